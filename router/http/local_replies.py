"""Answers that the router itself gives: heads, and headers of errors. No I/O.

Answers of workers are in router/edge/forwarded_heads.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Final

from prompts.errors import RequestError
from router.http.request import HttpRequest

REASON_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
JSON: Final = b"application/json"
Header = tuple[bytes, bytes]


def make_method_error(request: HttpRequest, methods: Iterable[str]) -> RequestError:
    """Return the error for a method that a path does not have, with the `methods` that it has."""
    allowed_methods = ", ".join(sorted(methods))
    message = f"{request.method} {request.path}: expected {allowed_methods.replace(', ', ' or ')}"
    headers = ((b"allow", allowed_methods.encode()),)
    return RequestError(message, code="method_not_allowed", status=405, headers=headers)


def make_upgrade_error(path: str) -> RequestError:
    """Return the error for a WebSocket client; some of them continue over HTTP only after this status."""
    message = f"{path}: WebSocket is not spoken here, expected a POST over HTTP/1.1"
    headers = ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))
    return RequestError(message, code="upgrade_required", status=426, headers=headers)


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


def list_error_headers(error: RequestError) -> Sequence[Header]:
    """Return the headers of an error: its own, or those that its status or its code always has."""
    if error.status == 401:
        # Anthropic's clients repeat a 401, for three minutes in Claude Code, unless told not to.
        return ((b"www-authenticate", b"Bearer"), (b"x-should-retry", b"false"))
    if error.code in ("overloaded", "no_worker") and not error.headers:
        return ((b"retry-after", b"1"),)
    return error.headers


def make_crash_error() -> RequestError:
    """Return the error of a request that ended because of a fault of the router."""
    return RequestError("the router failed to answer; its log says why", code="internal_error", status=500)
