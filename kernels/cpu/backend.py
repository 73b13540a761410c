"""The CPU backend: native operations for many small operations, plain torch for the rest.

Torch takes long to enter an operation, and its attention would need a copy of the KV. The native operations
(kernels/cpu/native, C++) attend directly over the pool. The reference computes dtypes and sizes that they do not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu import _native
from kernels.interface import BlockTable, PagedKV, RaggedBatch
from kernels.reference.backend import ReferenceKernels, ReferencePlan

_IS_BF16_BY_DTYPE = {torch.bfloat16: True, torch.float32: False}


class CpuKernels(ReferenceKernels):
    """Computes on a CPU, by native operations if they take the tensors, else as the reference."""

    name = "cpu"

    def plan_attention(self, batch: RaggedBatch, table: BlockTable, kv: PagedKV, window: int | None) -> Any:
        """Plan by the native code, or by a `ReferencePlan` for dtypes and sizes that it does not take."""
        is_bf16 = _IS_BF16_BY_DTYPE.get(kv.buffer.dtype)
        if is_bf16 is None or kv.head_dim % 16:
            return super().plan_attention(batch, table, kv, window)
        elems_per_row = kv.elems_per_row
        layout = _native.Layout(
            kv.buffer.numel() // elems_per_row, kv.elems_per_unit // elems_per_row, kv.blocks_per_unit, kv.block_size,
            kv.num_layers, kv.num_kv_heads, kv.head_dim,
        )  # fmt: skip
        blocks = table.select_blocks(batch, kv)
        assert window is None or window > 0
        return _native.AttentionPlan(batch.query_starts, batch.context_lens, blocks, layout, is_bf16, window)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: _native.AttentionPlan | ReferencePlan,
        scale: float,
    ) -> Tensor:  # fmt: skip
        if isinstance(plan, ReferencePlan):
            return super().attention(q, k, v, kv, layer, plan, scale)
        assert q.dtype == k.dtype == v.dtype == kv.buffer.dtype
        num_tokens, num_heads, dim = q.shape
        assert k.shape == v.shape == (num_tokens, kv.num_kv_heads, dim)
        assert 0 <= layer < kv.num_layers
        assert num_heads % kv.num_kv_heads == 0
        q, k, v = _make_tokens_contiguous(q), _make_tokens_contiguous(k), _make_tokens_contiguous(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        plan.attend(
            kv.buffer.data_ptr(), layer,
            q.data_ptr(), q.stride(0), num_heads,
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            out.data_ptr(), scale, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
        if not (2 <= x.dim() <= 3 and _are_native(x, weight)):
            return super().rms_norm(x, weight, eps, zero_centred)
        return _norm(x, None, weight, eps, zero_centred)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not (x.dim() == 2 and _are_native(x, weight, residual) and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps, zero_centred)
        assert residual.shape == x.shape
        return _norm(x, residual, weight, eps, zero_centred), residual

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        if not _are_native(x, cos, signed_sin):
            return super().rotate(x, cos, signed_sin)
        tokens, heads, dim = x.shape
        width = cos.shape[-1]
        assert cos.shape == signed_sin.shape == (tokens, width)
        assert width <= dim
        assert width % 2 == 0
        x, cos, signed_sin = _make_tokens_contiguous(x), cos.contiguous(), signed_sin.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        _native.rotate(
            _IS_BF16_BY_DTYPE[x.dtype],
            x.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(), out.data_ptr(),
            tokens, heads, dim, width, x.stride(0),
        )  # fmt: skip
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if not (_are_native(x) and x.is_contiguous() and x.shape[-1] % 2 == 0):
            return super().silu_and_mul(x)
        size = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
        _native.silu_and_mul(
            _IS_BF16_BY_DTYPE[x.dtype], x.data_ptr(), out.data_ptr(), out.numel() // max(size, 1), size
        )
        return out


def _are_native(*tensors: Tensor) -> bool:
    """Return whether the native operations take these tensors together."""
    dtype = tensors[0].dtype
    return dtype in _IS_BF16_BY_DTYPE and all(x.dtype == dtype for x in tensors[1:])


def _make_tokens_contiguous(x: Tensor) -> Tensor:
    """Return x, [tokens, heads, dim] or [tokens, dim], copied unless each token's values are contiguous."""
    inner_strides = (x.shape[-1], 1) if x.dim() == 3 else (1,)
    return x if x.stride()[1:] == inner_strides else x.contiguous()


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Return the root mean square norm of x, or of x + residual, which is then stored in the residual.

    x: [tokens, dim] or [tokens, heads, dim]. weight: [dim], or [heads, dim] with a weight for each head.
    """
    dim = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    assert weight.shape == (dim,) or weight.shape == (num_heads, dim)
    x, weight = _make_tokens_contiguous(x), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    weight_stride = dim if weight.dim() == 2 else 0  # 0: all heads have the same weight
    _native.norm(
        _IS_BF16_BY_DTYPE[x.dtype],
        x.data_ptr(), weight.data_ptr(), 0 if residual is None else residual.data_ptr(), out.data_ptr(),
        x.shape[0], num_heads, dim, x.stride(0), weight_stride,
        eps, zero_centred,
    )  # fmt: skip
    return out
