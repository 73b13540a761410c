"""The addresses on which the router listens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from options.addresses import bracket_host
from options.tls import make_server_context
from router.app.config import ProcessConfig
from router.app.guard import AdminGuard, Guard
from router.app.system import name_flag_in_errors
from router.http.connection import Application
from router.http.listener import Listener

log = logging.getLogger("router")


class FlaggedListener(NamedTuple):
    """A listener, and the flag that asked for its address."""

    flag: str
    address: tuple[str, int]
    listener: Listener


class ListenAddresses:
    """Listens on the main address and on the admin address, if there is one. Call `bind`, then `listen`."""

    def __init__(self, config: ProcessConfig, admin_key: str, make_app: Callable[[Guard], Application]) -> None:
        """`make_app` makes the application of an address, from the guard of its admin routes."""
        self._config = config
        self._listeners: list[FlaggedListener] = []
        self._admin_key = admin_key
        self._make_app = make_app

    async def bind(self, connections_max: int) -> int:
        """Bind all addresses, without accepting connections, and return the port of the main one. Raises OSError.

        `connections_max`: most connections of each address.
        """
        config = self._config
        admin = config.admin_address
        hosts = [config.host] if admin is None else [config.host, admin[0]]
        guard = AdminGuard(self._admin_key, [*config.admin_hosts, *hosts])
        main_guard = guard.check_from_loopback if admin is None else guard.refuse
        main_address = config.host, config.http_port
        port = await self._bind(
            "--host and --port", main_address, main_guard, connections_max, reuse_port=config.reuse_port
        )
        if admin is not None:
            admin_port = await self._bind("--admin", admin, guard.check, connections_max)
            log.info("admin routes on %s:%d", bracket_host(admin[0]), admin_port)
        return port

    async def listen(self) -> None:
        """Accept connections on every address. Raises OSError."""
        for flag, (host, port), listener in self._listeners:
            with name_flag_in_errors(flag, f"{host}:{port}"):
                await listener.listen()

    async def _bind(
        self, flag: str, address: tuple[str, int], guard: Guard, connections_max: int, *, reuse_port: bool = False
    ) -> int:
        """Bind one address and return its port. Raises OSError, which names `flag`."""
        config = self._config
        listener = Listener(self._make_app(guard), config.edge.client_timeouts, connections_max)
        self._listeners.append(FlaggedListener(flag, address, listener))
        with name_flag_in_errors(flag, "{}:{}".format(*address)):
            return await listener.bind(
                *address,
                make_server_context(config.tls_cert, config.tls_key, config.tls_client_ca),
                reuse_port=reuse_port,
            )

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return any(flagged_listener.listener.is_busy for flagged_listener in self._listeners)

    def expire_connections(self, now: float) -> None:
        """Close connections whose clients take too long. Call a few times a second."""
        self.for_each_listener(lambda listener: listener.expire_connections(now))

    def for_each_listener(self, step: Callable[[Listener], None]) -> None:
        """Call `step` with every listener."""
        for flagged_listener in self._listeners:
            step(flagged_listener.listener)
