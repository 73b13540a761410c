"""Logprobs of prompts and outputs against transformers; bf16 against fp32; what the runner refuses."""

from __future__ import annotations

import random

import pytest
import torch
from hand_driver import Driver, Oracle, random_cuts

from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.config import EngineConfig
from engine.execution import runner as runner_module
from engine.execution.device_pool import compute_unit_stride
from engine.execution.sizing import count_units
from engine.tiny.model import Recipe, cached_model
from engine.types import SamplingParams


def test_prompt_logprobs_in_chunks(monkeypatch):
    monkeypatch.setattr(runner_module, "LOGIT_SLAB_BYTES", 4 * 2048 * 5)
    rng = random.Random(4)
    folder = cached_model(Recipe())
    oracle, d = Oracle(folder), Driver(folder, all_rows=False)
    tokens = [rng.randrange(2048) for _ in range(41)]
    seq = d.sequence(tokens, SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2))
    other = d.sequence([rng.randrange(2048) for _ in range(9)])
    logprobs, outputs = [], []
    for end in random_cuts(rng, 41):
        parts = [(other, len(other.token_ids)), (seq, end)]
        result = d.step(*parts)
        logprobs += result.prompt_logprobs_by_chunk.get(1, [])
        assert 0 not in result.prompt_logprobs_by_chunk
        outputs += [result.logprobs_by_chunk[1]] if 1 in result.logprobs_by_chunk else []
    exact = torch.log_softmax(oracle.logits(tokens).double(), -1)
    assert [entry.token_id for entry in logprobs] == tokens[1:]
    for position, entry in enumerate(logprobs):
        assert entry.logprob == pytest.approx(exact[position, entry.token_id].item(), abs=2e-4)
        assert entry.rank == 1 + int((exact[position] > exact[position, entry.token_id]).sum())
        assert [token for token, _ in entry.top_logprobs] == exact[position].topk(3).indices.tolist()
    (last,) = outputs
    assert last.token_id == seq.token_ids[41]
    assert last.rank == 1
    assert last.logprob == pytest.approx(exact[40].max().item(), abs=2e-4)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_agrees_with_fp32(family, dtype):
    """Share of positions where the likeliest token is that of transformers in fp32; printed, and mostly the same."""
    rng = random.Random(7)
    folder = cached_model(Recipe(family=family))
    oracle, d = Oracle(folder), Driver(folder, dtype=dtype)
    agree = total = 0
    for _ in range(4):
        seq = d.sequence([rng.randrange(2048) for _ in range(50)])
        logits = d.run(seq, 20, random_cuts(rng, 50))
        expected = oracle.logits(seq.token_ids)[: len(logits)]
        agree += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        total += len(logits)
    print(f"{family} {dtype}: greedy agreement {agree / total:.3f} of {total} positions")
    assert agree / total > 0.9


def test_units_hold_whole_token_rows():
    group = GroupSpec(FULL_ATTENTION, (0, 1, 2), num_kv_heads=3, head_dim=40, dtype_bytes=2)
    spec = CacheSpec(16, (group,), StateSpec((3,), 100_001))
    stride = compute_unit_stride(spec)
    assert stride % 240 == stride % 16 == 0
    assert 0 <= stride - spec.unit_bytes < 240
    assert count_units(EngineConfig(kv_cache_memory_bytes=10 * stride - 1), spec, torch.device("cpu")) == 9
