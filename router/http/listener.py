"""A listening address and its connections."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

from router.http.config import ClientTimeouts
from router.http.connection import Application, ClientConnection


class Listener:
    """Accepts connections for one application."""

    def __init__(self, app: Application, timeouts: ClientTimeouts, connections_max: int) -> None:
        self._app = app
        self._timeouts = timeouts
        self._connections_max = connections_max
        self._server: Any = None
        self.connections: set[ClientConnection] = set()

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, reuse_port: bool = False) -> int:
        """Listen; returns the port. Raises OSError."""

        def connected() -> asyncio.Protocol:
            if len(self.connections) >= self._connections_max:
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
            try:
                connection.expire(now, self._timeouts)
            except Exception as error:  # noqa: BLE001  a boundary
                connection.crash(error)

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
