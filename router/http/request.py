"""Bytes of one client connection -> complete HTTP/1.1 requests. Sans-IO: no socket, no clock, no routing.

Owns the syntax and the bounds of what a client may send. Knows nothing of OpenAI and answers nothing itself: what
cannot be read becomes a `BadRequest` that carries the status to answer with, after which the connection must close.

Invariants:
* There is one reader, and it reads a head once it is whole: what a stream of bytes means does not depend on how it was
  cut into reads.
* A request leaves only when its body is complete, so whoever forwards it states the length anew: a message whose
  length could be read in two ways (RFC 9112 section 6.3: both framings, two lengths, a folded header, an odd chunk
  size) never reaches a worker.
* Head and body are bounded while they arrive, not after.
"""

from __future__ import annotations

import re
from typing import Final

from router.http.chunked import BodyTooLarge, ChunkedBody
from router.http.config import HttpLimits
from router.http.headers import LINES, TOKEN, HeaderBlock, ProtocolError, framing

_HEAD = re.compile(rb"(?:\r\n)?(" + TOKEN + rb") (/[!-~]*|\*) HTTP/([0-9]\.[0-9])\r\n(" + LINES + rb")\r\n")
_NEVER = re.compile(rb"[^\t\r\n -~\x80-\xff]|(?<!\r)\n|\r(?!\n|\Z)")
"""What no head contains."""
PIECE_BYTES: Final = 1 << 20
"""A longer body is kept and passed on in pieces of about this size: nobody waits for a copy of it."""
READ_BYTES: Final = 4096
"""A read of so much of a body is kept as it is until the piece is whole; shorter ones are put together at once."""
TURN_BYTES: Final = 16 << 10
"""Of a chunked body that are read before others get their turn: a chunk may hold a byte or two."""
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"QUERY", b"TRACE"))


