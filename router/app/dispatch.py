"""Read requests for workers, and have the core choose a worker for each: request -> token ids -> core -> exchange."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from options.background_tasks import BackgroundTasks
from prompts.errors import RequestError
from prompts.worker_fields import has_worker_address
from router.app.tenant_limits import TenantLimits
from router.decide.messages import RouteRequest
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Exchange, Proxy
from router.edge.request_context import RequestContext
from router.edge.request_reader import RequestReader
from router.http.connection import Client
from router.http.request import HttpRequest

TRACE_ID_BYTES_MAX: Final = 128
_TRACE_ID_PATTERN: Final = re.compile(rb"[!-~]{1,%d}" % TRACE_ID_BYTES_MAX)
"""An `x-request-id` that may be forwarded: printable characters without spaces."""
ExchangeFactory = Callable[[Proxy, Any, RequestContext], Exchange]
"""Makes the exchange of a request, from the proxy, the client and the context."""


class RequestDispatcher:
    """Starts each request for workers: reads its prompt, applies its tenant's limits, and has a worker chosen."""

    def __init__(
        self,
        proxy: Proxy,
        reader: RequestReader,
        limits: TenantLimits,
        miss_reasons: MissReasonsRecorder,
        discover_model: Callable[[str], Awaitable[int]],
    ) -> None:
        """Make a dispatcher that reads requests by `reader`, checks them against `limits`, and hands them to `proxy`.

        `miss_reasons` records why prompts are not cached. `discover_model` asks all workers for a model that none is
        known to serve, and returns the number of workers that may still be loading it.
        """
        self.proxy = proxy
        self.reader = reader
        self.miss_reasons = miss_reasons
        self.discover_model = discover_model
        self._limits = limits
        self._trace_prefix = os.urandom(6).hex()
        """Start of the ids that this process gives to requests; `_trace_count` follows."""
        self._trace_count = 0
        self._read_tasks = BackgroundTasks()

    def dispatch(self, client: Client, request: HttpRequest, make_exchange: ExchangeFactory) -> None:
        """Read a client's request and have a worker chosen for it: at once, or in a task if that takes long.

        The object that `make_exchange` returns handles the request from then on, also its errors. Raises RequestError
        if the request is refused before.
        """
        context = RequestContext(request, client.tenant, self.proxy.now())
        self._limits.check_request_limit(context.tenant)
        reading = self.reader.begin_read(context, request.path)
        exchange = self.open(context, client, make_exchange)
        if reading is not None or self._is_model_missing(context):
            task = self._read_tasks.start(self._read_and_choose_worker(exchange, reading))
            if reading is not None:  # if the task is cancelled before its first step, nobody has awaited `reading`
                task.add_done_callback(lambda _: reading.close())
            return
        try:
            self.choose_worker(exchange)
        except RequestError as error:
            self.proxy.reject(exchange, error)

    async def _read_and_choose_worker(self, exchange: Exchange, reading: Coroutine[Any, Any, None] | None) -> None:
        """Finish reading a request, then have a worker chosen for it. An exception ends this request alone.

        `reading`: reads the prompt; None if that is done. If no worker is known to serve the model, all workers are
        asked for it first.
        """
        try:
            if reading is not None:
                await reading
            if self._is_model_missing(exchange.context):
                await self._discover_and_read(exchange.context)
            self.choose_worker(exchange)
        except RequestError as error:
            self.proxy.reject(exchange, error)
        except Exception as error:  # noqa: BLE001  a fault in one request must not stop the others
            self.proxy.end_crashed(exchange, error)

    def open(self, context: RequestContext, client: Client, make_exchange: ExchangeFactory) -> Exchange:
        """Make the exchange that answers a request, and count the request from now on until the exchange ends."""
        context.trace_id = self._make_trace_id(context.request)
        exchange = make_exchange(self.proxy, client, context)
        self.proxy.open(exchange)
        self._limits.add_request(context)
        client.responder = exchange
        return exchange

    def choose_worker(self, exchange: Exchange) -> None:
        """Have the core choose a worker for a request that was read. The core may put the request in its queue.

        Raises RequestError, for example if the client's API key has too many tokens in flight.
        """
        context = exchange.context
        exchange.request_worker(self._prepare_route_request(context))
        self.reader.store_conversation(context)
        if not context.is_done:
            self.miss_reasons.prepare_comparison(context)
        context.body = None  # its messages are large, and not needed any more

    def _prepare_route_request(self, context: RequestContext) -> RouteRequest:
        """Return the request to the core, and change the body for the worker: the model's name, the key's settings."""
        assert context.body is not None
        assert context.model is not None
        route = self.reader.build_route_request(context)
        changed_fields = self._limits.apply_key_settings(context, route)
        if context.model.is_renamed:
            changed_fields["model"] = context.model.name
        self.reader.rewrite_body(context, changed_fields)
        if context.body.request.kind != "other":
            self.proxy.metrics.tokenize_s.observe(context.body.prompt.seconds)
        self._limits.add_prompt_tokens(context, route.prompt_tokens)
        return route

    def _is_model_missing(self, context: RequestContext) -> bool:
        """Return whether workers should be asked for the model that a request names, as none is known to serve it."""
        if context.is_done:
            return False
        assert context.body is not None
        assert context.model is not None
        has_name = context.body.request.model is not None
        return has_name and not self.proxy.core.registry.is_model_known(context.model.name)

    async def _discover_and_read(self, context: RequestContext) -> None:
        """Ask the workers for the model of a request, then read the request again, as the model is known now.

        Raises RequestError with 503 while a worker that was never reached may serve the model: clients repeat that.
        """
        assert context.model is not None
        model = context.model.name
        unreached_count = await self.discover_model(model)
        await self.reader.read(context, context.request.path)
        if unreached_count and self._is_model_missing(context):
            model_names = ", ".join(sorted(self.proxy.core.registry.get_served_models())) or "none"
            message = f"No worker serves model {model!r} yet; served: {model_names}. Not reached: {unreached_count}."
            raise RequestError(message, param="model", code="no_worker", status=503)

    def _make_trace_id(self, request: HttpRequest) -> bytes:
        """Return the client's `x-request-id` if it may be forwarded, else a new id."""
        client_id = request.headers.get(b"x-request-id") or b""
        if _TRACE_ID_PATTERN.fullmatch(client_id) and not has_worker_address(client_id):
            return client_id
        self._trace_count += 1
        return b"%s-%x" % (self._trace_prefix.encode(), self._trace_count)
