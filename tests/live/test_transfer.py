"""Blocks that move between engines in processes of their own, by requests of every API; clients without the key."""

from __future__ import annotations

import hmac
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, wait_until

pytestmark = [pytest.mark.live, pytest.mark.long]

FLEET_KEY = "a key of sixteen or more"
TEXT = " ".join(f"{i} times {i} is {i * i}." for i in range(60))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    """A source and a consumer."""
    folder = tmp_path_factory.mktemp("transfer")
    key_file = folder / "key"
    key_file.write_text(f"{FLEET_KEY}\n")
    flags = ("--port", "0", "--kv-transfer", "0", "--kv-transfer-key-file", str(key_file), "--check-invariants")
    programs = [Program(folder / f"e{i}.log", "engine", "serve", *flags) for i in range(2)]
    try:
        yield [program.await_ready() for program in programs]
    finally:
        for program in programs:
            program.close()


def transfer_params(source: Program, fleet_key: str = FLEET_KEY) -> dict[str, Any]:
    match = re.search(r"^transfers (\S+):(\d+)$", source.log(), re.MULTILINE)
    assert match is not None, source.log()
    text = "\n".join(["kv-source", "r1", match[1], match[2]])  # as docs/adr/0020-kv-moves-by-pulls.md says
    signature = hmac.new(fleet_key.encode(), text.encode(), "sha256").hexdigest()
    kv_source = {"kv_request_id": "r1", "remote_host": match[1], "remote_port": int(match[2]), "signature": signature}
    return {"remote_kv_source": kv_source}


def metrics(program: Program) -> dict[str, float]:
    with urllib.request.urlopen(f"{program.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^engine:kv_transfer_(\S+) (\S+)$", text, re.MULTILINE)}


