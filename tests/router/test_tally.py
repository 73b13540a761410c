"""How many prompts have each chunk: the native tally beside a Counter."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.tally import NaiveTally

from router.index import make_index

Order = tuple[bool, int, int]


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 120)), max_size=60), st.integers(0, 3))
def test_it_counts_as_a_counter_does(orders: list[Order], least: int) -> None:
    index = make_index(seed=1)
    native, naive = [index.tally() for _ in range(3)], [NaiveTally() for _ in range(3)]
    tally = native[0]
    key_lists: list[list[int]] = []
    for adds, conversation, chunks in orders:
        if adds or not key_lists:
            keys = [conversation * 1_000_003 + i for i in range(chunks)]
            key_lists.append(keys)
            assert tally.add_prompt(keys, *native[1:]) == naive[0].add_prompt(keys, *naive[1:])
        else:
            keys = key_lists.pop(conversation % len(key_lists))
            assert tally.remove_prompt(keys, *native[1:]) == naive[0].remove_prompt(keys, *naive[1:])
        for native_tally, naive_tally in zip(native, naive):
            assert native_tally.count_leading(keys, least) == naive_tally.count_leading(keys, least)
            assert native_tally.counts() == naive_tally.counts()
    for keys in key_lists:
        tally.remove_prompt(keys, *native[1:])
    assert [native_tally.counts() for native_tally in native] == [{}, {}, {}]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40), st.integers(0, 2)), max_size=60))
def test_what_runs_is_counted_in_all_places_at_once(orders: list[tuple[bool, int, int, int]]) -> None:
    index = make_index(seed=1)
    native, naive = [index.tally() for _ in range(5)], [NaiveTally() for _ in range(5)]
    running: list[tuple[list[int], int]] = []
    for adds, conversation, chunks, place in orders:
        if adds or not running:
            running.append(([conversation * 1_000_003 + i for i in range(chunks)], place))
            keys = running[-1][0]
            counts = [all[0].add_prompt(keys, all[2 + place], all[1]) for all in (native, naive)]
        else:
            keys, place = running.pop(conversation % len(running))
            counts = [all[0].remove_prompt(keys, all[2 + place], all[1]) for all in (native, naive)]
        assert counts[0] == counts[1]
        assert [tally.counts() for tally in native] == [tally.counts() for tally in naive]


def test_what_was_never_counted_cannot_be_taken() -> None:
    index = make_index(seed=1)
    tally, resident_tally, place_tally = index.tally(), index.tally(), index.tally()
    assert tally.add_prompt([2**64 - 1, 0], resident_tally, place_tally) == 0
    with pytest.raises(IndexError):
        tally.remove_prompt([7], resident_tally, place_tally)
    assert tally.counts() == resident_tally.counts() == place_tally.counts() == {2**64 - 1: 1, 0: 1}
    assert tally.count(7) == 0
