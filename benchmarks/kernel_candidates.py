"""What might be faster on a GPU and has not been measured: other tiles, a matrix-vector product of our own.

`benchmarks/kernels.py --candidates` times them beside what is in use. One that shows is moved to `kernels`; one that
does not is deleted here, with its figure in docs/performance.md.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton import backend as triton_ops

DECODE_TILES = ((32, 4, 4), (64, 8, 4), (128, 4, 3), (128, 8, 4))
"""(keys, warps, stages). One stage more or less gives the same machine code."""
PREFILL_TILES = ((128, 128, 8, 3), (64, 64, 4, 4))
"""(rows, keys, warps, stages). Larger ones spill registers."""
VECTOR_TILES = ((4, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 1024, 8))
"""(outputs, inputs, warps) of a program of `matvec`."""

Call = Callable[[], torch.Tensor]


def with_constant(call: Call, name: str, value: Any) -> Call:
    """The call with another value of a constant or function of `kernels.triton.backend`."""

    def changed() -> torch.Tensor:
        usual = getattr(triton_ops, name)
        setattr(triton_ops, name, value)
        try:
            return call()
        finally:
            setattr(triton_ops, name, usual)

    return changed


def other_tiles(call: Call, decodes: bool) -> dict[str, Call]:
    """Of an attention call."""
    name, tiles = ("decode_tile", DECODE_TILES) if decodes else ("prefill_tile", PREFILL_TILES)
    return {"x".join(map(str, tile)): with_constant(call, name, lambda *_, t=tile: t) for tile in tiles}


def matvec_peers(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
    return {
        f"own {'x'.join(map(str, tile))}": lambda t=tile: matvec(x, weight, t) for tile in VECTOR_TILES
    } | {
        f"own, SwiGLU {'x'.join(map(str, tile))}": lambda t=tile: matvec(x, weight, t, gated=True)
        for tile in VECTOR_TILES[:2]
    }  # fmt: skip


def matvec(
    x: torch.Tensor, weight: torch.Tensor, tile: tuple[int, int, int] = VECTOR_TILES[1], gated: bool = False
) -> torch.Tensor:
    """x @ weight^T of one row, [1, outputs]; `gated`: silu of its first half times the second, [1, outputs / 2]."""
    outputs, inputs = weight.shape
    assert x.shape == (1, inputs)
    assert weight.is_contiguous()
    count = outputs // 2 if gated else outputs
    out = torch.empty((1, count), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = tile
    _matvec[(triton.cdiv(count, block_n),)](
        x, weight, out, count, INPUTS=inputs, GATED=gated, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps
    )
    return out


@triton.jit
def _matvec(
    x_ptr, weight_ptr, out_ptr, count,
    INPUTS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (output blocks): each reads whole rows of the weight; enough programs share a processor to hide latency."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    source = weight_ptr + row.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    gated = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        k = first + at
        mask = (row < count)[:, None] & (k < INPUTS)[None, :]
        x = tl.load(x_ptr + k, mask=k < INPUTS, other=0.0).to(tl.float32)[None, :]
        total += tl.load(source + k[None, :], mask=mask, other=0.0).to(tl.float32) * x
        if GATED:
            up = tl.load(source + count.to(tl.int64) * INPUTS + k[None, :], mask=mask, other=0.0)
            gated += up.to(tl.float32) * x
    out = tl.sum(total, 1)
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * tl.sum(gated, 1)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=row < count)
