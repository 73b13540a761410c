"""Parse the bytes of a client connection into complete HTTP/1.1 requests. Sans-IO: no socket, no clock, no routing.

The parser checks the syntax and the size of what a client sends. If it cannot read something, it raises `BadRequest`
with the status to answer. After that the connection must be closed.

Invariants:
* A head is read when it is complete, so the meaning of a stream of bytes does not depend on how it was cut into reads.
* A request is returned only when its body is complete, and is forwarded with a length of our own. So a message whose
  length could be read in two ways (RFC 9112 section 6.3) never reaches a worker.
* Head and body are bounded while they arrive, not after.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from prompts.errors import RequestError
from router.http.body_pieces import BodyPieces
from router.http.chunked import BodyTooLarge, ChunkedBody
from router.http.config import HttpLimits
from router.http.headers import (
    TOKEN_PATTERN,
    HeaderBlock,
    ProtocolError,
    parse_framing,
    wants_keep_alive,
)

_ABSOLUTE_FORM = rb"(?i:https?)://((?:\[[0-9A-Fa-f:.]+\]|[-!$%&'()*+,.;=~\w]+)(?::[0-9]*)?)((?:[/?][!-~]*)?)"
"""Pattern of a target that is a whole URL, without a user name. Groups: its host and port, its path and query."""
_REQUEST_LINE_PATTERN = re.compile(
    rb"(?:\r\n)?(" + TOKEN_PATTERN + rb") (?:(/[!-~]*|\*)|" + _ABSOLUTE_FORM + rb") HTTP/([0-9]\.[0-9])\r\n"
)
_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_FORBIDDEN_PATTERN = re.compile(rb"[^\t\r\n -~\x80-\xff]|(?<!\r)\n|\r(?!\n|\Z)")
"""Bytes that no head may contain."""
BYTES_PER_TURN: Final = 16 << 10
"""Bytes of a chunked body that are parsed in one turn, as chunks may be tiny and others wait."""
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"QUERY", b"TRACE"))


class BadRequest(RequestError):
    """The client broke HTTP or a limit. It gets `status`, and the connection must be closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, param=None, code="bad_http", status=status)


