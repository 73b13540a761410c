"""For Ray Serve: a `RequestRouter` that asks `router run` where a request goes, by its index and price.

Serve keeps carrying the requests; of ours there is one `router run` (or several) that follows the engines' cache events
and is asked by `POST /route`. In a Serve LLM application it stands where Ray's `KVAwareRouter` does, and is one, so Ray
switches on the events of vLLM and says where each replica publishes (`kv_event_metadata` of its routing stats):

    RequestRouterConfig(request_router_class="fleet.serve:BlockcastRouter", request_router_kwargs={"router": URL,
        "admin_key": KEY, "model": "qwen", "tokenizer": "/models/qwen"})

`model` is the name that requests ask for, `tokenizer` the folder by which the router reads prompts; where Ray has read
them already, its token ids are asked for. Any other deployment may tell the same of its replicas, or, where an engine
with HTTP is behind one, its address:

    def record_routing_stats(self) -> dict: return {"blockcast_worker": {"url": "http://10.0.0.7:8000"}}

Engines are told to the router and taken back as replicas come and go. What Serve sends is seen by the router on the
engines' `/metrics` a little later; until then this class counts it itself, and all the time for replicas without HTTP:
each handle or proxy then knows of the queues that it made itself. Where the router does not answer in time, the replica
with the fewest own requests is taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from fleet.worker_list import ListedWorker, parse_workers_page, plan_admin_calls

try:
    from ray.serve.llm.request_router import KVAwareRouter as _Base
except ImportError:  # no vLLM beside Ray
    _Base = RequestRouter

log = logging.getLogger("fleet")

METRICS_DELAY_S = 2.5
"""By then the router has read of a request on the engine's own page."""
REGISTRATION_CHECK_S = 5.0
"""Between two looks whether the router still knows the engines."""


