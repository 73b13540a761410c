"""Bounds on the worker processes that read large bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Seconds, Size


@dataclass(frozen=True, slots=True)
class PromptWorkerConfig:
    """Worker processes that read bodies over 64 KiB, or of many objects."""

    count: Annotated[int, Meta(ge=1, le=64), "Number of processes, started when first needed."] = 2
    seconds_max: Annotated[Seconds, "Longest time for one body; after it the request is routed by load alone."] = 5.0
    memory_mb: Annotated[int, Meta(ge=64, le=10**6, title="MIB"), Size(1 << 20), "Most memory of one process."] = 2048
    waiting_mb: Annotated[
        Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20)],
        "Most memory for bodies that wait or are being read; more are answered 503.",
    ] = 512
    idle_s: Annotated[Seconds, "Idle time after which a process ends and gives its memory back."] = 60.0
