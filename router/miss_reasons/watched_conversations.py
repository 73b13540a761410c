"""Conversations that somebody asked to have compared, beside the share of all. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

WATCHED_MAX: Final = 1024
"""Conversations; of more the longest unused is forgotten."""


class WatchedConversations:
    """Conversations by their key, each with the time of its last prompt that was kept."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._stored_s: OrderedDict[int, float | None] = OrderedDict()
        """key -> when a prompt was last kept; None where none was yet."""

    def __len__(self) -> int:
        return len(self._stored_s)

    def add(self, key: int) -> None:
        """Follow a conversation from its next request on."""
        self._stored_s.setdefault(key, None)
        self._stored_s.move_to_end(key)
        if len(self._stored_s) > WATCHED_MAX:
            self._stored_s.popitem(last=False)

    def __contains__(self, key: int) -> bool:
        return key in self._stored_s

    def has_recent_prompt(self, key: int, now: float) -> bool:
        """Whether a prompt of that conversation was kept, not too long ago."""
        stored_s = self._stored_s.get(key)
        return stored_s is not None and now - stored_s < self._ttl_s

    def record_prompt(self, key: int, now: float) -> None:
        """Note that a prompt of that conversation is kept, where it is followed."""
        if key in self._stored_s:
            self._stored_s[key] = now
            self._stored_s.move_to_end(key)
