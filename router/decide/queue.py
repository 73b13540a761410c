"""Requests that the core knows: how often each may be tried again, and those that wait in the router: bounded, in the
order in which they should be tried, each with a deadline.

Requests are tried in the order of their priorities, and of their arrival inside a priority. With `fair` each tenant has
a list of its own, and router/tenancy/fair.py says whose turn it is. What is in the background has lists of its own,
which come last.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from router.decide.config import QueueConfig, RetryConfig
from router.decide.messages import Decision, FailureKind, Refuse, RouteRequest
from router.tenancy.fair import FairTurns

AHEAD_MAX: Final = 1024
"""Held requests looked at to see what is ahead of a new one; beyond it the line is long wherever it stands."""
TENANTS_MAX: Final = 4096
"""Tenants whose retries are counted; who asked longest ago begins anew."""
_BUDGET_TIMES: Final = 10.0
"""The retry budget grows to at most so many times its least."""


class ActiveRequest(msgspec.Struct, eq=False):
    """A request that is held or in flight."""

    request: RouteRequest
    arrived_s: float
    explain: bool
    """Its decisions carry every candidate's terms."""
    attempt: int = 0
    tried: frozenset[str] = frozenset()
    decision: Decision | None = None
    """Set while in flight."""
    first_token_seen: bool = False
    suspicions: int = 0
    """Workers that this very request may have ended, or makes fail."""


class RetryBudget:
    """Retries that may still be made, of each tenant: each request adds a part of one, so that a storm of failures is
    not doubled, and no tenant's failures use up the retries of the others."""

    def __init__(self, config: RetryConfig) -> None:
        self._attempts_max, self._ratio = config.attempts_max, config.budget_ratio
        self._least = float(config.budget_min)
        self._most = _BUDGET_TIMES * max(config.budget_min, 1)
        self._left: OrderedDict[str, float] = OrderedDict()
        """Tenant -> retries; the one that asked longest ago is first."""

    def __len__(self) -> int:
        return len(self._left)

    def arrived(self, tenant: str) -> None:
        """A new request came."""
        self._put(tenant, min(self._left.get(tenant, self._least) + self._ratio, self._most))

    def take(self, tenant: str, attempt: int) -> bool:
        """Take one retry of a request that was tried `attempt` times; False where there is none left for it."""
        if not self.has_one(tenant, attempt):
            return False
        self._put(tenant, self._left.get(tenant, self._least) - 1.0)
        return True

    def has_one(self, tenant: str, attempt: int) -> bool:
        """Whether `take` would."""
        return attempt < self._attempts_max and self._left.get(tenant, self._least) >= 1.0

    def _put(self, tenant: str, left: float) -> None:
        self._left[tenant] = left
        self._left.move_to_end(tenant)
        if len(self._left) > TENANTS_MAX:
            self._left.popitem(last=False)


def gave_up(request_id: str, kind: FailureKind, retry_after_s: float) -> Refuse:
    """The answer where no other worker could be tried."""
    status, code = 502, "upstream_failed"
    if kind is FailureKind.OVERLOADED:
        status, code = 429, "upstream_overloaded"
    elif kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        status, code = 504, "upstream_timeout"
    message = f"The worker failed ({kind.value}) and no other could be tried."
    return Refuse(request_id, status, code, message, retry_after_s)


