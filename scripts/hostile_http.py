"""Raw HTTP: what may be sent, whole and cut everywhere. See scripts/hostile.

What is held against the router is not one status a line but three rules: what is no HTTP is refused or closed, never
answered as something else (a request hidden in it would be); how a stream of bytes is cut into reads changes nothing;
and every connection ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

BODY = b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":1}'
HIDDEN = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
"""What follows a request whose end is doubtful: answered 200, it has been taken for a request."""


@dataclass(frozen=True)
class Variant:
    name: str
    data: bytes
    answers: int | None = 0
    """How many answers below 400 it must get; None: as many as the whole, whatever that is."""


def request_head(*lines: bytes, start: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"Host: h", *lines, b"", b""])


def valid_request(*lines: bytes, start: bytes = b"POST /v1/chat/completions HTTP/1.1", is_last: bool = True) -> bytes:
    """A sound request with its body."""
    close = [b"Connection: close"] if is_last else []
    return request_head(*lines, *close, b"Content-Length: %d" % len(BODY), start=start) + BODY


def chunked_request(*chunks: bytes, end: bytes = b"0\r\n\r\n", encoding: bytes = b"chunked") -> bytes:
    lines = request_head(b"Transfer-Encoding: " + encoding, b"Connection: close")
    return lines + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + end


def valid_requests() -> Iterator[Variant]:
    yield Variant("a request", valid_request(), 1)
    yield Variant("two in one", valid_request(is_last=False) + valid_request(), 2)
    yield Variant("ten small ones in one", HIDDEN * 9 + HIDDEN.replace(b"Host: h", b"Connection: close\r\nHost: h"), 10)
    yield Variant("an empty line first", b"\r\n" + valid_request(), 1)
    yield Variant("a body in chunks", chunked_request(BODY), 1)
    yield Variant("a body in chunks of a byte", chunked_request(*(BODY[i : i + 1] for i in range(len(BODY)))), 1)
    yield Variant("chunks with an extension", chunked_request(end=b"4e;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), 1)
    yield Variant("a trailer", chunked_request(BODY, end=b"0\r\nX-After: yes\r\n\r\n"), 1)
    yield Variant("a trailer that is a length", chunked_request(BODY, end=b"0\r\nContent-Length: 9\r\n\r\n"), None)
    yield Variant("a sound one, then noise", valid_request(is_last=False) + b"\x00\x01\x02\r\n\r\n", 1)
    yield Variant("a whole URL as target", valid_request(start=b"GET http://h/health HTTP/1.1"), 1)
    yield Variant("HTTP/1.0", valid_request(start=b"POST /v1/chat/completions HTTP/1.0"), 1)
    yield Variant(
        "a head answered without a body", request_head(b"Connection: close", start=b"HEAD /health HTTP/1.1"), 1
    )


def request_lines() -> Iterator[Variant]:
    for method in (b"", b" ", b"GE T", b"G\x00T", b"G(T", b"M" * 70_000, b"POST\t", b"\xc3\xa9"):
        yield Variant(f"method {method[:8]!r}", valid_request(start=method + b" /health HTTP/1.1"))
    for method in (b"CONNECT", b"TRACE", b"OPTIONS", b"PRI", b"post", b"FOO", b"DELETE", b"PUT"):
        yield Variant(f"method {method!r}", valid_request(start=method + b" /v1/models HTTP/1.1"), None)
    for target in (b"", b"health", b"h:80", b"/a b", b"/\x00", b"/\xff", b"/" + b"%ff" * 30_000):
        yield Variant(f"target {target[:12]!r}", valid_request(start=b"GET " + target + b" HTTP/1.1"))
    for target in (b"*", b"//health", b"/../workers", b"/v1/../workers", b"/v1/%2e%2e/workers", b"/health#x", b"/%00",
                   b"/v1//chat/completions", b"/v1/chat%2fcompletions", b"/?", b"/v1;/x"):  # fmt: skip
        yield Variant(f"target {target!r}", valid_request(start=b"GET " + target + b" HTTP/1.1"), None)
    for version in (b"", b"HTTP/", b"HTTP/1", b"HTTP/1.1 ", b"http/1.1", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9",
                    b"HTTP/1.10", b"HTTP/11.1", b"HTTP/-1.1", b"ICY/1.1", b"HTTP/1.1\x00"):  # fmt: skip
        yield Variant(f"version {version!r}", valid_request(start=b"GET /health " + version), 0)
    yield Variant("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9)
    yield Variant("a TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)))
    for size in (1000, 100_000):
        yield Variant(f"{size} zeros", b"\x00" * size + b"\r\n\r\n")
        yield Variant(f"a line of {size} letters without end", b"A" * size)
        yield Variant(f"{size} empty lines", b"\r\n" * size + HIDDEN)


def content_lengths() -> Iterator[Variant]:
    n = len(BODY)
    for text in (b"-1", b"+%d" % n, b"0x%x" % n, b"%d,%d" % (n, n + 1), b"ten", b"1e3", b"", b"%d.0" % n, b"\xd9\xa3",
                 b"%d %d" % (n, n), b"%d;" % n, b"1_0", b"9" * 15, b"1" + b"0" * 15, b"9" * 16, b"9" * 19,
                 b"18446744073709551616", b"18446744073709551%d" % (616 + n), b"9" * 400, b"4294967296"):  # fmt: skip
        lines = request_head(b"Content-Length: " + text)
        yield Variant(f"length {text[:20]!r}", lines + BODY + HIDDEN)
        yield Variant(
            f"a sound one, then length {text[:20]!r}", valid_request(is_last=False) + lines + BODY + HIDDEN, 1
        )
    for text in (b"0%d" % n, b"  %d  " % n, b"\t%d" % n, b"%d, %d" % (n, n)):
        yield Variant(f"length {text!r}", request_head(b"Connection: close", b"Content-Length: " + text) + BODY, None)
    names = (b"Content-Length: %d", b"content-length:%d", b"CONTENT-LENGTH: %d", b"Content-Length:\t%d")
    for first, second in itertools.product(names[:2], names):
        lines = request_head(first % n, second % (n + 5))
        yield Variant(f"two lengths, {first!r} {second!r}", lines + BODY + HIDDEN)
    yield Variant("a length twice", request_head(names[0] % n, names[0] % n, b"Connection: close") + BODY, None)
    for hider in (b"Content-Length : %d", b" Content-Length: %d", b"Content-Length\x00: %d", b"Content-Length: %d\x0b",
                  b"X: y\nContent-Length: %d", b"X: y\rContent-Length: %d", b"\x00Content-Length: %d"):  # fmt: skip
        yield Variant(f"a hidden length {hider!r}", request_head(hider % n) + BODY + HIDDEN)
    yield Variant(
        "an underscore", request_head(b"Content_Length: %d" % n, b"Content-Length: 0", b"Connection: close"), None
    )
    yield Variant("a body of a GET", valid_request(start=b"GET /health HTTP/1.1"), None)


def transfer_encodings() -> Iterator[Variant]:
    for encoding in (b"gzip", b"chunked, chunked", b"chunked, gzip", b"xchunked", b"chunked\x0b",
                     b"chunked;q=1", b"", b"identity", b"chunked,", b"\x00chunked", b"chun ked"):  # fmt: skip
        yield Variant(f"encoding {encoding!r}", chunked_request(BODY, encoding=encoding) + HIDDEN)
    for encoding in (b"Chunked", b"CHUNKED", b" chunked ", b"\tchunked"):
        yield Variant(f"encoding {encoding!r}", chunked_request(BODY, encoding=encoding), None)
    framing_headers = (b"Transfer-Encoding: chunked", b"Content-Length: 5")
    for lines in (framing_headers, framing_headers[::-1]):
        yield Variant(f"both framings, {lines[0]!r} first", request_head(*lines) + b"0\r\n\r\n" + HIDDEN)
    for second_encoding in (b"Transfer-Encoding: identity", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"):
        for lines in ((framing_headers[0], second_encoding), (second_encoding, framing_headers[0])):
            yield Variant(f"two encodings, {lines}", request_head(*lines) + b"0\r\n\r\n" + HIDDEN)
    start_line = b"POST /v1/chat/completions HTTP/1.0"
    yield Variant("chunks in HTTP/1.0", request_head(framing_headers[0], start=start_line) + b"0\r\n\r\n" + HIDDEN)
    for size in (b"0x4e", b"-4e", b"+4e", b" 4e", b"4e ", b"4e\t", b"", b"g", b"zz", b"4e,", b"00000000000000004e0",
                 b"f" * 16, b"1" + b"0" * 16, b"f" * 400, b"8" + b"0" * 15, b"4_e", b"\xef\xbc\x94"):  # fmt: skip
        lines = request_head(b"Transfer-Encoding: chunked")
        answers = None if size in (b"4e ", b"4e\t", b"00000000000000004e0") else 0
        yield Variant(f"chunk size {size[:20]!r}", lines + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN, answers)
    lines, n = request_head(b"Transfer-Encoding: chunked"), b"%x" % len(BODY)
    ends = {
        "a chunk longer than it says": n + b"\r\n" + BODY + b"X\r\n0\r\n\r\n",
        "a chunk shorter than it says": b"ff\r\n" + BODY + b"\r\n0\r\n\r\n",
        "a chunk without its end": n + b"\r\n" + BODY + b"0\r\n\r\n",
        "bare line feeds": n + b"\n" + BODY + b"\n0\n\n",
        "a long extension": n + b";" + b"x" * 200_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
        "a long trailer": b"0\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        "many trailers": b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        "a trailer without a colon": b"0\r\nnonsense\r\n\r\n",
        "a trailer with a zero": b"0\r\nX: \x00\r\n\r\n",
    }
    for name, end in ends.items():
        yield Variant(name, lines + end + HIDDEN)


def headers() -> Iterator[Variant]:
    for line in (b"nonsense", b": x", b"X : y", b" X: y", b"X\x00: y", b"X: a\x00b", b"X: a\rb", b"X: a\nb", b"X(: y",
                 b"X: " + b"x" * 70_000, b"\xff: y", b"X: y\r\n folded", b"X: y\r\n\tfolded", b"=: y\x7f"):  # fmt: skip
        yield Variant(f"header {line[:20]!r}", request_head(line, b"Content-Length: %d" % len(BODY)) + BODY + HIDDEN)
    for count in (129, 20_000):
        yield Variant(f"{count} headers", request_head(*[b"X: y"] * count) + HIDDEN)
    for line in (b"X: \xff", b"X:", b"X:y", b"Expect: 100-continue", b"Expect: the unexpected", b"Upgrade: h2c",
                 b"Connection: upgrade\r\nUpgrade: websocket", b"Connection: keep-alive, close", b"Connection: \x01",
                 b"Host: other", b"x-blockcast-worker: \xff", b"x-session-id: " + b"s" * 9000, b"traceparent: 0",
                 b"x-blockcast-deadline-ms: " + b"9" * 400, b"x-blockcast-priority: 1e999"):  # fmt: skip
        yield Variant(f"header {line[:30]!r}", valid_request(line), None)
    yield Variant("no host", b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", None)
    for ending in (b"\n", b"\r", b"\r\r\n", b"\n\r", b"\x0b", b"\x85"):
        yield Variant(f"lines that end in {ending!r}", valid_request().replace(b"\r\n", ending) + HIDDEN)


def admin_requests() -> Iterator[Variant]:
    """From this very machine, as a web page or a proxy on it would ask: without the key there is nothing to be had."""
    foreign = (b"Origin: http://evil", b"Content-Type: text/plain")
    keys = (b"Authorization: Bearer ", b"Authorization: Bearer \xff", b"Host: localhost")
    for start in (b"GET /workers", b"POST /workers", b"DELETE /workers/x", b"POST /workers/x/drain", b"POST /route",
                  b"GET /dashboard/updates", b"GET /metrics/../workers", b"GET /index/dump"):  # fmt: skip
        for lines in ((), foreign, *((key,) for key in keys)):
            yield Variant(f"{start!r} {lines}", valid_request(*lines, start=start + b" HTTP/1.1"))


def make_variants() -> list[Variant]:
    variants = [
        *valid_requests(),
        *request_lines(),
        *content_lengths(),
        *transfer_encodings(),
        *headers(),
        *admin_requests(),
    ]
    # The parser remembers the last head of a connection: all of it once more behind a sound request.
    return variants + [
        Variant(
            f"after a sound one: {v.name}",
            valid_request(is_last=False) + v.data,
            None if v.answers is None else v.answers + 1,
        )
        for v in variants
        if len(v.data) < 2000
    ]
