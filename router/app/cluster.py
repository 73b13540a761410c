"""The workers and other routers that this router follows while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from events.sources import resolve_endpoint
from options.system import raise_file_limit
from prompts.errors import RequestError
from router.app.config import ProcessConfig
from router.app.failure_log import FailureLog
from router.app.process_limits import compute_streams_max, name_flag_in_errors
from router.app.request_pipeline import RequestPipeline
from router.decide.core import RouterCore
from router.decide.messages import Decision, FailureKind
from router.decide.workers import Worker, WorkerState
from router.fleet.fact_queue import FactQueue, WorkerFact
from router.fleet.index_feed import IndexFeed
from router.fleet.kubernetes import KubernetesSource
from router.fleet.membership import Fleet
from router.fleet.peer_snapshots import PeerClient, PeerRoutes
from router.fleet.peers import PeerLoads, PeerSockets
from router.fleet.prober import Prober
from router.fleet.worker_checkpoints import WorkerCheckpoints
from router.fleet.worker_monitor import FleetContext
from router.fleet.worker_settings import parse_worker_flag
from router.host_names import HostNames
from router.http.request import HttpRequest
from router.http.routes import Response, Routes
from router.http_client import make_key_headers
from router.index.protocol import PrefixIndex
from router.prompting.model_tokenizers import RemoteTokenizer, RemoteWorker

log = logging.getLogger("router")

FIRST_WORKER_WAIT_S: Final = 10.0
"""Longest wait at the start for an answer of any configured worker: two timeouts of a probe."""
OTHER_WORKERS_WAIT_S: Final = 1.0
"""Longest wait for the other workers once one has answered."""


class Cluster:
    """Follows the workers' health and events, and the load of other routers, while the process runs."""

    def __init__(
        self,
        config: ProcessConfig,
        pipeline: RequestPipeline,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        host_names: HostNames,
        peer_client: PeerClient,
    ) -> None:
        """Make the parts that follow workers, and connect them with the pipeline by callbacks.

        The feed reads the events by which workers tell what they cache; the fleet probes which workers are healthy.
        `session`: for health checks. `peer_client`: asks other routers what they know of workers' caches.
        """
        proxy = pipeline.proxy
        self._proxy = proxy
        self._config = config
        self._index = index
        self._peer_client = peer_client
        self._peer_sockets: PeerSockets | None = None
        self._failure_log = FailureLog()

        # The feed, which applies the workers' cache events to the index.
        streams_possible = compute_streams_max(raise_file_limit())
        self.feed = IndexFeed(
            index,
            report=FactQueue(asyncio.get_running_loop(), self._apply_fact).put,
            streams_max=min(config.fleet.streams_max, streams_possible),
            index_bytes_max=config.fleet.index_mb << 20,
        )

        # The fleet, which finds out over HTTP what workers are and whether they are up.
        key_headers = make_key_headers(config.worker_api_key)
        tokenizers = pipeline.prompt_reader.tokenizers
        tokenizers.remote = RemoteTokenizer(session, key_headers, is_serving=partial(is_worker_serving, proxy.core))
        prober = Prober(
            session,
            host_names,
            headers=key_headers,
            trusts_endpoints=config.fleet.trust_event_endpoints,
            kv_dialects=config.kv_dialects,
        )
        worker_checkpoints = WorkerCheckpoints(tokenizers, proxy.core.workers)
        self.fleet = Fleet(
            FleetContext(
                proxy.core, prober, self.feed, worker_checkpoints, peer_client, proxy.perform, config.fleet, proxy.now
            )
        )

        # The core asks the feed about events, and the feed and the fleet learn of failed requests.
        proxy.core.registry.on_state_change = _log_state_change
        proxy.core.watchdog.count_stored_blocks = self.feed.count_stored_blocks
        proxy.core.watchdog.list_unreachable_endpoints = self.feed.list_unreachable_endpoints
        proxy.workers.may_send_key = self.fleet.may_receive_api_key
        proxy.on_worker_lost.append(self.feed.restart_streams)
        proxy.on_failure.append(self._on_attempt_failed)
        proxy.on_transfer_failed.append(self.fleet.check_soon)

    def register(self, routes: Routes) -> None:
        """Serve the routes by which other routers copy this one's index, and by which an operator names them."""
        peer_routes = PeerRoutes(self._index.seed, self.feed.make_snapshot, self._peer_client.outcomes)
        routes.add("GET", "/peer", peer_routes.get_seed, public=False)
        routes.add("GET", "/peer/*", peer_routes.get_snapshot, public=False)
        routes.add("PUT", "/peers", self._set_peers, public=False)

    def start_feed(self) -> None:
        """Read event streams from now on. Raises OSError if a `--bind-events` endpoint cannot be bound."""
        self.feed.start()
        for endpoint in self._config.bind_events:
            with name_flag_in_errors("--bind-events", endpoint):
                log.info("publishers may connect to %s", _name_own_host(self.feed.bind(endpoint)))

    def connect_peers(self) -> None:
        """Share load with other routers if the operator named any. Raises OSError."""
        if not self._config.peers and self._config.peer_bind is None:
            return
        sockets = PeerSockets(PeerLoads(self._proxy.core.tracker, make_router_name()))
        self._peer_sockets = sockets
        if self._config.peer_bind is not None:
            with name_flag_in_errors("--peer-bind", self._config.peer_bind):
                sockets.bind(self._config.peer_bind)
        for peer in self._config.peers:
            with name_flag_in_errors("--peer", peer):
                sockets.connect(peer)
        if sockets.address is not None:
            log.info("other routers may follow this one's load with --peer %s", _name_own_host(sockets.address))

    def follow_workers(self) -> None:
        """Begin to probe the configured workers. Raises ConfigError for a bad workers file."""
        config = self._config
        for settings in config.worker_flags:
            self.fleet.watch(settings, origin="operator")
        for url in config.worker_dns:
            self.fleet.follow_name(parse_worker_flag(url))
        for spec in config.kubernetes:
            self.fleet.follow_kubernetes(KubernetesSource.parse(spec))
        if config.workers_file is not None:
            self.fleet.follow_file(Path(config.workers_file))

    async def wait_for_workers(self) -> None:
        """Wait a little for the configured workers, because without them the first request would find none."""
        now = self._proxy.now
        end_s = now() + min(FIRST_WORKER_WAIT_S, self._config.edge.ready_s)
        while self.fleet.has_unprobed_worker() and now() < end_s:
            if self._proxy.core.workers:
                end_s = min(end_s, now() + OTHER_WORKERS_WAIT_S)
            await asyncio.sleep(0.01)

    def exchange_loads(self, now: float) -> None:
        """Exchange load with other routers. Call every tick."""
        if self._peer_sockets is not None:
            self._peer_sockets.exchange_loads(now)

    def sweep(self, now: float) -> None:
        """Drop the counters of workers that left, and log event streams that stay down."""
        self._proxy.metrics.retain_workers(self._proxy.core.workers)
        for worker_id, worker in self._proxy.core.workers.items():
            if worker.state is WorkerState.UP:
                self.feed.warn_of_unreachable_streams(worker_id)

    def count_peer_messages(self) -> dict[str, int]:
        """Return the messages to and from other routers, by outcome."""
        load_messages = {} if self._peer_sockets is None else self._peer_sockets.loads.counts
        return load_messages | self._peer_client.outcomes

    async def close(self) -> None:
        await self.fleet.close()
        self.feed.close()
        if self._peer_sockets is not None:
            self._peer_sockets.close()

    def _set_peers(self, request: HttpRequest, _: str) -> Response:
        """Replace the other routers whose load counts by those in the body. Raises RequestError."""
        if self._peer_sockets is None:
            raise RequestError("peers: this router tells no load: --peer-bind", param="peers", status=409)
        return Response(msgspec.json.encode({"peers": self._peer_sockets.set_peers(request.body)}))

    def _apply_fact(self, fact: WorkerFact) -> None:
        try:
            self.fleet.apply_fact(fact)
        except Exception as error:  # noqa: BLE001  a boundary
            self._proxy.metrics.record_crash("feed", error)

    def _on_attempt_failed(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        self._failure_log.warn(decision.worker if decision else "?", kind, reason, self._proxy.now())
        if decision is not None and kind is not FailureKind.OVERLOADED:
            self.fleet.check_soon(decision.worker)


def is_worker_serving(core: RouterCore, settings: RemoteWorker, model: str) -> bool:
    """Return whether a worker is up, at the address that `settings` names, and serves a base model."""
    worker = core.workers.get(settings.worker_id)
    if worker is None or worker.is_down or worker.spec.url != settings.url:
        return False
    return any(served.base == model for served in worker.spec.models)


def make_router_name() -> str:
    """Return a name for this process that no peer has: containers may share the host's name and all be process 1."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def _name_own_host(endpoint: str) -> str:
    """Return a bound address as others can use it: on all interfaces, with the name of this host."""
    return resolve_endpoint(endpoint, socket.gethostname())


def _log_state_change(worker: Worker, previous_state: WorkerState | None) -> None:
    level = logging.WARNING if worker.state is WorkerState.DOWN else logging.INFO
    previous_name = "new" if previous_state is None else previous_state.value
    reason = f": {worker.state_reason}" if worker.state_reason else ""
    log.log(level, "worker %s: %s -> %s%s", worker.worker_id, previous_name, worker.state.value, reason)
