"""The HTTP process: routes, errors as the APIs have them, start and end. The model runs in another process.

`serve` starts the core, binds a port and answers. On SIGTERM or Ctrl-C running requests are finished, new ones get 503,
and the process ends with status 0. If the core dies, requests in flight get an error, /health answers 503, and the
process ends with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_log import AccessLogger

from engine.config import EngineConfig, ServerConfig, is_loopback
from engine.core_messages import CoreInfo
from engine.http import routes, weights
from engine.http.admission import IDLE_POLL_S, RETRY_AFTER_S, Admission, make_unavailable_error
from engine.http.generate import create_response, generate
from engine.http.state import STATE, ServerState
from engine.process.client import EngineClient, EngineDeadError
from engine.protocol.parsed_request import read_chat, read_completion, read_count, read_messages
from engine.protocol.tokenize import read_detokenize, read_tokenize
from engine.structured_output.constraint import EncodedConstraint
from options.addresses import bracket_host
from options.system import import_event_loops, probe_silent_connections, raise_file_limit
from options.tls import make_server_context
from prompts import RequestError, Tokenizer, TokenizerError
from prompts.unknown_paths import make_unknown_path_error

log = logging.getLogger("engine.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/kv_event_sources", "/kv_cache/groups"})
"""Paths that need no API key, for probes and for routers without a key."""
PROBED_PATHS = OPEN_PATHS | {"/v1/models", "/is_sleeping"}
"""Paths that routers, probes and scrapers request each second."""
OPERATOR_HANDLERS = frozenset({routes.reset_prefix_cache, weights.sleep, weights.wake_up, weights.collective_rpc})
"""Handlers that change the engine for all clients. They need the operator's key."""
CONNECTIONS_MAX = 4096
"""Default of --max-connections."""
OTHER_FILE_DESCRIPTORS = 64
"""File descriptors of everything but clients' connections."""
KEEPALIVE_S = 120.0
"""Time after which a connection without a complete head of a request is closed."""
DEATH_GRACE_S = 1.0
"""Time between the core's death and the end of the process, for the last answers to leave."""


def build_app(state: ServerState) -> web.Application:
    """Return the engine's HTTP application with all its routes."""
    app = web.Application(middlewares=[handle_errors], client_max_size=state.config.max_body_bytes)
    app[STATE] = state
    # APIs of OpenAI and Anthropic.
    app.router.add_post("/v1/chat/completions", partial(generate, parse=read_chat))
    app.router.add_post("/v1/completions", partial(generate, parse=read_completion))
    app.router.add_post("/v1/messages", partial(generate, parse=read_messages))
    app.router.add_post("/v1/messages/count_tokens", partial(routes.parse_and_respond, parse=read_count))
    app.router.add_post("/v1/responses", create_response)
    app.router.add_get("/v1/responses/{response_id}", routes.show_response)
    app.router.add_delete("/v1/responses/{response_id}", routes.delete_response)
    app.router.add_get("/v1/models", routes.list_models)
    app.router.add_get("/v1/models/{model:.+}", routes.show_model)
    app.router.add_post("/tokenize", partial(routes.parse_and_respond, parse=read_tokenize))
    app.router.add_post("/detokenize", partial(routes.parse_and_respond, parse=read_detokenize))
    # Probes, metrics and facts for routers.
    app.router.add_get("/", routes.show_paths)
    app.router.add_get("/health", routes.check_health)
    app.router.add_get("/ping", routes.check_health)
    app.router.add_post("/ping", routes.check_health)
    app.router.add_get("/version", routes.show_version)
    app.router.add_get("/metrics", routes.show_metrics)
    app.router.add_get("/kv_event_sources", routes.list_kv_event_sources)
    app.router.add_get("/kv_cache/groups", routes.list_kv_cache_groups)
    # Routes of the operator.
    app.router.add_post("/reset_prefix_cache", routes.reset_prefix_cache)
    if state.config.sleep_mode:
        app.router.add_post("/sleep", weights.sleep)
        app.router.add_post("/wake_up", weights.wake_up)
        app.router.add_get("/is_sleeping", weights.is_sleeping)
        app.router.add_post("/collective_rpc", weights.collective_rpc)
    return app


