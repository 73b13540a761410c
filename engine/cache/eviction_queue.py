"""The ends of cached paths in the order of eviction: by what `ReuseStats` has learned of conversations.

A turn that was left at `age` is worth `share / max(gap, age)`, hits a block per unit of time: it is kept while it is
due; when it is overdue it loses worth as in LRU; and of turns that are equally far from being due the youngest goes,
which leaves of a cycle that is larger than the cache a part that stays. Turns of equal class and gap share a queue:
only the ends of queues are compared, and their number does not grow with the cache. A path goes from its end, so a
parent never goes before its child; a path that was chosen goes on being the one until it is gone or another is cached.

Where a path can be resumed only at states that are kept of it (`StateValuation`), it is worth what its last one saves
for the room that this and the blocks take. A state that a deeper one of the same path has superseded is asked for by
itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.cache.reuse_stats import ConversationTurn, ReuseStats

_STEPS = 2
"""Queues of one class for each doubling of the gap."""
_LATE = 1.5
"""Times its gap after which a turn is overdue."""

_UNRESUMABLE = 0.02
"""What a path without a state at its end is worth: it tells only where a checkpoint should be."""

EvictableT = TypeVar("EvictableT", bound="EvictableNode")


class EvictableNode(Protocol):
    """A node of a prefix tree, as eviction sees it."""

    hash: int
    depth: int
    cached_child_count: int
    """How many places of its cache hang from it."""


@dataclass(frozen=True, slots=True)
class StateValuation(Generic[EvictableT]):
    """The recurrent states of paths, without which they are not resumed."""

    room: int
    """Blocks of attention that one takes the room of."""
    saved: Callable[[EvictableT, int], int | None]
    """Blocks from the state before a place to the one there, by that room; None where there is none."""

    def worth(self, end: EvictableT) -> float:
        """Blocks that a path which ends there saves, for each that it and its last state take."""
        saved = self.saved(end, self.room)
        return _UNRESUMABLE if saved is None else saved / (saved + self.room)


class CachedPath(Generic[EvictableT]):
    """A path that can be shortened at `leaf`, kept for the sake of `turn`."""

    __slots__ = ("leaf", "queue", "turn")

    def __init__(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        self.leaf = leaf
        self.turn = turn
        self.queue: tuple[object, int, int] | None = None
        """None: left behind, by a conversation that went on elsewhere."""


class EvictionQueue(Generic[EvictableT]):
    """Every cached place that nothing hangs from, in the order of eviction."""

    def __init__(self, habits: ReuseStats, states: StateValuation[EvictableT] | None = None) -> None:
        self._habits = habits
        self._states = states
        self._at: dict[EvictableT, CachedPath[EvictableT]] = {}
        self._of: dict[ConversationTurn, CachedPath[EvictableT]] = {}
        self._left: OrderedDict[CachedPath[EvictableT], None] = OrderedDict()
        self._superseded: OrderedDict[EvictableT, tuple[float, int]] = OrderedDict()
        """States that go by themselves: what each is worth, and since when."""
        self._queues: dict[tuple[object, int, int], OrderedDict[CachedPath[EvictableT], None]] = {}
        self._chosen: CachedPath[EvictableT] | None = None

    def add(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        """`leaf` is the end of the path that `turn` has left."""
        self._superseded.pop(leaf, None)
        entry = self._at[leaf] = CachedPath(leaf, turn)
        self._of[turn] = entry
        self._enqueue(entry)
        self._chosen = None

    def remove(self, leaf: EvictableT) -> None:
        """`leaf` is in use, or gone; nothing if it is not the end of a path."""
        entry = self._at.pop(leaf, None)
        if entry is not None:
            self._dequeue(entry)
            if self._of.get(entry.turn) is entry:
                del self._of[entry.turn]

    def turn_of(self, leaf: EvictableT) -> ConversationTurn | None:
        """Who left the path that ends there; None if it is not the end of one."""
        entry = self._at.get(leaf)
        return None if entry is None else entry.turn

    def shorten(self, leaf: EvictableT, parent: EvictableT) -> None:
        """`leaf` is gone, and `parent` the end of its path now."""
        entry = self._at.pop(leaf)
        entry.leaf = parent
        self._at[parent] = entry
        self._superseded.pop(parent, None)
        turn = entry.turn
        shared = None
        if parent.depth < turn.base and not turn.shared:
            shared = self._habits.shared_at(parent.hash, turn.last)
        if shared is not None:
            self._dequeue(entry)
            if self._of.get(turn) is entry:
                del self._of[turn]
            entry.turn = shared
            self._enqueue(entry)
        else:
            self.weigh(parent)

    def weigh(self, place: EvictableT) -> None:
        """The state at `place`, which may be the end of a path, is in use, or has come or gone."""
        self._superseded.pop(place, None)
        entry = self._at.get(place)
        if entry is not None and entry.queue is not None and entry.queue[2] != self._worth(place):
            self._dequeue(entry)
            self._enqueue(entry)
            self._chosen = None

    def supersede(self, place: EvictableT, worth: float) -> None:
        """Few will ask for the state at `place`, which saves `worth` blocks for each it takes the room of."""
        if place not in self._at:
            self._superseded[place] = (worth, self._habits.now)

    def choose_state(self) -> EvictableT | None:
        """The oldest of the superseded states, if the end of no path is worth less."""
        if not self._superseded:
            return None
        place, (worth, since) = next(iter(self._superseded.items()))
        least = self._choose()
        if least is None:
            return place
        share, due = self._habits.mean()
        return place if worth * share / max(2.0**due, self._habits.now - since) <= self._worth_now(least) else None

    def leave_behind(self, turn: ConversationTurn) -> None:
        """The conversation of `turn` goes on elsewhere: what is left of that path was dropped from its prompt."""
        entry = self._of.pop(turn, None)
        if entry is not None:
            self._dequeue(entry)
            entry.queue = None
            self._left[entry] = None

    def choose(self) -> EvictableT | None:
        """The end of the path that is to be shortened next; None without any."""
        entry = self._choose()
        return None if entry is None else entry.leaf

    def clear(self) -> None:
        for entries in (self._at, self._of, self._left, self._queues, self._superseded):
            entries.clear()
        self._chosen = None

    def check_invariants(self, leaves: set[EvictableT]) -> None:
        entries = set(self._at.values())
        assert set(self._at) == leaves
        assert all(entry.leaf is leaf for leaf, entry in self._at.items())
        queued = [entry for queue in (self._left, *self._queues.values()) for entry in queue]
        assert set(queued) == entries
        assert len(queued) == len(entries)
        assert all(self._queues.values())
        assert all(self._of[turn] in entries for turn in self._of)
        assert self._chosen is None or self._chosen in entries
        assert not self._superseded.keys() & leaves

    def check_states(self, cached: set[EvictableT]) -> None:
        assert self._superseded.keys() <= cached

    def _choose(self) -> CachedPath[EvictableT] | None:
        if self._chosen is None:
            self._chosen = next(iter(self._left), None) or self._least()
        return self._chosen

    def _least(self) -> CachedPath[EvictableT] | None:
        """The oldest of a queue where it is overdue, else the youngest; of all queues what is worth least."""
        now, least, worth_min = self._habits.now, None, float("inf")
        for key, queue in self._queues.items():
            entry = next(iter(queue))
            if now - entry.turn.last <= _LATE * 2.0 ** (key[1] / _STEPS):
                entry = next(reversed(queue))
            worth = self._worth_now(entry)
            if worth < worth_min:
                least, worth_min = entry, worth
        return least

    def _worth_now(self, entry: CachedPath[EvictableT]) -> float:
        if entry.queue is None:
            return 0.0
        _, due, worth_log2 = entry.queue
        gap, age = 2.0 ** (due / _STEPS), self._habits.now - entry.turn.last
        return self._habits.of(entry.turn).share / (age if age > _LATE * gap else gap) * 2.0**worth_log2

    def _worth(self, leaf: EvictableT) -> int:
        """log2, rounded, of what a block of the path that ends there saves."""
        return 0 if self._states is None else round(math.log2(self._states.worth(leaf)))

    def _enqueue(self, entry: CachedPath[EvictableT]) -> None:
        turn = entry.turn
        due = round(self._habits.due(turn) * _STEPS)
        entry.queue = key = (self._habits.kind(turn), due, self._worth(entry.leaf))
        self._queues.setdefault(key, OrderedDict())[entry] = None

    def _dequeue(self, entry: CachedPath[EvictableT]) -> None:
        if self._chosen is entry:
            self._chosen = None
        if entry.queue is None:
            del self._left[entry]
            return
        queue = self._queues[entry.queue]
        del queue[entry]
        if not queue:
            del self._queues[entry.queue]
