"""One process of the router: builds every part, runs the event loop, ends in good order.

Owns the clock, the signals and the periodic work. The parts do not know each other beyond what is handed to them here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from router.admin import Admin
from router.config import CoreConfig
from router.core import RouterCore
from router.dashboard import Dashboard
from router.discovery import Prober, WorkerFlag
from router.feed import IndexFeed
from router.fleet import FleetConfig, Workers
from router.http_request import Request
from router.http_server import ClientConnection
from router.index import make_index
from router.messages import Decision, FailureKind
from router.metrics import Family, Metrics, feed_families, prompt_families
from router.peers import PeerLoads, PeerSockets
from router.proxy import Exchange, Proxy
from router.server import COMPLETIONS, TICK_S, EdgeConfig, Listener, RouterApp
from router.tokenizing import PromptReader
from router.upstream import UpstreamPool

log = logging.getLogger("router")

LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Everything one process is told."""

    host: str
    port: int
    core: CoreConfig
    edge: EdgeConfig
    fleet: FleetConfig
    workers: tuple[WorkerFlag, ...] = ()
    names: tuple[WorkerFlag, ...] = ()
    """Hosts that resolve to many workers."""
    workers_file: Path | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    bind_events: tuple[str, ...] = ()
    """Addresses for publishers that connect instead of bind."""
    peers: tuple[str, ...] = ()
    """Addresses where other routers of the same workers publish their load."""
    peer_bind: str | None = None
    """Where this router publishes its own."""
    worker_api_key: str | None = None
    admin: tuple[str, int] | None = None
    """Address of the admin routes; None serves them to loopback on the main one."""
    tls: tuple[Path, Path] | None = None
    """(certificate, key)."""
    index: str = "auto"
    tokenize_threads: int = field(default_factory=lambda: max(1, min(8, os.cpu_count() or 1)))
    seed: int = 0
    announce: bool = True
    """Print the address on stdout once requests are taken."""


