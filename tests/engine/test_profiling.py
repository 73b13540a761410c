"""The step that sizes the cache on a GPU: here, that it runs on every kind of model and fits the units it asks for."""

from __future__ import annotations

import pytest
import torch

from engine.execution.profiling import largest_step
from engine.execution.runner import ModelRunner
from engine.models.loader import load_model
from engine.tiny.model import Recipe, cached_model


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (70, 1), (70, 4), (3, 8), (300, 4)])
def test_the_largest_step_runs_in_its_units(family, tokens, sequences):
    model, dtype = load_model(cached_model(Recipe(family=family, layers=4)))
    spec = model.cache_spec(16, dtype)
    plan, units = largest_step(spec, tokens, sequences, length_max=128)
    assert plan.token_count == tokens
    assert len(plan.chunks) == min(tokens, sequences)
    owners = []
    for seq in {id(chunk.seq): chunk.seq for chunk in plan.chunks}.values():  # those of one token are one
        assert seq.prompt_len <= 128
        for group, table in enumerate(seq.block_tables):
            assert len(table) * spec.block_size >= seq.prompt_len
            assert max(table) < units * spec.blocks_per_unit(group)
            owners.append({block // spec.blocks_per_unit(group) for block in table})
    owners += [{unit} for unit in plan.state_resets]
    assert sum(map(len, owners)) == len(set().union(*owners)) == units  # no unit serves two groups
    runner = ModelRunner(model, spec, units, device=torch.device("cpu"), dtype=dtype, max_model_len=128)
    for token in runner.execute(plan).sampled:
        assert token is not None
        assert 0 <= token < model.config.vocab_size
