"""The workers a router knows: identity, what they serve, and whether they may be given work.

Owns each worker's state and circuit breaker. Refuses to know sockets (the edge probes and reports), load (the tracker)
and caches (the index). Invariants: only an UP worker, or one probe at a time on a PROBING one, is eligible.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.decide.config import HealthConfig
from router.decide.messages import FailureKind, RouteRequest
from router.index.protocol import HolderId

BLOCKCAST, VLLM = "blockcast", "vllm"
"""Engines of which the router knows more."""


class WorkerState(str, enum.Enum):
    """UP takes work. STARTING was never reached yet. DRAINING finishes what it has. SLEEPING has given its memory back
    until its operator wakes it. DOWN is broken; PROBING is DOWN whose pause is over, so that one request may try it."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    DOWN = "down"
    PROBING = "probing"


class CacheView(str, enum.Enum):
    """Where the router's picture of a worker's cache comes from."""

    EVENTS = "events"
    APPROXIMATE = "approximate"
    """No events: what this router sent there, least recently used first out, at the advertised capacity."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name a worker answers to."""

    name: str
    base: str
    """The model whose KV it shares events and index with; equals `name` unless it is an alias or a LoRA."""
    lora: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What an operator or discovery says about a worker."""

    worker_id: str
    """Stable name shown everywhere, by default host:port of the URL."""
    url: str
    models: tuple[ServedModel, ...] = ()
    roles: frozenset[str] = frozenset()
    ranks: int = 1
    """Data-parallel ranks, each a holder of its own."""
    engine: str = ""
    """`owned_by` of its models: BLOCKCAST, VLLM ..., or empty."""
    cache_view: CacheView = CacheView.EVENTS
    cache_tokens: int | None = None
    """Advertised capacity of the KV cache, all ranks together; None where unknown."""
    host_tokens: int | None = None
    """Of host memory under it, whose blocks its events tell of as well."""
    max_num_seqs: int | None = None
    """Sequences that each rank runs at once (`max_num_seqs`); None where unknown: it is then learned."""
    block_size: int | None = None
    is_shortest_first: bool = False
    """Of the prompts it was sent, it computes the one with the least left first; else the one that came first."""


@dataclass(slots=True)
class Worker:
    """A worker as the core keeps it. `holders[rank]` names its streams in the index."""

    spec: WorkerSpec
    health: WorkerState
    """STARTING, UP, DOWN or PROBING: its state, but for what its operator did."""
    models: dict[str, ServedModel] = field(default_factory=dict)
    """What it serves, by name."""
    holders: list[HolderId] = field(default_factory=list)
    failures: int = 0
    """Consecutive."""
    open_until_s: float = 0.0
    open_s: float = 0.0
    probe: str | None = None
    """The request that probes it."""
    last_answer_at_s: float = -math.inf
    """When a request's answer began, went on or ended there last."""
    health_reason: str = ""
    """Why it is DOWN."""
    is_drained: bool = False
    """An operator of the router wants it to be given nothing new."""
    is_asleep: bool = False
    """Its engine says that it sleeps."""

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def state(self) -> WorkerState:
        if self.is_drained:
            return WorkerState.DRAINING
        if self.is_asleep and self.health in (WorkerState.UP, WorkerState.PROBING):
            return WorkerState.SLEEPING
        return self.health

    @property
    def state_reason(self) -> str:
        if self.is_drained:
            return "drained by an operator"
        return "its engine sleeps" if self.state is WorkerState.SLEEPING else self.health_reason

    @property
    def is_down(self) -> bool:
        return self.health in (WorkerState.DOWN, WorkerState.PROBING)


class CircuitBreaker:
    """The circuit breaker's rules, over `Worker`s that it mutates and never stores."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config

    def record_failure(
        self, worker: Worker, now: float, *, reason: str, is_fatal: bool = False, is_probe: bool = False
    ) -> bool:
        """Count a failure; True where it took the worker down just now. `probe`: it is the probe's. What was sent
        before a worker went down and fails after it tells nothing new: of one incident there is one pause."""
        worker.failures += 1
        was_up = worker.health is WorkerState.UP
        if is_probe or (was_up and (is_fatal or worker.failures >= self._config.failures_to_open)):
            self.open(worker, now, reason, is_longer=is_probe)
        return was_up and worker.health is WorkerState.DOWN

    def open(self, worker: Worker, now: float, reason: str, *, is_longer: bool = False) -> None:
        """Open the breaker: nothing is sent until its pause is over. `is_longer`: a probe failed, the pause doubles."""
        first_s = worker.open_s or self._config.open_s
        worker.open_s = min(first_s * 2, self._config.open_s_max) if is_longer else first_s
        worker.open_until_s = now + worker.open_s
        worker.health, worker.health_reason = WorkerState.DOWN, reason
        worker.probe = None

    def record_success(self, worker: Worker) -> bool:
        """An answer or a health check came: close the breaker; True where the worker may be given work again."""
        worker.failures = 0
        worker.probe = None
        if worker.health is WorkerState.UP:
            return False
        worker.open_s = 0.0
        worker.health, worker.health_reason = WorkerState.UP, ""
        return worker.state is WorkerState.UP

    def try_half_open(self, worker: Worker, now: float) -> bool:
        """Let a probe through where the pause is over; True where that is so now."""
        is_over = worker.state is WorkerState.DOWN and now >= worker.open_until_s
        if is_over:
            worker.health, worker.probe = WorkerState.PROBING, None
        return is_over


def is_worker_fault(kind: FailureKind, request: RouteRequest, worker: Worker, silent_since_s: float) -> bool:
    """Return whether a failure of a request counts against its worker, so that no client can take a worker out.

    A client chooses how long a whole answer takes. A silent stream is the worker's fault where the worker answered no
    other request since `silent_since_s`.
    """
    if kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        return request.is_streaming and worker.last_answer_at_s <= silent_since_s
    return kind not in (FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.LOST)


def find_unusable_reason(worker: Worker) -> str | None:
    """The reason a worker takes no new work, or None."""
    if worker.state is WorkerState.UP:
        return None
    if worker.state is WorkerState.PROBING:
        return None if worker.probe is None else "probing"
    return str(worker.state.value)


def merge_models(workers: Iterable[Worker]) -> dict[str, ServedModel]:
    """Every name some worker not DOWN serves, with the longest context any of them offers."""
    models: dict[str, ServedModel] = {}
    for worker in workers:
        if worker.state in (WorkerState.DOWN, WorkerState.STARTING):
            continue
        for model in worker.models.values():
            longest = models.get(model.name)
            if longest is None or (model.max_model_len or 0) > (longest.max_model_len or 0):
                models[model.name] = model
    return models
