"""Types of stream.py: start modes, phases, bounds and instructions.

`Apply` and `Clear` go to the holder of the state, in order; requests go to the shell that owns the replay sockets. All
others are notices that need no action.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class StartMode(enum.Enum):
    """Way in which a stream starts without history."""

    SNAPSHOT = "snapshot"
    """Request a snapshot; if there is none, replay the ring."""
    RING = "ring"
    """Replay the ring from its oldest batch."""
    LIVE = "live"
    """Take live batches only. After a restart or an unrecoverable gap the ring is replayed nevertheless."""


class StreamPhase(enum.Enum):
    LIVE = "live"
    REPAIR = "repair"
    SNAPSHOT = "snapshot"
    REBUILD = "rebuild"


class StreamPosition(NamedTuple):
    """The last applied batch of a stream, after which a restarted subscriber continues."""

    seq: int
    """Number of the batch."""
    payload_digest: int
    """Digest of its bytes (`digest_payload`). If a replay has others, the publisher has restarted and counts anew."""


MAX_EARLY_BATCHES, MAX_EARLY_BYTES = 20_000, 256 << 20
"""Most live batches, and their bytes, that wait for earlier ones."""


@dataclass(frozen=True)
class StreamConfig:
    """Settings for following a stream of events: what its publisher offers, bounds of buffers, and times of retries."""

    start_mode: StartMode = StartMode.SNAPSHOT
    can_replay: bool = True
    """Whether the publisher has a replay endpoint."""
    has_snapshots: bool = False
    """Whether the publisher has a socket that answers snapshots only."""
    max_early_batches: int = MAX_EARLY_BATCHES
    max_early_bytes: int = MAX_EARLY_BYTES
    max_recent_batches: int = 1024
    """Most applied batches whose digests are kept, to tell a repeated batch from one of a restarted publisher."""
    request_timeout_s: float = 5.0
    """Longest wait for the next message of a reply."""
    max_attempts: int = 3
    """Most requests for the same missing batches; then the stream goes on without them."""
    snapshot_retry_s: float = 10.0
    """Seconds until a snapshot is requested again, after missing batches could not be recovered."""
    tail_check_s: float = 1.0
    """Seconds of silence after which the publisher is asked, once, whether it has sent later batches."""

    @property
    def can_recover(self) -> bool:
        """Whether missing batches can be recovered, by a replay or a snapshot."""
        return self.can_replay or self.has_snapshots


class Origin(enum.Enum):
    LIVE = "live"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this payload. `seq` is None for a snapshot chunk."""

    seq: int | None
    payload: bytes
    origin: Origin


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove everything that this stream announced."""

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
class DuplicateBatch:
    """Notice: a batch came that was applied already."""

    seq: int


@dataclass(frozen=True, slots=True)
class PublisherRestarted:
    """Notice: the publisher is another process than before. A Clear follows if anything was applied."""

    reason: str


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """Notice: a message of the stream could not be read or used, or the stream begins anew after an error."""

    reason: str


@dataclass(frozen=True, slots=True)
class DroppedMessages:
    """Notice: so many messages were dropped because too much of the stream waited; made by the shell."""

    count: int


@dataclass(frozen=True, slots=True)
class Connection:
    """Notice: the subscription was connected or lost; made by the shell."""

    up: bool


Instruction: TypeAlias = (
    Apply
    | Clear
    | RequestReplay
    | RequestSnapshot
    | Gap
    | DuplicateBatch
    | PublisherRestarted
    | MalformedMessage
    | DroppedMessages
    | Connection
)
