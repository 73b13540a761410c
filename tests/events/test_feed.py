"""The shells together over loopback sockets: publisher, feed and subscriber, with real faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from block_hash import hash_block
from old_events import encode_as_arrays

from events import (
    FULL_ATTENTION,
    GPU,
    Apply,
    BlockRemoved,
    BlockStored,
    Clear,
    Connection,
    EventBatch,
    EventFeed,
    EventPublisher,
    Instruction,
    KVEventsConfig,
    Message,
    Notice,
    Origin,
    PublisherRestarted,
    StartMode,
    StreamConfig,
    StreamSource,
    Subscriber,
)
from events.codec import encode_batch
from events.frames import END_SEQ, pack_seq
from events.stream_types import MalformedMessage

BLOCK = 4


def make_stored(key: int) -> BlockStored:
    tokens = [key] * BLOCK
    return BlockStored([hash_block(None, tokens)], None, tokens, BLOCK, None, GPU, None, [None], 0, FULL_ATTENTION)


def make_removed(key: int) -> BlockRemoved:
    return BlockRemoved([hash_block(None, [key] * BLOCK)], GPU, 0)


def config(
    endpoint: str = "tcp://127.0.0.1:*", replay: str | None = "tcp://127.0.0.1:*", **fields: object
) -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, **fields)  # type: ignore[arg-type]


@pytest.fixture
def publish() -> Iterator[Callable[..., EventPublisher]]:
    started_objects: list[EventPublisher] = []

    def open_publisher(*args: Any, **kwargs: Any) -> EventPublisher:
        started_objects.append(EventPublisher(config(*args, **kwargs)))
        return started_objects[-1]

    yield open_publisher
    for publisher in started_objects:
        publisher.close()


def source_of(publisher: EventPublisher, join: StartMode = StartMode.SNAPSHOT, **fields: Any) -> StreamSource:
    source = publisher.describe_source()
    return StreamSource(
        "w",
        source.endpoint,
        source.replay_endpoint,
        source.topic,
        StreamConfig(start_mode=join, tail_check_s=0.3),
        **fields,
    )


class Follower:
    """Collects what a Subscriber brings and keeps the set of names it implies."""

    def __init__(self, *sources: StreamSource) -> None:
        self.subscriber = Subscriber(sources)
        self.resident: set[object] = set()
        self.messages: list[Message] = []
        self.notices: list[object] = []

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.resident, self.notices[-5:], self.messages[-3:])
            item = self.subscriber.get(0.05)
            if isinstance(item, Notice):
                self.notices.append(item.content)
                if isinstance(item.content, Clear):
                    self.resident.clear()
            elif item is not None:
                self.messages.append(item)
                for event in item.decoded_batch.batch.events:
                    if isinstance(event, BlockStored):
                        self.resident.update(event.block_hashes)
                    elif isinstance(event, BlockRemoved):
                        self.resident.difference_update(event.block_hashes)

    def saw(self, kind: type) -> bool:
        return any(isinstance(notice, kind) for notice in self.notices)


Publish = Callable[..., EventPublisher]
Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Callable[..., Follower]]:
    started_objects: list[Follower] = []

    def open_follower(*sources: StreamSource) -> Follower:
        started_objects.append(Follower(*sources))
        return started_objects[-1]

    yield open_follower
    for follower in started_objects:
        follower.subscriber.close()


def names(keys: set[int]) -> set[object]:
    return {hash_block(None, [key] * BLOCK) for key in keys}


def test_late_joiner_gets_a_snapshot_then_live_events(publish: Publish, follow: Follow) -> None:
    publisher = publish(buffer_steps=2)
    for key in range(3000):
        publisher.publish([make_stored(key)])
    publisher.publish([make_removed(7), make_removed(8)])
    follower = follow(source_of(publisher))
    expected = names(set(range(3000)) - {7, 8})
    follower.wait_until(lambda: follower.resident == expected)
    assert follower.messages[0].origin is Origin.SNAPSHOT
    for key in range(5000, 5020):  # the first may come by the last replay of joining, if that is still under way
        publisher.publish([make_stored(key)])
        expected.update(names({key}))
        follower.wait_until(lambda: follower.resident == expected)
        assert follower.messages[-1].seq == key - 1999
        if follower.messages[-1].origin is Origin.LIVE:
            return
    pytest.fail("twenty events after the snapshot and none came live")


def test_restarted_worker_on_the_same_address(publish: Publish, follow: Follow) -> None:
    first = publish()
    for key in range(5):
        first.publish([make_stored(key)])
    source = first.describe_source()
    follower = follow(source_of(first))
    follower.wait_until(lambda: follower.resident == names(set(range(5))))
    first.close()
    second = rebind(source.endpoint, source.replay_endpoint)
    try:
        for key in range(100, 120):
            second.publish([make_stored(key)])
        follower.wait_until(lambda: follower.resident == names(set(range(100, 120))))
        assert follower.saw(PublisherRestarted)
    finally:
        second.close()


def rebind(endpoint: str, replay: str | None) -> EventPublisher:
    """A publisher on an address that vLLM's rule would connect to: loopback, fixed port."""
    port = endpoint.rsplit(":", 1)[1]
    replay_port = (replay or "").rsplit(":", 1)[1]
    deadline = time.monotonic() + 10
    while True:
        try:
            return EventPublisher(config(f"tcp://*:{port}", f"tcp://127.0.0.1:{replay_port}"))
        except ValueError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_without_replay_events_come_live(publish: Publish, follow: Follow) -> None:
    publisher = publish(replay=None)
    follower = follow(source_of(publisher))
    follower.wait_until(lambda: follower.saw(Connection))
    # A subscription takes effect a moment after the connection stands.
    keys = iter(range(10_000))

    def publish_one() -> bool:
        publisher.publish([make_stored(next(keys))])
        return bool(follower.resident)

    follower.wait_until(publish_one)


