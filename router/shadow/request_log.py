"""Read a log of requests, one JSON object a line: the body of a request, or an object with the field `body`. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from options import ConfigError
from router.http.headers import HeaderBlock
from router.http.request import HttpRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class LogLine(msgspec.Struct):
    """One request of a log, and its answer as far as it is known."""

    body: msgspec.Raw = msgspec.Raw()
    """The body that was posted, as an object or as text."""
    path: str | None = None
    at: float | None = None
    """Time of the request, in seconds of any clock."""
    worker: str | None = None
    """Id, HOST:PORT or URL of the worker that answered."""
    ttft_s: float | None = None
    seconds: float | None = None
    """Time to the end of the answer."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    headers: dict[str, str] = {}


def read_log(lines: Iterable[bytes], source: str) -> Iterator[tuple[LogLine, HttpRequest]]:
    """Yield (line, request) in the order of the file. Raises ConfigError for a line that cannot be read."""
    decoder = msgspec.json.Decoder(LogLine)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            is_bare_body = not bytes(line.body)
            body = bytes(text if is_bare_body else line.body).strip()
            if body[:1] == b'"':
                body = msgspec.json.decode(body, type=str).encode()
            fields: Any = msgspec.json.decode(body)
            if not isinstance(fields, dict):
                raise msgspec.ValidationError(f"Expected an object as the body, got {type(fields).__name__}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        if is_bare_body:
            line = LogLine()
        path = line.path or (CHAT if "messages" in fields else COMPLETION)
        pairs = [(name.lower().encode(), value.encode()) for name, value in line.headers.items()]
        request = HttpRequest("POST", path.encode(), path, HeaderBlock.from_pairs(pairs))
        request.pieces, request.has_body = (body,), True
        yield line, request
