"""What became of the last requests: each with the reasons why its prompt was not cached. Pure.

Owns the history of prompts, the last answers to "why", and the sums by reason. Refuses to know sockets, workers' load
and how a prompt is read. Of most requests only the decision is kept: reasons that need no more are made of it when
somebody asks. A share of the conversations, and those that somebody asks for, are compared turn by turn.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.index.protocol import PrefixIndex, Scope
from router.miss_reasons.attribution import (
    MissFacts,
    Placement,
    PromptComparison,
    attribute_misses,
    attribute_without_comparison,
)
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import MissExplanation
from router.miss_reasons.prompt_history import PreviousPrompt, PromptHistory
from router.prompting.chat_outline import Outline

SHORT_KEY_TOKENS: Final = 16
"""Between the keys of a prompt's first chunk, by which one that has no more is found."""


class AnalyzedPrompt:
    """A prompt that is compared: its answer has begun, or it is asked about."""

    def __init__(
        self,
        request_id: str,
        route: RouteRequest,
        token_ids: array[int],
        outline: Outline | None,
        chunk_keys: Sequence[int] = (),
        short_keys: Sequence[int] = (),
        opening_key: int | None = None,
        is_history_incomplete: bool = False,
    ) -> None:
        self.request_id = request_id
        """That the client knows the request by."""
        self.token_ids, self.scope, self.outline = token_ids, route.scope, outline
        self.session_name, self.parent, self.is_final = route.session, route.parent, route.is_final
        self.chunk_keys = chunk_keys
        """Digests of its chunks, where its session has no name."""
        self.short_keys = short_keys
        """Digests of its first chunk's beginnings, where its session has no name and it has no chunk, or others have
        none."""
        self.opening_key = opening_key
        """Digest of what its user said first, where its session has no name: conversations with one system prompt may
        have all their chunks in common."""
        self.is_history_incomplete = is_history_incomplete
        """Earlier prompts of its conversation may have been, and were not kept."""

    @property
    def lookup_keys(self) -> list[int]:
        """Of which prompts it may be a continuation, the shortest first. Of prompts that merely begin alike the short
        ones tell too little: they are not looked for by these."""
        opening_keys = () if self.opening_key is None else (self.opening_key,)
        return [*self.short_keys, *self.chunk_keys, *opening_keys]


class PlacedRequest:
    """A request from its first byte on, whose prompt is not compared."""

    __slots__ = ("_placement", "_reported_tokens", "_session", "id", "prompt_tokens")

    def __init__(self, id: str, session: str | None, prompt_tokens: int, placement: Placement) -> None:
        self.id, self.prompt_tokens = id, prompt_tokens
        self._session = session
        self._placement = placement
        self._reported_tokens: int | None = None

    @property
    def decision(self) -> Decision:
        return self._placement.decision

    @property
    def explanation(self) -> MissExplanation:
        """The reasons that need only the decision and the index."""
        explanation = _new_explanation(self.id, self._session, self.prompt_tokens, self._placement)
        explanation.is_compared = False
        explanation.uncached_ranges = attribute_without_comparison(self.prompt_tokens, self._placement)
        explanation.update_main_reason()
        if self._reported_tokens is not None:
            explanation.apply_reported_tokens(self.decision.terms.resident_tokens, self._reported_tokens)
        return explanation

    def apply_reported_tokens(self, reported_tokens: int) -> None:
        """The worker said how much it reused."""
        self._reported_tokens = reported_tokens


class ComparedRequest:
    """A request from its first byte on, whose prompt was compared with the last one of its conversation."""

    __slots__ = ("decision", "explanation", "is_final", "is_sampled", "stored_prompt")

    def __init__(
        self,
        explanation: MissExplanation,
        stored_prompt: PreviousPrompt,
        decision: Decision,
        *,
        is_final: bool,
        is_sampled: bool,
    ) -> None:
        self.explanation = explanation
        self.stored_prompt = stored_prompt
        self.decision = decision
        self.is_final = is_final
        self.is_sampled = is_sampled
        """Counted by reason: its conversation is one of the share."""

    @property
    def id(self) -> str:
        return self.explanation.id

    @property
    def prompt_tokens(self) -> int:
        return self.explanation.prompt_tokens

    def apply_reported_tokens(self, reported_tokens: int) -> None:
        """The worker said how much it reused."""
        self.explanation.apply_reported_tokens(self.decision.terms.resident_tokens, reported_tokens)