class BadRequest(Exception):
    """The client broke HTTP or a bound: answer `status` and close."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class HttpRequest:
    """One complete request."""

    __slots__ = ("has_body", "headers", "http_1_0", "is_decoded", "keep_alive", "method", "path", "pieces", "target")

    def __init__(self, method: str, target: bytes, path: str, headers: HeaderBlock) -> None:
        self.method = method
        self.target = target
        """Path and query as sent; what is forwarded."""
        self.path = path
        self.headers = headers
        self.pieces: tuple[bytes, ...] = (b"",)
        """The body."""
        self.has_body = False
        """Told by the head already."""
        self.is_decoded = False
        """The body came compressed, as `content-encoding` says, and is so no more."""
        self.keep_alive = True
        self.http_1_0 = False

    @property
    def body(self) -> bytes:
        """In one piece: a copy, where it is long."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)

    @property
    def body_bytes(self) -> int:
        return len(self.pieces[0]) if len(self.pieces) == 1 else sum(map(len, self.pieces))

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower-case), or None."""
        return self.headers.get(name)


class RequestHead:
    """What a head says: a request without its body, and how that is framed."""

    __slots__ = ("chunked", "expects_continue", "length", "request")

    def __init__(self, request: HttpRequest, chunked: bool, length: int | None, expects_continue: bool) -> None:
        self.request = request
        self.chunked = chunked
        self.length = length
        """The content-length."""
        self.expects_continue = expects_continue


class RequestParser:
    """Feed bytes, take requests one by one. One instance a connection."""

    __slots__ = (
        "_at", "_body", "_chunks", "_data", "_ended", "_expects_continue", "_head", "_left", "_limits",
        "_new", "_pieces", "_read", "_read_bytes", "_request",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._data = b""
        self._at = 0
        """[_at, end) of `_data` was fed and not looked at: what follows a request that was taken."""
        self._ended = False
        """Nothing more is read: the client asked to close after a request, or sent what is none."""
        self._head = bytearray()
        """Of a head that is not whole yet."""
        self._request: HttpRequest | None = None
        """Its head was read, its body is to come."""
        self._new = False
        """`begun` was not called for it."""
        self._expects_continue = False
        self._left = 0
        """Bytes to come of a body of known length."""
        self._chunks: ChunkedBody | None = None
        self._pieces: list[bytes] = []
        """Of the body, what is complete in pieces; `_read` and `_body` behind it are the next."""
        self._read: list[bytes] = []
        self._read_bytes = 0
        """In all of `_read`."""
        self._body = bytearray()

    @property
    def more(self) -> bool:
        """Bytes are at hand that `next` left for another turn."""
        return self._chunks is not None and self._at < len(self._data)

    @property
    def midway(self) -> bool:
        """Part of a request has arrived, and not all of it."""
        return self._request is not None or bool(self._head)

    @property
    def buffered(self) -> int:
        """Bytes kept here."""
        kept = len(self._data) - self._at + len(self._head) + len(self._body) + self._read_bytes
        return kept + sum(map(len, self._pieces)) if self._pieces else kept

    @property
    def empty(self) -> bool:
        """Nothing of a further request has come."""
        return not self._data and not self._head and self._request is None

    def begun(self) -> HttpRequest | None:
        """The request whose head is read and whose body is to come, once for each."""
        request = self._request if self._new else None
        self._new = False
        return request

    def take_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body that is to come; True at most once."""
        wants = self._expects_continue and self._request is not None and not (self._body or self._read or self._pieces)
        self._expects_continue = False
        return wants

    def stop(self) -> None:
        """Read nothing more, and forget what came of a request that is not complete: its pieces by `forget_some`."""
        self._ended = True
        self._data = b""
        self._at = 0
        self._head = bytearray()
        self._read, self._read_bytes, self._body = [], 0, bytearray()
        self._request = self._chunks = None

    def forget_some(self) -> bool:
        """Of a client that left, or was refused: let go of a piece of what it sent, as the system takes long to
        take many back. Whether there are more."""
        if self._pieces:
            self._pieces.pop()
        return bool(self._pieces)

    def feed(self, data: bytes) -> None:
        """Bytes from the client. They are read by `next`."""
        if self._ended:
            return
        if self._at < len(self._data):
            data = self._data[self._at :] + data
        self._data = data
        self._at = 0

    def next(self) -> HttpRequest | None:
        """The next complete request; None where it takes more bytes, or, with `more`, another turn. Raises
        `BadRequest`."""
        request = None
        try:
            while request is None and self._at < len(self._data) and not self._ended:
                if self._request is None:
                    request = self._read_head()
                elif self._chunks is None:
                    request = self._read_length()
                else:
                    request = self._read_chunks(self._chunks)
                    break
        except ProtocolError as error:
            self._ended = True
            raise BadRequest(400, f"malformed HTTP request: {error}") from None
        except BodyTooLarge:
            self._ended = True
            raise self._too_large() from None
        except BadRequest:
            self._ended = True
            raise
        if request is not None and not request.keep_alive:
            self._ended = True
        if self._ended or self._at == len(self._data):
            self._data = b""
            self._at = 0
        return request

    # Heads --------------------------------------------------------------------------------------------------------

    def _read_head(self) -> HttpRequest | None:
        """Read a head, or keep what there is of it. The request, if all of its body is here too."""
        whole = self._whole_head()
        if whole is None:
            return None
        head, data = self._parse(whole), self._data
        request, size = head.request, head.length or 0
        if size > self._limits.body_bytes_max:
            raise self._too_large()
        request.has_body = size > 0 or head.chunked
        after = self._at + size
        if not head.chunked and after <= len(data):
            request.pieces = (data[self._at : after],)
            self._at = after
            return request
        self._request, self._new, self._expects_continue = request, True, head.expects_continue
        self._left = size
        self._chunks = ChunkedBody(self._limits.body_bytes_max, self._limits.head_bytes_max) if head.chunked else None
        return None

    def _whole_head(self) -> bytes | None:
        """The head that ends in this read; None where its end is to come, and all there is of it is kept."""
        data, start, kept = self._data, self._at, self._head
        most = self._limits.head_bytes_max
        if not kept:
            end = data.find(b"\r\n\r\n", start, start + most)
            if end >= 0:
                self._at = end + 4
                return data[start : end + 4]
        before = len(kept)
        kept += data[start : start + most + 1 - before]
        end = kept.find(b"\r\n\r\n", max(0, before - 3), most)
        if end >= 0:
            self._at = start + end + 4 - before
            whole = bytes(kept[: end + 4])
            self._head = bytearray()
            return whole
        if _NEVER.search(kept, max(0, before - 1)) is not None:
            raise BadRequest(400, "malformed HTTP request: a control character in its head")
        if len(kept) > most:
            raise BadRequest(431, f"request head over {most} bytes")
        self._at = len(data)
        return None

    def _parse(self, whole: bytes) -> RequestHead:
        """Read a whole head. Raises BadRequest or ProtocolError."""
        found = _HEAD.fullmatch(whole)
        if found is None:
            raise BadRequest(400, "malformed HTTP request: its head is none of HTTP/1.x")
        if found[3] not in (b"1.1", b"1.0"):
            raise BadRequest(505, f"HTTP/{found[3].decode()} is not spoken here")
        if found[1] not in _METHODS:
            raise BadRequest(501, "a method that is not known here")
        headers = HeaderBlock(found[4])
        if headers.raw.count(b"\n") > self._limits.headers_max:
            raise BadRequest(431, f"more than {self._limits.headers_max} headers")
        request = HttpRequest(found[1].decode(), found[2], found[2].partition(b"?")[0].decode("ascii"), headers)
        request.http_1_0 = found[3] == b"1.0"
        connection = b",".join(headers.all(b"connection")).lower()
        if connection != b"keep-alive":
            options = {option.strip(b" \t") for option in connection.split(b",")}
            request.keep_alive = b"close" not in options and (not request.http_1_0 or b"keep-alive" in options)
        chunked, length = framing(headers)
        if chunked and request.http_1_0:
            raise BadRequest(400, "transfer-encoding in an HTTP/1.0 request")
        if len(headers.all(b"host")) != 1 and not (request.http_1_0 and b"host" not in headers):
            raise BadRequest(400, "exactly one Host header is needed")
        expected = headers.all(b"expect") if b"expect" in headers else []
        if any(value.lower() != b"100-continue" for value in expected):
            raise BadRequest(417, "expect: only 100-continue is understood")
        return RequestHead(request, chunked, length, bool(expected) and not request.http_1_0)

    # Bodies -------------------------------------------------------------------------------------------------------

    def _read_length(self) -> HttpRequest | None:
        data, start = self._data, self._at
        end = self._at = min(start + self._left, len(data))
        self._left -= end - start
        if end - start >= READ_BYTES:
            self._put_together()
            self._read.append(data if end - start == len(data) else data[start:end])
            self._read_bytes += end - start
        else:
            self._body += data[start:end]
        self._cut()
        return None if self._left else self._complete()

    def _read_chunks(self, chunks: ChunkedBody) -> HttpRequest | None:
        self._at += chunks.feed(self._data[self._at : self._at + TURN_BYTES], self._body)
        self._cut()
        return self._complete() if chunks.done else None

    def _put_together(self) -> None:
        if self._body:
            self._read.append(bytes(self._body))
            self._read_bytes += len(self._body)
            self._body = bytearray()

    def _cut(self) -> None:
        if self._read_bytes + len(self._body) >= PIECE_BYTES:
            self._put_together()
            self._pieces.append(b"".join(self._read))
            self._read, self._read_bytes = [], 0

    def _complete(self) -> HttpRequest:
        request, self._request, self._chunks = self._request, None, None
        assert request is not None
        self._put_together()
        if self._read or not self._pieces:
            self._pieces.append(b"".join(self._read))
        request.pieces = tuple(self._pieces)
        self._pieces, self._read, self._read_bytes = [], [], 0
        return request

    def _too_large(self) -> BadRequest:
        return BadRequest(413, f"request body over {self._limits.body_bytes_max} bytes")
