"""The cache's part of a running sequence: which blocks it holds, and which nodes of the prefix tree name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from engine.cache.blocks import Block, Node
from engine.cache.pool import UnitPool
from engine.types import BlockId, Sequence

UNREAD_BLOCK_ID = BlockId(0)
"""What a sliding-window table holds for positions before the window: any valid block, since no kernel may read it."""


class PendingMerge(NamedTuple):
    """A block that is redirected to an identical one at commit."""

    group: int
    block_index: int
    """Index of the block in the table of its group."""
    identical_block: Block
    """A reference to it is held until then."""


@dataclass(slots=True)
class TableVersion:
    """Number of changes of tables that kernels may have read, over all sequences (`Sequence.table_version`)."""

    count: int = 0


class SequenceBlocks:
    """The blocks that a sequence holds. Keeps `seq.block_tables` equal to their ids."""

    __slots__ = (
        "_version",
        "blocks_by_group",
        "committed_block_count",
        "is_detached",
        "nodes",
        "pending_merges",
        "seq",
        "window_starts",
    )

    def __init__(self, seq: Sequence, group_count: int, version: TableVersion, *, is_detached: bool) -> None:
        self.seq = seq
        self._version = version
        self.blocks_by_group: list[list[Block | None]] = [[] for _ in range(group_count)]
        """Blocks held, by group and position; None where a sliding window has passed."""
        self.nodes: list[Node] = []
        """Node of every named block: those of [0, committed) are computed, the rest are of steps that are out."""
        self.committed_block_count = 0
        self.pending_merges: list[PendingMerge] = []
        """Ordered by position."""
        self.is_detached = is_detached
        """Its further blocks stay unnamed: nothing is cached, the cache was reset under it, or a hash collided."""
        self.window_starts = [0] * group_count
        """First block still held of each group."""
        seq.block_tables = [[] for _ in range(group_count)]
        self.mark_replaced()

    # ------------------------------------------------------------------ tables

    def mark_replaced(self) -> None:
        """Let the runner write the tables of this sequence anew."""
        self.seq.table_version += 1
        self._version.count += 1

    def append(self, new_blocks: list[tuple[int, Block]]) -> None:
        """Add (group, block) at the ends of the tables."""
        blocks_by_group, tables = self.blocks_by_group, self.seq.block_tables
        for group, block in new_blocks:
            blocks_by_group[group].append(block)
            tables[group].append(block.id)

    def replace(self, group: int, index: int, block: Block) -> Block:
        """Put another block in a place. Returns the one that was there, which the caller releases."""
        replaced_block = self.blocks_by_group[group][index]
        assert replaced_block is not None
        assert replaced_block is not block
        self.blocks_by_group[group][index] = block
        self.seq.block_tables[group][index] = block.id
        return replaced_block

    def rewrite_tables(self) -> None:
        """Blocks have got other ids, or places other blocks."""
        for table, blocks in zip(self.seq.block_tables, self.blocks_by_group):
            table[:] = _list_ids(blocks)

    # ------------------------------------------------------------------ giving blocks up

    def release_before(self, group: int, start: int, pool: UnitPool) -> None:
        """Release the blocks of a sliding window before this index."""
        blocks, table = self.blocks_by_group[group], self.seq.block_tables[group]
        end = min(start, len(blocks))
        for index in range(self.window_starts[group], end):
            block = blocks[index]
            assert block is not None
            pool.release(block)
            blocks[index] = None
            table[index] = UNREAD_BLOCK_ID
        self.window_starts[group] = max(self.window_starts[group], end)

    def release(self, pool: UnitPool) -> None:
        """Give the blocks held back, the last position of every group first, so that it is evicted first."""
        for column in zip_longest(*(reversed(blocks) for blocks in reversed(self.blocks_by_group))):
            for block in column:
                if block is not None:
                    pool.release(block)

    # ------------------------------------------------------------------ names

    def take_merges(self, end: int) -> list[PendingMerge]:
        """Take the merges of blocks before this index out."""
        count = sum(merge.block_index < end for merge in self.pending_merges)
        merges, self.pending_merges = self.pending_merges[:count], self.pending_merges[count:]
        return merges

    def drop_merges(self, pool: UnitPool, start: int = 0) -> None:
        """Keep the own blocks from this index on after all."""
        for merge in self.pending_merges:
            if merge.block_index >= start:
                pool.release(merge.identical_block)
        self.pending_merges = [merge for merge in self.pending_merges if merge.block_index < start]

    def iter_pending_blocks(self, start: int, end: int) -> Iterator[Block]:
        """The blocks of [start, end) that a step which is out fills and names, parents first: by group, by position."""
        for group, held_blocks in enumerate(self.blocks_by_group):
            for node in self.nodes[start:end]:
                block = node.blocks[group]
                if block is not None and block.is_pending and held_blocks[node.depth] is block:
                    yield block

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        for group, (blocks, table) in enumerate(zip(self.blocks_by_group, self.seq.block_tables)):
            assert _list_ids(blocks) == table
            assert all(block is not None for block in blocks[self.window_starts[group] :])
            for index, block in enumerate(blocks):
                if block is not None:
                    assert block.kind == group
                    if index < self.committed_block_count:
                        assert block.node is self.nodes[index] or block.node is None

    def list_references(self) -> list[Block]:
        """Every reference that the sequence holds, one entry each."""
        blocks = [block for group_blocks in self.blocks_by_group for block in group_blocks if block is not None]
        return blocks + [merge.identical_block for merge in self.pending_merges]


def _list_ids(blocks: list[Block | None]) -> list[BlockId]:
    return [UNREAD_BLOCK_ID if block is None else block.id for block in blocks]
