"""The routers that scripts/event_faults can drive: started, given two workers, asked where a prompt goes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from event_faults_worker import FakeWorker

START_S_MAX = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: Any = None, method: str | None = None, timeout_s: float = 20.0) -> tuple[int, Any]:
    """(status, JSON); status 0 where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _DIRECT.open(request, timeout=timeout_s) as answer:
            return answer.status, _json(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json(error.read())
    except OSError as error:
        return 0, str(error)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw or b"null")
    except ValueError:
        return raw.decode(errors="replace")


def await_true(probe: Any, seconds: float, every_s: float = 0.05) -> Any:
    """The first true answer of `probe`, or its last false one."""
    end_s = time.monotonic() + seconds
    while True:
        found = probe()
        if found or time.monotonic() > end_s:
            return found
        time.sleep(every_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Router(Protocol):
    """A router under test. `attach` gives it exactly these workers."""

    name: str
    explains: bool
    """Whether `predicted` tells anything."""
    settle_s: float
    """How long to wait until events have surely been applied, where the router cannot be asked."""
    notes: dict[str, str]
    """Case -> what a reader must know to judge this router's row."""

    def attach(self, workers: list[FakeWorker]) -> str:
        """The URL under which these workers are served now. Raises RuntimeError where they are not taken in."""

    def predicted(self, url: str, body: dict[str, Any]) -> dict[int, int] | None:
        """Port of a worker -> tokens of the prompt the router believes it has cached; None: it does not tell."""

    def detach(self, workers: list[FakeWorker]) -> None: ...

    def close(self) -> None: ...


class Ours:
    """`router run`, started here or running already; workers come and go through its admin API."""

    name = "blockcast"
    explains = True
    settle_s = 0.0
    notes: dict[str, str] = {}

    def __init__(self, url: str | None = None, args: tuple[str, ...] = ()) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if url is None:
            command = [sys.executable, "-m", "router", "run", "--port", "0", "--log-level", "error", *args]
            root = str(Path(__file__).resolve().parent.parent)
            environment = {**os.environ, "PYTHONPATH": root}
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=environment)
            assert self._process.stdout is not None
            line = self._process.stdout.readline().decode()
            found = re.search(r"http://\S+", line)
            if found is None:
                raise RuntimeError(f"the router did not start: {line!r}")
            url = found.group()
        self.url = url.rstrip("/")

    def attach(self, workers: list[FakeWorker]) -> str:
        for worker in workers:
            status, answer = call(f"{self.url}/workers", {"url": worker.url})
            if status != 201:
                raise RuntimeError(f"POST /workers answers {status}: {answer}")
        ids = {f"127.0.0.1:{worker.port}" for worker in workers}

        def following() -> bool:
            rows = {row["worker_id"]: row for row in call(f"{self.url}/workers")[1]["workers"]}
            return ids <= rows.keys() and all(
                rows[i]["state"] == "up" and all(s["up"] and s["phase"] == "live" for s in rows[i]["events"]["streams"])
                for i in ids
            )

        if not await_true(following, START_S_MAX):
            raise RuntimeError(f"workers not followed: {call(f'{self.url}/workers')[1]}")
        return self.url

    def predicted(self, url: str, body: dict[str, Any]) -> dict[int, int] | None:
        status, answer = call(f"{url}/route", body)
        if status != 200:
            return None
        return {int(row["worker"].rpartition(":")[2]): row["cached_tokens"] for row in answer["candidates"]}

    def detach(self, workers: list[FakeWorker]) -> None:
        for worker in workers:
            call(f"{self.url}/workers/127.0.0.1:{worker.port}", method="DELETE")

    def close(self) -> None:
        if self._process is not None:
            _stop(self._process)


class VllmRouter:
    """The Rust vllm-router with the policy kv_aware; a process a case, since it cannot be given other workers."""

    name = "vllm-router"
    explains = False
    settle_s = 1.5
    notes = {
        "workers with different block sizes": "over HTTP it takes one --kv-event-block-size for all workers",
        "blocks of a LoRA and a request for it": "over HTTP it takes one --kv-event-model for all workers",
        "a late join with a snapshot": "snapshots are an extension of ours that no vLLM offers",
    }

    def __init__(self, venv: Path) -> None:
        self._program = venv / "bin" / "vllm-router"
        if not self._program.exists():
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            subprocess.run([*pip, "vllm-router"], check=True)
        show = [str(venv / "bin" / "python"), "-c", "import importlib.metadata as m; print(m.version('vllm-router'))"]
        self.version = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
        self.name = f"vllm-router {self.version}"
        self._processes: dict[int, tuple[subprocess.Popen[bytes], Any]] = {}

    def attach(self, workers: list[FakeWorker]) -> str:
        port = free_port()
        command = [str(self._program), "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware",
                   "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
                   "--health-check-interval-secs", "1", "--worker-urls", *(worker.url for worker in workers),
                   # Over HTTP it wants model, block size and sources from the operator, the same for all workers.
                   "--kv-event-model", workers[0].model,
                   "--kv-event-block-size", str(workers[0].block_size)]  # fmt: skip
        for worker in workers:
            command += ["--kv-event-source", f"{worker.url}={worker.publisher.endpoint}"]
            if worker.publisher.replay_endpoint is not None:
                command += ["--kv-event-replay-source", f"{worker.url}={worker.publisher.replay_endpoint}"]
        log = open(os.environ.get("EVENT_FAULTS_LOG", os.devnull), "ab")  # noqa: SIM115  (closed with the process)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._processes[workers[0].port] = (process, log)
        url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"it ended with status {process.returncode}")
            return call(f"{url}/health", timeout_s=2)[0] == 200

        if not await_true(serves, START_S_MAX, 0.1):
            raise RuntimeError("it does not get healthy")
        return url

    def predicted(self, url: str, body: dict[str, Any]) -> dict[int, int] | None:
        return None

    def detach(self, workers: list[FakeWorker]) -> None:
        process, log = self._processes.pop(workers[0].port)
        _stop(process)
        log.close()

    def close(self) -> None:
        """Every process ended with its case."""


class Running:
    """Any router that runs already before two workers on ports agreed on by hand. The workers outlive the cases."""

    explains = False
    settle_s = 1.5
    notes: dict[str, str] = {}

    def __init__(self, url: str) -> None:
        self.url, self.name = url.rstrip("/"), url

    def attach(self, workers: list[FakeWorker]) -> str:
        return self.url

    def predicted(self, url: str, body: dict[str, Any]) -> dict[int, int] | None:
        return None

    def detach(self, workers: list[FakeWorker]) -> None:
        """It keeps its workers."""

    def close(self) -> None:
        """Not ours to end."""


def is_ours(url: str) -> bool:
    status, answer = call(f"{url.rstrip('/')}/workers")
    return status == 200 and isinstance(answer, dict) and "in_flight" in answer


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
