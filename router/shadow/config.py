"""What `router shadow` can be told besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import FILE, Flag, Seconds


# fmt: off
@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """A log of requests instead of copies, and what is made of them."""

    log: Annotated[str | None, FILE, Flag("--log", metavar="FILE"),
        "Read bodies from this file instead, one JSON object a line; report, and end."] = None
    report: Annotated[str | None, Flag("--report", metavar="FILE"),
        "Write the report there, one HTML page, or JSON (FILE.json): at the end, and after each comparison."] = None
    requests_max: Annotated[int, Meta(ge=10, le=10**6, title="N"), Flag("--keep"),
        "Requests that are compared, the last ones; about a kilobyte each and 8 bytes for each block."] = 10_000
    warm_share: Annotated[float, Meta(ge=0, le=0.9, title="SHARE"), Flag("--warm-share"),
        "Of them, the first, which only fill the caches that are played with."] = 0.1
    every_s: Annotated[Seconds, Flag("--every"), "Between two comparisons; each takes a core for some seconds."] = 60.0
    placed_s: Annotated[Seconds, "A request whose worker no event told within so long has none."] = 60.0
