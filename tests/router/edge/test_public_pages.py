"""Pages that anybody may ask for cost no more the oftener they are asked for, and errors repeat no heads."""

from __future__ import annotations

from typing import Any

import pytest

from prompts.errors import RequestError
from router.app.api_keys import AdminGuard
from router.http.headers import HeaderBlock
from router.http.request import HttpRequest
from router.http.routes import MAX_PAGE_CACHE_S, RENDER_SHARE, CachedPage, Response

GET = HttpRequest("GET", b"/metrics", "/metrics", HeaderBlock(b""))


@pytest.mark.parametrize("cost_s", [0.001, 0.01, 3.0])
def test_a_page_is_made_again_when_its_share_of_the_loop_allows(cost_s: float) -> None:
    clock, made = [100.0], [0]

    def make() -> Response:
        clock[0] += cost_s
        made[0] += 1
        return Response(b"%d" % made[0])

    page = CachedPage(make, lambda: clock[0])
    assert page(GET, "").body == b"1"
    kept_s = min(cost_s / RENDER_SHARE, MAX_PAGE_CACHE_S)
    clock[0] += kept_s * 0.9
    assert page(GET, "").body == b"1"
    clock[0] += kept_s * 0.2
    assert page(GET, "").body == b"2"
    for _ in range(1000):
        page(GET, "")
    assert made == [2]


def test_a_page_that_fails_is_made_again() -> None:
    def make() -> Response:
        raise RequestError("no", param=None)

    page = CachedPage(make)
    for _ in range(2):
        with pytest.raises(RequestError):
            page(GET, "")


SECRET = b"Bearer-sk-secret"


@pytest.mark.parametrize(
    "head",
    [
        SECRET + b" / HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: " + SECRET + b"\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: r\r\nContent-Length: " + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: " + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: r\r\nExpect: " + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + SECRET + b"\r\nHost: b\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: r\r\nX: " + SECRET + b"\r\n\r\n",
    ],
)
def test_an_error_repeats_nothing_of_a_head(edge: Any, head: bytes) -> None:
    async def scenario() -> None:
        await edge.start()
        answer = await edge.exchange(head)
        assert answer[9:10] in b"45"
        assert SECRET not in answer

    edge.run(scenario())


def test_a_worker_s_head_is_not_repeated_either(edge: Any, make_post: Any) -> None:
    async def nonsense(request: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie " + SECRET + b"\r\n\r\n")

    async def scenario() -> None:
        await edge.start()
        await edge.worker(nonsense)
        answer = await edge.exchange(make_post(b'{"model":"tiny","prompt":"x"}', b"/v1/completions"))
        assert answer.startswith(b"HTTP/1.1 502")
        assert SECRET not in answer

    edge.run(scenario())


def test_a_foreign_host_is_refused_without_its_name() -> None:
    request = HttpRequest(
        "GET", b"/workers", "/workers", HeaderBlock(b"Host: %b\r\nAuthorization: Bearer k\r\n" % SECRET)
    )
    with pytest.raises(RequestError, match="--admin-host") as refused:
        AdminGuard("k", ()).check(None, request)  # type: ignore[arg-type]
    assert SECRET.decode() not in refused.value.message
