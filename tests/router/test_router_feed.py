"""Real publishers, real sockets, a real index: what a worker announces is what the router predicts."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
from reference import ReferenceIndex

from events.codec import encode_batch
from events.config import KVEventsConfig
from events.publisher import EventPublisher
from events.sources import EventSource, resolve_endpoint
from events.stream_types import Apply, DuplicateBatch, Origin, PublisherRestarted, StartMode, StreamConfig
from events.types import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from router.fleet.fact_queue import CacheCleared, CapacityObserved, EngineRestarted, StreamLost, WorkerFact
from router.fleet.index_feed import IndexFeed
from router.fleet.worker_stream import EVICTIONS_MIN, AppliedBatch
from router.index.protocol import HolderId, Scope


def wait_until(condition: Callable[[], bool], description: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {description}"
        time.sleep(0.01)


def publisher(endpoint: str = "tcp://*:*", replay: str | None = "tcp://*:*") -> EventPublisher:
    return EventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay))


def source_of(pub: EventPublisher) -> EventSource:
    source = pub.describe_source()
    return EventSource(
        endpoint=resolve_endpoint(source.endpoint, "127.0.0.1"),
        replay_endpoint=source.replay_endpoint and resolve_endpoint(source.replay_endpoint, "127.0.0.1"),
        epoch=source.epoch,
        snapshot=source.snapshot,
    )


def block_events(first: int, count: int, size: int = 4) -> list[Event]:
    """Blocks `first`.. of the prompt 0, 1, 2 ..., named by their number + 1."""
    names: list[int | bytes] = [first + i + 1 for i in range(count)]
    tokens = list(range(first * size, (first + count) * size))
    return [BlockStored(names, first or None, tokens, size, None, "GPU", None)]


@pytest.fixture
def index() -> ReferenceIndex:
    return ReferenceIndex(1)


@pytest.fixture
def reported_facts() -> list[WorkerFact]:
    """What the feed has reported, in order."""
    return []


@pytest.fixture
def feed(index: ReferenceIndex, reported_facts: list[WorkerFact]) -> Iterator[IndexFeed]:
    feed = IndexFeed(index, report=reported_facts.append)
    feed.start()
    yield feed
    feed.close()
    index.check_invariants()


def count_cached_tokens(index: ReferenceIndex, holder: HolderId) -> int:
    return next((m.tokens for m in index.match(list(range(1000)), Scope("m")) if m.holder == holder), 0)


def test_what_is_announced_before_and_after_joining_is_known(index: ReferenceIndex, feed: IndexFeed) -> None:
    pub = publisher()
    pub.publish(block_events(0, 3))
    holder = index.add_holder("m")
    feed.follow_worker("a", [source_of(pub)], [holder])
    wait_until(lambda: count_cached_tokens(index, holder) == 12, "the snapshot is applied")
    wait_until(lambda: feed.is_synced("a"), "synced")
    pub.publish(block_events(3, 2))
    wait_until(lambda: count_cached_tokens(index, holder) == 20, "a live batch is applied")
    pub.publish([BlockRemoved([5], "GPU")])
    wait_until(lambda: count_cached_tokens(index, holder) == 16, "a removal is applied")
    (row,) = feed.describe_streams("a")["streams"]
    assert row["up"]
    assert row["phase"] == "live"
    assert feed.count_stored_blocks("a") == 5
    assert feed.sum_counters()["a"]["removed"] == 1
    pub.close()


@pytest.mark.parametrize("has_died", [False, True])
def test_a_worker_that_announces_more_than_its_cache_holds_is_forgotten(
    index: ReferenceIndex, feed: IndexFeed, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    monkeypatch.setattr("router.fleet.index_feed.COUNT_EVERY", 4)
    liar, honest = publisher(), publisher()
    liar_holder, honest_holder = index.add_holder("m"), index.add_holder("m")
    feed.follow_worker("a", [source_of(liar)], [liar_holder], blocks_max=20)
    feed.follow_worker("b", [source_of(honest)], [honest_holder], blocks_max=20)
    if has_died:
        feed.restart_streams("a")
    wait_until(lambda: feed.is_synced("a") and feed.is_synced("b"), "synced")
    honest.publish(block_events(0, 20))
    for turn in range(12):
        liar.publish(block_events(2 * turn, 2))
    wait_until(
        lambda: feed.sum_counters()["a"]["stored"] == 24 and feed.sum_counters()["b"]["stored"] == 20, "all is read"
    )
    wait_until(lambda: feed.sum_counters()["a"]["forgotten"] > 20, "the liar's blocks are forgotten")
    assert feed.sum_counters()["b"]["forgotten"] == 0
    assert count_cached_tokens(index, liar_holder) < 20 * 4
    assert count_cached_tokens(index, honest_holder) == 20 * 4
    assert feed.make_snapshot("a", 0) is None or count_cached_tokens(index, liar_holder) == 0
    liar.publish([AllBlocksCleared()])
    liar.publish(block_events(0, 3))
    wait_until(lambda: count_cached_tokens(index, liar_holder) == 12, "it is followed all the same")
    liar.close()
    honest.close()


def test_a_full_index_forgets_who_announced_most_for_its_cache(
    index: ReferenceIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.index_feed.MEASURE_EVERY", 4)
    feed = IndexFeed(index, index_bytes_max=1, streams_max=3)
    feed.start()
    small, large = publisher(), publisher()
    small_holder, large_holder = index.add_holder("m"), index.add_holder("m")
    feed.follow_worker("b", [source_of(large)], [large_holder], blocks_max=1000)
    assert (feed.count_free_streams("a"), feed.count_free_streams("b")) == (2, 3)
    feed.follow_worker("a", [source_of(small)], [small_holder], blocks_max=10)
    wait_until(lambda: feed.is_synced("a") and feed.is_synced("b"), "synced")
    small.publish(block_events(0, 3))
    wait_until(lambda: count_cached_tokens(index, small_holder) == 12, "the small one's")
    large.publish(block_events(0, 9))
    wait_until(lambda: count_cached_tokens(index, large_holder) == 36, "the large one's")
    wait_until(lambda: count_cached_tokens(index, small_holder) == 0, "the small one's are forgotten")
    assert (feed.sum_counters()["a"]["forgotten"], feed.sum_counters()["b"]["forgotten"]) == (3, 0)
    feed.close()
    index.check_invariants()
    small.close()
    large.close()


def test_a_restart_on_the_same_address_forgets_the_old_life(
    index: ReferenceIndex, feed: IndexFeed, reported_facts: list[WorkerFact]
) -> None:
    pub = publisher()
    source = source_of(pub)
    holder = index.add_holder("m")
    feed.follow_worker("a", [source], [holder])
    pub.publish(block_events(0, 5))
    wait_until(lambda: count_cached_tokens(index, holder) == 20, "the first life")
    pub.close()
    assert source.replay_endpoint is not None
    restarted_pub = publisher(
        *(address.replace("127.0.0.1", "*") for address in (source.endpoint, source.replay_endpoint))
    )
    restarted_pub.publish(block_events(0, 2))
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "the second life")
    assert feed.sum_counters()["a"]["restarts"] >= 1
    assert any(isinstance(fact, EngineRestarted) for fact in reported_facts)
    restarted_pub.close()


def test_restarts_without_end_do_not_fill_the_log(
    index: ReferenceIndex, feed: IndexFeed, caplog: pytest.LogCaptureFixture
) -> None:
    """Two publishers of one topic contradict each other with every batch."""
    caplog.set_level("INFO", "router")
    feed.follow_worker("a", [EventSource(endpoint="tcp://127.0.0.1:1")], [index.add_holder("m")])
    (stream_id,) = feed._stream_by_id
    for seq in range(500):
        feed.apply_instruction(stream_id, PublisherRestarted(f"two different batches with seq {seq}"), b"")
    assert feed.sum_counters()["a"]["restarts"] == 500
    messages = [record.getMessage() for record in caplog.records if "restarted" in record.getMessage()]
    assert messages[0] == "worker a rank 0 restarted (restart 1): two different batches with seq 0"
    assert len(messages) == 10 + len((16, 32, 64, 128, 256))


def test_what_a_full_cache_holds_is_reported_until_it_restarts(
    index: ReferenceIndex, feed: IndexFeed, reported_facts: list[WorkerFact]
) -> None:
    def reported_capacities() -> list[CapacityObserved]:
        return [fact for fact in reported_facts if isinstance(fact, CapacityObserved)]

    unknown, full = CapacityObserved("a", 0, None), CapacityObserved("a", 0, 40)
    pub = publisher()
    source = source_of(pub)
    feed.follow_worker("a", [source], [index.add_holder("m")])
    pub.publish(block_events(0, 10))
    wait_until(lambda: feed.is_synced("a"), "synced")
    for i in range(10, 20):
        if i < 10 + EVICTIONS_MIN:  # fewer evictions than that were published so far
            assert reported_capacities() == [unknown]
        pub.publish([BlockRemoved([i - 9], "GPU"), BlockStored([i + 1], None, [i] * 4, 4, None, "GPU", None)])
    wait_until(lambda: reported_capacities() == [unknown, full], "ten blocks of four tokens")
    pub.close()
    assert source.replay_endpoint is not None
    restarted_pub = publisher(
        *(address.replace("127.0.0.1", "*") for address in (source.endpoint, source.replay_endpoint))
    )
    restarted_pub.publish(block_events(0, 2))
    wait_until(lambda: reported_capacities() == [unknown, full, unknown], "the next process may have more memory")
    assert StreamLost("a", 0) in reported_facts
    restarted_pub.close()


def find_clears(facts: list[WorkerFact]) -> list[CacheCleared]:
    return [fact for fact in facts if isinstance(fact, CacheCleared)]


def test_a_cache_that_was_given_back_is_not_believed_and_its_stream_goes_on(
    index: ReferenceIndex, feed: IndexFeed, reported_facts: list[WorkerFact]
) -> None:
    pub = publisher()
    holder = index.add_holder("m")
    feed.follow_worker("a", [source_of(pub)], [holder])
    pub.publish(block_events(0, 5))
    wait_until(lambda: count_cached_tokens(index, holder) == 20, "awake")
    clear_count, before_s = len(find_clears(reported_facts)), time.monotonic()
    feed.clear_worker("a")
    assert count_cached_tokens(index, holder) == 0
    (clear,) = find_clears(reported_facts)[clear_count:]
    assert clear[:2] == ("a", 0)
    assert before_s <= clear.at_s <= time.monotonic()
    assert feed.find_incomplete_ranks("a") == {}, "nothing is missing"
    pub.publish([AllBlocksCleared(), *block_events(0, 2)])
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "awake again")
    assert len(find_clears(reported_facts)) == clear_count + 2, "its events said so as well"
    assert feed.count_clears("a") == 1
    assert feed.sum_counters()["a"]["gaps"] == 0
    feed.clear_worker("unknown")
    pub.close()


def test_a_lost_worker_leaves_the_index_and_comes_back(
    index: ReferenceIndex, feed: IndexFeed, reported_facts: list[WorkerFact]
) -> None:
    """The core says that a worker is lost, so the core is not told by the feed."""
    pub = publisher()
    holder = index.add_holder("m")
    feed.follow_worker("a", [source_of(pub)], [holder])
    pub.publish(block_events(0, 5))
    wait_until(lambda: count_cached_tokens(index, holder) == 20, "announced")
    clears = find_clears(reported_facts)
    feed.restart_streams("a")
    assert find_clears(reported_facts) == clears
    wait_until(lambda: count_cached_tokens(index, holder) == 20, "it was alive after all: the snapshot brings it back")
    pub.close()
    wait_until(lambda: not feed.describe_streams("a")["streams"][0]["up"], "its end is seen")
    feed.restart_streams("a")
    assert count_cached_tokens(index, holder) == 0


@pytest.mark.parametrize("replays", [True, False])
def test_a_worker_that_died_and_came_back_counts_as_restarted(
    index: ReferenceIndex, feed: IndexFeed, reported_facts: list[WorkerFact], replays: bool
) -> None:
    """vLLM has no replay unless its operator asks for it."""
    pub = publisher()
    holder = index.add_holder("m")

    def make_source(by: EventPublisher) -> EventSource:
        changes = {} if replays else {"replay_endpoint": None, "snapshot": False}
        return msgspec.structs.replace(source_of(by), **changes)

    numbers = itertools.count()

    def publish_block() -> None:
        number = next(numbers)
        pub.publish([BlockStored([number + 1], None, [number] * 4, 4, None, "GPU", None)])

    def after_another_event(condition: Callable[[], bool]) -> Callable[[], bool]:
        """Whether it holds after one more event: a connection is up a moment before its publisher knows what it wants,
        so the first events of a life may reach nobody."""

        def publish_and_check() -> bool:
            publish_block()
            return condition()

        return publish_and_check

    def publish_many() -> None:
        """Publish more batches than may be lost at the start of the next life: without replay, only a number that comes
        again tells one life from another."""
        for _ in range(300):
            publish_block()
        wait_until(lambda: (feed.describe_streams("a")["streams"][0]["last_seq"] or 0) >= 300, "a long life")

    source = source_of(pub)
    feed.follow_worker("a", [make_source(pub)], [holder])
    wait_until(lambda: feed.describe_streams("a")["streams"][0]["up"], "followed")
    wait_until(after_another_event(lambda: feed.count_stored_blocks("a") >= 3), "the first life")
    for life in (1, 2):
        publish_many()
        pub.close()
        wait_until(lambda: not feed.describe_streams("a")["streams"][0]["up"], "its end is seen")
        feed.restart_streams("a")
        assert source.replay_endpoint is not None
        pub = publisher(*(address.replace("127.0.0.1", "*") for address in (source.endpoint, source.replay_endpoint)))
        feed.follow_worker("a", [make_source(pub)], [holder])
        wait_until(lambda: feed.is_synced("a"), "it is back")
        wait_until(after_another_event(lambda life=life: feed.sum_counters()["a"]["restarts"] == life), "counted")
    feed.restart_streams("a")
    wait_until(lambda: feed.describe_streams("a")["streams"][0]["up"], "it was alive after all")
    before = feed.sum_counters()["a"]["batches"]
    wait_until(after_another_event(lambda: feed.sum_counters()["a"]["batches"] > before), "it goes on")
    assert feed.sum_counters()["a"]["restarts"] == 2, "each was counted once"
    assert sum(isinstance(fact, EngineRestarted) for fact in reported_facts) == 2
    pub.close()


def test_events_of_another_rank_are_told(index: ReferenceIndex, feed: IndexFeed, caplog: Any) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint=None)
    pubs = [EventPublisher(msgspec.structs.replace(config), dp_rank=rank) for rank in range(2)]
    sources = [msgspec.structs.replace(source_of(pub), data_parallel_rank=rank) for rank, pub in enumerate(pubs)]
    for order, wrong in ((sources, [None, None]), (sources[::-1], [1, 0])):
        ranked_sources = [msgspec.structs.replace(source, data_parallel_rank=rank) for rank, source in enumerate(order)]
        feed.follow_worker("a", ranked_sources, [index.add_holder("m") for _ in range(2)])
        wait_until(lambda: feed.is_synced("a"), "followed")
        for pub in pubs:
            pub.publish(block_events(0, 1))
        wait_until(
            lambda: all(row["last_seq"] is not None for row in feed.describe_streams("a")["streams"]), "both spoke"
        )
        assert [row["wrong_rank"] for row in feed.describe_streams("a")["streams"]] == wrong
    assert "events of rank 1 come from the address of rank 0" in caplog.text
    for pub in pubs:
        pub.close()


def test_a_snapshot_of_another_rank_is_told_once(index: ReferenceIndex, feed: IndexFeed, caplog: Any) -> None:
    """A snapshot of a full cache has a thousand chunks, and each names its rank."""
    feed.follow_worker("a", [EventSource(endpoint="tcp://127.0.0.1:1")] * 2, [index.add_holder("m") for _ in range(2)])
    stream_id = next(iter(feed._stream_by_id))
    for first in range(3):
        chunk = encode_batch(EventBatch(1.0, block_events(first, 1), 1))
        feed.apply_instruction(stream_id, Apply(None, chunk, Origin.SNAPSHOT), b"")
    assert caplog.text.count("events of rank 1 come from the address of rank 0") == 1


def test_a_forgotten_worker_writes_nothing_more(index: ReferenceIndex, feed: IndexFeed) -> None:
    pub = publisher()
    holder = index.add_holder("m")
    feed.follow_worker("a", [source_of(pub)], [holder])
    pub.publish(block_events(0, 1))
    wait_until(lambda: count_cached_tokens(index, holder) == 4, "announced")
    feed.forget("a")
    index.remove_holder(holder)
    pub.publish(block_events(1, 1))
    time.sleep(0.1)
    assert feed.describe_streams("a") == {"streams": []}
    pub.close()


def test_following_again_without_a_change_keeps_the_stream(index: ReferenceIndex, feed: IndexFeed) -> None:
    pub = publisher()
    holder = index.add_holder("m")
    feed.follow_worker("a", [source_of(pub)], [holder])
    pub.publish(block_events(0, 2))
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "announced")
    feed.follow_worker("a", [source_of(pub)], [holder])
    assert feed.sum_counters()["a"]["batches"] >= 1
    assert count_cached_tokens(index, holder) == 8
    other = publisher()
    feed.follow_worker("a", [source_of(other)], [holder])
    other.publish(block_events(0, 1))
    wait_until(lambda: count_cached_tokens(index, holder) == 4, "another address: what the old stream said is replaced")
    pub.close()
    other.close()


@pytest.mark.parametrize(("host", "epochs", "is_replaced"), [
    ("localhost", ("one", "two"), True), ("localhost", ("one", "one"), False), ("localhost", (None, None), False),
    ("127.0.0.1", ("one", "two"), False),
])  # fmt: skip
def test_a_name_behind_which_another_publisher_answers_is_looked_up_again(
    index: ReferenceIndex, feed: IndexFeed, host: str, epochs: tuple[str | None, str | None], is_replaced: bool
) -> None:
    """The connection stayed with the old machine for as long as that lived, and requests went to the new one."""
    pub, holder = publisher(), index.add_holder("m")
    endpoint = source_of(pub).endpoint.replace("127.0.0.1", host)
    replay_endpoint = source_of(pub).replay_endpoint
    sources = [EventSource(endpoint=endpoint, replay_endpoint=replay_endpoint, epoch=epoch) for epoch in epochs]
    feed.follow_worker("a", sources[:1], [holder])
    pub.publish(block_events(0, 2))
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "announced")
    (stream,) = feed._streams_by_worker["a"]
    feed.follow_worker("a", sources[1:], [holder])
    assert (feed._streams_by_worker["a"] != [stream]) == is_replaced
    wait_until(lambda: count_cached_tokens(index, holder) == 8, "read anew, or kept")
    pub.close()


def test_a_publisher_that_connects_is_known_by_its_topic(index: ReferenceIndex, feed: IndexFeed) -> None:
    address = feed.bind("tcp://127.0.0.1:*")
    holder = index.add_holder("m")
    feed.follow_worker("h:8000", [EventSource(endpoint="tcp://127.0.0.1:1", topic="kv@h:8000@m")], [holder])
    pub = EventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=address, topic="kv@h:8000@m"))
    end = time.monotonic() + 10
    count = 0
    while count_cached_tokens(index, holder) == 0:
        assert time.monotonic() < end
        pub.publish(block_events(0, 2))
        count += 1
        time.sleep(0.05)
    assert count_cached_tokens(index, holder) == 8
    pub.close()


def test_what_cannot_be_read_is_counted_and_shown(index: ReferenceIndex, feed: IndexFeed) -> None:
    from events.stream_types import Apply, MalformedMessage, Origin

    holder = index.add_holder("m")
    feed.follow_worker("a", [EventSource(endpoint="tcp://127.0.0.1:1")], [holder])
    stream_id = next(iter(feed._stream_by_id))
    feed.apply_instruction(stream_id, Apply(0, b"\xc1nonsense", Origin.LIVE), b"")
    feed.apply_instruction(stream_id, MalformedMessage("a frame of two parts"), b"")
    (row,) = feed.describe_streams("a")["streams"]
    assert row["malformed"] == 2
    assert len(row["problems"]) == 2


def test_batches_that_come_again_are_counted(index: ReferenceIndex, feed: IndexFeed) -> None:
    """A second publisher of a topic, with old sequence numbers, shows by nothing else."""
    feed.follow_worker("a", [EventSource(endpoint="tcp://127.0.0.1:1")], [index.add_holder("m")])
    (stream_id,) = feed._stream_by_id
    feed.apply_instruction(stream_id, DuplicateBatch(3), b"")
    assert feed.sum_counters()["a"]["repeated"] == 1


def test_how_late_a_batch_counted_is_shown(index: ReferenceIndex, feed: IndexFeed) -> None:
    feed.follow_worker("a", [EventSource(endpoint="tcp://127.0.0.1:1")], [index.add_holder("m")])
    (stream_id,) = feed._stream_by_id
    assert feed.list_event_lags() == {}
    for seq, (payload, is_known) in enumerate(
        [(encode_batch(EventBatch(time.time() - 100.0, [])), True), (msgspec.msgpack.encode([1, [], 0]), False)]
    ):
        feed.apply_instruction(stream_id, Apply(seq, payload, Origin.LIVE), b"")
        lag_s = feed.describe_streams("a")["streams"][0]["last_event_lag_s"]
        assert lag_s == (pytest.approx(100.0, abs=30.0) if is_known else None)
        assert feed.list_event_lags() == ({"a": lag_s} if is_known else {})


def test_a_batch_that_comes_while_lags_are_listed_does_not_break_the_list(feed: IndexFeed) -> None:
    """The page is made on another thread than the batches are applied on."""

    class Stream:
        batches = iter((AppliedBatch(1.0, 2.0), AppliedBatch(1.0, None)))
        last_event = property(lambda self: next(self.batches))

    feed._streams_by_worker["a"] = cast("Any", [Stream()])
    assert feed.list_event_lags() == {"a": 2.0}
    del feed._streams_by_worker["a"]


def test_messages_without_a_sequence_number_are_counted_and_shown(index: ReferenceIndex, feed: IndexFeed) -> None:
    context = zmq.Context()
    pub = context.socket(zmq.XPUB)
    try:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        feed.follow_worker("a", [EventSource(endpoint=f"tcp://127.0.0.1:{port}")], [index.add_holder("m")])
        # Messages that are read together with the report of their connection are dropped: a replay would bring them.
        wait_until(lambda: bool(pub.poll(0)) and feed.describe_streams("a")["streams"][0]["up"], "it is connected")
        for frames in ([b"payload"], [b"topic", b"payload"], [b"topic", b"7", b"payload"]):
            pub.send_multipart(frames)
        wait_until(lambda: feed.sum_counters()["a"]["malformed"] == 3, "all are counted")
        (row,) = feed.describe_streams("a")["streams"]
        assert [problem[:12] for problem in row["problems"]] == ["live message", "live message", "sequence fra"]
    finally:
        pub.close(0)
        context.term()


def test_a_late_router_starts_from_what_a_peer_knows() -> None:
    """The worker is as vLLM: replay, no snapshots, and its ring no longer holds the beginning."""
    pub = EventPublisher(
        KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:*", replay_endpoint="tcp://*:*", buffer_steps=2)
    )
    source = msgspec.structs.replace(source_of(pub), snapshot=False)
    old, late = ReferenceIndex(7), ReferenceIndex(7)
    holders = [index.add_holder("m") for index in (old, late)]
    first, second = feeds = [IndexFeed(index) for index in (old, late)]
    for feed in feeds:
        feed.start()
    first.follow_worker("a", [source], holders[:1])
    wait_until(lambda: first.is_synced("a"), "the first router follows")
    for i in range(6):
        pub.publish(block_events(i, 1))
    wait_until(lambda: count_cached_tokens(old, holders[0]) == 24, "the first router knows all")
    snapshot = first.make_snapshot("a", 0)
    assert snapshot is not None
    assert (snapshot.seq, first.make_snapshot("a", 1), first.make_snapshot("b", 0)) == (5, None, None)
    pub.publish(block_events(6, 1))  # after the snapshot, before it is used
    second.follow_worker("a", [source], holders[1:2], {0: snapshot})
    wait_until(lambda: second.is_synced("a"), "the late router follows")
    assert count_cached_tokens(late, holders[1]) == 28
    (row,) = second.describe_streams("a")["streams"]
    assert (row["snapshots"], row["replayed"], row["restarts"]) == (len(snapshot.parts), 1, 0)
    pub.publish([BlockRemoved([7], "GPU")])
    wait_until(lambda: count_cached_tokens(late, holders[1]) == 24, "it goes on from there")
    for feed in feeds:
        feed.close()
    pub.close()
    late.check_invariants()


def test_a_snapshot_is_made_between_the_turns_of_other_streams() -> None:
    """However large the dump is: the other worker's events are applied before it is done, its own only afterwards."""

    class SlowDumpIndex(ReferenceIndex):
        """A dump that goes on until the other worker's events have come."""

        slices = 0

        def begin_dump(self, holder: HolderId) -> Any:
            dumping, step = super().begin_dump(holder), self._step
            return SimpleNamespace(step=lambda: step(dumping))

        def _step(self, dumping: Any) -> Any:
            SlowDumpIndex.slices += 1
            if SlowDumpIndex.slices == 1:
                big.publish(block_events(3, 1))
                other.publish(block_events(0, 2))
            assert count_cached_tokens(self, holders[0]) == 12, "the holder that is dumped does not change"
            return (
                dumping.step() if count_cached_tokens(self, holders[1]) == 8 or SlowDumpIndex.slices > 1_000_000 else []
            )

    big, other = publisher(), publisher()
    index = SlowDumpIndex(7)
    holders = [index.add_holder("m") for _ in range(2)]
    feed = IndexFeed(index)
    feed.start()
    for name, pub, holder in zip("ab", (big, other), holders):
        feed.follow_worker(name, [source_of(pub)], [holder])
    wait_until(lambda: feed.is_synced("a") and feed.is_synced("b"), "both are followed")
    big.publish(block_events(0, 3))
    wait_until(lambda: count_cached_tokens(index, holders[0]) == 12, "what was before the snapshot")
    snapshot = feed.make_snapshot("a", 0)
    assert snapshot is not None
    assert (snapshot.seq, len(snapshot.parts), count_cached_tokens(index, holders[1])) == (0, 1, 8)
    assert 1 < SlowDumpIndex.slices <= 1_000_000
    wait_until(lambda: count_cached_tokens(index, holders[0]) == 16, "what came meanwhile is applied afterwards")
    feed.close()
    for pub in (big, other):
        pub.close()


