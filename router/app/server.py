"""The router's HTTP application: what each path means, and the processes' one event loop around core, feed and sockets.

Completion routes go request -> routing view -> token ids -> core -> exchange; every other `/v1/` path goes to a worker
that serves the model it names. What looks at or changes the router itself is in router/app/admin.py.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prompts.errors import RequestError, bad_value
from prompts.routing import RoutingRequest, parse_routing
from router.app.admin import Admin
from router.counters import Metrics
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.edge.config import EdgeConfig
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.http.connection import ClientConnection, error_type
from router.http.request import HttpRequest
from router.index.protocol import Scope
from router.prompting.reader import PromptReader, estimate_tokens

log = logging.getLogger("router")

COMPLETIONS = frozenset(("/v1/chat/completions", "/v1/completions"))
OUTPUT_TOKENS_DEFAULT = 256
TRACE_ID_BYTES_MAX = 128
TICK_S = 0.02
"""How often the core's pending work is looked at."""


class RouterApp:
    """Answers requests. Needs a running event loop; owns no listening socket."""

    def __init__(
        self,
        core: RouterCore,
        proxy: Proxy,
        prompts: PromptReader,
        metrics: Metrics,
        config: EdgeConfig,
        admin: Admin,
        *,
        serves_admin: Callable[[ClientConnection, HttpRequest], bool],
    ) -> None:
        self.limits = config.limits
        self.draining = False
        self._core = core
        self._proxy = proxy
        self._prompts = prompts
        self._metrics = metrics
        self._keys = [key.encode() for key in config.api_keys]
        self._admin = admin
        self._serves_admin = serves_admin
        self._trace_prefix = os.urandom(6).hex()
        self._traces = 0
        self._scopes: dict[tuple[str, str | None], Scope] = {}
        self._reading: set[asyncio.Future[tuple[Sequence[int] | None, float]]] = set()
        """Prompts being read; the loop alone would not keep them."""

    # Application --------------------------------------------------------------------------------------------------

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer one request now or later."""
        path = request.path
        try:
            if path in COMPLETIONS and request.method == "POST":
                self._check_key(request)
                self._complete(connection, request)
            elif path.startswith("/v1/") and path != "/v1/models":
                self._check_key(request)
                self._pass_through(connection, request)
            else:
                if path.startswith("/v1/"):
                    self._check_key(request)
                self._admin.handle(connection, request, allowed=self._serves_admin(connection, request))
        except RequestError as error:
            self._metrics.http_errors[str(error.status)] += 1
            headers = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
            connection.respond_error(error, headers)

    def rejected(self, status: int) -> None:
        self._metrics.http_errors[str(status)] += 1

    # Completions --------------------------------------------------------------------------------------------------

    def _complete(self, connection: ClientConnection, request: HttpRequest) -> None:
        parsed = parse_routing(request.path, request.body)
        wishes = read_wishes(request, parsed)
        model, base, lora = self._model(parsed.model)
        exchange = self._open(connection, request)
        tokenizer = self._prompts.get(base)
        reading: asyncio.Future[tuple[Sequence[int] | None, float]]
        if self._prompts.asks(base):
            reading = asyncio.ensure_future(self._prompts.ask(parsed, base))
        elif tokenizer is None or self._prompts.is_quick(len(request.body)):
            self._place(exchange, parsed, wishes, model, base, lora, *self._prompts.read(parsed, tokenizer))
            return
        else:
            reading = self._prompts.run(parsed, tokenizer)
        self._reading.add(reading)

        def encoded(future: asyncio.Future[tuple[Sequence[int] | None, float]]) -> None:
            self._reading.discard(future)
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                log.error("a prompt could not be read, load decides", exc_info=error)
            self._place(
                exchange, parsed, wishes, model, base, lora, *(future.result() if error is None else (None, 0.0))
            )

        reading.add_done_callback(encoded)

    def _place(
        self,
        exchange: Exchange,
        parsed: RoutingRequest,
        wishes: Wishes,
        model: str,
        base: str,
        lora: str | None,
        token_ids: Sequence[int] | None,
        tokenize_s: float,
    ) -> None:
        """Hand a request whose prompt was read to the core."""
        request = exchange.request
        self._metrics.tokenize_s.observe(tokenize_s)
        output = parsed.max_tokens if parsed.max_tokens is not None else OUTPUT_TOKENS_DEFAULT
        route = RouteRequest(
            request_id=exchange.request_id,
            model=model,
            scope=self._scope(base, parsed.cache_salt, lora),
            token_ids=token_ids,
            prompt_tokens=len(token_ids) if token_ids is not None else estimate_tokens(len(request.body)),
            output_tokens=output * parsed.n,
            stream=parsed.stream,
            priority=wishes.priority,
            worker=wishes.worker,
            session=_text(request.header(b"x-session-id")) or parsed.user,
            role=wishes.role,
            deadline_s=None if wishes.deadline_ms is None else exchange.started_s + wishes.deadline_ms / 1000.0,
        )
        self._proxy.route(exchange, route)

    def _model(self, name: str | None) -> tuple[str, str, str | None]:
        """(name, base model, LoRA) of what the client asked for; without a name, the first model there is."""
        if name is None:
            name = next((model for worker in self._core.workers.values() for model in worker.models), "")
        served = self._core.resolve_model(name)
        return (name, name, None) if served is None else (name, served.base, served.lora)

    def _scope(self, base: str, salt: str | None, lora: str | None) -> Scope:
        """Without a salt, the same object for every request of a model that somebody serves."""
        if salt is not None:
            return Scope(base, salt, lora)
        known = self._scopes.get((base, lora))
        if known is None:
            known = Scope(base, None, lora)
            if self._core.resolve_model(lora or base) is not None:
                self._scopes[base, lora] = known
        return known

    # Everything else under /v1/ -----------------------------------------------------------------------------------

    def _pass_through(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Send on a request that is not about a prompt we know how to read: by model where it names one, and load."""
        name = None
        stream = False
        if request.body[:1] in (b"{", b" ", b"\n", b"\r", b"\t"):
            parsed = parse_routing(request.path, request.body)
            name, stream = parsed.model, parsed.stream
        model, base, lora = self._model(name)
        exchange = self._open(connection, request)
        route = RouteRequest(
            request_id=exchange.request_id,
            model=model,
            scope=self._scope(base, None, lora),
            token_ids=None,
            prompt_tokens=estimate_tokens(len(request.body)),
            output_tokens=0,
            stream=stream,
            worker=_text(request.header(b"x-blockcast-worker")),
        )
        self._proxy.route(exchange, route)

    # Shared -------------------------------------------------------------------------------------------------------

    def _open(self, connection: ClientConnection, request: HttpRequest) -> Exchange:
        exchange = self._proxy.open(connection, request, self._trace_id(request))
        connection.work = exchange
        return exchange

    def _trace_id(self, request: HttpRequest) -> bytes:
        given = request.header(b"x-request-id")
        if given is not None and 0 < len(given) <= TRACE_ID_BYTES_MAX and given.isascii() and given.isalnum():
            return given
        if given is not None and 0 < len(given) <= TRACE_ID_BYTES_MAX and all(33 <= byte < 127 for byte in given):
            return given
        self._traces += 1
        return b"%s-%x" % (self._trace_prefix.encode(), self._traces)

    def _check_key(self, request: HttpRequest) -> None:
        """Raises RequestError 401 where keys are required and the request brings none of them."""
        if not self._keys or self.has_key(request):
            return
        raise RequestError(
            "a valid API key is needed: Authorization: Bearer KEY", param=None, code="invalid_api_key", status=401,
            type=error_type(401),
        )  # fmt: skip

    def has_key(self, request: HttpRequest) -> bool:
        """Whether the request brings one of the configured keys. Every key is compared, each in constant time."""
        given = request.header(b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        token = token.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return any(matches)


class Wishes:
    """What a client's `x-blockcast-*` headers ask for."""

    __slots__ = ("deadline_ms", "priority", "role", "worker")

    def __init__(self, priority: int, deadline_ms: int | None, worker: str | None, role: str | None) -> None:
        self.priority = priority
        """`x-blockcast-priority`, else the body's `priority`; lower is earlier."""
        self.deadline_ms = deadline_ms
        """`x-blockcast-deadline-ms`: how long the router may hold the request."""
        self.worker = worker
        self.role = role


def read_wishes(request: HttpRequest, parsed: RoutingRequest) -> Wishes:
    """Raises RequestError naming the header that cannot be read."""
    priority = _integer(request, b"x-blockcast-priority", -(2**31), 2**31 - 1)
    return Wishes(
        priority=parsed.priority if priority is None else priority,
        deadline_ms=_integer(request, b"x-blockcast-deadline-ms", 1, 86_400_000),
        worker=_text(request.header(b"x-blockcast-worker")),
        role=_text(request.header(b"x-blockcast-role")),
    )


def _integer(request: HttpRequest, name: bytes, low: int, high: int) -> int | None:
    value = request.header(name)
    if value is None:
        return None
    if re.fullmatch(rb"-?[0-9]{1,10}", value) is None or not low <= int(value) <= high:
        raise bad_value(name.decode(), value.decode("latin-1"), f"an integer from {low} to {high}")
    return int(value)


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value else None


class Listener:
    """A listening address and its connections."""

    def __init__(self, app: RouterApp, config: EdgeConfig) -> None:
        self._app = app
        self._config = config
        self._server: Any = None
        self.connections: set[ClientConnection] = set()

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, reuse_port: bool = False) -> int:
        """Listen; returns the port. Raises OSError."""

        def connected() -> asyncio.Protocol:
            if len(self.connections) >= self._config.connections_max:
                return _Full()
            return ClientConnection(self._app, self.connections)

        self._server = await asyncio.get_running_loop().create_server(
            connected, host, port, ssl=tls, backlog=2048, reuse_port=reuse_port or None
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket. Raises OSError."""
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ClientConnection(self._app, self.connections), str(path))

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return any(not connection.idle for connection in self.connections)

    def sweep(self, now: float) -> None:
        for connection in list(self.connections):
            connection.expire(now, self._config.client_timeouts)

    def stop_listening(self) -> None:
        """No new connections, no new requests on those that are open."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_when_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class _Full(asyncio.Protocol):
    """A connection over the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain: Any = transport
        body = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"overloaded"}}'
        plain.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        plain.close()
