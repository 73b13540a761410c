"""The core with recurrent state and sliding windows, on the fake device: what a hybrid prompt publishes and reuses."""

from __future__ import annotations

from fake_device import Bench

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec, StateSpec
from engine.scheduler import SchedulerConfig
from events import BlockRemoved, BlockStored


def make_bench(
    units: int = 40, *, window: int | None = None, state_blocks: int | None = 3, block_size: int = 16, budget: int = 256
) -> Bench:
    groups = [GroupSpec(FULL_ATTENTION, (0,), 1, 64, 2)]
    if window is not None:
        groups.append(GroupSpec(SLIDING_WINDOW, (1,), 1, 64, 2, window))
    state = None if state_blocks is None else StateSpec((2,), state_blocks * block_size * 256)
    spec = CacheSpec(block_size, tuple(groups), state)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=2000)
    return Bench(KVCache(spec, units, step_tokens_max=budget), config)


def stored_events(bench: Bench, kind: str) -> list[BlockStored]:
    return [e for e in bench.events.events if isinstance(e, BlockStored) and e.kv_cache_spec_kind == kind]


def test_forty_tokens_publish_two_blocks_and_what_was_promised_is_reused() -> None:
    bench = make_bench()
    prompt = list(range(1000, 1040))
    bench.add("a", prompt, max_tokens=1)
    bench.drain()
    full, states = stored_events(bench, "full_attention"), stored_events(bench, "mamba")
    hashes = [name for event in full for name in event.block_hashes]
    assert len(hashes) == 2
    (checkpoint,) = states
    assert checkpoint.block_hashes == hashes[1:]
    assert checkpoint.parent_block_hash == hashes[0]
    assert checkpoint.token_ids == prompt[16:32]
    assert (checkpoint.group_idx, checkpoint.block_size) == (1, 16)
    bench.add("b", [*prompt[:32], 1, 2, 3], max_tokens=1)
    bench.add("c", [*prompt[:31], 1, 2, 3], max_tokens=1)
    bench.drain()
    assert bench.firsts["b"].cached_tokens == 32
    assert bench.firsts["c"].cached_tokens == 0
    bench.assert_correct()


def test_branching_point_gets_a_checkpoint_the_second_time() -> None:
    bench = make_bench(units=80)
    prefix = list(range(1000, 1064))
    bench.add("a", prefix + [1] * 40, max_tokens=1)
    bench.drain()
    bench.add("b", prefix + [2] * 40, max_tokens=1)
    bench.drain()
    assert bench.firsts["b"].cached_tokens == 0  # the KV was there, the state was not
    bench.add("c", prefix + [3] * 40, max_tokens=1)
    bench.drain()
    assert bench.firsts["c"].cached_tokens == 64
    bench.assert_correct()


def test_requests_that_wait_together_share_at_their_common_point() -> None:
    bench = make_bench(units=80)
    prefix = list(range(1000, 1050))
    for name in "abcd":
        bench.add(name, prefix + [ord(name)] * 30, max_tokens=2)
    bench.drain()
    assert [bench.firsts[name].cached_tokens for name in "abcd"] == [0, 48, 48, 48]
    assert bench.device.computed_tokens == 80 + 3 * 32 + 4
    bench.assert_correct()


def test_one_that_comes_while_the_prefix_is_computed_waits_for_its_checkpoint() -> None:
    bench = make_bench(units=80, budget=32)
    prefix = list(range(1000, 1100))
    bench.add("a", prefix + [1] * 20, max_tokens=2)
    bench.step()
    bench.add("b", prefix + [2] * 20, max_tokens=2)
    bench.drain()
    assert bench.firsts["b"].cached_tokens == 96
    bench.assert_correct()


def test_a_conversation_resumes_at_the_last_boundary_reached_in_decode() -> None:
    bench = make_bench(units=80)
    history = list(range(1000, 1030))
    for turn in range(4):
        request = bench.add(f"t{turn}", history, max_tokens=50)
        bench.drain()
        if turn:
            assert bench.firsts[f"t{turn}"].cached_tokens == (len(history) - 2) // 16 * 16
        history = [*request.token_ids, *bench.outputs[f"t{turn}"], 7]
    bench.assert_correct()
    rolling = [e for e in stored_events(bench, "mamba") if any(token < 1000 for token in e.token_ids)]
    dropped_states = [e for e in bench.events.events if isinstance(e, BlockRemoved) and e.group_idx == 1]
    assert len(rolling) > 8
    assert len(dropped_states) >= len(rolling) - 8  # one rolling checkpoint a sequence, whatever the length


def test_sliding_window_blocks_are_announced_when_evicted_not_when_passed() -> None:
    bench = make_bench(units=30, window=20, state_blocks=None)
    prompt = list(range(1000, 1100))
    bench.add("a", prompt, max_tokens=1)
    bench.drain()
    window_blocks = {name for e in stored_events(bench, "sliding_window") for name in e.block_hashes}
    assert len(window_blocks) == 6
    assert not any(isinstance(e, BlockRemoved) for e in bench.events.events)
    assert all(e.kv_cache_spec_sliding_window == 20 for e in stored_events(bench, "sliding_window"))
    bench.add("b", prompt[:40] + [1] * 40, max_tokens=1)  # branches where the window had long passed
    bench.drain()
    assert bench.firsts["b"].cached_tokens == 32
    for turn in range(6):
        bench.add(f"c{turn}", [turn] * 100, max_tokens=1)
        bench.drain()
    removed_events = [e for e in bench.events.events if isinstance(e, BlockRemoved)]
    assert {e.group_idx for e in removed_events} == {0, 1}
    bench.assert_correct()


def test_everything_at_once_under_pressure() -> None:
    bench = make_bench(units=14, window=20, state_blocks=3, budget=48)
    for wave in range(3):
        for i in range(8):
            bench.add(f"{wave}.{i}", [5] * (16 * (i % 3)) + [i] * 30, max_tokens=30)
        bench.drain()
    bench.assert_correct()
    assert len(bench.ends) == 24
    assert bench.core.stats().totals.prefix_hit_tokens > 0


def test_nobody_waits_for_a_checkpoint_that_a_reset_has_taken_back() -> None:
    bench = make_bench(units=80, budget=32)
    prefix = list(range(1000, 1200))
    bench.add("a", [*prefix, 1], max_tokens=2)
    bench.step()
    bench.core.reset_prefix_cache()
    bench.add("b", [*prefix, 2], max_tokens=2)
    bench.core.scheduler.config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2000)
    bench.step()
    assert bench.core.scheduler.running_count == 2
    bench.drain()
    bench.assert_correct()


def test_a_state_that_is_used_again_and_again_leaves_no_trail() -> None:
    bench = make_bench(units=40)
    for turn in range(400):
        bench.add(f"t{turn}", [*range(1000, 1040), turn % 3], max_tokens=1)
        bench.drain()  # checks the length of the pool's queue


def test_a_resumed_sequence_that_needs_the_whole_pool_takes_the_checkpoint_itself() -> None:
    bench = make_bench(units=12)
    length = bench.core.scheduler.token_limit - 1
    text = list(range(1000, 1000 + length - 64))
    bench.add("a", text, max_tokens=1)
    bench.drain()
    bench.add("b", [*text, *range(64)], max_tokens=9)
    bench.drain()
    assert bench.firsts["b"].cached_tokens > 0
    bench.assert_correct()
