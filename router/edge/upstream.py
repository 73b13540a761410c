"""Keep-alive connections to workers, and nothing about what is sent over them.

Owns sockets and their reuse: one request at a time a connection, newest idle connection first (the one least likely to
have been closed by the other side), idle ones dropped before usual servers drop them. Whoever uses a connection
implements `UpstreamUser`. Invariant: a connection is idle in the pool, or has exactly one user, or is closed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from router.http.fair_scheduler import FairScheduler
from router.http.response import ResponseHeadParser

JOIN_BYTES_MAX: Final = 64 * 1024
"""Up to this size a copy is cheaper than a vectored write."""
SILENT_S_MAX: Final = 30
"""A worker's machine that acknowledges nothing for so long is gone: its connections break."""
SLICE_BYTES: Final = 16 * 1024
"""Of one read that is handed over before others get their turn, where a byte may cost much: 2,700 chunks of a byte."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Where a worker listens, taken apart once. Compared by identity: one object a worker, and its key in the pool."""

    host: str
    port: int
    is_tls: bool
    authority: bytes
    """Value of the `Host` header."""
    path_prefix: bytes
    """Path that stands before every request's path, without its last slash; usually empty."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """From `http(s)://host[:port][/path]`, as router/fleet/discovery.py normalises it."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        return cls(
            parts.hostname,
            port,
            is_tls,
            parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
            parts.path.rstrip("/").encode(),
        )


class UpstreamUser(Protocol):
    """What a connection tells whoever holds it, and what it raised meanwhile."""

    def connection_opened(self, connection: UpstreamConnection) -> None: ...

    def connection_failed(self, error: Exception) -> None: ...

    def upstream_data(self, data: bytes) -> None: ...

    def crash(self, error: Exception) -> None: ...

    @property
    def reads_in_slices(self) -> bool:
        """Long reads are handed over in parts, between the turns of others."""

    def upstream_lost(self, reason: str) -> None:
        """The connection ended; the user no longer holds it."""


class UpstreamConnection(asyncio.Protocol):
    """One TCP connection to a worker. Its callbacks are a boundary: what raises behind one ends its user's request."""

    __slots__ = (
        "_is_buffer_full",
        "_is_paused",
        "_is_send_scheduled",
        "_loss_reason",
        "_pool",
        "_unread_data",
        "_unsent_pieces",
        "head_parser",
        "idle_since_s",
        "request_count",
        "target",
        "transport",
        "user",
    )  # fmt: skip

    def __init__(self, pool: UpstreamPool, target: Endpoint) -> None:
        self._pool = pool
        self.target = target
        self.transport: Any = None
        """An asyncio transport, or uvloop's, which is none by its type."""
        self.user: UpstreamUser | None = None
        self.head_parser = ResponseHeadParser()
        self.request_count = 0
        """Requests sent over it: a connection that breaks on its second use may just have timed out idle."""
        self._unread_data = b""
        """Of a long read; meanwhile nothing more is read."""
        self._is_paused = False
        """By the user."""
        self._unsent_pieces: deque[bytes] = deque()
        """Of a long body."""
        self._is_buffer_full = False
        """What was written waits for the worker to read it."""
        self._is_send_scheduled = False
        """`_send_next_piece` will be called."""
        self._loss_reason = ""
        """Why the connection was lost."""
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        user = self.user
        if user is None:
            self.close()  # a worker speaks only when asked: what comes now could be taken for the next answer
            return
        if self._unread_data:  # a transport that is paused may still hand over what it has decrypted
            self._unread_data += data
            return
        try:
            if len(data) > SLICE_BYTES and user.reads_in_slices:
                self._unread_data = data[SLICE_BYTES:]
                if self.transport is not None:
                    self.transport.pause_reading()
                self._pool.scheduler.schedule(self._deliver_unread)
                data = data[:SLICE_BYTES]
            user.upstream_data(data)
        except Exception as error:  # noqa: BLE001  a boundary
            user.crash(error)

    def _deliver_unread(self) -> None:
        data = self._unread_data
        if not data or self._is_paused:
            return
        self._unread_data = b""
        self.data_received(data)
        if self._unread_data:
            return
        if self.transport is None:
            self._notify_lost()
        elif not self._is_paused:
            self.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None
        self._unsent_pieces.clear()
        self._pool.discard(self)
        self._loss_reason = str(exc) if exc else "closed by the worker"
        if not self._unread_data:  # else its user gets that first, in its turns
            self._notify_lost()

    def _notify_lost(self) -> None:
        user, self.user = self.user, None
        if user is None:
            return
        try:
            user.upstream_lost(self._loss_reason)
        except Exception as error:  # noqa: BLE001  a boundary
            user.crash(error)

    def send(self, head: bytes, body: tuple[bytes, ...]) -> None:
        """Write one request, whose body is in pieces; none is copied where it is long, and each has a turn."""
        assert self.transport is not None
        self.request_count += 1
        if len(body) == 1 and len(body[0]) <= JOIN_BYTES_MAX:
            self.transport.write(head + body[0])
            return
        self.transport.writelines((head, body[0]))
        self._unsent_pieces.extend(body[1:])
        self._schedule_send()

    def _schedule_send(self) -> None:
        if self._unsent_pieces and not self._is_send_scheduled and not self._is_buffer_full:
            self._is_send_scheduled = True
            self._pool.scheduler.schedule(self._send_next_piece)

    def _send_next_piece(self) -> None:
        self._is_send_scheduled = False
        try:
            if self.transport is not None and self._unsent_pieces and not self._is_buffer_full:
                self.transport.write(self._unsent_pieces.popleft())
                self._schedule_send()
        except Exception as error:  # noqa: BLE001  a boundary
            if self.user is not None:
                self.user.crash(error)

    def pause_writing(self) -> None:
        self._is_buffer_full = True

    def resume_writing(self) -> None:
        self._is_buffer_full = False
        self._schedule_send()

    @property
    def has_unread(self) -> bool:
        """More was read than its user was given, or it was answered before all was sent."""
        return bool(self._unread_data or self._unsent_pieces)

    def pause_reading(self) -> None:
        self._is_paused = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._unread_data:
            self._pool.scheduler.schedule(self._deliver_unread)
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def close(self) -> None:
        """Give up the connection, and with it whatever the worker is still computing for it."""
        self.user = None
        self._unread_data = b""
        self._unsent_pieces.clear()
        if self.transport is not None:
            self.transport.abort()


