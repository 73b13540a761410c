"""All exchanges of a process, and the hands of the core: its instructions become attempts, refusals and waiting.

Owns the names of requests in flight and the connections' targets. Refuses to know what an exchange does with its bytes
(router/edge/exchange.py) and why the core decides as it does.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from prompts.errors import describe_context_overflow
from router.decide.core import RouterCore
from router.decide.messages import Decision, FailureKind, Forward, Instruction, Refuse, RouteRequest, WorkerLost
from router.edge.config import Timeouts
from router.edge.exchange import Exchange
from router.edge.exchange_services import ExchangeServices, is_final_refusal
from router.edge.upstream import Endpoint, UpstreamPool
from router.http.budget import Budget
from router.http.config import HttpLimits
from router.http.connection import Client
from router.http.request import HttpRequest
from router.metrics import Metrics

log = logging.getLogger("router")


class Proxy(ExchangeServices):
    """All exchanges, and the hands of the core."""

    def __init__(
        self,
        core: RouterCore,
        pool: UpstreamPool,
        metrics: Metrics,
        *,
        now: Callable[[], float],
        timeouts: Timeouts,
        worker_authorization: bytes | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(core, pool, metrics, now, worker_authorization)
        self.scheduler = pool.scheduler
        self.budget = budget if budget is not None else Budget(HttpLimits(), metrics)
        self.explains_decisions = False
        """Keep every candidate's terms in decisions: while somebody watches."""
        self.log_share = 0.0
        """Share of requests whose decisions are logged with every candidate's terms."""
        self.tracer: Callable[[Exchange, float], tuple[Any, bytes] | None] | None = None
        """Called with every exchange that begins, and the time; what it returns is the exchange's `span`."""
        self.exchanges: dict[str, Exchange] = {}
        self.on_first_byte: list[Callable[..., None]] = []
        """Called with every exchange whose answer has begun, once that is on its way to the client."""
        self.on_end: list[Callable[..., None]] = []
        """Called with every exchange that ended."""
        self.on_worker_lost: list[Callable[..., None]] = []
        """Called with the id of a worker that died."""
        self.on_failure: list[Callable[..., None]] = []
        """Called with (Decision | None, FailureKind, reason) of every attempt that failed."""
        self._timeouts = timeouts
        self._endpoints: dict[str, tuple[str, Endpoint]] = {}
        self._count = 0

    def open(
        self, client: Client, request: HttpRequest, trace_id: bytes, kind: Callable[..., Exchange] = Exchange
    ) -> Exchange:
        """Begin the life of a complete request."""
        self._count += 1
        name = f"r{self._count}"
        exchange = self.exchanges[name] = kind(self, client, request, name, trace_id)
        if self.tracer is not None:
            exchange.span = self.tracer(exchange, self.now())
        return exchange

    def route(self, exchange: Exchange, route: RouteRequest) -> None:
        """Ask the core for a worker and do what it says."""
        if exchange.is_done:
            return
        route.allowed_workers = self.core.registry.reachable_workers
        exchange.add_routing_hints(route)
        exchange.route = route
        exchange.is_in_core = True
        exchange.is_sampled = self.log_share > 0 and random.random() < self.log_share
        self._execute(self.core.route(route, self.now(), explain=self.explains_decisions or exchange.is_sampled))

    def perform(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, WorkerLost):
            self._notify(self.on_worker_lost, instruction.worker_id)
            return
        exchange = self.exchanges.get(instruction.request_id)
        if exchange is None:
            return
        try:
            if isinstance(instruction, Forward):
                if exchange.is_sampled:
                    fields = {
                        **instruction.decision.to_json_fields(),
                        "request_id": exchange.trace_id.decode("latin-1"),
                    }
                    text = msgspec.json.encode(fields).decode()
                    log.info("decision %s", text, extra={"fields": {"decision": fields}})
                exchange.forward(instruction.decision)
            elif isinstance(instruction, Refuse):
                exchange.is_in_core = False
                exchange.refuse(
                    instruction.status,
                    instruction.code,
                    _refusal_message(instruction, exchange),
                    instruction.retry_after_s,
                )
        except Exception as error:  # noqa: BLE001  a boundary: one request's event may place another
            exchange.crash(error)

    def _notify(self, listeners: list[Callable[..., None]], event: object) -> None:
        """Tell all; one that raises keeps nothing from the others."""
        for listener in listeners:
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001  a boundary
                self.metrics.record_crash("listener", error)

    def endpoint_of(self, worker_id: str) -> Endpoint | None:
        worker = self.core.workers.get(worker_id)
        if worker is None or not worker.spec.url:
            return None
        entry = self._endpoints.get(worker_id)
        if entry is None or entry[0] != worker.spec.url:
            entry = self._endpoints[worker_id] = (worker.spec.url, Endpoint.parse(worker.spec.url))
        return entry[1]

    def sweep(self, now: float) -> None:
        """Enforce the timeouts of all exchanges; to be called several times a second."""
        progress_times: dict[str, float] = {}
        for exchange in list(self.exchanges.values()):
            try:
                exchange.expire(now, self._timeouts)
            except Exception as error:  # noqa: BLE001  a boundary
                exchange.crash(error)
            self._migrate_if_needed(exchange, now)
            moved_s, decision = exchange.last_progress_at_s, exchange.decision
            if moved_s is not None and decision is not None:
                progress_times[decision.worker] = max(moved_s, progress_times.get(decision.worker, moved_s))
        for worker_id in self.core.update_stalled_workers(progress_times, now):
            if worker_id in self.core.stall_detector.stalled_workers:
                log.warning("worker %s stands still: none of its streams moves", worker_id)
            else:
                log.info("worker %s stands still no more", worker_id)
        for worker_id in self._endpoints.keys() - self.core.workers.keys():
            del self._endpoints[worker_id]

    def _migrate_if_needed(self, exchange: Exchange, now: float) -> None:
        """Move what is on a worker that is gone, is down or stands still."""
        decision = exchange.decision
        if decision is None or exchange.is_done:
            return
        worker, stall_detector = self.core.workers.get(decision.worker), self.core.stall_detector
        try:
            if worker is None and exchange.first_byte_at_s is None:
                exchange.migrate("the worker was removed")
            elif worker is not None and worker.is_down and worker.probe != exchange.request_id:
                exchange.migrate("the worker is down")
            elif worker is not None and worker.is_asleep and exchange.first_byte_at_s is None:
                exchange.migrate("the worker sleeps")
            elif (
                decision.worker in stall_detector.stalled_workers
                and now - (exchange.last_progress_at_s or now) >= stall_detector.stall_s
            ):
                exchange.migrate("the worker stands still", is_stalled=True)
        except Exception as error:  # noqa: BLE001  a boundary
            exchange.crash(error)

    def withdraw(self, request_id: str, kind: FailureKind | None, silent_s: float = 0.0) -> None:
        """What the core would do about this very request is not wanted any more."""
        now = self.now()
        instructions = self.core.fail_attempt(request_id, kind, now, silent_s=silent_s) if kind is not None else []
        if not is_final_refusal(instructions, request_id):
            instructions = instructions + self.core.abort_request(request_id, now)
        self.perform(
            instruction
            for instruction in instructions
            if isinstance(instruction, WorkerLost) or instruction.request_id != request_id
        )

    def notify_first_byte(self, request_id: str) -> None:
        self._notify(self.on_first_byte, self.exchanges[request_id])

    def notify_end(self, request_id: str) -> None:
        self._notify(self.on_end, self.exchanges.pop(request_id))

    def record_failed_attempt(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        self.metrics.record_attempt_failure(decision.worker if decision else "", kind.value)
        for listener in self.on_failure:
            try:
                listener(decision, kind, reason)
            except Exception as error:  # noqa: BLE001  a boundary
                self.metrics.record_crash("listener", error)


def _refusal_message(refusal: Refuse, exchange: Exchange) -> str:
    """Why a request is refused, as clients of its API know it."""
    route = exchange.route
    if refusal.context_max is None or route is None:
        return refusal.message
    tokens = route.longest_prompt_tokens or route.prompt_tokens
    return describe_context_overflow(exchange.request.path, tokens, refusal.context_max, is_exact=route.is_counted)
