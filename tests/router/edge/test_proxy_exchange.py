"""One request through the edge on real sockets: what arrives where, byte for byte, and how each thing that can go
wrong ends. `edge.run` checks after every scenario that nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from router.decide.workers import ServedModel
from router.edge.config import Timeouts
from router.http.response import MAX_INTERIM_RESPONSES

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def headers_of(answer: bytes) -> dict[bytes, bytes]:
    head = answer.partition(b"\r\n\r\n")[0]
    return dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_json_passes_unchanged_both_ways(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        odd = b'{ "usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":3},"completion_tokens":2}}\n'
        worker = await edge.worker(edge.reply(odd, headers=(b"Content-Type: application/json", b"X-Thing: a, b")))
        sent = b'  {"model":"tiny", "messages":[{"role":"user","content":"\\u00e9"}],"unknown":[1, 2]}'
        answer = await edge.exchange(make_post(sent, headers=[b"X-Custom: kept", b"Authorization: Bearer k"]))
        assert status_of(answer) == 200
        assert body_of(answer) == odd
        assert headers_of(answer)[b"x-thing"] == b"a, b"
        assert headers_of(answer)[b"x-blockcast-worker"] == b"w0"
        assert headers_of(answer)[b"x-blockcast-predicted-cached-tokens"] == b"0"
        request = worker.received[0]
        assert request.body == sent
        assert request.line == b"POST /v1/chat/completions HTTP/1.1"
        assert request.all(b"x-custom") == [b"kept"]
        assert request.all(b"authorization") == [b"Bearer k"]
        assert request.all(b"content-length") == [b"%d" % len(sent)]
        assert request.all(b"host") == [b"127.0.0.1:%d" % worker.port]
        assert request.all(b"connection") == []
        assert request.all(b"x-request-id") == [headers_of(answer)[b"x-request-id"]]
        usage = edge.core.snapshot(0.0)
        assert usage.in_flight == 0

    edge.run(scenario())


@pytest.mark.parametrize("reads", range(1, 12))
def test_usage_is_found_at_the_end_of_a_stream_of_any_length(edge: Any, make_post: Any, reads: int) -> None:
    parts = [b"data: {}\n\n"] * reads
    parts += [b'data: {"usage":{"prompt_tokens":7,', b'"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"]

    async def stream(request: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await edge.let_loop_read()
        writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        await edge.worker(stream)
        found = []
        edge.proxy.on_end.append(lambda exchange: found.append(exchange.usage))
        await edge.exchange(make_post(b'{"model":"tiny","prompt":"x","stream":true}', b"/v1/completions"))
        assert [(usage.prompt_tokens, usage.completion_tokens) for usage in found] == [(7, 2)]

    edge.run(scenario())


def test_chunked_stream_is_relayed_as_it_comes(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await gate.wait()
            for piece in (b"9\r", b"\ndata: 2", b"\n\n\r\n0", b"\r\n", b"\r\n"):
                writer.write(piece)
                await writer.drain()
                await edge.let_loop_read()

        await edge.start()
        await edge.worker(script)
        reader, writer = await edge.connect()
        for _ in range(2):  # the second request reuses both connections
            gate.clear()
            writer.write(make_post(STREAM, close=False))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"
            gate.set()
            chunks = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert b"".join(chunks.split(b"\r\n")[1::2]) == b"data: 2\n\n"
        assert edge.upstreams[0].connections == 1
        writer.close()

    edge.run(scenario())


def test_http_1_0_client_gets_no_chunks(edge: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

        await edge.start()
        await edge.worker(script)
        head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(CHAT)
        answer = await edge.exchange(head + CHAT)
        assert body_of(answer) == b"abcde"
        assert b"transfer-encoding" not in headers_of(answer)
        assert headers_of(answer)[b"connection"] == b"close"

    edge.run(scenario())


def test_upstream_without_framing_ends_with_its_connection(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
            writer.close()

        await edge.start()
        await edge.worker(script)
        answer = await edge.exchange(make_post(CHAT, close=False))
        assert body_of(answer) == b"until the end"
        assert headers_of(answer)[b"connection"] == b"close"

    edge.run(scenario())


def test_hop_by_hop_headers_stay_on_their_hop(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        script = edge.reply(headers=(b"Connection: X-Secret", b"X-Secret: 1", b"Keep-Alive: timeout=5", b"X-Open: 2"))
        worker = await edge.worker(script)
        sent = [b"Connection: close, X-Mine", b"X-Mine: 1", b"TE: trailers", b"Proxy-Authorization: x", b"X-Other: 2"]
        answer = await edge.exchange(make_post(CHAT, headers=sent, close=False))
        for name in (b"x-mine", b"te", b"proxy-authorization", b"connection"):
            assert worker.received[0].all(name) == []
        assert worker.received[0].all(b"x-other") == [b"2"]
        assert b"x-secret" not in headers_of(answer)
        assert b"keep-alive" not in headers_of(answer)
        assert headers_of(answer)[b"x-open"] == b"2"

    edge.run(scenario())


def test_client_that_leaves_cancels_upstream_at_once(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await reader.readexactly(1)

        await edge.start()
        worker = await edge.worker(script)
        reader, writer = await edge.connect()
        writer.write(make_post(STREAM))
        await reader.readuntil(b"abc\r\n")
        writer.close()
        await edge.until(lambda: worker.closed_by_router)
        assert worker.closed_by_router == 1
        assert edge.core.counters["aborted"] == 1

    edge.run(scenario())


@pytest.mark.parametrize("how", ["refused", "reset", "500", "502", "503", "429", "garbage"])
def test_attempt_is_repeated_elsewhere_before_the_first_byte(edge: Any, make_post: Any, how: str) -> None:
    async def scenario() -> None:
        async def reset(request: Any, reader: Any, writer: Any) -> None:
            writer.transport.abort()

        async def garbage(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"SMTP ready\r\n\r\n")

        await edge.start()
        if how == "refused":
            await edge.worker(reset, port=1)
        elif how.isdigit():
            await edge.worker(edge.reply(status=how.encode() + b" No"))
        else:
            await edge.worker(reset if how == "reset" else garbage)
        await edge.worker(edge.reply(b'"good"'))
        for _ in range(4):
            answer = await edge.exchange(make_post(CHAT))
            assert status_of(answer) == 200
            assert body_of(answer) == b'"good"'
        assert edge.core.counters["retried"] >= 1

    edge.run(scenario())


def test_last_workers_own_refusal_passes_through(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply(b'{"error":"mine"}', status=b"429 Slow down", headers=(b"Retry-After: 7",)))
        answer = await edge.exchange(make_post(CHAT))
        assert answer.startswith(b"HTTP/1.1 429 Slow down\r\n")
        assert body_of(answer) == b'{"error":"mine"}'
        assert headers_of(answer)[b"retry-after"] == b"7"

    edge.run(scenario())


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found", b"501 Not Implemented"])
def test_engines_errors_pass_through_and_are_not_repeated(edge: Any, make_post: Any, status: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        workers = [await edge.worker(edge.reply(b'{"error":{"message":"x"}}', status=status)) for _ in range(2)]
        answer = await edge.exchange(make_post(CHAT))
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert body_of(answer) == b'{"error":{"message":"x"}}'
        assert sum(len(worker.received) for worker in workers) == 1

    edge.run(scenario())


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses"])
def test_an_adapter_that_a_worker_has_unloaded_answers_elsewhere(edge: Any, make_post: Any, path: bytes) -> None:
    """The worker's list of models is read every few seconds. Its 404 reaches the client if no other has the adapter."""
    prompt = {"prompt": "hello", "input": "hello", "messages": [{"role": "user", "content": "hello"}]}
    field = {b"/v1/completions": "prompt", b"/v1/responses": "input"}.get(path, "messages")
    body = json.dumps({"model": "tuned", field: prompt[field], "max_tokens": 5}).encode()

    async def scenario() -> None:
        await edge.start()
        unloaded = [await edge.worker(edge.reply(b'"unloaded"', status=b"404 Not Found")) for _ in range(2)]
        loaded = await edge.worker(edge.reply(b'"good"'))
        for worker in list(edge.core.workers.values()):
            models = (*worker.spec.models, ServedModel("tuned", "tiny", lora="tuned", max_model_len=4096))
            edge.core.add_worker(dataclasses.replace(worker.spec, models=models), edge.now())
        for _ in range(4):
            answer = await edge.exchange(make_post(body, path))
            assert status_of(answer) == 200
            assert body_of(answer) == b'"good"'
        assert sum(len(worker.received) for worker in unloaded) >= 1
        assert [worker.state.value for worker in edge.core.workers.values()] == ["up"] * 3
        edge.core.remove_worker("w2", edge.now())
        received_count = len(loaded.received)
        answer = await edge.exchange(make_post(body, path))
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert body_of(answer) == b'"unloaded"'
        assert len(loaded.received) == received_count

    edge.run(scenario())


