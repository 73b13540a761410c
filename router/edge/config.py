"""What the HTTP edge can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from options import SECRET, Flag, Seconds
from router.http.config import ClientTimeouts, HttpLimits


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Checked a few times a second, so an expiry can come up to `sweep_s` late."""

    connect_s: Annotated[Seconds, Flag("--connect-timeout"), "To reach a worker."] = 5.0
    first_byte_s: Annotated[
        Seconds, Flag("--first-byte-timeout"), "From the request's end to the answer's first byte."
    ] = 600.0
    """An answer that is not streamed starts when it is complete."""
    idle_s: Annotated[Seconds, Flag("--idle-timeout"), "Without a byte in the middle of an answer."] = 300.0
    """Whichever side is to blame."""
    total_s: Annotated[Seconds, Flag("--total-timeout"), "From the request to the answer's end."] = 3600.0
    sweep_s: Annotated[Seconds, "Between two looks at all these."] = 0.25


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Bounds, deadlines and keys of the edge."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    client_timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    api_keys: Annotated[
        tuple[str, ...],
        SECRET,
        Flag("--api-key", metavar="KEY", env="ROUTER_API_KEY"),
        "Require Authorization: Bearer KEY under /v1. May be repeated; or set ROUTER_API_KEY.",
    ] = field(default=(), repr=False)
    pass_routes: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^/v1/[!-~]+$", title="PATH", examples=["/v1/files"])], ...],
        Flag("--pass-route", metavar="PATH"),
        "Pass this route to workers too, /v1/x/* all below it, besides those of OpenAI's that answer prompts. "
        "May be repeated.",
    ] = ()
    connections_max: Annotated[
        Annotated[int, Meta(ge=1, le=10**9, title="N")],
        Flag("--max-connections"),
        "Of clients; more are answered 503.",
    ] = 20_000
    shutdown_s: Annotated[Seconds, Flag("--shutdown-timeout"), "For requests in flight after SIGTERM."] = 30.0
