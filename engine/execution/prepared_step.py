"""A step as the device needs it: what the host decides of it before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler import SamplingInputs
from engine.types import Chunk, Sequence, StepPlan
from kernels import RaggedBatch
from kernels.interface import IntArray
from kernels.transfer import copy_to_device

Order = Items[int]


@dataclass(frozen=True, slots=True)
class BatchState:
    """Inputs that stay the same while consecutive steps have the same sequences."""

    sequences: list[Sequence]
    rows: IntArray
    """[sequences]: row of the per-sequence tables of each; see `RowAllocator`."""
    row_list: list[int]
    device_rows: Tensor
    """`rows` on the device."""
    has_prompt_logprobs: bool
    """Whether logprobs of any prompt are wanted."""

    @staticmethod
    def from_chunks(chunks: Items[Chunk], rows: IntArray, device: torch.device) -> BatchState:
        sequences = [chunk.seq for chunk in chunks]
        has_prompt_logprobs = any(seq.request.params.prompt_logprobs is not None for seq in sequences)
        return BatchState(sequences, rows, rows.tolist(), copy_to_device(rows, device), has_prompt_logprobs)


class OrderedChunks(NamedTuple):
    """The chunks of a step in the kernels' order."""

    chunks: Items[Chunk]
    order: Order
    """Index of each chunk in the plan."""
    batch: RaggedBatch


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step as the device needs it."""

    plan: StepPlan
    chunks: Items[Chunk]
    """Chunks in the order of the kernels."""
    order: Order
    """Index of each chunk in the plan."""
    batch: RaggedBatch
    token_ids: Tensor
    """[tokens]"""
    tables: list[Any]
    """Block table of each group: [chunks, blocks], or a DeviceBlockTable."""
    units: IntArray | None
    """[chunks]: units of their states."""
    selected_tokens: Tensor | None
    """Tokens that need hidden states for logits; None: all."""
    selected_starts: IntArray
    """[chunks + 1]: where each chunk's begin among the selected."""
    sampled_chunks: Order
    """Chunks that a token is drawn for."""
    sampled_rows: list[int]
    """Table rows of the `sampled_chunks`."""
    last_token_indices: Tensor | None
    """Positions of their last tokens among the selected; None: these are all selected tokens."""
    sampling_inputs: SamplingInputs | None
    row_count: int
    tokens_on_device: tuple[Tensor | None, Tensor] | None
    """(places among the tokens, None: all; rows) of those that the step before draws."""
    prompt_logprob_chunks: list[int]
    """Chunks that need logprobs of prompt tokens."""
    sampled_device_rows: Tensor | None
    """Table rows that get the drawn tokens, for the next step."""


def select_hidden_rows(
    chunks: Items[Chunk], query_starts: IntArray, prompt_logprob_chunks: list[int]
) -> tuple[IntArray | None, IntArray]:
    """Rows of the batch that logits are made of (None: all), and where each chunk's start among them."""
    if query_starts[-1] == len(chunks) and False not in [chunk.should_sample for chunk in chunks]:
        return None, query_starts  # a decode step
    begins, ends = query_starts[:-1].copy(), query_starts[1:]
    for i, chunk in enumerate(chunks):
        if i not in prompt_logprob_chunks:
            begins[i] = ends[i] - chunk.should_sample
    if (begins == query_starts[:-1]).all():
        return None, query_starts
    rows = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    return rows, np.concatenate([[0], np.cumsum(ends - begins)])


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether logprobs of prompt tokens are wanted that this chunk computes."""
    return chunk.seq.request.params.prompt_logprobs is not None and chunk.start < chunk.seq.prompt_len - 1


def state_units(chunks: Items[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[chunks]: the unit of each chunk's recurrent state."""
    units = [chunk.seq.state_unit for chunk in chunks]
    assert None not in units, "a sequence without a state unit on a model that has state"
    return np.array(units, np.int64)


def sort_for_kernels(chunks: Items[Chunk]) -> OrderedChunks:
    """The chunks in the kernels' order, where each of them was, and their batch. A decode step is in order."""
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = np.array([chunk.end for chunk in chunks], np.int64)
    is_prompt = ends - starts > 1
    if not is_prompt.any():
        batch = RaggedBatch(np.arange(len(chunks) + 1), ends, starts, len(chunks))
        return OrderedChunks(chunks, range(len(chunks)), batch)
    permutation = is_prompt.argsort(kind="stable")
    order = permutation.tolist()
    batch = RaggedBatch.from_positions(starts[permutation], ends[permutation])
    return OrderedChunks([chunks[i] for i in order], order, batch)