@pytest.mark.parametrize("fault", ["another history", "another seed", "restarted"])
def test_a_peers_snapshot_that_the_worker_does_not_confirm_is_forgotten(fault: str) -> None:
    pub, other = publisher(), publisher()
    for source_pub in (pub, other):
        source_pub.publish(block_events(0, 3))
        source_pub.publish(block_events(3, 2) if source_pub is pub else [BlockRemoved([1], "GPU")])
    old, late = ReferenceIndex(7), ReferenceIndex(8 if fault == "another seed" else 7)
    holder = late.add_holder("m")
    first, second = IndexFeed(old), IndexFeed(late)
    first.start()
    second.start()
    first.follow_worker("a", [source_of(pub)], [old.add_holder("m")])
    wait_until(lambda: first.is_synced("a"), "the first router follows")
    pub.publish(block_events(5, 1))
    wait_until(lambda: first.make_snapshot("a", 0) is not None, "the first router is in step")
    snapshot = first.make_snapshot("a", 0)
    assert snapshot is not None
    empty = publisher()
    follow = {"another history": other, "another seed": pub, "restarted": empty}[fault]
    second.follow_worker("a", [msgspec.structs.replace(source_of(follow), snapshot=False)], [holder], {0: snapshot})
    wait_until(lambda: second.is_synced("a"), "the second router follows")
    wait_until(
        lambda: count_cached_tokens(late, holder) == {"another history": 0, "another seed": 24, "restarted": 0}[fault],
        fault,
    )
    for feed in (first, second):
        feed.close()
    for source_pub in (pub, other, empty):
        source_pub.close()
    late.check_invariants()


