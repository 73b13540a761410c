"""An asyncio loop whose clock jumps to the next timer, and whose connections are in memory.

Nothing waits and nothing runs beside the loop (executors included), so one program with one list of stimuli gives the
same bytes at the same times on every machine."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

START_S = 1000.0
WALL_START_S = 1_700_000_000.0
BUFFER_BYTES = 64 << 10
"""Bytes that wait in a transport before its writer is asked to pause."""

Factory = Callable[[], asyncio.BaseProtocol]


class VirtualClock:
    """Seconds since an arbitrary start; `install` makes the clocks of `time` read it."""

    def __init__(self) -> None:
        self.now_s = START_S

    def install(self) -> None:
        """Replace the clocks of the module `time` for the whole process. Call before anything else is imported."""
        time.monotonic = time.perf_counter = lambda: self.now_s
        time.thread_time = time.process_time = lambda: 0.0
        time.time = lambda: WALL_START_S + self.now_s
        time.time_ns = lambda: int((WALL_START_S + self.now_s) * 1e9)
        time.monotonic_ns = time.perf_counter_ns = lambda: int(self.now_s * 1e9)


class _JumpingSelector(selectors.SelectSelector):
    """Selector that moves the clock instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is ready and no timer is set: the scenario would wait forever")
        if timeout > 0:
            self.loop.jump_to_next_timer()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop of one scenario. `network` has the addresses that may be connected to."""

    def __init__(self, clock: VirtualClock) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._clock = clock
        self.network = Network(self)
        self.signal_handlers: dict[int, Callable[[], object]] = {}
        super().__init__(selector)

    def time(self) -> float:
        return self._clock.now_s

    def jump_to_next_timer(self) -> None:
        """Move the clock to the earliest timer."""
        self._clock.now_s = max(self._clock.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call the function at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  the future hands it to whoever awaits
            future.set_exception(error)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Keep the handler; scenarios send signals by calling it."""
        self.signal_handlers[sig] = callback

    async def create_server(self, protocol_factory: Factory, host: Any = None, port: Any = None, **_: Any) -> Any:
        return Server(self.network, protocol_factory, port or self.network.make_port())

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Factory, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        target = port if sock is None else sock.port
        server = await self.network.reach(target)
        client_transport, _ = self.network.join(protocol_factory(), server())
        return client_transport, client_transport.get_protocol()


class FakeSocket:
    """What programs ask of a transport's socket."""

    family = None

    def __init__(self, port: int) -> None:
        self.port = port

    def setsockopt(self, *_: Any) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def close(self) -> None: ...


class Server:
    """A listening address of the program under test."""

    def __init__(self, network: Network, factory: Factory, port: int) -> None:
        self._network = network
        self._factory = factory
        self.sockets = [FakeSocket(port)]

    async def start_serving(self) -> None:
        self._network.servers[self.sockets[0].port] = self._factory

    def close(self) -> None:
        self._network.servers.pop(self.sockets[0].port, None)


class Network:
    """Ports and what listens there."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._next_port = 20_000
        self.servers: dict[int, Factory] = {}
        self.silent_ports: set[int] = set()
        """Ports whose connections are neither accepted nor refused."""

    def make_port(self) -> int:
        self._next_port += 1
        return self._next_port

    async def reach(self, port: int) -> Factory:
        """Return what listens there. Raises ConnectionRefusedError; waits forever at a silent port."""
        if port in self.silent_ports:
            await self._loop.create_future()
        factory = self.servers.get(port)
        if factory is None:
            raise ConnectionRefusedError(111, f"Connect call failed ('127.0.0.1', {port})")
        return factory

    def join(
        self, client: asyncio.BaseProtocol, server: asyncio.BaseProtocol
    ) -> tuple[MemoryTransport, MemoryTransport]:
        """Connect two protocols; the server's is told first."""
        ends = MemoryTransport(self._loop, client), MemoryTransport(self._loop, server)
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        server.connection_made(ends[1])
        client.connection_made(ends[0])
        return ends

    async def start_connection(self, addr_infos: Any, **_: Any) -> FakeSocket:
        """Stand-in for aiohappyeyeballs.start_connection."""
        port = addr_infos[0][4][1]
        await self.reach(port)
        return FakeSocket(port)


def _deliver(protocol: Any, data: bytes) -> None:
    """Give received bytes to a protocol."""
    if not isinstance(protocol, asyncio.BufferedProtocol):
        protocol.data_received(data)
        return
    while data:
        buffer: Any = protocol.get_buffer(-1)
        part, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        protocol.buffer_updated(len(part))


class MemoryTransport(asyncio.Transport):
    """One end of a connection. What is written is in the other end's protocol before the clock moves, unless that end
    does not read."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 50_000), "sockname": ("127.0.0.1", 8080), "socket": FakeSocket(0)})
        self._loop = loop
        self._protocol: Any = protocol
        self.peer: MemoryTransport
        self._outbox: deque[bytes] = deque()
        self._high = BUFFER_BYTES
        self._is_reading = True
        self._is_closing = False
        self._ends_output = False
        """What waits is followed by the end of the stream."""
        self._has_ended_output = False
        self._is_lost = False
        self._is_writer_paused = False

    # What programs call

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = BUFFER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._outbox))

    def write(self, data: Any) -> None:
        if self._is_closing or self._ends_output or not data:
            return
        self._outbox.append(bytes(data))
        self._pump_soon()
        if not self._is_writer_paused and self.get_write_buffer_size() > self._high and not self.peer._is_reading:
            self._is_writer_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._ends_output = True
        self._pump_soon()

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self.peer._pump_soon()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = self._ends_output = True
            self._pump_soon()

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = self._ends_output = True
            self._outbox.clear()
            self._pump_soon()

    def reset(self) -> None:
        """End the connection as a process that died with unread bytes does."""
        self.abort()
        self.peer._outbox.clear()
        self._has_ended_output = True
        self.peer._is_closing = True
        self._loop.call_soon(self.peer._lose, ConnectionResetError(104, "Connection reset by peer"))

    # Delivery

    def _pump_soon(self) -> None:
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand over what waits while the other end reads."""
        peer = self.peer
        while self._outbox and peer.is_reading():
            _deliver(peer._protocol, self._outbox.popleft())
        if peer._is_closing:
            self._outbox.clear()
        if self._is_writer_paused and not self._outbox:
            self._is_writer_paused = False
            if not self._is_lost:
                self._protocol.resume_writing()
        if not self._outbox and self._ends_output:
            if not self._has_ended_output and (peer.is_reading() or self._is_closing):
                self._has_ended_output = True
                if not peer._is_closing and not peer._protocol.eof_received():
                    peer.close()
            if self._is_closing:
                self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._protocol.connection_lost(error)
            self.peer._pump_soon()
