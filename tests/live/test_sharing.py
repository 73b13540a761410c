"""Sharing, with real routers before simulated workers: other names, turns, the background, tokens of keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from programs import ADMIN_KEY, Program, call, wait_until

pytestmark = pytest.mark.live
SPEC = {"prefill_s_per_token": 1e-4, "step_s": 0.004, "kv_tokens": 65536, "max_model_len": 32768}


def engine(folder: Path, model: str, *flags: str) -> Program:
    command_flags = ("--simulate", json.dumps(SPEC), "--served-model-name", model, "--port", "0")
    return Program(folder / f"{model}.log", "engine", "serve", *command_flags, *flags)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """One simulated worker of each model."""
    folder, programs = tmp_path_factory.mktemp("fleet"), {}
    for model in ("m1", "m2"):
        programs[model] = engine(folder, model)
    try:
        yield {model: program.await_ready() for model, program in programs.items()}
    finally:
        for program in programs.values():
            program.close()


@pytest.fixture
def start_router(tmp_path: Path, fleet: dict[str, Program]) -> Iterator[Any]:
    programs: list[Program] = []

    def start(*flags: str, workers: list[str] | None = None) -> Program:
        urls = [program.url for program in fleet.values()] if workers is None else workers
        router = Program(tmp_path / f"router{len(programs)}.log", "router", "run", *urls, "--port", "0", *flags)
        programs.append(router)
        router.await_ready()
        up = lambda: call(router.url + "/health")[2].get("workers_up") == len(urls)  # noqa: E731
        wait_until(lambda: all(up() for _ in range(12)), router.log)  # every process
        return router

    yield start
    for program in programs:
        program.close()


def complete(url: str, model: str, prompt: str = "Hello there", key: str | None = None, **extra_fields: Any) -> Any:
    async def send_request() -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= extra_fields.pop("headers", {})
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **extra_fields}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
        ):
            return answer.status, dict(answer.headers), await answer.json()

    return asyncio.run(send_request())


def metric(url: str, name: str) -> dict[str, float]:
    """Labels, as they stand -> value."""
    lines = asyncio.run(_text(url + "/metrics")).splitlines()
    rows = [
        line.removeprefix(f"blockcast_router_{name}") for line in lines if line.startswith(f"blockcast_router_{name}")
    ]
    return {labels: float(value) for labels, _, value in (row.rpartition(" ") for row in rows)}


async def _text(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()


def test_aliases_canaries_and_a_fallback(start_router: Any, fleet: dict[str, Program]) -> None:
    router = start_router(
        "--model-alias", "gpt-4=m1", "--model-canary", "m1=m2:0.5", "--model-fallback", "m3=m4", "--model-fallback",
        "m4=m2",
    )  # fmt: skip
    roots_by_session = {}
    for number in range(16):
        session = {"headers": {"x-session-id": f"conversation {number}"}}
        models = {complete(router.url, "gpt-4", f"turn {turn}", **session)[2]["model"] for turn in range(3)}
        assert len(models) == 1, "a conversation stays on its side"
        roots_by_session[number] = models.pop()
    assert set(roots_by_session.values()) == {"m1", "m2"}
    for number in range(8):  # without a name it is known by how it begins
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {number}?"}]
        chat = {"model": "m1", "messages": messages, "max_tokens": 2}
        status, _, first = call(router.url + "/v1/chat/completions", chat)
        assert status == 200
        chat["messages"] = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
        assert call(router.url + "/v1/chat/completions", chat)[2]["model"] == first["model"]
    status, _, answer = complete(router.url, "m3")
    assert (status, answer["model"]) == (200, "m2"), "nobody serves m3 or m4"
    status, _, answer = complete(router.url, "m5")
    assert status == 404
    assert "m5" in answer["error"]["message"]
    listed_models = {row["id"]: row["root"] for row in call(router.url + "/v1/models")[2]["data"]}
    assert listed_models == {"m1": "m1", "m2": "m2", "gpt-4": "m1"}
    assert metric(router.url, "key_requests_total") == {}, "without keys nothing is counted by key"
    status, _, why = call(router.url + "/route", {"model": "gpt-4", "prompt": "where?"})
    assert status == 200
    assert why["worker"] in (fleet["m1"].url.removeprefix("http://"), fleet["m2"].url.removeprefix("http://"))


def test_a_fallback_answers_while_nobody_of_the_model_is_up(
    start_router: Any, fleet: dict[str, Program], tmp_path: Path
) -> None:
    router = start_router("--model-fallback", "m1=m2")
    assert complete(router.url, "m1")[2]["model"] == "m1"
    worker = fleet["m1"].url.removeprefix("http://")
    call(f"{router.url}/workers/{worker}/drain", {})
    assert complete(router.url, "m1")[2]["model"] == "m2"
    call(f"{router.url}/workers/{worker}/drain", {"on": False})
    assert complete(router.url, "m1")[2]["model"] == "m1"


async def _stream(url: str, body: dict[str, Any]) -> str:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        return await answer.text()


def test_the_tokens_of_each_key_add_up(start_router: Any) -> None:
    router = start_router("--api-key", "one", "--api-key", "two")
    usages = [complete(router.url, "m1", f"{key} says " * 40, key=key)[2]["usage"] for key in ("one", "two", "one")]
    prompt = [usage["prompt_tokens"] for usage in usages]
    cached_tokens = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached_tokens[2] > 0
    expected = {
        "key 0": {
            "prompt": prompt[0] + prompt[2], "cached": cached_tokens[0] + cached_tokens[2],
            "computed": prompt[0] + prompt[2] - cached_tokens[0] - cached_tokens[2], "output": 8,
        },
        "key 1": {
            "prompt": prompt[1], "cached": cached_tokens[1], "computed": prompt[1] - cached_tokens[1], "output": 4,
        },
    }  # fmt: skip
    tokens = {
        f'{{key="{key}",kind="{kind}"}}': count for key, kinds in expected.items() for kind, count in kinds.items()
    }
    wait_until(lambda: metric(router.url, "key_tokens_total") == tokens, lambda: metric(router.url, "key_tokens_total"))
    assert metric(router.url, "key_requests_total") == {'{key="key 0"}': 2.0, '{key="key 1"}': 1.0}


def refusal_message(log: Path, *flags: str) -> str:
    """What a router says that does not start."""
    router = Program(log, "router", "run", "--port", "0", *flags)
    try:
        assert router.process.wait(30) != 0, flags
    finally:
        router.close()
    assert "Traceback" not in router.log()
    return router.log()


@pytest.fixture
def in_turn(tmp_path: Path) -> Iterator[Program]:
    """A worker at which a short prompt waits for the long one before it."""
    worker = engine(tmp_path, "m1", "--prefill-order", "arrival")
    try:
        yield worker.await_ready()
    finally:
        worker.close()


def test_what_cannot_begin_in_time_may_come_when_it_was_told(start_router: Any, in_turn: Program) -> None:
    router = start_router(workers=[in_turn.url])
    for number in range(4):  # teach the router how fast the worker is
        complete(router.url, "m1", f"{number} warms up, " * 300)
    long = {"model": "m1", "prompt": "a long prompt comes first; " * 1500, "max_tokens": 1, "stream": True}

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(_stream(router.url, long))
            await asyncio.sleep(0.1)
            headers = {"x-blockcast-ttft-ms": "100"}
            short = {"model": "m1", "prompt": "short", "max_tokens": 1}
            async with session.post(f"{router.url}/v1/completions", json=short, headers=headers) as answer:
                assert answer.status == 429, await answer.text()
                assert (await answer.json())["error"]["code"] == "too_slow"
                wait_s = float(answer.headers["Retry-After"])
            await asyncio.sleep(wait_s)
            async with session.post(f"{router.url}/v1/completions", json=short, headers=headers) as answer:
                assert answer.status == 200
            await first

    asyncio.run(scenario())
    assert call(f"{router.url}/workers")[2]["counters"]["too_slow"] == 1
    status, _, answer = call(router.url + "/v1/completions", {"model": "m1", "prompt": "x"})
    assert status == 200, answer


def test_a_setting_that_cannot_be_is_named(tmp_path: Path) -> None:
    for flags, words in (
        (("--model-alias", "a"), "--model-alias: got 'a'"),
        (("--model-alias", "a=b", "--model-alias", "b=c"), "a is b, which is an alias itself"),
        (("--model-fallback", "a=b", "--model-fallback", "b=a"), "a circle: a -> b -> a"),
        (("--model-canary", "a=b:1.5"), "--model-canary"),
        (("--model-canary", "a=b:0.6", "--model-canary", "a=c:0.6"), "the shares of a add up to more than 1"),
        (("--key-share", "k=0"), "--key-share"),
    ):
        message = refusal_message(tmp_path / "router.log", *flags)
        assert words in message, message


def test_what_is_not_asked_for_costs_nothing(tmp_path: Path) -> None:
    """No name is resolved, nothing is held or charged."""
    from router.app.config import ProcessConfig
    from router.app.process import RouterProcess

    async def scenario() -> None:
        process = RouterProcess(ProcessConfig(), "test")
        pipeline = process.pipeline
        assert pipeline.request_reader.model_names is None
        assert not pipeline.tenant_limits._settings_by_tenant
        core = pipeline.proxy.core
        assert not core._placer._queues_when_busy
        assert core._placer._background_priority == float("inf")
        assert core.config.queue.ttft_s_max is None
        await process._resources.aclose()

    asyncio.run(scenario())


def test_the_admin_key_is_needed(start_router: Any) -> None:
    router = start_router()

    async def send_request(key: str) -> int:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.get(router.url + "/workers") as answer,
        ):
            return answer.status

    assert asyncio.run(send_request("no key")) == 401
    assert asyncio.run(send_request(ADMIN_KEY)) == 200
