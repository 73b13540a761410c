"""Send one client its answer: the head and the content of a worker, or of several workers in turn."""

from __future__ import annotations

import re

from router.edge.forwarded_heads import build_response_head
from router.edge.request_context import RequestContext
from router.edge.response_redactor import ResponseRedactor
from router.http.chunked import LAST_CHUNK, encode_chunk
from router.http.connection import Client
from router.http.response import LengthBody, ResponseHead


class ClientResponse:
    """The answer that one client gets, made from the content of workers.

    For example, a worker sends `{"id": 7, "worker_id": 3}` in one chunk. The client gets `{"id": 7, "worker_id": 0}` in
    one chunk. If that worker dies, the content of another worker follows under the same head.
    """

    __slots__ = ("_client", "_context", "_is_chunked", "_keeps_alive", "_redactor", "_shows_worker", "_unsent_head")

    def __init__(self, client: Client, context: RequestContext, *, shows_worker: bool) -> None:
        """Prepare the answer to `client`, which `begin` starts. `shows_worker`: add headers with the chosen worker."""
        self._client = client
        self._context = context
        self._shows_worker = shows_worker
        self._unsent_head = b""
        """Head of the answer, which is sent in one write with the first content."""
        self._is_chunked = False
        """Whether the client gets the content in chunks, as the worker sent it. Clients of HTTP/1.0 do not."""
        self._keeps_alive = False
        """Whether the client's connection can carry further requests once it has the whole body."""
        self._redactor: ResponseRedactor | None = None
        """Blanks internal fields of the worker; None if all are shown, or the answer has no JSON."""

    def begin(self, head: ResponseHead, redacted_keys: re.Pattern[bytes] | None) -> None:
        """Build the client's head from a worker's. `redacted_keys`: pattern of fields to blank; None to show all."""
        context, request = self._context, self._context.request
        has_delimited_body = head.is_chunked or isinstance(head.body, LengthBody)
        self._is_chunked = head.is_chunked and not request.is_http_1_0
        self._keeps_alive = request.keep_alive and has_delimited_body and not request.is_http_1_0
        self._redactor = None if redacted_keys is None or not head.has_json else ResponseRedactor(redacted_keys)
        self._unsent_head = build_response_head(
            head, context.trace_id, context.decision if self._shows_worker else None, is_chunked=self._is_chunked,
            keep_alive=self._keeps_alive, cors_headers=self._client.cors_headers,
        )  # fmt: skip

    def forward(self, content: bytes, now: float, *, is_last: bool) -> None:
        """Send a worker's next content as the client may see it, and count it.

        Events of a second worker get the form of the first worker's. Then internal fields are blanked. `is_last`:
        whether the worker's answer ends with this content.
        """
        if self._context.continuation is not None:
            content = self._context.continuation.record_and_convert(content, is_last=is_last)
        if self._redactor is not None:
            content = self._redactor.feed(content, ends=is_last)
        self.send(content)
        self._context.progress.record(content, now)

    def send(self, content: bytes) -> None:
        """Send content as it is, after the head of the answer if that is not sent yet."""
        data = self._unsent_head + (encode_chunk(content) if self._is_chunked else content)
        self._unsent_head = b""
        if data:
            self._client.write(data)

    def end_body(self) -> None:
        """Send the end of the body if the content went out in chunks."""
        if self._is_chunked:
            self._client.write(LAST_CHUNK)

    def finish(self, *, is_content_complete: bool) -> None:
        """End the answer. The client's connection is closed where the client could not tell that the body has ended.

        `is_content_complete`: whether the client got all of a body whose length the head announced.
        """
        self._client.finish(keep_alive=self._keeps_alive and (self._is_chunked or is_content_complete))
