"""Penalties on tokens that a sequence already has, and the token counts for them, which stay on the device.

Each row (see `RowAllocator`) holds the distinct tokens of one sequence's output, with their counts, and the tokens of
its prompt if repetition_penalty needs them. So the host counts a sequence's tokens only once, and a step costs a few
device operations for each distinct token. The host never waits for the device here.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.types import SamplingParams, Sequence
from kernels.interface import IntArray
from kernels.transfer import copy_to_device

INITIAL_ROW_TOKENS = 256
"""Distinct tokens that a row has room for at first. The room is doubled when more are needed."""


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

    token_ids: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.int64]
    """How often the output has each token; 0 if only the prompt has it."""


class NewRows(NamedTuple):
    """Tokens of the sequences that get a table row in this step, on the device."""

    table_rows: Tensor
    """[new rows]"""
    lengths: Tensor
    """[new rows]: number of distinct tokens of each."""
    token_rows: Tensor
    """[tokens]: table row of each distinct token."""
    token_columns: Tensor
    """[tokens]: place of each token in its row: 0, 1, 2, ..."""
    token_ids: Tensor
    """[tokens]"""
    output_counts: Tensor
    """[tokens]: how often the output has each token."""


class GatheredRows(NamedTuple):
    """Token counts of a batch's rows before a step. Entries past a row's tokens repeat its first one."""

    token_ids: Tensor
    """[n, width] int64"""
    output_counts: Tensor
    """[n, width] int32"""
    token_counts: Tensor
    """[n, 1] int64: distinct tokens of each row"""


@dataclass(slots=True)
class PenaltyStep:
    """Inputs of one step's penalties, made on the host."""

    new_rows: NewRows | None
    width: int
    """Upper bound of the distinct tokens of any row, before and after the step."""
    gathered: GatheredRows | None = None
    """Set by `apply` for `count_sampled`, which frees it: the step's inputs live until its result is read."""


def make_penalty_rows(sequences: list[Sequence], table_rows: list[int], device: torch.device) -> PenaltyRows | None:
    """Collect the penalties of a batch; None if no sequence has any.

    `sequences`: one for each row of the logits. `table_rows`: row of each in the tables of counts.
    """
    logits_rows = [row for row, seq in enumerate(sequences) if has_penalties(seq.request.params)]
    if not logits_rows:
        return None
    params = [sequences[row].request.params for row in logits_rows]
    penalised_table_rows = np.array([table_rows[row] for row in logits_rows], np.int64)

    def make_column(values: list[float]) -> Tensor:
        return copy_to_device(np.array(values, np.float32), device)[:, None]

    has_all_rows = len(logits_rows) == len(sequences)
    return PenaltyRows(
        sequences=[sequences[row] for row in logits_rows],
        table_rows=penalised_table_rows,
        device_table_rows=copy_to_device(penalised_table_rows, device),
        logits_rows=None if has_all_rows else copy_to_device(np.array(logits_rows, np.int64), device),
        repetition=make_column([p.repetition_penalty for p in params]),
        presence=make_column([p.presence_penalty for p in params]),
        frequency=make_column([p.frequency_penalty for p in params]),
    )


