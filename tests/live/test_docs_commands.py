"""Every command of README.md and docs/ is run, as it is written but for ports and for how long it lasts.

A `bash` or `console` block is taken line by line. Servers are started for real and stay up for the rest of the page;
their ports are mapped to free ones. A command that this file does not know how to run fails the test: teach it here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
URL = re.compile(r"http://(?:127\.0\.0\.1|localhost):(\d+)")
READY_S_MAX = 90.0
WATCH_S = "12"
"""How long a command that never ends by itself is watched: more than a busy machine needs to start it."""

pytestmark = pytest.mark.live


def commands(page: Path) -> Iterator[str]:
    """The page's commands in order: prompts, comments and continuations resolved."""
    for kind, block in BLOCK.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            words = shlex.split(line, comments=True)
            if words:
                yield shlex.join(words)


class Session:
    """A terminal of a reader who follows one page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "BLOCKCAST_NO_VENV": "1"}

    def run(self, command: str) -> None:
        words = shlex.split(command)
        program = words[0]
        if words[:2] in (["engine", "serve"], ["router", "run"]) and "--dry-run" not in words:
            self._serve(words)
        elif program == "curl":
            self._check(["curl", "-sS", "--fail-with-body", "--max-time", "60", *self._mapped(words[1:])])
        elif program == "scripts/kv_subscriber":
            self._check(["timeout", "--preserve-status", "-s", "INT", WATCH_S, sys.executable, *self._mapped(words)])
        elif program in ("scripts/make_tiny_model", "engine"):
            start = [sys.executable, "-m", "engine"] if program == "engine" else [sys.executable, str(ROOT / program)]
            self._check([*start, *self._mapped(words[1:])])
        elif program in ("scripts/test", "scripts/check"):  # they run this very test: only that they are sound
            self._check(["bash", "-n", str(ROOT / program)])
        elif program in ("python", "python3") and words[1:3] == ["-m", "pytest"]:
            self._check([sys.executable, "-m", "pytest", "--collect-only", "-q", *words[3:]], ROOT)
        elif program.startswith(("scripts/", "benchmarks/")) or program in ("python", "python3"):
            self._check_options(words[1:] if program.startswith("python") else words)
        elif program == "pip":
            self._check([sys.executable, "-m", "pip", "install", "--help"])
            assert words[1] == "install", command
        elif program == "vllm":
            pytest.skip("a vLLM command: that engine is not installed for the tests")
        else:
            raise AssertionError(f"{command!r}: this test does not know how to run it")

    def close(self) -> None:
        for server in reversed(self._servers):
            server.terminate()
        for server in self._servers:
            server.wait(30)

    def _serve(self, words: list[str]) -> None:
        """Start the server on a free port and remember it under the port that the page names."""
        named = (
            words[words.index("--port") + 1] if "--port" in words else {"engine": "8000", "router": "8080"}[words[0]]
        )
        if "--port" in words:
            at = words.index("--port")
            words = words[:at] + words[at + 2 :]
        log = self._folder / f"{words[0]}-{named}.log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", words[0], *self._mapped(words[1:]), "--port", "0"]
            server = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self._environment, cwd=self._folder
            )
        self._servers.append(server)
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline and server.poll() is None:
            if found := re.search(r"http://\S+?:(\d+)", _ready_line(log.read_text())):
                self._ports[named] = found.group(1)
                self._await_workers(words[0], found.group(1))
                return
            time.sleep(0.05)
        raise AssertionError(f"{shlex.join(words)} did not get ready:\n{log.read_text()}")

    def _await_workers(self, program: str, port: str) -> None:
        deadline = time.monotonic() + READY_S_MAX
        while program == "router" and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)

    def _mapped(self, words: list[str]) -> list[str]:
        """The words with the page's ports replaced by the real ones; a worker nobody started is started now."""

        def real(match: re.Match[str]) -> str:
            if match.group(1) not in self._ports:
                self._serve(["engine", "serve", "--port", match.group(1)])
            return f"http://127.0.0.1:{self._ports[match.group(1)]}"

        return [URL.sub(real, word) for word in words]

    def _check_options(self, words: list[str]) -> None:
        """A long-running command: its script exists and its --help knows every option that the page uses."""
        script = ROOT / words[0]
        helped = self._check([sys.executable, str(script), "--help"])
        for option in (word.split("=")[0] for word in words[1:] if word.startswith("--")):
            assert option in helped, f"{words[0]} does not know {option}"

    def _check(self, command: list[str], folder: Path | None = None) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environment, cwd=folder or self._folder, timeout=120
        )
        assert done.returncode == 0, f"{shlex.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def _ready_line(log: str) -> str:
    return next((line for line in log.splitlines() if re.search(r"\b(ready|listening)\b", line)), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    session = Session(tmp_path)
    try:
        for command in commands(page):
            session.run(command)
    finally:
        session.close()
