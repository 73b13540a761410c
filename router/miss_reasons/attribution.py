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
from router.prompting.outlined import Outline

BLOCK_TOKENS: Final = 16
"""Where a worker does not tell."""
TEMPLATE_TAIL_TOKENS: Final = 16
"""A prompt's end, with which the template asks for an answer."""
ANNOUNCEMENT_S_MAX: Final = 5.0
"""What was computed longer ago and was never announced will not be."""


class RemovedPrefix(NamedTuple):
    """Some of a prompt that was held, and removed."""

    end: int
    """Tokens of the prompt up to where it was held."""
    worker: str
    at_s: float


class MissContext(Protocol):
    """What is asked only where something is missing."""

    def emptied(self, worker_id: str) -> float | None:
        """When a worker last lost all it held; None where it did not."""

    def thinks(self, model: str, ids: Sequence[int]) -> bool:
        """Whether what a few tokens say begins or ends a thought."""

    def guessed(self, worker_id: str) -> bool:
        """Whether a worker's cache is guessed: it tells nothing of what it removes."""


class PromptComparison:
    """One prompt of so many tokens, and what came before it. `block`: tokens of the chosen worker's blocks."""

    def __init__(self, tokens: int, block: int, past: PreviousPrompt | None) -> None:
        self.tokens, self.block, self.past = tokens, block, past
        self.common = 0
        """Tokens that both begin with."""
        self.outline: Outline | None = None
        self.same_session = True
        """False: the past prompt is the parent's."""
        self.differs: str | None = None
        """What of the scope does: salt, lora, model."""
        self.unknown_before = False
        """Earlier prompts of its conversation may have been, and were not kept."""


class _RangeBuilder:
    """Of a prompt of so many tokens, from `at` on, one behind the other."""

    def __init__(self, at: int, length: int) -> None:
        self.at, self._length = at, length
        self.found: list[UncachedRange] = []

    def add(
        self,
        reason: str,
        end: int,
        *,
        position: int | None = None,
        message: int | None = None,
        worker: str | None = None,
        ago_s: float | None = None,
        here_s: float | None = None,
        there_s: float | None = None,
    ) -> None:
        """What is left up to `end`, if anything is."""
        end = min(end, self._length)
        if end > self.at:
            self.found.append(UncachedRange(reason, self.at, end, position, message, worker, ago_s, here_s, there_s))
            self.at = end


def first_missing_token(decision: Decision) -> int:
    """The first token of a prompt that no worker which could be chosen has."""
    best = decision.most_cached
    return max(decision.predicted_cached_tokens, 0 if best is None else best.cached_tokens)


def attribute_without_comparison(
    tokens: int, decision: Decision, gone: RemovedPrefix | None, now: float
) -> list[UncachedRange]:
    """[what was predicted to be cached, the prompt's length) of so many tokens, part by part, as far as decision and
    index tell."""
    parts = _start_ranges(tokens, decision)
    _add_evicted(parts, gone, now)
    parts.add(NOT_COMPARED, tokens)
    return parts.found


def attribute_misses(
    turn: PromptComparison, decision: Decision, gone: RemovedPrefix | None, facts: MissContext, now: float
) -> list[UncachedRange]:
    """The same of a prompt that is compared with the last one of its conversation."""
    past, block, length = turn.past, turn.block, turn.tokens
    parts = _start_ranges(length, decision)
    goes_on = past is not None and turn.common == len(past.ids)
    known = 0 if past is None else past.known_tokens if goes_on else turn.common
    usable = _round_down_to_blocks(min(known, length - 1), block)
    if past is None or turn.differs is not None or parts.at < usable:
        _add_evicted(parts, gone, now)
    if past is None:
        parts.add(NOT_COMPARED if turn.unknown_before else "new_session", length)
        return parts.found
    if turn.differs is not None:
        parts.add(turn.differs, _round_down_to_blocks(turn.common, block))
        parts.add("block_rest", turn.common)
    elif parts.at < _round_down_to_blocks(min(turn.common, length - 1), block):
        reason, ago_s = _loss_reason(past, facts, now)
        parts.add(reason, usable, worker=past.worker, ago_s=ago_s)
    if not goes_on and turn.same_session and turn.differs is None:
        how, message = _message_difference(turn, past, facts)
        parts.add(how, max(past.known_tokens, turn.common + 1), position=turn.common, message=message)
    elif goes_on and parts.at < usable and turn.outline is not None:
        message = past.messages
        answer = classify_answer_change(turn.outline, message)
        if answer is not None:
            parts.add(answer, known, position=max(parts.at, turn.common), message=message)
    else:
        parts.add("block_rest", known)
    parts.add("new_text" if turn.same_session else "new_session", length)
    return parts.found


def _start_ranges(tokens: int, decision: Decision) -> _RangeBuilder:
    parts = _RangeBuilder(min(decision.predicted_cached_tokens, tokens), tokens)
    best = decision.most_cached
    if best is not None:
        parts.add(
            "elsewhere", best.cached_tokens, worker=best.worker, here_s=decision.terms.ttft_s, there_s=best.ttft_s
        )
    return parts


def _add_evicted(parts: _RangeBuilder, gone: RemovedPrefix | None, now: float) -> None:
    if gone is not None:
        parts.add("evicted", gone.end, worker=gone.worker, ago_s=round(now - gone.at_s, 3))


def _loss_reason(past: PreviousPrompt, facts: MissContext, now: float) -> tuple[str, float | None]:
    """(why nobody has what the past prompt's worker computed, how long ago it lost it)."""
    emptied_s = facts.emptied(past.worker)
    if emptied_s is not None and emptied_s >= past.at_s:
        return "worker_lost", round(now - emptied_s, 3)
    if facts.guessed(past.worker) or now - past.at_s > ANNOUNCEMENT_S_MAX:
        return "evicted", None
    return "not_announced", None


def _message_difference(turn: PromptComparison, past: PreviousPrompt, facts: MissContext) -> tuple[str, int | None]:
    """How the prompt differs from the past one, in which message."""
    if turn.outline is None or past.outline is None:
        return "edited", None
    how, message = classify_difference(past.outline, turn.outline, turn.common / len(past.ids))
    is_tail = len(past.ids) - turn.common <= TEMPLATE_TAIL_TOKENS
    if how == "re_encoded" and not is_tail:
        added = find_added_system_prompt(past.outline, turn.outline)
        if added is not None:  # the template put it before what had been said
            return "system_prompt", added
    if how == "re_encoded" and is_tail and classify_answer_change(turn.outline, past.messages) is not None:
        # What the template put before the answer is not what stands before it now.
        thinks = facts.thinks(past.scope.model, past.ids[turn.common :])
        return ("thinking_dropped" if thinks else how), past.messages
    return how, message


def _round_down_to_blocks(tokens: int, block: int) -> int:
    """Rounded down to blocks."""
    return tokens - tokens % block
