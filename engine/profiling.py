"""What a step needs besides weights and cache, found by computing the largest one before the cache is sized.

The step is one prompt of as many tokens as a step may have, over a cache just large enough, with a sampled token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cache.spec import CacheSpec
from engine.runner import ModelRunner
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId


def largest_step(spec: CacheSpec, token_count: int) -> tuple[StepPlan, int]:
    """(a step that computes one prompt of so many tokens, the units it needs)."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    tokens = [0] * token_count
    seq = Sequence(Request(request_id="profile", token_ids=tokens, params=params), tokens, token_count, 0.0)
    units = 0
    for group in range(len(spec.groups)):
        per_unit, table = spec.blocks_per_unit(group), list[BlockId]()
        while len(table) * spec.block_size < token_count:
            table += [BlockId(units * per_unit + sub) for sub in range(per_unit)]
            units += 1
        seq.block_tables.append(table)
    resets = []
    if spec.state is not None:
        seq.state_unit = UnitId(units)
        resets.append(seq.state_unit)
        units += 1
    return StepPlan([Chunk(seq, 0, token_count, samples=True)], state_resets=resets), units


def peak_step_bytes(
    make_runner: Callable[[int], ModelRunner], spec: CacheSpec, token_count: int, device: torch.device
) -> int:
    """Most bytes that the largest step holds at one time on a CUDA device. `make_runner`: from a number of units."""
    plan, units = largest_step(spec, token_count)
    runner = make_runner(units)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.execute(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    return peak
