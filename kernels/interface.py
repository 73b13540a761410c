"""Arguments of the kernel backends: one ragged batch, and strided views of the unit pool.

Knows no models, no requests, no scheduler. A backend prepares a batch once a step (`plan_attention`) and gets that
plan back at every layer. `kernels.reference.backend` defines the operations.

Invariants: in a batch, sequences with one query come first ([0, decode_count)). `attention` stores the K and V of the
whole batch before it attends, so every query reads them. Results depend only on the positions [0, context_len) of a
sequence, whatever bytes lie at others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Layout of the paged KV cache of one group of attention layers, in a buffer that all groups share.

    The buffer is cut into units of equal size. A unit holds as many blocks of one group as fit: unit u has the blocks
    [u * blocks_per_unit, (u + 1) * blocks_per_unit). A block has K and V of `block_size` tokens in every layer of the
    group, as `[layer][K/V][token][kv-head][dim]`. A row is [kv-head][dim]: K or V of one token in one layer.
    """

    buffer: Tensor
    """[units * elems_per_unit], in the dtype of K and V."""
    elems_per_unit: int
    blocks_per_unit: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        assert self.elems_per_unit % self.elems_per_row == 0
        assert self.blocks_per_unit * self.elems_per_block <= self.elems_per_unit

    @property
    def elems_per_row(self) -> int:
        """Number of elements of one token's K (or V) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def elems_per_block(self) -> int:
        return 2 * self.num_layers * self.block_size * self.elems_per_row

    @property
    def rows_per_layer(self) -> int:
        """Number of rows of one layer in a block: a K row for each token, then a V row for each."""
        return 2 * self.block_size

    def view_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """View the buffer as rows of K and of V of one layer: [rows, kv_heads, dim] each.

        If a token's K of layer 0 is in row r of the buffer, its K and V of this layer are in row r of the two views.
        """
        rows = self.buffer.view(-1, self.num_kv_heads, self.head_dim)
        first_k_row = layer * self.rows_per_layer
        return rows[first_k_row:], rows[first_k_row + self.block_size :]

    def compute_block_rows(self, blocks: IntArray) -> IntArray:
        """Return the row at which each block begins, with its first token's K in layer 0. `blocks`: of any shape."""
        unit_rows = self.elems_per_unit // self.elems_per_row
        block_rows = self.elems_per_block // self.elems_per_row
        return (blocks // self.blocks_per_unit) * unit_rows + (blocks % self.blocks_per_unit) * block_rows


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The tokens that a step computes ("queries"), one sequence after another. Sequences with one query come first."""

    query_starts: IntArray
    """[sequences + 1]: the queries of sequence i are the tokens [query_starts[i], query_starts[i + 1])."""
    context_lens: IntArray
    """[sequences]: KV length of each sequence, its queries included; the queries are its last positions."""
    positions: IntArray
    """[tokens]: position of each query in its sequence."""
    decode_count: int
    """Sequences [0, decode_count) have exactly one query."""

    @staticmethod
    def from_positions(starts: list[int] | IntArray, ends: list[int] | IntArray) -> RaggedBatch:
        """Make the batch of a step in which sequence i computes the tokens at positions [starts[i], ends[i]).

        Sequences that compute one token (decodes) must come first. A decode at position 5 and a prompt of 3 tokens,
        with starts [5, 0] and ends [6, 3], give query_starts [0, 1, 4], positions [5, 0, 1, 2] and decode_count 1.
        """
        first_positions = np.asarray(starts, np.int64)
        end_positions = np.asarray(ends, np.int64)
        query_counts = end_positions - first_positions
        query_starts = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(query_counts, out=query_starts[1:])
        has_one_query = query_counts == 1
        decode_count = int(has_one_query.sum())
        assert has_one_query[:decode_count].all(), "sequences with one query come first"
        position_offsets = np.repeat(first_positions - query_starts[:-1], query_counts)
        positions = np.arange(query_starts[-1]) + position_offsets
        return RaggedBatch(query_starts, end_positions, positions=positions, decode_count=decode_count)


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp64 stays, everything else becomes fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Block tables of all running sequences in one group of attention layers, on the host and on the device.

    A row of a table ("table row") lists the cache blocks of one sequence, in order. Sequences keep their table rows
    from step to step, so only new blocks are uploaded. A row of the cache ("pool row") is a token's K or V in a layer.
    """

    host_blocks: IntArray
    """[table rows, blocks]: block numbers. After the last block of a sequence come valid numbers without meaning."""
    block_start_rows: Tensor | None
    """[blocks, table rows] int32: pool row at which each block begins, with the K of its first token in layer 0.

    None if the kernels read tables on the host.
    """
    table_rows: IntArray
    """[sequences]: table row of each sequence of this step's batch."""

    def select_blocks(self, batch: RaggedBatch, kv: PagedKV) -> IntArray:
        """Return the blocks of the batch's sequences, [sequences, blocks], up to the longest context."""
        return self.host_blocks[self.table_rows, : count_context_blocks(batch, kv)]

    def find_rows(self, sequences: IntArray | int, positions: IntArray, kv: PagedKV) -> IntArray:
        """Return the pool row that holds K of layer 0 at each position, in the batch's sequence of that index."""
        block_index, offset_in_block = np.divmod(positions, kv.block_size)
        return kv.compute_block_rows(self.host_blocks[self.table_rows[sequences], block_index]) + offset_in_block

    def compute_slot_rows(self, batch: RaggedBatch, kv: PagedKV) -> IntArray:
        """Return the pool row in which each token of the batch stores its K in layer 0: [tokens]."""
        sequence_of_token = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        return self.find_rows(sequence_of_token, batch.positions, kv)


def ceil_div(count: int, size: int) -> int:
    """Return count / size, rounded up. triton.cdiv takes microseconds more."""
    return -(-count // size)


def count_context_blocks(batch: RaggedBatch, kv: PagedKV) -> int:
    """Return the number of blocks of the longest context in a batch."""
    return ceil_div(int(batch.context_lens.max()), kv.block_size)
