"""Feed that follows many publisher streams on one thread and hands their batches to a handler.

A shell: owns the SUB, monitor and DEALER sockets, one thread with its event loop, and the clock. StreamState makes all
decisions. Streams may be added and removed at any time.

Monitor sockets are needed because a restarted publisher may continue with a higher sequence number before its messages
are read. Messages are handed over only after checking that their connection is still the one that the stream knows.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from events.feed_sockets import (
    MAX_TOPICS,
    BoundSubscription,
    Context,
    FollowedStream,
    PendingRequest,
    SlicedWork,
    Socket,
    StreamSource,
    StreamSubscription,
    Subscription,
)
from events.frames import (
    SNAPSHOT_REQUEST_FRAMES,
    SNAPSHOT_SEQ,
    build_replay_request,
    parse_live_message,
    parse_reply_message,
    parse_snapshot_message,
)
from events.stream import StreamState
from events.stream_types import (
    Apply,
    Clear,
    Connection,
    DroppedMessages,
    Instruction,
    MalformedMessage,
    RequestReplay,
    RequestSnapshot,
)
from events.types import DecodeError, EventsError
from options.system import import_event_loops

logger = logging.getLogger(__name__)

REPLY_SLICE = 256
TURN_BYTES = 256 << 10
"""Most bytes of payload that are applied for one stream before other streams are served."""
REPLY_COST_BYTES, REPLY_COST_DIVISOR = 64, 16
"""A reply that is queued counts for so many bytes, and for this fraction of its own bytes."""
TICK_S = 0.1
STUCK_AFTER_S = 15.0
"""Seconds without a tick after which the thread counts as stuck."""
RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""First and longest pause before a failed stream is followed again; the pause doubles each time."""
FAULT_PAUSE_S = 0.05
REOPEN_S = 10.0
"""Seconds after which a lost connection is opened anew: after a message that is too long ZeroMQ does not try again."""


InstructionHandler = Callable[[str, Instruction, bytes], SlicedWork | None]
"""Function that handles an instruction of a stream, given the stream's id and the topic of its last message.

It gets the batches (`Apply`), the `Clear`s and the notices of each stream, in order, on the feed's thread, and should
not wait. The feed performs requests itself. A handler returns long work as an iterator, each step of which does a
slice. The feed serves other streams between the slices, and gives the handler no other batch of this stream before
their end. If the handler or the iterator raises an exception, the feed resets the stream.
"""


class _SocketReader(NamedTuple):
    """Function that reads some of the new messages of a socket."""

    read: Callable[[], object]
    stream: FollowedStream | None
    """Stream that is reset if `read` raises an exception; None if the socket is not of one stream."""


