"""Whose turn it is among those who wait: deficit round robin in predicted seconds, whose quantum is one request.

Owns what each line (a tenant's requests, or all of them) was given while there is pressure. The line that was given
least goes next, and is charged what its request is predicted to take, divided by its share. A line that comes anew
starts where the last turn was: nobody saves up turns while idle, and nobody pays for what it took while nobody else
waited. Invariants: of two lines that always wait, what they were given, each by its share, differs by no more than one
request of each; who asks for less than its share never waits for more than one request of every other line.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

MAX_QUEUES: Final = 4096
"""Remembered though nobody of them waits."""
Line = TypeVar("Line")


class DeficitRoundRobin:
    """All lines of one queue."""

    def __init__(self) -> None:
        self._served_s_by_queue: dict[str, float] = {}
        self._round_s = 0.0
        """What the line that went last had been given before."""

    def get_served_s(self, queue: str) -> float:
        """Seconds that a line counts as given; the least goes next."""
        return max(self._served_s_by_queue.get(queue, 0.0), self._round_s)

    def charge(self, queue: str, request_s: float, waiting_queues: Iterable[str]) -> None:
        """A request of it was sent. `waiting`: the lines in which somebody waits."""
        at_s = self.get_served_s(queue)
        self._round_s = max(self._round_s, min([at_s, *map(self.get_served_s, waiting_queues)]))
        self._served_s_by_queue[queue] = at_s + request_s
        if len(self._served_s_by_queue) > MAX_QUEUES:
            self._served_s_by_queue = {
                name: served_s for name, served_s in self._served_s_by_queue.items() if served_s > self._round_s
            }

    def reset(self) -> None:
        """Nobody waits any more."""
        self._served_s_by_queue.clear()
        self._round_s = 0.0

    def merge_queues(self, requests_by_queue: Mapping[str, Iterable[tuple[str, float]]]) -> Iterator[str]:
        """Requests in their order, of lines of (request, seconds)."""
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
