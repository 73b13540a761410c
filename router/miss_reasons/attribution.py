"""Attribute every uncached token of a prompt to a reason. No I/O.

A worker keeps the keys and values (KV) of computed prompts in blocks of tokens, so that it computes a later prompt only
from the first token that differs. The tokens after the predicted cached prefix are split at the ends of three longer
ones: cached at the best worker, cached at any worker before, shared with the conversation's last prompt and answer.
Invariant: the ranges cover these tokens in order and without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from router.decide.messages import Decision
from router.miss_reasons.differences import (
    PromptDifference,
    classify_answer_change,
    classify_difference,
    find_added_system_prompt,
)
from router.miss_reasons.explanation import UncachedRange
from router.miss_reasons.prompt_history import AnalyzedPrompt, PromptMatch

BLOCK_TOKENS: Final = 16
"""Block size of a worker that reports none."""
GENERATION_PROMPT_TOKENS_MAX: Final = 16
"""Longest generation prompt: the tokens with which a chat template ends a prompt, so that the model answers."""
ANNOUNCEMENT_S_MAX: Final = 5.0
"""Time after which blocks that were computed and not announced count as evicted."""


class RemovedPrefix(msgspec.Struct, frozen=True):
    """A prefix of a prompt that a worker had, and has removed."""

    end_token: int
    """Length of the prefix in tokens."""
    worker: str
    removed_at_s: float


class Placement(msgspec.Struct, frozen=True, eq=False):
    """The worker of a request, and the facts at its first byte."""

    decision: Decision
    removed_prefix: RemovedPrefix | None
    """Longest removed prefix beyond what any worker has; None if there is none."""
    block_tokens: int
    """Block size of the chosen worker in tokens."""
    at_s: float
    """Time of the answer's first byte, by the monotonic clock."""
    timestamp: float
    """Time of the answer's first byte, by the wall clock."""


class MissFacts(Protocol):
    """Facts about workers and tokens that an analysis asks for only if it needs them."""

    def last_emptied_s(self, worker_id: str) -> float | None:
        """Return when a worker last lost its whole cache; None if it never did."""

    def is_thinking(self, model: str, ids: Sequence[int]) -> bool:
        """Return whether the text of these tokens begins or ends a reasoning block."""

    def has_approximate_cache(self, worker_id: str) -> bool:
        """Return whether a worker's cache is estimated, as the worker does not announce what it removes."""


class _RangeBuilder:
    """Builds a prompt's ranges of uncached tokens, without gaps: the next range begins at `offset`.

    The first range begins after the tokens cached at the chosen worker. If another worker has more of the prompt
    cached, the range ends with these tokens.
    """

    def __init__(self, prompt_tokens: int, placement: Placement) -> None:
        self.prompt_tokens = prompt_tokens
        self.placement = placement
        self.offset = min(placement.decision.predicted_cached_tokens, prompt_tokens)
        self.ranges: list[UncachedRange] = []
        best = placement.decision.most_cached
        if best is not None:
            chosen_ttft_s = placement.decision.terms.ttft_s
            self.add(
                "cached_elsewhere", best.cached_tokens, worker=best.worker, chosen_ttft_s=chosen_ttft_s,
                best_ttft_s=best.ttft_s,
            )  # fmt: skip

    def add(self, reason: str, end: int, **details: Any) -> None:
        """Append the range of tokens from `offset` to `end`, or to the end of the prompt. An empty one is not added.

        `details`: further fields of the range. If its cause is that of the last range, the last range is extended.
        """
        end = min(end, self.prompt_tokens)
        if end <= self.offset:
            return
        uncached_range = UncachedRange(reason, self.offset, end, **details)
        if self.ranges and self.ranges[-1].has_same_cause(uncached_range):
            self.ranges[-1].end = end
        else:
            self.ranges.append(uncached_range)
        self.offset = end

    def add_evicted(self) -> None:
        """Add the tokens that some worker had cached and has removed, up to the end of the removed prefix."""
        removed = self.placement.removed_prefix
        if removed is not None:
            lost_ago_s = round(self.placement.at_s - removed.removed_at_s, 3)
            self.add("evicted", removed.end_token, worker=removed.worker, lost_ago_s=lost_ago_s)

    def round_down_to_blocks(self, tokens: int) -> int:
        """Return how many of the first `tokens` can be cached: whole blocks, and never the last token of the prompt."""
        cacheable_tokens = min(tokens, self.prompt_tokens - 1)
        return cacheable_tokens - cacheable_tokens % self.placement.block_tokens


