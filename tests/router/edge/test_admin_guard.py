"""Who may use the admin routes, and what is passed on to workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.app.api_keys import AdminGuard
from router.http.routes import Routes

KEY = b"Authorization: Bearer secret"
JSON = b"Content-Type: application/json"
NEW = b'{"url": "http://10.0.0.1:1"}'


def build_request(
    method: bytes, path: bytes, *headers: bytes, body: bytes = b"", host: bytes = b"127.0.0.1:8080"
) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Connection: close", b"Host: " + host, *headers]
    lines += [b"Content-Length: %d" % len(body)] if body else []
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def routes_of(routes: Routes) -> list[tuple[str, str, bool]]:
    return [(method, path, public) for (method, path), (_, public) in routes._route_by_method_and_path.items()]


PUBLIC = {"/", "/health", "/v1/models", "/v1/models/**", "/metrics", "/version", "/livez", "/readyz"}


def test_every_route_but_a_few_needs_the_key(edge: Any) -> None:
    """Walks what there is: a new route is closed until it is put on the list here."""

    async def scenario() -> None:
        await edge.start(guard=AdminGuard("secret", ()).check_from_loopback)
        found = routes_of(edge.routes)
        assert len(found) >= 10
        for method, path, _ in found:
            answer = await edge.exchange(build_request(method.encode(), path.replace("*", "x").encode()))
            assert (status(answer) == 401) is (path not in PUBLIC), (method, path, answer[:80])

    edge.run(scenario())


@pytest.mark.parametrize(
    ("headers", "host", "expected"),
    [
        ([KEY, JSON], b"127.0.0.1:8080", 400),
        ([KEY, JSON], b"[::1]:8080", 400),
        ([KEY, JSON], b"localhost", 400),
        ([KEY, JSON], b"LOCALHOST:8080", 400),
        ([KEY, JSON], b"router.example:8080", 400),
        ([KEY, JSON], b"rebound.example", 403),
        ([KEY, JSON], b"127.0.0.1.rebound.example", 403),
        ([KEY, JSON], b"[::1", 403),
        ([KEY, JSON], b"", 403),
        ([KEY, JSON, b"Origin: http://127.0.0.1:8080"], b"127.0.0.1:8080", 400),
        ([KEY, JSON, b"Origin: http://evil.example"], b"127.0.0.1:8080", 403),
        ([KEY, JSON, b"Origin: http://127.0.0.1:9999"], b"127.0.0.1:8080", 403),
        ([KEY, JSON, b"Origin: null"], b"127.0.0.1:8080", 403),
        ([KEY, b"Content-Type: text/plain"], b"127.0.0.1:8080", 415),
        ([KEY, b"Content-Type: application/x-www-form-urlencoded"], b"127.0.0.1:8080", 415),
        ([KEY], b"127.0.0.1:8080", 415),
        ([KEY, b"Content-Type: application/json; charset=utf-8"], b"127.0.0.1:8080", 400),
        ([JSON], b"127.0.0.1:8080", 401),
        ([JSON, b"Authorization: Bearer Secret"], b"127.0.0.1:8080", 401),
        ([JSON, b"Authorization: Basic secret"], b"127.0.0.1:8080", 401),
        ([JSON, b"Authorization: Bearer "], b"127.0.0.1:8080", 401),
        ([JSON, KEY, b"X-Forwarded-For: 1.2.3.4"], b"127.0.0.1:8080", 403),
        ([JSON, KEY, b"Via: 1.1 proxy"], b"127.0.0.1:8080", 403),
    ],
)
def test_what_a_web_page_or_a_proxy_sends_is_refused(
    edge: Any, headers: list[bytes], host: bytes, expected: int
) -> None:
    """400 is the handler's own answer: it was let in."""

    async def scenario() -> None:
        await edge.start(guard=AdminGuard("secret", ["router.example"]).check_from_loopback)
        assert (
            status(await edge.exchange(build_request(b"POST", b"/workers", *headers, body=NEW, host=host))) == expected
        )

    edge.run(scenario())


def test_each_address_has_its_rule(edge: Any) -> None:
    guard = AdminGuard("secret", ())
    rules = [(guard.check, 200), (guard.check_from_loopback, 200), (guard.refuse, 403)]

    async def one(rule: Any, expected: int) -> None:
        await edge.start(guard=rule)
        assert status(await edge.exchange(build_request(b"GET", b"/workers", KEY))) == expected
        assert status(await edge.exchange(build_request(b"GET", b"/health"))) in (200, 503)

    for rule, expected in rules:
        edge.run(one(rule, expected))


