"""Convert workers' answers for the client: choose the framing, blank internal fields, record token ids."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.edge.continuation import StreamContinuation
from router.edge.response_redactor import ResponseRedactor
from router.edge.token_recorder import TokenRecorder
from router.http.response import ResponseHead

LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseFilter(msgspec.Struct, eq=False):
    """Converts the content of an answer for the client: records tokens and hides internal fields.

    An answer may have parts of several workers, if some die. Call `begin_answer` for the first, `begin_part` for each.
    """

    adds_chunks: bool = False
    """Whether the content is sent in chunks, as the worker did, which clients of HTTP/1.0 do not understand."""
    _continuation: StreamContinuation | None = None
    """Continuation that records the tokens of the present worker; None if they are not recorded."""
    _redactor: ResponseRedactor | None = None

    def begin_answer(self, head: ResponseHead, redacted_keys: re.Pattern[bytes] | None, *, is_http_1_0: bool) -> None:
        """Choose the framing of an answer by the head that the client gets, and which JSON fields are blanked in it.

        `redacted_keys`: pattern of these fields; None if all are shown. `is_http_1_0`: the client's version of HTTP.
        """
        self.adds_chunks = head.is_chunked and not is_http_1_0
        if redacted_keys is not None and _is_readable(head):
            self._redactor = ResponseRedactor(redacted_keys)

    def begin_part(self, head: ResponseHead, continuation: StreamContinuation | None) -> None:
        """Record the tokens of a worker's part of an answer if it is a stream, so that another worker can go on."""
        records_tokens = continuation is not None and continuation.recorder is not None and is_readable_stream(head)
        self._continuation = continuation if records_tokens else None

    @property
    def recorder(self) -> TokenRecorder | None:
        """Recorder of the present worker's tokens; None if they are not recorded."""
        return None if self._continuation is None else self._continuation.recorder

    def convert(self, content: bytes, *, is_last: bool) -> bytes:
        """Return the content for the client that replaces the next content of the answer. Raises ProtocolError."""
        if self._continuation is not None:
            content = self._continuation.record_and_convert(content, is_last=is_last)
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
