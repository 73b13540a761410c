"""Long prefills on a hybrid model: chunks end on block boundaries, and a preempted or edited prompt resumes there."""

from __future__ import annotations

from fake_device import Bench

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.scheduler import SchedulerConfig


def make_bench(enable_prefix_caching: bool = True, block_size: int = 16) -> Bench:
    spec = CacheSpec(block_size, (GroupSpec(FULL_ATTENTION, (0,), 1, 64, 2),), StateSpec((1,), 20 * block_size * 256))
    cache = KVCache(spec, 60, step_tokens_max=1500, enable_prefix_caching=enable_prefix_caching)
    return Bench(cache, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=1500, max_model_len=8000))


def test_an_edited_long_prompt_resumes_where_a_chunk_ended() -> None:
    bench = make_bench()
    prompt = [i % 251 for i in range(4000)]
    bench.add("a", prompt, max_tokens=1)
    bench.drain()
    assert bench.device.plans == [
        [("a", 0, 1488)],
        [("a", 1488, 2976)],
        [("a", 2976, 3984)],
        [("a", 3984, 4000)],
    ]
    bench.add("b", [*prompt[:3500], 9, 9, 9], max_tokens=1)
    bench.drain()
    assert bench.firsts["b"].cached_tokens == 2976
    bench.assert_correct()


def test_a_chunk_within_one_long_block_is_not_cut_to_nothing() -> None:
    bench = make_bench(block_size=2048)
    bench.add("a", [i % 251 for i in range(4200)], max_tokens=1)
    bench.drain()
    assert bench.device.plans == [[("a", 0, 1500)], [("a", 1500, 2048)], [("a", 2048, 3548)], [("a", 3548, 4096)],
                                  [("a", 4096, 4200)]]  # fmt: skip
    bench.assert_correct()


def test_without_prefix_caching_nothing_is_cut() -> None:
    bench = make_bench(enable_prefix_caching=False)
    bench.add("a", [1] * 2005, max_tokens=1)
    bench.drain()
    assert bench.device.plans == [[("a", 0, 1500)], [("a", 1500, 2005)]]
    assert bench.events.events == []
    bench.assert_correct()


def test_a_step_with_enough_prompt_tokens_takes_in_no_further_request() -> None:
    cache = KVCache(CacheSpec(4, (GroupSpec(FULL_ATTENTION, (0,), 1, 64, 2),)), 80, step_tokens_max=64)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100, target_prefill_tokens=30)
    bench = Bench(cache, config)
    for i in range(5):
        bench.add(str(i), [10 * i + j for j in range(20)])
    bench.add("long", list(range(100, 190)))  # alone it may use the whole budget
    bench.drain()
    prefills = [[(name, start) for name, start, end in plan if end - start > 1] for plan in bench.device.plans]
    assert [plan for plan in prefills if plan] == [
        [("0", 0), ("1", 0)],
        [("2", 0), ("3", 0)],
        [("4", 0), ("long", 0)],
        [("long", 40)],  # four decoding, 20 of the one before: 40 were left
    ]
    bench.assert_correct()