AnalyzedRequest: TypeAlias = PlacedRequest | ComparedRequest


class MissAnalyzer:
    """One a process."""

    def __init__(
        self,
        config: MissReasonsConfig,
        count_common_tokens: Callable[[array[int], array[int]], int],
        requests_by_reason: Counter[str] | None = None,
        tokens_by_reason: Counter[str] | None = None,
        reuse_sums: Counter[str] | None = None,
    ) -> None:
        """`count_common_tokens`: how many tokens two prompts begin with alike."""
        self.history = PromptHistory(config.memory_mb << 20, config.ttl_s, count_common_tokens)
        self._max_recent_requests = config.requests_max
        self._recent_requests: OrderedDict[str, AnalyzedRequest] = OrderedDict()
        """id -> the last request of that id, the oldest first."""
        self.requests_by_reason: Counter[str] = Counter() if requests_by_reason is None else requests_by_reason
        """reason -> requests, of the share that is compared."""
        self.tokens_by_reason: Counter[str] = Counter() if tokens_by_reason is None else tokens_by_reason
        """reason -> tokens that had to be computed, of the same."""
        self.reuse_sums: Counter[str] = Counter() if reuse_sums is None else reuse_sums
        """prompt, best, chosen, reported: tokens of all requests whose worker said what it reused."""

    def __len__(self) -> int:
        return len(self._recent_requests)

    def get(self, request_id: str) -> MissExplanation | None:
        """What is known of a request."""
        request = self._recent_requests.get(request_id)
        return None if request is None else request.explanation

    def needs_short_keys(self, chunk_keys: Sequence[int]) -> bool:
        """Whether a prompt without a session's name is to come with the digests of its first chunk's beginnings."""
        return not chunk_keys or self.history.short_prompts > 0

    def explain(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> MissExplanation:
        """The same as `record_compared`, of a request that was not sent. Changes nothing."""
        return self._explain(prompt, self._compare(prompt), placement, facts)

    def record_placed(self, id: str, session: str | None, prompt_tokens: int, placement: Placement) -> PlacedRequest:
        """Its answer has begun, and its prompt of so many tokens is not compared."""
        request = PlacedRequest(id, session, prompt_tokens, placement)
        self._store(request)
        return request

    def record_compared(
        self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts, *, is_sampled: bool = True
    ) -> ComparedRequest:
        """Its answer has begun: the prompt was computed. Raises ValueError for blocks without tokens."""
        decision, block_tokens, now = placement.decision, placement.block_tokens, placement.at_s
        if block_tokens < 1:
            raise ValueError(f"a block of {block_tokens} tokens: expected at least 1")
        self.history.expire(now)
        comparison = self._compare(prompt)
        explanation = self._explain(prompt, comparison, placement, facts)
        session = prompt.session_name
        keys: tuple[int, ...] = ()
        if session is None:
            keys = select_lookup_keys(prompt.chunk_keys) or tuple(prompt.short_keys[-1:])
            keys += () if prompt.opening_key is None else (prompt.opening_key,)
        is_short = session is None and not prompt.chunk_keys
        stored_prompt = PreviousPrompt(
            prompt.scope, prompt.token_ids, prompt.outline, decision.worker, now, session, keys, is_short
        )
        if len(prompt.token_ids) >= block_tokens:  # of less nothing can be cached
            self.history.add(stored_prompt, replaces=comparison.previous)
        request = ComparedRequest(explanation, stored_prompt, decision, is_final=prompt.is_final, is_sampled=is_sampled)
        self._store(request)
        return request

    def record_end(self, request: AnalyzedRequest, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        """Its answer is whole, with so many tokens."""
        if usage is not None and usage.cached_tokens is not None:
            reported_tokens, decision, sums = max(usage.cached_tokens, 0), request.decision, self.reuse_sums
            request.apply_reported_tokens(reported_tokens)
            sums["prompt"] += request.prompt_tokens
            sums["best"] += (decision.most_cached or decision.terms).cached_tokens
            sums["chosen"] += decision.predicted_cached_tokens
            sums["reported"] += reported_tokens
        if isinstance(request, PlacedRequest):
            return
        explanation, stored_prompt = request.explanation, request.stored_prompt
        stored_prompt.answer_tokens, stored_prompt.computed_s = answer_tokens, now
        if request.is_sampled:
            self.requests_by_reason[explanation.reason] += 1
            for uncached_range in explanation.uncached_ranges:
                self.tokens_by_reason[uncached_range.reason] += uncached_range.tokens
        if request.is_final and stored_prompt.session is not None:
            self.history.forget_session(stored_prompt.session)

    def _store(self, request: AnalyzedRequest) -> None:
        requests = self._recent_requests
        requests.pop(request.id, None)
        requests[request.id] = request
        if len(requests) > self._max_recent_requests:
            requests.popitem(last=False)

    def _compare(self, prompt: AnalyzedPrompt) -> PromptComparison:
        """The prompt beside the one it goes on from."""
        token_ids, scope, session, history = prompt.token_ids, prompt.scope, prompt.session_name, self.history
        previous = history.find_continued(token_ids, scope, session, prompt.lookup_keys)
        comparison = PromptComparison(len(token_ids), previous)
        comparison.outline, comparison.is_history_incomplete = prompt.outline, prompt.is_history_incomplete
        if previous is not None:
            comparison.common_tokens = len(previous.token_ids)
            return comparison
        match = history.find_previous(token_ids, scope, comparison.outline, session, prompt.parent, prompt.chunk_keys)
        if match is not None:
            comparison.previous, comparison.common_tokens = match
            comparison.is_same_session = comparison.previous.session == session
            comparison.scope_difference = _classify_scope_difference(comparison.previous.scope, scope)
        return comparison

    @staticmethod
    def _explain(
        prompt: AnalyzedPrompt, comparison: PromptComparison, placement: Placement, facts: MissFacts
    ) -> MissExplanation:
        explanation = _new_explanation(prompt.request_id, prompt.session_name, comparison.prompt_tokens, placement)
        explanation.is_compared = comparison.previous is not None or not comparison.is_history_incomplete
        explanation.uncached_ranges = attribute_misses(comparison, placement, facts)
        explanation.update_main_reason()
        return explanation


def compute_short_keys(index: PrefixIndex, token_ids: Sequence[int], scope: Scope, chunk_tokens: int) -> list[int]:
    """The keys of a prompt's first chunk of so many tokens."""
    return index.chunk_keys(token_ids[: chunk_tokens + 1], scope, SHORT_KEY_TOKENS)


def select_lookup_keys(keys: Sequence[int]) -> tuple[int, ...]:
    """The chunks by which a prompt without a session's name is found again: its last, and those at powers of two."""
    remaining_count, selected_keys = len(keys), list[int]()
    while remaining_count:
        selected_keys.append(keys[remaining_count - 1])
        remaining_count //= 2
    selected_keys.reverse()
    return tuple(selected_keys)


def _new_explanation(id: str, session: str | None, prompt_tokens: int, placement: Placement) -> MissExplanation:
    decision = placement.decision
    best = decision.most_cached or decision.terms
    return MissExplanation(
        id=id,
        timestamp=placement.timestamp,
        session=session,
        worker=decision.worker,
        prompt_tokens=prompt_tokens,
        best_cached_tokens=best.cached_tokens,
        best_worker=best.worker,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        attempt=decision.attempt,
    )


def _classify_scope_difference(old: Scope, new: Scope) -> str | None:
    if old.model != new.model:
        return "model"
    return "lora" if old.lora != new.lora else "salt" if old.salt != new.salt else None
