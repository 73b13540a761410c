"""What a gap or a reconnect made a router forget it takes from another router: who is asked, when, and for what."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from events.sources import EventSource
from prompts.errors import RequestError
from router.decide.workers import WorkerSpec
from router.fleet import peer_snapshots
from router.fleet.config import FleetConfig
from router.fleet.index_feed import SNAPSHOT_VERSION, PeerSnapshot
from router.fleet.peer_snapshots import PeerClient, PeerRoutes
from router.fleet.prober import WorkerFacts
from router.fleet.worker_monitor import FleetContext, WorkerMonitor
from router.fleet.worker_settings import parse_worker_flag

REPLAYS = EventSource(endpoint="tcp://a:1", replay_endpoint="tcp://a:2")
SNAPSHOTS = EventSource(endpoint="tcp://a:1", replay_endpoint="tcp://a:2", snapshot=True)
SILENT = EventSource(endpoint="tcp://a:1")


def make_snapshot(complete_from: int, version: int = SNAPSHOT_VERSION) -> PeerSnapshot:
    return PeerSnapshot(version, seq=9, digest=5, complete_from=complete_from, parts=[])


def fetch_snapshots(
    answers: list[PeerSnapshot], sources: list[EventSource], only_before: Mapping[int, int] | None
) -> dict[int, PeerSnapshot]:
    """What a client finds at as many peers as there are answers."""

    async def run() -> dict[int, PeerSnapshot]:
        runners, urls = [], []
        for answer in answers:

            async def reply(request: web.Request, answer: PeerSnapshot = answer) -> web.Response:
                assert request.match_info["stream"].startswith("h:1#")
                return web.Response(body=msgspec.msgpack.encode(answer))

            app = web.Application()
            app.router.add_get("/peer/{stream}", reply)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with aiohttp.ClientSession() as session:
            snapshots = await PeerClient(session, urls).fetch_snapshots("h:1", sources, only_before)
        for runner in runners:
            await runner.cleanup()
        return snapshots

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"x" * 5_001, "snapshot_unanswered"), (b"\xc1", "snapshot_malformed"), (b"\x91" * 3_000, "snapshot_malformed"),
        (msgspec.msgpack.encode(make_snapshot(3, version=99)), "snapshot_older"),
        (msgspec.msgpack.encode(make_snapshot(3)), "snapshot_taken"),
        (None, "snapshot_unanswered"),
    ],
)  # fmt: skip
def test_what_becomes_of_an_answer_is_counted(
    body: bytes | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_snapshots, "SNAPSHOT_BYTES_MAX", 5_000)

    async def run() -> None:
        async def reply(request: web.Request) -> web.Response:
            return web.Response(body=body) if body is not None else web.Response(status=404)

        app = web.Application()
        app.router.add_get("/peer/{stream}", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            client = PeerClient(session, [f"http://127.0.0.1:{runner.addresses[0][1]}"])
            await client.fetch_snapshots("h:1", [REPLAYS])
        assert client.outcomes == {outcome: 1}
        await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("size", "outcome"), [(100, "snapshot_served"), (5_000, "snapshot_refused"), (None, "snapshot_refused")]
)
def test_what_is_asked_of_us_is_counted(size: int | None, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_snapshots, "SNAPSHOT_BYTES_MAX", 1_000)
    part: Any = {"rows": b"x" * (size or 0)}
    snapshot = None if size is None else msgspec.structs.replace(make_snapshot(3), parts=[part])
    outcomes: Counter[str] = Counter()

    async def run() -> None:
        await PeerRoutes(1, lambda worker, rank: snapshot, outcomes).get_snapshot(cast(Any, None), "h:1#0")

    with pytest.raises(RequestError) if outcome == "snapshot_refused" else contextlib.nullcontext():
        asyncio.run(run())
    assert outcomes == {outcome: 1}


def test_only_what_goes_back_further_is_taken() -> None:
    assert fetch_snapshots([make_snapshot(3)], [REPLAYS], None) == {0: make_snapshot(3)}
    assert fetch_snapshots([make_snapshot(3)], [REPLAYS], {0: 4}) == {0: make_snapshot(3)}
    assert fetch_snapshots([make_snapshot(3)], [REPLAYS], {0: 3}) == {}
    assert fetch_snapshots([make_snapshot(3), make_snapshot(0)], [REPLAYS], {0: 3}) == {0: make_snapshot(0)}
    assert fetch_snapshots([make_snapshot(3, version=1), make_snapshot(2)], [REPLAYS], {0: 9}) == {0: make_snapshot(2)}


def test_only_the_ranks_that_lack_something_and_can_confirm_it_are_asked_for() -> None:
    assert fetch_snapshots([make_snapshot(0)], [REPLAYS, REPLAYS], {1: 4}) == {1: make_snapshot(0)}
    assert fetch_snapshots([make_snapshot(0)], [SNAPSHOTS, SILENT], {0: 4, 1: 4}) == {}
    own_socket = msgspec.structs.replace(REPLAYS, snapshot_endpoint="tcp://h:9")
    assert fetch_snapshots([make_snapshot(0)], [own_socket], None) == {}


class IncompleteFeed:
    """A feed that lacks something until it is given a snapshot, and peers that count how often they are asked."""

    def __init__(self, answer: PeerSnapshot | None) -> None:
        self.answer = answer
        self.lacking = {0: 7}
        self.fetch_count = 0
        self.resume_calls: list[tuple[str, int, PeerSnapshot]] = []

    def find_incomplete_ranks(self, worker_id: str) -> dict[int, int]:
        return self.lacking

    def resume(self, worker_id: str, rank: int, snapshot: PeerSnapshot) -> bool:
        self.resume_calls.append((worker_id, rank, snapshot))
        self.lacking = {}
        return True

    async def fetch_snapshots(
        self, worker_id: str, sources: Any, only_before: Mapping[int, int]
    ) -> dict[int, PeerSnapshot]:
        assert only_before == {0: 7}
        self.fetch_count += 1
        return {} if self.answer is None else {0: self.answer}


@pytest.mark.parametrize("answer", [make_snapshot(0), None])
def test_peers_are_asked_again_less_and_less_often(answer: PeerSnapshot | None) -> None:
    async def run() -> None:
        now = [0.0]
        incomplete_feed = IncompleteFeed(answer)
        config = FleetConfig(peers_s=10.0, peers_s_max=40.0)
        dummy = cast(Any, None)
        now_s, peers = (lambda: now[0]), cast(Any, incomplete_feed)
        context = FleetContext(dummy, dummy, cast(Any, incomplete_feed), dummy, peers, dummy, config, now_s)
        monitor = WorkerMonitor(parse_worker_flag("http://h:1"), "operator", context)
        monitor.facts = WorkerFacts(WorkerSpec("h:1", "http://h:1"), (REPLAYS,))
        fetch_seconds = []
        for second in range(200):
            now[0] = float(second)
            before = incomplete_feed.fetch_count
            await monitor.fetch_missing_snapshots()
            if incomplete_feed.fetch_count > before:
                fetch_seconds.append(second)
        if answer is None:
            assert fetch_seconds == [0, 10, 30, 70, 110, 150, 190]
        else:
            assert fetch_seconds == [0]
            assert incomplete_feed.resume_calls == [("h:1", 0, answer)]

    asyncio.run(run())
