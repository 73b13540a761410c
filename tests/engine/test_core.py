"""The core on a fake device: what issue-level promises mean, case by case."""

from __future__ import annotations

import pytest
from fake_device import EOS, Bench, EventChecker, continuation

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.grammar_compiler import GrammarCompiler, GrammarVocabulary
from engine.scheduler import RequestRefusedError, SchedulerConfig
from engine.types import Constraint, FinishReason, RunnerLostError, StepPlan
from events import AllBlocksCleared, BlockRemoved, BlockStored
from events.hashing import unpack_token_ids


def dense(block_size: int = 4) -> CacheSpec:
    group = GroupSpec(kind=FULL_ATTENTION, layer_indices=(0, 1), num_kv_heads=1, head_dim=8, dtype_bytes=2)
    return CacheSpec(block_size=block_size, groups=(group,))


def make_bench(block_size: int = 4, units: int = 64, **config: object) -> Bench:
    defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200}
    return Bench(KVCache(dense(block_size), units), SchedulerConfig(**{**defaults, **config}))  # type: ignore[arg-type]


def test_same_step_twins_share_the_blocks_that_the_first_is_about_to_fill() -> None:
    bench = make_bench()
    prompt = list(range(100, 114))  # three full blocks and two tokens
    bench.add("a", prompt)
    bench.add("b", prompt)

    def check_plan(plan: StepPlan) -> None:
        (first, second) = plan.chunks
        assert (first.start, first.end, second.start, second.end) == (0, 14, 12, 14)
        assert first.seq.block_tables[0][:3] == second.seq.block_tables[0][:3]
        assert bench.cache.pool.live_units == 5
        refs = [bench.cache.pool.units[b].blocks[0].ref_count for b in first.seq.block_tables[0]]
        assert refs == [2, 2, 2, 1]

    bench.device.on_execute = check_plan
    bench.step()
    assert bench.firsts["a"].cached_tokens == 0
    assert bench.firsts["b"].cached_tokens == 12
    bench.device.on_execute = lambda plan: None
    bench.drain()
    bench.assert_correct()


def test_twins_whose_prompt_ends_on_a_block_boundary_end_on_one_block() -> None:
    """The last token must be computed, so the last block is computed twice and merged after the step."""
    bench = make_bench()
    prompt = list(range(100, 112))
    bench.add("a", prompt)
    bench.add("b", prompt)
    bench.step()
    assert bench.firsts["b"].cached_tokens == 8
    assert bench.cache.pool.live_units == 3
    bench.drain()
    bench.assert_correct()


def test_sequences_that_generate_the_same_text_end_up_on_the_same_blocks() -> None:
    bench = make_bench()
    bench.add("a", [1, 2, 3], max_tokens=20)
    bench.step()
    bench.step()
    bench.add("b", [1, 2, 3], max_tokens=20)
    for _ in range(10):
        bench.step()
    assert [name for name, _, _ in bench.device.plans[-1]] == ["a", "b"]
    chains = {seq.request.request_id: seq.block_tables[0] for seq in bench.cache._blocks_by_sequence}
    common_blocks = len(bench.outputs["b"]) // 4
    assert common_blocks >= 2
    assert chains["a"][:common_blocks] == chains["b"][:common_blocks]
    bench.drain()
    bench.assert_correct()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_no_length_runs_out_of_a_slot(block_size: int) -> None:
    """Lengths around every multiple of the block size, block size 1 included; twins of each, mixed in one batch."""
    bench = make_bench(block_size=block_size, units=400, max_num_batched_tokens=16)
    for length in range(1, 4 * block_size + 2):
        for twin in "xy":
            bench.add(f"{twin}{length}", [7] * length, max_tokens=2 * block_size + 1)
    bench.drain()
    bench.assert_correct()


def test_a_hash_that_points_at_a_freed_block_is_a_miss() -> None:
    bench = make_bench(units=4)
    bench.add("a", list(range(100, 112)), max_tokens=1)
    bench.drain()
    bench.add("b", list(range(200, 212)), max_tokens=1)  # takes the free unit and evicts two
    bench.drain()
    bench.add("a2", list(range(100, 112)), max_tokens=1)
    bench.drain()
    bench.assert_correct()
    assert bench.firsts["a2"].cached_tokens in (0, 4)


@pytest.mark.parametrize("colliding", ["tokens", "parent"])
def test_an_equal_hash_of_something_else_is_a_miss(monkeypatch: pytest.MonkeyPatch, colliding: str) -> None:
    def bad_hashes(parent: int | None, packed_ids: bytes, size: int, *keys: object) -> list[int]:
        tokens = unpack_token_ids(packed_ids)
        count = len(tokens) // size
        if colliding == "tokens":  # the hash knows the depth only
            return list(range((parent or 0) + 1, (parent or 0) + 1 + count))
        return [hash(tuple(tokens[i * size : (i + 1) * size])) & 0xFFFF for i in range(count)]

    monkeypatch.setattr("engine.cache.block_hasher.hash_packed_blocks", bad_hashes)
    bench = make_bench()
    tail = [9] * 8
    bench.add("a", [1, 2, 3, 4, *tail], max_tokens=9)
    bench.add("b", [5, 6, 7, 8, *tail], max_tokens=9)
    bench.drain()
    bench.add("c", [5, 6, 7, 8, *tail], max_tokens=9)
    bench.add("d", tail + tail, max_tokens=9)
    bench.drain()
    bench.assert_correct()


def test_a_prefix_that_is_being_computed_is_waited_for_not_computed_twice() -> None:
    bench = make_bench(max_num_batched_tokens=16)
    prefix = list(range(100, 150))
    bench.add("first", [*prefix, 1, 2])
    bench.step()  # 16 of the 52 tokens
    bench.add("second", [*prefix, 3, 4])
    bench.add("other", [7, 8, 9])
    bench.drain()
    start_steps = {
        name: next(i for i, plan in enumerate(bench.device.plans) if name in planned_names(plan))
        for name in bench.requests
    }
    assert start_steps["other"] <= start_steps["second"], "others are not held up"
    assert bench.firsts["second"].cached_tokens == 48
    assert bench.device.computed_tokens == 52 + 4 + 3 + 3 * 3  # each token once: prompts, then three decode steps each
    bench.assert_correct()


def test_the_owner_of_an_awaited_prefix_leaves_and_the_waiting_one_computes_it() -> None:
    bench = make_bench(max_num_batched_tokens=16)
    prefix = list(range(100, 150))
    bench.add("first", [*prefix, 1, 2])
    bench.step()
    bench.add("second", [*prefix, 3, 4])
    bench.step()
    bench.abort("first")
    bench.drain()
    assert bench.firsts["second"].cached_tokens == 32
    bench.assert_correct()


def planned_names(plan: list[tuple[str, int, int]]) -> set[str]:
    return {request_id for request_id, _, _ in plan}


def test_salt_and_lora_are_never_shared_across() -> None:
    bench = make_bench(units=200)
    prompt = list(range(50, 63))
    variants: list[dict[str, object]] = [
        {},
        {"cache_salt": "s"},
        {"cache_salt": "t"},
        {"lora_name": "s"},
        {"lora_name": "s", "cache_salt": "s"},
    ]
    for round_ in range(2):
        for i, variant in enumerate(variants):
            bench.add(f"{round_}.{i}", prompt, **variant)
        bench.drain()
    bench.assert_correct()
    assert [bench.firsts[f"0.{i}"].cached_tokens for i in range(5)] == [0] * 5
    assert [bench.firsts[f"1.{i}"].cached_tokens for i in range(5)] == [12] * 5
    stored_events = [e for e in bench.events.events if isinstance(e, BlockStored) and e.parent_block_hash is None]
    assert [e.extra_keys and e.extra_keys[:2] for e in stored_events] == [
        [None, None],
        [("s",), None],
        [("t",), None],
        [("s",), ("s",)],
        [("s", "s"), ("s",)],
    ]
    assert [e.lora_name for e in stored_events] == [None, None, None, "s", "s"]
    assert {(e.group_idx, e.kv_cache_spec_kind, e.medium, e.lora_id) for e in stored_events} == {
        (0, "full_attention", "GPU", None)
    }


