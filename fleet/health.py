"""Whether a program still goes on: what its health address has answered lately. No I/O.

Only time that was waited for an answer counts, and of one look no more than it can take: where whoever looks was itself
stopped for an hour, its program is not blamed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CORE_SILENT_S = 5.0
"""Longest that an engine's step loop may owe an answer before the engine counts as silent."""
SILENT_AFTER_PROBES = 2
"""Failed probes in a row after which a program counts as silent."""


@dataclass(frozen=True)
class ProbeHistory:
    """How long a program has not answered its health probes."""

    silent_s: float = 0.0
    missed_probe_count: int = 0
    """Failed probes since the last answer."""

    def add_probe(self, is_alive: bool, elapsed_s: float, max_elapsed_s: float) -> ProbeHistory:
        """Return the history with one more probe, which took `elapsed_s` with the pause before it."""
        if is_alive:
            return ProbeHistory()
        return ProbeHistory(self.silent_s + min(max(elapsed_s, 0.0), max_elapsed_s), self.missed_probe_count + 1)

    @property
    def is_silent(self) -> bool:
        """Whether enough probes failed in a row to report it."""
        return self.missed_probe_count >= SILENT_AFTER_PROBES

    def is_hung(self, max_silent_s: float) -> bool:
        """Return whether the program counts as hung; never with a `max_silent_s` of 0."""
        return 0 < max_silent_s <= self.silent_s and self.is_silent
