"""Keep-alive connections to workers, one request at a time on each, and the heads of the answers.

The newest idle connection is used first, as the worker is least likely to have closed it. The user of a connection
implements `UpstreamUser`. Invariant: a connection is idle in the pool, or has exactly one user, or is closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from aiohttp.helpers import is_ip_address

from options.addresses import get_default_port
from options.background_tasks import BackgroundTasks
from options.system import probe_silent_connections
from router.host_names import HostNames
from router.http.headers import ProtocolError
from router.http.response import MAX_INTERIM_RESPONSES, ResponseHead, parse_response_head

JOIN_BYTES_MAX: Final = 64 * 1024
"""Size up to which copying a body is cheaper than a vectored write."""
LOCAL_ERRNOS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Errors of this machine, which lacks sockets or memory. They say nothing about the worker."""
IDLE_S_MAX: Final = 4.0
"""Time after which an idle connection is closed: less than the 5 s after which Uvicorn, the server of most engines,
closes it, perhaps while a request is being written."""
NAMED_S_MAX: Final = 10.0
"""Time after which a connection to a host that is given by name takes no more requests: the name may have moved."""
IDLE_MAX: Final = 512
"""Most idle connections to one worker."""
READ_BYTES: Final = 64 * 1024
"""Most bytes of a worker that are read before other connections have their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Network address of a worker. Each URL has one object, so endpoints are compared by identity."""

    host: str
    port: int
    is_tls: bool
    authority: bytes
    """Value of the `Host` header."""
    path_prefix: bytes
    """Prefix of every request's path, without its last slash; usually empty."""

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, url: str) -> Endpoint:
        """Parse the valid URL of a worker, `http(s)://host[:port][/path]`."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        return cls(
            host=parts.hostname,
            port=parts.port or get_default_port(parts.scheme),
            is_tls=parts.scheme == "https",
            authority=parts.netloc.encode("ascii" if parts.netloc.isascii() else "idna"),
            path_prefix=parts.path.rstrip("/").encode(),
        )


log = logging.getLogger("router")

UNANSWERED_S_MAX: Final = 10.0
"""Longest wait for an answer that nobody reads."""


class UpstreamUser(Protocol):
    """Callbacks of the object that has a request sent over a connection, for what happens on the connection."""

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

        `is_stale`: whether a kept-alive connection, idle until then, was closed before the first byte of the answer.
        """

    def on_attempt_malformed(self, error: ProtocolError) -> None:
        """Handle an answer that is not HTTP."""

    def crash(self, error: Exception) -> None:
        """End the request, because code that handles it raised `error`."""


