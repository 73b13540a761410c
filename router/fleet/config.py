"""Settings of the fleet: how often workers are checked, and how many of their cache events are followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag, Seconds, Size


# fmt: off
@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings of how a router watches its workers: times between checks, and limits for streams of cache events."""

    health_s: Annotated[Seconds, Flag("--health-interval"), "Time between two health checks of a worker."] = 2.0
    sources_s: Annotated[Seconds, "Time between two probes of a worker's sources and sizes."] = 10.0
    loads_s: Annotated[Seconds, "Time between two readings of a worker's load in its /metrics."] = 4.0
    starting_s: Annotated[Seconds, "Time between two checks of a worker that is down or was never reached."] = 0.5
    starting_s_max: Annotated[Seconds, "Longest such time; it doubles for a worker that was never reached."] = 5.0
    failures_to_down: Annotated[int, Meta(ge=1, le=10**9),
        "Failed health checks in a row after which a worker is down."] = 2
    """After a failed request, one failed check is enough."""
    trust_event_endpoints: Annotated[bool, Flag("--trust-event-endpoints/--no-trust-event-endpoints"),
        "Follow event endpoints that workers name on other hosts, and ipc:// ones."] = False
    streams_max: Annotated[int, Meta(ge=1, le=10**6),
        "Most event streams of all workers, as far as file descriptors allow.",
        "The cache of a worker with further streams is estimated from the requests sent to it."] = 16_384
    index_mb: Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20), Flag("--index-memory"),
        "Largest size of the index of all workers' blocks.",
        "Beyond it the worker that announced the most, for the size of its cache, is dropped from the index."] = 8192
    names_s: Annotated[Seconds, "Time between two look-ups of a host name that many workers share."] = 10.0
    peers_s: Annotated[Seconds, "First pause between two requests to other routers for a snapshot; doubles."] = 10.0
    peers_s_max: Annotated[Seconds, "Longest pause between such requests."] = 600.0
