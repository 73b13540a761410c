"""The words of stream.py: where a stream starts, its phases, the bounds and times it keeps to, and what it counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Join(enum.Enum):
    """What a stream does when it starts without history."""

    SNAPSHOT = "snapshot"
    """Ask for the resident set; where there is none, replay the ring."""
    RING = "ring"
    """Replay the ring from its oldest batch."""
    LIVE = "live"
    """Take what comes from now on. After a restart or an uncovered gap the ring is replayed all the same."""


class StreamPhase(enum.Enum):
    LIVE = "live"
    REPAIR = "repair"
    SNAPSHOT = "snapshot"
    REBUILD = "rebuild"


@dataclass(frozen=True)
class StreamConfig:
    join: Join = Join.SNAPSHOT
    can_ask: bool = True
    """False where the publisher has no replay endpoint."""
    buffer_frames_max: int = 20_000
    buffer_bytes_max: int = 256 << 20
    recent_max: int = 1024
    """Applied batches whose bytes are remembered (as digests) to tell a repetition from a restart."""
    request_timeout_s: float = 5.0
    """Longest silence of a publisher that owes a reply."""
    attempts_max: int = 3
    retry_s: float = 10.0
    """After nobody could say what was missed: when to ask for a snapshot again."""
    tail_check_s: float = 1.0
    """After so much silence the publisher is asked once whether the last batch seen is its last."""


@dataclass
class StreamStats:
    applied: int = 0
    gaps: int = 0
    stale: int = 0
    restarts: int = 0
    clears: int = 0
    requests: int = 0
    snapshots: int = 0
    overflowed: int = 0
