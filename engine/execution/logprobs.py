"""Logprobs of tokens: computed on the device, then read on the host. Knows no requests and no sampling."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from engine.types import TokenLogprobs

LOGPROB_TENSORS = 5
"""Number of tensors that `compute_token_logprobs` returns."""


def compute_token_logprobs(logits: Tensor, tokens: Tensor, top_count: int) -> list[Tensor]:
    """Return each row's token, its logprob and its rank, then the logprobs and ids of the `top_count` likeliest tokens.

    logits: [rows, vocab]; tokens: [rows]. Shapes: three times [rows], twice [rows, top_count].
    """
    logprobs = torch.log_softmax(logits.float(), -1)
    own_logprobs = logprobs.gather(1, tokens[:, None])
    values, ids = logprobs.topk(min(top_count, logits.shape[1]))
    return [tokens, own_logprobs[:, 0], 1 + (logprobs > own_logprobs).sum(-1), values, ids]


def read_logprobs(columns: Rows[list[Any]], counts: Rows[int]) -> list[TokenLogprobs]:
    """Build each row's logprobs from the columns of `compute_token_logprobs`, with its `counts[i]` likeliest tokens."""
    return [
        TokenLogprobs.pack(token, value, rank, zip(top_ids[:count], top_logprobs[:count], strict=True))
        for token, value, rank, top_logprobs, top_ids, count in zip(*columns, counts, strict=True)
    ]
