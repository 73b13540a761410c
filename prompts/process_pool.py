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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from options.child_process import start_child
from options.system import read_resident_bytes
from prompts.errors import RequestError

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
        self.is_reusable = True
        """Whether no call was given up, and the process has memory left for another body."""
        self.child: subprocess.Popen[bytes] | None = None
        self._setup_message = (memory_bytes, setup)
        self._executor = executor
        self._stream: Any = None
        self._is_killed = False
        self._is_stream_in_use = False
        self._lock = threading.Lock()
        """Held while the child is started, so that `kill` finds every child, and while the stream is closed."""

    async def call(self, seconds_max: float, work: Callable[..., Any], *arguments: Any) -> Any:
        """Compute `work(setup_result, *arguments)` in the worker process, and return the result.

        `work`: function of a module, so that it can be pickled. `setup_result`: what the setup function of the process
        returned. A RequestError of `work` is raised here too. Raises WorkerProcessError if the call takes longer than
        `seconds_max`, or if the process dies.
        """
        alarm_s = math.ceil(seconds_max) + ALARM_MARGIN_S  # the process ends itself then, if this one cannot kill it
        task = (alarm_s, work, arguments)
        self.is_reusable = False  # if no result comes, because the call takes too long or is cancelled
        # A thread sends the task and receives the result, because both may be large.
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, self._send_and_receive, task)
        try:
            rejection, result, self.is_reusable = await asyncio.wait_for(future, seconds_max)
        except asyncio.TimeoutError:
            raise WorkerProcessError(f"not done within {seconds_max:g} s") from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerProcessError(f"{type(error).__name__}: {error}") from None
        if rejection is not None:
            raise RequestError(**rejection)
        return result

    def _send_and_receive(self, task: object) -> _TaskResult:
        """Send a task to the child process, which is started if there is none, and wait for the result.

        A child reads pickles from its socket: once the setup message, then tasks. It answers each task with a result.
        Raises EOFError or OSError if the child ends, or if it was to be killed while the task waited for a thread.
        """
        with self._lock:
            if self._is_killed:
                raise EOFError("killed before it was started")
            is_new = self.child is None
            if is_new:
                self.child, parent_socket = start_child("prompts.process_pool")
                with parent_socket:
                    self._stream = parent_socket.makefile("rwb")
            self._is_stream_in_use = True
        # The stream is used without the lock: it may block until the child is killed, and `kill` needs the lock.
        try:
            if is_new:
                pickle.dump(self._setup_message, self._stream)
            pickle.dump(task, self._stream)
            self._stream.flush()
            task_result: _TaskResult = pickle.load(self._stream)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.kill()  # now, because the error refers to this process and may keep it for long
            raise
        finally:
            self._release_stream()
        return task_result

    def _release_stream(self) -> None:
        with self._lock:
            self._is_stream_in_use = False
            if self._is_killed:
                self._close_stream()

    def is_running(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def kill(self) -> None:
        """Kill the child. A thread that waits for its result closes the stream."""
        with self._lock:
            self._is_killed = True
            if self.child is not None:
                self.child.kill()
                if not self._is_stream_in_use:
                    self._close_stream()

    def _close_stream(self) -> None:
        with contextlib.suppress(OSError):  # the rest of a message cannot be sent to a killed child
            self._stream.close()


class ProcessPool:
    """The worker processes of one server, and the calls that wait for a free one."""

    def __init__(self, setup: WorkerSetup, process_count: int, memory_bytes: int) -> None:
        """`memory_bytes` is the most memory of one process."""
        self._executor = ThreadPoolExecutor(process_count, thread_name_prefix="worker-pool")
        self._make_process = partial(WorkerProcess, setup, memory_bytes, self._executor)
        self.processes = [self._make_process() for _ in range(process_count)]
        self._killed_processes: list[WorkerProcess] = []
        """Killed processes that have not ended yet, because freeing gigabytes takes time."""
        self._waiters: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}
        """Users that wait for a process, by tenant, the next one first."""

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: str = "") -> AsyncIterator[WorkerProcess]:
        """Wait for a free worker process, which is the user's alone in an `async with` block. Tenants take turns.

        The process is killed afterwards if a call was given up, or if it has too little memory left for another call.
        """
        process = await self._wait_for_process(tenant)
        try:
            yield process
        finally:
            process.last_used_s = time.monotonic()
            self._release(process if process.is_reusable else self._replace(process))

    async def _wait_for_process(self, tenant: str) -> WorkerProcess:
        for process in self.processes:
            if not process.is_busy:
                process.is_busy = True
                has_died = process.child is not None and not process.is_running()
                return self._replace(process) if has_died else process
        waiter: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(tenant, deque()).append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(waiter.result())
            raise

    def _release(self, process: WorkerProcess) -> None:
        """Hand a process to the next user. Tenants take turns."""
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

    def _replace(self, process: WorkerProcess) -> WorkerProcess:
        """Kill a process, and return a new one in its place, which the next call starts."""
        process.kill()
        self._killed_processes = [killed for killed in (*self._killed_processes, process) if killed.is_running()]
        new_process = self._make_process()
        new_process.is_busy = process.is_busy
        self.processes[self.processes.index(process)] = new_process
        return new_process

    def close_idle(self, idle_since_s: float) -> None:
        """Kill processes that were idle since `idle_since_s` (`time.monotonic`)."""
        for process in list(self.processes):
            if process.is_running() and not process.is_busy and process.last_used_s < idle_since_s:
                self._replace(process)

    def close(self) -> None:
        for process in (*self.processes, *self._killed_processes):
            process.kill()
            if process.child is not None:
                process.child.wait()
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
