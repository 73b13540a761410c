"""Bodies that come compressed are decoded within the bounds of any body, and forwarded decoded."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from prompts.errors import RequestError
from router.http import decoding
from router.http.config import HttpLimits
from router.http.decoding import INPUT_SLICE_BYTES, MAX_MEMBERS, OUTPUT_SLICE_BYTES, BodyDecoder

PLAIN = json.dumps({"model": "tiny", "prompt": "word " * 400}).encode()


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


CODINGS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"gzip", gzip.compress), "x-gzip": (b"X-GZip", gzip.compress), "deflate": (b"deflate", zlib.compress),
    "deflate without its frame": (b"deflate", raw_deflate), "identity": (b"identity", bytes),
    "two members": (b"gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
}  # fmt: skip
if decoding.zstd is not None:
    CODINGS["zstd"] = b"zstd", decoding.zstd.compress
    CODINGS["two frames"] = b"zstd", lambda data: decoding.zstd.compress(data[:9]) + decoding.zstd.compress(data[9:])


def decoded(data: bytes, coding: str, bytes_max: int = 1 << 20) -> bytes:
    decoder = BodyDecoder([data[:5], data[5:]], coding, bytes_max)
    for _ in range(1000):
        before = decoder.decoded_bytes
        done = decoder.decode_slice()
        assert decoder.decoded_bytes - before <= OUTPUT_SLICE_BYTES
        if done:
            return b"".join(decoder.pieces)
    raise AssertionError("never done")


@pytest.mark.parametrize("what", CODINGS)
@pytest.mark.parametrize("size", [0, 1, INPUT_SLICE_BYTES, 700_000])
def test_a_body_is_decoded_in_slices(what: str, size: int) -> None:
    coding, encode = CODINGS[what]
    if coding == b"identity":
        return
    for data in (bytes(size), random.Random(size).randbytes(size)):
        assert decoded(encode(data), coding.decode().lower().removeprefix("x-")) == data
        if size > 1:
            with pytest.raises(RequestError, match=f"over {size - 1} bytes") as refused:
                decoded(encode(data), coding.decode().lower().removeprefix("x-"), size - 1)
            assert refused.value.status == 413


@pytest.mark.parametrize("coding", sorted(decoding._DECODER_BY_CODING))
def test_what_is_no_such_body_is_refused(coding: str) -> None:
    whole = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": CODINGS.get("zstd", (b"", bytes))[1]}[coding](
        PLAIN
    )
    for data in (whole[:-3], whole[:20], whole + b"junk", PLAIN, b"\0" * 100, whole[:40] + b"\xff" * 40 + whole[80:]):
        with pytest.raises(RequestError, match=f"no {coding}") as refused:
            decoded(data, coding)
        assert refused.value.status == 400
    if coding != "deflate":
        empty = {"gzip": gzip.compress, "zstd": CODINGS.get("zstd", (b"", bytes))[1]}[coding](b"")
        with pytest.raises(RequestError, match="something follows"):
            decoded(empty * (MAX_MEMBERS + 1), coding)


@pytest.mark.skipif(decoding.zstd is None, reason="needs zstd")
def test_a_window_of_zstd_is_bounded() -> None:
    zstd = decoding.zstd
    stream = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    data = stream.compress(PLAIN) + stream.flush()
    with pytest.raises(RequestError, match="memory"):
        decoded(data, "zstd")


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def test_a_body_is_forwarded_decoded_and_routed_as_it_reads(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", pass_routes=("/v1/own",))
        worker = await edge.worker(edge.reply())
        long = json.dumps({"model": "tiny", "prompt": [1], "text": "x" * 3_000_000}).encode()
        for coding, encode in CODINGS.values():
            for path in (b"/v1/completions", b"/v1/embeddings", b"/v1/own"):
                for body in (PLAIN, long):
                    headers = [b"Content-Encoding: " + coding, b"Accept-Encoding: gzip"]
                    assert status(await edge.exchange(make_post(encode(body), path, headers))) == 200
                    got = worker.received.pop()
                    assert got.body == body
                    assert not got.all(b"content-encoding")
                    assert not got.all(b"accept-encoding")
        other = json.dumps({"model": "nobody", "prompt": "a"}).encode()
        answer = await edge.exchange(make_post(gzip.compress(other), b"/v1/completions", [b"Content-Encoding: gzip"]))
        assert status(answer) == 404
        answer = await edge.exchange(make_post(gzip.compress(PLAIN), b"/route", [b"Content-Encoding: gzip"]))
        assert b'"candidates"' in answer

    edge.run(scenario())


def test_what_cannot_be_decoded_is_refused_in_the_words_of_its_api(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start(policy="kv", limits=HttpLimits(body_bytes_max=1 << 20))
        worker = await edge.worker(edge.reply())
        for coding in (b"br", b"gzip, gzip", b"\xff"):
            for path, kind in (
                (b"/v1/chat/completions", b'"code":"unsupported_content_encoding"'),
                (b"/v1/messages", b'{"type":"error","error":{"type":"invalid_request_error"'),
            ):
                answer = await edge.exchange(make_post(PLAIN, path, [b"Content-Encoding: " + coding]))
                assert status(answer) == 415
                assert kind in answer
                assert b"\r\naccept-encoding: gzip, deflate" in answer
        bomb = make_post(gzip.compress(bytes(2 << 20)), b"/v1/messages", [b"Content-Encoding: gzip"])
        answer = await edge.exchange(bomb)
        assert status(answer) == 413
        assert b"request_too_large" in answer
        answer = await edge.exchange(make_post(b"{}", b"/v1/completions", [b"Content-Encoding: gzip"]))
        assert status(answer) == 400
        assert not worker.received

    edge.run(scenario())


def test_decoded_bytes_are_booked(edge: Any, make_post: Any) -> None:
    """A key's bodies may be as long together, decoded, as if they had come so; and one connection goes on behind."""

    async def scenario() -> None:
        await edge.start(policy="kv", limits=HttpLimits(tenant_buffer_bytes_max=1 << 20))
        await edge.worker(edge.reply())
        headers = [b"Content-Encoding: gzip"]
        small = make_post(gzip.compress(PLAIN), b"/v1/completions", headers, close=False)
        large = make_post(gzip.compress(PLAIN[:-1] + b" " * (2 << 20) + b"}"), b"/v1/completions", headers, close=False)
        reader, writer = await edge.connect()
        writer.write(small + large + small)
        found = []
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            found.append((status(head), await reader.readexactly(length)))
        assert [code for code, _ in found] == [200, 429, 200]
        assert b"too many bytes of requests" in found[1][1]
        writer.write(large)
        writer.close()
        assert edge.metrics.request_buffer_bytes == 0

    edge.run(scenario())
