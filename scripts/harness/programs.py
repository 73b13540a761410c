"""Programs as processes: started with their output in a file, awaited, asked over HTTP, ended with their children."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 120.0
VLLM_RANKS = "--data-parallel-size"
READY_PATTERN = r"(?:^ready +|router listening on )(http://\S+)$"
"""What our programs say when they serve; the group is the URL."""
_OPENER_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
P = TypeVar("P", bound="Program")


def exit_on_sigterm() -> None:
    """Let a script that is terminated leave its contexts, in which it ends its programs: they have own sessions."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Program:
    """A process in a session of its own; as a context it ends with the block, also when the script is terminated."""

    def __init__(
        self, command: list[str], log: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.command, self.log, self._working_directory = command, log, cwd or ROOT
        self._env = {**os.environ, **(env or {})}
        exit_on_sigterm()
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._working_directory,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def await_line(self, pattern: str = READY_PATTERN, seconds: float = START_S_MAX) -> str:
        """The first group of `pattern`, once a line of the log has it. RuntimeError with the log's end if not."""
        compiled_pattern = re.compile(pattern, re.MULTILINE)
        match = self._poll_until(lambda: compiled_pattern.search(self.read_log()), f"a line like {pattern}", seconds)
        return str(match[1]) if compiled_pattern.groups else str(match[0])

    def await_url(self, url: str, seconds: float = START_S_MAX) -> None:
        """Until it answers 200."""
        self._poll_until(lambda: request_json(url, timeout_s=2)[0] == 200, f"200 from {url}", seconds)

    def _poll_until(self, probe: Callable[[], Any], condition: str, seconds: float) -> Any:
        end_s = time.monotonic() + seconds
        while not (result := probe()):
            if self.process.poll() is not None or time.monotonic() > end_s:
                state = f"ended with status {self.process.poll()}" if self.process.poll() is not None else "runs"
                raise RuntimeError(
                    f"{' '.join(self.command[:4])} {state} without {condition}:\n{self.read_log()[-3000:]}"
                )
            time.sleep(0.02)
        return result

    def kill(self) -> None:
        """SIGKILL, its children too: nothing is said to anybody."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = 15.0) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command of a program of this checkout."""
    return [sys.executable, "-m", module, *arguments]


def serve_engine(log: Path, *args: str, env: Mapping[str, str] | None = None) -> Program:
    return Program(module_command("engine", "serve", *args), log, env=env)


def free_port() -> int:
    """Return a TCP port that nobody listens on.

    It is none of those that the system gives to outgoing connections, which could take it before a slow program binds.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port was found")


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row: data-parallel rank r publishes at port + r."""
    for _ in range(100):
        first = free_port()
        try:
            for port in range(first + 1, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError(f"no {count} free ports in a row")


def vllm_rank_count(command: list[str]) -> int:
    return int(command[command.index(VLLM_RANKS) + 1]) if VLLM_RANKS in command else 1


def vllm_command(command: list[str]) -> tuple[list[str], str, int]:
    """A `vllm serve` with a port and events: the whole command, its URL, and where rank 0 publishes."""
    rank_count = vllm_rank_count(command)
    port, events_port, replay_port = free_port(), free_ports(rank_count), free_ports(rank_count)
    config = {"enable_kv_cache_events": True, "publisher": "zmq"}
    config |= {"endpoint": f"tcp://*:{events_port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    full_command = [*command, "--port", str(port), "--kv-events-config", json.dumps(config)]
    return full_command, f"http://127.0.0.1:{port}", events_port


ADMIN_KEY = os.environ.setdefault("ROUTER_ADMIN_API_KEY", secrets.token_hex(16))
"""Of every router that is started from here."""
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


def request_json(
    url: str, body: Any = None, method: str | None = None, *, timeout_s: float = 20.0, headers: Mapping[str, str] = {}
) -> tuple[int, Any]:
    """(status, JSON or text); status 0 if nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request_headers = {"Content-Type": "application/json", **({} if "/v1/" in url else ADMIN_HEADERS), **headers}
    request = urllib.request.Request(url, data, request_headers, method=method)
    try:
        with _OPENER_WITHOUT_PROXY.open(request, timeout=timeout_s) as response:
            return response.status, _parse_body(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parse_body(error.read())
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)  # the second: a port where nobody listens may have connected to itself


def _parse_body(content: bytes) -> Any:
    try:
        return json.loads(content or b"null")
    except ValueError:
        return content.decode(errors="replace")


def read_metric(url: str, name: str) -> float:
    """The sum of a metric's samples on the router's page; of all its labels unless the name has some. 0: none there."""
    metrics_text = str(request_json(f"{url}/metrics")[1])
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", metrics_text, re.MULTILINE)))


def wait_until(probe: Callable[[], Any], seconds: float, interval_s: float = 0.05) -> Any:
    """The first true answer of `probe`, or its last false one."""
    end_s = time.monotonic() + seconds
    while True:
        result = probe()
        if result or time.monotonic() > end_s:
            return result
        time.sleep(interval_s)


class Cluster:
    """`engine serve` workers and one `router run`: on entry all of them answer, on exit all are stopped."""

    model_name = "demo"

    def __init__(
        self,
        model: Path,
        *,
        policy: str,
        num_blocks: int | None,
        log_dir: Path,
        worker_count: int = 2,
        engine_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
    ) -> None:
        self._model, self._policy, self._log_dir = model, policy, log_dir
        self._worker_count, self._router_flags = worker_count, router_flags
        self._flags = ("--num-gpu-blocks-override", str(num_blocks)) if num_blocks else ()
        self._flags += tuple(engine_flags)
        self._programs: list[Program] = []
        self.worker_urls: list[str] = []
        self.url = ""
        self.router_log = log_dir / f"router-{time.time_ns()}.log"

    def __enter__(self) -> Cluster:
        flags = ("--served-model-name", self.model_name, "--port", "0", "--dtype", "bfloat16", *self._flags)
        try:
            self._programs = [
                serve_engine(self._log_dir / f"{self._policy}-worker-{time.time_ns()}.log", str(self._model), *flags)
                for _ in range(self._worker_count)
            ]
            self.worker_urls = [worker.await_line() for worker in self._programs]
            router_flags = ("--port", "0", "--policy", self._policy, *self._router_flags)
            command = module_command("router", "run", *self.worker_urls, *router_flags)
            self._programs.append(Program(command, self.router_log))
            self.url = self._programs[-1].await_line()
            self._programs[-1].await_url(f"{self.url}/health")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for program in reversed(self._programs):
            program.stop()

    def wait(self) -> None:
        """Until Ctrl-C, or until one of the processes ends."""
        with contextlib.suppress(KeyboardInterrupt):
            while all(program.process.poll() is None for program in self._programs):
                time.sleep(0.5)


def make_demo_model(family: str) -> Path:
    """The seeded random checkpoint of the demo, large enough that prefill costs something; made once a machine."""
    from engine.tiny.model import PRESETS, cached_model

    return cached_model(replace(PRESETS["demo"], family=family))
