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
    lengths: Tensor
    """[rows] int64: how many of each are."""


@dataclass(slots=True)
class PenaltyRows:
    """The rows of a batch that have penalties, and which."""

    logits_rows: Tensor | None
    """[n] int64: where they are among the logits; None: there are no others."""
    count_rows: Tensor
    """[n] int64: where they are among the counts."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """[n, 1] fp32 each."""


def penalise(logits: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """Change logits [rows, vocab] fp32 in place. `width`: at least what any of the rows has in use."""
    tokens, values, _ = _gather_rows(counts, batch, width)
    row_logits = logits if batch.logits_rows is None else logits.index_select(0, batch.logits_rows)
    old_logits = row_logits.gather(1, tokens)
    output_count = values >> 1
    new_logits = torch.where(
        values > 0,
        torch.where(old_logits > 0, old_logits / batch.repetition, old_logits * batch.repetition),
        old_logits,
    )
    new_logits = new_logits - (batch.frequency * output_count + batch.presence * (output_count > 0))
    row_logits.scatter_(1, tokens, new_logits)
    if batch.logits_rows is not None:
        logits.index_copy_(0, batch.logits_rows, row_logits)


def count_sampled(sampled_tokens: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """A token of each row was drawn: [all rows of the logits]. `width`: at least what is in use after it."""
    sampled_token = (
        sampled_tokens if batch.logits_rows is None else sampled_tokens.index_select(0, batch.logits_rows)
    )[:, None]
    tokens, values, lengths = _gather_rows(counts, batch, width)
    is_match = tokens == sampled_token
    # In an empty row the first token is what another sequence left there.
    is_present = is_match.any(1, keepdim=True) & (lengths > 0)
    is_next_slot = (torch.arange(width, device=sampled_tokens.device) == lengths) & ~is_present
    counts.tokens[:, :width].index_copy_(0, batch.count_rows, torch.where(is_next_slot, sampled_token, tokens))
    values = torch.where(is_next_slot, 2, values + 2 * is_match.int())
    counts.values[:, :width].index_copy_(0, batch.count_rows, values)
    counts.lengths.index_copy_(0, batch.count_rows, (lengths + ~is_present)[:, 0])


def _gather_rows(counts: TokenCounts, batch: PenaltyRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, values, how many) of the rows; what is past the last is the first once more, with its value."""
    tokens = counts.tokens[:, :width].index_select(0, batch.count_rows)
    values = counts.values[:, :width].index_select(0, batch.count_rows)
    lengths = counts.lengths.index_select(0, batch.count_rows)[:, None]
    is_used = torch.arange(width, device=lengths.device) < lengths
    return torch.where(is_used, tokens, tokens[:, :1]), torch.where(is_used, values, values[:, :1]), lengths
