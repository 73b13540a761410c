"""Penalties on tokens that a sequence already has, and the token counts for them, which stay on the device.

Each row (see `RowAllocator`) holds the distinct tokens of one sequence's output, with their counts, and the tokens of
its prompt if repetition_penalty needs them. So the host counts a sequence's tokens only once, and never waits for the
device. Memory is bounded: 8 bytes for each sequence and token of the longest context, and MAX_ENTRIES_AT_ONCE in a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.types import SamplingParams, Sequence
from kernels.host_copies import copy_to_device, overwrite
from kernels.interface import IntArray

INITIAL_ROW_TOKENS = 256
"""Distinct tokens that a row has room for at first. The room grows by a quarter or more when more are needed."""
MAX_ENTRIES_AT_ONCE = 1 << 21
"""Most entries of rows that are computed at once, of some 60 bytes each, unless one row has more."""


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The n sequences of a batch that have penalties, and their penalties on the device."""

    sequences: list[Sequence]
    table_rows: IntArray
    """[n]: row of each sequence in the tables of token counts, which stay on the device from step to step."""
    device_table_rows: Tensor
    """`table_rows` on the device."""
    logits_rows: Tensor | None
    """[n] int64: row of each sequence in the logits; None: all rows in order."""
    repetition: Tensor
    """[n, 1] fp32, as the other two penalties."""
    presence: Tensor
    frequency: Tensor


class TokenCounts(NamedTuple):
    """Distinct tokens of a sequence that penalties need, on the host."""

    token_ids: npt.NDArray[np.int32]
    output_counts: npt.NDArray[np.int32]
    """How often the output has each token; 0 if only the prompt has it."""


@dataclass(frozen=True, slots=True)
class PenaltyStep:
    """Inputs of one step's penalties, made on the host."""

    rows: PenaltyRows
    counts_by_new_row: dict[int, TokenCounts]
    """Tokens of the sequences that get a table row in this step, by that row."""
    width: int
    """Upper bound of the distinct tokens of any row, before and after the step."""


def make_penalty_rows(sequences: list[Sequence], table_rows: list[int], device: torch.device) -> PenaltyRows | None:
    """Collect the repetition, presence and frequency penalties of a batch; None if no sequence has any.

    `sequences`: one for each row of the logits. `table_rows`: row of each in the tables of token counts, which stay on
    the device from step to step.
    """
    logits_rows = [row for row, seq in enumerate(sequences) if has_penalties(seq.request.params)]
    if not logits_rows:
        return None
    penalised_sequences = [sequences[row] for row in logits_rows]
    penalised_table_rows = np.array([table_rows[row] for row in logits_rows], np.int64)
    params = [seq.request.params for seq in penalised_sequences]

    def make_column(values: list[float]) -> Tensor:
        return copy_to_device(np.array(values, np.float32), device)[:, None]

    has_all_rows = len(logits_rows) == len(sequences)
    return PenaltyRows(
        sequences=penalised_sequences,
        table_rows=penalised_table_rows,
        device_table_rows=copy_to_device(penalised_table_rows, device),
        logits_rows=None if has_all_rows else copy_to_device(np.array(logits_rows, np.int64), device),
        repetition=make_column([p.repetition_penalty for p in params]),
        presence=make_column([p.presence_penalty for p in params]),
        frequency=make_column([p.frequency_penalty for p in params]),
    )


