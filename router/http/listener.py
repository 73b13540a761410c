"""Listening addresses and their client connections."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

from options.background_tasks import BackgroundTasks
from options.system import probe_silent_connections
from router.http.config import ClientTimeouts
from router.http.connection import Application, ClientConnection

MAX_HANDSHAKE_S: Final = 10.0


class Listener:
    """Accepts connections at one address, for one application, up to a largest number.

    Every socket of a client counts, also while its TLS handshake runs.
    """

    def __init__(self, app: Application, timeouts: ClientTimeouts, max_connections: int) -> None:
        self._app = app
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._server: Any = None
        self.connections: set[ClientConnection] = set()
        self.handshake_tasks = BackgroundTasks()
        """TLS handshakes that have not ended."""

    async def bind(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        reuse_port: bool = False,
    ) -> int:
        """Bind the address without accepting connections yet, and return the port. Raises OSError.

        `tls`: None for plain HTTP. With `reuse_port` other processes may bind the address too. Connections over the
        limit are closed: plain ones after an answer 503, and TLS ones without an answer.
        """

        def make_protocol() -> asyncio.Protocol:
            is_full = len(self.connections) + len(self.handshake_tasks) >= self._max_connections
            if tls is not None:
                return _TlsAcceptor(self, None if is_full else tls)
            if is_full:
                return _OverLimitConnection()
            return ClientConnection(self._app, self.connections)

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            make_protocol, host, port, backlog=2048, reuse_port=reuse_port or None, start_serving=False
        )
        for listening_socket in self._server.sockets:
            probe_silent_connections(listening_socket, self._timeouts.send_s)
        return int(self._server.sockets[0].getsockname()[1])

    async def listen(self) -> None:
        """Accept connections from now on. Raises OSError if another process began to listen since `bind`."""
        await self._server.start_serving()

    def start_tls_handshake(self, client_socket: Any, tls: ssl.SSLContext) -> None:
        """Start the TLS handshake of an accepted socket, which becomes a client connection if it succeeds.

        It is closed after MAX_HANDSHAKE_S. Until then it counts as one of the listener's connections.
        """
        self.handshake_tasks.start(self._run_tls_handshake(client_socket, tls))

    async def _run_tls_handshake(self, client_socket: Any, tls: ssl.SSLContext) -> None:
        """Make a client connection of a socket by a TLS handshake; count a rejection if the handshake fails."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: ClientConnection(self._app, self.connections),
                client_socket,
                ssl=tls,
                ssl_handshake_timeout=MAX_HANDSHAKE_S,
            )
        except (OSError, asyncio.TimeoutError):  # not TLS, no valid certificate, or too slow; SSLError is an OSError
            self._app.metrics.http_errors["400"] += 1
        except Exception as error:  # noqa: BLE001  a boundary
            self._app.metrics.record_crash("handshake", error)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return any(not connection.is_idle for connection in self.connections)

    def expire_connections(self, now: float) -> None:
        for connection in list(self.connections):
            try:
                connection.expire(now, self._timeouts)
            except Exception as error:  # noqa: BLE001  a boundary
                connection.crash(error)

    def close_after_answers(self) -> None:
        """Answer each request from now on with `connection: close`, as load balancers keep their connections."""
        self._app.is_ending = True

    def stop_listening(self) -> None:
        """Accept no new connections, and no new requests on the open ones."""
        if self._server is not None:
            self._server.close()
        self.handshake_tasks.cancel()
        for connection in list(self.connections):
            connection.close_when_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class _TlsAcceptor(asyncio.Protocol):
    """Protocol of an accepted TCP connection: hands its socket to the listener, which makes the TLS handshake.

    asyncio could make the handshake itself, but shows a connection only after it. Clients that never finish their
    handshake would then not count against the listener's limit of connections.
    """

    def __init__(self, listener: Listener, tls: ssl.SSLContext | None) -> None:
        """Handle one connection. `tls`: None if the listener has too many, so that this one is closed at once."""
        self._listener = listener
        self._tls = tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the socket to the listener for its TLS handshake, and close asyncio's transport without TLS."""
        tcp_transport: Any = transport
        try:
            if self._tls is not None:
                # A copy of the socket, which stays open when the transport is closed below.
                client_socket = tcp_transport.get_extra_info("socket").dup()
                client_socket.setblocking(False)
                self._listener.start_tls_handshake(client_socket, self._tls)
        finally:
            tcp_transport.abort()


class _OverLimitConnection(asyncio.Protocol):
    """Connection over the limit, which is answered 503 and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp_transport: Any = transport
        body = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"overloaded"}}'
        tcp_transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        tcp_transport.close()
