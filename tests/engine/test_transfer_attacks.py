"""Sources and clients that die, stall, lie or have no key: each costs its request a bounded time, and nothing else."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from transfer_peers import FLEET_KEY, Engine, Relay, prompt

from engine.core import EngineCore
from engine.process.core_process import CoreLoop, CoreSocket
from engine.transfer import block_server, puller
from engine.transfer.connection import GREETING
from engine.transfer.messages import (
    BlocksSent,
    FetchBlocks,
    LocateBlocks,
    Refused,
    SentBlock,
    TransferError,
    WantedBlock,
)
from engine.types import KVSource, Request, SamplingParams, SequenceOutput

TEXT = prompt("attacked", 202)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What is generated after TEXT without a cache."""
    with Engine(prefix_caching=False) as plain:
        return plain.answer("plain", TEXT)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "CONNECT_S_MAX", 0.3)
    monkeypatch.setattr(block_server, "CONNECT_S_MAX", 0.3)


def check_failed(consumer: Engine, reason: str, expected: list[int], *, cached_tokens: int | None = 0) -> None:
    """The request "a" was answered as without a cache, and its pull failed for this reason."""
    assert consumer.tokens("a") == expected
    failures = {name: count for name, count in consumer.transfers.stats.failures.items() if count}
    assert failures == {reason: 1}
    if cached_tokens is not None:
        assert consumer.cached_tokens("a") == cached_tokens


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def check_still_pulls(consumer: Engine, source: Engine) -> None:
    """A source that is in order is still asked, and gives."""
    consumer.answer("again", TEXT, source.source)
    assert consumer.cached_tokens("again") == 200


# ---------------------------------------------------------------------- without the key


@pytest.mark.parametrize("wrong_side", ["source", "consumer"])
def test_engines_of_two_fleets_exchange_nothing(expected: list[int], wrong_side: str) -> None:
    keys = {"source": FLEET_KEY, "consumer": FLEET_KEY, wrong_side: "the key of another fleet"}
    with Engine(fleet_key=keys["source"]) as source, Engine(fleet_key=keys["consumer"]) as consumer:
        source.answer("a", TEXT)
        source.serve()
        consumer.answer("a", TEXT, source.source)
        source.pause()
        check_failed(consumer, "unauthenticated", expected)
        assert source.transfers.stats.sent_blocks == 0
        assert source.transfers.stats.refused_connections == 1


@pytest.mark.parametrize(
    "first_bytes",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 4096],
    ids=["silent", "http", "zeros", "many"],
)
def test_strangers_are_hung_up_on(short_waits: None, caplog: pytest.LogCaptureFixture, first_bytes: bytes) -> None:
    with Engine() as source:
        source.answer("a", TEXT)
        with socket.create_connection(("127.0.0.1", source.transfers.port)) as stranger:
            stranger.settimeout(10)
            if first_bytes:
                stranger.sendall(first_bytes)
            received = b""
            with suppress(ConnectionResetError):
                while data := stranger.recv(4096):
                    received += data
            assert len(received) <= len(GREETING) + 32, "more than a greeting"
        assert source.transfers.stats.sent_blocks == 0
    if not first_bytes:
        assert "a peer's connection is closed: TimeoutError" in caplog.messages


def test_strangers_cannot_take_all_connections(short_waits: None) -> None:
    with Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        source.serve()
        strangers = [socket.create_connection(("127.0.0.1", source.transfers.port)) for _ in range(200)]
        try:
            consumer.answer("a", TEXT, source.source)  # perhaps refused: too many greetings at once
            assert source.transfers.stats.refused_connections >= 200 - block_server.GREETINGS_MAX
        finally:
            for stranger in strangers:
                stranger.close()
        with Engine() as second_consumer:
            while second_consumer.transfers.stats.pulled_blocks == 0:
                second_consumer.core.reset_prefix_cache()
                second_consumer.transfers._puller._pause_end_s_by_source.clear()
                second_consumer.answer("again", TEXT, source.source)
        source.pause()


