"""The README's plot is what its command draws of the first table of docs/measurements/routing.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_plot_shows_the_table(tmp_path: Path) -> None:
    out = tmp_path / "plot.svg"
    environment = {**os.environ, "BLOCKCAST_NO_VENV": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "plot_policies"), str(out)]
    subprocess.run(command, check=True, env=environment)
    drawn = out.read_text()
    assert drawn.count("<rect") > 10
    assert drawn == (ROOT / "docs" / "pictures" / "ttft-by-policy.svg").read_text(), "run scripts/plot_policies"
