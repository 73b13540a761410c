"""The ledger and its naive model side by side: asked the same, they say the same."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.decide.messages import Decision, ReportedUsage
from router.turns import ledger as native
from router.turns._native import Begun
from router.turns.config import TurnsConfig
from router.turns.parts import Why, why_of
from router.turns.why import Asked, End, Facts, First, Looked, Outliner, PromptFacts

from .ledger import AskedTurn, BegunTurn, Ledger


@dataclass
class _OnePrompt(PromptFacts):
    """What is asked of the one prompt that is looked at."""

    facts: Facts
    short: Sequence[int]

    def about(self, asked: Asked) -> Facts:
        return self.facts

    def shorts(self, asked: Asked) -> Sequence[int]:
        return self.short


class BothLedgers:
    """Like each of both. Fails where they differ. `waits`: the native one is told as requests come, and looks at them
    when it is asked to."""

    def __init__(
        self, config: TurnsConfig, shared: Callable[[array[int], array[int]], int], *, waits: bool = False
    ) -> None:
        self.native, self.naive = native.Ledger(config), Ledger(config, shared)
        self.waits = waits
        self._looked: dict[str, tuple[Looked, PromptFacts]] = {}

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
        if self.waits:
            one: Looked = [_native(asked), _outline(asked), None, True, None]
            prompt = _OnePrompt(facts, asked.short)
            self._settle((one, native.placed_of(decision, asked.block), now), prompt, wall - now)
            found = self.native.book.get(asked.id)
            assert found is not None
            self._looked[asked.id] = one, prompt
        else:
            found = self.native.begun(_native(asked), _outline(asked), decision, asked.block, facts, now, wall)
        begun = found, self.naive.begun(asked, decision, facts, now, wall)
        self.why(begun)
        self._same()
        return begun

    def ended(
        self, begun: tuple[Begun, BegunTurn], usage: ReportedUsage | None, answer_tokens: int, now: float
    ) -> None:
        if self.waits:
            one, facts = self._looked[begun[1].why.id]
            self._settle((one, native.reported_of(usage), answer_tokens, now, True, False), facts, 0.0)
        else:
            self.native.ended(begun[0], usage, answer_tokens, now)
            self.native.tell()
        self.naive.ended(begun[1], usage, answer_tokens, now)
        self.why(begun)
        self._same()

    def _settle(self, one: First | End, facts: PromptFacts, wall_s: float) -> None:
        failed: list[Exception] = []
        self.native.book.settle([one], facts, wall_s, lambda *_: None, lambda _: None, failed.append)
        assert not failed, failed

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
    return (
        asked.id, asked.ids, asked.base, asked.kept, asked.stays, asked.scope,
        asked.keys, asked.short, asked.begins, asked.session, asked.parent, asked.sampled_tokens, asked.final,
    )  # fmt: skip
