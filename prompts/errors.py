"""Errors of requests, and their JSON bodies, for both programs.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, or, under `/v1/messages`, Anthropic's:
`{"type": "error", "error": {"type", "message", "details"}}`. HTTP servers make a response of `status` and `body()`.
"""

from __future__ import annotations

import json
from typing import Any

_OPENAI_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPE_BY_STATUS = {
    **_OPENAI_TYPE_BY_STATUS,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's code of an error after which its clients send the conversation again, whole."""


class RequestError(Exception):
    """A request cannot be served as it was sent; the client gets this error as an HTTP response.

    `param`: path of the wrong field (`messages[2].content`); None if no single field is wrong. `code`: a word for
    programs, mostly one of OpenAI's (`model_not_found`, `context_length_exceeded` ...). `status`: HTTP status.
    `headers`: HTTP headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        status: int = 400,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers = headers

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the error in Anthropic's format for a path of its Messages API, else in OpenAI's."""
        endpoint = path.rstrip("/").removesuffix("/count_tokens")
        if path.startswith("/v1/messages") or endpoint.endswith("/messages"):  # also below a wrong base URL
            default_type = "invalid_request_error" if self.status < 500 else "api_error"
            error_type = _ANTHROPIC_TYPE_BY_STATUS.get(self.status, default_type)
            details = {"details": {"error_code": self.code}} if self.code == THREAD_UNSUPPORTED else {}
            return {"type": "error", "error": {"type": error_type, "message": self.message, **details}}
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = _OPENAI_TYPE_BY_STATUS.get(self.status, default_type)
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def describe_context_overflow(path: str, prompt_tokens: int, context_max: int, *, is_exact: bool = True) -> str:
    """Return the error message for a prompt that is too long for the model, in OpenAI's or Anthropic's words.

    Clients recognise these words, and shorten the prompt. `path`: path of the request. `is_exact`: False if the prompt
    has more than `prompt_tokens`.
    """
    qualifier = "" if is_exact else "more than "
    if path.startswith("/v1/messages"):
        # At least context_max + 1, as a prompt that just fills the context has no room for an answer.
        shown_tokens = max(prompt_tokens, context_max + 1)
        return f"prompt is too long: {qualifier}{shown_tokens} tokens > {context_max} maximum"
    return (
        f"This model's maximum context length is {context_max} tokens. However, you requested {qualifier}"
        f"{prompt_tokens} tokens ({prompt_tokens} in the prompt, at least 1 in the answer). "
        "Please reduce the length of the prompt."
    )


def field_error(param: str, problem: str) -> RequestError:
    """Return the error for a wrong field, which names the field before the problem."""
    return RequestError(f"{param}: {problem}", param=param)


def bad_value(param: str, value: object, expectation: str) -> RequestError:
    """Return the error for a field with a wrong value, which says what was expected."""
    return field_error(param, f"got {format_value(value)}, expected {expectation}")


def format_value(value: object) -> str:
    """Return a short text of a JSON value for an error message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"an array of {len(value)} items" if value else "an empty array"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:76] + "..."
