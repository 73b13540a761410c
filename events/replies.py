"""What goes over the replay socket in answer to one request, as (seq, payload) pairs in order.

Pure: a reply is an iterator over things that no longer change, so it can be sent in slices between live batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from events.codec import encode_batch
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.replay_buffer import ReplayEntry
from events.resident_set import ResidentBlock, make_snapshot_events
from events.types import Event, EventBatch

ReplyMessage = tuple[int, bytes]

SNAPSHOT_CHUNK_BLOCKS = 1024
"""A snapshot chunk is closed when it holds at least so many blocks."""


def iter_replay(entries: Iterable[ReplayEntry]) -> Iterator[ReplyMessage]:
    """The batches themselves, then the end marker."""
    for entry in entries:
        yield entry.seq, entry.payload()
    yield END_SEQ, b""


def iter_snapshot(
    blocks: list[ResidentBlock],
    last: ReplayEntry | None,
    dp_rank: int | None,
    ts: float,
    chunk_blocks: int = SNAPSHOT_CHUNK_BLOCKS,
) -> Iterator[ReplyMessage]:
    """At least one chunk of the resident set, then `last`, the batch it is true for, as replay would send it, then the
    end marker.

    `last` is None, and left out, where nothing was ever published; the chunk is empty then.
    """
    events: list[Event] = []
    block_count = 0
    for event in make_snapshot_events(blocks):
        if block_count >= chunk_blocks:
            yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
            events, block_count = [], 0
        events.append(event)
        block_count += len(event.block_hashes)
    yield SNAPSHOT_SEQ, encode_batch(EventBatch(ts, events, dp_rank))
    if last is not None:
        yield last.seq, last.payload()
    yield END_SEQ, b""


class Reply:
    """A reply on its way to one peer."""

    __slots__ = ("_messages", "_next", "identity", "progress_at")

    def __init__(self, identity: bytes, messages: Iterator[ReplyMessage], now: float) -> None:
        self.identity = identity
        self.progress_at = now
        """When the peer last took something (monotonic seconds)."""
        self._messages = messages
        self._next: ReplyMessage | None = next(messages, None)

    def peek(self) -> ReplyMessage | None:
        """The message to send next; None at the end."""
        return self._next

    def advance(self, now: float) -> None:
        self._next = next(self._messages, None)
        self.progress_at = now
