"""What a request can be sent to, and how busy it is: the values that the tracker keeps and the policy reads.

A **target** is a worker, or one data-parallel rank of it. No book is kept here: only the tracker changes a target; what
is derived (slow, Q's parts) is recomputed by `refresh` and `requeue` after each change.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from router.decide.config import ServiceModel
from router.decide.learn import PoolSpeeds, Taught
from router.index.protocol import HolderId


class RequestPhase(enum.Enum):
    """PREFILL until the first token was seen (or estimated), then DECODE."""

    PREFILL = 0
    DECODE = 1


class InFlight:
    """One routed request."""

    __slots__ = (
        "cached_tokens",
        "context_tokens",
        "interval",
        "phase",
        "prefill_s",
        "prompt_tokens",
        "request_id",
        "routed_s",
        "stream",
        "target",
    )

    def __init__(
        self,
        request_id: str,
        target: Target,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        prefill_s: float,
        routed_s: float,
        stream: bool,
    ) -> None:
        self.request_id = request_id
        self.target = target
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.prefill_s = prefill_s
        self.routed_s = routed_s
        self.stream = stream
        self.phase = RequestPhase.PREFILL
        self.context_tokens = 0
        self.interval: Interval | None = None
        """Where its first token went, for learning."""


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """One router's part of a target's load, as it tells its peers. Times are on the receiver's clock."""

    prefill_s: float = 0.0
    prefill_requests: int = 0
    oldest_prefill_s: float = 0.0
    oldest_routed_s: float = 0.0
    head_since_s: float = 0.0
    decode_requests: int = 0
    decode_context: int = 0
    utilisation: float = 0.0
    updated_s: float = 0.0
    prefill_rate: float | None = None
    """The `a` that its seconds were predicted with, where it told: two routers may have learned differently so far."""


class Target:
    """The load of one target. Read by the policy; changed only by the `LoadTracker`."""

    __slots__ = (
        "arrivals_scaled",
        "busy_since_s",
        "context_tokens",
        "decode_context_s",
        "decode_request_s",
        "decode_requests",
        "head_since_s",
        "holder",
        "name",
        "open_interval",
        "peer",
        "prefill_rate",
        "prefill_s",
        "prefills",
        "progress_cap",
        "progress_max_s",
        "quadratic_rate",
        "rank",
        "requests",
        "service",
        "slow",
        "speeds",
        "step_prefill_s",
        "step_s",
        "utilisation_scaled",
        "waiting_s",
        "worker_id",
    )

    def __init__(
        self, worker_id: str, rank: int | None, holder: HolderId, speeds: PoolSpeeds, progress_cap: float
    ) -> None:
        self.worker_id = worker_id
        self.rank = rank
        self.holder = holder
        self.name = worker_id if rank is None else f"{worker_id}#{rank}"
        self.speeds = speeds
        speeds.join(self.name)
        self.prefills: dict[str, InFlight] = {}
        """Routed and without a first token, in the order of routing."""
        self.prefill_s = 0.0
        self.head_since_s = -math.inf
        """When the worker turned to its present oldest prefill: the last first token seen, or the end of one ahead."""
        self.requests = 0
        self.decode_requests = 0
        self.context_tokens = 0
        self.slow = 1.0
        self.utilisation_scaled = 0.0
        self.arrivals_scaled = 0.0
        """Requests routed here per second, averaged and scaled like `utilisation_scaled`."""
        self.peer: SharedLoad | None = None
        """The sum of what other routers have in flight here."""
        self.open_interval: Interval | None = None
        self.progress_cap = progress_cap
        self.waiting_s = 0.0
        """Sum of P of everything without a first token, other routers' included; Q before progress."""
        self.busy_since_s = 0.0
        """When the worker turned to the oldest of them."""
        self.progress_max_s = 0.0
        """What progress can be at most: a part of the oldest one's P."""
        self.teach(speeds.model(self.name))

    def teach(self, service: ServiceModel) -> None:
        """The worker is as fast as `service` says. Read once: these are looked at for every request."""
        self.service = service
        self.prefill_rate = service.prefill_s_per_token
        """a"""
        self.quadratic_rate = self.prefill_rate / (2.0 * service.quadratic_tokens)
        """a / (2 * Lq)"""
        self.step_s = service.step_s
        self.decode_request_s = service.decode_request_s
        self.decode_context_s = service.decode_context_s
        self.step_prefill_s = self.prefill_rate * service.step_tokens
        """What a step's prefill tokens take at an empty context."""
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from the service model and the decode load."""
        requests, context = self.decode_requests, self.context_tokens
        if self.peer is not None:
            requests += self.peer.decode_requests
            context += self.peer.decode_context
        step_overhead = self.step_s + self.decode_request_s * requests + self.decode_context_s * context
        self.slow = 1.0 + step_overhead / self.step_prefill_s

    def prefill_seconds(self, prompt_tokens: int, cached_tokens: int) -> float:
        """P."""
        quadratic = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic

    def queue_s(self, now: float) -> float:
        """Q: routed prefill that is still to be done, with the oldest one's progress taken off."""
        waiting = self.waiting_s
        if waiting == 0.0:
            return 0.0
        progress = (now - self.busy_since_s) / self.slow
        if progress > self.progress_max_s:
            progress = self.progress_max_s
        return waiting - progress if progress > 0.0 else waiting

    def requeue(self) -> None:
        """Recompute what `queue_s` reads, after what is in the queue changed."""
        since, oldest_s, oldest_routed_s = self.head_since_s, 0.0, math.inf
        if self.prefills:
            oldest = next(iter(self.prefills.values()))
            oldest_s, oldest_routed_s = oldest.prefill_s, oldest.routed_s
        self.waiting_s = self.prefill_s
        peer = self.peer
        if peer is not None and peer.prefill_s > 0.0:
            self.waiting_s += peer.prefill_s
            since = max(since, peer.head_since_s)
            if peer.oldest_routed_s < oldest_routed_s:
                oldest_s, oldest_routed_s = peer.oldest_prefill_s, peer.oldest_routed_s
        self.busy_since_s = max(since, oldest_routed_s)
        self.progress_max_s = min(self.progress_cap * oldest_s, self.waiting_s)


@dataclass(slots=True)
class Interval:
    """First tokens of one engine step, before they are learned from."""

    start_s: float
    end_s: float
    uncached_tokens: int
    quadratic: float
    decode_requests: float
    decode_context: float
    usable: bool
    taught: Taught | None = None
    """What was learned from it, once it was."""
