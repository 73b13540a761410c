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
    """Ends the router's process after a signal, once the requests in flight are answered.

    A second signal closes their connections at once.
    """

    def __init__(self, config: EdgeConfig, proxy: Proxy, addresses: ListenAddresses) -> None:
        self._config = config
        self._proxy = proxy
        self._addresses = addresses
        self._end_requested = asyncio.Event()
        self._abort_requested = asyncio.Event()
        self._picker_task: asyncio.Future[None] | None = None
        """Stops the gRPC server of `router epp`; None for other commands."""

    def watch_signals(self) -> None:
        """Let SIGTERM and SIGINT request the end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Request the end; at the second signal, close all connections."""
        if self._end_requested.is_set():
            log.warning("second signal: %d requests are cut off", len(self._proxy.exchanges))
            self._abort_requested.set()
            self._addresses.for_each_listener(Listener.abort)
        self._end_requested.set()

    def request_end(self) -> None:
        self._end_requested.set()

    async def wait_until_requested(self) -> None:
        await self._end_requested.wait()

    async def drain(self, stop_picker: Callable[[float], Awaitable[None]] | None) -> None:
        """Take requests for `unready_s` more, let those in flight end, and close all connections.

        `stop_picker` stops the gRPC server of `router epp`, whose streams have the given seconds to end.
        """
        await self._wait_unready()
        self._addresses.for_each_listener(Listener.stop_listening)
        if self._proxy.exchanges:
            log.info("shutting down: %d requests in flight", len(self._proxy.exchanges))
        if stop_picker is not None:
            self._picker_task = asyncio.ensure_future(stop_picker(self._config.shutdown_s))
        await self._wait_for_requests()
        self._addresses.for_each_listener(Listener.abort)
        await asyncio.sleep(0)  # the event loop tells the connections that they are closed

    async def _wait_for_requests(self) -> None:
        """Wait until no request is in flight, for at most `shutdown_s`, and no longer after a second signal."""
        deadline_s = self._proxy.now() + self._config.shutdown_s
        while self._has_requests:
            if self._proxy.now() > deadline_s or self._abort_requested.is_set():
                log.warning("%d requests were not done in time and are cut off", len(self._proxy.exchanges))
                return
            await asyncio.sleep(POLL_S)

    @property
    def _has_requests(self) -> bool:
        """Whether a request is in flight. Those of `router epp` come over gRPC, which no listener sees."""
        return self._addresses.is_busy or (self._picker_task is not None and bool(self._proxy.exchanges))

    async def _wait_unready(self) -> None:
        """Serve for `unready_s` more, until load balancers have seen the 503 of `/readyz` and send nothing more."""
        unready_s = self._config.unready_s
        if unready_s > 0:
            log.info("shutting down in %g s; until then requests are taken", unready_s)
            self._addresses.for_each_listener(Listener.close_after_answers)
            abort_task = asyncio.ensure_future(self._abort_requested.wait())
            await asyncio.wait({abort_task}, timeout=unready_s)
            abort_task.cancel()
