"""Request router for Ray Serve that asks `router run` which replica should get a request (`POST /route`).

Serve still carries the requests. The router follows the engines' cache events, and answers with a price for each
engine. In a Serve LLM application this class replaces Ray's `KVAwareRouter` and is derived from it. So Ray switches on
the events of vLLM, and says where each replica publishes (`kv_event_metadata` of its routing stats):

    RequestRouterConfig(request_router_class="fleet.serve:BlockcastRouter", request_router_kwargs={"router": URL,
        "admin_key": KEY, "model": "qwen", "tokenizer": "/models/qwen"})

`model` is the name that requests ask for. `tokenizer` is the folder by which the router reads prompts; if Ray has read
a prompt already, its token ids are sent instead. Another deployment may report the same of its replicas, or the address
of an engine with HTTP behind a replica:

    def record_routing_stats(self) -> dict: return {"blockcast_worker": {"url": "http://10.0.0.7:8000"}}

Engines are registered with the router, and removed, as replicas come and go. The router sees what Serve sends on the
engines' `/metrics`, a little later. Until then this class counts the requests that it has sent; for replicas without
HTTP it always does. If the router does not answer in time, the replica with the fewest such requests comes first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from fleet.worker_list import AdminCall, ListedWorker, parse_workers_page, plan_admin_calls
from options.bounded_dict import BoundedDict

try:
    from ray.serve.llm.request_router import KVAwareRouter as _Base
except ImportError:  # no vLLM beside Ray
    _Base = RequestRouter

log = logging.getLogger("fleet")

METRICS_DELAY_S = 2.5
"""Seconds after which the router has read of a request on the engine's metrics page."""
PENDING_REQUESTS_MAX = 10_000
REGISTRATION_CHECK_S = 5.0
"""Seconds between two checks that the router still knows the engines."""


class _WorkerPrice(NamedTuple):
    """The router's prediction for a request on one worker."""

    cost: float
    prefill_s: float


class _SentRequest(NamedTuple):
    """A request in flight, and what its prefill adds to the load of its worker."""

    worker_id: str
    prefill_s: float
    """Predicted seconds of prefill."""
    unpriced_until_s: float
    """Time from which on the router's prices include this prefill, or at which the prefill is done."""


