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
            kv.num_layers,
            kv.num_kv_heads, kv.head_dim,
        )  # fmt: skip
        blocks = table.select_blocks(batch, kv)
        return _native.AttentionPlan(batch.query_starts, batch.context_lens, blocks, layout, is_bf16, window)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, layer: int, plan: _native.AttentionPlan | ReferencePlan,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Store K and V of the step's tokens in a layer of the paged cache, and return their causal attention.

        q and the result: [tokens, heads, dim]. k and v: [tokens, kv_heads, dim]. `plan`: the step's batch, prepared by
        `plan_attention`; it is a `ReferencePlan` if the native code does not take the dtype or the size of a head.
        """
        if isinstance(plan, ReferencePlan):
            return super().attention(q, k, v, kv, layer, plan, scale)
        assert q.dtype == k.dtype == v.dtype == kv.buffer.dtype
        num_tokens, num_heads, dim = q.shape
        assert k.shape == v.shape == (num_tokens, kv.num_kv_heads, dim)
        q, k, v = _make_heads_adjacent(q), _make_heads_adjacent(k), _make_heads_adjacent(v)
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
        out = torch.empty(x.shape, dtype=x.dtype)
        _run_native_norm(x, weight, None, out, eps, zero_centred)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not (x.dim() == 2 and _are_native(x, weight, residual) and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps, zero_centred)
        assert residual.shape == x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        _run_native_norm(x, weight, residual, out, eps, zero_centred)
        return out, residual

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Apply rotary embedding to the first `width` dims of each head, in native code if that takes the dtype.

        x and the result: [tokens, heads, dim]. cos, signed_sin: [tokens, width], of the angles of each token's
        position; in the first half of signed_sin the sines are negated.
        """
        if not _are_native(x, cos, signed_sin):
            return super().rotate(x, cos, signed_sin)
        tokens, heads, dim = x.shape
        width = cos.shape[-1]
        assert cos.shape == signed_sin.shape == (tokens, width)
        assert width <= dim
        assert width % 2 == 0
        x, cos, signed_sin = _make_heads_adjacent(x), cos.contiguous(), signed_sin.contiguous()
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


def _make_heads_adjacent(x: Tensor) -> Tensor:
    """Return x, [tokens, heads, dim], copied unless the heads of a token are adjacent."""
    dim = x.shape[2]
    return x if x.stride()[1:] == (dim, 1) else x.contiguous()


def _run_native_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, eps: float, zero_centred: bool
) -> None:
    """Compute the root mean square norm of x by native code, times `weight`, and write it to `out`.

    If there is a residual, x is first added to it in place, and the sum is normed. `zero_centred`: the factor is
    1 + weight. x: [tokens, dim] or [tokens, heads, dim]. weight: [dim], or [heads, dim] with a weight for each head.
    """
    has_heads = x.dim() == 3
    num_heads = x.shape[1] if has_heads else 1
    dim = x.shape[-1]
    inner_strides = (dim, 1) if has_heads else (1,)
    if x.stride()[1:] != inner_strides:
        x = x.contiguous()
    assert weight.shape == (dim,) or weight.shape == (num_heads, dim)
    weight = weight.contiguous()
    weight_stride = dim if weight.dim() == 2 else 0  # 0: all heads have the same weight
    residual_address = 0 if residual is None else residual.data_ptr()
    _native.norm(
        _IS_BF16_BY_DTYPE[x.dtype],
        x.data_ptr(), weight.data_ptr(), residual_address, out.data_ptr(),
        x.shape[0], num_heads, dim, x.stride(0), weight_stride,
        eps, zero_centred,
    )  # fmt: skip
