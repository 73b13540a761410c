"""Applies the event streams of workers to the prefix index: each stream, in order, to the holder of its rank.

This module knows which streams are followed (worker_stream.py has their records). events/feed.py owns the sockets, the
thread and the replay after gaps. `handle` runs on the feed's thread, everything else on the caller's. A lock keeps a
forgotten stream from writing into a holder that was removed. No stream id is used twice, so late messages of a replaced
stream are dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from events.codec import decode_batch_rank
from events.feed import EventFeed
from events.feed_sockets import StreamSource
from events.sources import EventSource
from events.stream_buffers import digest_payload
from events.stream_types import (
    Apply,
    Clear,
    DroppedMessages,
    Gap,
    Instruction,
    MalformedMessage,
    Origin,
    PublisherRestarted,
)
from router.fleet.fact_queue import CacheCleared, CapacityObserved, StreamLost, WorkerFact
from router.fleet.worker_stream import ObservedCapacity, StreamCounters, WorkerStream
from router.index.protocol import DumpTask, HolderId, IngestReport, IngestTask, PrefixIndex

log = logging.getLogger("router")

SNAPSHOT_VERSION = 2
SNAPSHOT_S_MAX = 60.0
COUNT_EVERY, MEASURE_EVERY = 1 << 14, 1 << 17
"""Blocks stored after which the blocks of a stream are counted, and after which the index is measured."""
UNSLICED_BYTES_MAX = 64 << 10
"""Longest payload that is applied at once; longer ones are applied in slices, in turn with other streams."""


class PeerSnapshot(msgspec.Struct, array_like=True):
    """State of one event stream that a router sends to another one (peer_snapshots.py)."""

    version: int
    seq: int
    digest: int
    """Digest of the payload of batch `seq`, as made by events.stream."""
    complete_from: int
    """The snapshot has every batch from this one to `seq`; 0: it has all resident blocks."""
    chunks: list[bytes]
    """Payloads for an index with the same seed."""


class IndexFeed:
    """Follows the event streams of many workers and applies them to an index."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        report: Callable[[WorkerFact], None] = lambda fact: None,
        streams_max: int = 16_384,
        index_bytes_max: int = 8 << 30,
    ) -> None:
        """`report` is called with each fact about a worker, in order, on the thread that learns it."""
        self._max_streams = streams_max
        self._index_bytes_max = index_bytes_max
        self._blocks_stored_since_measured = 0
        """Blocks stored since the index was last measured."""
        self._index = index
        self._report = report
        self._lock = threading.Lock()
        self._stream_by_id: dict[str, WorkerStream] = {}
        self._streams_by_worker: dict[str, list[WorkerStream]] = {}
        self._counters: dict[tuple[str, int], StreamCounters] = {}
        """Counters by (worker, rank), kept while the worker is followed."""
        self._stream_generation = itertools.count()
        self.events = EventFeed(self)

    # The caller's thread -------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.events.start()

    def close(self) -> None:
        self.events.close()

    def bind(self, endpoint: str) -> str:
        """Listen for publishers that connect to this router, and return the bound address.

        A publisher is known by its topic: that of a followed stream, or `kv@NAME...`, where NAME is the worker's id or
        host. Raises zmq.ZMQError if the endpoint cannot be bound.
        """
        return self.events.bind(endpoint, self._find_stream)

    def follow(
        self,
        worker_id: str,
        sources: Sequence[EventSource],
        holders: Sequence[HolderId],
        snapshots: Mapping[int, PeerSnapshot] | None = None,
        blocks_max: int = 1 << 24,
    ) -> None:
        """Follow `sources[rank]` for `holders[rank]`, in place of the streams followed before.

        Streams whose address and holder stay are followed on. A rank with an entry in `snapshots` starts from that
        state of another router, if the worker's replay confirms it. `blocks_max` is the number of blocks that each rank
        may announce.
        """
        streams = self._streams_by_worker.get(worker_id, [])
        sources_with_holders = list(zip(sources, holders))
        if len(streams) == len(sources_with_holders) and all(
            s.has_same_address(source, h) for s, (source, h) in zip(streams, sources_with_holders)
        ):
            for stream, (source, _) in zip(streams, sources_with_holders):
                stream.source, stream.blocks_max = source, blocks_max
                self._declare_groups(stream)
            return
        self._stop_streams(worker_id)
        for stream in streams:
            self._clear_and_report(stream)  # the new stream starts from nothing and sends no Clear of its own
        self._streams_by_worker[worker_id] = [
            self._start_stream(
                worker_id,
                rank,
                source,
                holder,
                (snapshots or {}).get(rank),
                is_only_rank=len(sources_with_holders) == 1,
            )
            for rank, (source, holder) in enumerate(sources_with_holders)
        ]
        for stream in self._streams_by_worker[worker_id]:
            stream.blocks_max = blocks_max
        self.events.rematch_topics()

    def count_free_streams(self, worker_id: str) -> int:
        """Return how many streams of this worker can be followed."""
        return self._max_streams - sum(
            len(streams) for name, streams in self._streams_by_worker.items() if name != worker_id
        )

    def forget(self, worker_id: str) -> None:
        """Stop listening to a worker."""
        self._stop_streams(worker_id)
        self._streams_by_worker.pop(worker_id, None)
        for key in [key for key in self._counters if key[0] == worker_id]:
            del self._counters[key]

    def clear_worker(self, worker_id: str) -> None:
        """Forget a worker's cached blocks, because it gave its memory back and may not have said so.

        Its streams are followed on from where they are.
        """
        for stream in self._streams_by_worker.get(worker_id, []):
            with self._lock:
                self._clear_and_report(stream)
                stream.complete_from = 0  # what comes now is all there is

    def restart_streams(self, worker_id: str) -> None:
        """Forget the blocks of a worker that died.

        When its streams come back, they start from a snapshot or from the worker's replay buffer.
        """
        streams = self._streams_by_worker.get(worker_id, [])
        positions = [stream.position or stream.position_before_restart for stream in streams]
        self._stop_streams(worker_id)
        for stream in streams:
            self._clear(stream)
        self._streams_by_worker[worker_id] = [
            self._start_stream(worker_id, s.rank, s.source, s.holder, is_only_rank=s.is_only_rank) for s in streams
        ]
        for stream, position in zip(self._streams_by_worker[worker_id], positions):
            stream.position_before_restart = position
        self.events.rematch_topics()

    def find_incomplete_ranks(self, worker_id: str) -> dict[int, int]:
        """Return the ranks with unknown earlier blocks, and the first batch known of each.

        A rank is incomplete after a gap that its worker's replay did not cover, after a reconnect, or after a late
        start. Left out are ranks which offer a snapshot of their own, or which have no replay to confirm another
        router's.
        """
        if not self.is_synced(worker_id):
            return {}
        return {
            stream.rank: (stream.last_seq or 0) + 1 if stream.complete_from is None else stream.complete_from
            for stream in self._streams_by_worker[worker_id]
            if stream.last_seq is not None
            and stream.complete_from != 0
            and stream.source.replay_endpoint is not None
            and not stream.source.snapshot
            and stream.source.snapshot_endpoint is None
        }

    def resume(self, worker_id: str, rank: int, snapshot: PeerSnapshot) -> bool:
        """Restart a stream from another router's snapshot; False if that has no earlier batches than are known.

        The stream is followed from the snapshot's batch on. If the worker's replay does not begin with that batch, the
        snapshot is dropped and the whole replay buffer is read, so the index stays exact.
        """
        if snapshot.complete_from >= self.find_incomplete_ranks(worker_id).get(rank, 0):
            return False
        streams = self._streams_by_worker[worker_id]
        old_stream = streams[rank]
        self.events.remove(old_stream.stream_id)
        with self._lock:
            self._stream_by_id.pop(old_stream.stream_id, None)
        self._clear_and_report(old_stream)
        streams[rank] = self._start_stream(
            worker_id, rank, old_stream.source, old_stream.holder, snapshot, is_only_rank=old_stream.is_only_rank
        )
        return True

    # Seeing --------------------------------------------------------------------------------------------------------
    def count_stored_blocks(self, worker_id: str) -> int:
        """Return how many blocks the worker has announced so far."""
        return sum(stream.counters.stored for stream in self._streams_by_worker.get(worker_id, []))

    def list_unreachable_endpoints(self, worker_id: str) -> list[str]:
        """Return the endpoints of a worker's streams that have not been connected for UNREACHABLE_S."""
        now_s = time.monotonic()
        return [s.source.endpoint for s in self._streams_by_worker.get(worker_id, []) if s.is_unreachable(now_s)]

    def warn_of_unreachable_streams(self, worker_id: str) -> None:
        """Log the streams of a worker that have not been connected for UNREACHABLE_S, each once."""
        now_s = time.monotonic()
        for stream in self._streams_by_worker.get(worker_id, []):
            if stream.is_unreachable(now_s) and not stream.has_warned:
                stream.has_warned = True
                log.warning(
                    "worker %s: no events can be read from %s: is it the worker's address, and is the port open from "
                    "here?",
                    worker_id,
                    stream.source.endpoint,
                )

    def make_snapshot(self, worker_id: str, rank: int) -> PeerSnapshot | None:
        """Return the state of a stream for another router; None if this router has not caught up with it.

        Waits while the feed's thread writes the snapshot slice by slice, in turn with other streams.
        """
        streams = self._streams_by_worker.get(worker_id, [])
        if rank >= len(streams) or not self.is_synced(worker_id):
            return None
        stream = streams[rank]
        dump: DumpTask | None = None
        chunks: list[bytes] = []
        results: SimpleQueue[PeerSnapshot | None] = SimpleQueue()

        def make_next_slice() -> bool:
            nonlocal dump
            with self._lock:
                if (
                    stream.position is None
                    or stream.complete_from is None
                    or stream.stream_id not in self._stream_by_id
                ):
                    results.put(None)
                    return False
                try:
                    dump = dump or self._index.begin_dump(stream.holder)
                    if (new_chunks := dump.step()) is not None:
                        chunks.extend(new_chunks)
                        return True
                except KeyError:  # gone, or cleared by another thread
                    results.put(None)
                else:
                    results.put(PeerSnapshot(SNAPSHOT_VERSION, *stream.position, stream.complete_from, chunks))
            return False

        self.events.schedule_work(stream.stream_id, make_next_slice)
        deadline_s = time.monotonic() + SNAPSHOT_S_MAX
        while time.monotonic() < deadline_s and stream.position is not None:
            with contextlib.suppress(Empty):
                return results.get(timeout=0.1)
        return None

    def describe_streams(self, worker_id: str) -> dict[str, Any]:
        """Return the state of a worker's streams, for `/workers`."""
        streams = self._streams_by_worker.get(worker_id, [])
        return {
            "streams": [
                s.to_json(self.events.get_stream_state(s.stream_id), self._get_groups(s.holder)) for s in streams
            ]
        }

    def sum_counters(self) -> dict[str, dict[str, int]]:
        """Return the counters of each worker, summed over its ranks, for `/metrics`."""
        sums_by_worker: dict[str, dict[str, int]] = {}
        for worker_id, streams in list(self._streams_by_worker.items()):
            sums = sums_by_worker.setdefault(worker_id, dict.fromkeys(StreamCounters.__slots__, 0))
            for stream in streams:
                for name in sums:
                    sums[name] += getattr(stream.counters, name)
        return sums_by_worker

    def is_synced(self, worker_id: str) -> bool:
        """Return whether every stream of the worker is connected and has caught up."""
        streams = self._streams_by_worker.get(worker_id, [])
        return bool(streams) and all(
            s.is_up and (state := self.events.get_stream_state(s.stream_id)) is not None and state.phase.value == "live"
            for s in streams
        )

    def _get_groups(self, holder: HolderId) -> list[dict[str, object]]:
        try:
            return self._index.groups(holder)
        except KeyError:
            return []

    # Changing what is followed -------------------------------------------------------------------------------------
    def _start_stream(
        self,
        worker_id: str,
        rank: int,
        source: EventSource,
        holder: HolderId,
        snapshot: PeerSnapshot | None = None,
        *,
        is_only_rank: bool,
    ) -> WorkerStream:
        stream_id = f"{worker_id}#{rank}@{next(self._stream_generation)}"
        counters = self._counters.setdefault((worker_id, rank), StreamCounters())
        stream = WorkerStream(
            worker_id, rank, source, holder, stream_id, counters, is_only_rank, time.monotonic(), topic=source.topic
        )
        self._declare_groups(stream)
        self._report_capacity(stream)
        with self._lock:
            self._stream_by_id[stream_id] = stream
        self.events.add(stream.make_feed_source(self._apply_snapshot(stream, snapshot)))
        return stream

    def _apply_snapshot(self, stream: WorkerStream, snapshot: PeerSnapshot | None) -> tuple[int, int] | None:
        """Apply another router's snapshot; return the position that the worker has to confirm, if any."""
        if snapshot is None:
            return None
        for chunk in snapshot.chunks:
            report = self._index.ingest(stream.holder, chunk)
            stream.counters.snapshots += 1
            if report.malformed:
                log.warning("worker %s: a peer's snapshot is not used: %s", stream.worker_id, report.malformed[0])
                self._clear(stream)
                return None
        stream.position = (snapshot.seq, snapshot.digest)
        stream.last_seq, stream.complete_from = snapshot.seq, snapshot.complete_from
        return stream.position

    def _declare_groups(self, stream: WorkerStream) -> None:
        self._index.set_reannounces(stream.holder, stream.source.reannounces)
        if stream.source.groups:
            self._index.declare_groups(stream.holder, [msgspec.structs.asdict(g) for g in stream.source.groups])

    def _stop_streams(self, worker_id: str) -> None:
        for stream in self._streams_by_worker.get(worker_id, []):
            self.events.remove(stream.stream_id)
            with self._lock:
                self._stream_by_id.pop(stream.stream_id, None)

    def _report_cleared(self, stream: WorkerStream) -> None:
        self._report(CacheCleared(stream.worker_id, stream.rank, time.monotonic()))

    def _report_capacity(self, stream: WorkerStream) -> None:
        self._report(CapacityObserved(stream.worker_id, stream.rank, stream.full_cache.tokens))

    def _clear_and_report(self, stream: WorkerStream) -> None:
        self._clear(stream)
        self._report_cleared(stream)

    def _clear(self, stream: WorkerStream) -> None:
        stream.position = stream.complete_from = None
        try:
            self._index.clear(stream.holder)
        except KeyError:
            log.debug("holder of %s is gone already", stream.stream_id)

    def _find_stream(self, topic: str) -> StreamSource | None:
        """Return the stream that a publisher's topic names. Called on the feed's thread."""
        with self._lock:
            streams = list(self._stream_by_id.values())
        topic_names = topic.split("@")[1:2]
        for stream in streams:
            host = stream.worker_id.rpartition(":")[0]
            if stream.source.topic == topic or (topic_names and topic_names[0] in (stream.worker_id, host)):
                stream.topic = topic
                return stream.make_feed_source()
        return None

    def _enforce_limits(self, stream: WorkerStream, stored_blocks: int) -> None:
        """Forget the blocks of a stream that has too many, or of the largest one if the index is full.

        Counting and measuring are slow, so they are done only after many stored blocks.
        """
        stream.stored_since_counted += stored_blocks
        if stream.stored_since_counted >= min(COUNT_EVERY, stream.blocks_max):
            stream.stored_since_counted = 0
            if self._count_blocks(stream) > stream.blocks_max:
                self._drop_blocks(stream, f"more than {stream.blocks_max} blocks, which its cache cannot hold")
        self._blocks_stored_since_measured += stored_blocks
        if self._blocks_stored_since_measured >= MEASURE_EVERY:
            self._blocks_stored_since_measured = 0
            if self._index.stats().memory_bytes > self._index_bytes_max:
                streams = list(self._stream_by_id.values())
                largest_stream = max(
                    streams,
                    key=lambda candidate: (
                        self._count_blocks(candidate) / candidate.blocks_max,
                        self._count_blocks(candidate),
                    ),
                )
                self._drop_blocks(largest_stream, "most for its cache, and the index is full (--index-memory)")

    def _count_blocks(self, stream: WorkerStream) -> int:
        return sum(int(str(group["blocks"])) for group in self._get_groups(stream.holder))

    def _drop_blocks(self, stream: WorkerStream, reason: str) -> None:
        block_count = self._count_blocks(stream)
        if not stream.counters.forgotten:
            log.warning(
                "worker %s rank %d announced %s: %d forgotten", stream.worker_id, stream.rank, reason, block_count
            )
        stream.counters.forgotten += block_count
        self._clear_and_report(stream)

    # The feed's thread ---------------------------------------------------------------------------------------------
    def on_connection_changed(self, stream_id: str, up: bool) -> None:
        stream = self._stream_by_id.get(stream_id)
        if stream is not None:
            if up:
                stream.down_since_s, stream.has_warned = None, False
            else:
                if stream.is_up:
                    stream.down_since_s = time.monotonic()
                self._report(StreamLost(stream.worker_id, stream.rank))

    def handle(self, stream_id: str, instruction: Instruction, topic: bytes) -> Callable[[], bool] | None:
        """Apply one instruction of a stream.

        Of a long payload only the first slice is applied; the returned function applies the next one and returns
        whether there are more.
        """
        with self._lock:
            stream = self._stream_by_id.get(stream_id)
            if stream is None:
                return None
            counters = stream.counters
            if isinstance(instruction, Apply):
                return self._ingest(stream, instruction)
            if isinstance(instruction, Clear):
                self._clear_and_report(stream)
            elif isinstance(instruction, Gap):
                counters.gaps += 1
            elif isinstance(instruction, PublisherRestarted):
                counters.restarts += 1
                stream.full_cache = ObservedCapacity()
                self._report_capacity(stream)
                log.info("worker %s rank %d restarted: %s", stream.worker_id, stream.rank, instruction.reason)
            elif isinstance(instruction, MalformedMessage):
                counters.malformed += 1
                stream.record_skipped([instruction.reason])
            elif isinstance(instruction, DroppedMessages):
                counters.overflowed += instruction.count
        return None

    def _ingest(self, stream: WorkerStream, apply: Apply) -> Callable[[], bool] | None:
        try:
            if len(apply.payload) <= UNSLICED_BYTES_MAX:
                self._record_applied(stream, apply, self._index.ingest(stream.holder, apply.payload, time.monotonic()))
                return None
            task = self._index.begin_ingest(stream.holder, apply.payload, time.monotonic())
            if task.step():
                return lambda: self._continue_ingest(stream, apply, task)
            self._record_applied(stream, apply, task.report)
        except KeyError:
            log.debug("holder of %s is gone already", stream.stream_id)  # and its stream is about to be
        return None

    def _continue_ingest(self, stream: WorkerStream, apply: Apply, task: IngestTask) -> bool:
        """Apply the next slice of a long payload and return whether there are more."""
        with self._lock:
            if self._stream_by_id.get(stream.stream_id) is not stream:
                return False
            try:
                if task.step():
                    return True
            except KeyError:
                return False
            self._record_applied(stream, apply, task.report)
        return False

    def _record_applied(self, stream: WorkerStream, apply: Apply, report: IngestReport) -> None:
        counters = stream.counters
        if stream.last_seq is None and not stream.is_only_rank:
            stream.record_batch_rank(decode_batch_rank(apply.payload))
        counters.record_batch(len(apply.payload), report)
        stream.record_skipped(report.malformed)
        if report.removed:  # only then it can be full
            capacity_tokens = stream.full_cache.tokens
            stream.full_cache.record_batch(self._index.held_tokens(stream.holder), report)
            if stream.full_cache.tokens != capacity_tokens:
                self._report_capacity(stream)
        if apply.origin is Origin.LIVE:
            stream.last_event_s = time.time()
        elif apply.origin is Origin.REPLAY:
            counters.replayed += 1
        else:
            counters.snapshots += 1
        if report.cleared:
            self._report_cleared(stream)
        if apply.seq is None or report.cleared:
            stream.complete_from = 0
        elif stream.complete_from is None:
            stream.complete_from = apply.seq
        if apply.seq is not None:
            stream.last_seq = apply.seq
            stream.position = (apply.seq, digest_payload(apply.payload))
            if stream.position_before_restart is not None and stream.is_another_process(*stream.position, apply.origin):
                counters.restarts += 1
                log.info("worker %s rank %d came back as another process", stream.worker_id, stream.rank)
        if report.stored:
            self._enforce_limits(stream, report.stored)
