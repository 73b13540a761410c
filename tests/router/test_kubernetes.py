"""Workers that Kubernetes knows: what objects mean, and list and watch against a mock API server (kmock)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from options import ConfigError
from router.fleet import kubernetes, retries
from router.fleet.kubernetes import (
    EndpointReadiness,
    KubernetesSource,
    PoolSelection,
    merge_addresses,
    read_pod,
    read_pool,
    read_slice,
    watch_kubernetes,
)
from router.fleet.retries import run_forever
from router.http_client import FetchError

if sys.version_info >= (3, 11):
    import kmock

needs_mock = pytest.mark.skipif(sys.version_info < (3, 11), reason="kmock needs Python 3.11")
SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


def encode_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def endpoint(host: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions} if conditions else {"addresses": [host]}


def make_slice(name: str, *endpoints: dict[str, Any], version: int = 1, port: int = 8000) -> dict[str, Any]:
    meta = {"name": name, "namespace": "llm", "uid": name, "resourceVersion": str(version)}
    meta["labels"] = {"kubernetes.io/service-name": "vllm"}  # type: ignore[assignment]
    ports = [{"port": port, "name": "http", "protocol": "TCP"}, {"port": 9, "name": "metrics"}]
    return {"metadata": meta, "addressType": "IPv4", "endpoints": list(endpoints), "ports": ports}


@pytest.mark.parametrize(
    ("conditions", "takes"),
    [
        ({}, True), ({"ready": None}, True), ({"ready": True}, True), ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False), ({"ready": True, "terminating": True}, False),
    ],
)  # fmt: skip
def test_what_conditions_mean(conditions: dict[str, bool | None], takes: bool) -> None:
    assert read_slice(make_slice("a", endpoint("10.0.0.1", **conditions)), port=None) == {"10.0.0.1:8000": takes}


def test_ports_and_families() -> None:
    endpoint_slice = make_slice("a", endpoint("10.0.0.1"))
    ipv6_slice = {**endpoint_slice, "addressType": "IPv6", "endpoints": [endpoint("fd00::1")]}
    named_slice = {**endpoint_slice, "addressType": "FQDN", "endpoints": [endpoint("a.b")]}
    assert list(read_slice(endpoint_slice, port="metrics")) == ["10.0.0.1:9"]
    assert list(read_slice(endpoint_slice, port="8000")) == ["10.0.0.1:8000"]
    assert read_slice(endpoint_slice, port="other") == {}
    assert list(read_slice(ipv6_slice, port=None)) == ["[fd00::1]:8000"]
    assert read_slice(named_slice, port=None) == {}
    assert read_slice({**endpoint_slice, "endpoints": None, "ports": None}, port=None) == {}


def pod(ip: str | None, ready: bool = True, leaving: bool = False) -> dict[str, Any]:
    status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    if ip is not None:
        status["podIP"] = ip
    meta = {"name": f"p{ip}", "uid": f"u{ip}", "resourceVersion": "5"}
    return {
        "metadata": {**meta, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {})},
        "status": status,
    }


def test_pods_and_pools() -> None:
    assert read_pod(pod("10.0.0.1"), ports=(8000, 8001)) == {
        "10.0.0.1:8000": True,
        "10.0.0.1:8001": True,
    }
    assert read_pod(pod("10.0.0.1", ready=False), ports=(1,)) == {"10.0.0.1:1": False}
    assert read_pod(pod("10.0.0.1", leaving=True), ports=(1,)) == {"10.0.0.1:1": False}
    assert read_pod(pod(None), ports=(1,)) == {}
    spec = {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 8000}]}
    assert read_pool({"spec": spec}) == PoolSelection("a=1,b=2", (8000,))


def test_an_address_in_two_objects_takes_requests_if_either_says_so() -> None:
    assert merge_addresses([{"10.0.0.1:8000": True}, {"10.0.0.1:8000": False, "10.0.0.2:8000": False}]) == {
        "10.0.0.1:8000": True,
        "10.0.0.2:8000": False,
    }


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("vllm", KubernetesSource("service", "vllm", None, None)),
        ("pool/vllm:8000", KubernetesSource("pool", "vllm", None, "8000")),
        ("llm/service/vllm:http", KubernetesSource("service", "vllm", "llm", "http")),
    ],
)
def test_sources_are_parsed(text: str, source: KubernetesSource) -> None:
    assert KubernetesSource.parse(text) == source


@pytest.mark.parametrize("text", ["", "a/b", "pool/vllm:http", "llm/deployment/vllm", "A", "pool/"])
def test_other_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kubernetes"):
        KubernetesSource.parse(text)


def respond(content: int | bytes | dict[str, Any] | list[dict[str, Any]]) -> Any:
    """Return the answer of the API with an error's status, some bytes, an object, or the events of a watch."""
    if isinstance(content, int):
        return kmock.Response(status=content, payload=b"")
    if isinstance(content, bytes):
        return kmock.Response(status=200, payload=content)
    objects = [content] if isinstance(content, dict) else content
    return kmock.Response(status=200, payload=b"".join(encode_json(item) + b"\n" for item in objects))


