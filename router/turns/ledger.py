"""What became of the last requests: each with the reasons why its prompt was not cached. Pure.

Owns the sums by reason, and how the book of turns is asked. The book itself, which earlier prompt a new one goes on
from and why it misses are C++ (router/turns/native), checked against tests/contracts/reference/turns: every request is
looked at, and in Python that would cost as much as a quarter of all else that is done for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from router.decide.messages import Decision, ReportedUsage
from router.index.protocol import PrefixIndex, Scope
from router.turns._native import Begun
from router.turns._native import Ledger as Book
from router.turns.config import TurnsConfig
from router.turns.parts import Why, why_of
from router.turns.why import Asked, Facts, Outliner, Placed

BRANCHES_MAX: Final = 4
"""Conversations that go on under one session's name: agents ask for titles and summaries in between."""
SHORT_TOKENS: Final = 16
"""Between the keys of a prompt's first chunk, by which one that has no more is found."""


class Ledger:
    """One a process."""

    def __init__(
        self,
        config: TurnsConfig,
        turns: Counter[str] | None = None,
        tokens: Counter[str] | None = None,
        sums: Counter[str] | None = None,
    ) -> None:
        self.turns: Counter[str] = Counter() if turns is None else turns
        """reason -> requests. These three as of the last `tell`."""
        self.tokens: Counter[str] = Counter() if tokens is None else tokens
        """reason -> tokens that had to be computed."""
        self.sums: Counter[str] = Counter() if sums is None else sums
        """prompt, best, chosen, reported: tokens of the requests whose worker said what it reused."""
        self.book = Book(
            config.memory_mb << 20, config.keep_s, BRANCHES_MAX, config.requests_max, self.turns, self.tokens, self.sums
        )

    def __len__(self) -> int:
        return len(self.book)

    def get(self, name: str) -> Why | None:
        """What is known of a request."""
        begun = self.book.get(name)
        return None if begun is None else why_of(begun)

    def explain(
        self, asked: Asked, outline: Outliner, decision: Decision, block: int, facts: Facts, now: float, wall: float
    ) -> Why:
        """The same as `begun`, of a request that was not sent. Changes nothing."""
        return why_of(self.book.explained(asked, placed_of(decision, block), facts, outline, now, wall))

    def begun(
        self, asked: Asked, outline: Outliner, decision: Decision, block: int, facts: Facts, now: float, wall: float
    ) -> Begun:
        """Its answer has begun: the prompt was computed, in blocks of so many tokens."""
        return self.book.begun(asked, placed_of(decision, block), facts, outline, now, wall)

    def ended(self, begun: Begun, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        """Its answer is whole, with so many tokens."""
        self.book.ended(begun, reported_of(usage), answer_tokens, now)

    def tell(self) -> None:
        """Add to the counters what ended since the last time."""
        self.book.tell()

    def wants_short(self, keys: Sequence[int]) -> bool:
        """Whether a prompt without a session's name is to come with the digests of its first chunk's beginnings."""
        return not keys or self.book.shorts > 0


def placed_of(decision: Decision, block: int) -> Placed:
    """Where a request went, to a worker with blocks of so many tokens."""
    terms = decision.terms
    return (
        decision.worker, block, decision.predicted_cached_tokens, terms.resident_tokens, terms.ttft_s, decision.attempt,
        decision.best,
    )  # fmt: skip


def reported_of(usage: ReportedUsage | None) -> int:
    """Tokens that a worker says it reused; -1 where it does not."""
    return -1 if usage is None or usage.cached_tokens is None else max(usage.cached_tokens, 0)


def short_keys(index: PrefixIndex, ids: Sequence[int], scope: Scope, chunk_tokens: int) -> list[int]:
    """The keys of a prompt's first chunk of so many tokens."""
    return index.chunk_keys(ids[: chunk_tokens + 1], scope, SHORT_TOKENS)
