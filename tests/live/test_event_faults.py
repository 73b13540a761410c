"""scripts/event_faults: our router is right in every row, and one that does not care where blocks are is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.live]
ROOT = Path(__file__).resolve().parents[2]


def play(folder: Path, *args: str) -> tuple[int, dict[str, str], str]:
    """(exit status, case -> verdict, what it printed)."""
    out = folder / "faults.json"
    command = [sys.executable, str(ROOT / "scripts" / "event_faults"), "--json", str(out), *args]
    environment = {**os.environ, "BLOCKCAST_NO_VENV": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert out.exists(), done.stderr
    rows = json.loads(out.read_text())["rows"]
    return done.returncode, {row["case"]: row["verdict"] for row in rows}, done.stdout


def test_ours_is_right_in_every_row(tmp_path: Path) -> None:
    status, verdicts, printed = play(tmp_path)
    assert set(verdicts.values()) == {"right"}, printed
    assert len(verdicts) >= 40
    assert status == 0


def test_a_router_that_takes_turns_is_found_out(tmp_path: Path) -> None:
    """The judge can fail: two cases for a router that predicts rightly and sends requests in turn."""
    cases = ("--case", "a block is removed and stored", "--case", "both copies", "--jobs", "1")
    status, verdicts, printed = play(tmp_path, "--policy", "round_robin", *cases)
    assert len(verdicts) == 2
    assert set(verdicts.values()) & {"lost hit", "stale hit"}, printed
    assert status == 1
