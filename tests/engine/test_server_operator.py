"""The operator's routes and keys, the folders that weights may come from, and how many connections are taken."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiohttp import ClientSession, web

from engine.config import ServerConfig
from engine.http import server
from engine.http.admission import Admission
from engine.http.api_keys import ApiKeys
from engine.http.generate import ChoiceUpdater
from engine.http.metrics import RequestClock, ServerMetrics
from engine.http.server import LimitedProtocolFactory, build_app, compute_max_connections, make_runner
from engine.http.state import STATE, ServerState
from engine.http.weights import resolve_weights_folder, sleep
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import make_generation
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import ParsedRequest
from engine.tiny.tokenizer import build_tokenizer
from engine.types import Constraint, FinishReason, SequenceOutput
from prompts import RequestError, parse_completion


class Client:
    death_reason = None
    logprobs = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def call_core(self, operation: str, **options: Any) -> None:
        self.calls[operation] += 1


def make_state(client: Client, **config: Any) -> ServerState:
    state = object.__new__(ServerState)
    state.config = ServerConfig(sleep_mode=True, **config)
    state.client, state.metrics, state.model_names = client, ServerMetrics(), ("m",)  # type: ignore[assignment]
    state.info = SimpleNamespace(model_path="/models/own", max_model_len=8)  # type: ignore[assignment]
    state.admission = Admission(state.client, 0)
    state.start_time_s = 0
    state.weights_change_lock = asyncio.Lock()
    state.api_keys = ApiKeys(state.config.api_keys, state.config.admin_api_key)
    return state


RELOAD = json.dumps({"method": "reload_weights"})
OPERATORS = [
    ("/reset_prefix_cache", ""),
    ("/sleep", ""),
    ("/wake_up", ""),
    ("/collective_rpc", RELOAD),
    ("/%73leep", ""),
]


@pytest.mark.parametrize(
    ("config", "key", "status", "models"),
    [
        ({}, None, 200, 200),
        ({"api_keys": ("client",)}, "client", 403, 200),
        ({"api_keys": ("client",)}, None, 403, 401),
        ({"api_keys": ("client",), "admin_api_key": "admin"}, "client", 401, 200),
        ({"api_keys": ("client",), "admin_api_key": "admin"}, "admin", 200, 401),
        ({"admin_api_key": "admin"}, None, 401, 200),
        ({"admin_api_key": "admin"}, "admin", 200, 200),
    ],
)
def test_no_clients_key_opens_the_operators_routes(
    config: dict[str, Any], key: str | None, status: int, models: int
) -> None:
    async def play() -> None:
        client = Client()
        runner = make_runner(build_app(make_state(client, **config)), log_requests=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with ClientSession(headers=headers) as session:
                for path, body in OPERATORS:
                    async with session.post(url + path, data=body) as answer:
                        assert answer.status in (status, 409 if status == 200 else status), path
                async with session.get(url + "/v1/models") as answer:
                    assert answer.status == models
        finally:
            await runner.cleanup()
        assert bool(client.calls) == (status == 200)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/responses/compact", "this action is not supported"),
        ("/v1/responses/input_tokens", "this action is not supported"),
        ("/v1/embeddings", "this engine has no such path"),  # such as from Haystack, through a router that has it
    ],
)
def test_a_path_of_openai_that_the_engine_does_not_serve_is_named(path: str, reason: str) -> None:
    async def post() -> tuple[int, Any]:
        runner = make_runner(build_app(make_state(Client())), log_requests=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        try:
            async with ClientSession() as session, session.post(url, json={"model": "m", "input": "hi"}) as answer:
                return answer.status, (await answer.json())["error"]
        finally:
            await runner.cleanup()

    status, error = asyncio.run(post())
    assert status == 404
    assert error["message"].startswith(f"{path}: {reason}")
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")


def test_weights_come_from_named_folders_only(tmp_path: Path) -> None:
    model_folder, named_folder, other_folder = tmp_path / "own", tmp_path / "named", tmp_path / "named-not"
    for folder in (model_folder, named_folder / "deep" / "er", other_folder):
        folder.mkdir(parents=True)
    (named_folder / "out").symlink_to(other_folder)
    roots = (str(named_folder), str(model_folder))
    for path in (
        model_folder,
        named_folder,
        named_folder / "deep" / "er",
        named_folder / "new",
        named_folder / "deep" / ".." / "deep",
    ):
        assert resolve_weights_folder(str(path), roots) == str(path.resolve())
    for path in (
        other_folder,
        named_folder / "out",
        named_folder / ".." / "named-not",
        Path("/etc"),
        Path("own"),
        Path("org/hub-name"),
    ):
        with pytest.raises(RequestError, match=r"kwargs.weights_path: got .*--allowed-weights-path") as error_info:
            resolve_weights_folder(str(path), roots)
        assert error_info.value.status == 403


class RefusingClient(Client):
    """Refuses each change of weights after a moment."""

    async def call_core(self, operation: str, **options: Any) -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no")


def test_an_operator_who_leaves_before_a_refusal_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        state = make_state(RefusingClient())
        request = SimpleNamespace(app={STATE: state}, query={})
        leaving = asyncio.ensure_future(sleep(request))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0.05)
        assert not state.admission.is_asleep

    asyncio.run(play())
    gc.collect()
    assert caplog.text == ""


@pytest.mark.parametrize(("path", "is_asleep"), [("/wake_up", False), ("/sleep", True), ("/collective_rpc", True)])
def test_a_change_that_the_engine_has_made_already_keeps_no_request_out(path: str, is_asleep: bool) -> None:
    """A second /wake_up waited for the end of all running requests, and new ones got 503 until then."""

    async def play() -> None:
        client = Client()
        state = make_state(client)
        state.admission.active_request_count, state.admission.is_asleep = 1, is_asleep
        runner = make_runner(build_app(state), log_requests=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        try:
            async with ClientSession() as session, session.post(url, data=RELOAD) as answer:
                assert answer.status == 409
                assert ("asleep" if is_asleep else "awake") in (await answer.json())["error"]["message"]
        finally:
            await runner.cleanup()
        assert state.admission.is_asleep == is_asleep
        assert not client.calls

    asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_beyond_the_limit_are_told_so(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def request_health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        return (await reader.readuntil(b"\r\n\r\n"))[:12]

    async def play() -> None:
        app = web.Application()
        app.add_routes([web.get("/health", health)])
        runner = make_runner(app, log_requests=False)
        await runner.setup()
        assert runner.server is not None
        listening = await asyncio.get_running_loop().create_server(
            LimitedProtocolFactory(runner.server, 2), "127.0.0.1", 0
        )
        address = listening.sockets[0].getsockname()
        try:
            connections = [await asyncio.open_connection(*address) for _ in range(2)]
            assert [await request_health(*pair) for pair in connections] == [b"HTTP/1.1 200"] * 2
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                writer.close()
                await writer.wait_closed()
                assert head.startswith(b"HTTP/1.1 503")
                assert "2 connections are open" in json.loads(body)["error"]["message"]
            connections[0][1].close()
            await connections[0][1].wait_closed()
            while len(runner.server.connections) == 2:
                await asyncio.sleep(0.01)
            connections.append(await asyncio.open_connection(*address))
            assert await request_health(*connections[-1]) == b"HTTP/1.1 200"
            for _, writer in connections:
                writer.close()
                await writer.wait_closed()
        finally:
            listening.close()
            await runner.cleanup()

    run(play())
    assert len([r for r in caplog.records if "no more are taken" in r.message]) == 1


def test_fewer_file_descriptors_are_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "raise_file_limit", lambda: 200)
    assert compute_max_connections(100) == 100
    assert compute_max_connections(None) == 200 - server.OTHER_FILE_DESCRIPTORS
    assert not caplog.records
    assert compute_max_connections(4096) == 200 - server.OTHER_FILE_DESCRIPTORS
    assert "file descriptors are too few for --max-connections 4096: at most 136" in caplog.text
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


@pytest.mark.parametrize(("is_refused", "status"), [(True, 400), (False, 500)])
def test_what_only_the_core_can_refuse_is_the_clients_fault(is_refused: bool, status: int) -> None:
    factory = DetokenizerFactory(build_tokenizer(300))
    constraint = Constraint(lark_grammar="start: X", param="structured_outputs.regex")
    generation = make_generation(
        ParsedRequest(parse_completion(b'{"prompt": [5]}'), [[5]]),
        id="i", request_prefix="u", model="m", limits=ModelLimits(max_model_len=100, vocab_size=300), factory=factory,
        constraint=constraint,
    )  # fmt: skip
    follower = ChoiceUpdater(
        SimpleNamespace(metrics=ServerMetrics()),  # type: ignore[arg-type]
        generation,
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    output = SequenceOutput(request_id="u-0", token_ids=[], error="too complex", is_client_error=is_refused)
    output.finish_reason = FinishReason.ERROR
    with pytest.raises(RequestError, match="too complex") as error_info:
        follower._apply_output(output, 0.0)
    assert error_info.value.status == status
    assert error_info.value.param == ("structured_outputs.regex" if is_refused else None)


def test_an_answer_that_was_begun_elsewhere_counts_its_own_tokens_alone() -> None:
    def make_updater(metrics: ServerMetrics) -> ChoiceUpdater:
        body = b'{"prompt": [5, 6, 7, 8], "answered_tokens": 3, "max_tokens": 9}'
        generation = make_generation(
            ParsedRequest(parse_completion(body), [[5, 6, 7, 8]]), id="i", request_prefix="u", model="m",
            limits=ModelLimits(max_model_len=100, vocab_size=300), factory=DetokenizerFactory(build_tokenizer(300)),
        )  # fmt: skip
        return ChoiceUpdater(SimpleNamespace(metrics=metrics), generation, SimpleNamespace())  # type: ignore[arg-type]

    metrics = ServerMetrics()
    with pytest.raises(RequestError, match="a step failed"):  # before the first token
        make_updater(metrics)._apply_output(SequenceOutput.from_error("u-0", "a step failed"), 1.0)
    assert sum(metrics.request_decode_time.counts) == 0
    updater = make_updater(metrics)
    updater._apply_output(SequenceOutput(request_id="u-0", token_ids=[9]), 1.0)
    last_output = SequenceOutput(request_id="u-0", token_ids=[10], finish_reason=FinishReason.LENGTH)
    updater._apply_output(last_output, 1.5)
    assert metrics.time_per_output_token.total == pytest.approx(0.5)


def test_the_time_per_output_token_leaves_out_the_prompt() -> None:
    metrics = ServerMetrics()
    clock = RequestClock(metrics, 100.0)
    for choice_index, first_token_s in ((0, 110.0), (1, 111.0)):  # two answers: the prompt took 10 s
        for token_s in (0.0, 0.5, 1.0):
            clock.record_tokens(choice_index, 1, first_token_s + token_s)
        clock.record_finish(choice_index, "stop", 1000, first_token_s + 1.0)
    clock.record_tokens(2, 1, 112.0)
    clock.record_finish(2, "length", 1000, 112.0)  # its only token is the prompt's
    assert metrics.time_per_output_token.total == pytest.approx(0.5 + 0.5)
    assert sum(metrics.time_per_output_token.counts) == 2
    assert metrics.inter_token_latency.total == pytest.approx(4 * 0.5)
    assert metrics.time_to_first_token.total == pytest.approx(10.0)
    assert metrics.request_decode_time.total == pytest.approx(1.0 + 1.0)


def test_the_prefill_time_leaves_out_the_queue() -> None:
    metrics = ServerMetrics()
    clock = RequestClock(metrics, 100.0)
    clock.record_queue_time(7.0, 110.0)
    assert metrics.request_queue_time.total == pytest.approx(7.0)
    assert metrics.request_prefill_time.total == pytest.approx(3.0)