class HttpRequest(msgspec.Struct, eq=False):
    """One HTTP/1.x request of a client. Its body is missing until `RequestParser.next_request` returns the request."""

    method: str
    target: bytes
    """Path and query as sent; forwarded unchanged. A whole URL is split: its host replaces the `Host` header."""
    path: str
    headers: HeaderBlock
    pieces: tuple[bytes, ...] = (b"",)
    """Pieces of the body."""
    has_body: bool = False
    """Whether the head announces a body."""
    is_decoded: bool = False
    """Whether the body came compressed and is decoded."""
    keep_alive: bool = True
    is_http_1_0: bool = False

    @property
    def body(self) -> bytes:
        """The whole body as one copy."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)

    @property
    def body_bytes(self) -> int:
        return len(self.pieces[0]) if len(self.pieces) == 1 else sum(map(len, self.pieces))

    def get_header(self, name: bytes) -> bytes | None:
        """Return the first value of `name` (lower-case), or None."""
        return self.headers.get(name)


class RequestParser:
    """Parser of the requests on one connection. `feed` takes received bytes; then call `next_request` until None."""

    __slots__ = (
        "_body", "_body_remaining_bytes", "_chunked_body", "_head_buffer", "_is_finished", "_limits", "_position",
        "_unread_data", "partial_request",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits) -> None:
        """Make the parser of a connection. `limits`: largest head and body; a larger one is refused with BadRequest."""
        self._limits = limits
        self._unread_data = b""
        self._position = 0
        """Start of the bytes in `_unread_data` that are not parsed yet."""
        self._is_finished = False
        """Whether no further request is read, because the client asked to close, or sent something else than HTTP."""
        self._head_buffer = bytearray()
        """Bytes of an incomplete head."""

        self.partial_request: HttpRequest | None = None
        """Request with a parsed head and an incomplete body."""
        self._body: BodyPieces | None = None
        """Body as far as it was received; None if no body is being read."""
        self._body_remaining_bytes = 0
        """Bytes to come of a body of known length."""
        self._chunked_body: ChunkedBody | None = None
        """Parser of a body of unknown length; None if its length is known."""

    @property
    def has_more(self) -> bool:
        """Whether `next_request` left fed bytes for another turn."""
        return self._chunked_body is not None and self._position < len(self._unread_data)

    @property
    def has_partial_request(self) -> bool:
        """Whether a part of a request has arrived, and not all of it."""
        return self.partial_request is not None or bool(self._head_buffer)

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that the parser keeps."""
        unread_bytes = len(self._unread_data) - self._position
        body_bytes = 0 if self._body is None else self._body.byte_count
        return unread_bytes + len(self._head_buffer) + body_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a further request has arrived."""
        return not self._unread_data and not self._head_buffer and self.partial_request is None

    @property
    def is_continue_expected(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body of the partial request."""
        request = self.partial_request
        if request is None or request.is_http_1_0 or b"expect" not in request.headers.lines_by_name:
            return False
        return self._body is None or not self._body.byte_count

    def stop(self) -> None:
        """Parse nothing more, and drop an incomplete request; free its pieces by `discard_piece`."""
        self._is_finished = True
        self._unread_data = b""
        self._position = 0
        self._head_buffer = bytearray()
        if self._body is not None:
            self._body.growing = bytearray()
        self.partial_request = self._chunked_body = None

    def discard_piece(self) -> bool:
        """Free one piece of an unwanted body; return whether there are more. Freeing many at once takes long."""
        pieces = [] if self._body is None else self._body.complete
        if pieces:
            pieces.pop()
        return bool(pieces)

    def feed(self, data: bytes) -> None:
        """Take bytes from the client, to be parsed by `next_request`."""
        if self._is_finished:
            return
        if self._position < len(self._unread_data):
            data = self._unread_data[self._position :] + data
        self._unread_data = data
        self._position = 0

    def next_request(self) -> HttpRequest | None:
        """Return the next complete request; None if more bytes are needed, or another call if `has_more` is true.

        Raises `BadRequest` if the client broke HTTP or a limit; then no further request is read.
        """
        try:
            request = self._read_request()
        except BadRequest:
            self._is_finished = True
            raise
        if request is not None and not request.keep_alive:
            self._is_finished = True
        if self._is_finished or self._position == len(self._unread_data):
            self._unread_data = b""
            self._position = 0
        return request

    def _read_request(self) -> HttpRequest | None:
        """Parse fed bytes until a request is complete, and return it; None if bytes are missing. Raises `BadRequest`.

        Of a chunked body only a part is parsed in each call, because many tiny chunks take long.
        """
        request = None
        try:
            while request is None and self._position < len(self._unread_data) and not self._is_finished:
                if self.partial_request is None:
                    request = self._read_head()
                elif self._chunked_body is None:
                    request = self._read_length_body(self.partial_request)
                else:
                    return self._read_chunked_body(self.partial_request, self._chunked_body)
        except ProtocolError as error:
            raise BadRequest(400, f"malformed HTTP request: {error}") from None
        except BodyTooLarge:
            raise self._make_too_large_error() from None
        return request

    # Heads --------------------------------------------------------------------------------------------------------

    def _read_head(self) -> HttpRequest | None:
        """Parse the next head; return the request if its whole body has come too, else keep it. Raises BadRequest."""
        raw_head = self._take_head()
        if raw_head is None:
            return None
        request = self._parse_head(raw_head)
        is_chunked, content_length = parse_framing(request.headers)
        body_bytes = content_length or 0
        if is_chunked and request.is_http_1_0:
            raise BadRequest(400, "transfer-encoding in an HTTP/1.0 request")
        request.has_body = is_chunked or body_bytes > 0

        is_too_large = body_bytes > self._limits.body_bytes_max
        body_end = self._position + body_bytes
        has_whole_body = not is_chunked and body_end <= len(self._unread_data)
        if has_whole_body and not is_too_large:
            request.pieces = (self._unread_data[self._position : body_end],)
            self._position = body_end
            return request
        self._begin_body(request, body_bytes, is_chunked=is_chunked)
        if is_too_large:  # raised after `_begin_body`, so that `partial_request` is the refused request
            raise self._make_too_large_error()
        return None

    def _begin_body(self, request: HttpRequest, body_bytes: int, *, is_chunked: bool) -> None:
        """Keep a request until its body has come: a body of `body_bytes`, or of chunks."""
        self.partial_request = request
        self._body = BodyPieces()
        self._body_remaining_bytes = body_bytes
        self._chunked_body = None
        if is_chunked:
            self._chunked_body = ChunkedBody(self._limits.body_bytes_max, self._limits.head_bytes_max)

    def _take_head(self) -> bytes | None:
        """Return the bytes of the next head, and go behind it; None if its end has not come. Raises BadRequest."""
        start = self._position
        head_end = self._unread_data.find(_HEAD_END, start, start + self._limits.head_bytes_max)
        if head_end < 0 or self._head_buffer:
            return self._take_split_head()
        self._position = head_end + len(_HEAD_END)
        return self._unread_data[start : self._position]

    def _take_split_head(self) -> bytes | None:
        """Add unread bytes to a head that comes in several reads; return it if it is complete. Raises BadRequest."""
        buffer, max_bytes = self._head_buffer, self._limits.head_bytes_max
        old_bytes = len(buffer)
        buffer += self._unread_data[self._position : self._position + max_bytes + 1 - old_bytes]
        search_start = max(0, old_bytes - len(_HEAD_END) + 1)  # the first bytes of its end may have come before
        head_end = buffer.find(_HEAD_END, search_start, max_bytes)
        if head_end >= 0:
            head_bytes = head_end + len(_HEAD_END)
            self._position += head_bytes - old_bytes
            self._head_buffer = bytearray()
            return bytes(buffer[:head_bytes])
        if _FORBIDDEN_PATTERN.search(buffer, max(0, old_bytes - 1)) is not None:
            raise BadRequest(400, "malformed HTTP request: a control character in its head")
        if len(buffer) > max_bytes:
            raise BadRequest(431, f"request head over {max_bytes} bytes")
        self._position = len(self._unread_data)
        return None

    def _parse_head(self, raw_head: bytes) -> HttpRequest:
        """Parse and check a complete head; return the request without its body. Raises BadRequest or ProtocolError."""
        match = _REQUEST_LINE_PATTERN.match(raw_head)
        if match is None:
            raise BadRequest(400, "malformed HTTP request: its head is none of HTTP/1.x")
        headers = HeaderBlock(raw_head[match.end() : -len(_LINE_END)])
        method, target, url_host, url_path, version = match.groups()
        if version not in (b"1.1", b"1.0"):
            raise BadRequest(505, f"HTTP/{version.decode()} is not spoken here")
        if method not in _METHODS:
            raise BadRequest(501, "a method that is not known here")
        if headers.raw.count(b"\n") > self._limits.headers_max:
            raise BadRequest(431, f"more than {self._limits.headers_max} headers")
        is_http_1_0 = version == b"1.0"
        _check_host_and_expect(headers, is_http_1_0=is_http_1_0)

        if target is None:  # the request line has a whole URL
            target = url_path if url_path.startswith(b"/") else b"/" + url_path
            if method == b"OPTIONS" and not url_path:
                target = b"*"
            headers = headers.replace(b"host", url_host)
        path = target.partition(b"?")[0].decode("ascii")
        keep_alive = wants_keep_alive(headers, is_http_1_0=is_http_1_0)
        return HttpRequest(method.decode(), target, path, headers, keep_alive=keep_alive, is_http_1_0=is_http_1_0)

    # Bodies -------------------------------------------------------------------------------------------------------

    def _read_length_body(self, request: HttpRequest) -> HttpRequest | None:
        """Take fed bytes of a body of known length; return the request if its body is complete."""
        assert self._body is not None
        body_bytes = self._unread_data[self._position : self._position + self._body_remaining_bytes]
        self._position += len(body_bytes)
        self._body_remaining_bytes -= len(body_bytes)
        self._body.append(body_bytes)
        return None if self._body_remaining_bytes else self._complete_request(request, self._body)

    def _read_chunked_body(self, request: HttpRequest, chunked_body: ChunkedBody) -> HttpRequest | None:
        """Parse at most BYTES_PER_TURN of a chunked body; return the request if its body is complete."""
        assert self._body is not None
        data = self._unread_data[self._position : self._position + BYTES_PER_TURN]
        content, surplus = chunked_body.feed(data)
        self._position += len(data) - len(surplus)
        self._body.append(content)
        return self._complete_request(request, self._body) if chunked_body.is_complete else None

    def _complete_request(self, request: HttpRequest, body: BodyPieces) -> HttpRequest:
        """Return the request with its body, and make the parser ready for the next head."""
        request.pieces = body.to_tuple()
        self.partial_request = self._chunked_body = self._body = None
        return request

    def _make_too_large_error(self) -> BadRequest:
        return BadRequest(413, f"request body over {self._limits.body_bytes_max} bytes")


def _check_host_and_expect(headers: HeaderBlock, *, is_http_1_0: bool) -> None:
    """Raise BadRequest if there is not exactly one `Host` header, or an `Expect` header that is not understood."""
    host_count = headers.count(b"host")
    is_host_missing = host_count == 0 and is_http_1_0  # allowed in HTTP/1.0
    if host_count != 1 and not is_host_missing:
        raise BadRequest(400, "exactly one Host header is needed")
    if b"expect" not in headers.lines_by_name:
        return
    expectations = {expectation.lower() for expectation in headers.get_all(b"expect")}
    if expectations != {b"100-continue"}:
        raise BadRequest(417, "expect: only 100-continue is understood")
