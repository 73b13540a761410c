"""The list of workers: what cannot be one is refused, what never answers is told and asked less and less often."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from core_by_hand import request

from engine.tiny.tokenizer import write_tokenizer
from events.sources import EventSource
from options import ConfigError
from prompts.tokenizer import find_checkpoint
from router.app.process_limits import compute_streams_max
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.load import EngineLoad
from router.decide.messages import Instruction, Refuse
from router.decide.workers import CacheView, ServedModel, WorkerSpec, WorkerState
from router.fleet import membership, retries, worker_lists
from router.fleet.config import FleetConfig
from router.fleet.fact_queue import EngineRestarted
from router.fleet.index_feed import IndexFeed
from router.fleet.kubernetes import KubernetesSource
from router.fleet.membership import Fleet
from router.fleet.peer_snapshots import PeerClient
from router.fleet.prober import Prober, WorkerFacts, _read_engine_ids
from router.fleet.retries import double_pause, run_forever
from router.fleet.worker_checkpoints import WorkerCheckpoints, find_checkpoints
from router.fleet.worker_monitor import (
    BLOCKS_FACTOR,
    BLOCKS_MAX_DEFAULT,
    BLOCKS_MIN,
    FleetContext,
    WorkerMonitor,
    compute_max_blocks,
)  # fmt: skip
from router.fleet.worker_responses import ModelList
from router.fleet.worker_settings import WorkerSettings, normalise_url, parse_worker_flag
from router.host_names import HostNames
from router.http_client import FetchError
from router.index import make_index
from router.index.protocol import PrefixIndex
from router.prompting.conversation_reader import ConversationReader
from router.prompting.model_tokenizers import ModelTokenizers


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


NO_PEERS = PeerClient(cast(Any, None), [])


def fleet_of(prober: Any, config: FleetConfig | None = None) -> Fleet:
    dummy = cast(Any, None)
    core = cast(Any, type("Core", (), {"workers": {}}))
    return make_fleet(core, prober, dummy, dummy, config or FleetConfig(), now=lambda: 0.0)


def use_tokenizers(fleet: Fleet, tokenizers: ModelTokenizers) -> ModelTokenizers:
    fleet._context.checkpoints._tokenizers = tokenizers
    return tokenizers


def make_fleet(
    core: Any, prober: Any, feed: Any, prompts: Any, config: FleetConfig, *, now: Callable[[], float],
    peers: Any = NO_PEERS,
) -> Fleet:  # fmt: skip
    tokenizers = WorkerCheckpoints(prompts, core.workers)
    return Fleet(FleetContext(core, prober, feed, tokenizers, peers, lambda _: None, config, now))


@pytest.mark.parametrize(
    ("settings", "error_text"),
    [
        ({}, "url= is missing"),
        ({"url": "http://a b"}, "http://a b"),
        ({"url": "http://a:1,id=x"}, "http://a:1,id=x"),
        ({"url": ["http://a:1"]}, "url"),
        ({"url": True}, "url is True, expected a string"),
        ({"url": "http://a:1", "id": 7}, "id is 7, expected a string"),
        ({"url": "http://a:1", "topic": False}, "topic is False, expected a string"),
        ({"url": "http://a:1", "reannounce": True}, "reannounce='True', expected 0 or 1"),
        ({"url": "http://a:1", "event": "tcp://a:2"}, "'event'"),
        ({"url": "http://a:1", "events": "tcp://a"}, "tcp://a"),
        ({"url": "http://a:1", "events": "http://a:2"}, "http://a:2"),
        ({"url": "http://a:1", "cache_tokens": 0}, "cache_tokens"),
    ],
)
def test_what_is_posted_is_refused_by_name(settings: dict[str, Any], error_text: str) -> None:
    async def run() -> None:
        fleet = fleet_of(None)
        with pytest.raises(ConfigError, match=error_text):
            fleet.add(settings)
        assert fleet.list_starting_reasons() == {}

    asyncio.run(run())


class DeadWorkerProber:
    """A prober that finds nobody, for the reasons given."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = list(reasons)

    async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
        raise FetchError(self._reasons.pop(0))


def test_one_that_never_answers_is_asked_less_and_less_often() -> None:
    async def run() -> None:
        connect_errors = [f"ConnectError: attempt {n}" for n in range(6)]
        fleet = fleet_of(
            DeadWorkerProber(*connect_errors, "/v1/models answers 503", "/v1/models answers 503"),
            FleetConfig(starting_s=0.5, starting_s_max=5.0),
        )
        monitor = WorkerMonitor(parse_worker_flag("http://h:1"), "operator", fleet._context)
        fleet._monitors["h:1"] = monitor
        assert fleet.list_starting_reasons() == {"h:1": "not tried yet"}
        pauses = []
        for _ in range(8):
            assert not await monitor.probe_and_register()
            pauses.append(monitor.poll_times.starting_pause_s)
        assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 1.0], "another answer: it is on its way"
        assert fleet.list_starting_reasons() == {"h:1": "/v1/models answers 503 (tried 8 times, again every 1 s)"}

    asyncio.run(run())


def test_a_worker_that_is_removed_while_it_is_probed_leaves_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1024, 4096)
    spec = WorkerSpec("h:1", "http://h:1", models=(ServedModel("m", "m"),))

    class LateProber:
        async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
            del fleet._monitors["h:1"]
            return WorkerFacts(spec, (), roots={"m": str(tmp_path)})

    fleet = fleet_of(LateProber())

    async def run() -> None:
        monitor = fleet._monitors["h:1"] = WorkerMonitor(parse_worker_flag("http://h:1"), "operator", fleet._context)
        assert not await monitor.probe_and_register()
        assert fleet._context.checkpoints._checkpoints == {}

    asyncio.run(run())


class RecordingProber:
    """A prober that finds nobody and tells when it is asked."""

    def __init__(self) -> None:
        self.workers = asyncio.Queue[str]()
        self.host_names = HostNames()

    async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
        self.workers.put_nowait(settings.worker_id)
        raise FetchError("refused")


RARELY_HEALTH = FleetConfig(health_s=3600.0)
RARELY = FleetConfig(starting_s=3600.0, starting_s_max=3600.0)


def test_a_worker_is_left_also_in_the_moment_in_which_traffic_fails() -> None:
    async def run() -> None:
        prober = RecordingProber()
        fleet = fleet_of(prober, RARELY)
        fleet.add({"url": "http://h:1"})
        await prober.workers.get()
        for _ in range(5):
            await asyncio.sleep(0)  # it waits now
        fleet.check_soon("h:1")
        await asyncio.wait_for(fleet.close(), 30)
        assert prober.workers.empty()

    asyncio.run(run())


def test_one_that_is_named_again_is_asked_at_once() -> None:
    async def run() -> None:
        prober = RecordingProber()
        fleet = fleet_of(prober, RARELY)
        for _ in range(3):
            assert fleet.add({"url": "http://h:1"}) == "h:1"
            assert await asyncio.wait_for(prober.workers.get(), 30) == "h:1"
        await fleet.close()

    asyncio.run(run())


