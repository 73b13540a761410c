"""The commands of docs/get-started/ray.md run on this machine: `pytest -m slow tests/live/test_docs_fleet.py`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(1800)]


def test_the_commands_of_the_page() -> None:
    folder = Path(mkdtemp(prefix="bcray"))  # pytest's own is too long for the names of Ray's sockets
    part = (ROOT / "docs" / "get-started" / "ray.md").read_text()
    commands = part.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 11
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "RAY_raylet_start_wait_time_s": "180", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    outputs = {}
    try:
        for command in commands:
            words = shlex.split(command)
            if words[:2] in (["pip", "install"], ["ray", "stop"]):
                continue  # the first was; the last would end others' clusters on this machine too
            if words[:2] == ["ray", "start"]:
                words += ["--port", "6411", "--temp-dir", str(folder), "--dashboard-port", "8265"]
                environment["RAY_ADDRESS"] = "127.0.0.1:6411"
            elif words[0] == "fleet":
                words = [sys.executable, "-m", *words]
            elif words[0] == "curl":
                words += ["-sS", "--fail-with-body"]
            process = subprocess.run(
                words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
            )
            assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
            outputs[" ".join(shlex.split(command)[:2])] = process.stdout
    finally:
        subprocess.run([sys.executable, "-m", "fleet", "down", "--now"], env=environment, check=False, timeout=300)
        end_cluster(folder)
        shutil.rmtree(folder, ignore_errors=True)
    assert outputs["fleet up"].split() == ["http://127.0.0.1:8080", "http://127.0.0.1:8081"]
    assert "2 engines, 2 routers, settled" in outputs["fleet status"]
    assert ":8090" in outputs["ray job"]


def end_cluster(folder: Path) -> None:
    """Ray's processes of this test alone: those whose command line names its folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), 9)
            except OSError:
                continue