class UpstreamPool:
    """Idle connections by target. `idle_s_max` stays under the 5 s after which uvicorn closes an idle connection."""

    def __init__(
        self,
        *,
        idle_s_max: float = 4.0,
        idle_max: int = 512,
        connect_s_max: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._idle_connections: dict[Endpoint, list[UpstreamConnection]] = {}
        self._connections: set[UpstreamConnection] = set()
        self._idle_s_max = idle_s_max
        self._idle_max = idle_max
        self._connect_s_max = connect_s_max
        self._ssl_context = tls if tls is not None else ssl.create_default_context()
        self.connections_opened = 0
        """Connections made since the start."""
        self.scheduler = FairScheduler()

    def acquire(self, target: Endpoint) -> UpstreamConnection | None:
        """The newest idle connection, now the caller's, or None."""
        idle_connections = self._idle_connections.get(target)
        while idle_connections:
            connection = idle_connections.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    def open(self, target: Endpoint, user: UpstreamUser) -> asyncio.Task[None]:
        """Connect, and tell `user` how that ended."""
        return asyncio.get_running_loop().create_task(self._open(target, user))

    async def _open(self, target: Endpoint, user: UpstreamUser) -> None:
        connection: UpstreamConnection | None = None
        try:
            try:
                connection = await self.connect(target)
            except (OSError, asyncio.TimeoutError, ValueError) as failure:  # ValueError: a name that cannot be one
                user.connection_failed(failure)
            else:
                user.connection_opened(connection)
        except Exception as error:  # noqa: BLE001  a boundary
            if connection is not None and connection.user is None:
                connection.close()
            user.crash(error)

    async def connect(self, target: Endpoint) -> UpstreamConnection:
        """Open a connection. Raises OSError (also for TLS and name errors) or asyncio.TimeoutError."""
        loop = asyncio.get_running_loop()

        def factory() -> UpstreamConnection:
            return UpstreamConnection(self, target)

        connecting = loop.create_connection(
            factory, target.host, target.port, ssl=self._ssl_context if target.is_tls else None
        )
        _, connection = await asyncio.wait_for(connecting, self._connect_s_max)
        if connection.transport is not None:  # else it was closed at once, and is forgotten already
            self._connections.add(connection)
            _enable_keepalive(connection.transport.get_extra_info("socket"))
        self.connections_opened += 1
        return connection

    def release(self, connection: UpstreamConnection, now: float) -> None:
        """Take back a connection whose answer was read to its end."""
        connection.user = None
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        if connection.has_unread:
            connection.close()
            return
        idle_connections = self._idle_connections.setdefault(connection.target, [])
        if len(idle_connections) >= self._idle_max:
            connection.close()
            return
        connection.idle_since_s = now
        idle_connections.append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        idle_connections = self._idle_connections.get(connection.target)
        if idle_connections and connection in idle_connections:
            idle_connections.remove(connection)
            if not idle_connections:
                del self._idle_connections[connection.target]

    def close_idle(self, now: float) -> None:
        """Close what was idle for too long; call every second or so."""
        for target in list(self._idle_connections):
            idle_connections = self._idle_connections[target]
            expired_connections = [
                connection for connection in idle_connections if now - connection.idle_since_s > self._idle_s_max
            ]
            for connection in expired_connections:
                idle_connections.remove(connection)
                connection.close()
            if not idle_connections:
                self._idle_connections.pop(target, None)

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._idle_connections.clear()

    def count_connections(self) -> tuple[int, int]:
        """(open connections, idle ones)."""
        return len(self._connections), sum(map(len, self._idle_connections.values()))


def _enable_keepalive(sock: Any) -> None:
    """Have the kernel ask the other side of a silent connection whether it is there: a machine that lost its power or
    its network sends nothing, an end of the connection least of all."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option_name, option_value in (
        ("TCP_KEEPIDLE", SILENT_S_MAX // 2),
        ("TCP_KEEPINTVL", SILENT_S_MAX // 6),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option_name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option_name), option_value)
