"""Where an answer's body ends: however it is cut into reads, and whichever way through the reader it takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.chunked import MAX_TRAILER_BYTES, ChunkedBody
from router.http.headers import HeaderBlock, ProtocolError
from router.http.response import LengthBody, parse_response_head

contents = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
sizes_as_sent = st.sampled_from(["%x", "%X", "0%x", "%x;name=value"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(a chunked body as sent, its content)."""
    chunks = draw(contents)
    sent = b"".join(
        (draw(sizes_as_sent) % len(chunk)).encode() + b"\r\n" + chunk + b"\r\n"
        for chunk in chunks
    )  # fmt: skip
    trailers = draw(st.sampled_from([b"", b"x-sum: 1\r\n", b"a: b\r\nc: d\r\n"]))
    return sent + b"0\r\n" + trailers + b"\r\n", b"".join(chunks)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(bodies(), st.lists(st.integers(0, 1 << 16), max_size=6), st.binary(max_size=20))
def test_a_chunked_body_ends_where_it_ends(body: tuple[bytes, bytes], cuts: list[int], surplus: bytes) -> None:
    sent, content = body
    reader = ChunkedBody()
    payload, left, taken = b"", b"", 0
    for piece in pieces(sent + surplus, cuts):
        assert reader.is_complete == (taken == len(sent))
        new_content, behind = reader.feed(piece)
        payload, left, taken = payload + new_content, left + behind, taken + len(piece) - len(behind)
    assert reader.is_complete
    assert taken == len(sent)
    assert left == surplus
    reader.finish()
    assert payload == content


@given(bodies(), st.integers(0, 1 << 16), st.lists(st.integers(0, 1 << 16), max_size=4))
def test_a_body_that_breaks_off_is_noticed(body: tuple[bytes, bytes], cut: int, cuts: list[int]) -> None:
    sent, _ = body
    reader = ChunkedBody()
    for piece in pieces(sent[: cut % len(sent)], cuts):
        assert reader.feed(piece)[1] == b""
    with pytest.raises(ProtocolError):
        reader.finish()


@pytest.mark.parametrize(
    "sent",
    [b"5\r\nhello!\r\n", b"-5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5_0\r\nhello\r\n", b"\r\n", b"5\nhello\n",
     b"5\rhello", b" 5\r\nhello\r\n", b"5 \r\nhello\r\n", b"5\r\nhello\n\n"],
)  # fmt: skip
@pytest.mark.parametrize("first", [b"", b"3\r\nabc\r\n"])
def test_what_is_no_chunk_is_refused(sent: bytes, first: bytes) -> None:
    reader = ChunkedBody()
    with pytest.raises(ProtocolError):
        reader.feed(first + sent + b"0\r\n\r\n" * 400)


def test_trailers_without_end_are_not_read_for_ever() -> None:
    """Each is short and well-formed: it is their sum that is bounded, in an answer as in a request."""
    reader = ChunkedBody()
    assert reader.feed(b"0\r\n") == (b"", b"")
    trailers = b"x: y\r\n" * (MAX_TRAILER_BYTES // 6)
    assert reader.feed(trailers) == (b"", b"")
    with pytest.raises(ProtocolError, match="trailers too long"):
        reader.feed(b"x: y\r\n")


def test_what_a_head_means_after_head_is_not_what_it_means_after_get() -> None:
    """The answer to HEAD has no body, and says nothing about the next answer with the same head."""
    chunked, sized = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n",
    )
    for sent, kind in ((chunked, ChunkedBody), (sized, LengthBody)):
        for method in ("HEAD", "GET", "HEAD", "POST"):
            found = parse_response_head(sent, method)
            assert found is not None
            head, rest = found
            assert (rest, head.keep_alive, head.content_length) == (b"", True, 7 if kind is LengthBody else None)
            assert head.body.is_complete == (method == "HEAD")
            assert head.is_chunked == (kind is ChunkedBody and method != "HEAD")
            assert method == "HEAD" or type(head.body) is kind


lines = st.sampled_from(
    [b"X-A: 1\r\n", b"te: x\r\n", b"Te:\r\n", b"tea: 2\r\n", b"connection: keep-alive\r\n",
     b"Connection: tea, close\r\n", b"connection: host, x-a\r\n", b"HOST: r\r\n", b"x-te: te: 3\r\n"]
)  # fmt: skip


@given(st.lists(lines, max_size=8))
def test_a_block_without_some_names_is_its_other_lines(block: list[bytes]) -> None:
    named = [line.partition(b":") for line in block]
    options = {
        option.strip() for name, _, value in named if name.lower() == b"connection" for option in value.split(b",")
    }
    gone = {b"te", b"connection"} | (options - {b"keep-alive", b"close", b"host"})
    names = [name.lower() for name, _, _ in named]
    # Lines of one name come together: only their order has a meaning (RFC 9110 section 5.3).
    block_in_order = [line for _, line in sorted(zip(map(names.index, names), block), key=lambda item: item[0])]
    expected = b"".join([line for line in block_in_order if line.partition(b":")[0].lower() not in gone])
    assert HeaderBlock(b"".join(block)).join_lines_without(frozenset((b"te", b"connection"))) == expected


def test_a_malformed_line_is_refused_each_time_and_not_kept() -> None:
    for line in (b"a\r\n", b"a : b\r\n", b" a: b\r\n", b"a: \0\r\n", b"a: b\n", b"a: b\rc: d\r\n", b": b\r\n", b"a: b"):
        for _ in range(2):
            with pytest.raises(ProtocolError):
                HeaderBlock(b"Host: r\r\n" + line)


def test_many_lines_of_one_name_are_each_copied_once() -> None:
    """When each line copied all lines before it, so many took longer than a test may."""
    lines = b"a:\r\n" * 2_000_000
    block = HeaderBlock(lines)
    assert block.lines_by_name == {b"a": lines}
    assert block.count(b"a") == 2_000_000
