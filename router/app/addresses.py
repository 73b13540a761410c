"""The addresses of the router: opened, swept, left in good order.

Owns the listeners. Refuses to know what a request asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from options.tls import server_context
from router.app.config import ProcessConfig
from router.app.guard import AdminGuard, Guard
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

    async def open(self) -> int:
        """Open every address and return the port of the main one. Raises OSError."""
        config = self._config
        admin = config.admin_address
        hosts = [config.host] if admin is None else [config.host, admin[0]]
        guard = AdminGuard(self._admin_key, [*config.admin_hosts, *hosts])
        own = guard.loopback_only if admin is None else guard.elsewhere
        main = config.host, config.http_port
        port = await self._open("--host and --port", main, own, reuse_port=config.reuse_port)
        if admin is not None:
            admin_port = await self._open("--admin", admin, guard.admin_address)
            log.info("admin routes on %s:%d", admin[0], admin_port)
        return port

    async def _open(self, flag: str, address: tuple[str, int], guard: Guard, *, reuse_port: bool = False) -> int:
        config, edge = self._config, self._config.edge
        listener = Listener(self._make_app(guard), edge.client_timeouts, edge.connections_max)
        self._listeners.append(listener)
        with naming(flag, "{}:{}".format(*address)):
            return await listener.start(
                *address,
                server_context(config.tls_cert, config.tls_key, config.tls_client_ca),
                reuse_port=reuse_port,
            )

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return any(listener.busy for listener in self._listeners)

    def each(self, step: Callable[[Listener], None]) -> None:
        """`step` on every listener."""
        for listener in self._listeners:
            step(listener)
