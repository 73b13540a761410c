"""--max-queue counts who is inside and who is being read; --request-timeout also ends who does not take its answer."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ServerConfig
from engine.http import generate
from engine.http.admission import Admission
from engine.http.generate import ResponseWriter
from engine.http.server import make_runner
from prompts import RequestError


class Client:
    death_reason: str | None = None
    stats = publisher_stats = None

    def __init__(self) -> None:
        self.in_flight_count = 0

    def submit(self, requests: list[Any]) -> None:
        self.in_flight_count += len(requests)


def make_admission(limit: int, client: Any) -> Admission:
    return Admission(client, limit)


@given(limit=st.integers(1, 6), arrivals=st.lists(st.tuples(st.integers(1, 7), st.booleans()), max_size=12))
def test_no_more_than_the_limit_are_ever_inside(limit: int, arrivals: list[tuple[int, bool]]) -> None:
    """Any number come in at once, are read for a while, and then submit what they ask for or give up."""
    client = Client()
    admission = make_admission(limit, client)
    with ExitStack() as reading:
        inside = []
        for count, submits in arrivals:
            place = ExitStack()
            try:
                place.enter_context(admission.reserve())
            except RequestError as error:
                refusal_status = error.status
                assert (refusal_status, client.in_flight_count + admission._reading_request_count) == (429, limit)
                continue
            inside.append((reading.enter_context(place), count, submits))
        for place, count, submits in inside:
            if submits:
                before = client.in_flight_count + admission._reading_request_count
                try:
                    admission.submit([SimpleNamespace()] * count)
                    refusal_status = 200
                except RequestError as error:
                    refusal_status = error.status
                fits = before + count - 1 <= limit
                assert refusal_status == (200 if fits else 400 if count > limit else 429)
            place.close()
            assert client.in_flight_count + admission._reading_request_count <= limit
    assert admission._reading_request_count == 0


def test_nobody_is_let_in_while_the_server_ends() -> None:
    admission = make_admission(0, Client())
    with admission.reserve():
        admission.is_draining = True
        with pytest.raises(RequestError, match="shutting down"):
            admission.submit([SimpleNamespace()])
    with pytest.raises(RequestError, match="shutting down"), admission.reserve():
        raise AssertionError


@pytest.mark.parametrize("ends_in_s", [-5.0, 0.0, 0.05])
def test_a_reader_that_takes_nothing_is_dropped_at_the_deadline(
    ends_in_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it would be for standing still; the error that ends its stream may still be waited for a moment."""
    monkeypatch.setattr(generate, "FINAL_WRITES_S", 0.01)
    monkeypatch.setattr(generate, "FINAL_WRITE_S_MIN", 0.01)
    drops: list[bool] = []

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        request: Any = SimpleNamespace(transport=SimpleNamespace(abort=lambda: drops.append(True)))
        writer = ResponseWriter(
            request, ServerConfig(stall_timeout_s=3600), asyncio.get_running_loop().time() + ends_in_s
        )
        await writer._wait_for_client(wait_for_ever())

    with pytest.raises(ConnectionResetError):
        asyncio.run(run())
    assert drops


@pytest.mark.parametrize(("late_s", "limit_s"), [(0.0, 1.0), (0.5, 0.5), (60.0, generate.FINAL_WRITE_S_MIN)])
def test_all_that_is_written_after_the_deadline_shares_one_moment(
    late_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def wait_for(writing: Any, timeout_s: float) -> None:
        limits.append(timeout_s)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: 1000.0)
        await ResponseWriter(Mock(), ServerConfig(), 1000.0 - late_s)._wait_for_client(Mock())

    monkeypatch.setattr("asyncio.wait_for", wait_for)
    asyncio.run(run())
    assert limits == [limit_s]


def test_a_stream_that_says_nothing_sends_its_head_and_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "KEEPALIVE_COMMENT_S", 0.01)

    async def play() -> bytes:
        computation = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            writer = ResponseWriter(request, ServerConfig(), None)
            commenting = asyncio.ensure_future(writer.send_keepalive_comments())
            await computation.wait()
            await writer.write(b"data: a\n\n")
            commenting.cancel()
            return await writer.end()

        app = web.Application()
        app.add_routes([web.get("/", handler)])
        runner = make_runner(app, log_requests=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            reader, sender = await asyncio.open_connection(*runner.addresses[0][:2])
            sender.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            received_bytes = b""
            while received_bytes.count(generate.KEEPALIVE_COMMENT) < 3:
                received_bytes += await reader.read(1)
            computation.set()
            received_bytes += await reader.read()
            sender.close()
            await sender.wait_closed()
            return received_bytes
        finally:
            await runner.cleanup()

    received_bytes = asyncio.run(play())
    assert received_bytes.startswith(b"HTTP/1.1 200")
    assert b"text/event-stream" in received_bytes
    assert received_bytes.rindex(generate.KEEPALIVE_COMMENT) < received_bytes.index(b"data: a\n\n")
