"""Random histories of the whole core on the fake device: every block read is right, every event true, none starve."""

from __future__ import annotations

from budget import examples
from drawn_specs import specs
from fake_device import EOS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec
from engine.core import FAILURES_MAX
from engine.prefill_queue import PrefillOrder
from engine.scheduler import RequestRefusedError, SchedulerConfig
from engine.types import StepPlan


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        spec=specs(4, 9),
        units=st.integers(2, 16),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 20),
        max_model_len=st.integers(8, 60) | st.just(400),
        eos=st.booleans(),
        overlap=st.booleans(),
        adaptive=st.booleans(),
        host_units=st.sampled_from([0, 1, 4, 20]),
        order=st.sampled_from(["shortest", "arrival"]),
    )
    def start(
        self,
        spec: CacheSpec,
        units: int,
        max_num_seqs: int,
        extra_budget: int,
        max_model_len: int,
        eos: bool,
        overlap: bool,
        adaptive: bool,
        host_units: int,
        order: PrefillOrder,
    ) -> None:
        budget = max_num_seqs + extra_budget
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}) if eos else frozenset(),
            prefill_order=order,
        )
        cache = KVCache(spec, units, step_tokens_max=budget, adaptive_eviction=adaptive, host_unit_count=host_units)
        self.bench = Bench(cache, config, overlap=overlap)
        self.count = 0
        self.texts: list[list[int]] = [[]]

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        twins=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        salt=st.sampled_from([None, None, "s"]),
        logprobs=st.sampled_from([None, None, None, 1]),
    )
    def add(
        self,
        data: st.DataObject,
        tail: list[int],
        twins: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        logprobs: int | None,
    ) -> None:
        """New text, or a continuation of what was said before; several at once, as n > 1 makes them."""
        text = data.draw(st.sampled_from(self.texts)) + tail
        for _ in range(twins):
            name = f"r{self.count}"
            self.count += 1
            try:
                self.bench.add(
                    name,
                    text,
                    max_tokens=max_tokens,
                    priority=priority,
                    cache_salt=salt,
                    prompt_logprobs=logprobs,
                )
            except RequestRefusedError:
                assert len(text) >= self.bench.core.scheduler.token_limit

    @rule(data=st.data(), short_of=st.integers(1, 6), new=st.integers(0, 30), max_tokens=st.integers(1, 12))
    def add_one_that_fills_the_pool(self, data: st.DataObject, short_of: int, new: int, max_tokens: int) -> None:
        """As long as the pool, or nearly, most of it said before: resumed, it needs more memory for a moment."""
        length = self.bench.core.scheduler.token_limit - short_of
        prefix = data.draw(st.sampled_from(self.texts))[: max(0, length - new)]
        if length > 0:
            self.bench.add(f"r{self.count}", prefix + [2] * (length - len(prefix)), max_tokens=max_tokens)
            self.count += 1

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.bench.step():
                if output.finish_reason is not None:
                    name = output.request_id
                    self.texts.append(self.bench.requests[name].token_ids + self.bench.outputs[name])
                    self.texts = self.texts[-6:]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.count:
            self.bench.abort(f"r{data.draw(st.integers(0, self.count - 1))}")

    @rule(data=st.data())
    def abort_in_the_middle_of_a_step(self, data: st.DataObject) -> None:
        if not self.count:
            return
        victim = f"r{data.draw(st.integers(0, self.count - 1))}"

        def act(plan: StepPlan) -> None:
            self.bench.abort(victim)

        self._during_step(act)

    @rule()
    def reset_in_the_middle_of_a_step(self) -> None:
        self._during_step(lambda plan: self.bench.core.reset_prefix_cache())

    @precondition(
        lambda self: self.bench.core._consecutive_failures < FAILURES_MAX - 1
    )  # with one more the engine is lost
    @rule()
    def failing_step(self) -> None:
        self.bench.device.fail_next = True
        self.bench.step()
        self.bench.device.fail_next = False

    @rule()
    def reset(self) -> None:
        self.bench.core.reset_prefix_cache()

    @rule()
    def drain(self) -> None:
        self.bench.drain()

    @invariant()
    def honest(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()
            self.bench.assert_correct()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            self.bench.assert_correct()

    def _during_step(self, act: object) -> None:
        self.bench.device.on_execute = act  # type: ignore[assignment]
        self.bench.step()
        self.bench.device.on_execute = lambda plan: None


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@settings(max_examples=examples(150))
@given(
    spec=specs(4, 9),
    units=st.integers(2, 14),
    budget=st.integers(1, 80),
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.booleans(), st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=5
    ),
    overlap=st.booleans(),
    host_units=st.sampled_from([0, 1, 4, 20]),
)
def test_whatever_fits_alone_is_served(
    spec: CacheSpec, units: int, budget: int, arrivals: list[tuple[int, bool, int, int]], overlap: bool, host_units: int
) -> None:
    """Beginnings of one text, and requests that continue one to the pool's end: none waits for ever."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=500)
    bench = Bench(KVCache(spec, units, step_tokens_max=budget, host_unit_count=host_units), config, overlap=overlap)
    for number, (new, fills, short_of, max_tokens) in enumerate(arrivals):
        length = max(0, bench.core.scheduler.token_limit - short_of)
        text = [3] * (length - new) + [1] * min(new, length) * fills
        if text:
            bench.add(f"r{number}", text, max_tokens=max_tokens)
            bench.drain()
    bench.assert_correct()
