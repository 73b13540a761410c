"""What an engine's step takes, and what bounds it: the one service model of every simulation.

`engine serve --simulate` sleeps by it, `router shadow` and benchmarks/routing.py count by it.
Standard library only: no torch, no clock.

One step computes at most `step_tokens` tokens: one for each decoding sequence, the rest chunks of prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. docs/routing.md's symbols are in brackets."""

    prefill_s_per_token: float = 1e-4
    """[a] a prefill token at an empty context."""
    quadratic_tokens: float = 50_000.0
    """[Lq] context length at which a token costs twice what it costs at an empty context."""
    step_s: float = 0.012
    """[t0] fixed."""
    decode_request_s: float = 50e-6
    """[c] a decoding sequence."""
    decode_context_s: float = 2.5e-8
    """[d] a token of context of a decoding sequence."""
    step_tokens: int = 2048
    """[step_budget] tokens of one step."""
    load_s_per_token: float = 0.0
    """[m] a token that comes back from host memory."""

    def compute_prefill_s(self, tokens: int, context_tokens: int) -> float:
        """A chunk of so many tokens after `context_tokens` ones."""
        return self.prefill_s_per_token * tokens * (1.0 + (context_tokens + tokens / 2.0) / self.quadratic_tokens)

    def compute_decode_s(self, sequences: float, context_tokens: float) -> float:
        """A step without prefill."""
        return self.step_s + self.decode_request_s * sequences + self.decode_context_s * context_tokens

    def compute_decode_run_s(self, steps: int, sequences: int, context_tokens: int) -> float:
        """So many decode steps in a row, each of which adds a token to every context."""
        growth = self.decode_context_s * sequences * steps * (steps - 1) / 2.0
        return steps * self.compute_decode_s(sequences, context_tokens) + growth

    def count_started_steps(self, seconds: float, sequences: int, context_tokens: int) -> int:
        """Of such a stretch: how many steps have begun after so many seconds, at least one."""
        first_step_s, growth = self.compute_decode_s(sequences, context_tokens), self.decode_context_s * sequences / 2.0
        linear = first_step_s - growth
        steps = seconds / first_step_s
        if growth > 0.0:
            steps = (math.sqrt(linear * linear + 4.0 * growth * seconds) - linear) / (2.0 * growth)
        return max(1, math.ceil(steps + 1e-9))

    def scale(self, factor: float) -> StepTimes:
        """An engine that takes so many times as long."""
        scaled_values = {
            f.name: getattr(self, f.name) * (factor if f.name.endswith(("_s", "_token")) else 1) for f in fields(self)
        }
        return StepTimes(**scaled_values)
