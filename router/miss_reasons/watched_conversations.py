"""Conversations that a client or an operator wants compared, besides the sampled share. No I/O."""

from __future__ import annotations

from typing import Final

from options.bounded_dict import BoundedDict

WATCHED_MAX: Final = 1024


class WatchedConversations:
    """Conversations whose cache misses are always explained: each prompt is compared with the one before.

    A client or an operator asks for them one by one, at most WATCHED_MAX. A key is a digest of a session's name, or of
    the beginning of a conversation's prompts.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._stored_at_s_by_key: BoundedDict[int, float | None] = BoundedDict(WATCHED_MAX)
        """Time at which each conversation's last prompt was stored; None if none was. The least recently used first."""

    def __len__(self) -> int:
        return len(self._stored_at_s_by_key)

    def add(self, key: int) -> None:
        """Watch a conversation. The least recently used one is dropped if there are too many."""
        self._stored_at_s_by_key[key] = self._stored_at_s_by_key.get(key)

    def __contains__(self, key: int) -> bool:
        return key in self._stored_at_s_by_key

    def has_recent_prompt(self, key: int, now: float) -> bool:
        """Return whether a prompt of the conversation was stored less than `ttl_s` ago."""
        stored_at_s = self._stored_at_s_by_key.get(key)
        return stored_at_s is not None and now - stored_at_s < self._ttl_s

    def record_prompt(self, key: int, now: float) -> None:
        """Record that a prompt of the conversation is stored, if the conversation is watched."""
        if key in self._stored_at_s_by_key:
            self._stored_at_s_by_key[key] = now
