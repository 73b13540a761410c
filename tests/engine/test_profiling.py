"""The step that sizes the cache on a GPU: here, that it runs on every kind of model and fits the units it asks for."""

from __future__ import annotations

import pytest
import torch

from engine.execution.device_pool import DevicePool
from engine.execution.profiling import make_largest_step
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.tiny.model import Recipe, cached_model


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (70, 1), (70, 4), (3, 8), (300, 4)])
def test_the_largest_step_runs_in_its_units(family, tokens, sequences):
    model, dtype = load_model(cached_model(Recipe(family=family, layers=4)))
    spec = model.make_cache_spec(16, dtype)
    plan, units = make_largest_step(spec, token_count=tokens, sequence_count=sequences, length_max=128)
    assert sum(chunk.end - chunk.start for chunk in plan.chunks) == tokens
    assert len(plan.chunks) == min(tokens, sequences)
    owners = {}
    for chunk in plan.chunks:
        assert chunk.end == chunk.seq.prompt_len == 128  # at the end of the longest context
        for group, table in enumerate(chunk.seq.block_tables):
            assert len(table) * spec.block_size >= 128
            owners[group] = {block // spec.blocks_per_unit(group) for block in table}
    owners["state"] = set(plan.state_resets)
    assert sum(map(len, owners.values())) == len(set().union(*owners.values())) == units  # no unit serves two groups
    runner = ModelRunner(
        model, DevicePool(spec, units, device=torch.device("cpu"), dtype=dtype), RunnerConfig(max_model_len=128)
    )
    for token in runner.execute(plan).sampled_tokens:
        assert token is not None
        assert 0 <= token < model.config.vocab_size
