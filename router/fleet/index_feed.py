"""Applies the event streams of workers to the prefix index: each stream, in order, to the holder of its rank.

events/feed.py owns the sockets, the thread and the replay after gaps. `apply_instruction` runs on its thread, the rest
on the caller's. A lock keeps a forgotten stream from writing into a holder that was removed. No stream id is used
twice, so late messages of a replaced stream are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import msgspec

from events.feed import EventFeed
from events.feed_sockets import SlicedWork, StreamSource
from events.sources import EventSource
from events.stream_types import (
    Apply,
    Clear,
    Connection,
    DroppedMessages,
    DuplicateBatch,
    Gap,
    Instruction,
    MalformedMessage,
    PublisherRestarted,
    StreamPhase,
    StreamPosition,
)
from router.decide.watchdog import UNREACHABLE_HINT
from router.fleet.fact_queue import CacheCleared, CapacityObserved, EngineRestarted, StreamLost, WorkerFact
from router.fleet.worker_stream import ObservedCapacity, WorkerStream, make_address, make_stream_counters
from router.index.protocol import DumpPart, DumpTask, HolderId, IngestReport, IngestTask, PrefixIndex

log = logging.getLogger("router")

SNAPSHOT_VERSION = 3
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
    parts: list[DumpPart]


def can_use_peer_snapshot(source: EventSource) -> bool:
    """Return whether another router's snapshot helps: the worker has none of its own, and its replay can confirm it."""
    has_own_snapshot = source.snapshot or source.snapshot_endpoint is not None
    return source.replay_endpoint is not None and not has_own_snapshot