# ---------------------------------------------------------------------- dead and slow


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host.invalid", "x" * 300], ids=["closed", "unknown", "long"])
def test_nobody_answers(short_waits: None, expected: list[int], host: str) -> None:
    with Engine() as consumer:
        consumer.answer("a", TEXT, KVSource(host, closed_port()))
        check_failed(consumer, "unreachable", expected)


def test_a_host_that_says_nothing_costs_two_short_waits(short_waits: None, expected: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_host, Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        source.serve()
        consumer.answer("a", TEXT, KVSource(*silent_host.getsockname()))
        check_failed(consumer, "unreachable", expected)
        consumer.core.reset_prefix_cache()
        consumer.answer("b", TEXT, KVSource(*silent_host.getsockname()))
        assert consumer.transfers.stats.failures["recent"] == 1
        consumer.core.reset_prefix_cache()
        check_still_pulls(consumer, source)
        source.pause()


def test_a_pull_that_times_out_while_it_connects_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets: list[socket.socket] = []

    async def scenario() -> None:
        async def never_connect(sock: socket.socket, address: Any) -> None:
            sockets.append(sock)
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never_connect)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(puller._connect(KVSource("127.0.0.1", closed_port()), FLEET_KEY.encode()), 0.05)

    asyncio.run(scenario())
    assert [sock.fileno() for sock in sockets] == [-1]


