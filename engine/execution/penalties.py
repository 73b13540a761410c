"""What penalties need to know of running sequences, kept on the device and updated by each token that is drawn.

For each row (see `Seats`) the distinct tokens that count: those of the output, and of the prompt where
repetition_penalty wants them, with how often each is in the output. So a step costs what is distinct in a context times
a few operations on the device; the host counts a sequence's tokens only when it comes. Nothing here waits.
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
from kernels.transfer import to_device

Penalise = Callable[[Tensor, TokenCounts, PenaltyRows, int], None]
LEAST = 256
"""Tokens that a row has room for; doubled when more are needed."""


@dataclass(slots=True)
class PenaltyStep:
    """One step's part."""

    begun: list[Tensor]
    """Of the rows that begin, if any: rows [n] and lengths [n]; then of each of their tokens its row, its place there,
    itself, and its value."""
    width: int
    """At least the distinct tokens of any of its rows, before and after the step."""
    row_count: int


def penalty_rows(params: Rows[SamplingParams], at: list[int], rows: list[int], device: torch.device) -> PenaltyRows:
    """Of the sequences `at` among the params, whose counts are in `rows`."""
    chosen = [params[i] for i in at]

    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, np.float32), device)[:, None]

    return PenaltyRows(
        at=None if len(at) == len(params) else to_device(np.array(at, np.int64), device),
        rows=to_device(np.array(rows, np.int64), device),
        repetition=column([p.repetition_penalty for p in chosen]),
        presence=column([p.presence_penalty for p in chosen]),
        frequency=column([p.frequency_penalty for p in chosen]),
    )


class Penalties:
    """The tokens of all rows."""

    def __init__(self, device: torch.device, penalise: Penalise, count_drawn: Penalise) -> None:
        """`penalise` and `count_drawn`: those of `Kernels`."""
        self._device = device
        self._penalise, self._count_drawn = penalise, count_drawn
        self._bounds: IntArray = np.zeros(0, np.int64)
        """The host's part: at least how many distinct tokens each row has after the last step that was drafted; 0 of
        one that nobody has."""
        self._counts = TokenCounts(
            torch.zeros(0, LEAST, dtype=torch.int64, device=device),
            torch.zeros(0, LEAST, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
        )

    def forget(self, rows: Rows[int] | None = None) -> None:
        """These rows (None: all) belong to others now."""
        if rows is None:
            self._bounds[:] = 0
        else:
            self._bounds[[row for row in rows if row < len(self._bounds)]] = 0

    def draft(self, rows: IntArray, at: list[int], sequences: list[Sequence], row_count: int) -> PenaltyStep:
        """The host's part of a step in which a token of each of the sequences `at`, in these rows, is drawn."""
        if (more := row_count - len(self._bounds)) > 0:
            self._bounds = np.concatenate([self._bounds, np.zeros(more, np.int64)])
        new = (self._bounds[rows] == 0).nonzero()[0].tolist()
        found = [known_tokens(sequences[at[i]]) for i in new]
        begun = rows[new].tolist()
        self._bounds[begun] = [len(known) for known, _ in found]
        self._bounds[rows] += 1
        width = int(self._bounds[rows].max())
        if not begun:
            return PenaltyStep([], width, row_count)
        tokens, values = [known for known, _ in found], [value for _, value in found]
        lengths = np.array([len(some) for some in tokens])
        places = np.concatenate([np.arange(length) for length in lengths])
        arrays = [np.array(begun), lengths, np.repeat(begun, lengths), places]
        arrays += [np.concatenate(tokens), np.concatenate(values)]
        return PenaltyStep([to_device(array, self._device) for array in arrays], width, row_count)

    def apply(self, logits: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """Change logits [all rows, vocab] in place."""
        self._enter(step)
        self._penalise(logits, self._counts, batch, step.width)

    def count(self, drawn: Tensor, batch: PenaltyRows, step: PenaltyStep) -> None:
        """A token of each row was drawn, after `apply`. drawn: [all rows]."""
        self._count_drawn(drawn, self._counts, batch, step.width)

    def _enter(self, step: PenaltyStep) -> None:
        counts = self._counts
        rows, width = counts.tokens.shape
        if step.row_count > rows or step.width > width:
            shape = max(rows, step.row_count), width if step.width <= width else max(2 * width, step.width)
            tokens, values, used = (
                old.new_zeros(shape[: old.dim()]) for old in (counts.tokens, counts.values, counts.used)
            )
            tokens[:rows, :width], values[:rows, :width], used[:rows] = counts.tokens, counts.values, counts.used
            counts = self._counts = TokenCounts(tokens, values, used)
        if step.begun:
            begun, lengths, at_row, at, tokens, known = step.begun
            counts.values[:, 0].index_fill_(0, begun, 0)  # the first once more is nothing, where there is no first
            counts.used.index_copy_(0, begun, lengths)
            counts.tokens.index_put_((at_row, at), tokens)
            counts.values.index_put_((at_row, at), known.int())


def known_tokens(seq: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct tokens that a sequence's penalties look at, and for each 2 * (times in output) + (in the prompt)."""
    output, counts = np.unique(np.array(seq.token_ids[seq.prompt_len :], np.int64), return_counts=True)
    prompt = np.zeros(0, np.int64)
    if seq.request.params.repetition_penalty != 1.0:
        prompt = np.array(seq.token_ids[: seq.prompt_len], np.int64)
    tokens, where = np.unique(np.concatenate([output, prompt]), return_inverse=True)
    values = np.zeros(len(tokens), np.int64)
    values[where[len(output) :]] = 1
    values[where[: len(output)]] += 2 * counts
    return tokens, values


def penalises(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
