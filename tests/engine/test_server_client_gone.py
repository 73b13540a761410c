"""A client that leaves before its answer began is no error of the engine's: nothing is logged, others go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientConnectionError, ClientSession, web

from engine.http.server import handle_errors
from engine.http.state import STATE


async def _leave_early(request: web.Request) -> web.StreamResponse:
    transport = request.transport
    assert transport is not None
    transport.abort()
    response = web.StreamResponse()
    await asyncio.sleep(0)
    await response.prepare(request)  # raises ConnectionResetError, as for a stream whose first token comes too late
    raise AssertionError("the head of an answer was written to nobody")


async def _answer_normally(request: web.Request) -> web.Response:
    return web.Response(text="here")


def test_a_client_gone_before_the_answers_head_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        app = web.Application(middlewares=[handle_errors])
        app[STATE] = cast(Any, SimpleNamespace(api_keys=SimpleNamespace(check_client=lambda headers: None)))
        app.add_routes([web.get("/gone", _leave_early), web.get("/here", _answer_normally)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with ClientSession() as session:
                with pytest.raises(ClientConnectionError):
                    await session.get(f"http://{host}:{port}/gone")
                async with session.get(f"http://{host}:{port}/here") as response:
                    assert await response.text() == "here"
        finally:
            await runner.cleanup()

    asyncio.run(play())
    assert "Error handling request" not in caplog.text
    assert "Traceback" not in caplog.text
