"""Reading foreign bytes: liberal with events, strict with envelopes, never an exception of another kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from old_events import encode_as_arrays

from events import AllBlocksCleared, BlockRemoved, BlockStored, DecodeError, EventBatch, decode_batch, encode_batch

names = st.one_of(st.integers(0, 2**64 - 1), st.integers(-(2**63), -1), st.binary(min_size=32, max_size=32))
texts = st.one_of(st.none(), st.text(max_size=5))
keys = st.lists(st.one_of(st.none(), st.lists(st.text(max_size=4), min_size=1, max_size=2).map(tuple)), max_size=4)
stored_events = st.builds(
    BlockStored,
    block_hashes=st.lists(names, max_size=4),
    parent_block_hash=st.one_of(st.none(), names),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8),
    block_size=st.integers(1, 1024),
    lora_id=st.one_of(st.none(), st.integers(0, 9)),
    medium=texts,
    lora_name=texts,
    extra_keys=st.one_of(st.none(), keys),
    group_idx=st.one_of(st.none(), st.integers(0, 5)),
    kv_cache_spec_kind=texts,
    kv_cache_spec_sliding_window=st.one_of(st.none(), st.integers(1, 4096)),
)
session_events = st.builds(
    lambda event, session: msgspec.structs.replace(event, session_id=session), stored_events, texts
)
removed_events = st.builds(BlockRemoved, st.lists(names, max_size=4), texts, st.one_of(st.none(), st.integers(0, 5)))
events = st.one_of(stored_events, removed_events, st.builds(AllBlocksCleared))
event_batches = st.builds(
    EventBatch, st.floats(0, 2e9), st.lists(events, max_size=5), st.one_of(st.none(), st.integers(0, 8))
)


@given(st.builds(EventBatch, st.floats(0, 2e9), st.lists(st.one_of(session_events, removed_events), max_size=5)))
def test_maps_round_trip(batch: EventBatch) -> None:
    decoded_batch = decode_batch(encode_batch(batch))
    assert decoded_batch.batch == batch
    assert not decoded_batch.errors


def test_what_a_publisher_may_leave_out_is_written_all_the_same() -> None:
    batch = EventBatch(1.0, [BlockStored([7], None, [1, 2], 2), BlockRemoved([7])])
    stored_fields, removed_fields = msgspec.msgpack.decode(encode_batch(batch))[1]
    assert list(stored_fields) == ["type", *BlockStored.__struct_fields__[:7]]
    assert list(removed_fields) == ["type", "block_hashes", "medium"]
    assert decode_batch(encode_batch(batch)).batch == batch


@given(event_batches)
def test_legacy_arrays_round_trip(batch: EventBatch) -> None:
    decoded_batch = decode_batch(encode_as_arrays(batch))
    assert decoded_batch.batch == batch
    assert not decoded_batch.errors


@given(event_batches, st.data())
def test_maps_and_arrays_mix_in_one_batch(batch: EventBatch, data: st.DataObject) -> None:
    mixed_events: list[Any] = []
    for event in batch.events:
        (array,) = msgspec.msgpack.decode(encode_as_arrays(EventBatch(0.0, [event])))[1]
        mixed_events.append(data.draw(st.sampled_from([event, array])))
    assert decode_batch(msgspec.msgpack.encode([batch.ts, mixed_events, batch.data_parallel_rank])).batch == batch


BAD: list[Any] = [
    {"type": "BlockStored"},
    {"type": "BlockStored", "block_hashes": ["x"], "token_ids": [], "block_size": 4},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": "abc", "block_size": 4},
    ["BlockRemoved", 7],
    ["BlockRemoved"],
    {"no": "type"},
    {"type": 7},
    {"type": ["BlockStored"]},
    [],
    [["BlockStored"]],
    None,
    7,
    "BlockStored",
]


@given(event_batches, st.lists(st.tuples(st.integers(0, 5), st.sampled_from(BAD)), max_size=4))
def test_a_bad_event_never_costs_the_good_ones(batch: EventBatch, bad: list[tuple[int, Any]]) -> None:
    mixed_events: list[Any] = list(batch.events)
    for place, event in bad:
        mixed_events.insert(place, event)
    decoded_batch = decode_batch(msgspec.msgpack.encode([batch.ts, mixed_events, batch.data_parallel_rank]))
    assert decoded_batch.batch == batch
    assert len(decoded_batch.errors) == len(bad)


def test_unknown_types_are_counted_and_unknown_fields_ignored() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "colour": "blue"}
    array = ["BlockRemoved", [6], "GPU", 0, None, None, "from the future"]
    payload = msgspec.msgpack.encode([1.5, [event, {"type": "BlockMoved"}, ["BlockMoved", 1], array], None, "more"])
    decoded_batch = decode_batch(payload)
    assert decoded_batch.batch.events == [BlockRemoved([5], "GPU"), BlockRemoved([6], "GPU", 0)]
    assert decoded_batch.unknown_type_counts == {"BlockMoved": 2}
    assert not decoded_batch.errors


def test_absent_fields_of_old_engines() -> None:
    payload = msgspec.msgpack.encode([1, [["BlockStored", [-5], None, [1, 2], 2, None], ["BlockRemoved", [-5]]]])
    assert decode_batch(payload).batch.events == [
        BlockStored([-5], None, [1, 2], 2, None, None, None),
        BlockRemoved([-5], None),
    ]


@pytest.mark.parametrize("encode", [encode_batch, encode_as_arrays])
def test_names_without_tokens(encode: Callable[[EventBatch], bytes]) -> None:
    """What vLLM 0.32's offloading sends (made by hand after its sources): a name, its tier, its group, a size of 0."""
    copy = BlockStored([7], None, [], 0, None, "CPU", None, group_idx=0)
    decoded_batch = decode_batch(encode(EventBatch(1.0, [copy])))
    assert (decoded_batch.batch.events, decoded_batch.errors) == ([copy], [])


