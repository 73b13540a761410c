"""`POST /route` explains the decision that is taken: the same request, sent on, goes where it said."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.decide.workers import ServedModel, WorkerSpec

WISHES: dict[str, list[str | None]] = {
    "x-blockcast-worker": [None, None, "w1", "w2", "nobody"],
    "x-blockcast-role": [None, None, "even", "odd", "none"],
    "x-blockcast-priority": [None, "-3", "7", "high"],
    "x-blockcast-deadline-ms": [None, "5000", "0"],
    "x-session-id": [None, "a", "b", "c", "d"],
}


def draw(rng: random.Random) -> tuple[str, list[bytes], bytes]:
    """(path, headers, body) of a request that may wish for anything."""
    headers = [(name, rng.choice(values)) for name, values in WISHES.items()]
    body: dict[str, Any] = {
        "model": rng.choice(["tiny", "tiny", "tuned", None, "unknown"]),
        "user": rng.choice([None, "a", "e", 3]),
        "cache_salt": rng.choice([None, "salt"]),
        "priority": rng.choice([None, 2, "x"]),
        "stream": rng.choice([None, False]),
    }
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/embeddings"])
    text = "x" * rng.choice([1, 300, 3000, 30_000])
    if path == "/v1/chat/completions":
        body["messages"] = rng.choice([[{"role": "user", "content": text}], "none"])
    elif path == "/v1/completions":
        body["prompt"] = rng.choice([text, [rng.randrange(99) for _ in range(rng.choice([5, 2000, 5000]))], [[1, 2]]])
    else:
        body["input"] = [text]
    body = {name: value for name, value in body.items() if value is not None or rng.random() < 0.5}
    return (
        path,
        [f"{name}: {value}".encode() for name, value in headers if value is not None],
        json.dumps(body).encode(),
    )


def parts(answer: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.lower().split(": ", 1) for line in lines), json.loads(body)


@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "sticky", "least_requests"])
def test_the_explained_decision_is_the_one_taken(edge: Any, make_post: Any, policy: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def scenario() -> None:
        await edge.start(policy=policy, core={"session_affinity": rng.random() < 0.5})
        models = (ServedModel("tiny", "tiny", max_model_len=4096), ServedModel("tuned", "tiny", "tuned", 4096))
        for number in range(4):
            upstream = await edge.worker(edge.reply())
            role = frozenset(["odd" if number % 2 else "even"])
            url = f"http://127.0.0.1:{upstream.port}"
            edge.core.add_worker(WorkerSpec(f"w{number}", url, models, roles=role), 0.0)
        outcomes = set()
        for _ in range(120):
            path, headers, body = draw(rng)
            route = f"/route?path={path}" if path == "/v1/embeddings" or rng.random() < 0.5 else "/route"
            told_status, _, told = parts(await edge.exchange(make_post(body, route.encode(), headers)))
            status, answer, _ = parts(await edge.exchange(make_post(body, path.encode(), headers)))
            story = (seed, path, headers, body[:200])
            assert told_status == status, story
            outcomes.add(status)
            if status == 200:
                assert told["worker"] == answer["x-blockcast-worker"], story
                assert told["predicted_cached_tokens"] == int(answer["x-blockcast-predicted-cached-tokens"]), story
        assert outcomes >= {200, 400, 404}, (seed, outcomes)

    edge.run(scenario())


def test_a_path_that_no_request_is_sent_on_from_is_named(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply())
        status, _, refused = parts(await edge.exchange(make_post(b'{"model": "tiny"}', b"/route?path=/nope")))
        assert (status, refused["error"]["param"]) == (400, "path")
        assert refused["error"]["message"].startswith(
            "path: got '/nope', expected a route under /v1/, such as /v1/chat/"
        )

    edge.run(scenario())


def test_a_prompt_that_is_to_be_cut_is_cut_as_vllm_cuts_it(edge: Any, make_post: Any) -> None:
    """`truncate_prompt_tokens: -1` keeps the end of the prompt, with room for one token."""

    async def scenario() -> None:
        await edge.start(policy="kv")
        upstream = await edge.worker(edge.reply())
        models = (ServedModel("short", "short", max_model_len=100),)
        edge.core.add_worker(WorkerSpec("w", f"http://127.0.0.1:{upstream.port}", models), 0.0)
        for count, keep, prompt_tokens in [(99, -1, 99), (100, -1, 99), (5000, -1, 99), (5000, 7, 7)]:
            body = {"model": "short", "prompt": list(range(count)), "truncate_prompt_tokens": keep}
            status, _, explained = parts(await edge.exchange(make_post(json.dumps(body).encode(), b"/route")))
            assert status == 200, explained
            assert explained["prompt_tokens"] == prompt_tokens

    edge.run(scenario())


def test_a_prompt_that_is_too_long_is_refused_with_its_field_and_the_limit(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        upstream = await edge.worker(edge.reply())
        models = (ServedModel("short", "short", max_model_len=100),)
        edge.core.add_worker(WorkerSpec("w", f"http://127.0.0.1:{upstream.port}", models), 0.0)
        body = json.dumps({"model": "short", "prompt": list(range(500))}).encode()
        answer = await edge.exchange(make_post(body, b"/v1/completions"))
        status, _, error = parts(answer)
        assert (status, error["error"]["code"], error["error"]["param"]) == (400, "context_length_exceeded", "prompt")
        assert "100" in error["error"]["message"]

    edge.run(scenario())
