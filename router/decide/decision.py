"""Where one attempt of a request goes, and why. Plain, so that compiled code reads its fields at their places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from router.decide.messages import Terms

_FIELDS = (
    "request_id", "worker", "rank", "attempt", "prompt_tokens", "predicted_cached_tokens", "predicted_ttft_s", "terms",
    "decided_s", "waited_s", "best", "candidates", "not_eligible",
)  # fmt: skip


class Decision:
    """A worker, and what its price is made of."""

    __slots__ = _FIELDS

    def __init__(
        self,
        request_id: str,
        worker: str,
        rank: int | None,
        attempt: int,
        prompt_tokens: int,
        predicted_cached_tokens: int,
        predicted_ttft_s: float,
        terms: Terms,
        decided_s: float,
        waited_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.worker = worker
        self.rank = rank
        """Data-parallel rank whose cache matched best, where the worker has several; else None."""
        self.attempt = attempt
        """0 for the first, counted up by retries."""
        self.prompt_tokens = prompt_tokens
        self.predicted_cached_tokens = predicted_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.terms = terms
        self.decided_s = decided_s
        self.waited_s = waited_s
        """How long the reordering queue held it."""
        self.best: Terms | None = None
        """Of the candidate that has most of the prompt cached, where that is more than the worker has."""
        self.candidates: list[Terms] = []
        """Every candidate's terms, cheapest first; filled only where an explanation was asked for."""
        self.not_eligible: dict[str, str] = {}
        """worker -> why it was not a candidate; filled with `candidates`."""

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in _FIELDS}


class Forward:
    """Send the request to the decision's worker now."""

    __slots__ = ("decision", "request_id")

    def __init__(self, request_id: str, decision: Decision) -> None:
        self.request_id = request_id
        self.decision = decision
