"""Causal depthwise convolution over time, with the last inputs of each sequence kept as its state.

A tail holds the `width - 1` inputs before the next token, oldest first: [width - 1, channels]. Sums are taken in fp32
(fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import StatePlan, wide


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: StatePlan, silu: bool) -> Tensor:
    """See `interface.Kernels.causal_conv`. Decoding sequences go together, the others one by one."""
    taps = weight.t().to(wide(x.dtype))  # [width, channels]
    out = torch.empty_like(x)
    count = plan.batch.decode_count
    if count:
        window = torch.cat((tails[plan.decode_units], x[:count, None]), 1)  # [sequences, width, channels]
        out[:count] = _finish((window * taps).sum(1), bias, silu)
        tails[plan.decode_units] = window[:, 1:]
    for start, end, unit in plan.chunks:
        padded = torch.cat((tails[unit], x[start:end]))
        tails[unit] = padded[end - start :]
        padded = padded.to(taps.dtype)
        total = padded[: end - start] * taps[0]
        for i in range(1, taps.shape[0]):
            total.addcmul_(padded[i : i + end - start], taps[i])
        out[start:end] = _finish(total, bias, silu)
    return out


def _finish(total: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    if bias is not None:
        total = total + bias
    return F.silu(total) if silu else total
