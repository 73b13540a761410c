"""Times of an engine's steps, for every simulation: `engine serve --simulate`, `router shadow`, benchmarks/routing.py.

The module needs no torch and no clock.

One step computes at most `step_tokens` tokens: one for each decoding sequence, the rest chunks of prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=1, le=10**12, title="N")]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of an engine in seconds, from which the time of any work is predicted.

    A step computes one token of each decoding request, and chunks of prompts (prefill). A router has these times as
    settings: the prior from which it learns the times of a worker.
    """

    prefill_s_per_token: Annotated[Positive, "Seconds to prefill one token at an empty context."] = 1e-4
    quadratic_tokens: Annotated[Positive, "Context length at which a token costs twice that."] = 50_000.0
    step_s: Annotated[NotNegative, "Fixed time of an engine step."] = 0.012
    decode_request_s: Annotated[NotNegative, "Time a decoding request adds to a step."] = 50e-6
    decode_context_s: Annotated[NotNegative, "Time a token of decode context adds to a step."] = 2.5e-8
    step_tokens: Annotated[Count, "Prefill tokens of one step, of workers that do not tell it."] = 2048
    load_s_per_token: float = 0.0
    """Time of a token that comes back from host memory, in simulations."""

    def compute_prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Return the seconds of a prefill chunk that follows `context_tokens` tokens."""
        return self.prefill_s_per_token * tokens * (1.0 + (context_tokens + tokens / 2.0) / self.quadratic_tokens)

    def compute_decode_s(self, sequence_count: float, context_tokens: float) -> float:
        """Return the seconds of a step without prefill."""
        return self.step_s + self.decode_request_s * sequence_count + self.decode_context_s * context_tokens

    def compute_decode_run_s(self, step_count: int, sequence_count: int, context_tokens: int) -> float:
        """Return the seconds of consecutive decode steps, each of which adds a token to every context."""
        growth = self.decode_context_s * sequence_count * step_count * (step_count - 1) / 2.0
        return step_count * self.compute_decode_s(sequence_count, context_tokens) + growth

    def count_started_steps(self, elapsed_s: float, sequence_count: int, context_tokens: int) -> int:
        """Count the steps of a decode run that have begun after so many seconds, at least one."""
        first_step_s = self.compute_decode_s(sequence_count, context_tokens)
        growth = self.decode_context_s * sequence_count / 2.0
        linear = first_step_s - growth
        step_count = elapsed_s / first_step_s
        if growth > 0.0:  # n steps take growth * n^2 + linear * n seconds, as contexts grow
            step_count = (math.sqrt(linear * linear + 4.0 * growth * elapsed_s) - linear) / (2.0 * growth)
        return max(1, math.ceil(step_count + 1e-9))

    def scale(self, prefill_factor: float, step_factor: float) -> StepTimes:
        """Return the times of an engine that takes longer for prefill by one factor, and for steps by another."""
        return replace(
            self,
            prefill_s_per_token=prefill_factor * self.prefill_s_per_token,
            load_s_per_token=prefill_factor * self.load_s_per_token,
            step_s=step_factor * self.step_s,
            decode_request_s=step_factor * self.decode_request_s,
            decode_context_s=step_factor * self.decode_context_s,
        )
