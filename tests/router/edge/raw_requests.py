"""Hundreds of ways to write a request: every spelling of a length, a coding, a line end, a chunk, each followed by a
request that must not come out of its body. For tests of the parser, of the edge and of proxies in front.
"""

from __future__ import annotations

from collections.abc import Iterator

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
SMUGGLED = b"POST /workers HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}"


def _items(text: str) -> tuple[bytes, ...]:
    """One a line, with escapes."""
    return tuple(line.encode().decode("unicode_escape").encode("latin-1") for line in text.strip("\n").split("\n"))


LENGTHS = (
    *_items(
        r"""
0
3
03
000000000000003
0000000000000003
00000000000000000000000003
+3
-3
-0
\x203
3\x20
3\t
3,3
3, 3
3,
,3
3;
3.0

3e0
0x3
3_0
\x20
3 3
\x0b3
3\x0c
3\xa0
\xb23
\xd9\xa3
999999999999999
1000000000000000
9999999999999999
10000000000000000
18446744073709551615
18446744073709551616
18446744073709551619
4294967299
3\rX: y
"""
    ),
    b"9" * 400,
)
CODINGS = _items(
    r"""
chunked
Chunked
CHUNKED
\x20chunked\x20
\tchunked
chunked,
,chunked
chunked, chunked
gzip, chunked
chunked, gzip
identity
chunked, identity

xchunked
chunkedx
x
\x0bchunked
chunked\x0c
\xa0chunked
chunked;q=1
"chunked"
'chunked'
chu nked
chunked\x00
chunked\r
gzip
"""
)
NAMES = _items(
    r"""
%b\x20
\x20%b
\t%b
%b\t
%b\x00
\x0b%b
%b\x0c
X: y\n%b
X: y\r%b
%b\xa0
(%b
%b:
"""
)
CHUNKS = (
    *_items(
        r"""
3\r\nabc\r\n0\r\n\r\n
03\r\nabc\r\n0\r\n\r\n
3;x\r\nabc\r\n0\r\n\r\n
3;x="y"\r\nabc\r\n0\r\n\r\n
3 \r\nabc\r\n0\r\n\r\n
3 ;x\r\nabc\r\n0\r\n\r\n
\x203\r\nabc\r\n0\r\n\r\n
3\nabc\r\n0\r\n\r\n
3\r\nabc\n0\r\n\r\n
3\r\nabc\r\n0\n\n
3\r\nabc\r\n0\r\n\n
3\r\nabcd\r\n0\r\n\r\n
3\r\nab\r\n0\r\n\r\n
3\r\nabc0\r\n\r\n
0x3\r\nabc\r\n0\r\n\r\n
+3\r\nabc\r\n0\r\n\r\n
-3\r\nabc\r\n0\r\n\r\n
\r\nabc\r\n0\r\n\r\n
g\r\nabc\r\n0\r\n\r\n
3;x\ny\r\nabc\r\n0\r\n\r\n
3;x\ry\r\nabc\r\n0\r\n\r\n
3\r\r\nabc\r\n0\r\n\r\n
3\x00\r\nabc\r\n0\r\n\r\n
ffffffffffffffff\r\nabc
fffffffffffffffff\r\nabc
10000000000000003\r\nabc\r\n0\r\n\r\n
0000000000000000003\r\nabc\r\n0\r\n\r\n
3\r\nabc\r\n00\r\n\r\n
3\r\nabc\r\n-0\r\n\r\n
3\r\nabc\r\n0\r\nA: b\r\n\r\n
3\r\nabc\r\n0\r\nA : b\r\n\r\n
3\r\nabc\r\n0\r\nContent-Length: 9\r\n\r\n
3\r\nabc\r\n0\r\nnonsense\r\n\r\n
3\r\nabc\r\n0\r\n A: b\r\n\r\n
3\r\nabc\r\n0;x\r\n\r\n
0\r\n\r\n
0\r\nX: y\nZ: z\r\n\r\n
"""
    ),
    *(b"3;" + b"x" * count + b"\r\nabc\r\n0\r\n\r\n" for count in (1020, 1021)),
    b"3\r\nabc\r\n0\r\n" + b"A: b\r\n" * 20 + b"\r\n",
)
STARTS = _items(
    r"""
GET / HTTP/1.1
get / HTTP/1.1
GET  / HTTP/1.1
GET /  HTTP/1.1
GET / HTTP/1.1\x20
\x20GET / HTTP/1.1
GET\t/\tHTTP/1.1
GET / http/1.1
GET / HTTP/1.0
GET / HTTP/0.9
GET / HTTP/2.0
GET / HTTP/1.2
GET / HTTP/1.10
GET / HTTP/01.1
GET /
GET / HTTP/11
GET / HTTP /1.1
GET http://x/ HTTP/1.1
GET * HTTP/1.1
GET ? HTTP/1.1
GET /\x00 HTTP/1.1
GET /\x7f HTTP/1.1
GET /\xff HTTP/1.1
GET /a b HTTP/1.1
GET /#a HTTP/1.1
CONNECT a:1 HTTP/1.1
CONNECT / HTTP/1.1
OPTIONS * HTTP/1.1
OPTIONS / HTTP/1.1
TRACE / HTTP/1.1

PRI * HTTP/2.0
BREW / HTTP/1.1
G\x00T / HTTP/1.1
\r\n
\r\nGET / HTTP/1.1
\r\n\r\nGET / HTTP/1.1
\nGET / HTTP/1.1
\rGET / HTTP/1.1
\r\n GET / HTTP/1.1
HEAD / HTTP/1.1
GET / HTTP/1.1\r
GET / HTTP/1.1\n
GET / HTTP/1.1\r\nHost: a
POST / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade
GET / HTTP/1.1\r\nConnection: close
GET / HTTP/1.1\r\nConnection: keep-alive, close
GET / HTTP/1.0\r\nConnection: Keep-Alive
GET / HTTP/1.1\r\nConnection: keep-alive\r\nConnection: close
GET / HTTP/1.1\r\nExpect: 100-continue
GET / HTTP/1.1\r\nExpect: x
GET / HTTP/1.1\r\n X: folded
GET / HTTP/1.1\r\nX: a\r\n folded
GET / HTTP/1.1\r\nX
GET / HTTP/1.1\r\n: x
GET / HTTP/1.1\r\nX:
GET / HTTP/1.1\r\nX: \x01
GET / HTTP/1.1\r\nX: \x7f
GET / HTTP/1.1\r\nX: \xff
GET / HTTP/1.1\r\nX\xff: a
GET / HTTP/1.1\r\nX Y: a
"""
)


