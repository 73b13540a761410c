"""Measure the memory of a step besides weights and cache, by computing the largest one before the cache is sized.

The step has the most tokens and sequences that a step may have: a chunk of a prompt (several, where one may not be so
long) and a token of each other sequence, all at the end of the longest context. All sequences draw a token with
penalties, which need a copy of the logits, and with logprobs. With several ranks all must measure, as they communicate
inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.cache.spec import CacheSpec
from engine.execution.runner import ModelRunner
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId


def largest_step(spec: CacheSpec, token_count: int, sequences: int, length_max: int) -> tuple[StepPlan, int]:
    """Make the largest step to profile: at most `sequences` sequences of `length_max` tokens, `token_count` in all.

    Returns the step and its number of units. All sequences share one unit of each group and one state, because the
    results are dropped.
    """
    token_count = min(token_count, sequences * length_max)
    remaining, lengths = token_count, list[int]()
    while remaining > sequences - len(lengths):  # of those that are left each has at least one token
        lengths.append(min(length_max, remaining - (sequences - len(lengths) - 1)))
        remaining -= lengths[-1]
    tokens = [0] * length_max
    tables = []
    for group in range(len(spec.groups)):
        per_unit = spec.blocks_per_unit(group)
        blocks = -(-length_max // spec.block_size)
        tables.append([BlockId(group * per_unit + block % per_unit) for block in range(blocks)])
    state = None if spec.state is None else UnitId(len(spec.groups))

    def chunk(count: int, name: str) -> Chunk:
        prompt_logprobs = 20 if count > 1 else None
        params = SamplingParams(
            temperature=1.0, top_p=0.9, frequency_penalty=0.1, logprobs=20, prompt_logprobs=prompt_logprobs
        )  # fmt: skip
        request = Request(request_id=name, token_ids=tokens, params=params)
        seq = Sequence(request, tokens, length_max, 0.0, block_tables=tables, state_unit=state)
        return Chunk(seq, length_max - count, length_max, should_sample=True)

    chunks = [chunk(length, f"profile {i}") for i, length in enumerate(lengths)] + [chunk(1, "profile")] * remaining
    return StepPlan(chunks, state_resets=[] if state is None else [state]), len(spec.groups) + (state is not None)


def peak_step_bytes(
    make_runner: Callable[[int], ModelRunner],
    spec: CacheSpec,
    token_count: int,
    sequences: int,
    length_max: int,
    device: torch.device,
) -> int:
    """Most bytes that the largest step holds at one time on a CUDA device. `make_runner`: from a number of units."""
    plan, units = largest_step(spec, token_count, sequences, length_max)
    runner = make_runner(units)
    peak = peak_bytes(partial(runner.execute, plan), device)
    del runner
    torch.cuda.empty_cache()
    return peak


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that are held at one time on a CUDA device while it runs, beyond those that were before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