def bodies(api: str) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request of an API; each has another prompt."""
    text = f"{api}: {TEXT}"
    messages = [{"role": "user", "content": text}]
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}),
        "completions": ("/v1/completions", {"prompt": text, "max_tokens": 8, "seed": 3, "n": 2}),
        "messages": ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}),
        "responses": ("/v1/responses", {"input": text, "max_output_tokens": 8, "temperature": 0}),
    }[api]


def cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    count = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    assert isinstance(count, int), usage
    return count


@pytest.mark.parametrize("api", ["chat", "completions", "messages", "responses"])
def test_a_request_of_every_api_takes_blocks_from_the_source_that_it_names(engines: list[Program], api: str) -> None:
    source, consumer = engines
    path, body = bodies(api)
    status, _, first_answer = call(source.url + path, body)
    assert status == 200, first_answer
    before = metrics(consumer)
    status, _, answer = call(consumer.url + path, {**body, "kv_transfer_params": transfer_params(source)})
    assert status == 200, answer
    wait_until(lambda: metrics(consumer)["pulls_total"] > before["pulls_total"], "statistics come after the answer")
    after = metrics(consumer)
    assert _texts(answer) == _texts(first_answer)
    moved_blocks = after["pulled_blocks_total"] - before["pulled_blocks_total"]
    assert cached_tokens(answer["usage"]) == moved_blocks * 16 > 300
    assert after["pulls_total"] - before["pulls_total"] == 1
    pulled_count = after["pulled_blocks_total"]
    wait_until(lambda: metrics(source)["sent_blocks_total"] >= pulled_count, "the source counts what it sent")


def _texts(answer: dict[str, Any]) -> list[Any]:
    if "choices" in answer:
        return [choice.get("message", choice.get("text")) for choice in answer["choices"]]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return [part["text"] for part in parts]


@pytest.mark.parametrize("fault", ["another key", "no signature", "another host"])
def test_a_source_without_the_fleets_signature_is_refused(engines: list[Program], fault: str) -> None:
    source, consumer = engines
    params = transfer_params(source, "the key of somebody else" if fault == "another key" else FLEET_KEY)
    if fault == "no signature":
        del params["remote_kv_source"]["signature"]
    if fault == "another host":
        params["remote_kv_source"]["remote_host"] = "10.0.0.1"
    before = metrics(consumer)
    path, body = bodies("chat")
    status, _, answer = call(consumer.url + path, {**body, "kv_transfer_params": params})
    assert status == 403, answer
    assert "signature" in answer["error"]["message"]
    assert metrics(consumer) == before


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("host:1", "expected `object`"),
        ({}, "missing required field"),
        ({"kv_request_id": "a", "remote_host": "h\nh", "remote_port": 1}, "remote_host"),
        ({"kv_request_id": "a", "remote_host": "h", "remote_port": 70000}, "remote_port"),
        ({"kv_request_id": "a", "remote_host": "h", "remote_port": 1, "cached_tokens": 2**64}, "cached_tokens"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_clients_error(engines: list[Program], value: Any, problem: str) -> None:
    path, body = bodies("chat")
    status, _, answer = call(engines[1].url + path, {**body, "kv_transfer_params": {"remote_kv_source": value}})
    assert status == 400, answer
    assert problem.lower() in answer["error"]["message"].lower()


def test_params_of_other_dialects_are_none_of_ours(engines: list[Program]) -> None:
    path, body = bodies("chat")
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]}
    assert call(engines[1].url + path, {**body, "kv_transfer_params": params})[0] == 200


@pytest.mark.parametrize(
    ("key", "problem"), [(None, "expected the fleet's key"), ("short", "a key of 5 bytes, expected at least 16")]
)
def test_no_engine_starts_without_a_key(tmp_path: Path, key: str | None, problem: str) -> None:
    key_flags: tuple[str, ...] = ()
    if key is not None:
        (tmp_path / "key").write_text(key)
        key_flags = ("--kv-transfer-key-file", str(tmp_path / "key"))
    program = Program(tmp_path / "log", "engine", "serve", "--port", "0", "--kv-transfer", "0", *key_flags)
    try:
        assert program.process.wait(60) == 2
        assert problem in program.log()
    finally:
        program.close()


def test_an_engine_that_pulls_from_a_frozen_source_sleeps_when_the_pull_is_over(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(FLEET_KEY)
    flags = ("--port", "0", "--kv-transfer", "0", "--kv-transfer-key-file", str(tmp_path / "key"))
    source = Program(tmp_path / "source.log", "engine", "serve", *flags)
    consumer = Program(
        tmp_path / "consumer.log", "engine", "serve", *flags, "--enable-sleep-mode", "--kv-transfer-timeout", "3",
    )  # fmt: skip
    answers: list[tuple[int, Any]] = []
    try:
        source.await_ready()
        consumer.await_ready()
        path, body = bodies("chat")
        assert call(source.url + path, body)[0] == 200
        core_pid = source.children()[0]
        os.kill(core_pid, signal.SIGSTOP)
        body = {**body, "kv_transfer_params": transfer_params(source)}
        requests = threading.Thread(target=lambda: answers.append(call(consumer.url + path, body)[::2]))
        requests.start()
        wait_until(lambda: waiting_requests(consumer) == 1, "the request waits for its pull")
        assert call(f"{consumer.url}/sleep", {}, method="POST")[0] == 200
        requests.join(30)
        assert answers
        assert answers[0][0] == 200, "the request was answered before the engine slept"
        assert cached_tokens(answers[0][1]["usage"]) == 0
        assert call(f"{consumer.url}/wake_up", {}, method="POST")[0] == 200
        os.kill(core_pid, signal.SIGCONT)
        time.sleep(2.1)  # a source that has failed is not asked for so long
        status, _, answer = call(consumer.url + path, body)
        assert status == 200
        assert cached_tokens(answer["usage"]) > 300
    finally:
        with suppress(ProcessLookupError, UnboundLocalError):
            os.kill(core_pid, signal.SIGCONT)
        source.close()
        consumer.close()


def waiting_requests(program: Program) -> float:
    with urllib.request.urlopen(f"{program.url}/metrics", timeout=30) as answer:
        match = re.search(r"^vllm:num_requests_waiting\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert match is not None
    return float(match[1])


def test_simulated_engines_move_no_bytes_and_take_the_time_of_the_bandwidth(tmp_path: Path) -> None:
    """300 blocks of 16 tokens of 100 kB each at .5 GB/s: at least .9 s, as the source has each of them."""
    spec = {"prefill_s_per_token": 1e-6, "kv_tokens": 100_000, "kv_bytes_per_token": 100_000, "transfer_gb_s": 0.5}
    (tmp_path / "key").write_text(FLEET_KEY)
    flags = ("--port", "0", "--kv-transfer", "0", "--kv-transfer-key-file", str(tmp_path / "key"), "--simulate")
    programs = [
        Program(tmp_path / f"{name}.log", "engine", "serve", *flags, json.dumps(spec))
        for name in ("source", "consumer")
    ]
    try:
        source, consumer = (program.await_ready() for program in programs)
        body = {"prompt": [100 + i * i % 997 for i in range(4810)], "max_tokens": 4}
        status, _, first_answer = call(f"{source.url}/v1/completions", body)
        assert status == 200
        params = transfer_params(source)
        status, _, answer = call(f"{consumer.url}/v1/completions", {**body, "kv_transfer_params": params})
        assert status == 200
        assert _texts(answer) == _texts(first_answer)
        assert cached_tokens(answer["usage"]) == 300 * 16
        wait_until(lambda: metrics(consumer)["pulled_blocks_total"] >= 300, "the last statistics of the consumer")
        moved = metrics(consumer)
        assert moved["pulled_blocks_total"] == 300
        assert moved["pulled_bytes_total"] == 300 * 16 * 100_000
        assert moved["pull_seconds_total"] > 0.9
    finally:
        for program in programs:
            program.close()


def test_a_simulation_without_bytes_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(FLEET_KEY)
    spec = json.dumps({"prefill_s_per_token": 1e-6, "kv_tokens": 1000})
    flags = ("--kv-transfer", "0", "--kv-transfer-key-file", str(tmp_path / "key"), "--simulate", spec)
    program = Program(tmp_path / "log", "engine", "serve", "--port", "0", *flags)
    try:
        assert program.process.wait(60) == 1
        assert "--kv-transfer: with --simulate SPEC must have kv_bytes_per_token" in program.log()
    finally:
        program.close()


@pytest.mark.long
def test_engines_of_two_ranks_exchange_blocks_of_both_ranks_and_none_with_one_rank(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(FLEET_KEY)
    flags = ("--port", "0", "--kv-transfer", "0", "--kv-transfer-key-file", str(tmp_path / "key"))
    host_memory = ("--num-gpu-blocks-override", "60", "--host-cache-memory", "64MB")
    ranks = ("--tensor-parallel-size", "2", "--check-invariants")
    programs = [
        Program(tmp_path / f"{i}.log", "engine", "serve", *flags, *own_flags)
        for i, own_flags in enumerate(((*ranks, *host_memory), ranks, ()))
    ]
    try:
        source, consumer, single_rank = (program.await_ready() for program in programs)
        path, body = bodies("chat")
        answers = [call(program.url + path, body)[2] for program in (single_rank, source)]
        filler = {"prompt": "fill " * 380, "max_tokens": 1}
        assert call(f"{source.url}/v1/completions", filler)[0] == 200  # the first prompt moves to host memory
        params = transfer_params(source)
        status, _, answer = call(consumer.url + path, {**body, "kv_transfer_params": params})
        assert status == 200
        assert _texts(answer) == _texts(answers[0]) == _texts(answers[1])
        wait_until(lambda: metrics(consumer)["pulls_total"] == 1, "statistics come after the answer")
        assert cached_tokens(answer["usage"]) == metrics(consumer)["pulled_blocks_total"] * 16 > 300
        _, other_body = bodies("completions")
        assert call(f"{source.url}/v1/completions", other_body)[0] == 200
        before = metrics(single_rank)
        assert call(f"{single_rank.url}/v1/completions", {**other_body, "kv_transfer_params": params})[0] == 200
        wait_until(
            lambda: metrics(single_rank)["pulls_total"] > before["pulls_total"], "statistics of the refused pull"
        )
        after = metrics(single_rank)
        assert {name for name in after if "failures" in name and after[name] != before[name]} == {
            'failures_total{reason="incompatible"}'
        }
        assert after['failures_total{reason="incompatible"}'] == before['failures_total{reason="incompatible"}'] + 1
    finally:
        for program in programs:
            program.close()
