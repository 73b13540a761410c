"""Every number the router's cores can be tuned by, in frozen dataclasses that are parsed once at the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

POLICIES = ("kv", "round_robin", "least_requests", "random", "sticky")


class ConfigError(ValueError):
    """A setting has a value that cannot work; the message names it and says what is expected."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """How long a worker takes: the prior that learning starts from. docs/routing.md's symbols are in brackets."""

    prefill_s_per_token: float = 1e-4
    """[a] seconds to prefill one token at an empty context."""
    quadratic_tokens: float = 50_000.0
    """[Lq] context length at which a token costs twice what it costs at an empty context."""
    step_s: float = 0.012
    """[t0] fixed time of an engine step."""
    decode_request_s: float = 50e-6
    """[c] time a decoding request adds to a step."""
    decode_context_s: float = 2.5e-8
    """[d] time a token of decode context adds to a step."""
    step_tokens: int = 2048
    """[step_budget] prefill tokens of one step."""


@dataclass(frozen=True, slots=True)
class CostConfig:
    """The weights of the cost."""

    beta_scale: float = 1.0
    """[beta = beta_scale * U * (1 + Q / P) / max(1 - U, 0.1); the pool's means of U and P, its shortest Q] weight of
    new prefill against waiting, as the pool fills: how many later requests it will delay."""
    beta_max: float = 50.0
    beta_min: float = 0.1
    """Floor of beta: on an idle pool, prefilling a prefix twice must save this part of it to be worth it."""
    utilisation_weight: float = 0.1
    """Seconds of price for each unit of a worker's own utilisation: spreads what is otherwise equal."""
    utilisation_window_s: float = 60.0
    decode_weight: float = 0.0
    """Optional 0.05: price for prefilling where many are decoding (end-to-end time against first token)."""
    tie_s: float = 1e-6
    """Prices closer than this are a tie, and ties rotate."""
    load_s_per_token: tuple[float, float, float, float] = (0.0, 2e-6, 2e-5, 4e-5)
    """Seconds to fetch a cached token from GPU, CPU, STORAGE, REMOTE."""
    progress_cap: float = 0.95
    """The oldest prefill never counts as more than this part done before its first token is seen."""


@dataclass(frozen=True, slots=True)
class LearnConfig:
    """Online estimation of each worker's ServiceModel."""

    enabled: bool = True
    half_life: float = 300.0
    """First tokens after which an observation weighs half."""
    prior_weight: float = 8.0
    """What the rest of the pool is like counts as this many observations of a worker."""
    err_low: float = 0.9
    """The prefill rate used is this part of the estimate: half of it costs 2 %, twice it 9 %."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The reordering queue. `enabled` is off by default because it trades the tail under overload for the mean."""

    enabled: bool = False
    hold_above_s: float = 0.2
    """Hold a request when the winner's slow * Q is longer than this: enough to keep an engine busy for a step."""
    gamma: float = 0.1
    """Held requests are tried in ascending P * slow - gamma * waited."""
    tries: int = 24
    """Held requests tried at each first token and each tick."""
    requests_max: int = 4096
    wait_s_max: float = 120.0
    """Deadline of a held request that brings none: it is then forwarded to the cheapest worker."""
    tick_s: float = 0.05


@dataclass(frozen=True, slots=True)
class WorkingSetConfig:
    """What crowding a worker's cache costs (router/decide/working_set.py)."""

    enabled: bool = True
    live_s: float = 90.0
    """A prompt that was sent within so many seconds is expected to come back."""
    reuse_max: float = 5.0
    """The times that a computed token is used again are learned, but never taken to be more."""
    reuse_memory: float = 500.0
    """Requests over which they are averaged."""
    chunk_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Retries happen only before the first byte, on a worker not yet tried."""

    attempts_max: int = 3
    budget_ratio: float = 0.2
    """Retries allowed per request routed, over a sliding window, on top of `budget_min`."""
    budget_min: int = 10


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """The circuit breaker of each worker."""

    failures_to_open: int = 3
    """Consecutive failures after which a worker is broken; a refused connection counts as all of them."""
    open_s: float = 1.0
    """First pause before a probe is let through; doubles up to `open_s_max`."""
    open_s_max: float = 30.0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """All of the above. Unknown keys are rejected by `parse`."""

    policy: str = "kv"
    service: ServiceModel = field(default_factory=ServiceModel)
    cost: CostConfig = field(default_factory=CostConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    working_set: WorkingSetConfig = field(default_factory=WorkingSetConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    session_affinity: bool = False
    """Keep a session on its worker while it is eligible, whatever the policy."""
    session_ttl_s: float = 3600.0
    sessions_max: int = 100_000
    pin_grace_s: float = 0.25
    """How long a finished request's prefix still counts as cached: the answer races its last events by milliseconds.
    While it counts, what was evicted meanwhile is promised all the same: no longer, then, than a slow link needs."""
    requests_max: int = 100_000
    """Requests in flight or held; more are refused with 429."""
    history_tokens: int = 500_000
    """Assumed cache of a worker without events that does not advertise its capacity."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: got {self.policy!r}, expected one of {', '.join(POLICIES)}")
        _positive("pin_grace_s", self.pin_grace_s, allow_zero=True)
        _positive("requests_max", self.requests_max)
        _positive("queue.requests_max", self.queue.requests_max)
        _positive("queue.wait_s_max", self.queue.wait_s_max)
        _positive("queue.tick_s", self.queue.tick_s)
        _positive("service.prefill_s_per_token", self.service.prefill_s_per_token)
        _positive("service.quadratic_tokens", self.service.quadratic_tokens)
        _positive("service.step_tokens", self.service.step_tokens)
        _positive("working_set.live_s", self.working_set.live_s)
        _positive("working_set.reuse_memory", self.working_set.reuse_memory)
        _positive("working_set.chunk_tokens", self.working_set.chunk_tokens)
        _positive("cost.utilisation_window_s", self.cost.utilisation_window_s)
        _positive("retry.attempts_max", self.retry.attempts_max)
        _positive("health.failures_to_open", self.health.failures_to_open)

    @classmethod
    def parse(cls, settings: dict[str, Any]) -> CoreConfig:
        """Build from nested dicts, as JSON or `--set queue.enabled=true` gives them. Raises ConfigError."""
        parts = {
            "service": ServiceModel,
            "cost": CostConfig,
            "learn": LearnConfig,
            "queue": QueueConfig,
            "working_set": WorkingSetConfig,
            "retry": RetryConfig,
            "health": HealthConfig,
        }
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in known:
                raise ConfigError(f"{key}: unknown setting, expected one of {', '.join(sorted(known))}")
            if key in parts:
                values[key] = _part(key, parts[key], value)
            else:
                values[key] = value
        return cls(**values)


def _part(name: str, kind: Any, settings: Any) -> Any:
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}: got {settings!r}, expected an object")
    known = {f.name for f in fields(kind)}
    for key in settings:
        if key not in known:
            raise ConfigError(f"{name}.{key}: unknown setting, expected one of {', '.join(sorted(known))}")
    return kind(**settings)


def _positive(name: str, value: float, *, allow_zero: bool = False) -> None:
    if value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(f"{name}: got {value!r}, expected a number {'>=' if allow_zero else '>'} 0")
