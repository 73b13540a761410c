"""What the core shows of itself: the rows of `/workers`, the sums behind `/metrics`. Values and their assembly only."""

from __future__ import annotations

from dataclasses import dataclass

from router.decide.engine_load import EngineLoad
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.decide.workers import Worker


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
    engine_load: EngineLoad | None
    """What its engine said last of its sequences and memory; None where it does not, or not lately."""
    others_requests: int
    """Of those, what no router of ours sent, as far as it is believed; counted in, too."""
    cache_tokens: int | None
    """What its KV cache holds: told, or as its events show it; None where neither is known."""
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


def worker_row(worker: Worker, target: Target, tracker: LoadTracker, alarms: list[str], now: float) -> WorkerSnapshot:
    """One target's row of `/workers`."""
    service, peer, claims, others = target.service, target.peer, target.claims, target.others()
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
        peer_prefilling=(peer.prefill_requests if peer else 0) - (others.prefill_requests if others else 0),
        peer_decoding=(peer.decode_requests if peer else 0) - (others.decode_requests if others else 0),
        engine_load=claims.load if claims is not None else None,
        others_requests=others.prefill_requests + others.decode_requests if others else 0,
        cache_tokens=target.capacity_tokens,
        queue_s=target.queue_s(now),
        utilisation=tracker.utilisation(target, now),
        slow=target.slow,
        learned={
            "prefill_s_per_token": service.prefill_s_per_token,
            "quadratic_tokens": service.quadratic_tokens,
            "step_s": service.step_s,
            "decode_request_s": service.decode_request_s,
            "load_factor": target.load.factor,
            "observations": target.speeds.observations(target.name),
        },
        routed=target.routed,
        predicted_cached_tokens=target.predicted_cached_tokens,
        reported_cached_tokens=target.reported_cached_tokens,
        alarms=alarms,
    )
