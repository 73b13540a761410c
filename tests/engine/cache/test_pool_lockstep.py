"""The pool, tree and tables in lockstep with a naive model, and mutants of them that the lockstep must catch.

The seven invariants: one state per unit and sub-block, kinds never mixed in a unit; references = table entries;
hash <-> block bijection; replayed events = resident set, strictly alternating; bytes follow hashes through compaction
and merge; allocation succeeds exactly when capacity says so; prefix closure.
"""

from __future__ import annotations

import random

import pytest
from budget import examples
from drawn_specs import group, specs
from fake_device import EventChecker, resident_in
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from naive_memory import NaiveCache

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec, StateSpec
from engine.types import Chunk, Request, SamplingParams, Sequence, StepPlan

STEP_TOKENS_MAX = 8
HOST_UNITS = st.sampled_from([0, 1, 2, 5, 20])


class PoolMachine(RuleBasedStateMachine):
    """A scheduler that does anything at random, within the contract of KVCache."""

    @initialize(spec=specs(3, 6), units=st.integers(3, 12), adaptive=st.booleans(), host_units=HOST_UNITS)
    def start(self, spec: CacheSpec, units: int, adaptive: bool, host_units: int) -> None:
        self._start(spec, units, adaptive, host_units)

    def _start(self, spec: CacheSpec, units: int, adaptive: bool = False, host_units: int = 0) -> None:
        self.cache = KVCache(
            spec, units, step_tokens_max=STEP_TOKENS_MAX, adaptive_eviction=adaptive, host_unit_count=host_units
        )
        self.naive = NaiveCache(self.cache)
        self.events = EventChecker(spec.block_size)
        self.running: list[Sequence] = []
        self.texts: list[list[int]] = [[]]

    @rule(
        seed=st.integers(0, 2**32),
        admissions=st.integers(0, 3),
        outcome=st.sampled_from(["apply"] * 5 + ["fail", "reset"]),
    )
    def step(self, seed: int, admissions: int, outcome: str) -> None:
        """Grow some running sequences, admit new ones, compute, commit (or fail, or be reset meanwhile)."""
        rng = random.Random(seed)
        self.naive.pinned_blocks = set()
        chunks: list[Chunk] = []
        for seq in list(self.running):
            if rng.random() < 0.8:
                self._continue(seq, rng, chunks)
        for chunk in chunks:
            self._reserve(chunk.seq, chunk.end)
        for _ in range(admissions):
            self._admit(rng, chunks)
        plan = StepPlan(chunks=chunks)
        self.cache.fill_plan(plan)  # without chunks it may hold the moves of a compaction that did not help enough
        self.cache.check_invariants()
        if outcome == "fail":
            self._fail()
            return
        self.naive.execute(plan)
        if outcome == "reset":
            self.reset()
        self.cache.commit(chunks)
        self.naive.pinned_blocks = set()

    @rule(seed=st.integers(0, 2**32))
    def finish(self, seed: int) -> None:
        if self.running:
            seq = self.running.pop(random.Random(seed).randrange(len(self.running)))
            self.texts = [*self.texts, list(seq.token_ids)][-8:]
            self._release(seq)

    @rule()
    def reset(self) -> None:
        self.naive.forget()
        self.cache.reset()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        if events := self.cache.take_events():
            self.events(events)
        assert set(self.events.resident) == resident_in(self.cache)
        self.naive.check_structure()
        self.naive.check_cached()
        self.naive.check_kept()
        for seq in self.running:
            self.naive.check_readable(seq, seq.computed_tokens, seq.computed_tokens)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in self.running:
                self._release(seq)
            self.running = []
            self.holds()
            assert self.cache.pool.live_units == 0

    # ------------------------------------------------------------------ one step's parts

    def _continue(self, seq: Sequence, rng: random.Random, chunks: list[Chunk]) -> None:
        if seq.computed_tokens == len(seq.token_ids):
            seq.token_ids.append(rng.randrange(2))
        end = self.cache.clip_chunk_end(
            seq, rng.randint(seq.computed_tokens + 1, min(len(seq.token_ids), seq.computed_tokens + STEP_TOKENS_MAX))
        )
        if self._grow(seq, end):
            chunks.append(Chunk(seq, seq.computed_tokens, end, False))

    def _grow(self, seq: Sequence, end: int) -> bool:
        block_count = -(-end // self.cache.block_size) - len(seq.block_tables[0])
        extra_units = [max(0, block_count)] * len(self.cache.spec.groups) + [0]
        room = self.naive.has_room(extra_units)
        has_grown = self.cache.grow(seq, end)
        assert has_grown == room, f"grow said {has_grown}, capacity says {room}"
        return has_grown

    def _admit(self, rng: random.Random, chunks: list[Chunk]) -> None:
        text = rng.choice(self.texts)
        text = text[: rng.randint(0, len(text))] + [rng.randrange(2) for _ in range(rng.randint(1, 6))]
        request = Request(request_id="r", token_ids=text, params=SamplingParams())
        seq = Sequence(request=request, token_ids=list(text), prompt_len=len(text), arrival_s=0.0)
        if self.cache.should_wait(seq):
            self.cache.forget_match(seq)
            return
        blocks = -(-len(text) // self.cache.block_size)
        has_room_alone = self.naive.has_room(self.naive.demand(blocks, STEP_TOKENS_MAX))
        if not self.cache.admit(seq):
            assert not has_room_alone, "refused although it fits without sharing anything"
            self.cache.forget_match(seq)
            return
        for other in rng.sample(self.texts, k=min(2, len(self.texts))):
            if len(other) > 1:
                twin = Sequence(request=request, token_ids=list(other), prompt_len=len(other), arrival_s=0.0)
                self.cache.plan_shared_prefix(seq, twin)
                self.cache.forget_match(twin)
        end = self.cache.clip_chunk_end(seq, min(len(text), seq.computed_tokens + STEP_TOKENS_MAX))
        if not self.cache.grow(seq, end):
            self._release(seq)
            return
        self.running.append(seq)
        chunks.append(Chunk(seq, seq.computed_tokens, end, False))
        self._reserve(seq, end)

    def _reserve(self, seq: Sequence, end: int) -> None:
        """What the step pins, states to copy and blocks to merge into, counts as live until it is over."""
        self.cache.register_full_blocks(seq, end)
        state = len(self.cache.spec.groups)
        self.naive.pinned_blocks = {
            (unit.kind, unit.index if unit.kind == state else block.id)
            for unit in self.cache.pool.units
            for block in unit.blocks
            if block.ref_count and block.node is not None and unit.kind is not None
        }

    def _release(self, seq: Sequence) -> None:
        self.cache.release(seq)
        self.cache.forget_match(seq)

    def _fail(self) -> None:
        self.naive.forget()
        self.cache.reset_after_failure()
        for seq in self.running:
            self._release(seq)
        self.running = []


class CrampedMachine(PoolMachine):
    """Two attention groups and state in a handful of units: little but compactions."""

    @initialize(
        block_size=st.integers(1, 2),
        blocks=st.integers(3, 5),
        window=st.integers(3, 6),
        units=st.integers(5, 9),
        host_units=HOST_UNITS,
    )
    def start(self, block_size: int, blocks: int, window: int, units: int, host_units: int) -> None:  # type: ignore[override]
        state = StateSpec(layer_indices=(9,), state_bytes=blocks * block_size * 256)
        spec = CacheSpec(block_size=block_size, groups=(group(1), group(1, window=window)), state=state)
        self._start(spec, units, host_units=host_units)


class RoomyMachine(PoolMachine):
    """States and room for everything in host memory, over a device that holds next to nothing."""

    @initialize(block_size=st.integers(1, 2), units=st.integers(3, 5), adaptive=st.booleans())
    def start(self, block_size: int, units: int, adaptive: bool) -> None:  # type: ignore[override]
        spec = CacheSpec(
            block_size=block_size, groups=(group(1),), state=StateSpec(layer_indices=(9,), state_bytes=700)
        )
        self._start(spec, units, adaptive, host_units=60)


class SlidingMachine(PoolMachine):
    """A short window beside full attention: blocks of windows are missing in many cached prefixes."""

    @initialize(window=st.integers(2, 4), units=st.integers(4, 12))
    def start(self, window: int, units: int) -> None:  # type: ignore[override]
        self._start(CacheSpec(block_size=1, groups=(group(1), group(1, window=window))), units)


QUICK = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = QUICK
TestCrampedPool = CrampedMachine.TestCase
TestCrampedPool.settings = QUICK

TestRoomyPool = RoomyMachine.TestCase
TestRoomyPool.settings = QUICK

TestSlidingPool = SlidingMachine.TestCase
TestSlidingPool.settings = QUICK


@pytest.mark.slow
def test_thousands_of_histories() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=5000, stateful_step_count=60, deadline=None))
