"""Whatever raises, wherever: it ends its own request, is counted, and everybody else goes on."""

from __future__ import annotations

import asyncio
import errno
import gzip
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.tokenizer import Checkpoint, Tokenizer
from router.decide.attempts import AttemptTracker
from router.decide.core import RouterCore
from router.decide.placement import RequestPlacer
from router.edge.client_response import ClientResponse
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.edge.response_progress import ResponseProgress
from router.edge.upstream import JOIN_BYTES_MAX, READ_BYTES, Endpoint, UpstreamConnection, UpstreamPool
from router.http.body_pieces import PIECE_BYTES
from router.http.budget import BufferBudget
from router.http.config import ClientTimeouts, HttpLimits
from router.http.connection import LONG_READ_BYTES, ClientConnection
from router.http.decoding import BodyDecoder
from router.http.fair_scheduler import READS_PER_ITERATION, REQUESTS_PER_ITERATION, FairScheduler
from router.http.headers import HeaderBlock
from router.http.request import HttpRequest
from router.http.response import ResponseHead
from router.metrics import Metrics
from router.prompting.model_tokenizers import LoadedTokenizer

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
ERRORS = [AssertionError("no"), RecursionError("deep"), MemoryError(), KeyError("gone")]
CHUNKS = 40
KINDS = (
    Exchange, ClientResponse, ResponseProgress, UpstreamConnection, UpstreamPool, RouterCore, RequestPlacer,
    AttemptTracker, Proxy, ClientConnection,
)  # fmt: skip
FINAL = """crash on_client_gone end end_crashed _notify_lost record_crash abort_response abort close
_cancel_responder withdraw discard __init__ perform _notify refuse respond respond_error
finish write _close count_connections check_invariants get_attempts is_background expire sweep tick
_handle_requests _start_request connection_made connection_lost data_received get_buffer buffer_updated eof_received
record_failed_attempt
_execute _open"""
"""What the guards themselves stand on, and the callbacks that hold them; those have tests of their own below."""


def targets() -> list[tuple[type, str]]:
    found = []
    for kind in KINDS:
        for name, member in vars(kind).items():
            if inspect.isfunction(member) and name not in FINAL.split():
                found.append((kind, name))
    return found


class SlowStream:
    """A worker's script: a streamed answer in many reads. `x-fate: reset`: its first try is broken off. `x-waits`: it
    waits in its middle for `may_go_on`."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.waiting = 0
        self._was_reset = False

    async def __call__(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.all(b"x-fate") == [b"reset"] and not self._was_reset:
            self._was_reset = True
            writer.transport.abort()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(CHUNKS):
            text = b"data: %d\n\n" % number
            writer.write(b"%x\r\n%b\r\n" % (len(text), text))
            await writer.drain()
            for _ in range(3):  # a read of its own, and turns for the other streams
                await asyncio.sleep(0)
            if number == CHUNKS // 2 and request.all(b"x-waits"):
                self.waiting += 1
                await self.may_go_on.wait()
        writer.write(b"0\r\n\r\n")


def test_an_index_that_raises_leaves_nothing_on_the_books(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt cannot be pinned: the request fails, and the worker is not thought busy with it."""

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())
        body = json.dumps({"model": "tiny", "prompt": list(range(200))}).encode()
        request = make_post(body, b"/v1/completions")
        with monkeypatch.context() as patch:
            patch.setattr(edge.core.index, "pin", raises)
            assert b" 500 " in (await edge.exchange(request)).split(b"\r\n")[0]
        assert not edge.core.get_attempts()
        assert edge.core.snapshot(0.0).in_flight == 0
        edge.core.check_invariants()
        assert b" 200 " in (await edge.exchange(request)).split(b"\r\n")[0]
        await edge.settle()

    def raises(*_: Any, **__: Any) -> None:
        raise MemoryError

    edge.run(scenario())


