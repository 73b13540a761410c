"""Circuit breaker: takes a failing worker out, and lets one request try the worker after a pause."""

from __future__ import annotations

from typing import Final

from router.decide.config import HealthConfig
from router.decide.messages import FailureKind, RouteRequest
from router.decide.workers import Worker, WorkerState

_FAILURES_OF_HEALTHY_WORKERS: Final = frozenset((
    FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.NOT_SERVED, FailureKind.LOST, FailureKind.SOURCE,
))  # fmt: skip


class CircuitBreaker:
    """Decides from failures and successes when a worker gets no requests for a while. It stores no worker itself."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config

    def record_failure(
        self, worker: Worker, now: float, *, reason: str, is_fatal: bool = False, is_probe: bool = False
    ) -> None:
        """Count a failure of a worker, which may take the worker down.

        `is_fatal`: one such failure is enough. `is_probe`: the request failed that was to show whether the worker
        serves again. Other failures of a worker that is down do not lengthen the pause.
        """
        worker.failures += 1
        was_up = worker.health is WorkerState.UP
        is_enough = is_fatal or worker.failures >= self._config.failures_to_open
        if is_probe or (was_up and is_enough):
            self.open(worker, now, reason, is_longer=is_probe)

    def record_refusal(self, worker: Worker, now: float) -> None:
        """Avoid a worker that refused a request; for twice as long as the last time if it served nothing since."""
        if now < worker.avoided_until_s:
            return
        last_pause_s, first_pause_s = worker.refusal_pause_s, self._config.open_s
        worker.refusal_pause_s = min(last_pause_s * 2, self._config.open_s_max) if last_pause_s else first_pause_s
        worker.avoided_until_s = now + worker.refusal_pause_s

    def open(self, worker: Worker, now: float, reason: str, *, is_longer: bool = False) -> None:
        """Take a worker down until a pause is over. `is_longer`: the pause is twice the last one."""
        first_s = worker.open_s or self._config.open_s
        worker.open_s = min(first_s * 2, self._config.open_s_max) if is_longer else first_s
        worker.open_until_s = now + worker.open_s
        worker.health, worker.health_reason = WorkerState.DOWN, reason
        worker.probe = None

    def record_success(self, worker: Worker) -> bool:
        """Record an answer or a good health check; return whether the worker may get requests again."""
        worker.failures = 0
        worker.probe = None
        worker.is_lost = False
        if worker.health is WorkerState.UP:
            return False
        worker.open_s = 0.0
        worker.health, worker.health_reason = WorkerState.UP, ""
        return worker.state is WorkerState.UP

    def try_half_open(self, worker: Worker, now: float) -> bool:
        """Let one request try a worker that is down, if its pause is over; return whether that is so."""
        is_pause_over = worker.state is WorkerState.DOWN and now >= worker.open_until_s
        if is_pause_over:
            worker.health, worker.probe = WorkerState.PROBING, None
        return is_pause_over


def is_worker_fault(kind: FailureKind, request: RouteRequest, worker: Worker, silent_since_s: float) -> bool:
    """Return whether a failure of a request counts against its worker, so that no client can take a worker out.

    A client chooses how long a whole answer takes. A silent stream is the worker's fault where the worker answered no
    other request since `silent_since_s`.
    """
    if kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        return request.is_streaming and worker.last_answer_at_s <= silent_since_s
    return kind not in _FAILURES_OF_HEALTHY_WORKERS
