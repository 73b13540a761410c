"""Why a prompt was not cached: every token that had to be computed, and the reason. Pure.

Owns the reasons. A prompt's tokens [0, L) are cut at the ends of nested beginnings: what the worker reused, what was
predicted there, what the best worker had, what the fleet held once, what the conversation's last prompt and answer had.
Invariant: the parts are what lies between what was reused and L, in order and without a gap.
"""

from __future__ import annotations

from typing import Final

from router.decide.messages import Decision, Terms
from router.prompting.outlined import Outline
from router.turns.parts import Part, Why
from router.turns.why import GROUPS, NO_LOSS, Facts

from .book import Past
from .differences import answered, difference

TAIL_TOKENS: Final = 16
"""A prompt's end, with which the template asks for an answer."""
ANNOUNCED_WITHIN_S: Final = 5.0
"""What was computed longer ago and was never announced will not be."""


class Turn:
    """One prompt of so many tokens, and what came before it. `block`: tokens of the chosen worker's blocks."""

    def __init__(self, tokens: int, block: int, past: Past | None) -> None:
        self.tokens, self.block, self.past = tokens, block, past
        self.common = 0
        """Tokens that both begin with."""
        self.outline: Outline | None = None
        """Whole, where the two part before the past one's end."""
        self.same_session = True
        """False: the past prompt is the parent's."""
        self.differs: str | None = None
        """What of the scope does: salt, lora, model."""


def tell(why: Why) -> None:
    """Sum its parts up."""
    lost = most = most_new = 0
    main: Part | None = None
    new: Part | None = None
    for part in why.parts:
        tokens = part.end - part.start
        if part.reason not in NO_LOSS:
            lost += tokens
            if tokens > most:
                most, main = tokens, part
        elif tokens > most_new:
            most_new, new = tokens, part
    if main is None:
        main = new
    why.lost_tokens = lost
    why.reason = main.reason if main is not None else "new_text"
    why.position = None if main is None else main.start if main.position is None else main.position


class _Parts:
    """Of a prompt of so many tokens, from `at` on, one behind the other."""

    def __init__(self, at: int, length: int) -> None:
        self.at, self._length = at, length
        self.found: list[Part] = []

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
            self.found.append(Part(reason, self.at, end, position, message, worker, ago_s, here_s, there_s))
            self.at = end


def parts_of(turn: Turn, decision: Decision, facts: Facts, now: float) -> list[Part]:
    """[what was predicted to be cached, the prompt's length), part by part."""
    past, block, length = turn.past, turn.block, turn.tokens
    parts = _Parts(min(decision.predicted_cached_tokens, length), length)
    best = decision.best
    if best is not None:
        parts.add(
            "elsewhere", best.cached_tokens, worker=best.worker, here_s=decision.terms.ttft_s, there_s=best.ttft_s
        )
    goes_on = past is not None and turn.common == len(past.ids)
    known = 0 if past is None else past.known_tokens if goes_on else turn.common
    usable = _whole(min(known, length - 1), block)
    if past is None or turn.differs is not None or parts.at < usable:
        gone = facts.gone(parts.at, block)
        if gone is not None:
            parts.add("evicted", gone[0], worker=gone[1], ago_s=round(now - gone[2], 3))
    if past is None:
        parts.add("new_session", length)
        return parts.found
    if turn.differs is not None:
        parts.add(turn.differs, _whole(turn.common, block))
        parts.add("block_rest", turn.common)
    elif parts.at < _whole(min(turn.common, length - 1), block):
        reason, ago_s = _lost(past, facts, now)
        parts.add(reason, usable, worker=past.worker, ago_s=ago_s)
    if not goes_on and turn.same_session and turn.differs is None:
        how, message = _difference(turn, past, facts)
        parts.add(how, max(past.known_tokens, turn.common + 1), position=turn.common, message=message)
    elif goes_on and parts.at < usable and turn.outline is not None:
        message = past.messages
        answer = answered(turn.outline, message)
        if answer is not None:
            parts.add(answer, known, position=max(parts.at, turn.common), message=message)
    else:
        parts.add("block_rest", known)
    parts.add("new_text" if turn.same_session else "new_session", length)
    return parts.found


def _lost(past: Past, facts: Facts, now: float) -> tuple[str, float | None]:
    """(why nobody has what the past prompt's worker computed, how long ago it lost it)."""
    emptied_s = facts.emptied(past.worker)
    if emptied_s is not None and emptied_s >= past.at_s:
        return "worker_lost", round(now - emptied_s, 3)
    if facts.guessed(past.worker) or now - past.at_s > ANNOUNCED_WITHIN_S:
        return "evicted", None
    return "not_announced", None


def _difference(turn: Turn, past: Past, facts: Facts) -> tuple[str, int | None]:
    """How the prompt differs from the past one, in which message."""
    if turn.outline is None or past.outline is None:
        return "edited", None
    how, message = difference(past.outline, turn.outline, turn.common / len(past.ids))
    tail = past.ids[turn.common :]
    if how == "re_encoded" and len(tail) <= TAIL_TOKENS and answered(turn.outline, past.messages) is not None:
        # What the template put before the answer is not what stands before it now.
        return ("thinking_dropped" if facts.thinks(list(tail)) else how), past.messages
    return how, message


def _whole(tokens: int, block: int) -> int:
    """Rounded down to blocks."""
    return tokens - tokens % block


def settle(why: Why, terms: Terms, reported: int | None) -> None:
    """The worker said how much it reused: what was predicted beyond that is missing too, what it had beyond is not."""
    why.reported_tokens = reported
    if reported is None:
        return
    reused, predicted = min(max(reported, 0), why.prompt_tokens), why.chosen_tokens
    kept = [part for part in why.parts if part.end > reused]
    for part in kept:
        part.start = max(part.start, reused)
    vouched = min(max(terms.resident_tokens, reused), predicted)
    missing = [
        Part("mispredicted", reused, vouched, worker=why.worker),
        Part("not_announced", vouched, predicted, worker=why.worker),
    ]
    why.parts = [part for part in missing if part.end > part.start] + kept


def check_adds_up(why: Why) -> None:
    """Assert the module's invariant; for tests."""
    reused = why.chosen_tokens if why.reported_tokens is None else min(why.reported_tokens, why.prompt_tokens)
    edges = [(part.start, part.end) for part in why.parts]
    assert all(start < end for start, end in edges), why
    assert [start for start, _ in edges] + [why.prompt_tokens] == [reused] + [end for _, end in edges], why
    assert all(part.reason in NO_LOSS or part.reason in GROUPS for part in why.parts), why
