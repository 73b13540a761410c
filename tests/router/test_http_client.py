"""Answers of workers that come in more pieces than they are worth: others have their turns in between."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp.streams import StreamReader

from router.http_client import READ_BYTES, FetchError, fetch, open_session

PIECES_PER_TURN_MAX = READ_BYTES // 8
"""In one turn: what aiohttp keeps of chunks, once taken and half of it filled again."""
COUNT = 100_000
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"


def read_answer(answer: bytes, read: Callable[[aiohttp.ClientSession, str], Awaitable[Any]]) -> Any:
    """What `read` makes of an answer that comes at once."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def serve_and_read() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, aiohttp.ClientSession() as session:
            return await read(session, url)

    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(serve_and_read(), 60))
    finally:
        loop.close()


class LoopTurnCounter:
    """How much is done in one turn of the loop."""

    def __init__(self) -> None:
        self.pieces_max = self.pieces = self.turns = 0

    def count_piece(self) -> None:
        self.pieces += 1
        self.pieces_max = max(self.pieces_max, self.pieces)

    async def watch(self) -> None:
        while True:
            self.pieces = 0
            self.turns += 1
            await asyncio.sleep(0)


async def run_watched(turns: LoopTurnCounter, work: Awaitable[Any]) -> Any:
    watching = asyncio.ensure_future(turns.watch())
    try:
        return await work
    finally:
        watching.cancel()


def test_chunks_of_a_byte_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, feed = LoopTurnCounter(), StreamReader.feed_data

    def count_and_feed(reader: StreamReader, data: bytes, *args: Any) -> Any:
        turns.count_piece()
        return feed(reader, data, *args)

    monkeypatch.setattr(StreamReader, "feed_data", count_and_feed)
    answer = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * COUNT + b"0\r\n\r\n"

    async def read(session: aiohttp.ClientSession, url: str) -> Any:
        return await run_watched(turns, fetch(session, url, seconds=60, bytes_max=COUNT))

    assert read_answer(answer, read) == (200, b"x" * COUNT)
    assert turns.pieces_max <= PIECES_PER_TURN_MAX
    with pytest.raises(FetchError, match="more than 99 bytes"):
        read_answer(answer, lambda session, url: fetch(session, url, seconds=60, bytes_max=99))


def test_servers_that_do_not_answer_hold_up_no_other() -> None:
    """aiohttp shares 100 connections among all servers unless it is told otherwise."""
    silent_count = 120

    async def run() -> Any:
        writers: list[asyncio.StreamWriter] = []
        all_ask = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            if len(writers) == silent_count:
                all_ask.set()
            if b"/healthy" in await reader.readuntil(b"\r\n\r\n"):
                writer.write(HEAD + b"content-length: 0\r\n\r\n")

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_session(None) as session:
            silent = [asyncio.ensure_future(fetch(session, url, seconds=60, bytes_max=9)) for _ in range(silent_count)]
            await all_ask.wait()
            answer = await fetch(session, f"{url}/healthy", seconds=60, bytes_max=9)
            for request in silent:
                request.cancel()
            await asyncio.wait(silent)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        server.close()
        return answer

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (200, b"")


def test_what_is_compressed_stays_so() -> None:
    compressed = gzip.compress(bytes(10_000_000))
    answer = HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(compressed) + compressed

    async def read(_: aiohttp.ClientSession, url: str) -> Any:
        async with open_session(None) as session:
            return await fetch(session, url, seconds=60, bytes_max=len(compressed))

    assert read_answer(answer, read) == (200, compressed)


def test_cookies_are_dropped() -> None:
    answer = HEAD + b"set-cookie: a=1; Path=/\r\ncontent-length: 0\r\n\r\n"

    async def read(_: aiohttp.ClientSession, url: str) -> Any:
        async with open_session(None) as session:
            await fetch(session, url.replace("127.0.0.1", "localhost"), seconds=60, bytes_max=9)
            return list(session.cookie_jar)

    assert read_answer(answer, read) == []


@pytest.mark.parametrize(("host", "connections"), [("localhost", 3), ("127.0.0.1", 1)])
def test_a_host_that_is_given_by_name_is_looked_up_for_each_request(host: str, connections: int) -> None:
    """Checks came so often that the connection to the old machine was never idle for long, nor the name looked up."""
    accepted = 0

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed the connection
            while b"connection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower():
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, open_session(None) as session:
            for _ in range(3):
                assert await fetch(session, f"http://{host}:{port}/", seconds=20.0, bytes_max=10) == (200, b"ok")

    asyncio.run(run())
    assert accepted == connections
