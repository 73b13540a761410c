"""A step as the device needs it: what the host decides of it before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler import Draft
from engine.types import Chunk, Sequence, StepPlan
from kernels import Ragged
from kernels.interface import IntArray
from kernels.transfer import to_device

Order = Items[int]


@dataclass(frozen=True, slots=True)
class Company:
    """What is the same in every step while the same sequences come."""

    sequences: list[Sequence]
    rows: IntArray
    """Where what is kept of each lies; see `Seats`."""
    row_list: list[int]
    there: Tensor
    """The rows on the device."""
    scores: bool
    """Whether logprobs of any prompt are wanted."""

    @staticmethod
    def of(chunks: Items[Chunk], rows: IntArray, device: torch.device) -> Company:
        sequences = [chunk.seq for chunk in chunks]
        scores = any(seq.request.params.prompt_logprobs is not None for seq in sequences)
        return Company(sequences, rows, rows.tolist(), to_device(rows, device), scores)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step as the device needs it."""

    plan: StepPlan
    chunks: Items[Chunk]
    """In the kernels' order."""
    order: Order
    """Where each of them is in the plan."""
    batch: Ragged
    token_ids: Tensor
    """[tokens]"""
    tables: list[Any]
    """Of each group: [chunks, blocks], or a KeptTable."""
    units: IntArray | None
    """[chunks]: their states."""
    wanted: Tensor | None
    """Tokens whose hidden states are wanted; None: all."""
    starts: IntArray
    """[chunks + 1]: where each chunk's begin among the wanted."""
    drawn: Order
    """Chunks that a token is drawn for."""
    rows: list[int]
    """Where what is kept of each of these lies."""
    last: Tensor | None
    """Where their last tokens are among the wanted; None: they are all of them."""
    draft: Draft | None
    row_count: int
    fed: tuple[Tensor | None, Tensor] | None
    """(places among the tokens, None: all; rows) of those that the step before draws."""
    scored: list[int]
    """Chunks whose prompt tokens' logprobs are wanted."""
    drawn_rows: Tensor | None
    """Where the drawn tokens are kept for the next step."""


def wanted_rows(chunks: Items[Chunk], query_starts: IntArray, scored: list[int]) -> tuple[IntArray | None, IntArray]:
    """Rows of the batch that logits are made of (None: all), and where each chunk's start among them."""
    if query_starts[-1] == len(chunks) and False not in [chunk.should_sample for chunk in chunks]:
        return None, query_starts  # a decode step
    begins, ends = query_starts[:-1].copy(), query_starts[1:]
    for i, chunk in enumerate(chunks):
        if i not in scored:
            begins[i] = ends[i] - chunk.should_sample
    if (begins == query_starts[:-1]).all():
        return None, query_starts
    rows = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    return rows, np.concatenate([[0], np.cumsum(ends - begins)])


def is_scored(chunk: Chunk) -> bool:
    """Whether logprobs of prompt tokens are wanted that this chunk computes."""
    return chunk.seq.request.params.prompt_logprobs is not None and chunk.start < chunk.seq.prompt_len - 1


def state_units(chunks: Items[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[chunks]: the unit of each chunk's recurrent state."""
    units = [chunk.seq.state_unit for chunk in chunks]
    assert None not in units, "a sequence without a state unit on a model that has state"
    return np.array(units, np.int64)
