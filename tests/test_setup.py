"""The scripts' set-up where it fails: the failing program's words, then what to try, and never our traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "scripts").exists(), reason="stands beside the sources only")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """So much of one that its set-up begins."""
    (tmp_path / "scripts").mkdir()
    for name in ("_setup", "_env.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts" / "any").write_text("import _env\nprint('ran')\n")
    return tmp_path


def start(clone: Path, path: str = os.environ["PATH"], **environment: str) -> str:
    """All that it says; it has to fail."""
    environment = {"PATH": path, "HOME": str(clone), **environment}
    command = [sys.executable, str(clone / "scripts" / "any")]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stdout
    assert "ran" not in result.stdout.splitlines()
    return result.stdout


def program(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def test_pip_that_fails_is_quoted_and_what_to_try_is_said(clone: Path) -> None:
    program(clone / ".venv/bin/pip", "exit 0")
    program(clone / ".venv/bin/python", "echo 'ERROR: No matching distribution found for torch' >&2; exit 1")
    output = start(clone)
    assert "ERROR: No matching distribution found for torch" in output
    assert "'pip install torch' failed; its own words are above. Try: is the package registry reachable" in output


def test_no_python_that_will_do(clone: Path) -> None:
    for name in ("bash", "cat", "cksum", "dirname"):
        (clone / "bin").mkdir(exist_ok=True)
        (clone / "bin" / name).symlink_to(shutil.which(name) or "")
    program(clone / "bin" / "python3", "exit 1")  # as an old one answers
    output = start(clone, str(clone / "bin"))
    assert output.endswith("blockcast: no Python >= 3.10 found; set PYTHON to one\n")


def test_an_environment_that_cannot_be_made(clone: Path) -> None:
    program(clone / "full", 'case "$1" in -c) exit 0;; esac; echo "No space left on device" >&2; exit 1')
    output = start(clone, PYTHON=str(clone / "full"))
    assert "No space left on device" in output
    assert f"'{clone}/full -m venv .venv' failed; its own words are above" in output
