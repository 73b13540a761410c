"""Which worker a session was sent to last. Bounded, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sessions:
    """session -> (worker, last use)."""

    ttl_s: float
    size_max: int
    known: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)

    def get(self, session: str, now: float) -> str | None:
        """The session's worker, unless it was used too long ago."""
        entry = self.known.get(session)
        return entry[0] if entry is not None and now - entry[1] <= self.ttl_s else None

    def put(self, session: str, worker_id: str, now: float) -> None:
        """The session was sent to a worker."""
        self.known[session] = (worker_id, now)
        self.known.move_to_end(session)
        while len(self.known) > self.size_max:
            self.known.popitem(last=False)
