"""State of one followed stream, its subscription and its pending request, as events/feed.py uses them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from socket import AF_INET6, getaddrinfo
from typing import TypeAlias

import zmq

from events.frames import MAX_HANDSHAKE_MS, SNAPSHOT_REQUEST_FRAMES
from events.stream import StreamState
from events.stream_types import Apply, Instruction, StreamConfig, StreamPosition

_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

MAX_MESSAGE_BYTES = 16 << 20
"""Longest frame; a publisher that sends a longer one loses its connection."""
MAX_QUEUED_MESSAGES = 16
"""Most messages that ZeroMQ queues for a connection, of MAX_MESSAGE_BYTES each; the others wait at the publisher."""
MAX_FRAMES, MAX_REPLY_FRAMES, FRAMES_SLICE = 16, 65_536, 256
"""Most frames of a live message and of a reply that are kept, and most that are read before other sockets are."""
LIVE_SLICE, LIVE_SLICE_BYTES = 128, 1 << 20
"""Most live messages and bytes that are read from one socket before other sockets are read."""
MAX_WAITING_MESSAGES, MAX_WAITING_BYTES = 1_000, 64 << 20
"""Most live messages of a topic, and their bytes, that wait while an earlier one is applied; more show as a gap."""
MAX_REPLIES_BYTES = 256 << 20
"""Most bytes of replies that wait while earlier ones are applied; more end the request.

Replies are taken out of ZeroMQ's queue at once, as vLLM's ROUTER drops what a slow peer does not take.
"""
MAX_RECONNECT_PAUSE_MS = 2_000
MAX_TOPICS, MAX_TOPIC_BYTES = 1_000, 512
"""Most unclaimed topics that a bound socket remembers, and the longest of them in bytes."""

SlicedWork: TypeAlias = Iterator[None]
"""Long work of which each step does a slice, so that other streams are served between them."""
KEEPALIVE_S, KEEPALIVE_PROBES = 2, 5
"""Seconds between two of the kernel's probes of a silent connection, and unanswered probes after which it is lost."""
LOOKUP_S_MAX = 0.5
"""Longest wait for the addresses of a host's name. All streams wait meanwhile."""
MAX_CONNECT_MS = 3_000
"""Longest attempt to connect. The kernel's own attempt waits up to a minute before it tries a host again."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class StreamSource:
    """Addresses of one stream. `stream_id` is the caller's name of the stream."""

    stream_id: str
    endpoint: str
    """Address to subscribe to; for publishers that connect to us, the address that we bind."""
    replay_endpoint: str | None = None
    topic: str | None = None
    """Topic to subscribe to; None or empty subscribes to all topics."""
    config: StreamConfig = field(default_factory=StreamConfig)
    resume_position: StreamPosition | None = None
    """Last batch that the subscriber applied before its restart; None: it begins without history."""
    snapshot_endpoint: str | None = None
    """Address of vLLM's socket for snapshots alone. Our engines send snapshots from `replay_endpoint`."""


class FollowedStream:
    """A stream of events that is followed: its state, its queued work and its pending request.

    Its live messages come on the SUB socket of a Subscription.
    """

    def __init__(self, source: StreamSource) -> None:
        """Begin to follow a stream at the resume position of its source, or without history."""
        self.source = source
        self.stream_state = self._make_state(source.resume_position)

        # The connection.
        self.subscription: Subscription | None = None
        """Subscription on which the live messages come; None if it could not be opened."""
        self.topic = (source.topic or "").encode()
        """Topic of the last live message; replies of older vLLM carry none."""
        self.descriptor: int | None = None
        """Connection to a bound socket on which the stream comes; None if it ended, and on a StreamSubscription."""
        self.is_connected = False
        self.disconnected_at: float | None = None
        """Time at which the connection was lost; None while connected."""
        self.fault_count = 0
        """Exceptions that ended the stream so far."""
        self.retry_at: float | None = None
        """Time at which the stream is followed again after an exception, without its earlier state."""

        # Queued work.
        self.pending_work: deque[Instruction | SlicedWork] = deque()
        """Instructions of `stream_state`, and long work; each is complete before the next begins."""
        self.is_turn_scheduled = False
        """Whether a part of the queued work is done in the next turn of the feed's loop."""
        self.pending_bytes = 0
        """Bytes of the payloads in `pending_work`."""

        self.request: PendingRequest | None = None
        """Request for missed batches or a snapshot, until it is answered."""

    @property
    def is_busy(self) -> bool:
        return bool(self.pending_work or (self.request is not None and self.request.replies))

    @property
    def is_full(self) -> bool:
        return len(self.pending_work) >= MAX_WAITING_MESSAGES or self.pending_bytes >= MAX_WAITING_BYTES

    def enqueue(self, instructions: list[Instruction]) -> None:
        self.pending_bytes += sum(
            len(instruction.payload) for instruction in instructions if isinstance(instruction, Apply)
        )
        self.pending_work.extend(instructions)

    def accepts_topic(self, topic: bytes) -> bool:
        """Return whether messages of a topic are the stream's: a subscription also gets all longer topics."""
        return not self.source.topic or self.source.topic.encode() == topic

    def pop_work(self) -> Instruction | SlicedWork:
        work = self.pending_work.popleft()
        if isinstance(work, Apply):
            self.pending_bytes -= len(work.payload)
        return work

    def reset(self, retry_at: float) -> None:
        """Forget all but the messages that were dropped and not reported yet. `retry_at`: time to follow it again."""
        unreported_drop_count = self.stream_state.unreported_drop_count
        self.stream_state = self._make_state(None)
        self.stream_state.unreported_drop_count = unreported_drop_count
        self.pending_work.clear()
        self.pending_bytes = 0
        self.retry_at = retry_at

    def _make_state(self, resume_position: StreamPosition | None) -> StreamState:
        source = self.source
        config = replace(
            source.config,
            can_replay=source.config.can_replay and source.replay_endpoint is not None,
            has_snapshots=source.snapshot_endpoint is not None,
        )
        return StreamState(config, resume_position)


