"""Measures the memory of a step besides weights and cache, by computing the largest step before the cache is sized.

All its sequences are at the end of the longest context, and draw a token with penalties and with logprobs. With several
ranks all of them must measure, as they communicate inside the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cache.spec import CacheSpec, ceil_div
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId


def make_largest_step(
    spec: CacheSpec, *, token_count: int, sequence_count: int, length_max: int, vocab_size: int
) -> tuple[StepPlan, int]:
    """Make the plan of the forward step that needs most memory, to measure how much that is.

    The step has up to `token_count` tokens of `sequence_count` sequences, each at the end of a context of `length_max`
    tokens. Returns the plan, and the units of KV cache memory that it needs. These are few, because all sequences have
    the same blocks, of one unit for each attention group, and the same recurrent state: nobody uses the results.
    """
    unit_count = len(spec.groups)
    block_count = ceil_div(length_max, spec.block_size)
    block_tables = []
    for group in range(len(spec.groups)):
        blocks_per_unit = spec.blocks_per_unit(group)
        block_tables.append([BlockId(group * blocks_per_unit + i % blocks_per_unit) for i in range(block_count)])
    state_unit = None
    if spec.state is not None:
        state_unit = UnitId(unit_count)
        unit_count += 1
    tokens = [i % vocab_size for i in range(length_max)]
    chunks = []
    for index, chunk_tokens in enumerate(_divide_tokens(token_count, sequence_count, length_max)):
        params = SamplingParams(
            top_p=0.9,
            frequency_penalty=0.1,
            repetition_penalty=1.1 if index == 0 else 1.0,  # one is enough to make the tables of penalties wide
            logprobs=20,
            prompt_logprobs=20 if chunk_tokens > 1 else None,
        )
        request = Request(request_id=f"profile {index}", token_ids=tokens, params=params)
        seq = Sequence(request, tokens, length_max, 0.0, block_tables=block_tables, state_unit=state_unit)
        chunks.append(Chunk(seq, length_max - chunk_tokens, length_max, should_sample=True))
    return StepPlan(chunks, state_resets=[] if state_unit is None else [state_unit]), unit_count


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
