"""Queue of work that another thread gives to the thread of the steps, which does it between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class _Job(NamedTuple):
    """A function that copies bytes, and the future of its result."""

    work: Callable[[], Any]
    byte_count: int
    future: Future[Any]


class StepJobs:
    """A queue of jobs. One thread submits, and the thread of the steps runs them in order."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self.on_submit: Callable[[], None] = lambda: None
        """Called on the thread that has submitted a job, to wake the thread of the steps."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def submit(self, work: Callable[[], Result], byte_count: int) -> Future[Result]:
        """Queue `work`, which copies `byte_count` bytes, and return the future of its result.

        If the future is cancelled before the work begins, the work is skipped.
        """
        future: Future[Result] = Future()
        self._jobs.append(_Job(work, byte_count, future))
        self.on_submit()
        return future

    def run(self, bytes_max: int) -> None:
        """Run the oldest jobs until they have copied at least `bytes_max` bytes, or none is left.

        The thread of the step loop calls this between steps. If a job raises, its future gets the error, and this
        method raises it, too. Later jobs stay queued.
        """
        copied_bytes = 0
        while self._jobs and copied_bytes < bytes_max:
            job = self._jobs.popleft()
            is_cancelled = not job.future.set_running_or_notify_cancel()
            if is_cancelled:
                continue
            copied_bytes += job.byte_count
            try:
                result = job.work()
            except Exception as error:
                job.future.set_exception(error)
                raise
            job.future.set_result(result)