@pytest.mark.parametrize("reannounces", [False, True])
def test_a_store_that_repeats_a_hit_is_no_second_copy(
    index: ReferenceIndex, feed: IndexFeed, reannounces: bool
) -> None:
    """vLLM with kv_cache_report_mode=full announces every hit again; the block is there once all the same."""
    pub = publisher()
    holder = index.add_holder("m")
    feed.follow_worker("a", [msgspec.structs.replace(source_of(pub), reannounces=reannounces)], [holder])
    wait_until(lambda: feed.is_synced("a"), "synced")
    for _ in range(3):
        pub.publish(block_events(0, 2))
    pub.publish([BlockRemoved([2], "GPU")])
    wait_until(lambda: feed.sum_counters()["a"]["removed"] == 1, "the removal is applied")
    assert count_cached_tokens(index, holder) == (4 if reannounces else 8)
    (row,) = feed.describe_streams("a")["streams"]
    assert row["reannounces"] is reannounces
    pub.close()


class RouterPair:
    """Two routers of one seed that follow one worker: as vLLM, with a ring of two batches and no snapshots."""

    def __init__(self) -> None:
        config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint="tcp://*:*", replay_endpoint="tcp://*:*", buffer_steps=2
        )
        self.pub = EventPublisher(config)
        self.source = msgspec.structs.replace(source_of(self.pub), snapshot=False)
        self.indexes = [ReferenceIndex(7), ReferenceIndex(7)]
        self.holders = [index.add_holder("m") for index in self.indexes]
        self.feeds = [IndexFeed(index) for index in self.indexes]
        for feed, holder in zip(self.feeds, self.holders):
            feed.start()
            feed.follow_worker("a", [self.source], [holder])
        wait_until(lambda: all(feed.is_synced("a") for feed in self.feeds), "both follow")

    def tokens(self) -> list[int]:
        return [count_cached_tokens(index, holder) for index, holder in zip(self.indexes, self.holders)]

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        self.pub.close()
        for index in self.indexes:
            index.check_invariants()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterPair]:
    # Our publisher answers a request for a snapshot whatever it advertises; vLLM's cannot: none is asked for.
    monkeypatch.setattr("router.fleet.worker_stream.StreamConfig", lambda: StreamConfig(start_mode=StartMode.RING))
    pair = RouterPair()
    yield pair
    pair.close()