class RouterProcess:
    """`await RouterProcess(config).run()` serves until SIGTERM or SIGINT."""

    def __init__(self, config: ProcessConfig, version: str) -> None:
        self._config = config
        self._version = version
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Raises OSError where an address cannot be had, ConfigError for a bad workers file."""
        config = self._config
        loop = asyncio.get_running_loop()
        now = time.monotonic  # uvloop's own clock stands still within a turn of the loop
        raise_file_limit()
        executor = ThreadPoolExecutor(config.tokenize_threads, thread_name_prefix="tokenize")
        index = make_index(config.index)  # type: ignore[arg-type]
        core = RouterCore(index, config.core, seed=config.seed)
        metrics = Metrics()
        timeouts = config.edge.timeouts
        pool = UpstreamPool(connect_s_max=timeouts.connect_s)
        key = config.worker_api_key
        authorization = f"Bearer {key}".encode() if key is not None else None
        proxy = Proxy(core, pool, metrics, now=now, timeouts=timeouts, worker_authorization=authorization)
        proxy.on_end.append(lambda exchange: count_end(core, metrics, exchange, now()))
        prompts = PromptReader(executor, override=config.tokenizer, chat_template=config.chat_template)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else None
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            suspects: list[Callable[[str], None]] = []

            def stream_changed(worker_id: str, up: bool) -> None:
                if not up:  # on the feed's thread
                    for suspect in suspects:
                        loop.call_soon_threadsafe(suspect, worker_id)

            feed = IndexFeed(index, on_connection=stream_changed)
            feed.start()
            stack.callback(feed.close)
            for endpoint in config.bind_events:
                log.info("publishers may connect to %s", feed.bind(endpoint))
            prober = Prober(session, headers=headers)
            fleet = Workers(core, prober, feed, prompts, proxy.perform, config.fleet, now=now)
            suspects.append(fleet.suspect)
            stack.push_async_callback(fleet.close)
            proxy.on_worker_lost.append(feed.lost)

            def failed(decision: Decision | None, kind: FailureKind, reason: str) -> None:
                if decision is not None:
                    log.warning("attempt on %s failed (%s): %s", decision.worker, kind.value, reason)
                    fleet.suspect(decision.worker)

            proxy.on_failure.append(failed)

            def extra() -> Iterable[Family]:
                yield from prompt_families(prompts)
                yield from feed_families(feed.totals())

            admin = Admin(core, fleet, prompts, metrics, now=now, version=self._version, extra_families=extra)
            dashboard = Dashboard(core, proxy, prompts, admin.workers)
            admin.show(dashboard)
            app = RouterApp(core, proxy, prompts, metrics, config.edge, admin, serves_admin=self._may_administer)
            listeners = [Listener(app, config.edge)]
            tls = tls_context(config.tls)
            port = await listeners[0].start(config.host, config.port, tls)
            if config.admin is not None:
                admin_app = RouterApp(core, proxy, prompts, metrics, config.edge, admin, serves_admin=_always)
                listeners.append(Listener(admin_app, config.edge))
                admin_port = await listeners[1].start(*config.admin, tls)
                log.info("admin routes on %s:%d", config.admin[0], admin_port)
            self._start_fleet(fleet)
            stack.callback(pool.close)
            stack.callback(executor.shutdown, wait=False, cancel_futures=True)
            peers = self._meet_peers(core)
            if peers is not None:
                stack.callback(peers.close)
            beat = loop.create_task(self._beat(core, proxy, pool, feed, listeners, peers, dashboard))
            stack.callback(beat.cancel)
            settle_heap()
            self._announce(port)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, listeners, proxy)
            waiting = loop.create_task(self._stop.wait())
            done, _ = await asyncio.wait({waiting, beat}, return_when=asyncio.FIRST_COMPLETED)
            if beat in done:
                beat.result()
            admin.draining = True
            await self._drain(listeners, proxy)

    def _start_fleet(self, fleet: Workers) -> None:
        for flag in self._config.workers:
            fleet.watch(flag, origin="operator")
        for name in self._config.names:
            fleet.follow_name(name)
        if self._config.workers_file is not None:
            fleet.follow_file(self._config.workers_file)

    def _meet_peers(self, core: RouterCore) -> PeerSockets | None:
        """Share load with other routers where the operator named any. Raises OSError."""
        if not self._config.peers and self._config.peer_bind is None:
            return None
        sockets = PeerSockets(
            PeerLoads(core.tracker, f"{socket.gethostname()}/{os.getpid()}"), self._config.peer_bind, self._config.peers
        )
        if sockets.address is not None:
            log.info("other routers may follow this one's load with --peer %s", sockets.address)
        return sockets

    async def _beat(
        self,
        core: RouterCore,
        proxy: Proxy,
        pool: UpstreamPool,
        feed: IndexFeed,
        listeners: Iterable[Listener],
        peers: PeerSockets | None,
        dashboard: Dashboard,
    ) -> None:
        """The core's clock, every timeout, idle connections."""
        sweep_s = self._config.edge.timeouts.sweep_s
        swept_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if peers is not None:
                peers.beat(now)
            due = core.next_tick()
            if due is not None and due <= now:
                proxy.perform(core.tick(now))
            if now - swept_s >= sweep_s:
                swept_s = now
                proxy.sweep(now)
                pool.close_idle(now)
                for listener in listeners:
                    listener.sweep(now)
                dashboard.beat(now)
                for worker_id in core.workers:
                    core.watchdog.events(worker_id, feed.stored_blocks(worker_id))

    def _may_administer(self, connection: ClientConnection, request: Request) -> bool:
        """On the main address: nobody where there is an admin address, else who comes from this very machine.

        A request that a local reverse proxy passed on shows it in a header and counts as foreign.
        """
        if self._config.admin is not None or not connection.peer.startswith(LOOPBACK):
            return False
        return not any(request.header(name) for name in (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"))

    def _announce(self, port: int) -> None:
        scheme = "https" if self._config.tls is not None else "http"
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        log.info("policy %s, listening on %s://%s:%d", self._config.core.policy, scheme, host, port)
        if self._config.announce:
            print(f"router listening on {scheme}://{host}:{port}", flush=True)

    def _signalled(self, listeners: Iterable[Listener], proxy: Proxy) -> None:
        if self._stop.is_set():
            log.warning("second signal: %d requests are cut off", len(proxy.exchanges))
            for listener in listeners:
                listener.abort()
        self._stop.set()

    async def _drain(self, listeners: list[Listener], proxy: Proxy) -> None:
        """No new requests; those in flight have `shutdown_s` to end."""
        for listener in listeners:
            listener.stop_listening()
        deadline_s = time.monotonic() + self._config.edge.shutdown_s
        if proxy.exchanges:
            log.info("shutting down: %d requests in flight", len(proxy.exchanges))
        while any(not connection.idle for one in listeners for connection in one.connections):
            if time.monotonic() > deadline_s:
                log.warning("%d requests were not done in time and are cut off", len(proxy.exchanges))
                break
            await asyncio.sleep(0.02)
        for listener in listeners:
            listener.abort()
        await asyncio.sleep(0)


def count_end(core: RouterCore, metrics: Metrics, exchange: Exchange, now: float) -> None:
    """Add an ended exchange to the counters."""
    path = exchange.request.path if exchange.request.path in COMPLETIONS else "other"
    route, decision, usage = exchange.route, exchange.decision, exchange.usage
    # Names that clients make up must not become labels.
    model = route.model if route is not None and core.resolve_model(route.model) is not None else "unknown"
    metrics.requests[path, model, exchange.outcome] += 1
    metrics.request_s.observe(now - exchange.started_s)
    if exchange.first_byte_s is not None:
        metrics.ttft_s.observe(exchange.first_byte_s - exchange.started_s)
    if exchange.outcome == "client_gone":
        metrics.client_disconnects += 1
    if route is None or decision is None:
        return
    metrics.decisions[decision.worker] += 1
    metrics.routing_s.observe(decision.decided_s - exchange.started_s)
    if route.token_ids is not None:
        metrics.prompt_tokens += route.prompt_tokens
        metrics.predicted_cached_tokens += decision.predicted_cached_tokens
    if usage is not None:
        metrics.reported_prompt_tokens += usage.prompt_tokens or 0
        metrics.reported_cached_tokens += usage.cached_tokens or 0


def settle_heap() -> None:
    """Take what start-up made out of the garbage collector's sight, and let it look less often.

    Requests leave no cycles behind, so what it would look for hardly exists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def raise_file_limit() -> None:
    """Two sockets a request: take as many file descriptors as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tls_context(files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    """Raises OSError or ssl.SSLError for files that are no certificate and key."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


def _always(connection: ClientConnection, request: Request) -> bool:
    return True


def run_process(config: ProcessConfig, version: str) -> None:
    """Run on uvloop where it is installed."""
    sys.setswitchinterval(0.0005)  # encoding threads must not hold the event loop for the default 5 ms
    try:
        import uvloop
    except ImportError:
        asyncio.run(_run(config, version))
        return
    if sys.version_info >= (3, 12):
        asyncio.run(_run(config, version), loop_factory=uvloop.new_event_loop)
    else:
        uvloop.install()
        asyncio.run(_run(config, version))


async def _run(config: ProcessConfig, version: str) -> None:
    await RouterProcess(config, version).run()
