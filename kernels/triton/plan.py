"""Plans of a step's batch for the Triton kernels, on the device: one upload a step for each group.

Plans of fixed shape, for recorded decode steps, are refilled in place. The host never waits for the device here. A slot
or a unit below zero marks padding, which the kernels skip; a padded sequence has a context of 0.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.host_copies import ALIGNED_INTS, overwrite, upload
from kernels.interface import BlockTable, IntArray, PagedKV, RaggedBatch, ceil_div, count_context_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU. It is chosen when triton is imported."""
STATE_CHUNK = 64
"""Tokens of a tile of the recurrent operations."""
PADDING_SLOT = -1


def round_up_to_power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is neither under `size` nor under `least`."""
    return max(least, 1 << (size - 1).bit_length())


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether the processors of a device have 160 KiB of shared memory for a program, as A100 and Hopper have.

    Consumer GPUs and the L4 have 99 KiB, for which some tiles must be smaller. The interpreter has no limit.
    """
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stubs
    return shared_bytes >= 160 << 10


def choose_dot_precision(x: Tensor) -> str:
    """Return the precision of products: exact for fp32; TF32 for 16-bit inputs, which have no more bits than TF32."""
    return "ieee" if x.element_size() > 2 else "tf32"


@dataclass(frozen=True, slots=True)
class FlashPrompts:
    """Prompts of a step for FlashAttention."""

    arguments: dict[str, Any]
    """Arguments of its function that are the same in all layers."""
    copied_rows: Tensor | None
    """[context tokens of all prompts]: row of each one's K of layer 0, to copy; None: the cache is read in place."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's batch as the attention kernels read it, in device memory. The layers of a group share it.

    Decoding sequences come first. A plan of a recorded step (CUDA graph) is fixed: it keeps its shapes and addresses,
    and each batch of decoding sequences is written into it.
    """

    slot_rows: Tensor
    """[tokens]: row of the KV cache in which each token's K of layer 0 is stored."""
    query_starts: Tensor
    """[sequences + 1]: first token of each sequence in the batch, then the end of the last."""
    context_lens: Tensor
    """[sequences]: context lengths."""
    block_table: Tensor
    """[blocks, sequences]: row of the KV cache at which a block of a sequence begins, with its first K of layer 0."""
    batch: RaggedBatch | None
    """The batch on the host, for prompts; None in a fixed plan, which has no prompts."""
    decode_count: int
    split_count: int
    """Number of parts into which the context of a decoding sequence is cut."""
    window: int | None
    tiles_by_size: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Results of `get_query_tiles`, which all layers of a step share, by the queries of a tile."""
    refill_buffer: Tensor | None = None
    """[3, sequences]: slot rows, context lengths and rows in the `BlockTable` of a fixed plan, for one transfer."""
    flash_prompts: FlashPrompts | None = None
    """The prompts for FlashAttention; None: Triton kernels compute them."""

    def get_query_tiles(self, queries_per_tile: int) -> tuple[Tensor, Tensor]:
        """Return the tiles of the prompts' queries: the sequence of each, and its first query in that, [tiles] int32.

        They are uploaded once a step. The last tiles come first: they see the most keys, and should not start late.
        """
        if queries_per_tile not in self.tiles_by_size:
            assert self.batch is not None, "a fixed plan holds only decoding sequences"
            sequence, first_query = make_query_tiles(self.batch, queries_per_tile)
            tile_seq, tile_query = upload([sequence[::-1], first_query[::-1]], self.slot_rows.device)
            self.tiles_by_size[queries_per_tile] = tile_seq, tile_query
        return self.tiles_by_size[queries_per_tile]


def make_query_tiles(batch: RaggedBatch, tile_size: int) -> tuple[IntArray, IntArray]:
    """Cut the queries of each prompt into tiles. Returns (index of each tile's sequence, tile's first query in it).

    Decoding sequences have one query each, come first in the batch, and get no tile. Prompts of 3 and 5 queries after
    one decoding sequence, in tiles of 4, give ([1, 2, 2], [0, 0, 4]).
    """
    query_counts = np.diff(batch.query_starts)[batch.decode_count :]
    tile_counts = -(-query_counts // tile_size)  # rounded up
    first_tiles = np.cumsum(tile_counts) - tile_counts
    prompts = np.arange(batch.decode_count, batch.decode_count + len(query_counts))
    index_in_prompt = np.arange(int(tile_counts.sum())) - np.repeat(first_tiles, tile_counts)
    return np.repeat(prompts, tile_counts), index_in_prompt * tile_size


def plan_attention(
    batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None, device: torch.device, split_count: int
) -> AttentionPlan:
    """Upload a batch for the attention kernels. `split_count`: parts into which contexts of decodes are cut."""
    arrays = [table.compute_slot_rows(batch, kv), batch.query_starts, batch.context_lens, table.table_rows]
    slots, starts, lens, rows = upload(arrays, device)
    assert table.block_start_rows is not None
    batch_table = table.block_start_rows[: count_context_blocks(batch, kv)].index_select(1, rows)
    return AttentionPlan(slots, starts, lens, batch_table, batch, batch.decode_count, split_count, window)


def make_fixed_decode_plan(
    max_sequences: int, width: int, window: int | None, device: torch.device, split_count: int
) -> AttentionPlan:
    """Make the attention plan of a recorded decode step (CUDA graph), which always reads the same device memory.

    It has room for `max_sequences` decoding sequences of up to `width` cache blocks. All of them are padding until
    `refill_decode_plan` writes a batch into the plan. `split_count`: parts into which contexts are cut.
    """
    padded_sequence_count = ceil_div(max_sequences, ALIGNED_INTS) * ALIGNED_INTS  # aligns each row of the buffer
    buffer = torch.zeros(3, padded_sequence_count, dtype=torch.int32, device=device)
    buffer[0] = PADDING_SLOT
    return AttentionPlan(
        slot_rows=buffer[0, :max_sequences],
        query_starts=torch.arange(max_sequences + 1, dtype=torch.int32, device=device),
        context_lens=buffer[1, :max_sequences],
        block_table=torch.zeros(width, max_sequences, dtype=torch.int32, device=device),
        batch=None,
        decode_count=max_sequences,
        split_count=split_count,
        window=window,
        refill_buffer=buffer,
    )


def refill_decode_plan(plan: AttentionPlan, batch: RaggedBatch, table: BlockTable, kv: PagedKV) -> None:
    """Write a batch of decoding sequences into the plan of a recorded decode step (CUDA graph).

    The plan may have room for more sequences; those become padding. Slots, lengths and table rows go to the device in
    one transfer. The block table is gathered there, from the table of all running sequences.
    """
    max_sequences = plan.decode_count
    sequence_count = batch.decode_count
    width = count_context_blocks(batch, kv)
    assert sequence_count == len(batch.context_lens) <= max_sequences, "only decoding sequences fit a fixed plan"
    assert width <= plan.block_table.shape[0], f"{width} blocks in a table of {plan.block_table.shape[0]}"
    assert plan.refill_buffer is not None, "not a fixed plan"
    assert table.block_start_rows is not None
    host_buffer = np.zeros(plan.refill_buffer.shape, np.int32)
    host_buffer[0] = PADDING_SLOT
    host_buffer[0, :sequence_count] = table.compute_slot_rows(batch, kv)
    host_buffer[1, :sequence_count] = batch.context_lens
    host_buffer[2, :sequence_count] = table.table_rows
    overwrite(plan.refill_buffer.view(-1), host_buffer)
    table_rows = plan.refill_buffer[2, :max_sequences]
    torch.index_select(table.block_start_rows[:width], 1, table_rows, out=plan.block_table[:width])


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """The batch of the recurrent operations, as the kernels read it on the device."""

    query_starts: Tensor
    """[sequences + 1]: the batch's query_starts."""
    units: Tensor
    """[sequences]: the unit of each sequence's state."""
    tile_seq: Tensor
    """[tiles]: sequence of each tile, which is a chunk of STATE_CHUNK tokens of a prompt."""
    tile_token: Tensor
    """[tiles]: first token of each tile, counted in the batch."""
    decode_count: int
    """Number of decoding sequences, which come first in the batch."""
    sequence_count: int


def plan_recurrent(batch: RaggedBatch, units: IntArray, device: torch.device) -> RecurrentPlan:
    """Upload a batch for the recurrent kernels. `units`: [sequences], unit of each sequence's state."""
    seq, first = make_query_tiles(batch, STATE_CHUNK)
    arrays = [batch.query_starts, units, seq, batch.query_starts[seq] + first]
    starts, device_units, tile_seq, tile_token = upload(arrays, device)
    return RecurrentPlan(starts, device_units, tile_seq, tile_token, batch.decode_count, len(units))


def make_fixed_recurrent_plan(max_sequences: int, device: torch.device) -> RecurrentPlan:
    """Make a plan of decoding sequences only, all of them padding until it is refilled."""
    decodes = RaggedBatch.from_positions([0] * max_sequences, [1] * max_sequences)
    return plan_recurrent(decodes, np.full(max_sequences, -1), device)


def refill_recurrent_plan(plan: RecurrentPlan, units: IntArray) -> None:
    """Write the units of decoding sequences into a fixed plan. The rest becomes padding."""
    padded_units = np.full(plan.sequence_count, -1, np.int32)
    padded_units[: len(units)] = units
    overwrite(plan.units, padded_units)
