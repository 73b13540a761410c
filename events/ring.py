"""The last batches of a stream, for subscribers that missed some.

Owns sequence numbers and which batches are still there. Refuses to know sockets and threads; encodes a batch at most
once, when it is first needed. Invariant: the sequence numbers of the ring are consecutive and end at `next_seq - 1`.
"""

from __future__ import annotations

from collections import deque

from events.codec import encode_batch
from events.types import Event, EventBatch


class Entry:
    """One batch of the stream. `payload()` always returns the same bytes, live and replayed."""

    __slots__ = ("_batch", "_payload", "seq")

    def __init__(self, seq: int, batch: EventBatch) -> None:
        self.seq = seq
        self._batch: EventBatch | None = batch
        self._payload: bytes | None = None

    def events(self) -> list[Event]:
        """The batch's events; only until `payload` was called for the first time."""
        assert self._batch is not None, f"events of seq {self.seq} were already encoded"
        return self._batch.events

    def payload(self, legacy: bool = False) -> bytes:
        if self._payload is None:
            assert self._batch is not None
            self._payload = encode_batch(self._batch, legacy)
            self._batch = None
        return self._payload


class Ring:
    """At most `capacity` batches; the oldest leaves when a new one comes. Appending and reading never fail."""

    def __init__(self, capacity: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self.next_seq = 0

    def append(self, batch: EventBatch) -> Entry:
        """Give the batch its sequence number and its place."""
        entry = Entry(self.next_seq, batch)
        self._entries.append(entry)
        self.next_seq += 1
        return entry

    def since(self, start_seq: int) -> list[Entry]:
        """The entries with `seq >= start_seq` that are still here, in order."""
        first = self.next_seq - len(self._entries)
        skip = max(0, start_seq - first)
        return list(self._entries)[skip:]

    def last(self) -> Entry | None:
        return self._entries[-1] if self._entries else None

    def __len__(self) -> int:
        return len(self._entries)
