"""Why a prompt was not cached: every token that had to be computed, and the reason. Pure.

Owns the reasons. A prompt's tokens [0, L) are cut at the ends of nested beginnings: what was predicted to be cached
where it went, what the best worker had, what the fleet held once, what the conversation's last prompt and answer had.
Invariant: the parts are what lies between what was predicted and L, in order and without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from router.decide.messages import Decision
from router.miss_reasons.differences import classify_answer_change, classify_difference, find_added_system_prompt
from router.miss_reasons.explanation import NOT_COMPARED, UncachedRange
from router.miss_reasons.prompt_history import PreviousPrompt
from router.prompting.chat_outline import Outline

BLOCK_TOKENS: Final = 16
"""Where a worker does not tell."""
TEMPLATE_TAIL_TOKENS: Final = 16
"""A prompt's end, with which the template asks for an answer."""
ANNOUNCEMENT_S_MAX: Final = 5.0
"""What was computed longer ago and was never announced will not be."""


class RemovedPrefix(NamedTuple):
    """Some of a prompt that was held, and removed."""

    end_token: int
    """Tokens of the prompt up to where it was held."""
    worker: str
    removed_at_s: float


class Placement(NamedTuple):
    """Where a request went, and what was known then."""

    decision: Decision
    removed_prefix: RemovedPrefix | None
    """What of its prompt was held and removed, behind what some worker has."""
    block_tokens: int
    """Tokens of the chosen worker's blocks."""
    at_s: float
    """When its answer began."""
    timestamp: float
    """The same by the wall clock."""


class MissFacts(Protocol):
    """What is asked only where something is missing."""

    def last_emptied_s(self, worker_id: str) -> float | None:
        """When a worker last lost all it held; None where it did not."""

    def is_thinking(self, model: str, ids: Sequence[int]) -> bool:
        """Whether what a few tokens say begins or ends a thought."""

    def has_approximate_cache(self, worker_id: str) -> bool:
        """Whether a worker's cache is guessed: it tells nothing of what it removes."""


class PromptComparison:
    """One prompt of so many tokens, and what came before it."""

    def __init__(self, prompt_tokens: int, previous: PreviousPrompt | None) -> None:
        self.prompt_tokens, self.previous = prompt_tokens, previous
        self.common_tokens = 0
        """Tokens that both begin with."""
        self.outline: Outline | None = None
        self.is_same_session = True
        """False: the past prompt is the parent's."""
        self.scope_difference: str | None = None
        """What of the scope does: salt, lora, model."""
        self.is_history_incomplete = False
        """Earlier prompts of its conversation may have been, and were not kept."""


class _RangeBuilder:
    """Builds the uncached ranges of a prompt in order, each beginning at `offset`, where the last one ended."""

    def __init__(self, offset: int, prompt_tokens: int) -> None:
        self.offset, self._prompt_tokens = offset, prompt_tokens
        self.ranges: list[UncachedRange] = []

    def add(
        self,
        reason: str,
        end: int,
        *,
        position: int | None = None,
        message: int | None = None,
        worker: str | None = None,
        lost_ago_s: float | None = None,
        chosen_ttft_s: float | None = None,
        best_ttft_s: float | None = None,
    ) -> None:
        """Append the range from `offset` to `end`, cut at the end of the prompt; nothing where it is empty.

        A range that differs from the last one in nothing but its place extends that one.
        """
        end = min(end, self._prompt_tokens)
        if end <= self.offset:
            return
        uncached_range = UncachedRange(
            reason, self.offset, end, position, message, worker, lost_ago_s, chosen_ttft_s, best_ttft_s
        )
        if self.ranges and self.ranges[-1].has_same_cause(uncached_range):
            self.ranges[-1].end = end
        else:
            self.ranges.append(uncached_range)
        self.offset = end


def find_first_missing_token(decision: Decision) -> int:
    """Return the position of the first token of a prompt that no candidate has cached."""
    best = decision.most_cached
    return max(decision.predicted_cached_tokens, 0 if best is None else best.cached_tokens)


def attribute_without_comparison(prompt_tokens: int, placement: Placement) -> list[UncachedRange]:
    """Attribute the tokens behind the predicted hit to reasons that need only the decision and the index."""
    builder = _start_ranges(prompt_tokens, placement.decision)
    _add_evicted(builder, placement)
    builder.add(NOT_COMPARED, prompt_tokens)
    return builder.ranges


