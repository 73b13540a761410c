"""benchmarks/step_host.py runs on every kind of device, and says what it did not measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_parts_of_a_step(tmp_path: Path, device: str) -> None:
    target = tmp_path / "host.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "step_host.py"), "--shape", "tiny", "--device", device]
    command += ["--rounds", "3", "--device-ms", "3", "--cases", "3x64", "2x64p", "--json", str(target)]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr
    plain, penalised_case = json.loads(target.read_text())["cases"]
    assert {"plan", "tables", "launch", "sampling inputs", "read-back", "apply"} <= set(plain["parts_ms"])
    assert "penalties" in penalised_case["parts_ms"]
    assert "penalties" not in plain["parts_ms"]
