"""What scripts/chaos is made of: workers that can be killed, links that can be cut, rogue workers, clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from demo_cluster import free_port

READY_S_MAX = 120.0


class Link:
    """A TCP relay that can be cut: what stands between a worker's event sockets and the router."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._up = True
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._up:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    def cut(self) -> None:
        self._up = False
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._up = True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


class EngineWorker:
    """`engine serve` on fixed ports, its events behind links."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self.port, self._events, self._replay = free_port(), free_port(), free_port()
        self.links = [Link(self._events), Link(self._replay)]
        self._log = logs / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def flag(self) -> str:
        events, replay = (f"tcp://127.0.0.1:{link.port}" for link in self.links)
        return f"url={self.url},id={self.name},events={events},replay={replay}"

    async def start(self) -> None:
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replay}",
        }
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine", "serve", "--port", str(self.port),
                "--kv-events-config", json.dumps(config), stdout=log, stderr=log,
            )  # fmt: skip

    async def kill(self) -> None:
        """SIGKILL, its children too: nothing is said to anybody."""
        assert self._process is not None
        for child in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                import os

                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except asyncio.TimeoutError:
                await self.kill()


class Rogue:
    """A worker that looks healthy and is not: `silent` never answers a request, `half` breaks its answers off."""

    def __init__(self, kind: str, card: dict[str, Any]) -> None:
        self.kind = kind
        self._card = card
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.requests = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    known = head.startswith((b"GET /health", b"GET /v1/models"))
                    body = json.dumps({"object": "list", "data": [self._card]}).encode() if known else b"{}"
                    status = b"200 OK" if known else b"404 Not Found"
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
                    continue
                self.requests += 1
                if self.kind == "half":
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                        b'20\r\ndata: {"id":"x","choices":[]}\n\n\n\r\n'
                    )
                    await writer.drain()
                    if random.random() < 0.5:
                        await asyncio.sleep(0.05)
                        writer.transport.abort()
                        return
                await reader.read(-1)
        writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()


@dataclass
class Tally:
    """What became of the requests."""

    sent: int = 0
    answered: int = 0
    broken_off: int = 0
    """Answers that began and were cut, streams or not: nobody could have repeated them."""
    failed: Counter[str] = field(default_factory=Counter)
    """Reason -> requests that were lost although no byte of an answer had come."""
    slowest_s: float = 0.0
    hung: int = 0


class Load:
    """Clients that talk without a pause until told to stop."""

    def __init__(self, url: str, model: str, *, clients: int, patience_s: float, seed: int) -> None:
        self._url = url
        self._model = model
        self._clients = clients
        self._patience_s = patience_s
        self._rng = random.Random(seed)
        self._stop = asyncio.Event()
        self.tally = Tally()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._patience_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self._clients)))

    def stop(self) -> None:
        self._stop.set()

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        messages: list[dict[str, str]] = []
        while not self._stop.is_set():
            if turn % 6 == 0:
                start = " ".join(f"client {number} talk {turn} word {i}" for i in range(self._rng.randint(10, 60)))
                messages = [{"role": "system", "content": start}]
            turn += 1
            messages.append({"role": "user", "content": f"turn {turn}?"})
            await self._ask(session, messages, stream=self._rng.random() < 0.5)
            messages.append({"role": "assistant", "content": "Yes."})

    async def _ask(self, session: aiohttp.ClientSession, messages: list[dict[str, str]], *, stream: bool) -> None:
        tally = self.tally
        tally.sent += 1
        body = {"model": self._model, "messages": messages, "max_tokens": 8, "stream": stream}
        started = time.monotonic()
        begun = False
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                begun = answer.status == 200
                data = await answer.read()
                if answer.status != 200:
                    tally.failed[f"{answer.status} {data[:120].decode(errors='replace')}"] += 1
                elif stream and b"[DONE]" not in data:
                    tally.broken_off += 1
                else:
                    tally.answered += 1
        except asyncio.TimeoutError:
            tally.hung += 1
        except aiohttp.ClientError as error:
            if begun:
                tally.broken_off += 1
            else:
                tally.failed[type(error).__name__] += 1
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - started)
