"""Follows many publisher streams from one thread: sockets in, instructions out.

A shell: owns the SUB, monitor and DEALER sockets, one thread and the clock. All decisions are StreamState's; what is
applied is the handler's. Streams come and go while it runs.

Why the monitor sockets: a restarted publisher can be back with a higher sequence number before anyone looks. What came
on a connection is handed over only after checking that the connection is still the one the stream knows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.errors import DecodeError
from events.feed_sockets import Context, FollowedStream, StreamSource, Subscription, ask
from events.frames import SNAPSHOT_SEQ, LiveFrame, parse_live, parse_reply
from events.stream import StreamState
from events.stream_types import Instruction, Malformed, RequestReplay, RequestSnapshot
from events.wake import Bell

logger = logging.getLogger(__name__)

LIVE_SLICE = 128
"""Live messages taken from one stream before the next has its turn."""
REPLY_SLICE = 256
TICK_S = 0.1


class FeedHandler(Protocol):
    """Called on the feed's thread, in stream order; must not raise and should not wait."""

    def handle(self, stream_id: str, instruction: Instruction, topic: bytes) -> None:
        """Apply and Clear in order, and the notices. Requests are performed by the feed and not passed on."""

    def connection(self, stream_id: str, up: bool) -> None:
        """The subscription of this stream came up or went down."""


