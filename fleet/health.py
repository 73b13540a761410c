"""Decides whether a program hangs, by the answers to its health probes, and when to start it again. No I/O.

Only the time of waiting for answers counts, and each probe counts at most the time that it can take. So a program does
not count as hung because its observer was stopped for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CORE_SILENT_S = 5.0
"""Longest that an engine's step loop may owe an answer before the engine counts as silent."""
SILENT_AFTER_PROBES = 2
"""Failed probes in a row after which a program counts as silent."""
MAX_RESTART_PAUSE_S = 60.0


def compute_restart_pause(failure_count: int) -> float:
    """Return the seconds until a program is started again after so many failures in a row: 0, 1, 2, 4, ... 60."""
    return min(MAX_RESTART_PAUSE_S, 2.0 ** min(failure_count - 2, 6)) if failure_count > 1 else 0.0


@dataclass(frozen=True)
class ProbeHistory:
    """For how long, and for how many probes in a row, a program has not answered its health probes."""

    silent_s: float = 0.0
    missed_probe_count: int = 0
    """Failed probes since the last answer."""

    def add_probe(self, is_alive: bool, elapsed_s: float, max_elapsed_s: float) -> ProbeHistory:
        """Return the history with one more probe.

        `elapsed_s` is the time since the previous probe; of it at most `max_elapsed_s` count, in case the observer was
        stopped.
        """
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