class EventFeed:
    """Follows any number of streams. All public methods may be called from any thread."""

    def __init__(self, handle: InstructionHandler) -> None:
        """Prepare a feed that gives its batches and notices to `handle`. `start` starts its thread."""
        self._handle = handle
        self._context: Context = zmq.Context()
        # As many sockets as ZeroMQ can have: the default of 1,023 is used up by 341 streams.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))

        self._loop: asyncio.AbstractEventLoop = import_event_loops().new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-feed", daemon=True)
        self._lock = threading.Lock()
        """Held while a command is submitted, so that the loop is not closed meanwhile."""
        self._is_closing = False
        self._ticked_at_s = 0.0

        self._stream_by_id: dict[str, FollowedStream] = {}
        self._bound_subscriptions: list[BoundSubscription] = []
        self._reader_by_socket: dict[Socket, _SocketReader] = {}
        """Reader of each open SUB, monitor and DEALER socket."""
        self._scheduled_sockets: set[Socket] = set()
        """Sockets that are read in the next turn of the loop."""

        self.ignored_message_count = 0
        """Live messages whose topic belongs to no followed stream."""
        self.fault_count = 0
        """Exceptions on the feed's thread; each ended one message or one stream."""

    # Any thread

    def start(self) -> None:
        self._ticked_at_s = time.monotonic()
        self._loop.call_later(TICK_S, self._run_tick)
        self._thread.start()

    def describe_fault(self) -> str | None:
        """Return why the feed's thread does not run; None if it runs."""
        if self._is_closing or self._thread.ident is None:
            return None
        if not self._thread.is_alive():
            return "the thread that reads events has ended"
        idle_s = time.monotonic() - self._ticked_at_s
        return f"the thread that reads events has done nothing for {idle_s:.0f} s" if idle_s > STUCK_AFTER_S else None

    def has_publisher(self) -> bool:
        """Return whether a publisher is connected to a bound socket."""
        return any(subscription.publisher_count for subscription in self._bound_subscriptions)

    def rematch_topics(self) -> None:
        """Search again for the streams of unclaimed topics, because a worker was added."""
        self._submit(self._rematch_topics)

    def add(self, source: StreamSource) -> None:
        """Follow a stream, in place of one with the same `stream_id`."""
        self._submit(lambda: self._add(source))

    def remove(self, stream_id: str) -> None:
        """Stop following a stream, when the feed's thread performs this command."""
        self._submit(lambda: self._remove(stream_id))

    def schedule_work(self, stream_id: str, work: SlicedWork) -> None:
        """Do work on the feed's thread after a stream's queued instructions, unless the stream is removed before."""
        self._submit(lambda: self._enqueue_work(stream_id, work))

    def bind(self, endpoint: str, find_source: Callable[[str], StreamSource | None]) -> str:
        """Bind a SUB socket for publishers that connect to it, and return the bound address.

        `find_source` returns the stream of a topic; None leaves the topic unclaimed. Raises zmq.ZMQError.
        """
        subscription = BoundSubscription(self._context, endpoint, find_source)
        self._bound_subscriptions.append(subscription)
        self._submit(lambda: self._register(subscription, None))
        return subscription.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def get_stream_state(self, stream_id: str) -> StreamState | None:
        """Return the state of a stream; None if it is not followed."""
        stream = self._stream_by_id.get(stream_id)
        return stream.stream_state if stream is not None else None

    def close(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()
        self._loop.close()
        self._context.term()

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the feed's thread run a command; ignored after `close`."""
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(self._run_command, command)

    # The feed's thread

    def _run_command(self, command: Callable[[], None]) -> None:
        with self._guard(None):
            command()

    @contextmanager
    def _guard(self, stream: FollowedStream | None) -> Iterator[None]:
        """Do not let an exception in the `with` block end the thread, which follows all streams.

        An exception resets `stream`. If `stream` is None, the exception is logged, and the rest of the block is lost.
        """
        try:
            yield
        except Exception as error:  # a foreign message may cause an exception anywhere
            self.fault_count += 1
            if stream is None:
                logger.exception("the thread that reads events goes on after an error")
                time.sleep(FAULT_PAUSE_S)
            else:
                self._restart_stream(stream, error)

    def _enqueue_work(self, stream_id: str, work: SlicedWork) -> None:
        stream = self._stream_by_id.get(stream_id)
        if stream is not None:
            stream.pending_work.append(work)
            self._schedule_turn(stream)

    def _enqueue_instructions(self, stream: FollowedStream, instructions: list[Instruction]) -> None:
        stream.enqueue(instructions)
        if instructions:
            self._schedule_turn(stream)

    def _schedule_turn(self, stream: FollowedStream) -> None:
        """Have a part of a stream's work done in the next turn of the loop. The loop reads sockets before each turn."""
        if not stream.is_turn_scheduled:
            stream.is_turn_scheduled = True
            self._loop.call_soon(self._run_turn, stream)

    def _run_turn(self, stream: FollowedStream) -> None:
        stream.is_turn_scheduled = False
        if self._stream_by_id.get(stream.source.stream_id) is not stream:
            return  # it was removed
        with self._guard(stream):
            self._process_stream(stream)
        if stream.is_busy:
            self._schedule_turn(stream)

    def _watch(self, socket: Socket, reader: _SocketReader) -> None:
        """Read a socket whenever it has input, and in the next turn, as earlier input is not reported."""
        self._reader_by_socket[socket] = reader
        self._loop.add_reader(socket.fileno(), self._on_readable, socket)
        self._schedule_read(socket)

    def _unwatch(self, socket: Socket) -> None:
        self._reader_by_socket.pop(socket, None)
        self._loop.remove_reader(socket.fileno())

    def _on_readable(self, socket: Socket) -> None:
        """Read a socket that has new input, unless it is read in this turn of the loop anyway."""
        if socket not in self._scheduled_sockets:
            self._read_socket(socket)

    def _schedule_read(self, socket: Socket) -> None:
        """Have a socket read in the next turn of the loop."""
        if socket not in self._scheduled_sockets:
            self._scheduled_sockets.add(socket)
            self._loop.call_soon(self._read_socket, socket)

    def _read_socket(self, socket: Socket) -> None:
        """Read some messages of a socket, unless the socket was closed meanwhile.

        ZeroMQ reports several new messages only once, so a socket with more input is read again in the next turn.
        """
        self._scheduled_sockets.discard(socket)
        reader = self._reader_by_socket.get(socket)
        if reader is None or not _has_input(socket):
            return
        with self._guard(reader.stream):
            reader.read()
        if not socket.closed and _has_input(socket):
            self._schedule_read(socket)

    def _run_tick(self) -> None:
        self._loop.call_later(TICK_S, self._run_tick)
        self._ticked_at_s = time.monotonic()
        with self._guard(None):
            self._tick(self._ticked_at_s)

    def _tick(self, now: float) -> None:
        """Retry failed streams, open lost connections anew, and tell the other streams the time."""
        for stream in list(self._stream_by_id.values()):
            with self._guard(stream):
                self._tick_stream(stream, now)

    def _tick_stream(self, stream: FollowedStream, now: float) -> None:
        self._report_dropped_messages(stream)
        if stream.retry_at is not None and now >= stream.retry_at:
            stream.retry_at = None
            if stream.is_connected:
                self._on_connected(stream)
            else:
                self._reopen(stream)
        elif stream.disconnected_at is not None and now - stream.disconnected_at >= REOPEN_S:
            stream.disconnected_at = now
            self._reopen(stream)
        elif not stream.is_busy:
            self._enqueue_instructions(stream, stream.stream_state.on_tick(now))

    def _restart_stream(self, stream: FollowedStream, error: Exception) -> None:
        """Forget all about a stream of cache events after an exception, and follow it again after a pause.

        It is unknown which events were handled before, so the handler is told to remove all blocks of the stream.
        """
        stream.fault_count += 1
        doubling_count = min(stream.fault_count - 1, 10)
        pause_s = min(RETRY_S * 2.0**doubling_count, MAX_RETRY_S)
        reason = f"{type(error).__name__}: {error}"
        stream_id = stream.source.stream_id
        is_surprising = stream.fault_count == 1 and not isinstance(error, EventsError)
        logger.error("stream %s begins anew in %g s: %s", stream_id, pause_s, reason, exc_info=is_surprising)

        self._cancel_request(stream)
        stream.reset(time.monotonic() + pause_s)

        notices: list[Instruction] = [Clear(reason), MalformedMessage(reason)]
        if stream.subscription is not None:
            notices.append(Connection(False))
        for notice in notices:
            with self._guard(None):  # one by one, because the handler may have raised the exception
                self._handle(stream_id, notice, stream.topic)

    def _add(self, source: StreamSource) -> None:
        self._remove(source.stream_id)
        stream = self._stream_by_id[source.stream_id] = FollowedStream(source)
        with self._guard(stream):
            self._reopen(stream)

    def _reopen(self, stream: FollowedStream) -> None:
        """Subscribe to a stream anew, unless its publisher connects to a bound socket. Raises EventsError."""
        if isinstance(stream.subscription, BoundSubscription):
            return
        self._unsubscribe(stream)
        try:
            stream.subscription = StreamSubscription(self._context, stream)
        except zmq.ZMQError as error:
            raise EventsError(f"cannot subscribe to {stream.source.endpoint!r}: {error}") from error
        self._register(stream.subscription, stream)

    def _register(self, subscription: Subscription, stream: FollowedStream | None) -> None:
        """Read the sockets of a new subscription. `stream`: the only stream of it; None for a bound socket."""
        self._watch(subscription.socket, _SocketReader(lambda: self._read_live(subscription), stream))
        self._watch(subscription.monitor, _SocketReader(lambda: self._read_monitor(subscription), stream))

    def _unregister(self, subscription: Subscription) -> None:
        self._unwatch(subscription.socket)
        self._unwatch(subscription.monitor)
        subscription.close()

    def _remove(self, stream_id: str) -> None:
        stream = self._stream_by_id.pop(stream_id, None)
        if stream is not None:
            self._cancel_request(stream)
            self._unsubscribe(stream)

    def _unsubscribe(self, stream: FollowedStream) -> None:
        """Close a stream's own subscription, or make its topic of a bound socket unclaimed."""
        if isinstance(stream.subscription, BoundSubscription):
            stream.subscription.stream_by_topic.pop(stream.topic)
        elif stream.subscription is not None:
            self._unregister(stream.subscription)
        stream.subscription = None

    def _read_monitor(self, subscription: Subscription) -> bool:
        """Handle connections that began or ended, as ZeroMQ's monitor of a SUB socket reports; return whether any did.

        A StreamSubscription has one connection, to the publisher of its stream. A bound socket has a connection from
        each publisher, and the stream of a publisher is unknown until its first message comes.
        """
        had_event = False
        while subscription.monitor.poll(0):
            message = recv_monitor_message(subscription.monitor)
            event_type = message["event"]
            had_event = True
            if isinstance(subscription, BoundSubscription):
                self._handle_publisher_event(subscription, event_type, int(message["value"]))
            elif event_type == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected(subscription.stream)
            elif event_type == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(subscription.stream)
        return had_event

    def _handle_publisher_event(self, subscription: BoundSubscription, event_type: int, descriptor: int) -> None:
        """Handle the begin or the end of a connection of a bound socket."""
        if event_type == zmq.EVENT_ACCEPTED:
            subscription.descriptors.add(descriptor)
        elif event_type == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            subscription.publisher_count += 1
        elif event_type == zmq.EVENT_DISCONNECTED:
            subscription.remove_connection(descriptor)
            for stream in list(subscription.stream_by_topic.values()):
                if stream.descriptor == descriptor:
                    stream.descriptor = None
                    with self._guard(stream):
                        self._on_disconnected(stream)

    def _on_connected(self, stream: FollowedStream) -> None:
        stream.is_connected, stream.disconnected_at = True, None
        if stream.retry_at is not None:
            return  # the pause after a fault is not over
        self._handle(stream.source.stream_id, Connection(True), stream.topic)
        self._enqueue_instructions(stream, stream.stream_state.on_connected(time.monotonic()))

    def _on_disconnected(self, stream: FollowedStream) -> None:
        stream.is_connected, stream.disconnected_at = False, time.monotonic()
        if not stream.stream_state.is_online:
            return
        self._cancel_request(stream)
        self._enqueue_instructions(stream, stream.stream_state.on_disconnected())
        self._handle(stream.source.stream_id, Connection(False), stream.topic)

    def _read_live(self, subscription: Subscription) -> None:
        """Read and handle some of the live messages of a SUB socket, unless its stream has queued work."""
        if isinstance(subscription, StreamSubscription) and subscription.stream.is_busy:
            return
        messages = subscription.receive_messages()
        # ZeroMQ reports the end of a connection before messages of the next one can be received. So without a report
        # now, all messages came on the known connection. Otherwise they are dropped, and the replay that follows a new
        # connection brings them again. On a bound socket each message itself tells its connection.
        had_connection_event = self._read_monitor(subscription)
        if had_connection_event and isinstance(subscription, StreamSubscription):
            return
        for frames in messages:
            self._handle_live_message(subscription, frames)

    def _handle_live_message(self, subscription: Subscription, frames: list[zmq.Frame]) -> None:
        """Give a live message to the state machine of its stream, and queue the work that results.

        The message is dropped and counted if its topic belongs to no stream, or if too much of its stream waits.
        """
        try:
            message = parse_live_message([frame.bytes for frame in frames])
        except DecodeError as error:
            stream = subscription.get_stream(frames[0].bytes)
            if stream is None:
                self.ignored_message_count += 1
            else:
                self._handle(stream.source.stream_id, MalformedMessage(str(error)), b"")
            return
        if isinstance(subscription, BoundSubscription):
            stream = self._get_topic_stream(subscription, message.topic, int(frames[0].get(zmq.SRCFD)))
        else:
            stream = subscription.stream
        if stream is None or not stream.accepts_topic(message.topic):
            self.ignored_message_count += 1
            return
        state = stream.stream_state
        if stream.is_full:
            state.unreported_drop_count += 1
            return
        stream.topic = message.topic
        with self._guard(stream):
            instructions = state.on_live_batch(message.seq, message.payload, time.monotonic(), message.publisher_id)
            self._enqueue_instructions(stream, instructions)

    def _get_topic_stream(
        self, subscription: BoundSubscription, topic: bytes, descriptor: int
    ) -> FollowedStream | None:
        """Return the stream to which a message on a bound socket belongs by its topic; None if there is none.

        A bound socket receives the messages of many publishers, which connect to it, each with a topic of its own. The
        first message of a topic connects the topic to its stream. `descriptor`: file descriptor of the connection on
        which this message came. If it is another one than before, the publisher has connected again.
        """
        stream = subscription.get_stream(topic)
        if stream is None:
            is_new = subscription.record_unclaimed_topic(topic, descriptor)
            return self._claim_topic(subscription, topic, is_new=True) if is_new else None
        if stream.descriptor != descriptor:  # messages may have been lost, so the stream begins a repair
            stream.descriptor = descriptor
            with self._guard(stream):
                self._on_disconnected(stream)
            with self._guard(stream):
                self._on_connected(stream)
        return stream

    def _claim_topic(self, subscription: BoundSubscription, topic: bytes, *, is_new: bool) -> FollowedStream | None:
        """Follow the stream to which an unclaimed topic belongs, and return it; None, logged if new, if none does."""
        source = subscription.find_source(topic.decode(errors="replace"))
        stream = None if source is None else self._stream_by_id.get(source.stream_id)
        has_other_topic = stream is not None and stream.subscription is subscription and stream.is_connected
        if source is None or has_other_topic:
            if is_new:
                has_room = len(subscription.descriptor_by_unclaimed_topic) < MAX_TOPICS
                level = logging.WARNING if has_room else logging.DEBUG
                logger.log(level, "events of topic %r are ignored", topic)
            return None
        self._remove(source.stream_id)
        stream = self._stream_by_id[source.stream_id] = subscription.stream_by_topic[topic] = FollowedStream(source)
        stream.subscription, stream.topic = subscription, topic
        stream.descriptor = subscription.descriptor_by_unclaimed_topic.pop(topic)
        with self._guard(stream):
            self._on_connected(stream)
        return stream

    def _rematch_topics(self) -> None:
        for subscription in self._bound_subscriptions:
            for topic in list(subscription.descriptor_by_unclaimed_topic):
                self._claim_topic(subscription, topic, is_new=False)

    def _process_stream(self, stream: FollowedStream) -> None:
        """Perform queued work of a stream, then its replies, until the stream has used up its turn of TURN_BYTES."""
        used_bytes = 0
        while stream.is_busy and used_bytes < TURN_BYTES:
            if stream.pending_work:
                used_bytes += self._perform_next(stream)
            elif stream.request is not None:
                frames = stream.request.pop_reply()
                stream.enqueue(self._handle_reply(stream, stream.request, frames))
                # To queue a reply costs little. Its payload counts in full when it is applied.
                used_bytes += REPLY_COST_BYTES + sum(map(len, frames)) // REPLY_COST_DIVISOR

    def _perform_next(self, stream: FollowedStream) -> int:
        """Perform an instruction, or one slice of long work; return the bytes that this uses of the stream's turn."""
        work = stream.pop_work()
        if isinstance(work, Instruction):
            self._perform(stream, work)
            return len(work.payload) if isinstance(work, Apply) else 0
        with suppress(StopIteration):
            next(work)
            stream.pending_work.appendleft(work)  # it has more
        return TURN_BYTES  # one slice in each turn

    def _perform(self, stream: FollowedStream, instruction: Instruction) -> None:
        """Send a request, or give another instruction to the handler."""
        source = stream.source
        match instruction:
            case RequestReplay(request_id, start_seq):
                self._send_request(stream, request_id, source.replay_endpoint, build_replay_request(start_seq))
            case RequestSnapshot(request_id) if source.snapshot_endpoint is None:
                self._send_request(stream, request_id, source.replay_endpoint, build_replay_request(SNAPSHOT_SEQ))
            case RequestSnapshot(request_id):
                self._send_request(stream, request_id, source.snapshot_endpoint, SNAPSHOT_REQUEST_FRAMES)
            case _:
                remaining_work = self._handle(source.stream_id, instruction, stream.topic)
                if remaining_work is not None:
                    stream.pending_work.appendleft(remaining_work)

    def _report_dropped_messages(self, stream: FollowedStream) -> None:
        state = stream.stream_state
        if state.unreported_drop_count:
            count, state.unreported_drop_count = state.unreported_drop_count, 0
            self._handle(stream.source.stream_id, DroppedMessages(count), stream.topic)

    def _send_request(self, stream: FollowedStream, request_id: int, endpoint: str | None, frames: list[bytes]) -> None:
        """Ask a publisher for missed batches or for a snapshot, in place of an earlier request of this stream."""
        self._cancel_request(stream)
        assert endpoint is not None
        try:
            request = stream.request = PendingRequest(self._context, endpoint, frames, request_id)
        except zmq.ZMQError as error:
            self._fail_request(stream, request_id, f"cannot ask {endpoint!r}: {error}")
            return
        self._watch(request.socket, _SocketReader(lambda: self._read_replies(stream, request), stream))

    def _fail_request(self, stream: FollowedStream, request_id: int, reason: str) -> None:
        self._enqueue_instructions(stream, stream.stream_state.on_request_failed(request_id, time.monotonic(), reason))

    def _cancel_request(self, stream: FollowedStream) -> None:
        if stream.request is not None:
            self._unwatch(stream.request.socket)
            stream.request.socket.close(0)
            stream.request = None

    def _read_replies(self, stream: FollowedStream, request: PendingRequest) -> None:
        """Queue the replies to a stream's request that have come; if too many bytes wait, the request fails."""
        for _ in range(REPLY_SLICE):
            try:
                has_room = request.receive_reply()
            except zmq.Again:
                break
            if not has_room:
                self._cancel_request(stream)
                stream.stream_state.unreported_drop_count += 1
                self._fail_request(stream, request.request_id, "too many bytes or frames of replies")
                return
        self._schedule_turn(stream)

    def _handle_reply(self, stream: FollowedStream, request: PendingRequest, frames: list[bytes]) -> list[Instruction]:
        """Give one message of a reply to the stream's state machine; return the instructions that result.

        A reply to a replay request ends with a marker. The socket for snapshots sends one message only.
        """
        now = time.monotonic()
        state, request_id = stream.stream_state, request.request_id
        try:
            if request.is_for_snapshot_socket:
                snapshot = parse_snapshot_message(frames)
                self._cancel_request(stream)
                return state.on_snapshot(request_id, snapshot.last_seq, snapshot.publisher_id, snapshot.chunks, now)
            reply = parse_reply_message(frames)
        except DecodeError as error:
            return [MalformedMessage(str(error))]
        if reply.is_end:
            self._cancel_request(stream)
            return state.on_reply_end(request_id, now)
        return state.on_reply(request_id, reply.seq, reply.payload, now, reply.publisher_id)

    def _close_sockets(self) -> None:
        for stream_id in list(self._stream_by_id):
            self._remove(stream_id)
        for subscription in self._bound_subscriptions:
            self._unregister(subscription)


def _has_input(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
