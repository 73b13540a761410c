"""Real programs as processes for the live tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from programs import Program


class EngineProcess(Program):
    """`engine serve`."""

    def __init__(self, log: Path, *args: str) -> None:
        super().__init__(log, "engine", "serve", *args, "--port", "0")

    def core_pid(self) -> int:
        """The process id of the step loop."""
        (core,) = self.children()
        return core


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Start `engine serve` with the given flags; stopped at the end of the test."""
    processes: list[EngineProcess] = []

    def start(*args: str, wait: bool = True) -> EngineProcess:
        engine = EngineProcess(tmp_path / f"engine-{len(processes)}.log", *args)
        processes.append(engine)
        return engine.await_ready() if wait else engine

    yield start
    for engine in processes:
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
    processes = [EngineProcess(folder / f"engine-{i}.log", "--served-model-name", "m") for i in range(2)]
    try:
        yield [engine.await_ready() for engine in processes]
    finally:
        for engine in processes:
            engine.close()
