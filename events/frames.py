"""The ZeroMQ frames around a payload: live messages, replay requests and replies, the snapshot extension.

Owns the byte layout of every message; sockets and meaning are elsewhere. docs/reference/wire-format.md has the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from events.types import DecodeError

SEQ_BYTES = 8
PUBLISHER_ID_BYTES = 16
"""Length of a publisher id, which may follow the sequence number (vLLM with snapshots): another id is another
process."""
SNAPSHOT_REQUEST_FRAMES = [b"", b"snapshot"]
"""Request that a DEALER sends to a socket that answers snapshots only."""
END_SEQ = 2**64 - 1
"""Sequence number of the marker that ends every reply; its payload is empty."""
SNAPSHOT_SEQ = 2**64 - 2
"""Number that stands for a snapshot of the resident set: as `start_seq` of a request it asks for a snapshot, as the
number of a reply it marks a chunk of the snapshot."""

MAX_REQUEST_BYTES = 64 << 10
"""Longest message to a publisher: a replay request, or a topic that is subscribed to."""
MAX_HANDSHAKE_MS = 3_000
"""Longest ZeroMQ handshake before a connection is closed, as it holds a descriptor (ZeroMQ's default: 30 s)."""
MAX_UNACKNOWLEDGED_MS = 120_000
"""Longest time in which a subscriber's machine acknowledges nothing, before the kernel closes the connection and its
queue of messages is freed (the kernel's default: some 15 minutes). A machine whose subscriber reads nothing counts
too, so this is longer than any snapshot takes to apply."""


class LiveMessage(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes
    publisher_id: bytes = b""
    """Id of the publisher's process; empty if it sends none."""


class ReplyMessage(NamedTuple):
    seq: int
    payload: bytes
    publisher_id: bytes = b""

    @property
    def is_end(self) -> bool:
        return self.seq == END_SEQ


def pack_seq(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")


class SnapshotMessage(NamedTuple):
    """Answer of a snapshot socket."""

    last_seq: int | None
    """Batch after which the chunks are true, -1 before the first; None: there is no snapshot now."""
    publisher_id: bytes
    chunks: Sequence[bytes]
    """Payloads of the chunks, each a batch."""


def _parse_seq(frame: bytes) -> tuple[int, bytes]:
    """Split a sequence frame into the sequence number and the publisher id. Raises DecodeError."""
    if len(frame) not in (SEQ_BYTES, SEQ_BYTES + PUBLISHER_ID_BYTES):
        raise DecodeError(
            f"sequence frame: expected {SEQ_BYTES} bytes, or {SEQ_BYTES + PUBLISHER_ID_BYTES} with a publisher id, "
            f"got {len(frame)}: {frame[:16]!r}"
        )
    return int.from_bytes(frame[:SEQ_BYTES], "big"), frame[SEQ_BYTES:]


def parse_live_message(frames: Sequence[bytes]) -> LiveMessage:
    """Parse the frames of a live message, `[topic, seq, payload]`. Raises DecodeError for any other shape."""
    if len(frames) != 3:
        raise DecodeError(f"live message: expected 3 frames (topic, seq, payload), got {len(frames)}")
    seq, publisher_id = _parse_seq(frames[1])
    return LiveMessage(frames[0], seq, frames[2], publisher_id)


def build_replay_request(start_seq: int) -> list[bytes]:
    """Build the frames that a DEALER sends to ask for replay from `start_seq`, or for a snapshot (SNAPSHOT_SEQ)."""
    return [b"", pack_seq(start_seq)]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Parse the request that a ROUTER received, `[identity, "", start_seq]`, into (peer identity, start_seq). Raises
    DecodeError."""
    if len(frames) != 3 or frames[1]:
        raise DecodeError(f"replay request: expected frames identity, empty, start_seq; got {len(frames)} frames")
    return frames[0], _parse_seq(frames[2])[0]


def build_reply_frames(peer_identity: bytes, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Build the frames of one reply of the ROUTER, with the topic, as current vLLM does."""
    return [peer_identity, b"", topic, pack_seq(seq), payload]


def parse_reply_message(frames: Sequence[bytes]) -> ReplyMessage:
    """Parse a reply that a DEALER received: `["", topic, seq, payload]`, or without the topic (older vLLM). Raises
    DecodeError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise DecodeError(f"replay reply: expected frames empty, (topic,) seq, payload; got {len(frames)} frames")
    seq, publisher_id = _parse_seq(frames[-2])
    return ReplyMessage(seq, frames[-1], publisher_id)


def parse_snapshot_message(frames: Sequence[bytes]) -> SnapshotMessage:
    """Parse the answer of a snapshot socket: the sequence number (signed), the publisher id, and the chunks.

    A DEALER receives an empty frame before these. Raises DecodeError for any other shape.
    """
    if frames and not frames[0]:
        frames = frames[1:]
    if len(frames) < 2 or len(frames[0]) != SEQ_BYTES or len(frames[1]) != PUBLISHER_ID_BYTES:
        raise DecodeError(
            f"snapshot: expected frames of {SEQ_BYTES} and {PUBLISHER_ID_BYTES} bytes, then chunks; "
            f"got {[len(frame) for frame in frames[:4]]}"
        )
    last_seq = int.from_bytes(frames[0], "big", signed=True)
    return SnapshotMessage(None if last_seq < -1 else last_seq, frames[1], frames[2:])
