"""What a client may send, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag, Seconds, Size

Bytes = Annotated[int, Meta(ge=1, le=10**15, title="BYTES"), Size()]


# fmt: off
@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may send."""

    head_bytes_max: Annotated[Bytes, "Of a request's head; longer ones are answered 431."] = 64 << 10
    headers_max: Annotated[int, Meta(ge=1, le=10**6), "Of a request; more are answered 431."] = 128
    body_bytes_max: Annotated[Bytes, Flag("--max-body-bytes"), "Of a request; longer ones are answered 413."] = 64 << 20
    request_buffer_bytes_max: Annotated[Bytes, Flag("--max-request-buffer-bytes"),
        "Of all requests that arrive or are in flight, each above 16 KiB, and of answers that wait for their clients, "
        "each above 64 KiB; a request that would be more is answered 503, an answer is broken off.",
    ] = 1 << 30
    tenant_buffer_bytes_max: Annotated[Bytes, Flag("--max-request-buffer-bytes-by-key"),
        "Of those with one API key, or from one address where no keys are needed; more is answered 429."] = 512 << 20


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """How long a client may take."""

    request_s: Annotated[Seconds, Flag("--request-timeout"), "For a client to send a whole request."] = 60.0
    """From its first byte to its last: slow-loris clients are cut off with 408."""
    send_s: Annotated[Seconds, Flag("--send-timeout"),
        "For a client to take any byte of an answer that waits for it."] = 60.0
    """Between two bytes that leave, not for the whole answer: after it the connection is broken off."""
    keep_alive_s: Annotated[Seconds, "Between two requests of a client's connection."] = 75.0