class Penalties:
    """Keeps the token counts of all rows on the device, and applies the penalties to logits."""

    def __init__(self, row_count: int, vocab_size: int, device: torch.device, length_max: int | None = None) -> None:
        """Make empty tables for `row_count` sequences, of at most `length_max` tokens each (None: no limit)."""
        self._row_count = row_count
        self._vocab_size = vocab_size
        self._width_max = vocab_size if length_max is None else min(vocab_size, length_max + 1)
        """Most distinct tokens of a row, and one that a step may add."""
        self._device = device
        self._token_count_bounds: IntArray = np.zeros(row_count, np.int64)
        """Upper bound of each row's distinct tokens after the last prepared step; 0 for a row that is not in use."""
        # These tables begin with one short row, and grow when a step needs more.
        self._token_ids = torch.zeros(1, INITIAL_ROW_TOKENS, dtype=torch.int32, device=device)
        """[rows, width]: the distinct tokens of each row's sequence, in no order."""
        self._output_counts = torch.zeros(1, INITIAL_ROW_TOKENS, dtype=torch.int32, device=device)
        """[rows, width]: how often the output has each token; 0 if only the prompt has it."""
        self._token_counts = torch.zeros(row_count, dtype=torch.int64, device=device)
        """[rows]: number of distinct tokens of each row."""

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the counts of these rows, because other sequences get the rows."""
        self._token_count_bounds[rows] = 0

    def prepare(self, batch: PenaltyRows) -> PenaltyStep:
        """Prepare a step on the host, which counts the tokens of sequences that are new here.

        The host does not know how many distinct tokens a row has on the device. So it adds one for each step, as an
        upper bound.
        """
        counts_by_new_row: dict[int, TokenCounts] = {}
        for row, seq in zip(batch.table_rows.tolist(), batch.sequences, strict=True):
            if self._token_count_bounds[row] == 0:
                counts_by_new_row[row] = count_penalised_tokens(seq)
                self._token_count_bounds[row] = len(counts_by_new_row[row].token_ids)
        self._token_count_bounds[batch.table_rows] += 1
        width = min(int(self._token_count_bounds[batch.table_rows].max()), self._vocab_size)
        return PenaltyStep(batch, counts_by_new_row, width)

    def apply(self, logits: Tensor, step: PenaltyStep) -> None:
        """Store the counts of new rows, and penalise logits [all rows, vocab] fp32 in place."""
        batch = step.rows
        self._enlarge_tables(int(batch.table_rows.max()) + 1, step.width)
        if step.counts_by_new_row:
            self._store_new_rows(step.counts_by_new_row)
        for rows in self._split_rows(step):
            self._penalise(logits, step, rows)

    def _penalise(self, logits: Tensor, step: PenaltyStep, rows: slice) -> None:
        """Penalise the logits of some of a step's rows, in place.

        repetition_penalty divides positive logits, and multiplies negative ones. From this, frequency_penalty is
        subtracted once for each time that the output has the token, and presence_penalty if it has the token at all.
        """
        batch, width = step.rows, step.width
        table_rows = batch.device_table_rows[rows]
        token_ids = self._token_ids[:, :width].index_select(0, table_rows)
        output_counts = self._output_counts[:, :width].index_select(0, table_rows)
        token_counts = self._token_counts.index_select(0, table_rows)[:, None]
        # Entries past a row's tokens become copies of its first one, so that one value is written more than once.
        is_used = torch.arange(width, device=self._device) < token_counts
        token_ids = torch.where(is_used, token_ids, token_ids[:, :1]).long()
        output_counts = torch.where(is_used, output_counts, output_counts[:, :1])

        row_logits = logits[rows] if batch.logits_rows is None else logits[batch.logits_rows[rows]]
        old_logits = row_logits.gather(1, token_ids)
        repetition = batch.repetition[rows]
        repeated = torch.where(old_logits > 0, old_logits / repetition, old_logits * repetition)
        new_logits = torch.where(token_counts > 0, repeated, old_logits)  # a row without tokens stays as it is
        new_logits -= batch.frequency[rows] * output_counts + batch.presence[rows] * (output_counts > 0)
        row_logits.scatter_(1, token_ids, new_logits)
        if batch.logits_rows is not None:
            logits.index_copy_(0, batch.logits_rows[rows], row_logits)

    def count_sampled(self, sampled_tokens: Tensor, step: PenaltyStep) -> None:
        """Add the token drawn for each sequence to the sequence's token counts on the device. Called after `apply`.

        A row of the tables lists a sequence's distinct tokens and their counts. If the row has the token, its count
        grows by one, else the token is appended with count 1. `sampled_tokens`: [all rows of the logits].
        """
        batch = step.rows
        flat_token_ids, flat_output_counts = self._token_ids.view(-1), self._output_counts.view(-1)
        if batch.logits_rows is not None:
            sampled_tokens = sampled_tokens.index_select(0, batch.logits_rows)
        for rows in self._split_rows(step):
            table_rows, new_tokens = batch.device_table_rows[rows], sampled_tokens[rows]
            token_counts = self._token_counts.index_select(0, table_rows)
            is_match = self._token_ids[:, : step.width].index_select(0, table_rows) == new_tokens[:, None].int()
            is_match &= torch.arange(step.width, device=self._device) < token_counts[:, None]
            match_counts, match_columns = is_match.byte().max(1)
            has_token = match_counts.bool()
            columns = torch.where(has_token, match_columns, token_counts)
            flat_indices = table_rows * self._token_ids.shape[1] + columns
            new_counts = torch.where(has_token, flat_output_counts.gather(0, flat_indices) + 1, 1)
            flat_token_ids.index_copy_(0, flat_indices, new_tokens.int())
            flat_output_counts.index_copy_(0, flat_indices, new_counts)
            self._token_counts.index_copy_(0, table_rows, token_counts + ~has_token)

    def _split_rows(self, step: PenaltyStep) -> Iterator[slice]:
        """Yield the rows of a batch in parts of at most MAX_ENTRIES_AT_ONCE entries and 16 times as many logits."""
        part_rows = max(1, MAX_ENTRIES_AT_ONCE // max(step.width, self._vocab_size // 16))
        for start in range(0, len(step.rows.sequences), part_rows):
            yield slice(start, start + part_rows)

    def _store_new_rows(self, counts_by_row: dict[int, TokenCounts]) -> None:
        """Write the tokens of rows that this step uses for the first time."""
        table_rows = copy_to_device(np.array(list(counts_by_row), np.int64), self._device)
        lengths = np.array([len(counts.token_ids) for counts in counts_by_row.values()], np.int64)
        self._output_counts[:, 0].index_fill_(0, table_rows, 0)  # for empty rows, whose entries all repeat this one
        self._token_counts.index_copy_(0, table_rows, copy_to_device(lengths, self._device))
        for row, counts in counts_by_row.items():
            overwrite(self._token_ids[row], counts.token_ids)
            overwrite(self._output_counts[row], counts.output_counts)

    def _enlarge_tables(self, row_count: int, width: int) -> None:
        """Enlarge the tables of counts to at least `row_count` rows and `width` tokens in a row.

        They begin small, because all rows at the width of a prompt with 100,000 distinct tokens would take gigabytes.
        """
        old_row_count, old_width = self._token_ids.shape
        added_rows = _compute_growth(old_row_count, row_count, self._row_count)
        added_width = _compute_growth(old_width, width, self._width_max)
        if added_rows or added_width:
            self._token_ids = F.pad(self._token_ids, (0, added_width, 0, added_rows))
            self._output_counts = F.pad(self._output_counts, (0, added_width, 0, added_rows))


def _compute_growth(size: int, needed_size: int, size_max: int) -> int:
    """Return by how much to enlarge a dimension: by a quarter, up to `size_max`, or as much as needed."""
    return 0 if needed_size <= size else max(needed_size, min(size + size // 4, size_max)) - size


def count_penalised_tokens(seq: Sequence) -> TokenCounts:
    """Return the distinct tokens that a sequence's penalties need, with their counts in its output.

    Tokens of the prompt are needed for repetition_penalty alone.
    """
    output, wide_counts = np.unique(np.array(seq.token_ids[seq.prompt_len :], np.int32), return_counts=True)
    counts = wide_counts.astype(np.int32)
    if seq.request.params.repetition_penalty == 1.0:
        return TokenCounts(output, counts)
    only_in_prompt = np.setdiff1d(np.array(seq.token_ids[: seq.prompt_len], np.int32), output)
    no_counts = np.zeros(len(only_in_prompt), np.int32)
    return TokenCounts(np.concatenate([output, only_in_prompt]), np.concatenate([counts, no_counts]))


def has_penalties(p: SamplingParams) -> bool:
    """Return whether any penalty changes logits."""
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
