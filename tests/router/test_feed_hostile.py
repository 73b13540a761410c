"""Streams that misbehave: what one of them does ends that one, and the others go on. Real sockets, counted turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from events import feed_sockets
from events.config import KVEventsConfig
from events.feed import EventFeed
from events.feed_sockets import (
    MAX_MESSAGE_BYTES,
    MAX_TOPIC_BYTES,
    MAX_TOPICS,
    MAX_WAITING_MESSAGES,
    BoundSubscription,
    FollowedStream,
    SlicedWork,
    StreamSource,
)
from events.frames import END_SEQ, pack_seq
from events.publisher import EventPublisher
from events.sources import EventSource, resolve_endpoint
from events.stream_types import (
    Apply,
    Clear,
    Connection,
    DroppedMessages,
    Gap,
    Instruction,
    MalformedMessage,
    StartMode,
    StreamConfig,
)
from events.types import BlockStored, Event
from router.decide.config import CostConfig, LearnConfig
from router.decide.load_tracker import LoadTracker
from router.fleet.index_feed import IndexFeed
from router.fleet.peers import PeerLoads, PeerSockets
from router.index import make_index
from router.index.protocol import HolderId, PrefixIndex, Scope
from simulation.steps import StepTimes


def wait_until(condition: Callable[[], object], description: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {description}"
        time.sleep(0.01)


def wait_in_slices(release: threading.Event) -> SlicedWork:
    while not release.is_set():
        time.sleep(0.001)
        yield


class Recorder:
    """A handler that notes what it is told, and raises or hands back work as the test says."""

    def __init__(self) -> None:
        self.instructions: list[tuple[str, Instruction]] = []
        self.reply: Callable[[str, Instruction], SlicedWork | None] = lambda stream_id, instruction: None

    def handle(self, stream_id: str, instruction: Instruction, topic: bytes) -> SlicedWork | None:
        if not isinstance(instruction, Connection):
            self.instructions.append((stream_id, instruction))
        return self.reply(stream_id, instruction)

    def count_applied(self, stream_id: str) -> int:
        return sum(
            name == stream_id and isinstance(instruction, Apply) for name, instruction in list(self.instructions)
        )

    def kinds(self, stream_id: str) -> set[type]:
        return {type(instruction) for name, instruction in list(self.instructions) if name == stream_id}


class Pub:
    """A publisher of raw frames."""

    def __init__(self, context: zmq.Context[Any], keeps: int = 1000) -> None:
        """`keeps`: messages for each subscriber that does not take them; ZeroMQ looks at it when a socket is bound."""
        self._socket = pub_socket(context)
        self._socket.sndhwm = keeps
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.seq = 0

    def send(self, payload: bytes = b"x") -> None:
        self._socket.send_multipart([b"", pack_seq(self.seq), payload])
        self.seq += 1

    def source(self, name: str) -> StreamSource:
        return StreamSource(name, f"tcp://127.0.0.1:{self.port}", config=StreamConfig(start_mode=StartMode.LIVE))


OPEN_SOCKETS: list[zmq.Socket[bytes]] = []
"""Closed after the test."""


def pub_socket(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    OPEN_SOCKETS.append(context.socket(zmq.PUB))
    return OPEN_SOCKETS[-1]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    while OPEN_SOCKETS:
        OPEN_SOCKETS.pop().close(0)
    context.term()


@pytest.fixture
def start_feed() -> Iterator[Callable[[Any], EventFeed]]:
    feeds: list[EventFeed] = []

    def start(handler: Any) -> EventFeed:
        feeds.append(EventFeed(handler.handle))
        feeds[-1].start()
        return feeds[-1]

    yield start
    for feed in feeds:
        feed.close()


def keep_sending(pub: Pub, condition: Callable[[], object], description: str) -> None:
    def send_and_check() -> object:
        pub.send()
        return condition()

    wait_until(send_and_check, description)


def test_a_stream_that_raises_begins_anew_and_the_others_go_on(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    handler, good, bad = Recorder(), Pub(context), Pub(context)
    feed = start_feed(handler)
    feed.add(good.source("good"))
    feed.add(bad.source("bad"))
    keep_sending(bad, lambda: handler.count_applied("bad"), "both are followed")

    def raise_for_bad(stream_id: str, instruction: Instruction) -> None:
        if stream_id == "bad" and isinstance(instruction, Apply):
            raise ValueError("planted")

    handler.reply = raise_for_bad
    keep_sending(bad, lambda: feed.fault_count, "it raises")
    keep_sending(bad, lambda: {Clear, MalformedMessage} <= handler.kinds("bad"), "what it held is forgotten")
    keep_sending(good, lambda: handler.count_applied("good") > 3, "the other is followed")
    assert feed.describe_fault() is None
    handler.reply = lambda stream_id, instruction: None
    before = handler.count_applied("bad")
    keep_sending(bad, lambda: handler.count_applied("bad") > before, "it is followed again")


def test_whatever_line_raises_is_behind_the_guard(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    """Every method that the thread calls is made to raise once: the thread lives, and the fault is counted."""
    handler, pub = Recorder(), Pub(context)
    feed = start_feed(handler)
    feed.add(pub.source("a"))
    for name in (
        "_tick",
        "_read_live",
        "_handle_live_message",
        "_enqueue_instructions",
        "_process_stream",
        "_read_monitor",
    ):
        original, faults = getattr(feed, name), feed.fault_count

        def fails(*args: Any, name: str = name, original: Any = original) -> None:
            setattr(feed, name, original)
            raise RuntimeError("planted")

        setattr(feed, name, fails)
        keep_sending(pub, lambda faults=faults: feed.fault_count > faults, f"{name} raises")
        setattr(feed, name, original)
        before = handler.count_applied("a")
        keep_sending(
            pub, lambda before=before: handler.count_applied("a") > before, f"after {name} the stream is followed"
        )
        with contextlib.suppress(KeyError):
            feed._stream_by_id["a"].fault_count = 0
    assert feed.describe_fault() is None


def test_a_thread_that_ended_shows(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    handler, pub = Recorder(), Pub(context)
    feed = start_feed(handler)
    feed.add(pub.source("a"))
    keep_sending(pub, lambda: handler.count_applied("a"), "followed")

    def ends(stream_id: str, instruction: Instruction) -> None:
        handler.reply = lambda stream_id, instruction: None
        raise SystemExit

    handler.reply = ends
    keep_sending(pub, feed.describe_fault, "the end shows")
    assert "ended" in str(feed.describe_fault())


def test_a_stream_with_long_work_waits_for_the_others(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    """Between two slices of one stream's message the other's messages are applied."""
    handler, long, short = Recorder(), Pub(context), Pub(context)
    feed = start_feed(handler)
    feed.add(long.source("long"))
    feed.add(short.source("short"))
    keep_sending(long, lambda: handler.count_applied("long"), "followed")
    keep_sending(short, lambda: handler.count_applied("short"), "followed")
    slices: list[int] = []

    def work_in_slices() -> SlicedWork:
        for _ in range(20):
            slices.append(handler.count_applied("short"))
            short.send()
            time.sleep(0.01)
            yield

    handler.reply = lambda stream_id, instruction: work_in_slices() if stream_id == "long" else None
    long.send()
    long.send()
    wait_until(lambda: len(slices) >= 40, "all slices")
    assert slices[-1] - slices[0] >= 15, "the short stream had its turns in between"


def test_many_bytes_of_one_stream_are_applied_over_many_turns(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    handler, pub = Recorder(), Pub(context)
    feed = start_feed(handler)
    feed.add(pub.source("a"))
    keep_sending(pub, lambda: handler.count_applied("a"), "followed")
    turns: list[int] = []
    turn_numbers, process_stream = itertools.count(), feed._process_stream
    turn = next(turn_numbers)

    def count_turns(stream: FollowedStream) -> None:
        nonlocal turn
        turn = next(turn_numbers)
        process_stream(stream)

    feed._process_stream = count_turns  # type: ignore[method-assign]
    handler.reply = lambda stream_id, instruction: turns.append(turn)
    for _ in range(40):
        pub.send(bytes(100_000))
    wait_until(lambda: len(turns) >= 40, "applied")
    assert max(turns.count(turn) for turn in turns) <= 4  # one byte of before, and three of 100 kB


def test_a_socket_is_read_once_a_turn_however_often_it_gets_messages(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    """A report of new messages adds no read to the one that is due, or a flood would hold up all other streams."""
    handler, pub = Recorder(), Pub(context)
    feed = start_feed(handler)
    feed.add(pub.source("a"))
    keep_sending(pub, lambda: handler.count_applied("a"), "followed")
    reads_by_turn, read_live, process_stream = [0], feed._read_live, feed._process_stream

    def count_reads(subscription: Any) -> None:
        reads_by_turn[-1] += 1
        read_live(subscription)

    def count_turns(stream: FollowedStream) -> None:
        reads_by_turn.append(0)
        process_stream(stream)

    feed._read_live, feed._process_stream = count_reads, count_turns  # type: ignore[method-assign]
    handler.reply = lambda stream_id, instruction: time.sleep(0.0005)
    subscription = feed._stream_by_id["a"].subscription
    assert subscription is not None
    flood_end_s = time.monotonic() + 1.5
    while time.monotonic() < flood_end_s:
        pub.send(bytes(100_000))
        feed._submit(lambda: feed._on_readable(subscription.socket))  # as ZeroMQ reports messages of many publishers
    assert len(reads_by_turn) > 20
    assert max(reads_by_turn) <= 3


def test_a_message_beyond_the_bound_ends_its_connection_alone(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("events.feed.REOPEN_S", 0.5)
    handler, good, bad = Recorder(), Pub(context), Pub(context)
    feed = start_feed(handler)
    feed.add(good.source("good"))
    feed.add(bad.source("bad"))
    keep_sending(bad, lambda: handler.count_applied("bad"), "followed")
    bad.send(bytes(MAX_MESSAGE_BYTES + 1))
    keep_sending(good, lambda: handler.count_applied("good") > 5, "the other is followed")
    assert all(
        len(instruction.payload) <= MAX_MESSAGE_BYTES
        for _, instruction in handler.instructions
        if isinstance(instruction, Apply)
    )
    before = handler.count_applied("bad")
    keep_sending(bad, lambda: handler.count_applied("bad") > before, "it may come back")


def test_a_message_of_many_frames_is_read_in_turn_with_others(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million frames without a byte took the thread of all streams for seconds."""
    handler, bad = Recorder(), Pub(context)
    start_feed(handler).add(bad.source("bad"))
    keep_sending(bad, lambda: handler.count_applied("bad"), "followed")
    turns, receive = 0, feed_sockets._SubSocket.receive
    unfinished_turns: set[int] = set()

    def receive_in_turns(subscription: Any) -> Any:
        nonlocal turns
        try:
            return receive(subscription)
        finally:
            turns += 1
            if subscription._frames:
                unfinished_turns.add(turns)

    monkeypatch.setattr(feed_sockets._SubSocket, "receive", receive_in_turns)
    bad._socket.send_multipart([b""] * 20_000)
    wait_until(lambda: MalformedMessage in handler.kinds("bad"), "the message is told")
    keep_sending(bad, lambda: handler.count_applied("bad") > 5, "its stream goes on")
    assert len(unfinished_turns) == 20_000 // feed_sockets.FRAMES_SLICE


