"""Whether the router is alive, well, and ready for requests: `/livez`, `/health` and `/readyz`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from router.decide.core import RouterCore
from router.decide.workers import CacheView, WorkerState
from router.fleet.index_feed import IndexFeed
from router.fleet.membership import Fleet
from router.http.request import HttpRequest
from router.http.routes import Response, Routes

LISTED_WORKERS_MAX = 10


class HealthRoutes:
    """Health of this router, by its workers and by how far their event streams have caught up."""

    def __init__(
        self, core: RouterCore, fleet: Fleet, feed: IndexFeed, now: Callable[[], float], ready_s: float
    ) -> None:
        """`ready_s`: longest time from now on in which a worker with an unknown cache makes the router unready."""
        self._core = core
        self._fleet = fleet
        self._feed = feed
        self._now = now
        self._ready_until_s = now() + ready_s
        self._was_ready = False
        self.is_draining = False
        """Whether the process is about to end."""

    def register(self, routes: Routes) -> None:
        routes.add("GET", "/livez", lambda *_: Response(b'{"status":"ok"}'), public=True)
        routes.add("GET", "/health", self._report_health, public=True)
        routes.add("GET", "/readyz", self._report_readiness, public=True)

    def _report_health(self, request: HttpRequest, _: str) -> Response:
        """Answer 200 while a worker is up and the router is not about to end."""
        states = [worker.state for worker in self._core.workers.values()]
        up_count = sum(state is WorkerState.UP for state in states)
        status = "draining" if self.is_draining else "ok" if up_count else "no worker is up"
        worker_count = len(states) + len(self._fleet.list_starting_reasons())
        body: dict[str, Any] = {"status": status, "workers": worker_count, "workers_up": up_count}
        fault = self._feed.events.describe_fault()
        if fault is not None:
            body["events"] = fault  # no reason for 503: requests are still sent on, by the caches known until then
        return Response(msgspec.json.encode(body), 200 if status == "ok" else 503)

    def _report_readiness(self, request: HttpRequest, _: str) -> Response:
        """Answer 503 while requests had better go to another router."""
        reason = self.find_unready_reason()
        return Response(msgspec.json.encode({"status": reason or "ok"}), 503 if reason else 200)

    def find_unready_reason(self) -> str | None:
        """Return why the router should get no requests yet; None if it is ready.

        At its start, a router waits a while until it knows what the workers have cached. Once it was ready, it stays
        ready while any worker is up.
        """
        if self.is_draining:
            return "draining"
        if not any(worker.state is WorkerState.UP for worker in self._core.workers.values()):
            return "no worker is up"
        if not self._was_ready:
            unknown_workers = self._list_unknown_workers()
            if unknown_workers and self._now() < self._ready_until_s:
                return f"not known yet: {', '.join(unknown_workers[:LISTED_WORKERS_MAX])}"
            self._was_ready = True
        return None

    def _list_unknown_workers(self) -> list[str]:
        """Return the ids of workers with a cache that is not known yet, and of workers that were never reached."""
        unsynced_ids = [
            worker.worker_id
            for worker in self._core.workers.values()
            if worker.state is WorkerState.UP
            and worker.spec.cache_view is CacheView.EVENTS
            and not self._feed.is_synced(worker.worker_id)
        ]
        return unsynced_ids + list(self._fleet.list_starting_reasons())
