"""For Ray Serve: a `RequestRouter` that asks `router run` where a request goes, by its index and price.

Serve keeps carrying the requests; of ours there is one `router run` (or several) that follows the engines' cache events
and is asked by `POST /route`. A replica says which engine is behind it in `record_routing_stats`:

    def record_routing_stats(self) -> dict: return {"blockcast_worker": {"url": "http://10.0.0.7:8000"}}

and `RequestRouterConfig(request_router_class="fleet.serve:BlockcastRouter", request_router_kwargs={"router": URL,
"admin_key": KEY})` does the rest: engines are told to the router and taken back as replicas come and go. What Serve
sends is seen by the router on the engines' `/metrics` a little later; until then this class counts it itself. Where the
router does not answer in time, the replica with the fewest own requests is taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from fleet.books import Listed, changes, read_rows

log = logging.getLogger("fleet")

SEEN_S = 2.5
"""By then the router has read of a request on the engine's own page."""
LISTED_S = 5.0
"""Between two looks whether the router still knows the engines."""


class BlockcastRouter(RequestRouter):  # type: ignore[misc]
    """One a handle or proxy."""

    def initialize_state(self, router: str, admin_key: str, timeout_s: float = 0.25, **other: Any) -> None:
        """`router`: the admin address of a `router run`."""
        if other:
            raise ValueError(f"request_router_kwargs: {sorted(other)} are not known: router, admin_key, timeout_s")
        self._url, self._key, self._timeout_s = router.rstrip("/"), admin_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._told: dict[str, Mapping[str, Any]] = {}
        self._told_s = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._priced: dict[str, dict[str, float]] = {}
        """Request -> worker -> predicted seconds of prefill, until it is routed."""
        self._sent: dict[str, tuple[str, float, float]] = {}
        """Request -> worker, when, seconds of prefill."""
        self.asked: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Cheapest first, each a rank of its own; replicas that the router has no price for come last."""
        engines = {_id(replica): worker for replica in candidate_replicas if (worker := _worker(replica)) is not None}
        self._tell(engines)
        body = _body(pending_request)
        prices: dict[str, tuple[float, float]] = {}
        if pending_request is not None and body is not None:
            try:
                prices = await asyncio.wait_for(self._ask(body), self._timeout_s)
                self.asked["answered"] += 1
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                self.asked["not answered"] += 1
                log.warning("%s: not asked: %r", self._url, error)
            self._priced[_name(pending_request)] = {worker: prefill_s for worker, (_, prefill_s) in prices.items()}
        own = self._own()

        def price(replica: RunningReplica) -> tuple[bool, float]:
            name = _id(replica)
            if name in prices:
                return False, prices[name][0] + own.get(name, 0.0)
            return True, float(sum(worker == name for worker, _, _ in self._sent.values()))

        return [[replica] for replica in sorted(candidate_replicas, key=price)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        name = _name(pending_request)
        replica = self._replicas.get(replica_id)
        prices = self._priced.pop(name, {})
        if replica is not None:
            worker = _id(replica)
            self._sent[name] = (worker, time.monotonic(), prices.get(worker, 0.0))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent.pop(internal_request_id, None)

    def _own(self) -> dict[str, float]:
        """Seconds of prefill that were sent to each worker lately, and which the router cannot know of yet."""
        now, sums = time.monotonic(), dict[str, float]()
        for worker, at, seconds in self._sent.values():
            if now - at < SEEN_S:
                sums[worker] = sums.get(worker, 0.0) + seconds
        return sums

    async def _ask(self, body: bytes) -> dict[str, tuple[float, float]]:
        """Worker -> (price, seconds of prefill)."""
        async with self._call("POST", "/route", body) as answer:
            page = json.loads(await answer.read())
            if answer.status != 200:
                raise ValueError(f"{answer.status} {str(page)[:300]}")
        return {one["worker"]: (float(one["cost"]), float(one["prefill_s"])) for one in page["candidates"]}

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
            weakref.finalize(self, _close, self._session, asyncio.get_running_loop())
        headers = {"Authorization": f"Bearer {self._key}"} | ({"Content-Type": "application/json"} if body else {})
        return self._session.request(method, self._url + path, data=body, headers=headers)

    def _tell(self, engines: dict[str, Mapping[str, Any]]) -> None:
        """Have the router know these engines and no others; beside the requests."""
        now = time.monotonic()
        if (engines != self._told or now - self._told_s > LISTED_S) and (self._telling is None or self._telling.done()):
            self._told_s = now
            self._telling = asyncio.get_running_loop().create_task(self._list(engines))

    async def _list(self, engines: dict[str, Mapping[str, Any]]) -> None:
        try:
            async with self._call("GET", "/workers", None) as answer:
                rows = read_rows(json.loads(await answer.read()))
            listed = [Listed({"send_key": 1, **worker, "id": name}) for name, worker in engines.items()]
            for method, path, body in changes(listed, rows):
                async with self._call(method, path, json.dumps(body).encode() if body else None) as answer:
                    if answer.status not in (200, 201, 404):
                        raise ValueError(f"{method} {path}: {answer.status} {(await answer.text())[:300]}")
            self._told = engines
        except (aiohttp.ClientError, ValueError) as error:
            log.warning("%s: the engines could not be told: %s", self._url, error)


def _close(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Serve does not say when a router of requests is done with."""
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def _worker(replica: RunningReplica) -> Mapping[str, Any] | None:
    found = (replica.routing_stats or {}).get("blockcast_worker")
    return found if isinstance(found, Mapping) and isinstance(found.get("url"), str) else None


def _id(replica: RunningReplica) -> str:
    worker = _worker(replica)
    return str(worker.get("id") or worker["url"].partition("://")[2]) if worker else replica.replica_id.unique_id


def _name(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)


def _body(pending_request: PendingRequest | None) -> bytes | None:
    """The first argument that is an OpenAI body: a dict, JSON, or an object with `model_dump`."""
    if pending_request is None:
        return None
    for value in (*pending_request.args, *pending_request.kwargs.values()):
        if hasattr(value, "model_dump"):
            value = value.model_dump(exclude_none=True)
        if isinstance(value, Mapping) and ("messages" in value or "prompt" in value):
            return json.dumps(value).encode()
        if isinstance(value, bytes) and value.lstrip()[:1] == b"{":
            return value
    return None
