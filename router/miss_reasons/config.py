"""Settings of the reasons why prompts miss the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Flag, Seconds, Size


# fmt: off
@dataclass(frozen=True, slots=True)
class MissReasonsConfig:
    """Settings of the reasons for cache misses."""

    enabled: Annotated[bool, Flag("--reasons/--no-reasons"),
        "Find out why prompts missed the cache (/requests/ID, metrics)."] = True
    share: Annotated[float, Meta(ge=0, le=1, title="SHARE"), Flag("--reasons-share"),
        "Share of the conversations in which prompts are compared with earlier ones."] = 0.125
    memory_mb: Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20),
        "Memory for the last prompts of these conversations."] = 64
    ttl_s: Annotated[Seconds, "How long a conversation's last prompt is remembered."] = 3600.0
    requests_max: Annotated[int, Meta(ge=1, le=10**7), "Number of recent requests that GET /requests/ID knows."] = 4096
