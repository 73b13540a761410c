"""What a real vLLM 0.32 server answered (tests/golden), as a worker's answers through the router."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from router.fleet.answers import read_block_size, read_models, read_sources

GOLDEN = Path(__file__).parents[2] / "golden" / "vllm" / "recorded-0.32.0"


def exchanges(story: str) -> list[dict[str, Any]]:
    with gzip.open(GOLDEN / f"{story}.json.gz") as file:
        return json.load(file)["exchanges"]  # type: ignore[no-any-return]


REFUSED = [e for e in exchanges("answers") if e["body"] and e["status"] >= 400]


def replayed(edge: Any, exchange: dict[str, Any]) -> Any:
    kind = b"content-type: " + exchange["type"].encode()
    return edge.reply(exchange["answer"].encode(), b"%d Told" % exchange["status"], (kind,))


def request(exchange: dict[str, Any]) -> bytes:
    body = json.dumps(exchange["body"]).encode()
    head = f"POST {exchange['path']} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_its_pages_tell_what_it_serves_and_how_long_its_blocks_are() -> None:
    pages = {e["path"]: e["answer"] for e in exchanges("answers") if e["body"] is None}
    assert read_block_size(pages["/metrics"]) == 32
    (source,) = read_sources(pages["/kv_event_sources"].encode(), "http://gpu1:8000")
    assert source.endpoint.startswith("tcp://gpu1:")
    (model,) = read_models(pages["/v1/models"].encode())
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
