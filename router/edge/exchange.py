"""One request on its way: to the worker the core chose, and the answer back, byte for byte.

Owns the life of an `Exchange`: routed, connected, sent, head, body, done. Refuses to know prompts, prices, HTTP syntax,
and which worker comes next: that is the core's, asked through router/edge/proxy.py. Rules it keeps:

* An attempt may be repeated only while no byte of an answer's body went to the client.
* The client's leaving closes the worker's connection at once; that is how engines learn to stop computing.
* A slow client stops the reading from its worker, and only that.
* Every exchange ends exactly once: finished, refused, cut, or given up by the client; also where its own code raises.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Final

from prompts.errors import RequestError
from router.decide.messages import Decision, FailureKind, ReportedUsage, RouteRequest
from router.edge.config import Timeouts
from router.edge.continuation import StreamContinuation, build_continuation
from router.edge.exchange_services import LOCAL_ERRNOS, RETRYABLE_STATUSES, ExchangeServices, is_final_refusal
from router.edge.response_progress import ResponseProgress
from router.edge.response_redactor import ResponseRedactor
from router.edge.rewrite import build_request_head, build_response_head
from router.edge.upstream import UpstreamConnection
from router.http.chunked import ChunkedBody
from router.http.headers import ProtocolError
from router.http.request import HttpRequest
from router.http.response import LengthBody, ResponseHead

if TYPE_CHECKING:
    from router.edge.prompt_comparison import PromptComparison
    from router.http.connection import Client
    from router.miss_reasons.analyzer import AnalyzedRequest

CHUNKS_PER_PROGRESS_REPORT: Final = 32
"""Chunks of a stream between two reports of progress to the core."""
RESPONSES_PATH: Final = "/v1/responses"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Exchange:
    """One request and its answer. Created when the request is complete, even before its prompt is tokenised."""

    __slots__ = (
        "_connecting",
        "_connection",
        "_continuation",
        "_head_buffer",
        "_is_client_paused",
        "_is_resend",
        "_rechunks",
        "_records_tokens",
        "_redactor",
        "_response_head",
        "_services",
        "_unframed_content",
        "client",
        "decision",
        "first_byte_at_s",
        "is_done",
        "is_in_core",
        "is_sampled",
        "miss_analysis",
        "outcome",
        "progress",
        "request",
        "request_id",
        "route",
        "sent_at_s",
        "span",
        "started_at_s",
        "trace_id",
        "usage",
    )  # fmt: skip

    def __init__(
        self, services: ExchangeServices, client: Client, request: HttpRequest, request_id: str, trace_id: bytes
    ) -> None:
        self._services = services
        self.client = client
        self.request = request
        self.request_id = request_id
        """Unique in this process: the core's name for it."""
        self.trace_id = trace_id
        """`x-request-id`: the client's where it sent one."""
        self.started_at_s = services.now()
        self.route: RouteRequest | None = None
        """What the core was asked, once the prompt was read."""
        self.span: tuple[Any, bytes] | None = None
        """Where it is traced: whatever the tracer keeps, and what the worker is told in `traceparent`."""
        self.is_sampled = False
        """Its decisions are logged with every candidate's terms."""
        self.is_in_core = False
        """The core has the request on its books."""
        self.decision: Decision | None = None
        self.sent_at_s: float | None = None
        self.first_byte_at_s: float | None = None
        self.progress = ResponseProgress(self.started_at_s)
        self.usage: ReportedUsage | None = None
        self.outcome = ""
        self.miss_analysis: PromptComparison | AnalyzedRequest | None = None
        """What router/edge/miss_reasons_recorder.py knows of it; None before its first byte where it is not
        compared."""
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._response_head: ResponseHead | None = None
        self._head_buffer = b""
        self._unframed_content: bytearray | None = bytearray() if request.is_http_1_0 else None
        self._records_tokens = False
        """The answer's events pass through `_stream`."""
        self._rechunks = False
        """The answer's chunks are taken apart, and what is passed on of them is put into new ones."""
        self._is_client_paused = False
        self._continuation: StreamContinuation | None = None
        """What the answer needs to go on elsewhere; None where it cannot."""
        self._redactor: ResponseRedactor | None = None
        """What hides the fields of an answer that are workers' own; None where that cannot be read."""
        self._is_resend = False
        """This attempt was repeated on a new connection because a kept-alive one broke."""
        self.is_done = False

    # From the core ------------------------------------------------------------------------------------------------

    def add_routing_hints(self, route: RouteRequest) -> None:
        """Add what is known of the request besides what it says itself: the core is asked next."""

    def forward(self, decision: Decision) -> None:
        """Start an attempt."""
        self.decision = decision
        self._is_resend = False
        self._start(decision)

    def _start(self, decision: Decision) -> None:
        self._drop_connection()
        self._response_head = None
        self._head_buffer = b""
        if self._unframed_content is not None:
            self._unframed_content.clear()
        target = self._services.endpoint_of(decision.worker)
        if target is None:
            self._handle_failed_attempt(FailureKind.CONNECT, "the worker was removed")
            return
        connection = None if self._is_resend else self._services.pool.acquire(target)
        if connection is not None:
            self._connection = connection
            self._send(connection)
        else:
            self._connecting = self._services.pool.open(target, self)

    def refuse(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        """End with an error of our own, before any byte of an answer; in the middle of one by cutting it off."""
        if self.client.has_response_started:
            self._abort_response(message, None)
        elif self._end(f"refused_{code}"):
            self._drop_connection()
            param = None
            if code == "unknown_model":
                param = "model"
            elif code == "context_length_exceeded":
                param = {"/v1/completions": "prompt", RESPONSES_PATH: "input"}.get(self.request.path, "messages")
            self.client.refuse(status, code, message, retry_after_s, param=param)

    def reject(self, error: RequestError) -> None:
        """The same, for what was found wrong with the request itself."""
        if self._end("rejected"):
            self._drop_connection()
            self.client.respond_error(error)

    # From the client's side ---------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client closed its connection: cancel upstream at once. An answer whose last event it has is complete."""
        head = self._response_head
        if head is not None and self._is_stream_complete(head):
            self._record_completion(head, reusable=False)
        elif self._end("client_gone"):
            self._release()

    def _is_stream_complete(self, head: ResponseHead) -> bool:
        """Whether all of a stream was passed on but the end of its body."""
        is_streaming = not self.outcome and self.client.has_response_started and head.status == 200 and _is_stream(head)
        return is_streaming and self.progress.has_final_event(self.request.path)

    def _release(self) -> None:
        """Of the worker and of the core, where they still have it."""
        try:
            self._drop_connection()
        finally:
            if self.is_in_core:
                self.is_in_core = False
                self._services.perform(self._services.core.abort_request(self.request_id, self._services.now()))

    def client_paused(self) -> None:
        """The client reads slower than the worker writes."""
        self._is_client_paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def client_resumed(self) -> None:
        self._is_client_paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    # The boundary -------------------------------------------------------------------------------------------------

    def crash(self, error: Exception) -> None:
        """What handles this exchange raised `error`: the client gets what can still be said, nobody else notices."""
        self.outcome = self.outcome or "crashed"
        if self.client.responder is self:
            self.client.crash(error)  # which ends the exchange as if the client had gone
        else:
            self._services.metrics.record_crash("exchange", error)
        self.is_in_core = self.route is not None  # whatever was said to the core: it may not have come to hear it
        try:
            self._end("crashed")
            self._release()
        except Exception as second_error:  # noqa: BLE001  a boundary
            self._services.metrics.record_crash("exchange", second_error)

    # The attempt --------------------------------------------------------------------------------------------------

    def connection_opened(self, connection: UpstreamConnection) -> None:
        """A connection was opened for this attempt."""
        self._connecting = None
        if self.is_done:
            self._services.pool.release(connection, self._services.now())
        elif connection.transport is None:
            self._handle_failed_attempt(FailureKind.RESET, "closed by the worker at once")
        else:
            self._connection = connection
            self._send(connection)

    def connection_failed(self, error: Exception) -> None:
        """No connection could be opened."""
        self._connecting = None
        if isinstance(error, OSError) and error.errno in LOCAL_ERRNOS:
            self._services.record_failed_attempt(None, FailureKind.LOCAL, str(error))
            self._services.pool.close_idle(math.inf)
            self._withdraw_from_core(None)
            self.refuse(503, "overloaded", f"the router cannot open a connection: {error}", 1.0)
        else:
            reason = "connect timed out" if isinstance(error, asyncio.TimeoutError) else str(error)
            self._handle_failed_attempt(FailureKind.CONNECT, reason, was_sent=self._is_resend)

    def _send(self, connection: UpstreamConnection) -> None:
        assert self.decision is not None
        connection.user = self
        authorization = self._services.worker_authorization
        if authorization is not None and not self._services.may_send_key(self.decision.worker):
            authorization = b""
        body, stream, path = self.request.pieces, self._continuation, None
        if self.route is not None and self.route.is_streaming and self._services.continues_streams:
            stream = self._continuation = stream or build_continuation(self.request)
        if stream is not None:
            resent_body = stream.request_body_for(self._services.get_engine(self.decision.worker))
            if resent_body is None:
                self._abort_response("no worker of the same engine is left", None)
                return
            body, path = resent_body, stream.path
        head = build_request_head(
            self.request, connection.target, self.trace_id, self.decision.rank, authorization, body, path,
            traceparent=None if self.span is None else self.span[1],
            allowed_worker_headers=self._services.passed_fields, )  # fmt: skip
        self.sent_at_s = self.progress.last_byte_at_s = self._services.now()
        connection.send(head, body)
        if self._is_client_paused:
            connection.pause_reading()

    @property
    def reads_in_slices(self) -> bool:
        return self._response_head is None or self._response_head.is_chunked

    def upstream_data(self, data: bytes) -> None:
        """Bytes from the worker."""
        prefix = b""
        head = self._response_head
        try:
            if head is None:
                head, data = self._read_head(data)
                if head is None:
                    return
                client_head = self._accept_head(head)
                if client_head is None:
                    return
                prefix = client_head
            self._relay(head, prefix, data)
        except ProtocolError as error:
            self._handle_broken_response(str(error))

    def _read_head(self, data: bytes) -> tuple[ResponseHead | None, bytes]:
        """The head of the answer and what came after it, once it is complete."""
        buffer = self._head_buffer + data if self._head_buffer else data
        connection = self._connection
        assert connection is not None
        while True:
            parsed_head = connection.head_parser.parse(buffer, self.request.method)
            if parsed_head is None:
                self._head_buffer = buffer
                return None, b""
            head, buffer = parsed_head
            if head.status >= 200:
                return head, buffer
            if head.status == 101:
                raise ProtocolError("101 to a request that offered no upgrade")

    def _accept_head(self, head: ResponseHead) -> bytes | None:
        """The head to send to the client, which is empty where it has one; None where the attempt is over."""
        failure_kind = RETRYABLE_STATUSES.get(head.status)
        if failure_kind is not None and self.is_in_core:
            self._services.record_failed_attempt(self.decision, failure_kind, head.status_and_reason.decode("latin-1"))
            instructions = self._services.core.fail_attempt(self.request_id, failure_kind, self._services.now())
            if not is_final_refusal(instructions, self.request_id):
                self._drop_connection()
                self._services.perform(instructions)
                return None
            # Nobody else can take it: the worker's own words are the best answer. The core has forgotten it.
            self.is_in_core = False
            self._services.perform(instructions[1:])
        is_readable_stream = _is_readable_stream(head)
        if self.client.has_response_started and not is_readable_stream:
            failure_kind = FailureKind.STREAM if head.status < 400 else None
            self._abort_response(
                f"the worker that was to go on answers {head.status}, and no events that can be read", failure_kind
            )
            return None
        if not is_readable_stream:
            self._continuation = None
        self._response_head = head
        self._records_tokens = self._continuation is not None and self._continuation.recorder is not None
        if not self.client.has_response_started and self._services.redacted_keys is not None and _is_readable(head):
            is_chunked = is_readable_stream and not self._records_tokens
            self._redactor = ResponseRedactor(self._services.redacted_keys, is_chunked=is_chunked)
        filters_content = self._redactor is not None and isinstance(head.body, ChunkedBody) and not is_readable_stream
        self._rechunks = self._unframed_content is None and (self._records_tokens or filters_content)
        if self.client.has_response_started:
            return b""
        chunks, keep_alive = self._unframed_content is None, self._keeps_alive(head)
        decision = self.decision if self._services.sends_cache_headers else None
        cors_headers = self.client.cors_headers
        return build_response_head(
            head, self.trace_id, decision, allows_chunked=chunks, keep_alive=keep_alive, cors_headers=cors_headers
        )

    def _keeps_alive(self, head: ResponseHead) -> bool:
        is_delimited = head.is_chunked or isinstance(head.body, LengthBody)
        return self.request.keep_alive and is_delimited and self._unframed_content is None

    def _relay(self, head: ResponseHead, prefix: bytes, data: bytes) -> None:
        """Pass on what belongs to the answer, and notice its first byte and its end."""
        body, stream, redactor = head.body, self._continuation if self._records_tokens else None, self._redactor
        content = bytearray() if self._rechunks else self._unframed_content
        body_bytes = body.feed(data, content)
        services = self._services
        now = services.now()
        has_surplus = body_bytes != len(data)
        if has_surplus:
            data = data[:body_bytes]
        if data and self.first_byte_at_s is None:
            self.first_byte_at_s = now
        is_first_output = bool(data) and not self.progress.has_started and self._has_output(data)
        if is_first_output:
            self.progress.has_started = True
            if self.is_in_core and self.route is not None and self.route.is_streaming and head.status == 200:
                services.perform(services.core.record_first_token(self.request_id, now))
        if content is not None:
            data = bytes(content)
            content.clear()
        if stream is not None:
            data = stream.convert_content(data, is_last=body.is_complete)
        if redactor is not None:
            data = redactor.feed(data, ends=body.is_complete)
        if self._rechunks:
            data = _encode_chunk(data)
        if prefix or data:
            self.client.write(prefix + data if prefix else data)
        if is_first_output and head.status == 200:
            services.notify_first_byte(self.request_id)
        progress = self.progress
        progress.record(data, now)
        if stream is not None and stream.has_worker_failed and self._handle_worker_failure(stream):
            return
        if body.is_complete:
            if stream is not None and stream.is_truncated:
                self._handle_broken_response("the worker ended its answer without a finish reason")
                return
            if self._rechunks:
                self.client.write(_LAST_CHUNK)
            self._complete(head, reusable=head.keep_alive and not has_surplus)
            return
        if progress.read_count % CHUNKS_PER_PROGRESS_REPORT == 0 and self.is_in_core:
            services.core.record_progress(self.request_id, progress.read_count, now)

    def _has_output(self, data: bytes) -> bool:
        """Whether the model has begun: a stream of Responses begins with events that say only that it was asked."""
        return self.request.path != RESPONSES_PATH or b"response.output" in data or b"event: response." not in data

    def _complete(self, head: ResponseHead, *, reusable: bool) -> None:
        """All of the answer was passed on."""
        if self._record_completion(head, reusable=reusable):
            self.client.finish(keep_alive=self._keeps_alive(head))

    def _record_completion(self, head: ResponseHead, *, reusable: bool) -> bool:
        """End with a whole answer; False where the exchange had ended."""
        connection, now = self._connection, self._services.now()
        if connection is not None:
            if self._is_client_paused:
                connection.resume_reading()
            if reusable:
                self._services.pool.release(connection, now)
            else:
                connection.close()
            self._connection = None
        self.usage = self.progress.find_reported_usage()
        if not self._end(f"status_{head.status}"):
            return False
        if self.is_in_core:
            self.is_in_core = False
            is_error = head.status >= 400
            if self.route is not None and self.route.is_streaming:
                self._services.core.record_progress(self.request_id, self.progress.read_count)
            # Of an answer that went on, it is about another request than the last one that was routed.
            usage = None if self._continuation is not None and self._continuation.is_continued else self.usage
            self._services.perform(self._services.core.finish_request(self.request_id, usage, now, is_error=is_error))
        return True

    # Ends ---------------------------------------------------------------------------------------------------------

    def upstream_lost(self, reason: str) -> None:
        """The worker's connection ended."""
        connection, self._connection = self._connection, None
        head = self._response_head
        if head is not None:
            try:
                head.body.finish()
            except ProtocolError as error:
                self._handle_broken_response(f"{reason}: {error}")
            else:
                self._complete(head, reusable=False)
            return
        is_stale_connection = (
            connection is not None and connection.request_count > 1 and not self._head_buffer and not self._is_resend
        )
        if is_stale_connection and self.decision is not None:
            self._is_resend = True  # it had been idle and was closed as we wrote: not the worker's fault, but only once
            self._start(self.decision)
        else:
            self._handle_failed_attempt(FailureKind.RESET, reason)

    @property
    def last_progress_at_s(self) -> float | None:
        """When the last byte came of a stream that is in its middle; None where none is to be expected."""
        is_streaming = (
            self.progress.has_started
            and not self._is_client_paused
            and self.route is not None
            and self.route.is_streaming
        )
        return self.progress.last_byte_at_s if is_streaming and not self.is_done else None

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """End or repeat what took too long. Called for every exchange a few times a second."""
        if now - self.started_at_s > timeouts.total_s:
            message = f"no complete answer within {timeouts.total_s:g} s"
            if self._response_head is not None:
                self._abort_response(message, None)  # the client's choice, as its answer goes on
                return
            self._withdraw_from_core(None)
            self.refuse(504, "timeout", message)
        elif self.sent_at_s is None:
            return  # waiting for a worker or a connection: the core's and the pool's deadlines apply
        elif self._response_head is None:
            silent_s = now - self.sent_at_s
            if silent_s > timeouts.first_byte_s:
                self._drop_connection()
                reason = f"no answer within {timeouts.first_byte_s:g} s"
                self._handle_failed_attempt(FailureKind.TIMEOUT, reason, silent_s=silent_s)
        elif now - self.progress.last_byte_at_s > timeouts.idle_s:
            if self._is_client_paused:
                self._abort_response(f"its client read nothing for {timeouts.idle_s:g} s", None)
            else:
                self._handle_broken_response(f"no byte for {timeouts.idle_s:g} s", FailureKind.STALLED)

    def migrate(self, reason: str, *, is_stalled: bool = False) -> None:
        """The worker is lost, or stands still: have another one answer where somebody can; else wait on."""
        services = self._services
        if self.is_done or not self.is_in_core:
            return
        if self.client.has_response_started:
            self._continue_elsewhere(reason, FailureKind.STALLED if is_stalled else FailureKind.LOST, is_move=True)
            return
        instructions = services.core.move_request(self.request_id, services.now())
        if instructions:
            self._drop_connection()
            services.record_failed_attempt(self.decision, FailureKind.LOST, reason)
            services.perform(instructions)

    def _handle_failed_attempt(
        self, kind: FailureKind, reason: str, *, silent_s: float = 0.0, was_sent: bool = False
    ) -> None:
        """Nothing of an answer was passed on: the core says who tries next, or that nobody does."""
        self.sent_at_s = None
        services = self._services
        services.record_failed_attempt(self.decision, kind, reason)
        if self.is_in_core:
            instructions = services.core.fail_attempt(
                self.request_id, kind, services.now(), silent_s=silent_s, was_sent=was_sent
            )
            services.perform(instructions)
        else:
            self.refuse(502, "bad_gateway", f"the worker did not answer: {reason}")

    def _handle_broken_response(self, reason: str, kind: FailureKind = FailureKind.STREAM) -> None:
        """The answer cannot be completed."""
        self._drop_connection()
        head = self._response_head
        if head is not None and self._is_stream_complete(head):
            self._terminate_body(head)
        elif not self.client.has_response_started:
            self._handle_failed_attempt(FailureKind.RESET, reason)
        elif not self._continue_elsewhere(reason, kind):
            self._abort_response(reason, kind)

    def _terminate_body(self, head: ResponseHead) -> None:
        """The worker left before the end of a body whose last event was passed on."""
        body = head.body
        if (
            self._unframed_content is None
            and isinstance(body, ChunkedBody)
            and (self._records_tokens or body.is_between_chunks)
        ):
            self.client.write(_LAST_CHUNK)
            self._complete(head, reusable=False)
        elif self._record_completion(head, reusable=False):
            self.client.abort_response()

    def _abort_response(self, reason: str, kind: FailureKind | None) -> None:
        """Nobody can complete what the client has the beginning of. `kind`: None where no worker failed."""
        self._drop_connection()
        if not self._end("broken"):
            return
        if kind is not None:
            self._services.record_failed_attempt(self.decision, kind, reason)
        self._withdraw_from_core(kind)
        self._services.record_broken_stream(self.trace_id, "cut", reason)
        self.client.abort_response()

    def _handle_worker_failure(self, stream: StreamContinuation) -> bool:
        """The worker says in the middle that it failed, which this very request may be the reason of. False where its
        words go to the client."""
        if not self._continue_elsewhere("the worker says that it failed", FailureKind.INTERNAL):
            self.client.write(_encode_chunk(stream.release_failure_event()))
            return False
        return True

    def _continue_elsewhere(self, reason: str, kind: FailureKind, *, is_move: bool = False) -> bool:
        """Have another worker complete the answer; False where that cannot be. `is_move`: the connection to this one is
        there, so without another worker the answer stays."""
        stream, head, route, services = self._continuation, self._response_head, self.route, self._services
        if head is None or route is None or not self.is_in_core or self.is_done:
            return False
        missing_end = (
            None
            if stream is None
            else stream.build_missing_end(is_usage_sent=self.progress.find_reported_usage() is not None)
        )
        if missing_end is not None:
            services.record_broken_stream(self.trace_id, "completed", reason)
            self.client.write(_encode_chunk(missing_end) + _LAST_CHUNK)
            self._complete(head, reusable=False)
            return True
        continuation_route = self._build_continuation_route(head, route)
        if continuation_route is None:
            return False
        now = services.now()
        if is_move:
            instructions = services.core.move_request(
                self.request_id, now, continuation_route, is_stalled=kind is FailureKind.STALLED
            )
            if not instructions:
                return False
        else:
            instructions = services.core.fail_attempt(
                self.request_id, kind, now, continuation_route, silent_s=self._silent_s()
            )
        if is_final_refusal(instructions, self.request_id):
            self.is_in_core = False
            services.perform(instructions[1:])
            return False
        self._drop_connection()
        services.record_failed_attempt(self.decision, kind, reason)
        services.record_broken_stream(self.trace_id, "continued", reason)
        if stream is not None and stream.recorder is not None:
            stream.start_continuation(continuation_route, services.get_model_tokens_max(route.model))
        self.route, self._response_head = continuation_route, None
        self.progress.restart()
        services.perform(instructions)
        return True

    def _build_continuation_route(self, head: ResponseHead, route: RouteRequest) -> RouteRequest | None:
        """What another worker is asked that goes on with the answer; None where nobody can."""
        stream, services = self._continuation, self._services
        if stream is None or stream.recorder is None:
            # Nothing can be noted of such an answer, but of this one the client has a head and no more. Once only: it
            # may be what kills its workers.
            is_first_attempt = self.first_byte_at_s is None and self.decision is not None and not self.decision.attempt
            return route if is_first_attempt and _is_readable_stream(head) else None
        continuation_route = stream.build_continuation_route(route, services.get_model_tokens_max(route.model))
        if continuation_route is None or continuation_route is route or self.decision is None:
            return continuation_route
        same_engine_workers = services.find_workers_by_engine(services.get_engine(self.decision.worker))
        return (
            continuation_route.replace(
                allowed_workers=same_engine_workers
                if continuation_route.allowed_workers is None
                else same_engine_workers & continuation_route.allowed_workers
            )
            if same_engine_workers
            else continuation_route
        )

    def _withdraw_from_core(self, kind: FailureKind | None) -> None:
        if self.is_in_core:
            self.is_in_core = False
            self._services.withdraw(self.request_id, kind, self._silent_s())

    def _silent_s(self) -> float:
        """For how long the worker said nothing."""
        return self._services.now() - self.progress.last_byte_at_s

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        self.sent_at_s = None
        if connection is not None:
            connection.close()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _end(self, outcome: str) -> bool:
        """Mark the end; False where it had ended before."""
        if self.is_done:
            return False
        self.is_done = True
        self.outcome = self.outcome or outcome
        self._services.notify_end(self.request_id)
        return True


def _is_stream(head: ResponseHead) -> bool:
    """Whether the answer is a stream of events, and not an encoded one."""
    is_event_stream = b"event-stream" in (head.headers.get(b"content-type") or b"")
    return is_event_stream and head.headers.get(b"content-encoding") is None


def _is_readable(head: ResponseHead) -> bool:
    """Whether the answer is JSON, or a stream of it, and not an encoded one."""
    if head.headers.get(b"content-encoding") is not None:
        return False
    content_type = head.headers.get(b"content-type") or b""
    return b"json" in content_type or b"event-stream" in content_type


def _is_readable_stream(head: ResponseHead) -> bool:
    """Whether a stream's events can be noted as they pass."""
    return head.status == 200 and head.is_chunked and _is_stream(head)


def _encode_chunk(content: bytes) -> bytes:
    """Of a chunked body; nothing for nothing."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""
