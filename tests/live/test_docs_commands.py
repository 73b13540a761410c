"""Every command of README.md and docs/ is run, as it is written but for addresses and for how long it lasts.

A `bash` or `console` block, or one without a language that begins with a program, is taken command by command. Servers
are started for real and stay up for the rest of the page; their ports are mapped to free ones, and a worker that the
page has running already (`gpu1:8000`) is one of ours. Of another engine's command what it publishes is read. A command
that this file does not know how to run fails the test: teach it here. A block of TOML or Python that begins with
`# NAME` is that file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from events import KVEventsConfig
from fleet.cli import cli as fleet
from router.fleet.worker_stream import STREAM_COUNTERS

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import free_ports
from real_envoy import CONFIGURATION, configuration, envoy_program, start_envoy

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"(\w+=\S+ )*(engine|router|fleet|ray|kv_subscriber|curl|envoy|kubectl|pip|pytest|python3?|vllm|"
    r"(scripts|benchmarks|\S+/bin)/\S+) "
)
URL = re.compile(r"http://(?:127\.0\.0\.1|localhost|(gpu\d)):(\d+)")
WORKER_ID = re.compile(r"(?<=/workers/)127\.0\.0\.1:(\d+)")
ENDPOINT = re.compile(r"tcp://(gpu\d):(\d+)")
REPLAY_PORT = "5657"
"""As the pages have it; the other port of a worker is where it publishes."""
READY_S_MAX = 90.0
WATCH_S = "12"
"""How long a command that never ends by itself is watched: more than a busy machine needs to start it."""

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of the page's commands in order: prompts, comments and continuations resolved, `&&` taken apart."""
    for kind, block in BLOCK.findall(page.read_text()):
        if kind not in ("bash", "console") and (kind or not PROGRAM.match(block)):
            continue
        lines = block.replace("\\\n", " ").splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        text = ""
        for line in lines:
            text += line
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # the rest of a quoted text is on the next line
                continue
            text = ""
            for command in _split(words, "&&"):
                (first, *_) = _split(command, "|")
                yield [word for at, word in enumerate(first) if at or re.match(r"\w+=", word) is None]
        assert not text, f"{page.name}: a quotation without an end: {text!r}"


