"""Seeded histories of two engines that pull from each other between steps: on fake devices, without a network.

The devices check every read, so a block with foreign content shows, and every event and invariant is checked after
every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from drawn_specs import group
from fake_device import EOS, Bench, DeviceFault, FakeDevice
from transfer_peers import FakeFingerprint

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec, StateSpec
from engine.scheduler import RequestRefusedError, SchedulerConfig
from engine.transfer.block_exchange import BlockExchange
from engine.transfer.interface import Transfers
from engine.transfer.messages import BlocksSent, WantedBlock
from engine.transfer.pull_plan import Pull, PullItem, split_into_batches
from engine.types import BlockCopy, BlockPlace, KVSource, Request, SamplingParams
from events import AllBlocksCleared

CONTENT_BYTES = 8
ALL_CONTENTS: list[Any] = []
"""What blocks that were read hold; the bytes that move are indices of this list."""


class FakeMemory:
    """The memory of a fake device, as transfers see it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.calls_before_failure: int | None = None
        """Accesses that succeed before one raises; None: all succeed."""

    def _count_access(self) -> None:
        if self.calls_before_failure is not None:
            self.calls_before_failure -= 1
            if self.calls_before_failure < 0:
                self.calls_before_failure = None
                raise DeviceFault("the device fell off the bus")

    def get_block_bytes(self, kind: int) -> int:
        return CONTENT_BYTES

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        self._count_access()
        self._device.copy_blocks(block_copies)

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        self._count_access()
        contents = b""
        for kind, block, is_on_host in places:
            device = self._device
            if kind == len(device.windows):
                ALL_CONTENTS.append((device.host_states if is_on_host else device.states)[block])
            else:
                ALL_CONTENTS.append(list((device.host_slots if is_on_host else device.slots)[kind, block]))
            contents += (len(ALL_CONTENTS) - 1).to_bytes(CONTENT_BYTES, "little")
        return memoryview(contents)

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        self._count_access()
        assert len(contents) == len(places) * CONTENT_BYTES
        for index, (kind, block, is_on_host) in enumerate(places):
            assert not is_on_host
            start = index * CONTENT_BYTES
            content = ALL_CONTENTS[int.from_bytes(contents[start : start + CONTENT_BYTES], "little")]
            if kind == len(self._device.windows):
                self._device.states[block] = content
            else:
                self._device.slots[kind, block] = list(content)


class OneJob(Transfers):
    """Transfers that do one thing between two steps."""

    job: Callable[[], None] | None = None

    @property
    def has_copies(self) -> bool:  # type: ignore[override]
        return self.job is not None

    def copy_blocks(self) -> None:
        assert self.job is not None
        job, self.job = self.job, None
        job()


class Peer:
    def __init__(self, spec: CacheSpec, rng: random.Random) -> None:
        seqs = rng.randint(1, 4)
        budget = seqs + rng.randint(0, 20)
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=60,
            eos_token_ids=frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
        )
        cache = KVCache(
            spec,
            rng.randint(4, 40),
            step_tokens_max=budget,
            adaptive_eviction=rng.random() < 0.5,
            host_unit_count=rng.choice([0, 0, 4, 30]),
        )
        self.bench = Bench(cache, config, overlap=rng.random() < 0.6)
        self.transfers = self.bench.core.transfers = OneJob()
        self.memory = FakeMemory(self.bench.device)
        self.exchange = BlockExchange(cache, self.memory, FakeFingerprint(b"one model"))
        self.request_count = 0

    def between_steps(self, job: Callable[[], None]) -> None:
        self.transfers.job = job
        self.bench.step()
        assert self.transfers.job is None


def draw_spec(rng: random.Random) -> CacheSpec:
    size = rng.randint(1, 4)
    groups = [group(rng.randint(1, 2))]
    if rng.random() < 0.4:
        groups.append(group(rng.randint(1, 3), window=rng.randint(1, 9)))
    state = None
    if rng.random() < 0.4:
        state = StateSpec(layer_indices=(9,), state_bytes=rng.randint(1, 6) * size * 256 + rng.randint(0, 200))
    return CacheSpec(block_size=size, groups=tuple(groups), state=state)


