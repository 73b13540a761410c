"""KV that moves between workers: the bodies that both get, and every way in which a prefill for another one fails."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hmac
import json
import logging
from typing import Any

import msgspec
import pytest
from nixl_workers import NixlWorkers, text_for

from router.admin.dashboard import Dashboard
from router.app.accounting import RequestAccounting
from router.decide.messages import Decision, Forward, Instruction, ReportedUsage, Transfer, TransferKind
from router.decide.workers import TransferFacts
from router.edge.upstream import Endpoint, UpstreamConnection, UpstreamPool

FLEET_KEY = b"a key of sixteen or more"
PROMPT = {"model": "tiny", "prompt": "hello", "max_tokens": 8}


def plan(edge: Any, kind: TransferKind, source: str = "p", worker: str = "d") -> None:
    """Have each first decision send the request to `worker`, with a transfer from `source`."""
    route = edge.core.route

    def route_with_transfer(request: Any, *args: Any, **kwargs: Any) -> Instruction:
        request.worker = worker
        instruction = route(request, *args, **kwargs)
        request.worker = None
        if isinstance(instruction, Forward):
            add_transfer(instruction.decision, kind, source)
        return instruction

    edge.core.route = route_with_transfer


def add_transfer(decision: Decision, kind: TransferKind, source: str) -> None:
    decision.terms = msgspec.structs.replace(decision.terms, transfer=Transfer(kind, source, None, 128, 0.01))
    decision.predicted_cached_tokens = 128


async def split_pair(edge: Any, **workers: Any) -> tuple[NixlWorkers, Any, Any]:
    """A prefill worker `p` and a decode worker `d`."""
    nixl = NixlWorkers(edge.now)
    await edge.start()
    prefill = await edge.worker(workers.get("p", nixl.prefill), "p", engine="vllm")
    decode = await edge.worker(workers.get("d", nixl.decode), "d", port=workers.get("port"), engine="vllm")
    set_facts(edge, "p", TransferFacts("g", frozenset((TransferKind.PREFILL,)), dialect="nixl"))
    plan(edge, TransferKind.PREFILL)
    return nixl, prefill, decode


def set_facts(edge: Any, name: str, facts: TransferFacts) -> None:
    """Have a worker move KV, without the price that would choose it."""
    worker = edge.core.workers[name]
    worker.spec = dataclasses.replace(worker.spec, transfer=facts)


def delay_connections(edge: Any, monkeypatch: pytest.MonkeyPatch, port: int) -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that is set once the router connects to this port, and the event for which it then waits."""
    connect, connecting, gate = edge.pool.connect, asyncio.Event(), asyncio.Event()

    async def connect_late(connection: Any) -> None:
        if connection.target.port == port:
            connecting.set()
            await gate.wait()
        await connect(connection)

    monkeypatch.setattr(edge.pool, "connect", connect_late)
    return connecting, gate


