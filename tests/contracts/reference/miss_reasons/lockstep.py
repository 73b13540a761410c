"""The analyzer and its naive model side by side: asked the same, they say the same."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from router.decide.messages import ReportedUsage
from router.miss_reasons.analyzer import AnalyzedRequest, MissAnalyzer
from router.miss_reasons.attribution import MissFacts, Placement
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import MissExplanation
from router.miss_reasons.prompt_history import AnalyzedPrompt

from . import naive

Both = tuple[AnalyzedRequest, naive.NaiveRequest]


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

    def explain(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> MissExplanation:
        explanation = self.analyzer.explain(prompt, placement, facts)
        naive_explanation = self.naive.explain(prompt, placement, facts)
        assert explanation == naive_explanation, (explanation, naive_explanation)
        return explanation

    def record_placed(self, prompt: AnalyzedPrompt, placement: Placement) -> Both:
        arguments = prompt.request_id, prompt.route.session, len(prompt.token_ids), placement
        return self._check_equal((self.analyzer.record_placed(*arguments), self.naive.record_placed(*arguments)))

    def record_compared(
        self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts, *, is_sampled: bool = True
    ) -> Both:
        prompt.is_sampled = is_sampled
        analyzed = self.analyzer.record_compared(prompt, placement, facts)
        naive_analyzed = self.naive.record_compared(prompt, placement, facts, is_sampled)
        return self._check_equal((analyzed, naive_analyzed))

    def record_end(self, request: Both, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        self.analyzer.record_end(request[0], usage, answer_tokens, now)
        self.naive.record_end(request[1], usage, answer_tokens, now)
        self._check_equal(request)

    def explanation_of(self, request: Both) -> MissExplanation:
        explanation = request[0].explanation
        assert explanation == request[1].why, (explanation, request[1].why)
        assert self.analyzer.get(explanation.id) == self.naive.get(explanation.id)
        return explanation

    def _check_equal(self, request: Both) -> Both:
        self.explanation_of(request)
        history, naive = self.analyzer.history, self.naive
        history.check_invariants()
        assert (len(history), history.used_bytes) == (len(naive.history), naive.used_bytes)
        assert len(self.analyzer) == len(naive.requests)
        assert (self.analyzer.requests_by_reason, self.analyzer.tokens_by_reason, self.analyzer.reuse_sums) == (
            naive.turns,
            naive.tokens,
            naive.sums,
        )
        return request
