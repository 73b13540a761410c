"""Counts the variants of Triton kernels that steps need: those of recorded decode steps and a prompt, and what more.

    python tests/kernels/count_variants.py qwen3

A program of its own, since the interpreter must be off before triton is imported. Steps run on torch's meta device;
instead of a launch it is noted what Triton would compile for: the types, the constants, and of numbers that it may
specialise on, whether they are 1 or a multiple of 16. Prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from kernels import host_copies

META = torch.device("meta")
# Copies to it want a GPU's pinned memory.
host_copies.copy_to_device = lambda array, device: torch.from_numpy(array).to(META)
host_copies.overwrite = lambda there, array: None
host_copies.upload = lambda arrays, device: [torch.empty(a.size, dtype=torch.int32, device=META) for a in arrays]

from engine.execution import runner as step_runner  # noqa: E402
from engine.execution.device_pool import DevicePool  # noqa: E402
from engine.execution.profiling import make_largest_step  # noqa: E402
from engine.execution.runner import ModelRunner, RunnerConfig  # noqa: E402
from engine.models import HfConfig, build_model  # noqa: E402
from engine.tiny.model import Recipe, cached_model  # noqa: E402
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId  # noqa: E402
from kernels.triton.backend import TritonKernels  # noqa: E402

SEQUENCES_MAX = 64
LENGTH_MAX = STEP_TOKENS_MAX = 2048
variants: set[tuple[Any, ...]] = set()


def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = tuple(sorted((name, kwargs.pop(name)) for name in ("num_warps", "num_stages") if name in kwargs))
    bound = dict(zip(self.arg_names, args)) | kwargs
    kinds: list[Any] = []
    for p in self.params:
        value = bound[p.name]
        if p.is_constexpr:
            kinds.append(value)
        elif isinstance(value, torch.Tensor):
            kinds.append((value.dtype, value.storage_offset() * value.element_size() % 16 == 0))
        elif isinstance(value, float) or p.do_not_specialize:
            kinds.append(type(value))
        else:
            kinds.append((value == 1, value % 16 == 0))
    variants.add((self.fn.__name__, options, *kinds))


def record(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    return (lambda: None), run()


def make_runner(recipe: Recipe) -> ModelRunner:
    model = build_model(HfConfig.read(cached_model(recipe)))
    for weight in model.weights:
        weight.allocate(torch.bfloat16, META)
    ops = TritonKernels.__new__(TritonKernels)
    ops.device, ops._processor_count = META, 132
    spec = model.make_cache_spec(16, torch.bfloat16)
    return ModelRunner(
        model,
        DevicePool(spec, 400, device=META, dtype=torch.bfloat16),
        RunnerConfig(max_model_len=LENGTH_MAX),
        kernels=ops,
        capture=record,
    )


def step(runner: ModelRunner, spans: list[tuple[int, int]]) -> None:
    """One that computes the positions [start, end) of a sequence for each span."""
    chunks = []
    for start, end in spans:
        tokens = [1] * end
        seq = Sequence(Request(request_id="", token_ids=tokens, params=SamplingParams()), tokens, end, 0.0, start)
        seq.block_tables = [[BlockId(0)] * (end // 16 + 1) for _ in runner.pool.spec.groups]
        seq.state_unit = None if runner.pool.spec.state is None else UnitId(0)
        chunks.append(Chunk(seq, start, end, should_sample=True))
    runner.submit(StepPlan(chunks))


def main(family: str, seed: int) -> None:
    JITFunction.run = note  # type: ignore[method-assign]
    step_runner.start_copy_to_host = lambda tensors: (
        lambda: [torch.ones(x.shape, dtype=x.dtype).tolist() for x in tensors]
    )
    rng, runner = random.Random(seed), make_runner(Recipe(family=family, layers=4))
    with torch.no_grad():
        runner.record_decode_steps(SEQUENCES_MAX)
        plan, _ = make_largest_step(
            runner.pool.spec,
            token_count=STEP_TOKENS_MAX,
            sequence_count=SEQUENCES_MAX,
            length_max=LENGTH_MAX,
            vocab_size=runner.model.config.vocab_size,
        )  # as at the engine's start
        runner.submit(plan)
        for count in (1, 3, 8):
            step(runner, [(99, 100)] * count)
        known = set(variants)
        for _ in range(40):
            decoding = [rng.randrange(1, LENGTH_MAX) for _ in range(rng.choice((0, 1, 2, 7, 16, 33, SEQUENCES_MAX)))]
            prompts = [rng.randrange(2, 600) for _ in range(rng.choice((1, 2, 3)))]
            step(runner, [(n - 1, n) for n in decoding] + [(0, n) for n in prompts])
    more = sorted({str(variant[0]) for variant in variants - known})
    print(json.dumps({"known": len(known), "more": more}))


if __name__ == "__main__":
    np.seterr(all="raise")
    main(sys.argv[1], int(sys.argv[2]))
