"""What the router sees of a worker's speed: intervals between first tokens, and steps of streamed answers.

Pure values; the tracker fills them in, and router/decide/speed.py learns from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

_INTERVAL_TOKENS_MAX: Final = 4.0
"""An interval that prefilled the tokens of so many full steps is not made longer."""
_INTERVAL_STEPS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval in which a worker did nothing but this work."""

    elapsed_s: float
    uncached_tokens: float
    quadratic_work: float
    """Sum of L^2 - h^2 over the prompts, tokens^2."""
    steps: float
    decode_requests: float
    decode_context_tokens: float
    is_decode: bool = False
    """The interval was seen by the tokens of an answer, so that its steps are counted; else by first tokens."""


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target, for learning how long a decode step takes: two of them bracket an answer."""

    updated_at_s: float = 0.0
    decode_request_seconds: float = 0.0
    """Integral of the number of decoding requests over time."""
    context_token_seconds: float = 0.0
    uncached_tokens: float = 0.0
    """Tokens that were prefilled until the latest first token."""
    quadratic_work: float = 0.0

    def observe_since(self, start: WorkTotals, elapsed_s: float, *, step_count: int) -> Observation:
        """Return what was done after `start`, in so many steps."""
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic_work=self.quadratic_work - start.quadratic_work,
            steps=step_count,
            decode_requests=(self.decode_request_seconds - start.decode_request_seconds) / elapsed_s,
            decode_context_tokens=(self.context_token_seconds - start.context_token_seconds) / elapsed_s,
            is_decode=True,
        )


@dataclass(slots=True)
class PrefillInterval:
    """First tokens of one engine step, or of several where a step may have begun a prompt that the next one ended."""

    start_s: float
    decode_requests: float
    decode_context_tokens: float
    waited_steps: float = 0.0
    """A request that comes while others decode waits for half a step, on average, before its own."""
    last_step_start_s: float = 0.0
    """When its last step began, about."""
    is_usable: bool = True
    """No other work is known to have been done in it."""
    end_s: float = field(init=False, default=0.0)
    uncached_tokens: int = field(init=False, default=0)
    quadratic_work: float = field(init=False, default=0.0)
    tier_load_s: float = field(init=False, default=0.0)
    """Time to load from slower tiers, by the configured rates, of all its requests."""
    step_count: int = field(init=False, default=1)

    def add_first_token(self, prompt_tokens: int, cached_tokens: int, tier_load_s: float, now: float) -> None:
        """The first token of such a request came in its last step."""
        self.end_s = now
        self.uncached_tokens += prompt_tokens - cached_tokens
        self.quadratic_work += float(prompt_tokens**2 - cached_tokens**2)
        self.tier_load_s += tier_load_s

    def can_add_step(self, routed_s: float, since_s: float, step_tokens: int) -> bool:
        """Whether a prompt that was routed then, and turned to then, may have begun in the last step: a step takes of
        the next prompt what its budget leaves, so that only both steps together did a known work."""
        has_room = self.uncached_tokens < _INTERVAL_TOKENS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        return has_room and routed_s <= self.last_step_start_s and since_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context_tokens: float) -> None:
        """Another step belongs to it, beside so many decodes; it began when the last one ended."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context_tokens - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int, tier_load_s: float = 0.0) -> Observation:
        """Return what the interval tells of a worker whose steps have so many prefill tokens, without the time that was
        spent on loads from slower tiers."""
        return Observation(
            elapsed_s=self.end_s - self.start_s - tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )
