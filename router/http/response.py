"""Parser of a worker's answer: its head, and the end of its body. Sans-IO; the content is not parsed.

A violation of RFC 9112 raises `ProtocolError`. If no byte was relayed yet, the client gets a 502. Otherwise the
client's connection is closed, which is the only way to show that the answer is incomplete.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.http.chunked import ChunkedBody
from router.http.headers import HeaderBlock, ProtocolError, parse_framing, wants_keep_alive

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_INTERIM_RESPONSES: Final = 32
"""Most interim responses (100 Continue, 103 Early Hints) before an answer; servers send one or two."""

_STATUS_LINE_PATTERN = re.compile(rb"HTTP/1\.([01]) (([1-5]\d\d)(?: [\t -~\x80-\xff]*)?)\r\n")


class LengthBody:
    """Finds the end of a response body whose length is known in advance; 0 for a response without a body."""

    __slots__ = ("is_complete", "remaining_bytes")

    def __init__(self, length: int) -> None:
        self.remaining_bytes = length
        self.is_complete = length == 0

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the content in the next bytes, and the bytes after the end of the body."""
        content, surplus = data[: self.remaining_bytes], data[self.remaining_bytes :]
        self.remaining_bytes -= len(content)
        self.is_complete = self.remaining_bytes == 0
        return content, surplus

    def finish(self) -> None:
        """End the body because the connection was closed. Raises `ProtocolError` if bytes are missing."""
        if not self.is_complete:
            raise ProtocolError(f"connection closed with {self.remaining_bytes} bytes of the body to come")


class CloseDelimitedBody:
    """Finds the end of a response body without a length: it ends when the worker closes the connection."""

    __slots__ = ("is_complete",)

    def __init__(self) -> None:
        self.is_complete = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        return data, b""

    def finish(self) -> None:
        self.is_complete = True


BodyFraming = ChunkedBody | LengthBody | CloseDelimitedBody
"""Finds the end of one answer's body: takes its bytes by `feed`, and is told by `finish` that the connection ended."""


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

    @property
    def is_event_stream(self) -> bool:
        """Whether the answer is a stream of events without a content coding."""
        return b"event-stream" in self._plain_content_type

    @property
    def is_readable_stream(self) -> bool:
        """Whether the answer is a stream with events that can be recorded."""
        return self.status == 200 and self.is_chunked and self.is_event_stream

    @property
    def has_json(self) -> bool:
        """Whether the answer is JSON, or a stream of it, without a content coding."""
        return b"json" in self._plain_content_type or self.is_event_stream

    @property
    def _plain_content_type(self) -> bytes:
        """Value of content-type; empty if there is none, or if the content has a coding, such as gzip."""
        has_coding = self.headers.get(b"content-encoding") is not None
        return b"" if has_coding else self.headers.get(b"content-type") or b""


def parse_response_head(data: bytes, method: str) -> tuple[ResponseHead, bytes] | None:
    """Parse the head of the response to a `method` request; return it and the bytes after it, or None if incomplete.

    The end of the body is found as in RFC 9112 section 6.3. Raises ProtocolError if the head is malformed or too long.
    """
    head_end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if head_end < 0:
        if len(data) >= MAX_HEAD_BYTES:
            raise ProtocolError(f"head over {MAX_HEAD_BYTES} bytes")
        return None
    lines_end = head_end + 2
    match = _STATUS_LINE_PATTERN.match(data, 0, lines_end)
    if match is None:
        raise ProtocolError("this is not the head of an HTTP/1.x response")
    minor_version, status_and_reason, status_digits = match.groups()
    status = int(status_digits)
    headers = HeaderBlock(data[match.end() : lines_end])
    keep_alive = wants_keep_alive(headers, is_http_1_0=minor_version == b"0")
    is_chunked, content_length = parse_framing(headers)
    has_no_body = status < 200 or status in (204, 304) or method == "HEAD"
    is_chunked = is_chunked and not has_no_body
    body: BodyFraming
    if has_no_body:
        body = LengthBody(0)
    elif is_chunked:
        body = ChunkedBody()
    elif content_length is not None:
        body = LengthBody(content_length)
    else:
        keep_alive = False
        body = CloseDelimitedBody()
    head = ResponseHead(status, status_and_reason, headers, body, is_chunked, content_length, keep_alive)
    return head, data[lines_end + 2 :]