def test_a_router_that_was_cut_off_takes_the_past_from_a_peer(pair: RouterPair) -> None:
    """The reconnect clears what was known, and the ring no longer has the beginning: nothing fits without it."""
    first, second = pair.feeds
    for i in range(6):
        pair.pub.publish(block_events(i, 1))
    wait_until(lambda: pair.tokens() == [24, 24], "both know all")
    assert (first.find_incomplete_ranks("a"), second.find_incomplete_ranks("a")) == ({}, {})
    second.restart_streams("a")
    wait_until(lambda: second.find_incomplete_ranks("a") == {0: 4}, "it knows the ring's two batches")
    assert pair.tokens() == [24, 0]
    snapshot = first.make_snapshot("a", 0)
    assert snapshot is not None
    assert (snapshot.complete_from, snapshot.seq) == (0, 5)
    pair.pub.publish(block_events(6, 1))  # after the snapshot, before it is used
    assert second.resume("a", 0, snapshot)
    wait_until(lambda: second.is_synced("a") and pair.tokens() == [28, 28], "both know all again")
    pair.pub.publish([BlockRemoved([6], "GPU")])
    wait_until(lambda: pair.tokens() == [20, 20], "and go on")
    assert second.find_incomplete_ranks("a") == {}
    assert not second.resume("a", 0, snapshot), "what is whole is not replaced"


