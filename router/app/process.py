"""The router's process: builds every part, runs the event loop, ends in good order.

Owns the clock, the signals and the periodic work. The parts do not know each other beyond what is handed to them here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp
import msgspec

from options import ConfigError
from options.system import raise_file_limit
from options.tls import make_client_context
from prompts.errors import RequestError
from router.app.accounting import count_ended_request, count_tokens_of_key, log_state_change, make_log_fields
from router.app.admin import AdminRoutes
from router.app.config import EppConfig, ProcessConfig
from router.app.dashboard import Dashboard
from router.app.dispatch import RequestDispatcher, RequestPlacer
from router.app.guard import Guard
from router.app.listen_addresses import ListenAddresses
from router.app.request_reader import RequestReader
from router.app.server import FORWARDED_PATHS, TIMER_INTERVAL_S, ForwardedRoutes, RouterApp, WorkerRoutes
from router.app.system import (
    HeapTrimmer,
    collect_old_objects,
    connections_limit,
    event_streams_max,
    limit_garbage_collection,
    name_flag_in_errors,
    too_few_files_message,
)
from router.app.tenant_limits import TenantLimits
from router.app.tracing import Tracing
from router.decide.core import RouterCore
from router.decide.messages import Decision, FailureKind
from router.edge.config import CONNECTIONS_MAX
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext
from router.edge.upstream import UpstreamPool
from router.fleet.discovery import Prober, parse_worker_flag
from router.fleet.fact_queue import FactQueue, WorkerFact
from router.fleet.feed import IndexFeed
from router.fleet.kubernetes import KubernetesSource
from router.fleet.members import Fleet
from router.fleet.peer_snapshots import PeerClient, PeerRoutes, fetch_seed
from router.fleet.peers import PeerLoads, PeerSockets
from router.http.listener import Listener
from router.http.request import HttpRequest
from router.http.routes import Response
from router.index import make_index
from router.metrics import Metrics
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.reader import PromptReader
from router.prompting.remote import RemoteTokenizer
from router.prompting.sessions import SessionNames
from router.tenancy.model_names import ModelNames

if TYPE_CHECKING:
    from router.picker.server import PickerServer

log = logging.getLogger("router")

FIRST_WORKER_WAIT_S: Final = 5.0
"""For the workers that were named to answer before the addresses are opened."""
OTHER_WORKERS_WAIT_S: Final = 1.0
"""For the others once one has."""
CONNECTIONS_EXPECTED: Final = 1_000
"""With fewer the operator is warned, also where no number was asked for."""


ArgumentT = TypeVar("ArgumentT")


class RouterProcess:
    """`await RouterProcess(config, version).run()` serves until SIGTERM or SIGINT."""

    def __init__(self, config: ProcessConfig, version: str) -> None:
        self._config = config
        self._version = version
        self._now = time.monotonic  # uvloop's own clock stands still within a turn of the loop
        self._stop_requested = asyncio.Event()
        self._abort_requested = asyncio.Event()
        self._executor = ThreadPoolExecutor(
            config.tokenize_threads or min(8, os.cpu_count() or 1), thread_name_prefix="tokenize"
        )
        self._heap_trimmer = HeapTrimmer(self._executor)
        self._admin_key = config.admin_api_key or secrets.token_urlsafe(24)
        seed, self._snapshot_urls = fetch_seed(config.snapshot_from, self._admin_key)
        self._index = make_index(seed)
        self._core = RouterCore(self._index, config.core, seed=config.seed)
        self._metrics = Metrics()
        self._worker_tls = make_client_context(
            config.worker_tls_cert, config.worker_tls_key, config.worker_tls_ca, "--worker-tls"
        )
        self._upstream_pool = UpstreamPool(connect_s_max=config.edge.timeouts.connect_s, tls=self._worker_tls)
        worker_api_key = config.worker_api_key
        self._proxy = Proxy(
            self._core,
            self._upstream_pool,
            self._metrics,
            config.edge,
            now=self._now,
            worker_authorization=None if worker_api_key is None else f"Bearer {worker_api_key}".encode(),
        )
        self._proxy.log_share = config.log_decisions
        self._prompt_reader = PromptReader(
            self._executor,
            override=config.tokenizer,
            chat_template=config.chat_template,
            cache_bytes=config.segment_cache_mb << 20,
            conversation_bytes=config.conversation_cache_mb << 20,
        )
        self._worker_pool = PromptWorkerPool(
            config.prompt_workers, chat_template=config.chat_template, cache_bytes=config.segment_cache_mb << 20
        )
        self._prompt_reader.worker_pool = self._worker_pool
        session_names = SessionNames(config.edge.session_headers)
        self._request_reader = RequestReader(self._core, self._prompt_reader, self._worker_pool, session_names)
        self._proxy.on_end.append(self._request_reader.stored_responses.record_ended_request)
        self._tenant_limits = TenantLimits(config.edge, self._metrics)
        model_names = ModelNames(config.tenancy)
        self._request_reader.model_names = model_names if model_names.has_renames else None
        self._index_feed = IndexFeed(
            self._index,
            report=FactQueue(asyncio.get_running_loop(), self._apply_fact).put,
            streams_max=min(config.fleet.streams_max, event_streams_max(raise_file_limit())),
            index_bytes_max=config.fleet.index_mb << 20,
        )
        self._reasons = MissReasonsRecorder(
            config.miss_reasons,
            self._core,
            self._proxy,
            self._prompt_reader,
            self._worker_pool,
            self._metrics,
        )
        self._listen_addresses = ListenAddresses(config, self._admin_key, self._make_app)
        self._peer_sockets: PeerSockets | None = None
        self._picker: PickerServer | None = None
        self._loop = asyncio.get_running_loop()
        self._sweep_s = 0.0
        otlp_endpoint = config.otlp_endpoint
        self._tracing = None if otlp_endpoint is None else Tracing(otlp_endpoint, config.trace_share, version)
        self._fleet: Fleet
        self._admin: AdminRoutes
        self._dashboard: Dashboard
        self._dispatcher: RequestDispatcher

    async def run(self) -> None:
        """Raises OSError where an address cannot be had, ConfigError for a bad workers file."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._executor.shutdown, wait=False, cancel_futures=True)
            stack.callback(self._worker_pool.processes.close)
            stack.callback(self._prompt_reader.close)
            if self._tracing is not None:
                stack.callback(self._tracing.close)
            stack.callback(self._upstream_pool.close)
            stack.callback(self._index_feed.close)
            self._start_feed()
            connector = aiohttp.TCPConnector(ssl=self._worker_tls)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            self._connect_parts(session)
            stack.push_async_callback(self._fleet.close)
            port = await self._listen_addresses.bind(self._connections_max())
            self._peer_sockets = self._connect_peers()
            stack.callback(lambda: None if self._peer_sockets is None else self._peer_sockets.close())
            picker_port = self._bind_picker(config) if isinstance(config := self._config, EppConfig) else None
            self._start_fleet()
            if self._config.admin_api_key is None:
                print(f"router admin key: {self._admin_key}", flush=True)
            await self._wait_for_first_workers()
            await self._listen_addresses.listen()
            timer_task = self._loop.create_task(self._run_timers())
            stack.callback(timer_task.cancel)
            if picker_port is not None:
                await self._start_picker(*picker_port)
            limit_garbage_collection()
            self._print_address(port)
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal)
            stop_task = self._loop.create_task(self._stop_requested.wait())
            ended_tasks, _ = await asyncio.wait({stop_task, timer_task}, return_when=asyncio.FIRST_COMPLETED)
            if timer_task in ended_tasks:
                timer_task.result()
            self._admin.draining = True
            await self._drain()

    # Building -----------------------------------------------------------------------------------------------------

    def _connections_max(self) -> int:
        """Number of connections of each address, for which file descriptors are enough."""
        limit = raise_file_limit()
        workers = len(self._config.workers)
        connections_wanted = self._config.edge.connections_max
        connections_possible = connections_limit(limit, workers, connections_wanted)
        if connections_possible < (
            CONNECTIONS_EXPECTED if connections_wanted == CONNECTIONS_MAX else connections_wanted
        ):
            log.warning(too_few_files_message(limit, workers, connections_wanted))
        return connections_possible

    def _start_feed(self) -> None:
        self._index_feed.start()
        for endpoint in self._config.bind_events:
            with name_flag_in_errors("--bind-events", endpoint):
                log.info("publishers may connect to %s", self._index_feed.bind(endpoint))

    def _connect_parts(self, session: aiohttp.ClientSession) -> None:
        config, proxy = self._config, self._proxy
        worker_api_key = config.worker_api_key
        headers = {"Authorization": f"Bearer {worker_api_key}"} if worker_api_key is not None else None
        prober = Prober(session, headers=headers, trusts_endpoints=config.fleet.trust_event_endpoints)
        self._prompt_reader.remote = RemoteTokenizer(session, headers)
        peer_client = PeerClient(session, self._snapshot_urls, self._admin_key)
        self._fleet = Fleet(
            self._core,
            prober,
            self._index_feed,
            self._prompt_reader,
            proxy.perform,
            config.fleet,
            now=self._now,
            peers=peer_client,
        )
        self._dispatcher = self._make_dispatcher()
        self._admin = AdminRoutes(
            self._core,
            self._fleet,
            self._prompt_reader,
            self._request_reader,
            self._metrics,
            now=self._now,
            version=self._version,
            feed_totals=self._index_feed.sum_counters,
            feed_fault=self._index_feed.events.describe_fault,
            event_faults=lambda: self._index_feed.events.fault_count,
            events_ignored=lambda: self._index_feed.events.ignored_message_count,
            peer_messages=lambda: (
                ({} if self._peer_sockets is None else self._peer_sockets.counts()) | peer_client.outcomes
            ),
            is_synced=self._index_feed.is_synced,
            ready_s=config.edge.ready_s,
            reasons=self._reasons,
            aliases=self._request_reader.model_names.model_by_alias
            if self._request_reader.model_names is not None
            else {},
            forwarded_paths=() if isinstance(config, EppConfig) else [*FORWARDED_PATHS, *config.edge.pass_routes],
        )
        self._dashboard = Dashboard(
            self._core, proxy, self._admin.describe_workers, version=self._version, why=self._reasons.get_explanation
        )
        self._admin.add_dashboard(self._dashboard)
        peer_routes = PeerRoutes(self._index.seed, self._index_feed.make_snapshot, peer_client.outcomes)
        self._admin.routes.add("GET", "/peer", peer_routes.get_seed, public=False)
        self._admin.routes.add("GET", "/peer/*", peer_routes.get_snapshot, public=False)
        self._admin.routes.add("PUT", "/peers", self._set_peers, public=False)
        self._core.registry.on_state_change = log_state_change
        self._core.watchdog.count_stored_blocks = self._index_feed.count_stored_blocks
        proxy.workers.may_send_key = self._fleet.may_receive_api_key
        proxy.on_worker_lost.append(self._index_feed.restart_streams)
        proxy.on_failure.append(self._on_attempt_failed)
        proxy.on_end.append(self._on_request_end)
        if self._tracing is not None:
            tracing = self._tracing
            proxy.tracer = tracing.begin
            proxy.on_end.append(lambda context: tracing.end(context, self._now()))

    def _bind_picker(self, config: EppConfig) -> tuple[PickerServer, int]:
        """Take the picker's ports; the picker and its port. Raises OSError where a port cannot be had."""
        from router.app.picker_app import PickerApp
        from router.picker.endpoint_map import EndpointMap
        from router.picker.messages import REWRITE
        from router.picker.pick_exchange import PickerState
        from router.picker.server import PickerServer

        self._request_reader.model_header = REWRITE
        picker_state = PickerState(config.picker, EndpointMap(self._core.workers))
        picker = PickerServer(PickerApp(self._dispatcher), picker_state, ready=self._admin.find_unready_reason)
        tls_pair = None
        if config.picker.self_signed:
            from router.picker.certificate import self_signed

            tls_pair = self_signed(config.host)
        elif config.tls_cert is not None and config.tls_key is not None:
            try:
                tls_pair = Path(config.tls_cert).read_bytes(), Path(config.tls_key).read_bytes()
            except OSError as unread:
                raise ConfigError(f"--tls-cert, --tls-key: {unread}") from unread
        return picker, picker.bind(config.host, config.port, config.picker.health_port, tls_pair)

    async def _start_picker(self, picker: PickerServer, port: int) -> None:
        await picker.start()
        self._picker = picker
        host = self._config.host
        log.info("endpoint picker on %s:%d", host, port)
        print(f"picker listening on {host}:{port}", flush=True)

    def _make_dispatcher(self) -> RequestDispatcher:
        """What reads requests for workers, and places them."""
        placer = RequestPlacer(self._request_reader, self._tenant_limits, self._proxy, self._reasons)
        return RequestDispatcher(
            self._proxy, self._request_reader, self._tenant_limits, placer, self._fleet.discover_model
        )

    def _make_worker_routes(self) -> WorkerRoutes:
        """What is done with requests for workers that come over HTTP."""
        is_forwarding = not isinstance(self._config, EppConfig)
        return ForwardedRoutes(self._dispatcher, self._admin.routes, self._config.edge, is_enabled=is_forwarding)

    def _make_app(self, guard: Guard) -> RouterApp:
        return RouterApp(self._proxy, self._make_worker_routes(), self._admin.routes, guard)

    def _start_fleet(self) -> None:
        for flag in self._config.worker_flags:
            self._fleet.watch(flag, origin="operator")
        for name in self._config.worker_dns:
            self._fleet.follow_name(parse_worker_flag(name))
        for spec in self._config.kubernetes:
            self._fleet.follow_kubernetes(KubernetesSource.parse(spec))
        if self._config.workers_file is not None:
            self._fleet.follow_file(Path(self._config.workers_file))

    async def _wait_for_first_workers(self) -> None:
        """Wait for the configured workers before the first request, which would be told that there are none. Once one
        has answered, the others are waited for OTHER_WORKERS_WAIT_S."""
        end_s = self._now() + min(FIRST_WORKER_WAIT_S, self._config.edge.ready_s)
        while self._fleet.has_untried() and self._now() < end_s:
            if self._core.workers:
                end_s = min(end_s, self._now() + OTHER_WORKERS_WAIT_S)
            await asyncio.sleep(0.01)

    def _connect_peers(self) -> PeerSockets | None:
        """Share load with other routers where the operator named any. Raises OSError."""
        if not self._config.peers and self._config.peer_bind is None:
            return None
        sockets = PeerSockets(PeerLoads(self._core.tracker, f"{socket.gethostname()}/{os.getpid()}"))
        if self._config.peer_bind is not None:
            with name_flag_in_errors("--peer-bind", self._config.peer_bind):
                sockets.bind(self._config.peer_bind)
        for peer in self._config.peers:
            with name_flag_in_errors("--peer", peer):
                sockets.connect(peer)
        if sockets.address is not None:
            log.info("other routers may follow this one's load with --peer %s", sockets.address)
        return sockets

    def _set_peers(self, request: HttpRequest, _: str) -> Response:
        """Set the routers whose load counts from now on."""
        if self._peer_sockets is None:
            raise RequestError("peers: this router tells no load: --peer-bind", param="peers", status=409)
        return Response(msgspec.json.encode({"peers": self._peer_sockets.follow(request.body)}))

    def _print_address(self, port: int) -> None:
        scheme = "https" if self._config.tls_cert is not None else "http"
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        log.info("policy %s, listening on %s://%s:%d", self._config.core.policy, scheme, host, port)
        print(f"router listening on {scheme}://{host}:{port}", flush=True)

    # While it runs ------------------------------------------------------------------------------------------------

    async def _run_timers(self) -> None:
        """Call `_on_timer` every tick, as a plain callback: a task would wake the loop twice. Ends by an exception."""
        failure: asyncio.Future[None] = self._loop.create_future()

        def tick() -> None:
            if failure.done():
                return
            try:
                self._on_timer()
            except Exception as error:  # noqa: BLE001  whatever it is, the process ends with it
                failure.set_exception(error)
            else:
                self._loop.call_later(TIMER_INTERVAL_S, tick)

        tick()
        await failure

    def _on_timer(self) -> None:
        """The core's clock, every timeout, idle connections."""
        now = self._now()
        if self._peer_sockets is not None:
            self._run_guarded("peers", self._peer_sockets.exchange_loads, now)
        core_tick_s = self._core.next_tick()
        if core_tick_s is not None and core_tick_s <= now:
            self._run_guarded("core", self._tick_core, now)
        if now - self._sweep_s < self._config.edge.timeouts.sweep_s:
            return
        self._sweep_s = now
        idle_steps = (self._upstream_pool.close_idle, self._worker_pool.close_idle, self._heap_trimmer.tick)
        for step in (self._proxy.sweep, *idle_steps, self._dashboard.tick, self._watch_feed):
            self._run_guarded("sweep", step, now)
        self._listen_addresses.for_each_listener(
            lambda listener: self._run_guarded("listener", listener.expire_connections, now)
        )
        if self._picker is not None:
            self._run_guarded("picker", self._picker.beat, now)
        collect_old_objects(idle=not self._proxy.exchanges)

    def _run_guarded(self, boundary: str, step: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        """A timer is a boundary: a step that raises keeps nothing from the others."""
        try:
            step(argument)
        except Exception as error:  # noqa: BLE001  a boundary
            self._metrics.record_crash(boundary, error)

    def _tick_core(self, now: float) -> None:
        self._proxy.perform(self._core.tick(now))

    def _watch_feed(self, now: float) -> None:
        self._metrics.retain_workers(self._core.workers)
        self._index_feed.events.restart_thread()

    def _apply_fact(self, fact: WorkerFact) -> None:
        self._run_guarded("feed", self._fleet.apply_fact, fact)

    def _on_attempt_failed(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        log.warning("attempt on %s failed (%s): %s", decision.worker if decision else "?", kind.value, reason)
        if decision is not None and kind is not FailureKind.OVERLOADED:
            self._fleet.check_soon(decision.worker)

    def _on_request_end(self, context: RequestContext) -> None:
        self._tenant_limits.remove_request(context)
        if self._config.edge.api_keys:
            count_tokens_of_key(self._metrics, context)
        now = self._now()
        count_ended_request(self._core, self._metrics, context, now)
        share = self._config.log_requests
        if share and (share >= 1 or random.random() < share):
            fields = make_log_fields(context, now)
            log.info("request %s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})

    # Ending -------------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self._stop_requested.is_set():
            log.warning("second signal: %d requests are cut off", len(self._proxy.exchanges))
            self._abort_requested.set()
            self._listen_addresses.for_each_listener(Listener.abort)
        self._stop_requested.set()

    async def _drain(self) -> None:
        """For `unready_s` only what asks for readiness is told; then no new requests, and those in flight have
        `shutdown_s` to end."""
        await self._wait_unready()
        self._listen_addresses.for_each_listener(Listener.stop_listening)
        deadline_s = self._now() + self._config.edge.shutdown_s
        if self._proxy.exchanges:
            log.info("shutting down: %d requests in flight", len(self._proxy.exchanges))
        picker = self._picker
        picker_stop_task = None if picker is None else self._loop.create_task(picker.stop(self._config.edge.shutdown_s))
        while self._listen_addresses.is_busy or (picker_stop_task is not None and self._proxy.exchanges):
            if self._now() > deadline_s or self._abort_requested.is_set():
                log.warning("%d requests were not done in time and are cut off", len(self._proxy.exchanges))
                break
            await asyncio.sleep(0.02)
        self._listen_addresses.for_each_listener(Listener.abort)
        await asyncio.sleep(0)

    async def _wait_unready(self) -> None:
        if self._config.edge.unready_s > 0:
            log.info("shutting down in %g s; until then requests are taken", self._config.edge.unready_s)
            waiting = self._loop.create_task(self._abort_requested.wait())
            await asyncio.wait({waiting}, timeout=self._config.edge.unready_s)
            waiting.cancel()


def run_process(config: ProcessConfig, version: str, process_class: type[RouterProcess] = RouterProcess) -> None:
    """Run on uvloop where it is installed."""
    sys.setswitchinterval(0.0005)  # encoding threads must not hold the event loop for the default 5 ms
    try:
        import uvloop
    except ImportError:
        asyncio.run(_run(process_class, config, version))
        return
    if sys.version_info >= (3, 12):
        asyncio.run(_run(process_class, config, version), loop_factory=uvloop.new_event_loop)
    else:
        uvloop.install()
        asyncio.run(_run(process_class, config, version))


async def _run(process_class: type[RouterProcess], config: ProcessConfig, version: str) -> None:
    await process_class(config, version).run()
