"""`router shadow`: a router that decides nothing. Reads, prices and explains copies of requests, or a log of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from options import ConfigError
from prompts.errors import RequestError
from prompts.routing import API_KIND_BY_PATH
from router.app.config import ShadowProcessConfig
from router.app.dispatch import RequestDispatcher
from router.app.process import RouterProcess
from router.app.server import RouterApp
from router.app.shadow_reporter import ShadowReporter
from router.edge.mirrored_exchange import MirroredExchange
from router.edge.proxy import Exchange
from router.edge.request_context import RequestContext
from router.http.connection import ClientConnection
from router.http.request import HttpRequest
from router.shadow.recorder import Recorder
from router.shadow.request_log import LogLine, read_log


class CopyDispatcher(RequestDispatcher):
    """Places copies of another balancer's requests without sending them, to compare its choices with the router's."""

    def choose_worker(self, exchange: Exchange) -> None:
        """Have the core choose a worker for a copy that was read. The copy keeps its body until its worker is found."""
        context = exchange.context
        assert context.body is not None
        self.proxy.metrics.tokenize_s.observe(context.body.prompt.seconds)
        exchange.request_worker(self.reader.build_route_request(context))
        self.reader.store_conversation(context)

    def _is_model_missing(self, context: RequestContext) -> bool:
        """Return False: workers are not asked for a model because of a copy."""
        return False


class CopyingApp(RouterApp):
    """HTTP application that takes copies of requests, which another load balancer mirrors, and answers 204 to each."""

    def admit_worker_request(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Return the tenant of a copy, the client's address: copies are not checked."""
        return connection.peer

    def handle_worker_request(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer 204: when a worker was chosen for the copy, or at once if it is no request for a model."""
        if request.path in API_KIND_BY_PATH and request.method == "POST":
            try:
                self.dispatcher.dispatch(connection, request, MirroredExchange)
                return
            except RequestError:
                pass  # the client hears of the error from the worker that answers the original request
        exchange = connection.responder
        if not isinstance(exchange, MirroredExchange):  # the copy was not read, or refused at once
            context = RequestContext(request, connection.tenant, self.now())
            exchange = self.dispatcher.open(context, connection, MirroredExchange)
        assert isinstance(exchange, MirroredExchange)
        exchange.answer()


class ShadowProcess(RouterProcess):
    """Process of `router shadow`: it takes copies of requests, or reads a log, and reports what switching would give.

    `await ShadowProcess(config, version).run()` ends with a signal, or at the end of the log.
    """

    dispatcher_class = CopyDispatcher
    app_class = CopyingApp

    def __init__(self, config: ShadowProcessConfig, version: str) -> None:
        # No answer passes from which to learn a worker's speed: the reporter finds it out.
        core = replace(config.core, learn=replace(config.core.learn, enabled=False))
        super().__init__(replace(config, core=core, miss_reasons=replace(config.miss_reasons, share=1.0)), version)
        proxy = self.pipeline.proxy
        self._log_path = None if config.shadow.log is None else Path(config.shadow.log)
        self._recorder = Recorder(proxy.core, config.shadow, proxy.now, self.pipeline.reasons.note)
        proxy.on_end.append(self._recorder.record_copy)
        self._reporter = ShadowReporter(config.shadow, config.core, proxy, self._recorder, version)
        self._reporter.register(self._local_routes)
        self._timers.add("shadow", self._recorder.find_workers)
        self._timers.add("shadow", self._reporter.tick)

    async def run(self) -> None:
        """Watch, then write the report. Raises OSError for an unusable address or file, and ConfigError."""
        log_task = None if self._log_path is None else asyncio.ensure_future(self._replay_log(self._log_path))
        try:
            await super().run()
        finally:
            self._reporter.close()
        if log_task is not None and log_task.done():
            log_task.result()
        self._reporter.finish()

    async def _replay_log(self, log_path: Path) -> None:
        """Record the requests of a log, then end the process. Raises ConfigError, and OSError for its file."""
        try:
            await self._wait_for_workers()
            has_requests = False
            with log_path.open("rb") as log_file:
                for logged_request, request in read_log(log_file, str(log_path)):
                    has_requests = True
                    await self._record_logged_request(logged_request, request)
            if not has_requests:
                raise ConfigError(f"--log: {log_path} has no requests, expected one JSON body a line")
        finally:
            self._shutdown.end_requested.set()

    async def _record_logged_request(self, logged_request: LogLine, request: HttpRequest) -> None:
        """Read and record one request of a log, or only count it if its prompt or its worker cannot be found out."""
        reader = self.pipeline.request_reader
        context = RequestContext(request, tenant="", started_at_s=0.0)
        try:
            await reader.read(context, request.path)
        except RequestError:
            self._recorder.counts["unread"] += 1
        else:
            self._recorder.record_logged(logged_request, reader.build_route_request(context))

    async def _wait_for_workers(self) -> None:
        """Wait for a worker of a model with a tokenizer here. Raises ConfigError if none comes in time."""
        now = self.pipeline.proxy.now
        deadline_s = now() + self._config.edge.ready_s
        while (unready_reason := self._find_unready_reason()) is not None:
            if now() > deadline_s:
                raise ConfigError(f"--log: prompts cannot be read: {unready_reason}")
            await asyncio.sleep(0.05)

    def _find_unready_reason(self) -> str | None:
        models = {
            model.base for worker in self.pipeline.proxy.core.workers.values() for model in worker.models.values()
        }
        has_tokenizer = any(self.pipeline.prompt_reader.tokenizers.get(model) is not None for model in models)
        no_tokenizer = None if has_tokenizer else "no tokenizer: give --tokenizer FOLDER"
        return self._health.find_unready_reason() or no_tokenizer