def test_a_connection_that_times_out_says_so(short_waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def never_connect(sock: socket.socket, address: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never_connect)
        with pytest.raises(TransferError, match="no connection: TimeoutError"):
            await puller._connect(KVSource("127.0.0.1", closed_port()), FLEET_KEY.encode())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("failure_s", "expected_times"),
    [(0.0, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]), (2.0, [1, 5, 13])],
    ids=["fast", "slow"],
)
def test_a_dead_source_is_asked_the_less_often_the_more_it_costs(
    monkeypatch: pytest.MonkeyPatch, failure_s: float, expected_times: list[int]
) -> None:
    """Silent sources took all slots half of the time; a source that was started again was not asked for 32 s."""
    now_s, asked_at = 0.0, []

    async def fail_to_connect(*args: Any) -> Any:
        nonlocal now_s
        asked_at.append(now_s)
        now_s += failure_s
        raise TransferError("unreachable", "no connection")

    monkeypatch.setattr(puller, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(puller, "_connect", fail_to_connect)
    with Engine() as consumer:
        for second in range(1, 20):
            now_s = max(now_s, float(second))
            consumer.core.reset_prefix_cache()
            consumer.answer(f"{second}", TEXT, KVSource("127.0.0.1", 1))
    assert asked_at == expected_times


def test_pulls_that_fail_together_are_one_failure_of_their_source(short_waits: None) -> None:
    """Four pulls that a silent source held at once had it left alone for 16 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent_host, Engine() as consumer:
        for i in range(puller.PULLS_AT_ONCE_MAX):
            consumer.add(f"{i}", prompt(i, 24), KVSource(*silent_host.getsockname()), max_tokens=1)
        consumer.run()
        assert consumer.transfers.stats.failures["unreachable"] == puller.PULLS_AT_ONCE_MAX
        (pause_end_s,) = consumer.transfers._puller._pause_end_s_by_source.values()
        assert pause_end_s <= time.monotonic() + puller.RETRY_AFTER_S


def test_failed_sources_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "FAILED_SOURCES_MAX", 2)
    with Engine() as consumer:
        sources = [KVSource("127.0.0.1", closed_port()) for _ in range(4)]
        for i, source in enumerate(sources):
            consumer.answer(f"{i}", prompt(i, 24), source, max_tokens=1)
        assert list(consumer.transfers._puller._pause_end_s_by_source) == [source.address for source in sources[-2:]]


def test_names_that_no_server_resolves_delay_no_source_with_an_address(
    short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of a name holds a thread until its end, which may come long after the pull has given up."""
    resolve, is_over = socket.getaddrinfo, threading.Event()

    def resolve_late(host: str, *args: Any, **kwargs: Any) -> Any:
        if host.endswith(".invalid") and not kwargs.get("flags"):
            is_over.wait(60)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    with Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        source.serve()
        for i in range(40):  # more than the threads for look-ups
            consumer.add(f"{i}", prompt(i, 24), KVSource(f"{i}.invalid", 1), max_tokens=1)
        consumer.run()
        check_still_pulls(consumer, source)
        source.pause()
        is_over.set()


def test_a_source_whose_steps_stand_still_costs_no_more_than_the_time_out(expected: list[int]) -> None:
    with Engine() as source, Engine(timeout_s=0.5) as consumer:
        source.answer("a", TEXT)  # and makes no more steps
        consumer.answer("a", TEXT, source.source)
        check_failed(consumer, "timeout", expected)
        assert 0.5 <= consumer.transfers.stats.pull_s < 5


@pytest.mark.parametrize("passed_bytes", [0, 20, 60, 100, 140, 5000, 50_000, 100_000])
def test_a_source_that_dies_on_the_way(expected: list[int], passed_bytes: int) -> None:
    def cut(data: bytes, before: int) -> bytes:
        if before + len(data) > passed_bytes:
            raise OSError("dead")
        return data

    with Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        source.serve()
        relay = Relay(source.source, cut)
        consumer.answer("a", TEXT, relay.source)
        relay.close()
        source.pause()
        assert consumer.tokens("a") == expected
        failures = consumer.transfers.stats.failures
        assert failures["closed"] + failures["unauthenticated"] == sum(failures.values()) == 1
        check_still_pulls_later(consumer, source)


def check_still_pulls_later(consumer: Engine, source: Engine) -> None:
    source.serve()
    consumer.core.reset_prefix_cache()
    check_still_pulls(consumer, source)
    source.pause()


# ---------------------------------------------------------------------- liars


@pytest.mark.parametrize("place", [3, 40, 70, 90, 100, 115, 150, 2000, 50_000, 100_000])
def test_a_bit_that_was_changed_on_the_way_is_seen(expected: list[int], place: int) -> None:
    def flip(data: bytes, before: int) -> bytes:
        if not before <= place < before + len(data):
            return data
        changed = bytearray(data)
        changed[place - before] ^= 4
        return bytes(changed)

    with Engine() as source, Engine(timeout_s=2.0) as consumer:
        source.answer("a", TEXT)
        source.serve()
        relay = Relay(source.source, flip)
        consumer.answer("a", TEXT, relay.source)
        relay.close()
        source.pause()
        assert consumer.tokens("a") == expected
        failures = consumer.transfers.stats.failures
        refusals = ("malformed", "unauthenticated", "incompatible", "timeout", "closed")
        assert sum(failures[reason] for reason in refusals) == sum(failures.values()) == 1
        assert consumer.cached_tokens("a") == 0
        assert consumer.transfers.stats.pulled_blocks == 0


Lie = Callable[[list[SentBlock], memoryview], tuple[list[SentBlock], memoryview]]


def _change_block(**changes: Any) -> Lie:
    return lambda blocks, contents: ([*blocks[:7], replace(blocks[7], **changes), *blocks[8:]], contents)


LIES: dict[str, Lie] = {
    "other tokens": _change_block(packed_tokens=b"\1\0\0\0" * 4),
    "another parent": _change_block(parent_hash=5),
    "no parent": _change_block(parent_hash=None),
    "another hash": _change_block(hash=77),
    "another kind": _change_block(kind=1),
    "a salt": _change_block(extra_keys=("salt",)),
    "an adapter": _change_block(lora_name="lora"),
    "more content": lambda blocks, contents: (blocks, memoryview(bytes(contents) + b"1")),
    "less content": lambda blocks, contents: (blocks, contents[:-1]),
    "no content": lambda blocks, contents: (blocks, memoryview(b"")),
    "another order": lambda blocks, contents: (blocks[::-1], contents),
    "more blocks": lambda blocks, contents: (blocks * 2, contents),
    "one block twice": lambda blocks, contents: ([*blocks[:-1], blocks[0]], contents),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_source_with_the_key_that_lies_is_not_believed(expected: list[int], lie: str) -> None:
    with Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        reading = source.exchange.read

        def read_and_lie(wanted_blocks: Sequence[WantedBlock]) -> tuple[BlocksSent, memoryview]:
            sent, contents = reading(wanted_blocks)
            blocks, contents = LIES[lie](sent.blocks, contents)
            return replace(sent, blocks=blocks), contents

        source.exchange.read = read_and_lie  # type: ignore[method-assign]
        source.serve()
        consumer.answer("a", TEXT, source.source)
        check_failed(consumer, "malformed", expected)
        source.exchange.read = reading  # type: ignore[method-assign]
        consumer.transfers._puller._pause_end_s_by_source.clear()
        consumer.core.reset_prefix_cache()
        check_still_pulls(consumer, source)
        source.pause()


def test_a_source_that_claims_more_than_there_is(expected: list[int]) -> None:
    with Engine() as source, Engine() as consumer:
        source.answer("a", TEXT)
        source.exchange.locate = lambda hashes: b"\xff" * 100_000  # type: ignore[method-assign]
        source.serve()
        consumer.answer("a", TEXT, source.source)
        source.pause()
        assert consumer.tokens("a") == expected
        assert consumer.cached_tokens("a") == 200


def test_other_weights_are_another_model(expected: list[int]) -> None:
    with Engine() as source, Engine(fingerprint=b"a fine-tune") as other, Engine() as consumer:
        for engine in (source, other):
            engine.answer("a", TEXT)
            engine.serve()
        consumer.answer("a", TEXT, other.source)
        check_failed(consumer, "incompatible", expected)
        reading = source.exchange.read

        def change_then_read(wanted_blocks: Sequence[WantedBlock]) -> tuple[BlocksSent, memoryview]:
            source.transfers.change_weights(None)
            return reading(wanted_blocks)

        source.exchange.read = change_then_read  # type: ignore[method-assign]
        consumer.core.reset_prefix_cache()
        consumer.answer("b", TEXT, source.source)
        assert consumer.transfers.stats.failures["incompatible"] == 2
        assert consumer.transfers.stats.pulled_blocks == 0
        for engine in (source, other):
            engine.pause()


# ---------------------------------------------------------------------- aborts, and many at once


def test_an_abort_ends_the_pull_at_once() -> None:
    with Engine() as source, Engine(timeout_s=600.0) as consumer:
        source.answer("a", TEXT)  # and makes no more steps
        consumer.add("a", TEXT, source.source)
        while not source.core.has_work:  # until the consumer has asked for blocks
            consumer.step()
        assert consumer.core._preparing_requests, "an engine that pulls could be put to sleep"
        consumer.core.abort(["a"])
        assert not consumer.core.has_work
        source.run()
        check_still_pulls_later(consumer, source)
        assert consumer.transfers.stats.pulls == 2
        assert not sum(consumer.transfers.stats.failures.values())


def test_a_thousand_pulls_at_once_from_good_and_dead_sources(short_waits: None) -> None:
    """Each is answered as without a source; connections and memory are bounded; good sources are still asked."""
    good_texts = [prompt(("good", i), 40) for i in range(20)]
    with Engine() as source, Engine(timeout_s=5.0) as consumer:
        for i, text in enumerate(good_texts):
            source.answer(f"{i}", text)
        source.serve()
        silent_hosts = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
        dead_sources = [KVSource(*host.getsockname()) for host in silent_hosts] + [KVSource("127.0.0.1", closed_port())]
        thread_count = threading.active_count()
        for i in range(980):
            consumer.add(f"dead {i}", prompt(("dead", i), 24), dead_sources[i % 21], max_tokens=1)
        for i, text in enumerate(good_texts):
            consumer.add(f"good {i}", text, source.source, max_tokens=1)
        most_threads = 0
        while consumer.core.has_work:
            for output in consumer.core.step(0.0):
                consumer.outputs.setdefault(output.request_id, []).append(output)
            most_threads = max(most_threads, threading.active_count())
        consumer.core.check_invariants()
        source.pause()
        for host in silent_hosts:
            host.close()
        assert len(consumer.outputs) == 1000
        assert all(outputs[-1].error is None for outputs in consumer.outputs.values())
        assert most_threads <= thread_count + 40, "a thread for each pull"
        stats = consumer.transfers.stats
        assert stats.pulls == 1000
        assert not consumer.transfers._pull_by_id
        assert not consumer.transfers._pull_by_request_id
        consumer.core.reset_prefix_cache()
        consumer.answer("a", good_texts[0], source.serve().source)
        source.pause()
        assert consumer.cached_tokens("a") == 36


def test_an_engine_that_only_waits_for_a_pull_sleeps(short_waits: None, expected: list[int]) -> None:
    """No step is made before the pull has ended: the loop looked every two milliseconds."""
    step_count = 0
    http_socket, sock = socket.socketpair()

    def step(now: float) -> list[SequenceOutput]:
        nonlocal step_count
        step_count += 1
        outputs = EngineCore.step(consumer.core, now)
        consumer.outputs.setdefault("a", []).extend(outputs)
        if outputs and outputs[-1].finish_reason is not None:
            http_socket.close()
        return outputs

    with Engine() as consumer, socket.create_server(("127.0.0.1", 0)) as silent_host, closing(CoreSocket(sock)) as core:
        consumer.core.step = step  # type: ignore[method-assign]
        model = SimpleNamespace(get_simulation_lag=lambda: None)
        engine: Any = SimpleNamespace(core=consumer.core, model=model, publisher=None)
        consumer.add("a", TEXT, KVSource(*silent_host.getsockname()))
        CoreLoop(engine, core).run()
        check_failed(consumer, "unreachable", expected)
        assert step_count < 20


def test_more_pulls_than_may_wait_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.transfer.service.PULLS_MAX", 2)
    with Engine() as source, Engine(timeout_s=0.5) as consumer:
        for i in range(5):
            consumer.add(f"{i}", prompt(i, 24), source.source)
        assert consumer.transfers.stats.failures["busy"] == 3
        consumer.run()
        assert len(consumer.outputs) == 5


def test_blocks_are_sent_as_those_of_the_weights_that_computed_them() -> None:
    """Also where the weights change after the blocks were read, and before the thread of the network sends them."""
    with Engine() as source:
        source.answer("a", TEXT)
        request = Request(request_id="a", token_ids=TEXT, params=SamplingParams())
        wanted_blocks = [WantedBlock(key.hash, 0) for key in source.exchange.list_keys(request)]
        read = source.exchange.read

        def read_and_reload(wanted_blocks: Sequence[WantedBlock]) -> tuple[BlocksSent, memoryview]:
            sent = read(wanted_blocks)
            source.transfers.change_weights("new weights")
            return sent

        source.exchange.read = read_and_reload  # type: ignore[method-assign]
        answer = source.transfers._server._make_answer(FetchBlocks(wanted_blocks))
        future = asyncio.run_coroutine_threadsafe(answer, source.transfers._loop)
        source.serve()
        sent, _ = future.result(10)
        source.pause()
        assert isinstance(sent, BlocksSent)
        assert sent.blocks
        assert sent.fingerprint == b"one model"


def test_questions_that_no_consumer_asks_are_refused() -> None:
    with Engine() as source:
        for question in (
            LocateBlocks(b"one model", [1] * ((1 << 18) + 1)),
            FetchBlocks([WantedBlock(1, 9)]),
            FetchBlocks([WantedBlock(1, -1)]),
            FetchBlocks([WantedBlock(1, 0)] * 5000),
        ):
            answer = source.transfers._server._make_answer(question)
            future = asyncio.run_coroutine_threadsafe(answer, source.transfers._loop)
            assert isinstance(future.result(10)[0], Refused)