def find_first_missing_token(decision: Decision) -> int:
    """Return the position of the first token of a prompt that no candidate has cached."""
    best = decision.most_cached
    return max(decision.predicted_cached_tokens, 0 if best is None else best.cached_tokens)


def attribute_without_match(prompt_tokens: int, placement: Placement, reason: str) -> list[UncachedRange]:
    """Return the uncached ranges of a prompt that is compared with no other one.

    The decision and the index alone show some reasons; the tokens after these have the given one.
    """
    builder = _RangeBuilder(prompt_tokens, placement)
    builder.add_evicted()
    builder.add(reason, prompt_tokens)
    return builder.ranges


def correct_ranges(
    ranges: Sequence[UncachedRange], prompt_tokens: int, decision: Decision, reported_tokens: int
) -> list[UncachedRange]:
    """Correct the uncached ranges of a prompt by the number of cached tokens that its worker reported.

    Predicted tokens that were not cached are added. If the worker's events had announced 64 tokens, 96 were predicted
    and 32 are reported, then tokens 32-64 were mispredicted, and 64-96 were not announced.
    """
    worker, predicted_tokens = decision.worker, decision.predicted_cached_tokens
    reused_tokens = min(reported_tokens, prompt_tokens)
    announced_tokens = min(max(decision.terms.resident_tokens, reused_tokens), predicted_tokens)
    corrected_ranges = [
        UncachedRange("mispredicted", reused_tokens, announced_tokens, worker=worker),
        UncachedRange("not_announced", announced_tokens, predicted_tokens, worker=worker),
        *ranges,
    ]
    started_ranges = [
        msgspec.structs.replace(uncached, start=max(uncached.start, reused_tokens)) for uncached in corrected_ranges
    ]
    return [uncached for uncached in started_ranges if uncached.end > uncached.start]


def attribute_misses(match: PromptMatch, placement: Placement, facts: MissFacts) -> list[UncachedRange]:
    """Return the ranges of a prompt's tokens that the chosen worker has to compute, each with the reason.

    `match`: the prompt and its conversation's last one. For example, a prompt of 100 tokens begins with the 70 tokens
    of the last prompt and its answer, and the worker has the first 32 cached, in blocks of 16. Then tokens 32 to 63
    were evicted, 64 to 69 are a partial block, and 70 to 99 are new text.
    """
    builder = _RangeBuilder(len(match.prompt.token_ids), placement)
    # First the tokens that both prompts have in common.
    if match.scope_difference is None:
        _add_lost(builder, match, facts)
    else:
        _add_other_scope(builder, match, match.scope_difference)
    # Then the tokens that were changed.
    if match.is_continuation:
        _add_rewritten_answer(builder, match)
    elif match.is_same_session and match.scope_difference is None:
        difference = _classify_message_difference(match, facts)
        changed_until = max(match.previous.cacheable_tokens, match.common_tokens + 1)
        builder.add(difference.kind, changed_until, position=match.common_tokens, message=difference.message_index)
    else:  # a prompt of the parent session, or of another model: nothing in it was changed
        builder.add("partial_block", match.common_tokens)
    # The others were added at the end.
    builder.add("new_text" if match.is_same_session else "new_session", builder.prompt_tokens)
    return builder.ranges


