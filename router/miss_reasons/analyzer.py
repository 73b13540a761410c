"""The latest requests, each with the reasons why its prompt was not cached, and the sums by reason. No I/O.

Most requests are only placed: their reasons are found from the decision when a client asks for them. Requests of a
sampled share of the conversations, and of watched ones, are compared with the last prompt of their conversation.
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
"""Tokens between the short keys of a prompt: a prompt without a whole chunk is found by these."""


class AnalyzedPrompt:
    """A prompt that is compared, after the first byte of its answer or for `POST /route`."""

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
        """Id by which the client knows the request."""
        self.token_ids, self.scope, self.outline = token_ids, route.scope, outline
        self.session_name, self.parent, self.is_final = route.session, route.parent, route.is_final
        self.chunk_keys = chunk_keys
        """Digests of the prompt up to the end of each chunk, where its session has no name."""
        self.short_keys = short_keys
        """Digests of beginnings of the first chunk, where the session has no name and some prompt has no chunk."""
        self.opening_key = opening_key
        """Digest of the first message of the user, where the session has no name.

        It tells conversations apart that share all of their chunks, as they share a system prompt.
        """
        self.is_history_incomplete = is_history_incomplete
        """Whether the conversation may have had earlier prompts that were not stored."""

    @property
    def lookup_keys(self) -> list[int]:
        """Keys of the prompts that this prompt may continue, the shortest first."""
        opening_keys = () if self.opening_key is None else (self.opening_key,)
        return [*self.short_keys, *self.chunk_keys, *opening_keys]


class PlacedRequest:
    """A request with a prompt that is not compared, from the first byte of its answer on."""

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
        """Explanation by the reasons that need only the decision and the index."""
        explanation = _new_explanation(self.id, self._session, self.prompt_tokens, self._placement)
        explanation.is_compared = False
        explanation.uncached_ranges = attribute_without_comparison(self.prompt_tokens, self._placement)
        explanation.update_main_reason()
        if self._reported_tokens is not None:
            explanation.apply_reported_tokens(self.decision.terms.resident_tokens, self._reported_tokens)
        return explanation

    def apply_reported_tokens(self, reported_tokens: int) -> None:
        """Record the number of tokens that the worker reported as reused."""
        self._reported_tokens = reported_tokens


class ComparedRequest:
    """A request with a prompt that was compared, from the first byte of its answer on."""

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
        """Whether the request is counted by reason, as its conversation belongs to the sampled share."""

    @property
    def id(self) -> str:
        return self.explanation.id

    @property
    def prompt_tokens(self) -> int:
        return self.explanation.prompt_tokens

    def apply_reported_tokens(self, reported_tokens: int) -> None:
        """Record the number of tokens that the worker reported as reused."""
        self.explanation.apply_reported_tokens(self.decision.terms.resident_tokens, reported_tokens)


AnalyzedRequest: TypeAlias = PlacedRequest | ComparedRequest


class MissAnalyzer:
    """Analyses the requests of a process."""

    def __init__(
        self,
        config: MissReasonsConfig,
        count_common_tokens: Callable[[array[int], array[int]], int],
        requests_by_reason: Counter[str] | None = None,
        tokens_by_reason: Counter[str] | None = None,
        reuse_sums: Counter[str] | None = None,
    ) -> None:
        """`count_common_tokens` returns the length of the common beginning of two prompts."""
        self.history = PromptHistory(config.memory_mb << 20, config.ttl_s, count_common_tokens)
        self._max_recent_requests = config.requests_max
        self._recent_requests: OrderedDict[str, AnalyzedRequest] = OrderedDict()
        """Request id -> last request of that id, the oldest first."""
        self.requests_by_reason: Counter[str] = Counter() if requests_by_reason is None else requests_by_reason
        """Main reason -> requests of the sampled share."""
        self.tokens_by_reason: Counter[str] = Counter() if tokens_by_reason is None else tokens_by_reason
        """Reason -> uncached tokens of the sampled share."""
        self.reuse_sums: Counter[str] = Counter() if reuse_sums is None else reuse_sums
        """Tokens of all requests with a report of the worker: prompt, best, chosen, reported."""

    def __len__(self) -> int:
        return len(self._recent_requests)

    def get(self, request_id: str) -> MissExplanation | None:
        """Return the explanation of a request; None if the request is unknown."""
        request = self._recent_requests.get(request_id)
        return None if request is None else request.explanation

    def needs_short_keys(self, chunk_keys: Sequence[int]) -> bool:
        """Return whether a prompt with these chunks, in a session without a name, needs short keys."""
        return not chunk_keys or self.history.short_prompts > 0

    def explain(self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts) -> MissExplanation:
        """Explain a request that was not sent. Changes nothing."""
        return self._explain(prompt, self._compare(prompt), placement, facts)

    def record_placed(self, id: str, session: str | None, prompt_tokens: int, placement: Placement) -> PlacedRequest:
        """Record a request at its first byte, without comparing its prompt."""
        request = PlacedRequest(id, session, prompt_tokens, placement)
        self._store(request)
        return request

    def record_compared(
        self, prompt: AnalyzedPrompt, placement: Placement, facts: MissFacts, *, is_sampled: bool = True
    ) -> ComparedRequest:
        """Compare and record a request at its first byte. Raises ValueError for blocks without tokens."""
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
        if len(prompt.token_ids) >= block_tokens:  # a shorter prompt is never cached
            self.history.add(stored_prompt, replaces=comparison.previous)
        request = ComparedRequest(explanation, stored_prompt, decision, is_final=prompt.is_final, is_sampled=is_sampled)
        self._store(request)
        return request

    def record_end(self, request: AnalyzedRequest, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        """Record the end of a request, with the usage that the worker reported."""
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
        """Compare a prompt with the last prompt of its conversation."""
        token_ids, scope, session, history = prompt.token_ids, prompt.scope, prompt.session_name, self.history
        previous = history.find_continued(token_ids, scope, session, prompt.lookup_keys)
        comparison = PromptComparison(len(token_ids), previous)
        comparison.outline, comparison.is_history_incomplete = prompt.outline, prompt.is_history_incomplete
        if previous is not None:
            comparison.common_tokens = len(previous.token_ids)
            return comparison
        match = history.find_previous(token_ids, comparison.outline, session, prompt.parent, prompt.chunk_keys)
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
    """Return the digests of beginnings of a prompt's first chunk of `chunk_tokens`."""
    return index.chunk_keys(token_ids[: chunk_tokens + 1], scope, SHORT_KEY_TOKENS)


def select_lookup_keys(keys: Sequence[int]) -> tuple[int, ...]:
    """Return the keys by which a prompt is stored: those of the last chunk, and at half, a quarter, ... of it."""
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