def test_no_socket_with_a_bound_on_its_queue_has_heartbeats(context: zmq.Context[Any]) -> None:
    """libzmq ends the process if a heartbeat fails while the queue is full. The kernel notices hosts that are gone."""
    subscription = BoundSubscription(context, "tcp://127.0.0.1:*", lambda topic: None)
    peers = PeerSockets(PeerLoads(LoadTracker(StepTimes(), CostConfig(), LearnConfig()), "a"))
    for socket in (subscription.socket, peers._pub, peers._sub):
        assert (socket.getsockopt(zmq.HEARTBEAT_IVL), socket.getsockopt(zmq.TCP_KEEPALIVE)) == (0, 1)
        assert socket.getsockopt(zmq.CONNECT_TIMEOUT) == feed_sockets.MAX_CONNECT_MS, (
            "a host that is back is found soon"
        )
    subscription.close()
    peers.close()


def test_a_stream_that_could_not_be_opened_is_tried_again(start_feed: Callable[[Any], EventFeed]) -> None:
    handler = Recorder()
    feed = start_feed(handler)
    feed.add(StreamSource("a", "tcp://no port"))
    wait_until(lambda: MalformedMessage in handler.kinds("a"), "the failure is told")
    first = len(handler.instructions)
    wait_until(lambda: len(handler.instructions) > first, "tried again")
    feed.remove("a")
    wait_until(lambda: not feed._stream_by_id, "forgotten")


