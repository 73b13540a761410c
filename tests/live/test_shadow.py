"""`router shadow` beside a balancer that it does not know: takes copies, finds out who answered, and reports."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, wait_until

from router.shadow.report import CAUSES

pytestmark = [pytest.mark.live, pytest.mark.long]

SPEC = json.dumps({"prefill_s_per_token": 1e-5, "kv_tokens": 16_000, "step_s": 1e-3})
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("engines")
    programs = [Program(folder / f"{i}.log", "engine", "serve", "--port", "0", "--simulate", SPEC) for i in range(2)]
    yield [engine.await_ready().url for engine in programs]
    for engine in programs:
        engine.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    programs: list[Program] = []

    def begin(*args: str) -> Program:
        log = tmp_path / f"{args[0]}{len(programs)}.log"
        programs.append(Program(log, "router", args[0], "--port", "0", *args[1:]))
        return programs[-1]

    yield begin
    for program in reversed(programs):
        program.close()


def ready(program: Program) -> str:
    program.await_ready()

    def up() -> bool:
        rows = call(f"{program.url}/workers")[2]["workers"]
        return len(rows) == 2 and all(r["state"] == "up" and "loaded" in r["tokenizer"].values() for r in rows)

    wait_until(up, "two workers up")
    return program.url


def talk(url: str, name: str, turns: int, *, also: str | None = None) -> list[dict[str, Any]]:
    """A conversation, every other turn streamed; bodies of its answers that are not."""
    messages = [{"role": "system", "content": f"{name}: " + "you are brief. " * 40}]
    answers = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: " + f"what of {name}? " * 20})
        body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "stream": turn % 2 == 1}
        if also is not None:
            assert call(also + CHAT, body)[0] == 204
        data = json.dumps(body).encode()
        request = urllib.request.Request(url + CHAT, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        if turn % 2:
            deltas = [json.loads(line[6:])["choices"] for line in text.splitlines() if line.startswith(b"data: {")]
            answer_text = "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
        else:
            answers.append(json.loads(text))
            answer_text = answers[-1]["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer_text})
    return answers


def await_report(program: Program, placed_requests: int) -> dict[str, Any]:
    """What it knows once it has placed so many."""
    report: dict[str, Any] = {}

    def has_enough() -> bool:
        report.update(call(f"{program.url}/shadow")[2])
        return bool(report["requests"].get("placed", 0) >= placed_requests)

    wait_until(has_enough, lambda: report["requests"])
    return report


def test_copies_are_answered_with_nothing_and_placed_by_events(start: Any, engines: list[str], tmp_path: Path) -> None:
    balancer = start("run", "--policy", "round_robin", *engines)
    report = tmp_path / "shadow.html"
    shadow = start("shadow", "--report", str(report), *engines)
    url = ready(shadow)
    empty_report = call(f"{url}/shadow")[2]
    assert (empty_report["lost"], empty_report["lost_s"]) == (dict.fromkeys(CAUSES, 0), dict.fromkeys(CAUSES))
    talk(ready(balancer), "mirrored", 4, also=url)
    shadow_report = await_report(shadow, 4)
    assert shadow_report["requests"]["placed"] == sum(shadow_report["turns"].values()) == 4, "each is explained once"
    assert shadow_report["lost"]["routing"] > 0, "each turn of a conversation went to the worker that had not the last"
    assert call(url + CHAT, b"no JSON")[0] == 204, "whoever answers says so"
    assert call(url + "/v1/nowhere", {})[0] == 204
    assert call(f"{url}/shadow")[2]["requests"]["unread"] == 2
    late = {"messages": [{"role": "user", "content": "whose copy comes too late? " * 40}], "max_tokens": 8}
    assert call(balancer.url + CHAT, late)[0] == 200
    predicted_tokens = lambda: call(f"{url}/route", late)[2]["predicted_cached_tokens"]  # noqa: E731
    wait_until(lambda: predicted_tokens() > 0, "its worker's events are here")
    assert call(url + CHAT, late)[0] == 204
    assert "unplaced" not in await_report(shadow, 5)["requests"]
    assert call(f"{url}/workers")[2]["in_flight"] == 0
    assert shadow.stop() == 0
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert "What switching gives" in page
    assert "Nothing was compared" not in page
    assert not re.search(r"<(?:script|link|img|iframe)|src=|url\(|@import", page), "one file, nothing from elsewhere"


def test_a_log_of_bodies_is_enough(start: Any, engines: list[str], tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are brief. " * 60}
    lines = []
    for i in range(12):
        body = {"messages": [system, {"role": "user", "content": f"{i % 3}: who are you? " * 10}], "max_tokens": 8}
        outcome = {"at": 2.0 * i, "worker": engines[i % 2], "ttft_s": 0.02, "seconds": 0.05, "output_tokens": 8}
        lines.append(json.dumps({"body": body, **outcome} if i % 2 else body))
    log, report = tmp_path / "bodies.jsonl", tmp_path / "report.json"
    log.write_text("\n".join(lines))
    shadow = start("shadow", "--log", str(log), "--report", str(report), "--warm-share", "0", *engines)
    assert shadow.process.wait(60) == 0, shadow.log()
    outcome = json.loads(report.read_text())
    comparison = outcome["comparison"]
    assert comparison["requests"] == 12
    assert comparison["saved"]["computed_tokens"] > 0
    assert outcome["lost"] == outcome["lost_s"] == dict.fromkeys(CAUSES), "a log does not show what was cached"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"prompt": "a"}\n[1]\n', "{log}, line 2: Expected `object`, got `array`"),
        ("\n", "--log: {log} has no requests"),
    ],
)
def test_a_log_that_cannot_be_read_is_named(
    start: Any, engines: list[str], tmp_path: Path, lines: str, problem: str
) -> None:
    log = tmp_path / "bodies.jsonl"
    log.write_text(lines)
    shadow = start("shadow", "--log", str(log), *engines)
    assert shadow.process.wait(60) == 2
    assert problem.format(log=log) in shadow.log()
