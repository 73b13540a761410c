"""The demo's processes: two `engine serve` workers and one `router run`, started, watched, stopped."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType

READY_S_MAX = 120


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_demo_model(family: str) -> Path:
    """The seeded random checkpoint the demo serves, large enough that prefill costs something; made once a machine."""
    from engine.tiny.model import cached_model, with_overrides

    return cached_model(with_overrides("demo", family=family))


class Cluster:
    """Context manager: on entry both workers and the router answer; on exit all are stopped."""

    def __init__(self, model: Path, *, policy: str, num_blocks: int | None, log_dir: Path, workers: int = 2) -> None:
        self.model, self.policy, self.num_blocks, self.log_dir = model, policy, num_blocks, log_dir
        self.model_name = "demo"
        self.worker_urls = [f"http://127.0.0.1:{free_port()}" for _ in range(workers)]
        self.url = f"http://127.0.0.1:{free_port()}"
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Cluster:
        try:
            for index, url in enumerate(self.worker_urls):
                blocks = ["--num-gpu-blocks-override", str(self.num_blocks)] if self.num_blocks else []
                port = url.rsplit(":", 1)[1]
                args = ["serve", str(self.model), "--served-model-name", self.model_name, "--port", port]
                self._start(f"worker-{index}", "engine", [*args, "--host", "127.0.0.1", "--dtype", "bfloat16", *blocks])
            for url in self.worker_urls:
                self._await(url + "/health")
            port = self.url.rsplit(":", 1)[1]
            self._start("router", "router", ["run", *self.worker_urls, "--port", port, "--policy", self.policy])
            self._await(self.url + "/health")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def curl_line(self) -> str:
        body = {"model": self.model_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        return f"curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"

    def wait(self) -> None:
        """Until Ctrl-C, or until one of the processes ends."""
        with contextlib.suppress(KeyboardInterrupt):
            while all(process.poll() is None for _, process in self._processes):
                time.sleep(0.5)

    def _start(self, name: str, program: str, args: list[str]) -> None:
        log = (self.log_dir / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen([sys.executable, "-m", program, *args], stdout=log, stderr=subprocess.STDOUT)
        self._processes.append((name, process))

    def _await(self, health_url: str) -> None:
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline:
            for name, process in self._processes:
                if process.poll() is not None:
                    log = (self.log_dir / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{name} ended with status {process.returncode}:\n{log}")
            with contextlib.suppress(OSError), urllib.request.urlopen(health_url, timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{health_url} did not answer within {READY_S_MAX} s; logs in {self.log_dir}")

    def _stop(self) -> None:
        for _, process in reversed(self._processes):
            process.terminate()
        for _, process in self._processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