def test_a_gap_that_replay_does_not_cover_is_filled_by_a_peer(pair: RouterPair) -> None:
    _, second = pair.feeds
    for i in range(6):
        pair.pub.publish(block_events(i, 1))
    wait_until(lambda: pair.tokens() == [24, 24], "both know all")
    (stream,) = second._stream_by_id.values()
    pub = pair.pub  # the second router's connection loses three batches; the ring keeps two
    second.events.remove(stream.stream_id)
    for i in range(6, 9):
        pub.publish(block_events(i, 1))
    wait_until(lambda: pair.tokens()[0] == 36, "the first router has them")
    assert stream.position is not None
    second.events.add(stream.make_feed_source(stream.position))  # it comes back where it was
    wait_until(lambda: second.find_incomplete_ranks("a") == {0: 7}, "the gap cost all that was known")
    snapshot = pair.feeds[0].make_snapshot("a", 0)
    assert snapshot is not None
    assert second.resume("a", 0, snapshot)
    wait_until(lambda: second.is_synced("a") and pair.tokens() == [36, 36], "both know all again")


def test_a_peer_that_knows_no_more_is_not_used(pair: RouterPair) -> None:
    for i in range(6):
        pair.pub.publish(block_events(i, 1))
    wait_until(lambda: pair.tokens() == [24, 24], "both know all")
    for feed in pair.feeds:
        feed.restart_streams("a")
    wait_until(lambda: all(feed.find_incomplete_ranks("a") == {0: 4} for feed in pair.feeds), "both know the ring")
    snapshot = pair.feeds[0].make_snapshot("a", 0)
    assert snapshot is not None
    assert snapshot.complete_from == 4
    assert not pair.feeds[1].resume("a", 0, snapshot)
    pair.pub.publish([AllBlocksCleared()])
    wait_until(
        lambda: all(feed.find_incomplete_ranks("a") == {} for feed in pair.feeds), "nothing is resident: that is whole"
    )


