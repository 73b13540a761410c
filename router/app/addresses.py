"""The addresses of one process: opened, offered to an heir, left in good order.

Owns the listeners. Refuses to know what a request asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from options.tls import server_context
from router.app.config import ProcessConfig
from router.app.guard import AdminGuard, Guard, anybody
from router.app.hand_over import Predecessor, http_path
from router.app.system import naming
from router.http.connection import Application
from router.http.listener import Listener

log = logging.getLogger("router")


class Addresses:
    """`open` first. `make_app` makes what serves an address, whose admin routes `guard` keeps."""

    def __init__(self, config: ProcessConfig, admin_key: str, make_app: Callable[[Guard], Application]) -> None:
        self._config = config
        self._admin_key = admin_key
        self._make_app = make_app
        self._listeners: list[Listener] = []
        self._named: list[tuple[str, Listener]] = []
        """Those that an heir takes."""

    async def open(self, predecessor: Predecessor | None) -> int:
        """Open every address, on the predecessor's sockets where there are any; the main one's port. Raises OSError."""
        config = self._config
        admin = config.admin_address
        hosts = [config.host] if admin is None else [config.host, admin[0]]
        guard = AdminGuard(self._admin_key, [*config.admin_hosts, *hosts])
        own = guard.loopback_only if admin is None else guard.elsewhere
        port = await self._open("main", "--host and --port", (config.host, config.http_port), own, predecessor)
        if admin is not None:
            admin_port = await self._open("admin", "--admin", admin, guard.admin_address, predecessor)
            log.info("admin routes on %s:%d", admin[0], admin_port)
        return port

    async def _open(
        self, name: str, flag: str, address: tuple[str, int], guard: Guard, predecessor: Predecessor | None
    ) -> int:
        config = self._config
        listener = self._listener(guard)
        self._named.append((name, listener))
        with naming(flag, "{}:{}".format(*address)):
            return await listener.start(
                *address,
                server_context(config.tls_cert, config.tls_key, config.tls_client_ca),
                reuse_port=config.reuse_port and name == "main",
                inherited=() if predecessor is None else predecessor.of(name),
            )

    def _listener(self, guard: Guard) -> Listener:
        config = self._config.edge
        listener = Listener(self._make_app(guard), config.client_timeouts, config.connections_max)
        self._listeners.append(listener)
        return listener

    async def open_to_heirs(self, path: Path) -> None:
        """Answer an heir's questions, for this user alone. Raises OSError."""
        await self._listener(anybody).start_unix(http_path(path))
        http_path(path).chmod(0o600)

    def offered(self) -> list[tuple[str, Any]]:
        """(name, socket) of all that an heir takes."""
        return [(name, sock) for name, listener in self._named for sock in listener.sockets]

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return any(listener.busy for listener in self._listeners)

    @property
    def connected(self) -> bool:
        return any(listener.connections for listener in self._listeners)

    def each(self, step: Callable[[Listener], None]) -> None:
        """`step` on every listener."""
        for listener in self._listeners:
            step(listener)