def _add_other_scope(builder: _RangeBuilder, match: PromptMatch, scope_difference: str) -> None:
    """Add the tokens shared with a last prompt that was for another model, LoRA adapter or cache salt.

    Blocks of one of these are of no use to another, though the tokens are the same.
    """
    builder.add_evicted()
    builder.add(scope_difference, match.common_tokens - match.common_tokens % builder.placement.block_tokens)
    builder.add("partial_block", match.common_tokens)


def _add_lost(builder: _RangeBuilder, match: PromptMatch, facts: MissFacts) -> None:
    """Add the tokens that the conversation's last prompt left in a cache, and that are no longer there."""
    usable_tokens = builder.round_down_to_blocks(match.repeated_tokens)
    if builder.offset < usable_tokens:
        # Some worker has told that it removed the first of these blocks.
        builder.add_evicted()
    # No worker has told of the others, so their loss is inferred from the state of the last prompt's worker.
    if builder.offset < builder.round_down_to_blocks(match.common_tokens):
        reason, lost_ago_s = _classify_loss(match.previous, facts, builder.placement.at_s)
        builder.add(reason, usable_tokens, worker=match.previous.worker, lost_ago_s=lost_ago_s)


def _add_rewritten_answer(builder: _RangeBuilder, match: PromptMatch) -> None:
    """Add the tokens at the end of the last prompt and its answer, which the new prompt repeats.

    Tokens that fill no whole block were never cached. If whole blocks are missing, although no worker lost them, the
    client or the chat template has written the answer otherwise than the model did.
    """
    previous, outline = match.previous, match.prompt.outline
    is_partial_block = builder.offset >= builder.round_down_to_blocks(match.repeated_tokens)
    if is_partial_block or outline is None:
        builder.add("partial_block", previous.cacheable_tokens)
        return
    answer_index = previous.message_count  # the answer follows the messages of the last prompt
    answer_change = classify_answer_change(outline, answer_index)
    if answer_change is not None:
        position = max(builder.offset, match.common_tokens)
        builder.add(answer_change, previous.cacheable_tokens, position=position, message=answer_index)


def _classify_loss(previous: AnalyzedPrompt, facts: MissFacts, now: float) -> tuple[str, float | None]:
    """Return why no worker has the blocks of the conversation's last prompt, though none told that it removed them.

    The second value is the time in seconds since their loss; None if it is unknown.
    """
    emptied_s = facts.last_emptied_s(previous.worker)
    if emptied_s is not None and emptied_s >= previous.computed_s:
        return "worker_lost", round(now - emptied_s, 3)
    if facts.has_approximate_cache(previous.worker) or now - previous.computed_s > ANNOUNCEMENT_S_MAX:
        return "evicted", None
    return "not_announced", None


def _classify_message_difference(match: PromptMatch, facts: MissFacts) -> PromptDifference:
    """Return how a prompt that does not begin with its conversation's last one differs from that one.

    Mostly the messages tell it. "re_encoded" means that the template rendered the same messages to other tokens. Then
    it matters whether only the last prompt's end differs, the generation prompt, with which the answer begins.
    """
    old_outline, new_outline = match.previous.outline, match.prompt.outline
    if old_outline is None or new_outline is None:
        return PromptDifference("edited")
    common_share = match.common_tokens / len(match.previous.token_ids)
    difference = classify_difference(old_outline, new_outline, common_share)
    if difference.kind != "re_encoded":
        return difference
    differing_ids = match.previous.token_ids[match.common_tokens :]
    is_only_end_different = len(differing_ids) <= GENERATION_PROMPT_TOKENS_MAX
    answer_index = old_outline.message_count
    has_answer = classify_answer_change(new_outline, answer_index) is not None
    if is_only_end_different and has_answer:  # the answer, now a message, begins without `<think>`, for example
        is_thinking = facts.is_thinking(match.previous.route.scope.model, differing_ids)
        return PromptDifference("thinking_dropped" if is_thinking else "re_encoded", answer_index)
    system_prompt_index = find_added_system_prompt(old_outline, new_outline)
    if not is_only_end_different and system_prompt_index is not None:  # it is last, and rendered before all others
        return PromptDifference("system_prompt", system_prompt_index)
    return difference
