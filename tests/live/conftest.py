"""Real programs as processes for the live tests."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_TIMEOUT_S = 120.0


class EngineProcess:
    """`engine serve` on a port of its own; `url` once it is ready."""

    def __init__(self, log: Path, *args: str) -> None:
        self._log = log
        self._file = log.open("wb")
        command = [sys.executable, "-m", "engine", "serve", *args, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT)
        self.url = ""

    def await_ready(self) -> EngineProcess:
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            found = re.search(r"^ready +(http://\S+)$", self.log(), re.MULTILINE)
            if found:
                self.url = found.group(1)
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"engine serve did not get ready (status {self.process.poll()}):\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def core_pid(self) -> int:
        """The process id of the step loop."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (core,) = (int(child) for child in children)
        return core

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Start `engine serve` with the given flags; stopped at the end of the test."""
    started: list[EngineProcess] = []

    def start(*args: str, wait: bool = True) -> EngineProcess:
        engine = EngineProcess(tmp_path / f"engine-{len(started)}.log", *args)
        started.append(engine)
        return engine.await_ready() if wait else engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One `engine serve` with the built-in model, shared by the tests of a module."""
    engine = EngineProcess(tmp_path_factory.mktemp("engine") / "engine.log", "--max-model-len", "2048")
    try:
        yield engine.await_ready()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two `engine serve` with the built-in model, called m, shared by the tests of a module."""
    folder = tmp_path_factory.mktemp("engines")
    started = [EngineProcess(folder / f"engine-{i}.log", "--served-model-name", "m") for i in range(2)]
    try:
        yield [engine.await_ready() for engine in started]
    finally:
        for engine in started:
            engine.close()
