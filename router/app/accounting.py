"""What is said of a request that ended: counters for `/metrics`, fields for the log."""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from prompts.routing import KINDS
from router.counters import Metrics
from router.decide.core import RouterCore
from router.decide.workers import Worker, WorkerState
from router.edge.exchange import Exchange
from router.sharing.ledger import NAMES, KeyLedger, Use

log = logging.getLogger("router")


def count_end(core: RouterCore, metrics: Metrics, exchange: Exchange, now: float) -> None:
    """Add an ended exchange to the counters."""
    path = exchange.request.path if exchange.request.path in KINDS else "other"
    route, decision, usage = exchange.route, exchange.decision, exchange.usage
    # Names that clients make up must not become labels.
    model, worker = "unknown", ""
    if decision is not None:
        worker = decision.worker
    if route is not None and (worker or core.resolve_model(route.model) is not None):
        model = route.model
    stream = "true" if route is not None and route.stream else "false"
    ends = metrics.ends(path, model, exchange.outcome, worker, stream)
    ends.count += 1
    ends.request_s.observe(now - exchange.started_s)
    if exchange.first_byte_s is not None:
        ends.ttft_s.observe(exchange.first_byte_s - exchange.started_s)
    if exchange.outcome == "client_gone":
        metrics.client_disconnects += 1
    if route is None or decision is None:
        return
    metrics.routing_s.observe(decision.decided_s - exchange.started_s)
    if route.token_ids is not None:
        metrics.prompt_tokens += route.prompt_tokens
        metrics.predicted_cached_tokens += decision.predicted_cached_tokens
    if usage is not None:
        metrics.reported_prompt_tokens += usage.prompt_tokens or 0
        metrics.reported_cached_tokens += usage.cached_tokens or 0


class Bookkeeping:
    """What each API key used: counted, and written to the ledger's file now and then, in a thread."""

    def __init__(self, ledger: KeyLedger, metrics: Metrics) -> None:
        self._ledger, self._metrics = ledger, metrics
        self._writing = asyncio.Lock()
        self._failed = False
        self.lasts = ledger.lasts
        """There is a file."""

    def ended(self, exchange: Exchange) -> None:
        """Count what an exchange used, if a worker computed anything for it."""
        route, decision, told = exchange.route, exchange.decision, exchange.usage
        account = self._ledger.name(exchange.client.party)
        if route is None or decision is None or exchange.first_byte_s is None or account is None:
            return
        if exchange.outcome.startswith("status_") and exchange.outcome != "status_200":
            return
        use = Use(requests=1, prompt_tokens=route.prompt_tokens, cached_tokens=decision.predicted_cached_tokens)
        if told is None or told.prompt_tokens is None or told.completion_tokens is None:
            use.estimated, use.output_tokens = 1, exchange.progress.reads if route.stream else 0
        else:
            use.prompt_tokens, use.output_tokens = told.prompt_tokens, told.completion_tokens
            use.cached_tokens = told.cached_tokens or 0
        use.computed_tokens = max(0, use.prompt_tokens - use.cached_tokens)
        for name in NAMES:
            self._metrics.used[account, name] += getattr(use, name)
        self._ledger.note(account, use)

    async def write(self) -> None:
        """Add what is new to the file; what cannot be written is kept for the next time."""
        async with self._writing:
            rows = self._ledger.take()
            try:
                await asyncio.to_thread(self._ledger.write, rows)
                self._failed = False
            except sqlite3.Error as error:
                self._ledger.untake(rows)
                if not self._failed:
                    log.error("--ledger: cannot be written, what is new is kept until it can: %s", error)
                self._failed = True

    async def kept(self) -> dict[str, Use]:
        """What the file says, with what is new."""
        await self.write()
        return await asyncio.to_thread(self._ledger.kept)


def log_state(worker: Worker, before: WorkerState | None) -> None:
    """One line for each change of a worker's state."""
    level = logging.WARNING if worker.state is WorkerState.DOWN else logging.INFO
    old = "new" if before is None else before.value
    why = f": {worker.state_reason}" if worker.state_reason else ""
    log.log(level, "worker %s: %s -> %s%s", worker.worker_id, old, worker.state.value, why)


def request_fields(exchange: Exchange, now: float) -> dict[str, object]:
    """What the log says of a request."""
    route, decision, usage = exchange.route, exchange.decision, exchange.usage
    fields: dict[str, object] = {
        "request_id": exchange.trace_id.decode("latin-1"),
        "path": exchange.request.path,
        "outcome": exchange.outcome,
        "seconds": round(now - exchange.started_s, 4),
    }
    if exchange.first_byte_s is not None:
        fields["first_byte_seconds"] = round(exchange.first_byte_s - exchange.started_s, 4)
    if route is not None:
        fields |= {"model": route.model, "prompt_tokens": route.prompt_tokens, "stream": route.stream}
    if decision is not None:
        fields |= {
            "worker": decision.worker,
            "attempt": decision.attempt,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "predicted_ttft_seconds": round(decision.predicted_ttft_s, 4),
        }
    if usage is not None and usage.cached_tokens is not None:
        fields["cached_tokens"] = usage.cached_tokens
    return fields
