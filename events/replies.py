"""Replies of the replay socket, as (seq, payload) pairs in order. No I/O.

A reply iterates over values that do not change, so that it can be sent in slices between live batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from events.codec import encode_batch
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.replay_buffer import ReplayEntry
from events.resident_set import ResidentBlock, make_snapshot_events
from events.types import Event, EventBatch

SeqAndPayload = tuple[int, bytes]

BLOCKS_PER_SNAPSHOT_CHUNK = 1024
"""Blocks after which a snapshot chunk is closed."""


def iter_replay(entries: Iterable[ReplayEntry]) -> Iterator[SeqAndPayload]:
    """Yield the batches, then the end marker."""
    for entry in entries:
        yield entry.seq, entry.encode_payload()
    yield END_SEQ, b""


def iter_snapshot(
    blocks: list[ResidentBlock],
    last_entry: ReplayEntry | None,
    dp_rank: int | None,
    ts: float,
    blocks_per_chunk: int = BLOCKS_PER_SNAPSHOT_CHUNK,
) -> Iterator[SeqAndPayload]:
    """Yield the messages of a snapshot: at least one chunk of blocks, the last applied batch, and the end marker.

    `last_entry` is the batch after which the snapshot was taken. The subscriber continues after its sequence number.
    None means that nothing was published yet; then the snapshot has no such batch.
    """
    events: list[Event] = []
    block_count = 0
    for event in make_snapshot_events(blocks):
        if block_count >= blocks_per_chunk:
            yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
            events, block_count = [], 0
        events.append(event)
        block_count += len(event.block_hashes)
    yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
    if last_entry is not None:
        yield last_entry.seq, last_entry.encode_payload()
    yield END_SEQ, b""


class Reply:
    """A reply that is being sent to one peer, message by message. `identity` is the peer's ZeroMQ routing id."""

    __slots__ = ("_messages", "_next_message", "identity", "progress_at")

    def __init__(self, identity: bytes, messages: Iterator[SeqAndPayload], now: float) -> None:
        self.identity = identity
        self.progress_at = now
        """Time of the peer's last progress, in monotonic seconds."""
        self._messages = messages
        self._next_message: SeqAndPayload | None = next(messages, None)

    def peek(self) -> SeqAndPayload | None:
        """Return the message to send next; None at the end."""
        return self._next_message

    def advance(self, now: float) -> None:
        self._next_message = next(self._messages, None)
        self.progress_at = now
