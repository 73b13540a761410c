"""Models through the whole core (scheduler, cache, runner): prefix hits, early sharing, preemption, against HF."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch
from hand_driver import Driver, Oracle

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.device_pool import DevicePool
from engine.execution.prepared_step import PreparedStep
from engine.execution.profiling import make_largest_step
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import Recipe, cached_model
from engine.types import FinishReason, Request, RunnerLostError, SamplingParams, SequenceOutput

RECIPES = {
    "qwen3": Recipe(),
    "llama": Recipe(family="llama"),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "granitemoehybrid": Recipe(family="granitemoehybrid", layers=3),
    "bamba": Recipe(family="bamba", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
    "lfm2": Recipe(family="lfm2", layers=3),
}
GAPS = {"qwen3_5": 2e-3}
"""How far from the likeliest a greedy token may be where rounding decides; else 1e-4. See test_runner_parity."""


def make_core(family: str, token_count: int, block_size: int, host_units: int = 0) -> EngineCore:
    """A core whose cache holds about so many tokens of KV, and a few states."""
    model, dtype = load_model(cached_model(RECIPES[family]))
    spec = model.make_cache_spec(block_size, dtype)
    unit_count = sum(-(-token_count // (block_size * spec.blocks_per_unit(g))) for g in range(len(spec.groups)))
    unit_count += 12 if spec.state is not None else 0
    cache = KVCache(spec, unit_count, step_tokens_max=64, host_unit_count=host_units)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
    runner = ModelRunner(
        model,
        DevicePool(spec, unit_count, device=torch.device("cpu"), dtype=dtype, host_unit_count=host_units),
        RunnerConfig(max_model_len=256),
    )
    runner.pool.buffer.fill_(0xFF)  # a read of what no step wrote is NaN
    return EngineCore(Scheduler(config, cache), runner, lambda events: None)


@pytest.mark.parametrize("family", list(RECIPES))
@pytest.mark.parametrize(
    ("block_size", "host_units"),
    [(16, 0), pytest.param(4, 0, marks=pytest.mark.long), pytest.param(4, 100, marks=pytest.mark.long)],
)
def test_conversations_in_a_small_cache(family, block_size, host_units):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    oracle = Oracle(cached_model(RECIPES[family]))
    core = make_core(family, token_count=256, block_size=block_size, host_units=host_units)
    prefixes = [[rng.randrange(2048) for _ in range(rng.randrange(20, 60))] for _ in range(2)]
    prompts, outputs = {}, {}
    waiting = [f"r{i}" for i in range(10)]
    hits = preemptions = 0
    while waiting or core.has_work:
        if waiting and rng.random() < 0.4:
            name = waiting.pop()
            prompts[name] = rng.choice(prefixes) + [rng.randrange(2048) for _ in range(rng.randrange(0, 20))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(8, 60), ignore_eos=True)
            core.add(Request(request_id=name, token_ids=prompts[name], params=params), now=0.0)
        for out in core.step(0.0):
            assert out.finish_reason in (None, FinishReason.LENGTH), out.error
            outputs.setdefault(out.request_id, []).extend(out.token_ids)
        core.check_invariants()
    hits, preemptions = core.stats().totals.prefix_hit_tokens, core.stats().totals.preemptions
    print(f"{hits} prompt tokens from the cache, {preemptions} preemptions")
    assert hits > 0
    for name, prompt in prompts.items():
        logits = oracle.logits(prompt + outputs[name])
        for i, token in enumerate(outputs[name]):
            row = logits[len(prompt) + i - 1]
            assert row.max() - row[token] < GAPS.get(family, 1e-4), (
                f"{name}: output {i}"
            )  # greedy, or a tie within rounding


@pytest.mark.parametrize("family", [*RECIPES, "qwen3_moe"])
def test_rows_that_no_token_is_drawn_from_end_at_the_last_mixer(family):
    rng = random.Random(family)
    folder = cached_model(RECIPES.get(family, Recipe(family=family)))
    d, reference_driver = Driver(folder, all_rows=False), Driver(folder)
    row_counts: list[int] = []

    def record_rows(layer):
        def call(x, step):
            row_counts.append(len(x))
            return layer(x, step)

        return call

    mixing = [i for i, _ in (*d.model.attention_layers, *d.model.recurrent_layers)]
    later_layers = d.model.blocks[max(mixing) :]
    watched_layers = 0
    for branch in list(chain.from_iterable(later_layers))[1:]:
        branch.layer, watched_layers = record_rows(branch.layer), watched_layers + 1
    assert watched_layers > 0
    first, second = ([rng.randrange(2048) for _ in range(count)] for count in (30, 20))
    results = []
    for driver in (d, reference_driver):
        a, b = driver.sequence(first, name="a"), driver.sequence(second, name="b")
        results.append([driver.step((a, 30), (b, 12)).sampled_tokens, driver.step((b, 16)).sampled_tokens])
        results[-1].append(driver.step((a, 31), (b, 20)).sampled_tokens)
    assert results[0] == results[1]
    assert results[0][1] == [None]
    assert row_counts == [1] * watched_layers + [2] * watched_layers


def test_a_step_that_fails_costs_its_requests_only():
    core = make_core("qwen3", 512, 16)
    core.add(Request(request_id="bad", token_ids=[1, 2, 10**6], params=SamplingParams()), now=0.0)
    (out,) = core.step(0.0)
    assert out.finish_reason is FinishReason.ERROR
    core.add(Request(request_id="good", token_ids=[1, 2, 3], params=SamplingParams(max_tokens=1)), now=0.0)
    (out,) = core.step(0.0)
    assert out.finish_reason is FinishReason.LENGTH


def test_an_error_that_sticks_to_the_device_is_told_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtype = load_model(cached_model(Recipe()))
    runner = ModelRunner(
        model,
        DevicePool(model.make_cache_spec(16, dtype), 4, device=torch.device("cpu"), dtype=dtype),
        RunnerConfig(max_model_len=64),
    )
    plan, _ = make_largest_step(runner.pool.spec, token_count=8, sequence_count=2, length_max=64, vocab_size=64)

    def raise_error(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(runner, "_forward", raise_error)
    with pytest.raises(RuntimeError, match="illegal") as passing:
        runner.execute(plan)
    assert not isinstance(passing.value, RunnerLostError)
    monkeypatch.setattr(runner, "_check_device", raise_error)
    with pytest.raises(RunnerLostError, match=r"^cpu computes nothing any more: CUDA error: .* encountered$"):
        runner.execute(plan)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, logprobs=2)])
def test_logits_that_are_not_numbers_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    core = make_core("qwen3", 512, 16)
    for name in ("good", "bad"):
        core.add(Request(request_id=name, token_ids=[1, 2, 3], params=params), now=0.0)
    compute_hidden = ModelRunner._forward

    def compute_bad_hidden(runner: ModelRunner, step: PreparedStep) -> torch.Tensor:
        hidden = compute_hidden(runner, step)
        hidden[[chunk.seq.request.request_id == "bad" for chunk in step.chunks], 7] = float("nan")
        return hidden

    monkeypatch.setattr(ModelRunner, "_forward", compute_bad_hidden)
    outputs: dict[str, list[SequenceOutput]] = {"good": [], "bad": []}
    while core.has_work:
        for output in core.step(0.0):
            outputs[output.request_id].append(output)
    (bad_output,) = outputs["bad"]
    assert bad_output.finish_reason is FinishReason.ERROR
    assert not bad_output.is_client_error
    assert "NaN" in (bad_output.error or "")
    assert [output.finish_reason for output in outputs["good"]] == [None] * 5 + [FinishReason.LENGTH]