Scenario = Callable[["WatchedServer"], Awaitable[None]]


class WatchedServer:
    """A mock API server and what is told of it."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.updates: list[EndpointReadiness] = []

    async def wait_for(self, expected: EndpointReadiness) -> None:
        for _ in range(300):
            if self.updates and self.updates[-1] == expected:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"told {self.updates[-3:]}, expected {expected}")


def follow(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, handler: Any, scenario: Scenario) -> None:
    async def run() -> None:
        async with handler as server, kmock.Server(server):
            cluster = {"name": "c", "cluster": {"server": str(server.url).rstrip("/")}}
            user = {"name": "u", "user": {"token": "secret"}}
            context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
            file = folder / "config"
            file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": [user],
                                        "contexts": [context], "current-context": "x"}))  # fmt: skip
            monkeypatch.setattr("kubernetes_asyncio.config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
            monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
            watched_server = WatchedServer(server)
            errors: list[Exception] = []
            parsed_source = KubernetesSource.parse(source)
            task = asyncio.create_task(
                run_forever(lambda: watch_kubernetes(parsed_source, watched_server.updates.append), errors.append)
            )
            try:
                await asyncio.wait_for(scenario(watched_server), 20)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert all(isinstance(error, FetchError) for error in errors), errors

    monkeypatch.setattr(retries, "RESTART_S", 0.05)
    monkeypatch.setattr(kubernetes, "SHORT_WATCH_S", 0.05)
    monkeypatch.setattr(kubernetes, "POOL_S", 0.1)
    asyncio.run(run())


@needs_mock
def test_a_service_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Listed and changed; a watch that ends goes on from its last version, and one that fails leads to a list.

    It fails by a status, by an error of the server, and by what is no event. The token goes with each request.
    """
    lists = iter([
        {"metadata": {"resourceVersion": "1"}, "items": [make_slice("a", endpoint("10.0.0.1"))]},
        *[{"metadata": {"resourceVersion": str(version)}, "items": [make_slice("a", endpoint("10.0.0.3"))]}
          for version in (50, 60, 70)],
    ])  # fmt: skip
    watches = iter([
        [{"type": "ADDED", "object": make_slice("b", endpoint("10.0.0.2"), version=2)},
         {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}}],
        [{"type": "MODIFIED", "object": make_slice("b", endpoint("10.0.0.4"), version=21)},
         {"type": "DELETED", "object": make_slice("a", version=22)},
         {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}],
        503,
        b"{nonsense\n",
        [{"type": "MODIFIED", "object": make_slice("a", endpoint("10.0.0.3", terminating=True), version=71)}],
    ])  # fmt: skip
    versions: list[str] = []

    def answer(request: Any) -> Any:
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.params["labelSelector"] == "kubernetes.io/service-name=vllm"
        if "watch" not in request.params:
            versions.append("list")
            return respond(next(lists))
        assert request.params["allowWatchBookmarks"] == "true"
        versions.append(request.params["resourceVersion"])
        return respond(next(watches, []))

    async def scenario(watched_server: WatchedServer) -> None:
        await watched_server.wait_for({"10.0.0.3:8000": False})
        one, both = {"10.0.0.1:8000": True}, {"10.0.0.1:8000": True, "10.0.0.2:8000": True}
        moved = {"10.0.0.1:8000": True, "10.0.0.4:8000": True}
        listed_anew = [{"10.0.0.3:8000": True}] * 3
        assert watched_server.updates == [
            one, both, moved, {"10.0.0.4:8000": True}, *listed_anew, {"10.0.0.3:8000": False},
        ]  # fmt: skip
        assert versions[:8] == ["list", "1", "20", "list", "50", "list", "60", "list"]

    handler = kmock.RawHandler()
    handler[f"get {SLICES}"] << answer
    follow(monkeypatch, tmp_path, "llm/service/vllm", handler, scenario)


@needs_mock
@pytest.mark.parametrize("is_watch", [False, True])
@pytest.mark.parametrize(
    "answer",
    [b"{nonsense", b"{}", b"null", b'"\xff"', b"[" * 100_000, b'{"type": "ADDED", "object": {}}', b"x" * (8 << 20)],
    ids=["nonsense", "no fields", "null", "no text", "too deep", "no metadata", "too long"],
)  # fmt: skip
def test_an_unreadable_answer_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes, is_watch: bool
) -> None:
    bad_answers = iter([answer])

    def respond_once_badly(request: Any) -> Any:
        if ("watch" in request.params) == is_watch:
            bad_answer = next(bad_answers, None)
            if bad_answer is not None:
                return respond(bad_answer)
        if "watch" in request.params:
            return respond([{"type": "ADDED", "object": make_slice("b", endpoint("10.0.0.2"), version=2)}])
        return respond({"metadata": {"resourceVersion": "1"}, "items": [make_slice("a", endpoint("10.0.0.1"))]})

    async def scenario(watched_server: WatchedServer) -> None:
        await watched_server.wait_for({"10.0.0.1:8000": True, "10.0.0.2:8000": True})

    handler = kmock.RawHandler()
    handler[f"get {SLICES}"] << respond_once_badly
    follow(monkeypatch, tmp_path, "llm/service/vllm", handler, scenario)


