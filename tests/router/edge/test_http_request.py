"""The request parser against well-formed, malformed and ambiguous bytes, whole and torn into pieces anywhere."""

from __future__ import annotations

import itertools

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.config import HttpLimits
from router.http.request import BadRequest, HttpRequest, RequestParser

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"


def feed(data: bytes, limits: HttpLimits | None = None, cuts: list[int] | None = None) -> list[HttpRequest]:
    parser = RequestParser(limits or HttpLimits())
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    found = []
    for start, end in itertools.pairwise(edges):
        parser.feed(data[start:end])
        while (request := parser.next_request()) is not None:
            found.append(request)
    return found


SMUGGLING = {
    "both framings": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both framings, other order": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "the same length twice": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": HEAD + b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal length": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "an empty length": HEAD + b"Content-Length:\r\n\r\n",
    "an overflowing length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 3\r\n\r\nabc",
    "a folded header": HEAD + b"X: a\r\n b\r\nContent-Length: 3\r\n\r\nabc",
    "a folded length": HEAD + b"Content-Length:\r\n 3\r\n\r\nabc",
    "a header before the first": b"POST /v1 HTTP/1.1\r\n Host: r\r\n\r\n",
    "bare line feeds": b"POST /v1 HTTP/1.1\nHost: r\nContent-Length: 0\n\n",
    "a carriage return in a value": HEAD + b"X: a\rb\r\n\r\n",
    "a NUL in a value": HEAD + b"X: a\0b\r\n\r\n",
    "a NUL in a name": HEAD + b"X\0: ab\r\n\r\n",
    "an odd transfer coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a vertical tab in the coding": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "stacked transfer codings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked, then identity": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /v1 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a hexadecimal prefix on a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "a signed chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "an empty chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n\r\nabc\r\n0\r\n\r\n",
    "an overflowing chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a line feed after a chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    "a chunk longer than it says": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    "two hosts": b"POST /v1 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no host": b"POST /v1 HTTP/1.1\r\nX: a\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target with a fragment for a host": b"GET http://#a/v1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target with a user": b"GET http://me@other/v1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target without a host": b"GET http:///v1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target of another scheme": b"GET ftp://other/v1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target, no host header": b"GET http://other/v1 HTTP/1.1\r\n\r\n",
    "an absolute target, two host headers": b"GET http://other/v1 HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c4030300"),
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_ambiguous_or_malformed_requests_are_refused(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        feed(SMUGGLING[name])
    assert 400 <= caught.value.status <= 505


@pytest.mark.parametrize("name", SMUGGLING)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=15, deadline=None)
def test_refusal_does_not_depend_on_how_the_bytes_are_cut(name: str, cuts: list[int]) -> None:
    with pytest.raises(BadRequest):
        feed(SMUGGLING[name], cuts=cuts)


