"""Measures the memory of a step besides weights and cache, by computing the largest step before the cache is sized.

All its sequences are at the end of the longest context, and draw a token with penalties and with logprobs. With several
ranks all of them must measure, as they communicate inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.cache.spec import CacheSpec, ceil_div
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId


class LargestStep(NamedTuple):
    """A step that is computed only to measure its memory."""

    plan: StepPlan
    unit_count: int
    """Units of KV cache memory that the plan's block tables name. The cache must have at least as many."""


def make_largest_step(
    spec: CacheSpec, *, token_count: int, sequence_count: int, length_max: int, vocab_size: int
) -> LargestStep:
    """Make the forward step that needs most memory besides the weights and the cache, to measure how much that is.

    It computes up to `token_count` tokens of `sequence_count` sequences, each at the end of a context of `length_max`
    tokens. All sequences share one unit of blocks for each attention group, and one recurrent state. They overwrite
    each other's KV there, which does no harm: the results are not used. So a cache of a few units is enough.
    """
    group_count = len(spec.groups)
    block_count = ceil_div(length_max, spec.block_size)
    block_tables = [_repeat_blocks(group, spec.blocks_per_unit(group), block_count) for group in range(group_count)]
    state_unit = None if spec.state is None else UnitId(group_count)  # after the units of the attention groups
    state_resets = [] if state_unit is None else [state_unit]
    tokens = [i % vocab_size for i in range(length_max)]
    chunks = []
    for number, chunk_tokens in enumerate(_divide_tokens(token_count, sequence_count, length_max)):
        params = _make_costly_params(is_first=number == 0, is_prompt=chunk_tokens > 1)
        request = Request(request_id=f"profile {number}", token_ids=tokens, params=params)
        seq = Sequence(request, tokens, length_max, 0.0, block_tables=block_tables, state_unit=state_unit)
        chunks.append(Chunk(seq, length_max - chunk_tokens, length_max, should_sample=True))
    return LargestStep(StepPlan(chunks, state_resets=state_resets), group_count + len(state_resets))


def _repeat_blocks(unit: int, blocks_per_unit: int, block_count: int) -> list[BlockId]:
    """Return a block table that repeats the blocks of one unit: unit 1 of 4 blocks gives [4, 5, 6, 7, 4, 5, ...]."""
    return [BlockId(unit * blocks_per_unit + i % blocks_per_unit) for i in range(block_count)]


def _make_costly_params(*, is_first: bool, is_prompt: bool) -> SamplingParams:
    """Return the sampling parameters of one sequence, such that drawing its token takes as much memory as possible."""
    return SamplingParams(
        top_p=0.9,
        frequency_penalty=0.1,
        repetition_penalty=1.1 if is_first else 1.0,  # one sequence is enough to make the tables of penalties wide
        logprobs=20,
        prompt_logprobs=20 if is_prompt else None,
    )


def _divide_tokens(token_count: int, sequence_count: int, length_max: int) -> list[int]:
    """Divide tokens into as few long chunks as possible, with at least one token for every sequence.

    10 tokens for 4 sequences of at most 6 tokens become [6, 2, 1, 1].
    """
    remaining_tokens = min(token_count, sequence_count * length_max)
    chunk_lengths: list[int] = []
    while remaining_tokens:
        later_sequences = sequence_count - len(chunk_lengths) - 1
        chunk_lengths.append(max(1, min(length_max, remaining_tokens - later_sequences)))
        remaining_tokens -= chunk_lengths[-1]
    return chunk_lengths


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a CUDA device holds while `run` runs, beyond those that it held before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - bytes_before
