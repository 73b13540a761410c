"""Batches that subscribers missed: the buffer of a stream's last batches, and the replies of the replay socket. No I/O.

A batch is encoded at most once, when it is first needed. A reply iterates over values that do not change, so that it
can be sent in slices between live batches. Invariant: the sequence numbers of the buffer are consecutive and end at
`next_seq - 1`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from events.codec import encode_batch
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.resident_set import ResidentBlock, make_snapshot_events
from events.types import Event, EventBatch

SeqAndPayload = tuple[int, bytes]

BLOCKS_PER_SNAPSHOT_CHUNK = 1024
"""Blocks after which a snapshot chunk is closed."""


class ReplayEntry:
    """One published batch of events. It is encoded when first needed, and keeps the bytes to be sent again later."""

    __slots__ = ("_dp_rank", "_events", "_payload", "_ts", "seq")

    def __init__(self, seq: int, ts: float, events: Collection[Event], dp_rank: int | None) -> None:
        self.seq = seq
        self._ts = ts
        self._events: Collection[Event] | None = events
        self._dp_rank = dp_rank
        self._payload: bytes | None = None

    def read_events(self) -> list[Event]:
        """Return the events; the first call reads them from their producer. Must not follow `encode_payload`."""
        assert self._events is not None, f"events of seq {self.seq} were already encoded"
        if not isinstance(self._events, list):
            self._events = list(self._events)
        return self._events

    def encode_payload(self) -> bytes:
        """Return the encoded batch. The first call reads the events and then drops them."""
        if self._payload is None:
            self._payload = encode_batch(EventBatch(self._ts, self.read_events(), self._dp_rank))
            self._events = None
        return self._payload


class ReplayBuffer:
    """Ring buffer of a stream's newest `capacity` batches, for subscribers that ask for batches they missed."""

    def __init__(self, capacity: int) -> None:
        self._entries: deque[ReplayEntry] = deque(maxlen=capacity)
        self.next_seq = 0
        """Sequence number of the next batch."""

    def append(self, ts: float, events: Collection[Event], dp_rank: int | None) -> ReplayEntry:
        """Append a batch and return its entry. The events are not read yet."""
        entry = ReplayEntry(self.next_seq, ts, events, dp_rank)
        self._entries.append(entry)
        self.next_seq += 1
        return entry

    def list_entries_from(self, start_seq: int) -> list[ReplayEntry]:
        """Return the buffered batches with `seq >= start_seq`, in order."""
        first_seq = self.next_seq - len(self._entries)
        skipped_count = max(0, start_seq - first_seq)
        return list(self._entries)[skipped_count:]

    def __len__(self) -> int:
        return len(self._entries)


def iter_replay(entries: Iterable[ReplayEntry]) -> Iterator[SeqAndPayload]:
    """Yield the batches, then the end marker."""
    for entry in entries:
        yield entry.seq, entry.encode_payload()
    yield END_SEQ, b""


def iter_snapshot(
    blocks: list[ResidentBlock], last_entry: ReplayEntry | None, dp_rank: int | None, ts: float
) -> Iterator[SeqAndPayload]:
    """Yield the messages that tell a subscriber which blocks are cached: chunks of `blocks`, then the end marker.

    Before the end marker comes `last_entry`, the batch after which the snapshot was taken: the subscriber goes on after
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
    if last_entry is not None:
        yield last_entry.seq, last_entry.encode_payload()
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
