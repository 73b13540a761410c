"""Streams through the edge: bytes as they come, and an end for each way in which one can end."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.edge.config import Timeouts
from router.http.chunked import ChunkedBody
from router.http.headers import ProtocolError

STREAM = b'{"model":"tiny","prompt":"x","stream":true}'
PATH = b"/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


# Where a body stands ------------------------------------------------------------------------------------------------


@st.composite
def bodies(draw: Any) -> bytes:
    """A chunked body, sound or not."""
    size = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a=b", b"%x ", b"g%x", b"%x\n"])
    body = b""
    for content in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        line = draw(size) if draw(st.integers(0, 9)) == 0 else b"%x"
        end = draw(st.sampled_from([b"\r\n"] * 20 + [b"\n", b"x\r\n", b""]))
        body += line % len(content) + b"\r\n" + content + end
    return body + draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", b"00000000000\r\n\r\n"]))


def read(reads: list[bytes]) -> tuple[bytes, bool, bool]:
    """(content, whether done, whether it broke: then what came in that read is lost)."""
    body, content = ChunkedBody(), bytearray()
    try:
        for data in reads:
            content += body.feed(data)[0]
    except ProtocolError:
        return b"", False, True
    return bytes(content), body.is_complete, False


@given(st.data())
def test_a_body_ends_where_it_ends_however_it_is_cut(data: st.DataObject) -> None:
    whole = data.draw(bodies())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    reads = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)]) if a < b]
    assert read(reads) == read([whole])


async def read_content(reader: asyncio.StreamReader, byte_count: int) -> bytes:
    """Content of the next chunks, of so many bytes in all."""
    content = b""
    while len(content) < byte_count:
        size = int((await reader.readuntil(b"\r\n"))[:-2], 16)
        content += (await reader.readexactly(size + 2))[:-2]
    return content


# Through the edge ---------------------------------------------------------------------------------------------------


class Paced:
    """A worker's script that sends a chunk when it is told to."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, request: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while (piece := await self.pieces.get()) is not None:
            writer.write(piece)
            await writer.drain()


async def begin(edge: Any, make_post: Any, **start: Any) -> tuple[Paced, asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream in the middle of its answer, three chunks of it read."""
    await edge.start(**start)
    script = Paced()
    await edge.worker(script)
    reader, writer = await edge.connect()
    writer.write(make_post(STREAM, PATH, close=False))
    await reader.readuntil(b"\r\n\r\n")
    for number in range(3):
        script.pieces.put_nowait(chunk(b"data: %d\n\n" % number))
        assert await reader.readexactly(14) == chunk(b"data: %d\n\n" % number)
    return script, reader, writer


def test_a_stream_passes_as_it_comes_and_its_usage_is_found(edge: Any, make_post: Any) -> None:
    usage = b'data: {"usage":{"prompt_tokens":7,"completion_tokens":20}}\n\n'

    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post)
        ended: list[Any] = []
        edge.proxy.on_end.append(ended.append)
        split = chunk(b"data: split over reads\n\n")
        for piece, content in (
            (split[:9], b"data:"), (split[9:-1], b" split over reads\n\n"),
            (split[-1:] + chunk(b"x" * 100_000), b"x" * 100_000),
            (chunk(usage)[:59], usage[:55]), (chunk(usage)[59:], usage[55:]),  # between the digits of a count
        ):  # fmt: skip
            script.pieces.put_nowait(piece)
            assert await read_content(reader, len(content)) == content
        script.pieces.put_nowait(b"0\r\n\r\n")
        script.pieces.put_nowait(None)
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        await edge.settle()
        assert ended[0].usage.completion_tokens == 20
        assert ended[0].progress.read_count >= 9
        writer.close()

    edge.run(scenario())


def test_connections_go_on_after_their_streams(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post)
        for _ in range(3):
            script.pieces.put_nowait(b"0\r\n\r\n")
            script.pieces.put_nowait(None)
            assert await reader.readexactly(5) == b"0\r\n\r\n"
            await edge.settle()
            writer.write(make_post(STREAM, PATH, close=False))
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(4):
                script.pieces.put_nowait(chunk(b"word"))
                assert await reader.readexactly(9) == chunk(b"word")
        assert edge.upstreams[0].connections == 1
        writer.close()
        script.pieces.put_nowait(None)

    edge.run(scenario())


def test_a_client_that_leaves_ends_the_work(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, _, writer = await begin(edge, make_post)
        writer.transport.abort()
        for number in range(200):
            if edge.upstreams[0].closed_by_router or not edge.proxy.exchanges:
                break
            script.pieces.put_nowait(chunk(b"more %d" % number))
            await edge.let_loop_read()
        await edge.settle()
        script.pieces.put_nowait(None)

    edge.run(scenario())


def test_a_worker_that_dies_in_the_middle_cuts_the_answer(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post)
        script.pieces.put_nowait(b"ff\r\nhalf a chunk")
        assert await reader.readexactly(17) == chunk(b"half a chunk")
        await edge.upstreams[0].stop()
        assert await reader.read(-1) == b""
        await edge.settle()
        assert edge.metrics.failures[("w0", "stream")] == 1
        writer.close()
        script.pieces.put_nowait(None)

    edge.run(scenario())


def test_a_client_that_does_not_read_stops_its_worker_and_loses_nothing(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post)
        writer.transport.pause_reading()
        sent = b""
        for number in range(64):
            content = bytes([65 + number % 26]) * 400_000
            sent += content
            script.pieces.put_nowait(chunk(content))
        (exchange,) = edge.proxy.exchanges.values()
        await edge.until(lambda: exchange._is_client_paused and edge.upstreams[0].unread_bytes)
        for _ in range(20):
            await edge.let_loop_read()
            assert script.pieces.qsize() > 20, "everything was taken in for a client that reads nothing"
        writer.transport.resume_reading()
        assert await read_content(reader, len(sent)) == sent
        script.pieces.put_nowait(chunk(b"small again"))
        assert await reader.readexactly(16) == chunk(b"small again")
        script.pieces.put_nowait(b"0\r\n\r\n")
        script.pieces.put_nowait(None)
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()

    edge.run(scenario())


def test_lines_that_are_split_between_reads_pass_as_they_come(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post)
        for _ in range(20):
            script.pieces.put_nowait(b"a")
            await edge.let_loop_read()
            script.pieces.put_nowait(b"\r\n0123456789\r\n")
            assert await reader.readexactly(15) == chunk(b"0123456789")
        script.pieces.put_nowait(b"0\r\n\r\n")
        script.pieces.put_nowait(None)
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()

    edge.run(scenario())


def test_a_silent_worker_runs_into_the_idle_timeout_and_a_talking_one_does_not(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        script, reader, writer = await begin(edge, make_post, timeouts=Timeouts(idle_s=0.4))
        for _ in range(8):
            edge.advance(0.1)
            script.pieces.put_nowait(chunk(b"alive"))
            assert await reader.readexactly(10) == chunk(b"alive")
        edge.advance(0.5)
        assert await reader.read(-1) == b""
        await edge.settle()
        writer.close()
        script.pieces.put_nowait(None)

    edge.run(scenario())
