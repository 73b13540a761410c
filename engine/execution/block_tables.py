"""The block tables of running sequences where the kernels read them, kept from step to step.

A sequence has a row (`Seats`) as long as it is in every step. What its table gained is written there when a step needs
it, on the host and on the device; all of it where something else of it changed (`Sequence.table_changes`). So a step
costs what is new, however long the contexts are, and nobody is looked at one by one who has nothing new.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.types import BlockId, Chunk, Sequence
from kernels.interface import IntArray, KeptTable, PagedKV
from kernels.transfer import upload

ROWS = 16
"""That tables begin with; doubled when more sequences come."""


class Seats:
    """Which row of what is kept by sequence belongs to whom."""

    def __init__(self) -> None:
        self.count = ROWS
        self._sequences: list[Sequence] = []
        self._held: dict[Sequence, int] = {}
        self._free = list(range(ROWS))[::-1]
        self._rows = np.zeros(0, np.int64)

    def of(self, chunks: list[Chunk]) -> tuple[IntArray, list[int]]:
        """([chunks]: the row of each chunk's sequence, those rows that are new to it). Who is not there loses his."""
        sequences = [chunk.seq for chunk in chunks]
        if sequences == self._sequences:  # sequences are compared by identity
            return self._rows, []
        held, self._sequences = self._held, sequences
        self._held = {seq: held.pop(seq) for seq in sequences if seq in held}
        self._free += held.values()
        while len(self._free) < len(sequences) - len(self._held):
            self._free += range(self.count, 2 * self.count)
            self.count *= 2
        new = []
        for seq in sequences:
            if seq not in self._held:
                self._held[seq] = self._free.pop()
                new.append(self._held[seq])
        self._rows = np.array([self._held[seq] for seq in sequences], np.int64)
        return self._rows, new

    def clear(self) -> None:
        """Nothing that is kept may be trusted: a step has failed."""
        self._sequences, self._held = [], {}
        self._free = list(range(self.count))[::-1]


class BlockTables:
    """Of one attention group."""

    def __init__(self, group: int, kv: PagedKV, blocks_max: int, device: torch.device | None) -> None:
        """`blocks_max`: of the longest sequence. `device`: where kernels read the tables; None: on the host alone."""
        self._group = group
        self._kv = kv
        self._device = device
        self._here = np.zeros((ROWS, blocks_max), np.int64)
        self._there = None if device is None else torch.zeros(blocks_max, ROWS, dtype=torch.int32, device=device)
        self._known = np.zeros((2, ROWS), np.int64)
        """Of the sequence in each row when its table was written: its `table_changes`, its blocks."""

    def update(self, chunks: list[Chunk], ends: IntArray, rows: IntArray, new: list[int], row_count: int) -> None:
        """Write what the tables of the chunks' sequences, which end at `ends`, gained; all of those in `new` rows."""
        self._extend(row_count)
        self._known[1, new] = 0
        changes, lengths = self._known[:, rows]
        now = np.array([chunk.seq.table_changes for chunk in chunks])
        lengths[changes != now] = 0
        behind = (lengths * self._kv.block_size < ends).nonzero()[0]
        if not len(behind):
            return
        stride = self._here.shape[0]
        places: list[int] = []
        blocks: list[BlockId] = []
        for i, row, length in zip(behind.tolist(), rows[behind].tolist(), lengths[behind].tolist()):
            seq, end = chunks[i].seq, int(ends[i])
            table = seq.block_tables[self._group]
            assert len(table) * self._kv.block_size >= end, (
                f"{seq.request.request_id}: {len(table)} blocks for {end} tokens"
            )
            new_blocks = table[length:]
            self._here[row, length : len(table)] = new_blocks
            self._known[:, row] = seq.table_changes, len(table)
            blocks += new_blocks
            places += range(length * stride + row, len(table) * stride + row, stride)
        if self._there is not None:
            values = self._kv.block_rows(np.array(blocks, np.int64))
            at, sent = upload([np.array(places, np.int64), values], self._there.device)
            self._there.view(-1).index_copy_(0, at.long(), sent)

    def kept(self, rows: IntArray) -> KeptTable:
        """The tables in these rows, for kernels that read them on the device."""
        assert self._there is not None
        return KeptTable(self._here, self._there, rows)

    def array(self, ends: IntArray, rows: IntArray) -> IntArray:
        """[chunks, blocks]: a copy; what is past a chunk's context may be anything."""
        return self._here[rows, : -(-int(ends.max()) // self._kv.block_size)]

    def _extend(self, row_count: int) -> None:
        more = row_count - self._known.shape[1]
        if more > 0:
            self._known = np.concatenate([self._known, np.zeros((2, more), np.int64)], 1)
            self._here = np.concatenate([self._here, np.zeros((more, self._here.shape[1]), np.int64)])
            if self._there is not None:
                self._there = torch.cat([self._there, self._there.new_zeros(self._there.shape[0], more)], 1)
