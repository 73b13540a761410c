"""A streaming OpenAI client that costs little: one TCP connection a user, answers searched, not parsed.

Every system is measured through this same client (Hugging Face's `generate` has no server and is timed in its own
process, which flatters it). A chunk counts when its bytes arrive; how many tokens an answer has is what the server's
`usage` says, checked against what was asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

_DONE = b"data: [DONE]"
_CHUNK = b"data: {"


@dataclass(slots=True)
class Answer:
    """When the parts of one answer came, seconds of `time.perf_counter`."""

    sent_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    tokens: int = 0
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.chunk_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks; a gap of zero is two chunks that came in one read."""
        times = self.chunk_times_s
        return [b - a for a, b in pairwise(times)]

    @property
    def itl_s(self) -> float:
        """Mean time a token after the first."""
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / max(1, self.tokens - 1)


def completion_body(model: str, prompt: list[int], output_len: int, with_ids: bool) -> bytes:
    """Exactly `output_len` greedy tokens, streamed, with the usage at the end; `with_ids`: and their ids."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if with_ids:
        body["return_token_ids"] = True
    return json.dumps(body, separators=(",", ":")).encode()


class _User(asyncio.Protocol):
    """Sends a request, takes the answer, sends the next, until the feed is empty."""

    def __init__(self, host: str, feed: Iterator[bytes], output_len: int, done: asyncio.Future[None]) -> None:
        self._head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._feed = feed
        self._output_len = output_len
        self._done = done
        self._tail = b""
        self._transport: asyncio.WriteTransport | None = None
        self._answer: Answer | None = None
        self.answers: list[Answer] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        body = next(self._feed, None)
        if body is None:
            self._done.set_result(None)
            self._transport.close()
            return
        self._tail = b""
        request = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._answer = Answer(time.perf_counter())
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        answer = self._answer
        if answer is None:
            self._fail(f"bytes that nobody asked for: {data[:200]!r}")
            return
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"the server answered {data[:400]!r}")
            return
        joined = self._tail[-16:] + data
        count = joined.count(_CHUNK) - self._tail[-16:].count(_CHUNK)
        answer.chunk_times_s.extend([now_s] * count)
        self._tail = (self._tail + data)[-2048:]
        if _DONE in self._tail and self._tail.endswith(b"0\r\n\r\n"):
            self._finish(answer, now_s)

    def _finish(self, answer: Answer, now_s: float) -> None:
        answer.end_s = now_s
        answer.chunk_times_s.pop()  # the usage
        at = self._tail.rfind(b'"completion_tokens":')
        answer.tokens = int(self._tail[at + 20 :].lstrip().split(b",")[0].split(b"}")[0]) if at >= 0 else 0
        if answer.tokens != self._output_len:
            self._fail(f"{answer.tokens} tokens instead of {self._output_len}: {self._tail!r}")
            return
        self.answers.append(answer)
        self._answer = None
        self._next()

    def _fail(self, message: str) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(message))
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"connection lost in the middle of an answer: {exc}"))


async def _closed_loop(url: str, bodies: list[bytes], users: int, output_len: int) -> tuple[list[Answer], float]:
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    feed = iter(bodies)
    made: list[_User] = []
    waits: list[asyncio.Future[None]] = []
    start_s = time.perf_counter()
    for _ in range(users):
        done: asyncio.Future[None] = loop.create_future()

        def new_user(done: asyncio.Future[None] = done) -> _User:
            return _User(address.netloc, feed, output_len, done)

        _, user = await loop.create_connection(new_user, address.hostname or address.netloc, address.port or 80)
        made.append(user)
        waits.append(done)
    await asyncio.gather(*waits)
    wall_s = time.perf_counter() - start_s
    return [answer for user in made for answer in user.answers], wall_s


def closed_loop(
    url: str, model: str, prompts: list[list[int]], users: int, output_len: int, *, with_ids: bool = False
) -> tuple[list[Answer], float]:
    """All the prompts, `users` at any time; their answers and the wall seconds. Raises RuntimeError on any other."""
    import uvloop

    bodies = [completion_body(model, prompt, output_len, with_ids) for prompt in prompts]
    result: tuple[list[Answer], float] = uvloop.run(_closed_loop(url, bodies, users, output_len))
    return result
