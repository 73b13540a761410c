"""Settings of the reasons why prompts miss the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag, Seconds, Size


# fmt: off
@dataclass(frozen=True, slots=True)
class MissReasonsConfig:
    """Why turns miss (router/miss_reasons)."""

    enabled: Annotated[bool, Flag("--reasons/--no-reasons"),
        "Say why prompts were not cached: GET /requests/ID, /route, metrics, dashboard."] = True
    share: Annotated[float, Meta(ge=0, le=1, title="SHARE"), Flag("--reasons-share"),
        "Of the conversations whose prompts are compared with the ones before, for reasons that need that."] = 0.125
    memory_mb: Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20),
        "For the last prompts of conversations, as token ids and digests."] = 64
    ttl_s: Annotated[Seconds, "A conversation's last prompt is forgotten after so long."] = 3600.0
    requests_max: Annotated[int, Meta(ge=1, le=10**7), "Requests that GET /requests/ID knows, the last ones."] = 4096
