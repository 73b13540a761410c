"""A worker that costs next to nothing: a raw asyncio protocol that answers from memory and paces streams by a timer.

    python -m harness.mock --model FOLDER --announce FILE

It announces real KV events for the conversations in FILE (JSON: lists of token ids), so that a router's index has
something to match, and takes part in health checks and discovery like any worker. Prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from email.utils import formatdate
from pathlib import Path
from typing import Any

import click

from events.config import KVEventsConfig
from events.publisher import EventPublisher
from events.sources import encode_sources
from events.types import BlockRemoved, BlockStored

BLOCK = 16
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1700000000, "model": "mock",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "A short answer. " * 8},
                     "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "total_tokens": 33, "completion_tokens": 32},
    }
).encode()  # fmt: skip
ENDLESS = 1 << 60
"""Bytes of a chunked body, until its last chunk comes."""
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def heads() -> tuple[bytes, bytes]:
    """(a complete answer, the head of a stream), with this second's date, as uvicorn sends them."""
    start = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\n" % formatdate(usegmt=True).encode()
    complete = start + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(ANSWER) + ANSWER
    stream = start + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return complete, stream


def event() -> bytes:
    """One chunk of a stream, as long as OpenAI's are, with the moment it is written."""
    data = (
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
        b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],"t":%d}\n\n'
        % time.monotonic_ns()
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


class Mock(asyncio.Protocol):
    """One connection."""

    heads = heads()
    """Renewed every second."""

    def __init__(self, pages: dict[bytes, bytes], chunks: int, pace_s: float) -> None:
        self._pages = pages
        self._chunks = chunks
        self._pace_s = pace_s
        self._buffer = b""
        """Of a head, or the last bytes of a body that is not whole."""
        self._left = 0
        """Bytes of a body that are to come. They are looked through as they come and not kept: bodies may be large."""
        self._streams = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._body(data)
            return
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = buffer
            return
        head, self._buffer, self._streams = buffer[:end].lower(), b"", False
        at = head.find(b"content-length:")
        self._left = int(head[at + 15 : at + 26].split(b"\r\n")[0]) if at >= 0 else 0
        if b"\r\ntransfer-encoding: chunked" in head:
            self._left = ENDLESS
        self._head = head
        if self._left:
            self._body(buffer[end + 4 :])
        else:
            self._answer()
            if len(buffer) > end + 4:
                self.data_received(buffer[end + 4 :])

    def _body(self, data: bytes) -> None:
        piece, rest = data[: self._left], data[self._left :]
        seen = self._buffer + piece
        if self._left > ENDLESS // 2 and seen.endswith(b"\r\n0\r\n\r\n"):
            self._left = len(piece)  # JSON has no such line in it
        self._streams = self._streams or b'"stream":true' in seen or b'"stream": true' in seen
        self._left -= len(piece)
        self._buffer = seen[-16:] if self._left else b""
        if not self._left:
            self._answer()
            if rest:
                self.data_received(rest)

    def _answer(self) -> None:
        if self._head.startswith(b"post"):
            if self._streams:
                self._transport.write(Mock.heads[1])
                self._tick(self._chunks, asyncio.get_running_loop().time())
            else:
                self._transport.write(Mock.heads[0])
            return
        page = self._pages.get(self._head.split(b" ", 2)[1], None)
        status = b"200 OK" if page is not None else b"404 Not Found"
        page = page or b""
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(page)) + page
        )

    def _tick(self, left: int, due_s: float) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(DONE)
            return
        self._transport.write(event())
        loop = asyncio.get_running_loop()
        loop.call_at(due_s + self._pace_s, self._tick, left - 1, due_s + self._pace_s)


def publisher(announce: list[list[int]]) -> EventPublisher:
    """A publisher that has announced every full block of each prompt."""
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    )
    made = EventPublisher(config, model="mock", block_size=BLOCK)
    next_hash = 1
    for ids in announce:
        count = len(ids) // BLOCK
        if count:
            hashes: list[Any] = list(range(next_hash, next_hash + count))
            next_hash += count
            made.publish([BlockStored(hashes, None, ids[: count * BLOCK], BLOCK, None, "GPU", None)])
    return made


async def churn(events: EventPublisher, rate: float) -> None:
    """Store a new chain of blocks and remove an old one, `rate` times a second."""
    rng = random.Random(events.epoch)
    held: deque[list[Any]] = deque()
    next_hash = 1 << 40
    while True:
        count = rng.randint(1, 40)
        hashes: list[Any] = list(range(next_hash, next_hash + count))
        next_hash += count
        ids = [rng.randrange(4096) for _ in range(count * BLOCK)]
        batch: list[Any] = [BlockStored(hashes, None, ids, BLOCK, None, "GPU", None)]
        held.append(hashes)
        if len(held) > 500:
            batch.append(BlockRemoved(list(reversed(held.popleft())), "GPU"))
        events.publish(batch)
        await asyncio.sleep(1.0 / rate)


async def serve(
    model: str, announce: Path | None, chunks: int, pace_ms: float, churn_rate: float, max_model_len: int
) -> None:
    events = publisher(json.loads(announce.read_text()) if announce is not None else [])
    churning = asyncio.create_task(churn(events, churn_rate)) if churn_rate else None
    card = {"id": "mock", "object": "model", "owned_by": "mock", "root": model, "max_model_len": max_model_len}
    pages = {
        b"/health": b"",
        b"/v1/models": json.dumps({"object": "list", "data": [card]}).encode(),
        b"/kv_event_sources": encode_sources([events.source()]),
        b"/metrics": b"",
        b"/get_server_info": json.dumps({"model_path": model, "served_model_name": "mock"}).encode(),
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Mock(pages, chunks, pace_ms / 1e3), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    while churning is None or not churning.done():
        Mock.heads = heads()
        await asyncio.sleep(1.0)


@click.command()
@click.option("--model", required=True)
@click.option("--announce", type=click.Path(path_type=Path, exists=True))
@click.option("--chunks", default=64)
@click.option("--pace-ms", default=10.0)
@click.option("--churn", default=0.0, help="Chains of blocks stored and removed a second.")
@click.option("--max-model-len", default=1 << 20)
def main(model: str, announce: Path | None, chunks: int, pace_ms: float, churn: float, max_model_len: int) -> None:
    import uvloop

    uvloop.install()
    asyncio.run(serve(model, announce, chunks, pace_ms, churn, max_model_len))


if __name__ == "__main__":
    main()
