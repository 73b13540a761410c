"""Queue of requests that wait in the router: bounded, ordered, each request with a deadline.

Requests are ordered by priority and, within a priority, by arrival. With `fair` each tenant has a line of its own, and
router/tenancy/deficit_round_robin.py chooses between the lines. Background requests have lines of their own, which come
last.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from router.decide.config import QueueConfig
from router.tenancy.deficit_round_robin import DeficitRoundRobin

LOOKAHEAD_MAX: Final = 1024
"""Most queued requests that are examined to find those ahead of a new one."""


@dataclass(slots=True)
class _QueuedRequest:
    """A request in the queue."""

    sort_key: tuple[int, float, int]
    line_name: str
    is_background: bool
    deadline_s: float
    refuse_at_deadline: bool
    target: str
    prefill_s: float
    charge_s: float


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Everything that decides a request's place in the queue."""

    tenant: str
    is_background: bool
    priority: int
    arrived_s: float


_Line = list[tuple[tuple[int, float, int], str]]


class RequestQueue:
    """Requests that wait in the router, sorted in lines by tenant. The background has lines of its own.

    Invariant: the sorted lines and the dictionary have the same requests.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._requests: dict[str, _QueuedRequest] = {}
        self._lines: tuple[dict[str, _Line], dict[str, _Line]] = ({}, {})
        """tenant, or "" for all -> line, for waiting requests ([0]) and background requests ([1])."""
        self._tenant_schedulers = (DeficitRoundRobin(), DeficitRoundRobin())
        self._deadlines: list[tuple[float, str]] = []
        self._arrival_count = 0
        self.request_counts = [0, 0]
        """Number of waiting requests ([0]) and of background requests ([1])."""
        self.queued_prefill_s = 0.0
        """Prefill seconds of all waiting requests, without the background."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_full(self, position: QueuePosition) -> bool:
        """Return whether a request at this position has no place.

        Waiting and background requests each have the configured places. With `fair`, a tenant may take no more places
        than it leaves free for all others.
        """
        free_places = self._config.requests_max - self.request_counts[position.is_background]
        if self._config.fair and free_places > 0:
            return len(self._lines[position.is_background].get(position.tenant, ())) >= free_places
        return free_places <= 0

    def put(
        self,
        request_id: str,
        position: QueuePosition,
        *,
        target: str,
        prefill_s: float,
        charge_s: float,
        deadline_s: float,
        refuse_at_deadline: bool,
    ) -> None:
        """Queue a request for its cheapest target, or change the target of a queued one.

        `prefill_s`: its prefill there. `charge_s`: time that its tenant is charged when it is sent.
        `refuse_at_deadline`: whether it is refused at its deadline, or else forwarded to the cheapest worker.
        """
        queued_request, is_background = self._requests.get(request_id), position.is_background
        sort_key = (position.priority, position.arrived_s, self._arrival_count)
        if queued_request is not None:
            assert queued_request.sort_key[:2] == sort_key[:2], (
                f"queued request {request_id} has another place than before"
            )
            self._add_prefill(is_background, prefill_s - queued_request.prefill_s)
            queued_request.target, queued_request.prefill_s, queued_request.charge_s = target, prefill_s, charge_s
            return
        self._arrival_count += 1
        self._add_prefill(is_background, prefill_s)
        self.request_counts[is_background] += 1
        request = _QueuedRequest(
            sort_key,
            self._get_line_name(position),
            is_background,
            deadline_s,
            refuse_at_deadline,
            target,
            prefill_s,
            charge_s,
        )
        self._requests[request_id] = request
        heapq.heappush(self._deadlines, (deadline_s, request_id))
        bisect.insort(self._lines[is_background].setdefault(request.line_name, []), (sort_key, request_id))

    def remove(self, request_id: str) -> bool:
        """Remove a request from the queue; return whether it was there."""
        queued_request = self._requests.pop(request_id, None)
        if queued_request is None:
            return False
        is_background = queued_request.is_background
        self._remove_from_line(request_id, queued_request)
        self.request_counts[is_background] -= 1
        if not self._lines[is_background]:
            self._tenant_schedulers[is_background].reset()
        self._add_prefill(is_background, -queued_request.prefill_s)
        if not self.request_counts[0]:
            self.queued_prefill_s = 0.0  # rounding must not accumulate
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [(request.deadline_s, queued_id) for queued_id, request in self._requests.items()]
            heapq.heapify(self._deadlines)
        return True

    def charge(self, position: QueuePosition, charge_s: float) -> None:
        """Charge a tenant for a request that is sent while others wait, whether or not it was queued itself.

        Call it before `remove`, which forgets all charges with the last waiting request.
        """
        if self._config.fair and self.request_counts[position.is_background]:
            self._tenant_schedulers[position.is_background].charge(
                self._get_line_name(position), charge_s, self._lines[position.is_background]
            )

    def compute_prefill_ahead(self, position: QueuePosition) -> dict[str, float]:
        """Return target -> prefill seconds of the queued requests that would be sent there before a new request."""
        prefill_s_by_target: dict[str, float] = {}
        sort_key = (position.priority, position.arrived_s, self._arrival_count)
        line_name, max_requests = self._get_line_name(position), LOOKAHEAD_MAX
        request_id_iterators: list[Iterable[str]] = []
        for background in range(position.is_background + 1):
            lines, scheduler = self._lines[background], self._tenant_schedulers[background]
            if background < position.is_background:
                request_id_iterators.append(self._iter_request_ids(background))
                continue
            preceding_entries = list(itertools.takewhile(lambda entry: entry[0] <= sort_key, lines.get(line_name, ())))
            served_until_s = scheduler.get_served_s(line_name) + sum(
                self._requests[request_id].charge_s for _, request_id in preceding_entries[:max_requests]
            )
            request_id_iterators.append(request_id for _, request_id in preceding_entries)
            request_id_iterators += [
                self._iter_ids_served_before(line, scheduler.get_served_s(name), served_until_s)
                for name, line in lines.items()
                if name != line_name
            ]
        for request_id in itertools.islice(itertools.chain.from_iterable(request_id_iterators), max_requests):
            request = self._requests[request_id]
            prefill_s_by_target[request.target] = prefill_s_by_target.get(request.target, 0.0) + request.prefill_s
        return prefill_s_by_target

    def _iter_ids_served_before(self, line: _Line, served_s: float, end_s: float) -> Iterator[str]:
        """Yield the requests of a line that are served before the line's tenant was charged `end_s`."""
        for _, request_id in line:
            if served_s >= end_s:
                return
            yield request_id
            served_s += self._requests[request_id].charge_s

    def get_queued_target(self, request_id: str) -> tuple[str, float]:
        """Return the target of a queued request and its prefill seconds there."""
        request = self._requests[request_id]
        return request.target, request.prefill_s

    def get_next_request_ids(self, count: int) -> list[str]:
        """Return the next `count` waiting requests and the next `count` background requests."""
        return [
            *itertools.islice(self._iter_request_ids(0), count),
            *itertools.islice(self._iter_request_ids(1), count),
        ]

    def _iter_request_ids(self, background: int) -> Iterator[str]:
        lines = self._lines[background]
        if len(lines) == 1:
            return (request_id for (line,) in (lines.values(),) for _, request_id in line)
        charges_by_line = {
            name: ((item, self._requests[item].charge_s) for _, item in line) for name, line in lines.items()
        }
        return self._tenant_schedulers[background].merge_queues(charges_by_line)

    def pop_expired(self, now: float) -> list[tuple[str, bool]]:
        """Return the requests that have reached their deadlines, with `refuse_at_deadline`; the caller removes them."""
        refuse_by_id: dict[str, bool] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                refuse_by_id[request_id] = request.refuse_at_deadline  # a request that was queued twice is here twice
        return list(refuse_by_id.items())

    def next_deadline_s(self) -> float:
        """Return the earliest time at which `pop_expired` may find a request."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_invariants(self) -> None:
        """Assert that the lines are sorted and have the same requests as the dictionary."""
        request_ids: list[str] = []
        for background, lines in enumerate(self._lines):
            for name, line in lines.items():
                assert line, f"the line {name!r} is empty"
                assert sorted(line) == line
                assert all(self._requests[request_id].line_name == name for _, request_id in line)
                request_ids += [request_id for _, request_id in line]
            assert sum(map(len, lines.values())) == self.request_counts[background]
        assert len(request_ids) == len(set(request_ids))
        assert set(request_ids) == set(self._requests)
        waiting_prefills_s = (
            self._requests[request_id].prefill_s for line in self._lines[0].values() for _, request_id in line
        )
        assert math.isclose(self.queued_prefill_s, sum(waiting_prefills_s), abs_tol=1e-6)

    def _get_line_name(self, position: QueuePosition) -> str:
        return position.tenant if self._config.fair else ""

    def _add_prefill(self, background: bool, prefill_s: float) -> None:
        if not background:
            self.queued_prefill_s += prefill_s

    def _remove_from_line(self, request_id: str, request: _QueuedRequest) -> None:
        lines = self._lines[request.is_background]
        line = lines[request.line_name]
        position = bisect.bisect_left(line, (request.sort_key, request_id))
        assert line[position][1] == request_id, f"queued request {request_id} is not where its key says"
        del line[position]
        if not line:
            del lines[request.line_name]
