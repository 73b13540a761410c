"""The block tables of running sequences where the kernels read them, kept from step to step.

A sequence has a row (`Seats`) as long as it is in every step. What its table gained since the last step is written
there, on the host and on the device; all of it where something else of it changed (`Sequence.table_changes`). So a
step costs what is new, however long the contexts are.
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
        self._known: list[tuple[int, int]] = [(-1, 0)] * ROWS
        """(table_changes, blocks) of the sequence in each row when its table was written."""

    def update(self, chunks: list[Chunk], rows: list[int], new: list[int], row_count: int) -> None:
        """Write what the tables of the chunks' sequences gained; all of those in the `new` rows."""
        self._extend(row_count)
        known, group, size = self._known, self._group, self._kv.block_size
        for row in new:
            known[row] = (-1, 0)
        written: list[tuple[int, int, list[BlockId]]] = []
        for chunk, row in zip(chunks, rows, strict=True):
            seq = chunk.seq
            table, (changes, length) = seq.block_tables[group], known[row]
            assert len(table) * size >= chunk.end, (
                f"{seq.request.request_id}: {len(table)} blocks for {chunk.end} tokens"
            )
            if changes != seq.table_changes:
                length = 0
            elif length == len(table):
                continue
            known[row] = (seq.table_changes, len(table))
            written.append((row, length, table[length:]))
        for row, start, blocks in written:
            self._here[row, start : start + len(blocks)] = blocks
        if self._there is not None and written:
            self._send(self._there, written)

    def kept(self, rows: IntArray) -> KeptTable:
        """The tables in these rows, for kernels that read them on the device."""
        assert self._there is not None
        return KeptTable(self._here, self._there, rows)

    def array(self, chunks: list[Chunk], rows: IntArray) -> IntArray:
        """[chunks, blocks]: a copy; what is past a chunk's context may be anything."""
        return self._here[rows, : -(-max(chunk.end for chunk in chunks) // self._kv.block_size)]

    def _send(self, there: torch.Tensor, written: list[tuple[int, int, list[BlockId]]]) -> None:
        places = [np.arange(start, start + len(blocks)) * there.shape[1] + row for row, start, blocks in written]
        values = self._kv.block_rows(np.array([block for _, _, blocks in written for block in blocks], np.int64))
        at, rows = upload([np.concatenate(places), values], there.device)
        there.view(-1).index_copy_(0, at.long(), rows)

    def _extend(self, row_count: int) -> None:
        more = row_count - len(self._known)
        if more > 0:
            self._known += [(-1, 0)] * more
            self._here = np.concatenate([self._here, np.zeros((more, self._here.shape[1]), np.int64)])
            if self._there is not None:
                self._there = torch.cat([self._there, self._there.new_zeros(self._there.shape[0], more)], 1)
