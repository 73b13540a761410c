"""Whose prompt is computed next: the order against a naive model, its bound, what caches change, and no livelock."""

from __future__ import annotations

from typing import Any

import pytest
from budget import examples
from fake_device import Bench
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.prefill_queue import AGEING, PrefillOrder
from engine.scheduler import SchedulerConfig

SPEC = CacheSpec(4, (GroupSpec(FULL_ATTENTION, (0,), 1, 64, 2),))
HYBRID = CacheSpec(4, (GroupSpec(FULL_ATTENTION, (0,), 1, 64, 2),), StateSpec((1,), 256))

History = list[tuple[list[int], int]]
"""Prompts (tokens) that come, and the steps that go by behind them."""

histories = st.lists(
    st.tuples(st.lists(st.integers(1, 12) | st.integers(30, 90), max_size=4), st.integers(0, 6)),
    min_size=1,
    max_size=12,
)


def make_bench(
    order: PrefillOrder = "shortest",
    *,
    budget: int = 8,
    units: int = 400,
    seqs: int = 8,
    caching: bool = True,
    spec: CacheSpec = SPEC,
    **config: Any,
) -> Bench:
    cache = KVCache(spec, units, step_tokens_max=budget, enable_prefix_caching=caching)
    limits = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=400, prefill_order=order, **config
    )
    return Bench(cache, limits)


def play(bench: Bench, history: History) -> list[list[tuple[str, int, int]]]:
    """The plans. No two prompts begin alike; nobody decodes."""
    count = 0
    for prompts, steps in history:
        for tokens in prompts:
            bench.add(f"r{count}", [1000 + count] * tokens, max_tokens=1)
            count += 1
        for _ in range(steps):
            bench.step()
    bench.drain()
    bench.assert_correct()
    return bench.device.plans


