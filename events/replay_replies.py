"""Replies of the replay socket: batches that a subscriber missed, or a snapshot of the resident set. No I/O.

A reply iterates over values that do not change, so that it can be sent in slices between live batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from events.codec import encode_batch
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.resident_set import ResidentBlock, make_snapshot_events
from events.types import Event, EventBatch

SeqAndPayload = tuple[int, bytes]

BLOCKS_PER_SNAPSHOT_CHUNK = 1024
"""Blocks after which a snapshot chunk is closed."""


def iter_replay(batches: Iterable[SeqAndPayload], start_seq: int) -> Iterator[SeqAndPayload]:
    """Yield the batches from `start_seq` on, then the end marker. The batches are read at the first `next`."""
    yield from [batch for batch in batches if batch[0] >= start_seq]
    yield END_SEQ, b""


def iter_snapshot(
    blocks: list[ResidentBlock], last_batch: SeqAndPayload | None, dp_rank: int | None, ts: float
) -> Iterator[SeqAndPayload]:
    """Yield the messages that tell a subscriber which blocks are cached: chunks of `blocks`, then the end marker.

    Before the end marker comes `last_batch`, the batch after which the snapshot was taken: the subscriber goes on after
    its sequence number. None: nothing was published yet. There is at least one chunk, which may be empty.
    """
    events: list[Event] = []
    block_count = 0
    for event in make_snapshot_events(blocks):
        if block_count >= BLOCKS_PER_SNAPSHOT_CHUNK:
            yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
            events, block_count = [], 0
        events.append(event)
        block_count += len(event.block_hashes)
    yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
    if last_batch is not None:
        yield last_batch
    yield END_SEQ, b""


@dataclass(slots=True)
class Reply:
    """Reply of a publisher to one subscriber, which is sent message by message."""

    identity: bytes
    """ZeroMQ routing id of the subscriber."""
    messages: Iterator[SeqAndPayload]
    """Messages after `next_message`."""
    progress_at: float
    """Time at which the subscriber last took a message, in monotonic seconds."""
    next_message: SeqAndPayload | None = None
    """Sequence number and payload of the message to send next; None at the end."""

    def __post_init__(self) -> None:
        self.next_message = next(self.messages, None)

    def advance(self, now: float) -> None:
        """Go to the next message, because the subscriber took this one."""
        self.next_message = next(self.messages, None)
        self.progress_at = now
