"""Processes for large bodies: a call that is given up leaves no process, and no result for another call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prompts import process_pool
from prompts.process_pool import ProcessPool, WorkerProcessError


def begin() -> str:
    return "begun"


def get_pid(_: str, name: str) -> tuple[str, int]:
    return name, os.getpid()


def test_a_call_that_is_given_up_before_its_process_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was not there when it was to be killed, so it started afterwards, for the next call to read from."""
    start_child, children = process_pool.start_child, []

    def start_slowly(module: str, *numbers: int) -> Any:
        time.sleep(0.3)
        child, sock = start_child(module, *numbers)
        children.append(child)
        return child, sock

    monkeypatch.setattr(process_pool, "start_child", start_slowly)

    async def run() -> None:
        pool = ProcessPool((begin, ()), 2, 4 << 30)
        async with pool.acquire():
            with pytest.raises(WorkerProcessError, match=r"not done within 0\.05 s"):
                async with pool.acquire() as process:
                    await process.call(0.05, get_pid, "first")
            async with pool.acquire() as process:
                name, pid = await process.call(60.0, get_pid, "second")
            assert name == "second"
            assert [child.pid for child in children if child.poll() is None] == [pid]
        pool.close()
        assert all(child.poll() is not None for child in children)

    asyncio.run(asyncio.wait_for(run(), 120))


def end_process(_: str) -> None:
    os._exit(1)


def test_the_socket_of_a_process_that_ended_by_itself_is_closed_without_the_garbage_collector() -> None:
    """Bodies that need too much memory end processes, each of which left a socket open."""

    async def run() -> None:
        pool = ProcessPool((begin, ()), 1, 4 << 30)
        files_before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(WorkerProcessError, match="EOFError"):
                async with pool.acquire() as process:
                    await process.call(60.0, end_process)
        assert len(os.listdir("/proc/self/fd")) == files_before
        pool.close()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        gc.enable()


SERVER = """
import asyncio
from prompts.process_pool import ProcessPool
from templates_without_end import begin, never_end

async def main():
    async with ProcessPool((begin, ()), 1, 4 << 30).acquire() as process:
        await process.call(60.0, repr)  # its start may take longer than the task
        await process.call(1.0, never_end)

asyncio.run(main())
"""
TASKS = """
import os

def begin():
    return None

def never_end(_):
    print(os.getpid(), flush=True)
    while True:
        pass
"""


def test_a_task_without_an_end_does_not_outlive_a_server_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "templates_without_end.py").write_text(TASKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        process_fd = os.pidfd_open(pid)
        server.kill()
    try:
        has_ended, _, _ = select.select([process_fd], [], [], 120.0)
        assert has_ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(process_fd)
