"""What workers say about themselves, and what operators write."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from events.types import DecodeError
from options import ConfigError
from prompts.tokenizer import find_checkpoint_folder
from router.decide.messages import TransferKind
from router.decide.workers import KINDS_BY_DIALECT, NO_TRANSFERS, CacheView, ServedModel, WorkerSpec
from router.fleet.prober import Prober, WorkerFacts, suggest_remedy
from router.fleet.worker_responses import (
    MODELS_MAX,
    OBJECTS_MAX,
    EngineSizes,
    read_engine_sizes,
    read_models,
    read_server_info,
    read_sources,
)
from router.fleet.worker_settings import parse_worker_flag
from router.http_client import FetchError
from router.prompting.model_tokenizers import RemoteTokenizer


def test_a_plain_url_is_enough() -> None:
    flag = parse_worker_flag("gpu1:8000/")
    assert (flag.url, flag.worker_id) == ("http://gpu1:8000", "gpu1:8000")
    assert parse_worker_flag("http://[::1]:8000").worker_id == "[::1]:8000"


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"id":[]}'])
def test_more_lists_and_objects_than_a_list_of_models_has_are_not_built(item: bytes) -> None:
    assert 3 * MODELS_MAX < OBJECTS_MAX
    items = b"[" + b",".join([item] * OBJECTS_MAX) + b"]"
    for read, body in (
        (read_models, b'{"data":%b}' % items),
        (read_server_info, b'{"x":%b}' % items),
        (lambda body: read_sources(body, "http://a:1"), items),
    ):
        with pytest.raises(DecodeError, match="lists and objects"):
            read(body)


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


def test_a_worker_without_an_address_is_told_whole() -> None:
    flag = parse_worker_flag("model=qwen,root=/m/qwen,events=tcp://a:2,replay=tcp://a:3,block_size=16,id=replica")
    assert (flag.url, flag.model, flag.root, flag.block_size) == ("", "qwen", "/m/qwen", 16)
    facts = probe({}, "model=qwen,root=/m/qwen,events=tcp://a:2,replay=tcp://a:3,block_size=16,id=replica")
    assert facts.spec.models == (ServedModel("qwen", "qwen"),)
    assert (facts.sources[0].endpoint, facts.sources[0].replay_endpoint) == ("tcp://a:2", "tcp://a:3")
    assert (facts.spec.block_size, facts.roots) == (16, {"qwen": "/m/qwen"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model=m,url=http://a", "model= and url="),
        ("model=m,events=tcp://a:1", "id= is missing"),
        ("model=m,id=w", "events= is missing"),
        ("block_size=16,events=tcp://a:1,id=w", "model= is missing"),
        ("model=m,events=none,id=w", "events='none'"),
        ("model=m,events=tcp://a:1,id=w,block_size=0", "block_size='0'"),
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
    assert read_models(json.dumps({"data": cards}).encode()).models == (
        ServedModel("base", "base", max_model_len=4096),
        ServedModel("alias", "base", max_model_len=4096),
        ServedModel("tuned", "base", lora="tuned", max_model_len=4096),
    )
    for bad in (b"[]", b"{", b'{"data": 3}'):
        with pytest.raises(DecodeError, match="/v1/models"):
            read_models(bad)


@pytest.mark.parametrize(
    ("owner", "engine"), [("vllm", "vllm"), ("vllm-frontend-rs", "vllm"), ("sglang", "sglang"), (None, ""), (3, "")]
)
def test_an_engine_has_one_name_whatever_its_frontend(owner: object, engine: str) -> None:
    assert read_models(json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()).engine == engine


def test_capacity_from_metrics() -> None:
    text = '# HELP x\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\nother 3\n'
    assert read_engine_sizes(text).cache_tokens == 16_000
    assert read_engine_sizes(text, reserved_blocks=1).cache_tokens == 15_984, "vLLM keeps a block for itself"
    assert read_engine_sizes('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0').cache_tokens is None
    assert read_engine_sizes(text).host_tokens is None
    assert read_engine_sizes(text.replace('engine="0"', 'num_cpu_blocks="70"')).host_tokens == 1120


def test_block_size_from_metrics() -> None:
    """Labels as vLLM 0.32 writes them; on a hybrid model the attention block is longer than asked for."""
    line = (
        'vllm:cache_config_info{_block_size_resolved="True",block_size="32",effective_attention_block_size="%s"} 1.0\n'
    )
    assert read_engine_sizes("# HELP vllm:cache_config_info x\n" + line % 32).block_size == 32
    assert read_engine_sizes(line % 528).block_size == 528
    assert read_engine_sizes(line.replace("32", "None") % "None").block_size is None
    assert read_engine_sizes("").block_size is None


def test_limits_of_a_step_from_metrics() -> None:
    line = 'vllm:cache_config_info{block_size="16",max_num_seqs="%s",max_num_batched_tokens="%s"} 1.0\n'
    sizes = read_engine_sizes(line % (64, 256))
    assert (sizes.max_num_seqs, sizes.step_tokens) == (64, 256)
    assert read_engine_sizes(line % (64, 256) + line % (64, 128)).step_tokens == 128, "of several ranks the least"
    for text in (line % ("None", "None"), line % (0, 0), line % (-1, "9" * 20), 'cache_config_info{block_size="16"} 1'):
        sizes = read_engine_sizes(text)
        assert (sizes.max_num_seqs, sizes.step_tokens) == (None, None)


def test_limits_of_a_step_reach_the_core_unless_the_operator_knows_better() -> None:
    metrics = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="9",max_num_seqs="8",max_num_batched_tokens="64"} 1'
    )
    for flag, max_num_seqs in (("url={url},events=none", 8), ("url={url},events=none,max_num_seqs=5", 5)):
        spec = probe({"/v1/models": MODELS, "/metrics": (200, metrics)}, flag).spec
        assert (spec.max_num_seqs, spec.step_tokens) == (max_num_seqs, 64)


def test_sglang_tells_its_sizes() -> None:
    for chunk, step_tokens in ((4096, 4096), (-1, None), (None, None), ("x", None)):
        info = json.dumps({"max_total_num_tokens": 700, "chunked_prefill_size": chunk})
        spec = probe({"/v1/models": MODELS, "/server_info": (200, info)}, "url={url},events=none").spec
        assert (spec.cache_tokens, spec.step_tokens) == (700, step_tokens)


def sglang_info(**publisher: Any) -> str:
    """Answer of SGLang 0.5.23 with a publisher of two ranks; the router uses these fields."""
    described = {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000, "topic": "kv", "block_size": 64,
        "dp_size": 2, "replay_endpoint_port_base": 6100, "load_endpoint_port_base": 6200, "load_topic": "load",
    }  # fmt: skip
    return json.dumps({"max_total_num_tokens": 700, "dp_size": 2, "kv_events": described | publisher})


def test_sglang_tells_where_it_publishes() -> None:
    facts = probe({"/v1/models": MODELS, "/server_info": (200, sglang_info())})
    assert [(s.data_parallel_rank, s.endpoint, s.replay_endpoint, s.topic) for s in facts.sources] == [
        (0, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100", "kv"),
        (1, "tcp://127.0.0.1:6001", "tcp://127.0.0.1:6101", "kv"),
    ]
    spec = facts.spec
    assert (spec.ranks, spec.cache_view, spec.block_size, spec.cache_tokens) == (2, CacheView.EVENTS, 64, 1400)
    (source,) = probe(
        {"/v1/models": MODELS, "/server_info": (200, sglang_info(dp_size=1, replay_endpoint_port_base=None))}
    ).sources
    assert (source.endpoint, source.replay_endpoint) == ("tcp://127.0.0.1:6000", None)


@pytest.mark.parametrize(
    "info", ["nonsense", "[]", "{}", '{"kv_events": null}', "[" * 9999, sglang_info(dp_size=9999), sglang_info(topic=3)]
)
def test_sglang_without_a_readable_publisher_has_no_sources(info: str) -> None:
    assert probe({"/v1/models": MODELS, "/server_info": (200, info)}).sources == ()


@pytest.mark.parametrize("publisher", [{"endpoint_host": "10.1.2.3"}, {"endpoint_port_base": 65535}])
def test_sglang_may_publish_at_its_own_ports_only(publisher: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match=r"is not on|is no address"):
        probe({"/v1/models": MODELS, "/server_info": (200, sglang_info(**publisher))})


async def serve(routes: dict[str, tuple[int, str]]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    for path, (status, text) in routes.items():

        def handler(request: web.Request, status: int = status, text: str = text) -> web.Response:
            headers = {"Location": text} if status == 307 else None
            return web.Response(status=status, text=text, headers=headers)

        async def route(request: web.Request, handler=handler) -> web.Response:  # type: ignore[no-untyped-def]
            return handler(request)

        app.router.add_get(path, route)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def probe(
    routes: dict[str, tuple[int, str]],
    flag: str = "url={url}",
    known: WorkerFacts | None = None,
    **options: Any,
) -> WorkerFacts:
    async def run() -> WorkerFacts:
        runner, url = await serve(routes)
        try:
            async with aiohttp.ClientSession() as session:
                worker = parse_worker_flag(flag.format(url=url))
                return await Prober(session, timeout_s=2, **options).probe(worker, known)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


MODELS = (200, json.dumps({"data": [{"id": "m", "max_model_len": 100}]}))


def test_a_worker_with_sources_is_followed_by_events() -> None:
    sources = [{"data_parallel_rank": r, "endpoint": f"tcp://*:{7000 + r}", "epoch": "e", "extra": 1} for r in (0, 1)]
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'
    facts = probe({"/v1/models": MODELS, "/kv_event_sources": (200, json.dumps(sources)), "/metrics": (200, metrics)})
    assert [s.endpoint for s in facts.sources] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]
    assert [s.epoch for s in facts.sources] == ["e", "e"]
    spec = facts.spec
    assert (spec.ranks, spec.cache_view, spec.cache_tokens) == (2, CacheView.EVENTS, 1600)


def test_a_worker_without_events_is_followed_by_history_at_its_capacity() -> None:
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'
    facts = probe({"/v1/models": MODELS, "/metrics": (200, metrics)}, "url={url},events=none")
    spec = facts.spec
    assert (spec.cache_view, spec.cache_tokens) == (CacheView.APPROXIMATE, 1600)


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
    with pytest.raises((FetchError, DecodeError), match=re.escape(reason)):
        probe(routes)


def test_nobody_there() -> None:
    async def run() -> WorkerFacts:
        async with aiohttp.ClientSession() as session:
            return await Prober(session, timeout_s=1).probe(parse_worker_flag("http://127.0.0.1:1"))

    with pytest.raises(FetchError, match="cannot connect"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("flag", "is_advertised", "expected"),
    [("", False, False), ("", True, True), (",reannounce=1", False, True), (",reannounce=0", True, True)],
)
def test_who_repeats_its_stores(flag: str, is_advertised: bool, expected: bool) -> None:
    """The worker may tell, and the operator; either is enough."""
    source = {"endpoint": "tcp://*:7000", "reannounces": is_advertised}
    routes = {"/v1/models": (200, '{"data": [{"id": "m"}]}'), "/kv_event_sources": (200, json.dumps({"0": source}))}
    facts = probe(routes, "url={url}" + flag)
    assert [source.reannounces for source in facts.sources] == [expected]


def kv_offer(endpoint: str = "tcp://0.0.0.0:7001", bytes_per_token: int = 512) -> dict[str, Any]:
    return {"endpoint": endpoint, "group": "1fa8", "bytes_per_token": bytes_per_token}


def test_an_engine_says_where_peers_get_its_blocks() -> None:
    source = {"endpoint": "tcp://*:7000", "kv_transfer": kv_offer()}
    routes = {"/v1/models": MODELS, "/kv_event_sources": (200, json.dumps({"0": source}))}
    facts = probe(routes, kv_dialects={"blockcast"})
    transfer = facts.spec.transfer
    assert (transfer.dialect, transfer.group, transfer.kinds) == ("blockcast", "1fa8", {TransferKind.PULL})
    assert (transfer.address, transfer.bytes_per_token) == ("127.0.0.1:7001", 512)
    assert probe(routes, kv_dialects={"nixl"}).spec.transfer == NO_TRANSFERS, "a router without the fleet's key"


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (kv_offer("tcp://192.0.2.1:7001"), "is not on 127.0.0.1"),
        (kv_offer("ipc:///tmp/kv"), "no address of a peer"),
        (kv_offer("tcp://caf\u00e9:7001"), "is no address"),
        (kv_offer("tcp://*:70000"), "is no address"),
        (kv_offer(bytes_per_token=0), "Expected `int` >= 1 - at `$[...].kv_transfer.bytes_per_token`"),
        (kv_offer() | {"gb_s": -1.0}, "Expected `float` >= 0.0 - at `$[...].kv_transfer.gb_s`"),
        ({"endpoint": "tcp://*:7001"}, "missing required field"),
    ],
)
def test_a_wrong_address_for_peers_is_no_source(offer: dict[str, Any], reason: str) -> None:
    source = {"endpoint": "tcp://*:7000", "kv_transfer": offer}
    with pytest.raises(DecodeError, match=re.escape(reason)):
        probe({"/v1/models": MODELS, "/kv_event_sources": (200, json.dumps({"0": source}))})


@pytest.mark.parametrize(
    ("roles", "can_give", "can_take"),
    [("prefill", True, False), ("decode", False, True), ("prefill;decode", True, True), ("", True, True)],
)
def test_the_operator_says_that_a_worker_moves_kv(roles: str, can_give: bool, can_take: bool) -> None:
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'
    routes = {"/v1/models": MODELS, "/kv_event_sources": (404, ""), "/metrics": (200, metrics)}
    facts = probe(routes, "url={url},events=tcp://127.0.0.1:7000,kv=nixl,roles=" + roles, kv_dialects={"nixl"})
    transfer = facts.spec.transfer
    assert (transfer.dialect, transfer.kinds, transfer.group) == ("nixl", {TransferKind.PREFILL}, "nixl m 16")
    assert (transfer.can_give, transfer.can_take) == (can_give, can_take)


@pytest.mark.parametrize(
    ("flag", "address", "needs_partner"),
    [
        ("kv=sglang,roles=prefill", "127.0.0.1:8998", True),
        ("kv=sglang,roles=decode,bootstrap=h:9", "h:9", True),
        ("kv=p2p,bootstrap=[::1]:5711", "[::1]:5711", False),
    ],
)
def test_where_other_workers_meet_a_worker(flag: str, address: str, needs_partner: bool) -> None:
    routes = {"/v1/models": MODELS, "/kv_event_sources": (404, "")}
    facts = probe(routes, "url={url},events=none," + flag, kv_dialects={"sglang", "p2p"})
    assert (facts.spec.transfer.address, facts.spec.transfer.needs_partner) == (address, needs_partner)
    assert facts.spec.transfer.kinds == KINDS_BY_DIALECT[facts.spec.transfer.dialect]


@pytest.mark.parametrize(
    ("answer", "events", "engine_ids"),
    [
        ((200, '{"0": {"engine_id": "f00d", "worker_addr": {}}}'), "none", ("f00d",)),
        ((200, '{"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}'), "tcp://h:1;tcp://h:2", ("a", "b")),
        ((200, '{"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}'), "none", ()),
        ((200, '{"0": {"engine_id": "a"}}'), "tcp://h:1;tcp://h:2", ()),
        ((200, "{}"), "none", ()),
        ((200, '{"0": {"engine_id": 7}}'), "none", ()),
        ((404, ""), "none", ()),
    ],
)
def test_a_mooncake_worker_names_the_engines_of_its_ranks(
    answer: tuple[int, str], events: str, engine_ids: tuple[str, ...]
) -> None:
    """The bootstrap server is at the worker's own address here."""
    routes = {"/v1/models": MODELS, "/kv_event_sources": (404, ""), "/query": answer}

    async def run() -> WorkerFacts:
        runner, url = await serve(routes)
        flag = f"url={url},events={events},kv=mooncake,roles=prefill,bootstrap={url.removeprefix('http://')}"
        async with aiohttp.ClientSession() as session:
            facts = await Prober(session, timeout_s=2, kv_dialects={"mooncake"}).probe(parse_worker_flag(flag))
        await runner.cleanup()
        return facts

    facts = asyncio.run(run())
    assert facts.spec.transfer.dialect == "mooncake"
    assert (facts.spec.transfer.can_give, facts.spec.transfer.engine_ids) == (bool(engine_ids), engine_ids)


