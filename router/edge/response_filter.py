"""What is changed of a worker's answer on its way to the client: framing, workers' own fields, recorded token ids."""

from __future__ import annotations

import re
from typing import Final

from router.edge.continuation import StreamContinuation
from router.edge.response_redactor import ResponseRedactor
from router.http.chunked import ChunkedBody
from router.http.response import ResponseHead

LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseFilter:
    """Converts the answers of the workers that answer one request."""

    __slots__ = ("_redactor", "rechunks", "stream", "takes_content", "unframes")

    def __init__(self, *, unframes: bool) -> None:
        self.unframes = unframes
        """The client is given the content alone: it does not know chunks."""
        self.rechunks = False
        """The answer's chunks are taken apart, and what is passed on of them is put into new ones."""
        self.takes_content = unframes
        """`convert` takes the content of the body, without its framing."""
        self.stream: StreamContinuation | None = None
        """What notes the tokens of the answer as they pass; None where nothing does."""
        self._redactor: ResponseRedactor | None = None

    def start(
        self,
        head: ResponseHead,
        continuation: StreamContinuation | None,
        redacted_keys: re.Pattern[bytes] | None,
        *,
        is_stream: bool,
    ) -> None:
        """A worker's answer begins. `redacted_keys`: to be hidden from here on, unless None. `is_stream`: its events
        can be noted as they pass."""
        self.stream = continuation if continuation is not None and continuation.recorder is not None else None
        if redacted_keys is not None and _is_readable(head):
            self._redactor = ResponseRedactor(redacted_keys, is_chunked=is_stream and self.stream is None)
        redacts_content = self._redactor is not None and isinstance(head.body, ChunkedBody) and not is_stream
        self.rechunks = not self.unframes and (self.stream is not None or redacts_content)
        self.takes_content = self.unframes or self.rechunks

    def convert(self, data: bytes, *, is_last: bool) -> bytes:
        """Return what the client gets for the next bytes of the answer. Raises ProtocolError where they are none."""
        if self.stream is not None:
            data = self.stream.convert_content(data, is_last=is_last)
        if self._redactor is not None:
            data = self._redactor.feed(data, ends=is_last)
        return b"%x\r\n%b\r\n" % (len(data), data) if self.rechunks and data else data


def is_event_stream(head: ResponseHead) -> bool:
    """Whether the answer is a stream of events, and not an encoded one."""
    has_events = b"event-stream" in (head.headers.get(b"content-type") or b"")
    return has_events and head.headers.get(b"content-encoding") is None


def is_readable_stream(head: ResponseHead) -> bool:
    """Whether a stream's events can be noted as they pass."""
    return head.status == 200 and head.is_chunked and is_event_stream(head)


def _is_readable(head: ResponseHead) -> bool:
    """Whether the answer is JSON, or a stream of it, and not an encoded one."""
    if head.headers.get(b"content-encoding") is not None:
        return False
    content_type = head.headers.get(b"content-type") or b""
    return b"json" in content_type or b"event-stream" in content_type


def encode_chunk(content: bytes) -> bytes:
    """Return a chunk of a chunked body; nothing for nothing."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""
