"""Recorded decode steps: padding, refilled plans, the fallback. Recording itself is stood in for by running again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from hand_driver import Driver

from engine.decode_graphs import DecodeGraphs
from engine.tiny_model import Recipe, cached_model
from kernels import select
from kernels.reference import ReferenceKernels

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")


class RunAgain:
    """Records by keeping the computation; a repetition writes the same result tensor, as a graph does."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.recorded += 1
        out = torch.full_like(run(), float("nan"))

        def replay() -> None:
            self.replayed += 1
            out.copy_(run())

        return replay, out


def with_graphs(driver: Driver, capture: Callable) -> Driver:
    runner = driver.runner
    runner._graphs = DecodeGraphs(
        driver.model, runner._ops, kv=runner._kv, states=runner._states, ropes=runner._ropes, blocks_max=64,
        capture=capture,
    )  # fmt: skip
    return driver


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_recorded_steps_give_the_same_tokens(family):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    folder = cached_model(Recipe(family=family, layers=2 if family == "qwen3" else 3))
    capture = RunAgain()
    graphs = with_graphs(Driver(folder, kernels=select(CPU, "triton")), capture)
    plain = Driver(folder, kernels=ReferenceKernels(CPU))
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in (16, 5, 3)]
    answers = []
    for driver in (graphs, plain):
        seqs = [driver.sequence(prompt, name=str(i)) for i, prompt in enumerate(prompts)]
        driver.step(*((seq, len(seq.token_ids)) for seq in seqs))
        for members in ([0, 1, 2], [2, 0], [1, 2, 0]):  # three pad to four; the order changes
            driver.step(*((seqs[i], len(seqs[i].token_ids)) for i in members))
        answers.append([seq.token_ids for seq in seqs])
    assert answers[0] == answers[1]
    assert (capture.recorded, capture.replayed) == (2, 3)  # sizes 4 and 2; the prompts were computed as usual


def test_without_memory_to_record_it_is_computed_as_usual():
    def no_memory(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    driver = with_graphs(Driver(cached_model(Recipe()), kernels=select(CPU, "triton")), no_memory)
    plain = Driver(cached_model(Recipe()))
    tokens = []
    for d in (driver, plain):
        seq = d.sequence([1, 2, 3])
        d.run(seq, 3)
        tokens.append(seq.token_ids)
    assert tokens[0] == tokens[1]


def test_recording_ahead():
    capture = RunAgain()
    driver = with_graphs(Driver(cached_model(Recipe()), kernels=select(CPU, "triton")), capture)
    driver.runner.record_decode_steps(3)
    assert capture.recorded == 3  # 4, 2 and 1
    seq = driver.sequence([1, 2, 3])
    driver.run(seq, 3)
    assert (capture.recorded, capture.replayed) == (3, 2)