@needs_mock
def test_a_fault_of_the_router_is_no_failure_of_the_api(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is in applying the first change, after the list."""

    def answer(request: Any) -> Any:
        if "watch" in request.params:
            return respond([{"type": "ADDED", "object": make_slice("b", endpoint("10.0.0.2"), version=2)}])
        return respond({"metadata": {"resourceVersion": "1"}, "items": [make_slice("a", endpoint("10.0.0.1"))]})

    async def scenario(watched_server: WatchedServer) -> None:
        updates: list[EndpointReadiness] = []

        def update(addresses: EndpointReadiness) -> None:
            if updates:
                raise KeyError("a fault")
            updates.append(addresses)

        with pytest.raises(KeyError, match="a fault"):
            await watch_kubernetes(KubernetesSource.parse("llm/service/vllm"), update)

    handler = kmock.RawHandler()
    handler[f"get {SLICES}"] << answer
    follow(monkeypatch, tmp_path, "llm/service/other", handler, scenario)
    assert "a fault" not in caplog.text


@needs_mock
def test_a_pool_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its pods as the emulated server has them, and others when it selects others."""
    port = 8000

    def pool(_: Any) -> Any:
        return {"spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": port}]}}

    pods = {"10.0.0.1": pod("10.0.0.1"), "10.0.0.2": pod("10.0.0.2", ready=False)}

    def list_pods(request: Any) -> Any:
        assert request.params["labelSelector"] == "app=vllm"
        if "watch" in request.params:
            return b""
        return {"metadata": {"resourceVersion": "5"}, "items": list(pods.values())}

    async def scenario(watched_server: WatchedServer) -> None:
        nonlocal port
        await watched_server.wait_for({"10.0.0.1:8000": True, "10.0.0.2:8000": False})
        port = 9000
        await watched_server.wait_for({"10.0.0.1:9000": True, "10.0.0.2:9000": False})

    handler = kmock.RawHandler()
    handler["get /apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools/vllm"] << pool
    handler["get /api/v1/namespaces/default/pods"] << list_pods
    follow(monkeypatch, tmp_path, "pool/vllm", handler, scenario)


@needs_mock
def test_pods_are_followed_while_their_pool_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As while it is deleted and made anew. It is missing at first, too."""
    pool = {"spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}}
    pool_answers = iter([404, pool])
    later_reads = 0

    def read_pool_once(_: Any) -> Any:
        nonlocal later_reads
        answer = next(pool_answers, None)
        later_reads += answer is None
        return respond(404 if answer is None else answer)

    def list_pods(request: Any) -> Any:
        if "watch" in request.params:
            return respond([{"type": "ADDED", "object": pod("10.0.0.2")}] if later_reads > 1 else [])
        return {"metadata": {"resourceVersion": "5"}, "items": [pod("10.0.0.1")]}

    async def scenario(watched_server: WatchedServer) -> None:
        await watched_server.wait_for({"10.0.0.1:8000": True, "10.0.0.2:8000": True})

    handler = kmock.RawHandler()
    handler["get /apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools/vllm"] << read_pool_once
    handler["get /api/v1/namespaces/default/pods"] << list_pods
    follow(monkeypatch, tmp_path, "pool/vllm", handler, scenario)


@needs_mock
def test_an_emulated_server_s_watch_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """kmock's own: what others create and delete."""
    handler = kmock.KubernetesEmulator()
    resource = kmock.resource("discovery.k8s.io", "v1", "endpointslices")
    handler.resources[resource] = {"namespaced": True, "kind": "EndpointSlice"}
    handler.objects[resource, "llm", "a"] = make_slice("a", endpoint("10.0.0.1"))

    async def scenario(watched_server: WatchedServer) -> None:
        import aiohttp

        await watched_server.wait_for({"10.0.0.1:8000": True})
        async with aiohttp.ClientSession(str(watched_server.server.url)) as session:
            await session.post(SLICES, json=make_slice("b", endpoint("10.0.0.2")))
            await watched_server.wait_for({"10.0.0.1:8000": True, "10.0.0.2:8000": True})
            await session.delete(f"{SLICES}/a")
            await watched_server.wait_for({"10.0.0.2:8000": True})

    follow(monkeypatch, tmp_path, "llm/service/vllm", handler, scenario)
