"""Parser of a worker's answer: its head, and the end of its body. Sans-IO; the content is not parsed.

The body is relayed unchanged, with its chunk framing, so the parser only finds the number of bytes that belong to the
answer. A violation of RFC 9112 raises `ProtocolError`. If no byte was relayed yet, the client gets a 502. Otherwise the
client's connection is closed, which is the only way to show that the answer is incomplete.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

import msgspec

from router.http.chunked import ChunkedBody
from router.http.headers import HeaderBlock, ProtocolError, parse_framing, wants_keep_alive

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_INTERIM_RESPONSES: Final = 32
"""Most interim responses (100 Continue, 103 Early Hints) before an answer; servers send one or two."""

_STATUS_LINE_PATTERN = re.compile(rb"HTTP/1\.([01]) (([1-5]\d\d)(?: [\t -~\x80-\xff]*)?)\r\n")


class BodyFraming(Protocol):
    """Interface of an object that finds the end of one answer's body."""

    is_complete: bool

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        """Return how many leading bytes of `data` belong to the body, and set `is_complete` at the end of the body.

        The content without framing is appended to `payload`, for clients that do not know chunks.
        """

    def finish(self) -> None:
        """End the body because the connection ended. Raises `ProtocolError` if the body is incomplete."""


class LengthBody:
    """Body of a length known in advance. Answers without a body have length 0."""

    __slots__ = ("is_complete", "remaining_bytes")

    def __init__(self, length: int) -> None:
        self.remaining_bytes = length
        self.is_complete = length == 0

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        taken_bytes = len(data)
        if taken_bytes >= self.remaining_bytes:
            taken_bytes = self.remaining_bytes
            self.is_complete = True
        self.remaining_bytes -= taken_bytes
        if payload is not None and taken_bytes:
            payload += data[:taken_bytes]
        return taken_bytes

    def finish(self) -> None:
        if not self.is_complete:
            raise ProtocolError(f"connection closed with {self.remaining_bytes} bytes of the body to come")


class CloseDelimitedBody:
    """Body of an answer that ends when the worker closes the connection."""

    __slots__ = ("is_complete",)

    def __init__(self) -> None:
        self.is_complete = False

    def feed(self, data: bytes, payload: bytearray | None = None) -> int:
        if payload is not None:
            payload += data
        return len(data)

    def finish(self) -> None:
        self.is_complete = True


class ResponseHead(msgspec.Struct, eq=False):
    """Status line and headers of one answer, and the framing of its body."""

    status: int
    status_and_reason: bytes
    """Status and reason as sent, such as `200 OK`."""
    headers: HeaderBlock
    body: BodyFraming
    is_chunked: bool
    content_length: int | None
    """Value of content-length, which an answer to HEAD has without a body."""
    keep_alive: bool


def parse_response_head(data: bytes, method: str) -> tuple[ResponseHead, bytes] | None:
    """Return the head of the answer to a `method` request, and the bytes after the head; None if it is incomplete.

    The body's framing follows RFC 9112 section 6.3. Raises ProtocolError if the head is malformed or too long.
    """
    lines_end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 2
    if lines_end < 2:
        if len(data) >= MAX_HEAD_BYTES:
            raise ProtocolError(f"head over {MAX_HEAD_BYTES} bytes")
        return None
    match = _STATUS_LINE_PATTERN.match(data, 0, lines_end)
    if match is None:
        raise ProtocolError("this is not the head of an HTTP/1.x response")
    headers = HeaderBlock(data[match.end() : lines_end])
    status = int(match[3])
    keep_alive = wants_keep_alive(headers, is_http_1_0=match[1] == b"0")
    framing = parse_framing(headers)
    is_chunked, content_length = framing.is_chunked, framing.content_length
    body: BodyFraming
    if status < 200 or status in (204, 304) or method == "HEAD":
        body = LengthBody(0)
        is_chunked = False
    elif is_chunked:
        body = ChunkedBody()
    elif content_length is not None:
        body = LengthBody(content_length)
    else:
        keep_alive = False
        body = CloseDelimitedBody()
    head = ResponseHead(status, match[2], headers, body, is_chunked, content_length, keep_alive)
    return head, data[lines_end + 2 :]