class IndexFeed:
    """Reads the streams of cache events of many workers, and applies them to the prefix index."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        report: Callable[[WorkerFact], None] = lambda fact: None,
        streams_max: int = 16_384,
        index_bytes_max: int = 8 << 30,
    ) -> None:
        """Prepare to read streams; `start` starts the thread that does it.

        `index` gets the cached blocks that the streams announce. `report` is called with each fact about a worker, such
        as a lost stream, on the thread that learns it. `streams_max`: most streams of all workers. `index_bytes_max`:
        memory of the index beyond which the blocks of the largest stream are dropped.
        """
        self._index = index
        self._report = report
        self._streams_max = streams_max
        self._index_bytes_max = index_bytes_max
        self._blocks_since_measurement = 0
        """Blocks stored since the memory of the index was last measured."""
        self._lock = threading.Lock()
        """Held while a message is applied, and while `_stream_by_id` changes."""
        self._stream_by_id: dict[str, WorkerStream] = {}
        """Streams that are read now, by the id that `events` has for each."""
        self._streams_by_worker: dict[str, list[WorkerStream]] = {}
        """Streams of each worker, one for each data-parallel rank."""
        self.events = EventFeed(self.apply_instruction)
        """Sockets and the thread that reads them."""

    # The caller's thread -------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.events.start()

    def close(self) -> None:
        self.events.close()

    def bind(self, endpoint: str) -> str:
        """Listen for publishers that connect to this router, and return the bound address.

        A publisher is known by its topic. It is the topic of a followed stream, or `kv@NAME...`, where NAME is the
        worker's id or host. Raises zmq.ZMQError if the endpoint cannot be bound.
        """
        return self.events.bind(endpoint, self._find_stream)

    def follow_worker(
        self,
        worker_id: str,
        sources: Sequence[EventSource],
        holders: Sequence[HolderId],
        snapshots: Mapping[int, PeerSnapshot] | None = None,
        blocks_max: int = 1 << 24,
    ) -> None:
        """Read a worker's cache events from `sources`, one stream for each data-parallel rank.

        The blocks of `sources[rank]` go to the entry `holders[rank]` of the index. The worker's earlier streams go on
        if addresses and holders are the same, and are replaced otherwise, or if a name may have moved. `snapshots`: by
        rank, a copy of another router's index to start from, if the events that the worker repeats (its replay) fit to
        it. `blocks_max`: most blocks that a rank may announce.
        """
        old_streams = self._streams_by_worker.get(worker_id, [])
        old_addresses = [make_address(stream.source, stream.holder) for stream in old_streams]
        new_addresses = [make_address(source, holder) for source, holder in zip(sources, holders)]
        if old_addresses == new_addresses:
            for stream, source in zip(old_streams, sources):
                stream.source, stream.blocks_max = source, blocks_max
                self._declare_groups(stream)
            return
        for stream in old_streams:
            self._stop_stream(stream)
            self._clear_and_report(stream)  # the new stream starts from nothing, without announcing that
        new_streams = self._streams_by_worker[worker_id] = []
        for rank, (source, holder) in enumerate(zip(sources, holders)):
            stream = WorkerStream(
                worker_id=worker_id,
                rank=rank,
                source=source,
                holder=holder,
                counters=old_streams[rank].counters if rank < len(old_streams) else make_stream_counters(),
                is_only_rank=len(new_addresses) == 1,
                blocks_max=blocks_max,
            )
            snapshot = snapshots.get(rank) if snapshots else None
            new_streams.append(self._start_stream(stream, snapshot))
        self.events.rematch_topics()

    def count_free_streams(self, worker_id: str) -> int:
        """Return how many streams of this worker can be followed beside the streams of all other workers."""
        other_streams = (streams for name, streams in self._streams_by_worker.items() if name != worker_id)
        return self._streams_max - sum(map(len, other_streams))

    def forget(self, worker_id: str) -> None:
        """Stop listening to a worker."""
        for stream in self._streams_by_worker.pop(worker_id, []):
            self._stop_stream(stream)

    def clear_worker(self, worker_id: str) -> None:
        """Forget a worker's cached blocks, because it gave its memory back. Its streams go on where they are."""
        for stream in self._streams_by_worker.get(worker_id, []):
            with self._lock:
                self._clear_and_report(stream)
                stream.complete_from = 0  # what comes now is all there is

    def restart_streams(self, worker_id: str) -> None:
        """Forget the blocks of a worker that died. Its streams start anew from a snapshot or the replay buffer."""
        streams = self._streams_by_worker.setdefault(worker_id, [])  # a worker without streams has zeros in the metrics
        for rank, stream in enumerate(streams):
            self._stop_stream(stream)
            successor = stream.make_successor()
            successor.position_before_restart = stream.position or stream.position_before_restart
            self._clear(stream)
            streams[rank] = self._start_stream(successor)
        self.events.rematch_topics()

    def find_incomplete_ranks(self, worker_id: str) -> dict[int, int]:
        """Return the ranks for which the index lacks earlier cached blocks: rank -> first batch of events that it has.

        Events are missed after a gap that the worker's replay does not cover, after a reconnect, or by a late start.
        Only ranks that can use another router's snapshot are returned.
        """
        if not self.is_synced(worker_id):
            return {}
        first_batch_by_rank: dict[int, int] = {}
        for stream in self._streams_by_worker[worker_id]:
            if stream.last_seq is None or not can_use_peer_snapshot(stream.source):
                continue
            if stream.complete_from is None:  # the index has nothing yet, so it begins with the next batch
                first_batch_by_rank[stream.rank] = stream.last_seq + 1
            elif stream.complete_from > 0:  # 0: the index has all cached blocks
                first_batch_by_rank[stream.rank] = stream.complete_from
        return first_batch_by_rank

    def resume(self, worker_id: str, rank: int, snapshot: PeerSnapshot) -> bool:
        """Restart a stream from another router's snapshot; False if that has no earlier batches than are known.

        The stream is followed from the snapshot's batch on. If the worker's replay does not begin with that batch, the
        snapshot is dropped and the whole replay buffer is read, so the index stays exact.
        """
        if snapshot.complete_from >= self.find_incomplete_ranks(worker_id).get(rank, 0):
            return False
        streams = self._streams_by_worker[worker_id]
        old_stream = streams[rank]
        self._stop_stream(old_stream)
        self._clear_and_report(old_stream)
        streams[rank] = self._start_stream(old_stream.make_successor(), snapshot)
        return True

    def count_stored_blocks(self, worker_id: str) -> int:
        """Return how many blocks the worker has announced so far."""
        return sum(stream.counters["stored"] for stream in self._streams_by_worker.get(worker_id, []))

    def count_clears(self, worker_id: str) -> int:
        """Return how many times the worker has announced that its cache is empty."""
        return sum(stream.counters["cleared"] for stream in self._streams_by_worker.get(worker_id, []))

    def list_unreachable_endpoints(self, worker_id: str) -> list[str]:
        """Return the endpoints of a worker's streams that have not been connected for UNREACHABLE_S."""
        return [stream.source.endpoint for stream in self._find_unreachable_streams(worker_id)]

    def warn_of_unreachable_streams(self, worker_id: str) -> None:
        """Log the streams of a worker that have not been connected for UNREACHABLE_S, each once."""
        for stream in self._find_unreachable_streams(worker_id):
            if not stream.has_warned:
                stream.has_warned = True
                endpoint = stream.source.endpoint
                log.warning("worker %s: no events can be read from %s: %s", worker_id, endpoint, UNREACHABLE_HINT)

    def _find_unreachable_streams(self, worker_id: str) -> list[WorkerStream]:
        """Return a worker's unreachable streams; none while publishers connect here, as one may be the worker's."""
        if self.events.has_publisher():
            return []
        now_s = time.monotonic()
        return [stream for stream in self._streams_by_worker.get(worker_id, []) if stream.is_unreachable(now_s)]

    def make_snapshot(self, worker_id: str, rank: int) -> PeerSnapshot | None:
        """Return a copy of what the index has of one worker's rank, for another router; None if that is not possible.

        The caller's thread waits while the thread that reads events writes the snapshot in slices, in turn with other
        work. The wait ends with the result, after SNAPSHOT_S_MAX, or when the worker's publisher restarts.
        """
        streams = self._streams_by_worker.get(worker_id, [])
        if rank >= len(streams) or not self.is_synced(worker_id):
            return None
        stream, snapshot = streams[rank], Future[PeerSnapshot | None]()
        self.events.schedule_work(stream.stream_id, self._write_snapshot(stream, snapshot))
        deadline_s = time.monotonic() + SNAPSHOT_S_MAX
        # After a restart the stream has no position and nothing sets a result, so look at it now and then.
        while time.monotonic() < deadline_s and stream.position is not None:
            with contextlib.suppress(futures.TimeoutError):
                return snapshot.result(timeout=0.1)
        return None

    def describe_streams(self, worker_id: str) -> dict[str, Any]:
        """Return the state of a worker's streams, for `/workers`."""
        streams = self._streams_by_worker.get(worker_id, [])
        rows = []
        for stream in streams:
            state = self.events.get_stream_state(stream.stream_id)
            rows.append(stream.to_json(state, self._get_groups(stream.holder)))
        return {"streams": rows}

    def sum_counters(self) -> dict[str, Counter[str]]:
        """Return the counters of each worker, summed over its ranks, for `/metrics`."""
        sums_by_worker: dict[str, Counter[str]] = {}
        for worker_id, streams in list(self._streams_by_worker.items()):
            sums = sums_by_worker[worker_id] = make_stream_counters()
            for stream in streams:
                sums.update(stream.counters)
        return sums_by_worker

    def list_event_lags(self) -> dict[str, float]:
        """Return how late the last batch of each worker was applied, in seconds, of several ranks the latest."""
        longest_lags: dict[str, float] = {}
        for worker_id, streams in list(self._streams_by_worker.items()):
            last_lags_s = [stream.last_event.lag_s for stream in streams]
            known_lags_s = [lag_s for lag_s in last_lags_s if lag_s is not None]
            if known_lags_s:
                longest_lags[worker_id] = max(known_lags_s)
        return longest_lags

    def is_synced(self, worker_id: str) -> bool:
        """Return whether every stream of the worker is connected and has caught up."""
        streams = self._streams_by_worker.get(worker_id, [])
        return bool(streams) and all(map(self._is_stream_live, streams))

    def _is_stream_live(self, stream: WorkerStream) -> bool:
        state = self.events.get_stream_state(stream.stream_id)
        return stream.is_up and state is not None and state.phase is StreamPhase.LIVE

    def _get_groups(self, holder: HolderId) -> list[dict[str, object]]:
        """Return the groups of a holder, without the one that stands for all until events name them."""
        try:
            groups = self._index.groups(holder)
        except KeyError:
            return []
        return [group for group in groups if group["group_idx"] is not None or group["blocks"]]

    def _start_stream(self, stream: WorkerStream, snapshot: PeerSnapshot | None = None) -> WorkerStream:
        """Follow a new stream, from another router's snapshot if there is one."""
        self._declare_groups(stream)
        self._report_capacity(stream)
        with self._lock:
            self._stream_by_id[stream.stream_id] = stream
        self.events.add(stream.make_feed_source(self._apply_snapshot(stream, snapshot)))
        return stream

    def _apply_snapshot(self, stream: WorkerStream, snapshot: PeerSnapshot | None) -> StreamPosition | None:
        """Apply another router's snapshot; return the position that the worker has to confirm, if any."""
        if snapshot is None:
            return None
        for part in snapshot.parts:
            report = self._index.load(stream.holder, part)
            stream.counters["snapshots"] += 1
            if report.malformed:
                log.warning("worker %s: a peer's snapshot is not used: %s", stream.worker_id, report.malformed[0])
                self._clear(stream)
                return None
        stream.position = StreamPosition(snapshot.seq, snapshot.digest)
        stream.last_seq, stream.complete_from = snapshot.seq, snapshot.complete_from
        return stream.position

    def _declare_groups(self, stream: WorkerStream) -> None:
        self._index.set_reannounces(stream.holder, stream.source.reannounces)
        if stream.source.groups:
            self._index.declare_groups(stream.holder, [msgspec.structs.asdict(g) for g in stream.source.groups])

    def _stop_stream(self, stream: WorkerStream) -> None:
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
        """Drop all blocks of `stream` from the index if they are too many; of the largest stream if memory is full.

        `stored_blocks`: blocks that the stream has just stored. Counting blocks and measuring memory are slow, so each
        is done only once in many stored blocks.
        """
        stream.stored_since_counted += stored_blocks
        is_count_due = stream.stored_since_counted >= min(COUNT_EVERY, stream.blocks_max)
        if is_count_due:
            stream.stored_since_counted = 0
            if self._count_blocks(stream) > stream.blocks_max:
                self._drop_blocks(stream, f"more than {stream.blocks_max} blocks, which its cache cannot hold")
        self._blocks_since_measurement += stored_blocks
        is_measurement_due = self._blocks_since_measurement >= MEASURE_EVERY
        if is_measurement_due:
            self._blocks_since_measurement = 0
            if self._index.stats().memory_bytes > self._index_bytes_max:
                largest_stream = max(self._stream_by_id.values(), key=self._measure_size)
                self._drop_blocks(largest_stream, "most for its cache, and the index is full (--index-memory)")

    def _measure_size(self, stream: WorkerStream) -> tuple[float, int]:
        """Return a sort key: a stream is larger if its blocks are a larger share of what it may announce."""
        block_count = self._count_blocks(stream)
        return block_count / stream.blocks_max, block_count

    def _count_blocks(self, stream: WorkerStream) -> int:
        return sum(int(str(group["blocks"])) for group in self._get_groups(stream.holder))

    def _drop_blocks(self, stream: WorkerStream, reason: str) -> None:
        block_count = self._count_blocks(stream)
        if not stream.counters["forgotten"]:
            log.warning(
                "worker %s rank %d announced %s: %d forgotten", stream.worker_id, stream.rank, reason, block_count
            )
        stream.counters["forgotten"] += block_count
        self._clear_and_report(stream)

    # The feed's thread ---------------------------------------------------------------------------------------------
    def _record_connection(self, stream: WorkerStream, *, is_up: bool) -> None:
        """Record that a stream was connected or disconnected. A disconnected one is reported each time."""
        if is_up:
            stream.down_since_s = None
            stream.has_warned = False
            return
        if stream.is_up:
            stream.down_since_s = time.monotonic()
        self._report(StreamLost(stream.worker_id, stream.rank))

    def _write_snapshot(self, stream: WorkerStream, snapshot: Future[PeerSnapshot | None]) -> SlicedWork:
        """Copy the blocks of a stream from the index in slices of some milliseconds, with a `yield` after each.

        The result of `snapshot` is set at the end: None if the stream was replaced, or its cache cleared, meanwhile.
        """
        task: DumpTask | None = None
        parts: list[DumpPart] = []
        while True:
            with self._lock:
                is_followed = stream.stream_id in self._stream_by_id
                if not is_followed or stream.position is None or stream.complete_from is None:
                    break
                try:
                    task = task or self._index.begin_dump(stream.holder)
                    new_parts = task.step()
                except KeyError:  # the index entry of the stream was removed, or cleared by another thread
                    break
                if new_parts is None:
                    seq, digest = stream.position
                    snapshot.set_result(PeerSnapshot(SNAPSHOT_VERSION, seq, digest, stream.complete_from, parts))
                    return
            parts.extend(new_parts)
            yield
        snapshot.set_result(None)

    def apply_instruction(self, stream_id: str, instruction: Instruction, topic: bytes) -> SlicedWork | None:
        """Apply what happened on an event stream to the index and the stream's record: a batch came, one was lost, ...

        A long batch is not applied yet, and the work on it is returned.
        """
        with self._lock:
            stream = self._stream_by_id.get(stream_id)
            if stream is None:
                return None
            match instruction:
                case Apply():
                    return self._ingest_batch(stream, instruction)
                case Clear():
                    self._clear_and_report(stream)
                case Gap():
                    stream.counters["gaps"] += 1
                case DuplicateBatch():
                    stream.counters["repeated"] += 1
                case PublisherRestarted(reason):
                    stream.count_restart(reason)
                    stream.full_cache = ObservedCapacity()
                    self._report_capacity(stream)
                    self._report(EngineRestarted(stream.worker_id, stream.rank))
                case MalformedMessage(reason):
                    stream.counters["malformed"] += 1
                    stream.record_skipped([reason])
                case DroppedMessages(count):
                    stream.counters["overflowed"] += count
                case Connection(is_up):
                    self._record_connection(stream, is_up=is_up)
        return None

    def _ingest_batch(self, stream: WorkerStream, batch: Apply) -> SlicedWork | None:
        """Apply a batch to the index; return the work if the batch is long."""
        if len(batch.payload) > UNSLICED_BYTES_MAX:
            return self._ingest_in_slices(stream, batch)
        try:
            report = self._index.ingest(stream.holder, batch.payload, time.monotonic())
            self._record_applied(stream, batch, report)
        except KeyError:  # the index entry that the blocks go to was removed, and its stream is about to be
            log.debug("holder of %s is gone already", stream.stream_id)
        return None

    def _ingest_in_slices(self, stream: WorkerStream, batch: Apply) -> SlicedWork:
        """Apply a long batch to the index in slices of some milliseconds, with a `yield` after each but the last.

        Between slices the feed's thread does other work. If the stream is stopped meanwhile, the rest is not applied.
        """
        task: IngestTask | None = None
        has_more = True
        while has_more:
            with self._lock:
                if stream.stream_id not in self._stream_by_id:
                    return
                try:
                    task = task or self._index.begin_ingest(stream.holder, batch.payload, time.monotonic())
                    has_more = task.step()
                    if not has_more:
                        self._record_applied(stream, batch, task.report)
                except KeyError:  # the index entry that the blocks go to was removed
                    return
            if has_more:
                yield

    def _record_applied(self, stream: WorkerStream, batch: Apply, report: IngestReport) -> None:
        """Update a stream's record after a batch was applied to the index, and report what it says about the worker.

        A batch can show that the worker's cache was cleared or is full, or that the worker is a new process. `report`:
        what the batch changed in the index.
        """
        stream.record_batch(batch, report)
        if report.removed:  # a cache that evicts nothing may have room left
            old_capacity = stream.full_cache.tokens
            stream.full_cache.record_batch(self._index.held_tokens(stream.holder), report)
            if stream.full_cache.tokens != old_capacity:
                self._report_capacity(stream)
        if report.cleared:
            self._report_cleared(stream)
        if stream.detect_new_process(batch.origin):
            self._report(EngineRestarted(stream.worker_id, stream.rank))
        if report.stored:
            self._enforce_limits(stream, report.stored)
