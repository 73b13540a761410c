"""The router's HTTP application: what each path means, and the processes' one event loop around core, feed and sockets.

Under `/v1/`, and for `/tokenize`: request -> what it asks for -> token ids (of completions) -> core -> exchange. What
looks at or changes the router itself is in router/app/admin.py.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from prompts.errors import RequestError
from prompts.paths import make_unknown_path_error
from prompts.worker_fields import has_worker_address
from router.app.guard import Guard, bearer_token
from router.app.request_reader import TOKENIZE_PATHS, RequestIntent, RequestReader, is_worker_path
from router.app.tenant_limits import TenantLimits, make_key_name
from router.edge.config import EdgeConfig
from router.edge.exchange import Exchange as ForwardedExchange
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Exchange, Proxy
from router.edge.request_context import RequestContext
from router.http.connection import Client, ClientConnection
from router.http.cors import CorsPolicy
from router.http.fair_scheduler import REQUESTS_PER_ITERATION, FairScheduler
from router.http.local_replies import MethodNotAllowed, UpgradeRequired
from router.http.request import HttpRequest
from router.http.routes import Routes
from router.metrics import Metrics
from router.prompting.reader import TokenizedPrompt

if TYPE_CHECKING:
    from router.picker.picker_client import PickerClient

log = logging.getLogger("router")

TRACE_ID_BYTES_MAX: Final = 128
FORWARDED_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Methods that --pass-route forwards. The others ask about a server, and the one that was asked is this."""
LOCAL_PATHS = {"/v1/models": ("GET", "HEAD")}
MODEL_PATH_PREFIX: Final = "/v1/models/"
"""Prefix of a model's path: its name, which may have slashes, follows."""
FORWARDED_PATHS = {
    **dict.fromkeys((
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations", *TOKENIZE_PATHS,
    ), ("POST",)),
    "/v1/responses/*": ("DELETE", "GET", "HEAD", "POST"),
}  # fmt: skip
"""What workers serve to clients, and how. Other routes under /v1 change them (adapters) or keep what only one has."""
TIMER_INTERVAL_S: Final = 0.02
"""How often the core's pending work is looked at."""


