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

LINES_MAX: Final = 4096
"""Remembered though nobody of them waits."""
Line = TypeVar("Line")


class FairTurns:
    """All lines of one queue."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._turn_s = 0.0
        """What the line that went last had been given before."""

    def at(self, line: str) -> float:
        """Seconds that a line counts as given; the least goes next."""
        return max(self._given.get(line, 0.0), self._turn_s)

    def charge(self, line: str, seconds: float, waiting: Iterable[str]) -> None:
        """A request of it was sent. `waiting`: the lines in which somebody waits."""
        at_s = self.at(line)
        self._turn_s = max(self._turn_s, min([at_s, *map(self.at, waiting)]))
        self._given[line] = at_s + seconds
        if len(self._given) > LINES_MAX:
            self._given = {name: given for name, given in self._given.items() if given > self._turn_s}

    def over(self) -> None:
        """Nobody waits any more."""
        self._given.clear()
        self._turn_s = 0.0

    def merged(self, lines: Mapping[str, Iterable[tuple[str, float]]]) -> Iterator[str]:
        """Requests in their order, of lines of (request, seconds)."""
        heads: list[tuple[float, int, str, float, Iterator[tuple[str, float]]]] = []
        for number, (name, line) in enumerate(lines.items()):
            rest = iter(line)
            for request_id, seconds in rest:
                heads.append((self.at(name), number, request_id, seconds, rest))
                break
        heapq.heapify(heads)
        while heads:
            at_s, number, request_id, seconds, rest = heads[0]
            yield request_id
            following = next(rest, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (at_s + seconds, number, *following, rest))
