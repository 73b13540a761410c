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
        """Readable once there is a job: for a thread that sleeps on sockets, and reads what woke it."""
        self.wake_socket.setblocking(False)
        self._waking_socket.setblocking(False)
        self.arrival: Future[None] = Future()
        """Done once there is a job: for a thread that sleeps on futures. Another one after each `run`."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def submit(self, work: Callable[[], Result], byte_count: int) -> Future[Result]:
        """Have `work` done, which copies so many bytes. If its future is cancelled before, it is not done."""
        future: Future[Result] = Future()
        self._jobs.append(_Job(work, byte_count, future))
        if not self.arrival.done():
            self.arrival.set_result(None)
        with suppress(BlockingIOError):  # there are bytes enough to wake the other thread
            self._waking_socket.send(b"\0")
        return future

    def run(self, bytes_max: int) -> None:
        """Do the jobs that came first, until they have copied so many bytes.

        The error of a job goes to its future, and is raised. Later jobs are then left for the next call.
        """
        self.arrival = Future()
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
