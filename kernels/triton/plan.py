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

from kernels.host_copies import upload
from kernels.interface import IntArray, RaggedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU. It is chosen when triton is imported."""
STATE_CHUNK = 64
"""Tokens of a tile of the recurrent operations."""


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

    @property
    def prompt_count(self) -> int:
        return self.units.shape[0] - self.decode_count
