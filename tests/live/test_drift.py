"""The drift watchdog end to end: workers that are not what the router takes them for, flagged within 50 requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live
REQUESTS_MAX = 50
START_S = 120.0
OTHER_TEMPLATE = """\
{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"""


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


class Program:
    """One of our programs as a process."""

    def __init__(self, log: Path, ready: str, *args: str) -> None:
        self._log, self._ready = log, ready
        self._file = log.open("wb")
        self.process = subprocess.Popen([sys.executable, "-m", *args], stdout=self._file, stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            found = re.search(self._ready, self._log.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found.group(1)
            assert self.process.poll() is None, self._log.read_text(errors="replace")
            time.sleep(0.05)
        raise AssertionError(f"not ready in {START_S:g} s:\n{self._log.read_text(errors='replace')}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._file.close()


Start = Callable[..., Program]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    from engine.tiny_model import PRESETS, make_model

    return make_model(tmp_path_factory.mktemp("tiny"), PRESETS["tiny"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def engine(model: Path, *args: str) -> Program:
        command = ("engine", "serve", str(model), "--served-model-name", "m", "--port", "0", *args)
        started.append(Program(tmp_path / f"{len(started)}.log", r"^ready +(http://\S+)$", *command))
        return started[-1]

    def router(*args: str) -> Program:
        command = ("router", "run", "--port", "0", "--policy", "round_robin", *args)
        started.append(Program(tmp_path / f"{len(started)}.log", r"^router listening on (http://\S+)$", *command))
        return started[-1]

    engine.router = router  # type: ignore[attr-defined]
    yield engine
    for program in reversed(started):
        program.close()


def other_tokenizer(tiny: Path, folder: Path) -> Path:
    """The same vocabulary with half of the merges: other ids for the same text, and more of them."""
    folder.mkdir()
    for file in tiny.iterdir():
        if "token" in file.name or "template" in file.name or file.name == "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 8]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def alarms(url: str) -> dict[str, list[str]]:
    """URL of a worker that is up -> names of the alarms raised."""
    rows = call(f"{url}/workers")["workers"]
    return {row["url"]: [alarm.split(":")[0] for alarm in row["alarms"]] for row in rows if row["state"] == "up"}


def metric(url: str, worker_url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    name = worker_url.removeprefix("http://")
    (value,) = re.findall(rf'^blockcast_router_worker_alarms{{worker="{name}"}} (\S+)$', text, re.MULTILINE)
    return float(value)


def drive(url: str, workers: list[str], wanted: dict[str, str]) -> dict[str, int]:
    """Converse until every worker of `wanted` has raised its alarm; the requests each worker had got by then."""
    needed: dict[str, int] = {}
    subjects = itertools.count()
    while len(needed) < len(wanted):
        subject = next(subjects)
        talk = [{"role": "system", "content": f"About subject {subject}: " + "rivers and letters " * 20}]
        for turn in range(3):
            talk.append({"role": "user", "content": f"And what of part {turn}, number {subject * turn}?"})
            for _ in workers:  # round robin: each worker once
                call(f"{url}/v1/chat/completions", {"model": "m", "messages": talk, "max_tokens": 1})
            talk.append({"role": "assistant", "content": f"Part {turn}."})
        found = alarms(url)
        routed = {row["url"]: row["routed"] for row in call(f"{url}/workers")["workers"]}
        for worker, alarm in wanted.items():
            if alarm in found[worker]:
                needed.setdefault(worker, routed[worker])
        assert all(count <= REQUESTS_MAX for count in routed.values()), (found, routed)
    return needed


def test_workers_that_drifted_are_flagged_within_50_requests(tiny: Path, start: Any, tmp_path: Path) -> None:
    """Four workers under one model name: a sound one, another chat template, another tokenizer, events to nowhere."""
    template = tmp_path / "other.jinja"
    template.write_text(OTHER_TEMPLATE)
    nowhere = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:9"})
    engines = [
        start(tiny),
        start(tiny, "--chat-template", str(template)),
        start(tiny, "--tokenizer", str(other_tokenizer(tiny, tmp_path / "other"))),
        start(tiny, "--kv-events-config", nowhere),
    ]
    sound, other_template, tokenizer, silent = workers = [engine.url for engine in engines]
    router = start.router("--tokenizer", str(tiny), *workers)
    end_s = time.monotonic() + START_S
    while len(alarms(router.url)) < 4:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    wanted = {other_template: "prompt_tokens", tokenizer: "prompt_tokens", silent: "events"}
    needed = drive(router.url, workers, wanted)
    assert all(20 <= count <= REQUESTS_MAX for count in needed.values())
    assert alarms(router.url)[sound] == []
    assert metric(router.url, sound) == 0
    assert all(metric(router.url, worker) >= 1 for worker in wanted)