def test_a_restarted_worker_does_not_confirm_a_peers_snapshot(pair: RouterPair) -> None:
    """The peer's snapshot is of the worker's life before: used, not confirmed, forgotten."""
    first, second = pair.feeds
    for i in range(6):
        pair.pub.publish(block_events(i, 1))
    wait_until(lambda: pair.tokens() == [24, 24], "both know all")
    snapshot = first.make_snapshot("a", 0)
    assert snapshot is not None
    other = publisher()
    for i in range(7):
        other.publish([BlockRemoved([99], "GPU")] if i < 6 else block_events(0, 1))
    restarted_source = msgspec.structs.replace(source_of(other), snapshot=False)
    second.follow_worker("a", [restarted_source], pair.holders[1:])
    wait_until(lambda: second.is_synced("a") and pair.tokens()[1] == 4, "the other life is followed")
    (stream,) = second._stream_by_id.values()
    stream.complete_from = 5  # as if the ring had lost the beginning
    assert second.resume("a", 0, snapshot)
    wait_until(lambda: second.is_synced("a") and pair.tokens()[1] == 4, "the ring is all that counts")
    (row,) = second.describe_streams("a")["streams"]
    assert row["restarts"] == 1
    other.close()


def test_a_stream_that_never_connected_says_so(index: ReferenceIndex, feed: IndexFeed) -> None:
    """Nobody listens there: the address is wrong, or the publisher connects to a subscriber instead of binding."""
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        source = EventSource(endpoint=f"tcp://127.0.0.1:{bound_socket.getsockname()[1]}")
        holder = index.add_holder("m")
        feed.follow_worker("a", [source], [holder])
        (row,) = feed.describe_streams("a")["streams"]
    assert (row["up"], row["phase"]) == (False, "disconnected")
    assert not feed.is_synced("a")


