"""How much of a prefix a model looks at: all of it, the last blocks where a window slides, and the state at its end.

So how much memory a sequence needs and where one can resume. Pure arithmetic over a `CacheSpec` and the nodes it is
asked about. Refuses to know who holds which block.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.cache.blocks import Node
from engine.cache.spec import CacheSpec

ENDLESS = sys.maxsize
"""Tokens or blocks of a window that never slides."""


class AttentionWindows:
    """The windows of a model's attention groups. Full attention is a window that never slides."""

    def __init__(self, spec: CacheSpec, step_tokens_max: int | None) -> None:
        """`step_tokens_max` bounds what one step adds to a sequence, and so what a sliding-window group must hold."""
        self._block_size = size = spec.block_size
        self._tokens_by_group = [group.sliding_window or ENDLESS for group in spec.groups]
        self._blocks_by_group = [-(-(tokens - 1) // size) for tokens in self._tokens_by_group]
        """Blocks that a query at the first position of a block still sees behind it."""
        self.sliding_groups = [g for g, tokens in enumerate(self._tokens_by_group) if tokens != ENDLESS]
        self._step_blocks = ENDLESS if step_tokens_max is None else -(-step_tokens_max // size) + 1
        self._has_state = spec.state is not None

    def first_block_needed(self, group: int, block_count: int) -> int:
        """Index of the first of so many blocks that a query behind them still sees."""
        return max(0, block_count - self._blocks_by_group[group])

    def first_block_seen(self, group: int, position: int) -> int:
        """Index of the first block that a query at this position, or a later one, still sees."""
        return max(0, position - self._tokens_by_group[group] + 1) // self._block_size

    def count_blocks_needed(self, block_count: int) -> list[int]:
        """Blocks of every kind that a sequence of so many blocks holds at once at most."""
        counts = [min(block_count, window + self._step_blocks) for window in self._blocks_by_group]
        return counts + [1] * self._has_state

    def count_missing_blocks(self, nodes: list[Node], block_count: int) -> list[int]:
        """Blocks of every kind that a sequence of so many blocks adds to the live ones if it resumes after `nodes`."""
        counts = self.count_blocks_needed(block_count)
        for group in range(len(self._blocks_by_group)):
            first_needed = self.first_block_needed(group, len(nodes))
            counts[group] -= sum(node.is_held(group) for node in nodes[first_needed:])
        return counts

    def compute_token_capacity(self, unit_count: int, blocks_per_unit: Sequence[int]) -> int:
        """Tokens that one sequence alone can hold in so many units."""

        def fits(tokens: int) -> bool:
            counts = self.count_blocks_needed(-(-tokens // self._block_size))
            return sum(-(-count // n) for count, n in zip(counts, blocks_per_unit)) <= unit_count

        low, high = 0, (unit_count * blocks_per_unit[0] + 1) * self._block_size
        while high - low > 1:  # fits(low), not fits(high)
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def count_resumable_nodes(self, nodes: list[Node]) -> int:
        """The largest number of leading nodes after which every group, and the state, can resume."""
        node_count = len(nodes)
        while node_count:
            usable_count = self.count_usable_nodes(nodes, node_count)
            while self._has_state and usable_count and not _has_state_after(nodes[usable_count - 1]):
                usable_count -= 1
            if usable_count == node_count:
                break
            node_count = usable_count
        return node_count

    def count_usable_nodes(self, nodes: list[Node], node_count: int) -> int:
        """The largest number of leading nodes, up to `node_count`, after which no window misses a block."""
        for group in self.sliding_groups:
            while node_count:
                first_needed = self.first_block_needed(group, node_count)
                missing_index = next(
                    (i for i in range(node_count - 1, first_needed - 1, -1) if not nodes[i].has_block(group)), None
                )
                if missing_index is None:
                    break
                node_count = missing_index
        return node_count


def _has_state_after(node: Node) -> bool:
    return node.can_resume() or node.has_host_block(-1)
