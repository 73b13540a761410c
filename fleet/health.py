"""Whether a program still goes on: what its health address has answered lately. Pure.

Only time that was waited for an answer counts, and of one look no more than it can take: where whoever looks was itself
stopped for an hour, its program is not blamed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CORE_SILENT_S = 5.0
"""An engine whose step loop owes an answer for longer does not answer, though its HTTP process does."""
SILENT_AFTER_PROBES = 2
"""Looks without an answer in a row until that is said."""


@dataclass(frozen=True)
class ProbeHistory:
    """After some looks."""

    silent_s: float = 0.0
    missed_probe_count: int = 0
    """Looks in a row without an answer."""

    def add_probe(self, is_alive: bool, elapsed_s: float, max_elapsed_s: float) -> ProbeHistory:
        """After one more: with the pause before it, it took so long."""
        if is_alive:
            return ProbeHistory()
        return ProbeHistory(self.silent_s + min(max(elapsed_s, 0.0), max_elapsed_s), self.missed_probe_count + 1)

    @property
    def is_silent(self) -> bool:
        """Worth saying."""
        return self.missed_probe_count >= SILENT_AFTER_PROBES

    def is_hung(self, max_silent_s: float) -> bool:
        """Whether to end it; never with a patience of 0."""
        return 0 < max_silent_s <= self.silent_s and self.is_silent
