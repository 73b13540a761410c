"""The two decoders side by side on real payloads with faults in them: neither raises, both accept and refuse the same.

The long run under AddressSanitizer is `scripts/fuzz --only native`.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from index_world import dump
from reference import ReferenceIndex
from reference.dump import ROW

from router.index import make_index
from router.index.protocol import HolderId, IngestReport, PrefixIndex, Scope

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@cache
def payloads() -> list[bytes]:
    """The real payloads, shortest first: a shrunk failure stays small."""
    messages: set[bytes] = set()
    for capture in GOLDEN.rglob("*.frames.jsonl.gz"):
        with gzip.open(capture) as file:
            frames = [json.loads(line).get("frames") for line in file]
        messages.update(bytes.fromhex(frame[-1]) for frame in frames if frame)
    return sorted(messages, key=lambda payload: (len(payload), payload))


def corrupt_payload(payload: bytes, faults: list[tuple[int, int, int]]) -> bytes:
    """Cut, flip, overwrite, insert and delete at places given as parts of 10,000."""
    data = bytearray(payload)
    for kind, place, value in faults:
        if not data:
            break
        at = len(data) * place // 10_000
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << value % 8
        elif kind == 2:
            data[at] = value
        elif kind == 3:
            data.insert(at, value)
        else:
            del data[at]
    return bytes(data)


def counts(report: IngestReport) -> tuple[int, ...]:
    return (
        report.stored,
        report.removed,
        report.cleared,
        report.parked,
        report.unknown_removals,
        report.unknown_copies,
        report.unknown_events,
    )


def content(index: PrefixIndex, holder: HolderId) -> list[str]:
    """What the holder holds, whatever the order of the dump."""
    parts = dump(index, holder)
    return sorted(
        [repr((part["group_idx"], part["tier"], row)) for part in parts for row in ROW.iter_unpack(part["rows"])]
    )


def ingest_in_both(*batches: bytes) -> IngestReport:
    """Both indexes say and hold the same after the batches. Returns what was said of the last."""
    ingest_results = []
    entries = []
    for index in (ReferenceIndex(1), make_index(1)):
        holder = index.add_holder("m")
        reports = [index.ingest(holder, payload) for payload in batches]
        index.match([1, 2, 3] * 100, Scope("m"))
        ingest_results.append([(counts(report), len(report.malformed)) for report in reports])
        entries.append((index.stats().entries, content(index, holder)))
    assert ingest_results[0] == ingest_results[1]
    assert entries[0] == entries[1]
    return reports[-1]


@settings(max_examples=examples(600), deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9_999), st.integers(0, 255)), max_size=4),
)
def test_faulty_payloads(payload_index: int, faults: list[tuple[int, int, int]]) -> None:
    real = payloads()[payload_index % len(payloads())]
    ingest_in_both(real, corrupt_payload(real, faults))


def test_whole_payloads() -> None:
    for payload in payloads():
        assert ingest_in_both(payload, payload).malformed == []


STORED: dict[str, object] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 2,
}
NO_UTF8 = msgspec.Raw(b"\xa2\xff\xfe")
NO_TEXT_KEY = msgspec.Raw(b"\x81\x01\x01")


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


@pytest.mark.parametrize("number", range(40))
def test_one_name_at_two_places(number: int) -> None:
    """Found in a real payload of two groups, one byte damaged: two events of a batch spell one name out differently.
    Each goes where it says itself, and what comes later counts."""
    first = STORED | {"parent_block_hash": 7, "block_hashes": [11, 12]}
    second = STORED | {"kv_cache_spec_kind": "full_attention", "group_idx": 1, "token_ids": [1, 2, 3, number]}
    parent = STORED | {"block_hashes": [7], "token_ids": [9, 9]}
    ingest_in_both(batch(first, second))
    ingest_in_both(batch(parent), batch(first, second))
    ingest_in_both(batch(parent), batch(second, first), batch(first))
    ingest_in_both(
        batch(STORED | {"block_hashes": [11, 11]}, {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"})
    )


@pytest.mark.parametrize(
    ("change", "malformed_count"),
    [
        ({"medium": NO_UTF8}, 1),
        ({"lora_name": NO_UTF8}, 1),
        ({"cache_salt": NO_UTF8}, 1),
        ({"extra_keys": [[NO_UTF8], None]}, 1),
        ({"extra_keys": [[[NO_UTF8, 0]], None]}, 0),
        ({"extra_keys": [[[NO_UTF8, None]], None]}, 0),
        ({"extra_keys": [[["image", True]], None]}, 0),
        ({"extra_keys": [[{"an": NO_UTF8}], None]}, 0),
        ({"a newer field": NO_UTF8}, 0),
        ({"a newer field": NO_TEXT_KEY}, 0),
        ({"locality": 5, "session_id": NO_UTF8, "lookahead_token_ids": "?"}, 0),
        ({"token_ids": [[1, 2], [2, 3], 3, [4, None]]}, 0),
        ({"token_ids": [[1, 2], [2, 3], 3, []]}, 1),
        ({"token_ids": [[1, 2], [2, 3], 3, [[4]]]}, 1),
        ({"token_ids": [1, 2, 3, 1 << 32]}, 1),
        ({"block_size": True}, 1),
        ({"block_size": 0}, 0),
        ({"block_size": 0, "token_ids": [1, 2, 3]}, 1),
        ({"block_size": 0, "block_hashes": []}, 1),
        ({"token_ids": None}, 0),
        ({"token_ids": None, "block_size": 0}, 0),
        ({"token_ids": [1, 2, "image", 4]}, 0),
        ({"token_ids": ["image", "image", "other", 4], "extra_keys": [["salt"], ["x"]], "mm_keys": [[1], [{}, 2]]}, 0),
        ({"token_ids": [1, 2, "image", 4], "block_size": 0}, 0),
        ({"token_ids": [1, 2, "image"]}, 1),
        ({"token_ids": [1, 2, "image", 4], "block_hashes": [11]}, 1),
        ({"token_ids": [1, 2, NO_UTF8, 4]}, 1),
        ({"token_ids": [1, 2, ["image", 3], 4]}, 1),
        ({"mm_keys": [None, [{"type": "mm_key", "hash": "ab", "start_offset": 0}]]}, 0),
        ({"mm_keys": [[], None, [1], [2]]}, 0),
        ({"mm_keys": [{}]}, 1),
        ({"mm_keys": "?"}, 1),
        ({"lora_id": 0}, 0),
        ({"lora_id": 0, "lora_name": "", "extra_keys": [[""], ["", "x"]]}, 0),
        ({"lora_id": 3, "lora_name": ""}, 0),
        ({"parent_block_hash": 0}, 0),
        ({"parent_block_hash": 99, "skipped_parent_block_hash": None, "skipped_token_ids": [7, 8]}, 0),
        ({"parent_block_hash": 99, "skipped_parent_block_hash": 11, "skipped_token_ids": [7]}, 0),
        ({"parent_block_hash": 99, "skipped_token_ids": [7, 8], "skipped_extra_keys": [None, ["x"]]}, 0),
        ({"parent_block_hash": 99, "skipped_token_ids": [7, 8], "skipped_extra_keys": [None, []]}, 0),
        ({"skipped_parent_block_hash": "x"}, 1),
        ({"skipped_token_ids": [1 << 32]}, 1),
        ({"skipped_token_ids": ["image"]}, 1),
        ({"skipped_extra_keys": [1]}, 1),
        ({"type": "BlockRemoved", "remaining_copy_counts": [0, 1 << 63]}, 0),
        ({"type": "BlockRemoved", "remaining_copy_counts": None}, 0),
        ({"type": "BlockRemoved", "remaining_copy_counts": [0]}, 1),
        ({"type": "BlockRemoved", "remaining_copy_counts": [0, -1]}, 1),
        ({"type": "BlockRemoved", "remaining_copy_counts": 0}, 1),
        ({"remaining_copy_counts": "?"}, 0),
        ({"type": "AllBlocksCleared", "medium": "CPU"}, 0),
        ({"type": "AllBlocksCleared", "medium": NO_UTF8}, 0),
        ({"block_size": 0, "token_ids": []}, 0),
        ({"block_size": 2, "token_ids": [], "group_idx": None}, 0),
        ({"block_size": -1, "token_ids": []}, 1),
        ({"block_size": 1 << 24, "token_ids": []}, 1),
        ({"block_size": 2.0}, 1),
        ({"group_idx": (1 << 63) - 1}, 0),
        ({"group_idx": 1 << 63}, 1),
        ({"lora_id": 1 << 63}, 1),
        ({"lora_id": -(1 << 63)}, 0),
        ({"kv_cache_spec_sliding_window": -5}, 0),
        ({"kv_cache_spec_sliding_window": 1 << 63}, 1),
        ({"type": "BlockRemoved", "token_ids": "?", "extra_keys": 5, "parent_block_hash": []}, 0),
        ({"type": "BlockRemoved", "group_idx": "0"}, 1),
        ({"type": "AllBlocksCleared", "medium": 5}, 0),
        ({"type": "BlockMoved", "medium": 5}, 0),
        ({"type": NO_UTF8}, 1),
        ({"type": None}, 1),
    ],
)
def test_what_is_malformed(change: dict[str, object], malformed_count: int) -> None:
    """One event that says something odd between two that do not: it costs itself at most."""
    odd = STORED | change
    report = ingest_in_both(batch(STORED, odd, STORED | {"block_hashes": [13, 14], "token_ids": [5, 6, 7, 8]}))
    assert len(report.malformed) == malformed_count
    assert report.stored >= 4
    for text in report.malformed:
        assert text.startswith("event 1: ") or "BlockStored" in text
    ingest_in_both(batch(list(odd.values())))


@pytest.mark.parametrize("rank", [True, "0", [], 1.0])
def test_rank_of_another_type(rank: object) -> None:
    report = ingest_in_both(msgspec.msgpack.encode([1.0, [STORED], rank]))
    assert len(report.malformed) == 1
    assert report.stored == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x92\xcb" + bytes(8) + b"\x91" + b"\x91" * 100_000,
        b"\x92\xcb" + bytes(8) + b"\x91\xdf\xff\xff\xff\xff",
        b"\x92\xcb" + bytes(8) + b"\x91\x92\xabBlockStored\xdd\x7f\xff\xff\xff",
    ],
)
def test_hostile_payloads(payload: bytes) -> None:
    """Claimed lengths far beyond the bytes, and nesting far beyond the stack."""
    index = make_index()
    holder = index.add_holder("m")
    assert len(index.ingest(holder, payload).malformed) == 1
    assert index.stats().entries == 0
