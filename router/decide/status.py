"""What the core shows of itself: the rows of `/workers`, the sums behind `/metrics`. Values and their assembly only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.decide.watchdog import Watchdog
from router.decide.workers import CacheView, Worker


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One row of `/workers`: a worker, or one data-parallel rank of it."""

    worker_id: str
    target: str
    url: str
    state: str
    state_reason: str
    models: list[str]
    roles: list[str]
    cache_view: str
    prefilling: int
    decoding: int
    peer_prefilling: int
    """What other routers have in flight there, as they told; `queue_s`, `utilisation` and `slow` count it in."""
    peer_decoding: int
    queue_s: float
    utilisation: float
    slow: float
    learned: dict[str, float]
    """prefill_s_per_token, quadratic_tokens, step_s, decode_request_s, observations."""
    routed: int
    predicted_cached_tokens: int
    reported_cached_tokens: int
    alarms: list[str]


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Everything `/workers` and `/metrics` show of the core."""

    workers: list[WorkerSnapshot]
    held: int
    in_flight: int
    counters: dict[str, int]


@dataclass(slots=True)
class Totals:
    """Running sums of a target since it was added."""

    routed: int = 0
    predicted_cached_tokens: int = 0
    reported_cached_tokens: int = 0


class Ledger:
    """Running sums of every target, and what the engines' own figures say of the predictions."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._totals: dict[str, Totals] = {}

    def routed(self, target: Target) -> None:
        """A request was sent there."""
        self._totals.setdefault(target.name, Totals()).routed += 1

    def finished(self, request: RouteRequest, decision: Decision, usage: ReportedUsage, worker: Worker | None) -> None:
        """Compare the engine's figures with what was predicted; `worker` is None where it was removed meanwhile."""
        if worker is None:
            return
        totals = self._totals.get(decision.terms.worker)
        if totals is not None and usage.cached_tokens is not None:
            totals.predicted_cached_tokens += decision.predicted_cached_tokens
            totals.reported_cached_tokens += usage.cached_tokens
        self._watchdog.finished(
            decision.worker,
            counted_tokens=request.prompt_tokens if request.token_ids is not None else None,
            prompt_tokens=usage.prompt_tokens,
            predicted_cached=decision.predicted_cached_tokens,
            cached_tokens=usage.cached_tokens,
            resident=decision.terms.resident_tokens,
            block_tokens=worker.spec.block_size,
        )

    def forget(self, worker_id: str, targets: Iterable[Target]) -> None:
        """The worker is removed."""
        for target in targets:
            self._totals.pop(target.name, None)
        self._watchdog.forget(worker_id)

    def row(self, worker: Worker, target: Target, tracker: LoadTracker, now: float) -> WorkerSnapshot:
        """One target's row of `/workers`."""
        totals = self._totals.get(target.name, Totals())
        service, peer = target.service, target.peer
        return WorkerSnapshot(
            worker_id=worker.worker_id,
            target=target.name,
            url=worker.spec.url,
            state=worker.state.value,
            state_reason=worker.state_reason,
            models=sorted(worker.models),
            roles=sorted(worker.spec.roles),
            cache_view=worker.spec.cache_view.value,
            prefilling=len(target.prefills),
            decoding=target.decode_requests,
            peer_prefilling=peer.prefill_requests if peer is not None else 0,
            peer_decoding=peer.decode_requests if peer is not None else 0,
            queue_s=target.queue_s(now),
            utilisation=tracker.utilisation(target, now),
            slow=target.slow,
            learned={
                "prefill_s_per_token": service.prefill_s_per_token,
                "quadratic_tokens": service.quadratic_tokens,
                "step_s": service.step_s,
                "decode_request_s": service.decode_request_s,
                "observations": target.speeds.observations(target.name),
            },
            routed=totals.routed,
            predicted_cached_tokens=totals.predicted_cached_tokens,
            reported_cached_tokens=totals.reported_cached_tokens,
            alarms=self._watchdog.alarms(worker.worker_id, expects_events=worker.spec.cache_view is CacheView.EVENTS),
        )