def receive_frames(socket: Socket, frames: list[zmq.Frame], frames_max: int) -> None:
    """Append the rest of the next message to `frames`, which then has `frames_max` + 1 if the message has more.

    Raises zmq.Again if there is no message, or if so many frames are left that other sockets have their turn first.
    """
    for _ in range(FRAMES_SLICE):
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) <= frames_max:
            frames.append(frame)
        if not frame.more:
            return
    raise zmq.Again


def detect_lost_hosts(socket: Socket, probe_interval_s: int) -> None:
    """Have the kernel close connections to hosts that are gone, by TCP keepalive, and soon try to connect again.

    ZeroMQ's own heartbeats must not be used with a bound on the queue: libzmq 4.3 ends the process if one fails
    while the queue is full, and a full queue makes it fail (issue 3937 of zeromq/libzmq).
    """
    socket.setsockopt(zmq.CONNECT_TIMEOUT, MAX_CONNECT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, probe_interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, probe_interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)


def allow_ipv6(socket: Socket, endpoint: str) -> None:
    """Have a socket use IPv6 where its endpoint is an address of IPv6, or a name that has no other one.

    ZeroMQ tries one address, and most publishers listen at IPv4 alone, so a name with both keeps IPv4.
    """
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0]
    is_ipv4 = host == "*" or host.replace(".", "").isdigit()
    if scheme == "tcp" and not is_ipv4 and (":" in host or _has_ipv6_alone(host)):
        socket.setsockopt(zmq.IPV6, 1)


def _has_ipv6_alone(host: str) -> bool:
    """Return whether a name has addresses of IPv6 only. False if a silent name server takes over LOOKUP_S_MAX."""
    families: set[int] = set()

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            families.update([family for family, *_ in getaddrinfo(host, None)])

    thread = threading.Thread(target=look_up, name="names", daemon=True)
    thread.start()
    thread.join(LOOKUP_S_MAX)
    return families == {AF_INET6}


class _SubSocket:
    """ZeroMQ SUB socket that receives live messages, with a monitor socket that reports its connections."""

    def __init__(self, context: Context, topic: str | None) -> None:
        """Create the socket. `topic`: only topics that begin with it are received; None for all."""
        self.socket: Socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_QUEUED_MESSAGES
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, MAX_HANDSHAKE_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_PAUSE_MS)
        self.socket.subscribe(topic or "")
        detect_lost_hosts(self.socket, KEEPALIVE_S)
        self.monitor: Socket = self.socket.get_monitor_socket(_MONITORED)
        self._frames: list[zmq.Frame] = []
        """Frames of a message of which the last ones are still to be read."""

    def receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message, at most MAX_FRAMES + 1. Raises zmq.Again if it is not complete yet."""
        receive_frames(self.socket, self._frames, MAX_FRAMES)
        frames, self._frames = self._frames, []
        return frames

    def receive_messages(self) -> list[list[zmq.Frame]]:
        """Return the frames of the next live messages; at most LIVE_SLICE, so that other sockets get their turn."""
        messages: list[list[zmq.Frame]] = []
        received_bytes = 0
        while len(messages) < LIVE_SLICE and received_bytes < LIVE_SLICE_BYTES:
            try:
                frames = self.receive()
            except zmq.Again:
                break
            messages.append(frames)
            received_bytes += sum(map(len, frames))
        return messages

    def open(self, attach: Callable[[str], object], endpoint: str) -> None:
        """Call `attach`, which binds or connects the socket. Raises zmq.ZMQError, after closing everything."""
        allow_ipv6(self.socket, endpoint)
        try:
            attach(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class StreamSubscription(_SubSocket):
    """Subscription to a publisher that listens at an address: all messages are of one stream."""

    def __init__(self, context: Context, stream: FollowedStream) -> None:
        """Connect to the stream's publisher. Raises zmq.ZMQError if the address cannot be used."""
        super().__init__(context, stream.source.topic)
        self.stream = stream
        self.open(self.socket.connect, stream.source.endpoint)

    def get_stream(self, topic: bytes) -> FollowedStream | None:
        """Return the only stream, whatever the topic."""
        return self.stream


