"""Ids asked of workers: what is asked, what is routed on, and that a worker that cannot tokenise delays nobody."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from prompts.routing import parse_routing
from router.app.cluster import is_worker_serving
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.worker_settings import parse_worker_flag
from router.prompting.encode import build_tokenize_request
from router.prompting.model_tokenizers import RemoteTokenizer
from router.prompting.prompt_worker_pool import WorkerState, _inspect_body, _load_tokenizer, _run_task

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}], "add_generation_prompt": False}


def tokenising(request: Any) -> bytes:
    """A worker's answer: one id a word."""
    body = json.loads(request.body)
    text = body["prompt"] if "prompt" in body else " ".join(m["content"] for m in body["messages"])
    ids = [len(word) for word in text.split()]
    return json.dumps({"count": len(ids), "max_model_len": 99, "tokens": ids}).encode()


ANSWERS = {
    "garbage": b'{"tokens": "many"}',
    "beyond 32 bits": b'{"tokens": [1, 4294967296]}',
    "negative": b'{"tokens": [-1]}',
    "more than was asked": b'{"tokens": [%b1]}' % (b"1," * 600_000),
    "endless": b'{"tokens": [%b1]}' % (b"1," * 40_000),
}


@pytest.mark.parametrize(
    "how",
    ["answers", "404", "garbage", "beyond 32 bits", "negative", "endless", "more than was asked", "elsewhere", "hangs"],
)
def test_prompts_are_read_by_a_worker_that_can(edge: Any, make_post: Any, how: str, monkeypatch: Any) -> None:
    if how == "endless":
        monkeypatch.setattr("router.prompting.model_tokenizers.RESPONSE_BYTES_MAX", 10_000)
    able = True

    async def script(request: Any, reader: Any, writer: Any) -> None:
        if not request.line.startswith(b"POST /tokenize"):
            await edge.reply()(request, reader, writer)
        elif how == "answers" or able:
            await edge.reply(tokenising(request))(request, reader, writer)
        elif how == "404":
            await edge.reply(b"{}", status=b"404 Not Found")(request, reader, writer)
        elif how in ANSWERS:
            await edge.reply(ANSWERS[how])(request, reader, writer)
        elif how == "elsewhere":
            headers = (b"location: http://127.0.0.1:%d/tokenize" % edge.upstreams[1].port,)
            await edge.reply(b"", b"307 Temporary Redirect", headers)(request, reader, writer)
        else:
            await reader.read(1)  # until the router waits no more

    async def scenario() -> None:
        nonlocal able
        await edge.start(policy="kv")
        worker = await edge.worker(script)
        async with aiohttp.ClientSession() as session:
            edge.prompts.tokenizers.remote = RemoteTokenizer(session)
            await edge.prompts.tokenizers.discover("tiny", None, parse_worker_flag(f"http://127.0.0.1:{worker.port}"))
            assert edge.prompts.tokenizers.is_remote("tiny")
            assert "workers are asked" in edge.prompts.tokenizers.problems["tiny"]
            routed = []
            edge.proxy.on_end.append(lambda exchange: routed.append(exchange.route.token_ids))
            able = False
            if how == "hangs":
                monkeypatch.setattr("router.prompting.model_tokenizers.RESPONSE_S_MAX", 0.05)
            other = await edge.worker(script)
            edge.core.set_draining("w1", 0.0)
            answer = await edge.exchange(make_post(json.dumps(CHAT).encode()))
            assert other.received == [], "a redirect is not followed"
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert routed == [[3, 3, 5] if how == "answers" else None]
            asked = json.loads(worker.received[1].body)
            assert asked == CHAT
            # ids that the client brings need no worker
            count = len(worker.received)
            await edge.exchange(make_post(b'{"model":"tiny","prompt":[5,6,7]}', b"/v1/completions"))
            assert len(worker.received) == count + 1
            assert list(routed[-1]) == [5, 6, 7]
            edge.prompts.tokenizers.remove_worker(f"http://127.0.0.1:{worker.port}")
            assert not edge.prompts.tokenizers.is_remote("tiny")

    edge.run(scenario())


