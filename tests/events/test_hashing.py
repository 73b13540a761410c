"""Golden vectors and properties of the block hash. A changed vector is a changed protocol."""

from __future__ import annotations

from array import array

import pytest
from block_hash import hash_block
from hypothesis import given
from hypothesis import strategies as st

from events import hash_blocks, make_hash_keys, make_wire_keys
from events.hashing import ROOT_HASH, pack_token_ids, unpack_token_ids

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
key_tuples = st.lists(st.text(max_size=4), max_size=2).map(tuple)

GOLDEN: list[tuple[int | None, list[int], tuple[str, ...], int]] = [
    (None, [], (), 0x420B93810F5005EF),
    (None, list(range(16)), (), 0x42B30F8E54A81C4C),
    (None, list(range(16)), ("salt:a",), 0x0CA8455234A988E5),
    (7, [2**32 - 1], ("lora:x", "salt:é"), 0xE511CB3C0016902E),
    (2**64 - 1, [151643, 0, 1, 2], (), 0x88A00135B4F0A5A9),
]


@pytest.mark.parametrize(("parent", "token_ids", "keys", "expected"), GOLDEN)
def test_golden_vectors(parent: int | None, token_ids: list[int], keys: tuple[str, ...], expected: int) -> None:
    assert hash_block(parent, token_ids, keys) == expected


def test_the_root_is_pinned() -> None:
    assert ROOT_HASH == 0x203505AC4341EA2C


@given(tokens, st.integers(1, 7), key_tuples, key_tuples, st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_runs_equal_single_blocks(
    token_ids: list[int], size: int, first: tuple[str, ...], other: tuple[str, ...], parent: int | None
) -> None:
    expected: list[int] = []
    head = parent
    for start in range(0, len(token_ids) - size + 1, size):
        head = hash_block(head, token_ids[start : start + size], other if expected else first)
        expected.append(head)
    assert hash_blocks(parent, token_ids, size, first, other) == expected
    assert hash_blocks(parent, array("I", token_ids), size, first, other) == expected


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.lists(st.integers(0, 3), max_size=3), key_tuples),
        max_size=20,
    )
)
def test_different_inputs_have_different_names(inputs: list[tuple[int | None, list[int], tuple[str, ...]]]) -> None:
    """Framing: tokens cannot pass for keys, nor two keys for one."""
    distinct = {(parent, tuple(token_ids), keys) for parent, token_ids, keys in inputs}
    assert len({hash_block(parent, token_ids, keys) for parent, token_ids, keys in distinct}) == len(distinct)


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_token_ids_out_of_range(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\^32\)"):
        hash_block(None, bad)


@given(tokens)
def test_packed_token_ids_are_read_back(token_ids: list[int]) -> None:
    packed_ids = pack_token_ids(token_ids)
    assert packed_ids == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert unpack_token_ids(packed_ids) == token_ids


def test_keys_of_a_request() -> None:
    assert make_hash_keys("a", "b", is_first_block=True) == ("lora:a", "salt:b")
    assert make_hash_keys("a", "b", is_first_block=False) == ("lora:a",)
    assert make_hash_keys("a", None, True) != make_hash_keys(None, "a", True)
    assert make_wire_keys("a", "b", is_first_block=True) == ("a", "b")
    assert make_wire_keys(None, "b", is_first_block=False) is None
