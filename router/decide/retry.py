"""Requests that the core knows, and how often each may be tried again."""

from __future__ import annotations

from dataclasses import dataclass

from router.decide.config import RetryConfig
from router.decide.messages import Decision, FailureKind, Refuse, RouteRequest

_BUDGET_TIMES = 10.0
"""The retry budget grows to at most so many times its least."""


@dataclass(slots=True)
class Live:
    """A request that is held or in flight."""

    request: RouteRequest
    arrived_s: float
    explain: bool
    """Whether its decisions carry every candidate's terms."""
    attempt: int = 0
    tried: frozenset[str] = frozenset()
    decision: Decision | None = None
    """Set while in flight."""
    first_token_seen: bool = False
    internal_errors: int = 0
    """Workers that answered 500."""


class RetryBudget:
    """Retries that may still be made: each request adds a part of one, so that a storm of failures is not doubled."""

    def __init__(self, config: RetryConfig) -> None:
        self._attempts_max, self._ratio = config.attempts_max, config.budget_ratio
        self._left = float(config.budget_min)
        self._most = _BUDGET_TIMES * max(config.budget_min, 1)

    def arrived(self) -> None:
        """A new request came."""
        self._left = min(self._left + self._ratio, self._most)

    def take(self, attempt: int) -> bool:
        """Take one retry of a request that was tried `attempt` times; False where there is none left for it."""
        if attempt >= self._attempts_max or self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def gave_up(request_id: str, kind: FailureKind, retry_after_s: float) -> Refuse:
    """The answer where no other worker could be tried."""
    status, code = 502, "upstream_failed"
    if kind is FailureKind.OVERLOADED:
        status, code = 429, "upstream_overloaded"
    elif kind is FailureKind.TIMEOUT:
        status, code = 504, "upstream_timeout"
    message = f"The worker failed ({kind.value}) and no other could be tried."
    return Refuse(request_id, status, code, message, retry_after_s)