def test_client_that_leaves_while_a_worker_tokenises(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate, answered = asyncio.Event(), list[Any]()

        async def script(request: Any, reader: Any, writer: Any) -> None:
            if len(edge.upstreams[0].received) > 1:
                await gate.wait()
            await edge.reply(tokenising(request))(request, reader, writer)
            answered.append(request)

        await edge.start(policy="kv")
        worker = await edge.worker(script)
        async with aiohttp.ClientSession() as session:
            edge.prompts.tokenizers.remote = RemoteTokenizer(session)
            await edge.prompts.tokenizers.discover("tiny", None, parse_worker_flag(f"http://127.0.0.1:{worker.port}"))
            _, writer = await edge.connect()
            writer.write(make_post(json.dumps(CHAT).encode()))
            await edge.until(lambda: len(worker.received) == 2)
            writer.close()
            await edge.until(lambda: not edge.listener.connections)
            gate.set()
            await edge.until(lambda: len(answered) == 2)
            await edge.let_loop_read()
            assert edge.core.counters["routed"] == 0
            assert len(worker.received) == 2

    edge.run(scenario())


def test_what_cannot_be_asked_is_not() -> None:
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {**CHAT, "chat_template": "{% for i in range(10**9) %}{% endfor %}"}),
        ("/v1/completions", {"prompt": [[1, 2]]}),
        ("/v1/completions", {}),
    ):
        assert build_tokenize_request(parse_routing(path, json.dumps(body).encode()), "m") is None
    first = build_tokenize_request(parse_routing("/v1/completions", b'{"prompt":["a","b"]}'), "m")
    assert json.loads(first or b"") == {"model": "m", "prompt": "a", "add_special_tokens": True}
    empty = build_tokenize_request(parse_routing("/v1/completions", b'{"prompt":""}'), "m")
    assert json.loads(empty or b"{}") == {"model": "m", "prompt": "", "add_special_tokens": True}
    turns = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,"}]
    request_body = build_tokenize_request(
        parse_routing("/v1/messages", json.dumps({"max_tokens": 5, "messages": turns}).encode()), "m"
    )
    asked = json.loads(request_body or b"")
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize("older", [False, True])
def test_a_worker_with_an_older_transformers_is_found_out_when_it_joins(edge: Any, tmp_path: Path, older: bool) -> None:
    """The template reads reasoning under a name that the client did not use; since 5.23 it is given under all."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", "a", "b", "c", "e"])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.thinking if m.thinking else '' }} {{ m.content }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    told = [1, 2, 4] if older else [1, 3, 2, 4]
    said = {"role": "assistant", "content": "b", "reasoning": "c"}
    asked = {"messages": [{"role": "user", "content": "a"}, said], "add_generation_prompt": False}

    async def scenario() -> None:
        await edge.start(policy="kv")
        worker = await edge.worker(edge.reply(json.dumps({"tokens": told}).encode()))
        other = await edge.worker(edge.reply(b'{"tokens": [1, 3, 2, 4]}'))
        async with aiohttp.ClientSession() as session:
            edge.prompts.tokenizers.remote = RemoteTokenizer(session)
            for joined in (worker, other):
                await edge.prompts.tokenizers.discover(
                    "m", str(tmp_path), parse_worker_flag(f"http://127.0.0.1:{joined.port}")
                )
        parsed = parse_routing("/v1/chat/completions", json.dumps(asked).encode())
        ids = edge.prompts.tokenize(parsed, edge.prompts.tokenizers.get("m")).token_ids
        assert list(ids) == ([1, 2] if older else [1, 3, 2])
        order = edge.prompts.make_task("m", "chat", None)
        assert order.keeps_messages_as_sent is older
        shelf = WorkerState(None)
        _load_tokenizer(shelf, order.checkpoint)
        _inspect_body(shelf, (json.dumps(asked).encode(),), "chat")
        assert list(_run_task(shelf, order).parsed_body.prompt.token_ids or ()) == list(ids)

    edge.run(scenario())


def test_a_worker_that_is_down_or_serves_another_model_now_is_not_asked(edge: Any) -> None:
    """A frozen one would take two seconds of each of its prompts, and a restarted one with another model reads none."""

    async def script(request: Any, reader: Any, writer: Any) -> None:
        await edge.reply(tokenising(request))(request, reader, writer)

    async def scenario() -> None:
        await edge.start(policy="kv")
        frozen, changed, sound = [await edge.worker(script) for _ in range(3)]
        async with aiohttp.ClientSession() as session:
            remote = RemoteTokenizer(session, is_serving=partial(is_worker_serving, edge.core))
            for worker in (frozen, changed, sound):
                flag = parse_worker_flag(f"url=http://127.0.0.1:{worker.port},id=w{worker.port}")
                edge.core.add_worker(WorkerSpec(flag.worker_id, flag.url, (ServedModel("tiny", "tiny"),)), 0.0)
                assert await remote.probe("tiny", flag)
            edge.core.mark_worker_down(f"w{frozen.port}", 0.0, "it does not answer")
            other_model = (ServedModel("other", "other"),)
            edge.core.add_worker(WorkerSpec(f"w{changed.port}", f"http://127.0.0.1:{changed.port}", other_model), 0.0)
            request_body = json.dumps({"model": "tiny", "prompt": "one three"}).encode()
            for _ in range(6):
                assert await remote.tokenize(request_body, "tiny") == [3, 5]
            assert [len(worker.received) for worker in (frozen, changed, sound)] == [1, 1, 7]
            edge.core.mark_worker_down(f"w{sound.port}", 0.0, "it does not answer")
            assert await remote.tokenize(request_body, "tiny") is None

    edge.run(scenario())
