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
from prompts.paths import unknown_path
from prompts.worker_fields import has_worker_address
from router.app.guard import Guard, bearer
from router.app.request_reader import TOKENIZE_PATHS, RequestIntent, RequestReader, is_worker_path
from router.app.tenants import Tenants, name_of
from router.counters import Metrics
from router.edge.answer_filter import key_pattern
from router.edge.config import EdgeConfig
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.edge.reasons import Reasons
from router.http.answers import MethodNotAllowed, UpgradeRequired
from router.http.connection import Client, ClientConnection
from router.http.cors import CorsPolicy
from router.http.fair_scheduler import REQUESTS_PER_ITERATION, FairScheduler
from router.http.request import HttpRequest
from router.http.routes import Routes
from router.prompting.reader import INLINE_BYTES_MAX, TokenizedPrompt

if TYPE_CHECKING:
    from router.picker.caller import Caller

log = logging.getLogger("router")

TRACE_ID_BYTES_MAX: Final = 128
PASSED_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""To workers, by --pass-route. What remains asks about servers, and the one that was asked is this."""
OWN = {"/v1/models": ("GET", "HEAD")}
MODEL: Final = "/v1/models/"
"""One of them: its name, which may have slashes, follows."""
PASSED = {
    **dict.fromkeys((
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations", *TOKENIZE_PATHS,
    ), ("POST",)),
    "/v1/responses/*": ("DELETE", "GET", "HEAD", "POST"),
}  # fmt: skip
"""What workers serve to clients, and how. Other routes under /v1 change them (adapters) or keep what only one has."""
TICK_S: Final = 0.02
"""How often the core's pending work is looked at."""


async def _with(asked: RequestIntent, read: asyncio.Future[TokenizedPrompt]) -> tuple[RequestIntent, TokenizedPrompt]:
    return asked, await read


