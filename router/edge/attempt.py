"""One try of a request at one worker: the connection, and the head of the answer.

Owns how the connection is come by and given back, and the bytes of the head until it is whole. Refuses to know what is
sent and what becomes of the answer: that is its owner's (router/edge/exchange.py).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.edge.upstream import Endpoint, UpstreamConnection, UpstreamPool
from router.http.headers import ProtocolError
from router.http.response import ResponseHead


class AttemptOwner(Protocol):
    """What an attempt tells whoever makes it."""

    def attempt_connected(self, connection: UpstreamConnection) -> None:
        """There is a connection: the request may be sent."""

    def attempt_unconnected(self, error: Exception | None) -> None:
        """No connection could be opened; None: the worker closed it at once."""

    def attempt_answered(self, head: ResponseHead, data: bytes) -> None:
        """The head of the answer is whole, and `data` came after it."""

    def attempt_received(self, head: ResponseHead, data: bytes) -> None:
        """More of the answer came."""

    def attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        """The connection ended. `is_stale`: it had been idle and was closed as the request was written."""

    def attempt_malformed(self, error: ProtocolError) -> None:
        """The worker's bytes are no answer."""

    def crash(self, error: Exception) -> None: ...


class Attempt:
    """One try; an `UpstreamUser`."""

    __slots__ = ("_connecting", "_connection", "_head_buffer", "_method", "_owner", "_pool", "head", "is_resend")

    def __init__(self, owner: AttemptOwner, pool: UpstreamPool, method: str, *, is_resend: bool = False) -> None:
        """`method`: of the request. `is_resend`: repeats a try whose kept-alive connection broke, on a new one."""
        self._owner = owner
        self._pool = pool
        self._method = method
        self._connecting: asyncio.Task[None] | None = None
        self._connection: UpstreamConnection | None = None
        self._head_buffer = b""
        """Beginning of a head that is not whole yet."""
        self.head: ResponseHead | None = None
        """Head of the answer, once the owner takes it."""
        self.is_resend = is_resend

    def start(self, target: Endpoint) -> None:
        """Have a connection to the worker."""
        connection = self._connection = None if self.is_resend else self._pool.acquire(target)
        if connection is not None:
            connection.user = self
            self._owner.attempt_connected(connection)
        else:
            self._connecting = self._pool.open(target, self)

    def close(self) -> None:
        """Give up the connection, and with it whatever the worker is still computing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def finish(self, now: float, *, reusable: bool) -> None:
        """Give the connection back after the whole answer."""
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

    def connection_opened(self, connection: UpstreamConnection) -> None:
        """A connection was opened for this attempt."""
        self._connecting = None
        if connection.transport is None:
            self._owner.attempt_unconnected(None)
        else:
            self._connection, connection.user = connection, self
            self._owner.attempt_connected(connection)

    def connection_failed(self, error: Exception) -> None:
        """No connection could be opened."""
        self._connecting = None
        self._owner.attempt_unconnected(error)

    @property
    def reads_in_slices(self) -> bool:
        return self.head is None or self.head.is_chunked

    def upstream_data(self, data: bytes) -> None:
        """Bytes from the worker."""
        head = self.head
        try:
            if head is not None:
                self._owner.attempt_received(head, data)
                return
            head, data = self._read_head(data)
            if head is not None:
                self._owner.attempt_answered(head, data)
        except ProtocolError as error:
            self._owner.attempt_malformed(error)

    def _read_head(self, data: bytes) -> tuple[ResponseHead | None, bytes]:
        """The head of the answer and what came after it, once it is complete."""
        buffer = self._head_buffer + data if self._head_buffer else data
        connection = self._connection
        assert connection is not None
        while True:
            parsed_head = connection.head_parser.parse(buffer, self._method)
            if parsed_head is None:
                self._head_buffer = buffer
                return None, b""
            head, buffer = parsed_head
            if head.status >= 200:
                return head, buffer
            if head.status == 101:
                raise ProtocolError("101 to a request that offered no upgrade")

    def upstream_lost(self, reason: str) -> None:
        """The worker's connection ended."""
        connection, self._connection = self._connection, None
        is_reused = connection is not None and connection.request_count > 1
        is_stale = is_reused and self.head is None and not self._head_buffer and not self.is_resend
        self._owner.attempt_lost(reason, is_stale=is_stale)

    def crash(self, error: Exception) -> None:
        self._owner.crash(error)
