"""The block tables of running sequences where the kernels read them, kept from step to step.

A sequence has a row (`Seats`) as long as it is in every step. What its table gained is written there when a step needs
it, on the host and on the device; all of it where something else of it changed (`Sequence.table_version`). So a step
costs what is new, however long the contexts are, and nobody is looked at one by one who has nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

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

    def of(self, chunks: Items[Chunk]) -> tuple[IntArray, list[int]]:
        """([chunks]: the row of each chunk's sequence, those rows that are new to it). Who is not there loses his."""
        if self.hold(chunks):
            return self._rows, []
        sequences = [chunk.seq for chunk in chunks]
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

    def hold(self, chunks: Items[Chunk]) -> bool:
        """Whether these are the sequences of the last step, in its order. They are compared by identity."""
        return len(chunks) == len(self._sequences) and [chunk.seq for chunk in chunks] == self._sequences

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
        """Of the sequence in each row when its table was written: its `table_version`, its blocks."""
        self._changes: int | None = None

    def update(
        self,
        chunks: Items[Chunk],
        ends: IntArray,
        rows: IntArray,
        new: list[int],
        row_count: int,
        changes: int | None = None,
    ) -> None:
        """Write what the tables of the chunks' sequences, which end at `ends`, gained; all of those in `new` rows.

        `changes`: as StepPlan has it; where it is what it was, only what tables gained is looked for.
        """
        self._extend(row_count)
        if new:
            self._known[1, new] = 0
        lengths = self._known[1, rows]
        if new or changes is None or changes != self._changes:
            now = np.array([chunk.seq.table_version for chunk in chunks])
            lengths[self._known[0, rows] != now] = 0
            self._known[0, rows] = now
            self._changes = changes
        behind = (lengths * self._kv.block_size < ends).nonzero()[0]
        if not len(behind):
            return
        stride, grown = self._here.shape[0], rows[behind]
        places: list[int] = []
        """In a table [blocks, rows]."""
        new_blocks: list[BlockId] = []
        written: list[int] = []
        for i, row, length in zip(behind.tolist(), grown.tolist(), lengths[behind].tolist()):
            chunk = chunks[i]
            table = chunk.seq.block_tables[self._group]
            count = len(table)
            assert count * self._kv.block_size >= chunk.end, f"{chunk.seq.request.request_id}: fewer blocks than tokens"
            new_blocks += table[length:]
            written.append(count)
            places += range(length * stride + row, count * stride + row, stride)
        at, blocks = np.array(places, np.int64), np.array(new_blocks, np.int64)
        index, row_of = np.divmod(at, stride)
        self._here[row_of, index] = blocks
        self._known[1, grown] = written
        if self._there is not None:
            there, sent = upload([at, self._kv.block_rows(blocks)], self._there.device)
            self._there.view(-1).index_copy_(0, there.long(), sent)

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
