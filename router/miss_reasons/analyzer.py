"""The latest requests, each with the reasons why its prompt was not cached, and the sums by reason. No I/O.

For most requests the reasons are those that the decision and the index show. Requests of a sampled share of the
conversations, and of watched ones, are compared with the last prompt of their conversation, which shows all reasons.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from weakref import ref

import msgspec

from options.bounded_dict import BoundedDict
from router.decide.messages import ReportedUsage
from router.miss_reasons.attribution import (
    MissFacts,
    Placement,
    attribute_misses,
    attribute_without_match,
    correct_ranges,
)
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import NOT_COMPARED, MissExplanation, UncachedRange
from router.miss_reasons.prompt_history import AnalyzedPrompt, PromptHistory, PromptMatch


class AnalyzedRequest(msgspec.Struct, eq=False):
    """Request that was sent to a worker, with the facts that explain why tokens of its prompt were not cached there."""

    id: str
    session: str | None
    prompt_tokens: int
    placement: Placement
    compared_ranges: list[UncachedRange] | None = None
    """Uncached ranges that a comparison with the conversation's last prompt showed; None without a comparison."""
    reported_tokens: int | None = None
    """Number of cached tokens as the worker reports it; None if it does not."""
    prompt_reference: ref[AnalyzedPrompt] | None = None
    """Weak reference to the prompt in the history, for the conversation's next one; None without a comparison."""
    is_final: bool = False
    """Whether this is the last request of its session."""
    is_sampled: bool = False
    """Whether the metrics count the request by reason, as its conversation belongs to the sampled share."""

    @property
    def explanation(self) -> MissExplanation:
        """Explanation of why tokens of the prompt were not cached: each uncached range of the prompt with its reason.

        It is made from the comparison with the conversation's last prompt, or else from the routing decision alone.
        Once the worker has reported how many tokens it reused, the ranges are corrected by that number. It is not
        stored, because few explanations are read.
        """
        decision = self.placement.decision
        uncached_ranges = self.compared_ranges
        if uncached_ranges is None:
            uncached_ranges = attribute_without_match(self.prompt_tokens, self.placement, NOT_COMPARED)
        if self.reported_tokens is not None:
            uncached_ranges = correct_ranges(uncached_ranges, self.prompt_tokens, decision, self.reported_tokens)
        # `most_cached` is None if no other worker had more cached tokens than the chosen one.
        best = decision.most_cached or decision.terms
        return MissExplanation(
            id=self.id,
            timestamp=self.placement.timestamp,
            session=self.session,
            worker=decision.worker,
            prompt_tokens=self.prompt_tokens,
            best_cached_tokens=best.cached_tokens,
            best_worker=best.worker,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            reported_cached_tokens=self.reported_tokens,
            attempt=decision.attempt,
            is_compared=self.compared_ranges is not None,
            uncached_ranges=uncached_ranges,
        )


