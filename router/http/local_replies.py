"""Heads of the answers that the router itself gives, and headers of its errors. Pure.

Refuses to know connections, and the answers of workers, which pass as they came (router/edge/rewrite.py).
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
    """405, with the methods that a path has."""

    def __init__(self, request: HttpRequest, methods: Iterable[str]) -> None:
        self.allowed_methods = ", ".join(sorted(methods))
        message = f"{request.method} {request.path}: expected {self.allowed_methods.replace(', ', ' or ')}"
        super().__init__(message, param=None, code="method_not_allowed", status=405)


class UpgradeRequired(RequestError):
    """426, to a client that would speak WebSocket: some of them go on over HTTP only after this."""

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
    """Up to its empty line, of an answer whose body has `length` bytes (which an answer to HEAD only tells).
    `extra_lines`: lines of further headers."""
    parts = [b"HTTP/1.1 %d %b\r\ncontent-type: %b" % (status, REASON_PHRASES.get(status, b"Status"), content_type)]
    parts += [b"\r\n%b: %b" % header for header in headers]
    parts.append(b"\r\ncontent-length: %d\r\n%b" % (length, extra_lines))
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)


def iter_error_headers(error: RequestError, present_headers: Collection[Header]) -> Iterator[Header]:
    """Headers of an error besides those of `present_headers`."""
    if error.status == 401:
        yield b"www-authenticate", b"Bearer"
    elif isinstance(error, MethodNotAllowed):
        yield b"allow", error.allowed_methods.encode()
    elif isinstance(error, UpgradeRequired):
        yield from ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))
    elif isinstance(error, UnsupportedEncoding):
        yield b"accept-encoding", error.accepted_codings.encode()
    elif error.code == "overloaded" and not present_headers:
        yield b"retry-after", b"1"


def build_refusal(
    status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None
) -> tuple[RequestError, list[Header]]:
    """An error of the router's own and its headers. `param`: the field of the body that it is about."""
    if code == "unknown_model":
        code = "model_not_found"  # OpenAI's word
    headers = [] if retry_after_s is None else [(b"retry-after", b"%d" % max(1, round(retry_after_s)))]
    return RequestError(message, param=param, code=code, status=status), headers
