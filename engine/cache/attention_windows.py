"""How much of a prefix a model looks at: all of it, the last blocks where a window slides, and the state at its end.

So how much memory a sequence needs and where one can resume. Pure arithmetic over a `CacheSpec` and the nodes it is
asked about. Refuses to know who holds which block.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.nodes import Node
from engine.cache.spec import CacheSpec


class AttentionWindows:
    """The windows of a model's attention groups, in blocks."""

    def __init__(self, spec: CacheSpec, step_tokens_max: int | None) -> None:
        """`step_tokens_max` bounds what one step adds to a sequence, and so what a sliding-window group must hold."""
        self._block_size = size = spec.block_size
        self.window_tokens = [group.sliding_window for group in spec.groups]
        self.window_blocks = [None if window is None else -(-(window - 1) // size) for window in self.window_tokens]
        """Blocks that a query at the first position of a block still sees behind it; None: all of them."""
        self._sliding_groups = [(g, window) for g, window in enumerate(self.window_blocks) if window is not None]
        self._step_blocks = None if step_tokens_max is None else -(-step_tokens_max // size) + 1
        self._state_kind = None if spec.state is None else len(spec.groups)

    def __bool__(self) -> bool:
        """Whether any of them slides."""
        return bool(self._sliding_groups)

    def count_blocks_needed(self, block_count: int) -> list[int]:
        """Blocks of every kind that a sequence of so many blocks holds at once at most."""
        counts = [
            block_count if window is None or self._step_blocks is None else min(block_count, window + self._step_blocks)
            for window in self.window_blocks
        ]
        return counts + [1] * (self._state_kind is not None)

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
            if self._state_kind is not None:
                kind = self._state_kind
                while (
                    usable_count
                    and not nodes[usable_count - 1].can_resume(kind)
                    and not nodes[usable_count - 1].has_host_block(kind)
                ):
                    usable_count -= 1
            if usable_count == node_count:
                break
            node_count = usable_count
        return node_count

    def count_usable_nodes(self, nodes: list[Node], node_count: int) -> int:
        """The largest number of leading nodes, up to `count`, after which no window misses a block."""
        for group, window in self._sliding_groups:
            while node_count:
                window_indices = range(node_count - 1, max(0, node_count - window) - 1, -1)
                missing_index = next(
                    (i for i in window_indices if not nodes[i].blocks[group] and not nodes[i].has_host_block(group)),
                    None,
                )
                if missing_index is None:
                    break
                node_count = missing_index
        return node_count