class FailingProber:
    """A prober whose answers the router cannot bear."""

    async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
        raise OverflowError("a number of the worker's")


def test_a_watch_that_fails_says_so_once_and_comes_back_less_and_less_often(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.fleet.retries.RESTART_S", 0.001)
    monkeypatch.setattr("router.fleet.retries.RESTART_S_MAX", 0.004)
    pauses_s: list[float] = []

    def record_pause(pause_s: float, first_s: float, max_s: float) -> float:
        pauses_s.append(double_pause(pause_s, first_s, max_s))
        return pauses_s[-1]

    monkeypatch.setattr("router.fleet.retries.double_pause", record_pause)

    async def run() -> None:
        fleet = fleet_of(FailingProber())
        fleet.add({"url": "http://h:1"})
        while fleet.failed_checks["h:1"] < 5:
            await asyncio.sleep(0.001)
        assert pauses_s[:4] == [0.001, 0.002, 0.004, 0.004]
        assert "a number of the worker's" in fleet.list_starting_reasons()["h:1"]
        await fleet.close()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if "OverflowError" in record.getMessage()] == [
        "worker h:1 cannot be followed: OverflowError: a number of the worker's"
    ]


def test_a_worker_that_is_added_later_gets_the_key_only_where_that_is_said() -> None:
    async def run() -> None:
        fleet = fleet_of(RecordingProber(), RARELY)
        fleet.watch(parse_worker_flag("http://a:1"), origin="operator")
        fleet.add({"url": "http://b:1"})
        fleet.add({"url": "http://c:1", "send_key": 1})
        may_receive_key = {name: fleet.may_receive_api_key(name) for name in ("a:1", "b:1", "c:1", "unknown")}
        assert may_receive_key == {"a:1": True, "b:1": False, "c:1": True, "unknown": False}
        await fleet.close()

    asyncio.run(run())


def test_a_worker_is_asked_for_its_load_beside_its_health_and_less_often() -> None:
    """Health is looked at while an answer about the load is out; what came is handed to the core."""

    class SlowProber:
        def __init__(self) -> None:
            self.health_checks, self.load_polls, self.answers = 0, 0, asyncio.Queue[list[EngineLoad | None]]()

        async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
            return WorkerFacts(
                WorkerSpec(settings.worker_id, settings.url, (ServedModel("m", "m"),), cache_view=CacheView.APPROXIMATE)
            )

        async def check_health(self, settings: WorkerSettings) -> None:
            self.health_checks += 1

        async def fetch_models(self, settings: WorkerSettings) -> ModelList:
            return ModelList((ServedModel("m", "m"),), {})

        async def fetch_loads(self, settings: WorkerSettings, ranks: int) -> list[EngineLoad | None]:
            self.load_polls += 1
            return await self.answers.get()

    async def run() -> None:
        prober: Any = SlowProber()
        core, now = RouterCore(make_index(seed=1), CoreConfig()), [0.0]
        feed: Any = feed_of()
        prompts: Any = SimpleNamespace(
            discover=no_tokenizer, remove_worker=lambda _: None, is_replaced=lambda *_: False
        )
        config = FleetConfig(health_s=0.001, sources_s=1e6, loads_s=4.0)
        fleet = make_fleet(core, prober, feed, prompts, config, now=lambda: now[0])

        async def wait_for_health_checks(count: int) -> None:
            target_count = prober.health_checks + count
            while prober.health_checks < target_count:
                await asyncio.sleep(0.001)

        fleet.add({"url": "http://h:1", "events": "none"})
        await wait_for_health_checks(5)
        assert prober.load_polls == 1, "it has not answered yet"
        prober.answers.put_nowait([EngineLoad(3, 1, 0.5)])
        await wait_for_health_checks(3)
        assert prober.load_polls == 1
        assert core.snapshot(0.0).workers[0]["engine_load"] == EngineLoad(3, 1, 0.5)
        times = []
        for second in range(1, 14):
            now[0] = float(second)
            prober.answers.put_nowait([None])
            before = prober.load_polls
            await wait_for_health_checks(3)
            times += [second] * (prober.load_polls - before)
        assert times == [4, 8, 12]
        await fleet.close()

    asyncio.run(run())


async def no_tokenizer(*_: object) -> None:
    return None


class Page:
    """A vLLM worker's pages over HTTP, which a test changes."""

    def __init__(self) -> None:
        self.names, self.owner = ["base"], "vllm"
        self.answers: dict[str, tuple[int, str] | None] = {}
        """Status and text by path, in place of the usual ones; None: it does not answer."""
        self.metrics = ""
        self.request_counts: Counter[str] = Counter()
        self.status = 200
        self.engine_id = ""
        """Name of the process that Mooncake's bootstrap server tells."""

    async def answer(self, request: web.Request) -> web.Response:
        self.request_counts[request.path] += 1
        if request.path in self.answers:
            answer = self.answers[request.path]
            if answer is None:
                await asyncio.sleep(3600.0)
                raise AssertionError("a test that takes an hour")
            return web.Response(status=answer[0], text=answer[1])
        if request.path == "/v1/models":
            cards = [{"id": name, "owned_by": self.owner, "parent": "base" if name != "base" else None}
                     for name in self.names]  # fmt: skip
            return web.json_response({"data": cards}, status=self.status)
        if request.path == "/metrics":
            return web.Response(text=self.metrics)
        if request.path == "/query":
            return web.json_response({"0": {"engine_id": self.engine_id}})
        return web.Response(status=200 if request.path == "/health" else 404)

    async def wait_for_requests(self, path: str, count: int) -> None:
        """Wait until a path was asked for so many times more."""
        target_count = self.request_counts[path] + count
        await wait_until(lambda: self.request_counts[path] >= target_count)


@contextlib.asynccontextmanager
async def watching(
    page: Page,
    config: FleetConfig,
    feed: Any,
    *,
    is_mooncake: bool = False,
    events: str | None = "none",
    index: PrefixIndex | None = None,
    timeout_s: float = 5.0,
    peers: Any = None,
) -> AsyncIterator[tuple[Fleet, RouterCore, str]]:
    """A fleet that knows the worker of this page; and the worker's id.

    A short `timeout_s` is for pages that hang: on a busy machine any page may answer later than that.
    """
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as session:
        core = RouterCore(index or make_index(seed=1), CoreConfig())
        prompts: Any = SimpleNamespace(
            discover=no_tokenizer, remove_worker=lambda _: None, is_replaced=lambda *_: False
        )
        now = asyncio.get_running_loop().time
        prober = Prober(session, timeout_s=timeout_s, kv_dialects=("mooncake",))
        fleet = make_fleet(core, prober, feed, prompts, config, now=now, peers=peers or NO_PEERS)
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        kv_settings = {"kv": "mooncake", "bootstrap": address} if is_mooncake else {}
        event_settings = {} if events is None else {"events": events}
        name = fleet.add({"url": f"http://{address}", **event_settings, **kv_settings})
        await wait_until(lambda: name in core.workers)
        yield fleet, core, name
        await fleet.close()
    await runner.cleanup()