def test_more_streams_than_zeromq_has_sockets_by_default(start_feed: Callable[[Any], EventFeed]) -> None:
    """341 were the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    file_limit = 4_000 if hard == resource.RLIM_INFINITY else min(4_000, hard)
    if file_limit < 3_000:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, file_limit), hard))
    handler = Recorder()
    feed = start_feed(handler)
    for number in range(600):
        feed.add(StreamSource(f"w{number}", f"tcp://127.0.0.1:{1 + number % 1000}"))
    wait_until(lambda: len(feed._stream_by_id) == 600, "all are added", 60.0)
    wait_until(lambda: all(s.subscription for s in list(feed._stream_by_id.values())), "all are open")
    assert feed.fault_count == 0


# -- publishers that connect to us -------------------------------------------------------------------------------------


def block_events(first: int, count: int) -> list[Event]:
    names: list[Any] = list(range(first + 1, first + count + 1))
    tokens = [token for name in names for token in [name] * 4]
    return [BlockStored(names, first or None, tokens, 4, None, "GPU", None)]


@pytest.fixture
def index() -> PrefixIndex:
    return make_index(1)


@pytest.fixture
def index_feed(index: PrefixIndex) -> Iterator[IndexFeed]:
    feed = IndexFeed(index)
    feed.start()
    yield feed
    feed.close()


def count_cached_tokens(index: PrefixIndex, holder: HolderId) -> int:
    prompt = [token for name in range(1, 100) for token in [name] * 4]
    return next((match.tokens for match in index.match(prompt, Scope("m")) if match.holder == holder), 0)


def bound(feed: IndexFeed) -> Any:
    return feed.events._bound_subscriptions[0]


def test_a_publisher_that_spoke_before_its_worker_was_known_is_picked_up(
    index: PrefixIndex, index_feed: IndexFeed
) -> None:
    address = index_feed.bind("tcp://127.0.0.1:*")
    replay = "tcp://127.0.0.1:*"
    pub = EventPublisher(
        KVEventsConfig(enable_kv_cache_events=True, endpoint=address, replay_endpoint=replay, topic="kv@h:8000@m")
    )
    subscription = bound(index_feed)

    def spoke() -> bool:
        pub.publish(block_events(0, 2))
        return bool(subscription.descriptor_by_unclaimed_topic)

    wait_until(spoke, "it is heard, and nobody knows it")
    holder = index.add_holder("m")
    replay_endpoint = resolve_endpoint(str(pub.describe_source().replay_endpoint), "127.0.0.1")
    source = EventSource(endpoint="tcp://127.0.0.1:1", replay_endpoint=replay_endpoint, topic="kv@h:8000@m")
    index_feed.follow_worker("h:8000", [source], [holder])
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "what it holds is known without another word")
    assert not subscription.descriptor_by_unclaimed_topic
    pub.close()


def test_unclaimed_topics_are_bounded(context: zmq.Context[Any], index_feed: IndexFeed) -> None:
    address = index_feed.bind("tcp://127.0.0.1:*")
    socket = pub_socket(context)
    socket.connect(address)
    subscription = bound(index_feed)
    number = 0

    def send_unclaimed() -> bool:
        nonlocal number
        for _ in range(500):
            number += 1
            socket.send_multipart([b"topic %d" % number, pack_seq(0), b"x"])
            socket.send_multipart([b"%d" % number * MAX_TOPIC_BYTES, pack_seq(0), b"x"])
        return index_feed.events.ignored_message_count > 3 * MAX_TOPICS

    wait_until(send_unclaimed, "they are heard")
    assert 0 < len(subscription.descriptor_by_unclaimed_topic) <= MAX_TOPICS
    assert all(len(topic) <= MAX_TOPIC_BYTES for topic in subscription.descriptor_by_unclaimed_topic)
    assert not subscription.stream_by_topic


def test_what_waits_for_one_topic_is_bounded(context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]) -> None:
    handler = Recorder()
    feed = start_feed(handler)
    address = feed.bind(
        "tcp://127.0.0.1:*", lambda topic: StreamSource(topic, "", config=StreamConfig(start_mode=StartMode.LIVE))
    )
    socket = pub_socket(context)
    socket.connect(address)
    release = threading.Event()

    def holds(stream_id: str, instruction: Instruction) -> SlicedWork | None:
        return wait_in_slices(release) if isinstance(instruction, Apply) else None

    handler.reply = holds
    for seq in range(3 * MAX_WAITING_MESSAGES):
        socket.send_multipart([b"a", pack_seq(seq), b"x"])
        time.sleep(0.0001)
    wait_until(lambda: DroppedMessages in handler.kinds("a"), "it overflows, and that is told")
    assert len(feed._stream_by_id["a"].pending_work) <= MAX_WAITING_MESSAGES
    release.set()


def test_messages_that_were_dropped_before_a_fault_are_told_after_it(start_feed: Callable[[Any], EventFeed]) -> None:
    handler = Recorder()
    feed = start_feed(handler)
    stream = FollowedStream(StreamSource("a", ""))
    stream.stream_state.unreported_drop_count = 3
    feed._restart_stream(stream, ValueError("made up"))
    feed._report_dropped_messages(stream)
    feed._report_dropped_messages(stream)
    assert [item for _, item in handler.instructions if isinstance(item, DroppedMessages)] == [DroppedMessages(3)]


def test_the_bytes_that_wait_for_one_topic_are_bounded(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_sockets, "MAX_WAITING_BYTES", 10_000)
    handler = Recorder()
    feed = start_feed(handler)
    address = feed.bind(
        "tcp://127.0.0.1:*", lambda topic: StreamSource(topic, "", config=StreamConfig(start_mode=StartMode.LIVE))
    )
    socket = pub_socket(context)
    socket.connect(address)
    release, seq = threading.Event(), itertools.count()

    def holds(stream_id: str, instruction: Instruction) -> SlicedWork | None:
        return wait_in_slices(release) if isinstance(instruction, Apply) else None

    def send() -> None:
        socket.send_multipart([b"a", pack_seq(next(seq)), b"x" * 1000])

    handler.reply = holds

    def overflows() -> bool:
        send()
        return DroppedMessages in handler.kinds("a")

    wait_until(overflows, "it overflows")
    assert feed._stream_by_id["a"].pending_bytes <= 11_000
    release.set()
    before = handler.count_applied("a")
    wait_until(lambda: [send(), handler.count_applied("a") > before + 20][1], "it is followed again")
    wait_until(lambda: feed._stream_by_id["a"].pending_bytes == 0, "nothing waits")


def test_no_socket_keeps_more_bytes_than_told(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ counts messages: of every socket that others send to, how many it keeps times how long one may be."""
    sockets: list[zmq.Socket[bytes]] = []
    original = zmq.Context.socket

    def open_socket(self: zmq.Context[Any], *args: Any, **kwargs: Any) -> Any:
        sockets.append(original(self, *args, **kwargs))
        return sockets[-1]

    monkeypatch.setattr(zmq.Context, "socket", open_socket)
    feed, pub = start_feed(Recorder()), Pub(context)
    feed.bind("tcp://127.0.0.1:*", lambda topic: None)
    feed.add(dataclasses.replace(pub.source("a"), replay_endpoint="tcp://127.0.0.1:9", config=StreamConfig()))
    kinds = (zmq.SUB, zmq.DEALER)
    wait_until(lambda: sum(socket.type in kinds for socket in list(sockets)) >= 3, "all are opened")
    for socket in list(sockets):
        if socket.type in kinds:
            assert socket.rcvhwm * socket.getsockopt(zmq.MAXMSGSIZE) == 256 << 20


