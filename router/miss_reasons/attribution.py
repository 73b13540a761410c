"""Attribute every uncached token of a prompt to a reason. No I/O.

The tokens are split at the ends of four prefixes: the one predicted to be cached at the chosen worker, the one cached
at the best worker, the one that any worker had before, and the one shared with the conversation's last prompt and
answer. Invariant: the ranges cover the tokens behind the predicted prefix, in order and without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from router.decide.messages import Decision
from router.miss_reasons.differences import classify_answer_change, classify_difference, find_added_system_prompt
from router.miss_reasons.explanation import NOT_COMPARED, UncachedRange
from router.miss_reasons.prompt_history import AnalyzedPrompt, PreviousPrompt, PromptMatch

BLOCK_TOKENS: Final = 16
"""Block size of a worker that reports none."""
TEMPLATE_TAIL_TOKENS: Final = 16
"""Most tokens at the end of a prompt with which the template asks for an answer."""
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
    """Builds the uncached ranges of a prompt from its beginning to its end, without gaps.

    Each range begins at `offset`, where the last one ended.
    """

    def __init__(self, offset: int, prompt_tokens: int) -> None:
        self.offset = offset
        self.prompt_tokens = prompt_tokens
        self.ranges: list[UncachedRange] = []

    def add(self, reason: str, end: int, **details: Any) -> None:
        """Append the range from `offset` to `end`, and move `offset` there. `details`: further fields of the range.

        `end` is limited to the end of the prompt, and an empty range is not added. A range with the same cause as the
        last range extends the last range.
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


def find_first_missing_token(decision: Decision) -> int:
    """Return the position of the first token of a prompt that no candidate has cached."""
    best = decision.most_cached
    return max(decision.predicted_cached_tokens, 0 if best is None else best.cached_tokens)


def attribute_without_comparison(prompt_tokens: int, placement: Placement) -> list[UncachedRange]:
    """Return the uncached ranges of a prompt, with the reasons that the decision and the index alone show."""
    builder = _start_ranges(prompt_tokens, placement.decision)
    _add_evicted(builder, placement)
    builder.add(NOT_COMPARED, prompt_tokens)
    return builder.ranges


def attribute_misses(
    prompt: AnalyzedPrompt, match: PromptMatch | None, placement: Placement, facts: MissFacts
) -> list[UncachedRange]:
    """Return the uncached ranges of a prompt, each with the reason why the chosen worker has to compute it.

    The causes follow each other along the prompt, so each step below extends the ranges to a later token: cached at
    another worker only, evicted or lost since the conversation's last prompt, changed since that prompt, new.
    `match`: that last prompt; None if the conversation has none.
    """
    builder = _start_ranges(len(prompt.token_ids), placement.decision)
    if match is None:
        _add_evicted(builder, placement)
        builder.add("new_session", builder.prompt_tokens)
        return builder.ranges
    # Workers cache full blocks only, and always compute the last token of a prompt.
    shared_tokens = match.previous.cacheable_tokens if match.is_continuation else match.common_tokens
    usable_tokens = _round_down_to_blocks(min(shared_tokens, builder.prompt_tokens - 1), placement.block_tokens)
    _add_lost(builder, match, usable_tokens, placement, facts)
    _add_changed(builder, prompt, match, usable_tokens, facts)
    builder.add("new_text" if match.is_same_session else "new_session", builder.prompt_tokens)
    return builder.ranges


def _start_ranges(prompt_tokens: int, decision: Decision) -> _RangeBuilder:
    """Return a builder that begins after the tokens predicted to be cached at the chosen worker.

    Its first range is the one that only another worker has cached, if there is one.
    """
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
    """Add the tokens that some worker had cached and has removed, up to the end of the removed prefix."""
    removed_prefix = placement.removed_prefix
    if removed_prefix is not None:
        builder.add(
            "evicted",
            removed_prefix.end_token,
            worker=removed_prefix.worker,
            lost_ago_s=round(placement.at_s - removed_prefix.removed_at_s, 3),
        )


