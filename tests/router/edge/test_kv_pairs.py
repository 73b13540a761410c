"""Two workers that get their requests at once: what both are told, and every way in which either of them fails."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from functools import partial
from typing import Any

import msgspec
import pytest
from nixl_workers import text_for
from paired_workers import P2PWorkers, SGLangWorkers

from router.decide.messages import Transfer, TransferKind
from router.decide.workers import KINDS_BY_DIALECT, TransferFacts
from router.edge.config import Timeouts
from router.edge.exchange import Exchange
from router.edge.request_context import RequestContext
from router.edge.transfers.dialects import DIALECTS
from router.edge.transfers.prefill_leg import PrefillLeg
from router.edge.upstream import Endpoint, UpstreamConnection, UpstreamPool

SGLANG = TransferFacts("g", KINDS_BY_DIALECT["sglang"], dialect="sglang", address="127.0.0.1:8998", needs_partner=True)
P2P = TransferFacts("g", KINDS_BY_DIALECT["p2p"], dialect="p2p", address="127.0.0.1:5711")
FACTS = {"sglang": SGLANG, "p2p": P2P}
PROMPT = {"model": "tiny", "prompt": "hello", "max_tokens": 8}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES = [
    ("/v1/completions", PROMPT | {"logprobs": 1, "n": 1}),
    ("/v1/completions", PROMPT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "max_completion_tokens": 9}),
    ("/v1/messages", CHAT | {"max_tokens": 5}),
    ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 5}),
]


async def start_pairs(edge: Any, dialect: str, **scripts: Any) -> tuple[Any, dict[str, Any]]:
    """Start a router before two pairs of workers, p and q for prefills, d and e for decodes, but for scripts of None.

    With P2P, the least busy prefill worker computes each prompt, as with SGLang, where the router has no choice.
    """
    workers = SGLangWorkers() if dialect == "sglang" else P2PWorkers()
    await edge.start(timeouts=Timeouts(first_byte_s=100.0))
    upstreams = {}
    for name in "pqde":
        script = scripts.get(name, workers.prefill if name in "pq" else workers.decode)
        if script is None:
            continue
        upstreams[name] = await edge.worker(script, name, engine=dialect)
        is_prefill = name in "pq"
        facts = dataclasses.replace(FACTS[dialect], can_give=is_prefill, can_take=not is_prefill)
        spec = dataclasses.replace(
            edge.core.workers[name].spec,
            transfer=dataclasses.replace(facts, needs_partner=True),
            roles=frozenset({"prefill" if is_prefill else "decode"}),
        )
        edge.core.add_worker(spec, edge.now())
        if dialect == "p2p":  # planned as SGLang's pairs are; then each computes alone where the other fails
            worker = edge.core.workers[name]
            worker.spec = dataclasses.replace(spec, transfer=facts)
    return workers, upstreams


def post_body(make_post: Any, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data: bytes = make_post(json.dumps(body).encode(), path.encode())
    return data


def read_text(answer: bytes) -> str:
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    return text


def count_outcomes(edge: Any) -> dict[str, int]:
    return {outcome: count for (_, outcome), count in edge.metrics.transfers.outcomes.items()}


both_dialects = pytest.mark.parametrize("dialect", ["sglang", "p2p"])


@both_dialects
def test_an_ended_pair_is_freed_without_the_garbage_collector(edge: Any, make_post: Any, dialect: str) -> None:
    """As is a request to one worker (test_budget.py): the prefill and its attempt referred to each other."""

    def count_requests() -> int:
        return sum(type(item) in (Exchange, RequestContext, PrefillLeg) for item in gc.get_objects())

    async def scenario() -> None:
        await start_pairs(edge, dialect)
        await edge.exchange(post_body(make_post, PROMPT))
        await edge.settle()
        gc.collect()
        gc.disable()
        other_count = count_requests()  # earlier tests may keep some
        try:
            for _ in range(3):
                await edge.exchange(post_body(make_post, PROMPT))
            await edge.settle()
            await edge.let_loop_read()
            assert count_requests() <= other_count
        finally:
            gc.enable()

    edge.run(scenario())


@both_dialects
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_both_workers_get_their_requests_at_once(
    edge: Any, make_post: Any, dialect: str, path: str, body: dict[str, Any]
) -> None:
    """Each of them waits for the other."""

    async def scenario() -> None:
        workers, _ = await start_pairs(edge, dialect)
        answer = await edge.exchange(post_body(make_post, body, path))
        assert answer.startswith(b"HTTP/1.1 200")
        assert text_for(body).encode() in answer
        assert b"prefill's own token" not in answer
        assert (b"tool_calls" in answer, b"logprobs" in answer) == ("tools" in body, "logprobs" in body)
        await edge.settle()
        assert (workers.transfers, workers.faults, +workers.waiting) == (1, [], {})
        assert count_outcomes(edge) == {"started": 1}
        (bodies,) = workers.bodies.values()
        assert body in bodies, "the decoding worker gets the client's body"
        assert dialect == "p2p" or bodies == [body, body]

    edge.run(scenario())


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}])
def test_sglangs_pairs_compute_several_answers(edge: Any, make_post: Any, fields: dict[str, Any]) -> None:
    """From one room SGLang counts on, one room for each answer."""

    async def scenario() -> None:
        workers, _ = await start_pairs(edge, "sglang")
        answer = await edge.exchange(post_body(make_post, PROMPT | fields))
        assert read_text(answer) == text_for(PROMPT | fields)
        assert (workers.transfers, workers.faults) == (1, [])

    edge.run(scenario())


def test_vllm_computes_several_answers_at_one_worker(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        workers, upstreams = await start_pairs(edge, "p2p")
        body = PROMPT | {"n": 2}
        assert read_text(await edge.exchange(post_body(make_post, body))) == text_for(body)
        assert (workers.computed_alone, upstreams["p"].received) == (1, [])
        assert count_outcomes(edge) == {"started": 1, "refused": 1}

    edge.run(scenario())


def test_a_pull_names_a_worker_of_vllms_p2p_tier(edge: Any, make_post: Any) -> None:
    """Each data-parallel rank has a port of its own."""

    async def scenario() -> None:
        workers = P2PWorkers(port=5712)
        await edge.start()
        for name in "pd":
            await edge.worker(workers.decode, name, engine="vllm")
        worker = edge.core.workers["p"]
        worker.spec = dataclasses.replace(worker.spec, transfer=P2P, ranks=2)
        add_pull(edge, "p", rank=1)
        answer = await edge.exchange(post_body(make_post, PROMPT))
        assert read_text(answer) == text_for(PROMPT)
        assert (workers.transfers, workers.faults) == (1, [])

    edge.run(scenario())


def add_pull(edge: Any, source: str, rank: int) -> None:
    """Have each decision send the request to `d`, with a pull from a source."""
    route = edge.core.route

    def route_with_pull(request: Any, *args: Any, **kwargs: Any) -> Any:
        request.worker = "d"
        forward = route(request, *args, **kwargs)
        transfer = Transfer(TransferKind.PULL, source, rank, 128, 0.01)
        forward.decision.terms = msgspec.structs.replace(forward.decision.terms, transfer=transfer)
        return forward

    edge.core.route = route_with_pull


async def die(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def die_in_the_middle(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()


async def fail(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")


async def overload(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")


FAULTS = [(name, fault) for name in "pd" for fault in (die, fail, overload, None)] + [("p", die_in_the_middle)]


@both_dialects
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("broken", "fault"), FAULTS)
def test_either_worker_may_fail(
    edge: Any, make_post: Any, dialect: str, is_stream: bool, broken: str, fault: Any
) -> None:
    """The other pair answers, or with vLLM the decoding worker alone. None: the worker refuses connections."""

    async def scenario() -> None:
        workers, upstreams = await start_pairs(edge, dialect, **{broken: fault or die})
        if fault is None:
            await upstreams[broken].stop()
        body = PROMPT | {"stream": is_stream}
        for _ in range(4):
            answer = await edge.exchange(post_body(make_post, body))
            assert text_for(body).encode() in answer
            assert b"prefill's own token" not in answer
        await edge.settle()
        assert (workers.faults, +workers.waiting) == ([], {})
        assert edge.core.counters["retried"] <= 4, "one retry a request"
        for target in edge.core.tracker.targets.values():
            load = target.load
            assert (load.request_count, load.incoming_transfers, load.outgoing_transfers) == (0, 0, 0)

    edge.run(scenario())


@pytest.mark.parametrize("failing_decodes", [1, 99])
def test_the_only_decoding_worker_answers_with_another_prefill_worker(
    edge: Any, make_post: Any, failing_decodes: int
) -> None:
    """It answers 500 because it got no KV, while the prefill worker, whose fault it is, stands still."""

    async def scenario() -> None:
        decodes = 0

        async def decode(request: Any, reader: Any, writer: Any) -> None:
            nonlocal decodes
            decodes += 1
            await edge.until(lambda: upstreams["p"].received)
            await (fail if decodes <= failing_decodes else workers.decode)(request, reader, writer)

        gate = asyncio.Event()
        workers, upstreams = await start_pairs(edge, "sglang", p=edge.gated(gate), d=decode, e=None)
        edge.core._links.record_failure("q", "d", edge.now())  # the first request goes to the pair of p and d
        answer = await edge.exchange(post_body(make_post, PROMPT))
        if failing_decodes == 1:
            assert read_text(answer) == text_for(PROMPT)
            assert [len(upstreams[name].received) for name in "pqd"] == [1, 1, 2]
        else:
            assert answer.startswith(b"HTTP/1.1 500"), "the last one's own answer"
            assert decodes == 3, "as many tries as other failures have"
        gate.set()

    edge.run(scenario())


@both_dialects
@pytest.mark.parametrize("frozen", ["p", "d"])
def test_a_frozen_worker_is_waited_for_a_bounded_time(edge: Any, make_post: Any, dialect: str, frozen: str) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        others = {"q": None} if frozen == "d" else {"e": None}
        workers, upstreams = await start_pairs(edge, dialect, **{frozen: edge.gated(gate)}, **others)
        answers = [asyncio.ensure_future(edge.exchange(post_body(make_post, PROMPT))) for _ in range(2)]
        frozen_requests = upstreams[frozen].received
        await edge.until(lambda: frozen_requests and any(answer.done() for answer in answers))
        while not all(answer.done() for answer in answers):
            is_over = partial(has_moved_on, answers, frozen_requests, len(frozen_requests))
            edge.advance(101.0)
            await edge.until(is_over)
        for answer in await asyncio.gather(*answers):
            assert read_text(answer) == text_for(PROMPT)
        await edge.settle()
        assert (workers.faults, +workers.waiting) == ([], {})
        gate.set()

    edge.run(scenario())


def has_moved_on(answers: list[asyncio.Future[bytes]], requests: list[Any], count: int) -> bool:
    """Return whether all answers are complete, or a request came to the frozen worker that had `count` of them."""
    return all(answer.done() for answer in answers) or len(requests) > count


@both_dialects
@pytest.mark.parametrize("absent", ["p", "d", "none"])
def test_a_client_that_leaves_leaves_nothing_behind(edge: Any, make_post: Any, dialect: str, absent: str) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        scripts = {} if absent == "none" else {absent: edge.gated(gate)}
        workers, upstreams = await start_pairs(edge, dialect, q=None, e=None, **scripts)
        if absent == "none":
            workers._enter = lambda *args: None  # they never meet
            workers.decode_joined = workers.handed_over = _Never()
        _, writer = await edge.connect()
        writer.write(post_body(make_post, PROMPT))
        await edge.until(lambda: upstreams["p"].received and upstreams["d"].received)
        writer.close()
        await edge.until(lambda: not edge.proxy.exchanges)
        await edge.settle()
        await edge.until(lambda: not +workers.waiting)
        assert workers.faults == []
        gate.set()

    edge.run(scenario())


class _Never(dict[str, asyncio.Event]):
    def __missing__(self, place: str) -> asyncio.Event:
        return asyncio.Event()


def test_a_request_that_sglang_refuses_is_refused_by_the_decoding_worker(edge: Any, make_post: Any) -> None:
    """The prefill's refusal may come first, and says nothing about the worker."""

    async def scenario() -> None:
        gate = asyncio.Event()

        async def decode_late(request: Any, reader: Any, writer: Any) -> None:
            await gate.wait()
            await workers.decode(request, reader, writer)

        workers, upstreams = await start_pairs(edge, "sglang", q=None, e=None, d=decode_late)
        answer = asyncio.ensure_future(
            edge.exchange(post_body(make_post, CHAT | {"messages": []}, "/v1/chat/completions"))
        )
        await edge.until(lambda: upstreams["p"].received)
        await edge.let_loop_read()
        gate.set()
        assert b"400 Bad Request" in await answer
        assert b"no messages" in await answer
        assert workers.faults == []

    edge.run(scenario())


