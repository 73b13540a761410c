"""The dashboard's stream of events: what a viewer is told, and that watching costs nobody anything."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

from router.admin.dashboard import Dashboard

SHARED = list(range(1000, 1192))


def prompt(ids: list[int]) -> bytes:
    return json.dumps({"model": "tiny", "prompt": ids}).encode()


async def watch(edge: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await edge.connect()
    writer.write(b"GET /dashboard/events HTTP/1.1\r\nHost: r\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"text/event-stream" in head
    return reader, writer


async def next_event(reader: asyncio.StreamReader, name: str) -> Any:
    """The data of the next event called `name`."""
    while True:
        block = (await reader.readuntil(b"\n\n")).decode()
        lines = dict(line.split(": ", 1) for line in block.strip().split("\n"))
        if lines.get("event") == name:
            return json.loads(lines["data"])


def make(edge: Any) -> Dashboard:
    dashboard = Dashboard(edge.proxy, edge.worker_list.describe_workers)
    dashboard.register(edge.routes)
    return dashboard


def test_page_is_self_contained(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        make(edge)
        answer = await edge.exchange(b"GET /dashboard HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        head, _, page = answer.partition(b"\r\n\r\n")
        assert b"text/html" in head
        text = page.decode().replace("http://www.w3.org/2000/svg", "").replace("http://host:8000", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "<script src" not in text

    edge.run(scenario())


def test_the_page_runs_its_own_script_and_is_shown_in_no_frame(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        make(edge)
        answer = await edge.exchange(b"GET /dashboard HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        head, _, page = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        policy = dict(part.split(b" ", 1) for part in headers[b"content-security-policy"].split(b"; "))
        for kind in (b"script", b"style"):
            inside = page.partition(b"<%b>" % kind)[2].partition(b"</%b>" % kind)[0]
            assert policy[b"%b-src" % kind] == b"'sha256-%b'" % b64encode(sha256(inside).digest())
            assert page.count(b"<%b" % kind) == 1
        assert b" style=" not in page
        assert re.search(rb"<[^>]* on\w+=", page) is None
        assert (policy[b"default-src"], policy[b"frame-ancestors"]) == (b"'none'", b"'none'")
        assert headers[b"x-frame-options"] == b"DENY"

    edge.run(scenario())


def test_viewers_hear_of_decisions_with_every_candidates_terms(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        dashboard = make(edge)
        usage = b'{"usage":{"prompt_tokens":192,"prompt_tokens_details":{"cached_tokens":64}}}'
        await edge.worker(edge.reply(usage))
        await edge.worker(edge.reply(usage))
        await edge.exchange(make_post(prompt(SHARED), b"/v1/completions"))
        reader, writer = await watch(edge)
        assert len((await next_event(reader, "state"))["workers"]) == 2
        (before,) = await next_event(reader, "decisions")
        assert len(before["candidates"]) == 1, "terms of all candidates are kept only while somebody watches"
        await edge.exchange(make_post(prompt(SHARED), b"/v1/completions"))
        dashboard.tick(1e9)
        (row,) = await next_event(reader, "decisions")
        assert {one["worker"] for one in row["candidates"]} == {"w0", "w1"}
        assert (row["prompt_tokens"], row["cached_tokens"], row["outcome"]) == (192, 64, "status_200")
        writer.close()
        await edge.until(lambda: not edge.proxy.explains_decisions)
        point = json.loads(json.dumps(dashboard._points[-1]))
        assert (point["prompt_tokens"], point["actual_tokens"]) == (384, 128)

    edge.run(scenario())


def test_predictions_show_where_no_answer_tells_its_usage(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv")
        dashboard = make(edge)
        await edge.worker(edge.reply(b"{}"))
        await edge.exchange(make_post(prompt(SHARED), b"/v1/completions"))
        dashboard.tick(1e9)
        (point,) = dashboard._points
        assert (point["prompt_tokens"], point["reported_prompt_tokens"], point["actual_tokens"]) == (len(SHARED), 0, 0)

    edge.run(scenario())


def test_viewer_that_does_not_read_misses_updates(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        dashboard = make(edge)
        reader, writer = await watch(edge)
        writer.transport.pause_reading()
        (viewer,) = dashboard._viewers
        sent = 0
        while not viewer._is_paused:
            viewer.send("state", b"x" * 100_000)
            sent += 1
            assert sent < 1000
            await asyncio.sleep(0)
        for _ in range(1000):
            viewer.send("state", b"x" * 100_000)  # 100 MB that must not be kept
        assert viewer._connection._transport.get_write_buffer_size() < 2_000_000
        writer.transport.abort()
        assert reader is not None

    edge.run(scenario())
