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
"""Seconds after which the router has read of a request on the engine's metrics page."""
REGISTRATION_CHECK_S = 5.0
"""Seconds between two checks that the router still knows the engines."""


class BlockcastRouter(_Base):  # type: ignore[misc]
    """Request router of one Ray Serve handle or proxy."""

    def initialize_state(
        self,
        router: str,
        admin_key: str,
        timeout_s: float = 0.25,
        model: str = "",
        tokenizer: str = "",
        **unknown_arguments: Any,
    ) -> None:
        """Set up the router client. `router` is the admin address of a `router run`; `model` and `tokenizer` are those
        of replicas without HTTP."""
        if unknown_arguments:
            accepted = "router, admin_key, timeout_s, model, tokenizer"
            raise ValueError(f"request_router_kwargs: {sorted(unknown_arguments)} are not known: {accepted}")
        self._model, self._tokenizer = model, tokenizer
        self._admin_url, self._admin_key, self._timeout_s = router.rstrip("/"), admin_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._registered_settings_by_worker: dict[str, Mapping[str, Any]] = {}
        self._registered_at_s = 0.0
        self._registration_task: asyncio.Task[None] | None = None
        self._predicted_prefill_s_by_request: dict[str, dict[str, float]] = {}
        """Predicted seconds of prefill, by request and worker, until the request is routed."""
        self._sent_requests: dict[str, tuple[str, float, float]] = {}
        """Worker, time and seconds of prefill of each request in flight."""
        self._busy_until_s_by_worker: dict[str, float] = {}
        """End of the prefill sent to each replica without HTTP."""
        self._last_sent_s_by_worker: dict[str, float] = {}
        """Time of the last request to each worker; among equals the longest unused comes first."""
        self.route_query_counts: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank replicas from cheapest to dearest; replicas without a price come last."""
        settings_by_worker = {
            _get_worker_id(replica): worker
            for replica in candidate_replicas
            if (worker := self._get_worker_settings(replica)) is not None
        }
        self._register_if_changed(settings_by_worker)
        body = _build_route_query(pending_request, self._model)
        price_by_worker: dict[str, tuple[float, float]] = {}
        if pending_request is not None and body is not None:
            try:
                price_by_worker = await asyncio.wait_for(self._query_route(body), self._timeout_s)
                self.route_query_counts["answered"] += 1
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                self.route_query_counts["not answered"] += 1
                log.warning("%s: not asked: %r", self._admin_url, error)
            self._predicted_prefill_s_by_request[_get_request_id(pending_request)] = {
                worker: prefill_s for worker, (_, prefill_s) in price_by_worker.items()
            }
        unseen_prefill_s_by_worker = self._sum_unseen_prefill_s()
        in_flight_by_worker = Counter(worker for worker, _, _ in self._sent_requests.values())

        def get_sort_key(replica: RunningReplica) -> tuple[bool, float, int, float]:
            worker_id = _get_worker_id(replica)
            cost = (
                price_by_worker[worker_id][0] + unseen_prefill_s_by_worker.get(worker_id, 0.0)
                if worker_id in price_by_worker
                else 0.0
            )
            return (
                worker_id not in price_by_worker,
                cost,
                in_flight_by_worker[worker_id],
                self._last_sent_s_by_worker.get(worker_id, 0.0),
            )

        return [[replica] for replica in sorted(candidate_replicas, key=get_sort_key)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request_id = _get_request_id(pending_request)
        replica = self._replicas.get(replica_id)
        prefill_s_by_worker = self._predicted_prefill_s_by_request.pop(request_id, {})
        if replica is not None:
            worker, now, prefill_s = (
                _get_worker_id(replica),
                time.monotonic(),
                prefill_s_by_worker.get(_get_worker_id(replica), 0.0),
            )
            self._sent_requests[request_id] = (worker, now, prefill_s)
            self._last_sent_s_by_worker[worker] = now
            if "url" not in (self._get_worker_settings(replica) or {}):
                self._busy_until_s_by_worker[worker] = (
                    max(now, self._busy_until_s_by_worker.get(worker, now)) + prefill_s
                )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent_requests.pop(internal_request_id, None)

    def _sum_unseen_prefill_s(self) -> dict[str, float]:
        """Sum the seconds of prefill sent to each worker that the router cannot know of yet."""
        now = time.monotonic()
        self._busy_until_s_by_worker = {
            worker: until_s for worker, until_s in self._busy_until_s_by_worker.items() if until_s > now
        }
        prefill_s_by_worker = {worker: until_s - now for worker, until_s in self._busy_until_s_by_worker.items()}
        for worker, sent_at_s, prefill_s in self._sent_requests.values():
            if worker not in self._busy_until_s_by_worker and now - sent_at_s < METRICS_DELAY_S:
                prefill_s_by_worker[worker] = prefill_s_by_worker.get(worker, 0.0) + prefill_s
        return prefill_s_by_worker

    def _get_worker_settings(self, replica: RunningReplica) -> Mapping[str, Any] | None:
        """Return the settings that register the engine of a replica; None if the replica does not report them
        yet."""
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

    async def _query_route(self, body: bytes) -> dict[str, tuple[float, float]]:
        """Ask the router; return (price, seconds of prefill) by worker."""
        async with self._send_request("POST", "/route", body) as response:
            route_report = json.loads(await response.read())
            if response.status != 200:
                raise ValueError(f"{response.status} {str(route_report)[:300]}")
        return {
            candidate["worker"]: (float(candidate["cost"]), float(candidate["prefill_s"]))
            for candidate in route_report["candidates"]
        }

    def _send_request(self, method: str, path: str, body: bytes | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
            weakref.finalize(self, _close, self._session, asyncio.get_running_loop())
        headers = {"Authorization": f"Bearer {self._admin_key}"} | (
            {"Content-Type": "application/json"} if body else {}
        )
        return self._session.request(method, self._admin_url + path, data=body, headers=headers)

    def _register_if_changed(self, settings_by_worker: dict[str, Mapping[str, Any]]) -> None:
        """Start to register these engines, and no others, beside the requests."""
        now = time.monotonic()
        if (
            settings_by_worker != self._registered_settings_by_worker
            or now - self._registered_at_s > REGISTRATION_CHECK_S
        ) and (self._registration_task is None or self._registration_task.done()):
            self._registered_at_s = now
            self._last_sent_s_by_worker = {
                name: at_s for name, at_s in self._last_sent_s_by_worker.items() if name in settings_by_worker
            }
            self._registration_task = asyncio.get_running_loop().create_task(self._register_engines(settings_by_worker))

    async def _register_engines(self, settings_by_worker: dict[str, Mapping[str, Any]]) -> None:
        try:
            async with self._send_request("GET", "/workers", None) as response:
                status_by_worker = parse_workers_page(json.loads(await response.read()))
            workers = [
                ListedWorker({"send_key": 1, **worker, "id": worker_id})
                for worker_id, worker in settings_by_worker.items()
            ]
            for method, path, body in plan_admin_calls(workers, status_by_worker):
                async with self._send_request(method, path, json.dumps(body).encode() if body else None) as response:
                    if response.status not in (200, 201, 404):
                        raise ValueError(f"{method} {path}: {response.status} {(await response.text())[:300]}")
            self._registered_settings_by_worker = settings_by_worker
        except (aiohttp.ClientError, ValueError) as error:
            log.warning("%s: the engines could not be told: %s", self._admin_url, error)


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


def _build_route_query(pending_request: PendingRequest | None, model: str) -> bytes | None:
    """Return the body of a route query: token ids where Ray has read the prompt, else the first argument that is an
    OpenAI body.

    Such a body is a dict, JSON, an object with `model_dump`, or one whose attributes are its fields.
    """
    if pending_request is None:
        return None
    token_ids = pending_request.kwargs.get("request_token_ids")
    if token_ids and model:
        return json.dumps({"model": model, "prompt": list(token_ids)}).encode()
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if hasattr(argument, "model_dump"):
            argument = argument.model_dump(exclude_none=True)
        elif isinstance(argument, SimpleNamespace):
            argument = vars(argument)
        if isinstance(argument, Mapping) and ("messages" in argument or "prompt" in argument):
            return json.dumps(argument).encode()
        if isinstance(argument, bytes) and argument.lstrip()[:1] == b"{":
            return argument
    return None
