"""Answers tell no client where KV lies, and are as long as their heads say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.response_redactor import REDACTED_KEYS, ResponseRedactor, build_key_pattern

PATTERN = build_key_pattern(frozenset())
SECRET = {"remote": [{"x": 'a"}]\\'}], "n": -1.5e3, "t": "\u00e4"}
VALUES = st.sampled_from([SECRET, [1, [2]], 'te"xt', "", 12, -3.5, None, True, {}, []])
EMPTY = {dict: {}, list: [], int: 0, float: 0, type(None): None, bool: True}


@given(
    st.lists(st.tuples(st.sampled_from([*REDACTED_KEYS, "id", "text", "usage"]), VALUES), max_size=6),
    st.sampled_from([None, (",", ":")]),
    st.lists(st.integers(0, 400), max_size=5),
)
def test_values_are_blanked_wherever_the_bytes_are_cut(fields: Any, separators: Any, cuts: list[int]) -> None:
    body = dict(fields)
    data = json.dumps({"choices": [body]}, separators=separators).encode()
    assert PATTERN is not None
    found = ResponseRedactor(PATTERN)
    ends = sorted(min(cut, len(data)) for cut in cuts)
    parts = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)])]
    out = b"".join(found.feed(part, ends=i == len(parts) - 1) for i, part in enumerate(parts))
    assert len(out) == len(data)
    (left,) = json.loads(out)["choices"]
    for name, value in body.items():
        if name not in REDACTED_KEYS:
            assert left[name] == value
        elif isinstance(value, str):
            assert not left[name].strip()
        else:
            assert left[name] == EMPTY[type(value)]


TEXT = 'he said "kv_transfer_params": {"remote_host": 1}'
ANSWER = {"id": "c", "choices": [{"index": 0, "message": {"content": TEXT}}], "kv_transfer_params": SECRET}
LEFT = {**ANSWER, "kv_transfer_params": {}}


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("framing", ["length", "chunked", "byte by byte"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_answers_are_stripped(edge: Any, make_post: Any, framing: str, path: str, passed: bool) -> None:
    data = json.dumps(ANSWER).encode()

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        if framing == "length":
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))
            return
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        step = 1 if framing == "byte by byte" else len(data)
        for at in range(0, len(data), step):
            writer.write(b"%x\r\n%b\r\n" % (len(data[at : at + step]), data[at : at + step]))
        writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start(passed_fields=("kv_transfer_params",) if passed else ())
        await edge.worker(script)
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).encode()
        answer = await edge.exchange(make_post(body, path.encode()))
        content, head = b"", answer.partition(b"\r\n\r\n")[0]
        rest = answer.partition(b"\r\n\r\n")[2]
        if b"chunked" not in head:
            content = rest
        while b"chunked" in head and rest:
            size, _, rest = rest.partition(b"\r\n")
            content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert len(content) == len(data)
        assert json.loads(content) == (ANSWER if passed else LEFT)

    edge.run(scenario())


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_streams_are_stripped(edge: Any, make_post: Any, engine: str, version: bytes) -> None:
    def event(**fields: Any) -> bytes:
        return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"

    choice = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop", "token_ids": [5]}
    events = event(choices=[choice], nvext={"worker_id": {"prefill_worker_id": 77}}) + b"data: [DONE]\n\n"

    async def script(received: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(events), 7):
            writer.write(b"%x\r\n%b\r\n" % (len(events[at : at + 7]), events[at : at + 7]))
            await writer.drain()
            await asyncio.sleep(0.001)  # the router reads the pieces one by one
        writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        await edge.worker(script, engine=engine)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        answer = await edge.exchange(make_post(json.dumps(body).encode()).replace(b"HTTP/1.1", version, 1))
        sent = answer.partition(b"\r\n\r\n")[2]
        content = b"".join(sent.split(b"\r\n")[1::2]) if version == b"HTTP/1.1" else sent
        assert b"77" not in content
        assert b"[DONE]" in content
        assert answer.endswith(b"0\r\n\r\n" if version == b"HTTP/1.1" else b"data: [DONE]\n\n")

    edge.run(scenario())
