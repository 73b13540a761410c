"""The routers that scripts/event_faults can drive: started, given two workers, asked where a prompt goes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

from harness.peers import peer_program
from harness.programs import Program, await_true, call, free_port, ours
from harness.workers import FakeWorker

START_S_MAX = 60.0


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
    """`router run`; workers come and go through its admin API."""

    name = "blockcast"
    explains = True
    settle_s = 0.0
    notes: dict[str, str] = {}

    def __init__(self, *args: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = ours("router", "run", "--port", "0", "--log-level", "error", *args)
        self._program = Program(command, Path(self._folder.name) / "router.log")
        self.url = self._program.await_line()

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
        self._program.stop()
        self._folder.cleanup()


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

    def __init__(self) -> None:
        self._binary = str(peer_program("vllm-router"))
        self._folder = tempfile.TemporaryDirectory()
        self._programs: dict[int, Program] = {}

    def attach(self, workers: list[FakeWorker]) -> str:
        port = free_port()
        command = [self._binary, "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware",
                   "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
                   "--health-check-interval-secs", "1", "--worker-urls", *(worker.url for worker in workers),
                   # Over HTTP it wants model, block size and sources from the operator, the same for all workers.
                   "--kv-event-model", workers[0].model,
                   "--kv-event-block-size", str(workers[0].block_size)]  # fmt: skip
        for worker in workers:
            command += ["--kv-event-source", f"{worker.url}={worker.publisher.endpoint}"]
            if worker.publisher.replay_endpoint is not None:
                command += ["--kv-event-replay-source", f"{worker.url}={worker.publisher.replay_endpoint}"]
        program = Program(command, Path(self._folder.name) / f"{port}.log")
        self._programs[workers[0].port] = program
        program.await_url(f"http://127.0.0.1:{port}/health", START_S_MAX)
        return f"http://127.0.0.1:{port}"

    def predicted(self, url: str, body: dict[str, Any]) -> dict[int, int] | None:
        return None

    def detach(self, workers: list[FakeWorker]) -> None:
        self._programs.pop(workers[0].port).stop()

    def close(self) -> None:
        self._folder.cleanup()
