"""Matrices in the layout that the CPU's matrix library multiplies fastest (oneDNN's blocked formats).

For bf16 on CPUs that multiply it in hardware. Left in rows, a matrix is repacked inside every multiplication, which
with few tokens takes longer than the multiplication itself. A packed matrix can only be multiplied with.
"""

from __future__ import annotations

from typing import cast

import torch


def pack_matrix(weight: torch.Tensor) -> torch.Tensor | None:
    """[outputs, inputs] packed for `packed_linear`; None where that gains nothing (another dtype, device or CPU)."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    with torch.inference_mode():  # the number is a hint of how many rows x will have; the layout is the same for all
        return cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight.default(weight, 16))


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ W^T + bias, W as `pack_matrix` gave it. x: [..., inputs]. Returns [..., outputs]."""
    return cast(torch.Tensor, _linear(x, packed, bias, "none", _NO_SCALARS, ""))


_linear = torch.ops.mkldnn._linear_pointwise.default
_NO_SCALARS: list[float] = []
