"""Queue of requests that wait in the router: bounded, ordered, each request with a deadline.

Waiting requests and background requests have a lane each; the background lane comes last. A lane has a queue for each
tenant, or a single one without `fair`. A tenant's requests are ordered by priority, then by the rank that an endpoint
picker gives them, then by arrival. router/tenancy/fair_queueing.py chooses between the tenants.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from router.decide.attempts import ActiveRequest
from router.decide.config import QueueConfig
from router.tenancy.fair_queueing import StartTimeFairQueueing

LOOKAHEAD_MAX: Final = 1024
"""Most queued requests that are examined to find those ahead of a new one."""

SortKey = tuple[int, int, float, int]
"""Priority, rank among equal priorities, time of arrival, and number of requests that were queued before."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue, with the target that was cheapest when it was last tried."""

    active_request: ActiveRequest
    tenant: str
    """Tenant of the request; "" without `fair`, so that all share a queue."""
    sort_key: SortKey
    deadline_s: float
    target: str
    """Name of the target (a worker, or a rank of one) that was cheapest when the request was last tried."""
    prefill_s: float
    """Expected seconds of prefill at the target."""
    charge_s: float
    """Expected work in seconds that counts against the tenant's fair share once the request is sent."""

    @property
    def request_id(self) -> str:
        return self.active_request.request.request_id


_get_sort_key = attrgetter("sort_key")


class _Lane:
    """Requests that wait, in a sorted queue for each tenant. A scheduler chooses between the tenants.

    When a request is sent, its tenant is charged `charge_s`, and the tenant with the least charges sends next.
    """

    def __init__(self) -> None:
        self.tenant_queues: dict[str, list[QueuedRequest]] = {}
        """Queue of each tenant that has requests here; the one of "" without `fair`. None is empty."""
        self.scheduler = StartTimeFairQueueing()
        self.request_count = 0
        self.prefill_s = 0.0
        """Prefill seconds of all requests, each at its target."""

    def insert(self, request: QueuedRequest) -> None:
        """Insert a request into its tenant's queue."""
        bisect.insort(self.tenant_queues.setdefault(request.tenant, []), request, key=_get_sort_key)
        self.request_count += 1
        self.prefill_s += request.prefill_s

    def move(self, request: QueuedRequest, *, target: str, prefill_s: float, charge_s: float) -> None:
        """Have a request wait for another target, without losing its place."""
        self.prefill_s += prefill_s - request.prefill_s
        request.target, request.prefill_s, request.charge_s = target, prefill_s, charge_s

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request from its tenant's queue; the last one of all resets the scheduler."""
        tenant_queue = self.tenant_queues[request.tenant]
        place = bisect.bisect_left(tenant_queue, request.sort_key, key=_get_sort_key)
        assert tenant_queue[place] is request, f"queued request {request.request_id} is not where its key says"
        del tenant_queue[place]
        if not tenant_queue:
            del self.tenant_queues[request.tenant]
        self.request_count -= 1
        self.prefill_s = self.prefill_s - request.prefill_s if self.request_count else 0.0  # no rounding is left over
        if not self.tenant_queues:
            self.scheduler.reset()

    def iter_in_turn(self) -> Iterator[str]:
        """Yield the ids of all requests in the order in which they are served."""
        if len(self.tenant_queues) == 1:
            (only_queue,) = self.tenant_queues.values()
            return (request.request_id for request in only_queue)
        return self.scheduler.merge_queues(
            {
                tenant: ((request.request_id, request.charge_s) for request in tenant_queue)
                for tenant, tenant_queue in self.tenant_queues.items()
            }
        )

    def iter_ahead(self, tenant: str, sort_key: SortKey) -> Iterator[QueuedRequest]:
        """Yield the requests that will be sent before a new request: those of its tenant, then those of others.

        The tenant with the fewest served seconds sends next. For example, nothing was served yet, and the tenant has
        two requests of 3 s before the new one. Then another tenant with requests of 4 s sends two of them before it.
        """
        own_queue = self.tenant_queues.get(tenant, ())
        own_requests = list(itertools.takewhile(lambda request: request.sort_key <= sort_key, own_queue))
        yield from own_requests
        charged_s = sum(request.charge_s for request in own_requests[:LOOKAHEAD_MAX])  # bounded, to save time
        own_served_s = self.scheduler.get_served_s(tenant) + charged_s
        for other_tenant, other_queue in self.tenant_queues.items():
            if other_tenant == tenant:
                continue
            served_s = self.scheduler.get_served_s(other_tenant)
            for request in other_queue:
                if served_s >= own_served_s:
                    break
                yield request
                served_s += request.charge_s


