"""Digests and counts of bodies: what must differ differs, and what is counted is there."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from prompts.body_digests import count_openings, digest32


@given(
    text=st.one_of(st.binary(max_size=40), st.text("[{z;\x7b\x5b\x1b\x3b", max_size=40).map(str.encode)),
    end=st.one_of(st.none(), st.integers(0, 50)),
)
def test_lists_and_objects_are_counted(text: bytes, end: int | None) -> None:
    actual = count_openings(text) if end is None else count_openings(text, end)
    assert actual == text[:end].count(b"[") + text[:end].count(b"{")


@given(st.lists(st.binary(max_size=70), min_size=2, max_size=2, unique=True), st.integers(0, 2**32 - 1))
def test_other_bytes_have_another_digest(two: list[bytes], before: int) -> None:
    first_digest, second_digest = (digest32(data, before) for data in two)
    assert 0 <= first_digest < 2**32
    assert first_digest != second_digest
    assert digest32(two[0], before) == first_digest != digest32(two[0], before + 1)


def test_digests_of_texts_that_differ_little_differ_in_half_of_their_bits() -> None:
    rng = random.Random(7)
    differing = []
    for size in (1, 7, 8, 15, 16, 17, 33, 400):
        for _ in range(200):
            data = bytearray(rng.randbytes(size))
            before = digest32(bytes(data), 0)
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            differing.append((before ^ digest32(bytes(data), 0)).bit_count())
    assert 15 < sum(differing) / len(differing) < 17
    assert min(differing) > 2
