"""Penalties on tokens that a sequence has already: what is kept of each sequence on the device, and what it does.

A row holds the distinct tokens that count, in no order, and for each 2 * (times in the output) + (whether it is in the
prompt). Tokens of the prompt are there only where somebody wants them. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class TokenCounts:
    """Of all rows."""

    tokens: Tensor
    """[rows, room] int64."""
    values: Tensor
    """[rows, room] int32."""
    used: Tensor
    """[rows] int64: how many of each are."""


@dataclass(slots=True)
class PenaltyRows:
    """The rows of a batch that have penalties, and which."""

    at: Tensor | None
    """[n] int64: where they are among the logits; None: there are no others."""
    rows: Tensor
    """[n] int64: where they are among the counts."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """[n, 1] fp32 each."""


def penalise(logits: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """Change logits [rows, vocab] fp32 in place. `width`: at least what any of the rows has in use."""
    tokens, values, _ = _known(counts, batch, width)
    mine = logits if batch.at is None else logits.index_select(0, batch.at)
    old = mine.gather(1, tokens)
    count = values >> 1
    new = torch.where(values > 0, torch.where(old > 0, old / batch.repetition, old * batch.repetition), old)
    new = new - (batch.frequency * count + batch.presence * (count > 0))
    mine.scatter_(1, tokens, new)
    if batch.at is not None:
        logits.index_copy_(0, batch.at, mine)


def count_drawn(drawn: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """A token of each row was drawn: [all rows of the logits]. `width`: at least what is in use after it."""
    token = (drawn if batch.at is None else drawn.index_select(0, batch.at))[:, None]
    tokens, values, used = _known(counts, batch, width)
    hit = tokens == token
    known = hit.any(1, keepdim=True) & (used > 0)  # of an empty row the first is what another sequence left there
    next_ = (torch.arange(width, device=drawn.device) == used) & ~known
    counts.tokens[:, :width].index_copy_(0, batch.rows, torch.where(next_, token, tokens))
    values = torch.where(next_, 2, values + 2 * hit.int())
    counts.values[:, :width].index_copy_(0, batch.rows, values)
    counts.used.index_copy_(0, batch.rows, (used + ~known)[:, 0])


def _known(counts: TokenCounts, batch: PenaltyRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, values, how many) of the rows; what is past the last is the first once more, with its value."""
    tokens = counts.tokens[:, :width].index_select(0, batch.rows)
    values = counts.values[:, :width].index_select(0, batch.rows)
    used = counts.used.index_select(0, batch.rows)[:, None]
    inside = torch.arange(width, device=used.device) < used
    return torch.where(inside, tokens, tokens[:, :1]), torch.where(inside, values, values[:, :1]), used
