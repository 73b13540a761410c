"""The ledger and its naive model side by side: asked the same, they say the same."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from router.decide.messages import Decision, ReportedUsage
from router.miss_reasons.analyzer import AnalyzedRequest, MissAnalyzer, Prompt
from router.miss_reasons.attribution import MissContext, RemovedPrefix
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import MissExplanation

from . import naive

Both = tuple[AnalyzedRequest, naive.Begun]


class BothAnalyzers:
    """Like each of both. Fails where they differ."""

    def __init__(self, config: MissReasonsConfig, shared: Callable[[array[int], array[int]], int]) -> None:
        self.ledger, self.naive = MissAnalyzer(config, shared), naive.NaiveAnalyzer(config)

    @property
    def tokens(self) -> Counter[str]:
        assert self.ledger.tokens == self.naive.tokens
        return self.ledger.tokens

    @property
    def sums(self) -> Counter[str]:
        assert self.ledger.sums == self.naive.sums
        return self.ledger.sums

    def wants_short(self, keys: list[int]) -> bool:
        return self.ledger.wants_short(keys)

    def explain(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
    ) -> MissExplanation:
        found = self.ledger.explain(prompt, decision, block, gone, facts, now, wall)
        told = self.naive.explain(prompt, decision, block, gone, facts, now, wall)
        assert found == told, (found, told)
        return found

    def placed(self, prompt: Prompt, decision: Decision, gone: RemovedPrefix | None, now: float, wall: float) -> Both:
        asked = prompt.id, prompt.session, len(prompt.ids), decision, gone, now, wall
        return self._same((self.ledger.placed(*asked), self.naive.placed(*asked)))

    def compared(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
        *,
        is_sampled: bool = True,
    ) -> Both:
        begun = self.ledger.compared(prompt, decision, block, gone, facts, now, wall, is_sampled=is_sampled)
        told = self.naive.compared(prompt, decision, block, gone, facts, now, wall, is_sampled)
        return self._same((begun, told))

    def ended(self, begun: Both, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        self.ledger.ended(begun[0], usage, answer_tokens, now)
        self.naive.ended(begun[1], usage, answer_tokens, now)
        self._same(begun)

    def why(self, begun: Both) -> MissExplanation:
        found = begun[0].why
        assert found == begun[1].why, (found, begun[1].why)
        assert self.ledger.get(found.id) == self.naive.get(found.id)
        return found

    def _same(self, begun: Both) -> Both:
        self.why(begun)
        book, slow = self.ledger.book, self.naive
        book.check_invariants()
        assert (len(book), book.used_bytes, book.shorts) == (len(slow.pasts), slow.used_bytes, slow.shorts)
        assert len(self.ledger) == len(slow.last)
        assert (self.ledger.turns, self.ledger.tokens, self.ledger.sums) == (slow.turns, slow.tokens, slow.sums)
        return begun
