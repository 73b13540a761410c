"""The adaptive order of eviction: beside a model that looks at everything, and what it finds on small traces."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # last: it has files named like packages
sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
from played_cache import PlayedCache

from engine.cache.blocks import Node
from engine.cache.eviction_queue import EvictionQueue
from engine.cache.reuse_stats import ConversationTurn, ReuseStats, TurnClass
from engine.types import BlockKey


def make_node(hash_: int, parent: Node | None = None) -> Node:
    return Node(BlockKey(hash_, b"", None, None), parent, (None,))


def lru(trace: list[list[int]], capacity: int) -> list[int]:
    blocks: OrderedDict[int, None] = OrderedDict()
    hits = []
    for names in trace:
        hits.append(next((i for i, name in enumerate(names) if name not in blocks), len(names)))
        for name in reversed(names):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > capacity:
            blocks.popitem(last=False)
    return hits


def adaptive(trace: list[list[int]], capacity: int) -> list[int]:
    cache = PlayedCache(capacity, 16, adaptive=True)
    return [cache.serve(names) for names in trace]


def chain(rng: random.Random, blocks: int) -> list[int]:
    return [rng.getrandbits(63) for _ in range(blocks)]


def test_of_a_cycle_that_is_larger_than_the_cache_a_part_stays() -> None:
    rng = random.Random(0)
    prompts = [chain(rng, 10) for _ in range(40)]
    trace = prompts * 20
    assert sum(lru(trace, 200)[400:]) == 0
    assert sum(adaptive(trace, 200)[400:]) > 400 * 10 * 0.35  # half of the cycle fits


def test_a_conversation_is_known_again_after_all_of_it_was_evicted() -> None:
    reuse_stats = ReuseStats(100, 16)
    first = reuse_stats.begin_turn([1, 2, 3, 4], 0)
    reuse_stats.end_turn(first)
    reuse_stats.end_turn(reuse_stats.begin_turn([10, 11], 0))
    second = reuse_stats.begin_turn([1, 2, 3, 5, 6], 0)  # its last block ended otherwise
    assert (second.previous, second.turn_count, second.gap_blocks, second.added_blocks) == (first, 2, 7, 1)
    other = reuse_stats.begin_turn([1, 7, 8], 1)
    assert (other.previous, other.turn_count, other.shared_blocks) == (None, 1, 1)


def test_a_path_that_was_left_goes_first_and_from_its_end() -> None:
    cache = PlayedCache(10, 16, adaptive=True)
    cache.serve([1, 2, 3, 4, 5, 6])
    cache.serve([1, 2, 3, 4, 5, 7, 8])  # the conversation goes on; block 6 was dropped from it
    cache.serve([21, 22])
    assert 6 not in cache.names
    assert {1, 2, 3, 4, 5, 7, 8} <= set(cache.names)
    cache.cache.check_invariants()


def test_what_is_left_of_a_shortened_path_stays_when_a_younger_one_is_cached() -> None:
    """Else it would go on to be the one that is evicted, until nothing is left of any that waits."""
    reuse_stats = ReuseStats(100, 16)
    queue = EvictionQueue(reuse_stats)
    ends = []
    for first in (10, 20):
        turn = reuse_stats.begin_turn([first, first + 1], 0)
        reuse_stats.end_turn(turn)
        parent = make_node(first)
        ends.append(make_node(first + 1, parent))
        queue.add(ends[-1], turn)
        if first == 10:  # all that nobody holds, when a request needs room
            assert queue.select_leaf() is ends[0]
            queue.shorten_path(ends[0], parent)
            assert queue.select_leaf() is parent
    assert queue.select_leaf() is ends[1]


def test_a_turn_is_counted_when_it_comes_back_or_is_overdue_and_once() -> None:
    reuse_stats = ReuseStats(10, 16)
    first = reuse_stats.begin_turn([1, 2, 3, 4], 0)
    counts = reuse_stats.get_counts(first)
    before = counts.turn_count
    reuse_stats.end_turn(first)
    assert counts.turn_count == before, "it is not known yet whether it comes back"
    returning_turn = reuse_stats.begin_turn([1, 2, 3, 4, 5, 6], 4)
    assert (returning_turn.previous, counts.turn_count, counts.return_count) == (first, before + 1, before / 2 + 1)
    reuse_stats.end_turn(returning_turn)
    late = reuse_stats.get_counts(returning_turn)
    before = late.turn_count
    for k in range(100, 110):  # 20 blocks, two caches' worth
        reuse_stats.end_turn(reuse_stats.begin_turn([k, -k], 0))
    assert late.turn_count == before
    reuse_stats.end_turn(reuse_stats.begin_turn([200], 0))
    assert late.turn_count == before + 1
    reuse_stats.end_turn(reuse_stats.begin_turn([1, 2, 3, 4, 5, 6, 7], 0))
    assert late.turn_count == before + 1, "overdue, and then back"
    for _ in range(1000):  # nothing of it can be known again
        reuse_stats.end_turn(reuse_stats.begin_turn([], 0))
    assert len(reuse_stats._uncounted_turns) < 20


class Naive:
    """Every turn with the key of its queue; looks at all of them."""

    def __init__(self, reuse_stats: ReuseStats) -> None:
        self.reuse_stats = reuse_stats
        self.entries: list[tuple[Node, ConversationTurn, tuple[TurnClass, int]]] = []

    def add(self, leaf: Node, turn: ConversationTurn) -> None:
        gap_step = round(self.reuse_stats.estimate_gap_log2(turn) * 2)
        self.entries.append((leaf, turn, (self.reuse_stats.classify_turn(turn), gap_step)))

    def select(self) -> tuple[Node, ConversationTurn, tuple[TurnClass, int]]:
        """Return the least valuable offer of a queue, by half-octaves; of equal ones the youngest."""
        groups: dict[tuple[TurnClass, int], list[tuple[Node, ConversationTurn, tuple[TurnClass, int]]]] = {}
        for entry in self.entries:
            groups.setdefault(entry[2], []).append(entry)
        offers = [
            entries[0] if self._age(entries[0][1]) > 1.5 * 2 ** (gap_step / 2) else entries[-1]
            for (_, gap_step), entries in groups.items()
        ]
        return min(offers, key=lambda entry: (round(2 * math.log2(self._value(entry[1]))), self._age(entry[1])))

    def _age(self, turn: ConversationTurn) -> int:
        return self.reuse_stats.clock - turn.end_clock

    def _value(self, turn: ConversationTurn) -> float:
        gap, age = 2 ** self.reuse_stats.estimate_gap_log2(turn), self._age(turn)
        return self.reuse_stats.get_counts(turn).return_share / (age if age > 1.5 * gap else gap)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_of_all_is_found_at_the_ends_of_queues(seed: int) -> None:
    rng = random.Random(seed)
    reuse_stats = ReuseStats(50, 16)
    queue = EvictionQueue(reuse_stats)
    naive = Naive(reuse_stats)
    talks = [chain(rng, rng.randint(1, 9)) for _ in range(12)]
    for step in range(400):
        at = rng.randrange(len(talks))
        turn = reuse_stats.begin_turn(talks[at], 0)
        reuse_stats.end_turn(turn)
        turn.previous = None
        talks[at] = talks[at] + chain(rng, rng.randint(0, 3)) if rng.random() < 0.8 else chain(rng, 5)
        place = make_node(step)
        queue.add(place, turn)
        naive.add(place, turn)
        if rng.random() < 0.4:
            entry = naive.select()
            assert queue.select_leaf() is entry[0]
            queue.remove(entry[0])
            naive.entries.remove(entry)
        queue.check_invariants({entry[0] for entry in naive.entries})


def test_of_paths_of_about_equal_value_the_youngest_goes_first() -> None:
    """Even if it is worth a little more: the returns of the others are nearer."""
    reuse_stats = ReuseStats(100, 16)
    queue = EvictionQueue(reuse_stats)
    turns = {"short": [1, 2], "long": list(range(10, 50))}  # of different classes
    for name, hashes in turns.items():
        turn = reuse_stats.begin_turn(hashes, 0)
        reuse_stats.end_turn(turn)
        queue.add(make_node(hashes[0]), turn)
        if name == "long":
            counts = reuse_stats.get_counts(turn)
            counts.return_count *= 1.1
            counts.gap_log2_sum *= 1.1
    selected_leaf = queue.select_leaf()
    assert selected_leaf is not None
    assert selected_leaf.hash == 10


def test_a_class_whose_turns_never_return_keeps_its_mean_gap() -> None:
    """A million different prompts are a day's batch; a share and a sum that are halved for ever end at 0 / 0."""
    reuse_stats = ReuseStats(64, 16)
    counts = reuse_stats.get_counts(reuse_stats.begin_turn([1, 2], 0))
    for _ in range(1_000_000):
        counts.record_turn()
    assert counts.mean_gap_log2 == pytest.approx(6.0)
    assert 0.0 < counts.return_share < 1e-4


