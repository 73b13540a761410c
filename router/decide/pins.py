"""Prompts in flight, promised to the index: they count as cached where they were sent.

Owns the pins of live requests and, for a grace period after their end, of ended ones: what was computed will be
announced, but the answer races the events. Invariant: a request has at most one pin; no pin outlives its grace or its
holder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.index.protocol import HolderId, PinId, PrefixIndex, Prompt, Scope


class PinBook:
    """Who pinned what, and until when."""

    def __init__(self, index: PrefixIndex, grace_s: float) -> None:
        self._index = index
        self._grace_s = grace_s
        self._live: dict[str, tuple[HolderId, PinId]] = {}
        self._grace: deque[tuple[float, HolderId, PinId]] = deque()
        """(release, ...) of ended requests, in the order of release."""

    @property
    def requests(self) -> set[str]:
        """Live requests that have a pin."""
        return set(self._live)

    def pin(self, request_id: str, holder: HolderId, prompt: Prompt, scope: Scope) -> None:
        """The request was sent to the holder."""
        assert request_id not in self._live, f"request {request_id} is pinned already"
        self._live[request_id] = (holder, self._index.pin(holder, prompt, scope))

    def end(self, request_id: str, now: float, *, computed: bool) -> None:
        """The attempt is over. What was not `computed` is promised no longer."""
        pinned = self._live.pop(request_id, None)
        if pinned is None:
            return
        holder, pin = pinned
        if computed:
            self._grace.append((now + self._grace_s, holder, pin))
        else:
            self._index.unpin(pin)

    def tick(self, now: float) -> None:
        """Release what has outlived its grace."""
        while self._grace and self._grace[0][0] <= now:
            self._index.unpin(self._grace.popleft()[2])

    def next_release(self) -> float | None:
        """When `tick` has something to do."""
        return self._grace[0][0] if self._grace else None

    def release_holders(self, holders: Sequence[HolderId]) -> None:
        """The holders are about to go."""
        gone = set(holders)
        for request_id in [r for r, (holder, _) in self._live.items() if holder in gone]:
            self._index.unpin(self._live.pop(request_id)[1])
        kept: deque[tuple[float, HolderId, PinId]] = deque()
        for entry in self._grace:
            if entry[1] in gone:
                self._index.unpin(entry[2])
            else:
                kept.append(entry)
        self._grace = kept

    def check_invariants(self) -> None:
        """Releases are in order."""
        releases = [entry[0] for entry in self._grace]
        assert releases == sorted(releases)
