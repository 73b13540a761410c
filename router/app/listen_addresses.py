"""The addresses on which the router listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from options.tls import make_server_context
from router.app.api_keys import AdminGuard, Guard
from router.app.config import ProcessConfig
from router.app.process_limits import name_flag_in_errors
from router.http.connection import Application
from router.http.listener import Listener


class BoundAddress(NamedTuple):
    """An address that is bound, and the flag that asked for it."""

    flag: str
    host: str
    port: int
    listener: Listener

    async def listen(self) -> None:
        """Accept connections. Raises OSError."""
        with name_flag_in_errors(self.flag, f"{self.host}:{self.port}"):
            await self.listener.listen()


async def bind_addresses(
    config: ProcessConfig, admin_key: str, make_app: Callable[[Guard], Application], connections_max: int
) -> list[BoundAddress]:
    """Bind the main address, and the admin address if there is one. They do not accept connections yet.

    `make_app` makes the application of an address, from the guard of its admin routes. `connections_max`: most
    connections of each address. Raises OSError.
    """
    main_address, admin_address = (config.host, config.http_port), config.admin_address
    hosts = [config.host] if admin_address is None else [config.host, admin_address[0]]
    guard = AdminGuard(admin_key, [*config.admin_hosts, *hosts])
    if admin_address is None:  # the main address has admin routes too, for requests from this machine
        guarded_addresses = [("--host and --port", main_address, guard.check_from_loopback)]
    else:
        guarded_addresses = [("--host and --port", main_address, guard.refuse), ("--admin", admin_address, guard.check)]
    bound_addresses = []
    for flag, (host, port), check_admin_request in guarded_addresses:
        listener = Listener(make_app(check_admin_request), config.edge.client_timeouts, connections_max)
        tls = make_server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
        with name_flag_in_errors(flag, f"{host}:{port}"):
            port = await listener.bind(host, port, tls, reuse_port=config.reuse_port and flag != "--admin")
        bound_addresses.append(BoundAddress(flag, host, port, listener))
    return bound_addresses
