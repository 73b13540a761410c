"""The list of workers: what cannot be one is refused, what never answers is told and asked less and less often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from options import ConfigError
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.engine_load import EngineLoad
from router.decide.workers import ServedModel
from router.fleet.discovery import WorkerFacts, WorkerFlag, normalise_url, parse_worker_flag
from router.fleet.members import Fleet, FleetConfig, _Member
from router.index import make_index


@pytest.mark.parametrize(
    "url",
    [
        "", "http://", "hello world", "http://a b:1", "http://:8000", "http://a..b", "http://-a", "http://a%20b",
        "http://1.2.3", "http://256.1.1.1:80", "http://[::1", "http://[::zz]:1", "http://a:0", "http://a:70000",
        "http://a:b", "http://a?x=1", "http://a#b", "ftp://a", "http://a/b c", "http://" + "a" * 64, "http://u:p@a:1",
        "http://<host>:8000", "http://a\n:1",
    ],
)  # fmt: skip
def test_what_cannot_be_an_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="worker url: "):
        normalise_url(url)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("gpu1:8000", "http://gpu1:8000"),
        ("vllm_worker_1:80", "http://vllm_worker_1:80"),
        ("https://a.b.example./base/", "https://a.b.example./base"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1"),
        ("http://10.0.0.1:1/v1/", "http://10.0.0.1:1"),
        ("http://[fe80::1]:1/", "http://[fe80::1]:1"),
        ("http://bücher.example:1", "http://bücher.example:1"),
        ("pod-0.svc.cluster.local:8000", "http://pod-0.svc.cluster.local:8000"),
    ],
)
def test_what_can_be_one_is_taken(url: str, normal: str) -> None:
    assert normalise_url(url) == normal


def fleet_of(prober: Any, config: FleetConfig | None = None) -> Fleet:
    nothing = cast(Any, None)
    core = cast(Any, type("Core", (), {"workers": {}}))
    return Fleet(core, prober, nothing, nothing, nothing, config or FleetConfig(), now=lambda: 0.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "url= is missing"),
        ({"url": "http://a b"}, "http://a b"),
        ({"url": "http://a:1,id=x"}, "http://a:1,id=x"),
        ({"url": ["http://a:1"]}, "url"),
        ({"url": "http://a:1", "event": "tcp://a:2"}, "'event'"),
        ({"url": "http://a:1", "events": "tcp://a"}, "tcp://a"),
        ({"url": "http://a:1", "events": "http://a:2"}, "http://a:2"),
        ({"url": "http://a:1", "cache_tokens": 0}, "cache_tokens"),
    ],
)
def test_what_is_posted_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    async def run() -> None:
        fleet = fleet_of(None)
        with pytest.raises(ConfigError, match=said):
            await fleet.add(settings)
        assert fleet.starting() == {}

    asyncio.run(run())


class Silent:
    """A prober that finds nobody, for the reasons given."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = list(reasons)

    async def probe(self, flag: WorkerFlag, known: WorkerFacts | None = None) -> WorkerFacts:
        return WorkerFacts(False, self._reasons.pop(0))


def test_one_that_never_answers_is_asked_less_and_less_often() -> None:
    async def run() -> None:
        refused = [f"ConnectError: attempt {n}" for n in range(6)]
        fleet = fleet_of(
            Silent(*refused, "/v1/models answers 503", "/v1/models answers 503"),
            FleetConfig(starting_s=0.5, starting_s_max=5.0),
        )
        member = _Member(parse_worker_flag("http://h:1"), "operator")
        fleet._members["h:1"] = member
        assert fleet.starting() == {"h:1": "not tried yet"}
        pauses = []
        for _ in range(8):
            assert not await fleet._join(member)
            pauses.append(member.starting_pause_s)
        assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 1.0], "another answer: it is on its way"
        assert fleet.starting() == {"h:1": "/v1/models answers 503 (tried 8 times, again every 1 s)"}

    asyncio.run(run())


class Asked:
    """A prober that finds nobody and tells when it is asked."""

    def __init__(self) -> None:
        self.workers = asyncio.Queue[str]()

    async def probe(self, flag: WorkerFlag, known: WorkerFacts | None = None) -> WorkerFacts:
        self.workers.put_nowait(flag.worker_id)
        return WorkerFacts(False, "refused")


RARELY = FleetConfig(starting_s=3600.0, starting_s_max=3600.0)


