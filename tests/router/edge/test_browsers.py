"""What browsers and WebSocket clients ask before they send a request: OPTIONS, CORS, Upgrade."""

from __future__ import annotations

import json
from typing import Any

import pytest

from options import ConfigError, Schema, load_config
from router.edge.config import EdgeConfig

ORIGIN = b"Origin: http://app.example"
KEY = b"Authorization: Bearer one"
PREFLIGHT = (
    ORIGIN, b"Access-Control-Request-Method: POST", b"Access-Control-Request-Headers: authorization,content-type",
)  # fmt: skip
ALLOWED = b"access-control-allow-origin"


def ask(method: str, path: str, *headers: bytes, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: router", b"Connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def read(answer: bytes) -> tuple[int, dict[bytes, list[bytes]], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *rest = head.split(b"\r\n")
    found: dict[bytes, list[bytes]] = {}
    for name, value in (one.split(b": ", 1) for one in rest):
        found.setdefault(name.lower(), []).append(value)
    return int(line.split(b" ")[1]), found, body


COMPLETION = json.dumps({"model": "tiny", "prompt": [1]}).encode()


def test_a_page_of_an_allowed_origin_may_call(edge: Any) -> None:
    async def scenario() -> None:
        origins = ("http://app.example", "http://other.example:8080")
        await edge.start(api_keys=("one",), cors_origins=origins)
        theirs = (b"content-type: application/json", b"Access-Control-Allow-Origin: *", b"vary: accept")
        await edge.worker(edge.reply(headers=theirs))
        for path, methods in (
            ("/v1/chat/completions", b"POST"), ("/v1/models", b"GET, HEAD"), ("/v1/models/a/b", b"GET, HEAD"),
            ("/v1/responses/resp_1", b"DELETE, GET, HEAD, POST"),
        ):  # fmt: skip
            status, headers, body = read(await edge.exchange(ask("OPTIONS", path, *PREFLIGHT)))
            assert (status, body) == (200, b"")
            assert headers[ALLOWED] == [b"http://app.example"]
            assert headers[b"access-control-allow-methods"] == [methods]
            assert headers[b"access-control-allow-headers"] == [b"authorization,content-type"]
            assert b"access-control-allow-credentials" not in headers
        for more, code in (((KEY,), 200), ((), 401), ((KEY, b"X-Blockcast-Worker: nobody"), 404)):
            answer = await edge.exchange(ask("POST", "/v1/completions", ORIGIN, *more, body=COMPLETION))
            status, headers, _ = read(answer)
            assert (status, headers[ALLOWED]) == (code, [b"http://app.example"])
            assert b"x-blockcast-worker" in headers[b"access-control-expose-headers"][0]
        answer = ask("POST", "/v1/completions", b"Origin: http://evil.example", KEY, body=COMPLETION)
        status, headers, _ = read(await edge.exchange(answer))
        assert (status, headers.get(ALLOWED)) == (200, None)
        assert b"origin" in headers[b"vary"]
        _, headers, _ = read(await edge.exchange(ask("OPTIONS", "/v1/completions", b"Origin: null")))
        assert ALLOWED not in headers
        _, headers, _ = read(await edge.exchange(ask("GET", "/workers", ORIGIN)))
        assert ALLOWED not in headers, "admin routes are for no page but their own"
        status, headers, _ = read(await edge.exchange(ask("OPTIONS", "/v1/no/such/path", *PREFLIGHT)))
        assert (status, headers[ALLOWED]) == (404, [b"http://app.example"])

    edge.run(scenario())


def test_all_origins_may_be_allowed(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start(cors_origins=("*",))
        await edge.worker(edge.reply())
        answer = await edge.exchange(ask("POST", "/v1/completions", b"Origin: null", body=COMPLETION))
        assert read(answer)[1][ALLOWED] == [b"*"]
        for large in (b"Content-Length: 99999999999", b"Transfer-Encoding: chunked\r\n\r\nffffffffff"):
            head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nOrigin: null\r\n"
            status, headers, body = read(await edge.exchange(head + large + b"\r\n\r\n"))
            assert (status, headers[ALLOWED]) == (413, [b"*"])
            assert json.loads(body)["error"]["type"] == "request_too_large", "in the words of the path's API"

    edge.run(scenario())


def test_without_origins_a_question_is_answered_and_nothing_allowed(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start(api_keys=("one",))
        worker = await edge.worker(edge.reply(headers=(b"content-type: a/b", b"Access-Control-Allow-Origin: *")))
        status, headers, body = read(await edge.exchange(ask("OPTIONS", "/v1/completions", *PREFLIGHT)))
        assert (status, headers[b"allow"], body) == (200, [b"OPTIONS, POST"], b"")
        assert not [name for name in headers if name.startswith(b"access-control")]
        assert not worker.received
        _, headers, _ = read(await edge.exchange(ask("POST", "/v1/completions", ORIGIN, KEY, body=COMPLETION)))
        assert headers[ALLOWED] == [b"*"], "what the worker says passes"

    edge.run(scenario())


@pytest.mark.parametrize("origin", ["app.example", "http://app.example/", "http://a b", "", "**"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors"):
        load_config(Schema(EdgeConfig, "router"), table={"cors_origins": [origin]})


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/responses/resp_1"])
def test_a_websocket_client_is_sent_to_http(edge: Any, path: str) -> None:
    """Codex goes on over HTTP at once after a 426, and only then."""
    upgrade = (b"Upgrade: WebSocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")

    async def scenario() -> None:
        await edge.start(api_keys=("one",))
        worker = await edge.worker(edge.reply())
        status, headers, body = read(await edge.exchange(ask("GET", path, KEY, *upgrade)))
        assert status == 426
        assert headers[b"upgrade"] == [b"HTTP/1.1"]
        assert b"upgrade" in headers[b"connection"]
        assert json.loads(body)["error"]["code"] == "upgrade_required"
        assert read(await edge.exchange(ask("GET", path, *upgrade)))[0] == 401
        assert read(await edge.exchange(ask("GET", "/v1/realtime", KEY, *upgrade)))[0] == 404
        assert not worker.received

    edge.run(scenario())
