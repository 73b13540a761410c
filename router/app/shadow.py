"""`router shadow`: a router that decides nothing. The same reading, index, prices and reasons as `router run`.

Owns when the window of seen requests is compared with what `router run` would have made of it, in a process of its own,
and who gets to read the outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import multiprocessing
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from options import ConfigError
from prompts.errors import RequestError
from prompts.routing import API_KIND_BY_PATH
from router.app.config import ShadowProcessConfig
from router.app.dashboard import HTML, make_security_headers
from router.app.dispatch import RequestDispatcher
from router.app.process import RouterProcess, run_process
from router.app.request_reader import RequestReader
from router.app.server import ForwardedRoutes, WorkerRoutes
from router.decide.config import ServiceModel
from router.edge.mirrored_exchange import MirroredExchange
from router.edge.proxy import Exchange, Proxy
from router.edge.request_context import RequestContext
from router.http.connection import ClientConnection
from router.http.request import HttpRequest
from router.http.routes import Response
from router.shadow.recorder import Recorder
from router.shadow.replay import Comparison, compare
from router.shadow.report import ShadowReport, render_page
from router.shadow.request_log import read_log

log = logging.getLogger("router")

HISTORY_INTERVAL_S: Final = 10.0
"""Of the report's course of time."""
NEW_REQUESTS_MIN: Final = 20
"""Requests that have to be new for another comparison."""


class CopyPlacer:
    """Prices copies of requests."""

    def __init__(self, reader: RequestReader, proxy: Proxy) -> None:
        self._reader = reader
        self._metrics = proxy.metrics

    def place(self, exchange: Exchange) -> None:
        """Note where the request would go."""
        context = exchange.context
        assert context.body is not None
        self._metrics.tokenize_s.observe(context.body.prompt.seconds)
        route = self._reader.build_route_request(context)
        exchange.place(route)
        self._reader.store_conversation(context, route)