@pytest.mark.parametrize(
    "flag",
    [
        "kv=nixl,bootstrap=h:1", "kv=mooncake,bootstrap=h", "bootstrap=h:1", "kv=blockcast", "kv=p2p", "kv=sglang",
        "kv=sglang,roles=prefill;decode", "kv=p2p,bootstrap=http://h:1", "kv=p2p,bootstrap=::1:1",
        "kv=p2p,bootstrap=h:65536", "kv=p2p,bootstrap=h:0", "kv=p2p,bootstrap=tcp://*:5711",
        "kv=p2p,bootstrap=h:1\u0661",
    ],
)  # fmt: skip
def test_a_dialect_that_cannot_be_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"worker: (kv|bootstrap)="):
        parse_worker_flag(f"url=http://a:1,{flag}")


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
@pytest.mark.parametrize(
    ("endpoint", "is_own"),
    [
        ("tcp://*:7000", True),
        ("tcp://127.0.0.1:7000", True),
        ("tcp://localhost:7000", True),
        ("tcp://0.0.0.0:7000", True),
        ("tcp://127.0.0.2:7000", False),
        ("tcp://192.0.2.1:7000", False),
        ("tcp://no-such-host.invalid:7000", False),
        ("ipc:///tmp/socket", False),
        ("inproc://socket", False),
    ],
)
def test_event_endpoints_are_on_the_worker_s_own_host(field: str, endpoint: str, is_own: bool) -> None:
    sources = {"0": {"endpoint": "tcp://*:7001"}, "1": {"endpoint": "tcp://*:7002", field: endpoint}}
    routes = {"/v1/models": MODELS, "/kv_event_sources": (200, json.dumps(sources))}
    if is_own:
        assert len(probe(routes).sources) == 2
    else:
        with pytest.raises(DecodeError, match=f"rank 1: .*{re.escape(endpoint)}.*--trust-event-endpoints"):
            probe(routes)
    trusting_facts = probe(routes, trusts_endpoints=True)
    assert len(trusting_facts.sources) == 2
    operator_facts = probe(routes, "url={url},events=tcp://192.0.2.1:7000")
    assert operator_facts.sources, "an operator may name any"


