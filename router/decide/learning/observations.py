"""Observations of a target: work that a worker did, and the time that the work took.

A *prefill interval* ends with first tokens, which show that prompts were computed. Other observations are made between
two tokens of an answer, of which a target writes one in each *step*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

_INTERVAL_FULL_STEPS_MAX: Final = 4.0
"""An interval is not extended once its prefill tokens fill so many steps."""
_INTERVAL_STEPS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """Time that a target took for known work, with nothing else to do."""

    elapsed_s: float
    uncached_tokens: float
    quadratic_work: float
    """Attention work: sum of L^2 - h^2 over prompts of L tokens, h of them cached. Tokens^2."""
    steps: float
    decode_requests: float
    decode_context_tokens: float
    is_decode: bool = False
    """Whether the steps were counted by the tokens of an answer; otherwise they are derived from first tokens."""


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of the work that a worker did, by which its speed is learned.

    A copy is made when an answer begins. The totals at the answer's end, less that copy, are the work that the worker
    did meanwhile.
    """

    updated_at_s: float = 0.0
    """Time up to which the two integrals are computed."""
    decode_request_seconds: float = 0.0
    """Integral of the number of decoding requests over time."""
    context_token_seconds: float = 0.0
    """Integral of the context tokens of decoding requests over time."""
    uncached_tokens: float = 0.0
    """Tokens prefilled for the requests that have their first token."""
    quadratic_work: float = 0.0
    """Attention work of those prefills: sum of L^2 - h^2 for prompts of L tokens, h of them cached. Tokens^2."""

    def compute_work_since(self, start: WorkTotals, now: float, *, step_count: int) -> Observation:
        """Return the work that was done since `start`, an earlier copy of these totals, in `step_count` steps.

        The integrals divided by that time are the mean numbers of decoding requests and of their context tokens.
        """
        elapsed_s = now - start.updated_at_s
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic_work=self.quadratic_work - start.quadratic_work,
            steps=step_count,
            decode_requests=(self.decode_request_seconds - start.decode_request_seconds) / elapsed_s,
            decode_context_tokens=(self.context_token_seconds - start.context_token_seconds) / elapsed_s,
            is_decode=True,
        )


class PrefillInterval:
    """Time in which a target computed prompts, until the first tokens of one engine step or of several.

    One step may begin a prompt that the next step ends. The interval then covers both steps, because only the sum of
    their work is known.
    """

    def __init__(
        self, sent_at_s: float, previous_end_s: float, decode_requests: int, decode_context_tokens: int, now: float
    ) -> None:
        """Begin with a prompt that got its first token `now`; `add_first_token` then adds the prompt.

        The interval starts when the prompt was sent (`sent_at_s`), or when all prompts before it had been computed
        (`previous_end_s`), if that was later. A prompt that came while the target only decoded had to wait for the end
        of a running step, half a step on average. So if 30 ms passed, it waited 10 and was computed in a step of 20.
        """
        came_during_step = decode_requests > 0 and sent_at_s > previous_end_s
        self.waited_steps = 0.5 if came_during_step else 0.0
        self.start_s = max(previous_end_s, sent_at_s)
        self.end_s = now
        step_s = (now - self.start_s) / (self.waited_steps + 1.0)
        self.last_step_start_s = self.start_s + self.waited_steps * step_s
        """Estimated start of the last step."""
        self.step_count = 1
        self.is_usable = True
        """False if the target is known to have done other work in the interval."""

        # Work of all steps: sums over the prompts, and means over the steps.
        self.uncached_tokens = 0
        self.quadratic_work = 0.0
        """Attention work: sum of L^2 - h^2 over prompts of L tokens, h of them cached."""
        self.tier_load_s = 0.0
        """Time to load cached tokens from slower tiers, by the configured rates."""
        self.decode_requests: float = decode_requests
        self.decode_context_tokens: float = decode_context_tokens

    def add_first_token(self, prompt_tokens: int, cached_tokens: int, tier_load_s: float, now: float) -> None:
        """Add a request with its first token in the last step."""
        self.end_s = now
        self.uncached_tokens += prompt_tokens - cached_tokens
        self.quadratic_work += float(prompt_tokens**2 - cached_tokens**2)
        self.tier_load_s += tier_load_s

    def can_add_step(self, sent_at_s: float, previous_end_s: float, step_tokens: int) -> bool:
        """Return whether the interval should be extended by the next step.

        A step with room for more tokens may begin the next prompt. If the last step may have done so, only the work of
        both steps together is known. An interval of the maximum size is not extended. `sent_at_s`: when the next prompt
        was sent. `previous_end_s`: when all prompts before the next one had been computed.
        """
        is_below_maximum = (
            self.uncached_tokens < _INTERVAL_FULL_STEPS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        )
        return is_below_maximum and sent_at_s <= self.last_step_start_s and previous_end_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context_tokens: float) -> None:
        """Extend the interval by a step. Its decoding requests and context tokens enter the interval's means."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context_tokens - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int) -> Observation:
        """Return the interval as an observation. `step_tokens`: prefill tokens of a full step."""
        return Observation(
            elapsed_s=self.end_s - self.start_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )
