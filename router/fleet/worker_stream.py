"""Record of one followed event stream: its position, how much of it the index has, and its counters. No I/O."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp.helpers import is_ip_address

from events.codec import decode_batch_rank, read_batch_time
from events.feed_sockets import StreamSource
from events.sources import EventSource, parse_endpoint_host
from events.stream import StreamState
from events.stream_buffers import digest_payload
from events.stream_types import Apply, Origin, StreamConfig, StreamPosition
from router.index.protocol import HolderId, IngestReport

log = logging.getLogger("router")

RESTARTS_LOGGED = 10
"""Restarts of one stream that are all logged; later ones only if their number is a power of two."""
UNREACHABLE_S = 10.0
"""Time without a connection after which an operator is told: ZeroMQ itself tries again silently, for ever."""
PROBLEMS_MAX = 3
"""Messages about malformed events that are kept for `/workers`. All are counted, and the first is logged."""


EVICTIONS_MIN, HELD_SHARE_MIN = 8, 0.5
"""Batches that evict and store before a cache counts as full, and the least share of its peak that it holds then."""


@dataclass(slots=True)
class ObservedCapacity:
    """Estimate of a cache's capacity from its events: the most tokens that it ever held, once it seems to be full.

    That is after EVICTIONS_MIN batches of events that both remove and store blocks. If removals leave less than half of
    the peak, they were not for room, and the count starts again.
    """

    most_tokens: int = 0
    """Peak of the tokens in the cache."""
    evictions: int = 0
    """Batches so far that removed blocks and stored others."""

    @property
    def tokens(self) -> int | None:
        """Capacity in tokens; None while the cache was never full."""
        return self.most_tokens if self.evictions >= EVICTIONS_MIN else None

    def record_batch(self, held_tokens: int, report: IngestReport) -> None:
        """Record a batch of events, after which the cache holds `held_tokens`. `report`: what the batch changed."""
        self.most_tokens = max(self.most_tokens, held_tokens)
        if report.removed and not report.cleared:
            if held_tokens < HELD_SHARE_MIN * self.most_tokens:
                self.evictions = 0
            elif report.stored:
                self.evictions += 1


REPORTED_COUNTERS = (
    "stored", "removed", "cleared", "parked", "unknown_removals", "unknown_copies", "unknown_events", "refused",
)  # fmt: skip
"""Counts of an IngestReport that are summed."""
STREAM_COUNTERS = (
    "batches", "bytes", *REPORTED_COUNTERS, "malformed", "gaps", "restarts", "snapshots", "replayed", "repeated",
    "overflowed", "forgotten",
)  # fmt: skip
"""Counters of a stream since it was first followed, reconnects and restarts included. `forgotten` are blocks of which
there were too many."""


def make_stream_counters() -> Counter[str]:
    """Return the counters of a new stream, all zero."""
    return Counter(dict.fromkeys(STREAM_COUNTERS, 0))


class AppliedBatch(NamedTuple):
    """When a batch was applied."""

    at_s: float | None = None
    """Wall-clock time; None: there was no batch yet."""
    lag_s: float | None = None
    """Time from the making of the batch, by the worker's clock, until then; None if the batch does not tell it."""


_STREAM_NUMBERS = itertools.count()
"""Numbers of streams. No `stream_id` is used twice, so late messages of a replaced stream are told apart."""


