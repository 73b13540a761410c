"""One API key's bounds, priorities and salt: what it asks for beyond them changes nothing for the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.index.protocol import Scope

SALTS = {"tenant_salts": True, "api_keys": ("one", "two")}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": [1, 2, 3], **fields}).encode()


def key(name: str) -> bytes:
    return f"Authorization: Bearer {name}".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def test_keys_share_nothing_without_asking(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", **SALTS)
        worker = await edge.worker(edge.reply())
        scopes: list[Scope] = []
        edge.proxy.on_end.append(lambda exchange: scopes.append(exchange.route.scope))
        for name, given_salt in (("one", None), ("two", None), ("one", None), ("one", "s"), ("two", "s")):
            data = body() if given_salt is None else body(cache_salt=given_salt)
            assert status(await edge.exchange(make_post(data, b"/v1/completions", [key(name)]))) == 200
        sent = [json.loads(one.body)["cache_salt"] for one in worker.received]
        assert sent == [scope.salt for scope in scopes], "the router's books and the worker's cache have one name"
        assert len(set(sent)) == 4
        assert sent[0] == sent[2]
        assert not any("one" in salt or "two" in salt for salt in sent)
        long = body(text="x" * 100_000)
        assert status(await edge.exchange(make_post(long, b"/v1/completions", [key("one")]))) == 200
        assert json.loads(worker.received[-1].body)["cache_salt"] == sent[0]
        assert status(await edge.exchange(make_post(body(), b"/v1/messages", [key("one")]))) == 200
        assert json.loads(worker.received[-1].body)["cache_salt"] == sent[0]

    edge.run(scenario())


@pytest.mark.parametrize(
    ("given", "header", "name", "router", "worker"),
    [
        (None, None, "one", 0, None), (5, None, "one", 5, 5), (-9, None, "one", 0, 0), (None, -9, "one", 0, None),
        (-9, -9, "one", 0, 0), (-9, None, "two", -3, -3), (-2, None, "two", -2, -2), (None, -9, "two", -3, None),
    ],
)  # fmt: skip
def test_priority_is_capped_by_key(
    edge: Any, make_post: Any, given: int | None, header: int | None, name: str, router: int, worker: int | None
) -> None:
    """What the router takes, and what the worker reads: a key's floor is both's."""

    async def scenario() -> None:
        await edge.start(policy="kv", api_keys=("one", "two"), key_priorities=("two=-3",))
        upstream = await edge.worker(edge.reply())
        taken = []
        edge.proxy.on_end.append(lambda exchange: taken.append(exchange.route.priority))
        headers = [key(name), *([] if header is None else [b"x-blockcast-priority: %d" % header])]
        data = body() if given is None else body(priority=given)
        assert status(await edge.exchange(make_post(data, b"/v1/completions", headers))) == 200
        assert taken == [router]
        assert json.loads(upstream.received[0].body).get("priority") == worker

    edge.run(scenario())


@pytest.mark.parametrize("bound", ["requests", "tokens"])
def test_one_key_in_flight_leaves_room_for_the_others(edge: Any, make_post: Any, bound: str) -> None:
    bounds = {"requests": {"key_requests_max": 2}, "tokens": {"key_tokens_max": 7}}[bound]

    async def scenario() -> None:
        gate = asyncio.Event()

        await edge.start(policy="kv", api_keys=("one", "two"), **bounds)
        await edge.worker(edge.gated(gate))
        first = [
            asyncio.ensure_future(edge.exchange(make_post(body(), b"/v1/completions", [key("one")]))) for _ in range(2)
        ]
        await edge.until(lambda: len(edge.core.get_attempts()) == 2)
        third = await edge.exchange(make_post(body(), b"/v1/completions", [key("one")]))
        assert status(third) == 429
        assert b"too_many_requests" in third
        assert edge.metrics.refused_by_key == {bound: 1}
        other = asyncio.ensure_future(edge.exchange(make_post(body(), b"/v1/completions", [key("two")])))
        await edge.until(lambda: len(edge.core.get_attempts()) == 3)
        gate.set()
        assert [status(answer) for answer in [*await asyncio.gather(*first), await other]] == [200, 200, 200]
        assert status(await edge.exchange(make_post(body(), b"/v1/completions", [key("one")]))) == 200

    edge.run(scenario())


def test_one_request_may_be_larger_than_a_keys_bound(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", api_keys=("one",), key_tokens_max=2)
        await edge.worker(edge.reply())
        assert status(await edge.exchange(make_post(body(), b"/v1/completions", [key("one")]))) == 200

    edge.run(scenario())


def test_a_floor_changes_no_body_that_is_no_json(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(priority_min=5)
        worker = await edge.worker(edge.reply())
        for data in (b"--x\r\n}\r\n", b"", b"[1]"):
            assert status(await edge.exchange(make_post(data, b"/v1/audio/transcriptions"))) == 200
            assert worker.received[-1].body == data

    edge.run(scenario())


def test_cache_headers_can_be_left_out(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(cache_headers=False)
        await edge.worker(edge.reply(headers=(b"x-blockcast-predicted-cached-tokens: 9",)))
        answer = await edge.exchange(make_post(body(), b"/v1/completions"))
        assert status(answer) == 200
        assert b"x-blockcast" not in answer.lower()

    edge.run(scenario())


def test_the_workers_key_goes_to_whom_the_operator_named(edge: Any, make_post: Any) -> None:
    """To the others goes no key at all: neither the workers' nor the client's."""

    async def scenario() -> None:
        await edge.start(policy="round_robin")
        workers = {name: await edge.worker(edge.reply(), name) for name in ("named", "added")}
        edge.proxy.workers.authorization = b"Bearer of-the-workers"
        edge.proxy.workers.may_send_key = lambda worker_id: worker_id == "named"
        for name in workers:
            headers = [key("client"), f"x-blockcast-worker: {name}".encode()]
            assert status(await edge.exchange(make_post(body(), b"/v1/completions", headers))) == 200
        assert workers["named"].received[0].all(b"authorization") == [b"Bearer of-the-workers"]
        assert workers["added"].received[0].all(b"authorization") == []

    edge.run(scenario())


def test_a_session_is_its_key_s_own(edge: Any, make_post: Any) -> None:
    """Who names another key's session, or calls it a parent, neither moves its conversation nor ends it."""

    async def scenario() -> None:
        await edge.start(core={"session_affinity": True}, api_keys=("one", "two"))
        for _ in range(3):
            await edge.worker(edge.reply())

        async def ask(key: bytes, *headers: bytes) -> str:
            sent = [b"authorization: Bearer " + key, *headers]
            answer = await edge.exchange(make_post(body(), b"/v1/completions", headers=sent))
            return answer.partition(b"x-blockcast-worker: ")[2].partition(b"\r\n")[0].decode()

        first = await ask(b"one", b"x-session-id: s")
        others = [await ask(b"two", b"x-session-id: s") for _ in range(2)]
        assert len(set(others)) == 1
        assert set(others) != {first}, "the second key's session begins elsewhere"
        await ask(b"two", b"x-session-id: s", b"x-dynamo-session-final: true")
        child = await ask(b"two", b"x-session-id: child", b"x-parent-session-id: s")
        assert [await ask(b"one", b"x-session-id: s") for _ in range(3)] == [first] * 3
        assert child

    edge.run(scenario())


def test_without_keys_sessions_have_no_tenant(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(core={"session_affinity": True})
        await edge.worker(edge.reply())
        seen: list[Any] = []
        edge.proxy.on_end.append(lambda exchange: seen.append(exchange.route.session))
        await edge.exchange(make_post(body(), b"/v1/completions", headers=[b"x-session-id: s"]))
        assert seen == ["s"]

    edge.run(scenario())
