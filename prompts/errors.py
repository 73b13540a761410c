"""Errors of requests, and their JSON bodies, for both programs.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, or, under `/v1/messages`, Anthropic's:
`{"type": "error", "error": {"type", "message"}}`. HTTP servers make a response of `status` and `body()`.
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

    `param` names the wrong field (`messages[2].content`), None if it is no single field. `code` is OpenAI's
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
        """Return the JSON body in the format of the API to which `path` belongs."""
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
    """Whether a path is of Anthropic's API, or is a wrong one that its clients make of a base URL with a path."""
    return path.startswith("/v1/messages") or path.rstrip("/").removesuffix("/count_tokens").endswith("/messages")


def describe_context_overflow(
    path: str, prompt_tokens: int, context_max: int, *, output_tokens: int = 0, is_exact: bool = True
) -> str:
    """Return the message for a prompt that is too long, in the words by which clients know that they must shorten it.

    `output_tokens` are those of the requested answer, if the prompt alone has room. If not `is_exact`, the prompt has
    more than `prompt_tokens`.
    """
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
    """Return the error for a field with a wrong value, which says what was expected."""
    return RequestError(f"{param}: got {format_value(value)}, expected {expectation}", param=param)


def format_value(value: object) -> str:
    """Return a short text of a JSON value for an error message."""
    json_literals = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return json_literals[value]
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"an array of {len(value)} items" if value else "an empty array"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:76] + "..."
