"""The router's core, sans IO: stimuli in, instructions out.

Every method that changes state takes `now` (seconds of one monotonic clock, never going back) and returns the
instructions that follow from it, in order; the shell performs them. The core is single-threaded: the shell calls it
from one thread. The index behind it may be fed by another.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import CoreConfig
from router.messages import Decision, FailureKind, Forward, Hold, Instruction, Refuse, RouteRequest, Usage
from router.view import PrefixIndex
from router.workers import ServedModel, Worker, WorkerSpec


class RouterCore:
    """Interface agreed with the edge; see each method."""

    def __init__(self, index: PrefixIndex, config: CoreConfig, *, seed: int = 0) -> None: ...

    # Workers -----------------------------------------------------------------------------------------------------
    def add_worker(self, spec: WorkerSpec, now: float, *, up: bool = True) -> Worker:
        """Register (or update, same worker_id) a worker and its holders in the index."""

    def remove_worker(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget it at once. Its requests in flight stay known until the edge reports their end."""

    def worker_up(self, worker_id: str, now: float) -> list[Instruction]: ...

    def worker_down(self, worker_id: str, now: float, reason: str) -> list[Instruction]:
        """Out of the candidates and out of the index at once."""

    def drain(self, worker_id: str, now: float, *, on: bool = True) -> list[Instruction]: ...

    @property
    def workers(self) -> dict[str, Worker]: ...

    def resolve_model(self, name: str) -> ServedModel | None:
        """What a client's model name means (base model, LoRA), or None where no worker serves it."""

    # A request's life --------------------------------------------------------------------------------------------
    def route(self, request: RouteRequest, now: float, *, explain: bool = False) -> Forward | Hold | Refuse: ...

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """What `route` would decide, with every candidate's terms; changes nothing."""

    def first_token(self, request_id: str, now: float) -> list[Instruction]:
        """The first byte of the answer's body came (streams only)."""

    def progress(self, request_id: str, output_tokens: int) -> None:
        """Tokens generated so far, where the edge counts them (SSE chunks): refines decode context."""

    def finished(self, request_id: str, usage: Usage | None, now: float) -> list[Instruction]: ...

    def failed(self, request_id: str, kind: FailureKind, now: float) -> list[Instruction]:
        """The first instruction is about this request: Forward (retry), Hold or Refuse (give up)."""

    def aborted(self, request_id: str, now: float) -> list[Instruction]:
        """The client left, in flight or held; the edge cancels upstream by itself."""

    def tick(self, now: float) -> list[Instruction]:
        """Call at `next_tick()` or a little later: deadlines, held requests, grace periods, breakers."""

    def next_tick(self) -> float | None: ...

    # Seeing ------------------------------------------------------------------------------------------------------
    def snapshot(self, now: float) -> CoreSnapshot: ...


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One row of `/workers`."""

    worker_id: str
    url: str
    state: str
    state_reason: str
    models: list[str]
    roles: list[str]
    cache_view: str
    prefilling: int
    decoding: int
    queue_s: float
    utilisation: float
    slow: float
    learned: dict[str, float]
    """prefill_s_per_token, quadratic_tokens, step_s, decode_factor, observations."""
    predicted_cached_tokens: int
    reported_cached_tokens: int
    alarms: list[str]


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Everything `/workers` and `/metrics` show of the core."""

    workers: list[WorkerSnapshot]
    held: int
    in_flight: int
    counters: dict[str, int]
    """routed, held, refused, retried, finished, failed, aborted, deadline_forwards ..."""