@web.middleware
async def handle_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the API key, call the route's handler, and turn every exception into an error response."""
    state = request.app[STATE]
    try:
        if request.match_info.handler in OPERATOR_HANDLERS:
            state.api_keys.check_admin(request.headers)
        elif request.path not in OPEN_PATHS:
            state.api_keys.check_client(request.headers)
        return await handler(request)
    except RequestError as error:
        return make_error_response(state, request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        request_error = _convert_http_error(request, error)
        return make_error_response(state, request, request_error, allow=error.headers.get("Allow"))
    except ConnectionError:
        return web.Response(status=499)  # the client has left; an answer keeps aiohttp from logging a traceback
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        internal_error = RequestError("internal error", code="internal_error", status=500)
        return make_error_response(state, request, internal_error)


def make_error_response(
    state: ServerState, request: web.Request, error: RequestError, allow: str | None = None
) -> web.Response:
    """Count an error in the metrics, and return its HTTP response, in the format of the API that the path belongs to.

    `allow`: value of the Allow header.
    """
    state.metrics.error_responses[str(error.status)] += 1
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        # Anthropic's clients repeat a 401, for three minutes in Claude Code, unless told not to.
        headers |= {"WWW-Authenticate": "Bearer", "X-Should-Retry": "false"}
    if allow:
        headers["Allow"] = allow
    return web.Response(
        body=msgspec.json.encode(error.body(request.path)),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )


def _convert_http_error(request: web.Request, error: web.HTTPException) -> RequestError:
    """Convert an HTTP error that aiohttp raised to a RequestError, which says in its message what was expected."""
    if error.status == 404:
        reason = "this engine has no such path"  # a router may have one, such as /v1/embeddings
        return make_unknown_path_error(request.path, routes.list_paths(request.app), reason=reason)
    is_response_action = request.method == "POST" and request.path.startswith("/v1/responses/")
    if error.status == 405 and is_response_action:  # such as OpenAI's /v1/responses/compact
        return make_unknown_path_error(request.path, [], reason="this action is not supported")
    if error.status == 405:
        allowed_methods = ", ".join(sorted(getattr(error, "allowed_methods", ())))
        message = f"{request.method} {request.path}: expected {allowed_methods}"
        return RequestError(message, code="method_not_allowed", status=405)
    if error.status == 413:
        limit = request.app[STATE].config.max_body_bytes
        return RequestError(f"the body is larger than {limit} bytes", code="body_too_large", status=413)
    return RequestError(error.text or error.reason, status=error.status)


class RequestLog(AccessLogger):
    """Logs one line for each request, except for successful probes, of which there are many."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if response.status >= 400 or request.path not in PROBED_PATHS:
            super().log(request, response, time)


def make_runner(app: web.Application, *, log_requests: bool) -> web.AppRunner:
    """Return aiohttp's runner of the application, with our limits. `log_requests`: log a line for each request."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=logging.getLogger("engine.access") if log_requests else None,
        access_log_class=RequestLog,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEPALIVE_S,
        auto_decompress=False,
        max_line_size=16384,
        max_field_size=16384,
    )


def compute_max_connections(setting: int | None) -> int:
    """Return the connections that may be open: `setting`, at most as many as there are file descriptors.

    Raises the process's soft limit of descriptors first. None: CONNECTIONS_MAX, if there are enough.
    """
    descriptors = max(1, raise_file_limit() - OTHER_FILE_DESCRIPTORS)
    if setting is None:
        return min(CONNECTIONS_MAX, descriptors)
    if setting > descriptors:
        log.warning(
            "file descriptors are too few for --max-connections %d: at most %d connections are taken (ulimit -Hn, "
            "LimitNOFILE=)", setting, descriptors,
        )  # fmt: skip
    return min(setting, descriptors)