def test_the_owner_of_pending_blocks_aborted_in_that_step_leaves_its_sharer_correct() -> None:
    bench = make_bench()
    prompt = list(range(100, 114))
    bench.add("a", prompt)
    bench.add("b", prompt)
    bench.device.on_execute = lambda plan: bench.abort("a")
    bench.step()
    bench.device.on_execute = lambda plan: None
    assert bench.ends["a"].finish_reason is FinishReason.ABORT
    assert bench.cache.pool.live_units == 4
    bench.drain()
    bench.assert_correct()
    assert bench.outputs["a"] == []
    assert len(bench.outputs["b"]) == 4


def test_a_failed_step_ends_its_requests_announces_nothing_and_the_loop_lives_on() -> None:
    bench = make_bench(max_num_batched_tokens=16)
    prompt = list(range(100, 114))
    for name in "abc":
        bench.add(name, prompt)
    bench.device.fail_next = True
    outputs = bench.step()
    assert [o.request_id for o in outputs] == ["a", "b"]  # the budget had no room for c
    assert all(o.finish_reason is FinishReason.ERROR and "fell off the bus" in (o.error or "") for o in outputs)
    assert bench.events.events == [AllBlocksCleared()]
    bench.drain()
    bench.assert_correct()
    assert len(bench.outputs["c"]) == 4
    assert bench.firsts["c"].cached_tokens == 0
    assert bench.core.stats().failed_steps == 1


def test_reset_is_published_at_once_and_running_sequences_keep_their_blocks() -> None:
    bench = make_bench()
    prompt = list(range(100, 114))
    bench.add("a", prompt, max_tokens=12)
    bench.step()
    bench.core.reset_prefix_cache()
    assert isinstance(bench.events.events[-1], AllBlocksCleared)
    bench.check()
    bench.add("b", prompt, max_tokens=12)
    bench.drain()
    bench.assert_correct()
    assert bench.firsts["b"].cached_tokens == 0
    before = len(bench.events.events)
    bench.core.reset_prefix_cache()
    assert len(bench.events.events) == before + 1
    assert bench.events.resident == {}
    assert bench.cache.pool.free_units == 64


def test_reset_in_the_middle_of_a_step_announces_nothing_of_it() -> None:
    bench = make_bench()
    prompt = list(range(100, 112))
    for name in "abc":
        bench.add(name, prompt, max_tokens=12)
    bench.device.on_execute = lambda plan: bench.core.reset_prefix_cache()
    bench.step()
    bench.device.on_execute = lambda plan: None
    assert bench.events.resident == {}
    bench.drain()
    bench.assert_correct()


def test_stops() -> None:
    eos = frozenset({EOS})
    bench = make_bench(eos_token_ids=eos, units=200)
    prompts = {f"p{i}": [i, i + 1, i + 2] for i in range(12)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=40)
        bench.add(name + "/ignore", prompt, max_tokens=40, ignore_eos=True)
        bench.add(name + "/min", prompt, max_tokens=40, min_tokens=5)
        bench.add(name + "/stop", prompt, max_tokens=40, stop_token_ids=(2,))
    bench.drain()
    bench.assert_correct()
    reasons = {name: bench.ends[name] for name in bench.ends}
    for name in prompts:
        assert len(bench.outputs[name + "/ignore"]) == 40
        assert len(bench.outputs[name + "/min"]) >= 5
        last = bench.outputs[name + "/stop"][-1]
        assert reasons[name + "/stop"].stop_token_id == (2 if last == 2 else None)
        assert reasons[name].stop_token_id is None
    assert {r.finish_reason for r in reasons.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_max_model_len_ends_a_sequence_and_too_long_a_prompt_is_refused() -> None:
    bench = make_bench(max_model_len=20)
    bench.add("a", [1] * 15, max_tokens=None)
    bench.drain()
    assert len(bench.outputs["a"]) == 5
    assert bench.ends["a"].finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestRefusedError, match=r"prompt: 20 tokens .* maximum context length is 20"):
        bench.add("b", [1] * 20)
    with pytest.raises(RequestRefusedError, match="at least one token"):
        bench.add("c", [])


