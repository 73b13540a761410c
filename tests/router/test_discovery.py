"""What workers say about themselves, and what operators write."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from events.errors import DecodeError
from router.decide.config import ConfigError
from router.decide.workers import CacheView, ServedModel
from router.fleet.discovery import (
    Prober,
    WorkerFacts,
    parse_worker_flag,
    read_block_size,
    read_cache_capacity,
    read_models,
    worker_spec,
)


def test_a_plain_url_is_enough() -> None:
    flag = parse_worker_flag("gpu1:8000/")
    assert (flag.url, flag.worker_id) == ("http://gpu1:8000", "gpu1:8000")
    assert parse_worker_flag("http://[::1]:8000").worker_id == "[::1]:8000"


def test_everything_can_be_given() -> None:
    flag = parse_worker_flag(
        "url=http://a:1,events=tcp://a:2;tcp://a:3,replay=tcp://a:4;tcp://a:5,topic=kv,id=w,roles=x;y,cache_tokens=9"
    )
    assert flag.events == ("tcp://a:2", "tcp://a:3")
    assert flag.replay == ("tcp://a:4", "tcp://a:5")
    assert (flag.topic, flag.worker_id, flag.roles, flag.cache_tokens) == ("kv", "w", frozenset("xy"), 9)
    assert parse_worker_flag("url=http://a:1,events=none").no_events
    assert parse_worker_flag("url=http://a:1,reannounce=1").reannounces
    assert not parse_worker_flag("url=http://a:1,reannounce=0").reannounces


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("url=http://a:1,evnts=tcp://a:2", "evnts"),
        ("events=tcp://a:2", "url="),
        ("url=ftp://a", "ftp://a"),
        ("url=http://a:99999999", "99999999"),
        ("url=http://a,events=a:5", "a:5"),
        ("url=http://a,events=tcp://a:5,replay=tcp://a:6;tcp://a:7", "2 replay"),
        ("url=http://a,cache_tokens=-3", "-3"),
        ("url=http://a,url=http://b", "twice"),
        ("url=http://a,reannounce=yes", "reannounce='yes'"),
    ],
)
def test_a_bad_flag_says_which_part(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names.replace("[", r"\[")):
        parse_worker_flag(text)


def test_loras_and_aliases_share_the_first_names_cache() -> None:
    cards = [
        {"id": "base", "root": "org/base", "max_model_len": 4096},
        {"id": "alias", "root": "org/base", "max_model_len": 4096},
        {"id": "tuned", "root": "/loras/t", "parent": "alias"},
        {"nonsense": 1},
    ]
    assert read_models(json.dumps({"data": cards}).encode()) == (
        ServedModel("base", "base", max_model_len=4096),
        ServedModel("alias", "base", max_model_len=4096),
        ServedModel("tuned", "base", lora="tuned", max_model_len=4096),
    )
    for bad in (b"[]", b"{", b'{"data": 3}'):
        with pytest.raises(DecodeError, match="/v1/models"):
            read_models(bad)


def test_capacity_from_metrics() -> None:
    text = '# HELP x\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\nother 3\n'
    assert read_cache_capacity(text) == 16_000
    assert read_cache_capacity('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0') is None


def test_block_size_from_metrics() -> None:
    """Labels as vLLM 0.32 writes them; on a hybrid model the attention block is longer than asked for."""
    line = (
        'vllm:cache_config_info{_block_size_resolved="True",block_size="32",effective_attention_block_size="%s"} 1.0\n'
    )
    assert read_block_size("# HELP vllm:cache_config_info x\n" + line % 32) == 32
    assert read_block_size(line % 528) == 528
    assert read_block_size(line.replace("32", "None") % "None") is None
    assert read_block_size("") is None


async def serve(routes: dict[str, tuple[int, str]]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    for path, (status, text) in routes.items():

        def handler(request: web.Request, status: int = status, text: str = text) -> web.Response:
            return web.Response(status=status, text=text)

        async def route(request: web.Request, handler=handler) -> web.Response:  # type: ignore[no-untyped-def]
            return handler(request)

        app.router.add_get(path, route)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def probe(routes: dict[str, tuple[int, str]], flag: str = "url={url}") -> tuple[WorkerFacts, str]:
    async def run() -> tuple[WorkerFacts, str]:
        runner, url = await serve(routes)
        async with aiohttp.ClientSession() as session:
            facts = await Prober(session, timeout_s=2).probe(parse_worker_flag(flag.format(url=url)))
        await runner.cleanup()
        return facts, url

    return asyncio.run(run())


MODELS = (200, json.dumps({"data": [{"id": "m", "max_model_len": 100}]}))


def test_a_worker_with_sources_is_followed_by_events() -> None:
    sources = [{"data_parallel_rank": r, "endpoint": f"tcp://*:{7000 + r}", "epoch": "e", "extra": 1} for r in (0, 1)]
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'
    facts, url = probe(
        {"/v1/models": MODELS, "/kv_event_sources": (200, json.dumps(sources)), "/metrics": (200, metrics)}
    )
    assert facts.alive
    assert [s.endpoint for s in facts.sources] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]
    assert facts.epochs == ("e", "e")
    spec = worker_spec(parse_worker_flag(url), facts)
    assert (spec.ranks, spec.cache_view, spec.cache_tokens) == (2, CacheView.EVENTS, 1600)


def test_a_worker_without_events_is_followed_by_history_at_its_capacity() -> None:
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'
    facts, url = probe({"/v1/models": MODELS, "/metrics": (200, metrics)}, "url={url},events=none")
    spec = worker_spec(parse_worker_flag(f"url={url}"), facts)
    assert (spec.cache_view, spec.cache_tokens) == (CacheView.HISTORY, 1600)


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ({"/v1/models": (500, "no")}, "answers 500"),
        ({"/v1/models": (200, "{}")}, "data"),
        ({"/v1/models": (200, '{"data": []}')}, "lists no model"),
        ({"/v1/models": MODELS, "/kv_event_sources": (200, "nonsense")}, "kv_event_sources"),
    ],
)
def test_what_is_wrong_is_said(routes: dict[str, tuple[int, str]], reason: str) -> None:
    facts, _ = probe(routes)
    assert not facts.alive
    assert reason in facts.reason


def test_nobody_there() -> None:
    async def run() -> WorkerFacts:
        async with aiohttp.ClientSession() as session:
            return await Prober(session, timeout_s=1).probe(parse_worker_flag("http://127.0.0.1:1"))

    facts = asyncio.run(run())
    assert not facts.alive
    assert facts.reason


@pytest.mark.parametrize(
    ("flag", "advertised", "expected"),
    [("", False, False), ("", True, True), (",reannounce=1", False, True), (",reannounce=0", True, True)],
)
def test_who_repeats_its_stores(flag: str, advertised: bool, expected: bool) -> None:
    """The worker may tell, and the operator; either is enough."""
    source = {"endpoint": "tcp://*:7000", "reannounces": advertised}
    routes = {"/v1/models": (200, '{"data": [{"id": "m"}]}'), "/kv_event_sources": (200, json.dumps({"0": source}))}
    facts, _ = probe(routes, "url={url}" + flag)
    assert [source.reannounces for source in facts.sources] == [expected]


def test_given_endpoints_can_repeat_their_stores_too() -> None:
    routes = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
    facts, _ = probe(routes, "url={url},events=tcp://a:1,reannounce=1")
    assert [source.reannounces for source in facts.sources] == [True]
