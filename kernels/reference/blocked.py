"""Causal attention of one sequence as a few large bf16 products, for CPUs that multiply bf16 in hardware.

torch's CPU flash attention reaches a fraction of the bf16 matrix rate (measured: 80 of 450 GFLOP/s a core with AVX-512
bf16); products over blocks of queries, with the keys no query of the block sees left out, take less than half its
time. Scores are rounded to bf16 before the softmax, which is taken in fp32.
"""

from __future__ import annotations

import torch

QUERY_BLOCK = 128


def blocked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """q: [queries, heads, dim], the last positions of k and v: [context, kv_heads, dim]. Returns q's shape."""
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    group = heads // kv_heads
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [kv_heads, context, dim]
    folded = q.view(queries, kv_heads, group, dim) if q.is_contiguous() else q.reshape(queries, kv_heads, group, dim)
    out = torch.empty_like(folded, memory_format=torch.contiguous_format)
    before = context - queries  # keys that every query sees, but for a window
    for start in range(0, queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, queries)
        size, last = end - start, before + end
        first = 0 if window is None else max(0, before + start - window + 1)
        block = folded[start:end].permute(1, 2, 0, 3).reshape(kv_heads, group * size, dim)
        scores = torch.bmm(block, keys[:, first:last].transpose(1, 2)).float().mul_(scale)
        scores = scores.view(kv_heads, group, size, last - first)
        hidden = torch.ones(size, size, dtype=torch.bool).triu_(1)
        scores[..., last - first - size :].masked_fill_(hidden, float("-inf"))
        if window is not None and last - first > window:
            # Query i of the block sees nothing before key i, counted from where the first query's window starts.
            left = torch.ones(size, last - first, dtype=torch.bool).tril_(start + before - window - first)
            scores.masked_fill_(left, float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).view(kv_heads, group * size, last - first)
        mixed = torch.bmm(weights, values[:, first:last])
        out[start:end] = mixed.view(kv_heads, group, size, dim).permute(2, 0, 1, 3)
    return out.view(queries, heads, dim)
