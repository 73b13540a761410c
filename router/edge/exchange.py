"""Forward one request to the worker that the core chose, and its answer to the client.

The core decides which worker is tried next; router/edge/proxy.py asks it. It may also have another worker compute the
prompt (the prefill) and hand over its KV, the keys and values of attention, so that the chosen worker only generates
the answer (the decode). Rules:

* An attempt is repeated only while the client has no byte of an answer's body.
* When the client leaves, the worker's connection is closed at once: so engines learn to stop computing.
* A slow client stops the reading from its own worker only.
* Every exchange ends exactly once: complete, refused, cut off, or abandoned by the client, also if its own code raises.
"""

from __future__ import annotations

import asyncio
import math

from prompts.errors import RequestError
from prompts.routing import API_KIND_BY_PATH
from router.decide.messages import Decision, FailureKind, Instruction, RouteRequest, Transfer, TransferKind
from router.edge.client_response import ClientResponse
from router.edge.config import Timeouts
from router.edge.continuation import build_continuation
from router.edge.proxy import CHUNKS_PER_PROGRESS_REPORT, RETRYABLE_STATUSES, Proxy
from router.edge.request_context import RequestContext
from router.edge.response_progress import RESPONSES_PATH
from router.edge.transfers.dialects import Fields
from router.edge.transfers.prefill_leg import PrefillLeg
from router.edge.upstream import Endpoint, UpstreamConnection, is_local_error
from router.http.connection import Client
from router.http.headers import ProtocolError
from router.http.response import ResponseHead
from router.metrics import TransferOutcome
from router.prompting.body_fields import Body, add_fields


