"""The cache's part of a running sequence: which blocks it holds, and which nodes of the prefix tree name them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from engine.cache.nodes import Node
from engine.cache.pool import Block, UnitPool


class SequenceBlocks:
    """Parallel to `seq.block_tables`."""

    __slots__ = ("blocks", "committed_count", "is_detached", "nodes", "pending_merges", "window_starts")

    def __init__(self, group_count: int) -> None:
        self.blocks: list[list[Block[Node] | None]] = [[] for _ in range(group_count)]
        """Blocks held, by group and position; None where a sliding window has passed."""
        self.nodes: list[Node] = []
        """Node of every named block: those of [0, committed) are computed, the rest are of steps that are out."""
        self.committed_count = 0
        self.pending_merges: list[tuple[int, int, Block[Node]]] = []
        """(group, index, the identical block), by index: redirected at commit. A reference to it is held until then."""
        self.is_detached = False
        """Its further blocks stay unnamed: the cache was reset under it, or a hash collided."""
        self.window_starts = [0] * group_count
        """First block still held of each group."""

    def release(self, pool: UnitPool[Node]) -> None:
        """Give the blocks held back, the last position of every group first, so that it is evicted first."""
        for column in zip_longest(*(reversed(blocks) for blocks in reversed(self.blocks))):
            for block in column:
                if block is not None:
                    pool.release(block)

    def drop_merges(self, pool: UnitPool[Node], start: int = 0) -> None:
        """Keep the own blocks from this index on after all."""
        for _, _, block in (merge for merge in self.pending_merges if merge[1] >= start):
            pool.release(block)
        self.pending_merges = [merge for merge in self.pending_merges if merge[1] < start]

    def pending_blocks(self, start: int, end: int) -> Iterator[Block[Node]]:
        """The blocks of [start, end) that a step which is out fills and names, parents first: by group, by position."""
        for group, held_blocks in enumerate(self.blocks):
            for node in self.nodes[start:end]:
                block = node.blocks[group]
                if block is not None and block.is_pending and held_blocks[node.depth] is block:
                    yield block
