"""The block tables of running sequences, in memory that kernels read, and that lives from step to step.

A sequence has a row (`RowAllocator`) as long as it is in every step. New blocks of its table are written there when a
step needs them, on the host and on the device. The whole table is written again after any other change of it
(`Sequence.table_version`). So the cost of a step depends on the number of new blocks, and not on the context lengths.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from engine.types import BlockId, Chunk, Sequence
from kernels.host_copies import upload
from kernels.interface import BlockTable, IntArray, PagedKV


class RowAllocator:
    """Assigns each running sequence a row in tables that stay on the device from step to step, such as block tables.

    A sequence keeps its row as long as it is in every step, so that only changes of the row are written.
    """

    def __init__(self, row_count: int) -> None:
        """Start with all rows free. `row_count`: most sequences of a step."""
        self._row_count = row_count
        self._row_by_sequence: dict[Sequence, int] = {}
        self._free_rows = list(range(row_count))[::-1]

    def assign(self, sequences: list[Sequence]) -> tuple[IntArray, list[int]]:
        """Return the row of each sequence of a step, and the rows of new sequences. Absent sequences lose theirs."""
        previous_rows = self._row_by_sequence
        self._row_by_sequence = {seq: previous_rows.pop(seq) for seq in sequences if seq in previous_rows}
        self._free_rows += previous_rows.values()
        new_rows = []
        for seq in sequences:
            if seq not in self._row_by_sequence:
                row = self._free_rows.pop()
                self._row_by_sequence[seq] = row
                new_rows.append(row)
        return np.array([self._row_by_sequence[seq] for seq in sequences], np.int64), new_rows

    def clear(self) -> None:
        """Free all rows. After a failed step, the tables in them may be half written."""
        self._row_by_sequence = {}
        self._free_rows = list(range(self._row_count))[::-1]


class BlockTables:
    """Holds the block tables of one attention group where the kernels read them, a row for each running sequence."""

    def __init__(self, group: int, kv: PagedKV, row_count: int, blocks_max: int, device: torch.device | None) -> None:
        """Make empty tables for `row_count` sequences of at most `blocks_max` blocks each.

        `group`: index of the group of attention layers. `kv`: where the group's blocks lie in memory. `device`: the GPU
        on which kernels read the tables; None: kernels read them on the host.
        """
        self._group = group
        self._kv = kv
        self._host_tables = np.zeros((row_count, blocks_max), np.int64)
        self._device_tables: Tensor | None = None
        if device is not None:
            self._device_tables = torch.zeros(blocks_max, row_count, dtype=torch.int32, device=device)
        self._written_counts = np.zeros(row_count, np.int64)
        """[rows]: number of blocks that each row holds."""
        self._written_versions = np.zeros(row_count, np.int64)
        """[rows]: `Sequence.table_version` of each row's sequence when the row was last written."""

    def update(
        self,
        chunks: Items[Chunk],
        ends: IntArray,
        rows: IntArray,
        new_rows: list[int],
    ) -> None:
        """Write the blocks that each sequence of a step gained since its row of the block table was last written.

        `chunks`, `ends`, `rows`: the step's tokens, the context length and the row of each sequence. `new_rows`: rows
        of sequences that were not in the last step. These rows are written from their first block, as are rows in which
        blocks were replaced, so that `table_version` has changed.
        """
        if new_rows:
            self._written_counts[new_rows] = 0
        written_counts = self._written_counts[rows]
        versions = np.array([chunk.seq.table_version for chunk in chunks])
        written_counts[self._written_versions[rows] != versions] = 0
        self._written_versions[rows] = versions
        outdated_indices = (written_counts * self._kv.block_size < ends).nonzero()[0].tolist()
        if outdated_indices:
            self._write_new_blocks(
                [chunks[i] for i in outdated_indices],
                rows[outdated_indices].tolist(),
                written_counts[outdated_indices].tolist(),
            )

    def _write_new_blocks(self, chunks: list[Chunk], rows: list[int], written_counts: list[int]) -> None:
        """Write to each sequence's row of the block table the blocks that the row lacks.

        `rows[i]`: row of the sequence of `chunks[i]`. The row holds the first `written_counts[i]` blocks already.
        """
        row_count = len(self._host_tables)
        flat_indices: list[int] = []
        """Index of each new block in the flat device table [blocks, rows]: block index * row_count + row."""
        new_blocks: list[BlockId] = []
        for chunk, row, written_count in zip(chunks, rows, written_counts):
            table = chunk.seq.block_tables[self._group]
            token_capacity = len(table) * self._kv.block_size
            assert token_capacity >= chunk.end, f"{chunk.seq.request.request_id}: fewer blocks than tokens"
            new_blocks += table[written_count:]
            self._host_tables[row, written_count : len(table)] = table[written_count:]
            first_index = written_count * row_count + row
            flat_indices += range(first_index, len(table) * row_count + row, row_count)
            self._written_counts[row] = len(table)
        if self._device_tables is not None:
            block_rows = self._kv.compute_block_rows(np.array(new_blocks, np.int64))
            arrays = [np.array(flat_indices, np.int64), block_rows]
            device_indices, device_blocks = upload(arrays, self._device_tables.device)
            self._device_tables.view(-1).index_copy_(0, device_indices.long(), device_blocks)

    def make_step_table(self, rows: IntArray) -> BlockTable:
        """Return the tables of a step's sequences, which have these rows. Valid until the next `update`."""
        return BlockTable(self._host_tables, self._device_tables, rows)
