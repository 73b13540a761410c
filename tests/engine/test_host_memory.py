"""Host memory under the cache on real models: what comes back from it is what went there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fake_device import EventChecker, resident_in

from engine.cache.kv_cache import KVCache
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.device_pool import DevicePool
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.execution.sizing import count_host_units
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import Recipe, cached_model
from engine.types import BlockCopy, BlockId, CopyDirection, Request, SamplingParams
from options import ConfigError

RECIPES = {
    "qwen3": Recipe(),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "bamba": Recipe(family="bamba", layers=3),
}
CPU = torch.device("cpu")


def conversations(family: str, host_units: int, **cache: Any) -> tuple[dict[str, list[int]], EngineCore]:
    """What six conversations of five turns say, played in turn in a cache that holds about two of them."""
    model, dtype = load_model(cached_model(RECIPES[family]))
    spec = model.make_cache_spec(4, dtype)
    units = sum(-(-400 // (4 * spec.blocks_per_unit(g))) for g in range(len(spec.groups)))
    units += 6 if spec.state is not None else 0
    kv_cache = KVCache(spec, units, step_tokens_max=64, host_unit_count=host_units, **cache)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    runner = ModelRunner(
        model,
        DevicePool(spec, units, device=CPU, dtype=dtype, host_unit_count=host_units),
        RunnerConfig(max_model_len=256),
    )
    runner.pool.buffer.fill_(0xFF)
    events = EventChecker(spec.block_size)
    core = EngineCore(Scheduler(config, kv_cache), runner, events)
    rng = random.Random(family)
    texts = [[rng.randrange(2048) for _ in range(90)] for _ in range(6)]
    answers: dict[str, list[int]] = {}
    for turn in range(5):
        for first in (0, 3):
            names = [f"{turn}/{i}" for i in range(first, first + 3)]
            for name, text in zip(names, texts[first : first + 3], strict=True):
                params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
                core.add(Request(request_id=name, token_ids=list(text), params=params), now=0.0)
            while core.has_work:
                for output in core.step(0.0):
                    assert output.error is None
                    answers.setdefault(output.request_id, []).extend(output.token_ids)
                core.check_invariants()
                assert set(events.resident) == resident_in(kv_cache)
            for name, text in zip(names, texts[first : first + 3], strict=True):
                text += answers[name] + [rng.randrange(2048) for _ in range(12)]
    return answers, core


@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", list(RECIPES))
def test_tokens_are_those_of_an_engine_without_a_cache(family: str, adaptive: bool) -> None:
    plain, _ = conversations(family, 0, enable_prefix_caching=False)
    without, small = conversations(family, 0, adaptive_eviction=adaptive)
    answers, core = conversations(family, 400, adaptive_eviction=adaptive)
    assert answers == without == plain
    stats = core.stats()
    assert stats.totals.prefix_hit_tokens > small.stats().totals.prefix_hit_tokens
    assert 0 < stats.totals.host_hit_tokens <= stats.totals.prefix_hit_tokens
    assert stats.host_memory.stored_bytes > 0
    assert stats.host_memory.loaded_bytes > 0
    assert 0 < stats.host_memory.used_share <= 1
    returned_tokens = sum(90 + turn * 20 for turn in range(4)) * 6  # of whole blocks, but for the last token said
    assert stats.totals.prefix_hit_tokens > 0.9 * returned_tokens, (
        "not everything came back although there was room for all"
    )


def test_bad_sizes_are_refused() -> None:
    model, dtype = load_model(cached_model(RECIPES["qwen3"]))
    spec = model.make_cache_spec(16, dtype)
    assert count_host_units(EngineConfig(), spec) == 0
    assert count_host_units(EngineConfig(host_cache_memory=1 << 24), spec) == (1 << 24) // spec.unit_bytes
    halves = EngineConfig(host_cache_memory=1 << 24, tensor_parallel_size=2)
    assert count_host_units(halves, spec) == (1 << 23) // spec.unit_bytes
    for memory, wrong in ((100, "holds no unit"), (10**15, "expected at most the memory of this machine")):
        with pytest.raises(ConfigError, match=f"--host-cache-memory {memory}.*{wrong}"):
            count_host_units(EngineConfig(host_cache_memory=memory), spec)
    with pytest.raises(ConfigError, match="means nothing with --no-enable-prefix-caching"):
        count_host_units(EngineConfig(host_cache_memory=1 << 24, enable_prefix_caching=False), spec)


def test_a_pool_whose_blocks_were_moved_can_be_given_back() -> None:
    """An engine that sleeps gives the cache's memory back; what is moved after that lies elsewhere."""
    model, dtype = load_model(cached_model(Recipe()))
    spec = model.make_cache_spec(4, dtype)
    runner = ModelRunner(
        model,
        DevicePool(spec, 4, device=torch.device("cpu"), dtype=dtype, host_unit_count=4),
        RunnerConfig(max_model_len=64),
    )
    size = spec.block_bytes(0)
    for value in (7, 9):
        runner.pool.buffer[:size] = value
        runner.pool.block_copier.execute(
            [
                BlockCopy(0, BlockId(0), BlockId(1), CopyDirection.TO_HOST),
                BlockCopy(0, BlockId(1), BlockId(2), CopyDirection.FROM_HOST),
            ]
        )
        runner.pool.block_copier.execute([BlockCopy(0, BlockId(2), BlockId(3))])
        assert (runner.pool.block_copier._view_block(runner.pool.buffer, 0, BlockId(3)) == value).all()
        runner.release_pool()
        assert runner.pool.buffer.untyped_storage().nbytes() == 0
        runner.pool.allocate()


@pytest.mark.parametrize("way", CopyDirection)
@pytest.mark.parametrize(("source", "target"), [(-1, 0), (0, -1), (16, 0), (0, 16), (1 << 40, 0)])
def test_a_move_beyond_the_memory_is_not_done(way: CopyDirection, source: int, target: int) -> None:
    """Four units hold fewer than sixteen blocks."""
    model, dtype = load_model(cached_model(Recipe()))
    spec = model.make_cache_spec(4, dtype)
    runner = ModelRunner(
        model,
        DevicePool(spec, 4, device=torch.device("cpu"), dtype=dtype, host_unit_count=4),
        RunnerConfig(max_model_len=64),
    )
    assert 4 * spec.blocks_per_unit(0) <= 16
    before = runner.pool.buffer.clone()
    with pytest.raises(AssertionError, match="lies outside its memory"):
        runner.pool.block_copier.execute([BlockCopy(0, BlockId(source), BlockId(target), way)])
    assert torch.equal(runner.pool.buffer, before)
