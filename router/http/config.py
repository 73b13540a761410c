"""Limits on the size of a client's requests, and on the time that a client may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag, Seconds, Size

Bytes = Annotated[int, Meta(ge=1, le=10**15, title="BYTES"), Size()]


# fmt: off
@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on the size of requests."""

    head_bytes_max: Annotated[Bytes, "Largest head of a request; larger ones are answered 431."] = 64 << 10
    headers_max: Annotated[int, Meta(ge=1, le=10**6), "Most header fields of a request; more are answered 431."] = 128
    body_bytes_max: Annotated[Bytes, Flag("--max-body-bytes"),
        "Largest body of a request; larger ones are answered 413."] = 64 << 20
    request_buffer_bytes_max: Annotated[Bytes, Flag("--max-request-buffer-bytes"),
        "Most memory for request bodies and for answers that clients have not read.",
        "Bodies count above 16 KiB each, answers above 64 KiB each. A request that would exceed this is answered 503, "
        "an answer is cut off.",
    ] = 1 << 30
    tenant_buffer_bytes_max: Annotated[Bytes, Flag("--max-request-buffer-bytes-by-key"),
        "Most of that memory for one API key, or one address without keys."] = 512 << 20


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Limits on the time that a client may take."""

    request_s: Annotated[Seconds, Flag("--request-timeout"), "Longest that a client may take to send a request."] = 60.0
    """Time from the first byte of a request to its last; slow-loris clients are cut off with 408."""
    send_s: Annotated[Seconds, Flag("--send-timeout"),
        "Longest that a client may read nothing of an answer that waits for it."] = 60.0
    """Time between two bytes that leave, not of the whole answer; then the connection is closed."""
    keep_alive_s: Annotated[Seconds, "Longest pause between two requests of a connection."] = 75.0
