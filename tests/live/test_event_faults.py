"""Faults of event streams: our router is right in every case, and one that does not look at blocks is found out."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from event_faults import Case, Play, Router, Row
from event_faults_cases import CASES

pytestmark = [pytest.mark.long, pytest.mark.live]


def play_cases(cases: list[Case], policy: str, at_once: int) -> list[Row]:
    """What one router with this policy makes of the cases."""
    router = Router("--policy", policy)
    try:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(Play.run, [Play(router, case, seed) for seed, case in enumerate(cases, 1)]))
    finally:
        router.close()


def test_ours_is_right_in_every_case() -> None:
    rows = play_cases(CASES, "kv", at_once=6)
    assert len(rows) >= 40
    assert [row for row in rows if row.verdict != "right"] == []


def test_a_router_that_takes_turns_is_found_out() -> None:
    """The judge can fail: two cases for a router that predicts rightly and sends requests in turn."""
    cases = [case for case in CASES if case.name.startswith(("a block is removed and stored", "both copies"))]
    rows = play_cases(cases, "round_robin", at_once=1)
    assert len(rows) == 2
    assert {row.verdict for row in rows} & {"lost hit", "stale hit"}, rows
