"""How many workers there should be, by what the routers predict. No I/O.

The signal is the router's own queue: seconds of prefill that are routed to a worker and not done, with what other
routers sent there. As many workers are wanted as bring its mean to `queue_s`, and the share of their time that is
prefill to `prefill_share`. More are started at once, but not while others still start. Fewer are wanted only when
fewer were enough for all of `cool_down_s`, and then as few as the busiest moment of that time needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.1
"""Relative distance from the target within which nothing changes."""


@dataclass(frozen=True)
class ScalingBounds:
    """Bounds and targets of autoscaling."""

    low: int
    high: int
    queue_s: float = 0.5
    prefill_share: float = 0.7
    cool_down_s: float = 300.0
    is_dry_run: bool = False
    """Whether decisions are only reported."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"autoscaling: got {self.low}:{self.high}, expected MIN:MAX with 1 <= MIN <= MAX")
        if not (self.queue_s > 0 and 0 < self.prefill_share <= 1 and self.cool_down_s >= 0):
            raise ValueError(
                f"autoscaling: got queue {self.queue_s} s, busy {self.prefill_share}, cool-down {self.cool_down_s} s; "
                "expected a positive queue, busy in (0, 1], no negative cool-down"
            )


@dataclass(frozen=True)
class WorkerLoad:
    """Load of one worker, as routers report it."""

    queue_s: float
    prefill_share: float
    """Share of the worker's time that is prefill."""


@dataclass(frozen=True)
class Scaler:
    """Recent needs, as (time, worker count), oldest first."""

    recent_needs: tuple[tuple[float, int], ...] = ()
    started_at_s: float | None = None

    def decide(
        self,
        bounds: ScalingBounds,
        current_count: int,
        loads: Sequence[WorkerLoad],
        queued_request_count: int,
        now: float,
    ) -> tuple[Scaler, int, str]:
        """Decide how many workers there should be; return the next state, that count and the reason.

        `current_count` is the present target, `loads` are of the workers that are up, `queued_request_count` requests
        wait in routers because all workers are busy.
        """
        needed_count, reason = count_needed_workers(bounds, loads, queued_request_count)
        started_at_s = now if self.started_at_s is None else self.started_at_s
        recent_needs = tuple(
            (needed_at_s, needed_count)
            for needed_at_s, needed_count in self.recent_needs
            if now - needed_at_s <= bounds.cool_down_s
        )
        higher_needs = (need for need in recent_needs if need[1] > needed_count)  # only maxima matter
        next_state = Scaler((*higher_needs, (now, needed_count)), started_at_s)
        if needed_count > current_count and len(loads) >= current_count:
            return next_state, needed_count, reason
        if needed_count < current_count and now - started_at_s >= bounds.cool_down_s:
            highest_need = max(workers for _, workers in next_state.recent_needs)
            if highest_need < current_count:
                return next_state, highest_need, f"{reason}; at most {highest_need} in {bounds.cool_down_s:g} s"
        return next_state, min(max(current_count, bounds.low), bounds.high), reason


def count_needed_workers(
    bounds: ScalingBounds, loads: Sequence[WorkerLoad], queued_request_count: int
) -> tuple[int, str]:
    """Return how many workers this load needs, and why."""
    if not loads:
        return bounds.low, "no worker is up"
    queue_s = sum(load.queue_s for load in loads)
    prefill_share = sum(load.prefill_share for load in loads)
    mean_queue_s, mean_prefill_share = queue_s / len(loads), prefill_share / len(loads)
    load_ratio = max(mean_queue_s / bounds.queue_s, mean_prefill_share / bounds.prefill_share)
    if queued_request_count and load_ratio <= 1:
        load_ratio = 1 + 1 / len(loads)
    worker_count = (
        len(loads)
        if abs(load_ratio - 1) <= TOLERANCE and not queued_request_count
        else math.ceil(load_ratio * len(loads))
    )
    reason = f"queue {mean_queue_s:.2f} s a worker, {mean_prefill_share:.0%} busy" + (
        f", {queued_request_count} held" if queued_request_count else ""
    )
    return min(max(worker_count, bounds.low), bounds.high), reason