async def wait_until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


def feed_of(**methods: Any) -> Any:
    default_methods = {"follow_worker": lambda *_, **__: None, "find_incomplete_ranks": lambda _: {},
               "forget": lambda _: None, "clear_worker": lambda _: None, "count_clears": lambda _: 0,
               "count_free_streams": lambda _: 100}  # fmt: skip
    return SimpleNamespace(**{**default_methods, **methods})


def test_a_mooncake_process_that_restarted_unseen_has_its_new_name() -> None:
    """Its transfers fail; then it is looked at, although its health never failed."""

    async def run() -> None:
        page = Page()
        page.engine_id = "first"
        async with watching(page, RARELY_HEALTH, feed_of(), is_mooncake=True) as (fleet, core, name):
            assert core.workers[name].spec.transfer.engine_ids == ("first",)
            page.engine_id = "second"
            fleet.check_soon(name)
            await wait_until(lambda: core.workers[name].spec.transfer.engine_ids == ("second",))
            page.engine_id = ""
            fleet.check_soon(name)
            await wait_until(lambda: not core.workers[name].spec.transfer.can_give)
            page.engine_id = "third"
            fleet.check_soon(name)
            await wait_until(lambda: core.workers[name].spec.transfer.engine_ids == ("third",))
            assert core.workers[name].spec.transfer.can_give

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_mooncake_server_that_is_gone_gives_no_kv_and_one_that_is_slow_keeps_its_names() -> None:
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            prober = Prober(session, timeout_s=0.2, kv_dialects=("mooncake",))
            server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            settings = parse_worker_flag(f"url=http://a:1,kv=mooncake,bootstrap=127.0.0.1:{port}")
            assert await ask(prober, settings) is None
            server.close()
            assert await ask(prober, settings) == ()

    async def ask(prober: Prober, settings: WorkerSettings) -> tuple[str, ...] | None:
        bootstrap = asyncio.ensure_future(prober._fetch_bootstrap(settings))
        await asyncio.wait({bootstrap})
        return _read_engine_ids(bootstrap, 1)[0]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_mooncake_server_that_is_silent_is_told_once(caplog: Any) -> None:
    def count_warnings() -> int:
        return sum("does not name its engines" in record.getMessage() for record in caplog.records)

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, sources_s=0.001)
        page.engine_id = "first"
        async with watching(page, config, feed_of(), is_mooncake=True) as (_, core, name):
            for count in (1, 2):
                page.answers["/query"] = (503, "busy")
                await page.wait_for_requests("/query", 5)
                assert count_warnings() == count, "once for each time that it became silent"
                assert core.workers[name].spec.transfer.engine_ids == ("first",)
                del page.answers["/query"]
                await page.wait_for_requests("/query", 3)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_engine_whose_events_show_a_restart_and_that_tells_no_sizes_has_no_sizes() -> None:
    """It has no name by which its starts could be told apart, and may have come back with a smaller cache."""

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, sources_s=0.001)
        page.metrics = SIZES
        async with watching(page, config, feed_of()) as (fleet, core, name):
            page.metrics = ""
            await page.wait_for_requests("/metrics", 4)
            assert core.workers[name].spec.cache_tokens == 1600, "too busy to tell"
            fleet.apply_fact(EngineRestarted(name, 0))
            await wait_until(lambda: core.workers[name].spec.cache_tokens is None)
            page.metrics = SIZES
            await wait_until(lambda: core.workers[name].spec.cache_tokens == 1600)
            page.metrics = ""
            await page.wait_for_requests("/metrics", 4)
            assert core.workers[name].spec.cache_tokens == 1600, "the new engine has told it"
            fleet.apply_fact(EngineRestarted("nobody", 0))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_with_more_streams_than_there_is_room_for_is_routed_by_history(caplog: Any) -> None:
    class ManyStreamsProber:
        streams = 3

        async def probe(self, settings: WorkerSettings, known: Any, restart_count: int) -> WorkerFacts:
            sources = tuple(EventSource(endpoint=f"tcp://a:{rank + 1}") for rank in range(self.streams))
            spec = WorkerSpec(
                settings.worker_id, settings.url, (ServedModel("m", "m"),), ranks=self.streams, cache_tokens=160
            )
            return WorkerFacts(spec, sources)

    async def run() -> None:
        follow_calls: list[tuple[int, int]] = []
        prober = ManyStreamsProber()
        core = RouterCore(make_index(seed=1), CoreConfig())
        prompts: Any = SimpleNamespace(
            discover=no_tokenizer, remove_worker=lambda _: None, is_replaced=lambda *_: False
        )
        feed = feed_of(
            count_free_streams=lambda _: 2,
            follow_worker=lambda _, sources, *__, blocks_max: follow_calls.append((len(sources), blocks_max)),
        )
        now = asyncio.get_running_loop().time
        fleet: Any = make_fleet(core, prober, feed, prompts, FleetConfig(), now=now)
        name = fleet.add({"url": "http://a:1"})
        monitor = fleet._monitors[name]
        monitor.cancel()
        for streams in (3, 3, 2):
            prober.streams = streams
            assert await monitor.probe_and_register()
        assert [count for count, _ in follow_calls] == [0, 2]
        assert follow_calls[-1][1] == BLOCKS_MIN + BLOCKS_FACTOR * 5
        assert (core.workers[name].spec.cache_view, core.workers[name].spec.ranks) == (CacheView.EVENTS, 2)
        assert sum("room for 2" in record.message for record in caplog.records) == 1
        await fleet.close()

    asyncio.run(run())


SIZES = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="101",max_num_seqs="8",max_num_batched_tokens="512"} 1.0'


def list_sources(count: int) -> str:
    """Body of `/kv_event_sources` of a worker with this many ranks, at ports where nobody listens."""
    return json.dumps([{"data_parallel_rank": rank, "endpoint": f"tcp://*:{rank + 1}"} for rank in range(count)])


def test_a_worker_without_room_for_its_streams_keeps_what_is_known_of_it(caplog: Any) -> None:
    """It is the same engine at each poll. Its streams are followed as soon as there is room for them."""

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, sources_s=0.001)
        page.metrics, page.answers["/kv_event_sources"] = SIZES, (200, list_sources(2))
        index = make_index(seed=1)
        feed = IndexFeed(index, streams_max=1)
        feed.start()
        async with watching(page, config, feed, events=None, index=index) as (_, core, name):
            first_spec = core.workers[name].spec
            assert (first_spec.cache_view, first_spec.ranks) == (CacheView.APPROXIMATE, 1)
            assert (first_spec.cache_tokens, first_spec.max_num_seqs) == (1600, 8)
            holders = list(core.workers[name].holders)
            page.metrics = ""
            await page.wait_for_requests("/kv_event_sources", 5)
            assert core.workers[name].spec == first_spec
            assert core.workers[name].holders == holders
            assert sum("serves" in record.getMessage() for record in caplog.records) == 1
            feed._streams_max = 2
            await wait_until(lambda: core.workers[name].spec.cache_view is CacheView.EVENTS)
            assert core.workers[name].spec.cache_tokens == 1600
            assert len(feed.describe_streams(name)["streams"]) == 2
        feed.close()

    caplog.set_level("INFO")
    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("path", ["/metrics", "/query", "/kv_event_sources", "/server_info"])