class UpstreamConnection(asyncio.BufferedProtocol):
    """One TCP connection to a worker, for one request at a time: opens, sends the request, and reads the answer's head.

    An exception in one of its callbacks ends its user's request alone.
    """

    __slots__ = (
        "_head_buffer", "_interim_count", "_is_buffer_full", "_method", "_opening", "_pool", "_unsent_pieces",
        "first_idle_s", "head", "idle_since_s", "request_count", "target", "transport", "user",
    )  # fmt: skip

    def __init__(self, pool: UpstreamPool, target: Endpoint) -> None:
        """Make a connection to the worker at `target`. `begin_request` opens it; `pool` keeps it while idle."""
        self._pool = pool
        self.target = target
        self.transport: Any = None
        """Transport of asyncio or uvloop, which have no common type; None while the connection is not open."""
        self._opening: asyncio.Task[None] | None = None
        """Task that opens the connection."""
        self.request_count = 0
        """Requests sent so far. If a later one fails, the worker may just have closed the idle connection."""
        self.first_idle_s: float | None = None
        """Time at which the first request on the connection ended."""
        self.idle_since_s = 0.0
        """Time at which the last request on the connection ended."""

        # The current request and its answer.
        self.user: UpstreamUser | None = None
        """Object for which a request is sent; None while the connection is idle."""
        self._method = ""
        """Method of the request."""
        self._unsent_pieces: deque[bytes] = deque()
        """Pieces of a long body that are not written yet."""
        self._is_buffer_full = False
        """Whether the worker has to read before more is written."""
        self.head: ResponseHead | None = None
        """Head of the answer; None until it is complete."""
        self._head_buffer = b""
        """Bytes of a head that is incomplete."""
        self._interim_count = 0
        """Interim responses before the answer."""

    def begin_request(self, user: UpstreamUser, method: str) -> None:
        """Tell `user` when the connection is open for its request, or that it cannot be opened.

        A connection that was idle is open at once. `method` of the request decides whether its answer has a body.
        """
        self._method = method
        self.head, self._head_buffer, self._interim_count = None, b"", 0
        if self.transport is not None:
            self.user = user
            user.on_attempt_connected(self)
        else:
            self._opening = asyncio.get_running_loop().create_task(self._open(user))

    async def _open(self, user: UpstreamUser) -> None:
        """Open the connection, and tell `user` whether that succeeded."""
        try:
            failure = await self._try_open()
            was_closed = self._opening is None  # `close` came too late to cancel the opening
            self._opening = None
            if was_closed:
                self.close()
            elif failure is not None or self.transport is None:
                user.on_attempt_connect_failed(failure)
            else:
                self.user = user
                user.on_attempt_connected(self)
        except Exception as error:  # noqa: BLE001  a boundary: a fault ends this request alone
            user.crash(error)

    async def _try_open(self) -> Exception | None:
        """Open the connection; return the error if it cannot be opened."""
        try:
            await self._pool.connect(self)
        except (OSError, asyncio.TimeoutError, ValueError) as error:  # ValueError: an invalid host name
            return error.with_traceback(None)  # the traceback would keep the request in memory, by its frames
        return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read, which all connections share: each read is copied out at once."""
        return self._pool.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Give the next bytes of the worker to the request that uses the connection."""
        data, user = bytes(self._pool.read_buffer[:nbytes]), self.user
        if user is None:
            self.close()  # bytes without a request could be taken for the next answer
            return
        try:
            self._receive(user, data)
        except Exception as error:  # noqa: BLE001  a fault in one request must not close the router's other ones
            user.crash(error)

    def _receive(self, user: UpstreamUser, data: bytes) -> None:
        """Give `user` the head of the answer when it is complete, or further bytes of the body."""
        try:
            if self.head is not None:
                user.on_attempt_body(self.head, data)
                return
            self.head, data = self._read_head(data)
            if self.head is not None:
                user.on_attempt_head(self.head, data)
        except ProtocolError as error:
            user.on_attempt_malformed(error)

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

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None
        self._unsent_pieces.clear()
        self._pool.discard(self)
        user, self.user = self.user, None
        if user is None:
            return
        is_stale = self.request_count > 1 and self.head is None and not self._head_buffer
        try:
            user.on_attempt_lost(str(exc) if exc else "closed by the worker", is_stale=is_stale)
        except Exception as error:  # noqa: BLE001  a boundary
            user.crash(error)

    def send(self, head: bytes, body: tuple[bytes, ...]) -> None:
        """Write one request. A long body comes in pieces, which are written as fast as the worker reads."""
        assert self.transport is not None
        self.request_count += 1
        if len(body) == 1 and len(body[0]) <= JOIN_BYTES_MAX:
            self.transport.write(head + body[0])
            return
        self.transport.writelines((head, body[0]))
        self._unsent_pieces.extend(body[1:])
        self._write_pieces()

    def _write_pieces(self) -> None:
        transport = self.transport
        while self._unsent_pieces and not self._is_buffer_full and not transport.is_closing():  # as a write may find
            transport.write(self._unsent_pieces.popleft())

    def pause_writing(self) -> None:
        self._is_buffer_full = True

    def resume_writing(self) -> None:
        self._is_buffer_full = False
        self._write_pieces()

    def pause_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def close_after_answer(self) -> None:
        """Close the connection at the first byte of an answer that nobody reads, or after a while."""
        self.user = None
        asyncio.get_running_loop().call_later(UNANSWERED_S_MAX, self.close)

    def finish(self, now: float, *, reusable: bool) -> None:
        """Give the connection back to the pool after the complete answer; close it unless it is `reusable`."""
        if reusable and not self._unsent_pieces:  # the worker may have answered before it had the whole request
            self._pool.release(self, now)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection at once, which tells the worker to stop computing."""
        self.user = None
        self._unsent_pieces.clear()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self.transport is not None:
            self.transport.abort()


class ConnectionCounts(NamedTuple):
    open: int
    """All connections, in use or idle."""
    idle: int


def is_local_error(error: Exception | None) -> bool:
    """Return whether a connection failed for want of sockets or memory here."""
    return isinstance(error, OSError) and error.errno in LOCAL_ERRNOS


class UpstreamPool:
    """Opens connections to workers, and keeps idle ones for further requests."""

    def __init__(
        self,
        *,
        connect_s_max: float = 5.0,
        tls: ssl.SSLContext | None = None,
        host_names: HostNames | None = None,
    ) -> None:
        """Make a pool without connections.

        `connect_s_max`: longest time for opening a connection. `tls`: context for workers with https; None: the
        system's certificate authorities are trusted. `host_names`: addresses of workers.
        """
        self._idle_connections: dict[Endpoint, list[UpstreamConnection]] = {}
        self._connections: set[UpstreamConnection] = set()
        self._unanswered_requests = BackgroundTasks()
        self._connect_s_max = connect_s_max
        self._ssl_context = tls if tls is not None else ssl.create_default_context()
        self._host_names = host_names or HostNames()
        self.read_buffer = memoryview(bytearray(READ_BYTES))

    def acquire(self, target: Endpoint, *, is_new: bool = False) -> UpstreamConnection:
        """Return the newest idle connection to a worker, to use it; without one, or if `is_new`, an unopened one."""
        idle_connections = None if is_new else self._idle_connections.get(target)
        while idle_connections:
            connection = idle_connections.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return UpstreamConnection(self, target)

    async def connect(self, connection: UpstreamConnection) -> None:
        """Open a connection. Raises OSError (also for TLS and name errors), UnicodeError or asyncio.TimeoutError."""
        await asyncio.wait_for(self._connect(connection), self._connect_s_max)
        if connection.transport is not None:  # otherwise it was closed at once
            self._connections.add(connection)
            probe_silent_connections(connection.transport.get_extra_info("socket"))

    async def _connect(self, connection: UpstreamConnection) -> None:
        target = connection.target
        sock = await self._host_names.connect(target.host, target.port)
        await asyncio.get_running_loop().create_connection(
            lambda: connection,
            sock=sock,
            ssl=self._ssl_context if target.is_tls else None,
            server_hostname=target.host if target.is_tls else None,
        )

    def send_unanswered(self, target: Endpoint, head: bytes, body: tuple[bytes, ...]) -> None:
        """Send a request, and read no answer. Failures are ignored."""
        self._unanswered_requests.start(self._send_unanswered(target, head, body))

    async def _send_unanswered(self, target: Endpoint, head: bytes, body: tuple[bytes, ...]) -> None:
        connection = UpstreamConnection(self, target)
        try:
            await self.connect(connection)
        except (OSError, asyncio.TimeoutError, ValueError) as failure:
            log.info("%s:%d: a request without a reader was not sent: %s", target.host, target.port, failure)
            return
        if connection.transport is not None:
            connection.send(head, body)
            connection.close_after_answer()

    def release(self, connection: UpstreamConnection, now: float) -> None:
        """Keep a connection for further requests to its worker; close it if enough are idle, or if it is old."""
        connection.user = None
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        if connection.first_idle_s is None:
            connection.first_idle_s = now
        is_old = now - connection.first_idle_s > NAMED_S_MAX and not is_ip_address(connection.target.host)
        if is_old or len(self._idle_connections.get(connection.target, ())) >= IDLE_MAX:
            connection.close()
            return
        connection.idle_since_s = now
        self._idle_connections.setdefault(connection.target, []).append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        idle_connections = self._idle_connections.get(connection.target)
        if idle_connections and connection in idle_connections:
            idle_connections.remove(connection)
            if not idle_connections:
                del self._idle_connections[connection.target]

    def close_idle(self, now: float) -> None:
        """Close connections that were idle for too long, which discards them. Call every second or so."""
        for idle_connections in list(self._idle_connections.values()):
            for connection in list(idle_connections):
                if now - connection.idle_since_s > IDLE_S_MAX:
                    connection.close()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._idle_connections.clear()

    def count_connections(self) -> ConnectionCounts:
        return ConnectionCounts(len(self._connections), sum(map(len, self._idle_connections.values())))
