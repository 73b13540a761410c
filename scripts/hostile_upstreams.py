"""Workers that answer wrongly. See scripts/hostile.

What is held against the router: every request ends; an answer that a worker broke off never looks whole; bytes that
nobody asked for never reach a client; what failed before its first byte is repeated on the sound worker beside it.
"""

from __future__ import annotations

from harness.upstream import CLOSE, HEAD, RESET, STREAM, WAIT, Steps, complete_response, encode_chunk

VALID_BODY = b'{"id":"GOOD","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
COMPLETE_BODY = b'{"id":"FULL","choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
STALE_RESPONSE = complete_response(b'{"id":"STALE"}')
STREAM_START = (
    STREAM + encode_chunk(b'data: {"id":"x","choices":[]}\n\n') + encode_chunk(b"data: " + COMPLETE_BODY + b"\n\n")
)
STREAM_END = encode_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _head(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, b"content-type: application/json", *lines, b"", b""])


LENGTH_HEADER = b"content-length: %d" % len(COMPLETE_BODY)

INVALID_RESPONSES: dict[str, Steps] = {
    "ends after the request": (CLOSE,),
    "resets after the request": (RESET,),
    "never answers": (WAIT,),
    "half a status line": (b"HTTP/1.1 20", CLOSE),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-type: a", RESET),
    "a head that stops": (b"HTTP/1.1 200 OK\r\ncontent-type: a", WAIT),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), CLOSE),
    "noise": (bytes(range(256)) * 4, WAIT),
    "another version": (_head(LENGTH_HEADER, start=b"HTTP/9.9 200 OK") + COMPLETE_BODY, CLOSE),
    "a status that is a word": (_head(LENGTH_HEADER, start=b"HTTP/1.1 abc OK") + COMPLETE_BODY, CLOSE),
    "a status of one digit": (_head(LENGTH_HEADER, start=b"HTTP/1.1 9 OK") + COMPLETE_BODY, CLOSE),
    "a status of four digits": (_head(LENGTH_HEADER, start=b"HTTP/1.1 2000 OK") + COMPLETE_BODY, CLOSE),
    "a line without a colon": (_head(b"nonsense", LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "a zero in a header": (_head(b"x: \x00", LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "a folded header": (_head(b"x: a\r\n b", LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "a space before the colon": (_head(b"content-length : 5", LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "a huge header": (_head(b"x: " + b"x" * 2_000_000, LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "many headers": (_head(*[b"x: y"] * 50_000, LENGTH_HEADER) + COMPLETE_BODY, CLOSE),
    "headers without end": (HEAD, *[b"x: " + b"y" * 9000 + b"\r\n"] * 2000, CLOSE),
    "a negative length": (_head(b"content-length: -1") + COMPLETE_BODY, CLOSE),
    "a length that is a word": (_head(b"content-length: ten") + COMPLETE_BODY, CLOSE),
    "an endless length": (_head(b"content-length: " + b"9" * 30) + COMPLETE_BODY, CLOSE),
    "two lengths": (_head(LENGTH_HEADER, b"content-length: 5") + COMPLETE_BODY, CLOSE),
    "a list of lengths": (_head(b"content-length: 5, 6") + COMPLETE_BODY, CLOSE),
    "length and chunks": (_head(LENGTH_HEADER, b"transfer-encoding: chunked") + COMPLETE_BODY, CLOSE),
    "an unknown encoding": (_head(b"transfer-encoding: gzip, x") + COMPLETE_BODY, CLOSE),
    "a first chunk that is none": (STREAM + b"zz\r\nhello\r\n", CLOSE),
    "a first chunk of 2^70 bytes": (STREAM + b"400000000000000000\r\nhello\r\n", CLOSE),
    "a first chunk with a sign": (STREAM + b"-5\r\nhello\r\n", CLOSE),
    "100 Continue without end": (*[b"HTTP/1.1 100 Continue\r\n\r\n" * 100] * 100, CLOSE),
    "early hints without end": (*[b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 100] * 100, CLOSE),
    "another protocol": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\nhello", WAIT),
    "bare line feeds, half": (b"HTTP/1.1 200 OK\ncontent-le", CLOSE),
}
"""Nothing of these is an answer."""

TRUNCATED_RESPONSES: dict[str, Steps] = {
    "a length too long": (_head(b"content-length: %d" % (len(COMPLETE_BODY) + 9)) + COMPLETE_BODY[:-3], CLOSE),
    "a length never reached": (_head(b"content-length: %d" % (len(COMPLETE_BODY) + 9)) + COMPLETE_BODY[:-3], WAIT),
    "a stream that stops": (STREAM_START, WAIT),
    "a stream that ends": (STREAM_START, CLOSE),
    "a stream that is reset": (STREAM_START, RESET),
    "a chunk without its end": (STREAM_START + b"5\r\nhelloX\r\n" + STREAM_END, CLOSE),
    "a chunk size of noise": (STREAM_START + b"\x00\xff\r\n", WAIT),
    "a chunk longer than its size": (STREAM_START + b"5\r\nhello world\r\n" + STREAM_END, CLOSE),
    "a chunk size without end": (STREAM_START, *[b"0" * 9000] * 500, CLOSE),
    "an extension without end": (STREAM_START + b"5;", *[b"x" * 9000] * 500, CLOSE),
    "trailers without end": (STREAM_START + b"0\r\n", *[b"x: y\r\n" * 1000] * 500, CLOSE),
}
"""These began well: the client must see that they did not end well."""

UNUSUAL_RESPONSES: dict[str, Steps] = {
    "two answers for one": (complete_response(COMPLETE_BODY) + STALE_RESPONSE,),
    "a late second answer": (complete_response(COMPLETE_BODY), 0.02, STALE_RESPONSE),
    "a body behind a 204": (b"HTTP/1.1 204 No Content\r\n\r\n" + STALE_RESPONSE,),
    "a body behind a 304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n" + STALE_RESPONSE,),
    "more than the length": (complete_response(COMPLETE_BODY) + b"\x00" * 1000,),
    "closes after an answer": (complete_response(COMPLETE_BODY), CLOSE),
    "says close and does not": (_head(LENGTH_HEADER, b"connection: close") + COMPLETE_BODY, WAIT),
    "no length, then the end": (b"HTTP/1.0 200 OK\r\n\r\n" + COMPLETE_BODY, CLOSE),
    "byte by byte": tuple(bytes([b]) for b in STREAM_START + STREAM_END),
    "1,000 chunks of a byte": (STREAM_START + encode_chunk(b"x") * 1000 + STREAM_END,),
    "100,000 chunks of a byte": (STREAM_START + encode_chunk(b"x") * 100_000 + STREAM_END,),
    "one event of 10 MB": (STREAM + encode_chunk(b"data: " + b"x" * 10_000_000) + STREAM_END,),
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
    "a usage that never closes": (STREAM + encode_chunk(b'data: {"usage":{"prompt_tokens":1') + STREAM_END,),
    "gzip that is none": (_head(b"content-encoding: gzip", LENGTH_HEADER) + COMPLETE_BODY,),
    "a redirect": (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",),
    "500": (complete_response(b'{"error":1}', b"HTTP/1.1 500 Oh\r\n"),),
    "503, come back in 9^400 s": (complete_response(b"", b"HTTP/1.1 503 No\r\nretry-after: " + b"9" * 400 + b"\r\n"),),
    "429": (complete_response(b"", b"HTTP/1.1 429 No\r\nretry-after: -1\r\n"),),
    "401": (complete_response(b"", b"HTTP/1.1 401 No\r\n"),),
    "404 for the model": (complete_response(b'{"error":{"message":"no"}}', b"HTTP/1.1 404 No\r\n"),),
}
"""Whatever the client gets of these, it gets it soon, and nothing that another request should have got."""

COMPLETE_RESPONSES = {"a plain answer": complete_response(COMPLETE_BODY), "a stream": STREAM_START + STREAM_END}
"""Answers that are broken off at every offset."""
