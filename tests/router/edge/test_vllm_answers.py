"""What a real vLLM 0.32 server answered (tests/golden), as a worker's answers through the router."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.fleet.worker_responses import read_engine_sizes, read_models, read_sources

GOLDEN = Path(__file__).parents[2] / "golden" / "vllm" / "recorded-0.32.0"


def exchanges(story: str) -> list[dict[str, Any]]:
    with gzip.open(GOLDEN / f"{story}.json.gz") as file:
        return json.load(file)["exchanges"]  # type: ignore[no-any-return]


REFUSED = [e for e in exchanges("answers") if e["body"] and e["status"] >= 400]


def replayed(edge: Any, exchange: dict[str, Any]) -> Any:
    kind = b"content-type: " + exchange["type"].encode()
    return edge.reply(exchange["answer"].encode(), b"%d Told" % exchange["status"], (kind,))


def streamed(answer: str) -> Any:
    """A script: a chunk an event."""

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in answer.encode().split(b"\n\n")[:-1]:
            writer.write(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return script


def request(exchange: dict[str, Any]) -> bytes:
    body = json.dumps(exchange["body"]).encode()
    head = f"POST {exchange['path']} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_its_pages_tell_what_it_serves_and_how_long_its_blocks_are() -> None:
    pages = {e["path"]: e["answer"] for e in exchanges("answers") if e["body"] is None}
    assert read_engine_sizes(pages["/metrics"]).block_size == 32
    (source,) = read_sources(pages["/kv_event_sources"].encode(), "http://gpu1:8000")
    assert source.endpoint.startswith("tcp://gpu1:")
    (model,) = read_models(pages["/v1/models"].encode()).models
    assert (model.name, model.max_model_len) == ("tiny", 4096)


@pytest.mark.parametrize("exchange", REFUSED, ids=lambda e: e["label"])
def test_a_refusal_reaches_the_client_as_it_is_or_is_the_routers_own(edge: Any, exchange: dict[str, Any]) -> None:
    """The router refuses by itself only what vLLM refuses too, with the same status."""

    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(replayed(edge, exchange))
        head, _, body = (await edge.exchange(request(exchange))).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == exchange["status"]
        if worker.received:
            assert body == exchange["answer"].encode()

    edge.run(scenario())


def test_the_500_of_a_dead_core_is_answered_by_another_worker(edge: Any) -> None:
    dead = next(e for e in exchanges("engine_dies") if e["status"] >= 500 and e["body"])

    async def scenario() -> None:
        await edge.start()
        await edge.worker(replayed(edge, dead))
        await edge.worker(edge.reply(b'{"ok":true}'))
        for _ in range(3):
            answer = await edge.exchange(request(dead))
            assert answer.endswith(b'{"ok":true}')

    edge.run(scenario())


def test_a_stream_whose_core_dies_goes_on_at_another_worker(edge: Any) -> None:
    """vLLM ends it with an error in an event and `[DONE]`, as if it were whole."""
    dead = next(e for e in exchanges("engine_dies") if e["label"] == "a stream under way")
    dead["body"].pop("return_token_ids")  # the router asks for them
    told = [json.loads(line[6:]) for line in dead["answer"].split("\n\n") if line.startswith("data: {")]
    assert told[-1]["error"]["code"] == 500
    said = [choice for chunk in told[:-1] for choice in chunk["choices"]]
    answered = [token for choice in said for token in choice["token_ids"]]
    text = "".join(choice["text"] for choice in said)
    last = {**told[-2], "choices": [{**said[-1], "text": " end", "token_ids": [7], "finish_reason": "length"}]}

    async def scenario() -> None:
        await edge.start()
        await edge.worker(streamed(dead["answer"]), engine="vllm")
        rest = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"
        other = await edge.worker(streamed(rest), engine="vllm")
        answer = (await edge.exchange(request(dead))).decode()
        assert '"error"' not in answer
        assert answer.count("[DONE]") == 1
        asked = json.loads(other.received[0].body)
        kept = len(asked["prompt"]) - 90
        found = [json.loads(chunk) for chunk in re.findall(r"^data: (\{.*\})$", answer, re.MULTILINE)]
        assert "".join(choice["text"] for chunk in found for choice in chunk["choices"]) == text + " end"
        assert asked["prompt"] == [*dead["body"]["prompt"], *answered[:kept]]
        assert asked["max_tokens"] == 3000 - kept

    edge.run(scenario())
