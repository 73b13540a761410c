"""Read a log of requests, one JSON object a line: the body of a request, or an object with the field `body`. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from options import ConfigError
from router.http.headers import HeaderBlock, ProtocolError
from router.http.request import HttpRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class LogLine(msgspec.Struct):
    """One line of a request log: a request and its answer, as far as it is known. Times are in seconds."""

    body: msgspec.Raw = msgspec.Raw()
    """The body that was posted, as an object or as text."""
    path: str | None = None
    arrived_s: float | None = msgspec.field(name="at", default=None)
    """Time of the request, by any clock."""
    worker: str | None = None
    """Id, HOST:PORT or URL of the worker that answered."""
    ttft_s: float | None = None
    """Time from the request to the first token."""
    latency_s: float | None = msgspec.field(name="seconds", default=None)
    """Time from the request to the end of the answer."""
    cached_tokens: int | None = None
    """Prompt tokens that the worker had in its cache, as it reported them."""
    output_tokens: int | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)


def read_log(lines: Iterable[bytes], source: str) -> Iterator[tuple[LogLine, HttpRequest]]:
    """Yield each line of a log and its request. Raises ConfigError, which names `source`, for an invalid line."""
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            yield _read_line(text)
        except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError) as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None


def _read_line(text: bytes) -> tuple[LogLine, HttpRequest]:
    """Read a line of a log. Raises DecodeError, UnicodeDecodeError or ProtocolError."""
    line = msgspec.json.decode(text, type=LogLine)
    body = bytes(line.body).strip()
    if not body:  # then the line itself is the body, and its fields are the body's
        line, body = LogLine(), text.strip()
    elif body.startswith(b'"'):
        body = msgspec.json.decode(body, type=str).encode()
    fields = msgspec.json.decode(body, type=dict[str, Any])
    path = line.path or (CHAT if "messages" in fields else COMPLETION)
    headers = HeaderBlock.from_pairs((name.lower().encode(), value.encode()) for name, value in line.headers.items())
    request = HttpRequest("POST", path.encode(), path, headers)
    request.pieces, request.has_body = (body,), True
    return line, request
