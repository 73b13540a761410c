"""Triton kernels: the matrix products of a mixture of experts, on tokens sorted by expert.

The rows of one expert are cut into tiles. The expert of a tile is read from device memory, so that the host does not
wait for the routing. The grid has the most tiles that there can be; those past the last one do nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention import dot
from kernels.triton.launch import launch_cheaply


class SortedRows(NamedTuple):
    """The (token, chosen expert) pairs of a batch, sorted by expert. A pair is a row of the matrix products."""

    order: Tensor
    """[tokens * top_k]: pair of each row, token * top_k + choice."""
    starts: Tensor
    """[experts + 1]: first row of each expert."""
    tile_expert: Tensor
    """[tiles]: expert of each tile of rows."""
    tile_row: Tensor
    """[tiles]: first row of each tile; after the last row for a tile that is not needed."""


def sort_by_expert(expert_ids: Tensor, num_experts: int, block_m: int) -> SortedRows:
    """Sort the (token, expert) pairs of a mixture of experts by expert, and cut each expert's into tiles.

    A tile has up to `block_m` pairs ("rows"). expert_ids: [tokens, top_k]. With the experts [[1, 0], [1, 2]] of two
    tokens, the pairs 0 to 3 have the experts 1, 0, 1, 2: `order` is [1, 0, 2, 3], and `starts` is [0, 1, 3, 4]. There
    are as many tiles as there can be, because the host does not wait for the device to learn how many are needed.
    """
    sorted_experts, order = expert_ids.reshape(-1).sort(stable=True)
    row_count = sorted_experts.shape[0]
    experts = torch.arange(num_experts + 1, device=expert_ids.device, dtype=sorted_experts.dtype)
    starts = torch.searchsorted(sorted_experts, experts)
    tile_counts = (starts.diff() + block_m - 1) // block_m
    tile_ends = tile_counts.cumsum(0)
    tile_starts = tile_ends - tile_counts
    tile = torch.arange(row_count // block_m + min(row_count, num_experts), device=expert_ids.device)
    tile_expert = torch.searchsorted(tile_ends, tile, right=True).clamp_(max=num_experts - 1)
    tile_row = starts[tile_expert] + (tile - tile_starts[tile_expert]) * block_m
    is_needed = tile < tile_ends[-1]
    return SortedRows(order, starts, tile_expert, torch.where(is_needed, tile_row, row_count))


@launch_cheaply
@triton.jit
def multiply_gate_up(
    x_ptr, weight_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, x_token_stride, hidden, size,
    top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Compute silu(gate(x)) * up(x), the first half of a mixture of experts, for a tile of rows of one expert.

    A row is one token and one of the `top_k` experts that it chose; rows are sorted by expert. x: [tokens, hidden].
    order: [rows], token * top_k + choice of each row. starts: [experts + 1], the first row of each expert. tile_expert,
    tile_row: expert and first row of each tile; a tile that is not needed begins past its expert's rows. weight:
    [experts, 2 * size, hidden], gate before up. out: [rows, size]. The grid is (tiles, blocks of BLOCK_N columns).
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    first_row = tl.load(tile_row_ptr + tile)
    end = tl.load(starts_ptr + expert + 1)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    token = (tl.load(order_ptr + row, mask=row < end, other=0) // top_k).to(tl.int64)
    weight_ptrs = weight_ptr + expert.to(tl.int64) * 2 * size * hidden + column.to(tl.int64)[None, :] * hidden
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for inner_start in range(0, hidden, BLOCK_K):
        inner_column = inner_start + inner
        x = tl.load(
            x_ptr + token[:, None] * x_token_stride + inner_column[None, :],
            mask=(row < end)[:, None] & (inner_column < hidden)[None, :],
            other=0.0,
        )
        mask = (inner_column < hidden)[:, None] & (column < size)[None, :]
        gate_ptrs = weight_ptrs + inner_column[:, None]
        up_ptrs = gate_ptrs + size * hidden
        gate = dot(x, tl.load(gate_ptrs, mask=mask, other=0.0), gate, PRECISION, WIDE)
        up = dot(x, tl.load(up_ptrs, mask=mask, other=0.0), up, PRECISION, WIDE)
    out = gate / (1.0 + tl.exp(-gate)) * up
    target = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < size)[None, :])


@launch_cheaply
@triton.jit
def multiply_down(
    x_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, hidden, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Compute down(x) * scale, the second half of a mixture of experts, for a tile of rows of one expert, in fp32.

    A row is one token and one of the `top_k` experts that it chose; rows are sorted by expert. x: [rows, size], as
    `multiply_gate_up` has written it. weight: [experts, hidden, size]. scale: [tokens, top_k]. out: [tokens, top_k,
    hidden]; the caller adds up a token's outputs. The others are as in `multiply_gate_up`.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    first_row = tl.load(tile_row_ptr + tile)
    end = tl.load(starts_ptr + expert + 1)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + expert.to(tl.int64) * hidden * size + column.to(tl.int64)[None, :] * size
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for inner_start in range(0, size, BLOCK_K):
        inner_column = inner_start + inner
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * size + inner_column[None, :],
            mask=(row < end)[:, None] & (inner_column < size)[None, :], other=0.0,
        )  # fmt: skip
        mask = (inner_column < size)[:, None] & (column < hidden)[None, :]
        out = dot(x, tl.load(weight_ptrs + inner_column[:, None], mask=mask, other=0.0), out, PRECISION, WIDE)
    pair = tl.load(order_ptr + row, mask=row < end, other=0).to(tl.int64)  # token * top_k + choice
    out = out * tl.load(scale_ptr + pair, mask=row < end, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + pair[:, None] * hidden + column[None, :]
    tl.store(target, out, mask=(row < end)[:, None] & (column < hidden)[None, :])