def test_given_endpoints_can_repeat_their_stores_too() -> None:
    routes = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
    facts = probe(routes, "url={url},events=tcp://a:1,reannounce=1")
    assert [source.reannounces for source in facts.sources] == [True]


def source(**changes: object) -> str:
    group = {"group_idx": 0, "kind": "full", "block_size": 16}
    return json.dumps([{"endpoint": "tcp://*:7000", "groups": [group], **changes}])


HOSTILE = {
    "deep JSON": "[" * 100_000,
    "deep objects": '{"data":' * 50_000,
    "a wide object": "{" + ",".join(f'"{n}":0' for n in range(50_000)) + "}",
    "5,000 digits": '{"data":[{"id":"m","max_model_len":%s}]}' % ("9" * 5000),
    "a float": '{"data":[{"id":"m","max_model_len":1e300}]}',
    "a truth": '{"data":[{"id":"m","max_model_len":true}]}',
    "a lone surrogate": r'{"data":[{"id":"\ud800","root":"\udc00"}]}',
    "a zero byte": r'{"data":[{"id":"m","root":"\u0000"}]}',
    "a home of nobody": '{"data":[{"id":"m","root":"~nosuchuser/m"}]}',
    "a long root": '{"data":[{"id":"m","root":"%s"}]}' % ("r" * 100_000),
    "a name over two lines": r'{"data":[{"id":"m\n"}]}',
    "many models": json.dumps({"data": [{"id": f"m{n}"} for n in range(5000)]}),
    "a square": 'vllm:cache_config_info{block_size="\u00b2",num_gpu_blocks="\u0663"} 1.0',
    "digits": 'vllm:cache_config_info{block_size="%s",num_gpu_blocks="7"} 1.0' % ("9" * 5000),
    "one line of names": "cache_config_info{" * 100_000,
    "one line of labels": 'cache_config_info{a="' * 100_000,
    "one long word": "a" * 900_000 + "{",
    "an oversized group": source(groups=[{"group_idx": 0, "kind": "full", "block_size": 2**62}]),
    "a negative block": source(block_size=-1),
    "a group beyond": source(groups=[{"group_idx": 2**40, "kind": "full", "block_size": 16}]),
    "many groups": source(groups=[{"group_idx": n, "kind": "full", "block_size": 16} for n in range(1000)]),
    "no address": source(endpoint="tcp://a b:1"),
    "a port beyond": source(endpoint="tcp://*:99999"),
    "a port of digits": source(endpoint="tcp://*:" + "1" * 5000),
    "a rank below": source(data_parallel_rank=-1),
    "an endless topic": source(topic="t" * 100_000),
    "ranks by name": '{"\u00b2": {"endpoint": "tcp://*:1"}}',
    "ranks of many digits": '{"%s": {"endpoint": "tcp://*:1"}}' % ("1" * 5000),
    "a number": "7",
    "nothing": "",
}


