"""What a gap or a reconnect made a router forget it takes from another router: who is asked, when, and for what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from events.sources import EventSource
from router.fleet.discovery import WorkerFacts, parse_worker_flag
from router.fleet.feed import SNAPSHOT_VERSION, PeerSnapshot
from router.fleet.members import Fleet, FleetConfig, _Member
from router.fleet.snapshots import PeerClient

REPLAYS = EventSource(endpoint="tcp://a:1", replay_endpoint="tcp://a:2")
SNAPSHOTS = EventSource(endpoint="tcp://a:1", replay_endpoint="tcp://a:2", snapshot=True)
SILENT = EventSource(endpoint="tcp://a:1")


def told(since: int, version: int = SNAPSHOT_VERSION) -> PeerSnapshot:
    return PeerSnapshot(version, seq=9, digest=5, since=since, chunks=[])


def ask(
    answers: list[PeerSnapshot], sources: list[EventSource], below: Mapping[int, int] | None
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
            found = await PeerClient(session, urls).snapshots("h:1", sources, below)
        for runner in runners:
            await runner.cleanup()
        return found

    return asyncio.run(run())


def test_only_what_goes_back_further_is_taken() -> None:
    assert ask([told(3)], [REPLAYS], None) == {0: told(3)}
    assert ask([told(3)], [REPLAYS], {0: 4}) == {0: told(3)}
    assert ask([told(3)], [REPLAYS], {0: 3}) == {}
    assert ask([told(3), told(0)], [REPLAYS], {0: 3}) == {0: told(0)}
    assert ask([told(3, version=1), told(2)], [REPLAYS], {0: 9}) == {0: told(2)}


def test_only_the_ranks_that_lack_something_and_can_confirm_it_are_asked_for() -> None:
    assert ask([told(0)], [REPLAYS, REPLAYS], {1: 4}) == {1: told(0)}
    assert ask([told(0)], [SNAPSHOTS, SILENT], {0: 4, 1: 4}) == {}


class Asked:
    """A feed that lacks something until it is given a snapshot, and peers that count how often they are asked."""

    any = True

    def __init__(self, answer: PeerSnapshot | None) -> None:
        self.answer = answer
        self.lacking = {0: 7}
        self.asked = 0
        self.resumed: list[tuple[str, int, PeerSnapshot]] = []

    def incomplete(self, worker_id: str) -> dict[int, int]:
        return self.lacking

    def resume(self, worker_id: str, rank: int, snapshot: PeerSnapshot) -> bool:
        self.resumed.append((worker_id, rank, snapshot))
        self.lacking = {}
        return True

    async def snapshots(self, worker_id: str, sources: Any, below: Mapping[int, int]) -> dict[int, PeerSnapshot]:
        assert below == {0: 7}
        self.asked += 1
        return {} if self.answer is None else {0: self.answer}


@pytest.mark.parametrize("answer", [told(0), None])
def test_peers_are_asked_again_less_and_less_often(answer: PeerSnapshot | None) -> None:
    async def run() -> None:
        now = [0.0]
        parts = Asked(answer)
        config = FleetConfig(peers_s=10.0, peers_s_max=40.0)
        nothing = cast(Any, None)
        fleet = Fleet(
            nothing, nothing, cast(Any, parts), nothing, nothing, config, now=lambda: now[0], peers=cast(Any, parts)
        )
        member = _Member(parse_worker_flag("http://h:1"), "operator", facts=WorkerFacts(True, sources=(REPLAYS,)))
        asked_at = []
        for second in range(200):
            now[0] = float(second)
            before = parts.asked
            await fleet._fill_up(member)
            if parts.asked > before:
                asked_at.append(second)
        if answer is None:
            assert asked_at == [0, 10, 30, 70, 110, 150, 190]
        else:
            assert asked_at == [0]
            assert parts.resumed == [("h:1", 0, answer)]

    asyncio.run(run())
