"""The dashboard's page and its updates: what a viewer is told, and that it costs something only while it is watched."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

from router.admin.dashboard import WATCH_S, Dashboard

SHARED = list(range(1000, 1192))


def prompt(ids: list[int]) -> bytes:
    return json.dumps({"model": "tiny", "prompt": ids}).encode()


async def get_updates(edge: Any, after_s: float = 0.0) -> Any:
    """What the page shows that happened after a time."""
    target = b"/dashboard/updates?after=%f" % after_s if after_s else b"/dashboard/updates"
    answer = await edge.exchange(b"GET " + target + b" HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return json.loads(body)


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
        updates = await get_updates(edge)
        assert len(updates["state"]["workers"]) == 2
        (before,) = updates["decisions"]
        assert len(before["candidates"]) == 1, "terms of all candidates are kept only while somebody watches"
        await edge.exchange(make_post(prompt(SHARED), b"/v1/completions"))
        dashboard.tick(edge.now())
        updates = await get_updates(edge, updates["now"])
        (row,) = updates["decisions"]
        assert {one["worker"] for one in row["candidates"]} == {"w0", "w1"}
        assert (row["prompt_tokens"], row["cached_tokens"], row["outcome"]) == (192, 64, "status_200")
        (point,) = updates["points"]
        assert (point["prompt_tokens"], point["actual_tokens"]) == (384, 128)
        assert (await get_updates(edge))["decisions"] == [before, row], "another page"
        updates = await get_updates(edge, updates["now"])
        assert (updates["points"], updates["decisions"]) == ([], []), "told once"
        dashboard.tick(edge.now() + 61.0)
        assert edge.proxy.explains_decisions, "browsers let a tab in the background ask once a minute"
        dashboard.tick(edge.now() + 2 * WATCH_S)
        assert not edge.proxy.explains_decisions

    edge.run(scenario())


def test_updates_after_nonsense_are_refused(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        make(edge)
        request = b"GET /dashboard/updates?after=x HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"
        answer = await edge.exchange(request)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'after: got \\"x\\", expected a time' in answer

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