@pytest.mark.parametrize("answer_name", HOSTILE)
def test_whatever_a_worker_answers_is_a_fact_or_a_reason(answer_name: str) -> None:
    """Each answer on each route in turn: never an exception, nothing that native code or a log cannot bear."""
    body, reasons = HOSTILE[answer_name], list[str]()
    usual = {"/v1/models": MODELS, "/kv_event_sources": (200, source()), "/server_info": (200, "{}")}
    for path in (*usual, "/metrics"):
        try:
            facts = probe({**usual, path: (200, body)})
        except (FetchError, DecodeError) as error:
            reasons.append(str(error)[:300])
            continue
        spec = facts.spec
        assert 0 <= (spec.cache_tokens or 0) < 2**63
        assert 0 <= (spec.block_size or 0) < 2**31
        for root in facts.roots.values():
            assert find_checkpoint_folder(root) is None
        reasons += [model.name for model in spec.models]
    assert all(text.isascii() for text in reasons) or "\u00b2" in body


def test_a_process_without_a_home_finds_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry in the password file, as containers have, and no HOME."""
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert find_checkpoint_folder("meta/llama") is None


def test_a_bad_minute_of_the_sources_changes_nothing() -> None:
    """503, 500, 429: what is known stays; 404 says that there are none; what cannot be read is told."""
    previous = probe({"/v1/models": MODELS, "/kv_event_sources": (200, source())})
    assert previous.sources
    for status, are_sources_kept in ((503, True), (500, True), (429, True), (404, False)):
        facts = probe({"/v1/models": MODELS, "/kv_event_sources": (status, "no")}, known=previous)
        assert (facts.sources == previous.sources) is are_sources_kept, status
    with pytest.raises(DecodeError, match=r"deep|lists"):
        read_sources(b"[" * 100_000, "http://h:1")


def test_a_bad_minute_of_sglang_changes_nothing() -> None:
    """Its sources come from /server_info, beside a 404 for /kv_event_sources."""
    previous = probe({"/v1/models": MODELS, "/server_info": (200, sglang_info())})
    assert len(previous.sources) == 2
    for status, are_sources_kept in ((503, True), (429, True), (404, False)):
        facts = probe({"/v1/models": MODELS, "/server_info": (status, "no")}, known=previous)
        assert (facts.sources == previous.sources) is are_sources_kept, status


def test_a_default_port_that_answers_too_late_changes_nothing(monkeypatch: Any) -> None:
    """A machine too busy to accept a connection publishes where it did; a refusal says that it does not."""

    def probe_default_port(is_listening: bool | None, known: WorkerFacts | None) -> WorkerFacts:
        async def answer(*_: object) -> bool | None:
            return is_listening

        monkeypatch.setattr(Prober, "is_listening", answer)
        return probe({"/v1/models": MODELS}, known=known)

    known = probe_default_port(is_listening=True, known=None)
    assert len(known.sources) == 1
    assert probe_default_port(is_listening=None, known=known).sources == known.sources
    assert not probe_default_port(is_listening=False, known=known).sources
    assert not probe_default_port(is_listening=None, known=None).sources


SIZES = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="101",num_cpu_blocks="10",max_num_seqs="8",'
    'max_num_batched_tokens="512",prefill_order="shortest"} 1.0'
)


@pytest.mark.parametrize("engine", ["blockcast", "vllm"])
def test_the_sizes_of_an_engine_stay_while_it_is_too_busy_for_metrics(engine: str) -> None:
    """Whatever adapters came meanwhile; not those of another start, checkpoint or engine."""

    def routes(*adapters: str, root: str = "/m", owner: str = engine, epoch: str = "e") -> dict[str, tuple[int, str]]:
        cards = [{"id": "m", "root": root, "owned_by": owner}, *({"id": name, "parent": "m"} for name in adapters)]
        return {"/v1/models": (200, json.dumps({"data": cards})), "/kv_event_sources": (200, source(epoch=epoch))}

    known = probe({**routes(), "/metrics": (200, SIZES)})
    spec = known.spec
    assert (spec.step_tokens, spec.max_num_seqs, spec.block_size) == (512, 8, 16)
    for busy_answer in ((404, ""), (503, "busy"), (200, "")):
        later = probe({**routes("lora"), "/metrics": busy_answer}, known=known)
        assert len(later.spec.models) == 2
        assert dataclasses.replace(later.spec, models=spec.models, url=spec.url, worker_id=spec.worker_id) == spec
        assert probe(routes("lora"), known=later).sizes == known.sizes, "also at the probe after the next"
    for others in (routes(epoch="f"), routes(root="/n"), routes(owner="sglang")):
        assert probe(others, known=known).sizes == EngineSizes()
    new_sizes = SIZES.replace("512", "256").replace(',prefill_order="shortest"', "")
    retold = probe({**routes(), "/metrics": (200, new_sizes)}, known=known).spec
    assert (retold.step_tokens, retold.is_shortest_first) == (256, False), "what is told now counts"


@pytest.mark.parametrize(
    ("known_ids", "told_ids", "is_same"),
    [
        (("a",), ("a",), True), (("a",), ("b",), False), (("a",), (), False), (("a",), None, True),
        (None, ("a",), True), ((), ("a",), False), ((), None, True), (None, None, True),
    ],
)  # fmt: skip
def test_the_names_of_engines_tell_a_start_from_another(
    known_ids: tuple[str, ...] | None, told_ids: tuple[str, ...] | None, is_same: bool
) -> None:
    served = read_models(MODELS[1].encode())
    facts = WorkerFacts(WorkerSpec("w", "http://w", served.models), engine_ids=known_ids)
    assert facts.may_be_same_engine(served, (), told_ids) is is_same


def test_the_questions_of_a_probe_are_asked_at_once() -> None:
    """A worker that hangs costs one timeout, and not one for each question behind the first."""
    paths = {"/kv_event_sources", "/query", "/metrics"}

    async def run() -> WorkerFacts:
        asked_paths, all_are_asked = set[str](), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            if request.path == "/v1/models":
                return web.Response(text=MODELS[1])
            asked_paths.add(request.path)
            if asked_paths == paths:
                all_are_asked.set()
            await all_are_asked.wait()
            bodies = {"/query": '{"0": {"engine_id": "a"}}', "/kv_event_sources": source()}
            return web.Response(text=bodies.get(request.path, ""))

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        flag = parse_worker_flag(f"url=http://{address},kv=mooncake,bootstrap={address}")
        async with aiohttp.ClientSession() as session:
            facts = await Prober(session, timeout_s=20, kv_dialects={"mooncake"}).probe(flag)
        await runner.cleanup()
        return facts

    assert asyncio.run(run()).engine_ids == ("a",)


def test_a_worker_that_hangs_takes_one_connection() -> None:
    """Those of all workers are bounded together, so others would wait for one to be checked."""

    async def run() -> int:
        connection_count, is_closed = 0, asyncio.Event()

        async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connection_count
            connection_count += 1
            await reader.read()
            writer.close()
            is_closed.set()

        server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
        async with server, aiohttp.ClientSession() as session:
            flag = parse_worker_flag(f"url=http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(FetchError, match="timeout"):
                await Prober(session, timeout_s=0.5).probe(flag)
            await is_closed.wait()
        return connection_count

    assert asyncio.run(run()) == 1


def test_a_redirect_is_not_followed() -> None:
    with pytest.raises(DecodeError, match="/v1/models answers 307"):
        probe({"/v1/models": (307, "/elsewhere"), "/elsewhere": MODELS})


@pytest.mark.parametrize(("flag", "is_key_sent"), [("url={url}", True), ("url={url},send_key=0", False)])
def test_only_a_named_worker_is_asked_with_the_key(flag: str, is_key_sent: bool) -> None:
    async def run() -> list[str | None]:
        authorization_headers: list[str | None] = []

        async def answer(request: web.Request) -> web.Response:
            authorization_headers.append(request.headers.get("Authorization"))
            return web.json_response({"data": [{"id": "m"}], "tokens": [1]})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        worker = parse_worker_flag(flag.format(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        headers = {"Authorization": "Bearer key"}
        async with aiohttp.ClientSession() as session:
            prober, remote = Prober(session, headers=headers), RemoteTokenizer(session, headers)
            with pytest.raises(DecodeError):  # the same answer on every path
                await prober.probe(worker)
            await prober.check_health(worker)
            assert await remote.probe("m", worker)
        await runner.cleanup()
        return authorization_headers

    assert set(asyncio.run(run())) == {"Bearer key" if is_key_sent else None}


@pytest.mark.parametrize(
    ("verification_error", "remedy"),
    [
        ("unable to get local issuer certificate", "--worker-tls-ca"),
        ("self-signed certificate in certificate chain", "--worker-tls-ca"),
        ("Hostname mismatch, certificate is not valid for 'gpu1'.", "in the URL"),
        ("IP address mismatch, certificate is not valid for '10.0.0.1'.", "in the URL"),
        ("certificate has expired", "renew its certificate"),
        ("certificate is not yet valid", "clock"),
    ],
)
def test_the_remedy_for_a_certificate_that_is_not_accepted(verification_error: str, remedy: str) -> None:
    reason = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {verification_error}"
    assert remedy in suggest_remedy(parse_worker_flag("https://gpu1"), reason)
