"""All exchanges of a process, and the hands of the core: its instructions become attempts, refusals and waiting.

Owns the names of requests in flight and the connections' targets. Refuses to know what an exchange does with its bytes
(router/exchange.py) and why the core decides as it does.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable

import msgspec

from router.core import RouterCore
from router.edge_config import Timeouts
from router.exchange import Exchange
from router.http_request import Request
from router.http_server import ClientConnection
from router.messages import Decision, FailureKind, Forward, Instruction, Refuse, RouteRequest, WorkerLost
from router.metrics import Metrics
from router.relay import StreamRelay
from router.upstream import Target, UpstreamPool

log = logging.getLogger("router")


class Proxy:
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
        relay: StreamRelay | None = None,
    ) -> None:
        self.core = core
        self.pool = pool
        self.metrics = metrics
        self.relay = relay
        """Relays the middle of streams natively; None: exchanges do that themselves."""
        self.now = now
        self.worker_authorization = worker_authorization
        """Sent to workers instead of the client's `Authorization`, or None to pass that one on."""
        self.explains = False
        """Keep every candidate's terms in decisions: while somebody watches."""
        self.log_share = 0.0
        """Share of requests whose decisions are logged with every candidate's terms."""
        self.exchanges: dict[str, Exchange] = {}
        self.on_end: list[Callable[[Exchange], None]] = []
        self.on_worker_lost: list[Callable[[str], None]] = []
        self.on_failure: list[Callable[[Decision | None, FailureKind, str], None]] = []
        self._timeouts = timeouts
        self._targets: dict[str, tuple[str, Target]] = {}
        self._count = 0

    def open(self, client: ClientConnection, request: Request, trace_id: bytes) -> Exchange:
        """Begin the life of a complete request."""
        self._count += 1
        exchange = Exchange(self, client, request, f"r{self._count}", trace_id)
        self.exchanges[exchange.request_id] = exchange
        return exchange

    def route(self, exchange: Exchange, route: RouteRequest) -> None:
        """Ask the core for a worker and do what it says."""
        if exchange.done:
            return
        exchange.route = route
        exchange.in_core = True
        exchange.sampled = self.log_share > 0 and random.random() < self.log_share
        self._do(self.core.route(route, self.now(), explain=self.explains or exchange.sampled))

    def perform(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        if isinstance(instruction, WorkerLost):
            for listener in self.on_worker_lost:
                listener(instruction.worker_id)
            return
        exchange = self.exchanges.get(instruction.request_id)
        if exchange is None:
            return
        if isinstance(instruction, Forward):
            if exchange.sampled:
                fields = msgspec.to_builtins(instruction.decision)
                log.info("decision %s", msgspec.json.encode(fields).decode(), extra={"fields": {"decision": fields}})
            exchange.forward(instruction.decision)
        elif isinstance(instruction, Refuse):
            exchange.in_core = False
            exchange.refuse(instruction.status, instruction.code, instruction.message, instruction.retry_after_s)

    def target(self, worker_id: str) -> Target | None:
        """Where a worker listens; None where it is known no more."""
        worker = self.core.workers.get(worker_id)
        if worker is None:
            return None
        known = self._targets.get(worker_id)
        if known is None or known[0] != worker.spec.url:
            known = self._targets[worker_id] = (worker.spec.url, Target.parse(worker.spec.url))
        return known[1]

    def sweep(self, now: float) -> None:
        """Enforce the timeouts of all exchanges; call every `sweep_s`."""
        for exchange in list(self.exchanges.values()):
            exchange.expire(now, self._timeouts)
        for worker_id in self._targets.keys() - self.core.workers.keys():
            del self._targets[worker_id]

    def ended(self, exchange: Exchange) -> None:
        del self.exchanges[exchange.request_id]
        for listener in self.on_end:
            listener(exchange)

    def note_failure(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        for listener in self.on_failure:
            listener(decision, kind, reason)