class PeerHistory:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"peers {seed}")
        spec = draw_spec(self.rng)
        self.spec = spec
        self.peers = [Peer(spec, self.rng) for _ in range(2)]
        self.texts: list[list[int]] = [[]]
        self.stored_blocks = 0

    def play(self) -> None:
        acts: list[tuple[float, Callable[[], object]]] = [
            (0.35, self.send_request),
            (0.35, self.steps),
            (0.20, self.pull),
            (0.03, self.abort),
            (0.03, self.fail),
            (0.03, self.fail_transfer),
            (0.02, self.reset),
            (0.02, self.drain),
        ]
        for _ in range(self.rng.randint(20, 60)):
            self.rng.choices([act for _, act in acts], [share for share, _ in acts])[0]()
            for peer in self.peers:
                peer.bench.check()
                peer.bench.assert_correct()
        for peer in self.peers:
            peer.bench.drain()
            peer.bench.assert_correct()

    def anyone(self) -> Peer:
        return self.rng.choice(self.peers)

    def send_request(self) -> None:
        rng, peer = self.rng, self.anyone()
        text = (rng.choice(self.texts) + [rng.randint(0, 1) for _ in range(rng.randint(1, 16))])[:50]
        try:
            peer.bench.add(
                f"r{peer.request_count}", text, max_tokens=rng.randint(1, 20),
                cache_salt=rng.choice([None, None, None, "s"]), lora_name=rng.choice([None, None, None, "l"]),
            )  # fmt: skip
            self.texts = [*self.texts, text][-12:]
        except RequestRefusedError:
            pass  # longer than what the cache can hold
        peer.request_count += 1

    def steps(self) -> None:
        peer = self.anyone()
        for _ in range(self.rng.randint(1, 6)):
            peer.bench.step()

    def pull(self) -> None:
        """One peer pulls a text from the other one; steps of both go on between the batches."""
        rng = self.rng
        source, consumer = rng.sample(self.peers, 2)
        text = rng.choice(self.texts) + [1]
        request = Request(
            request_id="pull", token_ids=text, params=SamplingParams(), cache_salt=rng.choice([None, None, "s"]),
            lora_name=rng.choice([None, None, "l"]),
        )  # fmt: skip
        prompt = Pull(KVSource("source", 1), consumer.exchange.list_keys(request))
        masks = source.exchange.locate([key.hash for key in prompt.keys])
        items = consumer.exchange.choose_blocks_to_pull(prompt.keys, masks)
        sizes = [CONTENT_BYTES] * len(self.spec.block_bytes_by_kind())
        for batch in split_into_batches(items, sizes, CONTENT_BYTES * rng.randint(1, 12), 100):
            if rng.random() < 0.3:
                self.steps()
            answer = self._read(source, prompt, batch)
            if answer is None:
                return
            sent, contents = answer
            for item, block in zip(batch, sent.blocks):
                assert block == prompt.describe_block(item)
            if rng.random() < 0.3:
                self.steps()
            if self._store(consumer, prompt, batch[: len(sent.blocks)], contents) < len(batch):
                return

    def _read(self, source: Peer, prompt: Pull, batch: list[PullItem]) -> tuple[BlocksSent, memoryview] | None:
        """Returns None if the source fails."""
        wanted_blocks = [WantedBlock(prompt.keys[index].hash, kind) for index, kind in batch]
        results: list[tuple[BlocksSent, memoryview]] = []
        source.between_steps(lambda: results.append(source.exchange.read(wanted_blocks)))
        return results[0] if results else None

    def _store(self, consumer: Peer, prompt: Pull, items: list[PullItem], contents: memoryview) -> int:
        counts: list[int] = []
        consumer.between_steps(lambda: counts.append(consumer.exchange.store(prompt, items, contents)))
        if not counts:
            assert consumer.bench.core.stats().failed_steps
            return 0
        self.stored_blocks += counts[0]
        return counts[0]

    def abort(self) -> None:
        peer = self.anyone()
        peer.bench.abort(f"r{self.rng.randrange(peer.request_count + 1)}")

    def fail(self) -> None:
        peer = self.anyone()
        peer.bench.device.acts_before_fault = self.rng.choice([None, self.rng.randrange(12)])
        peer.bench.device.fail_next = peer.bench.device.acts_before_fault is None
        peer.bench.step()
        peer.bench.device.fail_next = False

    def fail_transfer(self) -> None:
        """Let one of the next copies for a peer fail."""
        self.anyone().memory.calls_before_failure = self.rng.randrange(8)

    def reset(self) -> None:
        self.anyone().bench.core.reset_prefix_cache()

    def drain(self) -> None:
        self.anyone().bench.drain()


def play_histories(seeds: range) -> int:
    """Returns how many blocks were stored in all."""
    stored_blocks = 0
    for seed in seeds:
        print(f"seed {seed}")
        history = PeerHistory(seed)
        history.play()
        stored_blocks += history.stored_blocks
        ALL_CONTENTS.clear()
    return stored_blocks


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (40, 80, 120))])
def test_every_read_every_event_and_every_answer_is_right(first: int) -> None:
    assert play_histories(range(first, first + 40)) > 50


def test_after_a_failed_copy_what_runs_is_computed_again() -> None:
    """The copy may have taken moves of its blocks along, which were never made."""
    rng = random.Random(7)
    peer = Peer(CacheSpec(block_size=2, groups=(group(1),)), rng)
    peer.bench.add("a", [1, 0, 1], max_tokens=6)
    peer.bench.step()
    peer.bench.step()

    def fail() -> None:
        raise DeviceFault("the device fell off the bus")

    peer.between_steps(fail)
    stats = peer.bench.core.stats()
    assert (stats.totals.preemptions, stats.failed_steps) == (1, 1)
    assert any(isinstance(event, AllBlocksCleared) for event in peer.bench.events.events)
    peer.bench.drain()
    peer.bench.assert_correct()
    assert peer.bench.ends["a"].error is None


@pytest.mark.parametrize("seed", [1449, 1688])
def test_blocks_that_only_the_host_has_stay_there_if_their_copies_get_no_name(seed: int) -> None:
    """Making room for them evicted their parents."""
    play_histories(range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 250))
def test_thousands_of_them(first: int) -> None:
    play_histories(range(first, first + 250))
