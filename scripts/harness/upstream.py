"""Workers that answer as they are told: bytes, pauses, and connections that end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

CLOSE, RESET, WAIT = "close", "reset", "wait"
Steps = tuple[bytes | float | str, ...]
"""Bytes are written, seconds slept; CLOSE and RESET end the connection, WAIT holds it until the other side leaves."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def complete_response(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


NOT_FOUND: Steps = (complete_response(b"{}", b"HTTP/1.1 404 Not Found\r\n"),)


def model_card(name: str, **extra_fields: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": "vllm", "root": name, "max_model_len": 8192, **extra_fields}


def models_page(card: Mapping[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": [card]}).encode()


class Upstream:
    """A worker whose pages are given and whose POSTs are answered step by step. Use as `async with`."""

    def __init__(
        self,
        pages: Mapping[str, bytes],
        make_steps: Callable[[], Steps] = lambda: (WAIT,),
        *,
        accept_action: str = "",
        port: int = 0,
    ) -> None:
        self.pages = {"/health": b"{}", **pages}
        """Path -> body of a 200, or a whole answer where it begins with HTTP."""
        self.make_steps = make_steps
        self.accept_action = accept_action
        """CLOSE or RESET: what becomes of every connection."""
        self.default_page: bytes | None = None
        """The body for every path that has no page."""
        self.port = port
        self.url = ""
        self._writers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        """Task -> the connection that the task serves."""

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers.values():
            writer.transport.abort()
        if self._writers:
            await asyncio.wait(self._writers, timeout=5.0)

    def response_steps(self, method: str, path: str, body: bytes) -> Steps:
        """Return the steps that answer a request."""
        page = self.pages.get(path, self.default_page)
        if page is not None:
            return (page if page.startswith(b"HTTP/") else complete_response(page),)
        return self.make_steps() if method != "GET" else NOT_FOUND

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._writers[task] = writer
        try:
            if self.accept_action:
                await self._run_steps(reader, writer, (self.accept_action,))
                return
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                position = head.lower().find(b"content-length:")
                body = await reader.readexactly(int(head[position + 15 :].split(b"\r\n")[0]) if position >= 0 else 0)
                steps = self.response_steps(method.decode("latin-1"), path.decode("latin-1").partition("?")[0], body)
                if await self._run_steps(reader, writer, steps):
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            del self._writers[task]

    async def _run_steps(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Steps) -> bool:
        """Whether the connection has ended with it."""
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == WAIT:
                while await reader.read(65536):
                    pass
                writer.close()
                return True
            else:
                if step == RESET:
                    writer.transport.abort()
                writer.close()
                return True
        return False
