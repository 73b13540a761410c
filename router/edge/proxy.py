"""All requests in flight of a process, and the core's instructions for them.

Names the requests, carries out the core's instructions, ends each request once, and calls the listeners. An `Exchange`
(router/edge/exchange.py, router/picker/pick_exchange.py) answers a request; the core decides which worker gets it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from prompts.errors import RequestError, describe_context_overflow
from router.decide.core import RouterCore
from router.decide.messages import (
    Decision,
    FailureKind,
    Forward,
    Instruction,
    Refuse,
    RouteRequest,
    Transfer,
    WorkerLost,
)
from router.edge.config import EdgeConfig, Timeouts
from router.edge.forwarded_heads import build_request_head
from router.edge.request_context import RequestContext, RequestSpan
from router.edge.response_progress import RESPONSES_PATH
from router.edge.response_redactor import build_key_pattern
from router.edge.upstream import Endpoint, UpstreamPool
from router.edge.worker_directory import WorkerDirectory
from router.http.budget import BufferBudget
from router.http.connection import Client, Responder
from router.metrics import Metrics, TransferOutcome
from router.prompting.body_fields import Body

log = logging.getLogger("router")

CHUNKS_PER_PROGRESS_REPORT: Final = 32
"""Number of chunks between two reports of a stream's progress to the core."""
RETRYABLE_STATUSES: Final = {
    429: FailureKind.OVERLOADED,
    500: FailureKind.INTERNAL,
    502: FailureKind.SERVER_ERROR,
    503: FailureKind.SERVER_ERROR,
}
"""Status of a worker's answer -> how the attempt failed."""


class Exchange(Responder, Protocol):
    """Interface of the object that answers one client request, mostly by forwarding it to the chosen worker."""

    __slots__ = ()

    context: RequestContext
    client: Client
    """Receiver of the answer."""

    @property
    def last_progress_at_s(self) -> float | None:
        """Time of the last byte of a running stream; None while no byte is expected."""
        return None

    def request_worker(self, route: RouteRequest) -> None:
        """Ask for a worker, now that the prompt was read and tokenised."""

    def forward(self, decision: Decision) -> None:
        """Send the request to the chosen worker."""

    def refuse(self, error: RequestError, outcome: str) -> None:
        """Answer with an error, such as 503 if no worker is left, and end the request with this outcome."""

    def migrate(self, reason: str, *, is_stalled: bool = False) -> None:
        """Move the request away from a worker that is lost or stalled, if there is another one and it can be moved."""
        return

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """End or repeat a request that takes too long. Called a few times a second."""

    def close(self) -> None:
        """Release all that the request holds. Called at its end; a second call does nothing."""
        return


