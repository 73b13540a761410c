"""Engines in processes of their own that pull prefixes from each other as one router plans it, and their faults."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from programs import Program, call, wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]

FLEET_KEY = "a key of sixteen or more"
TEXT = " ".join(f"{i} times {i} is {i * i}." for i in range(60))
NEARLY_FREE = ("--set", "transfer.floor_s=0", "--set", "transfer.gb_s=1000")
"""Transfers that are cheaper than a prefill of the tiny model."""
APIS = ["chat", "completions", "messages", "responses"]


class Fleet:
    """Two engines and a router with the fleet's key."""

    def __init__(self, folder: Path, *, first_key: str = FLEET_KEY, has_router_key: bool = True) -> None:
        """`first_key`: of the first engine. `has_router_key`: whether the router has the second one's key."""
        self.programs: list[Program] = []
        try:
            self.engines = [self._start_engine(folder, i, key) for i, key in enumerate((first_key, FLEET_KEY))]
            workers = [f"--worker=url={engine.await_ready().url},id=e{i}" for i, engine in enumerate(self.engines)]
            key_flags = ("--kv-transfer-key-file", str(folder / "key1")) if has_router_key else ()
            self.router = Program(
                folder / "router.log", "router", "run", "--port", "0", *key_flags, *NEARLY_FREE, *workers
            )
            self.programs.append(self.router)
            self.router.await_ready()
            wait_until(lambda: self.count_up() == 2, "two workers")
        except BaseException:
            self.close()
            raise

    def _start_engine(self, folder: Path, number: int, key: str) -> Program:
        (folder / f"key{number}").write_text(key)
        flags = ("--kv-transfer", "0", "--kv-transfer-key-file", str(folder / f"key{number}"), "--check-invariants")
        program = Program(folder / f"e{number}.log", "engine", "serve", "--port", "0", *flags)
        self.programs.append(program)
        return program

    def workers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = call(f"{self.router.url}/workers")[2]["workers"]
        return rows

    def count_up(self) -> int:
        return [row["state"] for row in self.workers()].count("up")

    def send(self, api: str, text: str, worker: str, **fields: Any) -> tuple[str, int, int]:
        """Return the text of the answer, the cached tokens that were predicted, and those that the engine reports."""
        path, body = make_body(api, text)
        data = json.dumps(body | fields).encode()
        headers = {"Content-Type": "application/json", "x-blockcast-worker": worker}
        with urllib.request.urlopen(
            urllib.request.Request(self.router.url + path, data, headers), timeout=60
        ) as answer:
            predicted_tokens = int(answer.headers["x-blockcast-predicted-cached-tokens"])
            content = answer.read()
        if content.startswith(b"data:"):
            events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            usage = events[-1]["usage"]
            return "".join(choice["delta"].get("content") or "" for choice in choices), predicted_tokens, cached(usage)
        fields = json.loads(content)
        return text_of(fields), predicted_tokens, cached(fields["usage"])

    def await_indexed(self, api: str, text: str) -> None:
        """Wait until the router knows that a worker has computed this text."""

        def is_indexed() -> bool:
            path, body = make_body(api, text)
            answer = call(f"{self.router.url}/route?path={quote(path, safe='')}", body)[2]
            return bool(answer["predicted_cached_tokens"] > 300)

        wait_until(is_indexed, "the worker's blocks are in the index")

    def count_pulls(self, engine: int) -> float:
        with urllib.request.urlopen(f"{self.engines[engine].url}/metrics", timeout=30) as answer:
            match = re.search(r"^engine:kv_transfer_pulls_total (\S+)$", answer.read().decode(), re.MULTILINE)
        assert match is not None
        return float(match[1])

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = call(f"{self.router.url}/workers")[2]["counters"]
        return counters

    def close(self) -> None:
        for program in reversed(self.programs):
            program.close()


