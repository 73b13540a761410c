"""Which worker a session was sent to last. Bounded in number and length, least recently used first out."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

NAME_CHARS_MAX = 64
"""Longer names, which clients make up, are known by their digest."""


@dataclass(slots=True)
class Sessions:
    """session -> (worker, last use)."""

    ttl_s: float
    size_max: int
    known: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)

    def get(self, session: str, now: float) -> str | None:
        """The session's worker, unless it was used too long ago."""
        entry = self.known.get(_key(session))
        return entry[0] if entry is not None and now - entry[1] <= self.ttl_s else None

    def put(self, session: str, worker_id: str, now: float) -> None:
        """The session was sent to a worker."""
        key = _key(session)
        self.known[key] = (worker_id, now)
        self.known.move_to_end(key)
        while len(self.known) > self.size_max:
            self.known.popitem(last=False)


def _key(session: str) -> str:
    if len(session) <= NAME_CHARS_MAX:
        return session
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=NAME_CHARS_MAX // 2).hexdigest()