def attribute_misses(comparison: PromptComparison, placement: Placement, facts: MissFacts) -> list[UncachedRange]:
    """The same of a prompt that is compared with the last one of its conversation."""
    previous, block_tokens, prompt_tokens = comparison.previous, placement.block_tokens, comparison.prompt_tokens
    builder = _start_ranges(prompt_tokens, placement.decision)
    is_continuation = previous is not None and comparison.common_tokens == len(previous.token_ids)
    cacheable_tokens = (
        0 if previous is None else previous.cacheable_tokens if is_continuation else comparison.common_tokens
    )
    usable_tokens = _round_down_to_blocks(min(cacheable_tokens, prompt_tokens - 1), block_tokens)
    if previous is None or comparison.scope_difference is not None or builder.offset < usable_tokens:
        _add_evicted(builder, placement)
    if previous is None:
        builder.add(NOT_COMPARED if comparison.is_history_incomplete else "new_session", prompt_tokens)
        return builder.ranges
    if comparison.scope_difference is not None:
        builder.add(comparison.scope_difference, _round_down_to_blocks(comparison.common_tokens, block_tokens))
        builder.add("partial_block", comparison.common_tokens)
    elif builder.offset < _round_down_to_blocks(min(comparison.common_tokens, prompt_tokens - 1), block_tokens):
        reason, lost_ago_s = _classify_loss(previous, facts, placement.at_s)
        builder.add(reason, usable_tokens, worker=previous.worker, lost_ago_s=lost_ago_s)
    if not is_continuation and comparison.is_same_session and comparison.scope_difference is None:
        difference, message_index = _classify_message_difference(comparison, previous, facts)
        builder.add(
            difference,
            max(previous.cacheable_tokens, comparison.common_tokens + 1),
            position=comparison.common_tokens,
            message=message_index,
        )
    elif is_continuation and builder.offset < usable_tokens and comparison.outline is not None:
        message_index = previous.message_count
        answer_change = classify_answer_change(comparison.outline, message_index)
        if answer_change is not None:
            builder.add(
                answer_change,
                cacheable_tokens,
                position=max(builder.offset, comparison.common_tokens),
                message=message_index,
            )
    else:
        builder.add("partial_block", cacheable_tokens)
    builder.add("new_text" if comparison.is_same_session else "new_session", prompt_tokens)
    return builder.ranges


def _start_ranges(prompt_tokens: int, decision: Decision) -> _RangeBuilder:
    builder = _RangeBuilder(min(decision.predicted_cached_tokens, prompt_tokens), prompt_tokens)
    best = decision.most_cached
    if best is not None:
        builder.add(
            "cached_elsewhere",
            best.cached_tokens,
            worker=best.worker,
            chosen_ttft_s=decision.terms.ttft_s,
            best_ttft_s=best.ttft_s,
        )
    return builder


def _add_evicted(builder: _RangeBuilder, placement: Placement) -> None:
    removed_prefix = placement.removed_prefix
    if removed_prefix is not None:
        builder.add(
            "evicted",
            removed_prefix.end_token,
            worker=removed_prefix.worker,
            lost_ago_s=round(placement.at_s - removed_prefix.removed_at_s, 3),
        )


def _classify_loss(previous: PreviousPrompt, facts: MissFacts, now: float) -> tuple[str, float | None]:
    """(why nobody has what the past prompt's worker computed, how long ago it lost it)."""
    emptied_s = facts.last_emptied_s(previous.worker)
    if emptied_s is not None and emptied_s >= previous.computed_s:
        return "worker_lost", round(now - emptied_s, 3)
    if facts.has_approximate_cache(previous.worker) or now - previous.computed_s > ANNOUNCEMENT_S_MAX:
        return "evicted", None
    return "not_announced", None


def _classify_message_difference(
    comparison: PromptComparison, previous: PreviousPrompt, facts: MissFacts
) -> tuple[str, int | None]:
    """How the prompt differs from the past one, in which message."""
    if comparison.outline is None or previous.outline is None:
        return "edited", None
    difference, message_index = classify_difference(
        previous.outline, comparison.outline, comparison.common_tokens / len(previous.token_ids)
    )
    is_tail = len(previous.token_ids) - comparison.common_tokens <= TEMPLATE_TAIL_TOKENS
    if difference == "re_encoded" and not is_tail:
        added_prompt_index = find_added_system_prompt(previous.outline, comparison.outline)
        if added_prompt_index is not None:  # the template put it before what had been said
            return "system_prompt", added_prompt_index
    if (
        difference == "re_encoded"
        and is_tail
        and classify_answer_change(comparison.outline, previous.message_count) is not None
    ):
        # What the template put before the answer is not what stands before it now.
        is_thought = facts.is_thinking(previous.scope.model, previous.token_ids[comparison.common_tokens :])
        return ("thinking_dropped" if is_thought else difference), previous.message_count
    return difference, message_index


def _round_down_to_blocks(tokens: int, block_tokens: int) -> int:
    """Rounded down to blocks."""
    return tokens - tokens % block_tokens