def test_a_request_that_fails_everywhere_is_tried_twice_and_takes_no_worker_out(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        script = edge.reply(b'{"error":"poison"}', status=b"500 Internal Server Error")
        workers = [await edge.worker(script) for _ in range(3)]
        for count in range(1, 15):
            answer = await edge.exchange(make_post(CHAT))
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert body_of(answer) == b'{"error":"poison"}'
            assert count <= sum(len(worker.received) for worker in workers) <= 2 * count
        assert [worker.state.value for worker in edge.core.workers.values()] == ["up"] * 3
        assert edge.core.counters["retried"] >= 1

    edge.run(scenario())


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_broken_stream_is_cut_not_completed_and_not_repeated(edge: Any, make_post: Any, framing: str) -> None:
    content = b"3\r\nabc\r\n" if framing == "chunked" else b"abc"

    async def scenario() -> None:
        seen = asyncio.Event()

        async def script(request: Any, reader: Any, writer: Any) -> None:
            if framing == "chunked":
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
            await writer.drain()
            await seen.wait()
            writer.transport.abort()

        await edge.start()
        workers = [await edge.worker(script) for _ in range(2)]
        reader, writer = await edge.connect()
        writer.write(make_post(STREAM))
        assert body_of(await reader.readuntil(content)) == content
        seen.set()
        assert await reader.read(-1) == b""
        writer.close()
        assert sum(len(worker.received) for worker in workers) == 1

    edge.run(scenario())


def test_stale_keep_alive_connection_is_replaced(edge: Any, make_post: Any) -> None:
    """A worker that closes an idle connection just as the next request is written: the request must not fail."""

    async def scenario() -> None:
        answered = 0

        async def script(request: Any, reader: Any, writer: Any) -> None:
            nonlocal answered
            answered += 1
            if answered == 2:
                writer.transport.abort()  # got the second request on the kept connection, and dies instead
                return
            await edge.reply()(request, reader, writer)

        await edge.start(core={"retry": {"attempts_max": 1, "budget_min": 1}})
        worker = await edge.worker(script)
        for _ in range(3):
            assert status_of(await edge.exchange(make_post(CHAT))) == 200
        assert worker.connections == 2
        assert edge.metrics.failures == {}

    edge.run(scenario())


def test_worker_that_never_answers_times_out_and_another_takes_over(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def silent(request: Any, reader: Any, writer: Any) -> None:
            await reader.readexactly(1)

        async def ask_and_wait() -> bytes:
            """Ask; where the silent worker gets the request, half a minute passes."""
            worker.received.clear()
            asked = asyncio.create_task(edge.exchange(make_post(CHAT)))
            await edge.until(lambda: worker.received or asked.done())
            edge.advance(31)
            return await asked

        await edge.start(timeouts=Timeouts(first_byte_s=30))
        worker = await edge.worker(silent)
        assert status_of(await ask_and_wait()) == 504
        await edge.worker(edge.reply())
        for _ in range(2):
            assert status_of(await ask_and_wait()) == 200
        assert edge.metrics.failures["w0", "timeout"] >= 2, "the first, and one that another worker answered"

    edge.run(scenario())


def test_stream_that_stalls_is_cut_after_the_idle_timeout(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def stalls(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await reader.readexactly(1)

        await edge.start(timeouts=Timeouts(idle_s=30))
        await edge.worker(stalls)
        reader, writer = await edge.connect()
        writer.write(make_post(STREAM))
        assert body_of(await reader.readuntil(b"abc\r\n")) == b"3\r\nabc\r\n"
        edge.advance(31)
        assert await reader.read(-1) == b""
        writer.close()

    edge.run(scenario())


def test_whole_answers_that_take_long_take_no_worker_down(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def computes(request: Any, reader: Any, writer: Any) -> None:
            await reader.readexactly(1)

        await edge.start(timeouts=Timeouts(first_byte_s=30))
        workers = [await edge.worker(computes) for _ in range(2)]
        asked = asyncio.gather(*(edge.exchange(make_post(CHAT)) for _ in range(8)))
        await edge.until(lambda: sum(len(worker.received) for worker in workers) == 8)

        def are_answered() -> bool:
            edge.advance(10)
            return asked.done()

        await edge.until(are_answered)
        assert {status_of(answer) for answer in await asked} == {504}
        assert edge.metrics.failures
        assert {worker.state.value for worker in edge.core.workers.values()} == {"up"}

    edge.run(scenario())


def test_streams_that_nobody_reads_take_no_worker_down(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def endless(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            while True:
                writer.write(piece)
                await writer.drain()

        await edge.start(timeouts=Timeouts(idle_s=30))
        worker = await edge.worker(endless)
        clients = [await edge.connect() for _ in range(4)]
        for _, writer in clients:
            writer.transport.pause_reading()
            writer.write(make_post(STREAM))
        await edge.until(lambda: len(worker.received) == len(clients))
        await edge.until(lambda: all(exchange._is_client_paused for exchange in edge.proxy.exchanges.values()))
        edge.advance(31)
        await edge.until(lambda: edge.metrics.broken_streams["cut"] == len(clients))
        assert {worker.state.value for worker in edge.core.workers.values()} == {"up"}
        assert all(worker.failures == 0 for worker in edge.core.workers.values())
        for _, writer in clients:
            writer.close()

    edge.run(scenario())


def test_a_request_that_ends_its_worker_is_sent_to_one_other(edge: Any, make_post: Any) -> None:
    """Also over a kept connection, where the worker cannot be reached any more when the request is sent once more."""

    async def scenario() -> None:
        async def dies(request: Any, reader: Any, writer: Any) -> None:
            if b"poison" not in request.body:
                await edge.reply()(request, reader, writer)
                return
            (upstream,) = [one for one in edge.upstreams if request in one.received]
            await upstream.stop()

        await edge.start()
        for _ in range(4):
            await edge.worker(dies)
        for _ in range(4):
            assert status_of(await edge.exchange(make_post(CHAT))) == 200
        assert status_of(await edge.exchange(make_post(CHAT.replace(b"hello", b"poison")))) == 502
        assert sum(b"poison" in one.body for upstream in edge.upstreams for one in upstream.received) == 2

    edge.run(scenario())


def test_total_timeout_before_an_answer_is_a_504(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def silent(request: Any, reader: Any, writer: Any) -> None:
            await reader.readexactly(1)

        await edge.start(timeouts=Timeouts(total_s=30))
        workers = [await edge.worker(silent) for _ in range(2)]
        asked = asyncio.create_task(edge.exchange(make_post(CHAT)))
        await edge.until(lambda: workers[0].received or workers[1].received)
        edge.advance(31)
        answer = await asked
        assert status_of(answer) == 504
        assert json.loads(body_of(answer))["error"]["code"] == "timeout"

    edge.run(scenario())


def test_slow_reader_holds_back_its_worker_and_loses_nothing(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        size = 48 * 1024 * 1024  # more than the kernel buffers of both hops
        sent = 0

        async def script(request: Any, reader: Any, writer: Any) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            block = bytes(range(256)) * 256
            while sent < size:
                writer.write(block)
                await writer.drain()
                sent += len(block)

        await edge.start()
        await edge.worker(script)
        reader, writer = await edge.connect()
        writer.transport.pause_reading()
        writer.write(make_post(CHAT))
        await edge.until(lambda: any(exchange._is_client_paused for exchange in edge.proxy.exchanges.values()))
        await edge.until(lambda: edge.upstreams[0].unread_bytes)
        for _ in range(20):
            await edge.let_loop_read()
            assert sent < size, "the router swallowed the whole answer for a client that reads nothing"
        writer.transport.resume_reading()
        answer = await reader.read(-1)
        assert len(body_of(answer)) == size
        assert body_of(answer) == bytes(range(256)) * (size // 256)
        writer.close()

    edge.run(scenario())


def test_interim_answers_are_swallowed(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        await edge.start()
        await edge.worker(script)
        answer = await edge.exchange(make_post(CHAT))
        assert status_of(answer) == 200
        assert body_of(answer) == b"ok"

    edge.run(scenario())


@pytest.mark.parametrize("interim", [b"100 Continue\r\n\r\n", b"103 Early Hints\r\nlink: x\r\n\r\n"])
def test_interim_answers_have_an_end(edge: Any, make_post: Any, interim: bytes) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write((b"HTTP/1.1 " + interim) * (MAX_INTERIM_RESPONSES if script.sound else 10_000))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        await edge.start()
        await edge.worker(script)
        for script.sound in (True, True, False):
            answer = await edge.exchange(make_post(CHAT))
            assert status_of(answer) == (200 if script.sound else 502)

    edge.run(scenario())


def test_bytes_after_an_answer_poison_only_their_connection(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        async def script(request: Any, reader: Any, writer: Any) -> None:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
            )

        await edge.start()
        worker = await edge.worker(script)
        for _ in range(2):
            assert body_of(await edge.exchange(make_post(CHAT))) == b"ok"
        assert worker.connections == 2

    edge.run(scenario())


def test_no_worker_is_a_503_with_retry_after(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        answer = await edge.exchange(make_post(CHAT))
        assert status_of(answer) == 503
        assert int(headers_of(answer)[b"retry-after"]) >= 1
        await edge.worker(edge.reply())
        unknown = await edge.exchange(make_post(CHAT.replace(b"tiny", b"other")))
        assert status_of(unknown) == 404
        assert json.loads(body_of(unknown))["error"]["type"] == "invalid_request_error"

    edge.run(scenario())


def test_other_paths_pass_through(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start(pass_routes=("/v1/responses/*", "/v1/things"))
        worker = await edge.worker(edge.reply(b"[]"))
        answer = await edge.exchange(b"GET /v1/responses/r1?x=1 HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        assert body_of(answer) == b"[]"
        assert worker.received[0].line == b"GET /v1/responses/r1?x=1 HTTP/1.1"
        assert worker.received[0].all(b"content-length") == []
        head = await edge.exchange(b"HEAD /v1/things HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        assert headers_of(head)[b"content-length"] == b"2"
        assert body_of(head) == b""

    edge.run(scenario())


def test_worker_removed_while_it_answers_finishes_its_streams(edge: Any, make_post: Any) -> None:
    """Also their first tokens, which teach the router about a worker it has forgotten."""

    async def scenario() -> None:
        gates = [asyncio.Event() for _ in range(3)]

        async def script(request: Any, reader: Any, writer: Any) -> None:
            await gates[len(edge.upstreams[0].received) - 1].wait()
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")

        await edge.start(policy="kv")
        await edge.worker(script)
        answers = []
        for _ in gates:
            answers.append(asyncio.create_task(edge.exchange(make_post(STREAM))))
            await edge.until(lambda: len(edge.upstreams[0].received) == len(answers))
        gates[0].set()
        await answers[0]
        edge.proxy.perform(edge.core.remove_worker("w0", edge.now()))
        for gate, answer in zip(gates[1:], answers[1:]):
            gate.set()
            assert body_of(await answer) == b"3\r\nabc\r\n0\r\n\r\n"
            edge.advance(0.1)

    edge.run(scenario())


def test_sampled_decisions_are_logged_with_every_candidate(
    edge: Any, make_post: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await edge.start()
        for _ in range(2):
            await edge.worker(edge.reply(b'{"usage":null}'))
        edge.proxy.log_share = 1.0
        await edge.exchange(make_post(CHAT))
        edge.proxy.log_share = 0.0
        await edge.exchange(make_post(CHAT))

    with caplog.at_level("INFO", logger="router"):
        edge.run(scenario())
    (line,) = [record for record in caplog.records if record.getMessage().startswith("decision ")]
    decision = json.loads(line.getMessage().removeprefix("decision "))
    assert {terms["worker"] for terms in decision["candidates"]} == {"w0", "w1"}
    assert {"cached_tokens", "prefill_s", "queue_s", "slowdown", "cost"} <= set(decision["candidates"][0])
    assert line.fields == {"decision": decision}  # type: ignore[attr-defined]


def test_a_rank_that_was_decided_for_is_named_to_the_worker(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        upstream = await edge.worker(edge.reply(), "w")
        spec = dataclasses.replace(edge.core.workers["w"].spec, ranks=3)
        edge.core.add_worker(spec, edge.now())
        decided: list[Any] = []
        edge.proxy.on_end.append(lambda exchange: decided.append(exchange.decision.rank))
        for _ in range(6):
            own = make_post(b'{"model":"tiny","messages":[]}', headers=[b"X-data-parallel-rank: 7"])
            assert (await edge.exchange(own)).startswith(b"HTTP/1.1 200")
        named = [received.all(b"x-data-parallel-rank") for received in upstream.received]
        assert named == [[b"%d" % rank] for rank in decided]
        assert set(decided) == {0, 1, 2}

    edge.run(scenario())
