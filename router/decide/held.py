"""Requests that the core knows: how often each may be tried again, and those that wait in the router: bounded, in the
order in which they should be tried, each with a deadline.

The order of trying is ascending `P * slow - gamma * waited` inside a priority. As every request waits at the same pace,
`P * slow + gamma * arrived` gives the same order and does not change with time, so a sorted list serves.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass

from router.decide.config import QueueConfig, RetryConfig
from router.decide.messages import Decision, FailureKind, Refuse, RouteRequest

AHEAD_MAX = 1024
"""Held requests looked at to see what is ahead of a new one; beyond it the line is long wherever it stands."""
_BUDGET_TIMES = 10.0
"""The retry budget grows to at most so many times its least."""


@dataclass(slots=True)
class Live:
    """A request that is held or in flight."""

    request: RouteRequest
    arrived_s: float
    explain: bool
    """Whether its decisions carry every candidate's terms."""
    attempt: int = 0
    tried: frozenset[str] = frozenset()
    decision: Decision | None = None
    """Set while in flight."""
    first_token_seen: bool = False
    internal_errors: int = 0
    """Workers that answered 500."""


class RetryBudget:
    """Retries that may still be made: each request adds a part of one, so that a storm of failures is not doubled."""

    def __init__(self, config: RetryConfig) -> None:
        self._attempts_max, self._ratio = config.attempts_max, config.budget_ratio
        self._left = float(config.budget_min)
        self._most = _BUDGET_TIMES * max(config.budget_min, 1)

    def arrived(self) -> None:
        """A new request came."""
        self._left = min(self._left + self._ratio, self._most)

    def take(self, attempt: int) -> bool:
        """Take one retry of a request that was tried `attempt` times; False where there is none left for it."""
        if attempt >= self._attempts_max or self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def gave_up(request_id: str, kind: FailureKind, retry_after_s: float) -> Refuse:
    """The answer where no other worker could be tried."""
    status, code = 502, "upstream_failed"
    if kind is FailureKind.OVERLOADED:
        status, code = 429, "upstream_overloaded"
    elif kind is FailureKind.TIMEOUT:
        status, code = 504, "upstream_timeout"
    message = f"The worker failed ({kind.value}) and no other could be tried."
    return Refuse(request_id, status, code, message, retry_after_s)


@dataclass(slots=True)
class _Held:
    key: tuple[int, float, int]
    deadline_s: float
    refuse: bool
    target: str
    prefill_s: float


class HeldQueue:
    """Invariant: the sorted list and the dict hold the same requests."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._held: dict[str, _Held] = {}
        self._order: list[tuple[tuple[int, float, int], str]] = []
        self._deadlines: list[tuple[float, str]] = []
        self._count = 0
        self.prefill_s = 0.0
        """Sum of P over all that is held."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def full(self) -> bool:
        return len(self._held) >= self._config.requests_max

    def put(
        self,
        request_id: str,
        *,
        target: str,
        prefill_s: float,
        work_s: float,
        priority: int,
        arrived_s: float,
        deadline_s: float,
        refuse: bool,
    ) -> None:
        """Hold it for `target` (P there, and P * slow), or move it in the order when it is held already. `refuse`: at
        its deadline it is refused, else forwarded to the cheapest worker."""
        known = self._held.get(request_id)
        order = known.key[2] if known is not None else self._count
        self._count += 1
        key = (priority, work_s + self._config.gamma * arrived_s, order)
        if known is not None:
            self.prefill_s += prefill_s - known.prefill_s
            known.target, known.prefill_s = target, prefill_s
            if known.key == key:
                return
            self._unlist(request_id, known)
            known.key = key
        else:
            self.prefill_s += prefill_s
            self._held[request_id] = _Held(key, deadline_s, refuse, target, prefill_s)
            heapq.heappush(self._deadlines, (deadline_s, request_id))
        bisect.insort(self._order, (key, request_id))

    def drop(self, request_id: str) -> bool:
        """Take it out, wherever it goes; False where it was not held."""
        known = self._held.pop(request_id, None)
        if known is None:
            return False
        self._unlist(request_id, known)
        # Recomputed when empty, so that rounding never accumulates.
        self.prefill_s = self.prefill_s - known.prefill_s if self._held else 0.0
        if len(self._deadlines) > 2 * len(self._held) + 64:
            self._deadlines = [(held.deadline_s, rid) for rid, held in self._held.items()]
            heapq.heapify(self._deadlines)
        return True

    def ahead_of(self, priority: int, work_s: float, arrived_s: float) -> dict[str, float]:
        """target -> seconds of prefill held for it that would be tried before such a request."""
        key = (priority, work_s + self._config.gamma * arrived_s, self._count)
        found: dict[str, float] = {}
        for other, request_id in itertools.islice(self._order, AHEAD_MAX):
            if other > key:
                break
            held = self._held[request_id]
            found[held.target] = found.get(held.target, 0.0) + held.prefill_s
        return found

    def held_for(self, request_id: str) -> tuple[str, float]:
        """(target, P there) of a held request."""
        held = self._held[request_id]
        return held.target, held.prefill_s

    def first(self, count: int) -> list[str]:
        """The next `count` to try."""
        return [request_id for _, request_id in self._order[:count]]

    def due(self, now: float) -> list[tuple[str, bool]]:
        """(request, refuse) of those whose deadline has come; the caller drops them."""
        found: list[tuple[str, bool]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            held = self._held.get(request_id)
            if held is not None and held.deadline_s == deadline_s:
                found.append((request_id, held.refuse))
        return found

    def next_deadline(self) -> float:
        """Earliest time at which `due` may find something."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_invariants(self) -> None:
        """The list and the dict agree and the list is sorted."""
        assert sorted(self._order) == self._order
        assert {request_id for _, request_id in self._order} == set(self._held)
        assert len(self._order) == len(self._held)
        assert math.isclose(self.prefill_s, sum(held.prefill_s for held in self._held.values()), abs_tol=1e-6)

    def _unlist(self, request_id: str, held: _Held) -> None:
        i = bisect.bisect_left(self._order, (held.key, request_id))
        assert self._order[i][1] == request_id, f"held request {request_id} is not where its key says"
        del self._order[i]
