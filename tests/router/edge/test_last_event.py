"""A stream whose last event was passed on is complete, whoever closes first; its usage counts, wherever it stands."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from router.decide.messages import ReportedUsage
from router.edge.response_progress import ResponseProgress

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def event(fields: dict[str, Any], *, named: bool = True) -> bytes:
    name = b"event: %b\n" % fields["type"].encode() if named and "type" in fields else b""
    return name + b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(usage: dict[str, Any]) -> list[bytes]:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
    return [event({"choices": [choice]}), event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def messages(start: dict[str, Any], delta: dict[str, Any]) -> list[bytes]:
    return [
        event({"type": "message_start", "message": {"id": "m" * 400, "content": [], "usage": start}}),
        event({"type": "content_block_delta", "delta": {"text": '{"usage": {"input_tokens": 9}}'}}),
        *[event({"type": "ping"})] * 9, event({"type": "message_delta", "delta": {}, "usage": delta}),
        event({"type": "message_stop"}),
    ]  # fmt: skip


def response(usage: dict[str, Any], last: str = "response.completed") -> list[bytes]:
    whole = {"id": "resp_1", "output": [{"text": "x" * 9000}], "usage": usage}
    return [event({"type": "response.output_text.delta", "delta": "x"}), event({"type": last, "response": whole})]


CHAT_USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSE_USAGE = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 5}
PARTS = {"input_tokens": 36, "cache_read_input_tokens": 64}
WHOLE = ReportedUsage(100, 64, 5)
STREAMS: dict[str, tuple[str, list[bytes], ReportedUsage]] = {
    "a chat": (CHAT, chat(CHAT_USAGE), WHOLE),
    "a response": (RESPONSES, response(RESPONSE_USAGE), WHOLE),
    "an incomplete response": (RESPONSES, response(RESPONSE_USAGE, "response.incomplete"), WHOLE),
    "told at the start": (MESSAGES, messages({**PARTS, "output_tokens": 0}, {"output_tokens": 5}), WHOLE),
    "told at the start, with written parts": (
        MESSAGES, messages({"input_tokens": 4, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 32},
                           {"output_tokens": 5}), WHOLE),
    "told at the end": (
        MESSAGES, messages({"input_tokens": 0, "output_tokens": 0}, {**PARTS, "output_tokens": 5}), WHOLE),
    "nought at the end": (
        MESSAGES, messages({**PARTS, "output_tokens": 1}, {"input_tokens": 0, "output_tokens": 5}), WHOLE),
    "no word of the cache": (
        MESSAGES, messages({"input_tokens": 100}, {"output_tokens": 5}), ReportedUsage(100, None, 5)),
    "nulls": (MESSAGES, messages({"input_tokens": 100, "cache_read_input_tokens": None}, {"output_tokens": 5}),
              ReportedUsage(100, None, 5)),
    "no end": (MESSAGES, messages(PARTS, {})[:-2], ReportedUsage(100, 64, None)),
}  # fmt: skip


@pytest.mark.parametrize("what", STREAMS)
@pytest.mark.parametrize("reads", ["events", "whole"])
def test_usage_is_found_wherever_it_stands(what: str, reads: str) -> None:
    path, events, expected = STREAMS[what]
    progress = ResponseProgress()
    for data in events if reads == "events" else [b"".join(events)]:
        assert not progress.has_final_event(path)
        progress.record(data, 0.0)
    assert progress.find_reported_usage() == expected
    assert progress.has_final_event(path) is (what != "no end")


def test_a_whole_answer_may_tell_its_usage_first() -> None:
    progress = ResponseProgress()
    progress.record(b'{"id":"x","usage":{"input_tokens":100,"output_tokens":5},"content":["%b"]}' % (b"x" * 9000), 0.0)
    assert progress.find_reported_usage() == ReportedUsage(100, None, 5)


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"choices":[{"delta":{"content":"data: [DONE]\\n\\n"}}]}\n\n', b"data: [DONE", b": data: [DONE]\n\n",
        b'event: message_stop\ndata: {"type":', b'data: {"type":"response.completed","response":{}}\n',
        b'data: {"x":{"type":"message_stop"}}\n\n', b'event: message_stop\ndata: {}\n\nevent: ping\ndata: {}\n\n',
    ],
)  # fmt: skip
def test_what_only_looks_like_the_last_event_is_none(data: bytes) -> None:
    progress = ResponseProgress()
    progress.record(b"data: {}\n\n", 0.0)
    progress.record(data, 0.0)
    assert not progress.has_final_event(MESSAGES)


def test_a_parameter_of_a_tool_that_is_named_usage_ends_no_response() -> None:
    tools = [{"type": "function", "name": "report", "parameters": {"properties": {"usage": {"type": "string"}}}}]
    progress = ResponseProgress()
    for kind in ("response.created", "response.in_progress"):
        progress.record(event({"type": kind, "response": {"id": "resp_1", "tools": tools, "usage": None}}), 0.0)
    progress.record(event({"type": "response.output_text.delta", "delta": "x"}), 0.0)
    assert not progress.has_final_event(RESPONSES)
    progress.record(response(RESPONSE_USAGE)[-1], 0.0)
    assert progress.has_final_event(RESPONSES)
    whole = {"id": "resp_1", "output": [{"text": "x" * 9000}], "usage": RESPONSE_USAGE, "tools": tools * 2}  # SGLang's
    progress.record(event({"type": "response.completed", "response": whole}), 0.0)
    assert progress.has_final_event(RESPONSES)
    assert progress.find_reported_usage() == WHOLE


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("framing", ["chunked", "in a chunk", "length", "close"])
@pytest.mark.parametrize("engine", ["", "vllm"])
@pytest.mark.parametrize("what", ["a chat", "a response", "told at the start"])
@pytest.mark.parametrize("first", ["worker", "client"])
def test_a_stream_with_its_last_event_is_complete(
    edge: Any, make_post: Any, framing: str, engine: str, what: str, first: str
) -> None:
    path, events, usage = STREAMS[what]
    sent = b"".join(events)

    async def script(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if framing in ("chunked", "in a chunk"):
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, events[:-1])))
            last = chunk(events[-1])
            writer.write(last if framing == "chunked" else b"%x\r\n" % (len(events[-1]) + 9) + events[-1])
        else:
            length = b"content-length: %d\r\n" % (len(sent) + 9) if framing == "length" else b"connection: close\r\n"
            writer.write(HEAD + length + b"\r\n" + sent)
        await writer.drain()
        if first == "client":
            await reader.read(1)
        writer.close()

    async def scenario() -> None:
        await edge.start(policy="kv")
        await edge.worker(script, engine=engine)
        ended: list[Any] = []
        edge.proxy.on_end.append(ended.append)
        fields: dict[str, Any] = {"model": "tiny", "stream": True, "input": "a", "max_tokens": 5}
        body = json.dumps({**fields, "messages": [{"role": "user", "content": "a"}]}).encode()
        reader, writer = await edge.connect()
        writer.write(make_post(body, path.encode(), close=False))
        got = b""
        while events[-1][-30:] not in got:
            got += await reader.read(1 << 16)
        if first == "client":
            writer.close()
        elif framing == "chunked":
            while not got.endswith(b"0\r\n\r\n"):
                more = await reader.read(1 << 16)
                assert more, "no end of the body"
                got += more
        await edge.until(lambda: ended)
        writer.close()
        (exchange,) = ended
        assert exchange.outcome == "status_200"
        assert exchange.usage == usage
        assert not edge.metrics.broken_streams
        assert not edge.metrics.client_disconnects
        assert edge.core.counters["finished"] == 1

    edge.run(scenario())


def test_the_log_names_a_request_by_the_id_that_its_client_has(
    edge: Any, make_post: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"data: {}\n\n"))
        await writer.drain()
        writer.transport.abort()

    async def scenario() -> None:
        await edge.start()
        edge.proxy.log_share = 1.0
        await edge.worker(script)
        body = json.dumps({"model": "tiny", "prompt": [1], "stream": True}).encode()
        await edge.exchange(make_post(body, b"/v1/completions", [b"x-request-id: of-the-client"]))

    with caplog.at_level(logging.INFO, "router"):
        edge.run(scenario())
    assert "the answer to of-the-client broke off and was cut" in caplog.text
    assert '"request_id":"of-the-client"' in caplog.text