def _add_lost(
    builder: _RangeBuilder, match: PromptMatch, usable_tokens: int, placement: Placement, facts: MissFacts
) -> None:
    """Add the tokens that the conversation's last prompt left in a cache, and that are no longer there or unusable.

    `builder` goes on where its last range ended. `usable_tokens`: end of the last full block that the new prompt has
    in common with the last prompt and its answer. With blocks of 16 tokens and 70 tokens in common it is 64.
    """
    if match.scope_difference is not None:
        # The last prompt was for another model, LoRA adapter or salt, so its blocks serve no token of this prompt.
        _add_evicted(builder, placement)
        builder.add(match.scope_difference, _round_down_to_blocks(match.common_tokens, placement.block_tokens))
        builder.add("partial_block", match.common_tokens)
        return
    if builder.offset < usable_tokens:
        # Some worker has told that it removed the first of these blocks.
        _add_evicted(builder, placement)
    # No worker has told of the others, so their loss is inferred from the state of the last prompt's worker.
    common_tokens = min(match.common_tokens, builder.prompt_tokens - 1)  # the last token is always computed
    if builder.offset < _round_down_to_blocks(common_tokens, placement.block_tokens):
        reason, lost_ago_s = _classify_loss(match.previous, facts, placement.at_s)
        builder.add(reason, usable_tokens, worker=match.previous.worker, lost_ago_s=lost_ago_s)


def _add_changed(
    builder: _RangeBuilder, prompt: AnalyzedPrompt, match: PromptMatch, usable_tokens: int, facts: MissFacts
) -> None:
    """Add the tokens after the last usable block that the conversation's last prompt and its answer had too.

    They are computed because the client or the template changed an earlier message (the prompt does not continue the
    last one), because the answer is written otherwise than the model wrote it, or else because they filled no whole
    block and so were never cached. With blocks of 16 tokens and a last prompt of 70, tokens 64 to 69 are such a
    partial block.
    """
    previous = match.previous
    is_comparable = match.is_same_session and match.scope_difference is None
    if not match.is_continuation and is_comparable:
        reason, message_index = _classify_message_difference(prompt, match, facts)
        changed_until = max(previous.cacheable_tokens, match.common_tokens + 1)
        builder.add(reason, changed_until, position=match.common_tokens, message=message_index)
        return
    if not match.is_continuation:  # a prompt of the parent session, or of another model: nothing in it was changed
        builder.add("partial_block", match.common_tokens)
        return
    if builder.offset >= usable_tokens or prompt.outline is None:
        builder.add("partial_block", previous.cacheable_tokens)
        return
    # Full blocks at the end of the last prompt and its answer are missing, and no worker lost them.
    answer_index = previous.message_count
    answer_change = classify_answer_change(prompt.outline, answer_index)
    if answer_change is not None:
        position = max(builder.offset, match.common_tokens)
        builder.add(answer_change, previous.cacheable_tokens, position=position, message=answer_index)


def _classify_loss(previous: PreviousPrompt, facts: MissFacts, now: float) -> tuple[str, float | None]:
    """Return why no worker has the blocks of the conversation's last prompt, though none told that it removed them.

    The second value is the time in seconds since their loss; None if it is unknown.
    """
    emptied_s = facts.last_emptied_s(previous.worker)
    if emptied_s is not None and emptied_s >= previous.computed_s:
        return "worker_lost", round(now - emptied_s, 3)
    if facts.has_approximate_cache(previous.worker) or now - previous.computed_s > ANNOUNCEMENT_S_MAX:
        return "evicted", None
    return "not_announced", None


def _classify_message_difference(
    prompt: AnalyzedPrompt, match: PromptMatch, facts: MissFacts
) -> tuple[str, int | None]:
    """Return how a prompt differs from its conversation's last one, and the index of the message that differs, or None.

    The kind is one of `DifferenceKind`, such as "edited" or "tools". Equal messages with other tokens are "re_encoded"
    at first. Two causes in the chat template are then told apart: it writes a later system prompt before the earlier
    messages, or it writes an answer otherwise than the model did.
    """
    previous = match.previous
    if prompt.outline is None or previous.outline is None:
        return "edited", None
    difference, message_index = classify_difference(
        previous.outline, prompt.outline, match.common_tokens / len(previous.token_ids)
    )
    if difference != "re_encoded":
        return difference, message_index
    differs_in_tail = len(previous.token_ids) - match.common_tokens <= TEMPLATE_TAIL_TOKENS
    if differs_in_tail:  # the tokens that began the answer: a template may write others once it is a message
        if classify_answer_change(prompt.outline, previous.message_count) is None:
            return "re_encoded", message_index
        is_thought = facts.is_thinking(previous.scope.model, previous.token_ids[match.common_tokens :])
        return ("thinking_dropped" if is_thought else "re_encoded"), previous.message_count
    added_prompt_index = find_added_system_prompt(previous.outline, prompt.outline)
    if added_prompt_index is not None:
        return "system_prompt", added_prompt_index
    return "re_encoded", message_index


def _round_down_to_blocks(tokens: int, block_tokens: int) -> int:
    """Return the largest multiple of `block_tokens` that is at most `tokens`."""
    return tokens - tokens % block_tokens
