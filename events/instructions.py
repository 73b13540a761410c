"""What a stream tells its shell: instructions to perform and notices to count. Values only.

`Apply` and `Clear` go to whoever keeps the state, in order; requests go to the shell that owns the replay sockets;
`Gap`, `Stale`, `Restarted` and `Malformed` are notices that need no action.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


class Origin(enum.Enum):
    LIVE = "live"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this payload now. `seq` is None for a snapshot chunk."""

    seq: int | None
    payload: bytes
    origin: Origin


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget everything this stream announced."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for the batches from `start_seq` on, on a fresh connection; drop an older request of this stream."""

    request_id: int
    start_seq: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    request_id: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Notice: the batches [first_seq, next_seen) are missing and are being asked for."""

    first_seq: int
    next_seen: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Notice: a batch came that was applied already."""

    seq: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """Notice: the publisher is another process than before. A Clear follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Notice: a message on the stream's socket was not `[topic, seq, payload]`; made by the shell."""

    reason: str


Instruction: TypeAlias = Apply | Clear | RequestReplay | RequestSnapshot | Gap | Stale | Restarted | Malformed