def test_a_stalled_stream_loses_nothing_that_its_publisher_keeps(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    handler, pub = Recorder(), Pub(context, keeps=100_000)
    feed = start_feed(handler)
    feed.add(pub.source("a"))
    keep_sending(pub, lambda: handler.count_applied("a"), "followed")
    release = threading.Event()

    def holds(stream_id: str, instruction: Instruction) -> SlicedWork | None:
        return wait_in_slices(release) if isinstance(instruction, Apply) else None

    handler.reply = holds
    for _ in range(5_000):
        pub.send(b"x" * 200)
    release.set()
    handler.reply = lambda stream_id, instruction: None
    wait_until(lambda: (feed._stream_by_id["a"].stream_state.position or (0, 0))[0] == pub.seq - 1, "all of it")
    assert not {DroppedMessages, Gap} & handler.kinds("a")


class Replier:
    """Answers each question to the replay socket with the same messages, as fast as they go."""

    def __init__(self, context: zmq.Context[Any], replies: list[list[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.request_count = 0
        self._replies, self._stop = replies, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.socket.poll(20):
                identity, *_ = self.socket.recv_multipart()
                self.request_count += 1
                for frames in self._replies:
                    self.socket.send_multipart([identity, b"", *frames])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        # Not at once: libzmq ends the process if a peer leaves a closed socket in the middle of a message (4.3.5).
        self.socket.close(5_000)


@pytest.mark.parametrize("bytes_max", [256 << 20, 50_000])
def test_replies_wait_here_and_not_in_zeromq(
    bytes_max: int, context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow handler loses no reply of a ROUTER with its usual bounds; beyond our bytes they are asked for anew."""
    monkeypatch.setattr(feed_sockets, "MAX_REPLIES_BYTES", bytes_max)
    ring = [[pack_seq(seq), b"x" * 200] for seq in range(800)]
    replier = Replier(context, [*ring, [pack_seq(END_SEQ), b""]])
    handler, pub = Recorder(), Pub(context)
    pub.seq = 800
    handler.reply = lambda stream_id, instruction: (
        time.sleep(0.001) or iter(()) if isinstance(instruction, Apply) else None
    )
    try:
        feed = start_feed(handler)
        source = dataclasses.replace(
            pub.source("a"),
            replay_endpoint=f"tcp://127.0.0.1:{replier.port}",
            config=StreamConfig(start_mode=StartMode.RING),
        )
        feed.add(source)
        if bytes_max > 10**6:
            keep_sending(pub, lambda: handler.count_applied("a") >= 800, "the ring is replayed")
            applied_seqs = [apply.seq for _, apply in list(handler.instructions) if isinstance(apply, Apply)]
            assert applied_seqs[:800] == list(range(800))
            assert DroppedMessages not in handler.kinds("a")
        else:
            keep_sending(pub, lambda: DroppedMessages in handler.kinds("a"), "the replies are too many")
            keep_sending(pub, lambda: replier.request_count >= 2, "it asks again")
            request = feed._stream_by_id["a"].request
            assert request is None or request.reply_bytes <= bytes_max + 300
            assert feed.describe_fault() is None
            assert not feed.fault_count
    finally:
        replier.close()


def test_a_reply_of_too_many_frames_ends_its_request(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    replier = Replier(context, [[b""] * (feed_sockets.MAX_REPLY_FRAMES + 1), [pack_seq(END_SEQ), b""]])
    handler, pub = Recorder(), Pub(context)
    try:
        feed = start_feed(handler)
        config = StreamConfig(start_mode=StartMode.RING)
        feed.add(dataclasses.replace(pub.source("a"), replay_endpoint=f"tcp://127.0.0.1:{replier.port}", config=config))
        keep_sending(pub, lambda: DroppedMessages in handler.kinds("a"), "the frames are too many")
        keep_sending(pub, lambda: replier.request_count >= 2, "it asks again")
        assert not feed.fault_count
    finally:
        replier.close()


def test_one_stream_with_a_large_payload_does_not_hold_the_index(index: PrefixIndex, index_feed: IndexFeed) -> None:
    """A million unknown events of one worker are applied in slices; an event of another comes in between."""
    holders = [index.add_holder("m") for _ in range(2)]
    for name, holder in zip(("a", "b"), holders):
        index_feed.follow_worker(name, [EventSource(endpoint="tcp://127.0.0.1:1")], [holder])
    large, small = list(index_feed._stream_by_id)
    payload = msgspec.msgpack.encode([0.0, [["x"]] * 1_000_000, 0])
    from events.stream_types import Origin

    work = index_feed.apply_instruction(large, Apply(0, payload, Origin.LIVE), b"")
    assert work is not None
    slices = 0
    for _ in work:
        slices += 1
        if slices == 3:
            batch = msgspec.msgpack.encode([0.0, [msgspec.to_builtins(event) for event in block_events(0, 2)], 0])
            assert index_feed.apply_instruction(small, Apply(0, batch, Origin.LIVE), b"") is None
            assert count_cached_tokens(index, holders[1]) == 8
    assert 10 < slices < 200
    assert index_feed.sum_counters()["a"]["unknown_events"] == 1_000_000


def test_what_is_done_about_an_error_may_raise_too(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raises for whatever it is told, for ever, and the thread lives; pauses do not grow without bound."""
    handler, good, bad = Recorder(), Pub(context), Pub(context)
    feed = start_feed(handler)
    feed.add(good.source("good"))
    feed.add(bad.source("bad"))
    keep_sending(bad, lambda: handler.count_applied("bad"), "followed")
    feed._stream_by_id["bad"].fault_count = 5_000

    def raises(stream_id: str, instruction: Instruction) -> None:
        if stream_id == "bad":
            raise MemoryError

    handler.reply = raises
    keep_sending(bad, lambda: feed.fault_count >= 3, "the error, and the two notices about it")
    keep_sending(good, lambda: handler.count_applied("good") > 3, "the other is followed")
    assert feed.describe_fault() is None
    again_at = feed._stream_by_id["bad"].retry_at
    assert again_at is not None
    assert again_at - time.monotonic() < 61


def test_a_stranger_disturbs_no_stream_of_a_bound_socket(
    context: zmq.Context[Any], start_feed: Callable[[Any], EventFeed]
) -> None:
    """Neither with what is no message nor by claiming a worker that is there under another topic."""
    handler = Recorder()
    feed = start_feed(handler)
    config = StreamConfig(start_mode=StartMode.LIVE)
    address = feed.bind("tcp://127.0.0.1:*", lambda topic: StreamSource(topic.split("@")[0], "", config=config))
    worker_socket, stranger_socket = pub_socket(context), pub_socket(context)
    for socket in (worker_socket, stranger_socket):
        socket.connect(address)
    seq = 0

    def says() -> bool:
        nonlocal seq
        worker_socket.send_multipart([b"w@1", pack_seq(seq), b"x"])
        seq += 1
        return handler.count_applied("w") > 3

    wait_until(says, "followed")
    before = feed._stream_by_id["w"]

    def disturbs() -> bool:
        says()
        stranger_socket.send_multipart([b"w@2", pack_seq(0), b"y"])
        stranger_socket.send_multipart([b"junk"])
        return feed.ignored_message_count > 20

    wait_until(disturbs, "heard")
    assert feed._stream_by_id["w"] is before
    assert handler.kinds("w") == {Apply}
