"""Seeded histories of the core over host memory: what is loaded over several steps, failures, aborts and resets in it.

Each history is a few dozen random acts on the fake device, which checks every read, every event and every answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from drawn_specs import group
from fake_device import EOS, Bench

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec, StateSpec
from engine.prefill_queue import PrefillOrder
from engine.scheduler import RequestRefusedError, SchedulerConfig
from engine.types import StepPlan


def make_bench(rng: random.Random, order: PrefillOrder) -> Bench:
    """Any model; caches from too small for anything to large enough for loads of many steps."""
    size, large = rng.randint(1, 4), rng.random() < 0.5
    groups = [group(rng.randint(1, 2))]
    if rng.random() < 0.4:
        groups.append(group(rng.randint(1, 3), window=rng.randint(1, 9)))
    state = None
    if rng.random() < 0.4:
        state = StateSpec(layer_indices=(9,), state_bytes=rng.randint(1, 6) * size * 256 + rng.randint(0, 200))
    seqs = rng.randint(1 + large, 4)
    budget = seqs + rng.randint(0, 20)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=60 if large else rng.choice([20, 40, 400]),
        eos_token_ids=frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
        prefill_order=order,
    )
    cache = KVCache(
        CacheSpec(block_size=size, groups=tuple(groups), state=state),
        rng.randint(8, 26) if large else rng.randint(2, 16),
        step_tokens_max=budget,
        adaptive_eviction=rng.random() < 0.5,
        host_unit_count=rng.choice([10, 20, 40] if large else [1, 4, 20]),
        load_bytes_max=rng.choice([1, 1, 600, None]),
    )
    return Bench(cache, config, overlap=rng.random() < 0.6)


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = make_bench(self.rng, "arrival" if seed % 2 else "shortest")
        self.texts: list[list[int]] = [[]]
        self.count = 0

    def play(self) -> None:
        acts: list[tuple[float, Callable[[], object]]] = [
            (0.40, self.send_request),
            (0.40, self.steps),
            (0.05, lambda: self.bench.abort(self.anyone())),
            (0.04, lambda: self.during(lambda plan: self.bench.abort(self.anyone()))),
            (0.02, lambda: self.during(lambda plan: self.bench.core.reset_prefix_cache())),
            (0.03, self.fail),
            (0.02, self.bench.core.reset_prefix_cache),
            (0.04, self.bench.drain),
        ]
        for _ in range(self.rng.randint(20, 60)):
            self.rng.choices([act for _, act in acts], [share for share, _ in acts])[0]()
            self.bench.check()
            self.bench.assert_correct()
        self.bench.drain()
        self.bench.assert_correct()

    def anyone(self) -> str:
        return f"r{self.rng.randrange(self.count + 1)}"

    def send_request(self) -> None:
        rng = self.rng
        text = (rng.choice(self.texts) + [rng.randint(0, 1) for _ in range(rng.randint(1, 16))])[:50]
        for _ in range(rng.choice([1, 1, 2, 3])):
            with suppress(RequestRefusedError):
                self.bench.add(
                    f"r{self.count}", text, max_tokens=rng.randint(1, 20), priority=rng.randint(0, 1),
                    cache_salt=rng.choice([None, None, None, "s"]), prompt_logprobs=rng.choice([None, None, None, 1]),
                )  # fmt: skip
            self.count += 1

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            for output in self.bench.step():
                if output.finish_reason is not None:
                    name = output.request_id
                    self.texts = [*self.texts, self.bench.requests[name].token_ids + self.bench.outputs[name]][-12:]

    def during(self, act: Callable[[StepPlan], object]) -> None:
        self.bench.device.on_execute = act  # type: ignore[assignment]
        self.bench.step()
        self.bench.device.on_execute = lambda plan: None

    def fail(self) -> None:
        self.bench.device.fail_next = True
        self.bench.step()
        self.bench.device.fail_next = False


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (30, 60, 90))])
def test_every_read_every_event_and_every_answer_is_right(first: int) -> None:
    for seed in range(first, first + 30):
        print(f"seed {seed}")
        History(seed).play()


def test_names_that_leave_with_what_is_evicted_for_them() -> None:
    """What is evicted to take a block up took the names along that other blocks of the same path were to get."""
    History(2951).play()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 250))
def test_thousands_of_them(first: int) -> None:
    for seed in range(first, first + 250):
        print(f"seed {seed}")
        History(seed).play()


BLOCK_BYTES = CacheSpec(block_size=4, groups=(group(1),)).block_bytes(0)


def two_that_decode(load_bytes_max: int | None) -> tuple[Bench, list[int]]:
    """Beside them a text of sixteen blocks that lies in host memory."""
    spec = CacheSpec(block_size=4, groups=(group(1),))
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=200, max_model_len=400)
    bench = Bench(KVCache(spec, 40, host_unit_count=60, load_bytes_max=load_bytes_max), config)
    text = [1, 2, 3, 0] * 16
    bench.add("first", text, max_tokens=1)
    bench.drain()
    bench.add("other", [2] * 158, max_tokens=1)
    bench.drain()
    for name in "ab":
        bench.add(name, [3, ord(name) % 5], max_tokens=60)
    bench.step()
    return bench, text


def copies_of_steps(bench: Bench) -> list[tuple[int, int]]:
    """(blocks that come up, that go down) with each further step, until it has computed all that is asked."""
    copy_counts: list[tuple[int, int]] = []
    block_bytes = bench.cache.spec.block_bytes(0)
    while "late" not in bench.ends:
        before = bench.core.stats()
        bench.step()
        after = bench.core.stats()
        up = after.host_loaded_bytes - before.host_loaded_bytes
        down = after.host_stored_bytes - before.host_stored_bytes
        copy_counts.append((up // block_bytes, down // block_bytes))
    return copy_counts


def loads_of_steps(bench: Bench) -> list[int]:
    return [up for up, _ in copies_of_steps(bench)]


def test_beside_decodes_a_step_copies_no_more_than_its_bound() -> None:
    """Up, and down to make room: also in the step that takes the request in."""
    bench, text = two_that_decode(6 * BLOCK_BYTES)
    bench.add("late", [*text, 4], max_tokens=1)
    copies = copies_of_steps(bench)
    assert [up for up, _ in copies] == [3, 3, 3, 3, 3, 1]
    assert all(3 <= down <= 5 for _, down in copies[:-1]), "those who decode take a block each now and then"
    assert bench.firsts["late"].cached_tokens == 64
    assert len(bench.outputs["a"]) == 1 + 6, "those who decode got a token in every step"
    bench.drain()
    bench.assert_correct()


@pytest.mark.parametrize(("bound", "loads"), [(2 * BLOCK_BYTES, [1, 1, 1, 1, 1, 1]), (BLOCK_BYTES, [1, 0, 1, 0, 1, 0]),
                                              (1, [1, 0, 0, 0, 1, 0])])  # fmt: skip
def test_where_a_block_takes_more_than_the_bound_the_next_steps_copy_nothing(bound: int, loads: list[int]) -> None:
    """But for a while only. With each block one goes down."""
    bench, text = two_that_decode(bound)
    bench.add("late", [*text, 4], max_tokens=1)
    assert loads_of_steps(bench)[:6] == loads


def test_what_waits_to_go_down_is_found_meanwhile() -> None:
    """What was evicted for loads ahead, and lies where they go, is a hit: its copy goes down before it comes up."""
    bench, text = two_that_decode(1)
    stored_bytes = bench.core.stats().host_stored_bytes
    bench.add("late", [*text, 4], max_tokens=1)
    bench.step()
    assert bench.core.stats().host_stored_bytes - stored_bytes < 5 * bench.cache.spec.block_bytes(0), "the rest waits"
    bench.add("again", [2] * 158 + [1], max_tokens=1)
    bench.drain()
    assert bench.firsts["again"].cached_tokens > 100
    bench.assert_correct()


def test_names_of_what_waits_to_go_down_can_be_forgotten() -> None:
    bench, text = two_that_decode(1)
    bench.add("late", [*text, 4], max_tokens=1)
    bench.step()
    stored_bytes = bench.core.stats().host_stored_bytes
    bench.core.reset_prefix_cache()
    bench.check()
    bench.drain()
    assert bench.core.stats().host_stored_bytes - stored_bytes < 5 * bench.cache.spec.block_bytes(0), (
        "copied for nobody"
    )
    bench.assert_correct()


def test_with_nobody_to_hold_up_all_is_loaded_at_once() -> None:
    bench, text = two_that_decode(1)
    bench.abort("a", "b")
    bench.add("late", [*text, 4], max_tokens=1)
    assert loads_of_steps(bench) == [16]


def test_who_needs_what_is_on_its_way_waits_for_it() -> None:
    """A second request for the same text is admitted when the blocks are planned, and loads nothing again."""
    bench, text = two_that_decode(2 * BLOCK_BYTES)
    bench.add("early", [*text, 0], max_tokens=1)
    bench.step()
    bench.add("late", [*text, 4], max_tokens=1)
    assert sum(loads_of_steps(bench)) == 15
    assert bench.firsts["late"].cached_tokens == 64
    bench.drain()
    bench.assert_correct()


def test_one_that_is_aborted_while_it_loads_leaves_the_rest_below() -> None:
    bench, text = two_that_decode(2 * BLOCK_BYTES)
    bench.add("early", [*text, 0], max_tokens=1)
    for _ in range(4):
        bench.step()
    bench.abort("early")
    bench.check()
    bench.add("late", [*text, 4], max_tokens=1)
    assert sum(loads_of_steps(bench)) == 12
    bench.drain()
    bench.assert_correct()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("question", [0, 3])
def test_states_that_are_read_back_are_found_again(question: int, overlap: bool, adaptive: bool) -> None:
    """The same eight prompts, or the same eight beginnings with another question, in every round."""
    spec = CacheSpec(block_size=4, groups=(group(1),), state=StateSpec(layer_indices=(9,), state_bytes=4096))
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=60, max_model_len=200)
    bench = Bench(KVCache(spec, 24, host_unit_count=200, adaptive_eviction=adaptive), config, overlap=overlap)
    rng = random.Random(1)
    texts = [[rng.randint(0, 3) for _ in range(41)] for _ in range(8)]
    for turn in range(6):
        for number, text in enumerate(texts):
            prompt_ids = text[:40] + [turn % 4] * question if question else text
            bench.add(f"{turn}/{number}", prompt_ids, max_tokens=2)
            bench.drain()
            assert turn == 0 or bench.firsts[f"{turn}/{number}"].cached_tokens == 40
    bench.assert_correct()