class CopiedRoutes:
    """Routes to which a balancer sends copies of whatever it may know what to do with."""

    def __init__(self, dispatcher: RequestDispatcher, forwarded_routes: ForwardedRoutes) -> None:
        self._dispatcher = dispatcher
        self.paths = forwarded_routes.paths
        self.get_methods = forwarded_routes.get_methods

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        return connection.peer

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer 204, now or once the copy was read."""
        if request.path in API_KIND_BY_PATH and request.method == "POST":
            try:
                self._dispatcher.dispatch(connection, request, MirroredExchange)
                return
            except RequestError:
                pass  # whoever answers it will say so
        exchange = connection.responder
        if not isinstance(exchange, MirroredExchange):
            context = RequestContext(request, connection.tenant, self._dispatcher.proxy.now())
            exchange = self._dispatcher.open(context, connection, MirroredExchange)
        assert isinstance(exchange, MirroredExchange)
        exchange.answer()


class ShadowProcess(RouterProcess):
    """`await ShadowProcess(config, version).run()` watches until SIGTERM or SIGINT."""

    def __init__(self, config: ShadowProcessConfig, version: str) -> None:
        self._router_config = config.core
        """What `router run` would be told. Here nothing is learned as requests pass: no answer comes by. It is learned
        from the window instead."""
        core = replace(config.core, learn=replace(config.core.learn, enabled=False))
        super().__init__(replace(config, core=core, miss_reasons=replace(config.miss_reasons, share=1.0)), version)
        self._shadow = config.shadow
        self._recorder = Recorder(self._core, config.shadow, self._now, self._reasons.note)
        self._proxy.on_end.append(self._recorder.record_copy)
        self._comparison: Comparison | None = None
        self._problem: str | None = None
        """Why there is no comparison."""
        self._miss_tokens_by_time: list[tuple[float, dict[str, int]]] = []
        self._started_at = time.time()
        self._compared_request_count, self._compared_at_s = 0, self._now()
        self._compare_process: concurrent.futures.ProcessPoolExecutor | None = None
        self._compare_task: asyncio.Task[None] | None = None
        self._log_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises OSError where an address or the report's file cannot be had."""
        try:
            await super().run()
        finally:
            if self._compare_process is not None:
                self._compare_process.shutdown(wait=False, cancel_futures=True)
        if self._log_task is not None and self._log_task.done():
            self._log_task.result()
        self._compare_at_end()
        self._write_report()

    def _make_dispatcher(self) -> RequestDispatcher:
        placer = CopyPlacer(self._request_reader, self._proxy)
        return RequestDispatcher(self._proxy, self._request_reader, self._tenant_limits, placer)

    def _make_worker_routes(self) -> WorkerRoutes:
        return CopiedRoutes(self._dispatcher, ForwardedRoutes(self._dispatcher, self._admin.routes, self._config.edge))

    def _serve_report_page(self, request: HttpRequest, _: str) -> Response:
        report = render_page(self._make_report())
        return Response(report, content_type=HTML, headers=make_security_headers(report))

    def _start_fleet(self) -> None:
        routes = self._admin.routes
        routes.add("GET", "/shadow", lambda *_: Response(msgspec.json.encode(self._make_report())), public=False)
        routes.add("GET", "/shadow/report", self._serve_report_page, public=False)
        super()._start_fleet()
        if self._shadow.log is not None:
            self._log_task = self._loop.create_task(self._replay_log(Path(self._shadow.log)))

    async def _replay_log(self, log_path: Path) -> None:
        """Then the process ends. ConfigError is raised by `run`."""
        try:
            await self._wait_for_workers()
            worker_names = sorted(self._core.workers)
            with log_path.open("rb") as log_file:
                for logged_request, request in read_log(log_file, str(log_path)):
                    try:
                        context = RequestContext(request, "", 0.0)
                        await self._request_reader.read(context, request.path)
                    except RequestError:
                        self._recorder.counts["unread"] += 1
                        continue
                    route = self._request_reader.build_route_request(context)
                    if logged_request.worker is not None:
                        worker_id = self._find_worker(logged_request.worker) or ""
                    else:
                        worker_id = worker_names[self._recorder.counts["dealt"] % len(worker_names)]
                        self._recorder.counts["dealt"] += 1
                    if route.token_ids is None or not worker_id:
                        self._recorder.counts["unread" if worker_id else "unplaced"] += 1
                        continue
                    self._recorder.record_logged(logged_request, route, worker_id)
        finally:
            self._stop_requested.set()

    async def _wait_for_workers(self) -> None:
        """Raises ConfigError where none comes, or none whose prompts can be read here."""
        deadline_s = self._now() + self._config.edge.ready_s
        while self._admin.find_unready_reason() is not None or not self._has_tokenizer():
            if self._now() > deadline_s:
                unready_reason = self._admin.find_unready_reason() or "no tokenizer: give --tokenizer FOLDER"
                raise ConfigError(f"--log: prompts cannot be read: {unready_reason}")
            await asyncio.sleep(0.05)

    def _has_tokenizer(self) -> bool:
        bases = {model.base for worker in self._core.workers.values() for model in worker.models.values()}
        return any(self._prompt_reader.tokenizer_of(base) is not None for base in bases)

    def _on_timer(self) -> None:
        super()._on_timer()
        now = self._now()
        self._run_guarded("shadow", self._recorder.place_open_requests, now)
        self._run_guarded("shadow", self._tick_shadow, now)

    def _find_worker(self, worker_name: str) -> str | None:
        """Its id, from itself, HOST:PORT or a URL."""
        if worker_name in self._core.workers:
            return worker_name
        address = urlsplit(worker_name).netloc or worker_name
        workers = self._core.workers.values()
        return next((w.worker_id for w in workers if urlsplit(w.spec.url).netloc == address), None)

    # What comes of it -----------------------------------------------------------------------------------------------

    def _tick_shadow(self, now: float) -> None:
        if not self._miss_tokens_by_time or now - self._miss_tokens_by_time[-1][0] >= HISTORY_INTERVAL_S:
            self._miss_tokens_by_time.append((now, dict(self._metrics.cache_miss_tokens)))
            del self._miss_tokens_by_time[:-5_000]
        placed_request_count = self._recorder.counts["placed"]
        is_due = (
            now - self._compared_at_s >= self._shadow.every_s
            and placed_request_count - self._compared_request_count >= NEW_REQUESTS_MIN
        )
        if is_due and (self._compare_task is None or self._compare_task.done()):
            self._compared_request_count, self._compared_at_s = placed_request_count, now
            self._compare_task = self._loop.create_task(self._compare())

    async def _compare(self) -> None:
        """In another process: it takes seconds."""
        if self._compare_process is None:
            spawn = multiprocessing.get_context("spawn")
            self._compare_process = concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)
        recorder = self._recorder
        requests, engines, core = list(recorder.requests), recorder.engines(), self._router_config
        try:
            self._comparison = await self._loop.run_in_executor(
                self._compare_process,
                compare,
                requests,
                engines,
                recorder.block,
                core,
                self._count_warmup_requests(len(requests)),
            )
        except Exception as error:  # noqa: BLE001  a boundary: what was seen is kept, and compared again
            self._problem, self._compare_process = f"{type(error).__name__}: {error}", None
            log.warning("comparing %d requests failed: %s", len(requests), self._problem)
        else:
            self._problem = None
            self._adopt_speeds(self._comparison)
            self._write_report()

    def _adopt_speeds(self, comparison: Comparison) -> None:
        for target in self._core.tracker.targets.values():
            steps = comparison.steps.get(target.worker_id)
            if steps is not None:
                parameters = asdict(steps)
                del parameters["load_s_per_token"]
                target.set_service_model(ServiceModel(**parameters))

    def _compare_at_end(self) -> None:
        """At the end."""
        recorder = self._recorder
        if not recorder.requests:
            return
        requests = recorder.requests
        warmup_request_count = self._count_warmup_requests(len(requests))
        self._comparison = compare(
            requests, recorder.engines(), recorder.block, self._router_config, warmup_request_count
        )

    def _count_warmup_requests(self, count: int) -> int:
        return min(int(count * self._shadow.warm_share), count - 1)

    def _make_report(self) -> ShadowReport:
        """What is known now."""
        return ShadowReport(
            version=self._version,
            since=self._started_at,
            until=time.time(),
            requests=dict(self._recorder.counts),
            comparison=self._comparison,
            problem=self._problem,
            tokens=dict(self._metrics.cache_miss_tokens),
            turns=dict(self._metrics.cache_miss_requests),
            course=[(time_s - self._miss_tokens_by_time[0][0], tokens) for time_s, tokens in self._miss_tokens_by_time],
            workers=self._recorder.engines(),
            seen=len(self._recorder.requests),
        )

    def _write_report(self) -> None:
        if self._shadow.report is not None:
            report_path = Path(self._shadow.report)
            report = self._make_report()
            report_path.write_bytes(
                msgspec.json.encode(report) if report_path.suffix == ".json" else render_page(report)
            )


def run_shadow(config: ShadowProcessConfig, version: str) -> None:
    """Until it is told to end. Raises as `run_process`."""
    run_process(config, version, ShadowProcess)
