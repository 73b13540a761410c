"""Penalties on tokens that a sequence has already: token counts on the device, and their effect on logits.

A row holds the distinct tokens of one sequence, in no order. The count code of a token is 2 * (times in the output) +
(1 if it is in the prompt). Tokens of the prompt are there only if a penalty needs them. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class TokenCounts:
    """The tokens of each row's sequence, with their counts, on the device."""

    token_ids: Tensor
    """[rows, room] int64."""
    count_codes: Tensor
    """[rows, room] int32."""
    used_lengths: Tensor
    """[rows] int64: number of tokens of each row."""


@dataclass(slots=True)
class PenaltyRows:
    """The rows of a batch that have penalties, with their penalties."""

    logits_rows: Tensor | None
    """[n] int64: rows of the logits; None: all rows in order."""
    count_rows: Tensor
    """[n] int64: rows of the counts."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """repetition, presence and frequency: [n, 1] fp32 each."""


def penalise(logits: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """Apply the penalties to logits [rows, vocab] fp32, in place. `width`: at least the tokens of any row."""
    token_ids, count_codes, _ = _gather_rows(counts, batch, width)
    row_logits = logits if batch.logits_rows is None else logits.index_select(0, batch.logits_rows)
    old_logits = row_logits.gather(1, token_ids)
    output_count = count_codes >> 1
    new_logits = torch.where(
        count_codes > 0,
        torch.where(old_logits > 0, old_logits / batch.repetition, old_logits * batch.repetition),
        old_logits,
    )
    new_logits = new_logits - (batch.frequency * output_count + batch.presence * (output_count > 0))
    row_logits.scatter_(1, token_ids, new_logits)
    if batch.logits_rows is not None:
        logits.index_copy_(0, batch.logits_rows, row_logits)


def count_sampled(sampled_tokens: Tensor, counts: TokenCounts, batch: PenaltyRows, width: int) -> None:
    """Count the drawn token of each row, [all rows of the logits]. `width`: at least the tokens of any row after it."""
    sampled_token = (
        sampled_tokens if batch.logits_rows is None else sampled_tokens.index_select(0, batch.logits_rows)
    )[:, None]
    token_ids, count_codes, used_lengths = _gather_rows(counts, batch, width)
    is_match = token_ids == sampled_token
    # In an empty row the first entry is that of an earlier sequence.
    is_present = is_match.any(1, keepdim=True) & (used_lengths > 0)
    is_next_slot = (torch.arange(width, device=sampled_tokens.device) == used_lengths) & ~is_present
    counts.token_ids[:, :width].index_copy_(0, batch.count_rows, torch.where(is_next_slot, sampled_token, token_ids))
    count_codes = torch.where(is_next_slot, 2, count_codes + 2 * is_match.int())
    counts.count_codes[:, :width].index_copy_(0, batch.count_rows, count_codes)
    counts.used_lengths.index_copy_(0, batch.count_rows, (used_lengths + ~is_present)[:, 0])


def _gather_rows(counts: TokenCounts, batch: PenaltyRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (token ids, count codes, number of tokens) of the batch's rows. Unused entries repeat the first one."""
    token_ids = counts.token_ids[:, :width].index_select(0, batch.count_rows)
    count_codes = counts.count_codes[:, :width].index_select(0, batch.count_rows)
    used_lengths = counts.used_lengths.index_select(0, batch.count_rows)[:, None]
    is_used = torch.arange(width, device=used_lengths.device) < used_lengths
    return (
        torch.where(is_used, token_ids, token_ids[:, :1]),
        torch.where(is_used, count_codes, count_codes[:, :1]),
        used_lengths,
    )
