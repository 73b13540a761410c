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

    def blocks_needed(self, blocks: int) -> list[int]:
        """Blocks of every kind that a sequence of so many blocks holds at once at most."""
        counts = [
            blocks if window is None or self._step_blocks is None else min(blocks, window + self._step_blocks)
            for window in self.window_blocks
        ]
        return counts + [1] * (self._state_kind is not None)

    def token_capacity(self, unit_count: int, blocks_per_unit: Sequence[int]) -> int:
        """Tokens that one sequence alone can hold in so many units."""

        def fits(tokens: int) -> bool:
            counts = self.blocks_needed(-(-tokens // self._block_size))
            return sum(-(-count // n) for count, n in zip(counts, blocks_per_unit)) <= unit_count

        low, high = 0, (unit_count * blocks_per_unit[0] + 1) * self._block_size
        while high - low > 1:  # fits(low), not fits(high)
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def resumable_count(self, nodes: list[Node]) -> int:
        """The largest number of leading nodes after which every group, and the state, can resume."""
        count = len(nodes)
        while count:
            smaller_count = self.usable_count(nodes, count)
            if self._state_kind is not None:
                kind = self._state_kind
                while (
                    smaller_count
                    and not nodes[smaller_count - 1].can_resume(kind)
                    and not nodes[smaller_count - 1].has_host_block(kind)
                ):
                    smaller_count -= 1
            if smaller_count == count:
                break
            count = smaller_count
        return count

    def usable_count(self, nodes: list[Node], count: int) -> int:
        """The largest number of leading nodes, up to `count`, after which no window misses a block."""
        for group, window in self._sliding_groups:
            while count:
                window_indices = range(count - 1, max(0, count - window) - 1, -1)
                missing = next(
                    (i for i in window_indices if not nodes[i].blocks[group] and not nodes[i].has_host_block(group)),
                    None,
                )
                if missing is None:
                    break
                count = missing
        return count
