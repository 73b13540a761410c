"""The two decoders side by side on real payloads with faults in them: neither raises, both accept the same.

The long run under AddressSanitizer is scripts/fuzz_native.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.index import ReferenceIndex, make_index
from router.view import IngestReport, PrefixIndex, Scope

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

pytest.importorskip("router._native", reason="the native index was not built")


@cache
def payloads() -> list[bytes]:
    """The real payloads, shortest first: a shrunk failure stays small."""
    found = set()
    for capture in GOLDEN.rglob("*.frames.jsonl.gz"):
        with gzip.open(capture) as file:
            frames = [json.loads(line).get("frames") for line in file]
        found.update(bytes.fromhex(frame[-1]) for frame in frames if frame)
    return sorted(found, key=lambda payload: (len(payload), payload))


def faulty(payload: bytes, faults: list[tuple[int, int, int]]) -> bytes:
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
        report.unknown_events,
    )


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9_999), st.integers(0, 255)), max_size=4),
)
@example(0, [])
def test_faulty_payloads(which: int, faults: list[tuple[int, int, int]]) -> None:
    real = payloads()[which % len(payloads())]
    payload = faulty(real, faults)
    pair: tuple[PrefixIndex, PrefixIndex] = (ReferenceIndex(1), make_index("native", 1))
    reports = []
    for index in pair:
        holder = index.add_holder("w", "m")
        index.ingest(holder, real)
        reports.append(index.ingest(holder, payload))
        index.match([1, 2, 3] * 100, Scope("m"))
    if not reports[0].malformed and not reports[1].malformed:
        assert counts(reports[0]) == counts(reports[1])
        assert pair[0].stats().entries == pair[1].stats().entries
    if not faults:
        assert reports[1].malformed == reports[0].malformed == []


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
    index = make_index("native")
    holder = index.add_holder("w", "m")
    assert len(index.ingest(holder, payload).malformed) == 1
    assert index.stats().entries == 0