@dataclass(slots=True)
class WorkerStream:
    """Record of one followed event stream of a worker's data-parallel rank."""

    worker_id: str
    rank: int
    source: EventSource
    holder: HolderId
    counters: Counter[str]
    is_only_rank: bool
    """Whether the worker has no other rank."""
    blocks_max: int
    """Most blocks that the stream may announce; with more, all of them are forgotten."""
    down_since_s: float | None = field(default_factory=time.monotonic)
    """Monotonic time since which the stream is not connected; None while it is."""
    has_warned: bool = False
    """Whether the log says that the stream cannot be connected."""
    last_seq: int | None = None
    position: StreamPosition | None = None
    """The last applied batch; None if the index does not follow from it exactly."""
    complete_from: int | None = None
    """The index has all batches from this number on; 0: it has all cached blocks; None: it has nothing."""
    position_before_restart: StreamPosition | None = None
    """`position` when the worker died, until a batch shows whether the worker came back as a new process."""
    wrong_rank: int | None = None
    """Data-parallel rank that the batches name, if it is not the one they are followed for."""
    last_event: AppliedBatch = field(default_factory=AppliedBatch)
    """Last live batch."""
    stream_id: str = field(init=False)
    topic: str = field(init=False)
    """Topic under which the worker publishes, as its description or its first message says."""
    stored_since_counted: int = 0
    """Blocks stored since they were last counted."""
    full_cache: ObservedCapacity = field(default_factory=ObservedCapacity)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream_id = f"{self.worker_id}#{self.rank}@{next(_STREAM_NUMBERS)}"
        self.topic = self.source.topic

    def make_successor(self) -> WorkerStream:
        """Return the record of a new stream of this rank. Only its counters go on from where they are."""
        return WorkerStream(
            self.worker_id, self.rank, self.source, self.holder, self.counters, self.is_only_rank, self.blocks_max
        )

    @property
    def is_up(self) -> bool:
        """Whether the stream is connected."""
        return self.down_since_s is None

    def is_unreachable(self, now_s: float) -> bool:
        """Return whether the stream has not been connected for UNREACHABLE_S."""
        return self.down_since_s is not None and now_s - self.down_since_s >= UNREACHABLE_S

    def make_feed_source(self, resume_position: StreamPosition | None = None) -> StreamSource:
        """Return the stream's addresses for the event feed, and the position to start from."""
        source = self.source
        return StreamSource(
            self.stream_id,
            source.endpoint,
            source.replay_endpoint,
            source.topic or None,
            StreamConfig(),
            resume_position,
            source.snapshot_endpoint,
        )

    def record_batch(self, batch: Apply, report: IngestReport) -> None:
        """Record a batch of events that was applied to the index. `report`: what the batch changed there."""
        is_first_batch = self.last_seq is None and self.wrong_rank is None
        if is_first_batch and not self.is_only_rank:
            self._check_rank(decode_batch_rank(batch.payload))
        self._count_batch(batch, report)
        self.record_skipped(report.malformed)

        is_snapshot = batch.seq is None
        if is_snapshot or report.cleared:  # the index has all cached blocks: those of the snapshot, or none
            self.complete_from = 0
        elif self.complete_from is None:  # the first batch: blocks that earlier batches announced are missing
            self.complete_from = batch.seq
        if batch.seq is not None:
            self.last_seq = batch.seq
            self.position = StreamPosition(batch.seq, digest_payload(batch.payload))

    def _count_batch(self, batch: Apply, report: IngestReport) -> None:
        """Add a batch to the counters, and record when a live one came."""
        self.counters.update(batches=1, bytes=len(batch.payload), malformed=report.malformed_events)
        for name in REPORTED_COUNTERS:
            self.counters[name] += getattr(report, name)
        if batch.origin is Origin.LIVE:
            now_s, made_s = time.time(), read_batch_time(batch.payload)
            self.last_event = AppliedBatch(now_s, None if made_s is None else now_s - made_s)
        else:
            self.counters["replayed" if batch.origin is Origin.REPLAY else "snapshots"] += 1

    def _check_rank(self, batch_rank: int | None) -> None:
        """Log an error if the first batch names another data-parallel rank than the one it is followed for."""
        expected = self.source.data_parallel_rank
        if batch_rank not in (None, expected):
            self.wrong_rank = batch_rank
            log.error(
                "worker %s: events of rank %s come from the address of rank %d", self.worker_id, batch_rank, expected
            )

    def detect_new_process(self, origin: Origin) -> bool:
        """Return whether the last batch of events shows that a worker came back as a new process, and count that.

        A new process numbers its batches from 0 again. So a batch with the last number before the worker was lost has
        other bytes, or a live batch has a smaller number. `origin`: whether the last batch came live or by replay.
        """
        position = self.position
        old_position = self.position_before_restart
        if position is None or old_position is None:
            return False
        if position.seq == old_position.seq:
            is_new_process = position.payload_digest != old_position.payload_digest
        else:
            is_new_process = position.seq < old_position.seq and origin is Origin.LIVE
        has_caught_up = position.seq >= old_position.seq
        if is_new_process or has_caught_up:
            self.position_before_restart = None  # later batches need no such check
        if is_new_process:
            self.counters["restarts"] += 1
            log.info("worker %s rank %d came back as another process", self.worker_id, self.rank)
        return is_new_process

    def count_restart(self, reason: str) -> None:
        """Count and log a restart of the publisher. Two publishers of one topic look like restarts without end."""
        self.counters["restarts"] += 1
        count = self.counters["restarts"]
        if count <= RESTARTS_LOGGED or count.bit_count() == 1:
            log.info("worker %s rank %d restarted (restart %d): %s", self.worker_id, self.rank, count, reason)

    def record_skipped(self, reasons: Iterable[str]) -> None:
        """Keep the reasons for which events were skipped, and log the first."""
        for reason in reasons:
            if not self.problems:
                log.warning("worker %s rank %d: malformed event skipped: %s", self.worker_id, self.rank, reason)
            if len(self.problems) < PROBLEMS_MAX:
                self.problems.append(reason)

    def to_json(self, state: StreamState | None, groups: list[dict[str, object]]) -> dict[str, Any]:
        """Return the stream as JSON values for `/workers`. `groups`: block groups that the index has of it."""
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
            "last_event_s": self.last_event.at_s,
            "last_event_lag_s": self.last_event.lag_s,
            **self.counters,
            "problems": list(self.problems),
            "groups": groups,
        }


def make_address(source: EventSource, holder: HolderId) -> tuple[str | HolderId | None, ...]:
    """Return where a stream is read from and for whom; with another address, a new stream has to be followed.

    Another publisher behind a host's name may have another IP address, and a connection would stay with the old one.
    """
    host = parse_endpoint_host(source.endpoint)
    epoch = None if host is None or is_ip_address(host) else source.epoch
    return source.endpoint, source.replay_endpoint, source.snapshot_endpoint, source.topic, holder, epoch
