"""Seeded histories of the core over host memory: loads, failures, aborts and resets.

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
    """Any model; caches from too small for anything to large enough for many loads."""
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
            (0.03, self.fail_half_way),
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

    def fail_half_way(self) -> None:
        """Let a step fail between its copies, its chunks and its checkpoints."""
        self.bench.device.acts_before_fault = self.rng.randrange(12)


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


def test_a_prefix_on_the_host_is_loaded_by_the_step_that_admits_its_request() -> None:
    """Beside two requests that decode: the step loads all sixteen blocks, and the second request loads none again."""
    spec = CacheSpec(block_size=4, groups=(group(1),))
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=200, max_model_len=400)
    bench = Bench(KVCache(spec, 40, host_unit_count=60), config)
    text = [1, 2, 3, 0] * 16
    bench.add("first", text, max_tokens=1)
    bench.drain()
    bench.add("other", [2] * 158, max_tokens=1)
    bench.drain()
    for name in "ab":
        bench.add(name, [3, ord(name) % 5], max_tokens=60)
    bench.step()
    loaded_bytes = bench.core.stats().host_memory.loaded_bytes
    bench.add("early", [*text, 0], max_tokens=1)
    bench.add("late", [*text, 4], max_tokens=1)
    bench.step()
    assert bench.core.stats().host_memory.loaded_bytes - loaded_bytes == 16 * spec.block_bytes(0)
    assert bench.firsts["early"].cached_tokens == bench.firsts["late"].cached_tokens == 64
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
