"""The analyzer and its naive model side by side: asked the same, they say the same."""

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
        self.analyzer, self.naive = MissAnalyzer(config, shared), naive.NaiveAnalyzer(config)

    @property
    def tokens(self) -> Counter[str]:
        assert self.analyzer.tokens_by_reason == self.naive.tokens
        return self.analyzer.tokens_by_reason

    @property
    def sums(self) -> Counter[str]:
        assert self.analyzer.reuse_sums == self.naive.sums
        return self.analyzer.reuse_sums

    def needs_short_keys(self, keys: list[int]) -> bool:
        return self.analyzer.needs_short_keys(keys)

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
        found = self.analyzer.explain(prompt, decision, block, gone, facts, now, wall)
        told = self.naive.explain(prompt, decision, block, gone, facts, now, wall)
        assert found == told, (found, told)
        return found

    def record_placed(
        self, prompt: Prompt, decision: Decision, gone: RemovedPrefix | None, now: float, wall: float
    ) -> Both:
        asked = prompt.id, prompt.session, len(prompt.token_ids), decision, gone, now, wall
        return self._same((self.analyzer.record_placed(*asked), self.naive.record_placed(*asked)))

    def record_compared(
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
        begun = self.analyzer.record_compared(prompt, decision, block, gone, facts, now, wall, is_sampled=is_sampled)
        told = self.naive.record_compared(prompt, decision, block, gone, facts, now, wall, is_sampled)
        return self._same((begun, told))

    def record_end(self, begun: Both, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        self.analyzer.record_end(begun[0], usage, answer_tokens, now)
        self.naive.record_end(begun[1], usage, answer_tokens, now)
        self._same(begun)

    def why(self, begun: Both) -> MissExplanation:
        found = begun[0].explanation
        assert found == begun[1].why, (found, begun[1].why)
        assert self.analyzer.get(found.id) == self.naive.get(found.id)
        return found

    def _same(self, begun: Both) -> Both:
        self.why(begun)
        book, slow = self.analyzer.history, self.naive
        book.check_invariants()
        assert (len(book), book.used_bytes, book.short_prompts) == (len(slow.pasts), slow.used_bytes, slow.shorts)
        assert len(self.analyzer) == len(slow.last)
        assert (self.analyzer.requests_by_reason, self.analyzer.tokens_by_reason, self.analyzer.reuse_sums) == (
            slow.turns,
            slow.tokens,
            slow.sums,
        )
        return begun