@pytest.mark.parametrize("fault", ["hangs", "503", "HTML", "10 MB"])
def test_a_question_that_a_worker_does_not_answer_for_a_while_is_no_restart(path: str, fault: str, caplog: Any) -> None:
    """Its facts, its targets and its holders stay, and its KV is asked for by the same name."""
    answers = {"hangs": None, "503": (503, "busy"), "HTML": (200, "<html>"), "10 MB": (200, "#" * 10**7)}

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, sources_s=0.001)
        page.metrics, page.engine_id, page.answers["/kv_event_sources"] = SIZES, "first", (200, list_sources(1))
        if path == "/server_info":
            page.owner, page.metrics = "sglang", ""
            page.answers[path] = (200, '{"max_total_num_tokens": 1600}')
        timeout_s = 0.3 if fault == "hangs" else 5.0
        watched = watching(page, config, feed_of(), is_mooncake=True, events=None, timeout_s=timeout_s)
        async with watched as (_, core, name):
            first_spec, holders = core.workers[name].spec, list(core.workers[name].holders)
            assert (first_spec.cache_tokens, first_spec.cache_view) == (1600, CacheView.EVENTS)
            assert (first_spec.transfer.engine_ids, first_spec.transfer.can_give) == (("first",), True)
            page.answers[path] = answers[fault]
            await page.wait_for_requests(path, 4)
            await page.wait_for_requests("/health", 1)
            worker = core.workers[name]
            assert worker.state is WorkerState.UP
            assert worker.holders == holders
            if (path, fault) == ("/query", "HTML"):
                assert worker.spec.transfer.engine_ids == (), "it is another server that has no engine"
                return
            assert worker.spec == first_spec
            assert sum("serves" in record.getMessage() for record in caplog.records) == 1
            core.mark_worker_down(name, asyncio.get_running_loop().time(), "a fault of its health check")
            if path != "/kv_event_sources":
                await wait_until(lambda: worker.state is WorkerState.UP)
                assert (worker.spec, worker.holders) == (first_spec, holders)

    caplog.set_level("INFO")
    asyncio.run(asyncio.wait_for(run(), 60))


def test_sizes_that_a_worker_told_too_late_for_its_first_probe_are_learned() -> None:
    async def run() -> None:
        page = Page()
        page.answers["/metrics"] = (500, "not yet")
        async with watching(page, FleetConfig(health_s=0.001, sources_s=0.001), feed_of()) as (_, core, name):
            assert core.workers[name].spec.cache_tokens is None
            del page.answers["/metrics"]
            page.metrics = SIZES
            await wait_until(lambda: core.workers[name].spec.cache_tokens == 1600)
            assert core.snapshot(0.0).workers[0]["cache_tokens"] == 1600

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_is_checked_while_another_router_does_not_answer() -> None:
    """The other router is asked for what this one has missed of the worker's events, and may take a minute."""
    is_asked = asyncio.Event()

    async def fetch_snapshots(worker_id: str, sources: Any, only_before: Any = None) -> dict[int, Any]:
        if only_before is not None:
            is_asked.set()
            await asyncio.sleep(3600.0)
        return {}

    async def run() -> None:
        page, peers = Page(), SimpleNamespace(fetch_snapshots=fetch_snapshots)
        feed = feed_of(find_incomplete_ranks=lambda _: {0: 5})
        async with watching(page, FleetConfig(health_s=0.001), feed, peers=peers) as (_, core, name):
            await is_asked.wait()
            page.answers["/health"] = (503, "")
            await wait_until(lambda: core.workers[name].is_down)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_joins_although_another_router_does_not_answer(monkeypatch: Any) -> None:
    monkeypatch.setattr("router.fleet.worker_monitor.JOIN_SNAPSHOTS_S_MAX", 0.05)

    async def fetch_snapshots(*_: object, **__: object) -> None:
        await asyncio.sleep(3600.0)

    async def run() -> None:
        async with watching(Page(), RARELY_HEALTH, feed_of(), peers=SimpleNamespace(fetch_snapshots=fetch_snapshots)):
            pass

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_that_was_down_and_is_not_ready_says_so_once(caplog: Any) -> None:
    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001)
        async with watching(page, config, feed_of()) as (fleet, core, name):
            page.status, page.answers["/health"] = 500, (503, "")
            fleet.check_soon(name)
            await wait_until(lambda: core.workers[name].is_down)
            del page.answers["/health"]
            await page.wait_for_requests("/v1/models", 8)
            assert core.workers[name].is_down
            assert fleet._monitors[name].problem == "/v1/models answers 500"
            page.status = 200
            await wait_until(lambda: core.workers[name].state is WorkerState.UP)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sum("does not answer yet" in record.getMessage() for record in caplog.records) == 1


def test_no_request_tries_a_worker_before_the_next_check_of_it_can_have_ended() -> None:
    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.25)
        async with watching(page, config, feed_of()) as (fleet, core, name):
            pauses: list[float] = []

            def mark_worker_down(worker_id: str, now: float, reason: str, pause_s: float) -> list[Instruction]:
                pauses.append(pause_s)
                return []

            core.mark_worker_down = mark_worker_down  # type: ignore[method-assign]
            fleet._monitors[name]._mark_down("no answer", asyncio.get_running_loop().time() - 5.0)
            assert pauses[-1] >= 10.25

    asyncio.run(asyncio.wait_for(run(), 60))


