"""Addresses of host names. While the name server fails or is slow, those of the last look-up are used.

Workers keep running while a name server restarts, so a router that lost them for that would fail every request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import aiohappyeyeballs
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import is_ip_address

from options.bounded_dict import BoundedDict

log = logging.getLogger("router")

LOOKUP_S_MAX = 1.0
"""Time after which the addresses of the last look-up are used, and the new one goes on in the background."""
CONNECT_DELAY_S = 0.25
"""Time that an address of a host has to answer before the next one is tried too."""
LOOKUPS_MAX = 64
"""Most look-ups at once, each in a thread of its own."""
NAMES_MAX = 8192

AddressInfo = tuple[Any, Any, int, str, Any]
"""Family, type, protocol, canonical name and socket address, as `getaddrinfo` returns them."""


class _Lookup(NamedTuple):
    task: asyncio.Task[list[AddressInfo]]
    started_s: float


class HostNames(AbstractResolver):
    """Looks up host names, each once at a time, and remembers their addresses. Also a resolver for aiohttp."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(LOOKUPS_MAX)
        self._last_addresses: BoundedDict[str, list[AddressInfo]] = BoundedDict(NAMES_MAX)
        """Addresses of each host, as the last successful look-up found them, with port 0."""
        self._lookups: dict[str, _Lookup] = {}
        """Look-ups that have not ended, by host."""

    async def look_up(self, host: str, port: int) -> list[AddressInfo]:
        """Return the addresses of a host, which may be an IP address itself. Raises OSError, UnicodeError.

        Once a host's addresses are known, a name server that needs over LOOKUP_S_MAX is not waited for.
        """
        if is_ip_address(host):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = _Lookup(asyncio.get_running_loop().create_task(self._query(host)), time.monotonic())
            lookup.task.add_done_callback(_retrieve_error)
            self._lookups[host] = lookup
        last_addresses = self._last_addresses.get(host)
        if last_addresses is None:
            addresses = await asyncio.shield(lookup.task)
        else:
            await asyncio.wait({lookup.task}, timeout=max(0.0, lookup.started_s + LOOKUP_S_MAX - time.monotonic()))
            addresses = lookup.task.result() if lookup.task.done() else last_addresses
        return [(*others, (address[0], port, *address[2:])) for *others, address in addresses]

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a socket that is connected to the first address of a host that answers. Raises OSError, UnicodeError.

        Each address gets a start of CONNECT_DELAY_S before the next one is tried too (Happy Eyeballs, RFC 8305).
        """
        addresses = await self.look_up(host, port)
        return await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=CONNECT_DELAY_S)

    async def _query(self, host: str) -> list[AddressInfo]:
        """Ask the name server. Return the last addresses if it fails, but not if it answers that there are none."""
        try:
            async with self._slots:
                addresses = await _find_addresses(host)
        except socket.gaierror as error:
            last_addresses = self._last_addresses.pop(host, None)
            if error.errno != socket.EAI_AGAIN or last_addresses is None:
                raise
            log.warning("%s: %s; its last addresses are used", host, error.strerror)
            addresses = last_addresses
        finally:
            del self._lookups[host]
        self._last_addresses[host] = addresses
        return addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host as aiohttp needs them. Raises OSError, UnicodeError."""
        return [
            ResolveResult(
                hostname=host, host=address[0], port=port, family=address_family, proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for address_family, _, proto, _, address in await self.look_up(host, port)
            if family in (socket.AF_UNSPEC, address_family)
        ]  # fmt: skip

    async def close(self) -> None:
        """Do nothing: look-ups end by themselves."""


async def _find_addresses(host: str) -> list[AddressInfo]:
    """Call `getaddrinfo` in a daemon thread: the end of the program need not wait for a silent name server."""
    answer: Future[list[AddressInfo]] = Future()

    def find() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001  whoever awaits it gets it
            answer.set_exception(error)

    answer.set_running_or_notify_cancel()  # from now on, nobody can cancel it
    threading.Thread(target=find, name="names", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _retrieve_error(task: asyncio.Task[list[AddressInfo]]) -> None:
    """Keep asyncio from logging the error of a look-up that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
