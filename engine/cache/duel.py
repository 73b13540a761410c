"""Whether what was learned or the present order finds more: both are played on a sample of the blocks.

The present order is LRU; where there are states, GreedyDual as `UnitPool` has it. Names only: a sampled block stands
for as many as one is sampled of, a state lies at the last sampled block before it, and takes so much less room.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from engine.cache.habits import Habits, Turn
from engine.cache.leaves import Leaves, States
from engine.cache.pool import state_worth

_SAMPLE_BLOCKS = 512
"""Blocks of the small caches of a duel, at least, where the cache is larger."""
_SAMPLE_ROOM = 8
"""Sampled blocks that a state takes the room of, at least: what is between two states is to be seen."""


class _Sampled:
    """A place of a small cache."""

    __slots__ = ("branches", "depth", "hash", "name", "parent", "stamp", "state", "superseded")

    def __init__(self, hash_: int, depth: int, parent: _Sampled | None) -> None:
        self.name, self.depth, self.parent = hash_, depth, parent
        self.hash = hash_
        """Of the shared beginning that ends behind it, before the next sampled place; its own where none does."""
        self.branches = 0
        self.state = self.superseded = False
        self.stamp = 0
        """Of its state, in the present order."""

    def before(self) -> _Sampled | None:
        """The state before."""
        place = self.parent
        while place is not None and not place.state:
            place = place.parent
        return place

    def saved(self, room: int) -> int | None:
        before = self.before()
        while before is not None and before.superseded and self.depth - before.depth < room:
            before = before.before()
        return None if not self.state else self.depth - (-1 if before is None else before.depth)


class SmallCache:
    """A cache of names alone, of `capacity` blocks, which evicts in one of the orders.

    `state_room`: real blocks that a state takes the room of, none where there are no states; one in `one_in` is here.
    """

    def __init__(self, capacity: int, habits: Habits, *, learned: bool, state_room: int = 0, one_in: int = 1) -> None:
        self._capacity = capacity
        self._learned = learned
        self._value = state_room
        self._room = state_room / one_in
        self._places: dict[int, _Sampled] = {}
        self._states = 0
        states = States(state_room, _Sampled.saved) if state_room else None
        self._leaves: Leaves[_Sampled] = Leaves(habits, states)
        self._by_worth: list[tuple[int, int, _Sampled]] = []
        self._counter = itertools.count()
        self._inflation = 0

    def serve(self, names: Sequence[tuple[int, int]], turn: Turn, base: int | None = None) -> int:
        """Play the request `turn`, which has the (hash, depth) `names`. Returns how many were found.

        `base`: the hash of the last block that belongs to others too.
        """
        last, known, found = None, 0, 0
        for name, _ in names:
            place = self._places.get(name)
            if place is None:
                break
            last, known = place, known + 1
            if place.state or not self._value:
                found = known
        if last is not None:
            self._leaves.remove(last)
            if self._value:
                self._take(last)
        for name, depth in names[known:]:
            place = self._places[name] = _Sampled(name, depth, last)
            if last is not None:
                last.branches += 1
            last = place
        if base is not None:
            ends = [name for name, depth in names if depth < turn.base]
            if ends:
                self._places[ends[-1]].hash = base
        if last is not None and self._value:
            self._take(last)
        if last is not None and not last.branches:
            self._leaves.add(last, turn, self._inflation + self._value)
        if turn.before is not None:
            self._leaves.leave_behind(turn.before)
        while len(self._places) + self._states * self._room > self._capacity:
            self._evict()
        return found

    def _take(self, place: _Sampled) -> None:
        """Take a checkpoint; the one before it is superseded unless the path branches there."""
        self._states += not place.state
        place.state = True
        before = place.before()
        if before is not None and before.branches < 2:
            self._release(before, superseded=True)
        self._release(place, superseded=False)

    def _release(self, place: _Sampled, *, superseded: bool) -> None:
        place.superseded = superseded
        before = place.before()
        while before is not None and before.superseded and not superseded:
            before = before.before()
        worth = state_worth(place.depth - (-1 if before is None else before.depth), superseded=superseded)
        if not self._learned:
            place.stamp = self._inflation + worth
            heapq.heappush(self._by_worth, (place.stamp, next(self._counter), place))
        elif superseded:
            self._leaves.supersede(place, worth / self._value)
        else:
            self._leaves.weigh(place)

    def _evict(self) -> None:
        if self._value and (state := self._state_to_go()) is not None:
            state.state = False
            self._states -= 1
            self._leaves.weigh(state)
            return
        leaf = self._leaves.choose(learned=self._learned)
        assert leaf is not None
        del self._places[leaf.name]
        self._states -= leaf.state
        leaf.state = False
        parent = leaf.parent
        if parent is not None:
            parent.branches -= 1
        if parent is None or parent.branches:
            self._leaves.remove(leaf)
        else:
            self._leaves.shorten(leaf, parent)

    def _state_to_go(self) -> _Sampled | None:
        """The state that goes by itself now, if one does."""
        if self._learned:
            return self._leaves.choose_state()
        oldest = self._leaves.oldest()
        assert oldest is not None
        while self._by_worth:
            stamp, _, place = self._by_worth[0]
            if place.state and place.stamp == stamp:
                break
            heapq.heappop(self._by_worth)
        least = self._by_worth[0] if self._by_worth else None
        self._inflation = max(self._inflation, oldest.stamp if least is None else min(least[0], oldest.stamp))
        return least[2] if least is not None and least[0] < oldest.stamp else None


class Duel:
    """Whether the learned order or the present one finds more, on the blocks whose hash falls into a sample."""

    def __init__(self, capacity: int, habits: Habits, state_room: int = 0) -> None:
        self._state_room = state_room
        self._one_in = max(1, capacity // _SAMPLE_BLOCKS)
        if state_room:
            self._one_in = max(1, min(self._one_in, state_room // _SAMPLE_ROOM))
        small = max(1, capacity // self._one_in)
        self._learned, self._present = (
            SmallCache(small, habits, learned=learned, state_room=state_room, one_in=self._one_in)
            for learned in (True, False)
        )
        self._memory_blocks = 8 * small
        self.lead = 0.0
        """Sampled blocks that the learned order found and the present one did not, lately."""

    def serve(self, names: Sequence[int], turn: Turn) -> None:
        sample = [(name, depth) for depth, name in enumerate(names) if name % self._one_in == 0]
        base = names[turn.base - 1] if self._state_room and 0 < turn.base <= len(names) else None
        lead = self._learned.serve(sample, turn, base) - self._present.serve(sample, turn, base)
        self.lead = self.lead * (1 - min(1.0, len(sample) / self._memory_blocks)) + lead

    @property
    def learned(self) -> bool:
        """Whether what was learned is to be followed."""
        return self.lead >= 0