class BlockcastRouter(_Base):  # type: ignore[misc]
    """One a handle or proxy."""

    def initialize_state(
        self, router: str, admin_key: str, timeout_s: float = 0.25, model: str = "", tokenizer: str = "", **other: Any
    ) -> None:
        """`router`: the admin address of a `router run`. `model`, `tokenizer`: of replicas without HTTP."""
        if other:
            accepted = "router, admin_key, timeout_s, model, tokenizer"
            raise ValueError(f"request_router_kwargs: {sorted(other)} are not known: {accepted}")
        self._model, self._tokenizer = model, tokenizer
        self._url, self._key, self._timeout_s = router.rstrip("/"), admin_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._registered_engines: dict[str, Mapping[str, Any]] = {}
        self._registered_s = 0.0
        self._registration: asyncio.Task[None] | None = None
        self._predicted_prefill_s: dict[str, dict[str, float]] = {}
        """Request -> worker -> predicted seconds of prefill, until it is routed."""
        self._sent_requests: dict[str, tuple[str, float, float]] = {}
        """Request -> worker, when, seconds of prefill."""
        self._busy_until_s: dict[str, float] = {}
        """Replicas without HTTP: when the prefill that was sent there will be done."""
        self._last_sent_s: dict[str, float] = {}
        """Worker -> when it was sent a request last; among equals who waits longest comes first."""
        self.route_queries: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Cheapest first, each a rank of its own; replicas that the router has no price for come last."""
        engines = {
            _worker_id(replica): worker
            for replica in candidate_replicas
            if (worker := self._worker_settings(replica)) is not None
        }
        self._register_if_changed(engines)
        body = _route_query(pending_request, self._model)
        prices: dict[str, tuple[float, float]] = {}
        if pending_request is not None and body is not None:
            try:
                prices = await asyncio.wait_for(self._query_route(body), self._timeout_s)
                self.route_queries["answered"] += 1
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                self.route_queries["not answered"] += 1
                log.warning("%s: not asked: %r", self._url, error)
            self._predicted_prefill_s[_request_id(pending_request)] = {
                worker: prefill_s for worker, (_, prefill_s) in prices.items()
            }
        unseen_prefill_s = self._unseen_prefill_s()
        requests_in_flight = Counter(worker for worker, _, _ in self._sent_requests.values())

        def price(replica: RunningReplica) -> tuple[bool, float, int, float]:
            name = _worker_id(replica)
            cost = prices[name][0] + unseen_prefill_s.get(name, 0.0) if name in prices else 0.0
            return name not in prices, cost, requests_in_flight[name], self._last_sent_s.get(name, 0.0)

        return [[replica] for replica in sorted(candidate_replicas, key=price)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        name = _request_id(pending_request)
        replica = self._replicas.get(replica_id)
        prices = self._predicted_prefill_s.pop(name, {})
        if replica is not None:
            worker, now, prefill_s = _worker_id(replica), time.monotonic(), prices.get(_worker_id(replica), 0.0)
            self._sent_requests[name] = (worker, now, prefill_s)
            self._last_sent_s[worker] = now
            if "url" not in (self._worker_settings(replica) or {}):
                self._busy_until_s[worker] = max(now, self._busy_until_s.get(worker, now)) + prefill_s

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent_requests.pop(internal_request_id, None)

    def _unseen_prefill_s(self) -> dict[str, float]:
        """Seconds of prefill that were sent to each worker, and which the router cannot know of, or not yet."""
        now = time.monotonic()
        self._busy_until_s = {worker: until_s for worker, until_s in self._busy_until_s.items() if until_s > now}
        sums = {worker: until_s - now for worker, until_s in self._busy_until_s.items()}
        for worker, at, seconds in self._sent_requests.values():
            if worker not in self._busy_until_s and now - at < METRICS_DELAY_S:
                sums[worker] = sums.get(worker, 0.0) + seconds
        return sums

    def _worker_settings(self, replica: RunningReplica) -> Mapping[str, Any] | None:
        """What the router is told of the engine in a replica; None where the replica does not say, or not yet."""
        stats = replica.routing_stats or {}
        reported, events = stats.get("blockcast_worker"), stats.get("kv_event_metadata")
        if isinstance(reported, Mapping) and isinstance(reported.get("url"), str):
            return reported
        if not isinstance(events, Mapping) or not self._model:
            return None
        settings = {"model": self._model, "root": self._tokenizer, "events": events.get("endpoint"),
                "replay": events.get("replay_endpoint"), "block_size": events.get("block_size")}  # fmt: skip
        return {key: value for key, value in settings.items() if value}

    async def _query_route(self, body: bytes) -> dict[str, tuple[float, float]]:
        """Worker -> (price, seconds of prefill)."""
        async with self._call("POST", "/route", body) as answer:
            page = json.loads(await answer.read())
            if answer.status != 200:
                raise ValueError(f"{answer.status} {str(page)[:300]}")
        return {
            candidate["worker"]: (float(candidate["cost"]), float(candidate["prefill_s"]))
            for candidate in page["candidates"]
        }

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
            weakref.finalize(self, _close, self._session, asyncio.get_running_loop())
        headers = {"Authorization": f"Bearer {self._key}"} | ({"Content-Type": "application/json"} if body else {})
        return self._session.request(method, self._url + path, data=body, headers=headers)

    def _register_if_changed(self, engines: dict[str, Mapping[str, Any]]) -> None:
        """Have the router know these engines and no others; beside the requests."""
        now = time.monotonic()
        if (engines != self._registered_engines or now - self._registered_s > REGISTRATION_CHECK_S) and (
            self._registration is None or self._registration.done()
        ):
            self._registered_s = now
            self._last_sent_s = {name: at_s for name, at_s in self._last_sent_s.items() if name in engines}
            self._registration = asyncio.get_running_loop().create_task(self._register_engines(engines))

    async def _register_engines(self, engines: dict[str, Mapping[str, Any]]) -> None:
        try:
            async with self._call("GET", "/workers", None) as answer:
                rows = parse_workers_page(json.loads(await answer.read()))
            workers = [ListedWorker({"send_key": 1, **worker, "id": name}) for name, worker in engines.items()]
            for method, path, body in plan_admin_calls(workers, rows):
                async with self._call(method, path, json.dumps(body).encode() if body else None) as answer:
                    if answer.status not in (200, 201, 404):
                        raise ValueError(f"{method} {path}: {answer.status} {(await answer.text())[:300]}")
            self._registered_engines = engines
        except (aiohttp.ClientError, ValueError) as error:
            log.warning("%s: the engines could not be told: %s", self._url, error)


def _close(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Serve does not say when a router of requests is done with."""
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def _worker_id(replica: RunningReplica) -> str:
    worker = (replica.routing_stats or {}).get("blockcast_worker")
    if isinstance(worker, Mapping) and isinstance(worker.get("url"), str):
        return str(worker.get("id") or worker["url"].partition("://")[2])
    return str(replica.replica_id.unique_id)


def _request_id(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)


def _route_query(pending_request: PendingRequest | None, model: str) -> bytes | None:
    """What the router is asked with: the token ids where Ray has read the prompt, or the first argument that is an
    OpenAI body: a dict, JSON, an object with `model_dump`, or one whose attributes are its fields."""
    if pending_request is None:
        return None
    ids = pending_request.kwargs.get("request_token_ids")
    if ids and model:
        return json.dumps({"model": model, "prompt": list(ids)}).encode()
    for value in (*pending_request.args, *pending_request.kwargs.values()):
        if hasattr(value, "model_dump"):
            value = value.model_dump(exclude_none=True)
        elif isinstance(value, SimpleNamespace):
            value = vars(value)
        if isinstance(value, Mapping) and ("messages" in value or "prompt" in value):
            return json.dumps(value).encode()
        if isinstance(value, bytes) and value.lstrip()[:1] == b"{":
            return value
    return None
