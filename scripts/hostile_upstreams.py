"""Workers that answer wrongly. See scripts/hostile.

What is held against the router: every request ends; an answer that a worker broke off never looks whole; bytes that
nobody asked for never reach a client; what failed before its first byte is repeated on the sound worker beside it.
"""

from __future__ import annotations

from harness.upstream import CLOSE, HEAD, RESET, STREAM, WAIT, Steps, complete_response, encode_chunk

GOOD = b'{"id":"GOOD","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
FULL = b'{"id":"FULL","choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
STALE = complete_response(b'{"id":"STALE"}')
STREAMED = STREAM + encode_chunk(b'data: {"id":"x","choices":[]}\n\n') + encode_chunk(b"data: " + FULL + b"\n\n")
DONE = encode_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _head(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, b"content-type: application/json", *lines, b"", b""])


LENGTH = b"content-length: %d" % len(FULL)

BEFORE: dict[str, Steps] = {
    "ends after the request": (CLOSE,),
    "resets after the request": (RESET,),
    "never answers": (WAIT,),
    "half a status line": (b"HTTP/1.1 20", CLOSE),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-type: a", RESET),
    "a head that stops": (b"HTTP/1.1 200 OK\r\ncontent-type: a", WAIT),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), CLOSE),
    "noise": (bytes(range(256)) * 4, WAIT),
    "another version": (_head(LENGTH, start=b"HTTP/9.9 200 OK") + FULL, CLOSE),
    "a status that is a word": (_head(LENGTH, start=b"HTTP/1.1 abc OK") + FULL, CLOSE),
    "a status of one digit": (_head(LENGTH, start=b"HTTP/1.1 9 OK") + FULL, CLOSE),
    "a status of four digits": (_head(LENGTH, start=b"HTTP/1.1 2000 OK") + FULL, CLOSE),
    "a line without a colon": (_head(b"nonsense", LENGTH) + FULL, CLOSE),
    "a zero in a header": (_head(b"x: \x00", LENGTH) + FULL, CLOSE),
    "a folded header": (_head(b"x: a\r\n b", LENGTH) + FULL, CLOSE),
    "a space before the colon": (_head(b"content-length : 5", LENGTH) + FULL, CLOSE),
    "a huge header": (_head(b"x: " + b"x" * 2_000_000, LENGTH) + FULL, CLOSE),
    "many headers": (_head(*[b"x: y"] * 50_000, LENGTH) + FULL, CLOSE),
    "headers without end": (HEAD, *[b"x: " + b"y" * 9000 + b"\r\n"] * 2000, CLOSE),
    "a negative length": (_head(b"content-length: -1") + FULL, CLOSE),
    "a length that is a word": (_head(b"content-length: ten") + FULL, CLOSE),
    "an endless length": (_head(b"content-length: " + b"9" * 30) + FULL, CLOSE),
    "two lengths": (_head(LENGTH, b"content-length: 5") + FULL, CLOSE),
    "a list of lengths": (_head(b"content-length: 5, 6") + FULL, CLOSE),
    "length and chunks": (_head(LENGTH, b"transfer-encoding: chunked") + FULL, CLOSE),
    "an unknown encoding": (_head(b"transfer-encoding: gzip, x") + FULL, CLOSE),
    "a first chunk that is none": (STREAM + b"zz\r\nhello\r\n", CLOSE),
    "a first chunk of 2^70 bytes": (STREAM + b"400000000000000000\r\nhello\r\n", CLOSE),
    "a first chunk with a sign": (STREAM + b"-5\r\nhello\r\n", CLOSE),
    "100 Continue without end": (*[b"HTTP/1.1 100 Continue\r\n\r\n" * 100] * 100, CLOSE),
    "early hints without end": (*[b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 100] * 100, CLOSE),
    "another protocol": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\nhello", WAIT),
    "bare line feeds, half": (b"HTTP/1.1 200 OK\ncontent-le", CLOSE),
}
"""Nothing of these is an answer."""

