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
from typing import NamedTuple

TOLERANCE = 0.1
"""Relative distance from the target within which nothing changes."""


@dataclass(frozen=True)
class ScalingBounds:
    """Bounds and targets of autoscaling. Raises ValueError for impossible ones."""

    low: int
    high: int
    queue_s: float = 0.5
    """Wanted mean queue of a worker, in seconds of prefill."""
    prefill_share: float = 0.7
    """Wanted share of a worker's time that is prefill."""
    cool_down_s: float = 300.0
    """Time for which fewer workers must have been enough before one is stopped."""
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

    def clamp(self, worker_count: int) -> int:
        """Return the nearest allowed number of workers."""
        return min(max(worker_count, self.low), self.high)


@dataclass(frozen=True)
class WorkerLoad:
    """Load of one worker, as routers report it."""

    queue_s: float
    prefill_share: float
    """Share of the worker's time that is prefill."""


class ScalingDecision(NamedTuple):
    """How many workers there should be, and why."""

    next_state: Scaler
    worker_count: int
    reason: str


@dataclass(frozen=True)
class Scaler:
    """Decides the number of workers, by the present load and by what was needed in the last `cool_down_s`."""

    recent_needs: tuple[tuple[float, int], ...] = ()
    """(time, needed workers), oldest first, without needs that a later one exceeds."""
    started_at_s: float | None = None

    def decide(
        self,
        bounds: ScalingBounds,
        current_count: int,
        loads: Sequence[WorkerLoad],
        queued_request_count: int,
        now: float,
    ) -> ScalingDecision:
        """Decide how many workers there should be instead of `current_count`.

        Workers are added at once, but only when all are up that were asked for before. They are removed only to the
        highest number that was needed in the last `cool_down_s`. `loads` are those of the workers that are up.
        `queued_request_count` requests wait in routers, because all workers are busy.
        """
        needed_count, reason = count_needed_workers(bounds, loads, queued_request_count)
        started_at_s = now if self.started_at_s is None else self.started_at_s
        higher_needs = [
            (needed_at_s, count)
            for needed_at_s, count in self.recent_needs
            if now - needed_at_s <= bounds.cool_down_s and count > needed_count
        ]
        next_state = Scaler((*higher_needs, (now, needed_count)), started_at_s)
        are_all_up = len(loads) >= current_count
        if needed_count > current_count and are_all_up:
            return ScalingDecision(next_state, needed_count, reason)
        if needed_count < current_count and now - started_at_s >= bounds.cool_down_s:
            highest_need = max(count for _, count in next_state.recent_needs)
            if highest_need < current_count:
                reason = f"{reason}; at most {highest_need} in {bounds.cool_down_s:g} s"
                return ScalingDecision(next_state, highest_need, reason)
        return ScalingDecision(next_state, bounds.clamp(current_count), reason)


def count_needed_workers(
    bounds: ScalingBounds, loads: Sequence[WorkerLoad], queued_request_count: int
) -> tuple[int, str]:
    """Return how many workers bring queues and prefill to their targets, and a text with the reason.

    The number is in proportion to the load. If requests wait in routers, it is more than there are.
    """
    if not loads:
        return bounds.low, "no worker is up"
    worker_count = len(loads)
    mean_queue_s = sum(load.queue_s for load in loads) / worker_count
    mean_prefill_share = sum(load.prefill_share for load in loads) / worker_count
    reason = f"queue {mean_queue_s:.2f} s a worker, {mean_prefill_share:.0%} busy"
    load_ratio = max(mean_queue_s / bounds.queue_s, mean_prefill_share / bounds.prefill_share)
    needed_count = math.ceil(load_ratio * worker_count)
    if queued_request_count:
        reason += f", {queued_request_count} held"
        needed_count = max(needed_count, worker_count + 1)
    elif abs(load_ratio - 1) <= TOLERANCE:
        needed_count = worker_count
    return bounds.clamp(needed_count), reason
