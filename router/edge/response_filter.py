"""Convert workers' answers for the client: change the framing, blank internal fields, record token ids."""

from __future__ import annotations

import re
from typing import Final

from router.edge.continuation import StreamContinuation
from router.edge.response_redactor import ResponseRedactor
from router.http.chunked import ChunkedBody
from router.http.response import ResponseHead

LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseFilter:
    """Converts the answers to one request, which may be one after the other from several workers."""

    __slots__ = ("_redactor", "rechunks", "stream", "takes_content", "unframes")

    def __init__(self, *, unframes: bool) -> None:
        self.unframes = unframes
        """Whether the client gets the content without framing, as it does not understand chunks."""
        self.rechunks = False
        """Whether the content is put into new chunks."""
        self.takes_content = unframes
        """Whether `convert` takes the content of the body, without its framing."""
        self.stream: StreamContinuation | None = None
        """Continuation that records the tokens of the answer; None if they are not recorded."""
        self._redactor: ResponseRedactor | None = None

    def start(
        self,
        head: ResponseHead,
        continuation: StreamContinuation | None,
        redacted_keys: re.Pattern[bytes] | None,
        *,
        is_stream: bool,
    ) -> None:
        """Prepare for a worker's answer.

        `redacted_keys`: pattern of the fields that are blanked from now on; None changes nothing. `is_stream`: the
        answer is a stream of which events can be recorded.
        """
        self.stream = continuation if continuation is not None and continuation.recorder is not None else None
        if redacted_keys is not None and _is_readable(head):
            self._redactor = ResponseRedactor(redacted_keys, is_chunked=is_stream and self.stream is None)
        redacts_content = self._redactor is not None and isinstance(head.body, ChunkedBody) and not is_stream
        self.rechunks = not self.unframes and (self.stream is not None or redacts_content)
        self.takes_content = self.unframes or self.rechunks

    def convert(self, data: bytes, *, is_last: bool) -> bytes:
        """Return the bytes for the client that replace the next bytes of the answer. Raises ProtocolError."""
        if self.stream is not None:
            data = self.stream.convert_content(data, is_last=is_last)
        if self._redactor is not None:
            data = self._redactor.feed(data, ends=is_last)
        return b"%x\r\n%b\r\n" % (len(data), data) if self.rechunks and data else data


def is_event_stream(head: ResponseHead) -> bool:
    """Return whether the answer is a stream of events without a content coding."""
    has_events = b"event-stream" in (head.headers.get(b"content-type") or b"")
    return has_events and head.headers.get(b"content-encoding") is None


def is_readable_stream(head: ResponseHead) -> bool:
    """Return whether the answer is a stream of which events can be recorded."""
    return head.status == 200 and head.is_chunked and is_event_stream(head)


def _is_readable(head: ResponseHead) -> bool:
    """Return whether the answer is JSON, or a stream of it, without a content coding."""
    if head.headers.get(b"content-encoding") is not None:
        return False
    content_type = head.headers.get(b"content-type") or b""
    return b"json" in content_type or b"event-stream" in content_type


def encode_chunk(content: bytes) -> bytes:
    """Return a chunk of a chunked body; no bytes if there is no content, as an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""
