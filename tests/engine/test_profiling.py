"""The step that sizes the cache on a GPU: here, that it runs on every kind of model and fits the units it asks for."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.config import EngineConfig
from engine.execution import sizing
from engine.execution.device_pool import DevicePool
from engine.execution.profiling import make_largest_step
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.tiny.model import Recipe, cached_model
from engine.types import StepPlan, StepResult
from options import ConfigError


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (70, 1), (70, 4), (3, 8), (300, 4)])
def test_the_largest_step_runs_in_its_units(family, tokens, sequences):
    model, dtype = load_model(cached_model(Recipe(family=family, layers=4)))
    spec = model.make_cache_spec(16, dtype)
    vocab_size = model.config.vocab_size
    plan, units = make_largest_step(
        spec, token_count=tokens, sequence_count=sequences, length_max=128, vocab_size=vocab_size
    )
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
    for _ in range(2):
        for token in runner.execute(plan).sampled_tokens:
            assert token is not None
            assert 0 <= token < vocab_size


def resolve_tiny_rank(config: EngineConfig) -> sizing.RankModel:
    model, dtype = load_model(cached_model(Recipe()))
    return sizing.resolve_rank_model(config, model, dtype, torch.device("cpu"))


def test_the_tables_of_penalties_are_measured_at_their_largest_before_the_rest_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=70, max_model_len=400)
    rank = resolve_tiny_rank(config)
    table_shapes = []
    make_runner = sizing.make_runner

    def make_watched_runner(config: EngineConfig, rank: sizing.RankModel, unit_count: int) -> ModelRunner:
        runner = make_runner(config, rank, unit_count)
        execute = runner.execute

        def execute_watched(plan: StepPlan) -> StepResult:
            table_shapes.append(tuple(runner._sampler._penalties._token_ids.shape))
            return execute(plan)

        runner.execute = execute_watched  # type: ignore[method-assign]
        return runner

    monkeypatch.setattr(sizing, "make_runner", make_watched_runner)
    monkeypatch.setattr(sizing, "measure_peak_bytes", lambda run, device: len(run().sampled_tokens))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    sizing._measure_largest_step(config, rank)
    assert table_shapes[-1] == (4, 401)


def test_the_memory_of_the_largest_step_is_free_again_before_the_cache_is_sized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=70, max_model_len=128)
    rank = resolve_tiny_rank(config)
    runners: list[weakref.ref[ModelRunner]] = []
    make_runner, events = sizing.make_runner, []

    def make_watched_runner(config: EngineConfig, rank: sizing.RankModel, unit_count: int) -> ModelRunner:
        assert config.enforce_eager, "no graph is recorded for one step"
        runner = make_runner(config, rank, unit_count)
        runners.append(weakref.ref(runner))
        return runner

    def measure(run, device: torch.device) -> int:
        assert not runners, "the tables of the runner are not measured"
        events.append(len(run().sampled_tokens))
        return 7 << 20

    monkeypatch.setattr(sizing, "make_runner", make_watched_runner)
    monkeypatch.setattr(sizing, "measure_peak_bytes", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append(runners[0]()))
    assert sizing._measure_largest_step(config, rank) == 7 << 20
    assert events == [4, None], "the memory is given back while a runner still holds it"

    def run_out(run, device: torch.device) -> int:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(sizing, "measure_peak_bytes", run_out)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 70, --max-num-seqs 4, --max-model-len 128: no mem"):
        sizing._measure_largest_step(config, rank)
