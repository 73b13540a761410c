"""Answers that the router itself gives: heads, and headers of errors. No I/O.

Answers of workers are in router/edge/rewrite.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from http import HTTPStatus
from typing import Final

from prompts.errors import RequestError
from router.http.decoding import UnsupportedEncoding
from router.http.request import HttpRequest

REASON_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
JSON: Final = b"application/json"
Header = tuple[bytes, bytes]


class MethodNotAllowed(RequestError):
    """Answers 405 with the methods of a path."""

    def __init__(self, request: HttpRequest, methods: Iterable[str]) -> None:
        self.allowed_methods = ", ".join(sorted(methods))
        message = f"{request.method} {request.path}: expected {self.allowed_methods.replace(', ', ' or ')}"
        super().__init__(message, param=None, code="method_not_allowed", status=405)


class UpgradeRequired(RequestError):
    """Answers 426 to a WebSocket client; some of them continue over HTTP only after this status."""

    def __init__(self, path: str) -> None:
        message = f"{path}: WebSocket is not spoken here, expected a POST over HTTP/1.1"
        super().__init__(message, param=None, code="upgrade_required", status=426)


def build_response_head(
    status: int,
    length: int,
    content_type: bytes,
    headers: Iterable[Header],
    *,
    keep_alive: bool,
    extra_lines: bytes = b"",
) -> bytes:
    """Build the head of an HTTP/1.1 response: status line, headers, and the empty line before the body.

    `length`: content-length of the body, in bytes. `extra_lines`: further header lines, each with its line end.
    """
    reason = REASON_PHRASES.get(status, b"Status")
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason), b"content-type: %b\r\n" % content_type]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines += [b"content-length: %d\r\n" % length, extra_lines]
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def iter_error_headers(error: RequestError, present_headers: Collection[Header]) -> Iterator[Header]:
    """Yield the headers of an error that are not among `present_headers`."""
    if error.status == 401:
        yield b"www-authenticate", b"Bearer"
    elif isinstance(error, MethodNotAllowed):
        yield b"allow", error.allowed_methods.encode()
    elif isinstance(error, UpgradeRequired):
        yield from ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))
    elif isinstance(error, UnsupportedEncoding):
        yield b"accept-encoding", error.accepted_codings.encode()
    elif error.code in ("overloaded", "no_worker") and not present_headers:
        yield b"retry-after", b"1"


def build_refusal(
    status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None
) -> tuple[RequestError, list[Header]]:
    """Return the error of a request that the router refuses, and its headers.

    `param`: field of the body that the error is about. `retry_after_s`: time after which the client may try again.
    """
    if code == "unknown_model":
        code = "model_not_found"  # OpenAI's word
    headers = [] if retry_after_s is None else [(b"retry-after", b"%d" % max(1, round(retry_after_s)))]
    return RequestError(message, param=param, code=code, status=status), headers
