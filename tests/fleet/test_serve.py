"""The plug-in for Ray Serve with stand-ins for Serve's classes: what it remembers of requests is bounded."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SERVE_CLASSES = ("PendingRequest", "ReplicaID", "ReplicaResult", "RequestRouter", "RunningReplica")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, beside stand-ins in place of Ray."""
    request_router = ModuleType("ray.serve.request_router")
    for name in SERVE_CLASSES:
        setattr(request_router, name, type(name, (), {}))
    modules = (ModuleType("ray"), ModuleType("ray.serve"), request_router)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "ray.serve.llm", None)
    monkeypatch.delitem(sys.modules, "fleet.serve", raising=False)
    yield importlib.import_module("fleet.serve")
    sys.modules.pop("fleet.serve", None)


def test_requests_that_are_never_routed_are_forgotten(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while its request waits for a replica: Serve calls nothing."""

    async def query_route(self: Any, body: bytes) -> dict[str, Any]:
        return {"w": serve._WorkerPrice(1.0, 0.5)}

    monkeypatch.setattr(serve.BlockcastRouter, "_query_route", query_route)
    router = serve.BlockcastRouter()
    router.initialize_state("http://127.0.0.1:1", "key")

    async def ask() -> None:
        for number in range(20_000):
            metadata = SimpleNamespace(internal_request_id=f"r{number}")
            await router._fetch_prices(SimpleNamespace(metadata=metadata, args=({"prompt": "a"},), kwargs={}))

    asyncio.run(ask())
    assert len(router._prices_by_request) <= 10_000
