"""The block tables of a step as one array, for the kernels' plans.

A list of Python numbers takes long to become an array (each number lies somewhere else), and from step to step hardly
any table changes. So a table's array is kept for the next step, with what it was made from: comparing two lists of the
same objects is cheap. Never trusts a table to be unchanged.
"""

from __future__ import annotations

import numpy as np

from engine.types import BlockId, Chunk
from kernels.interface import IntArray


class BlockTables:
    """Of one attention group."""

    def __init__(self, group: int, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self._known: dict[int, tuple[list[BlockId], list[BlockId], IntArray]] = {}
        """id(table) -> the table (held, so that its id is its own), what it was, and that as an array."""

    def of(self, chunks: list[Chunk]) -> IntArray:
        """[chunks, blocks]: the blocks of each chunk's context, zeros after them."""
        known, self._known = self._known, {}
        widths = [-(-chunk.end // self._block_size) for chunk in chunks]
        tables = np.zeros((len(chunks), max(widths)), np.int64)
        for i, (chunk, width) in enumerate(zip(chunks, widths, strict=True)):
            table = chunk.seq.block_tables[self._group]
            assert len(table) >= width, f"{chunk.seq.request.request_id}: {len(table)} blocks for {chunk.end} tokens"
            entry = known.get(id(table))
            if entry is None or entry[1] != table:
                entry = (table, list(table), np.array(table, np.int64))
            self._known[id(table)] = entry
            tables[i, :width] = entry[2][:width]
        return tables
