"""`scripts/demo --moving` in a short form: its table, and texts that pulls do not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]


def test_moving_shows_pulls_and_the_same_texts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "scripts/demo",
        "--moving=60",
        "--conversations=12",  # four seldom have a pull
        "--rounds=2",
        "--json",
        str(tmp_path / "figures"),
    ]
    environment = os.environ | {"BLOCKCAST_NO_VENV": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "figures").read_text())["moving"]
    assert list(rows) == ["60 %, no pulls", "60 %, pulls"]
    assert [row["equal_texts"] for row in rows.values()] == ["96 of 96", "96 of 96"]
    without_pulls, with_pulls = rows.values()
    assert (without_pulls["pulls"], without_pulls["pulled_blocks"]) == (0, 0)
    assert with_pulls["pulls"] > 0
    assert with_pulls["pulled_blocks"] > 0
    assert "| 60 %, pulls " in run.stdout