@pytest.mark.parametrize("gone", ["pq", "de"])
def test_no_pair_of_sglangs_workers_is_left(edge: Any, make_post: Any, gone: str) -> None:
    async def scenario() -> None:
        _, upstreams = await start_pairs(edge, "sglang")
        for name in gone:
            await upstreams[name].stop()
            edge.proxy.perform(edge.core.mark_worker_down(name, edge.now(), "killed"))
        answer = await edge.exchange(post_body(make_post, PROMPT))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"no pair" in answer
        assert not any(upstreams[name].received for name in "pqde")

    edge.run(scenario())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/rerank"])
def test_requests_without_an_answer_to_decode_go_to_one_worker(edge: Any, make_post: Any, path: str) -> None:
    async def scenario() -> None:
        reply = edge.reply(b'{"data":[]}')
        _, upstreams = await start_pairs(edge, "sglang", d=reply, e=reply)
        body = {"model": "tiny", "input": "hello"}
        assert b'{"data":[]}' in await edge.exchange(post_body(make_post, body, path))
        received = [request for upstream in upstreams.values() for request in upstream.received]
        assert [json.loads(request.body) for request in received] == [body]

    edge.run(scenario())


CLIENT_FIELDS = {
    "bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 7, "bootstrap_pair_key": "k",
    "routed_dp_rank": 3, "disagg_prefill_dp_rank": 3, "data_parallel_rank": 3, "rid": "r", "decode_tp_size": 2,
    "kv_transfer_params": {
        "do_remote_prefill": True, "remote_kv_source": {"remote_host": "evil"},
        "remote_decoder": {"kv_request_id": "x"},
        "remote_prefiller": {"kv_request_id": "x", "remote_host": "evil", "remote_port": 1},
    },
}  # fmt: skip