def test_the_benchmark_plays_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order finds at most what Belady does; the figures are written."""
    root = Path(__file__).resolve().parents[3]
    monkeypatch.setattr(sys, "path", [*sys.path, str(root / "benchmarks"), str(root / "scripts")])
    rng = random.Random(0)
    talks = [[rng.randrange(9999) for _ in range(5)] for _ in range(8)]
    lines = []
    for _ in range(80):
        ids = rng.choice(talks)
        ids.append(rng.randrange(9999))
        lines.append(json.dumps({"input_length": 512 * len(ids), "hash_ids": ids}))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    argv = [str(tmp_path / "trace.jsonl"), "--json", str(tmp_path / "out.json"), "--percents", "20"]
    argv += ["--state-blocks", "3"]
    monkeypatch.setattr(sys, "argv", ["eviction.py", *argv, "--requests", "80"])
    importlib.import_module("eviction").main()
    figures = json.loads((tmp_path / "out.json").read_text())["traces"]["trace"]
    row = figures["rows"]["20 %"]
    assert 0 < row["adaptive"] <= row["Belady"]
    assert row["LRU"] <= row["Belady"]
    row = figures["a state as 3 blocks"]["20 %"]
    assert 0 < row["adaptive"] <= row["Belady, no states"] == figures["rows"]["20 %"]["Belady"]
    assert row["LRU"] <= row["Belady, no states"]
    assert row["adaptive, refused"] == row["LRU, refused"] == 0
