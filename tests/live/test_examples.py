"""The examples run as their first lines say."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Program, call, wait_until

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import free_port

from events import StreamSource, Subscriber
from events.subscriber import Message

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.live, pytest.mark.long]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        program.terminate()
        program.communicate()


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent)


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [file.name for file in EXAMPLES.glob("*.py") if f'"{file.name}"' not in text] == []


def test_the_policy_of_ones_own_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    assert (EXAMPLES / "own_policy.py").exists()
    with contextlib.ExitStack() as stack:

        def run(name: str, *arguments: str) -> str:
            program = Program(tmp_path / f"{name}.log", *arguments)
            stack.callback(program.close)
            return program.await_ready().url

        engines = [run(f"engine-{number}", "engine", "serve", "--port", "0") for number in range(2)]
        router = run("router", "router", "run", *engines, "--port", "0", "--policy-function", "own_policy:choose")
        wait_until(lambda: call(f"{router}/health")[0] == 200, "a worker is up")
        body = {"prompt": "word " * 200, "max_tokens": 2}
        workers = set()
        for _ in range(4):  # the price would go there too, round robin would not
            status, headers, _ = call(f"{router}/v1/completions", body)
            assert status == 200
            workers.add(headers["x-blockcast-worker"])
        assert len(workers) == 1
        assert "policy own_policy:choose, listening" in (tmp_path / "router.log").read_text()


def test_offline_generation_reuses_the_shared_beginning() -> None:
    program = start("generate_offline.py")
    output, complaints = program.communicate(timeout=120)
    assert program.returncode == 0, complaints
    cached_tokens = [int(line.split()[0]) for line in output.splitlines() if "prompt tokens were cached" in line]
    assert len(cached_tokens) == 2
    assert cached_tokens[0] == 0
    assert cached_tokens[1] > 100


def test_published_events_reach_a_subscriber(processes: list[subprocess.Popen[str]]) -> None:
    endpoint = f"tcp://*:{free_port()}"
    processes.append(start("publish_events.py", endpoint))
    event_types: set[str] = set()
    with Subscriber([StreamSource("example", endpoint.replace("*", "127.0.0.1"), None)]) as subscriber:

        def all_seen() -> bool:
            item = subscriber.get(timeout_s=1.0)
            if isinstance(item, Message):
                event_types.update(type(event).__name__ for event in item.decoded_batch.batch.events)
            return event_types == {"BlockStored", "BlockRemoved"}

        wait_until(all_seen, lambda: f"only {event_types}", 60)


def test_a_subscriber_counts_the_blocks_of_an_engine(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    engine = Program(tmp_path / "engine.log", "engine", "serve", "--port", "0").await_ready()
    try:
        subscriber = start("subscribe.py", engine.url)
        processes.append(subscriber)
        assert subscriber.stdout is not None
        assert "up=True" in subscriber.stdout.readline()
        body = {"prompt": "word " * 200, "max_tokens": 4}
        assert call(f"{engine.url}/v1/completions", body)[0] == 200
        line = subscriber.stdout.readline()
        while "holds 0 blocks" in line or "blocks" not in line:
            line = subscriber.stdout.readline()
        assert int(line.split("holds ")[1].split()[0]) >= 12
    finally:
        engine.close()