class BoundSubscription(_SubSocket):
    """Subscription to publishers that connect to us. Each publisher sends its stream under a topic of its own.

    A topic is unclaimed as long as it belongs to no stream that is followed. A connection is identified by its file
    descriptor, as ZeroMQ reports it.
    """

    def __init__(self, context: Context, endpoint: str, find_source: Callable[[str], StreamSource | None]) -> None:
        """Bind the socket. `find_source` returns the stream to follow for a topic, or None. Raises zmq.ZMQError."""
        super().__init__(context, topic=None)
        self.find_source = find_source
        self.stream_by_topic: dict[bytes, FollowedStream] = {}
        self.descriptor_by_unclaimed_topic: OrderedDict[bytes, int] = OrderedDict()
        """Connection of the last message of each unclaimed topic. If there are too many, the oldest is dropped."""
        self.descriptors: set[int] = set()
        """All connections, also those of peers that have not completed the handshake."""
        self.publisher_count = 0
        """Upper estimate of the publishers that are connected."""
        self.open(self.socket.bind, endpoint)

    def get_stream(self, topic: bytes) -> FollowedStream | None:
        """Return the stream of a topic; None if the topic is unclaimed."""
        return self.stream_by_topic.get(topic)

    def remove_connection(self, descriptor: int) -> None:
        """Forget a connection. ZeroMQ does not say whether its peer had completed the handshake."""
        self.descriptors.discard(descriptor)
        self.publisher_count = min(self.publisher_count, len(self.descriptors))

    def record_unclaimed_topic(self, topic: bytes, descriptor: int) -> bool:
        """Remember an unclaimed topic and its connection; return whether the topic is new."""
        if len(topic) > MAX_TOPIC_BYTES:
            return False
        is_new = topic not in self.descriptor_by_unclaimed_topic
        if is_new and len(self.descriptor_by_unclaimed_topic) >= MAX_TOPICS:
            self.descriptor_by_unclaimed_topic.popitem(last=False)
        self.descriptor_by_unclaimed_topic[topic] = descriptor
        return is_new


Subscription: TypeAlias = StreamSubscription | BoundSubscription


class PendingRequest:
    """Request to a publisher's ROUTER socket for missed batches or a snapshot, and its replies until they are handled.

    Each request has a connection of its own, so that late replies to an earlier request are not taken for its replies.
    """

    def __init__(self, context: Context, endpoint: str, frames: list[bytes], request_id: int) -> None:
        """Send the request, on a DEALER socket. Raises zmq.ZMQError if the address cannot be used."""
        self.request_id = request_id
        self.is_for_snapshot_socket = frames == SNAPSHOT_REQUEST_FRAMES
        """Whether the socket answers snapshots only, by one message."""
        self.replies: deque[list[bytes]] = deque()
        """Frames of each reply that was received."""
        self.reply_bytes = 0
        """Bytes of `replies`."""
        self._frames: list[zmq.Frame] = []
        """Frames of a reply of which the last ones are still to be read."""
        self.socket: Socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_QUEUED_MESSAGES
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        allow_ipv6(self.socket, endpoint)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self.socket.send_multipart(frames)

    def receive_reply(self) -> bool:
        """Queue the next reply; return False if it has too many frames, or too many bytes wait.

        Raises zmq.Again if no reply is complete yet.
        """
        receive_frames(self.socket, self._frames, MAX_REPLY_FRAMES)
        frames = [frame.bytes for frame in self._frames]
        self._frames = []
        if len(frames) > MAX_REPLY_FRAMES:
            return False
        self.replies.append(frames)
        self.reply_bytes += sum(map(len, frames))
        return self.reply_bytes <= MAX_REPLIES_BYTES

    def pop_reply(self) -> list[bytes]:
        frames = self.replies.popleft()
        self.reply_bytes -= sum(map(len, frames))
        return frames
