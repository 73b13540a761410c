"""Whole models on a GPU: the tokens are the CPU reference's, and torch sees the host wait for nothing but the tokens.

Without a GPU the same code runs under Triton's interpreter where ON_CPU=1 asks for it: that the test itself is right.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from hand_driver import Driver

from engine.execution import runner
from engine.execution.decode_graphs import CudaCapture
from engine.tiny.model import Recipe, cached_model
from engine.types import SamplingParams
from kernels import select_kernels
from kernels.reference.backend import ReferenceKernels

ON_CPU = os.environ.get("ON_CPU") == "1"
pytestmark = pytest.mark.gpu
if not ON_CPU and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET not set", allow_module_level=True)

RECIPES = {
    "qwen3": Recipe(),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_moe": Recipe(family="qwen3_moe"),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "bamba": Recipe(family="bamba", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
    "lfm2": Recipe(family="lfm2", layers=3),
}


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch raises where the host waits, except where results are read."""
    if ON_CPU:
        yield
        return

    begin = runner.start_copy_to_host

    def to_host(tensors):
        read = begin(tensors)

        def waiting():
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                return read()
            finally:
                torch.cuda.set_sync_debug_mode(mode)

        return waiting

    monkeypatch.setattr(runner, "start_copy_to_host", to_host)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", list(RECIPES))
def test_the_references_tokens_and_no_waits(family: str, no_waits: None) -> None:
    """Prompts in chunks, a decode beside them, recorded decode steps that pad, other members, another order."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    folder = cached_model(RECIPES[family])
    device = torch.device("cpu" if ON_CPU else "cuda")
    capture = None if ON_CPU else CudaCapture(device)
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in (21, 1, 16)]
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0),
    ]
    answers = []
    drivers = [
        Driver(folder, kernels=select_kernels(device, "triton"), device=device, capture=capture),
        Driver(folder, kernels=ReferenceKernels(torch.device("cpu"))),
    ]
    for driver in drivers:
        seqs = [driver.sequence(prompt, p, name=str(i)) for i, (prompt, p) in enumerate(zip(prompts, params))]
        driver.step((seqs[0], 9), (seqs[1], 1))
        for number, members in enumerate(([0, 1, 2], [0, 1, 2], [2, 0], [1, 2, 0], [0, 2, 1])):
            # Kernels are compiled and steps recorded in the first steps, which may wait; later ones may not.
            strict = driver is drivers[0] and number == 4 and not ON_CPU
            torch.cuda.set_sync_debug_mode("error") if strict else None
            driver.step(*((seqs[i], len(seqs[i].token_ids)) for i in members))
            torch.cuda.set_sync_debug_mode("default") if strict else None
        answers.append([seq.token_ids for seq in seqs])
    assert answers[0] == answers[1]


def test_draws_on_the_device_follow_their_seeds(no_waits: None) -> None:
    """Two runs of one seed agree; top_k=1 is greedy."""
    folder = cached_model(RECIPES["qwen3"])
    device = torch.device("cpu" if ON_CPU else "cuda")
    answers = []
    for params in (
        SamplingParams(seed=5, top_p=0.95, top_k=50), SamplingParams(seed=5, top_p=0.95, top_k=50),
        SamplingParams(seed=6, top_p=0.95, top_k=50), SamplingParams(top_k=1), SamplingParams(temperature=0.0),
    ):  # fmt: skip
        driver = Driver(folder, kernels=select_kernels(device, "triton"), device=device)
        seq = driver.sequence([3, 1, 4, 1, 5], params)
        driver.run(seq, 10)
        answers.append(seq.token_ids[5:])
    assert answers[0] == answers[1] != answers[2]
    assert answers[3] == answers[4]