def test_no_request_tries_a_worker_that_has_come_back_and_refuses_the_router() -> None:
    """A worker that restarted with another API key answers each request by 401, and at once: it would get most."""

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001)
        async with watching(page, config, feed_of()) as (_, core, name):
            page.status = 401
            now = asyncio.get_running_loop().time
            core.mark_worker_down(name, now(), "connect failure")
            core.workers[name].open_until_s = now()  # the pause before a request may try it is over
            await page.wait_for_requests("/v1/models", 3)
            core.tick(now())
            assert core.workers[name].state is WorkerState.DOWN
            page.status = 200
            await wait_until(lambda: core.workers[name].state is WorkerState.UP)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_whose_watch_failed_is_checked_and_not_probed_without_a_pause(monkeypatch: Any) -> None:
    """If it did not answer just then, it was probed without a pause, and never found to be down."""
    monkeypatch.setattr("router.fleet.retries.RESTART_S", 0.001)

    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            page.status, page.answers["/health"] = 500, (503, "")
            check_health = fleet._context.prober.check_health

            async def fail_once(settings: WorkerSettings) -> None:
                fleet._context.prober.check_health = check_health  # type: ignore[method-assign]
                raise OverflowError("a number of the worker's")

            fleet._context.prober.check_health = fail_once  # type: ignore[method-assign]
            fleet.check_soon(name)
            await wait_until(lambda: "OverflowError" in fleet._monitors[name].problem)
            await asyncio.sleep(0.1)
            assert page.request_counts["/v1/models"] < 5
            fleet.check_soon(name)
            await wait_until(lambda: core.workers[name].is_down)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_tokenizers_are_read_again_when_a_worker_that_was_down_is_back() -> None:
    """The first reading may have failed: a folder that was not there, or a worker too busy for `/tokenize`."""

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001, sources_s=0.001)
        async with watching(page, config, feed_of()) as (fleet, core, name):
            readings: list[str] = []

            async def discover(base: str, *_: object) -> None:
                readings.append(base)

            fleet._context.checkpoints._tokenizers.discover = discover  # type: ignore[method-assign]
            await page.wait_for_requests("/metrics", 3)
            assert readings == []
            core.mark_worker_down(name, asyncio.get_running_loop().time(), "a fault")
            await wait_until(lambda: core.workers[name].state is WorkerState.UP)
            assert readings == ["base"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_model_of_another_checkpoint_is_read_with_its_tokenizer_once_no_worker_has_the_old_one(
    tmp_path: Path,
) -> None:
    """A rolling upgrade under one served name: the old tokenizer would mispredict every request for ever."""
    folders = {name: tmp_path / name for name in ("old", "new")}
    for vocabulary, folder in zip((1024, 2048), folders.values()):
        folder.mkdir()
        write_tokenizer(folder, vocabulary, 4096)

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001, sources_s=0.001)

        def serve(checkpoint: str) -> None:
            card = {"id": "base", "owned_by": "vllm", "root": str(folders[checkpoint])}
            page.answers["/v1/models"] = (200, json.dumps({"data": [card]}))

        serve("old")
        async with watching(page, config, feed_of()) as (fleet, core, name):
            with ThreadPoolExecutor(1) as executor:
                conversations = ConversationReader(0)
                tokenizers = use_tokenizers(fleet, ModelTokenizers(executor, conversations, None))

                def get_folder() -> str | None:
                    loaded = tokenizers.loaded_by_model.get("base")
                    return None if loaded is None else loaded.checkpoint.folder

                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: get_folder() == str(folders["old"]))
                old_tokenizer = tokenizers.get("base")
                facts = fleet._monitors[name].facts
                assert facts is not None
                spec = dataclasses.replace(facts.spec, worker_id="second", url="http://second:1")
                core.add_worker(spec, 0.0, is_up=True)
                second_facts = dataclasses.replace(facts, spec=spec)
                worker_checkpoints = fleet._context.checkpoints
                worker_checkpoints._checkpoints["second"] = find_checkpoints(second_facts)

                serve("new")
                await page.wait_for_requests("/metrics", 3)
                assert tokenizers.get("base") is old_tokenizer, "the second worker has it"
                core.mark_worker_down("second", asyncio.get_running_loop().time(), "upgraded")
                await wait_until(lambda: get_folder() == str(folders["new"]))
                assert tokenizers.get("base") is not old_tokenizer

                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                alias = dataclasses.replace(spec, models=(ServedModel("first", "first"), ServedModel("base", "first")))
                for kept_facts in (
                    dataclasses.replace(second_facts, spec=alias),
                    dataclasses.replace(second_facts, roots={}),
                    dataclasses.replace(second_facts, roots={"base": str(tmp_path / "elsewhere")}),
                ):
                    worker_checkpoints._checkpoints["second"] = find_checkpoints(kept_facts)
                    assert not worker_checkpoints._forget_replaced("second", kept_facts)
                worker_checkpoints._checkpoints["second"] = find_checkpoints(second_facts)
                assert worker_checkpoints._forget_replaced("second", second_facts)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_new_files_in_a_folder_are_read_once_no_worker_has_the_old_ones(tmp_path: Path) -> None:
    """A chat template that is mended in its place: the workers read it when they restart, and so does the router."""
    write_tokenizer(tmp_path, 1024, 4096)
    card = {"id": "base", "owned_by": "vllm", "root": str(tmp_path)}

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001, sources_s=0.001)
        page.answers["/v1/models"] = (200, json.dumps({"data": [card]}))
        async with watching(page, config, feed_of()) as (fleet, core, name):
            with ThreadPoolExecutor(1) as executor:
                tokenizers = fleet._context.checkpoints._tokenizers = ModelTokenizers(
                    executor, ConversationReader(0), None
                )
                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: tokenizers.get("base") is not None)
                old_tokenizer = tokenizers.get("base")
                write_tokenizer(tmp_path, 2048, 4096)
                adapter = {"id": "sql", "owned_by": "vllm", "parent": "base"}
                page.answers["/v1/models"] = (200, json.dumps({"data": [card, adapter]}))
                await wait_until(lambda: "sql" in core.workers[name].models)
                await page.wait_for_requests("/metrics", 3)
                assert tokenizers.get("base") is old_tokenizer, "the worker has read the old files"
                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: tokenizers.get("base") not in (None, old_tokenizer))
                assert tokenizers.loaded_by_model["base"].checkpoint == find_checkpoint(str(tmp_path))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_tokenizer_is_kept_while_the_worker_has_neither_it_nor_the_files_of_today(tmp_path: Path) -> None:
    """Files that are replaced twice in a rolling restart: they would be read anew at each probe, for nothing."""
    write_tokenizer(tmp_path, 1024, 4096)
    card = {"id": "base", "owned_by": "vllm", "root": str(tmp_path)}

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001, sources_s=0.001)
        page.answers["/v1/models"] = (200, json.dumps({"data": [card]}))
        async with watching(page, config, feed_of()) as (fleet, core, name):
            with ThreadPoolExecutor(1) as executor:
                tokenizers = fleet._context.checkpoints._tokenizers = ModelTokenizers(
                    executor, ConversationReader(0), None
                )
                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: tokenizers.get("base") is not None)
                old_tokenizer, monitor = tokenizers.get("base"), fleet._monitors[name]
                write_tokenizer(tmp_path, 2048, 4096)
                between = find_checkpoint(str(tmp_path))
                assert between is not None
                write_tokenizer(tmp_path, 3072, 4096)
                monitor.checkpoint_by_model = {"base": between}
                await page.wait_for_requests("/metrics", 3)
                assert tokenizers.get("base") is old_tokenizer
                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: tokenizers.get("base") not in (None, old_tokenizer))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_checkpoint_that_comes_to_this_machine_after_its_workers_have_started_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1024, 4096)
    later = tmp_path / "later"

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001, starting_s=0.001, sources_s=0.001)

        def serve(folder: Path) -> None:
            card = {"id": "base", "owned_by": "vllm", "root": str(folder)}
            page.answers["/v1/models"] = (200, json.dumps({"data": [card]}))

        serve(tmp_path)
        async with watching(page, config, feed_of()) as (fleet, core, name):
            with ThreadPoolExecutor(1) as executor:
                tokenizers = fleet._context.checkpoints._tokenizers = ModelTokenizers(
                    executor, ConversationReader(0), None
                )
                core.mark_worker_down(name, asyncio.get_running_loop().time(), "restarts")
                await wait_until(lambda: tokenizers.get("base") is not None)
                old_tokenizer = tokenizers.get("base")
                serve(later)
                await page.wait_for_requests("/metrics", 3)
                assert tokenizers.get("base") is old_tokenizer, "the other one is not here"
                copying = tmp_path / "copying"
                copying.mkdir()
                write_tokenizer(copying, 2048, 4096)
                copying.rename(later)
                await wait_until(lambda: tokenizers.get("base") not in (None, old_tokenizer))
                assert tokenizers.loaded_by_model["base"].checkpoint.folder == str(later)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_worker_may_announce_hangs_on_its_cache() -> None:
    def extra_blocks_max(**spec_fields: Any) -> int:
        return compute_max_blocks(WorkerSpec("w", "http://w", (ServedModel("m", "m"),), **spec_fields)) - BLOCKS_MIN

    assert extra_blocks_max() == BLOCKS_MAX_DEFAULT - BLOCKS_MIN
    assert (
        extra_blocks_max(cache_tokens=1600)
        == extra_blocks_max(cache_tokens=1600, block_size=528)
        == 100 * BLOCKS_FACTOR
    )
    assert extra_blocks_max(cache_tokens=1600, block_size=1) == 1600 * BLOCKS_FACTOR
    assert extra_blocks_max(cache_tokens=1600, host_tokens=3200, ranks=3) == 100 * BLOCKS_FACTOR
    assert compute_streams_max(20_000) < 20_000 // 4
    assert compute_streams_max(1) == 1


