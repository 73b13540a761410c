"""The end of the router's process: signals, and requests in flight that may still be answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from router.edge.config import EdgeConfig
from router.edge.proxy import Proxy
from router.http.listener import Listener

log = logging.getLogger("router")

POLL_S: Final = 0.02


class Shutdown:
    """Ends the router's process after a signal, once all requests are answered; at once after a second signal."""

    def __init__(self, config: EdgeConfig, proxy: Proxy) -> None:
        self._config = config
        self._proxy = proxy
        self.end_requested = asyncio.Event()
        self._abort_requested = asyncio.Event()

    def watch_signals(self) -> None:
        """Let SIGTERM, SIGINT and SIGHUP request the end, but keep a SIGHUP ignored where `nohup` ignores it.

        A second SIGHUP cuts nothing off: when a terminal closes, its shell sends one and the kernel another.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.end_requested.set)

    def _on_signal(self) -> None:
        if self.end_requested.is_set():
            log.warning("second signal: %d requests are cut off", len(self._proxy.exchanges))
            self._abort_requested.set()
        self.end_requested.set()

    async def drain(
        self, listeners: Sequence[Listener], stop_picker: Callable[[float], Awaitable[None]] | None
    ) -> None:
        """Shut the router down: let requests in flight end, then close all connections.

        New requests are taken for `unready_s` more, until load balancers send them elsewhere. `stop_picker` stops the
        gRPC server of `router epp`; its argument is the time in seconds that open streams have to end.
        """
        await self._wait_unready(listeners)
        for listener in listeners:
            listener.stop_listening()
        if self._proxy.exchanges:
            log.info("shutting down: %d requests in flight", len(self._proxy.exchanges))
        picker_task = None if stop_picker is None else asyncio.ensure_future(stop_picker(self._config.shutdown_s))
        await self._wait_for_requests(listeners)
        for listener in listeners:
            listener.abort()
        await asyncio.sleep(0)  # the event loop tells the connections that they are closed
        if picker_task is not None:
            picker_task.cancel()

    async def _wait_for_requests(self, listeners: Sequence[Listener]) -> None:
        """Wait until no request is in flight, for at most `shutdown_s`, and no longer after a second signal."""
        deadline_s = self._proxy.now() + self._config.shutdown_s
        # Those of `router epp` come over gRPC, which no listener sees.
        while self._proxy.exchanges or any(listener.is_busy for listener in listeners):
            if self._proxy.now() > deadline_s or self._abort_requested.is_set():
                log.warning("%d requests were not done in time and are cut off", len(self._proxy.exchanges))
                return
            await asyncio.sleep(POLL_S)

    async def _wait_unready(self, listeners: Sequence[Listener]) -> None:
        """Serve for `unready_s` more, until load balancers have seen the 503 of `/readyz` and send nothing more."""
        unready_s = self._config.unready_s
        if unready_s > 0:
            log.info("shutting down in %g s; until then requests are taken", unready_s)
            for listener in listeners:
                listener.close_after_answers()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._abort_requested.wait(), unready_s)
