"""Convert workers' answers for the client: change the framing, blank internal fields, record token ids."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.edge.continuation import StreamContinuation
from router.edge.response_redactor import ResponseRedactor
from router.http.chunked import ChunkedBody
from router.http.response import ResponseHead

LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseFilter(msgspec.Struct, eq=False):
    """Converts the body of a worker's answer for the client: hides internal fields, records tokens, changes framing.

    If nothing changes, the body is forwarded as the worker sent it. Otherwise its content is taken out of the worker's
    HTTP chunks, changed, and sent in new chunks, or without chunks to a client of HTTP/1.0.
    """

    is_http_1_0: bool
    """Whether the client does not understand chunks, so that it gets the bare content."""
    removes_chunks: bool = False
    """Whether `convert` takes the content of the body without the worker's chunks."""
    adds_chunks: bool = False
    """Whether `convert` puts the content into new chunks."""
    continuation: StreamContinuation | None = None
    """Continuation that records the tokens of the answer; None if they are not recorded."""
    _redactor: ResponseRedactor | None = None

    def choose_conversion(
        self,
        head: ResponseHead,
        continuation: StreamContinuation | None,
        redacted_keys: re.Pattern[bytes] | None,
        *,
        is_stream: bool,
    ) -> None:
        """Choose how the body of a worker's answer is converted for the client. `head`: its status and headers.

        `continuation` records the tokens of the answer if it has a recorder. `redacted_keys`: pattern of the JSON
        fields whose values are blanked. None if all are shown, or if the worker continues an answer: then its redactor
        goes on. `is_stream`: whether the answer is a stream of events that can be recorded.
        """
        records_tokens = continuation is not None and continuation.recorder is not None
        self.continuation = continuation if records_tokens else None
        if redacted_keys is not None and _is_readable(head):
            # The redactor must not blank the sizes of chunks, so it has to know whether they are in its input.
            keeps_chunks = is_stream and not records_tokens and not self.is_http_1_0
            self._redactor = ResponseRedactor(redacted_keys, is_chunked=keeps_chunks)
        redacts_content = self._redactor is not None and isinstance(head.body, ChunkedBody) and not is_stream
        self.removes_chunks = self.is_http_1_0 or records_tokens or redacts_content
        self.adds_chunks = self.removes_chunks and not self.is_http_1_0

    def convert(self, data: bytes, *, is_last: bool) -> bytes:
        """Return the bytes for the client that replace the next bytes of the answer. Raises ProtocolError."""
        if self.continuation is not None:
            data = self.continuation.record_and_convert(data, is_last=is_last)
        if self._redactor is not None:
            data = self._redactor.feed(data, ends=is_last)
        return encode_chunk(data) if self.adds_chunks else data


def is_event_stream(head: ResponseHead) -> bool:
    """Return whether the answer is a stream of events without a content coding."""
    has_events = b"event-stream" in (head.headers.get(b"content-type") or b"")
    return has_events and head.headers.get(b"content-encoding") is None


def is_readable_stream(head: ResponseHead) -> bool:
    """Return whether the answer is a stream with events that can be recorded."""
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
