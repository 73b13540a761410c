"""What a worker or a client may choose cannot stop the index, fill it or slow it: bounds, counted work, no deadlock."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from index_world import dump
from reference.dump import ROW

from router.index import make_index
from router.index._native import extra_work, most_blocks_locked
from router.index.protocol import HolderId, IngestReport, PrefixIndex, Scope

ROOT = Path(__file__).resolve().parents[2]
SCOPE = Scope("m")
WORK_PER_BYTE = 2
"""Steps beyond those that every byte pays for anyway, by byte of input: what grows faster is an attack."""


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def stored_event(names: list[int], parent: int | None = None, *, size: int = 1, **fields: Any) -> dict[str, Any]:
    tokens = [7] * (len(names) * size)
    head = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    return {**head, "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def removed_event(names: list[int], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", **fields}


CLEARED = {"type": "AllBlocksCleared"}


def one_holder() -> tuple[PrefixIndex, HolderId]:
    index = make_index(1)
    return index, index.add_holder("m")


def ingest(index: PrefixIndex, holder: HolderId, payload: bytes) -> IngestReport:
    """Apply it within the budget of work."""
    before = extra_work()
    report = index.ingest(holder, payload)
    assert extra_work() - before <= 1_000 + WORK_PER_BYTE * len(payload)
    return report


# -- tables ----------------------------------------------------------------------------------------------------------


def test_names_that_meet_in_a_public_hash_are_names_like_others() -> None:
    """544 names with 24 bits in common made the table throw when its hash was known."""
    inverse = pow(0xD6E8FEB86659FD93, -1, 1 << 64)
    names = [(0xABCDEF << 40 | number) * inverse % (1 << 64) for number in range(4_000)]
    names = [name ^ name >> 32 for name in names]
    index, holder = one_holder()
    assert ingest(index, holder, batch(stored_event(names))).stored == len(names)
    assert ingest(index, holder, batch(removed_event(names))).removed == len(names)
    assert index.stats().entries == 0


# -- work by byte of input ---------------------------------------------------------------------------------------------


def chain_from_its_end(count: int) -> list[Any]:
    """A chain told from its end."""
    return [stored_event([number], number - 1 if number else None) for number in reversed(range(count))]


def blocks_with_one_name(count: int) -> list[Any]:
    return [stored_event([5], 5 if number % 2 else 6) for number in range(count)]


def runs_without_parent(count: int) -> list[Any]:
    """Runs without a parent, all with one name, and each copy taken back."""
    runs = [stored_event([5, 5, 5], 1_000_000 + number) for number in range(count)]
    return [*runs, *[removed_event([5, 5, 5]) for _ in range(count)]]


def long_run_without_parent(count: int) -> list[Any]:
    return [stored_event(list(range(count)), 1 << 40), *[removed_event([number]) for number in reversed(range(count))]]


def blocks_with_media(count: int) -> list[Any]:
    """A key on each block: 40,000 of them took half a minute under the lock."""
    return [stored_event(list(range(1, count + 1)), extra_keys=[[["image", 0]] for _ in range(count)])]


def blocks_with_salts(count: int) -> list[Any]:
    return [stored_event([number], extra_keys=[[f"salt {number}"]]) for number in range(1, count + 1)]


def stores_and_clears(count: int) -> list[Any]:
    return [event for number in range(count) for event in (stored_event([number]), CLEARED)]


def unknown_events(count: int) -> list[Any]:
    return [["x"] for _ in range(count)]


def nil_events(count: int) -> list[Any]:
    return [None for _ in range(count)]


def copies_with_and_without_group(count: int) -> list[Any]:
    """Copies that name known and unknown blocks without their tokens, with and without a group."""
    fields = {"token_ids": [], "medium": "CPU"}
    copies = [{**stored_event([number % 150]), **fields, "group_idx": number % 3 or None} for number in range(count)]
    return [
        stored_event(list(range(100)), group_idx=0),
        *copies,
        *[removed_event([number % 150]) for number in range(count)],
    ]


SHAPES = [
    copies_with_and_without_group,
    chain_from_its_end,
    blocks_with_one_name,
    runs_without_parent,
    long_run_without_parent,
    blocks_with_media,
    blocks_with_salts,
    stores_and_clears,
    unknown_events,
    nil_events,
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_work_grows_with_the_bytes(shape: Any) -> None:
    index, holder = one_holder()
    ingest(index, holder, batch(*shape(20_000)))
    ingest(index, holder, batch(*shape(20_000)))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(1, 400)), max_size=8), st.randoms())
def test_mixed_shapes(parts: list[tuple[Any, int]], random: Any) -> None:
    events = [event for shape, count in parts for event in shape(count)]
    random.shuffle(events)
    index, holder = one_holder()
    for at in range(0, len(events), 500):
        ingest(index, holder, batch(*events[at : at + 500]))


def test_copies_in_a_dump_are_counted_not_added_one_by_one() -> None:
    source, twin = make_index(3), make_index(3)
    holder, copy = source.add_holder("m"), twin.add_holder("m")
    source.ingest(holder, batch(stored_event([1])))
    (part,) = dump(source, holder)
    (_, key, end, length, _) = ROW.unpack(part["rows"])
    part["rows"] = b"".join(ROW.pack(name, key, end, length, 1 << 20) for name in range(50_000))
    assert twin.load(copy, part).stored == 50_000
    assert twin.ingest(copy, batch(removed_event([7]))).removed == 1
    assert twin.stats().entries == 50_000


@pytest.mark.parametrize(
    "change",
    [
        {"tier": 4},
        {"rows": ROW.pack(1, 2**61 - 1, 1, 1, 1)},
        {"rows": ROW.pack(1, 5, 1 << 32, 1, 1)},
        {"rows": ROW.pack(1, 5, 1, 0, 1)},
        {"rows": ROW.pack(1, 5, 1, 1 << 24, 1)},
        {"rows": ROW.pack(1, 5, 1, 1, 0)},
        {"rows": ROW.pack(1, 5, 1, 1, (1 << 20) + 1)},
        {"rows": ROW.pack(1, 5, 1, 1, 1) * 65_537},
    ],
)
def test_a_part_of_a_dump_with_impossible_numbers_is_malformed(change: Any) -> None:
    index, holder = one_holder()
    ingest(index, holder, batch(stored_event([1])))
    (part,) = dump(index, holder)
    report = index.load(holder, {**part, **change})
    assert (report.stored, report.malformed_events, len(report.malformed)) == (0, 1, 1)


def test_a_dump_can_be_read_whatever_the_holder_has() -> None:
    """A kind that a worker declared is as long as it likes; copies are counted beyond what a dump may tell."""
    source, twin = make_index(3), make_index(3)
    holder, copy = source.add_holder("m"), twin.add_holder("m")
    source.declare_groups(holder, [{"group_idx": 0, "kind": "k" * 4_000, "block_size": 1}])
    for _ in range(18):
        source.ingest(holder, batch(*[stored_event([1] * 65_000, group_idx=0)]))
    source.ingest(holder, batch(stored_event([5], group_idx=1)))
    for part in dump(source, holder):
        assert twin.load(copy, part).malformed == []
    assert twin.groups(copy) == source.groups(holder)


def test_a_slice_of_a_dump_is_bounded_and_a_holder_that_changed_has_no_next_one() -> None:
    index, holder = one_holder()
    for at in range(0, 50_000, 500):
        ingest(index, holder, batch(stored_event(list(range(at, at + 500)))))
    dumping, sizes = index.begin_dump(holder), []
    while (parts := dumping.step()) is not None:
        sizes.append(sum(len(part["rows"]) // ROW.size for part in parts))
    assert sum(sizes) == 50_000
    assert len(sizes) > 10
    assert max(sizes) < 5_000
    dumping = index.begin_dump(holder)
    assert dumping.step() is not None
    index.declare_groups(holder, [])
    assert dumping.step() is not None
    ingest(index, holder, batch(removed_event([1])))
    with pytest.raises(KeyError, match="changed"):
        dumping.step()


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [1, 100, 1_100, 3_000])
@pytest.mark.parametrize("together", [False, True])
def test_storing_and_clearing_in_turn_fills_nothing(names: int, together: bool) -> None:
    """Each clear took a fresh seat, and what all matches look at grew with the seats."""
    index, holder = one_holder()
    turn = [stored_event(list(range(names))), CLEARED]
    sizes = []
    for _ in range(3):
        turns = max(20, 60_000 // names)
        for payload in [batch(*(turn * turns))] if together else [batch(*turn)] * turns:
            index.ingest(holder, payload)
        sizes.append(index.stats().memory_bytes)
    assert index.stats().entries == 0
    assert sizes[2] <= sizes[0] * 1.1 + 100_000
    index.ingest(holder, batch(stored_event([1])))
    assert [match.tokens for match in index.match([7, 8], SCOPE)] == [1]


def test_what_goes_beyond_a_bound_is_refused_and_counted() -> None:
    bounds: list[tuple[list[Any], str]] = [
        ([stored_event(list(range(70_000)))], "at most 65536"),
        ([stored_event([1], extra_keys=[["k"] * 70_000])], "at most 65536"),
        ([stored_event([1], kv_cache_spec_kind="k" * 65)], "at most 64"),
        ([{**stored_event([1]), "token_ids": [1] * 4_200_000}], "at most 4194304"),
        ([None] * 1_100_000, "too many events"),
    ]
    for events, message in bounds:
        index, holder = one_holder()
        report = index.ingest(holder, batch(*events, stored_event([99])))
        assert report.malformed_events == 1
        assert message in report.malformed[0]
        assert report.stored == (0 if len(events) > 1 else 1)


def test_the_messages_about_malformed_events_are_bounded_their_count_is_not() -> None:
    index, holder = one_holder()
    report = index.ingest(holder, batch(*[None] * 100_000))
    assert report.malformed_events == 100_000
    assert len(report.malformed) == 16


def test_block_lengths_are_bounded() -> None:
    """Each length that anybody uses is tried at every position of every prompt."""
    index, holder = one_holder()
    report = index.ingest(holder, batch(*[stored_event([size], size=size) for size in range(1, 101)]))
    assert (report.stored, report.refused) == (32, 68)
    assert index.ingest(holder, batch(stored_event([200], size=32))).stored == 1


def test_rows_of_a_dump_without_room_count_as_refused_alone() -> None:
    index, holder = one_holder()
    ingest(index, holder, batch(stored_event([1])))
    (part,) = dump(index, holder)
    twin, copy = one_holder()
    report = twin.load(copy, {**part, "rows": b"".join(ROW.pack(size, size, size, size, 1) for size in range(1, 101))})
    assert (report.stored, report.refused) == (32, 68)


# -- turns: how much is done under one hold of the lock, while requests wait -----------------------------------------

PARKED = 8192
TURN_BLOCKS = 4096 + PARKED
"""A run that is parked or wakes is one piece."""


def park_events(index: PrefixIndex, holder: HolderId) -> None:
    for first in range(0, PARKED, 1024):
        index.ingest(holder, batch(*[stored_event([1 << 20 | first + i], 5) for i in range(1024)]))
    assert index.stats().parked == PARKED


def wake_parked_blocks(index: PrefixIndex, holder: HolderId) -> None:
    park_events(index, holder)
    index.ingest(holder, batch(stored_event([5])))
    assert index.stats().entries == PARKED + 1


def replace_parked_blocks(index: PrefixIndex, holder: HolderId) -> None:
    park_events(index, holder)
    index.ingest(holder, batch(stored_event(list(range(1, PARKED + 1)), 1 << 40)))
    assert index.stats().parked == PARKED


def expire_parked_blocks(index: PrefixIndex, holder: HolderId) -> None:
    park_events(index, holder)
    for _ in range(10_000):
        index.ingest(holder, batch())
    assert index.stats().parked == 0


def store_largest_event(index: PrefixIndex, holder: HolderId) -> None:
    names = list(range(1, 65_537))
    assert index.ingest(holder, batch(stored_event(names, size=4))).stored == len(names)
    assert index.ingest(holder, batch(stored_event([], None), *[stored_event(names, size=4)])).stored == len(names)
    assert index.ingest(holder, batch(removed_event(names))).removed == len(names)


def restore_dump(index: PrefixIndex, holder: HolderId) -> None:
    index.ingest(holder, batch(stored_event(list(range(1, 20_000)))))
    other = index.add_holder("m")
    for part in dump(index, holder):
        index.load(other, part)
    assert index.stats().entries == 2 * 19_999


def store_copies_without_tokens(index: PrefixIndex, holder: HolderId) -> None:
    names = list(range(1, 20_000))
    index.ingest(holder, batch(stored_event(names)))
    bare = {**stored_event(names), "token_ids": [], "medium": "CPU"}
    assert index.ingest(holder, batch(bare)).stored == len(names)


@pytest.mark.parametrize(
    "attack",
    [
        wake_parked_blocks,
        replace_parked_blocks,
        expire_parked_blocks,
        store_largest_event,
        restore_dump,
        store_copies_without_tokens,
    ],
)
def test_nobody_holds_the_lock_for_long(attack: Any) -> None:
    index, holder = one_holder()
    most_blocks_locked()
    attack(index, holder)
    assert 1024 <= most_blocks_locked() <= TURN_BLOCKS


@pytest.mark.parametrize("size", [0, 1 << 24, 1 << 32, 1 << 63])
def test_a_declared_block_size_that_no_block_can_have_is_ignored(size: int) -> None:
    index, holder = one_holder()
    index.declare_groups(holder, [{"group_idx": 0, "kind": "full_attention", "block_size": size}])
    assert [group["block_size"] for group in index.groups(holder)] == [None]
    events = stored_event([1, 2], size=16, group_idx=0, kv_cache_spec_kind="full_attention")
    assert ingest(index, holder, batch(events)).stored == 2
    assert [match.tokens for match in index.match([7] * 100, SCOPE)] == [32]
    index.unpin(index.pin(holder, [1] * 100, SCOPE))
    assert [match.tokens for match in index.match([1] * 100, SCOPE)] == []


def test_a_large_payload_is_applied_in_slices() -> None:
    """So that the lock, and the thread that feeds all streams, is free in between."""
    index, holder = one_holder()
    payload = batch(*[["x"]] * 200_000, *[stored_event([number], size=16) for number in range(20_000)])
    ingesting = index.begin_ingest(holder, payload)
    steps = 1
    while ingesting.step():
        steps += 1
    assert 10 <= steps <= 50
    assert (ingesting.report.unknown_events, ingesting.report.stored) == (200_000, 20_000)
    other, twin = one_holder()
    assert not other.begin_ingest(twin, batch(stored_event([1]))).step(), "an ordinary batch is one slice"


@pytest.mark.parametrize("fault", ["cut", "no msgpack", "bytes behind", "rank"])
@pytest.mark.parametrize("events", [1, 50_000])
def test_a_payload_that_cannot_be_read_to_its_end_is_skipped_as_a_whole(fault: str, events: int) -> None:
    """Of a long one the slices before the fault stayed applied: half of what a worker said, under a number that counts
    as applied. Events that say something odd cost only themselves, also there."""
    index, holder = one_holder()
    stored_events = [stored_event([number], size=16) for number in range(events)]
    good = batch(*stored_events, {"type": "BlockStored"})
    bad = {
        "cut": good[: -len(good) // 20],
        "no msgpack": good[:-30] + b"\xc1" + good[-29:],
        "bytes behind": good + b"\x00",
        "rank": good[:-1] + b"\xa1x",
    }[fault]
    report = ingest(index, holder, bad)
    assert (report.stored, report.malformed_events, index.stats().entries) == (0, 1, 0)
    assert f"unreadable event batch of {len(bad)} bytes" in report.malformed[0]
    report = ingest(index, holder, good)
    assert (report.stored, report.malformed_events, index.stats().entries) == (events, 1, events)


def test_a_holder_that_is_removed_between_two_slices() -> None:
    index, holder = one_holder()
    ingesting = index.begin_ingest(holder, batch(*[["x"]] * 200_000))
    assert ingesting.step()
    index.remove_holder(holder)
    with pytest.raises(KeyError):
        ingesting.step()


# -- Python's side -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [array("q", [-1]), array("q", [1 << 40]), array("d", [1.0]), bytearray(3)])
def test_what_is_refused_is_given_back(ids: Any) -> None:
    """The buffer stayed locked when the constructor threw."""
    index, _ = one_holder()
    with pytest.raises(ValueError, match="token"):
        index.match(ids, SCOPE)
    ids.extend(ids)


DEADLOCK = """
import gc, threading, time
from router.index import make_index

index = make_index(1)
holder = index.add_holder("m")
declared = [{"group_idx": i, "kind": "full_attention", "block_size": 16} for i in range(40)]
index.declare_groups(holder, declared)

class Garbage:
    def __init__(self): self.own = self
    def __del__(self): time.sleep(0.01)

def declare():
    while not stop.is_set():
        index.declare_groups(holder, declared)
        index.set_reannounces(holder, False)
        index.stats()

stop = threading.Event()
threads = [threading.Thread(target=declare, daemon=True) for _ in range(2)]
for thread in threads: thread.start()
gc.set_threshold(1)
for _ in range(30):
    Garbage()
    index.groups(holder)
    index.begin_dump(holder).step()
stop.set()
for thread in threads: thread.join()
print("done")
"""


def test_no_deadlock_between_the_lock_and_the_interpreters() -> None:
    """`groups` made objects under the lock; a finalizer gave the interpreter to a thread that waited for the lock."""
    result = subprocess.run([sys.executable, "-c", DEADLOCK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout == "done\n", result.stderr
