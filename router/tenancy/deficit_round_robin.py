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
        self._served_s: dict[str, float] = {}
        self._round_s = 0.0
        """What the line that went last had been given before."""

    def served_s(self, queue: str) -> float:
        """Seconds that a line counts as given; the least goes next."""
        return max(self._served_s.get(queue, 0.0), self._round_s)

    def charge(self, queue: str, seconds: float, waiting: Iterable[str]) -> None:
        """A request of it was sent. `waiting`: the lines in which somebody waits."""
        at_s = self.served_s(queue)
        self._round_s = max(self._round_s, min([at_s, *map(self.served_s, waiting)]))
        self._served_s[queue] = at_s + seconds
        if len(self._served_s) > MAX_QUEUES:
            self._served_s = {name: served_s for name, served_s in self._served_s.items() if served_s > self._round_s}

    def reset(self) -> None:
        """Nobody waits any more."""
        self._served_s.clear()
        self._round_s = 0.0

    def merge(self, queues: Mapping[str, Iterable[tuple[str, float]]]) -> Iterator[str]:
        """Requests in their order, of lines of (request, seconds)."""
        heads: list[tuple[float, int, str, float, Iterator[tuple[str, float]]]] = []
        for number, (name, queue) in enumerate(queues.items()):
            remaining = iter(queue)
            for request_id, seconds in remaining:
                heads.append((self.served_s(name), number, request_id, seconds, remaining))
                break
        heapq.heapify(heads)
        while heads:
            at_s, number, request_id, seconds, remaining = heads[0]
            yield request_id
            following = next(remaining, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (at_s + seconds, number, *following, remaining))
