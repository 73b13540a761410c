"""How many prompts have each key, as a Counter keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class NaiveTally:
    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def _add(self, keys: Sequence[int], start: int = 0) -> int:
        present_count = sum(key in self._counts for key in keys[start:])
        self._counts.update(keys[start:])
        return present_count

    def _subtract(self, keys: Sequence[int], start: int = 0) -> int:
        if any(key not in self._counts for key in keys[start:]):
            raise IndexError("no prompt has this key")
        self._counts.subtract(keys[start:])
        self._counts = +self._counts
        return sum(key in self._counts for key in keys[start:])

    def add_prompt(self, keys: Sequence[int], target: NaiveTally, targets: NaiveTally) -> int:
        self._add(keys)
        before = target._add(keys)
        targets._add(keys, before)
        return before

    def remove_prompt(self, keys: Sequence[int], target: NaiveTally, targets: NaiveTally) -> int:
        self._subtract(keys)
        remaining_count = target._subtract(keys)
        targets._subtract(keys, remaining_count)
        return remaining_count

    def count(self, key: int) -> int:
        return self._counts[key]

    def count_leading(self, keys: Sequence[int], min_count: int) -> int:
        return next((i for i, key in enumerate(keys) if self._counts[key] < min_count), len(keys))

    def counts(self) -> dict[int, int]:
        return dict(self._counts)