@pytest.mark.parametrize(("kind", "name"), targets(), ids=lambda value: getattr(value, "__name__", value))
def test_a_crash_anywhere_ends_one_request(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    original: Callable[..., Any] = vars(kind)[name]
    error = ERRORS[sum(map(ord, name)) % len(ERRORS)]
    raised: list[int] = []
    armed = False

    def bad(*arguments: Any, **named: Any) -> Any:
        if armed and not raised:
            raised.append(1)
            raise error
        return original(*arguments, **named)

    async def bad_later(*arguments: Any, **named: Any) -> Any:
        if armed and not raised:
            raised.append(1)
            raise error
        return await original(*arguments, **named)

    monkeypatch.setattr(kind, name, bad_later if inspect.iscoroutinefunction(original) else bad)

    async def scenario() -> None:
        nonlocal armed
        await edge.start()
        script = SlowStream()
        await edge.worker(script)
        await edge.worker(script)
        assert (await edge.exchange(make_post(CHAT))).endswith(b"0\r\n\r\n")
        bystander = asyncio.create_task(edge.exchange(make_post(CHAT, headers=[b"x-waits: 1"])))
        await edge.until(lambda: script.waiting)
        armed = True
        script.may_go_on.set()
        answers = await asyncio.gather(
            *(edge.exchange(make_post(CHAT, headers=headers)) for headers in ([], [b"x-fate: reset"]))
        )
        reader, writer = await edge.connect()
        writer.write(make_post(CHAT))
        await reader.read(1)
        writer.close()
        others = [await bystander, *answers]
        whole = [answer for answer in others if answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"0\r\n\r\n")]
        assert len(whole) >= len(others) - len(raised), others
        for answer in others:
            if answer not in whole:
                assert not answer or answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502", b"HTTP/1.1 200"))
        await edge.settle()
        armed = False
        assert (await edge.exchange(make_post(CHAT))).endswith(b"0\r\n\r\n")
        if raised and len(whole) < len(others):
            assert sum(edge.metrics.crashes.values()) >= 1

    edge.run(scenario())


INDEX = ("prepare", "match", "match_any")