def test_a_publisher_that_has_connected_is_not_missed(
    index: ReferenceIndex, feed: IndexFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With --bind-events, a worker without a request so far has published nothing, and its endpoint is the router's."""
    monkeypatch.setattr("router.fleet.worker_stream.UNREACHABLE_S", 0.0)
    endpoint = feed.bind("tcp://127.0.0.1:*")
    feed.follow_worker("a", [EventSource(endpoint=endpoint, topic="kv@a@m")], [index.add_holder("m")])
    assert feed.list_unreachable_endpoints("a") == [endpoint], "nobody has connected"
    with zmq.Context() as context, context.socket(zmq.PUB) as silent_publisher:
        silent_publisher.connect(endpoint)
        wait_until(lambda: feed.list_unreachable_endpoints("a") == [], "its connection is seen")
        feed.warn_of_unreachable_streams("a")
        assert endpoint not in caplog.text
        host, _, port = endpoint.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))):
            pass
        time.sleep(0.1)
        assert feed.list_unreachable_endpoints("a") == [], "a stranger's end is not the publisher's"
    wait_until(lambda: feed.list_unreachable_endpoints("a") == [endpoint], "the publisher is gone")


def test_an_address_where_nobody_listens_is_said_once(
    index: ReferenceIndex, feed: IndexFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose `events=` is wrong is up and answers, so nothing else would tell the operator."""
    monkeypatch.setattr("router.fleet.worker_stream.UNREACHABLE_S", 0.2)
    with socket.socket() as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{closed_socket.getsockname()[1]}"
    reachable = publisher()
    feed.follow_worker("a", [EventSource(endpoint=endpoint)], [index.add_holder("m")])
    feed.follow_worker("b", [source_of(reachable)], [index.add_holder("m")])
    wait_until(lambda: feed.is_synced("b"), "the other worker is followed")
    wait_until(lambda: feed.list_unreachable_endpoints("a") == [endpoint], "the wrong address is noticed")
    assert feed.list_unreachable_endpoints("b") == []
    for worker_id in ("a", "b", "a"):
        feed.warn_of_unreachable_streams(worker_id)
    assert [record.getMessage() for record in caplog.records if endpoint in record.getMessage()] == [
        f"worker a: no events can be read from {endpoint}: is it the worker's address, and is the port open from here?"
    ]
    late = publisher(endpoint.replace("127.0.0.1", "*"), replay=None)
    wait_until(lambda: feed.list_unreachable_endpoints("a") == [], "a publisher begins there")
    late.close()
    reachable.close()