class MissAnalyzer:
    """Analyses the requests of a process: `record_placed` or `record_compared` at the first byte, then `record_end`."""

    def __init__(self, config: MissReasonsConfig, count_common_tokens: Callable[[array[int], array[int]], int]) -> None:
        """`count_common_tokens` returns the length of the common beginning of two prompts."""
        self.history = PromptHistory(config.memory_mb << 20, config.ttl_s, count_common_tokens)
        self._recent_requests: BoundedDict[str, AnalyzedRequest] = BoundedDict(config.requests_max)
        """Last request of each request id, the oldest first."""
        self.requests_by_reason: Counter[str] = Counter()
        """Requests of the sampled share by their main reason."""
        self.tokens_by_reason: Counter[str] = Counter()
        """Uncached tokens of the sampled share."""
        self.reuse_sums: Counter[str] = Counter()
        """Tokens of all requests for which the worker reported cached tokens: prompt, best, chosen, reported."""

    def __len__(self) -> int:
        return len(self._recent_requests)

    def get_request(self, request_id: str) -> AnalyzedRequest | None:
        """Return a request with its explanation and placement; None if the request is unknown."""
        return self._recent_requests.get(request_id)

    def get(self, request_id: str) -> MissExplanation | None:
        """Return the explanation of a request; None if the request is unknown."""
        request = self.get_request(request_id)
        return None if request is None else request.explanation

    def explain(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> MissExplanation:
        """Explain why the prompt of a request that is not sent would not be cached. Changes nothing."""
        return _compare_with_last_prompt(prompt, self.history.find_match(prompt), placement, facts).explanation

    def record_placed(self, id: str, session: str | None, prompt_tokens: int, placement: Placement) -> AnalyzedRequest:
        """Record a request at its first byte, without a comparison with the last prompt of its conversation."""
        request = self._recent_requests[id] = AnalyzedRequest(id, session, prompt_tokens, placement)
        return request

    def record_compared(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> AnalyzedRequest:
        """Compare a prompt with the conversation's last one, to explain which tokens were not cached; store the prompt.

        Called at the answer's first byte. The prompt takes the place of the last one, and is compared with the next.
        Raises ValueError for blocks without tokens.
        """
        if placement.block_tokens < 1:
            raise ValueError(f"a block of {placement.block_tokens} tokens: expected at least 1")
        self.history.expire(placement.at_s)
        match = self.history.find_match(prompt)
        request = _compare_with_last_prompt(prompt, match, placement, facts)
        request.prompt_reference = ref(prompt)
        prompt.worker = placement.decision.worker
        prompt.computed_s = placement.at_s
        can_be_cached = len(prompt.token_ids) >= placement.block_tokens
        if can_be_cached:
            self.history.add(prompt, replaces=None if match is None else match.previous)
        self._recent_requests[request.id] = request
        return request

    def record_end(
        self, request: AnalyzedRequest, usage: ReportedUsage | None, answer_tokens: int, now: float
    ) -> MissExplanation | None:
        """Record that a request's answer has ended: count the tokens that the worker reused, and why it missed others.

        Returns the explanation of the cache misses if the request is of the sampled share that is counted by reason,
        else None. `usage`: token counts that the worker reported, if it did. `answer_tokens`: tokens of the answer,
        which the conversation's next prompt is expected to repeat.
        """
        if usage is not None and usage.cached_tokens is not None:
            self._count_reuse(request, reported_tokens=max(usage.cached_tokens, 0))
        if request.prompt_reference is None:  # it was not compared with the history
            return None
        stored_prompt = request.prompt_reference()
        if stored_prompt is not None:  # the history still has it
            stored_prompt.answer_tokens = answer_tokens
            stored_prompt.computed_s = now
        explanation = None
        if request.is_sampled:
            explanation = request.explanation
            self._count_reasons(explanation)
        if request.is_final and request.session is not None:
            self.history.forget_session(request.session)
        return explanation

    def _count_reuse(self, request: AnalyzedRequest, reported_tokens: int) -> None:
        """Store what a worker reported as cached, and add it to the sums beside what was predicted."""
        decision = request.placement.decision
        request.reported_tokens = reported_tokens
        self.reuse_sums["prompt"] += request.prompt_tokens
        self.reuse_sums["best"] += (decision.most_cached or decision.terms).cached_tokens
        self.reuse_sums["chosen"] += decision.predicted_cached_tokens
        self.reuse_sums["reported"] += reported_tokens

    def _count_reasons(self, explanation: MissExplanation) -> None:
        self.requests_by_reason[explanation.reason] += 1
        for uncached_range in explanation.uncached_ranges:
            self.tokens_by_reason[uncached_range.reason] += uncached_range.tokens


def _compare_with_last_prompt(
    prompt: AnalyzedPrompt, match: PromptMatch | None, placement: Placement, facts: MissFacts
) -> AnalyzedRequest:
    """Compare a prompt with the last one of its conversation, to find the reasons of its uncached tokens.

    `match`: the last prompt. None: the prompt is the first of its conversation, and all of its tokens are new, unless
    earlier prompts may not have been stored. In that case nothing is compared.
    """
    compared_ranges = None
    if match is not None:
        compared_ranges = attribute_misses(match, placement, facts)
    elif not prompt.is_history_incomplete:
        compared_ranges = attribute_without_match(len(prompt.token_ids), placement, "new_session")
    return AnalyzedRequest(
        id=prompt.request_id,
        session=prompt.session,
        prompt_tokens=len(prompt.token_ids),
        placement=placement,
        compared_ranges=compared_ranges,
        is_final=prompt.route.is_final,
        is_sampled=prompt.is_sampled,
    )
