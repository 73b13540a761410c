"""Settings of `router shadow` besides those of `router run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import FILE, Flag, Seconds


# fmt: off
@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Source of the requests, and settings of their comparison."""

    log: Annotated[str | None, FILE, Flag("--log", metavar="FILE"),
        "Read requests from FILE, one JSON body a line, then report and end."] = None
    report: Annotated[str | None, Flag("--report", metavar="FILE"),
        "Write the report here, as an HTML page or JSON (FILE.json)."] = None
    requests_max: Annotated[int, Meta(ge=10, le=10**6, title="N"), Flag("--keep"),
        "Number of requests that are compared, the most recent ones."] = 10_000
    warm_share: Annotated[float, Meta(ge=0, le=0.9, title="SHARE"), Flag("--warm-share"),
        "Share of them, the first ones, that only fill the simulated caches."] = 0.1
    every_s: Annotated[Seconds, Flag("--every"),
        "Time between two comparisons; each takes a core for some seconds."] = 60.0
    placed_s: Annotated[Seconds, "How long events may take to show a request's worker."] = 60.0