REQUESTS = st.tuples(
    st.sampled_from([b"/v1/completions", b"/v1/chat/completions?x=%20", b"/health"]),
    st.lists(st.tuples(st.sampled_from([b"X-A", b"x-b", b"Accept"]), st.binary(max_size=6)), max_size=3),
    st.binary(max_size=40),
    st.sampled_from(["length", "chunked", "upgrade"]),
)


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.lists(st.integers(0, 600), max_size=12))
@settings(max_examples=examples(150), deadline=None)
def test_requests_survive_pipelining_and_any_cut(
    wanted: list[tuple[bytes, list[tuple[bytes, bytes]], bytes, str]], cuts: list[int]
) -> None:
    data = b""
    for path, headers, body, framing in wanted:
        data += b"POST " + path + b" HTTP/1.1\r\nHost: r\r\n"
        data += b"".join(name + b": " + value.hex().encode() + b"\r\n" for name, value in headers)
        if framing == "chunked":
            pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
            data += b"Transfer-Encoding: chunked\r\n\r\n"
            data += b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nT: x\r\n\r\n"
        else:
            offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n" if framing == "upgrade" else b""
            data += offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    found = feed(data, cuts=cuts)
    assert [(one.target, one.body) for one in found] == [(path, body) for path, _, body, _ in wanted]
    for request, (_, headers, _, _) in zip(found, wanted):
        for name in (b"x-a", b"x-b", b"accept"):
            sent = [value.hex().encode() for key, value in headers if key.lower() == name]
            assert request.headers.get_all(name) == sent
            assert request.get_header(name) == (sent[0] if sent else None)
        assert request.keep_alive or b"Upgrade" in data


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_noise_never_raises_anything_else(data: bytes, cuts: list[int]) -> None:
    for prefix in (b"", HEAD, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        try:
            feed(prefix + data, cuts=cuts)
        except BadRequest as error:
            assert error.message  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: r\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: r\r\nX: " + b"a" * 3000, 431),
        (b"GET / HTTP/1.1\r\nHost: r\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(50)) + b"\r\n", 431),
        (HEAD + b"Content-Length: 101\r\n\r\n", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101 + b"\r\n0\r\n\r\n", 413),
        (HEAD + b"Expect: 200-maybe\r\nContent-Length: 1\r\n\r\n", 417),
    ],
)
def test_bounds(data: bytes, status: int) -> None:
    limits = HttpLimits(head_bytes_max=2000, headers_max=40, body_bytes_max=100)
    for cuts in ([], list(range(0, len(data), 64))):
        with pytest.raises(BadRequest) as caught:
            feed(data, limits, cuts)
        assert caught.value.status == status


def test_a_head_seen_before_tells_its_own_body() -> None:
    lengths = (0, 3, 0, 3)
    found = feed(b"".join(HEAD + b"Content-Length: %d\r\n\r\n" % length + b"abc"[:length] for length in lengths))
    assert [request.has_body for request in found] == [length > 0 for length in lengths]
    assert feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")[0].has_body


@pytest.mark.parametrize(
    ("url", "host", "target", "path"),
    [
        (b"http://other/v1/models?a=b", b"other", b"/v1/models?a=b", "/v1/models"),
        (b"HTTP://Other:8000/v1", b"Other:8000", b"/v1", "/v1"),
        (b"https://[::1]:80/", b"[::1]:80", b"/", "/"),
        (b"http://other", b"other", b"/", "/"),
        (b"http://other?a=/b", b"other", b"/?a=/b", "/"),
    ],
)
def test_the_host_of_a_url_replaces_the_host_header(url: bytes, host: bytes, target: bytes, path: str) -> None:
    """Clients of a forward proxy send URLs, and every server has to accept them (RFC 9112 section 3.2.2)."""
    head = b"GET " + url + b" HTTP/1.1\r\nX-A: 1\r\nHost: x\r\nX-A: 2\r\nConnection: x-a\r\n"
    for request in feed((head + b"Content-Length: 1\r\n\r\na") * 2, cuts=[3, 12, 30]):
        assert (request.target, request.path, request.body) == (target, path, b"a")
        assert request.headers.get_all(b"host") == [host]
        assert request.headers.get_all(b"x-a") == [b"1", b"2"]


def test_options_of_a_url_without_a_path_are_the_servers() -> None:
    """The last proxy of a chain sends `*` for such a URL (RFC 9112 section 3.2.4), and asks not about `/`."""
    targets = (b"*", b"http://other", b"http://other/", b"http://other?a")
    requests = [feed(b"OPTIONS " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")[0] for target in targets]
    assert [request.target for request in requests] == [b"*", b"*", b"/", b"/?a"]


def test_continue_is_wanted_only_before_the_body() -> None:
    parser = RequestParser(HttpLimits())
    parser.feed(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    assert parser.next_request() is None
    assert parser.is_continue_expected
    parser.feed(b"abc")
    assert parser.next_request() is not None
    assert not parser.is_continue_expected
    whole = RequestParser(HttpLimits())
    whole.feed(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc")
    assert whole.next_request() is not None
    assert not whole.is_continue_expected