def test_workers_with_the_names_of_a_model_in_another_order_are_told(caplog: Any) -> None:
    """A rolling rename: requests for the old name are counted under one of the two first names."""

    async def run() -> None:
        page, config = Page(), FleetConfig(health_s=0.001)
        async with watching(page, config, feed_of()) as (_, core, name):
            core.add_worker(WorkerSpec("old", "http://old", (ServedModel("llama", "llama"),)), 0.0)
            page.answers["/v1/models"] = 200, json.dumps({"data": [{"id": "llama-3.1"}, {"id": "llama"}]})
            await wait_until(lambda: "llama" in core.workers[name].models)
            expected = f"worker {name}: lists llama as a name of llama-3.1, and old as one of llama"
            await wait_until(lambda: expected in caplog.text)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_models_are_looked_at_with_the_health_check() -> None:
    """An adapter comes and goes; another process takes the worker's place."""

    async def run() -> None:
        page = Page()
        async with watching(page, FleetConfig(health_s=0.001), feed_of()) as (_, core, name):
            for names in (["base", "tuned"], ["base"], ["other"], ["other", "other-2"]):
                page.names = names
                await wait_until(lambda names=names: sorted(core.workers[name].models) == names)
            page.names = ["base"]
            page.status = 503
            request_count = page.request_counts["/v1/models"]
            await wait_until(lambda: page.request_counts["/v1/models"] > request_count + 3)
            assert sorted(core.workers[name].models) == ["other", "other-2"], "it does not say: as before"
            page.names, page.status = [], 200
            request_count = page.request_counts["/v1/models"]
            await wait_until(lambda: page.request_counts["/v1/models"] > request_count + 3)
            assert sorted(core.workers[name].models) == ["other", "other-2"]

    asyncio.run(run())


def test_a_client_that_asks_for_an_unknown_model_has_workers_asked_but_not_every_time() -> None:
    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            page.names = ["base", "tuned"]
            await asyncio.gather(*(fleet.discover_model("tuned") for _ in range(100)))
            assert core.resolve_model("tuned") == ServedModel("tuned", "base", lora="tuned")
            request_count = page.request_counts["/v1/models"]
            assert request_count <= 4, "joined, looked for, joined again"
            page.names.append("later")
            for _ in range(100):
                await fleet.discover_model("later")
            assert page.request_counts["/v1/models"] == request_count
            fleet._discovered_s = -1e9  # a while later
            assert await fleet.discover_model("nonsense") == 0
            assert core.resolve_model("later") is not None
            fleet.add({"url": "http://127.0.0.1:1"})
            assert await fleet.discover_model("nonsense") == 1, "it was never reached, and may serve it"
            fleet._monitors["127.0.0.1:1"].configured_s -= 3600.0
            assert await fleet.discover_model("nonsense") == 0, "it does not start any more: the name is a mistake"
            fleet.remove(name)
            assert await fleet.discover_model("base") == 1, "no worker was reached, so nobody knows the models"
            assert not core.workers

    asyncio.run(run())


