"""Settings of the router's core. docs/reference/price.md has their places in the price."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from options import Flag, Seconds, check_config
from simulation.steps import Count, NotNegative, Positive, StepTimes

Share = Annotated[float, Meta(ge=0, le=1)]
Rates = tuple[NotNegative, NotNegative, NotNegative, NotNegative]
Priority = Annotated[int, Meta(ge=1, le=2**31 - 1, title="N")]
TtftLimit = Annotated[float, Meta(gt=0, le=1e9, title="SECONDS")]


# fmt: off
@dataclass(frozen=True, slots=True)
class CostConfig:
    """Weights of the price that a request has on each worker; the worker with the lowest price gets it."""

    congestion_weight: Annotated[NotNegative, "Weight of new prefill against waiting, as the pool fills."] = 1.0
    utilisation_weight: Annotated[NotNegative, "Seconds of price for each unit of a worker's own utilisation."] = 0.1
    """This term spreads requests over workers with equal prices."""
    decode_weight: Annotated[NotNegative, "Weight of a second after the first token; before it: 1."] = 0.2
    tier_load_s_per_token: Annotated[Rates,
        "Seconds to fetch a cached token from GPU, CPU, STORAGE, REMOTE."] = (0.0, 2e-6, 2e-5, 4e-5)


@dataclass(frozen=True, slots=True)
class LearnConfig:
    """Online estimation of each worker's step times."""

    enabled: Annotated[bool, "Learn how fast workers are."] = True


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Expected speed of moving KV cache between two workers, until it is learned from real transfers.

    Transfers are only planned between workers that say that they support them.
    """

    gb_s: Annotated[Positive, "Rate at which KV comes from a worker that names none, in 1e9 bytes a second."] = 5.0
    floor_s: Annotated[NotNegative, "Time of a transfer besides its bytes."] = 0.01


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Settings of requests that wait in the router, and of the longest wait for a first token.

    There are two reasons to wait. With `fair`, a request waits for its tenant's turn while all workers are busy. With
    `background_priority`, one of at least that priority waits until a worker is idle. Each has its own places in the
    queue and its own longest wait.

    The texts in the annotations are the help of the command line; strings below a field are notes for programmers.
    """

    enqueue_above_s: Annotated[NotNegative, "Queue a request that would wait longer than this at its worker."] = 0.2
    """So much work at a worker keeps its engine busy while the router sends the next request."""
    fair: Annotated[bool, Flag("--fair/--no-fair"),
        "Queue requests while all workers are busy; the least served API key goes first."
    ] = False
    """Clients without API keys are told apart by their addresses. docs/how-to/share-between-tenants.md explains it."""
    background_priority: Annotated[Priority | None,
        Flag("--background-priority"),
        "Requests of priority N and above wait until a worker is idle. [default: none]",
        "A worker is idle when it has nothing to prefill."] = None
    background_running: Annotated[Count, Flag("--background-running"),
        "Most background requests on a worker at once."] = 4
    background_wait_s_max: Annotated[Seconds,
        "Longest wait of a background request; after it the cheapest worker gets it."] = 600.0
    ttft_s_max: Annotated[TtftLimit | None, Flag("--max-ttft"),
        "Answer 429 where the predicted time to first token is longer. [default: never]",
        "The answer's Retry-After says when the request would be accepted."] = None
    """A client can set a shorter limit for its request with the header x-blockcast-ttft-ms."""
    requests_max: Annotated[Count,
        "Most requests in the queue, and as many of the background; more are answered 429."] = 4096
    wait_s_max: Annotated[Seconds,
        "Longest wait in the queue of a request without a deadline."] = 120.0


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Limits of retries, which happen only before the first byte of the answer, on a worker not yet tried."""

    attempts_max: Annotated[Count, "Workers that a request is sent to, one after the other."] = 3
    budget_ratio: Annotated[Share, "Retries of a key, or an address, for each of its requests."] = 0.2
    budget_min: Annotated[int, Meta(ge=0, le=10**12), "Retries of a key, or an address, on top of that."] = 10


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Settings of the circuit breaker of each worker: a worker that keeps failing gets no requests for a while."""

    failures_to_open: Annotated[Count, "Consecutive failures after which a worker is broken."] = 3
    """A refused connection counts as all of them."""
    open_s: Annotated[Seconds, "First pause before a request may try it again; doubles each time."] = 1.0
    open_s_max: Annotated[Seconds, "Longest such pause."] = 30.0
    stalled_s: Annotated[Seconds, "Avoid a worker if its streams stand still so long, and others' do not."] = 10.0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Settings of the router's core, which chooses a worker for each request."""

    policy: Annotated[Literal["kv", "round_robin", "least_requests", "random", "sticky"], Flag(),
        "How workers are chosen; kv is the price of docs/reference/price.md."] = "kv"
    policy_function: Annotated[str | None, Flag(metavar="MODULE:NAME"),
        "Your own function that chooses, as in examples/own_policy.py."] = None
    service: StepTimes = field(default_factory=StepTimes)
    cost: CostConfig = field(default_factory=CostConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    session_affinity: Annotated[bool, Flag(),
        "Keep a session on the worker that it began on, while that is up."] = False
    """It applies to every policy."""
    session_ttl_s: Annotated[Seconds, "How long a session is remembered after its last request."] = 3600.0
    sessions_max: Annotated[Count, "Most sessions that are remembered."] = 100_000
    pin_grace_s: Annotated[NotNegative, "Seconds that a finished request's prefix still counts as cached."] = 0.25
    """Events arrive milliseconds after their answer. Until then, only this pin counts the new prefix as cached.
    A longer time would count prefixes as cached that the worker has evicted since."""
    requests_max: Annotated[Count, Flag("--max-in-flight"),
        "Most requests in flight or queued; more are answered 429."] = 100_000

    def __post_init__(self) -> None:
        check_config(self)
