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

TIMEOUT_S = 300.0
_OPENAI_HEADERS = {
    "Accept-Encoding": "gzip, deflate", "Accept": "application/json", "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 1.99.0", "X-Stainless-Lang": "python", "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64", "X-Stainless-Runtime": "CPython", "X-Stainless-Async": "false",
    "Authorization": "Bearer sk-none", "X-Stainless-Retry-Count": "0",
}  # fmt: skip
"""The headers that OpenAI's Python client sends."""


def post_request(path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] = {}) -> bytes:
    """The bytes of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    lines = [
        f"{name}: {value}" for name, value in {**_OPENAI_HEADERS, **headers, "Content-Length": len(content)}.items()
    ]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode() + content


def completion_body(model: str, prompt: str | list[int], token_count: int, **extra_fields: Any) -> dict[str, Any]:
    """A body: exactly `token_count` greedy tokens, streamed, with the usage at the end."""
    required_fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": token_count,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return {**required_fields, "stream": True, "stream_options": {"include_usage": True}, **extra_fields}


@dataclass(slots=True)
class Response:
    """One answer as it came."""

    start_s: float
    status: int = 0
    """0: not even a head came."""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """(when, bytes of the body)."""
    end_s: float = 0.0
    error: str = ""
    """Why it is not whole."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.chunks)

    def json_events(self) -> Iterator[tuple[float, bytes]]:
        """Server-sent events that are JSON, each with the moment its last byte came."""
        remaining_bytes = b""
        for at_s, data in self.chunks:
            *complete_events, remaining_bytes = (remaining_bytes + data).split(b"\n\n")
            for event in complete_events:
                prefix, data, body = event.partition(b"data: {")
                if data and (not prefix or prefix.startswith(b"event: ")):
                    yield at_s, b"{" + body

    def raise_for_status(self) -> Response:
        """Itself. RuntimeError unless it is a whole 200."""
        if self.error or self.status != 200:
            raise RuntimeError(f"status {self.status} {self.error}: {self.body[:400]!r}")
        return self


class _Connection(asyncio.Protocol):
    """One request at a time. The names without underscore are what asyncio and the parser call."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._response_future: asyncio.Future[Response] | None = None
        self._disconnects_early = False
        self._now_s = 0.0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: bytes, disconnects_early: bool, timeout_s: float) -> asyncio.Future[Response]:
        """`disconnects_early`: disconnect as soon as something of the body has come."""
        loop = asyncio.get_running_loop()
        self._disconnects_early, self._response_future = disconnects_early, loop.create_future()
        self._timeout_handle = loop.call_later(timeout_s, self._finish, "timeout")
        self._response = Response(time.monotonic())
        self.transport.write(request)
        return self._response_future

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"{type(error).__name__}: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._response is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.chunks.append((self._now_s, data))
            if self._disconnects_early:
                self._finish("left")

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.transport.close()
        self._finish("")

    def _finish(self, error: str) -> None:
        if self._response is None or self._response_future is None:
            return
        self._timeout_handle.cancel()
        response, self._response = self._response, None
        response.end_s, response.error = time.monotonic(), error
        if error:
            self.transport.abort()
        if not self._response_future.done():
            self._response_future.set_result(response)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"connection lost: {exc}")


class Client:
    """Kept connections to one server; as many requests at a time as are asked."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, source: str | None = None) -> None:
        """`source`: an address of this machine to come from."""
        url_parts = urlsplit(url)
        self._source = (source, 0) if source else None
        self._address = url_parts.hostname or "127.0.0.1", url_parts.port or 80
        self._timeout_s = timeout_s
        self._idle_connections: list[_Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle_connections:
            connection.transport.close()

    async def send(
        self,
        request: bytes,
        *,
        disconnects_early: bool = False,
        new_connection: bool = False,
        timeout_s: float | None = None,
    ) -> Response:
        """Never raises for what the server does: the answer tells. `new_connection`: on a connection of its own."""
        connection = None
        while self._idle_connections and connection is None and not new_connection:
            connection = self._idle_connections.pop()
            if connection.transport.is_closing():
                connection = None
        if connection is None:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, *self._address, local_addr=self._source)
            except OSError as error:
                now_s = time.monotonic()
                return Response(now_s, end_s=now_s, error=f"no connection: {error}")
        response = await connection.send(
            request, disconnects_early, self._timeout_s if timeout_s is None else timeout_s
        )
        if new_connection:
            connection.transport.close()
        elif not connection.transport.is_closing():
            self._idle_connections.append(connection)
        return response


async def closed_loop(url: str, requests: Iterable[bytes], concurrency: int) -> list[Response]:
    """All of them, so many at any time. RuntimeError unless each gets a whole 200."""
    pending_requests, responses = iter(requests), []

    async def send_pending(client: Client) -> None:
        for request in pending_requests:
            responses.append((await client.send(request)).raise_for_status())

    async with Client(url) as client:
        await asyncio.gather(*(send_pending(client) for _ in range(concurrency)))
    return responses


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """One streamed answer as the client saw it; tokens as the engine reported them."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    """What the router said before."""
    completion_tokens: int
    ttft_s: float
    """To the first event with a token, whether or not it has text."""
    e2e_s: float
    text: str

    @classmethod
    def from_response(cls, response: Response, token_count: int, request_name: str) -> StreamOutcome:
        """RuntimeError naming `request_name` unless it is a whole answer of so many tokens."""
        try:
            events = [(at_s, json.loads(data)) for at_s, data in response.raise_for_status().json_events()]
            usage = next(event["usage"] for _, event in reversed(events) if event.get("usage"))
        except (RuntimeError, StopIteration) as error:
            raise RuntimeError(f"{request_name}: {error or 'an answer without usage'}") from None
        if usage["completion_tokens"] != token_count:
            raise RuntimeError(f"{request_name}: asked for {token_count} tokens, the answer ended with usage {usage}")
        choices = [(at_s, choice) for at_s, event in events for choice in event.get("choices", ())]
        texts = [(at_s, c["text"] if "text" in c else c["delta"].get("content")) for at_s, c in choices]
        first_s = next(at_s for at_s, text in texts if text is not None)
        return cls(
            response.headers.get("x-blockcast-worker", request_name), usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            int(response.headers.get("x-blockcast-predicted-cached-tokens", 0)), token_count,
            first_s - response.start_s, response.end_s - response.start_s, "".join(text or "" for _, text in texts),
        )  # fmt: skip
