"""What a router keeps does not grow with the number of requests, whatever names clients make up."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest

from engine.tiny.tokenizer import write_tokenizer
from prompts.tokenizer import Checkpoint, Tokenizer
from router.admin.dashboard import Dashboard
from router.app.accounting import RequestAccounting
from router.decide import cache_state
from router.prompting.model_tokenizers import LoadedTokenizer

WARM, MORE = 1000, 1000
"""Requests before the first look (what is bounded is full then) and between it and the second: what grows with the
requests doubles."""
SLACK = 60
"""Elements by which a container may differ between two looks: connections, heaps that are cleaned now and then."""


def sizes(root: Any) -> Counter[str]:
    """path -> elements, of every container that can be reached from `root`; the members of one container share a
    path. Strings and bytes count a thousand characters as one element."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, (str, bytes)):
            found[path] += len(value) // 1000
        elif isinstance(value, dict):
            found[path] += len(value)
            waiting += [(f"{path}{{}}", item) for pair in value.items() for item in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            found[path] += len(value)
            waiting += [(f"{path}[]", item) for item in value]
        elif type(value).__module__.split(".")[0] in ("router", "prompts", "tests", "conftest"):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            names = [*getattr(value, "__dict__", ()), *slots]
            waiting += [(f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return found


def request(number: int) -> tuple[bytes, list[bytes]]:
    """(body, headers) of requests that share nothing with those before: words, models, users, sessions, roles."""
    body: dict[str, Any] = {
        "model": "tiny" if number % 5 else f"no-such-model-{number}",
        "messages": [{"role": "user", "content": f"request {number}: {'and ' * (number % 40)}"}],
        "user": f"user-{number}" * (300 if number % 50 == 0 else 1),
    }
    headers = [b"x-request-id: trace-%d" % number, b"x-made-up-%d: 1" % number]
    if number % 3 == 0:
        headers.append(b"x-session-id: session-%d-%b" % (number, b"s" * 2000))
    if number % 11 == 0:
        headers.append(b"x-blockcast-role: role-%d" % number)
    if number % 13 == 0:
        headers.append(b"x-blockcast-worker: worker-%d" % number)
    if number % 17 == 0:
        body["cache_salt"] = f"salt-{number}"
    return json.dumps(body).encode(), headers


def test_what_is_kept_does_not_grow_with_requests(edge: Any, make_post: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1024, 4096)
    kept: list[Any] = [edge]

    async def scenario() -> None:
        await edge.start(policy="kv", core={"session_affinity": True, "sessions_max": 100})
        await edge.worker(edge.reply(b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}'))
        await edge.worker(edge.reply(status=b"500 Oops"))
        edge.prompts.tokenizers.loaded_by_model["tiny"] = LoadedTokenizer(
            Tokenizer.load(tmp_path), Checkpoint(str(tmp_path))
        )
        dashboard = Dashboard(edge.proxy, edge.worker_list.describe_workers)
        dashboard.register(edge.routes)
        edge.proxy.on_end.append(RequestAccounting(edge.proxy).record_ended_request)
        kept.append(dashboard)
        before: Counter[str] = Counter()
        for number in range(WARM + MORE):
            if number == WARM:
                before = await look()
            await send(number)
            if number % 5 == 0:
                dashboard.tick(float(number))
        after = await look()
        grown = {path: (before[path], count) for path, count in after.items() if count > 1.3 * before[path] + SLACK}
        assert not grown, f"grew with the number of requests: {grown}"
        assert edge.metrics.prompt_tokens > MORE  # so prompts were read

    async def send(number: int) -> None:
        edge.advance(0.001)
        data = make_post(*request(number)[:1], headers=request(number)[1])
        if number % 7 == 0:  # a client that leaves at once
            _, writer = await edge.connect()
            writer.write(data)
            await writer.drain()
            writer.close()
        else:
            assert (await edge.exchange(data)).startswith(b"HTTP/1.1 ")

    async def look() -> Counter[str]:
        await edge.settle()
        edge.advance(0.1)
        for upstream in edge.upstreams:
            upstream.received.clear()
        return sizes(kept)

    edge.run(scenario(), seconds=60)


def test_workers_that_come_and_go_leave_nothing(edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is kept of the last workers whose caches were cleared is full by the first look.
    monkeypatch.setattr(cache_state, "CLEARED_WORKERS_MAX", 8)

    async def scenario() -> None:
        await edge.start(policy="kv")
        edge.proxy.on_end.append(RequestAccounting(edge.proxy).record_ended_request)
        upstream = await edge.worker(edge.reply())
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()

        async def replace(number: int) -> None:
            edge.advance(0.01)
            spec = edge.core.workers[f"w{number}"].spec
            edge.core.remove_worker(f"w{number}", edge.proxy.now())
            edge.core.add_worker(replaced(spec, worker_id=f"w{number + 1}"), edge.proxy.now())
            assert (await edge.exchange(make_post(body, b"/v1/completions"))).startswith(b"HTTP/1.1 200")
            await edge.settle()

        async def look() -> Counter[str]:
            edge.pool.close_idle(edge.proxy.now() + 60.0)
            edge.metrics.retain_workers(edge.core.workers)
            edge.advance(0.1)
            await edge.until(lambda: not edge.pool.count_connections().open and not upstream._writers)
            upstream.received.clear()
            return sizes(edge)

        for number in range(5):
            await replace(number)
        before = await look()
        for number in range(5, 45):
            await replace(number)
        after = await look()
        grown = {path: (before[path], count) for path, count in after.items() if count > before[path] + 10}
        assert not grown, f"grew with the number of workers that were removed: {grown}"

    edge.run(scenario())
