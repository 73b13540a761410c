"""Conversations go on from the ids that were sampled: a random model, whose answers the encoder writes otherwise."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Program, call, two_engines_and_a_router, until

pytestmark = pytest.mark.live

ENGINE = ("engine", "serve", "--port", "0", "--served-model-name", "m", "--log-level", "warning")
BLOCK = 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Program], Program]]:
    folder: Path = tmp_path_factory.mktemp("sampled")
    with two_engines_and_a_router(folder, *ENGINE, router_flags=("--reasons-share", "1")) as programs:
        yield programs


def settled(engines: list[Program], router: Program) -> bool:
    """The router has applied what the engines have published."""
    workers = call(f"{router.url}/workers")[2]["workers"]
    seqs = {w["worker_id"]: s["last_seq"] for w in workers for s in w["events"]["streams"]}
    for engine in engines:
        published = metric(engine, "engine:kv_event_batches_total")
        seq = seqs[engine.url.removeprefix("http://")]
        if (0 if seq is None else seq + 1) != published:
            return False
    return True


def metric(program: Program, name: str) -> float:
    with urllib.request.urlopen(program.url + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def turn(url: str, messages: list[Any], worker: str = "", **more: Any) -> tuple[dict[str, str], Any]:
    """One more turn of a chat, at this worker if one is named: (headers, usage)."""
    body = {"model": "m", "messages": messages, "max_tokens": 40, "temperature": 1, "min_tokens": 20, **more}
    headers = {"Content-Type": "application/json"} | ({"x-blockcast-worker": worker} if worker else {})
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as got:
        headers, answer = dict(got.headers), json.loads(got.read())
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "And then? " * 4})
    return headers, answer["usage"]


def test_an_engine_goes_on_from_what_it_sampled(fleet: tuple[list[Program], Program]) -> None:
    engine = fleet[0][0]
    before = metric(engine, "engine:sampled_tokens_reused_total")
    for seed in range(4):
        messages: list[Any] = [{"role": "user", "content": f"Question {seed}? " * 10}]
        computed = 0
        for number in range(6):
            _, usage = turn(engine.url, messages, seed=100 * seed + number)
            assert usage["prompt_tokens_details"]["cached_tokens"] >= computed // BLOCK * BLOCK
            computed = usage["total_tokens"] - 1  # of the last token nothing was computed
    assert metric(engine, "engine:sampled_tokens_reused_total") > before


def test_a_router_prices_and_forwards_what_was_sampled(fleet: tuple[list[Program], Program]) -> None:
    engines, router = fleet
    taken = 0
    for seed in range(4):
        messages: list[Any] = [{"role": "user", "content": f"Another question {seed}? " * 10}]
        computed, worker = 0, None
        for number in range(8):
            until(lambda: settled(engines, router), "the router has applied what was published")
            asked = json.dumps({"model": "m", "messages": messages}).encode()
            explained = call(f"{router.url}/route", asked)[2]
            assert explained["why"].get("sampled_tokens", 0) == explained["sampled_tokens"]
            headers, usage = turn(router.url, messages, seed=100 * seed + number)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached
            if headers["x-blockcast-worker"] == worker:
                assert cached >= computed // BLOCK * BLOCK
            worker, computed = headers["x-blockcast-worker"], usage["total_tokens"] - 1
            status, _, why = call(f"{router.url}/requests/{headers['x-request-id']}")
            assert status == 200
            assert why.get("sampled_tokens", 0) == explained["sampled_tokens"]
            taken += explained["sampled_tokens"]
    assert metric(router, "blockcast_router_sampled_tokens_total") > 0
    assert taken > 0, "who asks is told that the prediction stands on sampled ids"


@pytest.mark.parametrize("body_chars", [0, 80_000], ids=["short", "read by a helper"])
def test_whoever_gets_the_next_turn_takes_the_ids_that_were_priced(
    fleet: tuple[list[Program], Program], body_chars: int
) -> None:
    """Each worker has said half of the conversation, and knows nothing of the other half but what the router tells."""
    engines, router = fleet
    names = [engine.url.removeprefix("http://") for engine in engines]
    messages: list[Any] = [{"role": "user", "content": f"A third question of {body_chars}? " * 10}]
    seen = dict.fromkeys(names, 0)
    for number in range(8):
        until(lambda: settled(engines, router), "the router has applied what was published")
        headers, usage = turn(router.url, messages, names[number % 2], seed=number, unread="x" * body_chars)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached
        assert cached >= seen[headers["x-blockcast-worker"]] // BLOCK * BLOCK
        seen[headers["x-blockcast-worker"]] = usage["total_tokens"] - 1


def test_spans_are_checked(fleet: tuple[list[Program], Program]) -> None:
    engine = fleet[0][0]
    for spans in ("[[0, 1, [1, 99999999]]]", "[[5, 100000, []]]", '[["a", 1, []]]', "{}"):
        body = f'{{"prompt_token_spans":{spans},"model":"m","messages":[{{"role":"user","content":"Hi"}}]}}'
        status, _, answer = call(f"{engine.url}/v1/chat/completions", body.encode())
        assert status == 400, answer
        assert answer["error"]["param"].startswith("prompt_token_spans")
