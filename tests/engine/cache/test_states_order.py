"""The adaptive order where recurrent states are kept: what a path with a state is worth, and how much is found."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cache.eviction_queue import EvictionQueue
from engine.cache.reuse_stats import ReuseStats

ROOM = 4


class Place:
    def __init__(self, hash_: int, parent: Place | None, *, state: bool = False) -> None:
        self.hash, self.parent, self.state = hash_, parent, state
        self.depth = 0 if parent is None else parent.depth + 1
        self.cached_child_count = 0

    def count_saved_blocks(self, room: int) -> int | None:
        before = self.parent
        while before is not None and not before.state:
            before = before.parent
        return None if not self.state else self.depth - (-1 if before is None else before.depth)


def path(first: int, blocks: int, *states: int) -> list[Place]:
    """Blocks of a prompt, with states after so many of them."""
    places: list[Place] = []
    for index in range(blocks):
        places.append(Place(first + index, places[-1] if places else None, state=index + 1 in states))
        if index:
            places[-2].cached_child_count = 1
    return places


def finish_turn(reuse_stats: ReuseStats, queue: EvictionQueue, places: list[Place]) -> None:
    turn = reuse_stats.begin_turn([place.hash for place in places], 0)
    reuse_stats.end_turn(turn)
    queue.add(places[-1], turn)


@pytest.fixture
def reuse_stats() -> ReuseStats:
    return ReuseStats(1000, 1)


@pytest.fixture
def queue(reuse_stats: ReuseStats) -> EvictionQueue:
    return EvictionQueue(reuse_stats, ROOM)


def test_with_one_chance_for_all_what_saves_least_for_its_room_goes_first(
    reuse_stats: ReuseStats, queue: EvictionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GreedyDual-Size has it for what is of one age: by what is saved and what it takes, whatever its class."""
    monkeypatch.setattr(ReuseStats, "classify_turn", lambda self, turn: (False, 1, 0))
    monkeypatch.setattr(ReuseStats, "estimate_gap_log2", lambda self, turn: 10.0)
    rng = random.Random(0)
    saves = [1, 2, 5, 14, 300]
    rng.shuffle(saves)
    ends = {}
    for number, saved_blocks in enumerate(saves):
        places = path(1000 * number, saved_blocks, saved_blocks)
        ends[saved_blocks] = places[-1]
        finish_turn(reuse_stats, queue, places)
    useless_path = path(9000, 600)
    finish_turn(reuse_stats, queue, useless_path)
    evicted_paths = []
    while (leaf := queue.select_leaf()) is not None:
        evicted_paths.append(leaf)
        queue.remove(leaf)
    assert evicted_paths == [useless_path[-1], *(ends[saved_blocks] for saved_blocks in sorted(saves))]


def test_a_path_is_worth_what_the_state_saves_that_is_left_at_its_end(
    reuse_stats: ReuseStats, queue: EvictionQueue
) -> None:
    places, other = path(0, 12, 8, 12), path(100, 1, 1)
    finish_turn(reuse_stats, queue, places)
    finish_turn(reuse_stats, queue, other)
    assert queue.select_leaf() is other[-1]
    for place in reversed(places[8:]):
        queue.shorten_path(place, place.parent or place)
        place.state = False
    assert queue.select_leaf() is other[-1]  # saves 1 and takes 5; the first 8 save 8 and take 12
    queue.shorten_path(places[7], places[6])  # nothing resumes there any more
    assert queue.select_leaf() is places[6]
    queue.check_invariants({places[6], other[-1]})


def test_a_state_that_leaves_by_itself_leaves_a_path_of_no_use(reuse_stats: ReuseStats, queue: EvictionQueue) -> None:
    places, other = path(0, 300, 300), path(500, 3, 3)
    finish_turn(reuse_stats, queue, places)
    finish_turn(reuse_stats, queue, other)
    assert queue.select_leaf() is other[-1]
    places[-1].state = False
    queue.requeue(places[-1])
    assert queue.select_leaf() is places[-1]


def test_a_superseded_state_goes_before_the_ends_of_paths_that_are_worth_more(
    reuse_stats: ReuseStats, queue: EvictionQueue
) -> None:
    places = path(0, 300, 100, 300)
    finish_turn(reuse_stats, queue, places)
    queue.add_superseded_state(places[99], 2.0)
    assert queue.select_state() is None
    queue.add_superseded_state(places[99], 0.5)
    assert queue.select_state() is places[99]
    queue.requeue(places[99])  # it is used
    assert queue.select_state() is None
    queue.add_superseded_state(places[99], 0.5)
    for place in reversed(places[100:]):
        queue.shorten_path(place, place.parent or place)
        place.state = False
    assert queue.select_state() is None, "it is the end of its path now, and goes with it"
    queue.check_invariants({places[99]})


# ---------------------------------------------------------------------- the engine's cache


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    root = Path(__file__).resolve().parents[3]
    monkeypatch.setattr(sys, "path", [*sys.path, str(root / "benchmarks"), str(root / "scripts")])
    return importlib.import_module("played_cache").PlayedCache


def conversations(rng: random.Random, requests: int) -> list[list[int]]:
    """Some go on, some begin anew, and two begin with the same."""
    prefix = [rng.getrandbits(63) for _ in range(3)]
    talks = [prefix + [rng.getrandbits(63)] if n < 2 else [rng.getrandbits(63)] for n in range(9)]
    trace = []
    for _ in range(requests):
        names = rng.choice(talks)
        trace.append(list(names))
        if len(names) > 12:
            del names[rng.randint(1, 3) :]
        names.extend(rng.getrandbits(63) for _ in range(rng.randint(0, 4)))
    return trace


@pytest.mark.parametrize("seed", range(4))
def test_every_path_and_state_that_is_cached_can_be_chosen(seed: int, hybrid: Any) -> None:
    cache = hybrid(60, 512, 3, adaptive=True)
    evicted_count = 0
    for names in conversations(random.Random(seed), 300):
        evicted_count += cache.serve(names)
        cache.cache.check_invariants()
    assert evicted_count


def test_of_a_cycle_that_is_larger_than_the_cache_states_of_a_part_stay(hybrid: Any) -> None:
    rng = random.Random(0)
    trace = [[rng.getrandbits(63) for _ in range(10)] for _ in range(40)] * 15
    present, adaptive = (
        sum([cache.serve(names) for names in trace][200:])
        for cache in (hybrid(260, 512, 3, adaptive=adaptive) for adaptive in (False, True))
    )
    assert present == 0
    assert adaptive > 400 * 10 * 0.35  # half of the cycle fits, with a state of three blocks' room for each ten
