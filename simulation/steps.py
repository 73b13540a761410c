"""Times of an engine's steps, for every simulation: `engine serve --simulate`, `router shadow`, benchmarks/routing.py.

The module needs only the standard library: no torch, no clock.

One step computes at most `step_tokens` tokens: one for each decoding sequence, the rest chunks of prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step in seconds. docs/reference/price.md has their places in the price."""

    prefill_s_per_token: float = 1e-4
    """Time of a prefill token at an empty context."""
    quadratic_tokens: float = 50_000.0
    """Context length at which a token costs twice what it costs at an empty context."""
    step_s: float = 0.012
    """Fixed time of a step."""
    decode_request_s: float = 50e-6
    """Time of a decoding sequence."""
    decode_context_s: float = 2.5e-8
    """Time of a token of a decoding sequence's context."""
    step_tokens: int = 2048
    """Most tokens of one step."""
    load_s_per_token: float = 0.0
    """Time of a token that comes back from host memory."""

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
        if growth > 0.0:
            step_count = (math.sqrt(linear * linear + 4.0 * growth * elapsed_s) - linear) / (2.0 * growth)
        return max(1, math.ceil(step_count + 1e-9))

    def scale(self, factor: float) -> StepTimes:
        """Return the times of an engine that is slower by a factor."""
        scaled_values = {
            field.name: getattr(self, field.name) * (factor if field.name.endswith(("_s", "_token")) else 1)
            for field in fields(self)
        }
        return StepTimes(**scaled_values)
