"""Logprobs of tokens: computed on the device, read when the host has a reason to wait anyway.

Knows logits and tokens; no requests, no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Logprobs of some rows, still on the device."""

    tokens: Tensor
    """[rows]."""
    values: Tensor
    ranks: Tensor
    """[rows] each: the token's own."""
    top_values: Tensor | None
    top_tokens: Tensor | None
    """[rows, most that a row wants]; None where no row wants any."""


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Rows[int]) -> LogprobTensors:
    """Logprob and rank of each row's token, and its likeliest tokens, queued. logits: [rows, vocab]; tokens: [rows]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, tokens[:, None])
    most = min(max(counts), logits.shape[1])
    values, ids = logprobs.topk(most) if most else (None, None)
    return LogprobTensors(tokens, chosen[:, 0], 1 + (logprobs > chosen).sum(-1), values, ids)


def read_logprobs(found: LogprobTensors, counts: Rows[int]) -> list[TokenLogprobs]:
    """Wait for them; of each row its `counts[i]` likeliest tokens."""
    tokens: list[int] = found.tokens.tolist()
    ranks: list[int] = found.ranks.tolist()
    values: list[float] = found.values.tolist()
    nothing: list[list[float]] = [[]] * len(tokens)
    top_values: list[list[float]] = nothing if found.top_values is None else found.top_values.tolist()
    top_tokens = nothing if found.top_tokens is None else found.top_tokens.tolist()
    return [
        TokenLogprobs(token, value, rank, list(zip(ids[:count], likely[:count], strict=True)))
        for token, value, rank, ids, likely, count in zip(
            tokens, values, ranks, top_tokens, top_values, counts, strict=True
        )
    ]
