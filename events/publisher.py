"""Publisher of a worker's cache events, for a step loop that must not wait.

A shell: owns the PUB and ROUTER sockets, the thread that serves them and the clock. Work of each thread:

* `publish`, on the caller's thread, gives a batch its sequence number and queues it.
* The publisher's thread reads the events of a batch, which may compute them, applies them to the resident set, encodes
  them for the ring of the newest batches and sends them, and answers replay and snapshot requests.

Invariants: every published batch reaches the resident set and the ring, in order, even if it is not sent live, because
`max_queue_size` others wait behind it: subscribers see a gap and ask for its replay.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from events.codec import encode_batch
from events.config import KVEventsConfig, make_rank_endpoint, should_bind
from events.frames import (
    MAX_HANDSHAKE_MS,
    MAX_REQUEST_BYTES,
    MAX_UNACKNOWLEDGED_MS,
    SNAPSHOT_SEQ,
    build_reply_frames,
    pack_seq,
    parse_replay_request,
)
from events.replay_replies import Reply, SeqAndPayload, iter_replay, iter_snapshot
from events.resident_set import ResidentSet
from events.sources import EventSource, GroupInfo
from events.types import DecodeError, Event, EventBatch, InvariantError
from options import ConfigError

logger = logging.getLogger(__name__)

MAX_REPLIES = 64
"""Most replies that are sent at the same time; further requests wait in their socket."""
REPLY_SLICE = 128
"""Most messages of replies that are sent before live batches are sent again."""
LIVE_SLICE = 256
BUSY_PEERS_WAIT_MS = 5
"""Pause before replies are tried again whose peers took nothing; a poll does not report when a peer is ready."""
MAX_MESSAGES_AHEAD = 128
"""Messages of a reply that wait in its socket: a peer makes progress with half as many, each of some 1,000 blocks.

