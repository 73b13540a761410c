"""The blocks that a running sequence holds, and their nodes in the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from engine.cache.blocks import Block, Node
from engine.cache.pool import UnitPool
from engine.types import BlockId, Sequence

UNREAD_BLOCK_ID = BlockId(0)
"""Entry of a sliding-window table before the window. No kernel reads it, so it may be any block."""


class PendingMerge(NamedTuple):
    """A block of a sequence that is replaced by an identical block when its step is committed."""

    group: int
    block_index: int
    """Index of the block in the table of its group."""
    identical_block: Block
    """Block of the prefix tree that replaces it. The sequence holds both until the commit."""


class SequenceBlocks:
    """The blocks that a running sequence holds, by group. Also writes `seq.block_tables`, which the runner reads."""

    __slots__ = (
        "blocks_by_group",
        "is_detached",
        "nodes",
        "pending_merges",
        "seq",
    )

    def __init__(self, seq: Sequence, group_count: int, *, is_detached: bool) -> None:
        """Start without blocks. Each of the `group_count` groups of attention layers has a block table of its own."""
        self.seq = seq
        self.blocks_by_group: list[list[Block | None]] = [[] for _ in range(group_count)]
        """[group][block index]; None stands for a block before the sliding window, which is released."""
        self.nodes: list[Node] = []
        """Prefix tree nodes of the leading blocks, which are registered."""
        self.pending_merges: list[PendingMerge] = []
        """Merges to do when their steps are committed, in order of position."""
        self.is_detached = is_detached
        """Whether further blocks stay unregistered: prefix caching is off, the cache was reset, or a hash collided."""
        seq.block_tables = [[] for _ in range(group_count)]
        self.increment_table_version()

    def increment_table_version(self) -> None:
        """Make the runner read this sequence's tables again in full, because blocks in them were replaced."""
        self.seq.table_version += 1

    def append(self, new_blocks: list[Block]) -> None:
        """Append each block to the table of its group."""
        blocks_by_group, tables = self.blocks_by_group, self.seq.block_tables
        for block in new_blocks:
            group = block.kind
            blocks_by_group[group].append(block)
            tables[group].append(block.id)

    def replace(self, group: int, index: int, block: Block) -> Block:
        """Replace one block of a table. Returns the old block, which the caller must release."""
        replaced_block = self.blocks_by_group[group][index]
        assert replaced_block is not None
        assert replaced_block is not block
        self.blocks_by_group[group][index] = block
        self.seq.block_tables[group][index] = block.id
        return replaced_block

    def rewrite_tables(self) -> None:
        """Write the tables again after blocks changed their ids, or were replaced."""
        for table, blocks in zip(self.seq.block_tables, self.blocks_by_group):
            table[:] = _list_ids(blocks)

    def release_before(self, group: int, start: int, pool: UnitPool) -> None:
        """Release the blocks of a sliding-window group before the block index `start`."""
        blocks = self.blocks_by_group[group]
        table = self.seq.block_tables[group]
        first = end = min(start, len(blocks))
        while first and blocks[first - 1] is not None:
            first -= 1
        for index in range(first, end):
            block = blocks[index]
            assert block is not None
            pool.release(block)
            blocks[index] = None
            table[index] = UNREAD_BLOCK_ID

    def release(self, pool: UnitPool) -> None:
        """Release all blocks, last position first, so that the end of the prefix is evicted before its beginning."""
        for column in zip_longest(*(reversed(blocks) for blocks in reversed(self.blocks_by_group))):
            for block in column:
                if block is not None:
                    pool.release(block)

    def take_merges(self, end: int) -> list[PendingMerge]:
        """Remove the pending merges of blocks before the block index `end`, and return them."""
        count = sum(merge.block_index < end for merge in self.pending_merges)
        merges = self.pending_merges[:count]
        del self.pending_merges[:count]
        return merges

    def drop_merges(self, pool: UnitPool) -> None:
        """Cancel the pending merges. The sequence keeps its own blocks."""
        for merge in self.pending_merges:
            pool.release(merge.identical_block)
        self.pending_merges.clear()

    def iter_pending_blocks(self, start: int, end: int) -> Iterator[Block]:
        """Yield the pending blocks of [start, end) that this sequence computes, parents first."""
        for group, held_blocks in enumerate(self.blocks_by_group):
            for node in self.nodes[start:end]:
                block = node.blocks[group]
                is_own_block = held_blocks[node.depth] is block
                if block is not None and is_own_block and block.is_pending:
                    yield block

    def check_invariants(self) -> None:
        """Assert that the tables list the held blocks, without gaps, each of its group and at its place in the tree."""
        for group, (blocks, table) in enumerate(zip(self.blocks_by_group, self.seq.block_tables)):
            assert _list_ids(blocks) == table
            is_held = [block is not None for block in blocks]
            assert is_held == sorted(is_held), "a block is missing within the window"
            for index, block in enumerate(blocks):
                if block is not None:
                    assert block.kind == group
                    if index < len(self.nodes):
                        assert block.node is self.nodes[index] or block.node is None

    def list_references(self) -> list[Block]:
        """Return the blocks that the sequence holds, one entry for each reference."""
        blocks = [block for group_blocks in self.blocks_by_group for block in group_blocks if block is not None]
        return blocks + [merge.identical_block for merge in self.pending_merges]


def _list_ids(blocks: list[Block | None]) -> list[BlockId]:
    return [UNREAD_BLOCK_ID if block is None else block.id for block in blocks]