def test_a_list_that_names_a_worker_again_has_it_checked_only_if_it_is_not_up() -> None:
    """A change of one endpoint names all others of its list again: 200 workers are not probed for it."""

    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            monitor = fleet._monitors[name]
            fleet.watch(monitor.settings, origin="service vllm")
            assert not monitor.wake.is_set()
            core.mark_worker_down(name, 0.0, "a fault")
            fleet.watch(monitor.settings, origin="service vllm")
            await wait_until(lambda: core.workers[name].state is WorkerState.UP)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_that_is_removed_while_it_is_asked_is_counted_no_more() -> None:
    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, _, name):
            page.answers["/v1/models"] = None
            asking = asyncio.create_task(fleet.discover_model("unknown"))
            await page.wait_for_requests("/v1/models", 1)
            fleet.remove(name)
            await asking
            assert not fleet.failed_checks

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_list_that_was_not_read_yet_may_have_workers(monkeypatch: Any) -> None:
    """The router let clients in before it had looked, and answered their first requests with 503."""

    async def run() -> None:
        listed = asyncio.Event()

        async def watch(*arguments: Any) -> None:
            await listed.wait()
            arguments[-1]({} if isinstance(arguments[0], KubernetesSource) else [])
            await asyncio.sleep(3600)

        monkeypatch.setattr(membership, "watch_kubernetes", watch)
        monkeypatch.setattr(membership, "watch_host_name", watch)
        for follow in (
            lambda fleet: fleet.follow_kubernetes(KubernetesSource.parse("vllm")),
            lambda fleet: fleet.follow_name(parse_worker_flag("http://engines:8000")),
        ):
            listed.clear()
            fleet = fleet_of(RecordingProber(), RARELY)
            assert not fleet.has_unprobed_worker()
            follow(fleet)
            await asyncio.sleep(0.01)
            assert fleet.has_unprobed_worker()
            listed.set()
            await asyncio.sleep(0.01)
            assert not fleet.has_unprobed_worker()
            await fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_work_that_goes_well_for_a_while_is_soon_begun_again(monkeypatch: Any) -> None:
    """A balancer that cut each watch of Kubernetes after 20 s let the router see new pods a minute late."""
    pauses: list[float] = []
    now_s = 0.0

    async def work() -> None:
        nonlocal now_s
        now_s += 20.0 if len(pauses) > 9 else 0.0
        raise FetchError("cut off")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            raise asyncio.CancelledError

    monkeypatch.setattr(retries.asyncio, "sleep", sleep)
    monkeypatch.setattr(retries.time, "monotonic", lambda: now_s)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_forever(work, lambda _: None))
    assert pauses[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert pauses[10:] == [1.0] * 10


def test_a_change_of_a_list_hastens_no_probe_of_its_other_workers() -> None:
    """Pods that come and go changed a list many times a second, and each change asked all workers that are down."""

    async def run() -> None:
        prober = RecordingProber()
        fleet = fleet_of(prober, RARELY)
        listed: dict[str, bool] = {}
        for number in range(3):
            listed[f"10.0.0.{number}:1"] = True
            fleet._apply_endpoints("vllm", listed)
            assert await prober.workers.get() == f"10.0.0.{number}:1"
            await asyncio.sleep(0.1)  # it waits now
        assert prober.workers.empty()
        await fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_two_ports_of_one_name_are_two_lists(monkeypatch: Any) -> None:
    """Neither list removes the workers of the other: pods with an engine at each of two ports, two namespaces."""

    def list_addresses(_: str, port: int, **__: Any) -> Any:
        return [(None, None, None, "", (host, port)) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "fe80::1")]

    async def watch_pods(source: KubernetesSource, update: Callable[[dict[str, bool]], None]) -> None:
        for _ in range(3):
            update({f"10.0.{len(source.namespace or '')}.1:{source.port}": True})
            await asyncio.sleep(0.01)

    monkeypatch.setattr("router.fleet.membership.watch_kubernetes", watch_pods)

    async def run() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", list_addresses)
        removed_ids: list[str] = []
        fleet = fleet_of(RecordingProber(), dataclasses.replace(RARELY, names_s=0.01))

        fleet.remove = removed_ids.append  # type: ignore[method-assign]
        for port in (8000, 8001):
            fleet.follow_name(parse_worker_flag(f"http://engines:{port}"))
            fleet.follow_kubernetes(KubernetesSource.parse(f"ab/service/vllm:{port}"))
        fleet.follow_kubernetes(KubernetesSource.parse("abc/service/vllm:8000"))
        await asyncio.sleep(0.2)
        assert len(fleet._monitors) == 6 + 3
        assert removed_ids == []
        await fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("operator_drains", ["never", "before", "meanwhile"])
def test_a_pod_that_is_ready_again_takes_requests_unless_an_operator_drained_it(operator_drains: str) -> None:
    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            fleet._monitors[name].settings = parse_worker_flag(f"http://{name}")

            def is_drained_if(ready: bool) -> bool:
                fleet._apply_endpoints("service/vllm", {name: ready})
                return core.workers[name].is_drained

            assert not is_drained_if(ready=True)
            if operator_drains == "before":
                fleet.drain(name, is_draining=True)
            assert is_drained_if(ready=False)
            drained_by = (
                "drained by an operator" if operator_drains == "before" else "not ready in Kubernetes (service/vllm)"
            )
            assert core.workers[name].state_reason == drained_by
            if operator_drains == "meanwhile":
                fleet.drain(name, is_draining=True)
            assert is_drained_if(ready=False)
            assert is_drained_if(ready=True) is (operator_drains != "never")
            fleet.drain(name, is_draining=False)
            assert is_drained_if(ready=False)
            assert not is_drained_if(ready=True)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_pod_that_an_operator_takes_back_stays_so_until_its_readiness_changes() -> None:
    async def run() -> None:
        async with watching(Page(), RARELY_HEALTH, feed_of()) as (fleet, core, name):
            fleet._monitors[name].settings = parse_worker_flag(f"http://{name}")
            fleet._apply_endpoints("service/vllm", {name: False})
            fleet.drain(name, is_draining=False)
            fleet._apply_endpoints("service/vllm", {name: False, "10.0.0.2:8000": False})
            assert not core.workers[name].is_drained
            for is_ready in (True, False):
                fleet._apply_endpoints("service/vllm", {name: is_ready})
                assert core.workers[name].is_drained is not is_ready

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_pod_of_two_lists_is_drained_while_one_of_them_says_that_it_is_not_ready() -> None:
    async def run() -> None:
        async with watching(Page(), RARELY_HEALTH, feed_of()) as (fleet, core, name):
            fleet._monitors[name].settings = parse_worker_flag(f"http://{name}")
            for origin in ("service/a", "pool/b"):
                fleet._apply_endpoints(origin, {name: False})
            fleet._apply_endpoints("pool/b", {name: True})
            assert core.workers[name].is_drained
            fleet._apply_endpoints("pool/b", {name: False})
            fleet._apply_endpoints("service/a", {})
            assert core.workers[name].is_drained
            fleet._apply_endpoints("pool/b", {name: True})
            assert not core.workers[name].is_drained

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_pod_that_an_operator_removed_is_drained_as_any_when_it_is_back() -> None:
    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            fleet._monitors[name].settings = parse_worker_flag(f"http://{name}")
            fleet._apply_endpoints("service/vllm", {name: False})
            fleet.remove(name)
            fleet._apply_endpoints("service/vllm", {name: True})
            await wait_until(lambda: name in core.workers)
            assert not core.workers[name].is_drained
            fleet._apply_endpoints("service/vllm", {name: False})
            assert core.workers[name].is_drained

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_stays_until_no_list_names_it() -> None:
    async def run() -> None:
        fleet, settings = fleet_of(RecordingProber(), RARELY), parse_worker_flag("http://a:1")
        removed_ids: list[str] = []
        fleet.remove = removed_ids.append  # type: ignore[method-assign]
        for origin in ("service a", "service b"):
            fleet._update_origin(origin, [settings])
        fleet._update_origin("service a", [])
        assert removed_ids == []
        fleet._update_origin("service b", [])
        assert removed_ids == ["a:1"]
        await fleet.close()

    asyncio.run(run())


def test_a_workers_file_counts_when_it_is_written_to_its_end(monkeypatch: Any, tmp_path: Path) -> None:
    """An operator's editor or script may write it in steps, and each step would remove workers that stay."""
    path = tmp_path / "workers"
    path.write_text("http://a:1\nhttp://b:1\n")
    texts = iter(["", "http://a:1\nhttp://b", "http://a:1\nhttp://b:1\nhttp", "http://a:1\nhttp://b:1\nhttp://c:1\n"])

    async def write_more(_: float) -> None:
        text = next(texts, None)
        if text is not None:
            path.write_text(text)
        elif lists and len(lists[-1]) == 3:
            raise asyncio.CancelledError

    lists: list[list[str]] = []
    monkeypatch.setattr(worker_lists, "asyncio", SimpleNamespace(sleep=write_more))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            worker_lists.watch_file(path, lambda workers: lists.append([settings.worker_id for settings in workers]))
        )
    assert lists == [["a:1", "b:1", "c:1"]]


