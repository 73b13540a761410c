"""What a client did wrong, in one type, and the one place where error bodies are made for both programs.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, or, under `/v1/messages`, Anthropic's:
`{"type": "error", "error": {"type", "message"}}`. Knows nothing of HTTP servers: an edge turns `status` and `body()`
into a response.
"""

from __future__ import annotations

from typing import Any

_OPENAI_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPE_BY_STATUS = {
    **_OPENAI_TYPE_BY_STATUS,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that cannot be served as it was sent.

    `param` names the field (`messages[2].content`), None where no single field is to blame. `code` is OpenAI's
    machine-readable word (`model_not_found`, `context_length_exceeded` ...).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None,
        code: str | int | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON body, in the form of the API that `path` belongs to."""
        if _is_anthropic(path):
            error_type = _ANTHROPIC_TYPE_BY_STATUS.get(
                self.status, "invalid_request_error" if self.status < 500 else "api_error"
            )
            return {"type": "error", "error": {"type": error_type, "message": self.message}}
        error_type = _OPENAI_TYPE_BY_STATUS.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def _is_anthropic(path: str) -> bool:
    """Whether a client of Anthropic's API asked, also where its base URL makes a wrong path of it."""
    return path.startswith("/v1/messages") or path.rstrip("/").removesuffix("/count_tokens").endswith("/messages")


def describe_context_overflow(
    path: str, prompt_tokens: int, context_max: int, *, output_tokens: int = 0, is_exact: bool = True
) -> str:
    """Say that a prompt of so many tokens is too long, in the words by which clients of the API know to shorten it.
    `output_tokens`: of the answer that was asked for, where that is what has no room. `is_exact`: `tokens` is the exact
    number; else the prompt has more."""
    qualifier = "" if is_exact else "more than "
    if path.startswith("/v1/messages"):
        # A prompt that fills the context leaves no room for the first token of an answer.
        return (
            f"prompt is too long: {qualifier}{max(prompt_tokens + output_tokens, context_max + 1)} tokens > "
            f"{context_max} maximum"
        )
    parts = f"{prompt_tokens} in the prompt, {output_tokens or 'at least 1'} in the answer"
    return (
        f"This model's maximum context length is {context_max} tokens. However, you requested {qualifier}"
        f"{prompt_tokens + output_tokens} tokens ({parts}). Please reduce the length of the prompt."
    )


def bad_value(param: str, value: object, expectation: str) -> RequestError:
    """The usual error: a field, the value it had, what would have been right."""
    return RequestError(f"{param}: got {format_value(value)}, expected {expectation}", param=param)


def format_value(value: object) -> str:
    """A value as an error message may show it: JSON-like, short."""
    json_literals = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return json_literals[value]
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"an array of {len(value)} items" if value else "an empty array"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:76] + "..."
