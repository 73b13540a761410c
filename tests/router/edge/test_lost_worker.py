"""A worker that goes down, is removed or stands still with requests on it: others answer them where they can."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from router.edge.upstream import Endpoint, UpstreamPool

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 20}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORDS = ["on", "e ", "tw", "o ", "three"]
PROMPT = [5, 6, 7]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def lose(edge: Any, name: str, how: str) -> None:
    now = edge.now()
    if how == "down":
        edge.proxy.perform(edge.core.mark_worker_down(name, now, "no answer to /health"))
    elif how == "asleep":
        edge.proxy.perform(edge.core.set_asleep(name, now, is_asleep=True))
    else:
        edge.proxy.perform(edge.core.remove_worker(name, now))


def silent(gate: asyncio.Event, answer: Any, *, head: bool = False) -> Any:
    """A script: nothing, or a head and nothing more, until the gate is set; then the answer."""

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head:
            writer.write(HEAD)
        await gate.wait()
        await answer(received, reader, writer)

    return script


def speaking(pauses_after: int | None, gate: asyncio.Event, log: list[str], name: str) -> Any:
    """A script: WORDS with their token ids from where the prompt says, with a pause until the gate is set."""

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        log.append(name)
        given = body.get("prompt")
        writer.write(HEAD)
        for at in range(len(given) - len(PROMPT) if isinstance(given, list) else 0, len(WORDS)):
            if at == pauses_after:
                await gate.wait()
            reason = "stop" if at == len(WORDS) - 1 else None
            choice = {"index": 0, "text": WORDS[at], "token_ids": [100 + at], "finish_reason": reason}
            told = {"id": name, "choices": [choice | {"prompt_token_ids": PROMPT}]}
            writer.write(chunk(b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"))
            await asyncio.sleep(0)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def text_of(answer: bytes) -> str:
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b'data: {"')]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.parametrize("how", ["down", "removed", "asleep"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/completions", {**BODY, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
    ],
)
def test_what_has_no_first_byte_moves(edge: Any, make_post: Any, path: str, body: dict[str, Any], how: str) -> None:
    async def scenario() -> None:
        await edge.start()
        gate = asyncio.Event()
        a = await edge.worker(silent(gate, edge.reply(b'"a"')), "a")
        await edge.worker(edge.reply(b'"b"'), "b")
        asked = [
            asyncio.create_task(edge.exchange(make_post(json.dumps(body).encode(), path.encode()))) for _ in range(2)
        ]
        await edge.until(lambda: a.received)
        lose(edge, "a", how)
        for answer in await asyncio.gather(*asked):
            assert answer.endswith(b'"b"')
            assert b"x-blockcast-worker: b" in answer.lower()
        await edge.until(lambda: a.closed_by_router or not gate.set())
        assert edge.core.counters["retried"] == 1
        assert edge.core.workers["b"].failures == 0

    edge.run(scenario())


@pytest.mark.parametrize("how", ["down", "removed"])
@pytest.mark.parametrize("others", ["none", "too short", "budget"])
def test_where_nobody_else_can_take_it_the_answer_is_waited_for(
    edge: Any, make_post: Any, how: str, others: str
) -> None:
    async def scenario() -> None:
        await edge.start(core={"retry": {"budget_min": 0, "budget_ratio": 0.0}} if others == "budget" else {})
        gate = asyncio.Event()
        a = await edge.worker(silent(gate, edge.reply(b'"a"')), "a")
        if others == "too short":
            await edge.worker(edge.reply(b'"b"'), "b")
            edge.core.set_draining("b", edge.now())
        asked = asyncio.create_task(edge.exchange(make_post(json.dumps(BODY).encode(), b"/v1/completions")))
        await edge.until(lambda: a.received)
        if others == "budget":
            await edge.worker(edge.reply(b'"b"'), "b")
        lose(edge, "a", how)
        for _ in range(20):
            edge.proxy.sweep(edge.now())
        gate.set()
        assert (await asked).endswith(b'"a"')

    edge.run(scenario())


def test_an_answer_that_breaks_off_after_its_worker_was_removed_goes_on_at_one_of_its_engine(
    edge: Any, make_post: Any
) -> None:
    async def scenario() -> None:
        await edge.start()
        breaks, log = asyncio.Event(), list[str]()

        async def break_off(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            speaks = asyncio.ensure_future(speaking(2, asyncio.Event(), log, "a")(received, reader, writer))
            await breaks.wait()
            speaks.cancel()
            writer.transport.abort()

        a = await edge.worker(break_off, "a", engine="vllm")
        body = json.dumps({**BODY, "stream": True}).encode()
        asked = asyncio.create_task(edge.exchange(make_post(body, b"/v1/completions")))
        await edge.until(lambda: a.received)
        await edge.until(lambda: any(one.context.progress.read_count > 1 for one in edge.proxy.exchanges.values()))
        for name, engine in (("b", ""), ("c", "blockcast"), ("d", "vllm")):
            await edge.worker(speaking(None, breaks, log, name), name, engine=engine)
        lose(edge, "a", "removed")
        breaks.set()
        assert text_of(await asked) == "".join(WORDS)
        assert log == ["a", "d"]

    edge.run(scenario())


@pytest.mark.parametrize("how", ["down", "removed", "breaks"])
def test_a_stream_of_which_the_client_has_the_head_only_begins_anew(edge: Any, make_post: Any, how: str) -> None:
    """Of an engine whose answers cannot be continued, and of an API for which nothing is noted."""
    done = b"event: message_stop\ndata: {}\n\n"

    async def whole(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(done) + b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        gate = asyncio.Event()
        a = await edge.worker(silent(gate, edge.reply(), head=True), "a", engine="sglang")
        b = await edge.worker(whole, "b", engine="sglang")
        for path in (b"/v1/messages", b"/v1/completions"):
            a.received.clear()
            b.received.clear()
            body = json.dumps({**CHAT, "prompt": "Hi", "stream": True}).encode()
            asked = [asyncio.create_task(edge.exchange(make_post(body, path))) for _ in range(2)]
            await edge.until(lambda: a.received and edge.core.get_attempts())
            await edge.until(
                lambda: all(exchange.client.has_response_started for exchange in edge.proxy.exchanges.values())
            )
            if how == "breaks":
                await a.stop()
                await a.start(a.port)
            else:
                lose(edge, "a", how)
            for answer in await asyncio.gather(*asked):
                assert answer.count(b"HTTP/1.1 200") == 1
                assert answer.endswith(chunk(done) + b"0\r\n\r\n")
            assert len(b.received) == 2
            if how == "removed":
                break
            edge.core.mark_worker_up("a", edge.now())
            edge.core.registry.record_answer("a", edge.now())
        gate.set()

    edge.run(scenario())


def test_a_stream_that_has_begun_goes_on_elsewhere_when_its_worker_is_down(edge: Any, make_post: Any) -> None:
    """The other worker is of the same engine, though others are as free."""

    async def scenario() -> None:
        await edge.start()
        gate, open_gate, log = asyncio.Event(), asyncio.Event(), list[str]()
        open_gate.set()
        await edge.worker(speaking(3, gate, log, "a"), "a", engine="vllm")
        body = json.dumps({**BODY, "stream": True}).encode()
        asked = asyncio.create_task(edge.exchange(make_post(body, b"/v1/completions")))
        await edge.until(lambda: any(one.context.progress.read_count >= 1 for one in edge.proxy.exchanges.values()))
        for name in ("b", "c", "d"):
            await edge.worker(edge.reply(), name, engine="blockcast")
        await edge.worker(speaking(None, open_gate, log, "e"), "e", engine="vllm")
        lose(edge, "a", "down")
        answer = await asked
        assert (text_of(answer), log) == ("".join(WORDS), ["a", "e"])
        assert answer.endswith(b"0\r\n\r\n")
        assert edge.metrics.broken_streams == {"continued": 1}
        gate.set()

    edge.run(scenario())


@pytest.mark.parametrize("how", ["down", "removed"])
def test_a_stream_that_cannot_go_on_stays(edge: Any, make_post: Any, how: str) -> None:
    """`removed`: nor does one move that could, its worker answers it to the end."""

    async def scenario() -> None:
        await edge.start()
        gate, log = asyncio.Event(), list[str]()
        engine = "sglang" if how == "down" else "vllm"
        await edge.worker(speaking(3, gate, log, "a"), "a", engine=engine)
        body = json.dumps({**BODY, "stream": True}).encode()
        asked = asyncio.create_task(edge.exchange(make_post(body, b"/v1/completions")))
        await edge.until(lambda: any(one.context.progress.read_count >= 1 for one in edge.proxy.exchanges.values()))
        await edge.worker(speaking(None, gate, log, "b"), "b", engine=engine)
        lose(edge, "a", how)
        for _ in range(20):
            edge.proxy.sweep(edge.now())
        gate.set()
        assert (text_of(await asked), log) == ("".join(WORDS), ["a"])
        assert not edge.metrics.broken_streams

    edge.run(scenario())


def test_streams_leave_a_worker_that_stands_still(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(core={"health": {"stalled_s": 0.3, "failures_to_open": 2}})
        gate, open_gate, log = asyncio.Event(), asyncio.Event(), list[str]()
        open_gate.set()
        await edge.worker(speaking(3, gate, log, "a"), "a", engine="vllm")
        body = json.dumps({**BODY, "stream": True}).encode()
        asked = [asyncio.create_task(edge.exchange(make_post(body, b"/v1/completions"))) for _ in range(2)]
        await edge.until(lambda: len(log) == 2)
        await edge.until(
            lambda: None not in (exchange.last_progress_at_s for exchange in edge.proxy.exchanges.values())
        )
        await edge.worker(speaking(None, open_gate, log, "b"), "b", engine="vllm")
        for _ in range(5):
            edge.advance(0.1)
        for answer in await asyncio.gather(*asked):
            assert text_of(answer) == "".join(WORDS)
        assert log == ["a", "a", "b", "b"]
        assert edge.core.workers["a"].is_down, "two streams in a row stood still"
        gate.set()

    edge.run(scenario())


def test_the_kernel_looks_for_a_machine_that_is_silent() -> None:
    """One that lost its power ends no connection."""

    async def run(port: int) -> None:
        pool = UpstreamPool()
        connection = pool.acquire(Endpoint.parse(f"http://127.0.0.1:{port}"))
        await pool.connect(connection)
        assert connection.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        pool.close()
        await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(run(server.getsockname()[1]))


@pytest.mark.parametrize(("host", "is_kept"), [("127.0.0.1", True), ("localhost", False)])
def test_a_connection_does_not_stay_with_the_address_that_a_name_had(host: str, is_kept: bool) -> None:
    """One that was used again and again carried requests to the old machine for as long as that lived."""

    async def run(port: int) -> None:
        pool = UpstreamPool()
        target = Endpoint.parse(f"http://{host}:{port}")
        connection = pool.acquire(target)
        await pool.connect(connection)
        for now in (100.0, 103.0, 106.0, 109.0):
            pool.release(connection, now)
            assert pool.acquire(target) is connection
        pool.release(connection, 112.0)
        assert (pool.acquire(target) is connection) == is_kept
        pool.close()
        await asyncio.sleep(0)
        assert pool.count_connections() == (0, 0)

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(run(server.getsockname()[1]))
