"""Routers that share their load: the sum is what one router would see; a lost peer or message does not stay."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from core_by_hand import apply_operation
from hypothesis import given
from hypothesis import strategies as st

from events.feed_sockets import FRAMES_SLICE
from prompts.errors import RequestError
from router.app import cluster
from router.decide.config import CostConfig, LearnConfig
from router.decide.load import NO_PEER_LOAD
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Transfer, TransferKind
from router.decide.price import Candidate, TransferPlan
from router.decide.target import OVERDUE_SHARE, InFlightRequest, Target
from router.fleet.peers import TOPIC, LoadMessage, PeerLoads, PeerSockets
from router.index.protocol import HolderId
from simulation.steps import StepTimes


def tracker() -> tuple[LoadTracker, list[Target]]:
    load_tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig(enabled=False))
    return load_tracker, [load_tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(2)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["route", "first", "end", "progress"]),
        st.integers(0, 7),
        st.integers(1, 9000),
        st.integers(0, 1),
    ),
    max_size=50,
)


@given(steps=STEPS, skew=st.floats(-1e6, 1e6), lost_messages=st.sets(st.integers(0, 60)))
def test_two_routers_see_what_one_would(
    steps: list[tuple[str, int, int, int]], skew: float, lost_messages: set[int]
) -> None:
    """Requests are dealt to two routers whose clocks differ by `skew`; messages in `lost` never arrive. After the next
    heartbeats both see the queue, decode load and utilisation of a single router that had them all."""
    (single_tracker, all_targets), pair = tracker(), [tracker(), tracker()]
    loads = [PeerLoads(pair[i][0], f"r{i}", heartbeat_s=5.0, expire_s=100.0) for i in range(2)]
    offset = [0.0, skew]
    now = 0.0
    single_requests: dict[str, InFlightRequest] = {}
    pair_requests: list[dict[str, InFlightRequest]] = [{}, {}]

    def exchange(number: int) -> None:
        for i in range(2):
            message = loads[i].next_message(now + offset[i])
            if message is not None and number not in lost_messages:
                loads[1 - i].apply_message(message, now + offset[1 - i])

    for number, (event, key, tokens, target_index) in enumerate(steps):
        now += 0.05
        name, side = str(key), key % 2
        books, targets = pair[side]
        apply_operation(single_tracker, all_targets[target_index], single_requests, event, name, tokens, now)
        apply_operation(books, targets[target_index], pair_requests[side], event, name, tokens, now + offset[side])
        exchange(number)
    now += 6.0
    lost_messages.clear()
    exchange(999)
    for i in range(2):
        books, targets = pair[i]
        for target, single_target in zip(targets, all_targets):
            at = now + offset[i]
            in_flight = target.load.request_count + (target.peer_load.request_count)
            assert in_flight == single_target.load.request_count
            assert target.slowdown == pytest.approx(single_target.slowdown)
            assert books.compute_utilisation(target, at) == pytest.approx(
                single_tracker.compute_utilisation(single_target, now), rel=1e-3, abs=1e-5
            )
            # The head of the queue is known to the other router by its age: exact up to skewed clocks. Who
            # aborts the oldest of its own thinks that the next has begun, though another router's may be before it.
            late_s = OVERDUE_SHARE * 0.05 * len(steps)
            assert target.estimate_queue_s(at) == pytest.approx(
                single_target.estimate_queue_s(now), rel=1e-3, abs=0.06 + late_s
            )


def test_work_is_told_whatever_each_learned() -> None:
    """A router that believes the worker to be three times as fast tells of the same queue."""
    (my_tracker, targets), their_tracker = (
        tracker(),
        LoadTracker(StepTimes(3e-5), CostConfig(), LearnConfig(enabled=False)),
    )
    other = their_tracker.add_target("w0", None, HolderId(0))
    their_tracker.add_request(other, prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.0)
    message = PeerLoads(their_tracker, "you").next_message(0.0)
    assert message is not None
    PeerLoads(my_tracker, "me").apply_message(message, 0.0)
    assert targets[0].estimate_queue_s(0.0) == pytest.approx(targets[0].estimate_prefill_s(8000, 0))
    late_s = 0.2 * 60.0 / targets[0].slowdown
    assert targets[0].estimate_queue_s(60.0) == pytest.approx(late_s)
    assert targets[0].peer_load is not NO_PEER_LOAD
    assert targets[0].peer_load.utilisation == pytest.approx(targets[0].estimate_prefill_s(8000, 0) / 60.0)


def test_requests_that_wait_for_kv_are_told_too() -> None:
    """They take a place in the batch of their worker soon, and compute little of their prompts."""
    (my_tracker, my_targets), (their_tracker, targets) = tracker(), tracker()
    mine, theirs = PeerLoads(my_tracker, "me"), PeerLoads(their_tracker, "you")
    transfer = Transfer(TransferKind.PULL, "other", None, 0, 1e9)
    candidate = Candidate(targets[0], plan=TransferPlan(transfer, Candidate(targets[1]), arriving_tokens=0))
    waiting = their_tracker.add_request(
        targets[0], prompt_tokens=8000, cached_tokens=7999, is_streaming=True, now=0.0, candidate=candidate
    )
    for now in (0.0, 10.0):  # a full message comes every half second
        message = theirs.next_message(now)
        assert message is not None
        mine.apply_message(message, now)
        assert my_targets[0].total_request_count == 1
    their_tracker.end_request(waiting, 11.0, is_computed=False)
    message = theirs.next_message(11.0)
    assert message is not None
    mine.apply_message(message, 11.0)
    assert my_targets[0].total_request_count == 0


def test_a_silent_peer_is_forgotten_and_a_restarted_one_replaced() -> None:
    (my_tracker, targets), (their_tracker, their_targets) = tracker(), tracker()
    loads = PeerLoads(my_tracker, "me", expire_s=2.0)
    their_tracker.add_request(their_targets[0], prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.0)
    message = PeerLoads(their_tracker, "you").next_message(0.0)
    assert message is not None
    loads.apply_message(message, 0.0)
    assert targets[0].peer_load is not NO_PEER_LOAD
    fresh, _ = tracker()
    restart_message = PeerLoads(fresh, "you").next_message(1.0)
    assert restart_message is not None
    loads.apply_message(restart_message, 1.0)
    assert targets[0].peer_load is NO_PEER_LOAD, "the new life has nothing in flight"
    loads.apply_message(message, 1.5)
    loads.expire(3.0)
    assert list(loads._peers) == ["you"]
    loads.expire(4.0)
    assert list(loads._peers) == []
    assert targets[0].peer_load is NO_PEER_LOAD
    assert loads.counts["expired"] == 1


def test_a_lost_message_is_repaired_by_the_next_full_one() -> None:
    (my_tracker, targets), (their_tracker, their_targets) = tracker(), tracker()
    loads, other = PeerLoads(my_tracker, "me"), PeerLoads(their_tracker, "you", heartbeat_s=1.0)
    a = their_tracker.add_request(their_targets[0], prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.0)
    loads.apply_message(other.next_message(0.0) or b"", 0.0)
    assert targets[0].prefill_queue.total_prefill_s > 0.0
    their_tracker.end_request(a, 0.1)
    assert other.next_message(0.1) is not None, "this one is lost"
    full = other.next_message(1.1)
    assert full is not None
    loads.apply_message(full, 1.1)
    assert targets[0].prefill_queue.total_prefill_s == 0.0


def test_late_and_unreadable_messages_are_counted_not_believed() -> None:
    (my_tracker, targets), (their_tracker, their_targets) = tracker(), tracker()
    loads, other = PeerLoads(my_tracker, "me"), PeerLoads(their_tracker, "you")
    first = other.next_message(0.0)
    their_tracker.add_request(their_targets[0], prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.1)
    second = other.next_message(0.1)
    assert first is not None
    assert second is not None
    loads.apply_message(second, 0.1)
    loads.apply_message(first, 0.2)
    loads.apply_message(b"\xc1", 0.3)
    import msgspec

    loads.apply_message(msgspec.msgpack.encode(LoadMessage(99, "x", "e", 1, True, [])), 0.3)
    loads.apply_message(loads.next_message(0.3) or b"", 0.3)
    assert [loads.counts[name] for name in ("late", "malformed", "received")] == [1, 2, 1]
    assert targets[0].peer_load is not NO_PEER_LOAD


def test_what_an_older_router_learned_of_speeds_is_left_out() -> None:
    my_tracker, targets = tracker()
    loads, before = PeerLoads(my_tracker, "me"), targets[0].speed.step_times
    message = [1, "old", "e", 1, True, [["w0", 3.0, 3.0, 1.0, 1.0, 0, 0, 0.5, 1]], [["", 1e-3, 20.0, 0.1, 5.0]]]
    loads.apply_message(msgspec.msgpack.encode(message), 1.0)
    assert (loads.counts["received"], targets[0].speed.step_times) == (1, before)
    assert targets[0].peer_load.prefill_s == 3.0


def test_nothing_is_said_when_nothing_changed() -> None:
    my_tracker, targets = tracker()
    loads = PeerLoads(my_tracker, "me", heartbeat_s=1.0)
    assert loads.next_message(0.0) is not None
    assert loads.next_message(0.5) is None
    my_tracker.add_request(targets[0], prompt_tokens=10, cached_tokens=0, is_streaming=True, now=0.6)
    assert loads.next_message(0.6) is not None
    assert loads.next_message(0.7) is None
    assert loads.next_message(1.0) is not None


def test_over_real_sockets() -> None:
    (first_tracker, targets), (second_tracker, second_targets) = tracker(), tracker()
    loads = [PeerLoads(first_tracker, "a"), PeerLoads(second_tracker, "b")]
    first, second = PeerSockets(loads[0]), PeerSockets(loads[1])
    first.bind("tcp://127.0.0.1:*")
    assert first.address is not None
    assert first.address.startswith("tcp://127.0.0.1:"), "an address that an operator may copy"
    second.bind("tcp://127.0.0.1:*")
    second.connect(first.address)
    first_tracker.add_request(targets[1], prompt_tokens=5000, cached_tokens=0, is_streaming=True, now=time.monotonic())
    end = time.monotonic() + 10
    while second_targets[1].peer_load is NO_PEER_LOAD and time.monotonic() < end:
        first.exchange_loads(time.monotonic())
        second.exchange_loads(time.monotonic())
        time.sleep(0.01)
    assert second_targets[1].peer_load is not NO_PEER_LOAD
    assert second_targets[1].peer_load.prefill_s == pytest.approx(targets[1].prefill_queue.own_prefill_s)
    first.close()
    second.close()


@pytest.mark.parametrize("host", ["*", "[::]", "0.0.0.0"])
def test_an_address_on_all_interfaces_is_told_with_the_name_of_the_host(host: str) -> None:
    sockets = PeerSockets(PeerLoads(tracker()[0], "a"))
    try:
        sockets.bind(f"tcp://{host}:*")
        address = cluster._name_own_host(str(sockets.address))
        assert re.fullmatch(rf"tcp://{re.escape(socket.gethostname())}:\d+", address)
    finally:
        sockets.close()


def test_a_message_of_many_frames_does_not_hold_up_the_router() -> None:
    """A million frames without a byte took the event loop, and all requests, for three seconds."""
    sockets = PeerSockets(PeerLoads(tracker()[0], "me"))
    with zmq.Context() as context, context.socket(zmq.XPUB) as peer:
        peer.linger = 0
        peer.bind("tcp://127.0.0.1:*")
        sockets.connect(peer.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        assert peer.poll(10_000), "subscribed"
        peer.send_multipart([TOPIC, *[b""] * (3 * FRAMES_SLICE)])
        assert sockets._sub.poll(10_000)
        malformed_counts = []
        for _ in range(4):
            sockets.exchange_loads(0.0)
            malformed_counts.append(sockets.loads.counts["malformed"])
        sockets.close()
    assert malformed_counts == [0, 0, 0, 1]


def test_no_two_routers_have_one_name() -> None:
    """Two containers with the host's name, each with process 1, would take each other's load for their own."""
    assert cluster.make_router_name() != cluster.make_router_name()


PAUSED_ROUTER = """
import time
from router.decide.config import CostConfig, LearnConfig, StepTimes
from router.decide.load_tracker import LoadTracker
from router.fleet.peers import PeerLoads, PeerSockets

