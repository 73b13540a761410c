"""Our programs as processes, and what the live tests ask of them over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

START_S_MAX = 120.0
ADMIN_KEY = os.environ.setdefault("ROUTER_ADMIN_API_KEY", "the tests' own")
"""Of every router that the tests start."""
T = TypeVar("T", bound="Program")


def wait_until(probe: Callable[[], Any], description: Callable[[], object] | str, seconds: float = 30.0) -> Any:
    """The first true answer of `probe`; after so long without one, a failure that says `what`."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        value = probe()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {description if isinstance(description, str) else description()}")


def call(url: str, body: Any = None, method: str | None = None) -> tuple[int, dict[str, str], Any]:
    """(status, headers, JSON body)."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    admin = {} if "/v1/" in url else {"Authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **admin}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.loads(error.read() or b"null")


class Program:
    """`engine ...` or `router ...` on a port of its own; `url` once its log tells."""

    def __init__(self, log: Path, *args: str) -> None:
        self._log = log
        self._file = log.open("wb")
        self.args = args
        self.process = subprocess.Popen([sys.executable, "-m", *args], stdout=self._file, stderr=subprocess.STDOUT)
        self.url = ""

    def await_ready(self: T) -> T:
        def address() -> str | None:
            assert self.process.poll() is None, f"{self.args} ended:\n{self.log()}"
            match = re.search(r"^(?:ready +|router listening on )(https?://\S+)$", self.log(), re.MULTILINE)
            return match.group(1) if match else None

        self.url = wait_until(address, lambda: f"{self.args} is ready:\n{self.log()}", START_S_MAX)
        return self

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Process ids."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


@contextlib.contextmanager
def two_engines_and_a_router(
    folder: Path, *engine: str, router_flags: Sequence[str] = ()
) -> Iterator[tuple[list[Program], Program]]:
    """Two of `engine`, a command, and a router before them that sends them requests; logs in the folder."""
    programs: list[Program] = []
    try:
        for i in range(2):
            programs.append(Program(folder / f"e{i}.log", *engine))
        engines = list(programs)
        urls = [started_engine.await_ready().url for started_engine in engines]
        router = Program(folder / "router.log", "router", "run", "--port", "0", *router_flags, *urls)
        programs.append(router)
        router.await_ready()
        wait_until(
            lambda: [w["state"] for w in call(router.url + "/workers")[2]["workers"]] == ["up"] * 2, "two workers"
        )
        yield engines, router
    finally:
        for program in programs:
            program.close()
