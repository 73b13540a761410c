"""The engine behaves in seeded histories as when their digests were recorded; and a small change of it is noticed.

A digest that differs says the first seed of a row. `compare_engines.py OLD_CHECKOUT --first SEED` shows the difference.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from compare_engines import DIGESTS, HISTORY_COUNT, ROOT, SEEDS_PER_DIGEST, combine_digests
from engine_history import compute_digest, play_history

from engine.cache import state_checkpoints
from engine.cache.blocks import Node
from engine.cache.event_log import Action, Change, EventLog
from engine.cache.host_tier import HostTier
from engine.cache.kv_cache import KVCache
from engine.cache.reuse_stats import ReuseStats
from engine.cache.state_checkpoints import StateCheckpoints
from engine.prefill_queue import PrefillQueue

Patch = pytest.MonkeyPatch

QUICK_SEEDS = 200
SEEDS_PER_TEST = 250
MUTANT_SEEDS = 150


def read_digests() -> dict[int, str]:
    rows = (line.split() for line in DIGESTS.read_text().splitlines())
    return {int(first): digest for first, digest in rows}


def check_histories(first: int, count: int) -> None:
    recorded_digests = read_digests()
    for seed in range(first, first + count, SEEDS_PER_DIGEST):
        digests = [compute_digest(play_history(s)) for s in range(seed, seed + SEEDS_PER_DIGEST)]
        assert combine_digests(digests) == recorded_digests[seed], f"one of {SEEDS_PER_DIGEST} histories from {seed} on"


def test_histories_are_as_recorded() -> None:
    check_histories(0, QUICK_SEEDS)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, HISTORY_COUNT, SEEDS_PER_TEST))
def test_thousands_of_histories_are_as_recorded(first: int) -> None:
    check_histories(first, SEEDS_PER_TEST)


def requests_do_not_wait_for_prefixes(patch: Patch) -> None:
    patch.setattr(KVCache, "should_wait", lambda self, seq: False)


def prompts_keep_their_place(patch: Patch) -> None:
    patch.setattr(PrefillQueue, "requeue_if_longer", lambda self, entry: False)


def chunks_run_past_checkpoints(patch: Patch) -> None:
    patch.setattr(StateCheckpoints, "clip_chunk_end", lambda self, seq, end: end)


def superseded_states_are_worth_all(patch: Patch) -> None:
    patch.setattr(state_checkpoints, "_SUPERSEDED_DIVISOR", 1)


def host_memory_takes_nothing(patch: Patch) -> None:
    patch.setattr(HostTier, "_store", lambda self, block, node: False)


def removed_blocks_are_announced_one_by_one(patch: Patch) -> None:
    real = EventLog.record

    def record(self: EventLog, action: Action, kind: int, node: Node) -> None:
        if action is Action.REMOVED:
            self._changes.append(Change(action, kind, {(kind, node): None}))
        else:
            real(self, action, kind, node)

    patch.setattr(EventLog, "record", record)


def gaps_are_learned_twice_as_long(patch: Patch) -> None:
    real = ReuseStats.estimate_gap_log2
    patch.setattr(ReuseStats, "estimate_gap_log2", lambda self, turn: real(self, turn) + 1)


def nothing_is_kept_to_grow_into(patch: Patch) -> None:
    patch.setattr(KVCache, "growth_reserve_blocks", 0)


MUTANTS: list[Callable[[Patch], None]] = [
    requests_do_not_wait_for_prefixes,
    prompts_keep_their_place,
    chunks_run_past_checkpoints,
    superseded_states_are_worth_all,
    host_memory_takes_nothing,
    removed_blocks_are_announced_one_by_one,
    gaps_are_learned_twice_as_long,
    nothing_is_kept_to_grow_into,
]
"""Changes after which every answer is right, so that no model of the cache objects."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_change_that_leaves_answers_right_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    rows = read_digests()
    assert any(
        combine_digests([compute_digest(play_history(s)) for s in range(seed, seed + SEEDS_PER_DIGEST)]) != rows[seed]
        for seed in range(0, MUTANT_SEEDS, SEEDS_PER_DIGEST)
    )


@pytest.mark.long
def test_the_command_compares_two_versions() -> None:
    command = [sys.executable, str(ROOT / "tests/differential_engine/compare_engines.py"), str(ROOT), "--count", "5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, "5 histories, the same in both\n"), result.stderr
