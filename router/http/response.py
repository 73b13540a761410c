"""Bytes of a worker's answer -> its head, and where its body ends. Sans-IO, and it never looks into the body.

The body is relayed as it came, chunk framing included, so all that is computed here is how many of the bytes at hand
belong to this answer. What breaks the rules of RFC 9112 raises `UpstreamProtocolError`: before the first byte was
relayed it is a bad gateway, after that the client's connection is cut, which is the only way to say "incomplete".
"""

from __future__ import annotations

import re
from typing import Protocol

from router.http.headers import CONTENT_LENGTH, LINES, HeaderBlock, Template

HEAD_BYTES_MAX = 64 * 1024
CHUNK_LINE_MAX = 1024
"""A chunk-size line with its extensions, and each trailer line."""

_HEAD = re.compile(rb"HTTP/1\.([01]) (([1-5]\d\d)(?: [^\r\n\x00]*)?)\r\n(" + LINES + rb")\r\n")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,12}\Z")
_DIGITS = re.compile(rb"[0-9]{1,15}\Z")


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


BETWEEN_CHUNKS = -1
"""A size line comes next."""


class ChunkedBody:
    """A chunked body: sizes are followed, content is skipped over."""

    __slots__ = ("_line", "_trailers", "done", "left")

    def __init__(self) -> None:
        self.done = False
        self.left = BETWEEN_CHUNKS
        """Content bytes of the current chunk that are to come; 0 before the line end that closes it."""
        self._line = b""
        """The start of a size line, chunk end or trailer line that is split between reads."""
        self._trailers = False

    @property
    def in_the_middle(self) -> bool:
        """`left` says all there is to know of where it stands."""
        return not (self.done or self._line or self._trailers)

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        position, size = 0, len(data)
        if payload is None and self.left == BETWEEN_CHUNKS and not self._line and not self._trailers:
            position = _skip_whole_chunks(data, size)
        while position < size and not self.done:
            left = self.left
            if left > 0:
                taken = min(left, size - position)
                if payload is not None:
                    payload.append(data[position : position + taken])
                self.left = left - taken
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
        if self.left == 0:  # the line end that closes a chunk's content
            if line != b"\r\n":
                raise UpstreamProtocolError(f"chunk longer than its size: {line[:40]!r}")
            self.left = BETWEEN_CHUNKS
        elif self._trailers:
            self.done = line == b"\r\n"
        else:
            digits = line[:-2].partition(b";")[0].rstrip(b" \t")
            if not _HEX.match(digits):
                raise UpstreamProtocolError(f"bad chunk size {line[:40]!r}")
            length = int(digits, 16)
            if length:
                self.left = length
            else:
                self._trailers = True

    def finish(self) -> None:
        if not self.done:
            raise UpstreamProtocolError("connection closed inside a chunked body")


_SIZES: dict[bytes, int] = {}
"""Size lines seen before, without their line end: streams repeat a few hundred."""
_SIZES_MAX = 4096


def _skip_whole_chunks(data: bytes, size: int) -> int:
    """Where the chunks end that stand complete at the start of `data`, up to anything unusual: the last chunk, an
    extension, a chunk that goes on in the next read."""
    position = 0
    while position < size:
        end = data.find(b"\r\n", position, position + 16)
        if end < 0:
            break
        digits = data[position:end]
        length = _SIZES.get(digits)
        if length is None:
            if not _HEX.match(digits):
                break
            length = int(digits, 16)
            if len(_SIZES) < _SIZES_MAX:
                _SIZES[digits] = length
        after = end + 2 + length
        if length == 0 or not data.startswith(b"\r\n", after):
            break
        position = after + 2
    return position


class ResponseHead:
    """Status line and headers of one answer, and how its body ends."""

    __slots__ = ("body", "chunked", "headers", "keep_alive", "length", "reason_line", "status")

    def __init__(self, status: int, reason_line: bytes, headers: HeaderBlock) -> None:
        self.status = status
        self.reason_line = reason_line
        """`200 OK`, as sent."""
        self.headers = headers
        """Without the content-length."""
        self.length: int | None = None
        """The content-length, which the answer to HEAD has without a body."""
        self.body: Body = LengthBody(0)
        self.chunked = False
        self.keep_alive = True


class HeadParser:
    """Reads the heads of the answers on one connection."""

    __slots__ = ("_template",)

    def __init__(self) -> None:
        self._template: Template[ResponseHead] | None = None

    def parse(self, data: bytes, method: str) -> tuple[ResponseHead, bytes] | None:
        """(head, what comes after it) of the answer to a `method` request; None while the head is incomplete.

        Raises `UpstreamProtocolError`.
        """
        template = self._template
        matched = template.match(data) if template is not None else None
        if template is not None and matched is not None:
            known = template.value
            end, length = matched
            head = ResponseHead(known.status, known.reason_line, known.headers)
            head.keep_alive, head.chunked, head.length = known.keep_alive, known.chunked, length
        else:
            parsed = _parse(data)
            if parsed is None:
                return None
            head, end = parsed
            self._template = Template(data[:end], head)
        if head.status < 200 or head.status in (204, 304) or method == "HEAD":
            head.body = LengthBody(0)
            head.chunked = False
        elif head.chunked:
            head.body = ChunkedBody()
        elif head.length is not None:
            head.body = LengthBody(head.length)
        else:
            head.keep_alive = False
            head.body = CloseBody()
        return head, data[end:]


def _parse(data: bytes) -> tuple[ResponseHead, int] | None:
    """(head, where it ends), the framing checked in the order of RFC 9112 section 6.3."""
    found = _HEAD.match(data)
    if found is None:
        if data.find(b"\r\n\r\n") >= 0 or len(data) > HEAD_BYTES_MAX:
            raise UpstreamProtocolError(f"this is no head of an HTTP/1.x answer: {data[:80]!r}")
        return None
    if found.end() > HEAD_BYTES_MAX:
        raise UpstreamProtocolError(f"head over {HEAD_BYTES_MAX} bytes")
    headers = HeaderBlock(found[4])
    head = ResponseHead(int(found[3]), found[2], headers)
    options = b",".join(headers.all(b"connection")).lower()
    head.keep_alive = b"close" not in options and (found[1] == b"1" or b"keep-alive" in options)
    lengths = headers.all(b"content-length")
    encodings = headers.all(b"transfer-encoding")
    if encodings:
        if lengths or len(encodings) != 1 or encodings[0].lower() != b"chunked":
            raise UpstreamProtocolError("transfer-encoding other than a lone chunked")
        head.chunked = True
    elif lengths:
        if len(set(lengths)) != 1 or not _DIGITS.match(lengths[0]):
            raise UpstreamProtocolError(f"bad content-length {lengths!r}")
        head.length = int(lengths[0])
        head.headers = HeaderBlock(CONTENT_LENGTH.sub(b"", headers.raw))
    return head, found.end()
