"""Bounds on the worker processes that read large bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import Seconds, Size


@dataclass(frozen=True, slots=True)
class PromptWorkerConfig:
    """Worker processes that read bodies over 64 KiB, or of many objects."""

    count: Annotated[int, Meta(ge=1, le=64), "Processes, started when they are first needed."] = 2
    seconds_max: Annotated[Seconds, "For one body; what takes longer is ended, and load alone decides."] = 5.0
    memory_mb: Annotated[int, Meta(ge=64, le=10**6, title="MIB"), Size(1 << 20), "Of one process."] = 2048
    waiting_mb: Annotated[
        Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20)],
        "Of bodies that wait or are being read; more are answered 503.",
    ] = 512
    idle_s: Annotated[Seconds, "Without a body, after which a worker process is ended and its memory given back."] = (
        60.0
    )