class RouterApp:
    """Answers requests. Needs a running event loop; owns no listening socket."""

    def __init__(
        self,
        proxy: Proxy,
        request_reader: RequestReader,
        tenant_limits: TenantLimits,
        metrics: Metrics,
        config: EdgeConfig,
        local_routes: Routes,
        *,
        guard: Guard,
        reasons: MissReasonsRecorder | None = None,
        discover_model: Callable[[str], Awaitable[None]] | None = None,
        make_exchange: Callable[[Proxy, Any, RequestContext], Exchange] = ForwardedExchange,
        forwards_requests: bool = True,
    ) -> None:
        """`discover_model`: asks workers for a model that none is known to serve. `make_exchange`: makes what
        carries a request. `forwards_requests`: this address passes requests on to workers."""
        self._make_exchange = make_exchange
        self.limits = config.limits
        self.budget = proxy.budget
        self.scheduler = proxy.pool.scheduler
        self.arrival_scheduler = FairScheduler(REQUESTS_PER_ITERATION)
        self.now = proxy.now
        self._proxy = proxy
        self._request_reader = request_reader
        self._tenant_limits = tenant_limits
        self._metrics = metrics
        self._api_keys = [key.encode() for key in config.api_keys]
        self._local_routes = local_routes
        request_reader.allowed_fields = proxy.passed_fields
        self._guard = guard
        self._miss_reasons = reasons
        self._cors = CorsPolicy(config.cors_origins) if config.cors_origins else None
        self._discover_model = discover_model
        forwarded_paths = (
            FORWARDED_PATHS | dict.fromkeys(config.pass_routes, FORWARDED_METHODS) if forwards_requests else {}
        )
        self._forwarded_paths: dict[str, tuple[str, ...]] = LOCAL_PATHS | forwarded_paths
        self._forwarded_folders = [
            (path[:-1], methods) for path, methods in forwarded_paths.items() if path.endswith("/*")
        ]
        self._trace_prefix = os.urandom(6).hex()
        self._trace_count = 0
        self._read_tasks: set[asyncio.Task[tuple[RequestIntent, TokenizedPrompt]]] = set()
        """Prompts being read; the loop alone would not keep them."""

    # Application --------------------------------------------------------------------------------------------------

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Whose request it is, told by its head. Raises RequestError before its body is read, or kept."""
        path = request.path
        if not is_worker_path(path):
            if not self._local_routes.methods_of(path):
                raise make_unknown_path_error(path, self._known_paths())
            if not self._local_routes.is_public(request):
                self._guard(connection, request)
            return connection.peer
        is_preflight = request.method == "OPTIONS"  # a browser's, before it sends the key
        tenant = connection.peer if is_preflight else self._authenticate_tenant(connection, request)
        methods = self._get_allowed_methods(path)
        if methods is None:
            raise make_unknown_path_error(
                path, self._known_paths(), reason="this path is not passed on to workers; --pass-route makes it so"
            )
        if b"websocket" in (request.header(b"upgrade") or b"").lower():
            raise UpgradeRequired(path)
        if request.method not in methods and not is_preflight:
            raise MethodNotAllowed(request, methods)
        return tenant

    def cors_headers(self, request: HttpRequest) -> bytes:
        """Lines of whatever answer a request under `/v1/` gets: admin routes are for no page but their own."""
        path = request.path
        if self._cors is None or not is_worker_path(path):
            return b""
        return self._cors.headers(request, self._get_allowed_methods(path) or ())

    def _known_paths(self) -> list[str]:
        """Every path that this address knows."""
        return [*self._forwarded_paths, *self._local_routes.paths()]

    def _get_allowed_methods(self, path: str) -> tuple[str, ...] | None:
        """Under `/v1/`; None where nothing is there."""
        if path.startswith(MODEL_PATH_PREFIX) and ".." not in path:
            return LOCAL_PATHS["/v1/models"]
        return self._forwarded_paths.get(path) or self._get_folder_methods(path)

    def _authenticate_tenant(self, client: Client, request: HttpRequest) -> str:
        tenant = self._find_key_name(request) if self._api_keys else client.peer
        if tenant is None:
            raise RequestError(
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", param=None,
                code="invalid_api_key", status=401,
            )  # fmt: skip
        return tenant

    def _get_folder_methods(self, path: str) -> tuple[str, ...] | None:
        """Of a folder below which everything is passed on, where the path stays there."""
        for folder, methods in self._forwarded_folders:
            if path.startswith(folder) and path != folder and ".." not in path and "%" not in path:
                return methods
        return None

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer one request now or later."""
        path = request.path
        if request.method == "OPTIONS" and is_worker_path(path):
            allowed_methods = ", ".join(sorted(["OPTIONS", *(self._get_allowed_methods(path) or ())]))
            connection.respond(200, b"", headers=[(b"allow", allowed_methods.encode())])
        elif is_worker_path(path) and path != "/v1/models" and not path.startswith(MODEL_PATH_PREFIX):
            self._forward_request(connection, request)
        else:
            self._local_routes.handle(connection, request)

    def pick(self, caller: PickerClient, request: HttpRequest) -> None:
        """Choose for a request whose bytes a gateway carries; which paths may pass is the gateway's to say."""
        caller.tenant = self._authenticate_tenant(caller, request)
        self._forward_request(caller, request)

    def record_rejection(self, status: int) -> None:
        self._metrics.http_errors[str(status)] += 1

    def record_crash(self, where: str, error: Exception) -> None:
        self._metrics.record_crash(where, error)

    # Workers ------------------------------------------------------------------------------------------------------

    def _forward_request(self, connection: Client, request: HttpRequest) -> None:
        """Send a request on: by its prompt where it has one that can be read, else by its model and load."""
        tenant = connection.tenant
        self._tenant_limits.check_request_limit(tenant)
        exchange: Exchange | None = None
        read = self._request_reader.begin_read(
            request, request.path, lambda: exchange is None or not exchange.context.is_done, tenant
        )
        exchange = self._open_exchange(connection, request, tenant)
        if isinstance(read, tuple):
            self._route_exchange(exchange, tenant, *read)
        else:
            self._route_when_read(exchange, tenant, read)

    def _route_when_read(
        self,
        exchange: Exchange,
        tenant: str,
        read: Coroutine[Any, Any, tuple[RequestIntent, TokenizedPrompt]],
        *,
        is_rediscovered: bool = False,
    ) -> None:
        """Place a request once its prompt was read. Whatever raises ends it."""
        task = asyncio.get_running_loop().create_task(read)
        self._read_tasks.add(task)

        def finish(task: asyncio.Task[tuple[RequestIntent, TokenizedPrompt]]) -> None:
            self._read_tasks.discard(task)
            if task.cancelled():
                return
            failure = task.exception()  # not `result`: what raises here would keep the task, and so itself
            try:
                if failure is None:
                    self._route_exchange(exchange, tenant, *task.result(), is_rediscovered=is_rediscovered)
                elif isinstance(failure, RequestError):
                    self._reject(exchange, failure)
                elif isinstance(failure, Exception):
                    exchange.crash(failure)
            except Exception as error:  # noqa: BLE001  a boundary: this request ends, the rest goes on
                exchange.crash(error)

        task.add_done_callback(finish)

    def _reject(self, exchange: Exchange, error: RequestError) -> None:
        self._metrics.http_errors[str(error.status)] += 1
        exchange.reject(error)

    async def _read_after_discovery(self, exchange: Exchange, model: str) -> tuple[RequestIntent, TokenizedPrompt]:
        """Read a request anew after the workers were asked for its model."""
        assert self._discover_model is not None
        await self._discover_model(model)
        context = exchange.context
        return await self._request_reader.read(
            context.request, context.request.path, lambda: not context.is_done, context.tenant
        )

    def _route_exchange(
        self,
        exchange: Exchange,
        tenant: str,
        intent: RequestIntent,
        tokens: TokenizedPrompt,
        *,
        is_rediscovered: bool = False,
    ) -> None:
        """Hand a request to the core once its prompt was read. `is_rediscovered`: workers were asked for its model."""
        context = exchange.context
        is_unknown = intent.body_request.model is not None and not self._proxy.core.registry.is_model_known(
            intent.model
        )
        if is_unknown and not is_rediscovered and self._discover_model is not None and not context.is_done:
            self._route_when_read(
                exchange, tenant, self._read_after_discovery(exchange, intent.model), is_rediscovered=True
            )
            return
        fields = self._tenant_limits.apply_key_settings(tenant, context.request.path, intent)
        if intent.is_renamed:
            fields["model"] = intent.model
        try:
            self._request_reader.rewrite_body(context.request, intent, fields)
        except RequestError as error:
            self._reject(exchange, error)
            return
        if intent.body_request.kind != "other":
            self._metrics.tokenize_s.observe(tokens.seconds)
        route = self._request_reader.build_route_request(intent, tokens, context.request_id, context.started_at_s)
        try:
            self._tenant_limits.add_prompt_tokens(context, route.prompt_tokens)
        except RequestError as error:
            self._reject(exchange, error)
        else:
            route.tenant = tenant
            if self._tenant_limits.share_by_tenant:
                route.share = self._tenant_limits.share_by_tenant.get(tenant, 1.0)
            exchange.place(route)
            self._request_reader.store_conversation(intent, tokens, route)
            if self._miss_reasons is not None and not context.is_done:
                context.turn = intent
                self._miss_reasons.register_request(context)
                context.turn = None

    # Shared -------------------------------------------------------------------------------------------------------

    def _open_exchange(self, connection: Client, request: HttpRequest, tenant: str) -> Exchange:
        """Raises RequestError where the key has enough in flight."""
        self._tenant_limits.check_request_limit(tenant)
        context = RequestContext(request, tenant, self.now(), trace_id=self._make_trace_id(request))
        exchange = self._make_exchange(self._proxy, connection, context)
        self._proxy.open(exchange)
        self._tenant_limits.add_request(context)
        connection.responder = exchange
        return exchange

    def _make_trace_id(self, request: HttpRequest) -> bytes:
        client_id = request.header(b"x-request-id")
        if client_id is not None and has_worker_address(client_id):
            client_id = None
        if (
            client_id is not None
            and 0 < len(client_id) <= TRACE_ID_BYTES_MAX
            and client_id.isascii()
            and client_id.isalnum()
        ):
            return client_id
        if (
            client_id is not None
            and 0 < len(client_id) <= TRACE_ID_BYTES_MAX
            and all(33 <= byte < 127 for byte in client_id)
        ):
            return client_id
        self._trace_count += 1
        return b"%s-%x" % (self._trace_prefix.encode(), self._trace_count)

    def _find_key_name(self, request: HttpRequest) -> str | None:
        """A name for the key that the request brings; None where it brings none of ours. Every key is compared, each in
        constant time."""
        token = bearer_token(request) or (request.header(b"x-api-key") or b"").strip()
        matches = [
            make_key_name(number) for number, key in enumerate(self._api_keys) if hmac.compare_digest(token, key)
        ]
        return matches[0] if matches else None
