"""The workers of a router: added and removed at run time, by an operator or by lists that change.

Each worker is a `WorkerMonitor`, which probes and checks it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from options import ConfigError
from router.fleet.fact_queue import CacheCleared, CapacityObserved, EngineRestarted, StreamLost, WorkerFact
from router.fleet.kubernetes import KubernetesSource, watch_kubernetes
from router.fleet.retries import run_forever
from router.fleet.worker_lists import read_workers_file, watch_file, watch_host_name
from router.fleet.worker_monitor import FleetContext, WorkerMonitor
from router.fleet.worker_settings import WorkerSettings, parse_worker_flag, parse_worker_settings
from router.http_client import FetchError

log = logging.getLogger("router")

DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER = 1.0, 0.01
"""Shortest time between two searches for unknown models: the longer of a fixed one and one for each worker."""
DISCOVERY_WAIT_S_MAX, DISCOVERY_POLL_S = 2.0, 0.02
"""Longest time that a client waits for such a search, and the pause between two looks at its result."""
STARTING_S_MAX = 1800.0
"""Time in which a new worker may load its model: as long as `fleet` gives a program to start."""
CONCURRENT_POLLS_MAX = 32
"""Workers that are asked for their models at once."""


class Fleet:
    """All workers of this router: adds and removes them, and has one task for each that probes and checks it."""

    def __init__(self, context: FleetContext) -> None:
        """Begin without workers."""
        self._context = context
        self._core = context.core
        self._feed = context.feed
        self._monitors = context.monitors
        self._now = context.now
        self.failed_checks = context.failed_checks
        """Failed checks and probes by worker id, for `/metrics`."""
        self._unread_origins: set[str] = set()
        """Host names and objects of Kubernetes that were not read yet."""
        self._discovery: asyncio.Task[None] | None = None
        """Task that asks all workers which models they serve."""
        self._discovered_s = -math.inf
        """Time when the last such task ended."""

    def add(self, values: dict[str, Any]) -> str:
        """Add a worker from a JSON object with the keys of `--worker` and return its id. Raises ConfigError."""
        settings = parse_worker_settings(values)
        self.watch(settings, origin="operator")
        return settings.worker_id

    def watch(self, settings: WorkerSettings, *, origin: str) -> None:
        """Start to probe a worker that the list `origin` names. It replaces one with the same id and other settings."""
        existing = self._monitors.get(settings.worker_id)
        if existing is not None and existing.settings == settings:
            existing.origins.add(origin)
            worker = self._core.workers.get(settings.worker_id)
            if worker is None or worker.is_down:
                existing.wake.set()  # whoever names the worker expects it to be there
            return
        monitor = WorkerMonitor(settings, origin, self._context)
        if existing is not None:
            existing.cancel()
            if existing.settings.url != settings.url:
                self._context.checkpoints.remove_worker(existing.settings)
            monitor.readiness = existing.readiness
        self._monitors[settings.worker_id] = monitor
        monitor.start()

    def remove(self, worker_id: str) -> None:
        """Forget a worker, if it is there. Its running answers are not cut off."""
        monitor = self._monitors.pop(worker_id, None)
        if monitor is None:
            return
        monitor.cancel()
        self.failed_checks.pop(worker_id, None)
        self._context.checkpoints.remove_worker(monitor.settings)
        self._feed.forget(worker_id)
        self._context.perform(self._core.remove_worker(worker_id, self._now()))

    async def discover_model(self, model: str) -> int:
        """Ask all workers for a model that none is known to serve; wait for one that has it, or all, for a while.

        Return the number of workers that may still be loading it. Clients that ask at the same time share one search.
        After a search there is a pause, because clients may ask for any name.
        """
        if self._discovery is None or self._discovery.done():
            pause_s = max(DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER * len(self._monitors))
            if self._now() - self._discovered_s >= pause_s:
                self._discovery = self._context.background.start(self._poll_all_models())
        search = self._discovery
        deadline_s = self._now() + DISCOVERY_WAIT_S_MAX
        while search is not None and not search.done():
            if self._now() >= deadline_s or self._core.registry.is_model_known(model):
                break
            await asyncio.wait({search}, timeout=DISCOVERY_POLL_S)
        return self._count_starting_workers()

    def _count_starting_workers(self) -> int:
        """Return how many workers may still be loading a model: new ones, or all while none was ever reached."""
        reached_workers = self._core.workers
        unreached = [monitor for worker_id, monitor in self._monitors.items() if worker_id not in reached_workers]
        if not reached_workers:
            return len(unreached)
        return sum(self._now() - monitor.configured_s <= STARTING_S_MAX for monitor in unreached)

    def drain(self, worker_id: str, *, is_draining: bool) -> None:
        """Stop or resume new requests to a known worker, as an operator says."""
        if worker_id in self._monitors:
            self._monitors[worker_id].readiness.is_drain_cause = False
        self._context.perform(self._core.set_draining(worker_id, self._now(), is_draining=is_draining))

    def check_soon(self, worker_id: str) -> None:
        """Check a worker now, because a request to it failed or its event stream broke."""
        monitor = self._monitors.get(worker_id)
        if monitor is not None:
            monitor.wake.set()

    def apply_fact(self, fact: WorkerFact) -> None:
        """Pass on to the core what the event feed learned about a worker."""
        match fact:
            case CacheCleared(worker_id, rank, at_s):
                self._core.clear_worker_cache(worker_id, at_s, rank)
            case CapacityObserved(worker_id, rank, tokens):
                self._core.record_cache_capacity(worker_id, rank, tokens)
            case StreamLost(worker_id):
                self.check_soon(worker_id)
            case EngineRestarted(worker_id):
                if worker_id in self._monitors:
                    self._monitors[worker_id].engine_restarts += 1

    async def close(self) -> None:
        """End all tasks."""
        await self._context.background.close()

    def describe_events(self, worker_id: str) -> dict[str, Any]:
        """Return the state of a worker's event streams, for `/workers`."""
        monitor = self._monitors.get(worker_id)
        details = self._feed.describe_streams(worker_id)
        if monitor is not None and monitor.problem:
            details["problem"] = monitor.problem
        return details

    def may_receive_api_key(self, worker_id: str) -> bool:
        """Return whether a worker may be sent the workers' API key."""
        monitor = self._monitors.get(worker_id)
        return monitor is not None and monitor.settings.sends_api_key

    def list_starting_reasons(self) -> dict[str, str]:
        """Return why each worker that was never reached is not available, by its id."""
        return {
            worker_id: monitor.starting_reason
            for worker_id, monitor in self._monitors.items()
            if worker_id not in self._core.workers
        }

    def has_unprobed_worker(self) -> bool:
        """Return whether some worker's first probe has not ended yet, or a list of workers was not read yet."""
        return bool(self._unread_origins) or any(
            monitor.facts is None and not monitor.consecutive_failures and not monitor.problem
            for monitor in self._monitors.values()
        )

    def follow_file(self, path: Path) -> None:
        """Add the workers in a file of `--worker` lines, and follow its changes. Raises ConfigError."""
        self._update_origin("file", read_workers_file(path))
        self._keep_running(lambda: watch_file(path, partial(self._update_origin, "file")))

    def follow_name(self, settings: WorkerSettings) -> None:
        """Add a worker for each address that the host of `settings` resolves to, and follow changes."""
        origin = f"dns {settings.url}"
        self._unread_origins.add(origin)
        update = partial(self._update_origin, origin)
        host_names, every_s = self._context.prober.host_names, self._context.config.names_s
        self._keep_running(lambda: watch_host_name(host_names, settings, every_s, update))

    def follow_kubernetes(self, source: KubernetesSource) -> None:
        """Add the endpoints of a Service or InferencePool, and follow changes. Unready ones get no new requests."""
        self._unread_origins.add(str(source))
        apply_endpoints = partial(self._apply_endpoints, str(source))
        self._keep_running(lambda: watch_kubernetes(source, apply_endpoints))

    def _apply_endpoints(self, origin: str, is_ready_by_address: Mapping[str, bool]) -> None:
        """Add and remove workers so that they are the endpoints that Kubernetes lists; drain those that are not ready.

        `origin`: name of the Service or pool. `is_ready_by_address`: all its endpoints, as HOST:PORT. An endpoint is
        added as a worker when it is ready for the first time.
        """
        workers = self._core.workers
        is_ready_by_settings = {
            parse_worker_flag(f"http://{address}"): is_ready for address, is_ready in is_ready_by_address.items()
        }
        listed = [
            settings for settings, is_ready in is_ready_by_settings.items() if is_ready or settings.worker_id in workers
        ]
        self._update_origin(origin, listed)
        unready_ids = {settings.worker_id for settings, is_ready in is_ready_by_settings.items() if not is_ready}
        for worker_id, monitor in self._monitors.items():
            if worker_id in workers:
                monitor.record_readiness(origin, is_ready=worker_id not in unready_ids)

    def _update_origin(self, origin: str, listed_workers: list[WorkerSettings]) -> None:
        """Watch the workers of a list, and remove those that only `origin` has named and names no more."""
        self._unread_origins.discard(origin)
        listed_ids = {settings.worker_id for settings in listed_workers}
        for worker_id, monitor in list(self._monitors.items()):
            if origin in monitor.origins and worker_id not in listed_ids:
                monitor.origins.discard(origin)
                if not monitor.origins:
                    log.info("worker %s left %s", worker_id, origin)
                    self.remove(worker_id)
        for settings in listed_workers:
            listed = self._monitors.get(settings.worker_id)
            if listed is None or origin not in listed.origins or listed.settings != settings:
                self.watch(settings, origin=origin)

    def _keep_running(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Follow a list of workers in the background until `close`."""
        self._context.background.start(run_forever(work, _report_list_error))

    async def _poll_all_models(self) -> None:
        try:
            slots = asyncio.Semaphore(CONCURRENT_POLLS_MAX)

            async def poll(monitor: WorkerMonitor) -> None:
                async with slots:
                    await monitor.poll_models()

            await asyncio.gather(
                *(poll(monitor) for monitor in list(self._monitors.values()) if monitor.facts is not None)
            )
        finally:
            self._discovered_s = self._now()


def _report_list_error(error: Exception) -> None:
    """Log why a list of workers is followed no more; it will be tried again."""
    is_fault = not isinstance(error, (ConfigError, FetchError))
    log.error("%s; the workers stay as they are, and it is tried again", error, exc_info=error if is_fault else None)
