"""Nothing of a program outlives its end, or the end of who asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GUARD = Path(__file__).resolve().parents[2] / "fleet" / "guard.py"
TREE = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), *(open(f"/proc/self/task/{os.getpid()}/children").read().split()), flush=True)
"""
"""A program with two children, one of them in a session of its own, that prints the three ids."""


@contextmanager
def run_guarded(code: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-E", str(GUARD), sys.executable, "-c", TREE + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as guard:
        assert guard.stdout is not None
        pids = [int(pid) for pid in guard.stdout.readline().split()]
        assert len(pids) == 3
        try:
            yield guard, pids
        finally:
            guard.kill()
            for pid in pids:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_s, f"{[pid for pid in pids if is_alive(pid)]} are still there"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("time.sleep(0.1)", 0)]
)
def test_what_a_program_leaves_behind_ends_with_it(code: str, status: int) -> None:
    with run_guarded(code) as (guard, pids):
        assert guard.wait(60) == status
        until_gone(pids)


def test_all_of_it_ends_with_who_asked_for_it() -> None:
    """The pipe closes however that process ends."""
    with run_guarded("time.sleep(600)") as (guard, pids):
        assert all(map(is_alive, pids))
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(60) == 137
        until_gone(pids)


def test_sigterm_is_the_programs_to_answer() -> None:
    code = "import signal\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('set', flush=True)\ntime.sleep(600)"
    with run_guarded(code) as (guard, pids):
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"set\n"
        guard.terminate()
        assert guard.wait(60) == 7
        until_gone(pids)


def test_a_killed_guard_takes_its_program_along() -> None:
    with run_guarded("time.sleep(600)") as (guard, pids):
        guard.kill()
        until_gone(pids[:1])


def test_an_actor_ends_with_its_raylet() -> None:
    """Also while a call of it waits for ever."""
    actor = (
        "import os, time, fleet.guard as g; g.exit_with_parent(0.05); print(os.getpid(), flush=True); time.sleep(600)"
    )
    raylet = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {actor!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", raylet], stdout=subprocess.PIPE, cwd=GUARD.parents[1]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        until_gone([pid])


def test_a_command_that_is_not_there() -> None:
    command = [sys.executable, "-S", "-E", str(GUARD), "/does/not/exist"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert result.returncode != 0
    assert b"/does/not/exist" in result.stderr