class BlockcastRouter(_Base):  # type: ignore[misc]
    """Request router of one Ray Serve handle or proxy."""

    def initialize_state(
        self, router: str, admin_key: str, timeout_s: float = 0.25, model: str = "", tokenizer: str = ""
    ) -> None:
        """Initialise the router. Ray Serve calls this with the `request_router_kwargs` of the deployment.

        `router`: admin address of the `router run` process that is asked for each decision. `model` and `tokenizer`
        describe the replicas, which that process cannot ask, because they have no HTTP address.
        """
        self._admin_url = router.rstrip("/")
        self._admin_key = admin_key
        self._timeout_s = timeout_s
        self._model = model
        self._tokenizer = tokenizer
        self._session: aiohttp.ClientSession | None = None

        self._registered_settings_by_worker: dict[str, Mapping[str, Any]] = {}
        """Engines that the router process knows, by worker id."""
        self._registered_at_s = 0.0
        self._registration_task: asyncio.Task[None] | None = None

        self._prices_by_request: BoundedDict[str, dict[str, _WorkerPrice]] = BoundedDict(PENDING_REQUESTS_MAX)
        """Request id -> worker -> price, until the request is routed; it may never be."""
        self._sent_requests: dict[str, _SentRequest] = {}
        """Requests in flight, by their ids."""
        self._last_sent_s_by_worker: dict[str, float] = {}
        """Time of the last request to each worker. Of equally cheap workers, the longest unused one is chosen."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request by the router's price for each, the cheapest first; those without come last.

        The result is a list of one-replica lists. Serve takes the first replica that accepts the request.
        """
        settings_by_worker = {}
        for replica in candidate_replicas:
            settings = self._get_worker_settings(replica)
            if settings is not None:
                settings_by_worker[_get_worker_id(replica)] = settings
        self._register_if_changed(settings_by_worker)

        price_by_worker = {} if pending_request is None else await self._fetch_prices(pending_request)
        unpriced_prefill_s_by_worker = self._sum_unpriced_prefill_s()
        in_flight_by_worker = Counter(request.worker_id for request in self._sent_requests.values())

        def get_sort_key(replica: RunningReplica) -> tuple[bool, float, int, float]:
            worker_id = _get_worker_id(replica)
            price = price_by_worker.get(worker_id)
            cost = 0.0 if price is None else price.cost + unpriced_prefill_s_by_worker.get(worker_id, 0.0)
            last_sent_s = self._last_sent_s_by_worker.get(worker_id, 0.0)
            return price is None, cost, in_flight_by_worker[worker_id], last_sent_s

        return [[replica] for replica in sorted(candidate_replicas, key=get_sort_key)]

    async def _fetch_prices(self, pending_request: PendingRequest) -> dict[str, _WorkerPrice]:
        """Ask the router for the price of a request on each worker; the result is empty if it does not answer in time.

        The prices are stored until Ray Serve has sent the request (`on_request_routed`).
        """
        body = _build_route_query(pending_request, self._model)
        if body is None:
            return {}
        price_by_worker: dict[str, _WorkerPrice] = {}
        try:
            price_by_worker = await asyncio.wait_for(self._query_route(body), self._timeout_s)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: not asked: %r", self._admin_url, error)
        self._prices_by_request[_get_request_id(pending_request)] = price_by_worker
        return price_by_worker

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Record that Ray Serve has sent a request to a replica, as load that the router does not know of yet."""
        request_id = _get_request_id(pending_request)
        price_by_worker = self._prices_by_request.pop(request_id, {})
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        now = time.monotonic()
        worker_id = _get_worker_id(replica)
        prefill_s = price_by_worker[worker_id].prefill_s if worker_id in price_by_worker else 0.0
        has_metrics_page = "url" in (self._get_worker_settings(replica) or {})
        if has_metrics_page:  # the router will soon read of the request there, and include it in its prices
            unpriced_until_s = now + METRICS_DELAY_S
        else:  # the replica is assumed to prefill one request after the other
            ends_s = [sent.unpriced_until_s for sent in self._sent_requests.values() if sent.worker_id == worker_id]
            unpriced_until_s = max([now, *ends_s]) + prefill_s
        self._sent_requests[request_id] = _SentRequest(worker_id, prefill_s, unpriced_until_s)
        self._last_sent_s_by_worker[worker_id] = now

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent_requests.pop(internal_request_id, None)

    def _sum_unpriced_prefill_s(self) -> dict[str, float]:
        """Return the predicted seconds of prefill, by worker, that the router's prices do not include yet."""
        now, prefill_s_by_worker = time.monotonic(), defaultdict[str, float](float)
        for request in self._sent_requests.values():
            if request.unpriced_until_s > now:
                prefill_s_by_worker[request.worker_id] += request.prefill_s
        return prefill_s_by_worker

    def _get_worker_settings(self, replica: RunningReplica) -> Mapping[str, Any] | None:
        """Return the settings that register a replica's engine; None if the replica does not report them yet."""
        stats = replica.routing_stats or {}
        reported_settings, event_metadata = stats.get("blockcast_worker"), stats.get("kv_event_metadata")
        if isinstance(reported_settings, Mapping) and isinstance(reported_settings.get("url"), str):
            return reported_settings
        if not isinstance(event_metadata, Mapping) or not self._model:
            return None
        settings = {"model": self._model, "root": self._tokenizer, "events": event_metadata.get("endpoint"),
                "replay": event_metadata.get("replay_endpoint"),
                "block_size": event_metadata.get("block_size")}  # fmt: skip
        return {key: value for key, value in settings.items() if value}

    async def _query_route(self, body: bytes) -> dict[str, _WorkerPrice]:
        """Ask the router for the price of a request on each worker. Raises ValueError if it refuses the request."""
        async with self._send_request("POST", "/route", body) as response:
            route_report = json.loads(await response.read())
            if response.status != 200:
                raise ValueError(f"{response.status} {str(route_report)[:300]}")
        return {
            candidate["worker"]: _WorkerPrice(float(candidate["cost"]), float(candidate["prefill_s"]))
            for candidate in route_report["candidates"]
        }

    def _send_request(self, method: str, path: str, body: bytes | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
            weakref.finalize(self, _close, self._session, asyncio.get_running_loop())
        headers = {"Authorization": f"Bearer {self._admin_key}"}
        if body:
            headers["Content-Type"] = "application/json"
        return self._session.request(method, self._admin_url + path, data=body, headers=headers)

    def _register_if_changed(self, settings_by_worker: dict[str, Mapping[str, Any]]) -> None:
        """Register exactly these engines with the router, in a task, if they changed or were not checked lately."""
        now = time.monotonic()
        has_changed = settings_by_worker != self._registered_settings_by_worker
        is_check_due = now - self._registered_at_s > REGISTRATION_CHECK_S
        is_registering = self._registration_task is not None and not self._registration_task.done()
        is_due = has_changed or is_check_due
        if is_registering or not is_due:
            return
        self._registered_at_s = now
        self._last_sent_s_by_worker = {
            worker_id: s for worker_id, s in self._last_sent_s_by_worker.items() if worker_id in settings_by_worker
        }
        self._registration_task = asyncio.get_running_loop().create_task(self._register_engines(settings_by_worker))

    async def _register_engines(self, settings_by_worker: dict[str, Mapping[str, Any]]) -> None:
        """Register exactly these engines with the router. A failure is logged, and the next check tries again."""
        try:
            async with self._send_request("GET", "/workers", None) as response:
                status_by_worker = parse_workers_page(json.loads(await response.read()))
            workers = [
                ListedWorker({"send_key": 1, **settings, "id": worker_id})
                for worker_id, settings in settings_by_worker.items()
            ]
            for call in plan_admin_calls(workers, status_by_worker):
                await self._call_router(call)
            self._registered_settings_by_worker = settings_by_worker
        except (aiohttp.ClientError, ValueError) as error:
            log.warning("%s: the engines could not be registered: %s", self._admin_url, error)

    async def _call_router(self, call: AdminCall) -> None:
        """Call the router's admin API. Raises ValueError if it refuses; an unknown worker is no refusal."""
        body = json.dumps(call.body).encode() if call.body else None
        async with self._send_request(call.method, call.path, body) as response:
            if response.status not in (200, 201, 404):
                raise ValueError(f"{call.method} {call.path}: {response.status} {(await response.text())[:300]}")


def _close(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Close the session on its loop, when a request router is garbage-collected."""
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def _get_worker_id(replica: RunningReplica) -> str:
    worker = (replica.routing_stats or {}).get("blockcast_worker")
    if isinstance(worker, Mapping) and isinstance(worker.get("url"), str):
        return str(worker.get("id") or worker["url"].partition("://")[2])
    return str(replica.replica_id.unique_id)


def _get_request_id(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)


def _build_route_query(pending_request: PendingRequest, model: str) -> bytes | None:
    """Return the JSON body of a `POST /route`, which asks the router what a Serve request would cost at each engine.

    If Ray has encoded the prompt already, the body has its token ids and `model`. Otherwise it is the first argument of
    the request that is a chat or completion request: an object with `model_dump` (pydantic), a SimpleNamespace, a
    mapping, or bytes that begin as a JSON object. None if there is no such argument.
    """
    token_ids = pending_request.kwargs.get("request_token_ids")
    if token_ids and model:
        return json.dumps({"model": model, "prompt": list(token_ids)}).encode()
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, bytes) and argument.lstrip().startswith(b"{"):
            return argument
        fields = argument
        if hasattr(argument, "model_dump"):
            fields = argument.model_dump(exclude_none=True)
        elif isinstance(argument, SimpleNamespace):
            fields = vars(argument)
        if isinstance(fields, Mapping) and ("messages" in fields or "prompt" in fields):
            return json.dumps(fields).encode()
    return None