class EventFeed:
    """Drives any number of streams. `start` it, `add` and `remove` streams from any thread, `close` it.

    `hwm`: messages ZeroMQ keeps for one stream while the handler is busy; more are dropped, show as a gap and are
    replayed.
    """

    def __init__(self, handler: FeedHandler, hwm: int = 100_000, context: Context | None = None) -> None:
        self._handler = handler
        self._hwm = hwm
        self._own_context = context is None
        self._context: Context = context or zmq.Context()
        self._poller = zmq.Poller()
        self._bell = Bell()
        self._poller.register(self._bell.fd, zmq.POLLIN)
        self._commands: deque[Callable[[], None]] = deque()
        self._subscriptions: dict[Any, Subscription] = {}  # SUB and monitor sockets -> their subscription
        self._dealers: dict[Any, FollowedStream] = {}
        self._streams: dict[str, FollowedStream] = {}
        self._lock = threading.Lock()
        self._closing = False
        self.ignored_messages = 0
        """Live messages of topics nobody follows."""
        self._thread = threading.Thread(target=self._run, name="kv-feed", daemon=True)

    # Any thread

    def start(self) -> None:
        self._thread.start()

    def add(self, source: StreamSource) -> None:
        """Follow a stream; one with the same stream_id is replaced."""
        self._command(lambda: self._add(source))

    def remove(self, stream_id: str) -> None:
        """Stop following; nothing of it is handed over afterwards once this command was performed."""
        self._command(lambda: self._remove(stream_id))

    def bind(self, endpoint: str, accept: Callable[[str], StreamSource | None]) -> str:
        """Bind a SUB for publishers that connect. `accept(topic)` names the stream of a new topic, or refuses (None).

        Returns the bound address. Raises zmq.ZMQError if it cannot be bound.
        """
        subscription = Subscription(self._context, None, bind=True, hwm=self._hwm)
        subscription.open(endpoint)
        subscription.accept = accept
        self._command(lambda: self._register(subscription))
        bound = subscription.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def epoch(self, stream_id: str, epoch: str) -> None:
        """Pass on what the worker says about its epoch."""
        self._command(lambda: self._on_stream(stream_id, lambda state, now: state.epoch(epoch, now)))

    def states(self) -> dict[str, StreamState]:
        """The streams by id, to read their stats, phase and position; they belong to the feed's thread."""
        return {stream_id: stream.state for stream_id, stream in list(self._streams.items())}

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close_sockets()
        self._bell.close()
        if self._own_context:
            self._context.term()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                return
            self._commands.append(command)
            self._bell.ring()

    # The feed's thread

    def _run(self) -> None:
        tick_at = time.monotonic() + TICK_S
        while not self._closing:
            ready = dict(self._poller.poll(max(0, math.ceil((tick_at - time.monotonic()) * 1000))))
            if ready.pop(self._bell.fd, None):
                self._bell.silence()
                while self._commands:
                    self._commands.popleft()()
            for socket in ready:
                # A handler or an earlier socket of this round may have closed it.
                if (subscription := self._subscriptions.get(socket)) is not None:
                    if socket is subscription.monitor:
                        self._read_monitor(subscription)
                    else:
                        self._read_live(subscription)
                elif (stream := self._dealers.get(socket)) is not None:
                    self._read_replies(stream)
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                for stream in list(self._streams.values()):
                    self._perform(stream, stream.state.tick(now))
        self._close_sockets()

    def _add(self, source: StreamSource) -> None:
        self._remove(source.stream_id)
        stream = FollowedStream(source)
        try:
            subscription = Subscription(self._context, source.topic, bind=False, hwm=self._hwm)
            subscription.open(source.endpoint)
        except zmq.ZMQError as error:
            reason = f"cannot subscribe to {source.endpoint!r}: {error}"
            self._handler.handle(source.stream_id, Malformed(reason), b"")
            logger.error("stream %s: %s", source.stream_id, reason)
            return
        subscription.stream = stream
        self._streams[source.stream_id] = stream
        self._register(subscription)
        if source.endpoint.startswith("inproc://"):  # has no handshake to wait for
            self._connected(stream)

    def _register(self, subscription: Subscription) -> None:
        for socket in (subscription.socket, subscription.monitor):
            self._subscriptions[socket] = subscription
            self._poller.register(socket, zmq.POLLIN)

    def _remove(self, stream_id: str) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self._drop_request(stream)
        for subscription in set(self._subscriptions.values()):
            if subscription.stream is stream:
                self._unregister(subscription)
            for topic in [t for t, s in subscription.by_topic.items() if s is stream]:
                del subscription.by_topic[topic]

    def _unregister(self, subscription: Subscription) -> None:
        for socket in (subscription.socket, subscription.monitor):
            self._poller.unregister(socket)
            del self._subscriptions[socket]
        subscription.close()

    def _on_stream(self, stream_id: str, stimulus: Callable[[StreamState, float], list[Instruction]]) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._perform(stream, stimulus(stream.state, time.monotonic()))

    # Connections

    def _read_monitor(self, subscription: Subscription) -> bool:
        """Handle what happened to the connections; True where something did."""
        happened = False
        while subscription.monitor.poll(0):
            message = recv_monitor_message(subscription.monitor)
            event = message["event"]
            happened = True
            if subscription.bound:
                if event == zmq.EVENT_DISCONNECTED:
                    self._peer_left(subscription, int(message["value"]))
            elif subscription.stream is not None:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected(subscription.stream)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._disconnected(subscription.stream)
        return happened

    def _connected(self, stream: FollowedStream) -> None:
        self._handler.connection(stream.source.stream_id, True)
        self._perform(stream, stream.state.connected(time.monotonic()))

    def _disconnected(self, stream: FollowedStream) -> None:
        if not stream.state.online:
            return
        self._drop_request(stream)
        self._perform(stream, stream.state.disconnected())
        self._handler.connection(stream.source.stream_id, False)

    def _peer_left(self, subscription: Subscription, descriptor: int) -> None:
        for topic in [t for t, d in subscription.connections.items() if d == descriptor]:
            del subscription.connections[topic]
            stream = subscription.by_topic.get(topic)
            if stream is not None:
                self._disconnected(stream)

    # Live messages

    def _read_live(self, subscription: Subscription) -> None:
        messages: list[list[zmq.Frame]] = []
        for _ in range(LIVE_SLICE):
            try:
                messages.append(subscription.socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
        # A connection's end is reported before anything of the next one can be received, so if nothing is reported
        # now, all of these are of the connection we know. Otherwise nobody can tell, and replay has them.
        if self._read_monitor(subscription) and not subscription.bound:
            return
        for message in messages:
            self._live_message(subscription, message)

    def _live_message(self, subscription: Subscription, message: list[zmq.Frame]) -> None:
        try:
            frame = parse_live([part.bytes for part in message])
        except DecodeError as error:
            for listener in subscription.streams():
                self._handler.handle(listener.source.stream_id, Malformed(str(error)), b"")
            return
        stream: FollowedStream | None = subscription.stream
        if subscription.bound:
            stream = self._stream_of_topic(subscription, frame, int(message[0].get(zmq.SRCFD)))
        if stream is None or (stream.source.topic and stream.source.topic.encode() != frame.topic):
            self.ignored_messages += 1  # a subscription matches every topic that begins with its own
            return
        stream.topic = frame.topic
        self._perform(stream, stream.state.live(frame.seq, frame.payload, time.monotonic()))

    def _stream_of_topic(self, subscription: Subscription, frame: LiveFrame, descriptor: int) -> FollowedStream | None:
        """The stream of a publisher that connected to us; brings it online if this is a new connection."""
        if frame.topic not in subscription.by_topic:
            assert subscription.accept is not None
            source = subscription.accept(frame.topic.decode(errors="replace"))
            if source is None:
                logger.warning("events of unknown topic %r are ignored", frame.topic)
            else:
                self._remove(source.stream_id)
                self._streams[source.stream_id] = FollowedStream(source)
            subscription.by_topic[frame.topic] = self._streams[source.stream_id] if source else None
        stream = subscription.by_topic[frame.topic]
        if stream is not None and subscription.connections.get(frame.topic) != descriptor:
            self._disconnected(stream)
            subscription.connections[frame.topic] = descriptor
            self._connected(stream)
        return stream

    # Requests

    def _perform(self, stream: FollowedStream, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, RequestReplay):
                self._request(stream, instruction.request_id, instruction.start_seq)
            elif isinstance(instruction, RequestSnapshot):
                self._request(stream, instruction.request_id, SNAPSHOT_SEQ)
            else:
                self._handler.handle(stream.source.stream_id, instruction, stream.topic)

    def _request(self, stream: FollowedStream, request_id: int, start_seq: int) -> None:
        """Ask on a connection of its own, so that late replies to an older request cannot be taken for its."""
        self._drop_request(stream)
        assert stream.source.replay_endpoint is not None
        try:
            dealer = ask(self._context, stream.source.replay_endpoint, start_seq)
        except zmq.ZMQError as error:
            reason = f"cannot ask {stream.source.replay_endpoint!r}: {error}"
            self._perform(stream, stream.state.request_failed(request_id, time.monotonic(), reason))
            return
        stream.dealer, stream.request_id = dealer, request_id
        self._dealers[dealer] = stream
        self._poller.register(dealer, zmq.POLLIN)

    def _drop_request(self, stream: FollowedStream) -> None:
        if stream.dealer is not None:
            self._poller.unregister(stream.dealer)
            del self._dealers[stream.dealer]
            stream.dealer.close(0)
            stream.dealer = None

    def _read_replies(self, stream: FollowedStream) -> None:
        dealer, request_id = stream.dealer, stream.request_id
        assert dealer is not None
        for _ in range(REPLY_SLICE):
            if stream.dealer is not dealer:
                return  # performing a reply replaced the request
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            try:
                reply = parse_reply(frames)
            except DecodeError as error:
                self._handler.handle(stream.source.stream_id, Malformed(str(error)), b"")
                continue
            if reply.is_end:
                self._drop_request(stream)
                self._perform(stream, stream.state.reply_end(request_id, now))
                return
            self._perform(stream, stream.state.reply(request_id, reply.seq, reply.payload, now))

    def _close_sockets(self) -> None:
        while self._commands:  # what was bound or added last must be closed too
            self._commands.popleft()()
        for stream in self._streams.values():
            self._drop_request(stream)
        for subscription in set(self._subscriptions.values()):
            self._unregister(subscription)
