"""Bytes of a worker's answer -> its head, and where its body ends. Sans-IO, and it never looks into the body.

The body is relayed as it came, chunk framing included, so all that is computed here is how many of the bytes at hand
belong to this answer. What breaks the rules of RFC 9112 raises `UpstreamProtocolError`: before the first byte was
relayed it is a bad gateway, after that the client's connection is cut, which is the only way to say "incomplete".
"""

from __future__ import annotations

import re
from typing import Protocol

HEAD_BYTES_MAX = 64 * 1024
CHUNK_LINE_MAX = 1024
"""A chunk-size line with its extensions, and each trailer line."""

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\x00]*)?\Z")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,12}\Z")
_DIGITS = re.compile(rb"[0-9]{1,18}\Z")

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that speak about one connection (RFC 9110 section 7.6.1) and are never passed on."""


class UpstreamProtocolError(Exception):
    """The worker sent something that is not HTTP/1.x, or that contradicts itself."""


class Body(Protocol):
    """How one answer's body is delimited."""

    done: bool

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """How many leading bytes of `data` belong to the body; sets `done` at its end.

        `payload` receives the content without framing, for clients that do not know chunks.
        """

    def finish(self) -> None:
        """The connection ended. Raises `UpstreamProtocolError` where that cuts the body short."""


class LengthBody:
    """A body of a length known in advance; 0 also stands for answers that have none."""

    __slots__ = ("done", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        taken = len(data)
        if taken >= self.left:
            taken = self.left
            self.done = True
        self.left -= taken
        if payload is not None and taken:
            payload.append(data[:taken])
        return taken

    def finish(self) -> None:
        if not self.done:
            raise UpstreamProtocolError(f"connection closed with {self.left} bytes of the body to come")


class CloseBody:
    """A body that lasts until the connection closes."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)

    def finish(self) -> None:
        self.done = True


class ChunkedBody:
    """A chunked body: sizes are followed, content is skipped over.

    Invariant: `_left` counts the content bytes of the current chunk that are to come, and is None between chunks.
    """

    __slots__ = ("_left", "_line", "_trailers", "done")

    def __init__(self) -> None:
        self.done = False
        self._left: int | None = None
        self._line = b""
        """The start of a size line, chunk end or trailer line that is split between reads."""
        self._trailers = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        position, size = 0, len(data)
        while position < size and not self.done:
            left = self._left
            if left:
                taken = min(left, size - position)
                if payload is not None:
                    payload.append(data[position : position + taken])
                self._left = left - taken
                position += taken
                continue
            end = data.find(b"\n", position, position + CHUNK_LINE_MAX)
            if end < 0:
                self._line += data[position:]
                if len(self._line) > CHUNK_LINE_MAX:
                    raise UpstreamProtocolError("chunk header too long")
                return size
            line = self._line + data[position : end + 1]
            self._line = b""
            position = end + 1
            self._read_line(line)
        return position

    def _read_line(self, line: bytes) -> None:
        if len(line) > CHUNK_LINE_MAX or line[-2:] != b"\r\n":
            raise UpstreamProtocolError(f"bad line in a chunked body: {line[:40]!r}")
        if self._left == 0:  # the line end that closes a chunk's content
            if line != b"\r\n":
                raise UpstreamProtocolError(f"chunk longer than its size: {line[:40]!r}")
            self._left = None
        elif self._trailers:
            self.done = line == b"\r\n"
        else:
            digits = line[:-2].partition(b";")[0].rstrip(b" \t")
            if not _HEX.match(digits):
                raise UpstreamProtocolError(f"bad chunk size {line[:40]!r}")
            length = int(digits, 16)
            if length:
                self._left = length
            else:
                self._trailers = True

    def finish(self) -> None:
        if not self.done:
            raise UpstreamProtocolError("connection closed inside a chunked body")


class ResponseHead:
    """Status line and headers of one answer. Header names are lower-case; values are as sent."""

    __slots__ = ("body", "chunked", "headers", "keep_alive", "reason_line", "status")

    def __init__(self, status: int, reason_line: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reason_line = reason_line
        """`200 OK`, as sent."""
        self.headers = headers
        self.body: Body = LengthBody(0)
        self.chunked = False
        self.keep_alive = True

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


def parse_head(block: bytes, method: str) -> ResponseHead:
    """Parse `block`, everything up to and including the empty line, of the answer to a `method` request.

    Raises `UpstreamProtocolError`.
    """
    lines = block[:-4].split(b"\r\n")
    status_line = _STATUS_LINE.match(lines[0])
    if status_line is None:
        raise UpstreamProtocolError(f"bad status line {lines[0][:80]!r}")
    headers: list[tuple[bytes, bytes]] = []
    head = ResponseHead(int(status_line[2]), lines[0][9:], headers)
    head.keep_alive = status_line[1] == b"1"
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.match(name) or b"\n" in value or b"\r" in value or b"\0" in value:
            raise UpstreamProtocolError(f"bad header line {line[:80]!r}")
        name = name.lower()
        value = value.strip(b" \t")
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value.lower())
        elif name == b"connection":
            options = value.lower()
            if b"close" in options:
                head.keep_alive = False
            elif b"keep-alive" in options:
                head.keep_alive = True
        headers.append((name, value))
    _frame(head, method, lengths, encodings)
    return head


def _frame(head: ResponseHead, method: str, lengths: list[bytes], encodings: list[bytes]) -> None:
    """Decide how the body ends, in the order of RFC 9112 section 6.3."""
    if head.status < 200 or head.status in (204, 304) or method == "HEAD":
        return
    if encodings:
        if encodings != [b"chunked"] or lengths:
            raise UpstreamProtocolError("transfer-encoding other than a lone chunked")
        head.chunked = True
        head.body = ChunkedBody()
    elif lengths:
        if len(set(lengths)) != 1 or not _DIGITS.match(lengths[0]):
            raise UpstreamProtocolError(f"bad content-length {lengths!r}")
        head.body = LengthBody(int(lengths[0]))
    else:
        head.keep_alive = False
        head.body = CloseBody()


def connection_options(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The header names that `Connection` declares to be of this hop, and the hop-by-hop headers themselves."""
    named = [value for name, value in headers if name == b"connection"]
    if not named:
        return HOP_BY_HOP
    options = {option.strip().lower() for value in named for option in value.split(b",")}
    # `Connection: content-length` must not strip what frames or authorises the message.
    options -= {b"content-length", b"host", b"authorization", b"content-type", b"keep-alive", b"close"}
    return HOP_BY_HOP | options if options else HOP_BY_HOP