class Penalties:
    """Keeps the token counts of all rows on the device, and applies the penalties to logits."""

    def __init__(self, row_count: int, vocab_size: int, device: torch.device) -> None:
        """Make empty tables, which grow to at most `row_count` rows of `vocab_size` tokens."""
        self._row_count = row_count
        self._vocab_size = vocab_size
        self._device = device
        self._token_count_bounds: IntArray = np.zeros(row_count, np.int64)
        """Upper bound of each row's distinct tokens after the last prepared step; 0 for a row that is not in use."""
        self._token_ids = torch.zeros(1, INITIAL_ROW_TOKENS, dtype=torch.int64, device=device)
        """[rows so far, room]: the distinct tokens of each row's sequence, in no order."""
        self._output_counts = torch.zeros(1, INITIAL_ROW_TOKENS, dtype=torch.int32, device=device)
        """[rows so far, room]: how often the output has each token; 0 if only the prompt has it."""
        self._token_counts = torch.zeros(row_count, dtype=torch.int64, device=device)
        """[rows]: number of distinct tokens of each row."""

    def reset_rows(self, rows: Rows[int] | None = None) -> None:
        """Forget the counts of these rows (None: of all), because other sequences get the rows."""
        if rows is None:
            self._token_count_bounds[:] = 0
        else:
            self._token_count_bounds[rows] = 0

    def prepare(self, batch: PenaltyRows) -> PenaltyStep:
        """Prepare a step on the host, which counts the tokens of sequences that are new here.

        The host does not know how many distinct tokens a row has on the device. So it adds one for each step, as an
        upper bound.
        """
        is_new = self._token_count_bounds[batch.table_rows] == 0
        new_rows = self._count_new_rows(batch, is_new.nonzero()[0]) if is_new.any() else None
        self._token_count_bounds[batch.table_rows] += 1
        width = min(int(self._token_count_bounds[batch.table_rows].max()), self._vocab_size)
        return PenaltyStep(new_rows, width)

    def _count_new_rows(self, batch: PenaltyRows, indices: IntArray) -> NewRows:
        """Count the tokens of the batch's sequences at these indices, and send the counts to the device."""
        counts_by_sequence = [count_penalised_tokens(batch.sequences[i]) for i in indices.tolist()]
        table_rows = batch.table_rows[indices]
        lengths = np.array([len(counts.token_ids) for counts in counts_by_sequence], np.int64)
        self._token_count_bounds[table_rows] = lengths
        columns = np.concatenate([np.arange(length) for length in lengths])
        token_ids = np.concatenate([counts.token_ids for counts in counts_by_sequence])
        output_counts = np.concatenate([counts.output_counts for counts in counts_by_sequence])
        return NewRows(
            table_rows=copy_to_device(table_rows, self._device),
            lengths=copy_to_device(lengths, self._device),
            token_rows=copy_to_device(np.repeat(table_rows, lengths), self._device),
            token_columns=copy_to_device(columns, self._device),
            token_ids=copy_to_device(token_ids, self._device),
            output_counts=copy_to_device(output_counts, self._device),
        )

    def apply(self, logits: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """Store the counts of new rows, set `step.gathered`, and penalise logits [all rows, vocab] fp32 in place."""
        self._enlarge_tables(int(batch.table_rows.max()) + 1, step.width)
        if step.new_rows is not None:
            self._store_new_rows(step.new_rows)
        step.gathered = self._gather_rows(batch, step.width)
        token_ids = step.gathered.token_ids
        row_logits = logits if batch.logits_rows is None else logits.index_select(0, batch.logits_rows)
        row_logits.scatter_(1, token_ids, _penalise(row_logits.gather(1, token_ids), batch, step.gathered))
        if batch.logits_rows is not None:
            logits.index_copy_(0, batch.logits_rows, row_logits)

    def count_sampled(self, sampled_tokens: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """Add the token drawn for each row to the row's counts. Called after `apply`.

        If the row has the token, its count grows by one. Else the token is written to the row's next free slot.
        sampled_tokens: [all rows of the logits].
        """
        if batch.logits_rows is not None:
            sampled_tokens = sampled_tokens.index_select(0, batch.logits_rows)
        sampled_token = sampled_tokens[:, None]
        assert step.gathered is not None, "the penalties of this step were not applied"
        token_ids, output_counts, token_counts = step.gathered
        step.gathered = None
        is_match = token_ids == sampled_token
        # In an empty row the first entry is a token of an earlier sequence.
        is_present = is_match.any(1, keepdim=True) & (token_counts > 0)
        is_next_slot = (torch.arange(step.width, device=self._device) == token_counts) & ~is_present
        token_ids = torch.where(is_next_slot, sampled_token, token_ids)
        output_counts = torch.where(is_next_slot, 1, output_counts + is_match.int())
        self._token_ids[:, : step.width].index_copy_(0, batch.device_table_rows, token_ids)
        self._output_counts[:, : step.width].index_copy_(0, batch.device_table_rows, output_counts)
        self._token_counts.index_copy_(0, batch.device_table_rows, (token_counts + ~is_present)[:, 0])

    def _gather_rows(self, batch: PenaltyRows, width: int) -> GatheredRows:
        """Return the counts of the batch's rows. To write the repeated entries past a row's tokens changes nothing."""
        token_ids = self._token_ids[:, :width].index_select(0, batch.device_table_rows)
        output_counts = self._output_counts[:, :width].index_select(0, batch.device_table_rows)
        token_counts = self._token_counts.index_select(0, batch.device_table_rows)[:, None]
        is_used = torch.arange(width, device=self._device) < token_counts
        token_ids = torch.where(is_used, token_ids, token_ids[:, :1])
        return GatheredRows(token_ids, torch.where(is_used, output_counts, output_counts[:, :1]), token_counts)

    def _store_new_rows(self, new: NewRows) -> None:
        """Write the tokens of rows that this step uses for the first time."""
        self._output_counts[:, 0].index_fill_(0, new.table_rows, 0)  # for empty rows, whose entries all repeat this one
        self._token_counts.index_copy_(0, new.table_rows, new.lengths)
        self._token_ids.index_put_((new.token_rows, new.token_columns), new.token_ids)
        self._output_counts.index_put_((new.token_rows, new.token_columns), new.output_counts.int())

    def _enlarge_tables(self, row_count: int, width: int) -> None:
        """Enlarge the tables of counts to at least `row_count` rows and `width` tokens in a row.

        They begin small, because all rows at the width of a prompt with 100,000 distinct tokens would take gigabytes.
        """
        old_row_count, old_width = self._token_ids.shape
        added_rows = _compute_growth(old_row_count, row_count, self._row_count)
        added_width = _compute_growth(old_width, width, self._vocab_size)
        if added_rows or added_width:
            self._token_ids = F.pad(self._token_ids, (0, added_width, 0, added_rows))
            self._output_counts = F.pad(self._output_counts, (0, added_width, 0, added_rows))


def _penalise(old_logits: Tensor, batch: PenaltyRows, gathered: GatheredRows) -> Tensor:
    """Return the logits of the gathered tokens after penalties. old_logits and the result: [n, width].

    repetition_penalty divides positive logits, and multiplies negative ones. From this, frequency_penalty is subtracted
    once for each time that the output has the token, and presence_penalty if it has the token at all.
    """
    repeated = torch.where(old_logits > 0, old_logits / batch.repetition, old_logits * batch.repetition)
    new_logits = torch.where(gathered.token_counts > 0, repeated, old_logits)  # a row without tokens stays as it is
    counts = gathered.output_counts
    new_logits -= batch.frequency * counts + batch.presence * (counts > 0)
    return new_logits


def _compute_growth(size: int, needed_size: int, size_max: int) -> int:
    """Return by how much to enlarge a dimension: it is doubled, up to `size_max`, or becomes as large as needed."""
    return 0 if needed_size <= size else max(needed_size, min(2 * size, size_max)) - size


def count_penalised_tokens(seq: Sequence) -> TokenCounts:
    """Return the distinct tokens that a sequence's penalties need, with their counts in its output.

    Tokens of the prompt are needed for repetition_penalty alone.
    """
    output, counts = np.unique(np.array(seq.token_ids[seq.prompt_len :], np.int64), return_counts=True)
    if seq.request.params.repetition_penalty == 1.0:
        return TokenCounts(output, counts)
    only_in_prompt = np.setdiff1d(np.array(seq.token_ids[: seq.prompt_len], np.int64), output)
    no_counts = np.zeros(len(only_in_prompt), np.int64)
    return TokenCounts(np.concatenate([output, only_in_prompt]), np.concatenate([counts, no_counts]))


def has_penalties(p: SamplingParams) -> bool:
    """Return whether any penalty changes logits."""
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
