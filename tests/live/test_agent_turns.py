"""Sessions of agents through the official clients: benchmarks/agent_turns.py, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]

ROOT = Path(__file__).resolve().parents[2]


def test_every_block_that_could_be_reused_is(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "agent_turns.py"), "--turns", "8", "--json", str(report)]
    subprocess.run(command, check=True, timeout=500, cwd=tmp_path)
    cases = json.loads(report.read_text())["cases"]
    clients = ("anthropic", "openai", "responses")
    assert set(cases) == {f"{case}, {client}" for case in ("thinking", "billing", "changing") for client in clients}
    for name, row in cases.items():
        if name.startswith("changing"):
            assert row["share"] < 0.05, name
        else:
            assert row["share_of_blocks"] == 1, name
            assert row["share"] > 0.99, name
