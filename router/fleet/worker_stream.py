"""One followed stream of a worker: where it is, how far the index has come with it, and what it brought.

Refuses to know the index and the sockets: feed.py moves what is said here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from events.feed_sockets import StreamSource
from events.sources import EventSource
from events.stream import StreamState
from events.stream_types import Origin, StreamConfig
from router.index.protocol import HolderId, IngestReport

log = logging.getLogger("router")

PROBLEMS_MAX = 3
"""Messages about malformed events kept for `/workers`; all are counted, the first is logged."""


EVICTIONS_MIN, HELD_SHARE_MIN = 8, 0.5
"""After so many batches that evict and store, of a cache that holds at least such a share of the most it ever held."""


@dataclass(slots=True)
class ObservedCapacity:
    """How many tokens a cache holds that does not tell: the most that it ever held, once it is full. It is full where
    it evicts to make room for what it stores; a removal alone (an operator's, one by age) tells nothing, and one that
    empties half of it shows that it removes for other reasons than room."""

    most_tokens: int = 0
    evictions: int = 0

    @property
    def tokens(self) -> int | None:
        """Its capacity as far as it was seen; None while it was not full."""
        return self.most_tokens if self.evictions >= EVICTIONS_MIN else None

    def record_batch(self, held_tokens: int, report: IngestReport) -> None:
        """A batch came, and it holds so much now."""
        self.most_tokens = max(self.most_tokens, held_tokens)
        if report.removed and not report.cleared:
            if held_tokens < HELD_SHARE_MIN * self.most_tokens:
                self.evictions = 0
            elif report.stored:
                self.evictions += 1


@dataclass(slots=True)
class StreamCounters:
    """What one stream brought since it was first followed; sums go on over reconnects and restarts."""

    batches: int = 0
    bytes: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    parked: int = 0
    unknown_removals: int = 0
    unknown_copies: int = 0
    unknown_events: int = 0
    refused: int = 0
    malformed: int = 0
    gaps: int = 0
    restarts: int = 0
    snapshots: int = 0
    replayed: int = 0
    overflowed: int = 0
    forgotten: int = 0
    """Blocks forgotten because there were too many."""

    def record_batch(self, size: int, report: IngestReport) -> None:
        """A batch of `size` bytes was ingested."""
        self.batches += 1
        self.bytes += size
        self.malformed += report.malformed_events
        for name in _REPORT_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(report, name))


_REPORT_FIELDS = [name for name in IngestReport.__slots__ if name in StreamCounters.__slots__ and name != "malformed"]


@dataclass(slots=True)
class WorkerStream:
    """One of the followed streams. `stream_id` is used once, so a stream that replaces another is told apart."""

    worker_id: str
    rank: int
    source: EventSource
    holder: HolderId
    stream_id: str
    counters: StreamCounters
    is_only_rank: bool
    """The worker has no other rank."""
    is_up: bool = False
    last_seq: int | None = None
    position: tuple[int, int] | None = None
    """(seq, digest) of the last batch applied, while the index holds exactly what follows from it."""
    complete_from: int | None = None
    """What the index holds follows from this batch and all later ones; 0: it is all that is resident. None: nothing."""
    position_before_restart: tuple[int, int] | None = None
    """`position` when the worker died, until what it sends next tells whether it is another process."""
    wrong_rank: int | None = None
    """The data-parallel rank that its batches name, where it is not the one they are followed for."""
    last_event_s: float | None = None
    """Wall clock of the last live batch's arrival."""
    topic: str = ""
    blocks_max: int = 1 << 24
    """Blocks that it may announce; with more everything it announced is forgotten."""
    stored_since: int = 0
    """Blocks stored since they were last counted."""
    full_cache: ObservedCapacity = field(default_factory=ObservedCapacity)
    problems: list[str] = field(default_factory=list)

    def has_same_address(self, source: EventSource, holder: HolderId) -> bool:
        """Whether following `source` for `holder` would change nothing but the epoch."""
        old, new = ((s.endpoint, s.replay_endpoint, s.snapshot_endpoint, s.topic) for s in (self.source, source))
        return old == new and self.holder == holder

    def feed_source(self, resume: tuple[int, int] | None = None) -> StreamSource:
        """Where the feed finds it."""
        source = self.source
        return StreamSource(
            self.stream_id,
            source.endpoint,
            source.replay_endpoint,
            source.topic or None,
            StreamConfig(),
            resume,
            source.snapshot_endpoint,
        )

    def check_rank(self, batch_rank: int | None) -> None:
        """What its first batch says: of another rank, all that is decided by it goes to the wrong engine."""
        expected = self.source.data_parallel_rank
        if batch_rank not in (None, expected) and self.wrong_rank is None:
            log.error(
                "worker %s: events of rank %s come from the address of rank %d", self.worker_id, batch_rank, expected
            )
            self.wrong_rank = batch_rank

    def is_another_process(self, seq: int, digest: int, origin: Origin) -> bool:
        """Whether this batch shows that the worker that died came back as another process."""
        if self.position_before_restart is None:
            return False
        last_seq, last_digest = self.position_before_restart
        is_other = digest != last_digest if seq == last_seq else seq < last_seq and origin is Origin.LIVE
        if is_other or seq >= last_seq:
            self.position_before_restart = None
        return is_other

    def record_skipped(self, reasons: Iterable[str]) -> None:
        """Why something of it was skipped."""
        for reason in reasons:
            if not self.problems:
                log.warning("worker %s rank %d: malformed event skipped: %s", self.worker_id, self.rank, reason)
            if len(self.problems) < PROBLEMS_MAX:
                self.problems.append(reason)

    def to_json(self, state: StreamState | None, groups: list[dict[str, object]]) -> dict[str, Any]:
        """For `/workers`."""
        return {
            "rank": self.rank,
            "endpoint": self.source.endpoint,
            "replay_endpoint": self.source.replay_endpoint,
            "topic": self.topic,
            "epoch": self.source.epoch,
            "wrong_rank": self.wrong_rank,
            "reannounces": self.source.reannounces,
            "up": self.is_up,
            "phase": state.phase.value if self.is_up and state is not None else "disconnected",
            "last_seq": self.last_seq,
            "last_event_s": self.last_event_s,
            **{name: getattr(self.counters, name) for name in StreamCounters.__slots__},
            "problems": list(self.problems),
            "groups": groups,
        }
