"""One worker with a small cache: what a core predicts before a naive engine, and the capacity that its events show.

The engine is vLLM's scheduler and cache with all that does not matter left out: requests are taken in as they came,
each when there is room for its whole prompt, hits are looked up at that moment; what nobody holds is evicted in the
order in which it was given back, the end of a sequence first. Memory runs out: the last one taken in waits again.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from block_hash import hash_block
from hypothesis import given, settings
from hypothesis import strategies as st

from events import BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.messages import Decision, Forward, ReportedUsage, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.worker_stream import ObservedCapacity
from router.index import make_index
from router.index.protocol import IngestReport, Scope


@dataclass(eq=False)
class Sequence_:
    request_id: str
    ids: list[int]
    prompt_tokens: int
    answer_tokens: int
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int | None = None


class NaiveEngine:
    """Serves requests in steps; `events` are those since they were taken."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.events: list[Event] = []
        self._free = OrderedDict.fromkeys(range(block_count))
        self._refs = [0] * block_count
        self._names: dict[int, int] = {}
        self._resident: dict[int, int] = {}
        self._waiting: deque[Sequence_] = deque()
        self._running: list[Sequence_] = []

    def add(self, request_id: str, ids: Sequence[int], answer_tokens: int) -> None:
        self._waiting.append(Sequence_(request_id, list(ids), len(ids), answer_tokens))

    def step(self) -> list[Sequence_]:
        """Those that ended."""
        for seq in list(self._running):
            while seq in self._running and len(seq.blocks) * self.block_tokens < len(seq.ids):
                if self._free:
                    seq.blocks.append(self._allocate_block())
                else:
                    self._release_blocks(last := self._running.pop())
                    self._waiting.appendleft(last)
        while self._waiting and self._start(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        for seq in self._running:
            self._register_full_blocks(seq)
            seq.ids.append(hash((seq.request_id, len(seq.ids))) % 900)
        ended_sequences = [seq for seq in self._running if len(seq.ids) == seq.prompt_tokens + seq.answer_tokens]
        for seq in ended_sequences:
            self._running.remove(seq)
            self._release_blocks(seq)
        return ended_sequences

    def _start(self, seq: Sequence_) -> bool:
        hits = []
        for name in self._block_hashes(seq.ids, (len(seq.ids) - 1) // self.block_tokens):
            if name not in self._resident:
                break
            hits.append(self._resident[name])
        new = -(-len(seq.ids) // self.block_tokens) - len(hits)
        if new + sum(block in self._free for block in hits) > len(self._free):
            return False
        for block in hits:
            self._free.pop(block, None)
            self._refs[block] += 1
        seq.blocks = hits + [self._allocate_block() for _ in range(new)]
        if seq.cached_tokens is None:
            seq.cached_tokens = len(hits) * self.block_tokens
        self._register_full_blocks(seq)
        return True

    def _allocate_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._names.pop(block, None)
        if name is not None:
            del self._resident[name]
            self.events.append(BlockRemoved(block_hashes=[name], medium="GPU", group_idx=0))
        self._refs[block] = 1
        return block

    def _register_full_blocks(self, seq: Sequence_) -> None:
        """What is computed is found by others of the same step too."""
        size = self.block_tokens
        count = len(seq.ids) // size
        if all(block in self._names for block in seq.blocks[:count]):
            return
        names = self._block_hashes(seq.ids, count)
        for i, (block, name) in enumerate(zip(seq.blocks, names)):
            if block in self._names or name in self._resident:
                continue
            self._names[block], self._resident[name] = name, block
            self.events.append(
                BlockStored(
                    block_hashes=[name],
                    parent_block_hash=names[i - 1] if i else None,
                    block_size=size,
                    token_ids=seq.ids[i * size : (i + 1) * size],
                    lora_id=None,
                    medium="GPU",
                    lora_name=None,
                    extra_keys=[None],
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            )

    def _release_blocks(self, seq: Sequence_) -> None:
        for block in reversed(seq.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._names)
        seq.blocks = []

    def _block_hashes(self, ids: Sequence[int], count: int) -> list[int]:
        names: list[int] = []
        for i in range(count):
            of = ids[i * self.block_tokens : (i + 1) * self.block_tokens]
            names.append(hash_block(names[-1] if names else None, tuple(of), ()))
        return names


class World:
    """One engine behind a core; events arrive with each step."""

    def __init__(self, block_count: int, **spec: object) -> None:
        self.engine = NaiveEngine(block_count, 32)
        self.core = RouterCore(make_index(seed=1), CoreConfig())
        models = (ServedModel("m", "m"),)
        worker = self.core.add_worker(WorkerSpec("w", "http://w", models, block_size=32, **spec), 0.0)  # type: ignore[arg-type]
        self.holder = worker.holders[0]
        self.full = ObservedCapacity()
        self.sees = not spec
        self.now, self.count, self.steps = 0.0, 0, 0
        self.live: dict[str, Decision] = {}
        self.predicted_tokens = self.reported_tokens = self.equal = 0

    def send(self, ids: list[int], answer_tokens: int) -> Decision:
        request_id, self.count = str(self.count), self.count + 1
        route_request = RouteRequest(
            request_id, "m", Scope("m"), ids, len(ids), output_tokens_max=answer_tokens, is_streaming=False
        )
        placement = self.core.route(route_request, self.now)
        assert isinstance(placement, Forward)
        self.live[request_id] = placement.decision
        self.engine.add(request_id, ids, answer_tokens)
        return placement.decision

    def step(self) -> list[Sequence_]:
        self.now += 0.02
        ended_sequences = self.engine.step()
        if self.engine.events:
            payload = encode_batch(EventBatch(ts=self.now, events=self.engine.events))
            report = self.core.index.ingest(self.holder, payload)
            if report.removed and self.sees:
                self.full.record_batch(self.core.index.held_tokens(self.holder), report)
                self.core.record_cache_capacity("w", 0, self.full.tokens)
            self.engine.events = []
        for seq in ended_sequences:
            predicted_tokens = self.live.pop(seq.request_id).predicted_cached_tokens
            usage = ReportedUsage(seq.prompt_tokens, seq.cached_tokens, seq.answer_tokens)
            self.core.finish_request(seq.request_id, usage, self.now)
            self.predicted_tokens += predicted_tokens
            self.reported_tokens += seq.cached_tokens or 0
            self.equal += predicted_tokens == seq.cached_tokens
        self.core.tick(self.now)
        self.steps += 1
        if self.steps % 8 == 0:
            self.core.check_invariants()
        return ended_sequences


def play(
    world: World, rng: random.Random, count: int, at_once: int, together: bool, answers: tuple[int, int] = (2, 40)
) -> None:
    """Beginnings that many share and more than there is room for, each with an end of its own; in bursts, or as many at
    once all the time."""
    shared_ids = [[rng.randrange(3, 900) for _ in range(rng.randrange(100, 500))] for _ in range(2 * max(at_once, 10))]
    while world.count < count or world.live:
        room = at_once - len(world.live)
        for _ in range(room if world.count < count and (room == at_once or not together) else 0):
            own_ids = [rng.randrange(3, 900) for _ in range(40)]
            world.send(rng.choice(shared_ids) + own_ids, rng.randrange(*answers))
        world.step()


@pytest.mark.parametrize("answers", [(2, 40), (50, 200)])
def test_a_capacity_that_nobody_tells_is_seen(answers: tuple[int, int]) -> None:
    for seed in range(3):
        world = World(70)
        play(world, random.Random(seed), 60, 10, True, answers)
        assert 62 * 32 <= (world.full.tokens or 0) <= 70 * 32


@given(st.integers(0, 2**32), st.integers(12, 40), st.integers(1, 6))
@settings(max_examples=20)
def test_what_is_seen_of_a_cache_is_never_more_than_it_holds_nor_much_less(
    seed: int, blocks: int, at_once: int
) -> None:
    """Blocks that are not full have no names: one for each that runs."""
    rng, world = random.Random(seed), World(blocks)
    while world.count < 120:
        while len(world.live) < at_once:
            world.send([rng.randrange(900) for _ in range(rng.randrange(40, 120))], 3)
        world.step()
        assert (world.full.tokens or 0) <= blocks * 32
    assert world.full.tokens is not None
    assert world.full.tokens >= (blocks - at_once - 1) * 32


def test_a_cache_that_is_never_full_is_not_known_nor_is_one_that_removes_what_is_old() -> None:
    world = World(70)
    for i in range(10):
        world.send([i] * 200, 5)
        while world.live:
            world.step()
    assert (world.full.evictions, world.core.registry.get_targets("w")[0].capacity.kv_tokens) == (0, None)
    full = ObservedCapacity()
    for held_tokens in range(320, 3200, 320):
        full.record_batch(held_tokens, IngestReport(stored=10))
    for _ in range(20):  # removed by age, while little is stored
        full.record_batch(3200, IngestReport(removed=5))
    assert full.tokens is None
    for _ in range(20):
        full.record_batch(3200, IngestReport(removed=5, stored=5))
    assert full.tokens == 3200
    full.record_batch(1500, IngestReport(removed=50, stored=1))
    assert full.tokens is None, "half of it was removed: not for room"


def test_a_worker_that_tells_its_capacity_is_believed() -> None:
    world = World(70, cache_tokens=70 * 32)
    world.core.record_cache_capacity("w", 0, 64)
    (target,) = world.core.registry.get_targets("w")
    assert target.capacity.kv_tokens == 70 * 32


def test_a_capacity_that_is_no_longer_known_leaves_nothing_behind() -> None:
    world = World(70)
    (target,) = world.core.registry.get_targets("w")
    world.core.record_cache_capacity("w", 0, 2240)
    request_id = world.send([1] * 100, 5)
    assert (target.capacity.kv_tokens, request_id.terms.cached_tokens) == (2240, 0)
    assert target.free_kv_tokens < 2240
    world.core.record_cache_capacity("w", 0, None)
    assert (target.capacity.kv_tokens, target.free_kv_tokens) == (None, float("inf"))
    while world.live:
        world.step()


@pytest.mark.parametrize("spec", [{}, {"cache_tokens": 70 * 32}])
def test_promises_that_are_evicted_before_their_requests_run_raise_the_alarm(spec: dict[str, object]) -> None:
    """The same with the capacity and without it: the evictions of requests that wait are not foreseen."""
    world = World(70, **spec)
    world.sees = False
    play(world, random.Random(0), 240, 10, together=True)
    assert world.predicted_tokens > 1.3 * world.reported_tokens
    (alarm,) = [a for a in world.core.watchdog.list_alarms("w") if a.startswith("promised")]
    assert "its cache is too small for what it gets" in alarm


@pytest.mark.parametrize("block_count", [25, 70])
def test_one_after_the_other_nothing_is_lowered_that_is_there(block_count: int) -> None:
    world = World(block_count, cache_tokens=block_count * 32)
    play(world, random.Random(3), 200, 1, together=True)
    assert world.predicted_tokens == world.reported_tokens > 0
    assert world.equal == world.count


def test_a_chat_goes_on_from_what_was_answered() -> None:
    world, rng = World(120, cache_tokens=120 * 32), random.Random(5)
    chats = [[rng.randrange(900) for _ in range(50)] for _ in range(6)]
    for _ in range(60):
        turns = [world.send(chats[i] + [rng.randrange(900) for _ in range(20)], 30) for i in rng.sample(range(6), 3)]
        assert turns
        while world.live:
            for seq in world.step():
                chat = next(i for i, ids in enumerate(chats) if seq.ids[: len(ids)] == ids)
                chats[chat] = seq.ids if len(seq.ids) < 900 else chats[chat][:50]
    assert abs(world.predicted_tokens - world.reported_tokens) <= 0.05 * world.reported_tokens