@pytest.mark.parametrize("method", [*INDEX, "on_end", "on_failure"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_crash_in_what_the_byte_path_calls_ends_one_request(
    edge: Any, make_post: Any, method: str, error: Exception
) -> None:
    """As above, in what the byte path calls of other rooms."""
    armed = False

    async def scenario() -> None:
        nonlocal armed
        await edge.start(policy="kv")
        await edge.worker(edge.reply())
        await edge.worker(edge.reply())

        def bad(*arguments: Any, **named: Any) -> Any:
            nonlocal armed
            if armed:
                armed = False
                raise error
            return original(*arguments, **named) if original is not None else None

        original = getattr(edge.index, method, None)
        if method.startswith("on_"):
            getattr(edge.proxy, method).append(bad)
        else:
            setattr(edge.index, method, bad)
        body = json.dumps({"model": "tiny", "prompt": list(range(40))}).encode()
        request = make_post(body, b"/v1/completions", close=False)
        last = make_post(body, b"/v1/completions")
        for _ in range(3):
            armed = True
            answers = await edge.exchange(request + request + last)  # pipelined: each is an answer of its own
            assert re.findall(rb"HTTP/1.1 (\d+)", answers).count(b"200") >= 2 - answers.count(b"HTTP/1.1 500")
            assert answers.count(b"HTTP/1.1 ") == 3 or not answers.endswith(b"\r\n\r\n")
        armed = False
        assert (await edge.exchange(last)).startswith(b"HTTP/1.1 200")

    edge.run(scenario())


def wait_for_with(monkeypatch: pytest.MonkeyPatch, end: Callable[[Any], Any]) -> None:
    """Let `end` decide what becomes of every connection to a worker."""
    original = asyncio.wait_for

    async def patched(waited: Any, timeout: float | None) -> Any:
        if getattr(waited, "__qualname__", "") != "UpstreamPool._connect":
            return await original(waited, timeout)
        return await end(waited)

    monkeypatch.setattr(asyncio, "wait_for", patched)


def test_a_worker_that_accepts_and_closes_at_once_is_an_answer_at_once(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost before whoever opened it could look: 600 s of waiting."""

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())

        async def lost(opening: Any) -> Any:
            connection = opening.cr_frame.f_locals["connection"]
            await opening
            connection.transport.abort()
            while connection.transport is not None:
                await asyncio.sleep(0)

        wait_for_with(monkeypatch, lost)
        answer = await edge.exchange(make_post(CHAT))
        assert answer.startswith(b"HTTP/1.1 502")
        assert not edge.metrics.crashes

    edge.run(scenario())


def test_a_request_that_kills_workers_is_not_sent_once_for_every_idle_connection(edge: Any, make_post: Any) -> None:
    """Settles the poison request: a kept-alive connection that breaks is replaced once an attempt, by a new one."""

    async def deadly(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.all(b"x-poison"):
            writer.transport.abort()
        else:
            await all_came.wait()
            await edge.reply()(request, reader, writer)

    all_came = asyncio.Event()

    async def scenario() -> None:
        await edge.start()
        upstreams = [await edge.worker(deadly) for _ in range(2)]
        asked = asyncio.gather(*(edge.exchange(make_post(CHAT)) for _ in range(40)))
        await edge.until(lambda: sum(len(upstream.received) for upstream in upstreams) == 40)
        all_came.set()
        await asked
        assert edge.pool.count_connections().idle > 10
        for upstream in upstreams:
            upstream.received.clear()
        answer = await edge.exchange(make_post(CHAT, headers=[b"x-poison: 1"]))
        assert answer.startswith(b"HTTP/1.1 502")
        attempts = sum(edge.metrics.failures.values())
        assert attempts <= 3
        assert sum(len(upstream.received) for upstream in upstreams) <= 2 * attempts

    edge.run(scenario())


@pytest.mark.parametrize("first", [b"zz\r\nabc\r\n", b"3\r\nabcd\r\n", b"2\r\nab\r\n-1\r\n"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_malformed_first_chunk_is_tried_elsewhere(edge: Any, make_post: Any, first: bytes, version: bytes) -> None:
    async def bad(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + first)

    async def scenario() -> None:
        await edge.start()
        await edge.worker(bad)
        await edge.worker(edge.reply(b"good"))
        for _ in range(2):
            answer = await edge.exchange(make_post(CHAT).replace(b"HTTP/1.1", b"HTTP/" + version))
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"\r\n\r\ngood")

    edge.run(scenario())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_the_routers_own_want_of_descriptors_is_not_the_workers_failure(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())

        async def starved(opening: Any) -> Any:
            opening.close()
            raise OSError(number, "none left")

        wait_for_with(monkeypatch, starved)
        for _ in range(10):
            answer = await edge.exchange(make_post(CHAT))
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer
        assert edge.metrics.failures == {("", "local"): 10}
        monkeypatch.undo()
        assert (await edge.exchange(make_post(CHAT))).startswith(b"HTTP/1.1 200")  # not down

    edge.run(scenario())


@pytest.mark.parametrize("status", [b"404 Not Found", b"401 Unauthorized", b"405 Method Not Allowed"])
def test_errors_to_head_have_no_body(edge: Any, status: bytes) -> None:
    lines = {b"404": b"HEAD /nowhere", b"401": b"HEAD /v1/models", b"405": b"HEAD /route"}

    async def scenario() -> None:
        await edge.start(api_keys=("k",))
        answer = await edge.exchange(lines[status[:3]] + b" HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert answer.endswith(b"\r\n\r\n")

    edge.run(scenario())


@pytest.mark.parametrize("method", [b"TRACE", b"OPTIONS", b"CONNECT"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/files", b"/health", b"a:443", b"*"])
def test_methods_about_servers_are_answered_here_once(edge: Any, method: bytes, path: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply())
        answer = await edge.exchange(method + b" " + path + b" HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        status = answer[9:12]
        allowed = method == b"OPTIONS" and path == b"/v1/chat/completions"
        assert status in ((b"200",) if allowed else (b"400", b"404", b"405", b"501"))
        assert (status in (b"200", b"405")) == (b"\r\nallow: " in answer)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not upstream.received

    edge.run(scenario())


DEEP = "[" * 1200 + "]" * 1200
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": DEEP}}
DECODABLE = '{"x":' * 490 + "1" + "}" * 490
"""Nested less deeply than a decoder allows, and so deeply that a recursive function of Python fails."""
IMAGES = f'[{{"role":"user","content":[{{"type":"input_image","image_url":{{"url":"data:"}}}}],"x":{DECODABLE}}}]'
CHAT_HEAD = '{"model":"tiny","messages":[{"role":"user","content":'
DEEP_BODIES = {
    "content": f"{CHAT_HEAD}{DEEP}}}]}}",
    "arguments": json.dumps({"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
    "tools": f'{CHAT_HEAD}"x"}}],"tools":[{{"x":{DEEP}}}]}}',
    "template arguments": f'{CHAT_HEAD}"x"}}],"chat_template_kwargs":{{"x":{DEEP}}}}}',
    "a field nobody knows": f'{CHAT_HEAD}"x"}}],"x":{DEEP}}}',
    "the prompt": f'{{"model":"tiny","prompt":{DEEP}}}',
    "fields of workers": f'{CHAT_HEAD}"x"}}],"extra_body":{DECODABLE}}}',
    "fields of workers in a large body": f'{CHAT_HEAD}"{"x" * 100_000}"}}],"extra_body":{DECODABLE}}}',
    "an image": f'{{"model":"tiny","messages":{IMAGES}}}',
    "an image in a response": f'{{"model":"tiny","input":{IMAGES}}}',
}


@pytest.mark.parametrize("name", DEEP_BODIES)
def test_deep_nesting_is_an_answer(edge: Any, make_post: Any, tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, 1024, 4096)
    body = DEEP_BODIES[name].encode()

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())
        for _ in range(2):
            for path in (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings"):
                answers = await edge.exchange(make_post(body, path, close=False) + make_post(body, path))
                assert answers.count(b"HTTP/1.1 ") == 2
                assert set(re.findall(rb"HTTP/1.1 (\d+)", answers)) <= {b"200", b"400"}
            edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(
                Tokenizer.load(tmp_path), Checkpoint(str(tmp_path))
            )
        assert not edge.metrics.crashes

    edge.run(scenario())


# Reads of workers -----------------------------------------------------------------------------------------------------


class Reader:
    """Whoever a connection reads for, and what it gets."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.ended = asyncio.Event()

    def on_attempt_connected(self, connection: UpstreamConnection) -> None:
        pass

    def on_attempt_head(self, head: ResponseHead, data: bytes) -> None:
        self.reads.append(data)

    def on_attempt_body(self, head: ResponseHead, data: bytes) -> None:
        self.reads.append(data)

    def on_attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        self.ended.set()

    def crash(self, error: Exception) -> None:
        raise error


class Transport:
    def __init__(self) -> None:
        self.reads, self.aborted = True, False
        self.written: list[bytes] = []

    def get_extra_info(self, _: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        assert high

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.written += parts

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def test_long_answers_are_read_in_bounded_parts_and_never_mixed() -> None:
    """All connections read into the same memory. One that is paused in the middle loses nothing."""
    bodies = [bytes([number]) * (16 * READ_BYTES + number) for number in range(6)]

    async def run() -> None:
        pool = UpstreamPool()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bodies[(await reader.read(1))[0]])
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        readers = [Reader() for _ in bodies]
        for number, reader in enumerate(readers):
            connection = pool.acquire(target)
            await pool.connect(connection)
            connection.begin_request(reader, "GET")  # type: ignore[arg-type]
            connection.send(bytes([number]), (b"",))
            if number % 2:
                connection.pause_reading()
                asyncio.get_running_loop().call_later(0.01, connection.resume_reading)
        for reader, body in zip(readers, bodies):
            await asyncio.wait_for(reader.ended.wait(), 30)
            assert b"".join(reader.reads) == body
            assert max(map(len, reader.reads)) <= READ_BYTES
        server.close()

    asyncio.run(run())


def test_a_connection_that_opens_when_its_time_is_over_gets_no_request(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await edge.start()
        worker = await edge.worker(edge.reply())
        connect = edge.pool.connect

        async def connect_late(connection: UpstreamConnection) -> None:
            await connect(connection)
            raise asyncio.TimeoutError

        monkeypatch.setattr(edge.pool, "connect", connect_late)
        answer = await edge.exchange(make_post(CHAT))
        assert answer.split(b" ")[1] in (b"502", b"503")
        assert not worker.received
        await edge.until(lambda: not edge.pool.count_connections().open)

    edge.run(scenario())


# Turns of long bodies -------------------------------------------------------------------------------------------------


def test_a_connection_is_not_used_again_before_its_request_is_sent_whole() -> None:
    async def run() -> None:
        pool, pieces = UpstreamPool(), (bytes(JOIN_BYTES_MAX),) * 9
        for is_slow in (False, True):
            transport = Transport()
            connection = UpstreamConnection(pool, Endpoint.parse("http://127.0.0.1:1"))
            connection.connection_made(transport)  # type: ignore[arg-type]
            if is_slow:
                connection.pause_writing()
            connection.send(b"head", pieces)
            assert len(transport.written) == (2 if is_slow else 1 + len(pieces))
            connection.finish(0.0, reusable=True)
            assert transport.aborted == is_slow, "answered before it was asked all"
            connection.resume_writing()
            assert len(transport.written) == (2 if is_slow else 1 + len(pieces))

    asyncio.run(run())


def test_a_worker_that_reads_slowly_is_sent_all_in_the_end() -> None:
    class SlowTransport(Transport):
        def write(self, data: bytes) -> None:
            super().write(data)
            connection.pause_writing()

    async def run() -> None:
        nonlocal connection
        transport, pieces = SlowTransport(), tuple(b"%d" % i * JOIN_BYTES_MAX for i in range(9))
        connection = UpstreamConnection(UpstreamPool(), Endpoint.parse("http://127.0.0.1:1"))
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.send(b"head", pieces)
        while transport.written != [b"head", *pieces]:
            before = len(transport.written)
            connection.resume_writing()
            assert len(transport.written) == before + 1, "one piece each time that the worker has read"

    connection: Any = None
    asyncio.run(run())


def test_nothing_more_is_written_once_a_worker_has_closed_its_connection() -> None:
    class BrokenTransport(Transport):
        def write(self, data: bytes) -> None:
            super().write(data)
            self.aborted = len(self.written) == 3

    async def run() -> None:
        transport = BrokenTransport()
        connection = UpstreamConnection(UpstreamPool(), Endpoint.parse("http://127.0.0.1:1"))
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.send(b"head", (bytes(JOIN_BYTES_MAX),) * 9)
        assert len(transport.written) == 3, "asyncio logs each further write as an error"

    asyncio.run(run())


class CrashMetrics(Metrics):
    """Counters of a router that has to have no fault, unless a test replaces `record_crash`."""

    def record_crash(self, boundary: str, error: Exception) -> None:
        raise error


class App:
    """What a client's connection is to know of."""

    def __init__(self) -> None:
        self.metrics = CrashMetrics()
        self.limits, self.scheduler = HttpLimits(), FairScheduler()
        self.budget = BufferBudget(self.limits, self.metrics)
        self.arrival_scheduler = FairScheduler(REQUESTS_PER_ITERATION)
        self.is_ending = False
        self.taken: list[int] = []

    def now(self) -> float:
        return 1000.0

    def admit(self, connection: Any, request: Any) -> str:
        return "somebody"

    def handle(self, connection: Any, request: Any) -> None:
        self.taken.append(request.body_bytes)

    def build_cors_headers(self, request: Any) -> bytes:
        return b""


@pytest.mark.parametrize("chunked", [False, True])
def test_long_bodies_are_read_in_turns(chunked: bool) -> None:
    """A loop reads on as long as bytes come: of many clients some are read in each of its turns, all in the end."""
    clients, size, reads = 3 * READS_PER_ITERATION, 4 * LONG_READ_BYTES, 5

    async def run() -> None:
        app, at_once = App(), 0
        part = b"%x\r\n%b\r\n" % (size, bytes(size)) if chunked else bytes(size)
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (reads * size)
        waiting: dict[Any, Any] = {}
        for _ in range(clients):
            connection, transport = ClientConnection(app, set()), Transport()  # type: ignore[arg-type]
            connection.connection_made(transport)  # type: ignore[arg-type]
            connection.data_received(b"POST / HTTP/1.1\r\nHost: r\r\n%b\r\n\r\n" % framing)
            waiting[connection] = (transport, [*[part] * reads, *[b"0\r\n\r\n"] * chunked])
        for turn in range(10_000):
            at_once = 0
            for connection, (transport, left) in list(waiting.items()):
                while left and transport.reads:  # as the loop does
                    at_once += len(left[0])
                    connection.data_received(left.pop(0))
                if not left:
                    waiting.pop(connection)
            assert at_once <= (READS_PER_ITERATION if turn else clients) * (len(part) + 5)
            if len(app.taken) == clients:
                break
            await asyncio.sleep(0)
        assert app.taken == [reads * size] * clients
        assert not app.metrics.http_errors

    asyncio.run(run())


@pytest.mark.parametrize("refused", [False, True])
def test_clients_that_leave_in_the_middle_of_long_bodies_are_forgotten_in_turns(refused: bool) -> None:
    """The system takes a tenth of a millisecond to take a megabyte back. It counts as kept until then."""

    async def run() -> None:
        app, connections = App(), []
        for _ in range(3 * READS_PER_ITERATION):
            connection = ClientConnection(app, set())  # type: ignore[arg-type]
            connection.connection_made(Transport())  # type: ignore[arg-type]
            connection.data_received(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % (9 * PIECE_BYTES))
            for _ in range(8):
                connection.data_received(bytes(PIECE_BYTES))
            connections.append(connection)
        metrics = app.budget._metrics
        assert metrics.request_buffer_bytes >= len(connections) * 8 * PIECE_BYTES
        pieces = 8 * len(connections)
        for connection in connections:
            if refused:
                connection.expire(app.now() + 1000, ClientTimeouts())
                assert b" 408 " in connection._transport.written[-1]
            else:
                connection.connection_lost(None)
        assert metrics.request_buffer_bytes >= len(connections) * 7 * PIECE_BYTES
        assert set(metrics.http_errors) == ({"408"} if refused else set())
        while metrics.request_buffer_bytes:
            bodies = [connection._parser._body for connection in connections]
            left = sum(len(body.complete) for body in bodies if body is not None)
            assert pieces - left <= max(READS_PER_ITERATION, len(connections) * (pieces == 8 * len(connections)))
            pieces = left
            await asyncio.sleep(0)
        app.budget.check_invariants()

    asyncio.run(run())


def test_a_body_is_asked_for_once() -> None:
    async def run() -> None:
        app, transport = App(), Transport()
        connection = ClientConnection(app, set())  # type: ignore[arg-type]
        connection.connection_made(transport)  # type: ignore[arg-type]
        head = b"POST / HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
        for data in (head, b"3\r", b"\nabc\r\n0\r\n\r\n"):
            connection.data_received(data)
            assert transport.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        assert app.taken == [3]

    asyncio.run(run())


def test_what_is_sent_after_a_refusal_is_read_in_turns() -> None:
    """And dropped, so that the client can read why."""

    async def run() -> None:
        app, transports = App(), []
        for _ in range(3 * READS_PER_ITERATION):
            connection, transport = ClientConnection(app, set()), Transport()  # type: ignore[arg-type]
            connection.connection_made(transport)  # type: ignore[arg-type]
            connection.data_received(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % 10**10)
            assert b" 413 " in transport.written[-1]
            connection.data_received(bytes(LONG_READ_BYTES))
            transports.append(transport)
        assert not any(transport.reads for transport in transports)
        assert set(app.metrics.http_errors) == {"413"}
        reading = 0
        while reading < len(transports):
            await asyncio.sleep(0)
            before, reading = reading, sum(transport.reads for transport in transports)
            assert reading - before <= READS_PER_ITERATION

    asyncio.run(run())


@pytest.mark.parametrize("fate", ["client leaves", "decoder crashes"])
def test_a_decoding_that_is_not_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    async def run() -> None:
        app, crashes, transport = App(), [], Transport()
        app.metrics.record_crash = lambda where, error: crashes.append(error)  # type: ignore[method-assign]
        connection = ClientConnection(app, set())  # type: ignore[arg-type]
        connection.connection_made(transport)  # type: ignore[arg-type]
        body = gzip.compress(bytes(16 << 20))
        head = b"POST / HTTP/1.1\r\nHost: r\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        connection.data_received(head % len(body) + body)
        while app.budget._metrics.request_buffer_bytes < 1 << 20:
            await asyncio.sleep(0)
        if fate == "client leaves":
            connection.connection_lost(None)
        else:
            monkeypatch.setattr(BodyDecoder, "decode_slice", Mock(side_effect=MemoryError))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (app.taken, app.budget._metrics.request_buffer_bytes) == ([], 0)
        assert len(crashes) == (fate == "decoder crashes")
        assert b"".join(transport.written).count(b"HTTP/1.1 500") == len(crashes)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


SMALL = b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"


class From(Transport):
    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer

    def get_extra_info(self, name: str) -> Any:
        return (self._peer, 1) if name == "peername" else None


def arrived(app: App, peer: str, body_bytes: int) -> ClientConnection:
    """A connection on which a whole request has come."""
    connection = ClientConnection(app, set())  # type: ignore[arg-type]
    connection.connection_made(From(peer))  # type: ignore[arg-type]
    connection.data_received(SMALL % body_bytes + bytes(body_bytes))
    return connection


def test_who_comes_with_many_requests_waits_behind_his_own() -> None:
    """A few begin in a turn of the loop, in order; who comes from elsewhere goes before the rest of them."""

    async def run() -> None:
        app, taken = App(), 0
        for size in range(1, 101):
            arrived(app, "10.0.0.1", size)
        assert app.taken == list(range(1, REQUESTS_PER_ITERATION + 1)), "the first begin as they come"
        arrived(app, "10.0.0.2", 1000)
        for turn in range(1000):
            taken = len(app.taken)
            await asyncio.sleep(0)
            assert len(app.taken) - taken <= 2 * REQUESTS_PER_ITERATION
            if turn == 3:
                assert 1000 in app.taken
            if len(app.taken) == 101:
                break
        assert [size for size in app.taken if size != 1000] == list(range(1, 101))
        await asyncio.sleep(0)
        arrived(app, "10.0.0.1", 7)
        assert app.taken[-1] == 7, "and nobody waits where there is room"

    asyncio.run(run())


def test_what_becomes_of_a_request_that_waits_for_its_turn() -> None:
    """What comes behind it is kept, the end of what its client sends begins it, and who leaves is forgotten."""

    async def run() -> None:
        app = App()
        for size in range(1, REQUESTS_PER_ITERATION + 1):
            arrived(app, "10.0.0.1", size)
        followed, ended, left, cut = (arrived(app, "10.0.0.1", size) for size in (101, 102, 103, 104))
        begun = len(app.taken)
        assert begun == REQUESTS_PER_ITERATION
        followed.data_received(SMALL % 200 + bytes(200))
        cut.data_received(SMALL % 9 + b"123")
        assert not ended.eof_received()
        assert app.taken[begun:] == [102]
        left.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert app.taken[begun:] == [102, 101, 104], "nobody twice"
        followed.finish(keep_alive=True)
        cut.finish(keep_alive=True)
        assert app.taken[begun + 3 :] == [200]
        cut.data_received(b"456789")
        assert app.taken[begun + 4 :] == [9], "cut or whole"
        app.budget.check_invariants()

    asyncio.run(run())


def test_a_request_that_waits_for_its_turn_and_cannot_be_answered_ends_by_itself() -> None:
    async def run() -> None:
        app, crashes = App(), []
        app.metrics.record_crash = lambda where, error: crashes.append(error)  # type: ignore[method-assign]
        for size in range(1, REQUESTS_PER_ITERATION + 2):
            last = arrived(app, "10.0.0.1", size)
        transport: Any = last._transport
        last.crash(RuntimeError("x"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(crashes) == 1
        assert len(app.taken) == REQUESTS_PER_ITERATION, "it was answered and is not begun"
        assert b"".join(transport.written).count(b"HTTP/1.1 500") == 1

    asyncio.run(run())


def test_a_reading_cancelled_before_its_first_step_is_closed(edge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> None: ...

    async def scenario() -> None:
        await edge.start()
        reading = read()
        monkeypatch.setattr(edge.dispatcher.reader, "begin_read", lambda *_: reading)
        request = HttpRequest("POST", b"/v1/completions", "/v1/completions", HeaderBlock(b""))
        monkeypatch.setattr(edge.dispatcher, "open", lambda *_: Mock())
        edge.dispatcher.dispatch(Mock(tenant=None), request, Mock())
        (task,) = edge.dispatcher._read_tasks._tasks
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(reading) == inspect.CORO_CLOSED
        assert not edge.dispatcher._read_tasks._tasks

    edge.run(scenario())
