"""bf16 matrices in the layouts that a CPU multiplies fastest.

Torch repacks a matrix for every multiplication, which takes long with few tokens. So matrices are packed once, for
the faster of two ways to multiply:

- native products (kernels/cpu/native/product.hpp): with older AVX-512 and AVX2, where oneDNN emulates bf16 and is four
  times slower; and with AVX512-BF16 and one thread;
- oneDNN with its blocked formats: with AMX, or AVX512-BF16 and several threads. Entering oneDNN takes longer than a
  small product, so small matrices are packed for the native products, too.

A packed matrix can only be used for multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_NATIVE = find_spec("kernels.cpu._native") is not None
"""Whether the native operations are installed. They are built on request (BLOCKCAST_KERNELS=ON, README.md)."""
if HAS_NATIVE:
    from kernels.cpu import _native

OUTPUTS_PER_PANEL = 64
"""Outputs that are adjacent in a native matrix."""

SMALL_PRODUCT_MAX = 750_000
"""Maximum number of multiplications up to which a native product is faster than oneDNN's on every CPU.

Measured with AMX, one token: 2.4 us instead of 16 us for 192 x 64 weights, 123 us instead of 380 us for 576 x 576.
"""


@dataclass(frozen=True, slots=True)
class NativeMatrix:
    """A matrix in the layout of the native products."""

    panels: Tensor
    """[panels, inputs / 2, OUTPUTS_PER_PANEL]: pairs of bf16 as int32, zeros after the last output."""
    num_outputs: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ W^T + bias in bf16, on torch's threads. x: [tokens, inputs]; the result: [tokens, outputs]."""
        num_tokens, num_inputs = x.shape
        assert num_inputs == 2 * self.panels.shape[1]
        assert x.dtype == torch.bfloat16
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(num_tokens, self.num_outputs, dtype=torch.bfloat16)
        if bias is not None:
            assert bias.shape == (self.num_outputs,)
            assert bias.dtype == torch.bfloat16
            bias = bias.contiguous()
        _native.product(
            x.data_ptr(), num_tokens, x.stride(0),
            self.panels.data_ptr(), self.num_outputs, num_inputs,
            0 if bias is None else bias.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class BlockedMatrix:
    """A matrix in oneDNN's layout."""

    weight: Tensor
    """[outputs, inputs]."""
    native_copy: NativeMatrix | None
    """Copy for products of at most SMALL_PRODUCT_MAX multiplications; None if native products cannot be used, or
    if even one token needs more multiplications."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ W^T + bias in bf16. x: [tokens, inputs]; the result: [tokens, outputs]."""
        if self.native_copy is not None and x.shape[0] * self.weight.numel() <= SMALL_PRODUCT_MAX:
            return self.native_copy.multiply(x, bias)
        return cast(Tensor, _linear(x, self.weight, bias, "none", [], ""))


PackedMatrix = NativeMatrix | BlockedMatrix

_linear = torch.ops.mkldnn._linear_pointwise.default


@cache
def _has_onednn_bf16() -> bool:
    """Return whether oneDNN, in this build of torch, multiplies bf16 with instructions of this CPU."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _has_amx() -> bool:
    """Return whether oneDNN multiplies with tiles, several times faster than with vectors."""
    is_tile_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return is_tile_supported is not None and bool(is_tile_supported())


def _has_native_products() -> bool:
    """Return whether the native products are built, and this CPU has their instructions."""
    return HAS_NATIVE and _native.has_products()


def has_bf16_instructions() -> bool:
    """Return whether this CPU has instructions for bf16, at several times the fp32 rate."""
    return _has_amx() or (HAS_NATIVE and "avx512bf16" in _native.instruction_sets())


def should_use_native_products() -> bool:
    """Return whether `pack_matrix` packs for the native products, which are slower than oneDNN's on some CPUs."""
    if not _has_native_products() or _has_amx():
        return False
    return torch.get_num_threads() == 1 or not has_bf16_instructions()


def pack_matrix(weight: Tensor) -> PackedMatrix | None:
    """Pack a bf16 weight [outputs, inputs] on the CPU for multiplication; None if products get no faster."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    can_be_native = _has_native_products() and weight.shape[1] % 2 == 0
    if can_be_native and should_use_native_products():
        return _pack_native(weight)
    if not _has_onednn_bf16():
        return None
    native_copy = _pack_native(weight) if can_be_native and weight.numel() <= SMALL_PRODUCT_MAX else None
    with torch.inference_mode():
        # The second argument is the expected number of input rows, on which the layout does not depend.
        blocked_weight = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight.default(weight, 16))
    return BlockedMatrix(blocked_weight, native_copy)


def _pack_native(weight: Tensor) -> NativeMatrix:
    num_outputs, num_inputs = weight.shape
    pairs = weight.contiguous().view(torch.int32)  # [outputs, inputs / 2]
    if num_outputs % OUTPUTS_PER_PANEL:  # else `pad` would copy the whole matrix
        pairs = F.pad(pairs, (0, 0, 0, -num_outputs % OUTPUTS_PER_PANEL))
    panels = pairs.view(-1, OUTPUTS_PER_PANEL, num_inputs // 2).transpose(1, 2).contiguous()
    return NativeMatrix(panels, num_outputs)
