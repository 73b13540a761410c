"""The short form of `scripts/hostile_engine`: some of its requests, other ones each day, beside a victim."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hostile_engine"


def test_no_request_ends_service_or_changes_a_neighbour(tmp_path: Path) -> None:
    seed = int(time.time() // 86400)
    report = tmp_path / "report.json"
    args = [sys.executable, str(SCRIPT), "--json", str(report), "--count", "500", "--seed", str(seed)]
    done = subprocess.run([*args, "--", "--check-invariants"], capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["faults"] == [], f"seed {seed}"
    assert found["requests"] == 500
    assert found["victim"]["answers"] >= 2
