"""The end of the router's process: signals, and requests in flight that may still be answered."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Final

from router.app.listen_addresses import ListenAddresses
from router.edge.config import EdgeConfig
from router.edge.proxy import Proxy
from router.http.listener import Listener

log = logging.getLogger("router")

POLL_S: Final = 0.02


class Shutdown:
    """Ends the process when a signal comes, after the requests in flight. A second signal cuts those off."""

    def __init__(self, config: EdgeConfig, proxy: Proxy, addresses: ListenAddresses) -> None:
        self._config = config
        self._proxy = proxy
        self._addresses = addresses
        self._end_requested = asyncio.Event()
        self._abort_requested = asyncio.Event()

    def watch_signals(self) -> None:
        """Take SIGTERM and SIGINT as requests to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Request the end; at the second signal, close all connections."""
        if self._end_requested.is_set():
            log.warning("second signal: %d requests are cut off", len(self._proxy.exchanges))
            self._abort_requested.set()
            self._addresses.for_each_listener(Listener.abort)
        self._end_requested.set()

    def request(self) -> None:
        """Ask for the end of the process."""
        self._end_requested.set()

    async def wait_until_requested(self) -> None:
        await self._end_requested.wait()

    async def drain(self, stop_picker: Callable[[float], Awaitable[None]] | None) -> None:
        """Take requests for `unready_s` more, then give those in flight `shutdown_s` to end.

        `stop_picker` stops the endpoint picker of `router epp`; its argument is the seconds that streams have to end.
        """
        await self._wait_unready()
        self._addresses.for_each_listener(Listener.stop_listening)
        deadline_s = self._proxy.now() + self._config.shutdown_s
        if self._proxy.exchanges:
            log.info("shutting down: %d requests in flight", len(self._proxy.exchanges))
        picker_task = None if stop_picker is None else asyncio.ensure_future(stop_picker(self._config.shutdown_s))
        # Requests of the picker come over gRPC, so they are no reason for `_addresses` to be busy.
        while self._addresses.is_busy or (picker_task is not None and self._proxy.exchanges):
            if self._proxy.now() > deadline_s or self._abort_requested.is_set():
                log.warning("%d requests were not done in time and are cut off", len(self._proxy.exchanges))
                break
            await asyncio.sleep(POLL_S)
        self._addresses.for_each_listener(Listener.abort)
        await asyncio.sleep(0)  # the event loop tells the connections that they are closed

    async def _wait_unready(self) -> None:
        """Take requests while load balancers find out that `/readyz` answers 503."""
        unready_s = self._config.unready_s
        if unready_s > 0:
            log.info("shutting down in %g s; until then requests are taken", unready_s)
            abort_task = asyncio.ensure_future(self._abort_requested.wait())
            await asyncio.wait({abort_task}, timeout=unready_s)
            abort_task.cancel()
