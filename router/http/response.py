"""Bytes of a worker's answer -> its head, and where its body ends. Sans-IO, and it never looks into the body.

The body is relayed as it came, chunk framing included, so all that is computed here is how many of the bytes at hand
belong to this answer. What breaks the rules of RFC 9112 raises `ProtocolError`: before the first byte was
relayed it is a bad gateway, after that the client's connection is cut, which is the only way to say "incomplete".
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from router.http.chunked import ChunkedBody
from router.http.headers import LINES, HeaderBlock, ProtocolError, framing

HEAD_BYTES_MAX: Final = 64 * 1024
INTERIM_MAX: Final = 32
"""Answers before the answer (100 Continue, 103 Early Hints): a sound server sends one or two."""

_HEAD = re.compile(rb"HTTP/1\.([01]) (([1-5]\d\d)(?: [\t -~\x80-\xff]*)?)\r\n(" + LINES + rb")\r\n")


class Body(Protocol):
    """How one answer's body is delimited."""

    done: bool

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        """How many leading bytes of `data` belong to the body; sets `done` at its end.

        `payload` receives the content without framing, for clients that do not know chunks.
        """

    def finish(self) -> None:
        """The connection ended. Raises `ProtocolError` where that cuts the body short."""


class LengthBody:
    """A body of a length known in advance; 0 also stands for answers that have none."""

    __slots__ = ("done", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        taken = len(data)
        if taken >= self.left:
            taken = self.left
            self.done = True
        self.left -= taken
        if payload is not None and taken:
            payload += data[:taken]
        return taken

    def finish(self) -> None:
        if not self.done:
            raise ProtocolError(f"connection closed with {self.left} bytes of the body to come")


class CloseBody:
    """A body that lasts until the connection closes."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        if payload is not None:
            payload += data
        return len(data)

    def finish(self) -> None:
        self.done = True


class ResponseHead:
    """Status line and headers of one answer, and how its body ends."""

    __slots__ = ("body", "chunked", "headers", "keep_alive", "length", "reason_line", "status")

    def __init__(self, status: int, reason_line: bytes, headers: HeaderBlock) -> None:
        self.status = status
        self.reason_line = reason_line
        """`200 OK`, as sent."""
        self.headers = headers
        self.length: int | None = None
        """The content-length, which the answer to HEAD has without a body."""
        self.body: Body = LengthBody(0)
        self.chunked = False
        self.keep_alive = True


class HeadParser:
    """Reads the heads of the answers on one connection."""

    __slots__ = ("_interim",)

    def __init__(self) -> None:
        self._interim = 0
        """Since the last answer."""

    def parse(self, data: bytes, method: str) -> tuple[ResponseHead, bytes] | None:
        """(head, what comes after it) of the answer to a `method` request; None while the head is incomplete.

        Raises `ProtocolError`.
        """
        parsed = _parse(data)
        if parsed is None:
            return None
        head, end = parsed
        self._interim = self._interim + 1 if head.status < 200 else 0
        if self._interim > INTERIM_MAX:
            raise ProtocolError(f"more than {INTERIM_MAX} interim answers")
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
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
    if end < 4:
        if len(data) >= HEAD_BYTES_MAX:
            raise ProtocolError(f"head over {HEAD_BYTES_MAX} bytes")
        return None
    found = _HEAD.fullmatch(data, 0, end)
    if found is None:
        raise ProtocolError("this is no head of an HTTP/1.x answer")
    headers = HeaderBlock(found[4])
    head = ResponseHead(int(found[3]), found[2], headers)
    options = b",".join(headers.all(b"connection")).lower()
    head.keep_alive = b"close" not in options and (found[1] == b"1" or b"keep-alive" in options)
    head.chunked, head.length = framing(headers)
    return head, end