def test_topic_is_exact(publish: Publish, follow: Follow) -> None:
    publisher = publish(topic="kv2")
    source = publisher.describe_source()
    other = StreamSource("w", source.endpoint, None, "kv", StreamConfig(start_mode=StartMode.LIVE))
    follower = follow(other, source_of(publisher))
    publisher.publish([make_stored(1)])
    follower.wait_until(lambda: follower.resident == names({1}))
    assert follower.messages[0].topic == b"kv2"


def test_dropped_live_batches_are_replayed(publish: Publish, follow: Follow) -> None:
    """A raw PUB that loses a batch on the way, with a replay socket that has it."""
    publisher = publish(max_queue_size=1)
    follower = follow(source_of(publisher, StartMode.RING))
    publisher.publish([make_stored(1)])
    follower.wait_until(lambda: follower.resident == names({1}))
    for key in range(2, 2000):
        publisher.publish([make_stored(key)])
    expected = names(set(range(1, 2000)))
    follower.wait_until(lambda: follower.resident == expected)
    assert [m.seq for m in follower.messages] == list(range(1999))
    if publisher.stats.unsent_batch_count:
        assert publisher.stats.replay_count > 0


def test_publisher_that_connects_is_known_by_its_topic(follow: Follow) -> None:
    follower = follow()

    def accept(topic: str) -> StreamSource | None:
        return (
            StreamSource(f"worker {topic}", "", None, topic, StreamConfig(start_mode=StartMode.LIVE))
            if topic == "a"
            else None
        )

    endpoint = follower.subscriber.feed.bind("tcp://127.0.0.1:*", accept)
    publishers = [EventPublisher(config(endpoint, None, topic=topic)) for topic in ("a", "b")]
    try:
        keys = iter(range(1, 10_000))

        def publish_both() -> bool:
            key = next(keys)
            for publisher in publishers:
                publisher.publish([make_stored(key)])
            return len(follower.messages) >= 3 and follower.subscriber.feed.ignored_message_count > 0

        follower.wait_until(publish_both)
        assert {m.stream_id for m in follower.messages} == {"worker a"}
    finally:
        for publisher in publishers:
            publisher.close()


def test_old_vllm_replay_without_topic_and_no_snapshot(follow: Follow) -> None:
    """A scripted ROUTER that answers like vLLM 0.9: three frames, the bare end marker for what it does not know."""
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        pub_port = pub.bind_to_random_port("tcp://127.0.0.1")
        router_port = router.bind_to_random_port("tcp://127.0.0.1")
        ring = [encode_as_arrays(EventBatch(1.0, [make_stored(key)], 0)) for key in range(4)]
        follower = follow(
            StreamSource("w", f"tcp://127.0.0.1:{pub_port}", f"tcp://127.0.0.1:{router_port}", None, StreamConfig())
        )
        for _ in range(2):  # the snapshot request, then the replay from 0
            assert router.poll(10_000)
            identity, _, start = router.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), len(ring)):
                router.send_multipart([identity, b"", pack_seq(seq), ring[seq]])
            router.send_multipart([identity, b"", pack_seq(END_SEQ), b""])
        follower.wait_until(lambda: follower.resident == names(set(range(4))))
    finally:
        pub.close(0)
        router.close(0)
        context.term()


