"""What an engine says of its own load on `/metrics`, and how far that is believed.

Only what others have there counts: sequences, and tokens in its KV memory, beyond what this router and its peers sent,
in two looks running. So an engine that says too little, or nothing, changes nothing. One that says too much is found
out by those who are served there, the next request first: each first token and each answer is compared with what was to
be expected with and without the report, and after DISTRUST_MISMATCHES answers against it a report counts no longer,
until as many speak for it. Where a report keeps everybody away, a request is sent to find out. Pure; the tracker keeps
one `ReportedLoad` a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DISTRUST_MISMATCHES, MISMATCHES_MAX = 3, 6
DISTINCT_RATIO, DISTINCT_S = 1.3, 0.02
"""Expectations are told apart that differ by more than the factor and the seconds."""
VALID_S: Final = 15.0
"""What was said longer ago counts no longer."""
TEST_INTERVAL_S, TEST_DOUBLINGS_MAX = 4.0, 5
"""A report that is new, or that nobody was sent to test for so long, is tested by the next request; after each that
found it true, up to so many, twice as long."""
USAGE_TOLERANCE: Final = 0.05
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
    kv_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.kv_tokens)

    def agree_with(self, previous: ExternalLoad) -> ExternalLoad:
        """What two looks agree on."""
        return ExternalLoad(
            min(self.running, previous.running),
            min(self.waiting, previous.waiting),
            min(self.kv_tokens, previous.kv_tokens),
        )


@dataclass(frozen=True, slots=True)
class LoadExpectation:
    """What was to be expected of a request without the reported load, and with it: seconds to the first token, and of a
    step what the reported load adds to it."""

    own_only_s: float
    with_external_s: float
    added_step_s: float


@dataclass(slots=True)
class ReportedLoad:
    """What one target's engine says, and what came of it."""

    latest: EngineLoad | None = None
    """As it was said last."""
    external: ExternalLoad = ExternalLoad()
    mismatches: int = 0
    is_testing: bool = False
    """The next request is placed as if nothing had been claimed."""
    reported_s: float = -math.inf
    _confirmations: int = 0
    """Times in a row."""
    _latest_external: ExternalLoad = ExternalLoad()
    """By the last look alone."""
    _tested_s: float = -math.inf

    @property
    def trusted_external(self) -> ExternalLoad | None:
        """What counts now."""
        return (
            self.external if self.external and self.mismatches < DISTRUST_MISMATCHES and not self.is_testing else None
        )

    def update(
        self,
        load: EngineLoad | None,
        now: float,
        *,
        in_flight: int,
        max_num_seqs: int,
        kv_tokens: int,
        capacity: int | None,
    ) -> None:
        """It was looked at (`load` is None: in vain). `in_flight`: the most requests that it may have had of ours
        meanwhile; `kv_tokens`: what those hold."""
        if load is None:
            if now - self.reported_s > VALID_S:
                self.latest = None
                self.external = ExternalLoad()
                self._latest_external = ExternalLoad()
                self.is_testing = False
            return
        external_requests = max(load.running + load.waiting - in_flight, 0)
        waiting = min(load.waiting, external_requests)
        external_tokens = 0
        if capacity is not None and load.usage is not None:
            external_tokens = max(int((load.usage - USAGE_TOLERANCE) * capacity) - kv_tokens, 0)
        # No engine runs more than max_num_seqs: one that says so is taken to be full.
        external = ExternalLoad(
            min(external_requests - waiting, max(max_num_seqs - min(in_flight, max_num_seqs), 0)),
            min(waiting, 2 * max_num_seqs),
            external_tokens,
        )
        is_new = not self.external
        self.external = (
            external.agree_with(self._latest_external) if now - self.reported_s <= VALID_S else ExternalLoad()
        )
        self.latest, self._latest_external, self.reported_s = load, external, now
        if not self.external:
            self.is_testing = False
        elif is_new or now - self._tested_s >= TEST_INTERVAL_S * 2**self._confirmations:
            self.is_testing = True

    def start_test(self, now: float) -> None:
        """A request goes there: what comes of it will tell."""
        self._tested_s, self.is_testing = now, False

    def record_wait(self, seconds: float, own_only_s: float, with_external_s: float) -> None:
        """Something took so long that was to take `own_only_s`, or `with_external_s` where the report is true."""
        if with_external_s < DISTINCT_RATIO * own_only_s + DISTINCT_S:
            return
        if seconds * seconds > own_only_s * with_external_s:
            self.mismatches = max(self.mismatches - 1, 0)
            self._confirmations = min(self._confirmations + 1, TEST_DOUBLINGS_MAX)
        else:
            self._confirmations = 0
            self.mismatches = min(self.mismatches + 1, MISMATCHES_MAX)
            self.is_testing = bool(self.external)
