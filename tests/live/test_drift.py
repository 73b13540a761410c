"""The drift watchdog end to end: workers that are not what the router takes them for, flagged within 50 requests."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]
REQUESTS_MAX = 50
OTHER_TEMPLATE = """\
{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"""


Start = Callable[..., Program]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    from engine.tiny.model import PRESETS, make_model

    return make_model(tmp_path_factory.mktemp("tiny"), PRESETS["tiny"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def engine(model: Path, *args: str) -> Program:
        command = ("engine", "serve", str(model), "--served-model-name", "m", "--port", "0", *args)
        programs.append(Program(tmp_path / f"{len(programs)}.log", *command))
        return programs[-1]

    def router(*args: str) -> Program:
        command = ("router", "run", "--port", "0", "--policy", "round_robin", *args)
        programs.append(Program(tmp_path / f"{len(programs)}.log", *command))
        return programs[-1]

    engine.router = router  # type: ignore[attr-defined]
    yield engine
    for program in reversed(programs):
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
    rows = call(f"{url}/workers")[2]["workers"]
    return {row["url"]: [alarm.split(":")[0] for alarm in row["alarms"]] for row in rows if row["state"] == "up"}


def metric(url: str, worker_url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    name = worker_url.removeprefix("http://")
    (value,) = re.findall(rf'^blockcast_router_worker_alarms{{worker="{name}"}} (\S+)$', text, re.MULTILINE)
    return float(value)


def drive(url: str, workers: list[str], expected_alarms: dict[str, str]) -> dict[str, int]:
    """Converse until every worker of `wanted` has raised its alarm; the requests each worker had got by then."""
    requests_by_worker: dict[str, int] = {}
    subjects = itertools.count()
    while len(requests_by_worker) < len(expected_alarms):
        subject = next(subjects)
        talk = [{"role": "system", "content": f"About subject {subject}: " + "rivers and letters " * 20}]
        for turn in range(3):
            talk.append({"role": "user", "content": f"And what of part {turn}, number {subject * turn}?"})
            for _ in workers:  # round robin: each worker once
                body = {"model": "m", "messages": talk, "max_tokens": 1}
                assert call(f"{url}/v1/chat/completions", body)[0] == 200
            talk.append({"role": "assistant", "content": f"Part {turn}."})
        current_alarms = alarms(url)
        routed_requests = {row["url"]: row["routed_requests"] for row in call(f"{url}/workers")[2]["workers"]}
        for worker, alarm in expected_alarms.items():
            if alarm in current_alarms[worker]:
                requests_by_worker.setdefault(worker, routed_requests[worker])
        assert all(count <= REQUESTS_MAX for count in routed_requests.values()), (current_alarms, routed_requests)
    return requests_by_worker


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
    sound, other_template, tokenizer, silent = workers = [engine.await_ready().url for engine in engines]
    router = start.router("--tokenizer", str(tiny), *workers).await_ready()
    wait_until(lambda: len(alarms(router.url)) == 4, "four workers are up", 120)
    expected_alarms = {other_template: "prompt_tokens", tokenizer: "prompt_tokens", silent: "events"}
    requests_by_worker = drive(router.url, workers, expected_alarms)
    assert all(20 <= count <= REQUESTS_MAX for count in requests_by_worker.values())
    assert alarms(router.url)[sound] == []
    assert metric(router.url, sound) == 0
    assert all(metric(router.url, worker) >= 1 for worker in expected_alarms)