class RouterApp:
    """Answers requests. Needs a running event loop; owns no listening socket."""

    def __init__(
        self,
        proxy: Proxy,
        request_reader: RequestReader,
        tenants: Tenants,
        metrics: Metrics,
        config: EdgeConfig,
        routes: Routes,
        *,
        guard: Guard,
        reasons: Reasons | None = None,
        look_for: Callable[[str], Awaitable[None]] | None = None,
        kind: Callable[..., Exchange] = Exchange,
        serves: bool = True,
    ) -> None:
        """`look_for`: asks workers for a model that none is known to serve.

        `kind`: makes what carries a request, or has it carried. `serves`: this address passes requests on."""
        self._kind = kind
        self.limits = config.limits
        self.budget = proxy.budget
        self.scheduler = proxy.scheduler
        self.arrival_scheduler = FairScheduler(REQUESTS_PER_ITERATION)
        self.now = proxy.now
        self._proxy = proxy
        self._request_reader = request_reader
        self._tenants = tenants
        self._metrics = metrics
        self._keys = [key.encode() for key in config.api_keys]
        self._own = routes
        request_reader.allowed_fields = proxy.passed_fields = frozenset(config.passed_fields)
        proxy.hidden_keys = key_pattern(proxy.passed_fields)
        self._guard = guard
        self._reasons = reasons
        self._cors = CorsPolicy(config.cors_origins) if config.cors_origins else None
        self._look_for = look_for
        passed = PASSED | dict.fromkeys(config.pass_routes, PASSED_METHODS) if serves else {}
        self._passed: dict[str, tuple[str, ...]] = OWN | passed
        self._passed_below = [(path[:-1], methods) for path, methods in passed.items() if path.endswith("/*")]
        self._trace_prefix = os.urandom(6).hex()
        self._traces = 0
        self._pending: set[asyncio.Task[tuple[RequestIntent, TokenizedPrompt]]] = set()
        """Prompts being read; the loop alone would not keep them."""

    # Application --------------------------------------------------------------------------------------------------

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Whose request it is, told by its head. Raises RequestError before its body is read, or kept."""
        path = request.path
        if not is_worker_path(path):
            if not self._own.methods_of(path):
                raise unknown_path(path, self._served())
            if not self._own.is_public(request):
                self._guard(connection, request)
            return connection.peer
        is_question = request.method == "OPTIONS"  # a browser's, before it sends the key
        party = connection.peer if is_question else self._party(connection, request)
        methods = self._methods_of(path)
        if methods is None:
            raise unknown_path(
                path, self._served(), reason="this path is not passed on to workers; --pass-route makes it so"
            )
        if b"websocket" in (request.header(b"upgrade") or b"").lower():
            raise UpgradeRequired(path)
        if request.method not in methods and not is_question:
            raise MethodNotAllowed(request, methods)
        return party

    def cors_headers(self, request: HttpRequest) -> bytes:
        """Lines of whatever answer a request under `/v1/` gets: admin routes are for no page but their own."""
        path = request.path
        if self._cors is None or not is_worker_path(path):
            return b""
        return self._cors.headers(request, self._methods_of(path) or ())

    def _served(self) -> list[str]:
        """Every path that this address knows."""
        return [*self._passed, *self._own.paths()]

    def _methods_of(self, path: str) -> tuple[str, ...] | None:
        """Under `/v1/`; None where nothing is there."""
        if path.startswith(MODEL) and ".." not in path:
            return OWN["/v1/models"]
        return self._passed.get(path) or self._methods_below(path)

    def _party(self, client: Client, request: HttpRequest) -> str:
        party = self._key_of(request) if self._keys else client.peer
        if party is None:
            raise RequestError(
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", param=None,
                code="invalid_api_key", status=401,
            )  # fmt: skip
        return party

    def _methods_below(self, path: str) -> tuple[str, ...] | None:
        """Of a folder below which everything is passed on, where the path stays there."""
        for folder, methods in self._passed_below:
            if path.startswith(folder) and path != folder and ".." not in path and "%" not in path:
                return methods
        return None

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer one request now or later."""
        path = request.path
        if request.method == "OPTIONS" and is_worker_path(path):
            allowed = ", ".join(sorted(["OPTIONS", *(self._methods_of(path) or ())]))
            connection.respond(200, b"", headers=[(b"allow", allowed.encode())])
        elif is_worker_path(path) and path != "/v1/models" and not path.startswith(MODEL):
            self._serve(connection, request)
        else:
            self._own.handle(connection, request)

    def pick(self, caller: Caller, request: HttpRequest) -> None:
        """Choose for a request whose bytes a gateway carries; which paths may pass is the gateway's to say."""
        caller.party = self._party(caller, request)
        self._serve(caller, request)

    def rejected(self, status: int) -> None:
        self._metrics.http_errors[str(status)] += 1

    def crashed(self, where: str, error: Exception) -> None:
        self._metrics.crashed(where, error)

    # Workers ------------------------------------------------------------------------------------------------------

    def _serve(self, connection: Client, request: HttpRequest) -> None:
        """Send a request on: by its prompt where it has one that can be read, else by its model and load."""
        reader, path, tenant = self._request_reader, request.path, connection.party
        found = reader.find_conversation(request, path)
        if found is not None:
            if request.body_bytes - found[1].body_end > INLINE_BYTES_MAX:
                exchange = self._open(connection, request, tenant)
                self._later(
                    exchange,
                    tenant,
                    reader.read_suffix_in_thread(request, path, found, lambda: not exchange.done, tenant),
                )
                return
            went_on = reader.read_suffix(request, found)
            if went_on is not None:
                self._place(self._open(connection, request, tenant), tenant, went_on[0], went_on[1])
                return
        if not reader.is_light(request, path):
            exchange = self._open(connection, request, tenant)
            self._later(exchange, tenant, reader.read(request, path, lambda: not exchange.done, tenant))
            return
        asked = reader.read_intent(request, path)
        exchange = self._open(connection, request, tenant)
        read = reader.tokenize(asked, request, lambda: not exchange.done, tenant)
        if isinstance(read, TokenizedPrompt):
            self._place(exchange, tenant, asked, read)
        else:
            self._later(exchange, tenant, _with(asked, read))

    def _later(
        self,
        exchange: Exchange,
        tenant: str,
        reading: Coroutine[Any, Any, tuple[RequestIntent, TokenizedPrompt]],
        *,
        looked: bool = False,
    ) -> None:
        """Place a request once its prompt was read. Whatever raises ends it."""
        task = asyncio.get_running_loop().create_task(reading)
        self._pending.add(task)

        def done(task: asyncio.Task[tuple[RequestIntent, TokenizedPrompt]]) -> None:
            self._pending.discard(task)
            if task.cancelled():
                return
            raised = task.exception()  # not `result`: what raises here would keep the task, and so itself
            try:
                if raised is None:
                    self._place(exchange, tenant, *task.result(), looked=looked)
                elif isinstance(raised, RequestError):
                    self._reject(exchange, raised)
                elif isinstance(raised, Exception):
                    exchange.crash(raised)
            except Exception as error:  # noqa: BLE001  a boundary: this request ends, the rest goes on
                exchange.crash(error)

        task.add_done_callback(done)

    def _reject(self, exchange: Exchange, error: RequestError) -> None:
        self._metrics.http_errors[str(error.status)] += 1
        exchange.reject(error)

    async def _look_again(self, exchange: Exchange, model: str) -> tuple[RequestIntent, TokenizedPrompt]:
        """Read a request anew after the workers were asked for its model."""
        assert self._look_for is not None
        await self._look_for(model)
        request = exchange.request
        return await self._request_reader.read(request, request.path, lambda: not exchange.done, exchange.client.party)

    def _place(
        self, exchange: Exchange, tenant: str, asked: RequestIntent, read: TokenizedPrompt, *, looked: bool = False
    ) -> None:
        """Hand a request whose prompt was read to the core. `looked`: workers were asked for its model already."""
        unknown = asked.body_request.model is not None and not self._proxy.core.registry.is_known(asked.model)
        if unknown and not looked and self._look_for is not None and not exchange.done:
            self._later(exchange, tenant, self._look_again(exchange, asked.model), looked=True)
            return
        fields = self._tenants.apply(tenant, exchange.request.path, asked)
        if asked.is_renamed:
            fields["model"] = asked.model
        try:
            self._request_reader.rewrite_body(exchange.request, asked, fields)
        except RequestError as error:
            self._reject(exchange, error)
            return
        if asked.body_request.kind != "other":
            self._metrics.tokenize_s.observe(read.seconds)
        route = self._request_reader.build_route_request(asked, read, exchange.request_id, exchange.started_s)
        try:
            self._tenants.weigh(exchange.request_id, route.prompt_tokens)
        except RequestError as error:
            self._reject(exchange, error)
        else:
            route.tenant = tenant
            if self._tenants.shares:
                route.share = self._tenants.shares.get(tenant, 1.0)
            self._proxy.route(exchange, route)
            self._request_reader.store_conversation(asked, read, route)
            if self._reasons is not None and not exchange.done:
                self._reasons.enter(exchange, asked)

    # Shared -------------------------------------------------------------------------------------------------------

    def _open(self, connection: Client, request: HttpRequest, tenant: str) -> Exchange:
        """Raises RequestError where the key has enough in flight."""
        self._tenants.check(tenant)
        exchange = self._proxy.open(connection, request, self._trace_id(request), self._kind)
        self._tenants.enter(tenant, exchange.request_id)
        connection.work = exchange
        return exchange

    def _trace_id(self, request: HttpRequest) -> bytes:
        given = request.header(b"x-request-id")
        if given is not None and has_worker_address(given):
            given = None
        if given is not None and 0 < len(given) <= TRACE_ID_BYTES_MAX and given.isascii() and given.isalnum():
            return given
        if given is not None and 0 < len(given) <= TRACE_ID_BYTES_MAX and all(33 <= byte < 127 for byte in given):
            return given
        self._traces += 1
        return b"%s-%x" % (self._trace_prefix.encode(), self._traces)

    def _key_of(self, request: HttpRequest) -> str | None:
        """A name for the key that the request brings; None where it brings none of ours. Every key is compared, each in
        constant time."""
        token = bearer(request) or (request.header(b"x-api-key") or b"").strip()
        matches = [name_of(number) for number, key in enumerate(self._keys) if hmac.compare_digest(token, key)]
        return matches[0] if matches else None