With 16 of them, the socket was empty for most of BUSY_PEERS_WAIT_MS: 10,000 batches took 3.8 s instead of 0.3 s.
"""
REPLY_STALL_S = 30.0
"""Seconds without progress after which a peer loses its reply."""


@dataclass
class PublisherStats:
    published_batch_count: int = 0
    unsent_batch_count: int = 0
    """Batches that were not sent live because the queue was full; replay has them."""
    replay_count: int = 0
    snapshot_count: int = 0
    broken_invariant_count: int = 0


class _QueuedBatch(NamedTuple):
    seq: int
    ts: float
    events: Iterable[Event]


class EventPublisher:
    """One publisher stream of one data-parallel rank.

    Raises ConfigError if the configuration disables events or an address cannot be used. `publish` may be called from
    any thread. `close` sends the waiting batches and frees the addresses.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        dp_rank: int = 0,
        *,
        model: str | None = None,
        block_size: int | None = None,
        groups: tuple[GroupInfo, ...] = (),
    ) -> None:
        """Open the sockets and start the thread. `model`, `block_size` and `groups` are for `describe_source`."""
        if not config.is_enabled:
            raise ConfigError("--kv-events-config: enable_kv_cache_events is false, there is nothing to publish")
        self.config = config
        self.dp_rank = dp_rank
        self.epoch = uuid.uuid4().hex
        self.stats = PublisherStats()
        self._model = model
        self._block_size = block_size
        self._groups = groups
        self._topic = config.topic.encode()

        self._lock = threading.Lock()
        """Guards the queue; held for microseconds."""
        self._queue: deque[_QueuedBatch] = deque()
        """Batches that are to be applied and sent."""
        self._ring: deque[SeqAndPayload] = deque(maxlen=config.buffer_steps)
        """The newest applied batches, for subscribers that missed some."""
        self._resident_set = ResidentSet()
        """Blocks that are cached after `_last_batch`, for snapshots."""
        self._last_batch: SeqAndPayload | None = None
        self._pending_replies: list[Reply] = []

        self._is_closing = False
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is a batch, or when the publisher closes: wakes the thread."""
        self._is_woken = False
        """Whether `_wakeup_fd` is readable already, so that waking the thread needs no further system call."""

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open_sockets()
        self._thread = threading.Thread(target=self._run, name=f"kv-events-{dp_rank}", daemon=True)
        self._thread.start()

    # The caller's side

    def publish(self, events: Iterable[Event]) -> None:
        """Publish the events of a step, which the publisher's thread reads later. Raises RuntimeError after `close`."""
        if not events:
            return
        now = time.time()
        with self._lock:
            if self._is_closing:
                raise RuntimeError("publish after close")
            self._queue.append(_QueuedBatch(self.stats.published_batch_count, now, events))
            self.stats.published_batch_count += 1
            self._wake_thread()

    def describe_source(self) -> EventSource:
        """Return the entry of this stream in `GET /kv_event_sources`."""
        return EventSource(
            data_parallel_rank=self.dp_rank,
            endpoint=self._endpoint,
            replay_endpoint=self._replay_endpoint,
            topic=self.config.topic,
            epoch=self.epoch,
            snapshot=self._replay_endpoint is not None,
            model=self._model,
            block_size=self._block_size,
            groups=self._groups,
        )

    def close(self, linger_s: float = 1.0) -> None:
        """Send the waiting batches, then wait up to `linger_s` for each socket and close. May be called twice."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._linger_ms = int(linger_s * 1000)
            self._wake_thread()
        self._thread.join()
        os.close(self._wakeup_fd)
        self._context.term()

    def _wake_thread(self) -> None:
        """Have the publisher's thread look for batches. Call it with the lock held, so that the file is still open."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wakeup_fd, 1)

    # The publisher's thread

    def _run(self) -> None:
        """Send live batches and answer replay requests in the publisher's thread, until `close` and no batch waits."""
        poller = zmq.Poller()
        poller.register(self._wakeup_fd, zmq.POLLIN)
        replay_socket = self._replay_socket
        if replay_socket is not None:
            poller.register(replay_socket, zmq.POLLIN)
        wait_ms: int | None = None
        while True:
            ready_sockets = dict(poller.poll(wait_ms))
            has_more = self._send_live()
            if not has_more and self._wakeup_fd in ready_sockets:
                os.eventfd_read(self._wakeup_fd)
                self._is_woken = False
                has_more = bool(self._queue)  # one may have been added before the wakeup was cleared
            if self._is_closing and not self._queue:
                break
            are_all_peers_busy = False
            if replay_socket is not None:
                if replay_socket in ready_sockets:
                    self._accept_requests(replay_socket)
                are_all_peers_busy = self._send_replies(replay_socket)
            wait_ms = self._choose_wait_ms(has_more, are_all_peers_busy)
        self._close_sockets()

    def _choose_wait_ms(self, has_more_batches: bool, are_all_peers_busy: bool) -> int | None:
        """Return how long to wait for the sockets before the next pass; None: until one of them is ready."""
        if has_more_batches:
            return 0
        if not self._pending_replies:
            return None
        return BUSY_PEERS_WAIT_MS if are_all_peers_busy else 0

    def _send_live(self) -> bool:
        """Apply some of the waiting batches and send them, unless too many wait; return whether more wait."""
        for _ in range(LIVE_SLICE):
            if not self._queue:
                return False
            is_overfull = len(self._queue) > self.config.max_queue_size
            seq, payload = self._apply(self._queue.popleft())
            if is_overfull:
                self.stats.unsent_batch_count += 1
            else:
                self._live_socket.send_multipart([self._topic, pack_seq(seq), payload])
        return bool(self._queue)

    def _apply(self, batch: _QueuedBatch) -> SeqAndPayload:
        """Update the resident set and the ring; return the encoded batch."""
        events = list(batch.events)
        try:
            self._resident_set.apply(events)
        except InvariantError as error:
            self.stats.broken_invariant_count += 1
            if self.stats.broken_invariant_count == 1:
                logger.error("cache events break their guarantees (seq %d): %s; counted from now on", batch.seq, error)
        self._last_batch = batch.seq, encode_batch(EventBatch(batch.ts, events, self.dp_rank))
        self._ring.append(self._last_batch)
        return self._last_batch

    def _accept_requests(self, replay_socket: zmq.Socket[bytes]) -> None:
        """Begin the replies to the requests that have come, as far as MAX_REPLIES allows."""
        while len(self._pending_replies) < MAX_REPLIES:
            try:
                frames = replay_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                identity, start_seq = parse_replay_request(frames)
            except DecodeError as error:
                logger.warning("ignored a message on the replay socket: %s", error)
                continue
            self._pending_replies.append(self._make_reply(identity, start_seq))

    def _make_reply(self, identity: bytes, start_seq: int) -> Reply:
        """Return the reply to a peer: the batches from `start_seq` on, or a snapshot if that is SNAPSHOT_SEQ."""
        now = time.monotonic()
        if start_seq == SNAPSHOT_SEQ:
            self.stats.snapshot_count += 1
            blocks = self._resident_set.list_blocks()
            return Reply(identity, iter_snapshot(blocks, self._last_batch, self.dp_rank, time.time()), now)
        self.stats.replay_count += 1
        return Reply(identity, iter_replay(self._ring, start_seq), now)

    def _send_replies(self, replay_socket: zmq.Socket[bytes]) -> bool:
        """Send some messages of each reply; return whether replies wait but no peer takes a message."""
        replies = list(self._pending_replies)
        sent_counts = [self._send_messages(reply, REPLY_SLICE // len(replies), replay_socket) for reply in replies]
        return bool(self._pending_replies) and not any(sent_counts)

    def _send_messages(self, reply: Reply, count_max: int, replay_socket: zmq.Socket[bytes]) -> int:
        """Send the next messages of a reply, as long as its peer takes them; return their number.

        The reply ends after its last message, when the peer has left, or when the peer took nothing for REPLY_STALL_S.
        """
        sent_count = 0
        while reply.next_message is not None:
            if sent_count == count_max:
                return sent_count
            seq, payload = reply.next_message
            try:
                replay_socket.send_multipart(build_reply_frames(reply.identity, self._topic, seq, payload), zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() - reply.progress_at < REPLY_STALL_S:
                    return sent_count
                logger.warning("gave up a replay reply: the peer took nothing for %.0f s", REPLY_STALL_S)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                break  # the peer has left
            reply.advance(time.monotonic())
            sent_count += 1
        self._pending_replies.remove(reply)
        return sent_count

    def _open_sockets(self) -> None:
        """Open the PUB socket for live batches and, if it is configured, the ROUTER socket that answers requests.

        Raises ConfigError, after closing everything, if an address cannot be used.
        """
        self._linger_ms = 0
        self._live_socket = self._context.socket(zmq.PUB)
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._replay_endpoint: str | None = None
        endpoint = self.config.endpoint
        try:
            self._live_socket.sndhwm = self.config.hwm
            endpoint = make_rank_endpoint(endpoint, self.dp_rank)
            self._endpoint = _bind_or_connect(self._live_socket, endpoint, binds=should_bind(endpoint))
            if self.config.replay_endpoint is not None:
                self._replay_socket = self._context.socket(zmq.ROUTER)
                # Otherwise a ROUTER drops the messages that a slow peer cannot take, in the middle of a reply.
                self._replay_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay_socket.sndhwm = MAX_MESSAGES_AHEAD
                endpoint = make_rank_endpoint(self.config.replay_endpoint, self.dp_rank)
                self._replay_endpoint = _bind_or_connect(self._replay_socket, endpoint, binds=True)
        except (zmq.ZMQError, ConfigError) as error:
            self._close_sockets()
            os.close(self._wakeup_fd)
            self._context.term()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--kv-events-config: cannot use endpoint {endpoint!r}: {error}") from error

    def _close_sockets(self) -> None:
        self._live_socket.close(self._linger_ms)
        if self._replay_socket is not None:
            self._replay_socket.close(self._linger_ms)


def _bind_or_connect(socket: zmq.Socket[bytes], endpoint: str, *, binds: bool) -> str:
    """Bind a publisher's socket to an address, or connect it, and return the address to tell subscribers.

    The returned address has the port that the system chose for port 0 or `*`. A wildcard host stays `*`.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, MAX_HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_MAXRT, MAX_UNACKNOWLEDGED_MS)
    is_ipv6 = "[" in endpoint or "::" in endpoint or "//*" in endpoint  # every address: those of IPv6 too
    if is_ipv6:
        socket.setsockopt(zmq.IPV6, 1)
    if not binds:
        socket.connect(endpoint)
        logger.warning(
            "kv events: connecting to %s. The reader of the events must bind this address (router run --bind-events). "
            "To listen here, use tcp://*:PORT.",
            endpoint,
        )
        return endpoint
    socket.bind(endpoint)
    return re.sub(r"^tcp://(0\.0\.0\.0|\[::\]):", "tcp://*:", socket.getsockopt_string(zmq.LAST_ENDPOINT))
