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

from fleet.books import Listed, changes, read_rows

try:
    from ray.serve.llm.request_router import KVAwareRouter as _Base
except ImportError:  # no vLLM beside Ray
    _Base = RequestRouter

log = logging.getLogger("fleet")

SEEN_S = 2.5
"""By then the router has read of a request on the engine's own page."""
LISTED_S = 5.0
"""Between two looks whether the router still knows the engines."""


class BlockcastRouter(_Base):  # type: ignore[misc]
    """One a handle or proxy."""

    def initialize_state(
        self, router: str, admin_key: str, timeout_s: float = 0.25, model: str = "", tokenizer: str = "", **other: Any
    ) -> None:
        """`router`: the admin address of a `router run`. `model`, `tokenizer`: of replicas without HTTP."""
        if other:
            known = "router, admin_key, timeout_s, model, tokenizer"
            raise ValueError(f"request_router_kwargs: {sorted(other)} are not known: {known}")
        self._model, self._tokenizer = model, tokenizer
        self._url, self._key, self._timeout_s = router.rstrip("/"), admin_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._told: dict[str, Mapping[str, Any]] = {}
        self._told_s = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._priced: dict[str, dict[str, float]] = {}
        """Request -> worker -> predicted seconds of prefill, until it is routed."""
        self._sent: dict[str, tuple[str, float, float]] = {}
        """Request -> worker, when, seconds of prefill."""
        self._busy_until_s: dict[str, float] = {}
        """Replicas without HTTP: when the prefill that was sent there will be done."""
        self._last_s: dict[str, float] = {}
        """Worker -> when it was sent a request last; among equals who waits longest comes first."""
        self.asked: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Cheapest first, each a rank of its own; replicas that the router has no price for come last."""
        engines = {
            _id(replica): worker for replica in candidate_replicas if (worker := self._worker(replica)) is not None
        }
        self._tell(engines)
        body = _body(pending_request, self._model)
        prices: dict[str, tuple[float, float]] = {}
        if pending_request is not None and body is not None:
            try:
                prices = await asyncio.wait_for(self._ask(body), self._timeout_s)
                self.asked["answered"] += 1
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                self.asked["not answered"] += 1
                log.warning("%s: not asked: %r", self._url, error)
            self._priced[_name(pending_request)] = {worker: prefill_s for worker, (_, prefill_s) in prices.items()}
        own, running = self._own(), Counter(worker for worker, _, _ in self._sent.values())

        def price(replica: RunningReplica) -> tuple[bool, float, int, float]:
            name = _id(replica)
            cost = prices[name][0] + own.get(name, 0.0) if name in prices else 0.0
            return name not in prices, cost, running[name], self._last_s.get(name, 0.0)

        return [[replica] for replica in sorted(candidate_replicas, key=price)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        name = _name(pending_request)
        replica = self._replicas.get(replica_id)
        prices = self._priced.pop(name, {})
        if replica is not None:
            worker, now, prefill_s = _id(replica), time.monotonic(), prices.get(_id(replica), 0.0)
            self._sent[name] = (worker, now, prefill_s)
            self._last_s[worker] = now
            if "url" not in (self._worker(replica) or {}):
                self._busy_until_s[worker] = max(now, self._busy_until_s.get(worker, now)) + prefill_s

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent.pop(internal_request_id, None)

    def _own(self) -> dict[str, float]:
        """Seconds of prefill that were sent to each worker, and which the router cannot know of, or not yet."""
        now = time.monotonic()
        self._busy_until_s = {worker: until_s for worker, until_s in self._busy_until_s.items() if until_s > now}
        sums = {worker: until_s - now for worker, until_s in self._busy_until_s.items()}
        for worker, at, seconds in self._sent.values():
            if worker not in self._busy_until_s and now - at < SEEN_S:
                sums[worker] = sums.get(worker, 0.0) + seconds
        return sums

    def _worker(self, replica: RunningReplica) -> Mapping[str, Any] | None:
        """What the router is told of the engine in a replica; None where the replica does not say, or not yet."""
        stats = replica.routing_stats or {}
        found, events = stats.get("blockcast_worker"), stats.get("kv_event_metadata")
        if isinstance(found, Mapping) and isinstance(found.get("url"), str):
            return found
        if not isinstance(events, Mapping) or not self._model:
            return None
        told = {"model": self._model, "root": self._tokenizer, "events": events.get("endpoint"),
                "replay": events.get("replay_endpoint"), "block_size": events.get("block_size")}  # fmt: skip
        return {key: value for key, value in told.items() if value}

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
            self._last_s = {name: at_s for name, at_s in self._last_s.items() if name in engines}
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


def _id(replica: RunningReplica) -> str:
    worker = (replica.routing_stats or {}).get("blockcast_worker")
    if isinstance(worker, Mapping) and isinstance(worker.get("url"), str):
        return str(worker.get("id") or worker["url"].partition("://")[2])
    return str(replica.replica_id.unique_id)


def _name(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)


def _body(pending_request: PendingRequest | None, model: str) -> bytes | None:
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
