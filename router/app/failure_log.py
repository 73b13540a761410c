"""Failed attempts of requests in the log."""

from __future__ import annotations

import logging
import math
from typing import Final

from options.bounded_dict import BoundedDict
from router.decide.messages import FailureKind

log = logging.getLogger("router")

FAILURE_LOG_S: Final = 10.0
"""Shortest time between two log lines about failures of one kind at one worker."""


class FailureLog:
    """Logs failed attempts, without a flood of lines if a worker fails at every request."""

    def __init__(self) -> None:
        self._last_lines: BoundedDict[tuple[str, FailureKind], tuple[float, int]] = BoundedDict(10_000)
        """(worker, kind) -> time of the last line, number of failures since then."""

    def warn(self, worker_id: str, kind: FailureKind, reason: str, now: float) -> None:
        """Log a failed attempt, unless one of this kind was logged a moment ago: then count it for the next line."""
        logged_at_s, unlogged_count = self._last_lines.get((worker_id, kind), (-math.inf, 0))
        if now - logged_at_s < FAILURE_LOG_S:
            self._last_lines[worker_id, kind] = logged_at_s, unlogged_count + 1
            return
        self._last_lines[worker_id, kind] = now, 0
        more = f"; {unlogged_count} more since the last line" if unlogged_count else ""
        log.warning("attempt on %s failed (%s): %s%s", worker_id, kind.value, reason, more)
