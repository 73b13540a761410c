"""A pipe that wakes a polling thread, a poller for many ZeroMQ sockets, and a thread that runs a loop."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq

STUCK_AFTER_S = 15.0
"""Seconds in one iteration after which the loop counts as stuck."""


class WakeupPipe:
    """Pipe by which any thread can wake a thread that polls its descriptor `fd`.

    Only the first notification before the next `clear` costs a system call. No notification may follow `close`.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        """`fd` is readable from `notify` until `clear`."""
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_notified = False

    def notify(self) -> None:
        if self._is_notified:
            return
        self._is_notified = True
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable too
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Reset the pipe, before looking for work: work that is added later notifies again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        self._is_notified = False

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


class LoopThread:
    """A thread that runs a loop until it is stopped, and the commands that other threads submit to it.

    The thread runs the function `run`. That must call `begin_iteration` before each iteration, and return once this is
    False.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.wakeup = WakeupPipe()
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._iteration_began_s = 0.0
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        self._iteration_began_s = time.monotonic()
        self._thread.start()

    def begin_iteration(self) -> bool:
        self._iteration_began_s = time.monotonic()
        return not self._is_stopping

    def submit(self, command: Callable[[], None]) -> None:
        """Queue a command for the loop's thread; ignored after `stop`. May be called from any thread."""
        with self._lock:
            if not self._is_stopping:
                self._commands.append(command)
                self.wakeup.notify()

    def take_commands(self) -> Iterator[Callable[[], None]]:
        """Yield the submitted commands, to be called now."""
        self.wakeup.clear()
        while self._commands:
            yield self._commands.popleft()

    def describe_fault(self) -> str | None:
        """Return why the loop does not run; None if it runs, or should not."""
        if self._is_stopping or self._thread.ident is None:
            return None
        if not self._thread.is_alive():
            return "has ended"
        idle_s = time.monotonic() - self._iteration_began_s
        return f"has done nothing for {idle_s:.0f} s" if idle_s > STUCK_AFTER_S else None

    def stop(self) -> bool:
        """Stop the loop and wait for its last iteration; return whether this is the first call."""
        with self._lock:
            if self._is_stopping:
                return False
            self._is_stopping = True
            self.wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join()
        return True


Socket = Any
"""zmq.Socket[bytes]."""


class SocketPoller:
    """Waits for input on many ZeroMQ sockets and one plain descriptor, by the kernel's epoll.

    Linux only, for one thread.

    ZeroMQ's own poll looks at every socket each time: with 2,000 streams that is 4,000 looks a round. Epoll reports
    only sockets whose descriptor became ready, but only once for several messages. So a socket that had input is looked
    at in each round until it has none. Invariant: a registered socket with input has a ready descriptor, or is in
    `_readable_sockets`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._socket_by_descriptor: dict[int, Socket] = {}
        self._readable_sockets: dict[Socket, None] = {}
        """Sockets with input, in the order in which they were found."""
        self._wakeup_descriptor = -1

    def watch_descriptor(self, descriptor: int) -> None:
        """Watch a plain descriptor: `poll` returns whether it is readable."""
        self._wakeup_descriptor = descriptor
        self._epoll.register(descriptor, select.EPOLLIN)

    def register(self, socket: Socket) -> None:
        descriptor = socket.getsockopt(zmq.FD)
        self._socket_by_descriptor[descriptor] = socket
        self._epoll.register(descriptor, select.EPOLLIN)
        self._readable_sockets[socket] = None  # earlier messages do not make the descriptor ready again

    def unregister(self, socket: Socket) -> None:
        """Stop watching a socket, before it is closed."""
        descriptor = socket.getsockopt(zmq.FD)
        del self._socket_by_descriptor[descriptor]
        self._epoll.unregister(descriptor)
        self._readable_sockets.pop(socket, None)

    def poll(self, wait_ms: int) -> tuple[bool, list[Socket]]:
        """Wait for input; return whether the plain descriptor is readable, and the sockets with input."""
        readable_sockets = self._readable_sockets
        for socket in list(readable_sockets):
            if not _has_input(socket):
                del readable_sockets[socket]
        wait_s = 0 if readable_sockets else wait_ms / 1000
        events_max = len(self._socket_by_descriptor) + 1
        is_woken = False
        for descriptor, _ in self._epoll.poll(wait_s, events_max):
            if descriptor == self._wakeup_descriptor:
                is_woken = True
                continue
            socket = self._socket_by_descriptor.get(descriptor)
            if socket is not None and _has_input(socket):  # a descriptor is ready for output or errors, too
                readable_sockets[socket] = None
        return is_woken, list(readable_sockets)

    def close(self) -> None:
        self._epoll.close()


def _has_input(socket: Socket) -> bool:
    return bool(socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)