def test_a_request_that_can_never_fit_is_refused_and_one_that_fills_the_cache_ends() -> None:
    bench = make_bench(units=4)
    with pytest.raises(RequestRefusedError, match=r"prompt: 16 tokens can never fit: the KV cache holds 16"):
        bench.add("a", [1] * 16)
    bench.add("b", [1] * 15, max_tokens=None)
    bench.add("c", [2] * 10, max_tokens=None)
    bench.drain()
    bench.assert_correct()
    assert len(bench.outputs["b"]) == 1
    assert len(bench.outputs["c"]) == 6
    bench.add("d", [1])
    with pytest.raises(RequestRefusedError, match="already being served"):
        bench.add("d", [1])


def test_preemption_recomputes_the_last_in_order_and_everybody_finishes() -> None:
    bench = make_bench(units=10, max_num_seqs=4)
    for i in range(4):
        bench.add(f"r{i}", [10 + i] * 6, max_tokens=20)
    bench.drain()
    bench.assert_correct()
    stats = bench.core.stats()
    assert stats.totals.preemptions > 0
    assert stats.totals.finished_requests == 4
    assert next(iter(bench.ends)) == "r0"


def test_the_first_output_says_how_long_the_request_waited() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("a", [1, 2, 3], max_tokens=2)
    bench.step()
    bench.add("b", [4, 5, 6], max_tokens=2)
    arrival_s = bench.now
    bench.now = arrival_s + 8.0
    bench.drain()
    assert bench.firsts["a"].queue_s == 0.0
    assert bench.firsts["b"].queue_s == 8.0


def test_priority_then_arrival() -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.add("late", [1] * 4, priority=1, max_tokens=1)
    bench.add("first", [2] * 4, priority=0, max_tokens=1)
    bench.add("second", [3] * 4, priority=0, max_tokens=1)
    bench.add("urgent", [4] * 4, priority=-1, max_tokens=1)
    bench.drain()
    assert list(bench.ends) == ["urgent", "first", "second", "late"]


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    bench = make_bench(max_num_batched_tokens=10, units=100)
    bench.add("short", [1, 2], max_tokens=30)
    bench.step()
    bench.add("long", [3] * 100, max_tokens=2)
    for _ in range(8):
        bench.step()
    assert all(plan[0][0] == "short" and plan[1][0] == "long" for plan in bench.device.plans[1:])
    assert all(sum(end - start for _, start, end in plan) <= 10 for plan in bench.device.plans)
    bench.drain()
    bench.assert_correct()


def test_prompt_logprobs_skip_no_position_and_survive_chunks_and_preemption() -> None:
    bench = make_bench(max_num_batched_tokens=8, units=12)
    prompt = list(range(100, 122))
    bench.add("warm", prompt, max_tokens=2)
    bench.drain()
    bench.add("other", [5] * 16, max_tokens=30)
    bench.add("wanted", prompt, prompt_logprobs=1, logprobs=1, max_tokens=3)
    bench.drain()
    bench.assert_correct()
    first = bench.firsts["wanted"]
    assert first.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [p.token_id for p in first.prompt_logprobs[1:] if p] == prompt[1:]
    assert first.logprobs is not None
    assert first.logprobs[0].token_id == first.token_ids[0]


