"""A disk cache under host memory, live: real files and processes that are killed, and a router that follows."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, until

pytestmark = pytest.mark.live

TALKS, TURNS = 6, 3
FLAGS = ("--num-gpu-blocks-override", "100", "--check-invariants")
"""Blocks of 16 tokens: less than two of the conversations."""
Texts = list[list[str]]


def start(log: Path, *flags: str) -> Program:
    return Program(log, "engine", "serve", "--port", "0", *FLAGS, *flags).await_ready()


def with_disk(folder: Path, host: str = "1MB", size: str = "200MB") -> tuple[str, ...]:
    return ("--host-cache-memory", host, "--disk-cache", str(folder), "--disk-cache-size", size)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^\w+:(\w+)(?:{.*})? (\S+)$", text, re.MULTILINE)}


def opening(k: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": " ".join(f"{i}: {i * k}." for i in range(150))}]


def converse(
    url: str, turns: int = TURNS, check: Callable[[dict[str, str], Any], None] = lambda headers, answer: None
) -> Texts:
    """What the engine says in conversations whose turns alternate, greedily."""
    model = call(f"{url}/v1/models")[2]["data"][0]["id"]
    talks = [opening(k) for k in range(TALKS)]
    said: Texts = [[] for _ in talks]
    for turn in range(turns):
        for talk, texts in zip(talks, said):
            talk.append({"role": "user", "content": f"Question {turn}?"})
            body = {"model": model, "messages": talk, "max_tokens": 12, "temperature": 0}
            status, headers, answer = call(f"{url}/v1/chat/completions", body)
            assert status == 200, answer
            check(headers, answer)
            texts.append(answer["choices"][0]["message"]["content"])
            talk.append({"role": "assistant", "content": texts[-1]})
    return said


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """What an engine without any cache says."""
    engine = start(tmp_path_factory.mktemp("uncached") / "log", "--no-enable-prefix-caching")
    try:
        return converse(engine.url)
    finally:
        engine.close()


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_a_killed_engine_wrote_is_used_by_the_next(tmp_path: Path, uncached: Texts, policy: str) -> None:
    flags = (*with_disk(tmp_path / "cache"), "--eviction-policy", policy)
    first = start(tmp_path / "first.log", *flags)
    try:
        assert " on disk (0 found there)" in first.log()
        assert converse(first.url) == uncached
        found = metrics(first.url)
        assert found["disk_cache_stored_bytes_total"] > 0
        assert found["disk_cache_loaded_bytes_total"] > 0, "host memory is too small for them"
        assert found["disk_cache_failed_reads_total"] == found["disk_cache_failed_writes_total"] == 0
        refused = Program(tmp_path / "refused.log", "engine", "serve", "--port", "0", *flags)
        assert refused.process.wait(120) == 1
        assert "another engine has it" in refused.log()
        refused.close()
    finally:
        for pid in [*first.children(), first.process.pid]:
            os.kill(pid, signal.SIGKILL)
        first.close()
    second = start_after(tmp_path / "second.log", *flags)
    try:
        assert int(re.findall(r"on disk \((\d+) found there\)", second.log())[0]) > 100
        assert converse(second.url) == uncached
        found = metrics(second.url)
        assert found["disk_cache_loaded_bytes_total"] > 0
        assert found["disk_cache_failed_reads_total"] == 0
    finally:
        second.close()


def start_after(log: Path, *flags: str) -> Program:
    """Once the killed one's core process has gone, too, and given the folder up."""
    started: list[Program] = []

    def attempt() -> Program | None:
        program = Program(log, "engine", "serve", "--port", "0", *FLAGS, *flags)
        try:
            return program.await_ready()
        except AssertionError:
            assert "another engine has it" in program.log(), program.log()
            program.close()
            return None

    found = until(attempt, "the folder is given up", 60)
    started.append(found)
    return started[0]


def first_turns(url: str) -> list[int]:
    """Tokens of each conversation's first turn that were found."""
    cached: list[int] = []
    converse(url, 1, lambda headers, answer: cached.append(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]))  # fmt: skip
    return cached


def test_after_a_restart_first_turns_are_found_but_not_what_is_damaged(tmp_path: Path, uncached: Texts) -> None:
    flags = with_disk(tmp_path / "cache", host="4MB")
    engine = start(tmp_path / "first.log", *flags)
    try:
        assert max(first_turns(engine.url)) < 100, "nothing was there"
        converse(engine.url)
    finally:
        assert engine.stop() == 0
        engine.close()
    engine = start(tmp_path / "second.log", *flags)
    try:
        again = first_turns(engine.url)
        assert sum(cached > 500 for cached in again) >= TALKS - 2, again
    finally:
        engine.close()
    (blocks,) = (tmp_path / "cache").glob("*/blocks")
    content = blocks.read_bytes()
    blocks.write_bytes(bytes(byte ^ 1 for byte in content))
    engine = start(tmp_path / "third.log", *flags)
    try:
        assert max(first_turns(engine.url)) < 100, "what was changed was used"
        assert metrics(engine.url)["disk_cache_failed_reads_total"] > 0
        assert "they are not used" in engine.log()
        assert converse(engine.url) == uncached
    finally:
        engine.close()
    engine = start(tmp_path / "other.log", "--dtype", "bfloat16", *flags)
    try:
        assert "(0 found there)" in engine.log()
        assert "is not used, and not deleted" in engine.log()
    finally:
        engine.close()


def test_a_router_predicts_what_is_found_after_a_restart(tmp_path: Path) -> None:
    flags = with_disk(tmp_path / "cache", host="4MB")
    engine = start(tmp_path / "first.log", *flags)
    try:
        converse(engine.url)
    finally:
        assert engine.stop() == 0
        engine.close()
    engine = start(tmp_path / "second.log", *flags)
    router = None
    try:
        router = Program(tmp_path / "router.log", "router", "run", "--port", "0", engine.url).await_ready()
        url = router.url
        until(lambda: call(f"{url}/workers")[2]["workers"][0]["state"] == "up", "the worker is up")
        explained = call(f"{url}/route", {"model": "tiny", "messages": [*opening(0), {"role": "user", "content": "?"}]})
        assert explained[2]["candidates"][0]["load_s"] > 0, json.dumps(explained[2])
        differences: list[tuple[int, int]] = []

        def compare(headers: dict[str, str], answer: Any) -> None:
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            differences.append((int(headers["x-blockcast-predicted-cached-tokens"]), cached))
            until(lambda: settled(url, engine.url), "the router has applied what was published")

        converse(url, check=compare)
        assert all(predicted == cached for predicted, cached in differences), differences
        assert sum(cached > 500 for _, cached in differences[:TALKS]) >= TALKS - 2
    finally:
        for program in (engine, router):
            if program is not None:
                program.close()


def settled(router: str, engine: str) -> bool:
    found = metrics(engine)
    (stream,) = call(f"{router}/workers")[2]["workers"][0]["events"]["streams"]
    told = found["kv_event_batches_total"]
    return not found["num_requests_running"] and stream["last_seq"] is not None and stream["last_seq"] + 1 >= told


def test_it_needs_host_memory_and_attention_alone(tmp_path: Path) -> None:
    for flags, reason in (
        (("--disk-cache", str(tmp_path)), "needs --host-cache-memory"),
        ((*with_disk(tmp_path), "--simulate", "h100:llama-3.1-8b"), "a simulated engine"),
        (with_disk(tmp_path, size="10KB"), "holds no block"),
    ):
        program = Program(tmp_path / "log", "engine", "serve", "--port", "0", *flags)
        assert program.process.wait(120) != 0
        assert reason in program.log(), program.log()
        program.close()
