"""`scripts/fleet_faults`, whole: `pytest -m slow tests/live/test_fleet_faults.py`. Root, for its network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(3600)]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_every_request_is_answered_and_every_prediction_exact() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "fleet_faults"
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.endswith("no process is left\n")