def make_body(api: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request of an API."""
    messages = [{"role": "user", "content": text}]
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}),
        "completions": ("/v1/completions", {"prompt": text, "max_tokens": 8, "temperature": 0}),
        "messages": ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}),
        "responses": ("/v1/responses", {"input": text, "max_output_tokens": 8, "temperature": 0}),
    }[api]


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return "".join(part["text"] for part in parts)


def cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens", usage.get("cache_read_input_tokens")))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("pulls"))
    yield fleet
    fleet.close()


@pytest.mark.parametrize("api", APIS)
def test_a_prefix_is_pulled_from_the_worker_that_has_it(fleet: Fleet, api: str) -> None:
    text, pulls = f"{api}: {TEXT}", fleet.count_pulls(1)
    expected_text, predicted_tokens, cached_tokens = fleet.send(api, text, "e0")
    assert (predicted_tokens, cached_tokens) == (0, 0)
    fleet.await_indexed(api, text)
    answer_text, predicted_tokens, cached_tokens = fleet.send(api, text, "e1")
    assert answer_text == expected_text
    assert predicted_tokens == cached_tokens > 300
    wait_until(lambda: fleet.count_pulls(1) == pulls + 1, "the engine counts its pull")


def test_a_stream_pulls_too(fleet: Fleet) -> None:
    text = f"stream: {TEXT}"
    expected_text, _, _ = fleet.send("chat", text, "e0")
    fleet.await_indexed("chat", text)
    answer = fleet.send("chat", text, "e1", stream=True, stream_options={"include_usage": True})
    assert answer[0] == expected_text
    assert answer[1] == answer[2] > 300


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_a_source_that_is_lost_costs_its_requests_a_bounded_time(tmp_path: Path, fault: str) -> None:
    fleet = Fleet(tmp_path)
    core_pid = fleet.engines[0].children()[0]
    try:
        expected_text, _, _ = fleet.send("chat", TEXT, "e0")
        fleet.await_indexed("chat", TEXT)
        if fault == "killed":
            fleet.engines[0].process.kill()
            os.kill(core_pid, signal.SIGKILL)  # it would give its blocks for a moment longer
            wait_until(lambda: has_ended(core_pid), "the core has ended")
        else:
            os.kill(core_pid, signal.SIGSTOP)
        answer_text, predicted_tokens, cached_tokens = fleet.send("chat", TEXT, "e1")
        assert answer_text == expected_text
        assert predicted_tokens > 300
        assert cached_tokens == 0
        assert fleet.counters()["failed_transfers"] == 1
    finally:
        with suppress(ProcessLookupError):
            os.kill(core_pid, signal.SIGCONT)
        fleet.close()


def test_a_source_with_another_key_is_avoided(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, first_key="another key of the same length")
    try:
        for i in range(2):
            text = f"{i}: {TEXT}"
            expected_text, _, _ = fleet.send("chat", text, "e0")
            fleet.await_indexed("chat", text)
            answer_text, predicted_tokens, cached_tokens = fleet.send("chat", text, "e1")
            assert answer_text == expected_text
            assert cached_tokens == 0
            assert (predicted_tokens > 300) is (i == 0), "after a failure no transfer of this pair is planned"
        assert fleet.counters()["failed_transfers"] == 1
    finally:
        fleet.close()


def test_an_engine_with_another_key_computes_what_it_cannot_pull(tmp_path: Path) -> None:
    """Such as while the engines of a fleet get a new key, one after another."""
    fleet = Fleet(tmp_path, first_key="another key of the same length")
    try:
        for i in range(2):
            text = f"{i}: {TEXT}"
            expected_text, _, _ = fleet.send("chat", text, "e1")
            fleet.await_indexed("chat", text)
            answer_text, _, cached_tokens = fleet.send("chat", text, "e0")
            assert answer_text == expected_text
            assert cached_tokens == 0
        assert fleet.counters()["failed_transfers"] == 1, "after a failure no transfer of this pair is planned"
    finally:
        fleet.close()


def test_without_the_fleets_key_nothing_is_pulled(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, has_router_key=False)
    try:
        fleet.send("chat", TEXT, "e0")
        fleet.await_indexed("chat", TEXT)
        assert fleet.send("chat", TEXT, "e1")[1:] == (0, 0)
        assert call(f"{fleet.router.url}/workers")[2]["kv_groups"] == []
    finally:
        fleet.close()