def variants() -> Iterator[bytes]:
    """Each a stream of its own, of one or two requests as seen by one reader or another."""
    for value in LENGTHS:
        for name in (b"Content-Length", b"content-length"):
            yield HEAD + name + b":" + value + b"\r\n\r\nabc" + SMUGGLED
        yield HEAD + b"Content-Length: " + value + b"\r\nContent-Length: 3\r\n\r\nabc" + SMUGGLED
        yield HEAD + b"Content-Length: 3\r\nContent-Length: " + value + b"\r\n\r\nabc" + SMUGGLED
        yield HEAD + b"Content-Length: 3\r\n\r\nabc" + HEAD + b"Content-Length: " + value + b"\r\n\r\nabc" + SMUGGLED
    for value in CODINGS:
        yield HEAD + b"Transfer-Encoding: " + value + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD + b"Transfer-Encoding: " + value + b"\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD + b"Content-Length: 3\r\nTransfer-Encoding: " + value + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: " + value + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: " + value + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
    for name in NAMES:
        yield HEAD + name % b"Content-Length" + b": 3\r\n\r\nabc" + SMUGGLED
        yield HEAD + name % b"Transfer-Encoding" + b": chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD + b"Content-Length: 3\r\n" + name % b"Transfer-Encoding" + b": chunked\r\n\r\n0\r\n\r\n" + SMUGGLED
        yield HEAD + b"Content-Length: 3\r\n" + name % b"Host" + b": b\r\n\r\nabc" + SMUGGLED
    for chunks in CHUNKS:
        yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + SMUGGLED
        yield HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks
    for start in STARTS:
        yield start + b"\r\nHost: r\r\n\r\n" + SMUGGLED
        yield start + b"\r\nHost: r\r\nContent-Length: 3\r\n\r\nabc" + SMUGGLED
        yield start.replace(b"GET", b"POST") + b"\nHost: r\nContent-Length: 3\n\nabc" + SMUGGLED