def test_a_worker_is_left_also_in_the_moment_in_which_traffic_fails() -> None:
    async def run() -> None:
        asked = Asked()
        fleet = fleet_of(asked, RARELY)
        await fleet.add({"url": "http://h:1"})
        await asked.workers.get()
        for _ in range(5):
            await asyncio.sleep(0)  # it waits now
        fleet.suspect("h:1")
        await asyncio.wait_for(fleet.close(), 30)
        assert asked.workers.empty()

    asyncio.run(run())


def test_one_that_is_named_again_is_asked_at_once() -> None:
    async def run() -> None:
        asked = Asked()
        fleet = fleet_of(asked, RARELY)
        for _ in range(3):
            assert await fleet.add({"url": "http://h:1"}) == "h:1"
            assert await asyncio.wait_for(asked.workers.get(), 30) == "h:1"
        await fleet.close()

    asyncio.run(run())


class Odd:
    """A prober whose answers the router cannot bear."""

    async def probe(self, flag: WorkerFlag, known: WorkerFacts | None = None) -> WorkerFacts:
        raise OverflowError("a number of the worker's")


def test_a_watch_that_fails_says_so_once_and_comes_back_less_and_less_often(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.fleet.members.RESTART_S", 0.001)
    monkeypatch.setattr("router.fleet.members.RESTART_S_MAX", 0.004)

    async def run() -> None:
        fleet = fleet_of(Odd())
        await fleet.add({"url": "http://h:1"})
        while fleet.unusable["h:1"] < 5:
            await asyncio.sleep(0.001)
        assert fleet._members["h:1"].restart_s == 0.004
        assert "a number of the worker's" in fleet.starting()["h:1"]
        await fleet.close()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if "OverflowError" in record.getMessage()] == [
        "worker h:1 cannot be followed: OverflowError: a number of the worker's"
    ]


def test_a_worker_that_is_added_later_gets_the_key_only_where_that_is_said() -> None:
    async def run() -> None:
        fleet = fleet_of(Asked(), RARELY)
        fleet.watch(parse_worker_flag("http://a:1"), origin="operator")
        await fleet.add({"url": "http://b:1"})
        await fleet.add({"url": "http://c:1", "send_key": 1})
        keyed = {name: fleet.is_keyed(name) for name in ("a:1", "b:1", "c:1", "unknown")}
        assert keyed == {"a:1": True, "b:1": False, "c:1": True, "unknown": False}
        await fleet.close()

    asyncio.run(run())


def test_a_worker_is_asked_for_its_load_beside_its_health_and_less_often_while_it_says_nothing() -> None:
    """Health is looked at while an answer about the load is out; what came is handed to the core."""

    class Slow:
        def __init__(self) -> None:
            self.looks, self.asked, self.answers = 0, 0, asyncio.Queue[list[EngineLoad | None]]()

        async def probe(self, flag: WorkerFlag, known: WorkerFacts | None = None) -> WorkerFacts:
            return WorkerFacts(True, models=(ServedModel("m", "m"),))

        async def healthy(self, flag: WorkerFlag) -> None:
            self.looks += 1

        async def loads(self, flag: WorkerFlag, ranks: int) -> list[EngineLoad | None]:
            self.asked += 1
            return await self.answers.get()

    async def run() -> None:
        prober: Any = Slow()
        core, now = RouterCore(make_index(seed=1), CoreConfig()), [0.0]
        feed: Any = SimpleNamespace(follow=lambda *_: None, incomplete=lambda _: {}, forget=lambda _: None)
        prompts: Any = SimpleNamespace(learn=no_tokenizer, forget=lambda _: None)
        config = FleetConfig(health_s=0.001, sources_s=1e6, loads_s=4.0)
        fleet = Fleet(core, prober, feed, prompts, lambda _: None, config, now=lambda: now[0])

        async def looks(more: int) -> None:
            until = prober.looks + more
            while prober.looks < until:
                await asyncio.sleep(0.001)

        await fleet.add({"url": "http://h:1", "events": "none"})
        await looks(5)
        assert prober.asked == 1, "it has not answered yet"
        prober.answers.put_nowait([EngineLoad(3, 1, 0.5)])
        await looks(3)
        assert prober.asked == 1
        assert core.snapshot(0.0).workers[0].engine_load == EngineLoad(3, 1, 0.5)
        times = []
        for second in range(1, 40):
            now[0] = float(second)
            prober.answers.put_nowait([None])
            before = prober.asked
            await looks(3)
            times += [second] * (prober.asked - before)
        assert times == [4, 8, 16, 32]
        await fleet.close()

    async def no_tokenizer(*_: object) -> None:
        return None

    asyncio.run(run())
