"""Token counts of running sequences for penalties, kept on the device and updated with each token that is drawn.

Each row (see `RowAllocator`) holds the distinct tokens of one sequence's output, with their numbers; and those of its
prompt, if repetition_penalty needs them. So the host counts a sequence's tokens only once, and a step costs a few
device operations for each distinct token. The host never waits here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.types import SamplingParams, Sequence
from kernels.counts import PenaltyRows, TokenCounts
from kernels.interface import IntArray
from kernels.transfer import copy_to_device

PenaltyKernel = Callable[[Tensor, TokenCounts, PenaltyRows, int], None]
INITIAL_ROW_TOKENS = 256
"""Distinct tokens that a row has room for at first. The room is doubled when more are needed."""


@dataclass(slots=True)
class PenaltyStep:
    """Inputs of one step's penalties, made on the host."""

    new_row_tensors: list[Tensor]
    """Rows [n] and lengths [n] of new rows; then row, column, id and count code of each of their tokens. Or empty."""
    width: int
    """Upper bound of the distinct tokens of any row, before and after the step."""
    row_count: int
    """Rows of the per-sequence tables."""


def make_penalty_rows(
    params: Rows[SamplingParams], batch_rows: list[int], rows: list[int], device: torch.device
) -> PenaltyRows:
    """Return the penalties of some sequences of a batch, on the device.

    `batch_rows`: their indices in the batch. `rows`: the rows of their token counts.
    """
    row_params = [params[i] for i in batch_rows]

    def column(values: list[float]) -> Tensor:
        return copy_to_device(np.array(values, np.float32), device)[:, None]

    return PenaltyRows(
        logits_rows=None if len(batch_rows) == len(params) else copy_to_device(np.array(batch_rows, np.int64), device),
        count_rows=copy_to_device(np.array(rows, np.int64), device),
        repetition=column([p.repetition_penalty for p in row_params]),
        presence=column([p.presence_penalty for p in row_params]),
        frequency=column([p.frequency_penalty for p in row_params]),
    )


class Penalties:
    """Keeps the token counts of all rows on the device, and applies the penalties to logits."""

    def __init__(self, device: torch.device, penalise: PenaltyKernel, count_sampled: PenaltyKernel) -> None:
        """`penalise` and `count_sampled`: those of `Kernels`."""
        self._device = device
        self._penalise, self._count_sampled = penalise, count_sampled
        self._token_count_bounds: IntArray = np.zeros(0, np.int64)
        """Upper bound of each row's distinct tokens after the last prepared step; 0 for a row that is not in use."""
        self._counts = TokenCounts(
            torch.zeros(0, INITIAL_ROW_TOKENS, dtype=torch.int64, device=device),
            torch.zeros(0, INITIAL_ROW_TOKENS, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
        )

    def reset_rows(self, rows: Rows[int] | None = None) -> None:
        """Forget the counts of these rows (None: of all), because other sequences get the rows."""
        if rows is None:
            self._token_count_bounds[:] = 0
        else:
            self._token_count_bounds[[row for row in rows if row < len(self._token_count_bounds)]] = 0

    def prepare(
        self, rows: IntArray, penalised_rows: list[int], sequences: list[Sequence], row_count: int
    ) -> PenaltyStep:
        """Prepare a step that draws a token for some `sequences`, with index `penalised_rows` and counts in `rows`."""
        missing_rows = row_count - len(self._token_count_bounds)
        if missing_rows > 0:
            self._token_count_bounds = np.concatenate([self._token_count_bounds, np.zeros(missing_rows, np.int64)])
        new_indices = (self._token_count_bounds[rows] == 0).nonzero()[0].tolist()
        new_counts = [count_penalised_tokens(sequences[penalised_rows[i]]) for i in new_indices]
        new_rows = rows[new_indices].tolist()
        self._token_count_bounds[new_rows] = [len(distinct_tokens) for distinct_tokens, _ in new_counts]
        self._token_count_bounds[rows] += 1
        width = int(self._token_count_bounds[rows].max())
        if not new_rows:
            return PenaltyStep([], width, row_count)
        tokens, count_codes = [row_tokens for row_tokens, _ in new_counts], [row_codes for _, row_codes in new_counts]
        lengths = np.array([len(row_tokens) for row_tokens in tokens])
        columns = np.concatenate([np.arange(length) for length in lengths])
        arrays = [np.array(new_rows), lengths, np.repeat(new_rows, lengths), columns]
        arrays += [np.concatenate(tokens), np.concatenate(count_codes)]
        return PenaltyStep([copy_to_device(array, self._device) for array in arrays], width, row_count)

    def apply(self, logits: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """Apply the penalties to logits [all rows, vocab] in place."""
        self._store_new_rows(step)
        self._penalise(logits, self._counts, batch, step.width)

    def count_sampled(self, sampled_tokens: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """Count the token drawn for each row, after `apply`. sampled_tokens: [all rows]."""
        self._count_sampled(sampled_tokens, self._counts, batch, step.width)

    def _store_new_rows(self, step: PenaltyStep) -> None:
        """Write the tokens of rows that this step uses for the first time."""
        self._make_room(step.row_count, step.width)
        if not step.new_row_tensors:
            return
        new_rows, new_lengths, at_row, columns, tokens, count_codes = step.new_row_tensors
        counts = self._counts
        counts.count_codes[:, 0].index_fill_(0, new_rows, 0)  # unused entries repeat the first one: empty rows too
        counts.used_lengths.index_copy_(0, new_rows, new_lengths)
        counts.token_ids.index_put_((at_row, columns), tokens)
        counts.count_codes.index_put_((at_row, columns), count_codes.int())

    def _make_room(self, row_count: int, width: int) -> None:
        """Enlarge the tensors of counts, if need be, to so many rows and so many tokens in a row."""
        counts = self._counts
        old_rows, old_width = counts.token_ids.shape
        if row_count <= old_rows and width <= old_width:
            return
        new_width = old_width if width <= old_width else max(2 * old_width, width)
        shape = max(old_rows, row_count), new_width
        token_ids, count_codes = counts.token_ids.new_zeros(shape), counts.count_codes.new_zeros(shape)
        used_lengths = counts.used_lengths.new_zeros(shape[0])
        token_ids[:old_rows, :old_width] = counts.token_ids
        count_codes[:old_rows, :old_width] = counts.count_codes
        used_lengths[:old_rows] = counts.used_lengths
        self._counts = TokenCounts(token_ids, count_codes, used_lengths)


def count_penalised_tokens(seq: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct tokens that a sequence's penalties need, and the count code of each (`kernels.counts`)."""
    output, counts = np.unique(np.array(seq.token_ids[seq.prompt_len :], np.int64), return_counts=True)
    prompt = np.zeros(0, np.int64)
    if seq.request.params.repetition_penalty != 1.0:
        prompt = np.array(seq.token_ids[: seq.prompt_len], np.int64)
    tokens, inverse = np.unique(np.concatenate([output, prompt]), return_inverse=True)
    values = np.zeros(len(tokens), np.int64)
    values[inverse[len(output) :]] = 1
    values[inverse[: len(output)]] += 2 * counts
    return tokens, values


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
