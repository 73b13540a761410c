"""Which decoding sequences of a batch begin with the same blocks, so that these can be attended to once for all.

Where a block is in two tables at one place, all before it are the same or hold the same: the cache shares prefixes,
never a block in the middle, but a block that was computed twice is in a table until the step is done that found it out.
So what a set of sequences has in common is found by bisection, whatever the length of contexts, in any table of theirs.
Pure arithmetic over tables. Refuses to know devices and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.interface import IntArray, KeptTable, Ragged

TOKENS_MIN = 1024
"""A prefix of fewer is attended to by each sequence itself."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Sets of two sequences or more; a sequence is in one of them at most."""

    members: list[IntArray]
    """Of each set: the places of its sequences in the batch, ascending."""
    tokens: list[int]
    """Of each set: how many they share, whole blocks, less than the context of each."""

    @property
    def saved_tokens(self) -> int:
        """Keys that need not be read."""
        return sum((len(members) - 1) * tokens for members, tokens in zip(self.members, self.tokens, strict=True))


class PrefixFinder:
    """Finds them anew only when other sequences come or a table of theirs was written anew."""

    def __init__(self, tokens_min: int = TOKENS_MIN) -> None:
        """`tokens_min`: of a prefix that is shared."""
        self._tokens_min = tokens_min
        self._rows: IntArray | None = None
        self._known: tuple[int, int] | None = None
        self._found: SharedPrefixes | None = None

    def find(self, batch: Ragged, table: KeptTable, block_size: int, saved_min: int) -> SharedPrefixes | None:
        """Those of the decoding sequences; None where fewer than `saved_min` keys would be saved.

        What tables gain makes no prefix shorter, so what was found stays true; a longer one is found with the next
        change. A table that nobody counts the changes of is looked at every time.
        """
        known = None if table.version is None else (table.version, batch.decode_count)
        if known is None or known != self._known or self._rows is not table.rows:
            found = shared_prefixes(batch, table, block_size, self._tokens_min)
            self._found = found if found.members and found.saved_tokens >= saved_min else None
            self._rows, self._known = table.rows, known
        return self._found


def shared_prefixes(batch: Ragged, table: KeptTable, block_size: int, tokens_min: int = TOKENS_MIN) -> SharedPrefixes:
    """Those of `tokens_min` tokens or more, cut into sets so that most keys are saved."""
    count = batch.decode_count
    rows, lens = table.rows[:count], (batch.context_lens[:count] - 1) // block_size
    least = -(-tokens_min // block_size)
    found = SharedPrefixes([], [])
    for members in _alike(table.here, rows, (lens >= least).nonzero()[0], least - 1):
        for some, blocks in _cut(table.here, rows, lens, members, least):
            found.members.append(some)
            found.tokens.append(blocks * block_size)
    return found


def _alike(here: IntArray, rows: IntArray, members: IntArray, column: int) -> list[IntArray]:
    """The sets of two or more of `members` that have the same block in this column."""
    if len(members) < 2:
        return []
    blocks = here[rows[members], column]
    order = blocks.argsort(kind="stable")
    sets = np.split(members[order], np.diff(blocks[order]).nonzero()[0] + 1)
    return [some for some in sets if len(some) > 1]


def _cut(here: IntArray, rows: IntArray, lens: IntArray, members: IntArray, low: int) -> list[tuple[IntArray, int]]:
    """(members, blocks) of the sets that save most, of members that have `low` blocks in common."""
    first, others = rows[members[0]], rows[members]
    high = int(lens[members].min())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if (here[others, middle - 1] == here[first, middle - 1]).all() else (low, middle - 1)
    longer = members[lens[members] > low]
    parts = [cut for some in _alike(here, rows, longer, low) for cut in _cut(here, rows, lens, some, low + 1)]
    if sum((len(some) - 1) * blocks for some, blocks in parts) > (len(members) - 1) * low:
        return parts
    return [(members, low)]
