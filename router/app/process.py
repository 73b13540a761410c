"""The router's process: builds every part, runs the event loop, ends in good order."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from options.addresses import bracket_host
from options.system import import_event_loops, raise_file_limit
from options.tls import ServerPem, watch_client_files, watch_server_pem
from router.admin.dashboard import Dashboard
from router.admin.description import DescriptionRoutes, ModelRoutes
from router.admin.explanations import ExplanationRoutes
from router.admin.health import HealthRoutes
from router.admin.metrics_page import MetricsPage
from router.admin.workers import WorkerListRoutes
from router.app.api_keys import ApiKeys, Guard
from router.app.cluster import Cluster
from router.app.config import EppConfig, ProcessConfig
from router.app.dispatch import RequestDispatcher
from router.app.listen_addresses import bind_addresses
from router.app.process_limits import (
    TRIM_S,
    compute_connections_max,
    compute_worker_requests_max,
    describe_missing_files,
    limit_garbage_collection,
    make_heap_trimmer,
)
from router.app.request_pipeline import RequestPipeline
from router.app.server import RouterApp, list_forwarded_paths
from router.app.shutdown import Shutdown
from router.app.timers import Timers
from router.app.tracing import Tracing
from router.edge.config import CONNECTIONS_MAX
from router.fleet.peer_snapshots import PeerClient, fetch_seed
from router.host_names import HostNames
from router.http.listener import Listener
from router.http.routes import Routes
from router.http_client import open_session
from router.index import make_index

if TYPE_CHECKING:
    from router.picker.server import PickerServer

log = logging.getLogger("router")

CONNECTIONS_EXPECTED: Final = 1_000
"""The operator is warned where fewer connections are possible, even if no number was configured."""


TLS_FILES_S: Final = 10.0
"""Time between two looks at the files of `--worker-tls-cert`, `--worker-tls-key` and `--worker-tls-ca`."""


class RouterProcess:
    """Process of `router run` and `router epp`: makes its parts, starts them, and ends them in order.

    `await RouterProcess(config, version).run()` serves until SIGTERM, SIGINT or SIGHUP.
    """

    dispatcher_class: ClassVar[type[RequestDispatcher]] = RequestDispatcher
    app_class: ClassVar[type[RouterApp]] = RouterApp

    def __init__(self, config: ProcessConfig, version: str) -> None:
        """Make the parts of the process, each from earlier ones. Needs a running event loop. Raises ConfigError."""
        self._config = config
        self._version = version
        self._admin_key = config.admin_api_key or secrets.token_urlsafe(24)
        self._resources = contextlib.AsyncExitStack()
        """Everything that is to be closed at the end, the newest part first."""

        # The index of cached prefixes, with the hash seed of another router whose index is to be copied.
        seed, snapshot_urls = fetch_seed(config.snapshot_from, self._admin_key)
        index = make_index(seed)

        # What forwards requests to workers. (The clock of uvloop stands still while the loop runs callbacks.)
        worker_tls = config.make_worker_tls()
        self._host_names = HostNames()
        self.pipeline = RequestPipeline(config, index, worker_tls, self._host_names, now=time.monotonic)
        pipeline, proxy = self.pipeline, self.pipeline.proxy
        self._resources.callback(pipeline.close)
        self._add_tracing()

        # What follows the state of workers and of other routers.
        session = open_session(worker_tls, compute_worker_requests_max(raise_file_limit()), self._host_names)
        self._resources.push_async_callback(session.close)
        peer_client = PeerClient(session, snapshot_urls, self._admin_key)
        cluster = Cluster(config, pipeline, index, session, self._host_names, peer_client)
        self.cluster = cluster
        self._resources.push_async_callback(cluster.close)

        # What answers HTTP requests.
        self._health = HealthRoutes(proxy.core, cluster.fleet, cluster.feed, proxy.now, config.edge.ready_s)
        self._worker_list = WorkerListRoutes(proxy, cluster.fleet, pipeline.prompt_reader)
        get_explanation = pipeline.reasons.analyzer.get
        self._dashboard = Dashboard(
            proxy, self._worker_list.describe_workers, version=version, get_explanation=get_explanation
        )
        self._forwarded_paths = {} if isinstance(config, EppConfig) else list_forwarded_paths(config.edge)
        self._local_routes = self._make_local_routes()
        self._dispatcher = self.dispatcher_class(
            proxy, pipeline.request_reader, pipeline.tenant_limits, pipeline.reasons, cluster.fleet.discover_model
        )

        # What runs from the start to the end.
        self._listeners: list[Listener] = []
        self._timers = self._make_timers()
        self._timers.add("tls", watch_client_files(worker_tls, *config.worker_tls_files), TLS_FILES_S)
        self._shutdown = Shutdown(config.edge, proxy)

    async def run(self) -> None:
        """Serve requests until a signal comes, then let those in flight end. Raises OSError and ConfigError."""
        config = self._config
        async with self._resources:
            # All addresses are bound first, so that the start fails at once if one cannot be used.
            self.cluster.start_feed()
            addresses = await bind_addresses(config, self._admin_key, self._make_app, self._find_connections_max())
            self._listeners += [address.listener for address in addresses]
            for address in addresses[1:]:
                log.info("admin routes on %s:%d", bracket_host(address.host), address.port)
            self.cluster.connect_peers()
            picker = self._bind_picker(config) if isinstance(config, EppConfig) else None

            # Clients are let in only once some worker is known, as their requests would be refused before.
            self.cluster.follow_workers()
            if config.admin_api_key is None:
                print(f"router admin key: {self._admin_key}", flush=True)
            await self.cluster.wait_for_workers()
            for address in addresses:
                await address.listen()
            self._timers.run()
            self._resources.callback(self._timers.stop)
            if picker is not None:
                await picker.start()
                self._timers.add("picker", picker.refresh, config.edge.timeouts.sweep_s)
                log.info("endpoint picker on %s:%d", config.host, picker.port)
                print(f"picker listening on {config.host}:{picker.port}", flush=True)
            limit_garbage_collection()  # all objects of now live to the end: collections need not visit them again
            self._print_address(addresses[0].port)

            self._shutdown.watch_signals()
            await self._shutdown.end_requested.wait()
            self._health.is_draining = True
            await self._shutdown.drain(self._listeners, None if picker is None else picker.stop)

    def _add_tracing(self) -> None:
        """Trace requests if an endpoint for traces is configured. Raises ConfigError if packages are missing."""
        config, proxy = self._config, self.pipeline.proxy
        if config.otlp_endpoint is None:
            return
        tracing = Tracing(config.otlp_endpoint, config.trace_share, self._version)
        self._resources.callback(tracing.close)
        proxy.tracer = tracing.begin
        proxy.on_end.append(lambda context: tracing.end(context, proxy.now()))

    def _make_local_routes(self) -> Routes:
        """Return the HTTP routes that the router answers without a worker: models, health, metrics, dashboard."""
        pipeline, cluster = self.pipeline, self.cluster
        proxy, model_names = pipeline.proxy, pipeline.request_reader.model_names
        model_by_alias = {} if model_names is None else model_names.model_by_alias
        metrics_page = MetricsPage(
            proxy,
            pipeline.prompt_reader,
            pipeline.worker_pool,
            cluster.fleet,
            cluster.feed,
            cluster.count_peer_messages,
        )
        routes = Routes()
        for route_group in (
            DescriptionRoutes(self._version, self._forwarded_paths),
            self._health,
            ModelRoutes(proxy.core, model_by_alias, proxy.now),
            metrics_page,
            self._worker_list,
            ExplanationRoutes(proxy, pipeline.request_reader, pipeline.reasons),
            self._dashboard,
            cluster,
        ):
            route_group.register(routes)
        return routes

    def _make_app(self, guard: Guard) -> RouterApp:
        return self.app_class(self._dispatcher, self._forwarded_paths, self._local_routes, guard)

    def _make_timers(self) -> Timers:
        """Return the periodic work of the process: some at every tick of 20 ms, the rest a few times a second."""
        pipeline, cluster = self.pipeline, self.cluster
        proxy = pipeline.proxy
        timers = Timers(proxy.now, proxy.metrics.record_crash)
        timers.add("peers", cluster.exchange_loads)
        timers.add("core", proxy.tick_core)
        slow_steps = (
            proxy.sweep,
            proxy.pool.close_idle,
            pipeline.worker_pool.close_idle,
            self._dashboard.tick,
            cluster.sweep,
        )
        sweep_s = self._config.edge.timeouts.sweep_s
        for step in slow_steps:
            timers.add("sweep", step, sweep_s)
        timers.add("sweep", make_heap_trimmer(pipeline.executor), TRIM_S)
        timers.add("listener", self._expire_connections, sweep_s)
        return timers

    def _expire_connections(self, now: float) -> None:
        for listener in self._listeners:
            listener.expire_connections(now)

    def _find_connections_max(self) -> int:
        """Return the most connections of an address: as configured, or as many as file descriptors are enough for."""
        file_limit, worker_count = raise_file_limit(), len(self._config.workers)
        wanted_connections = self._config.edge.connections_max
        possible_connections = compute_connections_max(file_limit, worker_count, wanted_connections)
        is_default = wanted_connections == CONNECTIONS_MAX
        if possible_connections < (CONNECTIONS_EXPECTED if is_default else wanted_connections):
            log.warning(describe_missing_files(file_limit, worker_count, wanted_connections))
        return possible_connections

    def _print_address(self, port: int) -> None:
        scheme = "https" if self._config.tls_cert is not None else "http"
        host = bracket_host(self._config.host)
        policy = self._config.core.policy_function or self._config.core.policy
        log.info("policy %s, listening on %s://%s:%d", policy, scheme, host, port)
        print(f"router listening on {scheme}://{host}:{port}", flush=True)

    def _bind_picker(self, config: EppConfig) -> PickerServer:
        """Set up the gRPC server of `router epp`, which Envoy asks for workers, and bind its ports. Raises OSError."""
        # gRPC is an optional package, which only this command needs.
        from router.picker.endpoint_map import EndpointMap
        from router.picker.messages import MODEL_REWRITE_HEADER
        from router.picker.pick_exchange import PickExchange
        from router.picker.picker_client import Picker
        from router.picker.server import PickerServer

        self.pipeline.request_reader.model_header = MODEL_REWRITE_HEADER  # a gateway may rename the model
        proxy = self.pipeline.proxy
        picker = Picker(
            proxy,
            config.picker,
            EndpointMap(proxy.core.workers, self._host_names),
            find_tenant=ApiKeys(config.edge.api_keys).find_tenant,
            dispatch=partial(self._dispatcher.dispatch, make_exchange=PickExchange),
        )
        server = PickerServer(picker, find_unready_reason=self._health.find_unready_reason)
        server.bind(config.host, config.port, config.picker.health_port, _make_picker_pem_source(config))
        return server


def _make_picker_pem_source(config: EppConfig) -> Callable[[], ServerPem] | None:
    """Return what tells the TLS files of the picker's port as they are now; None without TLS. Raises ConfigError."""
    if config.picker.self_signed:
        from router.picker.certificate import make_self_signed_certificate

        pem = ServerPem(*make_self_signed_certificate(config.host))
        return lambda: pem
    if config.tls_cert is None or config.tls_key is None:
        return None
    return watch_server_pem(config.tls_cert, config.tls_key, config.tls_client_ca)


def run_process(config: ProcessConfig, version: str, process_class: type[RouterProcess] = RouterProcess) -> None:
    """Run a router's process, on uvloop where it is installed."""
    sys.setswitchinterval(0.0005)  # encoding threads must not hold the event loop for the default 5 ms

    async def run() -> None:
        await process_class(config, version).run()  # its parts need a running event loop

    import_event_loops().run(run())