class Proxy:
    """Requests in flight, with the core that decides about them and the connections to workers.

    It carries out the core's instructions, and reports to the core and to listeners what becomes of the requests.
    """

    def __init__(
        self,
        core: RouterCore,
        pool: UpstreamPool,
        metrics: Metrics,
        config: EdgeConfig,
        *,
        now: Callable[[], float],
        worker_authorization: bytes | None = None,
    ) -> None:
        """Make a proxy without requests. `core` chooses workers, and `pool` has the connections to them.

        `worker_authorization`: value of `Authorization` for workers; None forwards the client's.
        """
        self.core = core
        self.pool = pool
        self.metrics = metrics
        self.config = config
        self.now = now
        self.budget = BufferBudget(config.limits, metrics)
        self.workers = WorkerDirectory(core.workers, worker_authorization)
        self.exchanges: dict[str, Exchange] = {}
        """Request id -> exchange that answers the request."""
        self._request_count = 0

        # Settings.
        self.passed_fields = frozenset(config.passed_fields)
        """Internal fields and headers of workers that clients may set and see."""
        self.redacted_keys = build_key_pattern(self.passed_fields)
        """Pattern of the fields that are blanked in answers; None if all are shown."""
        self.continues_streams = config.continue_streams
        """Whether streams of a dead worker are continued at another one."""
        self.explains_decisions = False
        """Whether decisions include the costs of every candidate, as while the dashboard is open."""
        self.log_share = 0.0
        """Share of requests for which the decision is logged, with the costs of every candidate."""
        self.tracer: Callable[[RequestContext, float], RequestSpan | None] | None = None
        """Called with the context of each new request, and the time; None: requests are not traced."""

        # Listeners.
        self.on_first_output: list[Callable[[RequestContext], None]] = []
        """Called with the context of a request after the client got the first output of a successful answer."""
        self.on_end: list[Callable[[RequestContext], None]] = []
        """Called with the context of each request that ended."""
        self.on_worker_lost: list[Callable[[str], None]] = []
        """Called with the id of a worker that died."""
        self.on_failure: list[Callable[[Decision | None, FailureKind, str], None]] = []
        """Called after each failed attempt with its decision, if a worker is to blame, the kind and the reason."""
        self.on_transfer_failed: list[Callable[[str], None]] = []
        """Called with the id of a worker that did not give its KV to another worker."""

    def open(self, exchange: Exchange) -> None:
        """Add a complete request, and give it an id and a span."""
        self._request_count += 1
        context = exchange.context
        context.request_id = f"r{self._request_count}"
        self.exchanges[context.request_id] = exchange
        if self.tracer is not None:
            context.span = self.tracer(context, self.now())

    def route(self, context: RequestContext, route: RouteRequest) -> None:
        """Ask the core for a worker, and carry out its instruction."""
        if context.is_done:
            return
        if route.allowed_workers is None:
            route.allowed_workers = self.core.registry.reachable_workers
        context.route = route
        context.is_logged = self.log_share > 0 and random.random() < self.log_share
        self._execute(self.core.route(route, self.now(), explain=self.explains_decisions or context.is_logged))

    # Instructions of the core -------------------------------------------------------------------------------------

    def perform(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions of the core."""
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        """Carry out one instruction of the core: forward or refuse a request, or report a lost worker."""
        if isinstance(instruction, WorkerLost):
            self._notify(self.on_worker_lost, instruction.worker_id)
            return
        exchange = self.exchanges.get(instruction.request_id)
        if exchange is None:
            return  # the request has ended meanwhile
        try:
            if isinstance(instruction, Forward):
                if exchange.context.is_logged:
                    _log_decision(exchange.context, instruction.decision)
                exchange.forward(instruction.decision)
            elif isinstance(instruction, Refuse):
                exchange.refuse(_make_refusal_error(instruction, exchange.context), f"refused_{instruction.code}")
        except Exception as error:  # noqa: BLE001  this may run at the end of another request
            self.end_crashed(exchange, error)

    def drop_refusal(self, context: RequestContext, instructions: list[Instruction]) -> list[Instruction]:
        """Return instructions by which another worker gets a request; none if the core has no other worker for it.

        Then the first instruction refuses the request, and the others, which are for other requests, are carried out.
        """
        first_instruction = instructions[0] if instructions else None
        if not isinstance(first_instruction, Refuse) or first_instruction.request_id != context.request_id:
            return instructions
        self.perform(instructions[1:])
        return []

    def tick_core(self, now: float) -> None:
        """Run the core's timers that are due. Call every tick."""
        due_at_s = self.core.next_tick()
        if due_at_s is not None and due_at_s <= now:
            self.perform(self.core.tick(now))

    # Reports to the core ------------------------------------------------------------------------------------------

    def is_in_core(self, context: RequestContext) -> bool:
        """Return whether the core has the request, queued or in flight."""
        return self.core.has_request(context.request_id)

    def record_first_token(self, context: RequestContext, now: float) -> None:
        """Report that the first token of a stream came."""
        self.perform(self.core.record_first_token(context.request_id, now))

    def complete(self, context: RequestContext, status: int) -> bool:
        """End a request of which the client has the complete answer, and report to the core what the worker has done.

        Return False if the request had ended before, as when its client left. `status`: of the answer.
        """
        context.read_usage()
        if not self.end(context, f"status_{status}"):
            return False
        if context.is_streaming:
            self.core.record_progress(context.request_id, context.progress.read_count)
        # The usage of a continued answer counts the work of both workers, so it is no measure of the last worker.
        is_continued = context.continuation is not None and context.continuation.is_continued
        usage = None if is_continued else context.usage
        self.perform(self.core.finish_request(context.request_id, usage, self.now(), is_error=status >= 400))
        return True

    def abort(self, context: RequestContext) -> None:
        """Report that no client waits for the request any more."""
        self.perform(self.core.abort_request(context.request_id, self.now()))

    def withdraw(self, context: RequestContext, kind: FailureKind | None) -> None:
        """Tell the core, which chooses workers, that a request ended early, and carry out its instructions for others.

        For example, a queued request gets the free slot. `kind`: how the worker failed; None if it did not fail.
        """
        request_id, now = context.request_id, self.now()
        instructions: list[Instruction] = []
        if kind is not None:
            silent_s = now - context.progress.last_byte_at_s
            instructions += self.core.fail_attempt(request_id, kind, now, silent_s=silent_s)
        instructions += self.core.abort_request(request_id, now)  # does nothing if the core has refused the request
        self.perform(
            instruction
            for instruction in instructions
            if isinstance(instruction, WorkerLost) or instruction.request_id != request_id
        )

    # Listeners ----------------------------------------------------------------------------------------------------

    def notify_first_output(self, context: RequestContext) -> None:
        """Tell the listeners that the client has the first output of a successful answer."""
        self._notify(self.on_first_output, context)

    def end(self, context: RequestContext, outcome: str) -> bool:
        """End a request: call the listeners with its outcome, and close its connections. The caller tells the core.

        Return False if the request had ended before: then nothing is done, and its first outcome counts.
        """
        if context.is_done:
            return False
        context.is_done = True
        context.outcome = context.outcome or outcome
        exchange = self.exchanges.pop(context.request_id)
        self._notify(self.on_end, context)
        try:
            exchange.close()
        except Exception as error:  # noqa: BLE001  a boundary: the core is to be told in any case
            self.metrics.record_crash("exchange", error)
        return True

    def reject(self, exchange: Exchange, error: RequestError) -> None:
        """Answer a request that the core does not have yet with an error, and count the error."""
        outcome = "rejected" if error.status < 500 else f"refused_{error.code}"
        exchange.refuse(error, outcome)
        has_sent_error = exchange.context.outcome == outcome  # a client may have left, and a copy gets no error
        if has_sent_error:
            self.metrics.http_errors[str(error.status)] += 1

    def end_crashed(self, exchange: Exchange, error: Exception) -> None:
        """End a request, because code that handles it raised `error`. A client without an answer gets an error."""
        context, client = exchange.context, exchange.client
        context.outcome = context.outcome or "crashed"
        if client.responder is exchange:
            client.crash(error)  # which ends the request as if the client had gone
        else:
            self.metrics.record_crash("exchange", error)
        try:
            self.end(context, "crashed")
            self.abort(context)
        except Exception as second_error:  # noqa: BLE001  a boundary
            self.metrics.record_crash("exchange", second_error)

    def build_head(
        self,
        context: RequestContext,
        endpoint: Endpoint,
        worker: str,
        rank: int | None,
        body: Body,
        path: bytes | None = None,
    ) -> bytes:
        """Return the head by which a request goes to a rank of a worker. `path`: None for the client's."""
        return build_request_head(
            context, endpoint, body, path=path, rank=rank, allowed_headers=self.passed_fields,
            authorization=self.workers.get_authorization(worker),
        )  # fmt: skip

    def record_failed_attempt(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        """Count a failed attempt, and call the listeners. `decision`: None if no worker is to blame."""
        self.metrics.record_attempt_failure(decision.worker if decision else "", kind.value)
        self._notify(self.on_failure, decision, kind, reason)

    def record_transfer_start(self, transfer: Transfer) -> None:
        """Count KV that is to move to the worker of a request."""
        transfers = self.metrics.transfers
        transfers.outcomes[transfer.kind.value, "started"] += 1
        transfers.planned_tokens[transfer.kind.value] += transfer.tokens
        transfers.planned_bytes[transfer.kind.value] += self.count_transfer_bytes(transfer)

    def count_transfer_bytes(self, transfer: Transfer) -> int:
        """Return the bytes of a transfer's tokens; 0 if its source was removed or does not tell."""
        source = self.core.workers.get(transfer.source)
        return 0 if source is None else int(transfer.tokens * source.spec.transfer.bytes_per_token)

    def fail_transfer(
        self, context: RequestContext, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False
    ) -> None:
        """Record that a request's worker does not get the KV cache that another worker, the source, was to send.

        `may_be_crash`: whether the request may have crashed the source.
        """
        assert context.decision is not None
        transfer = context.decision.transfer
        assert transfer is not None
        self.metrics.transfers.outcomes[transfer.kind.value, outcome] += 1
        log.info("no KV for %s at %s: %s: %s", context.name, context.decision.worker, outcome, reason)
        is_pair_fault = outcome not in ("refused", "local")
        instructions = self.core.fail_transfer(
            context.request_id, self.now(), is_pair_fault=is_pair_fault, may_be_crash=may_be_crash
        )
        self.perform(instructions)
        if is_pair_fault:
            self._notify(self.on_transfer_failed, transfer.source)

    def record_broken_stream(self, context: RequestContext, event: str, reason: str) -> None:
        """Count and log an answer that broke off. `event`: continued, completed or cut."""
        self.metrics.broken_streams[event] += 1
        log.info("the answer to %s broke off and was %s: %s", context.name, event, reason)

    def _notify(self, listeners: Sequence[Callable[..., None]], *event: object) -> None:
        """Call all listeners with the parts of an event, also if one of them raises."""
        for listener in listeners:
            try:
                listener(*event)
            except Exception as error:  # noqa: BLE001  a boundary
                self.metrics.record_crash("listener", error)

    # Timers -------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """End requests that take too long, and move others away from workers that are lost or stalled.

        Called several times a second. A stalled worker is up but has sent nothing on any stream for a while.
        """
        for exchange in list(self.exchanges.values()):
            try:
                exchange.expire(now, self.config.timeouts)
                self._migrate_if_needed(exchange, now)
            except Exception as error:  # noqa: BLE001  a fault in one request must not stop the others
                self.end_crashed(exchange, error)
        self._update_stalled_workers(now)

    def _update_stalled_workers(self, now: float) -> None:
        """Have the core find the workers that stand still, by the last byte of any running stream of each worker."""
        last_byte_s_by_worker: dict[str, float] = {}
        for exchange in self.exchanges.values():
            byte_s, decision = exchange.last_progress_at_s, exchange.context.decision
            if byte_s is not None and decision is not None:
                last_byte_s_by_worker[decision.worker] = max(byte_s, last_byte_s_by_worker.get(decision.worker, byte_s))
        for worker_id in self.core.update_stalled_workers(last_byte_s_by_worker, now):
            if worker_id in self.core.stall_detector.stalled_workers:
                log.warning("worker %s stands still: none of its streams moves", worker_id)
            else:
                log.info("worker %s stands still no more", worker_id)

    def _migrate_if_needed(self, exchange: Exchange, now: float) -> None:
        """Move a request to another worker if its own was removed, is down, sleeps, or has stalled."""
        decision, stall_detector = exchange.context.decision, self.core.stall_detector
        if decision is None or exchange.context.is_done:
            return
        problem = self._find_worker_problem(exchange.context, decision.worker)
        if problem is not None:
            exchange.migrate(problem)
        elif decision.worker in stall_detector.stalled_workers:
            silent_s = now - (exchange.last_progress_at_s or now)
            if silent_s >= stall_detector.stall_s:
                exchange.migrate("the worker stands still", is_stalled=True)

    def _find_worker_problem(self, context: RequestContext, worker_id: str) -> str | None:
        """Return why a worker can no longer answer a request; None if it can.

        A removed or sleeping worker still ends the answers that it has begun. A worker that is down keeps one request,
        its probe: the answer to the probe shows whether the worker works again.
        """
        worker, has_started = self.core.workers.get(worker_id), context.progress.first_byte_at_s is not None
        if worker is not None and worker.is_down and worker.probe != context.request_id:
            return "the worker is down"
        if has_started:
            return None
        if worker is None:
            return "the worker was removed"
        return "the worker sleeps" if worker.is_asleep else None


def _log_decision(context: RequestContext, decision: Decision) -> None:
    fields = {**decision.to_json_fields(), "request_id": context.name}
    text = msgspec.json.encode(fields).decode()
    log.info("decision %s", text, extra={"fields": {"decision": fields}})


def _make_refusal_error(refusal: Refuse, context: RequestContext) -> RequestError:
    """Return the error for a request that the core refuses, in the words of the API of the request's path."""
    path, route = context.request.path, context.route
    message, code, param = refusal.message, refusal.code, None
    if code == "unknown_model":
        code, param = "model_not_found", "model"  # OpenAI's word
    elif code == "context_length_exceeded":
        param = {"/v1/completions": "prompt", RESPONSES_PATH: "input"}.get(path, "messages")
    if refusal.context_max is not None and route is not None:
        tokens = route.longest_prompt_tokens or route.prompt_tokens
        message = describe_context_overflow(path, tokens, refusal.context_max, is_exact=route.is_counted)
    retry_after_s = refusal.retry_after_s
    headers = () if retry_after_s is None else ((b"retry-after", b"%d" % max(1, round(retry_after_s))),)
    return RequestError(message, param=param, code=code, status=refusal.status, headers=headers)
