"""Drawing a token from each row of logits: what a draw is, and how it is done in plain torch.

Tokens are ordered by falling logit, equal ones by rising id. Kept are, of those whose weight exp(logit / temperature)
is at least `min_p` of the greatest, the first `top_k`, and of these the fewest whose weights make up `top_p` of theirs.
The token drawn is the one where the running sum of the kept weights, by id, passes `at` times their sum: one uniform
number per row, so a row draws the same in whatever company it is computed. NaN counts as -inf; a row of nothing else
yields token 0. Knows no requests and no seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOGIT_MAX = 3.3895313892515355e38
"""The largest bf16: what +inf counts as."""
SPAN = 512
"""Weights that are summed up before any running sum is made."""
CANDIDATES = 256
"""What is kept of a row is looked for among so many likeliest tokens first."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Rows by how they are drawn; the others are greedy."""

    plain: list[int]
    cut: list[int]
    """With `top_k` or `top_p`."""


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
    kinds: Kinds | None = None
    """What the host knows already, so that `draw` need not ask the device."""
    barred: bool = False
    """Whether many logits are -inf: exp takes six times as long for these on a CPU, unless they are seen to."""

    def of(self, rows: Tensor | list[int]) -> Draws:
        """Of some rows: a mask of them, or their indices."""
        return Draws(
            self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows], self.at[rows],
            barred=self.barred,
        )  # fmt: skip


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """The token of each row, [rows] int64. logits: [rows, vocab], left unchanged. The host waits for the device."""
    values = logits.float()
    peak, tokens = values.max(-1)  # the first of equal ones
    kinds = draws.kinds or _kinds(draws, values.shape[1])
    if not math.isfinite(peak.sum().item()):  # NaN is the greatest of all
        values = values.nan_to_num(nan=float("-inf"), posinf=LOGIT_MAX, neginf=float("-inf"))
        peak, tokens = values.max(-1)
        some = (peak > float("-inf")).tolist()
        kinds = Kinds([i for i in kinds.plain if some[i]], [i for i in kinds.cut if some[i]])
    for rows, pick in ((kinds.plain, _draw_plain), (kinds.cut, _draw_cut)):
        if len(rows) == len(tokens):
            return pick(values, peak, draws)
        if rows:
            tokens[rows] = pick(values[rows], peak[rows], draws.of(rows))
    return tokens


def _kinds(draws: Draws, vocab: int) -> Kinds:
    drawn = draws.temperature > 0.0
    cut = drawn & ((draws.top_k < vocab) | (draws.top_p < 1.0))
    return Kinds((drawn & ~cut).nonzero()[:, 0].tolist(), cut.nonzero()[:, 0].tolist())


def _weights(values: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Of each token, relative to the greatest: 0 where it is under `min_p`."""
    weights = (values - peak[:, None]).div_(draws.temperature[:, None])
    if draws.barred:  # what weighs less than 2e-35 weighs nothing
        weights = torch.threshold_(weights.clamp_(min=-80.0).exp_(), 2e-35, 0.0)
    else:
        weights.exp_()
    return weights.masked_fill_(weights < draws.min_p[:, None], 0.0) if draws.min_p.any() else weights


def _draw_plain(values: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    return _passed(_weights(values, peak, draws), draws.at)


def _draw_cut(values: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Of rows with `top_k` or `top_p`: found among the likeliest tokens, where they are enough."""
    vocab = values.shape[1]
    limited, rank = draws.top_k < vocab, torch.arange(vocab, device=values.device)
    whole = None if limited.all() else _weights(values, peak, draws).sum(-1, dtype=torch.float64)
    count = min(vocab, max(CANDIDATES, 2 * int((draws.top_k * limited).max())))
    while True:
        if count < vocab:
            ids = values.topk(count, sorted=False).indices.sort().values
            best, at = values.gather(1, ids).sort(descending=True, stable=True)
        else:
            best, at = values.sort(descending=True, stable=True)
        weights = _weights(best, peak, draws).masked_fill_(rank[:count] >= draws.top_k[:, None], 0.0)
        running = weights.cumsum(-1, dtype=torch.float64)
        total = running[:, -1] if whole is None else torch.where(limited, running[:, -1], whole)
        needed = (total * draws.top_p).clamp(min=1e-300).masked_fill(draws.top_p >= 1.0, float("inf"))
        kept = weights.masked_fill_(running - weights >= needed[:, None], 0.0)
        # Enough: what is as likely as the last one kept is among them, so that the first ids of these are known.
        if count == vocab or bool((best[:, -1:] < best.gather(1, kept.count_nonzero(-1)[:, None] - 1)).all()):
            break
        count = vocab
    picked = _passed(torch.zeros_like(kept).scatter_(1, at, kept), draws.at)
    return picked if count == vocab else ids.gather(1, picked[:, None])[:, 0]


def _passed(weights: Tensor, at: Tensor) -> Tensor:
    """[rows]: where the running sum of the weights [rows, n] passes `at` of it all; one that weighs something.

    Running sums are of spans, then of one span's weights: an fp64 for every weight would be as slow as all the rest.
    """
    count = weights.shape[1]
    whole = count // SPAN * SPAN
    sums = weights[:, :whole].view(len(weights), whole // SPAN, SPAN).sum(-1, dtype=torch.float64)
    running = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], 1).cumsum_(1)
    target = at.double()[:, None] * running[:, -1:]
    span = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = torch.where(span > 0, running.gather(1, (span - 1).clamp_(min=0)), 0.0)
    places = span * SPAN + torch.arange(SPAN, device=weights.device)
    inside = weights.gather(1, places.clamp(max=count - 1)).double().masked_fill_(places >= count, 0.0).cumsum_(1)
    last = torch.searchsorted(
        inside, inside[:, -1:].contiguous()
    )  # sums in another order may leave a target behind them all
    found = torch.searchsorted(inside, target - before, right=True).minimum(last)
    return (span * SPAN + found)[:, 0].clamp_(max=count - 1)
