"""The ledger and its naive model side by side: asked the same, they say the same."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from router.decide.messages import Decision, ReportedUsage
from router.turns import ledger as native
from router.turns._native import Begun
from router.turns.config import TurnsConfig
from router.turns.parts import Why, why_of
from router.turns.why import Asked, Facts, Outliner

from .ledger import AskedTurn, BegunTurn, Ledger


class BothLedgers:
    """Like each of both. Fails where they differ."""

    def __init__(self, config: TurnsConfig, shared: Callable[[array[int], array[int]], int]) -> None:
        self.native, self.naive = native.Ledger(config), Ledger(config, shared)

    @property
    def tokens(self) -> Counter[str]:
        assert self.native.tokens == self.naive.tokens
        return self.native.tokens

    @property
    def sums(self) -> Counter[str]:
        assert self.native.sums == self.naive.sums
        return self.native.sums

    def wants_short(self, keys: list[int]) -> bool:
        assert self.native.wants_short(keys) == self.naive.wants_short(keys)
        return self.native.wants_short(keys)

    def explain(self, asked: AskedTurn, decision: Decision, facts: Facts, now: float, wall: float) -> Why:
        found = self.native.explain(_native(asked), _outline(asked), decision, asked.block, facts, now, wall)
        told = self.naive.explain(asked, decision, facts, now, wall)
        assert found == told, (found, told)
        return found

    def begun(
        self, asked: AskedTurn, decision: Decision, facts: Facts, now: float, wall: float
    ) -> tuple[Begun, BegunTurn]:
        assert self.native.book.goes_on(_native(asked)) == (not self.naive.parts_ways(asked))
        begun = (
            self.native.begun(_native(asked), _outline(asked), decision, asked.block, facts, now, wall),
            self.naive.begun(asked, decision, facts, now, wall),
        )
        self.why(begun)
        self._same()
        return begun

    def ended(
        self, begun: tuple[Begun, BegunTurn], usage: ReportedUsage | None, answer_tokens: int, now: float
    ) -> None:
        self.native.ended(begun[0], usage, answer_tokens, now)
        self.native.tell()
        self.naive.ended(begun[1], usage, answer_tokens, now)
        self.why(begun)
        self._same()

    def why(self, begun: tuple[Begun, BegunTurn]) -> Why:
        found = why_of(begun[0])
        assert found == begun[1].why, (found, begun[1].why)
        assert self.native.get(found.id) == self.naive.get(found.id)
        return found

    def _same(self) -> None:
        book, naive = self.native.book, self.naive.book
        naive.check_invariants()
        assert book.holds_together()
        assert (book.prompts, book.used_bytes, book.shorts) == (len(naive), naive.used_bytes, naive.shorts)
        assert len(self.native) == len(self.naive)
        assert (self.native.turns, self.native.tokens) == (self.naive.turns, self.naive.tokens)
        assert self.native.sums == self.naive.sums


def _outline(asked: AskedTurn) -> Outliner:
    """Itself, where it is at hand."""
    whole = asked.outline(0)
    return asked.outline if whole is None or not whole.kept else whole


def _native(asked: AskedTurn) -> Asked:
    is_cut = asked.base is not None and not asked.stays
    return (
        asked.id, asked.ids[asked.kept :] if is_cut else asked.ids, asked.base, asked.kept, asked.stays, asked.scope,
        asked.keys, asked.short, asked.begins, asked.session, asked.parent, asked.sampled_tokens, asked.final,
    )  # fmt: skip
