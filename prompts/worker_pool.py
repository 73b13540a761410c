"""Worker processes for bodies of clients, bounded in time and memory.

A body decides how much time and memory it takes to decode, render and encode. Decoding holds Python's interpreter lock,
so threads cannot replace the processes. A process has one body at a time, and ends when its socket closes. Pickles are
exchanged only between our own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from options.system import read_resident_bytes, start_child
from prompts.errors import RequestError

T = TypeVar("T")
WorkerSetup = tuple[Callable[..., Any], tuple[Any, ...]]
"""Function of a module and its arguments. Each process calls it once, and passes the result to every task."""

NICE = 5
"""Niceness of the processes: large bodies wait for small ones."""
ALARM_MARGIN_S = 2
"""Seconds after the time limit of a task in which the server may kill the process. Then the process ends by itself, as
the server has been killed."""


class WorkerProcessError(Exception):
    """A process died or was killed; the message says why."""


class _TaskResult(NamedTuple):
    """Message of a worker process at the end of a task."""

    rejection: dict[str, Any] | None
    """Arguments of the RequestError that the task raised."""
    result: Any
    is_reusable: bool


class WorkerProcess:
    """A worker process, as its parent process sees it. It computes one call at a time, and is started by the first."""

    def __init__(self, setup: WorkerSetup, memory_bytes: int, executor: ThreadPoolExecutor) -> None:
        self.is_busy = False
        self.last_used_s = 0.0
        self.is_reusable = False
        """Whether the process has memory left for another body."""
        self.child: subprocess.Popen[bytes] | None = None
        self._setup_message = (memory_bytes, setup)
        self._executor = executor
        self._stream: Any = None
        self._killed_children: list[subprocess.Popen[bytes]] = []
        self._start_lock = threading.Lock()
        """Held while a child is started, so that `kill` finds every child."""
        self._kill_count = 0

    async def call(self, seconds_max: float, work: Callable[..., Any], *arguments: Any) -> Any:
        """Compute `work(setup_result, *arguments)` in the worker process, and return the result.

        `work`: function of a module, so that it can be pickled. `setup_result`: what the setup function of the process
        returned. A RequestError of `work` is raised here too. Raises WorkerProcessError if the call takes longer than
        `seconds_max`, or if the process dies.
        """
        alarm_s = math.ceil(seconds_max) + ALARM_MARGIN_S  # the process ends itself then, if this one cannot kill it
        task = (alarm_s, work, arguments)
        # A thread sends the task and receives the result, because both may be large.
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, self._send_and_receive, task, self._kill_count)
        try:
            rejection, result, is_reusable = await asyncio.wait_for(future, seconds_max)
        except asyncio.TimeoutError:
            raise WorkerProcessError(f"not done within {seconds_max:g} s") from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerProcessError(f"{type(error).__name__}: {error}") from None
        self.is_reusable = is_reusable
        if rejection is not None:
            raise RequestError(**rejection)
        return result

    def _send_and_receive(self, task: object, kill_count_at_call: int) -> _TaskResult:
        """Send a task to the child process, which is started if there is none, and wait for the result.

        A child reads pickles from its socket: once the setup message, then tasks. It answers each task with a result.
        `kill_count_at_call`: `_kill_count` when this call was made. If the count has grown, the call was given up while
        it waited for a thread. Raises EOFError then, and EOFError or OSError if the child ends.
        """
        with self._start_lock:
            if self._kill_count != kill_count_at_call:
                raise EOFError("killed before it was started")
            ended_stream = None
            needs_child = self.child is None or self.child.poll() is not None
            if needs_child:
                ended_stream = self._stream
                self._start()
            stream = self._stream
        # The socket is used without the lock: it may block until the child is killed, and `kill` needs the lock.
        if needs_child:
            _close_stream(ended_stream)
            pickle.dump(self._setup_message, stream)
        pickle.dump(task, stream)
        stream.flush()
        task_result: _TaskResult = pickle.load(stream)
        return task_result

    def _start(self) -> None:
        self.child, parent_socket = start_child("prompts.worker_pool")
        with parent_socket:
            self._stream = parent_socket.makefile("rwb")

    def kill(self) -> None:
        """Kill the process. It is reaped later, because freeing gigabytes takes time."""
        self._killed_children = [child for child in self._killed_children if child.poll() is None]
        with self._start_lock:
            self._kill_count += 1
            if self.child is not None:
                self.child.kill()
                self._killed_children.append(self.child)
                self.child = None

    def reap(self) -> None:
        """Kill the process and wait for its end."""
        self.kill()
        for child in self._killed_children:
            child.wait()
        _close_stream(self._stream)


def _close_stream(stream: Any) -> None:
    """Close the socket to a process that has ended; None: there is none."""
    if stream is not None:
        with contextlib.suppress(OSError):  # a task in the buffer that was never sent
            stream.close()


class WorkerPool:
    """The worker processes of one server, and the calls that wait for a free one."""

    def __init__(self, setup: WorkerSetup, process_count: int, memory_bytes: int) -> None:
        """`memory_bytes` is the most memory of one process."""
        self._executor = ThreadPoolExecutor(process_count, thread_name_prefix="worker-pool")
        self.processes = [WorkerProcess(setup, memory_bytes, self._executor) for _ in range(process_count)]
        self._waiters: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}
        """Calls that wait for a process, by tenant, the next one first."""

    async def run(self, work: Callable[[WorkerProcess], Awaitable[T]], tenant: str = "") -> T:
        """Wait for a free worker process, call `work` with it, and return the result. Tenants take turns.

        The process is killed if `work` is cancelled or raises another error than RequestError, and if it has too little
        memory left for another call.
        """
        process = await self._acquire(tenant)
        has_failed = True
        try:
            result = await work(process)
            has_failed = False
            return result
        except RequestError:
            has_failed = False
            raise
        finally:
            process.last_used_s = time.monotonic()
            if has_failed or not process.is_reusable:
                process.kill()
            self._release(process)

    async def _acquire(self, tenant: str) -> WorkerProcess:
        for process in self.processes:
            if not process.is_busy:
                process.is_busy = True
                return process
        waiter: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(tenant, deque()).append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(waiter.result())
            raise

    def _release(self, process: WorkerProcess) -> None:
        """Hand a process to the next waiting call. Tenants take turns."""
        while self._waiters:
            tenant = next(iter(self._waiters))
            queue = self._waiters.pop(tenant)
            waiter = queue.popleft()
            if queue:
                self._waiters[tenant] = queue
            if not waiter.done():
                waiter.set_result(process)
                return
        process.is_busy = False

    def close_idle(self, idle_since_s: float) -> None:
        """Kill processes that were idle since `idle_since_s` (`time.monotonic`)."""
        for process in self.processes:
            if not process.is_busy and process.last_used_s < idle_since_s:
                process.kill()

    def close(self) -> None:
        for process in self.processes:
            process.reap()
        self._executor.shutdown(wait=False, cancel_futures=True)


def main(fd: int) -> int:
    """Run tasks in a worker process until the parent process closes its socket `fd`; return the exit status.

    The first message on the socket has the memory limit and the setup function; each later message is a task.
    """
    os.nice(NICE)
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb", buffering=1 << 20) as stream:
        try:
            memory_bytes, (setup, setup_arguments) = pickle.load(stream)
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps
            setup_result = setup(*setup_arguments)
            while True:
                _serve_task(stream, setup_result, memory_bytes)
        except (EOFError, OSError):
            return 0
        except MemoryError:
            return 1


def _serve_task(stream: Any, setup_result: Any, memory_bytes: int) -> None:
    alarm_s, work, arguments = pickle.load(stream)
    rejection, result = None, None
    signal.alarm(alarm_s)  # its signal has no handler and ends the process
    try:
        result = work(setup_result, *arguments)
    except RequestError as error:
        rejection = vars(error)
    signal.alarm(0)
    del arguments
    pickle.dump(_TaskResult(rejection, result, read_resident_bytes() < memory_bytes // 2), stream)
    stream.flush()