def body_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def outcomes(edge: Any) -> dict[str, int]:
    return {outcome: count for (_, outcome), count in edge.metrics.transfers.outcomes.items()}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT | {"n": 1, "min_tokens": 3, "logprobs": 1}),
        ("/v1/completions", PROMPT | {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"max_completion_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 5}),
    ],
)
def test_a_prompt_is_computed_by_one_worker_and_answered_by_another(
    edge: Any, make_post: Any, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        nixl, prefill, decode = await split_pair(edge)
        raw = json.dumps(body, indent=1).encode()
        answer = await edge.exchange(make_post(raw, path.encode()))
        assert text_for(body).encode() in answer
        (decode_request,) = decode.received
        assert decode_request.line.split()[1] == path.encode() == prefill.received[0].line.split()[1]
        params = json.loads(decode_request.body)["kv_transfer_params"]
        field = b'"kv_transfer_params":' + json.dumps(params, separators=(",", ":")).encode() + b","
        assert decode_request.body.replace(field, b"").endswith(raw.partition(b"{")[2]), "else byte for byte"
        assert (nixl.transfers, nixl.faults, nixl.pinned) == (1, [], [])
        assert outcomes(edge) == {"started": 1}
        assert edge.metrics.transfers.prefill_s.get(("p",)).counts[0] == 1

    edge.run(scenario())


async def get_metrics(edge: Any) -> bytes:
    page: bytes = await edge.exchange(b"GET /metrics HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n")
    return page


def test_both_requests_are_seen(edge: Any, make_post: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In the trace, in the log of requests and in the metrics."""

    async def scenario() -> None:
        await split_pair(edge)
        facts = TransferFacts("g", frozenset((TransferKind.PREFILL,)), bytes_per_token=1000.0, dialect="nixl")
        set_facts(edge, "p", facts)
        edge.proxy.on_end.append(RequestAccounting(edge.proxy, log_share=1.0).record_ended_request)
        exporter = InMemorySpanExporter()
        tracing = Tracing("http://127.0.0.1:9", 1.0, "1.2.3", exporter)
        edge.proxy.tracer = tracing.begin
        edge.proxy.on_end.append(lambda context: tracing.end(context, edge.now()))
        with caplog.at_level(logging.INFO, "router"):
            await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
            await edge.settle()
        tracing._provider.force_flush()
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert set(spans) == {"POST /v1/completions", "read and decide", "prefill", "answer"}
        assert spans["prefill"].attributes == {"blockcast.worker": "p"}
        assert spans["prefill"].end_time <= spans["answer"].start_time
        attributes = spans["POST /v1/completions"].attributes or {}
        assert (attributes["blockcast.worker"], attributes["blockcast.transfer.source"]) == ("d", "p")
        (fields,) = [record.__dict__["fields"] for record in caplog.records if "fields" in record.__dict__]
        assert (fields["worker"], fields["kv_source"], fields["kv_transfer"]) == ("d", "p", "prefill")
        assert fields["prefill_seconds"] >= 0.0
        page = await get_metrics(edge)
        assert b'blockcast_router_kv_transfer_planned_tokens_total{kind="prefill"} 128.0' in page
        assert b'blockcast_router_kv_transfer_planned_bytes_total{kind="prefill"} 128000.0' in page
        tracing.close()

    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from router.app.tracing import Tracing

    edge.run(scenario())


def test_mooncakes_workers_meet_by_the_name_of_the_transfer(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        prefill = await edge.worker(edge.reply(b'{"choices":[],"kv_transfer_params":null}'), "p", engine="vllm")
        decode = await edge.worker(edge.reply(), "d", engine="vllm")
        facts = TransferFacts(
            "g", frozenset((TransferKind.PREFILL,)), dialect="mooncake", address="h:8998", engine_ids=("f00d",)
        )
        set_facts(edge, "p", facts)
        plan(edge, TransferKind.PREFILL)
        for _ in range(2):
            assert b"200 OK" in await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        params = [json.loads(request.body)["kv_transfer_params"] for request in prefill.received]
        names = [value.pop("transfer_id") for value in params]
        assert params == [{"do_remote_decode": True, "do_remote_prefill": False}] * 2
        assert names[0] != names[1]
        assert [json.loads(request.body)["kv_transfer_params"] for request in decode.received] == [
            {
                "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name,
                "remote_bootstrap_addr": "http://h:8998", "remote_engine_id": "f00d",
            }
            for name in names
        ]  # fmt: skip

    edge.run(scenario())


@pytest.mark.parametrize(
    ("prefill_usage", "cached_tokens"),
    [({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 4), ({"prompt_tokens": 9}, None)],
)
def test_the_hit_of_a_split_request_is_that_of_the_worker_that_computed_the_prompt(
    edge: Any, make_post: Any, prefill_usage: dict[str, Any], cached_tokens: int | None
) -> None:
    """Mooncake's decode worker reports all KV that came as cached."""

    async def scenario() -> None:
        await edge.start()
        prefill_answer = {"choices": [], "kv_transfer_params": None, "usage": prefill_usage}
        decode_usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
        decode_answer = {"choices": [], "usage": decode_usage}
        await edge.worker(edge.reply(json.dumps(prefill_answer).encode()), "p", engine="vllm")
        await edge.worker(edge.reply(json.dumps(decode_answer).encode()), "d", engine="vllm")
        facts = TransferFacts("g", frozenset((TransferKind.PREFILL,)), dialect="mooncake", engine_ids=("f00d",))
        set_facts(edge, "p", facts)
        plan(edge, TransferKind.PREFILL)
        contexts: list[Any] = []
        edge.proxy.on_end += [contexts.append, RequestAccounting(edge.proxy).record_ended_request]
        assert b"200 OK" in await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        await edge.settle()
        (context,) = contexts
        assert context.usage == ReportedUsage(9, cached_tokens, 2)
        assert edge.metrics.reported_cached_tokens == (cached_tokens or 0)

    edge.run(scenario())


@pytest.mark.parametrize("fails_at", ["p", "d"])
def test_the_hit_of_a_request_whose_prefill_failed_is_that_of_the_worker_that_answers(
    edge: Any, make_post: Any, fails_at: str
) -> None:
    """It computed the prompt itself, so that its report is no KV of another worker."""

    async def scenario() -> None:
        await edge.start()
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        answer = edge.reply(json.dumps({"choices": [], "usage": usage, "kv_transfer_params": None}).encode())
        broken = edge.reply(b"{}", b"500 broken")
        without_kv = edge.gated(asyncio.Event()) if fails_at == "p" else broken

        async def decode(request: Any, reader: Any, writer: Any) -> None:
            await (without_kv if b"kv_transfer_params" in request.body else answer)(request, reader, writer)

        await edge.worker(broken if fails_at == "p" else answer, "p", engine="vllm")
        await edge.worker(decode, "d", engine="vllm")
        facts = TransferFacts("g", frozenset((TransferKind.PREFILL,)), dialect="mooncake", engine_ids=("f00d",))
        set_facts(edge, "p", facts)
        plan(edge, TransferKind.PREFILL)
        contexts: list[Any] = []
        edge.proxy.on_end.append(contexts.append)
        assert b"200 OK" in await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        await edge.settle()
        assert contexts[0].usage == ReportedUsage(9, 3, 2)
        assert sum(edge.metrics.transfers.outcomes[TransferKind.PREFILL.value, end] for end in ("error", "lost")) == 1

    edge.run(scenario())


async def pulling_pair(edge: Any, script: Any) -> Any:
    """Start two workers, and return the one that answers. The router has each first decision pull from the other."""
    facts = TransferFacts("g", frozenset((TransferKind.PULL,)), dialect="blockcast", address="[::1]:7001")
    await edge.start()
    await edge.worker(edge.reply(), "p")
    worker = await edge.worker(script, "d")
    set_facts(edge, "p", facts)
    edge.proxy.workers.fleet_key = FLEET_KEY
    plan(edge, TransferKind.PULL)
    return worker


def test_a_pull_names_its_source_under_the_fleets_key(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        worker = await pulling_pair(edge, edge.reply())
        raw = json.dumps(PROMPT).encode()
        assert b"200 OK" in await edge.exchange(make_post(raw, b"/v1/completions"))
        (request,) = worker.received
        source = json.loads(request.body)["kv_transfer_params"]["remote_kv_source"]
        assert (source["remote_host"], source["remote_port"], source["cached_tokens"]) == ("::1", 7001, 128)
        text = "\n".join(
            ["kv-source", source["kv_request_id"], "::1", "7001"]
        )  # as docs/adr/0020-kv-moves-by-pulls.md says
        assert source["signature"] == hmac.new(FLEET_KEY, text.encode(), "sha256").hexdigest()
        assert request.body.endswith(raw[1:])
        assert outcomes(edge) == {"started": 1}

    edge.run(scenario())


@pytest.mark.parametrize("answer", ["200 OK", "403 Forbidden"])
def test_a_worker_that_refuses_the_routers_source_is_asked_without_one(edge: Any, make_post: Any, answer: str) -> None:
    """The worker has another fleet's key, such as while the keys of a fleet change. `answer`: without a source."""

    async def refuse_source(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_refused = b"kv_transfer_params" in request.body
        await edge.reply(status=b"403 Forbidden" if is_refused else answer.encode())(request, reader, writer)

    async def scenario() -> None:
        worker = await pulling_pair(edge, refuse_source)
        raw = json.dumps(PROMPT).encode()
        assert answer.encode() in await edge.exchange(make_post(raw, b"/v1/completions"))
        assert b"kv_transfer_params" in worker.received[0].body
        assert [request.body for request in worker.received[1:]] == [raw]
        assert outcomes(edge) == {"started": 1, "error": 1}

    edge.run(scenario())


def test_a_clients_own_parameters_never_reach_a_worker(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        nixl, prefill, decode = await split_pair(edge)
        raw = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}} | PROMPT).encode()
        assert text_for(PROMPT).encode() in await edge.exchange(make_post(raw, b"/v1/completions"))
        for request in (*prefill.received, *decode.received):
            assert request.body.count(b"kv_transfer_params") == 1
            assert b"evil" not in request.body
        assert (nixl.transfers, nixl.faults) == (1, [])

    edge.run(scenario())


def test_the_rest_of_a_stream_is_split_too(edge: Any, make_post: Any) -> None:
    """The first worker dies in the middle of an answer; of what follows, one worker computes the prompt."""

    async def die_in_the_middle(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        choice = {"index": 0, "text": "on", "token_ids": [100], "prompt_token_ids": [5, 6, 7], "finish_reason": None}
        event = b"data: " + json.dumps({"id": "a", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        nixl = NixlWorkers(edge.now)
        await edge.start()
        await edge.worker(die_in_the_middle, "first", engine="vllm")
        prefill = await edge.worker(nixl.prefill, "p", engine="vllm")
        decode = await edge.worker(nixl.decode, "d", engine="vllm")
        set_facts(edge, "p", TransferFacts("g", frozenset((TransferKind.PREFILL,)), dialect="nixl"))
        for name in ("p", "d"):
            edge.core.set_draining(name, edge.now(), is_draining=True)
        fail_attempt = edge.core.fail_attempt

        def fail_with_transfer(*args: Any, **kwargs: Any) -> list[Instruction]:
            edge.core.set_draining("d", edge.now(), is_draining=False)
            instructions: list[Instruction] = fail_attempt(*args, **kwargs)
            (forward,) = instructions
            assert isinstance(forward, Forward)
            add_transfer(forward.decision, TransferKind.PREFILL, "p")
            return instructions

        edge.core.fail_attempt = fail_with_transfer
        raw = json.dumps(PROMPT | {"stream": True, "temperature": 0}).encode()
        await edge.exchange(make_post(raw, b"/v1/completions"))
        assert [json.loads(request.body)["prompt"] for request in prefill.received + decode.received] == [
            [5, 6, 7, 100]
        ] * 2
        assert (nixl.transfers, nixl.faults) == (1, [])

    edge.run(scenario())


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((b"{}",), "bad_answer"),
        ((b"<html>",), "bad_answer"),
        ((b'{"kv_transfer_params":null}',), "bad_answer"),
        ((b'{"kv_transfer_params":{"do_remote_prefill":true}}',), "bad_answer"),
        ((b'{"error":{}}', b"500 Internal Server Error"), "error"),
        ((b'{"error":{}}', b"429 Too Many Requests"), "error"),
        ((b'{"error":{}}', b"400 Bad Request"), "refused"),
        ((b" " * (5 << 20),), "bad_answer"),
    ],
)
def test_the_other_worker_computes_what_the_prefill_worker_does_not(
    edge: Any, make_post: Any, answer: tuple[bytes, ...], outcome: str
) -> None:
    async def scenario() -> None:
        nixl, _, decode = await split_pair(edge, p=edge.reply(*answer))
        raw = json.dumps(PROMPT).encode()
        assert body_of(await edge.exchange(make_post(raw, b"/v1/completions")))["choices"] == [
            {"text": text_for(PROMPT)}
        ]
        assert decode.received[0].body == raw
        assert (nixl.computed_alone, nixl.faults) == (1, [])
        assert outcomes(edge) == {"started": 1, outcome: 1}

    edge.run(scenario())


def test_the_routers_own_want_of_descriptors_is_not_the_pairs_failure(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await split_pair(edge)
        connect, failed = UpstreamPool.connect, list[str]()
        edge.proxy.on_transfer_failed.append(failed.append)

        async def connect_to_decode_alone(pool: UpstreamPool, connection: UpstreamConnection) -> None:
            if connection.target is Endpoint.parse(edge.core.workers["p"].spec.url):
                raise OSError(errno.EMFILE, "none left")
            await connect(pool, connection)

        raw = json.dumps(PROMPT).encode()
        with monkeypatch.context() as patch:
            patch.setattr(UpstreamPool, "connect", connect_to_decode_alone)
            assert b"200 OK" in await edge.exchange(make_post(raw, b"/v1/completions"))
        assert (outcomes(edge), failed) == ({"started": 1, "local": 1}, [])
        assert b"200 OK" in await edge.exchange(make_post(raw, b"/v1/completions"))
        assert outcomes(edge) == {"started": 2, "local": 1}, "the pair is not avoided"

    edge.run(scenario())


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_several_answers_are_computed_by_one_worker(edge: Any, make_post: Any, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        _, prefill, decode = await split_pair(edge)
        raw = json.dumps(PROMPT | fields).encode()
        assert b"200 OK" in await edge.exchange(make_post(raw, b"/v1/completions"))
        assert (prefill.received, decode.received[0].body) == ([], raw)
        assert outcomes(edge) == {"started": 1, "refused": 1}

    edge.run(scenario())


@pytest.mark.parametrize("when", ["before", "during", "mid-answer"])
def test_a_prefill_worker_that_dies_costs_its_request_nothing_but_time(edge: Any, make_post: Any, when: str) -> None:
    async def die(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if when == "mid-answer":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
        writer.close()

    async def scenario() -> None:
        _nixl, prefill, _ = await split_pair(edge, p=die)
        if when == "before":
            await prefill.stop()
        failed: list[str] = []
        edge.proxy.on_transfer_failed.append(failed.append)
        raw = json.dumps(PROMPT).encode()
        assert body_of(await edge.exchange(make_post(raw, b"/v1/completions")))["choices"] == [
            {"text": text_for(PROMPT)}
        ]
        assert outcomes(edge) == {"started": 1, "unreachable" if when == "before" else "lost": 1}
        assert failed == ["p"]
        assert edge.metrics.failures == {}, "the attempt at the other worker goes on"

    edge.run(scenario())


def test_a_frozen_prefill_worker_is_waited_for_a_bounded_time(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        _nixl, prefill, _ = await split_pair(edge, p=edge.gated(gate))
        answer = asyncio.ensure_future(edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions")))
        await edge.until(lambda: prefill.received)
        edge.advance(60.0)
        assert body_of(await answer)["choices"] == [{"text": text_for(PROMPT)}]
        assert outcomes(edge) == {"started": 1, "timeout": 1}
        gate.set()
        await edge.until(lambda: edge.pool.count_connections().open == edge.pool.count_connections().idle)

    edge.run(scenario())


def test_a_client_that_leaves_during_the_prefill_ends_it(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        _nixl, prefill, decode = await split_pair(edge, p=edge.gated(gate))
        _, writer = await edge.connect()
        writer.write(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        await edge.until(lambda: prefill.received)
        writer.close()
        await edge.until(lambda: not edge.proxy.exchanges)
        gate.set()
        await edge.settle()
        assert decode.received == []

    edge.run(scenario())


def test_a_client_that_leaves_between_the_legs_leaves_no_kv_behind(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        nixl, _, decode = await split_pair(edge)
        connecting, gate = delay_connections(edge, monkeypatch, decode.port)
        _, writer = await edge.connect()
        writer.write(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        await connecting.wait()
        writer.close()
        await edge.until(lambda: not edge.proxy.exchanges)
        assert len(nixl.pinned) == 1
        gate.set()
        await edge.until(lambda: not nixl.pinned)
        assert (nixl.transfers, nixl.faults) == (1, [])

    edge.run(scenario())


def test_a_client_that_leaves_during_the_fetch_does_not_cut_it_off(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        nixl = NixlWorkers(edge.now)

        async def decode_late(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            assert not reader.at_eof(), "the worker would stop in the middle"
            await nixl.decode(request, reader, writer)

        _, _, decode = await split_pair(edge, p=nixl.prefill, d=decode_late)
        _, writer = await edge.connect()
        writer.write(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        await edge.until(lambda: decode.received)
        writer.close()
        await edge.until(lambda: not edge.proxy.exchanges)
        assert len(nixl.pinned) == 1
        await edge.let_loop_read()
        gate.set()
        await edge.until(lambda: not nixl.pinned)
        assert nixl.faults == []

    edge.run(scenario())


def test_no_decode_is_sent_after_its_lease(edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        nixl, _, decode = await split_pair(edge)
        connecting, gate = delay_connections(edge, monkeypatch, decode.port)
        answer = asyncio.ensure_future(edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions")))
        await connecting.wait()
        edge.advance(25.0)
        gate.set()
        assert body_of(await answer)["choices"] == [{"text": text_for(PROMPT)}]
        assert (nixl.computed_alone, nixl.faults) == (1, [])
        assert outcomes(edge) == {"started": 1, "late": 1}

    edge.run(scenario())


def test_a_decode_worker_that_fails_is_replaced_without_the_old_parameters(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        _nixl, prefill, _decode = await split_pair(edge, d=edge.reply(b"{}", b"503 Service Unavailable"))
        assert body_of(await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions")))["choices"] == [
            {"text": text_for(PROMPT)}
        ]
        assert b"kv_transfer_params" not in prefill.received[1].body
        assert edge.metrics.failures == {("d", "server_error"): 1}

    edge.run(scenario())


def test_a_decode_that_cannot_fetch_its_kv_is_not_tried_with_the_same_pair(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        _, prefill, _ = await split_pair(edge, d=edge.reply(b"{}", b"500 Internal Server Error"))
        raw = json.dumps(PROMPT).encode()
        assert b"200 OK" in await edge.exchange(make_post(raw, b"/v1/completions"))
        assert prefill.received[1].body == raw
        assert outcomes(edge) == {"started": 1, "error": 1}

    edge.run(scenario())


def test_a_decode_whose_prefill_worker_went_down_begins_anew_without_it(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        nixl, gate = NixlWorkers(edge.now), asyncio.Event()

        async def hang_with_kv(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"kv_transfer_params" in request.body:
                await gate.wait()
            await nixl.decode(request, reader, writer)

        _, _, decode = await split_pair(edge, d=hang_with_kv)
        raw = json.dumps(PROMPT).encode()
        answer = asyncio.ensure_future(edge.exchange(make_post(raw, b"/v1/completions")))
        await edge.until(lambda: decode.received)
        edge.proxy.perform(edge.core.mark_worker_down("p", edge.now(), "no answer to /health"))
        assert body_of(await answer)["choices"] == [{"text": text_for(PROMPT)}]
        assert decode.received[1].body == raw
        assert outcomes(edge) == {"started": 1, "lost": 1}
        decode.script = nixl.decode
        gate.set()

    edge.run(scenario())


def test_an_error_of_the_decode_worker_reaches_the_client(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        await split_pair(edge, d=edge.reply(b'{"error":{"message":"too long"}}', b"400 Bad Request"))
        assert b"too long" in await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))

    edge.run(scenario())


def test_the_list_of_workers_says_why_no_kv_moves(edge: Any) -> None:
    async def scenario() -> None:
        await edge.start()
        for name, can_give in (("p", True), ("d", False)):
            await edge.worker(edge.reply(), name)
            set_facts(
                edge,
                name,
                TransferFacts("g", frozenset((TransferKind.PREFILL,)), can_give, not can_give, dialect="nixl"),
            )
        await edge.worker(edge.reply(), "other")
        row = {"group": "g", "dialect": "nixl", "sources": ["p"], "destinations": ["d"]}
        assert edge.worker_list.describe_workers()["kv_groups"] == [row | {"missing_role": "", "problem": ""}]
        assert b'blockcast_router_kv_role_missing{group="g",role="prefill"} 0.0' in await get_metrics(edge)
        edge.proxy.perform(edge.core.mark_worker_down("p", edge.now(), "no answer to /health"))
        (row,) = edge.worker_list.describe_workers()["kv_groups"]
        assert (row["sources"], row["problem"]) == ([], "no worker gives KV: each computes its prompts")
        assert row["missing_role"] == "prefill"
        assert b'blockcast_router_kv_role_missing{group="g",role="prefill"} 1.0' in await get_metrics(edge)
        edge.proxy.perform(edge.core.mark_worker_down("d", edge.now(), "no answer to /health"))
        page = await get_metrics(edge)
        for role in (b"prefill", b"decode"):
            assert b'blockcast_router_kv_role_missing{group="g",role="%b"} 1.0' % role in page

    edge.run(scenario())


def test_operators_see_what_moved(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def decode_late(request: Any, reader: Any, writer: Any) -> None:
            await gate.wait()
            await nixl.decode(request, reader, writer)

        nixl, _, decode = await split_pair(edge, d=decode_late)
        facts = TransferFacts("g", frozenset((TransferKind.PREFILL,)), bytes_per_token=1000.0, dialect="nixl")
        set_facts(edge, "p", facts)
        dashboard = Dashboard(edge.proxy, edge.worker_list.describe_workers)
        assert edge.worker_list.describe_workers()["kv_transfers"] == {}
        answer = asyncio.ensure_future(edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions")))
        await edge.until(lambda: decode.received)
        dashboard.tick(1e9)
        gate.set()
        await answer
        assert edge.worker_list.describe_workers()["kv_transfers"] == {"prefill": {"started": 1}}
        dashboard.tick(2e9)
        before_end, point = dashboard._points
        assert before_end["moved_tokens"] == before_end["moved_bytes"] == 0, "requests count when they end"
        moved = {name: point[name] for name in ("pulls", "prefills", "moved_tokens", "transfer_s", "computed_locally")}
        assert point["moved_bytes"] == 128_000
        assert moved == {"pulls": 0, "prefills": 1, "moved_tokens": 128, "transfer_s": 0.01, "computed_locally": 0}
        (row,) = dashboard._decisions
        assert row["transfer"].source == "p"
        assert row["cached_tokens"] is None, "the prefill worker reports none"

    edge.run(scenario())


async def refuse_fetches(nixl: NixlWorkers, status: bytes, request: Any, reader: Any, writer: Any) -> None:
    """Answer a decode that would fetch KV with this status, before it fetched anything; answer others as usual."""
    if b"remote_block_ids" in request.body:
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
    else:
        await nixl.decode(request, reader, writer)


def test_a_failed_fetch_is_computed_by_the_only_worker_that_decodes(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        nixl = NixlWorkers(edge.now)
        _, _, decode = await split_pair(
            edge, p=nixl.prefill, d=lambda *call: refuse_fetches(nixl, b"500 Internal Server Error", *call)
        )
        prefill_worker = edge.core.workers["p"]
        spec = dataclasses.replace(prefill_worker.spec, roles=frozenset({"prefill"}))
        edge.core.add_worker(spec, edge.now())
        answer = await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        assert text_for(PROMPT).encode() in answer
        assert len(decode.received) == 2
        assert outcomes(edge) == {"started": 1, "error": 1}

    edge.run(scenario())


def test_after_a_refused_decode_no_other_one_fetches_the_kv(edge: Any, make_post: Any) -> None:
    """The prefill's body is valid, as it lacks the field for which the decode is refused.

    vLLM frees the KV of a decode that it refuses. Mooncake's prefill worker would wait minutes for freed KV.
    """

    async def scenario() -> None:
        nixl = NixlWorkers(edge.now)

        async def decode(request: Any, reader: Any, writer: Any) -> None:
            if b"min_tokens" in request.body:
                nixl.lease_ends.clear()
                await refuse_fetches(nixl, b"400 Bad Request", request, reader, writer)
            else:
                await nixl.decode(request, reader, writer)

        await split_pair(edge, p=nixl.prefill, d=decode)
        further_decodes: list[Any] = []
        edge.pool.send_unanswered = lambda *request: further_decodes.append(request)
        answer = await edge.exchange(make_post(json.dumps(PROMPT | {"min_tokens": 99}).encode(), b"/v1/completions"))
        assert answer.startswith(b"HTTP/1.1 400")
        await edge.until(lambda: not nixl.pinned)
        assert nixl.faults == []
        assert further_decodes == []

    edge.run(scenario())


def test_a_prefill_worker_that_goes_down_long_after_the_fetch_disturbs_nobody(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        nixl, gate = NixlWorkers(edge.now), asyncio.Event()

        async def decode_slowly(request: Any, reader: Any, writer: Any) -> None:
            await gate.wait()
            await nixl.decode(request, reader, writer)

        _, _, decode = await split_pair(edge, p=nixl.prefill, d=decode_slowly)
        answer = asyncio.ensure_future(edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions")))
        await edge.until(lambda: decode.received)
        edge.advance(100.0)
        edge.proxy.perform(edge.core.mark_worker_down("p", edge.now(), "killed"))
        edge.advance(5.0)
        gate.set()
        await answer
        assert len(decode.received) == 1

    edge.run(scenario())


@pytest.mark.parametrize("params", [b'{"remote_host":"\xff"}', b"[" * 100_000 + b"]" * 100_000], ids=["utf8", "deep"])
def test_a_prefill_answer_that_cannot_be_decoded_is_not_used(edge: Any, make_post: Any, params: bytes) -> None:
    async def scenario() -> None:
        await split_pair(edge, p=edge.reply(b'{"kv_transfer_params":' + params + b"}"))
        answer = await edge.exchange(make_post(json.dumps(PROMPT).encode(), b"/v1/completions"))
        assert text_for(PROMPT).encode() in answer
        assert outcomes(edge) == {"started": 1, "bad_answer": 1}

    edge.run(scenario())


def test_a_prefill_does_not_stop_at_its_first_token_and_stores_nothing(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        _, prefill, _ = await split_pair(edge)
        stops = {"stop": ["a"], "stop_token_ids": [1], "logit_bias": {"1": 100}}
        await edge.exchange(make_post(json.dumps(PROMPT | stops).encode(), b"/v1/completions"))
        body = {"model": "tiny", "input": "hi", "background": True, "store": True}
        await edge.exchange(make_post(json.dumps(body).encode(), b"/v1/responses"))
        completion, response = (json.loads(request.body) for request in prefill.received)
        assert not set(stops) & set(completion)
        assert completion["ignore_eos"] is True
        assert (response["store"], "background" in response) == (False, False)

    edge.run(scenario())