AFTER: dict[str, Steps] = {
    "a length too long": (_head(b"content-length: %d" % (len(FULL) + 9)) + FULL[:-3], CLOSE),
    "a length never reached": (_head(b"content-length: %d" % (len(FULL) + 9)) + FULL[:-3], WAIT),
    "a stream that stops": (STREAMED, WAIT),
    "a stream that ends": (STREAMED, CLOSE),
    "a stream that is reset": (STREAMED, RESET),
    "a chunk without its end": (STREAMED + b"5\r\nhelloX\r\n" + DONE, CLOSE),
    "a chunk size of noise": (STREAMED + b"\x00\xff\r\n", WAIT),
    "a chunk longer than its size": (STREAMED + b"5\r\nhello world\r\n" + DONE, CLOSE),
    "a chunk size without end": (STREAMED, *[b"0" * 9000] * 500, CLOSE),
    "an extension without end": (STREAMED + b"5;", *[b"x" * 9000] * 500, CLOSE),
    "trailers without end": (STREAMED + b"0\r\n", *[b"x: y\r\n" * 1000] * 500, CLOSE),
}
"""These began well: the client must see that they did not end well."""

ODD: dict[str, Steps] = {
    "two answers for one": (complete_response(FULL) + STALE,),
    "a late second answer": (complete_response(FULL), 0.02, STALE),
    "a body behind a 204": (b"HTTP/1.1 204 No Content\r\n\r\n" + STALE,),
    "a body behind a 304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n" + STALE,),
    "more than the length": (complete_response(FULL) + b"\x00" * 1000,),
    "closes after an answer": (complete_response(FULL), CLOSE),
    "says close and does not": (_head(LENGTH, b"connection: close") + FULL, WAIT),
    "no length, then the end": (b"HTTP/1.0 200 OK\r\n\r\n" + FULL, CLOSE),
    "byte by byte": tuple(bytes([b]) for b in STREAMED + DONE),
    "1,000 chunks of a byte": (STREAMED + encode_chunk(b"x") * 1000 + DONE,),
    "100,000 chunks of a byte": (STREAMED + encode_chunk(b"x") * 100_000 + DONE,),
    "one event of 10 MB": (STREAM + encode_chunk(b"data: " + b"x" * 10_000_000) + DONE,),
    "50 MB": (complete_response(b'{"id":"FULL","x":"' + b"x" * 50_000_000 + b'"}'),),
    "deep JSON": (complete_response(b'{"id":"FULL","usage":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),),
    "usage that is a list": (complete_response(b'{"id":"FULL","usage":[1,2]}'),),
    "a usage of 5,000 digits": (complete_response(b'{"id":"FULL","usage":{"prompt_tokens":' + b"9" * 5000 + b"}}"),),
    "a negative usage": (complete_response(b'{"id":"FULL","usage":{"prompt_tokens":-5,"completion_tokens":-1}}'),),
    "an endless usage": (
        complete_response(b'{"id":"FULL","usage":{"prompt_tokens":1e999,"prompt_tokens_details":{}}}'),
    ),
    "cached tokens of a word": (
        complete_response(b'{"id":"FULL","usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":"x"}}}'),
    ),
    "a usage that never closes": (STREAM + encode_chunk(b'data: {"usage":{"prompt_tokens":1') + DONE,),
    "gzip that is none": (_head(b"content-encoding: gzip", LENGTH) + FULL,),
    "a redirect": (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",),
    "500": (complete_response(b'{"error":1}', b"HTTP/1.1 500 Oh\r\n"),),
    "503, come back in 9^400 s": (complete_response(b"", b"HTTP/1.1 503 No\r\nretry-after: " + b"9" * 400 + b"\r\n"),),
    "429": (complete_response(b"", b"HTTP/1.1 429 No\r\nretry-after: -1\r\n"),),
    "401": (complete_response(b"", b"HTTP/1.1 401 No\r\n"),),
    "404 for the model": (complete_response(b'{"error":{"message":"no"}}', b"HTTP/1.1 404 No\r\n"),),
}
"""Whatever the client gets of these, it gets it soon, and nothing that another request should have got."""

CUT = {"a plain answer": complete_response(FULL), "a stream": STREAMED + DONE}
"""Answers that are broken off at every offset."""
