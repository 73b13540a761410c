"""What the HTTP edge can be told; parsed once at the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.http.connection import ClientTimeouts
from router.http.request import HttpLimits


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Checked a few times a second, so an expiry can come up to `sweep_s` late."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    """From the request's last byte to the answer's first. An answer that is not streamed starts when it is complete."""
    idle_s: float = 300.0
    """Without a byte in the middle of an answer, whichever side is to blame."""
    total_s: float = 3600.0
    sweep_s: float = 0.25


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Bounds, deadlines and keys of the edge."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    client_timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    api_keys: tuple[str, ...] = ()
    connections_max: int = 20_000
    shutdown_s: float = 30.0
    """How long requests in flight may go on after a signal."""
