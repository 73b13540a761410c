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
    """Sort the pairs of token and chosen expert by expert, and cut those of each expert into tiles of `block_m` rows.

    With the choices [[1, 0], [1, 2]] the experts of the pairs 0 to 3 are 1, 0, 1, 2: `order` is [1, 0, 2, 3], and
    `starts` is [0, 1, 3, 4]. The host does not wait for the device, so it does not know the number of tiles: there are
    as many as there can be.
    """
    sorted_experts, order = expert_ids.reshape(-1).sort(stable=True)
    rows = sorted_experts.shape[0]
    starts = torch.searchsorted(
        sorted_experts, torch.arange(num_experts + 1, device=expert_ids.device, dtype=sorted_experts.dtype)
    )
    tiles = (starts.diff() + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    tile = torch.arange(rows // block_m + min(rows, num_experts), device=expert_ids.device)
    tile_expert = torch.searchsorted(ends, tile, right=True).clamp_(max=num_experts - 1)
    tile_row = starts[tile_expert] + (tile - (ends - tiles)[tile_expert]) * block_m
    return SortedRows(order, starts, tile_expert, torch.where(tile < ends[-1], tile_row, rows))


@launch_cheaply
@triton.jit
def multiply_gate_up(
    x_ptr, weight_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, x_token_stride, hidden, size,
    top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Compute silu(gate(x)) * up(x) for the rows of a tile, which all go to one expert.

    A row is one token and one of the `top_k` experts that it chose; rows are sorted by expert. The grid is (tiles,
    column blocks). order: [rows], token * top_k + choice of each row; starts: [experts + 1], the first row of each
    expert; weight: [experts, 2 * size, hidden], the rows of gate before those of up. The tiles are those of
    `sort_by_expert`; one that is not needed begins past its expert's rows.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    end = tl.load(starts_ptr + expert + 1)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    if tl.load(tile_row_ptr + tile) >= end:
        return
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
        gate = dot(x, tl.load(weight_ptrs + inner_column[:, None], mask=mask, other=0.0), gate, PRECISION, WIDE)
        up = dot(
            x, tl.load(weight_ptrs + size * hidden + inner_column[:, None], mask=mask, other=0.0), up, PRECISION, WIDE
        )
    out = gate / (1.0 + tl.exp(-gate)) * up
    target = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < size)[None, :])


@launch_cheaply
@triton.jit
def multiply_down(
    x_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, hidden, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Multiply the rows of a tile by an expert's down matrix, times the expert's weight for the token, in fp32.

    The grid is (tiles, column blocks). x: [rows, size], the rows of `multiply_gate_up`, sorted by expert; weight:
    [experts, hidden, size]; out: [tokens, top_k, hidden], in the order of the tokens again, for the caller to add up.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    end = tl.load(starts_ptr + expert + 1)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    if tl.load(tile_row_ptr + tile) >= end:
        return
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
    choice = tl.load(order_ptr + row, mask=row < end, other=0).to(tl.int64)
    out = out * tl.load(scale_ptr + choice, mask=row < end, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + choice[:, None] * hidden + column[None, :]
    tl.store(target, out, mask=(row < end)[:, None] & (column < hidden)[None, :])
