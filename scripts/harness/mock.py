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
RESPONSE_BODY = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1700000000, "model": "mock",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "A short answer. " * 8},
                     "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "total_tokens": 33, "completion_tokens": 32},
    }
).encode()  # fmt: skip
CHUNKED_BODY_BYTES = 1 << 60
"""Bytes of a chunked body, until its last chunk comes."""
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def make_heads() -> tuple[bytes, bytes]:
    """(a complete answer, the head of a stream), with this second's date, as uvicorn sends them."""
    common_head = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\n" % formatdate(usegmt=True).encode()
    complete_response = (
        common_head
        + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(RESPONSE_BODY)
        + RESPONSE_BODY
    )
    stream_head = common_head + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return complete_response, stream_head


def make_event_chunk() -> bytes:
    """One chunk of a stream, as long as OpenAI's are, with the moment it is written."""
    payload = (
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
        b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],"t":%d}\n\n'
        % time.monotonic_ns()
    )
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class MockWorkerConnection(asyncio.Protocol):
    """One connection."""

    response_heads = make_heads()
    """Renewed every second."""

    def __init__(self, pages: dict[bytes, bytes], chunk_count: int, interval_s: float) -> None:
        self._pages = pages
        self._chunk_count = chunk_count
        self._interval_s = interval_s
        self._buffer = b""
        """Of a head, or the last bytes of a body that is not whole."""
        self._body_bytes_remaining = 0
        """Bytes of a body that are to come. They are looked through as they come and not kept: bodies may be large."""
        self._is_streaming = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._body_bytes_remaining:
            self._receive_body(data)
            return
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = buffer
            return
        head, self._buffer, self._is_streaming = buffer[:end].lower(), b"", False
        at = head.find(b"content-length:")
        self._body_bytes_remaining = int(head[at + 15 : at + 26].split(b"\r\n")[0]) if at >= 0 else 0
        if b"\r\ntransfer-encoding: chunked" in head:
            self._body_bytes_remaining = CHUNKED_BODY_BYTES
        self._request_head = head
        if self._body_bytes_remaining:
            self._receive_body(buffer[end + 4 :])
        else:
            self._send_response()
            if len(buffer) > end + 4:
                self.data_received(buffer[end + 4 :])

    def _receive_body(self, data: bytes) -> None:
        body_bytes, next_request_bytes = data[: self._body_bytes_remaining], data[self._body_bytes_remaining :]
        searchable = self._buffer + body_bytes
        if self._body_bytes_remaining > CHUNKED_BODY_BYTES // 2 and searchable.endswith(b"\r\n0\r\n\r\n"):
            self._body_bytes_remaining = len(body_bytes)  # JSON has no such line in it
        self._is_streaming = self._is_streaming or b'"stream":true' in searchable or b'"stream": true' in searchable
        self._body_bytes_remaining -= len(body_bytes)
        self._buffer = searchable[-16:] if self._body_bytes_remaining else b""
        if not self._body_bytes_remaining:
            self._send_response()
            if next_request_bytes:
                self.data_received(next_request_bytes)

    def _send_response(self) -> None:
        if self._request_head.startswith(b"post"):
            if self._is_streaming:
                self._transport.write(MockWorkerConnection.response_heads[1])
                self._send_chunk(self._chunk_count, asyncio.get_running_loop().time())
            else:
                self._transport.write(MockWorkerConnection.response_heads[0])
            return
        page = self._pages.get(self._request_head.split(b" ", 2)[1], None)
        status = b"200 OK" if page is not None else b"404 Not Found"
        page = page or b""
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(page)) + page
        )

    def _send_chunk(self, chunks_remaining: int, due_s: float) -> None:
        if self._transport.is_closing():
            return
        if chunks_remaining == 0:
            self._transport.write(STREAM_END)
            return
        self._transport.write(make_event_chunk())
        loop = asyncio.get_running_loop()
        loop.call_at(due_s + self._interval_s, self._send_chunk, chunks_remaining - 1, due_s + self._interval_s)


def make_publisher(prompts: list[list[int]]) -> EventPublisher:
    """A publisher that has announced every full block of each prompt."""
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    )
    events = EventPublisher(config, model="mock", block_size=BLOCK)
    next_hash = 1
    for ids in prompts:
        count = len(ids) // BLOCK
        if count:
            hashes: list[Any] = list(range(next_hash, next_hash + count))
            next_hash += count
            events.publish([BlockStored(hashes, None, ids[: count * BLOCK], BLOCK, None, "GPU", None)])
    return events


async def churn_blocks(events: EventPublisher, per_second: float) -> None:
    """Store a new chain of blocks and remove an old one, `per_second` times a second."""
    rng = random.Random(events.epoch)
    stored_chains: deque[list[Any]] = deque()
    next_hash = 1 << 40
    while True:
        count = rng.randint(1, 40)
        hashes: list[Any] = list(range(next_hash, next_hash + count))
        next_hash += count
        ids = [rng.randrange(4096) for _ in range(count * BLOCK)]
        batch: list[Any] = [BlockStored(hashes, None, ids, BLOCK, None, "GPU", None)]
        stored_chains.append(hashes)
        if len(stored_chains) > 500:
            batch.append(BlockRemoved(list(reversed(stored_chains.popleft())), "GPU"))
        events.publish(batch)
        await asyncio.sleep(1.0 / per_second)


async def serve(
    model: str, announce: Path | None, chunks: int, pace_ms: float, churn_rate: float, max_model_len: int
) -> None:
    events = make_publisher(json.loads(announce.read_text()) if announce is not None else [])
    churn_task = asyncio.create_task(churn_blocks(events, churn_rate)) if churn_rate else None
    card = {"id": "mock", "object": "model", "owned_by": "mock", "root": model, "max_model_len": max_model_len}
    pages = {
        b"/health": b"",
        b"/v1/models": json.dumps({"object": "list", "data": [card]}).encode(),
        b"/kv_event_sources": encode_sources([events.describe_source()]),
        b"/metrics": b"",
        b"/get_server_info": json.dumps({"model_path": model, "served_model_name": "mock"}).encode(),
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: MockWorkerConnection(pages, chunks, pace_ms / 1e3), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    while churn_task is None or not churn_task.done():
        MockWorkerConnection.response_heads = make_heads()
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
