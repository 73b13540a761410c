"""Matrices in the layouts that a CPU multiplies fastest: oneDNN's blocked formats, and fp32 for very small products.

For bf16 on CPUs that multiply it in hardware. Left in rows, a matrix is repacked inside every multiplication, which
with few tokens takes longer than the multiplication itself; and a small matrix with few tokens is multiplied sooner
in fp32 than oneDNN is entered. A packed matrix can only be multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F

SMALL_MATRIX_ELEMS = 160_000
"""Matrices of at most so many elements are kept in fp32 as well."""
SMALL_PRODUCTS_MAX = 300_000
"""Up to so many multiplications fp32 is faster, conversions included: measured on a core with AVX-512 bf16."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    blocked: torch.Tensor
    """[outputs, inputs] in oneDNN's layout."""
    plain: torch.Tensor | None
    """[outputs, inputs] in fp32, of a small matrix."""
    plain_rows_max: int
    """Rows of x up to which `plain` is the faster one."""


@cache
def has_fast_bf16() -> bool:
    """Whether this CPU, and this build of torch, multiply bf16 in hardware."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_matrix(weight: torch.Tensor) -> PackedMatrix | None:
    """[outputs, inputs] packed for `packed_linear`; None where that gains nothing (another dtype, device or CPU)."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not has_fast_bf16():
        return None
    with torch.inference_mode():  # the number is a hint of how many rows x will have; the layout is the same for all
        blocked = cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight.default(weight, 16))
        if weight.numel() > SMALL_MATRIX_ELEMS:
            return PackedMatrix(blocked, None, 0)
        return PackedMatrix(blocked, weight.float(), SMALL_PRODUCTS_MAX // weight.numel())


def packed_linear(x: torch.Tensor, packed: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ W^T + bias, W as `pack_matrix` gave it. x: [tokens, inputs]. Returns [tokens, outputs]."""
    if x.shape[0] <= packed.plain_rows_max:
        assert packed.plain is not None
        return F.linear(x.float(), packed.plain, None if bias is None else bias.float()).to(x.dtype)
    return cast(torch.Tensor, _linear(x, packed.blocked, bias, "none", _NO_SCALARS, ""))


_linear = torch.ops.mkldnn._linear_pointwise.default
_NO_SCALARS: list[float] = []
