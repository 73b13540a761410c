"""How many workers there should be, by what the routers predict. Pure.

The signal is the router's own queue: seconds of prefill that are routed to a worker and not done, with what other
routers sent there. As many workers are wanted as bring its mean to `queue_s`, and the share of their time that is
prefill to `busy`. More are started at once, but not while others still start; fewer only when for all of `cool_s`
fewer were enough, and then as few as the busiest moment of that time needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.1
"""A mean so near to what it should be changes nothing."""


@dataclass(frozen=True)
class Bounds:
    """What autoscaling may do."""

    low: int
    high: int
    queue_s: float = 0.5
    busy: float = 0.7
    cool_s: float = 300.0
    dry: bool = False
    """Only say what would be done."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"autoscaling: got {self.low}:{self.high}, expected MIN:MAX with 1 <= MIN <= MAX")
        if not (self.queue_s > 0 and 0 < self.busy <= 1 and self.cool_s >= 0):
            raise ValueError(
                f"autoscaling: got queue {self.queue_s} s, busy {self.busy}, cool-down {self.cool_s} s; expected a "
                "positive queue, busy in (0, 1], no negative cool-down"
            )


@dataclass(frozen=True)
class Load:
    """One worker, as the routers see it."""

    queue_s: float
    busy: float
    """Prefill seconds a second."""


@dataclass(frozen=True)
class Scaler:
    """What was needed lately: (when, how many), oldest first."""

    needed: tuple[tuple[float, int], ...] = ()
    began_s: float | None = None

    def decide(
        self, bounds: Bounds, count: int, loads: Sequence[Load], held: int, now: float
    ) -> tuple[Scaler, int, str]:
        """(the next state, how many there should be, why). `count`: wanted now; `loads` of those that are up; `held`:
        requests that wait in routers because all are busy."""
        need, why = needed(bounds, loads, held)
        began = now if self.began_s is None else self.began_s
        kept = tuple(one for one in self.needed if now - one[0] <= bounds.cool_s)
        later = Scaler((*(one for one in kept if one[1] > need), (now, need)), began)  # only maxima matter
        if need > count and len(loads) >= count:
            return later, need, why
        if need < count and now - began >= bounds.cool_s:
            most = max(one for _, one in later.needed)
            if most < count:
                return later, most, f"{why}; at most {most} in {bounds.cool_s:g} s"
        return later, min(max(count, bounds.low), bounds.high), why


def needed(bounds: Bounds, loads: Sequence[Load], held: int) -> tuple[int, str]:
    """How many workers this load takes, and why."""
    if not loads:
        return bounds.low, "no worker is up"
    queue_s = sum(load.queue_s for load in loads)
    busy = sum(load.busy for load in loads)
    mean_s, part = queue_s / len(loads), busy / len(loads)
    ratio = max(mean_s / bounds.queue_s, part / bounds.busy)
    if held and ratio <= 1:
        ratio = 1 + 1 / len(loads)
    count = len(loads) if abs(ratio - 1) <= TOLERANCE and not held else math.ceil(ratio * len(loads))
    why = f"queue {mean_s:.2f} s a worker, {part:.0%} busy" + (f", {held} held" if held else "")
    return min(max(count, bounds.low), bounds.high), why
