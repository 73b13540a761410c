"""The promises of docs/reference/wire-format.md, against a model cache that keeps them and streams that break them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from block_hash import hash_block
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_checker import StreamChecker

from events import (
    FULL_ATTENTION,
    GPU,
    MAMBA,
    SLIDING_WINDOW,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventPublisher,
    InvariantError,
    KVEventsConfig,
    decode_batch,
    encode_batch,
)
from events.replay_replies import SeqAndPayload, iter_replay, iter_snapshot
from events.resident_set import ResidentSet, make_snapshot_events

BLOCK = 2
Name = int
KINDS = {0: FULL_ATTENTION, 1: SLIDING_WINDOW, 2: MAMBA}
Resident = set[tuple[int, str | None, int | bytes]]


class ModelCache:
    """A tree of full-attention blocks, some with a window copy or a state checkpoint; every change makes its events."""

    def __init__(self) -> None:
        self.tree: dict[Name, tuple[Name | None, list[int]]] = {}
        self.blocks_by_group: dict[int, set[Name]] = {0: set(), 1: set(), 2: set()}

    def resident(self) -> Resident:
        return {(group, GPU, name) for group, names in self.blocks_by_group.items() for name in names}

    def store(self, parent: Name | None, tokens: list[int], groups: list[int]) -> list[Event]:
        name = hash_block(parent, tokens)
        events: list[Event] = []
        for group in [0, *groups]:
            if name in self.blocks_by_group[group]:
                continue
            self.blocks_by_group[group].add(name)
            self.tree[name] = (parent, tokens)
            window = 4 * BLOCK if group == 1 else None
            events.append(
                BlockStored([name], parent, tokens, BLOCK, None, GPU, None, [None], group, KINDS[group], window)
            )
        return events

    def evict(self, name: Name) -> list[Event]:
        """With everything that hangs from it, deepest first."""
        events: list[Event] = []
        for child in [n for n in self.blocks_by_group[0] if self.tree[n][0] == name]:
            events += self.evict(child)
        for group in (2, 1, 0):
            if name in self.blocks_by_group[group]:
                self.blocks_by_group[group].remove(name)
                events.append(BlockRemoved([name], GPU, group))
        return events

    def random_step(self, rng: random.Random) -> list[Event]:
        events: list[Event] = []
        for _ in range(rng.randint(1, 4)):
            known_blocks = sorted(self.blocks_by_group[0])
            roll = rng.random()
            if roll < 0.7 or not known_blocks:
                parent = rng.choice(known_blocks) if known_blocks and rng.random() < 0.7 else None
                tokens = [rng.randint(0, 2) for _ in range(BLOCK)]
                events += self.store(parent, tokens, [g for g in (1, 2) if rng.random() < 0.3])
            elif roll < 0.95:
                events += self.evict(rng.choice(known_blocks))
            else:
                events.append(AllBlocksCleared())
                self.blocks_by_group = {0: set(), 1: set(), 2: set()}
        return events


def apply_all(payloads: list[bytes]) -> Resident:
    checker = StreamChecker()
    for payload in payloads:
        decoded_batch = decode_batch(payload)
        assert not decoded_batch.errors
        checker.check_batch(decoded_batch.batch.events)
    return checker.resident()


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40), st.sampled_from([1, 4, 1024]))
def test_replay_and_snapshot_give_the_resident_set(seed: int, step_count: int, chunk: int) -> None:
    """Guarantee 6, and the snapshot keeps 1, 2 and 3 itself."""
    rng, cache, shadow = random.Random(seed), ModelCache(), ResidentSet()
    batches: list[SeqAndPayload] = []
    for seq in range(step_count):
        events = cache.random_step(rng)
        shadow.apply(events)
        batches.append((seq, encode_batch(EventBatch(0.0, events, 0))))
    replayed_messages = list(iter_replay(batches, 0))
    assert [seq for seq, _ in replayed_messages[:-1]] == list(range(step_count))
    assert apply_all([payload for _, payload in replayed_messages[:-1]]) == cache.resident()
    with patch("events.replay_replies.BLOCKS_PER_SNAPSHOT_CHUNK", chunk):
        snapshot = list(iter_snapshot(shadow.list_blocks(), batches[-1] if batches else None, 0, 0.0))
    chunks = [payload for seq, payload in snapshot if seq == 2**64 - 2]
    assert chunks
    assert apply_all(chunks) == cache.resident()
    if batches:
        assert snapshot[-2] == batches[-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3))
def test_publisher_keeps_the_shadow_also_of_dropped_batches(seed: int, queue_max: int, buffer_steps: int) -> None:
    """Guarantee 7: the queue overflows, the shadow does not care, and the ring has every seq."""
    rng, cache = random.Random(seed), ModelCache()
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"inproc://{seed}",
        max_queue_size=queue_max,
        buffer_steps=buffer_steps,
    )
    publisher = EventPublisher(config)
    try:
        count = 0
        for _ in range(60):
            events = cache.random_step(rng)
            count += bool(events)
            publisher.publish(events)
        deadline = time.monotonic() + 10
        while publisher._last_batch is None or publisher._last_batch[0] < count - 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [seq for seq, _ in publisher._ring] == list(range(count))[-buffer_steps:]
        assert publisher.stats.broken_invariant_count == 0
        assert set(publisher._resident_set._block_by_key) == cache.resident()
        assert publisher.stats.published_batch_count == count
    finally:
        publisher.close()


class MadeWhenRead(Iterable[Event]):
    """Events as an engine hands them over; keeps which threads read them, and what the first reader got."""

    def __init__(self, make: Callable[[], list[Event]]) -> None:
        self._make = make
        self.readers: list[str] = []

    def __iter__(self) -> Iterator[Event]:
        self.readers.append(threading.current_thread().name)
        return iter(self._make())


def test_events_are_made_once_and_on_the_publishers_thread() -> None:
    steps = [MadeWhenRead(lambda name=name: [make_stored(name, name - 1 or None)]) for name in range(1, 200)]  # type: ignore[misc]
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://made-when-read")
    publisher = EventPublisher(config, 3)
    for step in steps:
        publisher.publish(step)
    publisher.close()
    assert {reader for step in steps for reader in step.readers} == {"kv-events-3"}
    assert [len(step.readers) for step in steps] == [1] * len(steps)
    payloads = [payload for _, payload in publisher._ring]
    assert [decode_batch(payload).batch.events for payload in payloads] == [list(step) for step in steps]
    assert set(publisher._resident_set._block_by_key) == {(0, GPU, name) for name in range(1, 200)}


def test_every_start_has_its_own_epoch() -> None:
    """Guarantee 8."""
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://epoch")
    epochs = set()
    for _ in range(3):
        publisher = EventPublisher(config)
        epochs.add(publisher.describe_source().epoch)
        publisher.close()
    assert len(epochs) == 3
    with pytest.raises(RuntimeError, match="after close"):
        publisher.publish([AllBlocksCleared()])


def make_stored(name: int, parent: int | None, group: int = 0, tokens: int = BLOCK) -> BlockStored:
    return BlockStored([name], parent, [0] * tokens, BLOCK, None, GPU, None, None, group, KINDS[group])


@pytest.mark.parametrize(
    ("guarantee", "events"),
    [
        (1, [make_stored(1, None), make_stored(1, None)]),
        (1, [BlockRemoved([1], GPU, 0)]),
        (1, [make_stored(1, None), BlockRemoved([1, 1], GPU, 0)]),
        (1, [make_stored(1, None), BlockRemoved([1], GPU, 1)]),
        (1, [make_stored(1, None), AllBlocksCleared(), BlockRemoved([1], GPU, 0)]),
        (2, [make_stored(1, None, tokens=3)]),
        (2, [msgspec.structs.replace(make_stored(1, None), block_hashes=[], token_ids=[])]),
        (3, [make_stored(2, 1)]),
        (3, [make_stored(1, None), make_stored(2, 1), BlockRemoved([1], GPU, 0)]),
        (3, [make_stored(1, None), make_stored(2, 1), BlockRemoved([1, 2], GPU, 0)]),
        (3, [make_stored(5, 4, group=2)]),
    ],
)
def test_checker_catches_broken_promises(guarantee: int, events: list[Event]) -> None:
    with pytest.raises(InvariantError, match=f"guarantee {guarantee}"):
        StreamChecker().check_batch(events)


def test_checker_accepts_what_is_promised() -> None:
    checker = StreamChecker()
    window = make_stored(2, 1, group=1)
    checker.check_batch(
        [window, make_stored(1, None), make_stored(2, 1)]
    )  # the window's parent is spelled out by the batch's end
    checker.check_batch([BlockRemoved([2], GPU, 1), BlockRemoved([2, 1], GPU, 0), make_stored(1, None)])
    assert checker.resident() == {(0, GPU, 1)}
    assert checker.resident_names(0) == {1}


def test_the_example_of_the_docs_is_what_we_write() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "wire-format.md").read_text()
    (example,) = re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    parts = []
    for line in example.splitlines():
        match = re.match(r"\s*((?:[0-9a-f]{2} {1,2})*[0-9a-f]{2})(?=\s|$)", line)
        assert match, line
        parts.append(match[1])
    documented_bytes = bytes.fromhex("".join(parts))
    name = 0x1122334455667788
    batch = EventBatch(
        1764000000.5,
        [
            BlockStored([name], None, [1, 300], 2, None, GPU, None, [None], 0, FULL_ATTENTION),
            BlockRemoved([name], GPU, 0),
            AllBlocksCleared(),
        ],
        0,
    )
    assert decode_batch(documented_bytes).batch == batch
    short = (b"\xde\x00\x0b", b"\x8b")  # which header the encoder writes depends on its version
    assert encode_batch(batch).replace(*short) == documented_bytes.replace(*short)


def test_a_snapshot_ends_where_parents_are_in_a_circle() -> None:
    resident_set = ResidentSet()
    for name, parent, medium in ((1, 2, "GPU"), (2, 1, "CPU"), (3, 3, "GPU")):
        resident_set.apply([BlockStored([name], parent, [name, name], BLOCK, medium=medium)])
    events = make_snapshot_events(resident_set.list_blocks())
    assert {(event.block_hashes[0], event.medium) for event in events} == {(1, "GPU"), (2, "CPU"), (3, "GPU")}
