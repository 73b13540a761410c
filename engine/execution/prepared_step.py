"""A step as the device needs it: all that the host decides before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler import SamplingBatch, SamplingInputs
from engine.types import Chunk, Sequence, StepPlan
from kernels import RaggedBatch
from kernels.host_copies import copy_to_device
from kernels.interface import BlockTable, IntArray


@dataclass(slots=True)
class BatchState:
    """Inputs of a step that the next step reuses if it has the same sequences, and samples for the same ones."""

    sequences: list[Sequence]
    """Sequences of the step, in the order in which the kernels take them: those with one token first."""
    sampled_chunks: list[int]
    """Indices of the sequences for which a token is drawn; the step computes one chunk of each sequence."""
    rows: IntArray
    """[sequences]: row of each sequence in the tables that stay on the device from step to step."""
    sampled_rows: list[int]
    """Rows of the sampled sequences."""
    sampled_device_rows: Tensor
    """`sampled_rows` on the device."""
    sampling_batch: SamplingBatch | None
    """Sampling parameters of the sampled sequences; None if this rank samples nothing."""


class SelectedTokens(NamedTuple):
    """Tokens of a step for which logits are computed, to draw the next token or for logprobs of the prompt."""

    indices: Tensor | None
    """Their indices among the step's tokens; None: all tokens."""
    starts: IntArray
    """[chunks + 1]: index of each chunk's first token among the selected tokens."""
    last_indices: Tensor | None
    """Index of the last token of each sampled chunk among the selected tokens; None: each selected token is one."""


class DeviceTokens(NamedTuple):
    """Tokens of a step that the previous step draws, so that only the device knows them."""

    token_indices: Tensor
    """Their indices among the step's tokens."""
    rows: Tensor
    """Rows of their sequences in the per-sequence tables."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All inputs of a forward step, made on the host before anything is computed. A chunk is one sequence's tokens."""

    plan: StepPlan
    chunks: Items[Chunk]
    """Chunks of the plan in the order in which the kernels take them: those of one token first."""
    order: list[int]
    """For each of `chunks`, its index in the plan: results are returned in the plan's order."""
    batch: RaggedBatch
    """Positions at which the chunks begin and end in their sequences."""
    token_ids: Tensor
    """[tokens]; a token that only the device knows is 0 here."""
    tables: list[BlockTable]
    """Block tables of each attention group."""
    units: IntArray | None
    """[chunks]: index of the memory unit with each sequence's recurrent state; None for a model without state."""
    selected: SelectedTokens
    """Tokens for which logits are computed."""
    batch_state: BatchState
    """Inputs that depend only on the step's sequences, so that the next step may reuse them."""
    sampling_inputs: SamplingInputs | None
    """None if this rank draws no token in the step."""
    device_tokens: DeviceTokens | None
    """Tokens that the previous step draws, which only the device knows."""
    prompt_logprob_chunks: list[int]
    """Indices of the chunks that need logprobs of prompt tokens."""


def select_tokens(
    query_starts: IntArray, sampled_chunks: list[int], prompt_logprob_chunks: list[int], device: torch.device
) -> SelectedTokens:
    """Select the tokens of a step for which logits are computed, and send their indices to the device.

    A chunk is the tokens of one sequence: chunk i has the tokens `query_starts[i]` to `query_starts[i + 1]` - 1 of the
    step. Selected are the last token of each of the `sampled_chunks`, and all tokens of the `prompt_logprob_chunks`.
    For two chunks of 1 and 3 tokens that sample, the indices are [0, 3], and `starts` is [0, 1, 2].
    """
    chunk_starts, chunk_ends = query_starts[:-1], query_starts[1:]
    first_selected = chunk_ends.copy()
    first_selected[sampled_chunks] -= 1
    first_selected[prompt_logprob_chunks] = chunk_starts[prompt_logprob_chunks]
    starts = query_starts
    indices = None
    selects_all = (first_selected == chunk_starts).all()
    if not selects_all:
        indices = np.concatenate([np.arange(first, end) for first, end in zip(first_selected, chunk_ends, strict=True)])
        starts = np.concatenate([[0], np.cumsum(chunk_ends - first_selected)])
    last_indices = None
    if len(sampled_chunks) < starts[-1]:  # other tokens are selected, too
        last_indices = copy_to_device(starts[1:][sampled_chunks] - 1, device)
    return SelectedTokens(None if indices is None else copy_to_device(indices, device), starts, last_indices)


def find_prompt_logprob_chunks(chunks: Items[Chunk]) -> list[int]:
    """Return the indices of the chunks that compute prompt tokens of which the request wants logprobs."""
    return [
        i
        for i, chunk in enumerate(chunks)
        if chunk.seq.request.params.prompt_logprobs is not None and chunk.start < chunk.seq.prompt_len - 1
    ]


def list_state_units(chunks: Items[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the unit of each chunk's recurrent state, [chunks]."""
    units = [chunk.seq.state_unit for chunk in chunks]
    assert None not in units, "a sequence without a state unit on a model that has state"
    return np.array(units, np.int64)