def _split(words: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


class Session:
    """A terminal of a reader who follows one page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "BLOCKCAST_NO_VENV": "1"}
        self._environment["ROUTER_ADMIN_API_KEY"] = "KEY"  # as the pages write it

    def run(self, words: list[str]) -> None:
        program = words[0] if words[0].startswith(("scripts/", "benchmarks/")) else words[0].rpartition("/")[2]
        serves = words[:2] in (["engine", "serve"], ["router", "run"], ["router", "shadow"])
        if serves and "--dry-run" not in words and "--log" not in words:
            self._serve(words)
        elif words[:2] == ["router", "epp"]:
            self._serve_picker(words)
        elif program == "envoy":
            self._serve_envoy(words)
        elif program == "fleet":  # run for real by test_docs_fleet.py
            (name, *arguments) = words[1:]
            fleet.commands[name].make_context(name, arguments)
        elif program == "ray":
            assert words[1] in ("start", "stop", "job"), words
        elif words[:3] == ["kubectl", "apply", "-f"]:
            assert list(yaml.safe_load_all((ROOT / words[3]).read_text()))
        elif program == "curl":
            self.run_curl(words[1:])
        elif program == "kv_subscriber":
            command = [sys.executable, "-m", "events.kv_subscriber", *self._map_words(words[1:])]
            self._check(["timeout", "--preserve-status", "-s", "INT", WATCH_S, *command])
        elif program in ("scripts/make_tiny_model", "engine", "router"):
            start = (
                [sys.executable, "-m", program]
                if program in ("engine", "router")
                else [sys.executable, str(ROOT / program)]
            )
            self._check([*start, *self._map_words(words[1:])])
        elif program in ("scripts/test", "scripts/check"):  # they run this very test: only that they are sound
            self._check(["bash", "-n", str(ROOT / program)])
        elif program == "pytest" or (program.startswith("python") and words[1:3] == ["-m", "pytest"]):
            arguments = words[1 if program == "pytest" else 3 :]
            self._check([sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments], ROOT)
        elif program == "vllm" or words[1:3] == ["-m", "sglang.launch_server"]:
            _check_events_config(words)
        elif program == "pip" or words[1:3] == ["-m", "venv"]:
            assert program != "pip" or words[1] == "install", words
            self._check([sys.executable, "-m", "pip" if program == "pip" else "venv", "--help"])
        elif program == "openssl":
            self._check(words)
        elif program.startswith(("scripts/", "benchmarks/", "python")):
            self._check_options(words[1:] if program.startswith("python") else words)
        else:
            raise AssertionError(f"{shlex.join(words)!r}: this test does not know how to run it")

    def run_curl(self, words: list[str]) -> str:
        """Return the body of the answer."""
        return self._check(["curl", "-sS", "--fail-with-body", "--max-time", "60", *self._map_words(words)])

    def close(self) -> None:
        for server in reversed(self._servers):
            server.terminate()
        for server in self._servers:
            server.wait(30)

    def _serve(self, words: list[str]) -> None:
        """Start the server on a free port and remember it under the port that the page names."""
        flag_values = (
            words[words.index("--port") + 1] if "--port" in words else {"engine": "8000", "router": "8080"}[words[0]]
        )
        if "--port" in words:
            at = words.index("--port")
            words = words[:at] + words[at + 2 :]
        log = self._folder / f"{words[0]}-{flag_values.replace(':', '-')}.log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", words[0], *self._map_words(words[1:]), "--port", "0"]
            server = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self._environment, cwd=self._folder
            )
        self._servers.append(server)
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline and server.poll() is None:
            if match := re.search(r"http://\S+?:(\d+)", _ready_line(log.read_text())):
                self._ports[flag_values] = match.group(1)
                self._await_workers(words[0], match.group(1))
                return
            time.sleep(0.05)
        raise AssertionError(f"{shlex.join(words)} did not get ready:\n{log.read_text()}")

    def _serve_picker(self, words: list[str]) -> None:
        """On free ports, remembered as those that the page names."""
        flag_values = {flag: words[words.index(flag) + 1] for flag in ("--port", "--health-port", "--metrics-port")}
        words = ["0" if word in flag_values.values() else word for word in words]
        log = self._folder / f"picker-{flag_values['--port']}.log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", *self._map_words(words)]
            self._servers.append(
                subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=self._environment, cwd=self._folder
                )
            )
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline and self._servers[-1].poll() is None:
            grpc = re.search(r"^picker listening on \S+:(\d+)$", log.read_text(), re.MULTILINE)
            http = re.search(r"^router listening on http://\S+:(\d+)$", log.read_text(), re.MULTILINE)
            if grpc and http:
                self._ports |= {flag_values["--port"]: grpc[1], flag_values["--metrics-port"]: http[1]}
                self._await_workers("router", http[1])
                return
            time.sleep(0.05)
        raise AssertionError(f"{shlex.join(words)} did not get ready:\n{log.read_text()}")

    def _serve_envoy(self, words: list[str]) -> None:
        """With the page's file, the addresses in it replaced by those of what the page has started."""
        assert words == ["envoy", "-c", str(CONFIGURATION.relative_to(ROOT))]
        if envoy_program() is None:
            return  # what the page asks of it is answered by its router
        port = free_ports(2)
        workers = [f"http://127.0.0.1:{self._ports[name]}" for name in ("8001", "8002")]
        text = configuration(port, port + 1, workers, [int(self._ports["9002"])])
        self._servers.append(start_envoy(self._folder, text).process)
        self._ports["8080"] = str(port)
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)

    def _await_workers(self, program: str, port: str) -> None:
        deadline = time.monotonic() + READY_S_MAX
        while program == "router" and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)

    def _map_words(self, words: list[str]) -> list[str]:
        """The words with the page's addresses replaced by real ones; a worker nobody started is started now."""

        def url(match: re.Match[str]) -> str:
            name = f"{match[1]}:{match[2]}" if match[1] else match[2]
            if name not in self._ports:
                self._serve(["engine", "serve", "--port", name])
            return f"http://127.0.0.1:{self._ports[name]}"

        def endpoint(match: re.Match[str]) -> str:
            (worker,) = (port for name, port in self._ports.items() if name.startswith(f"{match[1]}:"))
            with urllib.request.urlopen(f"http://127.0.0.1:{worker}/kv_event_sources", timeout=10) as answer:
                source = json.loads(answer.read())["0"]
            return str(source["replay_endpoint" if match[2] == REPLAY_PORT else "endpoint"])

        def worker_id(match: re.Match[str]) -> str:
            return f"127.0.0.1:{self._ports[match[1]]}"

        mapped_words = [WORKER_ID.sub(worker_id, ENDPOINT.sub(endpoint, URL.sub(url, word))) for word in words]
        return [re.sub(r"^/tmp/", f"{self._folder}/", word) for word in mapped_words]

    def _check_options(self, words: list[str]) -> None:
        """A long-running command: its script exists and its --help knows every option that the page uses."""
        script = ROOT / words[0]
        help_text = self._check([sys.executable, str(script), "--help"])
        for option in (word.split("=")[0] for word in words[1:] if word.startswith("--")):
            assert option in help_text, f"{words[0]} does not know {option}"

    def _check(self, command: list[str], folder: Path | None = None) -> str:
        process = subprocess.run(
            command, capture_output=True, text=True, env=self._environment, cwd=folder or self._folder, timeout=120
        )
        assert process.returncode == 0, (
            f"{shlex.join(command)}: status {process.returncode}\n{process.stdout}{process.stderr}"
        )
        return process.stdout