@pytest.mark.parametrize("reason", ["No such file", "Is a directory", "is empty"])
def test_the_log_says_why_a_workers_file_is_not_applied(
    reason: str, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    path = tmp_path / "workers"
    path.write_text("http://a:1\n")
    waits = itertools.count()

    async def spoil(_: float) -> None:
        wait = next(waits)
        if wait == 3:
            path.unlink()
            if reason == "Is a directory":
                path.mkdir()
            elif reason == "is empty":
                path.touch()
        elif wait == 6:
            raise asyncio.CancelledError

    monkeypatch.setattr(worker_lists, "asyncio", SimpleNamespace(sleep=spoil))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(worker_lists.watch_file(path, lambda flags: None))
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_an_emptied_workers_file_keeps_its_workers_and_a_comment_removes_them(monkeypatch: Any, tmp_path: Path) -> None:
    """A script that fails after it has opened the file, or a full disk, leaves it empty."""
    path = tmp_path / "workers"
    path.write_text("http://a:1\n")
    waits = itertools.count()
    steps = iter(["http://a:1\n", "", None, "http://a:1\nhttp://b:1\n", "# none\n"])

    async def take_steps(_: float) -> None:
        if next(waits) % 3:
            return  # each step is seen twice
        try:
            text = next(steps)
        except StopIteration:
            raise asyncio.CancelledError from None
        path.unlink() if text is None else path.write_text(text)

    lists: list[list[str]] = []
    monkeypatch.setattr(worker_lists, "asyncio", SimpleNamespace(sleep=take_steps))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            worker_lists.watch_file(path, lambda workers: lists.append([settings.worker_id for settings in workers]))
        )
    assert lists == [["a:1"], ["a:1", "b:1"], []]


def test_a_workers_file_written_anew_is_applied_although_its_content_is_the_same(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """Whoever writes it expects its workers to be there, also those that `DELETE /workers` has removed meanwhile."""
    path = tmp_path / "workers"
    path.write_text("http://a:1\n")
    waits = itertools.count()

    async def write_anew(_: float) -> None:
        wait = next(waits)
        if wait == 3:
            path.write_text("http://a:1\n")
            os.utime(path, (5, 5))  # a clock may be too coarse to tell two writes apart
        elif wait == 9:
            raise asyncio.CancelledError

    lists: list[list[str]] = []
    monkeypatch.setattr(worker_lists, "asyncio", SimpleNamespace(sleep=write_anew))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            worker_lists.watch_file(path, lambda workers: lists.append([settings.worker_id for settings in workers]))
        )
    assert lists == [["a:1"], ["a:1"]]


def test_one_that_is_removed_while_it_is_looked_at_stays_away() -> None:
    async def run() -> None:
        page = Page()
        async with watching(page, RARELY_HEALTH, feed_of()) as (fleet, core, name):
            page.names = ["base", "tuned"]
            monitor = fleet._monitors[name]
            looking = asyncio.create_task(monitor.probe_and_register())
            await asyncio.sleep(0)
            fleet.remove(name)
            assert not await looking
            assert name not in core.workers

    asyncio.run(run())


def sleep_state(awake: int, engine: int = 0) -> str:
    """What vLLM's page says of an engine."""
    labels = [f'engine="{engine}",model_name="base",sleep_state="{kind}"' for kind in ("awake", "weights_offloaded")]
    return "".join(
        f"vllm:{name} {value}\n"
        for name, value in (
            (f'num_requests_running{{engine="{engine}"}}', 0.0),
            (f'num_requests_waiting{{engine="{engine}"}}', 0.0),
            (f"engine_sleep_state{{{labels[0]}}}", float(awake)),
            (f"engine_sleep_state{{{labels[1]}}}", float(not awake)),
        )
    )


def test_a_worker_that_sleeps_gets_nothing_until_it_is_awake() -> None:
    async def run() -> None:
        page, cleared_workers = Page(), list[str]()
        page.metrics = sleep_state(1)
        config = FleetConfig(health_s=0.001, loads_s=0.001)
        async with watching(page, config, feed_of(clear_worker=cleared_workers.append)) as (fleet, core, name):
            worker = core.workers[name]
            await wait_until(lambda: core.snapshot(0.0).workers[0]["engine_load"])
            assert (worker.state, cleared_workers) == (WorkerState.UP, [])
            page.metrics = sleep_state(0)
            await wait_until(lambda: worker.state is WorkerState.SLEEPING)
            assert cleared_workers == [name]
            refusal = core.route(request("r", [1, 2, 3], model="base"), 0.0)
            assert isinstance(refusal, Refuse)
            assert (refusal.status, refusal.message) == (503, "No worker of model 'base' is up: 1 sleeping.")
            page.metrics = ""  # it does not answer: as before
            request_count = page.request_counts["/metrics"]
            await wait_until(lambda: page.request_counts["/metrics"] > request_count + 3)
            assert worker.state is WorkerState.SLEEPING
            page.metrics = sleep_state(1)
            await wait_until(lambda: worker.state is WorkerState.UP)
            assert cleared_workers == [name, name], "what came meanwhile is not believed either"
            fleet.drain(name, is_draining=True)
            page.metrics = sleep_state(0)
            await wait_until(lambda: worker.is_asleep)
            assert worker.state is WorkerState.DRAINING
            fleet.drain(name, is_draining=False)
            assert worker.state is WorkerState.SLEEPING
            core.mark_worker_down(name, 0.0, "gone")
            assert worker.state is WorkerState.DOWN

    asyncio.run(run())


def test_what_an_awake_engine_stored_for_another_router_is_kept() -> None:
    """Its load is read every few seconds: by then it may have published that it was empty, and computed prompts."""

    async def run() -> None:
        page, cleared_workers, clear_count = Page(), list[str](), 7
        page.metrics = sleep_state(1)
        feed = feed_of(clear_worker=cleared_workers.append, count_clears=lambda _: clear_count)
        config = FleetConfig(health_s=0.001, loads_s=0.001)
        async with watching(page, config, feed) as (_, core, name):
            for expected_clears in (1, 2):
                page.metrics = sleep_state(0)
                await wait_until(lambda: core.workers[name].state is WorkerState.SLEEPING)
                clear_count += 1
                page.metrics = sleep_state(1)
                await wait_until(lambda: core.workers[name].state is WorkerState.UP)
                assert cleared_workers == [name] * expected_clears, "when it fell asleep alone"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_that_joins_asleep_sleeps() -> None:
    async def run() -> None:
        page = Page()
        page.metrics = sleep_state(0)
        async with watching(page, RARELY_HEALTH, feed_of()) as (_, core, name):
            assert core.workers[name].state is WorkerState.SLEEPING

    asyncio.run(run())
