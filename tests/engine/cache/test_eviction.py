"""The adaptive order of eviction: beside a model that looks at everything, and what it finds on small traces."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # last: it has files named like packages
sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
from played_cache import PlayedCache

from engine.cache.blocks import BlockKey, Node
from engine.cache.eviction_queue import EvictionQueue
from engine.cache.reuse_stats import ConversationTurn, ReuseStats


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
    """Every entry with what it was queued by; looks at all of them."""

    def __init__(self, reuse_stats: ReuseStats) -> None:
        self.reuse_stats = reuse_stats
        self.entries: list[tuple[Node, ConversationTurn, object]] = []

    def value_min(self) -> float:
        groups: dict[object, list[ConversationTurn]] = {}
        for _, turn, key in self.entries:
            groups.setdefault(key, []).append(turn)
        values = []
        for key, turns in groups.items():
            assert isinstance(key, tuple)
            gap = 2 ** (key[1] / 2)
            age = self.reuse_stats.clock - min(turn.end_clock for turn in turns)
            values.append(self.reuse_stats.get_counts(turns[0]).return_share / (age if age > 1.5 * gap else gap))
        return min(values)


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
        naive.entries.append(
            (place, turn, (reuse_stats.classify_turn(turn), round(reuse_stats.estimate_gap_log2(turn) * 2)))
        )
        if rng.random() < 0.4:
            selected_leaf = queue.select_leaf()
            selected_entry = next(entry for entry in naive.entries if entry[0] is selected_leaf)
            key = selected_entry[2]
            assert isinstance(key, tuple)
            turns = [entry[1] for entry in naive.entries if entry[2] == key]
            gap, age = 2 ** (key[1] / 2), reuse_stats.clock - turns[0].end_clock
            overdue = age > 1.5 * gap
            assert selected_entry[1] is (turns[0] if overdue else turns[-1])
            assert (
                reuse_stats.get_counts(selected_entry[1]).return_share / (age if overdue else gap) == naive.value_min()
            )
            queue.remove(selected_entry[0])
            naive.entries.remove(selected_entry)
        queue.check_invariants({entry[0] for entry in naive.entries})


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
