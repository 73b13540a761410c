"""What an engine says of its own load on `/metrics`, and how far that is believed.

Only what others have there counts: sequences, and tokens in its KV memory, beyond what this router and its peers sent,
in two looks running. So an engine that says too little, or nothing, changes nothing. One that says too much is found
out by those who are served there, the next request first: each first token and each answer is compared with what was to
be expected with and without the claim, and after DOUBTS answers against it a claim counts no longer, until as many
speak for it. Where a claim keeps everybody away, a request is sent to find out. Pure; the tracker keeps one
`ReportedLoad` a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DOUBTS, DOUBTS_MAX = 3, 6
TELLING, TELLING_S = 1.3, 0.02
"""Expectations are told apart that differ by more than the factor and the seconds."""
VALID_S: Final = 15.0
"""What was said longer ago counts no longer."""
PROBE_S, PROBES = 4.0, 5
"""A claim that is new, or that nobody was sent to test for so long, is tested by the next request; after each that
found it true, up to so many, twice as long."""
USAGE_DOUBT: Final = 0.05
"""Share of the KV memory that books and engine may differ by: blocks that are not full, answers not yet counted."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One look at one rank."""

    running: int
    waiting: int
    usage: float | None = None
    """Share of the KV memory that running sequences hold; None where it does not say."""
    is_asleep: bool = False
    """It has given its memory back, and the cache in it."""


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """What others have on a target."""

    running: int = 0
    waiting: int = 0
    held_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.held_tokens)

    def and_before(self, before: ExternalLoad) -> ExternalLoad:
        """What two looks agree on."""
        return ExternalLoad(
            min(self.running, before.running),
            min(self.waiting, before.waiting),
            min(self.held_tokens, before.held_tokens),
        )


@dataclass(frozen=True, slots=True)
class LoadExpectation:
    """What was to be expected of a request without the claim, and with it: seconds to the first token, and of a step
    what the claim adds to it."""

    without_s: float
    with_s: float
    step_more_s: float


@dataclass(slots=True)
class ReportedLoad:
    """What one target's engine says, and what came of it."""

    load: EngineLoad | None = None
    """As it was said last."""
    claim: ExternalLoad = ExternalLoad()
    doubts: int = 0
    testing: bool = False
    """The next request is placed as if nothing had been claimed."""
    heard_s: float = -math.inf
    _found_true: int = 0
    """Times in a row."""
    _seen: ExternalLoad = ExternalLoad()
    """By the last look alone."""
    _tested_s: float = -math.inf

    @property
    def believed(self) -> ExternalLoad | None:
        """What counts now."""
        return self.claim if self.claim and self.doubts < DOUBTS and not self.testing else None

    def hear(
        self, load: EngineLoad | None, now: float, *, sent: int, seats: int, held_tokens: int, capacity: int | None
    ) -> None:
        """It was looked at (`load` is None: in vain). `sent`: the most requests that it may have had of ours meanwhile;
        `held_tokens`: what those hold."""
        if load is None:
            if now - self.heard_s > VALID_S:
                self.load, self.claim, self._seen, self.testing = None, ExternalLoad(), ExternalLoad(), False
            return
        others = max(load.running + load.waiting - sent, 0)
        waiting = min(load.waiting, others)
        held = 0
        if capacity is not None and load.usage is not None:
            held = max(int((load.usage - USAGE_DOUBT) * capacity) - held_tokens, 0)
        # Nobody runs more than his seats: who says so is taken to be full.
        seen = ExternalLoad(min(others - waiting, max(seats - min(sent, seats), 0)), min(waiting, 2 * seats), held)
        began = not self.claim
        self.claim = seen.and_before(self._seen) if now - self.heard_s <= VALID_S else ExternalLoad()
        self.load, self._seen, self.heard_s = load, seen, now
        if not self.claim:
            self.testing = False
        elif began or now - self._tested_s >= PROBE_S * 2**self._found_true:
            self.testing = True

    def sent(self, now: float) -> None:
        """A request goes there: what comes of it will tell."""
        self._tested_s, self.testing = now, False

    def served(self, seconds: float, without_s: float, with_s: float) -> None:
        """Something took so long that was to take `without_s`, or `with_s` where the claim is true."""
        if with_s < TELLING * without_s + TELLING_S:
            return
        if seconds * seconds > without_s * with_s:
            self.doubts = max(self.doubts - 1, 0)
            self._found_true = min(self._found_true + 1, PROBES)
        else:
            self._found_true = 0
            self.doubts = min(self.doubts + 1, DOUBTS_MAX)
            self.testing = bool(self.claim)
