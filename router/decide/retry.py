"""When a failed attempt may be repeated, and what the client is told when it may not."""

from __future__ import annotations

from router.decide.config import RetryConfig
from router.decide.messages import FailureKind, Refuse

_BUDGET_TIMES = 10.0
"""The budget grows to at most so many times its least."""


class RetryBudget:
    """Retries that may still be made: each request adds a part of one, so that a storm of failures is not doubled."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._left = float(config.budget_min)
        self._most = _BUDGET_TIMES * max(config.budget_min, 1)

    def arrived(self) -> None:
        """A new request came."""
        self._left = min(self._left + self._config.budget_ratio, self._most)

    def take(self, attempt: int) -> bool:
        """Take one retry of a request that was tried `attempt` times; False where there is none left for it."""
        if attempt >= self._config.attempts_max or self._left < 1.0:
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
