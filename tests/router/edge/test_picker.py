"""The picker over real gRPC, before the core and the edge's books; Envoy is played by the test."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from options.tls import ServerPem, watch_server_pem
from router.app.api_keys import ApiKeys
from router.decide.workers import ServedModel, WorkerSpec
from router.host_names import HostNames
from router.http.config import HttpLimits
from router.http.request import HttpRequest
from router.picker.certificate import make_self_signed_certificate
from router.picker.config import PickerConfig
from router.picker.endpoint_map import EndpointMap
from router.picker.messages import BUFFERED, DUPLEX, MODEL_REWRITE_HEADER, NONE, SUBSET_HINT_FIELD, SUBSET_HINT_METADATA
from router.picker.pick_exchange import PickExchange
from router.picker.picker_client import Picker
from router.picker.server import READY, PickerServer

BODY = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()


class Envoy:
    """Streams to one picker."""

    def __init__(self, edge: Any, server: PickerServer, picking: Picker, tls: bytes | None) -> None:
        self.edge, self.server, self.port, self.picker_state = edge, server, server.port, picking
        self.ended: list[Any] = []
        edge.proxy.on_end.append(self.ended.append)
        trusted = None if tls is None else grpc.ssl_channel_credentials(tls)
        where = f"127.0.0.1:{server.port}"
        self.channel = grpc.aio.secure_channel(where, trusted) if trusted else grpc.aio.insecure_channel(where)

    def stream(self, raw: bool = False) -> Any:
        method = self.channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=None if raw else pb.ProcessingRequest.SerializeToString,
            response_deserializer=None if raw else pb.ProcessingResponse.FromString,
        )
        return method(timeout=10)

    async def ask(self, body: bytes = BODY, hint: Any = None, answer: int = NONE, **headers: str) -> tuple[Any, Any]:
        """(stream, the answer to the request)."""
        stream = self.stream()
        head = request_head(answer, **headers)
        if hint is not None:
            head.metadata_context.filter_metadata[SUBSET_HINT_METADATA].update({SUBSET_HINT_FIELD: hint})
        await stream.write(head)
        await stream.read()
        await stream.write(pb.ProcessingRequest(request_body={"body": body, "end_of_stream": True}))
        return stream, await stream.read()


def request_head(answer: int = NONE, **headers: str) -> Any:
    fields = {":method": "POST", ":path": "/v1/completions", **{k.replace("_", "-"): v for k, v in headers.items()}}
    message = pb.ProcessingRequest(
        request_headers={"headers": {"headers": [{"key": k, "raw_value": v.encode()} for k, v in fields.items()]}}
    )
    message.protocol_config.request_body_mode = BUFFERED
    message.protocol_config.response_body_mode = answer
    return message


def answer_head(status: int = 200, served: str | None = None) -> Any:
    message = pb.ProcessingRequest(
        response_headers={"headers": {"headers": [{"key": ":status", "raw_value": b"%d" % status}]}}
    )
    if served is not None:
        message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    return message


def endpoints(response: Any) -> list[str]:
    options = {o.header.key: o.header.raw_value for o in response.request_body.response.header_mutation.set_headers}
    found: list[str] = options["x-gateway-destination-endpoint"].decode().split(",")
    return found


def worker_of(response: Any) -> str:
    options = response.response_headers.response.header_mutation.set_headers
    return next(o.header.raw_value.decode() for o in options if o.header.key == "x-blockcast-worker")


@asynccontextmanager
async def picker(
    edge: Any,
    workers: int = 3,
    config: PickerConfig | None = None,
    get_pem: Callable[[], ServerPem] | None = None,
    **settings: Any,
) -> AsyncIterator[Envoy]:
    await edge.start(**settings)
    for number in range(workers):
        await edge.worker(edge.reply(), f"w{number}", port=9100 + number)
    picking = Picker(
        edge.proxy,
        config or PickerConfig(),
        EndpointMap(edge.core.workers, HostNames()),
        find_tenant=ApiKeys(edge.proxy.config.api_keys).find_tenant,
        dispatch=partial(edge.dispatcher.dispatch, make_exchange=PickExchange),
    )
    server = PickerServer(picking, find_unready_reason=edge.health.find_unready_reason)
    server.bind("127.0.0.1", 0, 0, get_pem)
    await server.start()
    envoy = Envoy(edge, server, picking, None if get_pem is None else get_pem().certificate_chain)
    try:
        server.refresh(edge.now())
        yield envoy
    finally:
        await envoy.channel.close()
        await server.stop(0)


def load(edge: Any) -> dict[str, int]:
    return {target.worker_id: target.load.request_count for target in edge.core.tracker.targets.values()}


def test_a_choice_has_fallbacks_and_ends_with_its_stream(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge) as envoy:
            stream, chosen = await envoy.ask()
            found = endpoints(chosen)
            assert sorted(found) == ["127.0.0.1:9100", "127.0.0.1:9101", "127.0.0.1:9102"]
            assert sum(load(edge).values()) == 1
            await stream.write(answer_head())
            first = f"w{found[0][-1]}"
            assert worker_of(await stream.read()) == first
            assert load(edge)[first] == 1  # until the stream ends
            await stream.done_writing()
            await edge.until(lambda: not sum(load(edge).values()))
            assert [exchange.outcome for exchange in envoy.ended] == ["status_200"]
            gone, _ = await envoy.ask()
            gone.cancel()
            await edge.until(lambda: not sum(load(edge).values()))
            assert envoy.ended[1].outcome == "client_gone"

    edge.run(scenario())


def test_a_certificate_of_its_own(edge: Any) -> None:
    """As gateways ask for it: TLS, HTTP/2 by ALPN."""

    async def scenario() -> None:
        pem = ServerPem(*make_self_signed_certificate("127.0.0.1"))
        async with picker(edge, get_pem=lambda: pem) as envoy:
            _, response = await envoy.ask()
            assert len(endpoints(response)) == 3
            client = ssl.create_default_context()
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
            client.set_alpn_protocols(["h2", "http/1.1"])
            _, writer = await asyncio.open_connection("127.0.0.1", envoy.port, ssl=client)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            writer.close()

    edge.run(scenario())


def test_renewed_certificates_and_authorities_count_for_the_next_connection(edge: Any, tmp_path: Path) -> None:
    """Files as an operator replaces them: of the server, and of those who may sign the certificates of its clients."""
    pems = {name: make_self_signed_certificate("127.0.0.1") for name in ("old", "new", "alice", "bob")}
    paths = [tmp_path / name for name in ("tls.pem", "tls.key", "ca.pem")]

    def write(name: str, authority: str) -> None:
        for path, content in zip(paths, (*pems[name], pems[authority][0])):
            path.with_suffix(".next").write_bytes(content)
            path.with_suffix(".next").rename(path)

    async def is_let_in(envoy: Envoy, trusted: str, client: str | None = None) -> bool:
        chain, key = pems[client] if client else (None, None)
        credentials = grpc.ssl_channel_credentials(pems[trusted][0], key, chain)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{envoy.port}", credentials, options) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                return bool(error.code() is not grpc.StatusCode.UNAVAILABLE)
        return True

    async def scenario() -> None:
        write("old", "alice")
        async with picker(edge, get_pem=watch_server_pem(*map(str, paths))) as envoy:
            clients = ("alice", "bob", None)
            assert [await is_let_in(envoy, "old", client) for client in clients] == [True, False, False]
            write("new", "bob")
            assert [await is_let_in(envoy, "new", client) for client in clients] == [False, True, False]
            assert not await is_let_in(envoy, "old", "bob")
            paths[1].write_bytes(pems["old"][1])  # and not its certificate
            assert await is_let_in(envoy, "new", "bob")

    edge.run(scenario())


def test_the_books_follow_to_whoever_served(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge) as envoy:
            stream, chosen = await envoy.ask()
            first, second, _ = endpoints(chosen)
            await stream.write(answer_head(served=second))
            assert worker_of(await stream.read()) == f"w{second[-1]}"
            assert load(edge) == {f"w{n}": int(second.endswith(str(n))) for n in range(3)}
            assert edge.metrics.failures[f"w{first[-1]}", "reset"] == 1
            await stream.done_writing()

    edge.run(scenario())


@pytest.mark.parametrize(("status", "kind"), [(503, "server_error"), (429, "overloaded"), (500, "internal_error")])
def test_a_worker_s_failure_is_held_against_it(edge: Any, status: int, kind: str) -> None:
    async def scenario() -> None:
        async with picker(edge) as envoy:
            stream, chosen = await envoy.ask()
            await stream.write(answer_head(status))
            await stream.read()
            assert edge.metrics.failures[f"w{endpoints(chosen)[0][-1]}", kind] == 1
            assert not sum(load(edge).values())
            await stream.done_writing()

    edge.run(scenario())


@pytest.mark.parametrize("hint", [["127.0.0.1:9101"], "127.0.0.1:9101, 127.0.0.1:1"])
def test_only_the_gateway_s_subset_is_chosen(edge: Any, hint: Any) -> None:
    async def scenario() -> None:
        async with picker(edge) as envoy:
            for _ in range(4):
                stream, chosen = await envoy.ask(hint=hint)
                assert endpoints(chosen) == ["127.0.0.1:9101"]
                stream.cancel()
            for empty in ([], ["10.9.9.9:1"], "nonsense"):
                _, refused = await envoy.ask(hint=empty)
                assert refused.immediate_response.status.code == 503

    edge.run(scenario())


def test_load_is_shed_with_429(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, core={"requests_max": 1}) as envoy:
            stream, _ = await envoy.ask()
            _, refused = await envoy.ask()
            assert refused.immediate_response.status.code == 429
            names = {o.header.key for o in refused.immediate_response.headers.set_headers}
            assert names >= {"retry-after", "content-type"}
            stream.cancel()

    edge.run(scenario())


def test_no_worker_is_503_and_health_says_so(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, workers=0) as envoy:
            _, refused = await envoy.ask()
            assert refused.immediate_response.status.code == 503
            health = health_pb2_grpc.HealthStub(envoy.channel)

            async def state(name: str) -> int:
                return int((await health.Check(health_pb2.HealthCheckRequest(service=name))).status)

            assert await state("liveness") == 1
            assert [await state(name) for name in READY] == [2] * len(READY)
            await edge.worker(edge.reply(), "w0", port=9100)
            for _ in range(100):
                envoy.server.refresh(edge.now())
                await asyncio.sleep(0.01)
                if await state("") == 1:
                    break
            assert [await state(name) for name in READY] == [1] * len(READY)

    edge.run(scenario())


def test_objectives_become_priorities_and_fairness_orders_within_them(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, config=PickerConfig(objectives=("batch=7", "chat=-2"))) as envoy:
            streams, asked = [], []
            for headers in (
                {"x_gateway_inference_objective": "batch"}, {"x_gateway_inference_objective": "chat"},
                {"x_gateway_inference_objective": "unknown"}, {"x_gateway_inference_fairness_id": "a"},
                {"x_gateway_inference_fairness_id": "a"}, {"x_gateway_inference_fairness_id": "b"},
            ):  # fmt: skip
                streams.append((await envoy.ask(**headers))[0])
                route = [*edge.proxy.exchanges.values()][-1].context.route
                asked.append((route.priority, route.queue_rank))
            assert asked == [(7, 0), (-2, 1), (0, 2), (0, 0), (0, 1), (0, 0)]
            for stream in streams:
                stream.cancel()
            await edge.until(lambda: not envoy.picker_state.in_flight_counts)

    edge.run(scenario())


def test_keys_are_asked_for(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, api_keys=("secret",)) as envoy:
            _, refused = await envoy.ask()
            assert refused.immediate_response.status.code == 401
            stream, chosen = await envoy.ask(authorization="Bearer secret")
            assert endpoints(chosen)
            stream.cancel()

    edge.run(scenario())


def test_an_answer_s_usage_is_read_where_it_comes_by(edge: Any) -> None:
    usage = b'data: {"usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'

    async def scenario() -> None:
        async with picker(edge) as envoy:
            stream, _ = await envoy.ask(answer=DUPLEX)
            await stream.write(answer_head())
            await stream.read()
            for number in range(40):
                await stream.write(pb.ProcessingRequest(response_body={"body": b"data: %d\n\n" % number}))
                assert (await stream.read()).HasField("response_body")
            assert any(target.load.decode_request_count for target in edge.core.tracker.targets.values())
            await stream.write(pb.ProcessingRequest(response_body={"body": usage, "end_of_stream": True}))
            await stream.read()
            await edge.until(lambda: not sum(load(edge).values()))
            assert (envoy.ended[0].usage.prompt_tokens, envoy.ended[0].usage.cached_tokens) == (10, 4)

    edge.run(scenario())


def test_a_compressed_body_is_forwarded_decoded(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge) as envoy:
            headers = {"content_encoding": "gzip", "accept_encoding": "gzip"}
            _, answer = await envoy.ask(gzip.compress(BODY), answer=DUPLEX, **headers)
            common = answer.request_body.response
            assert common.body_mutation.body == BODY
            assert {"content-encoding", "accept-encoding"} <= set(common.header_mutation.remove_headers)
            _, answer = await envoy.ask(BODY, content_encoding="br")
            assert answer.immediate_response.status.code == 415
            _, answer = await envoy.ask(BODY, content_encoding="gzip")
            assert answer.immediate_response.status.code == 400

    edge.run(scenario())


def test_a_gateway_s_model_counts_instead_of_the_body_s(edge: Any) -> None:
    """Also in a long body, which another process reads."""

    async def scenario() -> None:
        async with picker(edge) as envoy:
            edge.dispatcher.reader.model_header = MODEL_REWRITE_HEADER
            for body in ({"model": "other", "prompt": [1]}, {"prompt": [1]}, {"prompt": [1], "text": "x" * 100_000}):
                _, answer = await envoy.ask(json.dumps(body).encode(), x_gateway_model_name_rewrite="tiny")
                sent = json.loads(answer.request_body.response.body_mutation.body)
                assert sent == {**body, "model": "tiny"}

    edge.run(scenario())


def test_bytes_are_booked_on_the_gateway_s_client(edge: Any) -> None:
    """The gateway is one peer for all clients: who keeps too much is refused alone."""
    large = BODY[:-1] + b', "x": "' + b"y" * 60_000 + b'"}'

    async def scenario() -> None:
        async with picker(edge, limits=HttpLimits(tenant_buffer_bytes_max=100_000)) as envoy:
            streams = []
            for client, refused in (("10.1.1.1", False), ("9.9.9.9, 10.1.1.1", True), ("10.1.1.2", False)):
                stream, answer = await envoy.ask(large, x_forwarded_for=client)
                assert (answer.immediate_response.status.code == 429) is refused, client
                streams.append(stream)
            for stream in streams:
                stream.cancel()
            await edge.until(lambda: not edge.metrics.request_buffer_bytes)

    edge.run(scenario())


def test_a_worker_that_joins_is_known_at_once(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, workers=1) as envoy:
            await edge.worker(edge.reply(), "w9", port=9109)
            known = envoy.picker_state.endpoints
            assert known.find_worker_ids(["127.0.0.1:9100", "127.0.0.1:9109", "127.0.0.1:1"]) == {"w0", "w9"}
            assert [known.get_worker_id(endpoint) for endpoint in ("127.0.0.1:9109", "127.0.0.1:1")] == ["w9", None]

    edge.run(scenario())


def test_a_name_is_looked_up(edge: Any) -> None:
    async def scenario() -> None:
        async with picker(edge, workers=0) as envoy:
            models = (ServedModel("tiny", "tiny", max_model_len=4096),)
            edge.core.add_worker(WorkerSpec("named", "http://localhost:9100", models), edge.now())
            envoy.server.refresh(edge.now() + 5)
            await edge.until(lambda: envoy.picker_state.endpoints.get_endpoint("named") is not None)
            stream, chosen = await envoy.ask()
            assert endpoints(chosen) == ["127.0.0.1:9100"]
            stream.cancel()

    edge.run(scenario())


def test_garbage_ends_its_own_stream_alone(edge: Any) -> None:
    """Bytes that are no message, messages cut and mutated, in any order, from many at once."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    good = [
        request_head(DUPLEX), request_head(), answer_head(), answer_head(503, "127.0.0.1:9101"),
        pb.ProcessingRequest(request_body={"body": BODY, "end_of_stream": True}),
        pb.ProcessingRequest(response_body={"body": b"data: x\n\n", "end_of_stream": True}),
        pb.ProcessingRequest(request_trailers={}), pb.ProcessingRequest(response_trailers={}), pb.ProcessingRequest(),
    ]  # fmt: skip

    def message() -> bytes:
        data = bytearray(rng.choice(good).SerializeToString())
        kind = rng.randrange(4)
        if kind == 0 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:
            del data[rng.randrange(len(data) + 1) :]
        elif kind == 2 and rng.random() < 0.3:
            data = bytearray(rng.randbytes(rng.randrange(200)))
        return bytes(data)

    async def scenario() -> None:
        async with picker(edge) as envoy:

            async def attack() -> None:
                stream = envoy.stream(raw=True)
                try:
                    for _ in range(rng.randrange(1, 7)):
                        await stream.write(message())
                        if rng.random() < 0.3:
                            await asyncio.sleep(0)
                    if rng.random() < 0.5:
                        await stream.done_writing()
                        while await asyncio.wait_for(stream.read(), 5) is not grpc.aio.EOF:
                            pass
                except (grpc.RpcError, asyncio.InvalidStateError):
                    pass
                finally:
                    stream.cancel()

            for _ in range(20):
                await asyncio.gather(*(attack() for _ in range(20)))
                stream, chosen = await asyncio.wait_for(envoy.ask(), 5)
                assert endpoints(chosen)
                stream.cancel()
            await edge.until(lambda: envoy.server.open_stream_count == 0)
            assert not edge.metrics.crashes
            assert not sum(load(edge).values())

    edge.run(scenario(), 60)


def test_an_ended_request_is_freed_without_garbage_collection(edge: Any) -> None:
    """The router collects old objects rarely; an exchange keeps the token ids of its prompt, a stream the body."""

    def count_requests() -> int:
        return sum(type(item) in (PickExchange, HttpRequest) for item in gc.get_objects())

    async def scenario() -> None:
        async with picker(edge) as envoy:
            gc.collect()
            gc.disable()
            other_count = count_requests()  # earlier tests may keep some
            try:
                for _ in range(3):
                    stream, _ = await envoy.ask()
                    await stream.write(answer_head())
                    await stream.read()
                    await stream.done_writing()
                    assert await stream.read() is grpc.aio.EOF
                abandoned = envoy.stream()
                head = request_head()
                head.protocol_config.request_body_mode = DUPLEX
                await abandoned.write(head)
                await abandoned.write(pb.ProcessingRequest(request_body={"body": bytes(1 << 20)}))
                await edge.until(lambda: edge.metrics.request_buffer_bytes)
                abandoned.cancel()
                await edge.until(lambda: not envoy.server.open_stream_count)
                envoy.ended.clear()
                assert count_requests() <= other_count
            finally:
                gc.enable()

    edge.run(scenario())