def test_abort_anywhere() -> None:
    bench = make_bench(units=12, max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(4):
        bench.add(f"r{i}", list(range(10 * i, 10 * i + 12)), max_tokens=10)
    bench.step()
    bench.abort("r3", "r0", "unknown")  # waiting, in the middle of its prefill
    bench.check()
    bench.step()
    bench.abort("r0")
    bench.drain()
    bench.assert_correct()
    assert bench.ends["r0"].finish_reason is FinishReason.ABORT
    assert bench.ends["r1"].finish_reason is FinishReason.LENGTH


def test_conversation_reuses_what_was_generated_and_events_say_the_same() -> None:
    bench = make_bench(units=60)
    history = list(range(100, 110))
    for turn in range(4):
        request = bench.add(f"t{turn}", history, max_tokens=7)
        bench.drain()
        expected = 0 if not turn else (len(history) - 3 - 1) // 4 * 4  # the last token of a turn was never computed
        assert bench.firsts[f"t{turn}"].cached_tokens == expected
        history = history + continuation(request, 200) + [200 + turn, 201, 202]
    stored_events = [e for e in bench.events.events if isinstance(e, BlockStored)]
    assert len(stored_events[0].block_hashes) == 2  # a run of neighbours is one event
    assert not any(isinstance(e, BlockRemoved) for e in bench.events.events)


def test_eviction_takes_the_tail_first_and_never_a_parent_before_its_child() -> None:
    bench = make_bench(units=6)
    bench.add("a", list(range(100, 120)), max_tokens=1)
    bench.drain()
    chain = [name for e in bench.events.events if isinstance(e, BlockStored) for name in e.block_hashes]
    bench.add("b", list(range(200, 212)), max_tokens=1)
    bench.drain()
    removed_hashes = [name for e in bench.events.events if isinstance(e, BlockRemoved) for name in e.block_hashes]
    assert removed_hashes == chain[:2:-1][: len(removed_hashes)]


def test_prefix_caching_can_be_switched_off() -> None:
    cache = KVCache(dense(), 40, enable_prefix_caching=False)
    bench = Bench(cache, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100))
    for name in "abc":
        bench.add(name, [1] * 14, max_tokens=10)
    bench.drain()
    bench.assert_correct()
    assert bench.events.events == []
    assert bench.firsts["c"].cached_tokens == 0


def test_the_checker_itself_notices() -> None:
    checker = EventChecker(1)
    event = BlockStored([1], None, [5], 1, None, "GPU", None, extra_keys=[None], group_idx=0)
    checker([event])
    with pytest.raises(AssertionError, match="stored twice"):
        checker([event])
    with pytest.raises(AssertionError, match="child before"):
        checker([BlockStored([3], 2, [5], 1, None, "GPU", None, extra_keys=[None], group_idx=0)])


def test_steps_that_all_fail_end_the_engine() -> None:
    bench = make_bench()

    def fail(plan: StepPlan) -> None:
        raise OSError("no space left on device\nand a second line")

    for number in range(9):
        bench.device.on_execute = fail
        bench.add(f"r{number}", [number])
        bench.step()
    bench.device.on_execute = lambda plan: None
    bench.add("fine", [1])
    bench.drain()  # one that is computed: the count begins anew
    bench.device.on_execute = fail
    for number in range(9):
        bench.add(f"s{number}", [number])
        bench.step()
    bench.add("last", [1])
    with pytest.raises(RunnerLostError, match=r"^10 steps failed in a row, .* left on device$"):
        bench.step()


class Panic(BaseException):
    """What llguidance raises where it panics is no Exception."""


@pytest.mark.parametrize("error", [OSError("tokenizer.json is gone"), Panic("index out of bounds")])
def test_a_grammar_that_fails_to_compile_for_any_reason_ends_its_request_alone(error: BaseException) -> None:
    def load() -> GrammarVocabulary:
        raise error

    bench = make_bench()
    bench.core._grammars = GrammarCompiler(load)
    bench.add("a", [1, 2, 3])
    bench.add("b", [1, 2, 3], constraint=Constraint("start: /a/", "response_format"))
    while "b" not in bench.ends:
        bench.step()
    bench.drain()
    bench.core._grammars.close()
    assert bench.ends["b"].error == f"the engine failed to prepare the request: {type(error).__name__}: {error}"
    assert not bench.ends["b"].is_client_error
    assert bench.ends["a"].error is None


def test_an_id_that_is_used_again_in_the_step_of_its_abort() -> None:
    """Also beside a running prompt that begins alike, by which new requests are put in order."""
    bench = make_bench(max_num_batched_tokens=16)
    bench.add("a", list(range(60)), max_tokens=2)
    bench.step()
    bench.add("b", [*range(40), 99], max_tokens=2)
    bench.abort("b")
    bench.ends.clear()
    bench.add("b", [*range(40), 98], max_tokens=2)
    bench.drain()
    bench.assert_correct()
