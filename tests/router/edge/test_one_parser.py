"""One reader of requests: what a stream of bytes means depends neither on how it was cut into reads, nor, where it is
accepted, on who reads it (llhttp, by httptools, is the other reader)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.config import HttpLimits
from router.http.request import BadRequest, HttpRequest, RequestParser

_spec = importlib.util.spec_from_file_location("raw_requests", Path(__file__).with_name("raw_requests.py"))
assert _spec is not None
assert _spec.loader is not None
raw = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(raw)

VARIANTS = list(dict.fromkeys(raw.variants()))
LIMITS = HttpLimits(head_bytes_max=2048, headers_max=12, body_bytes_max=4096)
Read = tuple[str, bytes, tuple[tuple[bytes, bytes], ...], bytes]


def view(request: HttpRequest) -> Read:
    lines = [line.split(b":", 1) for line in request.headers.raw.split(b"\r\n")[:-1]]
    headers = tuple((name.lower(), value.strip(b" \t")) for name, value in lines)
    length = (b"content-length", b"%d" % len(request.body))
    return request.method, request.target, tuple(h if h[0] != length[0] else length for h in headers), request.body


def read(pieces: list[bytes]) -> tuple[list[Read], bool, bool]:
    """(requests, whether the stream was refused, whether more of a request is awaited)."""
    parser = RequestParser(LIMITS)
    found = []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (request := parser.next_request()) is not None or parser.has_more:
                if request is not None:
                    found.append(view(request))
                    assert parser.partial_request is None
    except BadRequest:
        parser.feed(b"GET / HTTP/1.1\r\nHost: r\r\n\r\n")
        assert parser.next_request() is None  # the connection is over
        return found, True, False
    assert parser.buffered_bytes <= LIMITS.head_bytes_max + LIMITS.body_bytes_max
    return found, False, parser.has_partial_request


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


class Other:
    """llhttp's reading of a stream, until it refuses or an upgrade ends it."""

    def __init__(self, data: bytes) -> None:
        self.found: list[Read] = []
        self._parser = httptools.HttpRequestParser(self)
        self.on_message_begin()
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target, self._body = b"", b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._at_body = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._at_body:  # not trailers
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._at_body = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        length = (b"content-length", b"%d" % len(self._body))
        headers = tuple(h if h[0] != length[0] else length for h in self._headers)
        target = self._target
        if b"://" in target and not target.startswith(b"/"):  # RFC 9112 section 3.2.2: its host replaces the header's
            host = urlsplit(target).netloc
            headers = tuple((name, host if name == b"host" else value) for name, value in headers)
            target = target.partition(host)[2] or b"/"
        self.found.append((self._parser.get_method().decode(), target, headers, self._body))


def agree(data: bytes) -> list[Read]:
    """Everything that is read here is read there, as the same."""
    found, _, _ = read([data])
    other = Other(data).found
    upgrades = any(name == b"upgrade" for one in found for name, _ in one[2])
    assert upgrades or found == other[: len(found)]
    return found


def test_there_are_hundreds_of_variants_of_every_fate() -> None:
    fates = [read([data]) for data in VARIANTS]
    assert len(VARIANTS) > 400
    assert sum(refused for _, refused, _ in fates) > 200
    assert sum(len(found) == 2 for found, _, _ in fates) > 40


@pytest.mark.parametrize("number", range(0, len(VARIANTS), 20))
def test_no_variant_means_another_thing_when_it_is_cut(number: int) -> None:
    for data in VARIANTS[number : number + 20]:
        whole = read([data])
        assert read([data[i : i + 1] for i in range(len(data))]) == whole, data
        for at in range(1, len(data)):
            assert read([data[:at], data[at:]]) == whole, (data, at)
        agree(data)


def test_a_smuggled_request_comes_out_only_where_a_body_ended_for_everybody() -> None:
    for data in VARIANTS:
        for one in read([data])[0]:
            if one[1] == b"/workers":
                assert one in Other(data).found or b"Upgrade" in data, data


@pytest.mark.parametrize("digits", range(1, 25))
def test_a_length_has_one_meaning_whatever_its_digits(digits: int) -> None:
    """The smuggling: two bounds on the digits of one number made a head alone a whole request."""
    for first in (b"", raw.HEAD + b"Content-Length: 3\r\n\r\nabc"):
        found, refused, midway = read([first + raw.HEAD + b"Content-Length: 1" + b"0" * (digits - 1) + b"\r\n\r\n"])
        assert len(found) == bool(first)
        assert refused or midway


def test_a_head_that_begins_in_the_read_of_another_body_is_read_from_its_beginning() -> None:
    first = raw.HEAD + b"Content-Length: 3\r\n\r\n"
    inner = b"GET /inner HTTP/1.1\r\nHost: r\r\n\r\n"
    second = raw.HEAD + b"X: " + inner.replace(b"\r\n", b"  ") + b"\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner
    for at in range(len(second)):
        found, refused, midway = read([first, b"abc" + second[:at], second[at:]])
        assert [one[3] for one in found] == [b"abc", inner]
        assert not refused
        assert not midway


fragments = st.one_of(
    st.sampled_from(VARIANTS),
    st.sampled_from([raw.HEAD, raw.SMUGGLED, b"\r\n\r\n", b"\r\n", b"\n", b"\r", b" ", b"0\r\n\r\n"]),
    st.just(b"Content-Length: 5\r\n\r\nab"),
    st.sampled_from(raw.CHUNKS),
    st.binary(max_size=8),
)  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    data = bytearray(b"".join(draw(st.lists(fragments, max_size=5))))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from(b"\r\n \t:0139;,\x00\x7f\xffaA"))
    return bytes(data)


@given(streams(), st.data())
@settings(max_examples=examples(600), deadline=None)
def test_any_cut_of_any_stream_is_read_as_the_whole(data: bytes, more: Any) -> None:
    cuts = more.draw(st.lists(st.integers(0, len(data)), max_size=8))
    assert read(cut(data, cuts)) == read([data])
    agree(data)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS"]),
        st.text("abcXYZ0189-._~%/?=&+", max_size=30).map(lambda text: b"/" + text.encode()),
        st.lists(
            st.tuples(
                st.text("abcXYZ-_0!#$%&'*+.^`|~", min_size=1, max_size=12).map(lambda text: b"x" + text.encode()),
                st.text("abc \t:;,=\"'éÿ", max_size=20).map(lambda text: text.encode("latin-1")),
            ),
            max_size=6,
        ),
        st.binary(max_size=60),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(REQUESTS)
@settings(max_examples=examples(300), deadline=None)
def test_what_is_well_formed_is_taken_here_as_there(
    wanted: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes, bool]],
) -> None:
    data = b""
    for method, target, headers, body, chunked in wanted:
        data += method + b" " + target + b" HTTP/1.1\r\nHost: r\r\n"
        data += b"".join(name + b":" + value + b"\r\n" for name, value in headers)
        if chunked:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
            data += b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        else:
            data += b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert [one[3] for one in agree(data)] == [body for _, _, _, body, _ in wanted]
