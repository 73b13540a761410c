"""A connection that brings no whole head of a request is closed, the first one and the next, however it stays busy."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from engine.http import server

HEAD = b"GET /health HTTP/1.1\r\nHost: h\r\n"
SENT = {"nothing": b"", "a part": HEAD, "a part after a whole one": HEAD + b"\r\n" + HEAD}


async def _health(request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.parametrize("trickles", [False, True])
@pytest.mark.parametrize("head_bytes", SENT.values(), ids=SENT)
def test_a_head_that_never_ends_closes_its_connection(
    head_bytes: bytes, trickles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_S", 0.5)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        for number in range(1000):
            writer.write(b"x-%d: 1\r\n" % number if head_bytes else b"\r\n")
            await asyncio.sleep(0.05)

    async def play() -> None:
        app = web.Application()
        app.add_routes([web.get("/health", _health)])
        runner = server.make_runner(app, log_requests=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
            writer.write(head_bytes)
            task = asyncio.create_task(trickle(writer)) if trickles else None
            response = await asyncio.wait_for(_read_until_closed(reader), 30)
            assert response.count(b"HTTP/1.1 200") == head_bytes.count(b"\r\n\r\n")
            if task:
                task.cancel()
            writer.close()
        finally:
            await runner.cleanup()

    asyncio.run(play())


async def _read_until_closed(reader: asyncio.StreamReader) -> bytes:
    response = b""
    try:
        while data := await reader.read(65536):
            response += data
    except ConnectionResetError:  # it was still sending
        pass
    return response
