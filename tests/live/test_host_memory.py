"""Host memory under the engines' caches, live: conversations that exceed the device, and a router that follows both."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest
from programs import Program, call, wait_until

pytestmark = [pytest.mark.long, pytest.mark.live]

TALKS, TURNS = 8, 4
BLOCKS = 120
"""Of 16 tokens: less than two of the conversations a worker."""


@pytest.fixture(scope="module", params=["lru", "adaptive"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """(the router's URL, the engines')."""
    folder = tmp_path_factory.mktemp("host")
    flags = ("--num-gpu-blocks-override", str(BLOCKS), "--host-cache-memory", "64MB", "--check-invariants")
    engines = [
        Program(folder / f"e{i}.log", "engine", "serve", "--port", "0", *flags, "--eviction-policy", request.param)
        for i in range(2)
    ]
    router = None
    try:
        urls = [engine.await_ready().url for engine in engines]
        assert all("120 blocks of 16 tokens, and " in engine.log() for engine in engines)
        router = Program(folder / "router.log", "router", "run", "--port", "0", *urls)
        url = router.await_ready().url
        wait_until(lambda: sum(w["state"] == "up" for w in call(f"{url}/workers")[2]["workers"]) == 2, "two workers up")
        yield url, urls
    finally:
        for program in [*engines, *([router] if router else [])]:
            program.close()


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^\w+:(\w+)(?:{.*})? (\S+)$", text, re.MULTILINE)}


def test_what_is_predicted_is_what_comes_back_from_either(fleet: tuple[str, list[str]]) -> None:
    url, engines = fleet
    model = call(f"{url}/v1/models")[2]["data"][0]["id"]
    talks = [[{"role": "system", "content": " ".join(f"{i}: {i * k}." for i in range(150))}] for k in range(TALKS)]
    looked_up, reused_tokens = 0, 0
    for turn in range(TURNS):
        for index, talk in enumerate(talks):
            talk.append({"role": "user", "content": f"Question {turn}?"})
            body = {"model": model, "messages": talk, "max_tokens": 20, "temperature": 0}
            status, headers, answer = call(f"{url}/v1/chat/completions", body)
            assert status == 200, answer
            talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached_tokens, f"turn {turn} of {index}"
            if turn:
                assert cached_tokens > 0.8 * usage["prompt_tokens"], f"turn {turn} of {index} was not kept"
            looked_up, reused_tokens = looked_up + usage["prompt_tokens"], reused_tokens + cached_tokens
            wait_until(
                lambda total=looked_up: _has_settled(url, engines, total), "the router has applied what was published"
            )
    engine_metrics = [metrics(engine) for engine in engines]
    assert sum(f["prefix_cache_hits_total"] for f in engine_metrics) == reused_tokens
    for name in ("host_cache_hits_total", "host_cache_stored_bytes_total", "host_cache_loaded_bytes_total"):
        assert all(f[name] > 0 for f in engine_metrics), name
    assert all(0 < f["cpu_cache_usage_perc"] < 1 for f in engine_metrics)
    explanation = call(f"{url}/route", {"model": model, "messages": talks[0]})[2]
    assert explanation["candidates"][0]["tier_load_s"] > 0, "the oldest conversation lies in host memory"


def _has_settled(url: str, engines: list[str], looked_up: int) -> bool:
    engine_metrics = [metrics(engine) for engine in engines]
    if sum(f["prefix_cache_queries_total"] for f in engine_metrics) < looked_up or any(
        f["num_requests_running"] for f in engine_metrics
    ):
        return False
    streams = [stream for worker in call(f"{url}/workers")[2]["workers"] for stream in worker["events"]["streams"]]
    published_batches = sum(f["kv_event_batches_total"] for f in engine_metrics)
    return sum(stream["last_seq"] + 1 for stream in streams if stream["last_seq"] is not None) >= published_batches
