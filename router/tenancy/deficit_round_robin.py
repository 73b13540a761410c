"""Deficit round robin between waiting queues, in predicted seconds; the quantum is one request.

The queue with the fewest served seconds sends the next request, and is charged the predicted time of that request
divided by the queue's share. A queue that begins to wait starts with the served seconds of the queue that sent last: it
saves up nothing while idle and pays nothing for requests that it sent while no other queue waited.

Invariants: the served seconds of two queues that always wait differ by at most one request of each. A queue that asks
for less than its share never waits for more than one request of every other queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

MAX_QUEUES: Final = 4096
"""Most queues without a waiting request that are stored."""


class DeficitRoundRobin:
    """Scheduler of the queues that wait for the same workers."""

    def __init__(self) -> None:
        self._served_s_by_queue: dict[str, float] = {}
        self._round_s = 0.0
        """Served seconds of the queue that sent last, before that request."""

    def get_served_s(self, queue: str) -> float:
        """Return the served seconds of a queue; the queue with the fewest sends next."""
        return max(self._served_s_by_queue.get(queue, 0.0), self._round_s)

    def charge(self, queue: str, request_s: float, waiting_queues: Iterable[str]) -> None:
        """Charge a queue for a request that was sent. `waiting_queues` are the queues with waiting requests."""
        at_s = self.get_served_s(queue)
        self._round_s = max(self._round_s, min([at_s, *map(self.get_served_s, waiting_queues)]))
        self._served_s_by_queue[queue] = at_s + request_s
        if len(self._served_s_by_queue) > MAX_QUEUES:
            self._served_s_by_queue = {
                name: served_s for name, served_s in self._served_s_by_queue.items() if served_s > self._round_s
            }

    def reset(self) -> None:
        """Forget all queues, as no request waits."""
        self._served_s_by_queue.clear()
        self._round_s = 0.0

    def merge_queues(self, requests_by_queue: Mapping[str, Iterable[tuple[str, float]]]) -> Iterator[str]:
        """Yield request ids in the order in which they are sent, from queues of (request id, seconds)."""
        queue_heads: list[tuple[float, int, str, float, Iterator[tuple[str, float]]]] = []
        for queue_index, (name, queue) in enumerate(requests_by_queue.items()):
            remaining_requests = iter(queue)
            for request_id, request_s in remaining_requests:
                queue_heads.append((self.get_served_s(name), queue_index, request_id, request_s, remaining_requests))
                break
        heapq.heapify(queue_heads)
        while queue_heads:
            served_s, queue_index, request_id, request_s, remaining_requests = queue_heads[0]
            yield request_id
            next_request = next(remaining_requests, None)
            if next_request is None:
                heapq.heappop(queue_heads)
            else:
                heapq.heapreplace(queue_heads, (served_s + request_s, queue_index, *next_request, remaining_requests))
