"""The cache's part of a running sequence: which blocks it holds, and which nodes of the prefix tree name them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from engine.cache.nodes import Node
from engine.cache.pool import Block, UnitPool


class PendingMerge(NamedTuple):
    """A block that is redirected to an identical one at commit."""

    group: int
    block_index: int
    """Of the block in the table of its group."""
    identical_block: Block[Node]
    """A reference to it is held until then."""


class SequenceBlocks:
    """Parallel to `seq.block_tables`."""

    __slots__ = ("blocks_by_group", "committed_block_count", "is_detached", "nodes", "pending_merges", "window_starts")

    def __init__(self, group_count: int) -> None:
        self.blocks_by_group: list[list[Block[Node] | None]] = [[] for _ in range(group_count)]
        """Blocks held, by group and position; None where a sliding window has passed."""
        self.nodes: list[Node] = []
        """Node of every named block: those of [0, committed) are computed, the rest are of steps that are out."""
        self.committed_block_count = 0
        self.pending_merges: list[PendingMerge] = []
        """Ordered by position."""
        self.is_detached = False
        """Its further blocks stay unnamed: the cache was reset under it, or a hash collided."""
        self.window_starts = [0] * group_count
        """First block still held of each group."""

    def release(self, pool: UnitPool[Node]) -> None:
        """Give the blocks held back, the last position of every group first, so that it is evicted first."""
        for column in zip_longest(*(reversed(blocks) for blocks in reversed(self.blocks_by_group))):
            for block in column:
                if block is not None:
                    pool.release(block)

    def drop_merges(self, pool: UnitPool[Node], start: int = 0) -> None:
        """Keep the own blocks from this index on after all."""
        for merge in self.pending_merges:
            if merge.block_index >= start:
                pool.release(merge.identical_block)
        self.pending_merges = [merge for merge in self.pending_merges if merge.block_index < start]

    def iter_pending_blocks(self, start: int, end: int) -> Iterator[Block[Node]]:
        """The blocks of [start, end) that a step which is out fills and names, parents first: by group, by position."""
        for group, held_blocks in enumerate(self.blocks_by_group):
            for node in self.nodes[start:end]:
                block = node.blocks[group]
                if block is not None and block.is_pending and held_blocks[node.depth] is block:
                    yield block