def _check_events_config(words: list[str]) -> None:
    """Another engine's command: what it is to publish is a configuration as we read it, and can be subscribed to."""
    value = words[words.index("--kv-events-config") + 1] if "--kv-events-config" in words else "..."
    if value != "...":
        config = KVEventsConfig.parse(value)
        assert config.enable_kv_cache_events or "sglang.launch_server" in words
        assert config.endpoint.startswith("tcp://*:"), "it would connect instead of bind"


def _ready_line(log: str) -> str:
    return next((line for line in log.splitlines() if re.search(r"\b(ready|listening)\b", line)), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name, text in re.findall(
        r"^```(?:toml|python)\n# (\w+\.\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "bodies.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    session = Session(tmp_path)
    try:
        for command in commands(page):
            session.run(command)
    finally:
        session.close()


def _list_keys(value: object, path: str = "") -> set[str]:
    """Return the path of every key in a JSON value. Those of lists have no index, and names of models are left out."""
    if isinstance(value, list):
        return set().union(*(_list_keys(item, path) for item in value))
    if not isinstance(value, dict) or path.endswith((".conversation_cache", ".tokenizer", ".counters")):
        return set()
    return {f"{path}.{key}" for key in value} | set().union(*(_list_keys(v, f"{path}.{k}") for k, v in value.items()))


def test_the_annotated_answer_of_workers_has_the_keys_of_a_real_one(tmp_path: Path) -> None:
    (page_text,) = re.findall(r"^```jsonc\n(.*?)^```", (ROOT / "docs/reference/routes.md").read_text(), re.M | re.S)
    page_answer = json.loads(re.sub(r"\s+// .*", "", page_text))
    session = Session(tmp_path)
    try:
        session.run(["engine", "serve", "--simulate", "h100:llama-3.1-8b", "--port", "8001"])
        session.run(["router", "run", "http://127.0.0.1:8001", "--port", "8080"])
        real_answer: dict[str, Any] = {}
        deadline = time.monotonic() + READY_S_MAX
        while not real_answer or real_answer["workers"][0].get("engine_load") is None:  # it is asked every 4 s
            assert time.monotonic() < deadline, real_answer
            time.sleep(0.1)
            words = ["http://127.0.0.1:8080/workers", "-H", "Authorization: Bearer KEY"]
            real_answer = json.loads(session.run_curl(words))
    finally:
        session.close()
    page_keys, real_keys = _list_keys(page_answer), _list_keys(real_answer)
    assert page_keys <= real_keys, "keys that no answer has"
    left_out = {key.rpartition(".")[2] for key in real_keys - page_keys}
    assert left_out <= set(STREAM_COUNTERS), "keys that the page does not explain"
