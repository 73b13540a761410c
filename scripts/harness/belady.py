"""What a cache of prefixes could find at best: Belady's order, which knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

NEVER = 1 << 60


def count_cached_prefix(names: Sequence[Any], cached_blocks: Any) -> int:
    """Count the names, from the first, that are in `cached_blocks`."""
    for position, name in enumerate(names):
        if name not in cached_blocks:
            return position
    return len(names)


def belady_hits(trace: Sequence[Sequence[Any]], capacity: int) -> list[int]:
    """Blocks found of every prompt where what is used latest, or never, goes first."""
    uses: list[list[int]] = []
    next_use_by_name: dict[Any, int] = {}
    for position in reversed(range(len(trace))):
        uses.append([next_use_by_name.get(name, NEVER) for name in trace[position]])
        next_use_by_name.update(dict.fromkeys(trace[position], position))
    next_uses: dict[Any, int] = {}
    eviction_heap: list[tuple[int, int, Any]] = []
    hits = []
    for names, name_uses in zip(trace, reversed(uses)):
        hits.append(count_cached_prefix(names, next_uses))
        for depth, (name, use) in enumerate(zip(names, name_uses)):
            next_uses[name] = use
            heapq.heappush(eviction_heap, (-use, -depth, name))
        while len(next_uses) > capacity:
            use, _, name = heapq.heappop(eviction_heap)
            if next_uses.get(name) == -use:
                del next_uses[name]
    return hits
