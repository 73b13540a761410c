"""What a cache of prefixes could find at best: Belady's order, which knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

NEVER = 1 << 60


def leading(names: Sequence[Any], known: Any) -> int:
    """How many names, from the first, are `known`."""
    for index, name in enumerate(names):
        if name not in known:
            return index
    return len(names)


def belady(trace: Sequence[Sequence[Any]], capacity: int) -> list[int]:
    """Blocks found of every prompt where what is used latest, or never, goes first."""
    uses: list[list[int]] = []
    following: dict[Any, int] = {}
    for index in reversed(range(len(trace))):
        uses.append([following.get(name, NEVER) for name in trace[index]])
        following.update(dict.fromkeys(trace[index], index))
    cached: dict[Any, int] = {}
    latest: list[tuple[int, int, Any]] = []
    found = []
    for names, nexts in zip(trace, reversed(uses)):
        found.append(leading(names, cached))
        for depth, (name, use) in enumerate(zip(names, nexts)):
            cached[name] = use
            heapq.heappush(latest, (-use, -depth, name))
        while len(cached) > capacity:
            use, _, name = heapq.heappop(latest)
            if cached.get(name) == -use:
                del cached[name]
    return found
