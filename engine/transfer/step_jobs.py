"""Work that another thread has for the thread of the steps: done between steps, a bounded number of bytes at a time."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class _Job(NamedTuple):
    work: Callable[[], Any]
    byte_count: int
    future: Future[Any]


class StepJobs:
    """A queue of jobs. One thread submits, and the thread of the steps runs them in order."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self.wake_socket, self._waking_socket = socket.socketpair()
        """Readable after a job was submitted, for a thread that waits on sockets. That thread must read from it."""
        self.wake_socket.setblocking(False)
        self._waking_socket.setblocking(False)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def submit(self, work: Callable[[], Result], byte_count: int) -> Future[Result]:
        """Queue `work`, which copies `byte_count` bytes. It is skipped if the returned future is cancelled before."""
        future: Future[Result] = Future()
        self._jobs.append(_Job(work, byte_count, future))
        with suppress(BlockingIOError):  # the socket is full, so it wakes the other thread anyway
            self._waking_socket.send(b"\0")
        return future

    def run(self, bytes_max: int) -> None:
        """Run the oldest jobs until they have copied at least `bytes_max` bytes, or none is left.

        If a job raises, its future gets the error, and this raises it too. Later jobs are left for the next call.
        """
        copied_bytes = 0
        while self._jobs and copied_bytes < bytes_max:
            job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                copied_bytes += job.byte_count
                try:
                    result = job.work()
                except Exception as error:
                    job.future.set_exception(error)
                    raise
                job.future.set_result(result)

    def close(self) -> None:
        self.wake_socket.close()
        self._waking_socket.close()
