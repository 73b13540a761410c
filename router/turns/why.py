"""Why a prompt was not cached: every token that had to be computed, and the reason. Pure.

Owns the reasons. A prompt's tokens [0, L) are cut at the ends of nested beginnings: what the worker reused, what was
predicted there, what the best worker had, what the fleet held once, what the conversation's last prompt and answer had.
Invariant: the parts are what lies between what was reused and L, in order and without a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from router.decide.messages import Decision, Terms
from router.prompting.outline import Outline, answered, difference
from router.turns.book import Past

NO_LOSS = frozenset(("new_session", "new_text", "block_rest"))
"""Had to be computed, whoever it was sent to."""
GROUPS = {
    **dict.fromkeys(("billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments",
                     "truncated", "edited", "re_encoded", "salt", "lora", "model"), "workload"),
    **dict.fromkeys(("evicted", "worker_lost"), "capacity"),
    "elsewhere": "routing",
    **dict.fromkeys(("not_announced", "mispredicted"), "index"),
}  # fmt: skip
"""reason -> whose doing it is."""
TAIL_TOKENS = 16
"""A prompt's end, with which the template asks for an answer."""
ANNOUNCED_WITHIN_S = 5.0
"""What was computed longer ago and was never announced will not be."""
BLOCK_TOKENS = 16
"""Where a worker does not tell."""


class Part(msgspec.Struct, omit_defaults=True):
    """Some of the tokens that had to be computed."""

    reason: str
    start: int
    end: int
    position: int | None = None
    """The first token that differs from what was there before."""
    message: int | None = None
    """Of the body's messages, the one with that token; the first is 0."""
    worker: str | None = None
    """Who had it."""
    ago_s: float | None = None
    """When it lost it."""
    here_s: float | None = None
    there_s: float | None = None
    """Time to the first token where the request went, and where more was cached."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Why(msgspec.Struct, omit_defaults=True):
    """One request."""

    id: str
    at: float
    """Wall clock."""
    session: str | None
    worker: str
    prompt_tokens: int
    best_tokens: int
    """Cached at the worker that had most of it and could have been chosen."""
    best_worker: str
    chosen_tokens: int
    """Predicted to be cached where it went."""
    reported_tokens: int | None = None
    """As the worker says, where it does."""
    reason: str = ""
    """That of most of the lost tokens; where none was lost, of the new ones."""
    position: int | None = None
    """Where the prompt leaves what is or was held, for that reason."""
    lost_tokens: int = 0
    parts: list[Part] = []
    attempt: int = 0
    sampled_tokens: int = 0
    """Of the prompt: as a worker sampled them, where the encoder would choose others. 0: all are the template's."""

    def tell(self) -> None:
        """Sum the parts up."""
        lost = [part for part in self.parts if part.reason not in NO_LOSS]
        self.lost_tokens = sum(part.tokens for part in lost)
        main = max(lost or self.parts, key=lambda part: part.tokens, default=None)
        self.reason = main.reason if main is not None else "new_text"
        self.position = None if main is None else main.start if main.position is None else main.position


@dataclass(frozen=True, slots=True)
class Facts:
    """What is asked only where something is missing."""

    gone: Callable[[int, int], tuple[int, str, float] | None]
    """(end, worker, when) of what behind this position was held and removed, in blocks of so many tokens."""
    emptied: Callable[[str], float | None]
    """When a worker last lost all it held; None where it did not."""
    text: Callable[[array[int]], str]
    """What a few tokens say; empty where that is not known here."""
    guessed: Callable[[str], bool]
    """Whether a worker's cache is guessed: it tells nothing of what it removes."""


@dataclass(slots=True)
class Turn:
    """One prompt, and what came before it."""

    tokens: int
    block: int
    """Tokens of the chosen worker's blocks."""
    past: Past | None
    common: int = 0
    """Tokens that both begin with."""
    outline: Outline | None = None
    """Whole, where the two part before the past one's end."""
    same_session: bool = True
    """False: the past prompt is the parent's."""
    differs: str | None = None
    """What of the scope does: salt, lora, model."""


def parts_of(turn: Turn, decision: Decision, facts: Facts, now: float) -> list[Part]:
    """[what was predicted to be cached, the prompt's length), part by part."""
    past, block, length = turn.past, turn.block, turn.tokens
    at = min(decision.predicted_cached_tokens, length)
    parts: list[Part] = []

    def add(reason: str, end: int, **more: object) -> None:
        nonlocal at
        end = min(end, length)
        if end > at:
            parts.append(Part(reason, at, end, **more))  # type: ignore[arg-type]
            at = end

    best = decision.best
    if best is not None:
        add("elsewhere", best.cached_tokens, worker=best.worker, here_s=decision.terms.ttft_s, there_s=best.ttft_s)
    goes_on = past is not None and turn.common == len(past.ids)
    known = 0 if past is None else past.known_tokens if goes_on else turn.common
    usable = _whole(min(known, length - 1), block)
    if past is None or turn.differs is not None or at < usable:
        gone = facts.gone(at, block)
        if gone is not None:
            add("evicted", gone[0], worker=gone[1], ago_s=round(now - gone[2], 3))
    if past is None:
        add("new_session", length)
        return parts
    if turn.differs is not None:
        add(turn.differs, _whole(turn.common, block))
        add("block_rest", turn.common)
    elif at < _whole(min(turn.common, length - 1), block):
        reason, ago_s = _lost(past, facts, now)
        add(reason, usable, worker=past.worker, ago_s=ago_s)
    if not goes_on and turn.same_session and turn.differs is None:
        how, message = _difference(turn, past, facts)
        add(how, max(past.known_tokens, turn.common + 1), position=turn.common, message=message)
    elif goes_on and at < usable and turn.outline is not None:
        message = past.messages
        answer = answered(turn.outline, message)
        if answer is not None:
            add(answer, known, position=max(at, turn.common), message=message)
    else:
        add("block_rest", known)
    add("new_text" if turn.same_session else "new_session", length)
    return parts


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
        text = facts.text(tail).lower()
        return ("thinking_dropped" if "think" in text or "analysis" in text else how), past.messages
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
