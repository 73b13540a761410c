"""The stream machine against a network that loses, repeats, reorders, and publishers that restart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_world import World

from events import (
    Apply,
    Clear,
    DuplicateBatch,
    Gap,
    Instruction,
    MalformedMessage,
    Origin,
    PublisherRestarted,
    RequestReplay,
    RequestSnapshot,
    StartMode,
    StreamConfig,
    StreamPhase,
    StreamState,
)
from events.frames import END_SEQ, SNAPSHOT_SEQ, pack_seq

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 7)),
        st.tuples(st.just("deliver"), st.integers(0, 3)),
        st.tuples(st.just("repeat"), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.integers(0, 3)),
        st.tuples(st.just("serve"), st.just(0)),
        st.tuples(st.just("reply"), st.integers(1, 4)),
        st.tuples(st.just("lose_reply"), st.just(0)),
        st.tuples(st.just("reconnect"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("connect"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 6)),
    ),
    max_size=80,
)


def run(world: World, script: list[tuple[str, int]]) -> None:
    for action, value in script:
        if action == "publish":
            batch = world.publisher.toggle(value)
            if world.follower.stream.is_online:
                world.wire.append(batch)
        elif action == "deliver":
            world.deliver(value)
        elif action == "repeat":
            world.deliver(value, keep=True)
        elif action == "lose" and world.wire:
            del world.wire[value % len(world.wire)]
        elif action == "serve":
            world.serve()
        elif action == "reply":
            for _ in range(value):
                world.deliver_reply()
        elif action == "lose_reply":
            world.replies = None
        elif action == "reconnect":
            world.follower.perform(world.follower.stream.on_disconnected())
            world.connect()
        elif action == "restart":
            world.restart()
        elif action == "connect" and not world.follower.stream.is_online:
            world.connect()
        elif action == "wait":
            world.now += value
            world.follower.perform(world.follower.stream.on_tick(world.now))


@settings(max_examples=examples(400), deadline=None)
@given(steps, st.sampled_from([2, 5, 1000]), st.sampled_from([2, 1024]), st.sampled_from([3, 1000]))
def test_snapshot_publisher_ends_exact(
    script: list[tuple[str, int]], ring_size: int, recent_max: int, buffer_max: int
) -> None:
    """Guarantees 6 and 7 seen from outside: whatever the network did, once quiet both sides hold the same."""
    config = StreamConfig(max_recent_batches=recent_max, max_early_batches=buffer_max)
    world = World(config, ring_size, snapshots=True)
    world.connect()
    run(world, script)
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident
    assert world.follower.stream.phase is StreamPhase.LIVE


@settings(max_examples=examples(300), deadline=None)
@given(steps, st.sampled_from([2, 5, 1000]), st.sampled_from(list(StartMode)))
def test_ring_publisher_never_leaves_a_false_hit(
    script: list[tuple[str, int]], ring_size: int, join: StartMode
) -> None:
    """Without snapshots (vLLM) a short ring may lose blocks, but what is held is resident; a full ring is exact."""
    world = World(StreamConfig(start_mode=join), ring_size, snapshots=False)
    world.connect()
    run(world, script)
    world.run_until_quiet()
    assert world.follower.resident <= world.publisher.resident
    if ring_size == 1000 and join is not StartMode.LIVE:
        assert world.follower.resident == world.publisher.resident


def test_the_first_batch_that_is_lost_after_an_empty_ring_was_replayed_is_asked_for() -> None:
    world = World(StreamConfig(start_mode=StartMode.RING), 1000, snapshots=False)
    world.connect()
    run(world, [("serve", 0), ("publish", 0), ("publish", 1), ("lose", 0)])
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident == {0, 1}


def test_a_ring_that_nobody_replayed_is_asked_for_again_after_a_reconnection() -> None:
    world = World(StreamConfig(start_mode=StartMode.RING), 1000, snapshots=False)
    world.connect()
    run(world, [("publish", 0), *[("wait", 5)] * 3, ("reconnect", 0)])
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident != set()


@settings(max_examples=examples(200), deadline=None)
@given(steps)
def test_without_replay_only_consecutive_batches_are_held(script: list[tuple[str, int]]) -> None:
    script = [step for step in script if step[0] != "restart"]  # an idle restart cannot be seen without replay
    world = World(StreamConfig(can_replay=False), 0, snapshots=False)
    world.connect()
    run(world, script)
    assert world.follower.request_count == 0
    assert world.follower.stream.phase is StreamPhase.LIVE


def live_follower(count: int, config: StreamConfig | None = None) -> World:
    """A world in which `count` batches were published and applied live."""
    world = World(config or StreamConfig(), 1000, snapshots=True)
    world.connect()
    world.answer()
    world.answer()
    for key in range(count):
        seq, payload = world.publisher.toggle(key)
        world.follower.perform(world.follower.stream.on_live_batch(seq, payload, world.now))
    assert len(world.follower.resident) == count
    return world


def test_gap_is_asked_from_the_last_seen_batch_and_filled() -> None:
    world = live_follower(3)
    world.publisher.toggle(10)
    seq, payload = world.publisher.toggle(11)
    instructions = world.follower.stream.on_live_batch(seq, payload, 0.0)
    assert instructions == [Gap(3, 4), RequestReplay(instructions[1].request_id, 2)]  # type: ignore[union-attr]
    world.follower.perform(instructions)
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident


def test_restart_of_an_idle_publisher_is_noticed() -> None:
    world = live_follower(5)
    world.restart()
    world.run_until_quiet()
    assert any(isinstance(notice, PublisherRestarted) for notice in world.follower.notices)
    assert world.follower.resident == set()


def test_restart_whose_new_seq_is_already_higher_is_noticed() -> None:
    world = live_follower(5)
    world.restart()
    for key in range(20, 40):
        world.publisher.toggle(key)
    world.connect()
    seq, payload = world.publisher.toggle(50)
    world.wire.append((seq, payload))
    world.run_until_quiet()
    assert any(isinstance(notice, PublisherRestarted) for notice in world.follower.notices)
    assert world.follower.resident == world.publisher.resident


def test_a_blip_keeps_everything_and_asks_once() -> None:
    world = live_follower(5)
    before = world.follower.clear_count
    world.follower.perform(world.follower.stream.on_disconnected())
    world.publisher.toggle(9)
    world.run_until_quiet()
    assert world.follower.clear_count == before
    assert world.follower.resident == world.publisher.resident


def test_repeated_batch_is_stale() -> None:
    world = live_follower(5)
    assert world.follower.stream.on_live_batch(2, world.publisher.batches[2], 0.0) == [DuplicateBatch(2)]


def test_a_known_seq_with_other_bytes_is_a_restart() -> None:
    world = live_follower(5)
    instructions = world.follower.stream.on_live_batch(2, b"1:2:+9", 0.0)
    assert [type(i) for i in instructions] == [PublisherRestarted, Clear, RequestSnapshot]


def test_lost_last_batch_is_found_by_the_check_after_silence() -> None:
    world = live_follower(5)
    world.publisher.toggle(77)  # never on the wire
    world.run_until_quiet()
    assert 77 in world.follower.resident
    requests = world.follower.request_count
    world.run_until_quiet()
    assert world.follower.request_count == requests, "one check a silence, not a poll"


def test_publisher_that_never_answers_ends_cleared_and_live() -> None:
    world = live_follower(5)
    world.publisher.toggle(6)
    seq, payload = world.publisher.toggle(7)
    world.follower.perform(world.follower.stream.on_live_batch(seq, payload, world.now))
    for _ in range(20):
        world.now += 6
        world.follower.perform(world.follower.stream.on_tick(world.now))
        if world.follower.stream.phase is StreamPhase.LIVE:
            break
    assert world.follower.resident == {7}
    assert world.follower.stream.position is not None


def test_resume_continues_from_the_saved_position() -> None:
    world = live_follower(5)
    position = world.follower.stream.position
    assert position is not None
    for key in range(10, 14):
        world.publisher.toggle(key)
    second = StreamState(StreamConfig(start_mode=StartMode.LIVE), resume_position=position)
    (request,) = second.on_connected(0.0)
    assert isinstance(request, RequestReplay)
    instructions: list[Instruction] = []
    for seq, payload in world.publisher.replay(request.start_seq):
        instructions += second.on_reply(request.request_id, seq, payload, 0.0)
    instructions += second.on_reply_end(request.request_id, 0.0)
    assert [(i.seq, i.origin) for i in instructions if isinstance(i, Apply)] == [
        (s, Origin.REPLAY) for s in range(5, 9)
    ]


def test_a_reply_with_a_hole_is_asked_for_again() -> None:
    """A ROUTER drops what its peer cannot take fast enough, in the middle of a reply."""
    world = live_follower(3)
    for key in range(10, 16):
        batch = world.publisher.toggle(key)
    world.follower.perform(world.follower.stream.on_live_batch(*batch, world.now))
    world.serve()
    assert world.replies is not None
    del world.replies[1][2:4]
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident
    assert world.follower.clear_count == 0


def test_what_one_reply_did_not_bring_is_asked_for_at_once() -> None:
    world = live_follower(3)
    world.publisher.toggle(10)
    late = world.publisher.toggle(11)
    world.follower.perform(world.follower.stream.on_live_batch(*late, world.now))
    world.serve()
    world.publisher.toggle(12)
    world.follower.perform(world.follower.stream.on_live_batch(*world.publisher.toggle(13), world.now))
    while world.replies:
        world.deliver_reply()
    assert world.follower.request == RequestReplay(world.follower.stream._request.id, 4)
    world.answer()
    assert world.follower.resident == world.publisher.resident


def test_a_ring_in_answer_to_a_snapshot_request_is_not_taken_for_one() -> None:
    """A publisher that reads the reserved start_seq as a signed number replays everything."""
    world = World(StreamConfig(), 1000, snapshots=False)
    for key in range(4):
        world.publisher.toggle(key)
    world.connect()
    request = world.follower.request
    assert isinstance(request, RequestSnapshot)
    for seq, payload in world.publisher.replay(0):
        world.follower.perform(world.follower.stream.on_reply(request.request_id, seq, payload, 0.0))
    world.follower.perform(world.follower.stream.on_reply_end(request.request_id, 0.0))
    world.run_until_quiet()
    assert world.follower.resident == world.publisher.resident


@pytest.mark.slow
def test_many_seeds() -> None:
    for seed in range(3000):
        rng = random.Random(seed)
        actions = ["publish"] * 6 + ["deliver"] * 5 + ["lose", "repeat", "serve", "reply", "lose_reply", "reconnect"]
        actions += ["restart", "connect", "wait"]
        script = [(rng.choice(actions), rng.randint(1, 6)) for _ in range(rng.randint(10, 300))]
        world = World(
            StreamConfig(max_recent_batches=rng.choice([1, 4, 1024])), rng.choice([2, 10, 1000]), snapshots=True
        )
        world.connect()
        run(world, script)
        world.run_until_quiet()
        assert world.follower.resident == world.publisher.resident, f"seed {seed}"


# ---------------------------------------------------------------- publishers that name themselves, and their snapshots

A, B = b"a" * 16, b"b" * 16


def requests_of(instructions: list[Instruction]) -> list[Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, RequestReplay | RequestSnapshot)]


def joined_by_snapshot(*, can_replay: bool, last_seq: int = 4) -> StreamState:
    """A stream that joined by the answer of a snapshot socket."""
    stream = StreamState(StreamConfig(can_replay=can_replay, has_snapshots=True))
    assert stream.on_connected(0.0) == [RequestSnapshot(1)]
    assert stream.on_live_batch(last_seq, b"early", 0.1, A) == []
    instructions = stream.on_snapshot(1, last_seq, A, [b"one", b"two"], 0.2)
    assert instructions[:2] == [Apply(None, b"one", Origin.SNAPSHOT), Apply(None, b"two", Origin.SNAPSHOT)]
    assert requests_of(instructions) == []
    assert stream.phase is StreamPhase.LIVE
    stream.check_invariants()
    return stream


@pytest.mark.parametrize("can_replay", [True, False])
@pytest.mark.parametrize("last_seq", [-1, 4])
def test_a_snapshot_sockets_answer_joins_at_its_seq(can_replay: bool, last_seq: int) -> None:
    stream = StreamState(StreamConfig(can_replay=can_replay, has_snapshots=True))
    stream.on_connected(0.0)
    stream.on_live_batch(last_seq + 1, b"next", 0.1, A)
    instructions = stream.on_snapshot(1, last_seq, A, [b"x"], 0.2)
    assert instructions == [Apply(None, b"x", Origin.SNAPSHOT), Apply(last_seq + 1, b"next", Origin.LIVE)]
    assert stream.on_live_batch(last_seq + 2, b"heartbeat", 0.3, A) == [Apply(last_seq + 2, b"heartbeat", Origin.LIVE)]
    stream.check_invariants()


def test_another_publisher_id_is_a_restart_whatever_its_seq_is() -> None:
    for seq in (0, 4, 5, 6, 1000):
        stream = joined_by_snapshot(can_replay=False)
        restart_notice, clear, request = stream.on_live_batch(seq, b"of another", 1.0, B)
        assert isinstance(restart_notice, PublisherRestarted)
        assert isinstance(clear, Clear)
        assert isinstance(request, RequestSnapshot)
        assert stream.on_snapshot(request.request_id, seq, A, [b"old"], 1.1)[0] == PublisherRestarted(
            "the publisher has another id"
        )
        stream.check_invariants()


def test_a_reserved_seq_is_malformed_whatever_the_publisher_id_is() -> None:
    stream = joined_by_snapshot(can_replay=True)
    for seq in (SNAPSHOT_SEQ, END_SEQ):
        assert [type(instruction) for instruction in stream.on_live_batch(seq, b"x", 1.0, B)] == [MalformedMessage]
    assert stream.on_live_batch(5, b"5", 1.1, A) == [Apply(5, b"5", Origin.LIVE)]


def test_without_ids_nothing_is_said_about_them() -> None:
    stream = joined_by_snapshot(can_replay=True)
    assert stream.on_live_batch(5, b"x", 1.0) == [Apply(5, b"x", Origin.LIVE)]


def test_a_gap_is_replayed_where_it_can_be_and_else_taken_from_a_snapshot() -> None:
    stream = joined_by_snapshot(can_replay=True)
    gap, request = stream.on_live_batch(7, b"7", 1.0, A)
    assert (gap, request) == (Gap(5, 7), RequestReplay(2, 4))
    assert stream.on_reply(2, 5, b"5", 1.1, A) == [Apply(5, b"5", Origin.REPLAY)]
    assert stream.on_reply(2, 6, b"6", 1.1, A) == [Apply(6, b"6", Origin.REPLAY)]
    assert stream.on_reply_end(2, 1.2) == [Apply(7, b"7", Origin.LIVE)]
    stream = joined_by_snapshot(can_replay=False)
    assert [type(instruction) for instruction in stream.on_live_batch(7, b"7", 1.0, A)] == [Gap, Clear, RequestSnapshot]
    assert stream.on_snapshot(2, 6, A, [], 1.1) == [Apply(7, b"7", Origin.LIVE)]
    assert [type(instruction) for instruction in stream.on_connected(2.0)] == [Clear, RequestSnapshot]
    assert stream.on_tick(2.1) == []


def test_a_replay_of_another_process_is_a_restart() -> None:
    stream = joined_by_snapshot(can_replay=True)
    (request,) = stream.on_connected(1.0)
    assert isinstance(request, RequestReplay)
    restart_notice, clear, new_request = stream.on_reply(request.request_id, 5, b"5", 1.1, B)
    assert isinstance(restart_notice, PublisherRestarted)
    assert isinstance(clear, Clear)
    assert isinstance(new_request, RequestSnapshot)


@pytest.mark.parametrize("can_replay", [True, False])
def test_where_there_is_no_snapshot_now_it_is_asked_for_again_later(can_replay: bool) -> None:
    stream = StreamState(StreamConfig(can_replay=can_replay, has_snapshots=True))
    instructions = stream.on_connected(0.0)
    for _ in range(stream.config.max_attempts):
        (request,) = requests_of(instructions)
        assert isinstance(request, RequestSnapshot)
        instructions = stream.on_snapshot(request.request_id, None, A, [], 0.1)
    assert [type(instruction) for instruction in requests_of(instructions)] == ([RequestReplay] if can_replay else [])
    if not can_replay:
        assert stream.phase is StreamPhase.LIVE
        assert stream.on_live_batch(9, b"9", 0.2, A) == [Apply(9, b"9", Origin.LIVE)]
        (clear, request) = stream.on_tick(0.1 + stream.config.snapshot_retry_s)
        assert isinstance(clear, Clear)
        assert isinstance(request, RequestSnapshot)
    assert stream.on_snapshot(99, 3, A, [], 0.3) == [], "of an older request"
    stream.check_invariants()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(["batch", "lose", "restart", "snapshot", "connect"]), max_size=40), st.booleans())
def test_what_is_held_is_one_process_without_holes(script: list[str], late: bool) -> None:
    """Against a publisher whose batches say whose they are, where a snapshot answers each loss, or nothing does."""
    stream = StreamState(StreamConfig(can_replay=False, has_snapshots=True, max_attempts=1 if late else 3))
    life, seq, pending = 0, 0, list[Instruction]()
    held_batches: list[tuple[int, int]] = []

    def perform(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Clear):
                held_batches.clear()
            elif isinstance(instruction, Apply):
                publisher_number, first, last = map(int, instruction.payload.split())
                assert not held_batches or held_batches[-1] == (publisher_number, first - 1), (
                    held_batches,
                    instruction,
                )
                held_batches.append((publisher_number, last))
            elif isinstance(instruction, RequestSnapshot):
                pending[:] = [instruction]

    perform(stream.on_connected(0.0))
    for number, step in enumerate(script):
        now = 0.1 + number / 100
        identity = life.to_bytes(16, "big")
        if step in ("batch", "lose"):
            if step == "batch":
                perform(stream.on_live_batch(seq, b"%d %d %d" % (life, seq, seq), now, identity))
            seq += 1
        elif step == "restart":
            life, seq = life + 1, seq // 2
        elif step == "connect":
            perform(stream.on_connected(now))
        elif pending:
            request = pending.pop()
            assert isinstance(request, RequestSnapshot)
            perform(stream.on_snapshot(request.request_id, seq - 1, identity, [b"%d 0 %d" % (life, seq - 1)], now))
        stream.check_invariants()


SEQS = st.one_of(st.integers(0, 6), st.sampled_from([2**32, SNAPSHOT_SEQ - 1, SNAPSHOT_SEQ, END_SEQ]))
PAYLOADS = st.sampled_from([b"", b"x", b"y", b"z" * 50])
IDS = st.sampled_from([b"", A, B])
STIMULI = st.one_of(
    st.tuples(st.just("live"), SEQS, PAYLOADS, IDS),
    st.tuples(st.just("reply"), SEQS, PAYLOADS, IDS),
    st.tuples(st.just("end")),
    st.tuples(st.just("snapshot"), st.one_of(st.none(), st.integers(-1, 6), SEQS), IDS, st.lists(PAYLOADS, max_size=2)),
    st.tuples(st.just("failed")),
    st.tuples(st.just("tick"), st.sampled_from([0.1, 2.0, 6.0, 20.0])),
    st.tuples(st.just("connected")),
    st.tuples(st.just("disconnected")),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STIMULI, max_size=60), st.sampled_from(StartMode), st.booleans(), st.booleans())
def test_whatever_a_publisher_sends_the_state_stays_valid(
    script: list[Any], mode: StartMode, can_replay: bool, has_snapshots: bool
) -> None:
    """Batches, replies and ids that contradict each other: what is applied has no holes, and little is stored."""
    config = StreamConfig(mode, can_replay, has_snapshots, max_early_batches=4, max_early_bytes=100)
    stream, now, request_id = StreamState(config), 0.0, 0
    last_seq: int | None = None
    instructions = stream.on_connected(now)
    for stimulus, *values in [*script, ("tick", 20.0)]:
        if stimulus == "live":
            instructions = stream.on_live_batch(values[0], values[1], now, values[2])
        elif stimulus == "reply":
            instructions = stream.on_reply(request_id, values[0], values[1], now, values[2])
        elif stimulus == "end":
            instructions = stream.on_reply_end(request_id, now)
        elif stimulus == "snapshot":
            instructions = stream.on_snapshot(request_id, *values, now)
        elif stimulus == "failed":
            instructions = stream.on_request_failed(request_id, now)
        elif stimulus == "tick":
            now += values[0]
            instructions = stream.on_tick(now)
        else:
            instructions = stream.on_connected(now) if stimulus == "connected" else stream.on_disconnected()
        for instruction in instructions:
            if isinstance(instruction, RequestReplay | RequestSnapshot):
                request_id = instruction.request_id
            if isinstance(instruction, RequestReplay):
                pack_seq(instruction.start_seq)
            if isinstance(instruction, Clear):
                last_seq = None
            elif isinstance(instruction, Apply) and instruction.seq is not None:
                assert last_seq is None or instruction.seq == last_seq + 1
                last_seq = instruction.seq
        stream.check_invariants()