class RequestQueue:
    """Requests that wait in the router: in one lane for their tenant's turn, in another for an idle worker.

    Invariant: the lanes and the dictionary have the same requests.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self.requests: dict[str, QueuedRequest] = {}
        """Queued requests by id."""
        self._waiting, self._background = _Lane(), _Lane()
        self._deadlines: list[tuple[float, str]] = []
        """Heap of (deadline, request id); requests that were removed stay in it for a while."""
        self._arrival_count = 0

    @property
    def waiting_count(self) -> int:
        """Number of queued requests, without the background."""
        return self._waiting.request_count

    @property
    def waiting_prefill_s(self) -> float:
        """Prefill seconds of all queued requests, without the background."""
        return self._waiting.prefill_s

    def is_full(self, active_request: ActiveRequest) -> bool:
        """Return whether there is no place for a request.

        Waiting and background requests each have the configured places. With `fair`, a tenant may take no more places
        than it leaves free for all others.
        """
        lane = self._get_lane(active_request)
        free_places = self._config.requests_max - lane.request_count
        if self._config.fair and free_places > 0:
            return len(lane.tenant_queues.get(self._get_tenant(active_request), ())) >= free_places
        return free_places <= 0

    def add(self, active_request: ActiveRequest, *, target: str, prefill_s: float, charge_s: float) -> None:
        """Queue a new request for a target. The other arguments are those of `QueuedRequest`.

        The request waits for its turn until its own deadline, or else for the longest wait of the configuration.
        """
        config, request = self._config, active_request.request
        deadline_s = request.deadline_s
        if deadline_s is None:
            max_wait_s = config.background_wait_s_max if active_request.is_background else config.wait_s_max
            deadline_s = active_request.arrived_s + max_wait_s
        tenant, sort_key = self._get_tenant(active_request), self._make_sort_key(active_request)
        queued_request = QueuedRequest(active_request, tenant, sort_key, deadline_s, target, prefill_s, charge_s)
        self._arrival_count += 1
        self.requests[request.request_id] = queued_request
        self._get_lane(active_request).insert(queued_request)
        heapq.heappush(self._deadlines, (deadline_s, request.request_id))

    def move(self, request_id: str, *, target: str, prefill_s: float, charge_s: float) -> None:
        """Have a queued request wait for another target, which is cheapest now. The request keeps its place."""
        request = self.requests[request_id]
        lane = self._get_lane(request.active_request)
        lane.move(request, target=target, prefill_s=prefill_s, charge_s=charge_s)

    def remove(self, request_id: str) -> None:
        """Remove a request from the queue, if it is there."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self._get_lane(request.active_request).remove(request)
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [(request.deadline_s, queued_id) for queued_id, request in self.requests.items()]
            heapq.heapify(self._deadlines)

    def record_sent(self, active_request: ActiveRequest, charge_s: float) -> None:
        """Remove a request that is sent now, if it is queued, and charge its tenant for it if any request waits."""
        lane = self._get_lane(active_request)
        if self._config.fair and lane.request_count:
            lane.scheduler.charge(self._get_tenant(active_request), charge_s, lane.tenant_queues)
        self.remove(active_request.request.request_id)  # later than the charge: the last one resets all charges

    def compute_prefill_ahead(self, active_request: ActiveRequest) -> dict[str, float]:
        """Return target -> prefill seconds of the queued requests that would be sent there before a new request."""
        lane, tenant = self._get_lane(active_request), self._get_tenant(active_request)
        requests: Iterable[QueuedRequest] = lane.iter_ahead(tenant, self._make_sort_key(active_request))
        if active_request.is_background:
            waiting_requests = (self.requests[request_id] for request_id in self._waiting.iter_in_turn())
            requests = itertools.chain(waiting_requests, requests)
        prefill_s_by_target: dict[str, float] = {}
        for request in itertools.islice(requests, LOOKAHEAD_MAX):
            prefill_s_by_target[request.target] = prefill_s_by_target.get(request.target, 0.0) + request.prefill_s
        return prefill_s_by_target

    def get_next_request_ids(self, count: int) -> list[str]:
        """Return the next `count` waiting requests and the next `count` background requests."""
        return [
            *itertools.islice(self._waiting.iter_in_turn(), count),
            *itertools.islice(self._background.iter_in_turn(), count),
        ]

    def pop_expired(self, now: float) -> Iterator[ActiveRequest]:
        """Remove and yield the requests that have reached their deadlines, one after the other."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                self.remove(request_id)
                yield request.active_request

    def next_deadline_s(self) -> float:
        """Return the earliest time at which `pop_expired` may find a request."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def check_invariants(self) -> None:
        """Assert that the tenants' queues are sorted and have the same requests as the dictionary."""
        request_ids: list[str] = []
        for lane in (self._waiting, self._background):
            for tenant, tenant_queue in lane.tenant_queues.items():
                assert tenant_queue, f"the queue of {tenant!r} is empty"
                assert sorted(tenant_queue, key=_get_sort_key) == tenant_queue
                assert all(self._get_tenant(request.active_request) == tenant for request in tenant_queue)
                request_ids += [request.request_id for request in tenant_queue]
            assert sum(map(len, lane.tenant_queues.values())) == lane.request_count
            prefills_s = (request.prefill_s for queue in lane.tenant_queues.values() for request in queue)
            assert math.isclose(lane.prefill_s, sum(prefills_s), abs_tol=1e-6)
        assert len(request_ids) == len(set(request_ids))
        assert set(request_ids) == set(self.requests)

    def _get_lane(self, active_request: ActiveRequest) -> _Lane:
        return self._background if active_request.is_background else self._waiting

    def _get_tenant(self, active_request: ActiveRequest) -> str:
        return active_request.request.tenant if self._config.fair else ""

    def _make_sort_key(self, active_request: ActiveRequest) -> SortKey:
        request = active_request.request
        return request.priority, request.queue_rank, active_request.arrived_s, self._arrival_count
