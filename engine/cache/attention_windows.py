"""Blocks of a prefix that a model still reads: all of them, or the last ones if the attention window slides.

These decide how much memory a sequence needs, and after which prefix it can resume. Pure arithmetic over a `CacheSpec`
and nodes of the prefix tree. Refuses to know which sequence holds which block.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence

from engine.cache.blocks import Node
from engine.cache.spec import CacheSpec, ceil_div

ENDLESS = sys.maxsize
"""Length of a window that never slides, in tokens or blocks."""


HasBlock = Callable[[int, int], bool]
"""`has_block(kind, index)` says whether the block of a kind is cached for block `index` of a prefix."""


class AttentionWindows:
    """Computes which blocks the window of each attention group needs. Full attention is a window that never slides."""

    def __init__(self, spec: CacheSpec, step_tokens_max: int | None) -> None:
        """Read the windows of the attention groups from a cache's spec.

        `step_tokens_max`: most tokens that a step adds to a sequence; None: no limit. Sliding windows need room for
        these tokens, too.
        """
        self._block_size = size = spec.block_size
        self._tokens_by_group = [group.sliding_window or ENDLESS for group in spec.groups]
        self._blocks_by_group = [ceil_div(tokens - 1, size) for tokens in self._tokens_by_group]
        """Most earlier blocks that a query at the start of a block still reads, by group."""
        self.sliding_groups = [g for g, tokens in enumerate(self._tokens_by_group) if tokens != ENDLESS]
        self._step_blocks = ENDLESS if step_tokens_max is None else ceil_div(step_tokens_max, size) + 1
        self._has_state = spec.state is not None
        self._state_kind = spec.state_kind

    def find_first_needed_block(self, group: int, block_count: int) -> int:
        """Return the first of `block_count` blocks that a query right after them still reads."""
        return max(0, block_count - self._blocks_by_group[group])

    def find_first_index_to_resume(self, kind: int, block_count: int) -> int:
        """Return the index of the first block of `kind` that a sequence needs to resume after `block_count` blocks.

        `kind`: an attention group, or recurrent state, of which only the last block needs one.
        """
        if kind == self._state_kind:
            return block_count - 1
        return self.find_first_needed_block(kind, block_count)

    def find_first_seen_block(self, group: int, position: int) -> int:
        """Return the index of the first block that queries from `position` on read."""
        return max(0, position - self._tokens_by_group[group] + 1) // self._block_size

    def count_blocks_needed(self, block_count: int) -> list[int]:
        """Return the most blocks of every kind that a sequence of `block_count` blocks holds at one time."""
        counts = [min(block_count, window + self._step_blocks) for window in self._blocks_by_group]
        return counts + [1] * self._has_state

    def count_missing_blocks(self, nodes: list[Node], block_count: int) -> list[int]:
        """Return how many blocks of every kind must be found for a sequence that resumes after a cached prefix.

        `nodes`: nodes of the prefix. `block_count`: blocks that the sequence grows to. Blocks that running sequences
        hold already are shared, and not counted.
        """
        counts = self.count_blocks_needed(block_count)
        for group in range(len(self._blocks_by_group)):
            first_needed = self.find_first_needed_block(group, len(nodes))
            counts[group] -= sum(node.is_held(group) for node in nodes[first_needed:])
        return counts

    def compute_token_capacity(self, unit_count: int, blocks_per_unit: Sequence[int]) -> int:
        """Return the length in tokens of the longest sequence that fits alone in `unit_count` units of memory.

        `blocks_per_unit[k]`: blocks of kind k that a unit can hold. Memory does not grow in proportion to the length,
        because a sliding window and a recurrent state need no more from some length on. So the length is found by
        bisection.
        """

        def is_too_long(tokens: int) -> bool:
            counts = self.count_blocks_needed(ceil_div(tokens, self._block_size))
            return sum(map(ceil_div, counts, blocks_per_unit)) > unit_count

        too_many_tokens = (unit_count * blocks_per_unit[0] + 1) * self._block_size
        return bisect_left(range(1, too_many_tokens), True, key=is_too_long)

    def count_resumable_blocks(self, block_count: int, has_block: HasBlock) -> int:
        """Return the largest number of leading blocks of a cached prefix after which a sequence can resume.

        The full-attention blocks of `block_count` blocks are cached. The sequence also needs all blocks of the sliding
        windows at the end of the prefix, and the recurrent state there, if the model has one. If any is missing, the
        prefix is cut. A cut moves every window, so all is checked again.
        """
        checked_count = -1
        while block_count != checked_count:
            checked_count = block_count
            block_count = self.cut_to_cached_windows(block_count, has_block)
            while self._has_state and block_count and not has_block(self._state_kind, block_count - 1):
                block_count -= 1
        return block_count

    def cut_to_cached_windows(self, block_count: int, has_block: HasBlock) -> int:
        """Return `block_count`, lowered for one group after the other until the group's window misses no block.

        A window with a missing block is cut before the block. That may open a gap in the window of an earlier group.
        """
        for group in self.sliding_groups:
            last_missing_index: int | None = block_count
            while last_missing_index is not None:
                block_count = last_missing_index
                window = range(self.find_first_needed_block(group, block_count), block_count)
                last_missing_index = next((i for i in reversed(window) if not has_block(group, i)), None)
        return block_count
