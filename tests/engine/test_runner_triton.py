"""Whole models on the Triton kernels, under Triton's interpreter: the tokens are the reference's."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hand_driver import Driver

from engine.tiny.model import Recipe, cached_model
from kernels import select_kernels
from kernels.reference.backend import ReferenceKernels

pytestmark = pytest.mark.long

RECIPES = {
    "qwen3": Recipe(),
    "qwen3_moe": Recipe(family="qwen3_moe"),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "lfm2": Recipe(family="lfm2", layers=3),
}
SLOW = {"qwen3_moe", "gemma3", "lfm2"}

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPES]
)
def test_greedy_tokens_are_the_references(family):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    folder = cached_model(RECIPES[family])
    cpu = torch.device("cpu")
    drivers = [Driver(folder, kernels=kernels) for kernels in (select_kernels(cpu, "triton"), ReferenceKernels(cpu))]
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in (21, 1, 16)]
    answers, logits = [], []
    for driver in drivers:
        seqs = [driver.sequence(prompt, name=str(i)) for i, prompt in enumerate(prompts)]
        driver.step((seqs[0], 9), (seqs[1], 1))
        for _ in range(3):  # a chunk of one prompt beside a decode, then all decode
            driver.step(*((seq, len(seq.token_ids)) for seq in seqs))
        answers.append([seq.token_ids for seq in seqs])
        logits.append(torch.cat([driver.logits_of(seq) for seq in seqs]))
    assert answers[0] == answers[1]
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-4
