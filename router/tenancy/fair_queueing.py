"""Start-time fair queueing (Goyal et al., 1996) between waiting queues, in predicted seconds.

Invariants: the served seconds of two queues that always wait differ by at most one request of each. A queue that asks
for less than its share never waits for more than one request of every other queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

MAX_QUEUES: Final = 4096
"""Number of stored queues beyond which those that are not ahead of the virtual time are dropped."""


class StartTimeFairQueueing:
    """Decides which of several queues sends the next request, so that each gets its share of the workers' time.

    The queue with the fewest served seconds (predicted time of its requests, divided by its share) sends next. A queue
    that begins to wait starts at the virtual time, so it saves up nothing while idle.
    """

    def __init__(self) -> None:
        self._served_s_by_queue: dict[str, float] = {}
        self._virtual_time_s = 0.0
        """Fewest served seconds of any waiting queue at the last request; a queue that begins to wait starts here."""

    def get_served_s(self, queue: str) -> float:
        """Return the served seconds of a queue, at least the virtual time; the queue with the fewest sends next."""
        return max(self._served_s_by_queue.get(queue, 0.0), self._virtual_time_s)

    def charge(self, queue: str, request_s: float, waiting_queues: Iterable[str]) -> None:
        """Charge a queue for a request that it sent, and advance the virtual time to the fewest served seconds.

        `request_s`: predicted time of the request, divided by the queue's share. `waiting_queues`: all that wait.
        """
        served_s = self.get_served_s(queue)
        fewest_served_s = min([served_s, *map(self.get_served_s, waiting_queues)])
        self._virtual_time_s = max(self._virtual_time_s, fewest_served_s)
        self._served_s_by_queue[queue] = served_s + request_s
        if len(self._served_s_by_queue) > MAX_QUEUES:
            # Queues that are not ahead of the virtual time start there anyway, so they need no entry.
            self._served_s_by_queue = {
                name: total_s for name, total_s in self._served_s_by_queue.items() if total_s > self._virtual_time_s
            }

    def reset(self) -> None:
        """Forget all queues, as no request waits."""
        self._served_s_by_queue.clear()
        self._virtual_time_s = 0.0

    def merge_queues(self, requests_by_queue: Mapping[str, Iterable[tuple[str, float]]]) -> Iterator[str]:
        """Yield request ids in the order in which they would be sent, from queues of (request id, seconds)."""

        def list_send_times(number: int, name: str) -> Iterator[tuple[float, int, str]]:
            """Yield (served seconds of the queue when it sends the request, number of the queue, request id)."""
            served_s = self.get_served_s(name)
            for request_id, request_s in requests_by_queue[name]:
                yield served_s, number, request_id
                served_s += request_s

        streams = [list_send_times(number, name) for number, name in enumerate(requests_by_queue)]
        for _, _, request_id in heapq.merge(*streams):
            yield request_id
