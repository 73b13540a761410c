"""Responses through the edge: what goes on from one goes to its worker, and a stream's first token is the model's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prompts.responses import make_item_id

PATH = b"/v1/responses"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": "Hi", **fields}).encode()


@pytest.mark.parametrize("padding", [0, 100_000], ids=["light", "large"])
def test_what_names_a_stored_response_goes_to_its_worker(edge: Any, make_post: Any, padding: int) -> None:
    async def scenario() -> None:
        await edge.start()
        workers = {
            name: await edge.worker(edge.reply(json.dumps({"id": f"resp_{name}", "output": []}).encode()), name)
            for name in "abc"
        }

        def counts() -> list[int]:
            return [len(worker.received) for worker in workers.values()]

        for _ in workers:
            await edge.exchange(make_post(body(), PATH))
        assert counts() == [1, 1, 1]
        for _ in range(4):
            await edge.exchange(make_post(body(previous_response_id="resp_b", user="x" * padding), PATH))
        assert counts() == [1, 5, 1]
        named = {"type": "item_reference", "id": make_item_id("msg_", "resp_b", 0)}
        for item in (named, dict(reversed(named.items()))):
            await edge.exchange(make_post(body(input=[{"role": "user", "content": "x" * padding}, item]), PATH))
        assert counts() == [1, 7, 1]
        for request in (b"GET /v1/responses/resp_c", b"DELETE /v1/responses/resp_c"):
            await edge.exchange(request + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert counts() == [1, 7, 3]
        await edge.exchange(make_post(b"", PATH + b"/resp_a/cancel"))
        assert counts() == [2, 7, 3]
        edge.core.remove_worker("b", 0.0)
        answer = await edge.exchange(make_post(body(previous_response_id="resp_b"), PATH))
        assert answer.split(b" ")[1] == b"404"
        assert b"There is no worker" in answer

    edge.run(scenario())


@pytest.mark.parametrize("how", ["previous", "referenced", "GET", "DELETE"])
def test_a_stored_response_from_before_the_routers_start_is_searched(edge: Any, make_post: Any, how: str) -> None:
    """Its worker is unknown. A worker that does not have it answers 404, and so does the router if none has it."""

    async def scenario() -> None:
        def make_request(response_id: str) -> bytes:
            if how == "previous":
                return bytes(make_post(body(previous_response_id=response_id), PATH))
            if how == "referenced":
                item = {"type": "item_reference", "id": make_item_id("msg_", response_id, 0)}
                return bytes(make_post(body(input=[item]), PATH))
            return f"{how} {PATH.decode()}/{response_id} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()

        await edge.start()
        missing = edge.reply(b'"none"', status=b"404 Not Found")
        others = [await edge.worker(missing, name) for name in "ab"]
        holder = await edge.worker(edge.reply(b'{"id":"resp_2"}'), "c")
        for _ in range(3):
            answer = await edge.exchange(make_request("resp_1"))
            assert answer.split(b" ")[1] == b"200"
        assert len(holder.received) == 3
        assert any(worker.received for worker in others)
        assert [worker.state.value for worker in edge.core.workers.values()] == ["up"] * 3
        edge.core.remove_worker("c", edge.now())
        answer = await edge.exchange(make_request("resp_1"))
        assert answer.split(b" ")[1] == b"404"
        assert answer.endswith(b'"none"')

    edge.run(scenario())


def test_a_stored_response_needs_no_model_to_be_found(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply(), "a", model="first")
        worker = await edge.worker(edge.reply(b'{"id":"resp_b","output":[]}'), "b", model="second")
        await edge.exchange(make_post(body(model="second"), PATH))
        for method in (b"GET", b"DELETE"):
            request = method + b" /v1/responses/resp_b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            assert (await edge.exchange(request)).split(b" ")[1] == b"200"
        follow_up = make_post(json.dumps({"input": "Hi", "previous_response_id": "resp_b"}).encode(), PATH)
        assert (await edge.exchange(follow_up)).split(b" ")[1] == b"200"
        assert len(worker.received) == 4

    edge.run(scenario())


def test_a_response_that_still_runs_is_found(edge: Any, make_post: Any) -> None:
    begun = b'event: response.created\ndata: {"response":{"id":"resp_a"}}\n\n'
    begun += b"event: response.output_item.added\ndata: {}\n\n"

    async def scenario() -> None:
        async def script(received: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            if received.line.startswith(b"GET"):
                await edge.reply()(received, reader, writer)
            else:
                writer.write(HEAD + b"%x\r\n%b\r\n" % (len(begun), begun))
                await reader.read()

        await edge.start()
        first, second = await edge.worker(script), await edge.worker(script)
        reader, writer = await edge.connect()
        writer.write(make_post(body(stream=True, background=True), PATH))
        await reader.readuntil(b"output_item")
        holder = first if first.received else second
        for count in (2, 3, 4):
            await edge.exchange(b"GET /v1/responses/resp_a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert len(holder.received) == count
            writer.close()  # it is found later, too

    edge.run(scenario())


def test_the_first_token_is_the_models(edge: Any, make_post: Any) -> None:
    asked = [f"event: response.{name}\ndata: {{}}\n\n".encode() for name in ("created", "in_progress")]
    said = b'event: response.output_item.added\ndata: {"x":1}\n\n'

    async def scenario() -> None:
        goes_on = asyncio.Event()

        async def script(received: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD)
            for event in asked:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await edge.let_loop_read()
            await goes_on.wait()
            writer.write((b"%x\r\n%b\r\n" % (len(said), said)) * 3 + b"0\r\n\r\n")

        await edge.start()
        await edge.worker(script)
        firsts: list[str] = []
        first_token = edge.core.record_first_token

        def noted(request_id: str, now: float) -> Any:
            firsts.append(request_id)
            return first_token(request_id, now)

        edge.core.record_first_token = noted
        reader, writer = await edge.connect()
        writer.write(make_post(body(stream=True), PATH))
        got = b""
        while b"in_progress" not in got:
            got += await reader.read(1 << 16)
        assert firsts == []
        goes_on.set()
        while not got.endswith(b"0\r\n\r\n"):
            got += await reader.read(1 << 16)
        assert len(firsts) == 1
        writer.close()

    edge.run(scenario())


def test_counting_tokens_computes_nothing(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply(b'{"input_tokens":25000}'))
        weights: list[int] = []
        edge.proxy.on_end.append(lambda exchange: weights.append(exchange.route.prompt_tokens))
        for path in (b"/v1/messages/count_tokens", b"/v1/embeddings"):
            await edge.exchange(make_post(body(user="x" * 4_000), path))
        assert weights[0] == 1
        assert weights[1] > 1_000

    edge.run(scenario())
