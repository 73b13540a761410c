"""The blocks that a running sequence holds, and their nodes in the prefix tree."""

from __future__ import annotations

from itertools import zip_longest

from engine.cache.blocks import Block, Node
from engine.cache.pool import UnitPool
from engine.types import BlockId, Sequence

UNREAD_BLOCK_ID = BlockId(0)
"""Entry of a sliding-window table before the window. No kernel reads it, so it may be any block."""


class SequenceBlocks:
    """The blocks that a running sequence holds, by group. Also writes `seq.block_tables`, which the runner reads."""

    __slots__ = ("blocks_by_group", "is_detached", "nodes", "seq")

    def __init__(self, seq: Sequence, nodes: list[Node], group_count: int, *, is_detached: bool) -> None:
        """Start without blocks. Each of the `group_count` groups of attention layers has a block table of its own.

        `nodes`: prefix tree nodes of the sequence's cached prefix. The caller adds their blocks.
        """
        self.seq = seq
        self.blocks_by_group: list[list[Block | None]] = [[] for _ in range(group_count)]
        """[group][block index]; None stands for a block before the sliding window, which is released."""
        self.nodes = nodes
        """Prefix tree nodes of the leading blocks, which are registered."""
        self.is_detached = is_detached
        """Whether further blocks stay unregistered: prefix caching is off, the cache was reset, or a hash collided."""
        seq.block_tables = [[] for _ in range(group_count)]

    def append(self, new_blocks: list[Block]) -> None:
        """Append each block to the table of its group."""
        blocks_by_group, tables = self.blocks_by_group, self.seq.block_tables
        for block in new_blocks:
            group = block.kind
            blocks_by_group[group].append(block)
            tables[group].append(block.id)

    def replace(self, group: int, index: int, block: Block) -> Block:
        """Replace the block at `index` of a group's table. Returns the old block, which the caller must release."""
        self.seq.table_version += 1
        replaced_block = self.blocks_by_group[group][index]
        assert replaced_block is not None
        assert replaced_block is not block
        self.blocks_by_group[group][index] = block
        self.seq.block_tables[group][index] = block.id
        return replaced_block

    def rewrite_tables(self) -> None:
        """Write the tables again after blocks changed their ids, or were replaced. The runner reads them in full."""
        self.seq.table_version += 1
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
        return [block for group_blocks in self.blocks_by_group for block in group_blocks if block is not None]


def _list_ids(blocks: list[Block | None]) -> list[BlockId]:
    return [UNREAD_BLOCK_ID if block is None else block.id for block in blocks]
