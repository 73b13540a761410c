"""Buffer of a stream's last batches, for subscribers that missed some. No I/O.

A batch is encoded at most once, when it is first needed. Invariant: the sequence numbers of the ring are consecutive
and end at `next_seq - 1`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from events.codec import encode_batch
from events.types import Event, EventBatch


class ReplayEntry:
    """One batch of the stream. It is encoded when its bytes are first needed, and keeps them for later replays."""

    __slots__ = ("_dp_rank", "_events", "_payload", "_ts", "seq")

    def __init__(self, seq: int, ts: float, events: Collection[Event], dp_rank: int | None) -> None:
        self.seq = seq
        self._ts = ts
        self._events: Collection[Event] | None = events
        self._dp_rank = dp_rank
        self._payload: bytes | None = None

    def read_events(self) -> list[Event]:
        """Return the events, which are read from their producer once. Not to be called after `encode_payload`."""
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
    """The newest `capacity` batches of a stream, for subscribers that ask for batches they missed."""

    def __init__(self, capacity: int) -> None:
        self._entries: deque[ReplayEntry] = deque(maxlen=capacity)
        self.next_seq = 0

    def append(self, ts: float, events: Collection[Event], dp_rank: int | None) -> ReplayEntry:
        """Append a batch and return its entry. The events are not read yet."""
        entry = ReplayEntry(self.next_seq, ts, events, dp_rank)
        self._entries.append(entry)
        self.next_seq += 1
        return entry

    def list_entries_from(self, start_seq: int) -> list[ReplayEntry]:
        """Return the entries in the ring with `seq >= start_seq`, in order."""
        first_seq = self.next_seq - len(self._entries)
        skip_count = max(0, start_seq - first_seq)
        return list(self._entries)[skip_count:]

    def __len__(self) -> int:
        return len(self._entries)