@both_dialects
@pytest.mark.parametrize("container", [None, "extra_body", "vllm_xargs"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_client_names_no_meeting_place(
    edge: Any, make_post: Any, dialect: str, container: str | None, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        workers, upstreams = await start_pairs(edge, dialect)
        sent = CLIENT_FIELDS | body if container is None else body | {container: CLIENT_FIELDS}
        answer = await edge.exchange(post_body(make_post, sent, path))
        assert answer.startswith(b"HTTP/1.1 200")
        for upstream in upstreams.values():
            for request in upstream.received:
                assert b"evil" not in request.body
                names = [name for name, _ in json.loads(request.body, object_pairs_hook=list)]
                assert len(names) == len(set(names)), "no worker has to choose between two values"
        assert (workers.transfers, workers.faults, +workers.waiting) == (1, [], {})

    edge.run(scenario())


@both_dialects
@pytest.mark.parametrize(
    "content", [b"<html>", b"", b"[" * 100_000, b'{"kv_transfer_params":{}}', b"\xff\xfe", b" " * (5 << 20)]
)
def test_nothing_in_the_prefills_answer_matters(edge: Any, make_post: Any, dialect: str, content: bytes) -> None:
    """Its bytes are dropped, whatever they are; only whether it succeeded counts."""

    async def scenario() -> None:
        workers, _ = await start_pairs(edge, dialect)

        async def prefill(request: Any, reader: Any, writer: Any) -> None:
            pair = workers.handed_over
            body = json.loads(request.body)
            params = body.get("kv_transfer_params")
            place = str(body["bootstrap_room"]) if params is None else params["remote_decoder"]["kv_request_id"]
            pair.setdefault(place, asyncio.Event()).set()
            await edge.reply(content)(request, reader, writer)

        for upstream in edge.upstreams[:2]:
            upstream.script = prefill
        assert read_text(await edge.exchange(post_body(make_post, PROMPT))) == text_for(PROMPT)
        assert (workers.transfers, workers.faults, +workers.waiting) == (1, [], {})
        assert count_outcomes(edge) == {"started": 1}

    edge.run(scenario())


def test_a_decode_that_connects_after_the_prefills_answer_gets_its_fields(
    edge: Any, make_post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may take longer to open than a short prompt takes to compute."""
    connect = UpstreamPool.connect

    async def connect_late(pool: UpstreamPool, connection: UpstreamConnection) -> None:
        decode_urls = [edge.core.workers[name].spec.url for name in "de"]
        (exchange,) = edge.proxy.exchanges.values()
        while connection.target in map(Endpoint.parse, decode_urls) and exchange.context.prefill.ended_at_s is None:
            await asyncio.sleep(0)
        await connect(pool, connection)

    async def scenario() -> None:
        _, upstreams = await start_pairs(edge, "sglang")
        for name, upstream in upstreams.items():
            upstream.script = edge.reply(name.encode())
        monkeypatch.setattr(UpstreamPool, "connect", connect_late)
        await edge.exchange(post_body(make_post, PROMPT))
        (decode,) = upstreams["d"].received + upstreams["e"].received
        (prefill,) = upstreams["p"].received + upstreams["q"].received
        assert json.loads(decode.body)["bootstrap_room"] == json.loads(prefill.body)["bootstrap_room"]

    edge.run(scenario())


@both_dialects
@pytest.mark.parametrize("raw", [b"{}", b" {\n}", b'{"bootstrap_room":7}', b'{ "bootstrap_room":7, "rid":"r" } '])
def test_an_empty_body_stays_json(edge: Any, make_post: Any, dialect: str, raw: bytes) -> None:
    """Each worker says itself what it lacks."""

    async def scenario() -> None:
        workers, _ = await start_pairs(edge, dialect)
        assert (await edge.exchange(make_post(raw, b"/v1/completions"))).startswith(b"HTTP/1.1 200")
        assert (workers.transfers, workers.faults) == (1, [])

    edge.run(scenario())


def test_sglangs_prefill_may_wait_for_a_busy_decoding_worker(edge: Any, make_post: Any) -> None:
    """It has no memory for the KV yet; another pair would only lose the work."""

    async def scenario() -> None:
        gate = asyncio.Event()

        async def decode_late(request: Any, reader: Any, writer: Any) -> None:
            await gate.wait()
            await workers.decode(request, reader, writer)

        workers, upstreams = await start_pairs(edge, "sglang", e=None, d=decode_late)
        answer = asyncio.ensure_future(edge.exchange(post_body(make_post, PROMPT)))
        await edge.until(lambda: upstreams["d"].received and sum(workers.waiting.values()))
        edge.advance(50.0)
        gate.set()
        assert read_text(await answer) == text_for(PROMPT)
        assert (workers.transfers, workers.faults, count_outcomes(edge)) == (1, [], {"started": 1})

    edge.run(scenario())


def test_busy_prefill_workers_are_not_taken_for_crashed_ones(edge: Any, make_post: Any) -> None:
    """The request may crash the first decoding worker, but no other one yet."""

    async def scenario() -> None:
        workers, _ = await start_pairs(edge, "p2p", p=overload, q=overload, d=die)
        for _ in range(4):
            assert read_text(await edge.exchange(post_body(make_post, PROMPT))) == text_for(PROMPT)
        assert workers.faults == []

    edge.run(scenario())


def test_a_prefill_worker_that_is_removed_is_not_taken_for_a_crashed_one(edge: Any, make_post: Any) -> None:
    async def scenario() -> None:
        has_come = asyncio.Event()

        async def hang(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            has_come.set()
            await reader.read(1)
            writer.close()

        async def hang_and_die(request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(upstreams["d"].received) == 1:
                await reader.read(1)
            writer.close()

        _, upstreams = await start_pairs(edge, "p2p", p=hang, d=hang_and_die)
        answer = asyncio.ensure_future(edge.exchange(post_body(make_post, PROMPT)))
        await edge.until(lambda: has_come.is_set() and upstreams["d"].received)
        edge.proxy.perform(edge.core.remove_worker("p", edge.now()))
        assert read_text(await answer) == text_for(PROMPT)
        assert len(upstreams["d"].received) == 2

    edge.run(scenario())


def test_a_pull_from_a_worker_that_no_longer_gives_kv(edge: Any, make_post: Any) -> None:
    """It was restarted without transfers after the pull was planned."""

    async def scenario() -> None:
        workers = P2PWorkers()
        await edge.start()
        for name in "pd":
            await edge.worker(workers.decode, name, engine="vllm")
        add_pull(edge, "p", rank=0)
        assert read_text(await edge.exchange(post_body(make_post, PROMPT))) == text_for(PROMPT)
        assert (workers.computed_alone, workers.faults) == (1, [])

    edge.run(scenario())


def test_a_pair_whose_answer_had_no_byte_yet_is_replaced_as_often_as_others(edge: Any, make_post: Any) -> None:
    """The client has the head of the answer, and the prefill worker of the second pair is busy."""

    async def scenario() -> None:
        calls: list[str] = []
        has_head = asyncio.Event()

        async def decode_head_first(request: Any, reader: Any, writer: Any) -> None:
            calls.append("d")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            has_head.set()
            await reader.read(1)

        async def prefill(request: Any, reader: Any, writer: Any) -> None:
            calls.append("prefill")
            if calls.count("prefill") == 1:
                await has_head.wait()
                await edge.let_loop_read()
            await (overload if calls.count("prefill") < 3 else workers.prefill)(request, reader, writer)

        workers, _ = await start_pairs(edge, "sglang", p=prefill, q=prefill, d=decode_head_first)
        answer = await edge.exchange(post_body(make_post, PROMPT | {"stream": True}))
        assert (calls.count("d"), calls.count("prefill")) == (1, 3)
        assert text_for(PROMPT | {"stream": True}).encode() in answer
        assert answer.endswith(b"0\r\n\r\n")

    edge.run(scenario())


def test_each_dialect_has_the_fields_of_the_transfers_that_it_can_name() -> None:
    assert set(DIALECTS) == set(KINDS_BY_DIALECT)
    for name, dialect in DIALECTS.items():
        methods, kinds = vars(dialect), KINDS_BY_DIALECT[name]
        assert ("make_pull_fields" in methods) == (TransferKind.PULL in kinds), name
        assert ("make_prefill_fields" in methods) == (TransferKind.PREFILL in kinds), name
        assert ("make_decode_fields" in methods) == (TransferKind.PREFILL in kinds), name
