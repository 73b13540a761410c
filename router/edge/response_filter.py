"""Convert workers' answers for the client: choose the framing, blank internal fields, record token ids."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.edge.continuation import StreamContinuation
from router.edge.response_redactor import ResponseRedactor
from router.http.response import ResponseHead

LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseFilter(msgspec.Struct, eq=False):
    """Converts the content of a worker's answer for the client: records tokens and hides internal fields."""

    adds_chunks: bool = False
    """Whether the content is sent in chunks, as the worker did, which clients of HTTP/1.0 do not understand."""
    continuation: StreamContinuation | None = None
    """Continuation that records the tokens of the answer; None if they are not recorded."""
    _redactor: ResponseRedactor | None = None

    def choose_conversion(
        self,
        head: ResponseHead,
        continuation: StreamContinuation | None,
        redacted_keys: re.Pattern[bytes] | None,
        *,
        is_http_1_0: bool,
    ) -> None:
        """Choose how the content of a worker's answer is converted for the client. `head`: its status and headers.

        `continuation` records the tokens of the answer if it has a recorder. `redacted_keys`: pattern of the JSON
        fields whose values are blanked; None if all are shown. Also None for a worker that continues the answer of
        another one: the redactor of the first part then goes on. `is_http_1_0`: the client's version of HTTP.
        """
        records_tokens = continuation is not None and continuation.recorder is not None
        self.continuation = continuation if records_tokens else None
        self.adds_chunks = head.is_chunked and not is_http_1_0
        if redacted_keys is not None and _is_readable(head):
            self._redactor = ResponseRedactor(redacted_keys)

    def convert(self, content: bytes, *, is_last: bool) -> bytes:
        """Return the content for the client that replaces the next content of the answer. Raises ProtocolError."""
        if self.continuation is not None:
            content = self.continuation.record_and_convert(content, is_last=is_last)
        if self._redactor is not None:
            content = self._redactor.feed(content, ends=is_last)
        return content


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
