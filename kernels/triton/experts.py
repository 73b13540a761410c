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

from kernels.interface import ceil_div
from kernels.triton.attention import dot
from kernels.triton.launch import launch_cheaply
from kernels.triton.plan import INTERPRETED, choose_dot_precision, round_up_to_power_of_two


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
def multiply_experts(
    x_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, x_row_stride,
    in_size, out_size, top_k,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Multiply a tile of rows by the weights of one expert: one of the two halves of a mixture of experts.

    A row is one token and one of the `top_k` experts that it chose; rows are sorted by expert. order: [rows], token *
    top_k + choice of each row. starts: [experts + 1], the first row of each expert. tile_expert, tile_row: expert and
    first row of each tile; a tile that is not needed begins past its expert's rows. The grid is (tiles, blocks of
    BLOCK_N columns).

    With GATED, the first half: out [rows, out_size] = silu(gate(x)) * up(x), with x [tokens, in_size] and weight
    [experts, 2 * out_size, in_size], gate before up. Else the second: out [tokens, top_k, out_size] = down(x) * scale
    in fp32, with x [rows, in_size], weight [experts, out_size, in_size] and scale [tokens, top_k]; the caller adds up a
    token's outputs.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    first_row = tl.load(tile_row_ptr + tile)
    end = tl.load(starts_ptr + expert + 1)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < end
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = row.to(tl.int64)
    expert_size = in_size * out_size
    if GATED:
        x_row = (tl.load(order_ptr + row, mask=is_row, other=0) // top_k).to(tl.int64)
        expert_size = 2 * expert_size
    weight_ptrs = weight_ptr + expert.to(tl.int64) * expert_size + column.to(tl.int64)[None, :] * in_size
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_in in range(0, in_size, BLOCK_K):
        in_column = first_in + tl.arange(0, BLOCK_K)
        is_inside = in_column < in_size
        x_ptrs = x_ptr + x_row[:, None] * x_row_stride + in_column[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_inside[None, :], other=0.0)
        mask = is_inside[:, None] & (column < out_size)[None, :]
        in_ptrs = weight_ptrs + in_column[:, None]
        out = dot(x, tl.load(in_ptrs, mask=mask, other=0.0), out, PRECISION, WIDE)
        if GATED:
            up = dot(x, tl.load(in_ptrs + out_size * in_size, mask=mask, other=0.0), up, PRECISION, WIDE)
    out_row = row.to(tl.int64)
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    else:
        out_row = tl.load(order_ptr + row, mask=is_row, other=0).to(tl.int64)
        out = out * tl.load(scale_ptr + out_row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + out_row[:, None] * out_size + column[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < out_size)[None, :])


def apply_experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: [tokens, hidden].

    (token, expert) pairs are the rows of two matrix products. They are sorted by expert, on the device, so that a tile
    of rows needs the weights of one expert. `ReferenceKernels.apply_experts` gives the shapes.
    """
    num_tokens, hidden = x.shape
    num_experts, _, size = down.shape
    top_k = expert_ids.shape[1]
    row_count = num_tokens * top_k
    is_float32 = x.element_size() > 2
    # Twice the rows of an average expert, so that one tile does for most experts. A matrix product on the GPU needs 16
    # rows; the maximum bounds what one program holds.
    rows_max = 16 if is_float32 else 64
    block_m = round_up_to_power_of_two(min(max(2 * row_count // num_experts, 16), rows_max))
    block_n = 64
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": 32 if is_float32 else 64,  # the same number of bytes
        "PRECISION": choose_dot_precision(x),
        "WIDE": INTERPRETED,
        "num_warps": 4,
        "num_stages": 3,
    }
    sorted_rows = sort_by_expert(expert_ids, num_experts, block_m)
    tile_count = sorted_rows.tile_row.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    weights = weights.contiguous()
    inner = torch.empty((row_count, size), dtype=x.dtype, device=x.device)
    multiply_experts[(tile_count, ceil_div(size, block_n))](
        x, gate_up, weights, inner, *sorted_rows, x.stride(0), hidden, size, top_k, GATED=True, **constants
    )
    outputs = torch.empty((num_tokens, top_k, hidden), dtype=torch.float32, device=x.device)
    multiply_experts[(tile_count, ceil_div(hidden, block_n))](
        inner, down, weights, outputs, *sorted_rows, size, size, hidden, top_k, GATED=False, **constants
    )
    return outputs.sum(1).to(x.dtype)