class Exchange:
    """One request and its answer. Created when the request is complete, before its prompt is tokenised."""

    __slots__ = (
        "_connection", "_is_client_paused", "_is_resend", "_prefill", "_proxy", "_pull", "_response", "_response_head",
        "client", "context",
    )  # fmt: skip

    def __init__(self, proxy: Proxy, client: Client, context: RequestContext) -> None:
        self._proxy = proxy
        self.client = client
        self.context = context
        self._connection: UpstreamConnection | None = None
        """Connection to the chosen worker, also while it is being opened."""
        self._is_resend = False
        """Whether the connection replaces a kept-alive one that broke under the request."""
        self._response_head: ResponseHead | None = None
        """Head of the present worker's answer; None until it is forwarded."""
        self._prefill: PrefillLeg | None = None
        """Prefill at another worker, for the latest decision; None if there is none, or the prefill failed."""
        self._pull: Transfer | None = None
        """Pull of a cached prefix by the chosen worker; None if there is none, or the worker refused its source."""
        self._is_client_paused = False
        self._response = ClientResponse(client, context, shows_worker=proxy.config.cache_headers)

    @property
    def _decision(self) -> Decision:
        """Decision of the present attempt."""
        assert self.context.decision is not None
        return self.context.decision

    @property
    def _may_be_found_elsewhere(self) -> bool:
        """Whether another worker may have what the worker does not: a LoRA adapter, or a stored response.

        The router knows the worker of a stored response only if it forwarded that response since its start.
        """
        route, path = self.context.route, self.context.request.path
        if route is None or route.worker is not None:
            return False
        is_about_response = path.startswith(RESPONSES_PATH)
        return is_about_response or (route.scope.lora is not None and path in API_KIND_BY_PATH)

    # From the core ------------------------------------------------------------------------------------------------

    def request_worker(self, route: RouteRequest) -> None:
        """Ask the core for a worker, now that the prompt was read."""
        context = self.context
        has_media = route.media_conversation is not None  # token ids do not stand for media
        if route.is_streaming and not has_media and self._proxy.continues_streams and not context.is_done:
            fields = None if context.body is None else context.body.fields
            tokens_max = None if context.model is None else context.model.tokens_max
            context.continuation = build_continuation(context.request, fields, tokens_max)
        self._proxy.route(context, route)

    def forward(self, decision: Decision) -> None:
        """Start an attempt at the worker that the core chose, or the prefill at another worker before this attempt."""
        self.close()
        self.context.decision = decision
        transfer = decision.transfer
        self._pull = transfer if transfer is not None and transfer.kind is TransferKind.PULL else None
        if transfer is not None:
            self._proxy.record_transfer_start(transfer)
        has_prompt = self.context.request.path in API_KIND_BY_PATH
        if transfer is not None and decision.is_split and has_prompt:
            self._start_prefill(transfer)
        else:
            self._start_attempt()

    def _start_prefill(self, transfer: Transfer) -> None:
        """Start the prefill at the source of a transfer, and the decode too if both are sent at once."""
        self._response_head = None
        handover = self._proxy.workers.make_handover(transfer)
        if handover is None:
            self._start_without_kv("unreachable", "the prefill's worker was removed, or no longer gives KV")
            return
        prefill = self._prefill = PrefillLeg(self, self._proxy, self._decision, handover)
        self.context.prefill = prefill.times
        prefill.start()
        if handover.is_concurrent and self._prefill is prefill:
            self._start_attempt()

    def on_prefill_computed(self) -> None:
        """Send the request to the chosen worker, because another worker has computed the prompt for it.

        Some engines get the request at both workers at once (`is_concurrent`). Then the chosen worker already has the
        request, and also the KV.
        """
        prefill, request_id, now = self._prefill, self.context.request_id, self._proxy.now()
        assert prefill is not None
        is_concurrent, cached_tokens = prefill.handover.is_concurrent, prefill.times.cached_tokens
        instructions = self._proxy.core.record_prefill_end(
            request_id, now, is_kv_transferred=is_concurrent, cached_tokens=cached_tokens
        )
        self._proxy.perform(instructions)
        if not is_concurrent:
            self._start_attempt()
        elif prefill.needs_partner and prefill.is_decode_sent:  # both of SGLang's workers are done with the prompt
            self._prefill = None

    def on_prefill_failed(self, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False) -> None:
        """Go on after the prefill's worker failed, unless the chosen worker answers: then it has the KV already.

        The chosen worker computes the prompt itself, or other workers get the request if it cannot. `may_be_crash`:
        whether the request may have crashed the prefill's worker.
        """
        assert self._prefill is not None
        if self._has_answer_begun:
            self._prefill = None
        elif not self._prefill.needs_partner:
            self._start_without_kv(outcome, reason, may_be_crash=may_be_crash)
        else:
            self._give_up_transfer(outcome, reason, may_be_crash=may_be_crash)
            if self.context.is_done:
                return  # the request may have crashed several workers, so it was ended
            if self._response_head is None:
                self._handle_failed_attempt(FailureKind.SOURCE, reason)
            else:
                self._handle_broken_response(reason, FailureKind.SOURCE)

    def _start_without_kv(self, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False) -> None:
        """Give up the transfer, and send the request to the chosen worker, which computes the prompt itself."""
        self._give_up_transfer(outcome, reason, may_be_crash=may_be_crash)
        if not self.context.is_done:
            self._start_attempt()

    def _give_up_transfer(self, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False) -> None:
        """Forget the prefill or the pull, and report that its KV does not come. Sends no request by itself."""
        prefill, self._prefill, self._pull = self._prefill, None, None
        if prefill is not None:
            prefill.close()
        if self.context.prefill is not None:
            self.context.prefill.is_dropped = True
        self._proxy.fail_transfer(self.context, outcome, reason, may_be_crash=may_be_crash)

    @property
    def _has_answer_begun(self) -> bool:
        """Whether the client has the first bytes of the answer of the present attempt."""
        return self._response_head is not None and self.context.progress.first_byte_at_s is not None

    def _start_attempt(self, *, is_resend: bool = False) -> None:
        """Send the request to the chosen worker. `is_resend`: over a new connection, as a kept-alive one broke."""
        self.context.progress.sent_at_s = None
        self._close_connection()
        self._response_head = None
        self._is_resend = is_resend
        target = self._proxy.workers.get_endpoint(self._decision.worker)
        if target is None:
            self._handle_failed_attempt(FailureKind.CONNECT, "the worker was removed")
        else:
            self._connection = self._proxy.pool.acquire(target, is_new=is_resend)
            self._connection.begin_request(self, self.context.request.method)

    def refuse(self, error: RequestError, outcome: str) -> None:
        """Answer with an error; cut the answer off where the client has some of it."""
        if self.client.has_response_started:
            self._abort_response(error.message, None)
        elif self._proxy.end(self.context, outcome):
            self.client.respond_error(error)

    # From the client's side ---------------------------------------------------------------------------------------

    def on_client_gone(self) -> None:
        """Cancel the attempt, as the client has left. If the client has the last event, the answer is complete."""
        head = self._response_head
        if head is not None and self._is_stream_complete(head):
            self._proxy.complete(self.context, head.status)
        elif self._proxy.end(self.context, "client_gone"):
            self._proxy.abort(self.context)

    def _is_stream_complete(self, head: ResponseHead) -> bool:
        """Return whether the client has the last event of a stream, and lacks at most the end of its body."""
        context, has_begun = self.context, self.client.has_response_started
        is_unended_stream = head.status == 200 and head.is_event_stream and not context.outcome
        return has_begun and is_unended_stream and context.progress.has_final_event(context.request.path)

    def on_client_paused(self) -> None:
        """Stop reading from the worker, as the client reads too slowly."""
        self._is_client_paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def on_client_resumed(self) -> None:
        self._is_client_paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    def crash(self, error: Exception) -> None:
        """End this request alone, because code that handles it raised `error`."""
        self._proxy.end_crashed(self, error)

    # The attempt --------------------------------------------------------------------------------------------------

    def on_attempt_connected(self, connection: UpstreamConnection) -> None:
        """Send the request to the chosen worker, now that there is a connection to it.

        If the client has gone meanwhile, the connection is kept for other requests. If the worker was to continue
        another worker's answer, but runs another engine, the answer is cut off.
        """
        context = self.context
        if context.is_done:
            self._release_connection(reusable=True)
            return
        head_and_body = self._build_request(connection.target)
        if head_and_body is None:
            self._abort_response("no worker of the same engine is left", None)
            return
        context.progress.record_sent(self._proxy.now())
        head, body = head_and_body
        connection.send(head, body)
        if self._is_client_paused:
            connection.pause_reading()

    def _build_request(self, endpoint: Endpoint) -> tuple[bytes, Body] | None:
        """Return head and body for the chosen worker; None if it cannot continue the answer."""
        proxy, context, decision = self._proxy, self.context, self._decision
        continuation, path = context.continuation, None
        body: Body | None = context.request.pieces
        if continuation is not None:
            body, path = continuation.build_request_body(proxy.workers.get_engine(decision.worker)), continuation.path
        if body is None:
            return None
        kv_fields = self._take_kv_fields()
        if kv_fields is not None:
            body = add_fields(body, kv_fields)
        return proxy.build_head(context, endpoint, decision.worker, decision.rank, body, path), body

    def _take_kv_fields(self) -> Fields | None:
        """Return the fields by which the chosen worker gets KV; None if it computes the prompt itself."""
        if self._pull is not None:
            handover = self._proxy.workers.make_handover(self._pull)
            return None if handover is None else handover.make_pull_fields(self._decision.predicted_cached_tokens)
        if self._prefill is None:
            return None
        kv_fields = self._prefill.take_decode_fields(self._proxy.now())
        if kv_fields is None:
            self._give_up_transfer("late", "the KV is not kept for so long")
        return kv_fields

    def on_attempt_connect_failed(self, error: Exception | None) -> None:
        """Try another worker, or refuse, as no connection was opened. `error`: None if the worker closed it at once."""
        if self.context.is_done:
            return
        if error is None:
            self._handle_failed_attempt(FailureKind.RESET, "closed by the worker at once")
        elif is_local_error(error):  # idle connections are closed to get sockets and memory back
            self._proxy.record_failed_attempt(None, FailureKind.LOCAL, str(error))
            self._proxy.pool.close_idle(math.inf)
            self._proxy.withdraw(self.context, None)
            message = f"the router cannot open a connection: {error}"
            self.refuse(RequestError(message, code="overloaded", status=503), "refused_overloaded")
        else:
            reason = "connect timed out" if isinstance(error, asyncio.TimeoutError) else str(error)
            self._handle_failed_attempt(FailureKind.CONNECT, reason, was_sent=self._is_resend)

    def on_attempt_head(self, head: ResponseHead, data: bytes) -> None:
        """Forward the head of the worker's answer (status, headers), and `data`, the first bytes of its body.

        If the status is 503, for example, another worker is tried instead. A client that has the start of an answer by
        an earlier worker gets the body only.
        """
        if self._retry_after_status(head):
            return
        if not self.client.has_response_started:
            self._response.begin(head, self._proxy.redacted_keys)
        elif not head.is_readable_stream:
            is_worker_fault = head.status < 400  # an error status is the answer to a request that the router built
            reason = f"the worker that was to go on answers {head.status}, and no events that can be read"
            self._abort_response(reason, FailureKind.STREAM if is_worker_fault else None)
            return
        if self.context.continuation is not None and not head.is_readable_stream:
            self.context.continuation.recorder = None  # only tokens of a stream of events are recorded
        self._response_head = head
        self.on_attempt_body(head, data)

    def on_attempt_malformed(self, error: ProtocolError) -> None:
        """Give up the attempt, as the worker's bytes are no HTTP answer."""
        self._handle_broken_response(str(error))

    def _retry_after_status(self, head: ResponseHead) -> bool:
        """Send the request again if the status of the worker's answer allows it; return whether that was done.

        For example, after a 503 another worker gets the request. If there is none, the client gets the 503.
        """
        if head.status == 403 and self._pull is not None:
            self._start_without_kv("error", "the worker refuses the source, so it may have another fleet's key")
            return True
        if head.status == 404 and self._may_be_found_elsewhere:
            return self._try_other_worker(FailureKind.NOT_SERVED, head)
        failure_kind = RETRYABLE_STATUSES.get(head.status)
        if failure_kind is FailureKind.INTERNAL and self._prefill is not None:
            return self._retry_failed_decode(head, self._prefill)
        return failure_kind is not None and self._try_other_worker(failure_kind, head)

    def _retry_failed_decode(self, head: ResponseHead, prefill: PrefillLeg) -> bool:
        """Send the request again, as its prefill may have caused an error 500; return False if no worker gets it.

        The same worker computes the prompt itself. A decode worker of SGLang cannot: another one gets the request. If
        there is none, it gets new KV: after SOURCE, unlike other failures, a worker may get the request again.
        """
        if not prefill.needs_partner:
            self._start_without_kv("error", "the decode failed")
            return True
        self._give_up_transfer("error", "the decode failed")
        return self._try_other_worker(FailureKind.SOURCE, head)

    def _try_other_worker(self, failure_kind: FailureKind, head: ResponseHead) -> bool:
        """Send a request to another worker after an error status; return False if the core has no other worker."""
        proxy, context = self._proxy, self.context
        if not proxy.is_in_core(context):
            return False
        proxy.record_failed_attempt(context.decision, failure_kind, head.status_and_reason.decode("latin-1"))
        instructions = proxy.core.fail_attempt(context.request_id, failure_kind, proxy.now())
        instructions = proxy.drop_refusal(context, instructions)
        if not instructions:
            return False
        self.close()
        proxy.perform(instructions)
        return True

    def on_attempt_body(self, head: ResponseHead, data: bytes) -> None:
        """Forward the next bytes of the worker's answer to the client, and end a complete answer.

        Bytes that the worker sends after the end of its answer are dropped.
        """
        context, now = self.context, self._proxy.now()
        recorder = None if context.continuation is None else context.continuation.recorder
        content, surplus = head.body.feed(data)
        self._forward_content(head, content, now)
        if recorder is not None and recorder.has_worker_failed:
            if self._continue_elsewhere("the worker says that it failed", FailureKind.INTERNAL):
                return
            self._response.send(recorder.stop_recording())  # its report, which was held back
        if head.body.is_complete and recorder is not None and recorder.is_truncated:
            self._handle_broken_response("the worker ended its answer without a finish reason")
        elif head.body.is_complete:
            self._complete(head, reusable=head.keep_alive and not surplus)
        elif context.progress.read_count % CHUNKS_PER_PROGRESS_REPORT == 0:
            self._proxy.core.record_progress(context.request_id, context.progress.read_count, now)

    def _forward_content(self, head: ResponseHead, content: bytes, now: float) -> None:
        """Send the next content of an answer to the client, and report the model's first output.

        The core is told first, as it may send a queued request now. It learns from streams only: their first output is
        the first token, and other answers come whole. Listeners follow the write, which they must not delay.
        """
        context = self.context
        has_new_output = context.progress.record_arrival(content, context.request.path, now)
        is_first_output = has_new_output and head.status == 200
        if is_first_output and context.is_streaming:
            self._proxy.record_first_token(context, now)
        self._response.forward(content, now, is_last=head.body.is_complete)
        if is_first_output:
            self._proxy.notify_first_output(context)

    def _complete(self, head: ResponseHead, *, reusable: bool) -> None:
        """End the exchange, as the client has the whole content. `reusable`: the connection to the worker."""
        self._response.end_body()
        self._release_connection(reusable=reusable)
        if self._proxy.complete(self.context, head.status):
            self._response.finish(is_content_complete=head.body.is_complete)

    def _release_connection(self, *, reusable: bool) -> None:
        """Keep the connection to the worker for other requests if it is `reusable`, else close it."""
        if self._connection is not None:
            if self._is_client_paused:
                self._connection.resume_reading()
            self._connection.finish(self._proxy.now(), reusable=reusable)
            self._connection = None

    # Ends ---------------------------------------------------------------------------------------------------------

    def on_attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        """Handle the end of the worker's connection: complete the answer, send the request again, or fail the attempt.

        `is_stale`: whether a kept-alive connection was closed before the first byte of the answer. Engines do that at
        any time, so the request is sent once more over a new connection, and no failure is counted.
        """
        head, self._connection = self._response_head, None
        if head is not None:
            try:
                head.body.finish()  # raises unless the body may end with the connection
            except ProtocolError as error:
                self._handle_broken_response(f"{reason}: {error}")
            else:
                self._complete(head, reusable=False)
        elif is_stale:
            if self._prefill is not None:
                self._prefill.is_decode_sent = False  # the worker did not read the request, so it fetched no KV
            self._start_attempt(is_resend=True)
        else:
            self._handle_failed_attempt(FailureKind.RESET, reason)

    @property
    def last_progress_at_s(self) -> float | None:
        """Time of the last byte of a running stream; None while no byte is expected."""
        context = self.context
        is_moving = context.progress.has_output and not self._is_client_paused and context.is_streaming
        return context.progress.last_byte_at_s if is_moving and not context.is_done else None

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """End the request, or try another worker, if one of `timeouts` has passed. Called a few times a second.

        `total_s` limits the whole request, `first_byte_s` the wait for the answer of the worker that has the request,
        and `idle_s` each pause within the answer.
        """
        progress = self.context.progress
        if self._prefill is not None and not self._has_answer_begun:
            self._prefill.expire(now)
        if now - self.context.started_at_s > timeouts.total_s:
            self._end_late(f"no complete answer within {timeouts.total_s:g} s")
        elif progress.sent_at_s is None:
            return  # the chosen worker does not have the request yet
        elif self._response_head is None:
            silent_s = now - progress.sent_at_s
            if silent_s > timeouts.first_byte_s:
                reason = f"no answer within {timeouts.first_byte_s:g} s"
                self._handle_failed_attempt(FailureKind.TIMEOUT, reason, silent_s=silent_s)
        elif now - progress.last_byte_at_s > timeouts.idle_s:
            if self._is_client_paused:
                self._abort_response(f"its client read nothing for {timeouts.idle_s:g} s", None)
            else:
                self._handle_broken_response(f"no byte for {timeouts.idle_s:g} s", FailureKind.STALLED)

    def _end_late(self, message: str) -> None:
        """Cut off an answer that takes too long, or answer 504 if there is none yet. No worker is to blame."""
        if self._response_head is not None:
            self._abort_response(message, None)
        else:
            self._proxy.withdraw(self.context, None)
            self.refuse(RequestError(message, code="timeout", status=504), "refused_timeout")

    def migrate(self, reason: str, *, is_stalled: bool = False) -> None:
        """Move the request away from a worker that is lost or stalled, if there is another one; else wait."""
        proxy, context = self._proxy, self.context
        if context.is_done or not proxy.is_in_core(context):
            return
        if self.client.has_response_started:
            self._continue_elsewhere(reason, FailureKind.STALLED if is_stalled else FailureKind.LOST, is_move=True)
            return
        instructions = proxy.core.move_request(context.request_id, proxy.now())
        if instructions:
            self.close()
            proxy.record_failed_attempt(context.decision, FailureKind.LOST, reason)
            proxy.perform(instructions)

    def _handle_failed_attempt(
        self, kind: FailureKind, reason: str, *, silent_s: float = 0.0, was_sent: bool = False
    ) -> None:
        """Do what the core decides after an attempt failed before the client got any of its answer."""
        proxy, request_id = self._proxy, self.context.request_id
        self.close()
        proxy.record_failed_attempt(self.context.decision, kind, reason)
        if proxy.is_in_core(self.context):
            now = proxy.now()
            proxy.perform(proxy.core.fail_attempt(request_id, kind, now, silent_s=silent_s, was_sent=was_sent))
        else:
            error = RequestError(f"the worker did not answer: {reason}", code="bad_gateway", status=502)
            self.refuse(error, "refused_bad_gateway")

    def _handle_broken_response(self, reason: str, kind: FailureKind = FailureKind.STREAM) -> None:
        """Handle a worker's answer that broke off, by what the client has of it.

        Nothing: the attempt has failed. All events: the answer is complete. A part: another worker continues the
        answer, or it is cut off.
        """
        self.close()
        head = self._response_head
        if not self.client.has_response_started:
            self._handle_failed_attempt(FailureKind.RESET, reason)
        elif head is not None and self._is_stream_complete(head):
            self._complete(head, reusable=False)
        elif not self._continue_elsewhere(reason, kind):
            self._abort_response(reason, kind)

    def _abort_response(self, reason: str, kind: FailureKind | None) -> None:
        """Cut off an answer that has begun at the client. `kind`: the failure; None if no worker failed."""
        self.close()
        if not self._proxy.end(self.context, "broken"):
            return
        if kind is not None:
            self._proxy.record_failed_attempt(self.context.decision, kind, reason)
        self._proxy.withdraw(self.context, kind)
        self._proxy.record_broken_stream(self.context, "cut", reason)
        self.client.abort_response()

    def _continue_elsewhere(self, reason: str, kind: FailureKind, *, is_move: bool = False) -> bool:
        """Have another worker continue a streamed answer that broke off; return False if none can.

        For example, a worker dies after 40 tokens. Another worker gets the prompt with these tokens and continues the
        stream to the client. `is_move`: the worker still holds the request, and keeps it if there is no other worker.
        """
        proxy, context, head, route = self._proxy, self.context, self._response_head, self.context.route
        is_in_flight = proxy.is_in_core(context) and not context.is_done
        if not is_in_flight or route is None or head is None or not head.is_readable_stream:
            return False
        if self._write_end_events(head, reason):
            return True  # the client had all tokens already
        continuation_route = self._build_continuation_route(route)
        if continuation_route is None:
            return False
        instructions = self._ask_for_other_worker(continuation_route, kind, is_move=is_move)
        if not instructions:
            return False
        self.close()
        proxy.record_failed_attempt(context.decision, kind, reason)
        proxy.record_broken_stream(context, "continued", reason)
        if context.continuation is not None and context.continuation.recorder is not None:
            context.continuation.start_continuation()
        context.route, self._response_head = continuation_route, None
        context.progress.restart()
        proxy.perform(instructions)
        return True

    def _ask_for_other_worker(self, rest: RouteRequest, kind: FailureKind, *, is_move: bool) -> list[Instruction]:
        """Return the core's instructions for `rest`, the rest of an answer; none if no other worker can have it."""
        core, request_id, now = self._proxy.core, self.context.request_id, self._proxy.now()
        if is_move:
            instructions = core.move_request(request_id, now, rest, is_stalled=kind is FailureKind.STALLED)
        else:
            silent_s = now - self.context.progress.last_byte_at_s
            instructions = core.fail_attempt(request_id, kind, now, rest, silent_s=silent_s)
        return self._proxy.drop_refusal(self.context, instructions)

    def _write_end_events(self, head: ResponseHead, reason: str) -> bool:
        """Send the end of a stream if the client has its last token; return False if tokens are missing."""
        context, continuation = self.context, self.context.continuation
        if continuation is None:
            return False
        is_usage_sent = context.progress.find_reported_usage() is not None
        end_events = continuation.build_end_events(is_usage_sent=is_usage_sent)
        if end_events is None:
            return False
        self._proxy.record_broken_stream(context, "completed", reason)
        self._response.send(end_events)
        self._complete(head, reusable=False)
        return True

    def _build_continuation_route(self, route: RouteRequest) -> RouteRequest | None:
        """Return the core's request for the rest of a streamed answer; None if no worker can continue it."""
        continuation = self.context.continuation
        if continuation is None or continuation.recorder is None:  # the tokens that the client has are unknown
            has_body_begun = self.context.progress.first_byte_at_s is not None
            may_repeat = not has_body_begun and not self._decision.attempt
            return route if may_repeat else None
        same_engine_workers = self._proxy.workers.find_workers_of_engine(continuation.engine)
        return continuation.build_continuation_route(route, same_engine_workers)

    def close(self) -> None:
        """Close the connections to workers that handle the request, which makes these workers stop."""
        prefill, self._prefill = self._prefill, None
        self.context.progress.sent_at_s = None
        is_unanswered = self.context.is_done and self._response_head is None
        is_kv_fetched = prefill is not None and prefill.is_computed and prefill.is_decode_sent
        if is_unanswered and is_kv_fetched and self._connection is not None:
            self._connection.close_after_answer()  # if the fetch were cut off, the other worker would not free all KV
            self._connection = None
        self._close_connection()
        if prefill is not None:
            prefill.close()

    def _close_connection(self) -> None:
        """Close the connection to the chosen worker. It refers to this exchange: a cycle would keep the prompt."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
