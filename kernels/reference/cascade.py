"""Attention in parts: what several sequences share is attended once for all of them, and each adds its own.

A part is a softmax over its keys alone, with the logarithm of its sum; parts are put together by these weights
(Flash-Decoding, Dao et al., 2023; Hydragen, Juravsky et al., 2024). What native kernels do with prefixes, obviously.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import wide


def attend_part(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(attention over these keys, [queries, heads, dim]; logarithm of the sum of its weights, [queries, heads]).

    q: [queries, heads, dim], of any sequences; k and v: [keys, kv_heads, dim], which every query sees. No keys: a part
    without weight. In fp32, or fp64 for fp64 inputs.
    """
    dtype, per_key = wide(q.dtype), q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(per_key, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.to(dtype), k) * scale
    weight = scores.logsumexp(-1)
    return torch.einsum("qhk,khd->qhd", (scores - weight[..., None]).exp(), v), weight


def join_parts(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The attention over all of their keys, [queries, heads, dim]; one of the parts at least has some."""
    weights = torch.stack([weight for _, weight in parts]).softmax(0)
    return torch.stack([out for out, _ in parts]).nan_to_num(0.0).mul(weights[..., None]).sum(0)