class LimitedProtocolFactory:
    """Limits the server's connections. It is the protocol factory that asyncio calls for each new connection.

    Up to `max_connections` connections are served by aiohttp. Any further connection is answered 503 and closed.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max_connections = max_connections
        self._has_warned = False

    def __call__(self) -> asyncio.BaseProtocol:
        """Return the protocol that handles a new connection."""
        if len(self._server.connections) < self._max_connections:
            self._has_warned = False
            return self._server()
        if not self._has_warned:  # one warning until there is room again
            self._has_warned = True
            log.warning("%d connections are open: no more are taken (--max-connections)", self._max_connections)
        return RefusedConnection(self._max_connections)


class RefusedConnection(asyncio.Protocol):
    """Protocol of a connection beyond the server's limit: answers HTTP 503 at once, and closes the connection."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports do not inherit asyncio's classes
        message = f"{self._max_connections} connections are open, expected no more (--max-connections)"
        body = msgspec.json.encode(make_unavailable_error(message).body())
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: %d\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (RETRY_AFTER_S, len(body), body)
        )
        transport.close()


class Server:
    """Runs one engine and its HTTP server, from the start of the core process to its end."""

    def __init__(self, engine_config: EngineConfig, config: ServerConfig) -> None:
        self._engine_config = engine_config
        self._config = config
        self._stop_reason: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Resolved when the server is to stop: to None by a signal, to an error message by the core's death."""
        self._should_stop_now = False
        """Whether a second signal has come, so that requests are not finished."""
        self._tls_context = make_server_context(config.tls_cert, config.tls_key, config.tls_client_ca)

    async def run(self) -> int:
        """Bind the port, start the engine core, and serve until the end. Returns the process's exit status."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, self._on_signal)
        host, port = self._config.host, self._config.port
        try:
            listener = bind(host, port, self._config.stall_timeout_s)
        except OSError as error:
            return _report_failure(f"cannot listen on {host}:{port} (--host, --port): {error.strerror or error}")
        client = await EngineClient.start(self._engine_config, self._on_death)
        try:
            return await self._serve(client, listener)
        finally:
            listener.close()
            await client.close()

    async def _serve(self, client: EngineClient, listener: socket.socket) -> int:
        """Wait until the model is loaded, and serve until a signal comes or the core dies. Returns the exit status."""
        ready_task = asyncio.ensure_future(client.wait_ready())
        startup_futures: list[asyncio.Future[Any]] = [ready_task, self._stop_reason]
        await asyncio.wait(startup_futures, return_when=asyncio.FIRST_COMPLETED)
        if not ready_task.done():
            ready_task.cancel()
            return 0  # a signal came while the model was loaded
        try:
            state = await self._make_state(client, ready_task.result())
        except EngineDeadError as error:
            return _report_failure(error.reason)
        except TokenizerError as error:
            return _report_failure(str(error))
        if state.limits.script:  # every chat needs the process that checks grammars, which takes a second to start
            with contextlib.suppress(RequestError):
                await state.reader.check(EncodedConstraint("messages", b'{"type":"any_text"}'))

        failure = await self._answer_until_stop(state, listener)
        state.reader.close()
        return 0 if failure is None else _report_failure(failure)

    async def _answer_until_stop(self, state: ServerState, listener: socket.socket) -> str | None:
        """Answer requests until a signal comes or the core dies, and finish them. Returns why the core died, or None.

        Requests are finished after a signal; after a death, they have a moment to be answered with the error.
        """
        runner = make_runner(build_app(state), log_requests=self._config.log_requests)
        await runner.setup()
        server = await self._accept_connections(runner, listener)
        gc.collect()
        gc.freeze()  # libraries and handlers live as long as the process: a collection of them holds the loop 50 ms
        try:
            print_startup(self._engine_config, self._config, state, listener)
        except OSError as error:  # such as a full disk
            log.warning("cannot print what was started: %s", error)

        failure = await self._stop_reason
        if failure is None:
            await self._drain(state.admission)
        else:
            await asyncio.sleep(DEATH_GRACE_S)
        server.close()
        await runner.cleanup()
        return failure

    async def _accept_connections(self, runner: web.AppRunner, listener: socket.socket) -> asyncio.Server:
        assert runner.server is not None
        make_protocol = LimitedProtocolFactory(runner.server, compute_max_connections(self._config.max_connections))
        return await asyncio.get_running_loop().create_server(
            make_protocol, sock=listener, backlog=2048, ssl=self._tls_context
        )

    async def _make_state(self, client: EngineClient, info: CoreInfo) -> ServerState:
        """Load the tokenizer, and return the state that all handlers share. Raises TokenizerError."""
        folder = self._engine_config.tokenizer or info.model_path
        load_tokenizer = partial(Tokenizer.load, Path(folder), chat_template=self._config.chat_template)
        tokenizer = await asyncio.get_running_loop().run_in_executor(None, load_tokenizer)
        transfer_config = self._engine_config.kv_transfer
        fleet_key = None if transfer_config.port is None else transfer_config.read_key()
        return ServerState(self._config, client, info, tokenizer, folder, fleet_key=fleet_key)

    async def _drain(self, admission: Admission) -> None:
        """Admit no new requests. Wait for the running ones, until the time is up or a second signal comes."""
        admission.is_draining = True
        if not admission.active_request_count:
            return
        timeout_s = self._config.shutdown_timeout_s
        log.info("finishing %d requests (at most %.0f s; again to stop now)", admission.active_request_count, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while admission.active_request_count and not self._should_stop_now and time.monotonic() < deadline_s:
            await asyncio.sleep(IDLE_POLL_S)
        if admission.active_request_count:
            log.warning("ending with %d requests unfinished", admission.active_request_count)

    def _on_signal(self) -> None:
        """Begin to stop at the first signal; at the second one, stop without waiting for requests."""
        if self._stop_reason.done():
            self._should_stop_now = True
        else:
            self._stop_reason.set_result(None)

    def _on_death(self, reason: str) -> None:
        if not self._stop_reason.done():
            self._stop_reason.set_result(reason)


def bind(host: str, port: int, stall_timeout_s: float) -> socket.socket:
    """Return a socket that is bound to an address. Port 0 lets the system choose one. Raises OSError.

    `stall_timeout_s`: after so long, the kernel closes the connection of a client whose machine is gone.
    """
    family, socket_type, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, socket_type, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe_silent_connections(sock, stall_timeout_s)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def print_startup(
    engine_config: EngineConfig, config: ServerConfig, state: ServerState, listener: socket.socket
) -> None:
    """Print what was started: the model, its formats, its cache and addresses. A script may wait for the last line."""
    info, limits = state.info, state.limits
    host, port = listener.getsockname()[:2]
    print(f"model     {', '.join(state.model_names)} ({info.dtype} on {info.device}, {info.max_model_len} tokens)")
    if engine_config.simulate is not None:
        scale = "" if engine_config.time_scale == 1 else f", {engine_config.time_scale:g} times as long"
        print(f"          simulated: nothing is computed, steps take the time of {info.device}{scale}")
    elif engine_config.model is None:
        print("          no MODEL was given: this is the built-in random model, its text means nothing")
    print(f"answers   tool calls: {limits.call_format or 'none'}, reasoning: {limits.reasoning_format or 'none'}")
    host_memory = f", and {info.num_host_blocks} in host memory" if info.num_host_blocks else ""
    print(f"cache     {info.num_blocks} blocks of {info.block_size} tokens{host_memory}")
    for source in info.event_sources:
        replay = f", replay {source.replay_endpoint}" if source.replay_endpoint else ""
        print(f"events    {source.endpoint}{replay}")
    if not info.event_sources:
        print("events    off (--kv-events-config without enable_kv_cache_events: true)")
    if info.kv_transfer_port is not None:
        print(f"transfers {engine_config.kv_transfer.host}:{info.kv_transfer_port}")
    if is_loopback(host):
        print("reach     from this machine only (--host 0.0.0.0 opens the API and the events)")
    elif not config.api_keys:
        print("reach     the network, without an API key (--api-key, or keep the network private)")
    scheme = "http" if config.tls_cert is None else "https"
    print(f"ready     {scheme}://{bracket_host(host)}:{port}", flush=True)


def _report_failure(message: str) -> int:
    print(f"engine: {message}", file=sys.stderr, flush=True)
    return 1


def _should_log(record: logging.LogRecord) -> bool:
    """Return False for a request that is not HTTP: it is answered 400, and a traceback says no more."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve until a signal comes or the core dies. Return the exit status."""
    logging.getLogger("aiohttp.server").addFilter(_should_log)

    async def main() -> int:
        return await Server(engine_config, config).run()

    status: int = import_event_loops().run(main())
    return status
