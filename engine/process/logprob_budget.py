"""Bounds on the logprobs that are in memory for responses: for one request, and for all requests together.

A small request can ask for millions of them: samples times tokens times `top_logprobs`. Logprobs are counted from their
arrival from the core until they are sent. No I/O.
"""

from __future__ import annotations

from prompts import RequestError

REQUEST_LOGPROBS_MAX = 2 << 20
"""(token, logprob) pairs of one request. A position of 21 pairs takes 420 bytes, one with its own pair alone 145; a
pair takes 60 bytes as JSON."""
LOGPROBS_MAX = 6 << 20
"""(token, logprob) pairs of all requests together."""


class LogprobBudget:
    """Limits the logprobs that one process holds in memory for answers. Each request counts its own part of them."""

    def __init__(self, request_max: int = REQUEST_LOGPROBS_MAX, total_max: int = LOGPROBS_MAX) -> None:
        """`request_max`: most logprobs of one request; `total_max`: most of all requests together."""
        self.request_max = request_max
        self.total_max = total_max
        self.held_count = 0
        """Number of logprobs that all requests hold."""

    def check_prompts(self, count: int) -> None:
        """Raise RequestError 400 if the `count` logprobs of a request's prompts are more than it may hold."""
        if count > self.request_max:
            message = (
                f"prompt_logprobs: asks for {count} logprobs (prompt tokens times samples times (prompt_logprobs + 1)),"
                f" expected at most {self.request_max}"
            )
            raise RequestError(message, param="prompt_logprobs")


class LogprobShare:
    """Part of a `LogprobBudget` that one request holds: logprobs that were generated and not sent. Must be closed."""

    def __init__(self, budget: LogprobBudget) -> None:
        self._budget = budget
        self._held_count = 0

    def acquire(self, count: int) -> None:
        """Count `count` more logprobs that are in memory, until `release` or `close`.

        Raises RequestError: 400 if this request would hold too many, 503 if all requests together would.
        """
        budget = self._budget
        if self._held_count + count > budget.request_max:
            message = (
                f"top_logprobs: the answer has more than {budget.request_max} logprobs that are not sent yet: ask for "
                "fewer samples, tokens or top_logprobs, or stream the answer and read it faster"
            )
            raise RequestError(message, param="top_logprobs")
        if budget.held_count + count > budget.total_max:
            message = f"{budget.total_max} logprobs of answers are not sent yet, expected no more of them at a time"
            raise RequestError(message, code="unavailable", status=503)
        self._held_count += count
        budget.held_count += count

    def release(self, count: int) -> None:
        """Stop counting `count` logprobs, which were sent. A closed share has none to release."""
        count = min(count, self._held_count)
        self._held_count -= count
        self._budget.held_count -= count

    def close(self) -> None:
        self.release(self._held_count)
