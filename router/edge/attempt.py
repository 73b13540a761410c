"""One attempt to have one worker answer a request: the connection, and the head of the answer.

Takes a connection from the pool and returns it, and collects the bytes of the head until it is complete. What is sent,
and what is done with the answer, is decided by the attempt's owner (router/edge/exchange.py).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from router.edge.upstream import Endpoint, UpstreamConnection, UpstreamPool
from router.http.headers import ProtocolError
from router.http.response import MAX_INTERIM_RESPONSES, ResponseHead, parse_response_head


class AttemptOwner(Protocol):
    """Callbacks by which an `Attempt`, one connection to one worker for one request, reports what happens on it."""

    def on_attempt_connected(self, connection: UpstreamConnection) -> None:
        """Send the request over this connection, or give the connection back if the request has ended meanwhile."""

    def on_attempt_connect_failed(self, error: Exception | None) -> None:
        """Handle that no connection could be opened. `error` is None if the worker closed it at once."""

    def on_attempt_head(self, head: ResponseHead, data: bytes) -> None:
        """Handle the head of the answer (status and headers), and the bytes of its body that came with it."""

    def on_attempt_body(self, head: ResponseHead, data: bytes) -> None:
        """Handle further bytes of the answer's body."""

    def on_attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        """Handle the end of the connection. The answer is complete if its body may end in this way, else it failed.

        `is_stale`: whether a kept-alive connection, idle until then, was closed while the request was written.
        """

    def on_attempt_malformed(self, error: ProtocolError) -> None:
        """Handle an answer that is not HTTP."""

    def crash(self, error: Exception) -> None:
        """End the request, because code that handles it raised `error`."""


class Attempt(msgspec.Struct, eq=False):
    """The user of one connection to a worker, for one request."""

    _owner: AttemptOwner
    _pool: UpstreamPool
    _method: str
    """Method of the request."""
    is_resend: bool = False
    """Whether a new connection is used, as a kept-alive one broke under the request."""
    head: ResponseHead | None = None
    """Head of the answer; None until the owner accepts one."""
    _connecting: asyncio.Task[None] | None = None
    _connection: UpstreamConnection | None = None
    _head_buffer: bytes = b""
    """Bytes of a head that is incomplete."""
    _interim_count: int = 0
    """Interim responses before the answer."""

    def start(self, target: Endpoint) -> None:
        """Take an idle connection to the worker, or open one."""
        connection = self._connection = None if self.is_resend else self._pool.acquire(target)
        if connection is not None:
            connection.user = self
            self._owner.on_attempt_connected(connection)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._open(target))

    async def _open(self, target: Endpoint) -> None:
        """Open a connection to the worker, and tell the owner of the attempt whether that succeeded."""
        try:
            connection, failure = await self._try_connect(target)
            was_closed = self._connecting is None  # `close` came too late to cancel the opening
            self._connecting = None
            if was_closed:
                if connection is not None:
                    connection.close()
            elif connection is None or connection.transport is None:
                self._owner.on_attempt_connect_failed(failure)
            else:
                self._connection = connection
                connection.user = self
                self._owner.on_attempt_connected(connection)
        except Exception as error:  # noqa: BLE001  a boundary: a fault ends this request alone
            self._owner.crash(error)

    async def _try_connect(self, target: Endpoint) -> tuple[UpstreamConnection | None, Exception | None]:
        """Return a new connection to the worker, or the error by which there is none."""
        try:
            return await self._pool.connect(target), None
        except (OSError, asyncio.TimeoutError, ValueError) as error:  # ValueError: an invalid host name
            return None, error.with_traceback(None)  # the traceback would keep the request in memory, by its frames

    def close(self) -> None:
        """Close the connection, which tells the worker to stop computing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def close_after_answer(self) -> None:
        """Let the worker begin its answer before the connection is closed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close_after_answer()

    def finish(self, now: float, *, reusable: bool) -> None:
        """Return the connection after the complete answer; close it unless it is `reusable`."""
        if self._connection is None:
            return
        if reusable:
            self._pool.release(self._connection, now)
        else:
            self._connection.close()
        self._connection = None

    def pause_reading(self) -> None:
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        if self._connection is not None:
            self._connection.resume_reading()

    # From the connection ------------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Take bytes from the worker."""
        head = self.head
        try:
            if head is not None:
                self._owner.on_attempt_body(head, data)
                return
            head, data = self._read_head(data)
            if head is not None:
                self._owner.on_attempt_head(head, data)
        except ProtocolError as error:
            self._owner.on_attempt_malformed(error)

    def _read_head(self, data: bytes) -> tuple[ResponseHead | None, bytes]:
        """Return the head of the worker's answer and the bytes after it; (None, b"") while the head is incomplete.

        `data`: next bytes from the worker. Interim heads, such as `100 Continue`, are dropped. Raises ProtocolError.
        """
        buffer = self._head_buffer + data if self._head_buffer else data
        while True:
            parsed_head = parse_response_head(buffer, self._method)
            if parsed_head is None:
                self._head_buffer = buffer
                return None, b""
            head, buffer = parsed_head
            if head.status >= 200:
                return head, buffer
            if head.status == 101:
                raise ProtocolError("101 to a request that offered no upgrade")
            self._interim_count += 1
            if self._interim_count > MAX_INTERIM_RESPONSES:
                raise ProtocolError(f"more than {MAX_INTERIM_RESPONSES} interim answers")

    def on_connection_lost(self, reason: str) -> None:
        """Tell the owner that the worker's connection ended."""
        connection, self._connection = self._connection, None
        is_reused = connection is not None and connection.request_count > 1
        is_stale = is_reused and self.head is None and not self._head_buffer and not self.is_resend
        self._owner.on_attempt_lost(reason, is_stale=is_stale)

    def crash(self, error: Exception) -> None:
        self._owner.crash(error)
