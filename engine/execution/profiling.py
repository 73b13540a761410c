"""What a step needs besides weights and cache, found by computing the largest one before the cache is sized.

The step is a prompt (several, where one may not be as long) beside as many prompts of one token as there may be
sequences, as many tokens together as a step may have, over a cache just large enough; all draw a token, with penalties,
which need a copy of the logits. With several ranks all of them must measure, since they meet inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.cache.spec import CacheSpec
from engine.execution.runner import ModelRunner
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId


def largest_step(spec: CacheSpec, token_count: int, sequences: int, length_max: int) -> tuple[StepPlan, int]:
    """(a step of so many sequences, each of at most so many tokens, that computes so many tokens together; its units).

    The short ones share one block of each group and one state: what they compute is of no use to anybody.
    """
    token_count = min(token_count, sequences * length_max)
    rest, lengths = token_count, list[int]()
    while rest > sequences - len(lengths):  # of those that are left each has at least one token
        lengths.append(min(length_max, rest - (sequences - len(lengths) - 1)))
        rest -= lengths[-1]
    units = 0

    def sequence(length: int, name: str) -> Sequence:
        nonlocal units
        params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.1)
        tokens = [0] * length
        seq = Sequence(Request(request_id=name, token_ids=tokens, params=params), tokens, length, 0.0)
        for group in range(len(spec.groups)):
            per_unit, table = spec.blocks_per_unit(group), list[BlockId]()
            while len(table) * spec.block_size < length:
                table += [BlockId(units * per_unit + sub) for sub in range(per_unit)]
                units += 1
            seq.block_tables.append(table)
        if spec.state is not None:
            seq.state_unit = UnitId(units)
            units += 1
        return seq

    seqs = [sequence(length, f"profile {i}") for i, length in enumerate(lengths)]
    if rest:
        seqs += [sequence(1, "profile")] * rest
    chunks = [Chunk(seq, 0, seq.prompt_len, samples=True) for seq in seqs]
    resets = sorted({seq.state_unit for seq in seqs if seq.state_unit is not None})
    return StepPlan(chunks, state_resets=resets), units


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
