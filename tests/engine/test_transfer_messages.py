"""Frames and messages between engines, and what a pull chooses, for drawn values."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from drawn_specs import specs
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from engine.cache.attention_windows import AttentionWindows
from engine.transfer.connection import MESSAGE_BYTES_MAX, ConnectionKeys, FrameSigner, decode_lengths, encode_lengths
from engine.transfer.messages import (
    ANSWER_DECODER,
    QUESTION_DECODER,
    BlocksLocated,
    BlocksSent,
    FetchBlocks,
    LocateBlocks,
    Refused,
    SentBlock,
    TransferError,
    WantedBlock,
    decode_message,
)
from engine.transfer.pull_plan import Pull, PullItem, choose_blocks_to_pull, count_resumable_blocks, split_into_batches
from engine.types import BlockKey, KVSource

HASHES = st.integers(0, 2**64 - 1)
KEYS = st.none() | st.lists(st.text(max_size=8), max_size=2).map(tuple)
SENT_BLOCKS = st.builds(
    SentBlock, HASHES, st.integers(0, 7), st.none() | HASHES, st.binary(max_size=64), KEYS, st.none() | st.text()
)  # fmt: skip
QUESTIONS = st.builds(LocateBlocks, st.binary(max_size=32), st.lists(HASHES, max_size=9)) | st.builds(
    FetchBlocks, st.lists(st.builds(WantedBlock, HASHES, st.integers(0, 7)), max_size=9)
)
ANSWERS = (
    st.builds(BlocksLocated, st.binary(max_size=32))
    | st.builds(BlocksSent, st.binary(max_size=32), st.lists(SENT_BLOCKS, max_size=4))
    | st.builds(Refused, st.text(max_size=20), st.text(max_size=20))
)


@given(QUESTIONS)
def test_a_question_is_read_as_it_was_written(question: Any) -> None:
    assert decode_message(QUESTION_DECODER, encode(question)) == question


@given(ANSWERS)
def test_an_answer_is_read_as_it_was_written(answer: Any) -> None:
    assert decode_message(ANSWER_DECODER, encode(answer)) == answer


@given(st.binary(max_size=200) | QUESTIONS.map(encode), st.data())
def test_any_bytes_are_a_message_or_a_transfer_error(data: bytes, drawn: st.DataObject) -> None:
    if data:
        changed = bytearray(data)
        changed[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
        data = bytes(changed)
    for decoder in (QUESTION_DECODER, ANSWER_DECODER):
        with suppress(TransferError):
            decode_message(decoder, data)


def check_frame(receiver: FrameSigner, frame: bytes) -> None:
    message_bytes, payload_bytes = decode_lengths(frame[:8], 1 << 20)
    message_end = 8 + message_bytes
    payload_end = message_end + payload_bytes
    receiver.check(frame[payload_end:], frame[8:message_end], frame[message_end:payload_end])


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, 3), st.data())
def test_a_frame_is_accepted_whole_once_and_in_its_place_only(
    message: bytes, payload: bytes, earlier_frames: int, drawn: st.DataObject
) -> None:
    sender, receiver = FrameSigner(b"key"), FrameSigner(b"key")
    for _ in range(earlier_frames):
        receiver.check(sender.sign(message, payload), message, payload)
    mac = sender.sign(message, payload)
    frame = bytearray(encode_lengths(message, payload) + message + payload + mac)
    frame[drawn.draw(st.integers(0, len(frame) - 1))] ^= 1 << drawn.draw(st.integers(0, 7))
    changed_receiver = FrameSigner(b"key")
    for _ in range(earlier_frames):
        changed_receiver.sign(message, payload)
    with pytest.raises(TransferError):
        check_frame(changed_receiver, bytes(frame))
    receiver.check(mac, message, payload)
    with pytest.raises(TransferError):  # the same frame again
        receiver.check(mac, message, payload)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_lengths_are_bounded_before_anything_is_read(message_bytes: int, payload_bytes: int, room: int) -> None:
    lengths = struct.pack(">II", message_bytes, payload_bytes)
    if message_bytes <= MESSAGE_BYTES_MAX and payload_bytes <= room:
        assert decode_lengths(lengths, room) == (message_bytes, payload_bytes)
    else:
        with pytest.raises(TransferError):
            decode_lengths(lengths, room)


def test_the_keys_of_a_connection_are_all_different_and_follow_the_nonces() -> None:
    keys = {
        key
        for fleet_key in (b"a", b"b")
        for nonces in ((b"1" * 32, b"2" * 32), (b"2" * 32, b"1" * 32), (b"1" * 32, b"1" * 32))
        for key in ConnectionKeys.derive(fleet_key, *nonces)
    }
    assert len(keys) == 2 * 3 * 4


@given(SENT_BLOCKS, st.data())
def test_a_block_is_of_a_prompt_if_all_that_names_it_is_equal(block: SentBlock, drawn: st.DataObject) -> None:
    keys = [
        BlockKey(hash_, tokens, block.extra_keys, block.lora_name)
        for hash_, tokens in ((block.parent_hash, b"before"), (block.hash, block.packed_tokens))
        if hash_ is not None
    ]
    item = PullItem(len(keys) - 1, block.kind)
    expected = Pull(KVSource("host", 1), keys).describe_block(item)
    (sent,) = decode_message(ANSWER_DECODER, encode(BlocksSent(b"", [block]))).blocks  # type: ignore[union-attr]
    assert sent == expected
    field = drawn.draw(st.sampled_from(["hash", "kind", "parent_hash", "packed_tokens", "extra_keys", "lora_name"]))
    drawn_value = getattr(drawn.draw(SENT_BLOCKS), field)
    changed = msgspec.structs.replace(sent, **{field: drawn_value})
    assert (changed == expected) == (drawn_value == getattr(block, field))


# ---------------------------------------------------------------------- what a pull chooses


@given(specs(block_size_max=4, window_max=9), st.data())
def test_what_is_chosen_is_enough_and_no_block_too_many(spec: Any, drawn: st.DataObject) -> None:
    kind_count = len(spec.block_bytes_by_kind())
    windows = AttentionWindows(spec, step_tokens_max=None)
    masks = st.lists(st.integers(0, 2**kind_count - 1), max_size=12)
    local_masks, remote_masks = drawn.draw(masks), drawn.draw(masks)
    items = choose_blocks_to_pull(local_masks, remote_masks, kind_count, windows)
    assert len(set(items)) == len(items)
    length = max(len(local_masks), len(remote_masks))
    local = [*local_masks, *[0] * (length - len(local_masks))]
    for index, kind in items:
        assert not local[index] >> kind & 1, "it is here"
        assert remote_masks[index] >> kind & 1, "it is not there"

    def count_resumable(moved_items: list[PullItem]) -> int:
        moved = list(local)
        for index, kind in moved_items:
            moved[index] |= 1 << kind
        return count_resumable_blocks(moved, windows)

    everything = [
        PullItem(i, kind) for i, mask in enumerate(remote_masks) for kind in range(kind_count) if mask >> kind & 1
    ]
    assert count_resumable(items) == count_resumable(everything)
    for item in items:
        assert count_resumable([other for other in items if other != item]) < count_resumable(items)


@given(
    st.lists(st.builds(PullItem, st.integers(0, 9), st.integers(0, 1)), max_size=30),
    st.tuples(st.integers(0, 9), st.integers(0, 30)),
    st.integers(1, 25),
    st.integers(1, 6),
)
def test_batches_are_bounded_and_in_order(
    items: list[PullItem], bytes_by_kind: tuple[int, int], bytes_max: int, items_max: int
) -> None:
    batches = list(split_into_batches(items, bytes_by_kind, bytes_max, items_max))
    assert [item for batch in batches for item in batch] == items
    for batch in batches:
        assert 1 <= len(batch) <= items_max
        assert len(batch) == 1 or sum(bytes_by_kind[item.kind] for item in batch) <= bytes_max