@pytest.mark.parametrize(
    ("path", "passed"),
    [
        ("/v1/chat/completions", True), ("/v1/completions", True), ("/v1/embeddings", True), ("/v1/responses", True),
        ("/v1/audio/transcriptions", True), ("/v1/responses/r1/cancel", True), ("/v1/extra", True),
        ("/v1/more/a/b", True),
        ("/v1/load_lora_adapter", False), ("/v1/unload_lora_adapter", False), ("/v1/files", False), ("/v1/", False),
        ("/v1/more", False), ("/v1/extra/", False), ("/v1/Completions", False), ("/v1/completions/", False),
        ("/v1/../workers", False), ("/v1/more/../../workers", False), ("/v1/more/%2e%2e/x", False),
        ("/v1/models/../load_lora_adapter", False), ("/v1//completions", False), ("/v1/completions;x", False),
    ],
)  # fmt: skip
def test_only_named_routes_are_passed_on(edge: Any, make_post: Any, path: str, passed: bool) -> None:
    async def scenario() -> None:
        await edge.start(pass_routes=("/v1/extra", "/v1/more/*"))
        worker = await edge.worker(edge.reply())
        body = json.dumps({"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}).encode()
        assert status(await edge.exchange(make_post(body, path.encode()))) == (200 if passed else 404)
        assert len(worker.received) == passed

    edge.run(scenario())


@pytest.mark.parametrize("path", [b"/workers", b"/workers/x/drain"])
def test_a_long_body_of_a_change_is_refused_before_it_is_decoded(edge: Any, path: bytes) -> None:
    """10 MB of empty lists held everybody up for 0.7 s."""

    async def scenario() -> None:
        await edge.start()
        body = b'{"url":"http://w:1","odd":[' + b"[]," * 25_000 + b"[]]}"
        assert status(await edge.exchange(build_request(b"POST", path, JSON, body=body))) == 413

    edge.run(scenario())


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"), ("/v1/messages", "POST"), ("/v1/models", "GET, HEAD"),
        ("/v1/models/tiny", "GET, HEAD"), ("/v1/responses/r1", "DELETE, GET, HEAD, POST"),
        ("/v1/extra", "DELETE, GET, HEAD, PATCH, POST, PUT"),
    ],
)  # fmt: skip
def test_a_route_has_its_methods_and_no_others(edge: Any, path: str, allowed: str) -> None:
    async def scenario() -> None:
        await edge.start(pass_routes=("/v1/extra",))
        await edge.worker(edge.reply(b"[]"))
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT", "TRACE"):
            answer = await edge.exchange(build_request(method.encode(), path.encode(), JSON, body=b"{}"))
            assert (status(answer) == 405) == (method not in allowed.split(", ")), method
            if status(answer) == 405:
                assert b"\r\nallow: " + allowed.encode() + b"\r\n" in answer

    edge.run(scenario())


def test_ready_once_the_caches_are_known_or_time_has_passed(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        health, now, synced = edge.health, [0.0], set()
        health._now = lambda: now[0]
        edge.feed.synced = synced
        health._ready_until_s = 10.0

        async def ready() -> int:
            assert status(await edge.exchange(build_request(b"GET", b"/livez"))) == 200
            return status(await edge.exchange(build_request(b"GET", b"/readyz")))

        assert health.find_unready_reason() == "no worker is up"
        await edge.worker(edge.reply(), "a")
        await edge.worker(edge.reply(), "b")
        assert await ready() == 503
        synced.add("a")
        assert health.find_unready_reason() == "not known yet: b"
        synced.add("b")
        edge.fleet.waiting["c"] = "refused"
        assert health.find_unready_reason() == "not known yet: c"
        now[0] = 10.0
        assert await ready() == 200
        synced.clear()
        now[0] = 10.5
        assert await ready() == 200, "what it once knew counts: a gap later is no reason to send requests elsewhere"
        health.is_draining = True
        assert await ready() == 503

    edge.run(scenario())


@pytest.mark.parametrize(
    "body", [b'{"url":false}', b'{"url":"http://w:1","max_num_seqs":[]}', b'{"url":"http://w:1","odd":1}']
)
def test_a_worker_of_wrong_types_is_refused(edge: Any, body: bytes) -> None:
    """A method that is none of ours is 405."""

    async def scenario() -> None:
        await edge.start()
        head = b" /workers HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        answer = await edge.exchange(b"POST" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer.split(b" ")[1] == b"400"
        assert (await edge.exchange(b"QUERY" + head + b"\r\n")).split(b" ")[1] == b"405"

    edge.run(scenario())
