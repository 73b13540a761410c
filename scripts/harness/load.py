"""The load client: raw HTTP over kept connections, every part of an answer with the moment it came.

All benchmarks measure through it, so it costs little: a C parser cuts the answer, and nothing is read out of it until
the run is over. Times are of `time.monotonic`, which senders on the same machine can read too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

PATIENCE_S = 300.0
_AS_OPENAI = {
    "Accept-Encoding": "gzip, deflate", "Accept": "application/json", "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 1.99.0", "X-Stainless-Lang": "python", "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64", "X-Stainless-Runtime": "CPython", "X-Stainless-Async": "false",
    "Authorization": "Bearer sk-none", "X-Stainless-Retry-Count": "0",
}  # fmt: skip
"""The headers that OpenAI's Python client sends."""


def post(path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] = {}) -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    lines = [f"{name}: {value}" for name, value in {**_AS_OPENAI, **headers, "Content-Length": len(data)}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode() + data


def completion(model: str, prompt: str | list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A body: exactly `tokens` greedy tokens, streamed, with the usage at the end."""
    wanted = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {**wanted, "stream": True, "stream_options": {"include_usage": True}, **more}


@dataclass(slots=True)
class Answer:
    """One answer as it came."""

    sent_s: float
    status: int = 0
    """0: not even a head came."""
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    """(when, bytes of the body)."""
    end_s: float = 0.0
    error: str = ""
    """Why it is not whole."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Server-sent events that are JSON, each with the moment its last byte came."""
        rest = b""
        for at_s, data in self.parts:
            *whole, rest = (rest + data).split(b"\n\n")
            for event in whole:
                name, data, body = event.partition(b"data: {")
                if data and (not name or name.startswith(b"event: ")):
                    yield at_s, b"{" + body

    def checked(self) -> Answer:
        """Itself. RuntimeError unless it is a whole 200."""
        if self.error or self.status != 200:
            raise RuntimeError(f"status {self.status} {self.error}: {self.body[:400]!r}")
        return self


class _Connection(asyncio.Protocol):
    """One request at a time. The names without underscore are what asyncio and the parser call."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._leaves = False
        self._now_s = 0.0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, request: bytes, leaves: bool, patience_s: float) -> asyncio.Future[Answer]:
        """`leaves`: go away as soon as something of the body has come."""
        loop = asyncio.get_running_loop()
        self._leaves, self._done = leaves, loop.create_future()
        self._late = loop.call_later(patience_s, self._end, "timeout")
        self._answer = Answer(time.monotonic())
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"{type(error).__name__}: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.parts.append((self._now_s, data))
            if self._leaves:
                self._end("left")

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.transport.close()
        self._end("")

    def _end(self, error: str) -> None:
        if self._answer is None or self._done is None:
            return
        self._late.cancel()
        answer, self._answer = self._answer, None
        answer.end_s, answer.error = time.monotonic(), error
        if error:
            self.transport.abort()
        if not self._done.done():
            self._done.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")


class Client:
    """Kept connections to one server; as many requests at a time as are asked."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, source: str | None = None) -> None:
        """`source`: an address of this machine to come from."""
        parts = urlsplit(url)
        self._source = (source, 0) if source else None
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._patience_s = patience_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.transport.close()

    async def ask(
        self, request: bytes, *, leaves: bool = False, fresh: bool = False, patience_s: float | None = None
    ) -> Answer:
        """Never raises for what the server does: the answer tells. `fresh`: on a connection of its own."""
        connection = None
        while self._idle and connection is None and not fresh:
            connection = self._idle.pop()
            if connection.transport.is_closing():
                connection = None
        if connection is None:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, *self._address, local_addr=self._source)
            except OSError as error:
                now_s = time.monotonic()
                return Answer(now_s, end_s=now_s, error=f"no connection: {error}")
        answer = await connection.ask(request, leaves, self._patience_s if patience_s is None else patience_s)
        if fresh:
            connection.transport.close()
        elif not connection.transport.is_closing():
            self._idle.append(connection)
        return answer


async def closed_loop(url: str, requests: Iterable[bytes], concurrency: int) -> list[Answer]:
    """All of them, so many at any time. RuntimeError unless each gets a whole 200."""
    feed, answers = iter(requests), []

    async def user(client: Client) -> None:
        for request in feed:
            answers.append((await client.ask(request)).checked())

    async with Client(url) as client:
        await asyncio.gather(*(user(client) for _ in range(concurrency)))
    return answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """One streamed answer as the client saw it; tokens as the engine reported them."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    """What the router said before."""
    answer_tokens: int
    ttft_s: float
    """To the first event with a token, whether or not it has text."""
    e2e_s: float
    text: str

    @classmethod
    def of(cls, answer: Answer, tokens: int, where: str) -> Outcome:
        """RuntimeError naming `where` unless it is a whole answer of so many tokens."""
        try:
            events = [(at_s, json.loads(data)) for at_s, data in answer.checked().events()]
            usage = next(event["usage"] for _, event in reversed(events) if event.get("usage"))
        except (RuntimeError, StopIteration) as error:
            raise RuntimeError(f"{where}: {error or 'an answer without usage'}") from None
        if usage["completion_tokens"] != tokens:
            raise RuntimeError(f"{where}: asked for {tokens} tokens, the answer ended with usage {usage}")
        choices = [(at_s, choice) for at_s, event in events for choice in event.get("choices", ())]
        texts = [(at_s, c["text"] if "text" in c else c["delta"].get("content")) for at_s, c in choices]
        first_s = next(at_s for at_s, text in texts if text is not None)
        return cls(
            answer.headers.get("x-blockcast-worker", where), usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            int(answer.headers.get("x-blockcast-predicted-cached-tokens", 0)), tokens, first_s - answer.sent_s,
            answer.end_s - answer.sent_s, "".join(text or "" for _, text in texts),
        )  # fmt: skip
