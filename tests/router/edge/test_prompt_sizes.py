"""Every prompt of a body counts, to its end: for the price, for the key, and in the words of a refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.errors import describe_context_overflow
from prompts.tokenizer import Checkpoint, Tokenizer
from router.prompting import encode
from router.prompting.model_tokenizers import LoadedTokenizer

LIMIT = 4096
WORDS = "one two three four five "
LONG = {"padding": "x" * 100_000}
"""Makes a body one that a helper process reads."""


def parts(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, 1024, 4096)
    return Tokenizer.load(tmp_path)


async def start(edge: Any, tokenizer: Tokenizer, folder: Path, **settings: Any) -> Any:
    await edge.start(policy="kv", **settings)
    edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(tokenizer, Checkpoint(str(folder)))
    return await edge.worker(edge.reply(), max_model_len=LIMIT)


@pytest.mark.parametrize("more", [{}, LONG], ids=["here", "in a helper"])
def test_all_prompts_of_a_body_are_counted_priced_and_charged(
    edge: Any, make_post: Any, tokenizer: Tokenizer, tmp_path: Path, more: dict[str, str]
) -> None:
    texts = [WORDS, WORDS * 30, "", WORDS * 2]
    counts = [len(tokenizer.encode(text)) for text in texts]

    async def scenario() -> None:
        await start(edge, tokenizer, tmp_path, api_keys=("one",), key_tokens_max=10**6)
        routes, charged_tokens = [], []
        edge.proxy.on_end.insert(0, lambda exchange: routes.append(exchange.route))
        edge.proxy.on_end.insert(0, lambda exchange: charged_tokens.append(edge.tenants.tokens_in_flight["key 0"]))
        key = [b"Authorization: Bearer one"]
        for prompt, expected, longest in (
            (texts, sum(counts), max(counts)), ([[1, 2, 3], list(range(500)), [7]], 504, 500), ([WORDS], counts[0], 0),
            (WORDS, counts[0], 0), ([4, 5], 2, 0),
        ):  # fmt: skip
            several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 7, "n": 2, "min_tokens": 2, **more}
            post = make_post(json.dumps(body).encode(), b"/v1/completions", key)
            assert parts(await edge.exchange(post))[0] == 200
            (route,) = routes
            choices = 2 * (len(prompt) if several else 1)
            assert (route.prompt_tokens, route.longest_prompt_tokens) == (expected, longest)
            assert (route.output_tokens_max, route.output_tokens_min) == (7 * choices, 2 * choices)
            assert charged_tokens == [expected]
            assert len(route.token_ids) == (counts[0] if prompt in (texts, [WORDS], WORDS) else len(route.token_ids))
            routes.clear()
            charged_tokens.clear()
        body = {"model": "tiny", "prompt": [list(range(3000))] * 2, "truncate_prompt_tokens": 10}
        _, explanation = parts(await edge.exchange(make_post(json.dumps(body).encode(), b"/route")))
        assert explanation["prompt_tokens"] == 20

    edge.run(scenario())


def test_several_prompts_cost_what_all_of_them_compute(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply())
        found = {}
        for name, prompt in (("one", list(range(900))), ("three", [list(range(300))] * 3), ("first", list(range(300)))):
            body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
            _, found[name] = parts(await edge.exchange(make_post(body, b"/route")))
        assert found["one"]["prompt_tokens"] == found["three"]["prompt_tokens"] == 900
        assert found["one"]["terms"]["prefill_s"] == found["three"]["terms"]["prefill_s"]
        assert found["first"]["terms"]["prefill_s"] < found["three"]["terms"]["prefill_s"]

    edge.run(scenario())


def test_several_prompts_ring_no_alarm(edge: Any, make_post: Any) -> None:
    """An engine reports what it reused of all of them; of the router's prediction only the first is part."""
    usage = b'{"usage":{"prompt_tokens":600,"prompt_tokens_details":{"cached_tokens":592}}}'

    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(edge.reply(usage))
        body = json.dumps({"model": "tiny", "prompt": [list(range(300))] * 2}).encode()
        for _ in range(40):
            assert parts(await edge.exchange(make_post(body, b"/v1/completions")))[0] == 200
        assert not edge.core.watchdog.list_alarms("w0", expects_events=False)

    edge.run(scenario())


OPENAI = re.compile(r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens")
ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


@pytest.mark.parametrize("more", [{}, LONG], ids=["here", "in a helper"])
def test_a_prompt_without_room_is_refused_with_its_length(
    edge: Any, make_post: Any, tokenizer: Tokenizer, tmp_path: Path, more: dict[str, str]
) -> None:
    """The router refuses first, in the words by which clients know that they must shorten a conversation."""
    text = WORDS * 3000

    async def scenario() -> None:
        worker = await start(edge, tokenizer, tmp_path)
        chat = {"messages": [{"role": "user", "content": text}]}
        count = len(tokenizer.encode(text))
        for path, body, param in (
            ("/v1/completions", {"prompt": text}, "prompt"), ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
            ("/v1/completions", {"prompt": [7] * count}, "prompt"), ("/v1/chat/completions", chat, "messages"),
            ("/v1/responses", {"input": text}, "input"), ("/v1/messages", {**chat, "max_tokens": 5}, None),
        ):  # fmt: skip
            post = make_post(json.dumps({"model": "tiny", **body, **more}).encode(), path.encode())
            status, answer = parts(await edge.exchange(post))
            assert status == 400, (path, str(body)[:40], answer)
            error = answer["error"]
            assert status == 400
            found = (ANTHROPIC if path == "/v1/messages" else OPENAI).match(error["message"])
            assert found, error
            if path == "/v1/messages":
                assert (answer["type"], error["type"]) == ("error", "invalid_request_error")
                tokens, limit = int(found[1]), int(found[2])
            else:
                assert (error["code"], error["param"], error["type"]) == (
                    "context_length_exceeded", param, "invalid_request_error",
                )  # fmt: skip
                tokens, limit = int(found[2]), int(found[1])
            assert limit == LIMIT
            assert tokens == count if path == "/v1/completions" else count < tokens < count + 40
        assert not worker.received

    edge.run(scenario())


def test_a_text_beyond_all_bounds_is_not_counted_to_its_end(
    edge: Any, make_post: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(encode, "COUNTED_CHARS", 0)

    async def scenario() -> None:
        await start(edge, tokenizer, tmp_path)
        text = WORDS * 3000
        assert len(text) > encode.CHARS_PER_TOKEN_MAX * (LIMIT + 1)
        for path, body in (("/v1/completions", {"prompt": text}), ("/v1/messages", {"max_tokens": 1, "messages": [
            {"role": "user", "content": text}]})):  # fmt: skip
            asked = {"model": "tiny", **body}
            monkeypatch.setattr(
                "router.prompting.prompt_reader.is_light", lambda body: True
            )  # or a process without the patch reads it
            status, answer = parts(await edge.exchange(make_post(json.dumps(asked).encode(), path.encode())))
            assert status == 400
            assert re.search(r"more than \d+ tokens", answer["error"]["message"])

    edge.run(scenario())


def test_the_words_for_a_prompt_that_just_fills_the_context() -> None:
    assert describe_context_overflow("/v1/messages", 50, 50) == "prompt is too long: 51 tokens > 50 maximum"
    assert (
        describe_context_overflow("/v1/messages/count_tokens", 80, 50) == "prompt is too long: 80 tokens > 50 maximum"
    )
    assert describe_context_overflow("/v1/completions", 60, 50).startswith(
        "This model's maximum context length is 50 tokens. However, you requested 60 tokens (60 in the prompt, "
    )
