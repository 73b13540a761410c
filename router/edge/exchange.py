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
from router.edge.answer_filter import AnswerFilter
from router.edge.carrier import OUR_OWN, RETRYABLE, Carrier, gives_up
from router.edge.config import Timeouts
from router.edge.continuation import Continuation, continuation
from router.edge.progress import Progress
from router.edge.rewrite import answer_head, request_head
from router.edge.upstream import UpstreamConnection
from router.http.chunked import ChunkedBody
from router.http.headers import ProtocolError
from router.http.request import HttpRequest
from router.http.response import LengthBody, ResponseHead

if TYPE_CHECKING:
    from router.edge.comparison import Comparison
    from router.http.connection import Client
    from router.miss_reasons.analyzer import AnalyzedRequest

PROGRESS_EVERY: Final = 32
"""Chunks of a stream between two reports of progress to the core."""
RESPONSES: Final = "/v1/responses"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Exchange:
    """One request and its answer. Created when the request is complete, even before its prompt is tokenised."""

    __slots__ = (
        "_connecting", "_connection", "_filter", "_head", "_head_buffer", "_notes_tokens", "_paused", "_payload",
        "_proxy", "_reframes", "_resent", "_stream", "client", "decision", "done", "first_byte_s", "in_core", "looked",
        "outcome", "progress", "request", "request_id", "route", "sampled", "sent_s", "span", "started_s", "trace_id",
        "usage",
    )  # fmt: skip

    def __init__(self, proxy: Carrier, client: Client, request: HttpRequest, request_id: str, trace_id: bytes) -> None:
        self._proxy = proxy
        self.client = client
        self.request = request
        self.request_id = request_id
        """Unique in this process: the core's name for it."""
        self.trace_id = trace_id
        """`x-request-id`: the client's where it sent one."""
        self.started_s = proxy.now()
        self.route: RouteRequest | None = None
        """What the core was asked, once the prompt was read."""
        self.span: tuple[Any, bytes] | None = None
        """Where it is traced: whatever the tracer keeps, and what the worker is told in `traceparent`."""
        self.sampled = False
        """Its decisions are logged with every candidate's terms."""
        self.in_core = False
        """The core has the request on its books."""
        self.decision: Decision | None = None
        self.sent_s: float | None = None
        self.first_byte_s: float | None = None
        self.progress = Progress(self.started_s)
        self.usage: ReportedUsage | None = None
        self.outcome = ""
        self.looked: Comparison | AnalyzedRequest | None = None
        """What router/edge/reasons.py knows of it; None before its first byte where it is not compared."""
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head: ResponseHead | None = None
        self._head_buffer = b""
        self._payload: bytearray | None = bytearray() if request.is_http_1_0 else None
        self._notes_tokens = False
        """The answer's events pass through `_stream`."""
        self._reframes = False
        """The answer's chunks are taken apart, and what is passed on of them is put into new ones."""
        self._paused = False
        self._stream: Continuation | None = None
        """What the answer needs to go on elsewhere; None where it cannot."""
        self._filter: AnswerFilter | None = None
        """What hides the fields of an answer that are workers' own; None where that cannot be read."""
        self._resent = False
        """This attempt was repeated on a new connection because a kept-alive one broke."""
        self.done = False

    # From the core ------------------------------------------------------------------------------------------------

    def asks(self, route: RouteRequest) -> None:
        """Add what is known of the request besides what it says itself: the core is asked next."""

    def forward(self, decision: Decision) -> None:
        """Start an attempt."""
        self.decision = decision
        self._resent = False
        self._start(decision)

    def _start(self, decision: Decision) -> None:
        self._drop_connection()
        self._head = None
        self._head_buffer = b""
        if self._payload is not None:
            self._payload.clear()
        target = self._proxy.endpoint(decision.worker)
        if target is None:
            self._attempt_failed(FailureKind.CONNECT, "the worker was removed")
            return
        connection = None if self._resent else self._proxy.pool.take(target)
        if connection is not None:
            self._connection = connection
            self._send(connection)
        else:
            self._connecting = self._proxy.pool.open(target, self)

    def refuse(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        """End with an error of our own, before any byte of an answer; in the middle of one by cutting it off."""
        if self.client.has_response_started:
            self._cut(message, None)
        elif self._end(f"refused_{code}"):
            self._drop_connection()
            param = None
            if code == "unknown_model":
                param = "model"
            elif code == "context_length_exceeded":
                param = {"/v1/completions": "prompt", RESPONSES: "input"}.get(self.request.path, "messages")
            self.client.refuse(status, code, message, retry_after_s, param=param)

    def reject(self, error: RequestError) -> None:
        """The same, for what was found wrong with the request itself."""
        if self._end("rejected"):
            self._drop_connection()
            self.client.respond_error(error)

    # From the client's side ---------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client closed its connection: cancel upstream at once. An answer whose last event it has is complete."""
        head = self._head
        if head is not None and self._is_said(head):
            self._account(head, reusable=False)
        elif self._end("client_gone"):
            self._let_go()

    def _is_said(self, head: ResponseHead) -> bool:
        """Whether all of a stream was passed on but the end of its body."""
        streams = not self.outcome and self.client.has_response_started and head.status == 200 and _is_stream(head)
        return streams and self.progress.is_final(self.request.path)

    def _let_go(self) -> None:
        """Of the worker and of the core, where they still have it."""
        try:
            self._drop_connection()
        finally:
            if self.in_core:
                self.in_core = False
                self._proxy.perform(self._proxy.core.abort_request(self.request_id, self._proxy.now()))

    def client_paused(self) -> None:
        """The client reads slower than the worker writes."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def client_resumed(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    # The boundary -------------------------------------------------------------------------------------------------

    def crash(self, error: Exception) -> None:
        """What handles this exchange raised `error`: the client gets what can still be said, nobody else notices."""
        self.outcome = self.outcome or "crashed"
        if self.client.responder is self:
            self.client.crash(error)  # which ends the exchange as if the client had gone
        else:
            self._proxy.metrics.record_crash("exchange", error)
        self.in_core = self.route is not None  # whatever was said to the core: it may not have come to hear it
        try:
            self._end("crashed")
            self._let_go()
        except Exception as another:  # noqa: BLE001  a boundary
            self._proxy.metrics.record_crash("exchange", another)

    # The attempt --------------------------------------------------------------------------------------------------

    def connected(self, connection: UpstreamConnection) -> None:
        """A connection was opened for this attempt."""
        self._connecting = None
        if self.done:
            self._proxy.pool.release(connection, self._proxy.now())
        elif connection.transport is None:
            self._attempt_failed(FailureKind.RESET, "closed by the worker at once")
        else:
            self._connection = connection
            self._send(connection)

    def not_connected(self, error: Exception) -> None:
        """No connection could be opened."""
        self._connecting = None
        if isinstance(error, OSError) and error.errno in OUR_OWN:
            self._proxy.attempt_failed(None, FailureKind.LOCAL, str(error))
            self._proxy.pool.close_idle(math.inf)
            self._forget_in_core(None)
            self.refuse(503, "overloaded", f"the router cannot open a connection: {error}", 1.0)
        else:
            reason = "connect timed out" if isinstance(error, asyncio.TimeoutError) else str(error)
            self._attempt_failed(FailureKind.CONNECT, reason, was_sent=self._resent)

    def _send(self, connection: UpstreamConnection) -> None:
        assert self.decision is not None
        connection.user = self
        authorization = self._proxy.worker_authorization
        if authorization is not None and not self._proxy.is_keyed(self.decision.worker):
            authorization = b""
        body, stream, path = self.request.pieces, self._stream, None
        if self.route is not None and self.route.stream and self._proxy.continues:
            stream = self._stream = stream or continuation(self.request)
        if stream is not None:
            asked = stream.ask(self._proxy.engine(self.decision.worker))
            if asked is None:
                self._cut("no worker of the same engine is left", None)
                return
            body, path = asked, stream.path
        head = request_head(
            self.request, connection.target, self.trace_id, self.decision.rank, authorization, body, path,
            traceparent=None if self.span is None else self.span[1], passed=self._proxy.passed_fields,
        )  # fmt: skip
        self.sent_s = self.progress.last_byte_s = self._proxy.now()
        connection.send(head, body)
        if self._paused:
            connection.pause_reading()

    @property
    def in_turns(self) -> bool:
        return self._head is None or self._head.is_chunked

    def upstream_data(self, data: bytes) -> None:
        """Bytes from the worker."""
        prefix = b""
        head = self._head
        try:
            if head is None:
                head, data = self._read_head(data)
                if head is None:
                    return
                accepted = self._accept_head(head)
                if accepted is None:
                    return
                prefix = accepted
            self._relay(head, prefix, data)
        except ProtocolError as error:
            self._broken(str(error))

    def _read_head(self, data: bytes) -> tuple[ResponseHead | None, bytes]:
        """The head of the answer and what came after it, once it is complete."""
        buffer = self._head_buffer + data if self._head_buffer else data
        connection = self._connection
        assert connection is not None
        while True:
            found = connection.heads.parse(buffer, self.request.method)
            if found is None:
                self._head_buffer = buffer
                return None, b""
            head, buffer = found
            if head.status >= 200:
                return head, buffer
            if head.status == 101:
                raise ProtocolError("101 to a request that offered no upgrade")

    def _accept_head(self, head: ResponseHead) -> bytes | None:
        """The head to send to the client, which is empty where it has one; None where the attempt is over."""
        kind = RETRYABLE.get(head.status)
        if kind is not None and self.in_core:
            self._proxy.attempt_failed(self.decision, kind, head.status_and_reason.decode("latin-1"))
            instructions = self._proxy.core.fail_attempt(self.request_id, kind, self._proxy.now())
            if not gives_up(instructions, self.request_id):
                self._drop_connection()
                self._proxy.perform(instructions)
                return None
            # Nobody else can take it: the worker's own words are the best answer. The core has forgotten it.
            self.in_core = False
            self._proxy.perform(instructions[1:])
        is_readable_stream = _is_readable_stream(head)
        if self.client.has_response_started and not is_readable_stream:
            kind = FailureKind.STREAM if head.status < 400 else None
            self._cut(f"the worker that was to go on answers {head.status}, and no events that can be read", kind)
            return None
        if not is_readable_stream:
            self._stream = None
        self._head = head
        self._notes_tokens = self._stream is not None and self._stream.tokens is not None
        if not self.client.has_response_started and self._proxy.hidden_keys is not None and _is_readable(head):
            is_chunked = is_readable_stream and not self._notes_tokens
            self._filter = AnswerFilter(self._proxy.hidden_keys, is_chunked=is_chunked)
        filters_content = self._filter is not None and isinstance(head.body, ChunkedBody) and not is_readable_stream
        self._reframes = self._payload is None and (self._notes_tokens or filters_content)
        if self.client.has_response_started:
            return b""
        chunks, keep_alive = self._payload is None, self._keeps_alive(head)
        told = self.decision if self._proxy.tells_cache else None
        cors = self.client.cors_headers
        return answer_head(head, self.trace_id, told, chunks=chunks, keep_alive=keep_alive, cors_headers=cors)

    def _keeps_alive(self, head: ResponseHead) -> bool:
        framed = head.is_chunked or isinstance(head.body, LengthBody)
        return self.request.keep_alive and framed and self._payload is None

    def _relay(self, head: ResponseHead, prefix: bytes, data: bytes) -> None:
        """Pass on what belongs to the answer, and notice its first byte and its end."""
        body, stream, hides = head.body, self._stream if self._notes_tokens else None, self._filter
        content = bytearray() if self._reframes else self._payload
        taken = body.feed(data, content)
        proxy = self._proxy
        now = proxy.now()
        surplus = taken != len(data)
        if surplus:
            data = data[:taken]
        if data and self.first_byte_s is None:
            self.first_byte_s = now
        begins = bool(data) and not self.progress.began and self._speaks(data)
        if begins:
            self.progress.began = True
            if self.in_core and self.route is not None and self.route.stream and head.status == 200:
                proxy.perform(proxy.core.record_first_token(self.request_id, now))
        if content is not None:
            data = bytes(content)
            content.clear()
        if stream is not None:
            data = stream.pass_on(data, ends=body.is_complete)
        if hides is not None:
            data = hides.feed(data, ends=body.is_complete)
        if self._reframes:
            data = _chunk(data)
        if prefix or data:
            self.client.write(prefix + data if prefix else data)
        if begins and head.status == 200:
            proxy.first_byte(self.request_id)
        progress = self.progress
        progress.note(data, now)
        if stream is not None and stream.failed and self._fails(stream):
            return
        if body.is_complete:
            if stream is not None and stream.is_truncated:
                self._broken("the worker ended its answer without a finish reason")
                return
            if self._reframes:
                self.client.write(_LAST_CHUNK)
            self._complete(head, reusable=head.keep_alive and not surplus)
            return
        if progress.reads % PROGRESS_EVERY == 0 and self.in_core:
            proxy.core.record_progress(self.request_id, progress.reads, now)

    def _speaks(self, data: bytes) -> bool:
        """Whether the model has begun: a stream of Responses begins with events that say only that it was asked."""
        return self.request.path != RESPONSES or b"response.output" in data or b"event: response." not in data

    def _complete(self, head: ResponseHead, *, reusable: bool) -> None:
        """All of the answer was passed on."""
        if self._account(head, reusable=reusable):
            self.client.finish(keep_alive=self._keeps_alive(head))

    def _account(self, head: ResponseHead, *, reusable: bool) -> bool:
        """End with a whole answer; False where the exchange had ended."""
        connection, now = self._connection, self._proxy.now()
        if connection is not None:
            if self._paused:
                connection.resume_reading()
            if reusable:
                self._proxy.pool.release(connection, now)
            else:
                connection.close()
            self._connection = None
        self.usage = self.progress.usage()
        if not self._end(f"status_{head.status}"):
            return False
        if self.in_core:
            self.in_core = False
            refused = head.status >= 400
            if self.route is not None and self.route.stream:
                self._proxy.core.record_progress(self.request_id, self.progress.reads)
            # Of an answer that went on, it is about another request than the last one that was routed.
            usage = None if self._stream is not None and self._stream.goes_on else self.usage
            self._proxy.perform(self._proxy.core.finish_request(self.request_id, usage, now, is_error=refused))
        return True

    # Ends ---------------------------------------------------------------------------------------------------------

    def upstream_lost(self, reason: str) -> None:
        """The worker's connection ended."""
        connection, self._connection = self._connection, None
        head = self._head
        if head is not None:
            try:
                head.body.finish()
            except ProtocolError as error:
                self._broken(f"{reason}: {error}")
            else:
                self._complete(head, reusable=False)
            return
        stale = connection is not None and connection.uses > 1 and not self._head_buffer and not self._resent
        if stale and self.decision is not None:
            self._resent = True  # it had been idle and was closed as we wrote: not the worker's fault, but only once
            self._start(self.decision)
        else:
            self._attempt_failed(FailureKind.RESET, reason)

    @property
    def moved_s(self) -> float | None:
        """When the last byte came of a stream that is in its middle; None where none is to be expected."""
        streams = self.progress.began and not self._paused and self.route is not None and self.route.stream
        return self.progress.last_byte_s if streams and not self.done else None

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """End or repeat what took too long. Called for every exchange a few times a second."""
        if now - self.started_s > timeouts.total_s:
            message = f"no complete answer within {timeouts.total_s:g} s"
            if self._head is not None:
                self._cut(message, None)  # the client's choice, as its answer goes on
                return
            self._forget_in_core(None)
            self.refuse(504, "timeout", message)
        elif self.sent_s is None:
            return  # waiting for a worker or a connection: the core's and the pool's deadlines apply
        elif self._head is None:
            silent_s = now - self.sent_s
            if silent_s > timeouts.first_byte_s:
                self._drop_connection()
                reason = f"no answer within {timeouts.first_byte_s:g} s"
                self._attempt_failed(FailureKind.TIMEOUT, reason, silent_s=silent_s)
        elif now - self.progress.last_byte_s > timeouts.idle_s:
            if self._paused:
                self._cut(f"its client read nothing for {timeouts.idle_s:g} s", None)
            else:
                self._broken(f"no byte for {timeouts.idle_s:g} s", FailureKind.STALLED)

    def move(self, reason: str, *, stalled: bool = False) -> None:
        """The worker is lost, or stands still: have another one answer where somebody can; else wait on."""
        proxy = self._proxy
        if self.done or not self.in_core:
            return
        if self.client.has_response_started:
            self._go_on(reason, FailureKind.STALLED if stalled else FailureKind.LOST, moves=True)
            return
        instructions = proxy.core.move_request(self.request_id, proxy.now())
        if instructions:
            self._drop_connection()
            proxy.attempt_failed(self.decision, FailureKind.LOST, reason)
            proxy.perform(instructions)

    def _attempt_failed(self, kind: FailureKind, reason: str, *, silent_s: float = 0.0, was_sent: bool = False) -> None:
        """Nothing of an answer was passed on: the core says who tries next, or that nobody does."""
        self.sent_s = None
        proxy = self._proxy
        proxy.attempt_failed(self.decision, kind, reason)
        if self.in_core:
            told = proxy.core.fail_attempt(self.request_id, kind, proxy.now(), silent_s=silent_s, was_sent=was_sent)
            proxy.perform(told)
        else:
            self.refuse(502, "bad_gateway", f"the worker did not answer: {reason}")

    def _broken(self, reason: str, kind: FailureKind = FailureKind.STREAM) -> None:
        """The answer cannot be completed."""
        self._drop_connection()
        head = self._head
        if head is not None and self._is_said(head):
            self._end_body(head)
        elif not self.client.has_response_started:
            self._attempt_failed(FailureKind.RESET, reason)
        elif not self._go_on(reason, kind):
            self._cut(reason, kind)

    def _end_body(self, head: ResponseHead) -> None:
        """The worker left before the end of a body whose last event was passed on."""
        body = head.body
        if self._payload is None and isinstance(body, ChunkedBody) and (self._notes_tokens or body.is_between_chunks):
            self.client.write(_LAST_CHUNK)
            self._complete(head, reusable=False)
        elif self._account(head, reusable=False):
            self.client.abort_response()

    def _cut(self, reason: str, kind: FailureKind | None) -> None:
        """Nobody can complete what the client has the beginning of. `kind`: None where no worker failed."""
        self._drop_connection()
        if not self._end("broken"):
            return
        if kind is not None:
            self._proxy.attempt_failed(self.decision, kind, reason)
        self._forget_in_core(kind)
        self._proxy.broke(self.trace_id, "cut", reason)
        self.client.abort_response()

    def _fails(self, stream: Continuation) -> bool:
        """The worker says in the middle that it failed, which this very request may be the reason of. False where its
        words go to the client."""
        if not self._go_on("the worker says that it failed", FailureKind.INTERNAL):
            self.client.write(_chunk(stream.release()))
            return False
        return True

    def _go_on(self, reason: str, kind: FailureKind, *, moves: bool = False) -> bool:
        """Have another worker complete the answer; False where that cannot be. `moves`: the connection to this one is
        there, so without another worker the answer stays."""
        stream, head, route, proxy = self._stream, self._head, self.route, self._proxy
        if head is None or route is None or not self.in_core or self.done:
            return False
        ending = None if stream is None else stream.ending(usage_sent=self.progress.usage() is not None)
        if ending is not None:
            proxy.broke(self.trace_id, "completed", reason)
            self.client.write(_chunk(ending) + _LAST_CHUNK)
            self._complete(head, reusable=False)
            return True
        rest = self._rest(head, route)
        if rest is None:
            return False
        now = proxy.now()
        if moves:
            instructions = proxy.core.move_request(self.request_id, now, rest, is_stalled=kind is FailureKind.STALLED)
            if not instructions:
                return False
        else:
            instructions = proxy.core.fail_attempt(self.request_id, kind, now, rest, silent_s=self._silent_s())
        if gives_up(instructions, self.request_id):
            self.in_core = False
            proxy.perform(instructions[1:])
            return False
        self._drop_connection()
        proxy.attempt_failed(self.decision, kind, reason)
        proxy.broke(self.trace_id, "continued", reason)
        if stream is not None and stream.tokens is not None:
            stream.begin_rest(rest, proxy.tokens_max(route.model))
        self.route, self._head = rest, None
        self.progress.begin_again()
        proxy.perform(instructions)
        return True

    def _rest(self, head: ResponseHead, route: RouteRequest) -> RouteRequest | None:
        """What another worker is asked that goes on with the answer; None where nobody can."""
        stream, proxy = self._stream, self._proxy
        if stream is None or stream.tokens is None:
            # Nothing can be noted of such an answer, but of this one the client has a head and no more. Once only: it
            # may be what kills its workers.
            again = self.first_byte_s is None and self.decision is not None and not self.decision.attempt
            return route if again and _is_readable_stream(head) else None
        rest = stream.rest(route, proxy.tokens_max(route.model))
        if rest is None or rest is route or self.decision is None:
            return rest
        alike = proxy.of_engine(proxy.engine(self.decision.worker))
        return (
            rest.replace(allowed_workers=alike if rest.allowed_workers is None else alike & rest.allowed_workers)
            if alike
            else rest
        )

    def _forget_in_core(self, kind: FailureKind | None) -> None:
        if self.in_core:
            self.in_core = False
            self._proxy.forget(self.request_id, kind, self._silent_s())

    def _silent_s(self) -> float:
        """For how long the worker said nothing."""
        return self._proxy.now() - self.progress.last_byte_s

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        self.sent_s = None
        if connection is not None:
            connection.close()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _end(self, outcome: str) -> bool:
        """Mark the end; False where it had ended before."""
        if self.done:
            return False
        self.done = True
        self.outcome = self.outcome or outcome
        self._proxy.ended(self.request_id)
        return True


def _is_stream(head: ResponseHead) -> bool:
    """Whether the answer is a stream of events, and not an encoded one."""
    events = b"event-stream" in (head.headers.get(b"content-type") or b"")
    return events and head.headers.get(b"content-encoding") is None


def _is_readable(head: ResponseHead) -> bool:
    """Whether the answer is JSON, or a stream of it, and not an encoded one."""
    if head.headers.get(b"content-encoding") is not None:
        return False
    content_type = head.headers.get(b"content-type") or b""
    return b"json" in content_type or b"event-stream" in content_type


def _is_readable_stream(head: ResponseHead) -> bool:
    """Whether a stream's events can be noted as they pass."""
    return head.status == 200 and head.is_chunked and _is_stream(head)


def _chunk(content: bytes) -> bytes:
    """Of a chunked body; nothing for nothing."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""
