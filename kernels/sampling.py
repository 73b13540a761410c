"""Drawing a token from each row of logits: what a draw is, and the reference for it in plain torch.

Tokens are ordered by falling logit, equal ones by rising id. Kept are, of those whose weight exp(logit / temperature)
is at least `min_p` of the greatest, the first `top_k`, and of these the fewest whose weights make up `top_p` of theirs.
The token drawn is the one where the running sum of the kept weights, by id, passes `at` times their sum: one uniform
number per row, so a row draws the same in whatever company it is computed. NaN counts as -inf; a row of nothing else
yields token 0. Knows no requests and no seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

LOGIT_MAX = 3.3895313892515355e38
"""The largest bf16: what +inf counts as."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How the token of each row is drawn: [rows] each, on the logits' device."""

    temperature: Tensor
    """fp32; 0: the likeliest token, whatever the rest says."""
    min_p: Tensor
    """fp32 in [0, 1]; 0 keeps all."""
    top_k: Tensor
    """int32, at least 1; the vocabulary's size or more keeps all."""
    top_p: Tensor
    """fp32; 1 or more keeps all. At least one token is kept."""
    at: Tensor
    """fp64 in [0, 1)."""


@runtime_checkable
class DrawsTokens(Protocol):
    """A backend that draws on its device, without the host waiting for anything."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """The token of each row, [rows] int64. logits: [rows, vocab], left unchanged."""
        ...


def kept_weights(logits: Tensor, draws: Draws) -> Tensor:
    """[rows, vocab] fp64: each token's weight relative to the greatest; 0 for what is not kept."""
    values = logits.double().nan_to_num(nan=float("-inf"), posinf=LOGIT_MAX, neginf=float("-inf"))
    values, order = values.clamp(max=LOGIT_MAX).sort(descending=True, stable=True)
    peak = values[:, :1].nan_to_num(neginf=0.0)
    temperature = draws.temperature.double()[:, None]
    cold = temperature == 0.0
    weights = ((values - peak) / temperature.masked_fill(cold, 1.0)).exp()
    weights = weights * (weights >= draws.min_p.double()[:, None])
    rank = torch.arange(values.shape[1], device=values.device)
    weights = weights * (rank < draws.top_k[:, None])
    below = weights.cumsum(-1) - weights
    needed = draws.top_p.double()[:, None] * weights.sum(-1, keepdim=True)
    weights = weights * ((below < needed) | (draws.top_p[:, None] >= 1.0) | (rank == 0))
    weights = torch.where(cold, (rank == 0).double(), weights)
    return torch.zeros_like(weights).scatter_(1, order, weights)


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """The reference of `DrawsTokens.draw`."""
    cumulative = kept_weights(logits, draws).cumsum(-1)
    target = draws.at.double()[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return torch.where(cumulative[:, -1] > 0.0, found.clamp(max=logits.shape[1] - 1), 0)