@dataclass(slots=True)
class _QueuedRequest:
    key: tuple[int, float, int]
    line: str
    background: bool
    deadline_s: float
    refuse: bool
    target: str
    prefill_s: float
    charge_s: float


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where in the queue a request belongs."""

    tenant: str
    background: bool
    priority: int
    arrived_s: float


_Line = list[tuple[tuple[int, float, int], str]]


class RequestQueue:
    """Invariant: the sorted lists and the dict hold the same requests."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._held: dict[str, _QueuedRequest] = {}
        self._lines: tuple[dict[str, _Line], dict[str, _Line]] = ({}, {})
        """Of those who wait, and of the background: tenant, or "" for all -> its requests."""
        self._turns = (FairTurns(), FairTurns())
        self._deadlines: list[tuple[float, str]] = []
        self._count = 0
        self.counts = [0, 0]
        """Requests that wait, and those of the background."""
        self.prefill_s = 0.0
        """Sum of P over all that is held, but for the background."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def full(self, place: QueuePosition) -> bool:
        """Each of the two has its bound, so that neither keeps the other out; and with `fair` no tenant waits with more
        than are left for all others."""
        left = self._config.requests_max - self.counts[place.background]
        if self._config.fair and left > 0:
            return len(self._lines[place.background].get(place.tenant, ())) >= left
        return left <= 0

    def put(
        self,
        request_id: str,
        place: QueuePosition,
        *,
        target: str,
        prefill_s: float,
        charge_s: float,
        deadline_s: float,
        refuse: bool,
    ) -> None:
        """Hold it for `target` (P there), or for another target when it is held already. `charge_s`: what its turn
        costs its tenant. `refuse`: at its deadline it is refused, else forwarded to the cheapest worker."""
        known, background = self._held.get(request_id), place.background
        key = (place.priority, place.arrived_s, self._count)
        if known is not None:
            assert known.key[:2] == key[:2], f"held request {request_id} has another place than before"
            self._add(background, prefill_s - known.prefill_s)
            known.target, known.prefill_s, known.charge_s = target, prefill_s, charge_s
            return
        self._count += 1
        self._add(background, prefill_s)
        self.counts[background] += 1
        held = _QueuedRequest(key, self._line(place), background, deadline_s, refuse, target, prefill_s, charge_s)
        self._held[request_id] = held
        heapq.heappush(self._deadlines, (deadline_s, request_id))
        bisect.insort(self._lines[background].setdefault(held.line, []), (key, request_id))

    def drop(self, request_id: str) -> bool:
        """Take it out, wherever it goes; False where it was not held."""
        known = self._held.pop(request_id, None)
        if known is None:
            return False
        background = known.background
        self._unlist(request_id, known)
        self.counts[background] -= 1
        if not self._lines[background]:
            self._turns[background].over()
        self._add(background, -known.prefill_s)
        if not self.counts[0]:
            self.prefill_s = 0.0  # so that rounding never accumulates
        if len(self._deadlines) > 2 * len(self._held) + 64:
            self._deadlines = [(held.deadline_s, rid) for rid, held in self._held.items()]
            heapq.heapify(self._deadlines)
        return True

    def sent(self, place: QueuePosition, charge_s: float) -> None:
        """A request was sent, whether or not it was held, while others wait: its tenant has had a turn. Call it before
        `drop`, which forgets all turns with the last who waits."""
        if self._config.fair and self.counts[place.background]:
            self._turns[place.background].charge(self._line(place), charge_s, self._lines[place.background])

    def ahead_of(self, place: QueuePosition) -> dict[str, float]:
        """target -> seconds of prefill held for it that would be tried before such a request."""
        found: dict[str, float] = {}
        key = (place.priority, place.arrived_s, self._count)
        own, left = self._line(place), AHEAD_MAX
        before: list[Iterable[str]] = []
        for background in range(place.background + 1):
            lines, turns = self._lines[background], self._turns[background]
            if background < place.background:
                before.append(self._in_turn(background))
                continue
            mine = list(itertools.takewhile(lambda one: one[0] <= key, lines.get(own, ())))
            at_s = turns.at(own) + sum(self._held[request_id].charge_s for _, request_id in mine[:left])
            before.append(request_id for _, request_id in mine)
            before += [self._until(line, turns.at(name), at_s) for name, line in lines.items() if name != own]
        for request_id in itertools.islice(itertools.chain.from_iterable(before), left):
            held = self._held[request_id]
            found[held.target] = found.get(held.target, 0.0) + held.prefill_s
        return found

    def _until(self, line: _Line, at_s: float, end_s: float) -> Iterator[str]:
        """Those of a line whose turn comes before a line that has been given `end_s`."""
        for _, request_id in line:
            if at_s >= end_s:
                return
            yield request_id
            at_s += self._held[request_id].charge_s

    def held_for(self, request_id: str) -> tuple[str, float]:
        """(target, P there) of a held request."""
        held = self._held[request_id]
        return held.target, held.prefill_s

    def first(self, count: int) -> list[str]:
        """The next `count` to try, and of the background as many besides: it may find room where the others do not."""
        return [*itertools.islice(self._in_turn(0), count), *itertools.islice(self._in_turn(1), count)]

    def _in_turn(self, background: int) -> Iterator[str]:
        lines = self._lines[background]
        if len(lines) == 1:
            return (request_id for (line,) in (lines.values(),) for _, request_id in line)
        costs = {name: ((one, self._held[one].charge_s) for _, one in line) for name, line in lines.items()}
        return self._turns[background].merged(costs)

    def due(self, now: float) -> list[tuple[str, bool]]:
        """(request, refuse) of those whose deadline has come; the caller drops them."""
        found: dict[str, bool] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            held = self._held.get(request_id)
            if held is not None and held.deadline_s == deadline_s:
                found[request_id] = held.refuse  # a request that came back to the queue stands here twice
        return list(found.items())

    def next_deadline(self) -> float:
        """Earliest time at which `due` may find something."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_invariants(self) -> None:
        """The lists and the dict agree and the lists are sorted."""
        listed: list[str] = []
        for background, lines in enumerate(self._lines):
            for name, line in lines.items():
                assert line, f"the line {name!r} is empty"
                assert sorted(line) == line
                assert all(self._held[request_id].line == name for _, request_id in line)
                listed += [request_id for _, request_id in line]
            assert sum(map(len, lines.values())) == self.counts[background]
        assert len(listed) == len(set(listed))
        assert set(listed) == set(self._held)
        waiting = (self._held[request_id].prefill_s for line in self._lines[0].values() for _, request_id in line)
        assert math.isclose(self.prefill_s, sum(waiting), abs_tol=1e-6)

    def _line(self, place: QueuePosition) -> str:
        return place.tenant if self._config.fair else ""

    def _add(self, background: bool, prefill_s: float) -> None:
        if not background:
            self.prefill_s += prefill_s

    def _unlist(self, request_id: str, held: _QueuedRequest) -> None:
        lines = self._lines[held.background]
        line = lines[held.line]
        i = bisect.bisect_left(line, (held.key, request_id))
        assert line[i][1] == request_id, f"held request {request_id} is not where its key says"
        del line[i]
        if not line:
            del lines[held.line]