def test_tokens_after_each_block() -> None:
    """What vLLM 0.33 sends under EAGLE and MTP (made by hand after its sources)."""
    blocks = BlockStored([7, 8], None, [1, 2, 3, 4], 2, medium="GPU", session_id="s", lookahead_token_ids=[[3], [5]])
    decoded_batch = decode_batch(encode_batch(EventBatch(1.0, [blocks])))
    assert (decoded_batch.batch.events, decoded_batch.errors) == ([blocks], [])


def test_sglang_dialect() -> None:
    """An event-level salt, and (token, next token) pairs under EAGLE."""
    event = {
        "type": "BlockStored",
        "block_hashes": [-7],
        "parent_block_hash": None,
        "token_ids": [[1, 2], [2, 3]],
        "block_size": 2,
        "lora_id": None,
        "cache_salt": "s",
    }
    (read,) = decode_batch(msgspec.msgpack.encode([1.0, [event], 0])).batch.events
    assert isinstance(read, BlockStored)
    assert (read.token_ids, read.cache_salt) == ([1, 2], "s")


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1])]
)
def test_unreadable_envelopes_raise(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="unreadable event batch"):
        decode_batch(payload)


def test_truncated_payloads_raise_and_deep_ones_do_no_harm() -> None:
    payload = encode_batch(EventBatch(1.0, [BlockRemoved([1, 2, 3], "GPU", 0)], 0))
    for length in range(len(payload)):
        with pytest.raises(DecodeError):
            decode_batch(payload[:length])
    deep = b"\x93" + b"\xcb" + b"\0" * 8 + b"\x91" + b"\x91" * 1_000_000 + b"\xc0" + b"\xc0"
    with pytest.raises(DecodeError):
        decode_batch(deep)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_header_that_promises_billions_costs_nothing(header: bytes) -> None:
    good = msgspec.msgpack.encode(BlockRemoved([1], "GPU"))
    for payload in (
        b"\x93\xcb" + b"\0" * 8 + header,
        b"\x93\xcb" + b"\0" * 8 + b"\x91" + header + good,
        b"\x93\xcb" + b"\0" * 8 + b"\x91\x92\xacBlockRemoved" + header,
    ):
        with pytest.raises(DecodeError):
            decode_batch(payload)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_mutated_payloads_raise_nothing_but_decode_error(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from([encode_batch, encode_as_arrays]))(data.draw(event_batches)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        decode_batch(bytes(payload))