class Naive:
    """Sorts the prompts that have tokens left anew in every step.

    The last token of a begun prompt is planned as a decode is: first, and not as prompt work.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.computed_tokens = 0
        self.jobs: list[tuple[float, int, int]] = []
        """(came, number, tokens left)."""
        self.tokens: dict[int, int] = {}
        self.plans: list[list[tuple[str, int, int]]] = []

    def is_last_token(self, number: int, tokens_left: int) -> bool:
        return tokens_left == 1 < self.tokens[number]

    def step(self) -> None:
        budget, plan, waiting_jobs = self.budget, [], []

        def sort_key(job: tuple[float, int, int]) -> tuple[bool, float, int]:
            arrival_work, number, tokens_left = job
            return not self.is_last_token(number, tokens_left), tokens_left + AGEING * arrival_work, number

        for arrival_work, number, tokens_left in sorted(self.jobs, key=sort_key):
            tokens = min(tokens_left, budget)
            budget -= tokens
            if not self.is_last_token(number, tokens_left):
                self.computed_tokens += tokens
            if tokens:
                start = self.tokens[number] - tokens_left
                plan.append((f"r{number}", start, start + tokens))
            if tokens_left > tokens:
                waiting_jobs.append((arrival_work, number, tokens_left - tokens))
        self.jobs = waiting_jobs
        if plan:
            self.plans.append(plan)

    def play(self, history: History) -> list[list[tuple[str, int, int]]]:
        for prompts, steps in history:
            for tokens in prompts:
                number = len(self.tokens)
                self.tokens[number] = tokens
                self.jobs.append((self.computed_tokens, number, tokens))
            for _ in range(steps):
                self.step()
        while self.jobs:
            self.step()
        return self.plans


def test_who_has_the_least_left_goes_first_begun_or_not() -> None:
    bench = make_bench()
    bench.add("long", [1] * 60, max_tokens=1)
    bench.step()
    bench.add("short", [2] * 10, max_tokens=1)
    bench.add("shorter", [3] * 6, max_tokens=1)
    bench.drain()
    assert bench.device.plans[:4] == [
        [("long", 0, 8)],
        [("shorter", 0, 6), ("short", 0, 2)],
        [("short", 2, 10)],
        [("long", 8, 16)],
    ]
    bench.assert_correct()


@settings(max_examples=examples(200))
@given(history=histories, budget=st.integers(50, 64) | st.integers(100, 150))
@example(history=[([1, 4, 77], 0), ([1, 1, 67, 77], 4), ([8], 0)], budget=50)  # the last token of r2 is no prompt work
def test_the_order_is_that_of_a_naive_model(history: History, budget: int) -> None:
    assert play(make_bench(budget=budget, seqs=50, caching=False), history) == Naive(budget).play(history)


@settings(max_examples=examples(100))
@given(history=histories, budget=st.integers(4, 40), seqs=st.integers(1, 4))
def test_who_comes_after_the_bound_stays_behind(history: History, budget: int, seqs: int) -> None:
    """Of a prompt with `n` tokens, once `n / AGEING` were computed since it came."""
    bench = make_bench(budget=budget, seqs=seqs, caching=False)
    tokens = [prompt for prompts, _ in history for prompt in prompts]
    arrival_work: dict[str, int] = {}
    waiting = bench.core.scheduler._waiting_queue
    add_arrival = waiting.add_arrival

    def record_arrival(entry: Any) -> None:
        add_arrival(entry)
        arrival_work[entry.request_id] = entry.arrival_work

    waiting.add_arrival = record_arrival  # type: ignore[method-assign]
    plans = play(bench, history)
    last = {name: at for at, plan in enumerate(plans) for name, _, _ in plan}
    first = {name: at for at, plan in reversed(list(enumerate(plans))) for name, _, _ in plan}
    for name, end in last.items():
        number = int(name[1:])
        later_names = [other for other in arrival_work if int(other[1:]) > number and first[other] < end]
        assert all(arrival_work[other] - arrival_work[name] <= tokens[number] / AGEING for other in later_names), (
            name,
            later_names,
        )


def test_a_long_prompt_beside_short_ones_without_end() -> None:
    """As many tokens of short prompts come as a step computes: the long one is through when the bound says so."""
    ends = {}
    for order in ("shortest", "arrival"):
        bench = make_bench(order, caching=False)  # type: ignore[arg-type]
        bench.add("long", [1] * 80, max_tokens=1)
        while "long" not in bench.ends:
            bench.add(f"r{len(bench.requests)}", [2] * 8, max_tokens=1)
            bench.step()
        ends[order] = bench.device.computed_tokens
    assert ends["arrival"] == 80
    assert 80 / AGEING / 2 < ends["shortest"] <= 80 / AGEING + 2 * 80


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_waits_for_a_seat_as_others_do(overlap: bool) -> None:
    """Where seats are short it is passed by those who come while so much could be computed, not while it is: short
    questions with long answers compute hardly anything."""
    budget = 10
    cache = KVCache(SPEC, 400, step_tokens_max=budget, enable_prefix_caching=False)
    bench = Bench(
        cache, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=400), overlap=overlap
    )
    bench.add("first", [1] * 4, max_tokens=20)
    bench.step()
    bench.add("long", [2] * 30, max_tokens=1)
    overtaking_count = 0
    while "long" not in bench.ends:
        assert overtaking_count < 100
        if len(bench.core.scheduler._waiting_queue) < 2:
            bench.add(f"short{overtaking_count}", [3] * 2, max_tokens=8)
            overtaking_count += 1
        bench.step()
    # 30 / AGEING tokens go by in steps of 9 beside one that decodes: 34 steps, in which five answers of 8 are given.
    assert 3 <= overtaking_count <= 7
    bench.drain()
    bench.assert_correct()


@settings(max_examples=examples(50))
@given(
    bursts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=10),
    tokens=st.integers(1, 50),
    budget=st.integers(4, 40),
    seqs=st.integers(1, 4),
)
def test_prompts_that_are_equally_long_come_in_the_order_of_arrival(
    bursts: list[tuple[int, int]], tokens: int, budget: int, seqs: int
) -> None:
    history = [([tokens] * count, steps) for count, steps in bursts]
    by_arrival = play(make_bench("arrival", budget=budget, seqs=seqs), history)
    assert play(make_bench(budget=budget, seqs=seqs), history) == by_arrival


def test_priority_comes_before_length() -> None:
    bench = make_bench()
    bench.add("long", [1] * 20, max_tokens=1)
    bench.step()
    bench.add("short", [2] * 4, max_tokens=1, priority=1)
    bench.add("urgent", [3] * 40, max_tokens=1, priority=-1)
    bench.drain()
    assert list(bench.ends) == ["urgent", "long", "short"]


@pytest.mark.parametrize("spec", [SPEC, HYBRID], ids=["attention", "hybrid"])
def test_what_is_cached_is_not_left(spec: CacheSpec) -> None:
    bench = make_bench(spec=spec)
    turn = [1] * 41
    bench.add("first", turn, max_tokens=1)
    bench.drain()
    bench.add("new", [2] * 20, max_tokens=1)
    bench.add("turn", [*turn, 5, 5, 5], max_tokens=1)
    bench.drain()
    assert list(bench.ends) == ["first", "turn", "new"]
    assert bench.firsts["turn"].cached_tokens == 40


def test_what_was_evicted_meanwhile_is_left_again() -> None:
    bench = make_bench(seqs=1)
    bench.add("first", [1] * 40, max_tokens=1)
    bench.drain()
    bench.add("running", [2] * 4, max_tokens=2)
    bench.step()
    bench.add("turn", [1] * 42, max_tokens=1)
    bench.add("new", [3] * 20, max_tokens=1)
    bench.core.reset_prefix_cache()
    bench.drain()
    assert list(bench.ends) == ["first", "running", "new", "turn"]
    bench.assert_correct()


@pytest.mark.parametrize("spec", [SPEC, HYBRID], ids=["attention", "hybrid"])
def test_what_a_running_prompt_brings_is_not_left(spec: CacheSpec) -> None:
    """Questions about one text: before a longer one of another, whether they come before or after it has begun."""
    bench = make_bench(spec=spec)
    text = [1] * 40
    bench.add("asked", [*text, 2, 2], max_tokens=1)
    bench.add("before", [*text, 3, 3], max_tokens=1)
    bench.step()
    bench.add("after", [*text, 4, 4], max_tokens=1)
    bench.add("other", [5] * 36, max_tokens=1)
    bench.drain()
    assert set(list(bench.ends)[:3]) == {"asked", "before", "after"}
    assert bench.firsts["before"].cached_tokens == bench.firsts["after"].cached_tokens == 40
    bench.assert_correct()


def test_a_step_with_enough_prompt_tokens_does_not_go_on_with_a_longer_one() -> None:
    bench = make_bench(budget=64, target_prefill_tokens=20)
    bench.add("long", [1] * 200, max_tokens=1)
    bench.step()
    bench.add("short", [2] * 24, max_tokens=1)
    bench.drain()
    assert bench.device.plans[:3] == [[("long", 0, 64)], [("short", 0, 24)], [("long", 64, 128)]]


@settings(max_examples=examples(150))
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 70), st.integers(1, 20), st.integers(0, 3), st.integers(0, 1)), min_size=2, max_size=14
    ),
    units=st.integers(8, 24),
    budget=st.integers(4, 30),
    overlap=st.booleans(),
    hybrid=st.booleans(),
)
def test_no_livelock_where_memory_is_short(
    arrivals: list[tuple[int, int, int, int]], units: int, budget: int, overlap: bool, hybrid: bool
) -> None:
    """Short ones are admitted beside paused long ones, and preempted: all are through in the end.

    A preemption is paid for by somebody earlier in order who has computed something: so there are no more than tokens.
    """
    spec = HYBRID if hybrid else SPEC
    cache = KVCache(spec, units, step_tokens_max=budget)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=100, prefill_order="shortest")
    bench = Bench(cache, config, overlap=overlap)
    scheduler, tokens = bench.core.scheduler, 0
    for number, (length, answer, steps, priority) in enumerate(arrivals):
        length = min(length, scheduler.token_limit - 1)
        bench.add(f"r{number}", [number] * length, max_tokens=answer, priority=priority)
        tokens += length + answer
        for _ in range(steps):
            bench.step()
    bench.drain(steps_max=20 * tokens)
    bench.assert_correct()
    assert scheduler.totals.preemptions <= tokens