def make_sockets(name, heartbeat_s):
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    return PeerSockets(PeerLoads(tracker, name, heartbeat_s=heartbeat_s))

def exchange(seconds, *routers):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for router in routers:
            router.exchange_loads(time.monotonic())
        time.sleep(0.004)

paused, busy = make_sockets("a", 0.5), make_sockets("b", 0.0)
busy.bind("tcp://127.0.0.1:*")
paused.connect(busy.address)
exchange(0.5, paused, busy)
exchange(4.0, busy)
exchange(1.5, paused, busy)
print("goes on")
"""
"""A router that reads nothing for some seconds, while a peer sends more messages than the queue holds."""


@pytest.mark.long
def test_a_router_that_was_paused_under_the_load_of_a_peer_goes_on() -> None:
    """libzmq ended the process when a heartbeat failed while the queue was full."""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PAUSED_ROUTER], capture_output=True, text=True, cwd=root, check=False
    )
    assert (result.returncode, result.stdout) == (0, "goes on\n"), result.stderr


def test_who_is_followed_can_be_said_anew() -> None:
    mine, other, third = (PeerSockets(PeerLoads(tracker()[0], name)) for name in ("a", "b", "c"))
    try:
        other.bind("tcp://127.0.0.1:*")
        third.bind("tcp://127.0.0.1:*")
        body = msgspec.json.encode({"peers": [other.address, third.address]})
        assert mine.set_peers(body) == sorted([str(other.address), str(third.address)])
        assert mine.set_peers(body) == mine.set_peers(body), "twice is once"
        assert mine.set_peers(msgspec.json.encode({"peers": [third.address]})) == [third.address]
        assert mine.set_peers(b'{"peers": []}') == []
        for wrong in (b"", b"[]", b'{"peers": ["http://x"]}', b'{"peers": ["tcp://x:99999"]}', b'{"peers": 1}'):
            with pytest.raises(RequestError):
                mine.set_peers(wrong)
        assert mine.set_peers(b'{"peers": []}') == [], "nothing came of them"
    finally:
        for sockets in (mine, other, third):
            sockets.close()


def test_a_router_that_is_its_own_peer_says_so_once_and_ignores_itself(caplog: pytest.LogCaptureFixture) -> None:
    (my_tracker, targets) = tracker()
    my_tracker.add_request(targets[0], prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.0)
    loads = PeerLoads(my_tracker, "me")
    with caplog.at_level(logging.INFO, "router"):
        for now in (0.0, 1.0):
            message = loads.next_message(now)
            assert message is not None
            loads.apply_message(message, now)
    assert [record.getMessage() for record in caplog.records] == [
        "one of the peers is this router itself, and is ignored: --peer names the others' --peer-bind"
    ]
    assert loads.counts["received"] == 0
    assert targets[0].peer_load is NO_PEER_LOAD