def test_vllm_with_snapshots_is_followed_by_its_snapshot_and_its_id(follow: Follow) -> None:
    """Sequence frames of 24 bytes, a snapshot socket, empty batches as heartbeats, no replay; then another process."""
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        pub_port, router_port = (socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router))
        end = "tcp://127.0.0.1:{}".format
        follower = follow(StreamSource("w", end(pub_port), snapshot_endpoint=end(router_port)))

        def answer(last_seq: int, publisher_id: bytes, *keys: int) -> None:
            assert router.poll(10_000)
            identity, *request = router.recv_multipart()
            assert request == [b"", b"snapshot"]
            chunks = [encode_batch(EventBatch(1.0, [make_stored(key)], 0)) for key in keys]
            seq = last_seq.to_bytes(8, "big", signed=True)
            router.send_multipart([identity, b"", seq, publisher_id, *chunks])

        def send(seq: int, publisher_id: bytes, *events: Any) -> None:
            pub.send_multipart([b"kv@w", pack_seq(seq) + publisher_id, encode_batch(EventBatch(1.0, [*events], 0))])

        first_id, second_id = b"1" * 16, b"2" * 16
        answer(-2, first_id)
        answer(4, first_id, 0, 1, 2)
        follower.wait_until(lambda: follower.resident == names({0, 1, 2}))
        for seq, events in ((5, [make_stored(3)]), (6, []), (7, []), (8, [make_stored(4)])):
            send(seq, first_id, *events)
        follower.wait_until(lambda: follower.resident == names(set(range(5))))
        assert not follower.saw(MalformedMessage)
        send(9, second_id, make_stored(7))
        answer(8, second_id, 6)
        follower.wait_until(lambda: follower.resident == names({6, 7}))
        assert follower.saw(PublisherRestarted)
        pub.send_multipart([b"kv@w", b"x" * 12, b""])
        follower.wait_until(lambda: follower.saw(MalformedMessage))
    finally:
        pub.close(0)
        router.close(0)
        context.term()


def test_resume_replays_only_what_is_new(publish: Publish, follow: Follow) -> None:
    publisher = publish()
    first = follow(source_of(publisher, StartMode.RING))
    for key in range(4):
        publisher.publish([make_stored(key)])
    first.wait_until(lambda: len(first.messages) == 4)
    position = first.messages[-1].position
    first.subscriber.close()
    for key in range(4, 9):
        publisher.publish([make_stored(key)])
    second = follow(source_of(publisher, StartMode.LIVE, resume_position=position))
    second.wait_until(lambda: len(second.messages) == 5)
    assert [m.seq for m in second.messages] == [4, 5, 6, 7, 8]
    assert not second.saw(Clear)


def test_nothing_of_a_new_connection_passes_for_the_old_one() -> None:
    """A restarted publisher is back with exactly the next seq before the feed's thread runs again."""
    handed_instructions: list[Instruction] = []

    def handle(stream_id: str, instruction: Instruction, topic: bytes) -> None:
        if not isinstance(instruction, Connection):
            handed_instructions.append(instruction)

    def read_live() -> None:
        feed._read_live(subscription)
        feed._process_stream(feed._stream_by_id["w"])

    context = zmq.Context()
    feed = EventFeed(handle)  # never started: the test takes the thread's steps
    try:
        first = context.socket(zmq.PUB)
        port = first.bind_to_random_port("tcp://127.0.0.1")
        feed._add(StreamSource("w", f"tcp://127.0.0.1:{port}", None, None, StreamConfig(start_mode=StartMode.LIVE)))
        subscription = feed._stream_by_id["w"].subscription
        assert subscription is not None
        assert subscription.monitor.poll(10_000)
        feed._read_monitor(subscription)
        _send_until_received(first, subscription.socket, 0)
        read_live()
        (applied,) = [instruction for instruction in handed_instructions if isinstance(instruction, Apply)]
        assert isinstance(applied.seq, int)
        expected = applied.seq + 1
        handed_instructions.clear()
        first.close(0)
        assert subscription.monitor.poll(10_000)  # the end of the connection is reported, nobody has looked
        second = context.socket(zmq.PUB)
        _bind(second, port)
        _send_until_received(second, subscription.socket, expected)
        read_live()
        assert [type(instruction) for instruction in handed_instructions] == [Clear]
        second.close(0)
    finally:
        feed.close()
        context.term()


def _bind(socket: zmq.Socket[bytes], port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _send_until_received(pub: zmq.Socket[bytes], sub: zmq.Socket[bytes], seq: int) -> None:
    """A subscription takes effect a moment after the connection stands."""
    for attempt in range(500):
        pub.send_multipart([b"", pack_seq(seq), b"payload %d" % seq])
        if sub.poll(20):
            return
        assert attempt < 499
