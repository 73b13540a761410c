"""What clients make the router keep: bounded while it comes, in sum and for each party; refused before its body is read
where it would be refused after; given back however it ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import RequestError
from router.edge.exchange import Exchange
from router.edge.request_context import RequestContext
from router.http import headers as headers_module
from router.http.budget import BufferBudget
from router.http.config import ClientTimeouts, HttpLimits
from router.http.connection import MAX_PIPELINED_BYTES, WRITE_BUFFER_BYTES
from router.http.headers import HeaderBlock
from router.http.request import BadRequest, HttpRequest, RequestParser
from router.http.routes import Response
from router.metrics import Metrics

MIB = 1 << 20
KEY = b"Authorization: Bearer k1\r\n"


def head(length: int, extra: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nHost: r\r\n" + extra + b"Content-Length: %d\r\n\r\n" % length


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("framing", [b"Content-Length: 50000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("before", [b"", b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n"])
def test_a_body_without_a_key_is_not_waited_for(edge: Any, expect: bytes, framing: bytes, before: bytes) -> None:
    async def scenario() -> None:
        await edge.start(api_keys=("k1",))
        start = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
        answer = await edge.exchange(before + start + expect + framing + b"\r\n\r\n")  # and then waits for the close
        assert answer.count(b"HTTP/1.1 401") == 1
        assert b"www-authenticate: Bearer" in answer
        assert b" 100 " not in answer
        assert answer.startswith(b"HTTP/1.1 200") == bool(before)

    edge.run(scenario())


def test_a_method_that_is_not_passed_on_is_refused_before_its_body(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        answer = await edge.exchange(head(50_000_000).replace(b"POST", b"TRACE"))
        assert answer.startswith(b"HTTP/1.1 405")

    edge.run(scenario())


def test_unfinished_bodies_are_bounded_in_sum_and_for_each_key(edge: Any, make_post: Any) -> None:
    limits = HttpLimits(request_buffer_bytes_max=6 * MIB, tenant_buffer_bytes_max=4 * MIB)

    async def scenario() -> None:
        await edge.start(api_keys=("k1", "k2"), limits=limits)
        await edge.worker(edge.reply())
        writers = []

        async def upload(key: bytes) -> bytes:
            """Most of a body of 1 MiB; what was answered."""
            reader, writer = await edge.connect()
            writers.append(writer)
            writer.write(head(MIB, b"Authorization: Bearer " + key + b"\r\n") + bytes(MIB - 1))
            before, answer = edge.metrics.request_buffer_bytes, asyncio.ensure_future(reader.read(-1))
            await edge.until(lambda: answer.done() or edge.metrics.request_buffer_bytes >= before + MIB - 1)
            if answer.done():
                return answer.result()
            answer.cancel()
            return b""

        first = [await upload(b"k1") for _ in range(6)]
        assert [answer[9:12] for answer in first] == [b"", b"", b"", b"", b"429", b"429"]
        second = [await upload(b"k2") for _ in range(4)]
        assert [answer[9:12] for answer in second] == [b"", b"", b"503", b"503"]
        for answer in (*first[4:], *second[2:]):
            assert b"retry-after: 1\r\n" in answer
        assert edge.metrics.refused_bytes == {"tenant": 2, "sum": 2}
        assert 5 * MIB < edge.metrics.request_buffer_bytes <= limits.request_buffer_bytes_max
        small = make_post(b'{"model":"tiny","prompt":"x"}', b"/v1/completions", [KEY.strip()])
        assert (await edge.exchange(small)).startswith(b"HTTP/1.1 200")  # the others are not in its way
        for writer in writers:
            writer.close()
        await edge.settle()
        edge.proxy.budget.check_invariants()
        assert await upload(b"k1") == b""
        writers[-1].close()

    edge.run(scenario())


def test_bodies_in_flight_count_until_they_are_answered(edge: Any, make_post: Any) -> None:
    limits = HttpLimits(request_buffer_bytes_max=3 * MIB, tenant_buffer_bytes_max=3 * MIB)

    async def scenario() -> None:
        gate = asyncio.Event()

        await edge.start(limits=limits)
        upstream = await edge.worker(edge.gated(gate))
        body = b'{"model":"tiny","x":"' + b"y" * MIB + b'"}'
        running = [asyncio.create_task(edge.exchange(make_post(body, b"/v1/completions"))) for _ in range(2)]
        await edge.until(lambda: len(upstream.received) == 2)
        assert edge.metrics.request_buffer_bytes > 2 * MIB
        assert (await edge.exchange(make_post(body, b"/v1/completions"))).startswith(b"HTTP/1.1 429")
        gate.set()
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*running))
        await edge.settle()
        assert (await edge.exchange(make_post(body, b"/v1/completions"))).startswith(b"HTTP/1.1 200")

    edge.run(scenario())


def test_what_is_sent_ahead_of_an_answer_is_bounded_too(edge: Any, make_post: Any) -> None:
    limits = HttpLimits(request_buffer_bytes_max=MIB, tenant_buffer_bytes_max=MIB)

    async def scenario() -> None:
        gate = asyncio.Event()

        await edge.start(limits=limits)
        await edge.worker(edge.gated(gate))
        small = make_post(b'{"model":"tiny","prompt":"x"}', b"/v1/completions", close=False)
        clients = [await edge.connect() for _ in range(8)]
        for _, writer in clients:
            writer.write(small + small * 10_000)  # 2 MB each
        connections = edge.listener.connections
        await edge.until(lambda: all(one._is_reading_paused or one._has_unread_input for one in connections))
        assert len(connections) == 8
        for _ in range(20):
            await edge.let_loop_read()
            assert edge.metrics.request_buffer_bytes <= MIB
        gate.set()
        for reader, _ in clients:
            assert (await reader.read(12)) == b"HTTP/1.1 200"
        for _, writer in clients:
            writer.close()

    edge.run(scenario())


def test_what_a_client_left_behind_is_freed_without_the_garbage_collector(edge: Any) -> None:
    """A cycle of parser and connection kept abandoned uploads: 40 clients of 30 MB each were 1.2 GB."""

    async def scenario() -> None:
        await edge.start()

        async def leave(number: int) -> None:
            _, writer = await edge.connect()
            chunked = b"POST /v1/x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n"
            writer.write((chunked if number % 2 else head(MIB)) + bytes(MIB - 9))
            await writer.drain()
            await edge.until(lambda: edge.metrics.request_buffer_bytes)
            writer.transport.abort()

        await leave(0)
        await edge.settle()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(12):
                await leave(number)
            await edge.settle()
            await edge.until(lambda: not edge.listener.connections)
            await edge.let_loop_read()
            kept = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            gc.enable()
        assert kept < MIB, kept

    edge.run(scenario())


@pytest.mark.parametrize("ending", ["complete", "stream", "error", "cut off", "client gone", "no worker", "bad gzip"])
def test_an_ended_request_is_freed_without_the_garbage_collector(edge: Any, make_post: Any, ending: str) -> None:
    """The router makes full collections rarely, and an exchange keeps the body and the token ids of its prompt."""
    stream_head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def answer(request: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head + b"9\r\ndata: 1\n\n\r\n")
        if ending == "stream":
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        elif ending == "cut off":
            writer.close()

    scripts = {"complete": edge.reply(), "error": edge.reply(status=b"400 Bad Request")}
    body = b'{"model":"tiny","prompt":"x","stream":true}'

    async def ask() -> None:
        if ending != "client gone":
            headers = [b"content-encoding: gzip"] if ending == "bad gzip" else []
            await edge.exchange(make_post(body, b"/v1/completions", headers))
            return
        reader, writer = await edge.connect()
        writer.write(make_post(body, b"/v1/completions"))
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    def count_requests() -> int:
        return sum(type(item) in (Exchange, RequestContext, HttpRequest) for item in gc.get_objects())

    async def scenario() -> None:
        await edge.start()
        await edge.worker(scripts.get(ending, answer), port=1 if ending == "no worker" else None)
        if ending != "no worker":  # which is down after the first attempt
            await ask()
        await edge.until(lambda: not edge.listener.connections)
        gc.collect()
        gc.disable()
        other_count = count_requests()  # a test that failed before may keep some
        try:
            for _ in range(3):
                await ask()
            await edge.until(lambda: not edge.listener.connections and not edge.proxy.exchanges)
            await edge.let_loop_read()
            assert count_requests() <= other_count
        finally:
            gc.enable()

    edge.run(scenario())


def unread(edge: Any) -> int:
    """Bytes of answers that wait in the router."""
    return sum(connection._transport.get_write_buffer_size() for connection in edge.listener.connections)


async def connect_deaf(edge: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes next to nothing until it reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", edge.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.transport.pause_reading()
    return reader, writer


def add_page(edge: Any, size: int) -> None:
    edge.routes.add("GET", "/page", lambda *_: Response(bytes(size)), public=True)


PAGE = b"GET /page HTTP/1.1\r\nHost: r\r\n\r\n"


@pytest.mark.parametrize("size", [3_000, 300_000])
def test_no_request_is_begun_while_answers_wait(edge: Any, size: int) -> None:
    asked = 40 * MIB // size

    async def scenario() -> None:
        await edge.start()
        add_page(edge, size)
        reader, writer = await connect_deaf(edge)
        writer.write(PAGE * asked)
        await edge.until(lambda: unread(edge))
        for _ in range(100):
            await edge.let_loop_read()
            assert unread(edge) <= WRITE_BUFFER_BYTES + size + 4096
        writer.transport.resume_reading()
        for _ in range(asked):  # and once they are read, every request is answered
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(size)
        writer.close()

    edge.run(scenario())


def test_a_connection_ends_once_the_answers_before_dropped_requests_are_read(edge: Any) -> None:
    size, asked = 30_000, 300

    async def scenario() -> None:
        await edge.start(limits=HttpLimits(tenant_buffer_bytes_max=WRITE_BUFFER_BYTES + MAX_PIPELINED_BYTES))
        add_page(edge, size)
        reader, writer = await connect_deaf(edge)
        writer.write(PAGE * asked)
        await edge.until(lambda: unread(edge) > WRITE_BUFFER_BYTES)
        writer.write(PAGE * 10_000)
        await edge.until(lambda: any(one._has_unread_input for one in edge.listener.connections))
        writer.transport.resume_reading()
        assert 0 < (await reader.read(-1)).count(b"HTTP/1.1 200") < asked
        writer.close()

    edge.run(scenario())


def test_answers_that_wait_are_booked_and_given_back(edge: Any, make_post: Any) -> None:
    limits = HttpLimits(request_buffer_bytes_max=14 * MIB, tenant_buffer_bytes_max=14 * MIB)

    async def scenario() -> None:
        await edge.start(limits=limits)
        add_page(edge, 12 * MIB)
        reader, writer = await connect_deaf(edge)
        writer.write(PAGE)
        await edge.until(lambda: edge.metrics.request_buffer_bytes >= MIB)
        body = b'{"model":"tiny","x":"' + b"y" * 8 * MIB + b'"}'
        assert (await edge.exchange(make_post(body, b"/v1/completions"))).startswith(b"HTTP/1.1 429")
        other, another = await connect_deaf(edge)
        another.write(PAGE)
        another.transport.resume_reading()
        assert len(await other.read(-1)) < 12 * MIB  # broken off
        assert edge.metrics.refused_bytes["tenant"] == 2
        writer.transport.resume_reading()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(12 * MIB)
        writer.write(PAGE)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(12 * MIB)
        writer.close()
        another.close()

    edge.run(scenario())


@pytest.mark.parametrize("what", ["pages", "last page", "stream"])
def test_who_takes_nothing_of_an_answer_is_cut_off(edge: Any, make_post: Any, what: str) -> None:
    async def stream(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while True:
            writer.write(b"data: x\n\n" * 1000)
            await writer.drain()

    async def scenario() -> None:
        await edge.start(client_timeouts=ClientTimeouts(send_s=0.2, keep_alive_s=0.1))
        add_page(edge, 10 * MIB)
        await edge.worker(stream)
        _, writer = await connect_deaf(edge)
        if what == "stream":
            writer.write(make_post(b'{"model":"tiny","prompt":"x","stream":true}', b"/v1/completions"))
        else:
            writer.write(PAGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if "last" in what else PAGE * 5)
        await edge.until(lambda: unread(edge))

        def has_ended() -> bool:
            edge.advance(0.05)
            return not edge.listener.connections

        await edge.until(has_ended)
        writer.close()

    edge.run(scenario())


def test_a_body_in_tiny_chunks_costs_its_payload_not_its_chunks() -> None:
    parser = RequestParser(HttpLimits())
    parser.feed(b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert parser.next_request() is None
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        parser.feed(b"8\r\n12345678\r\n" * 1000)
        assert parser.next_request() is None
        while parser.has_more:
            assert parser.next_request() is None
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 1.3 * 800_000 + 10_000
    parser.feed(b"2\r\nab\r\n" * 200_000)
    with pytest.raises(BadRequest, match="framing"):
        all(parser.next_request() is None for _ in range(100))


def test_an_idle_connection_keeps_nothing_of_a_long_head() -> None:
    parser = RequestParser(HttpLimits())
    long = b"GET / HTTP/1.1\r\nHost: r\r\nX: " + b"x" * 60_000 + b"\r\n\r\n"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for cut in (len(long), 30_000):
        for piece in (long[:cut], long[cut:]):
            parser.feed(piece)
            request = parser.next_request()
        assert (request is not None) == (cut < len(long))
    piece = request = b""
    assert parser.buffered_bytes == 0
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 10_000


def test_what_connection_names_makes_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"n%d" % number for number in range(9_000)]
    block = HeaderBlock(
        b"A: b\r\nN77: c\r\nConnection: " + b",".join(names) + b"\r\nHost: r\r\nn8999:d\r\nN9000: e\r\n"
    )
    dropped = frozenset((b"connection", b"te"))
    monkeypatch.setattr(headers_module.re, "compile", None)
    assert block.join_lines_without(dropped) == b"A: b\r\nHost: r\r\nN9000: e\r\n"


def over(field: str) -> tuple[HttpLimits, bytes, bytes]:
    """(a low limit, what keeps it, what exceeds it)."""
    first = b"GET /metrics HTTP/1.1\r\nHost: r\r\n"
    big = 40_000
    if field == "head_bytes_max":
        return HttpLimits(head_bytes_max=500), first + b"\r\n", first + b"X: " + b"a" * 500 + b"\r\n\r\n"
    if field == "headers_max":
        return HttpLimits(headers_max=6), first + b"X: a\r\n" * 4 + b"\r\n", first + b"X: a\r\n" * 5 + b"\r\n"
    heads = 0 if field == "body_bytes_max" else 500  # they are kept too
    path = b"/metrics"
    more = big + heads + 1
    return HttpLimits(**{field: big + heads}), head(big, path=path) + bytes(big), head(more, path=path) + bytes(more)


@pytest.mark.parametrize("field", [field.name for field in fields(HttpLimits)])
def test_every_limit_holds(edge: Any, field: str) -> None:
    """A new field fails here until somebody says what exceeds it."""
    limits, kept, exceeding = over(field)

    async def scenario() -> None:
        await edge.start(limits=limits)
        close = b"Host: r\r\nConnection: close\r\n"
        assert (await edge.exchange(kept.replace(b"Host: r\r\n", close, 1)))[9:12] in (b"200", b"405")
        assert (await edge.exchange(exceeding.replace(b"Host: r\r\n", close, 1)))[9:12] in (
            b"413",
            b"429",
            b"431",
            b"503",
        )

    edge.run(scenario())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7), st.integers(0, 60)), max_size=40))
def test_the_books_of_what_is_held(changes: list[tuple[str, int, int]]) -> None:
    metrics = Metrics()
    budget = BufferBudget(HttpLimits(request_buffer_bytes_max=100, tenant_buffer_bytes_max=70), metrics)
    held: Counter[tuple[str, int]] = Counter()
    for party, connection, after in changes:
        before = held[party, connection]
        mine = sum(count for (who, _), count in held.items() if who == party)
        fits = mine + after - before <= 70 and held.total() + after - before <= 100
        if after <= before or fits:
            budget.change(party, before, after)
            held[party, connection] = after
        else:
            with pytest.raises(RequestError):
                budget.change(party, before, after)
        assert metrics.request_buffer_bytes == held.total()
        budget.check_invariants()
