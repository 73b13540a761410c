"""Which cached prefix goes first: what `Habits` has learned of conversations, or LRU where that finds more.

A turn that was left at `age` is worth `share / max(gap, age)`, hits a block per unit of time: it is kept while it is
due; when it is overdue it loses worth as in LRU; and of turns that are equally far from being due the youngest goes,
which leaves of a cycle that is larger than the cache a part that stays. Turns of equal class and gap share a queue:
only the ends of queues are compared, and their number does not grow with the cache. A path goes from its end, so a
parent never goes before its child; a path that was chosen goes on being the one until it is gone.

Both orders are played beside it on a sample of the blocks, each in a cache as much smaller, and the one that found more
lately is followed (`Duel`). So the price of being wrong is what it takes to find out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.cache.habits import Habits, Turn

_STEPS = 2
"""Queues of one class for each doubling of the gap."""
_SAMPLE_BLOCKS = 512
"""Blocks of the small caches of a duel, at least, where the cache is larger."""

_LATE = 1.5
"""Times its gap after which a turn is overdue."""

PlaceT = TypeVar("PlaceT", bound="Place")


class Place(Protocol):
    """A node of a prefix tree, as eviction sees it."""

    hash: int
    depth: int
    branches: int
    """How many places of its cache hang from it."""


class Entry(Generic[PlaceT]):
    """A path that can be shortened at `leaf`, kept for the sake of `turn`."""

    __slots__ = ("leaf", "queue", "turn")

    def __init__(self, leaf: PlaceT, turn: Turn) -> None:
        self.leaf = leaf
        self.turn = turn
        self.queue: tuple[object, int] | None = None
        """None: left behind, by a conversation that went on elsewhere."""


class Leaves(Generic[PlaceT]):
    """Every cached place that nothing hangs from, in the order of eviction: by worth, or the oldest first."""

    def __init__(self, habits: Habits) -> None:
        self._habits = habits
        self._at: dict[PlaceT, Entry[PlaceT]] = {}
        self._of: dict[Turn, Entry[PlaceT]] = {}
        self._oldest: OrderedDict[Entry[PlaceT], None] = OrderedDict()
        self._left: OrderedDict[Entry[PlaceT], None] = OrderedDict()
        self._queues: dict[tuple[object, int], OrderedDict[Entry[PlaceT], None]] = {}
        self._chosen: Entry[PlaceT] | None = None

    def __len__(self) -> int:
        return len(self._at)

    def add(self, leaf: PlaceT, turn: Turn) -> None:
        """`leaf` is the end of the path that `turn` has left."""
        entry = self._at[leaf] = Entry(leaf, turn)
        self._of[turn] = entry
        self._oldest[entry] = None
        self._enqueue(entry)

    def remove(self, leaf: PlaceT) -> None:
        """`leaf` is in use, or gone; nothing if it is not the end of a path."""
        entry = self._at.pop(leaf, None)
        if entry is not None:
            self._dequeue(entry)
            del self._oldest[entry]
            if self._of.get(entry.turn) is entry:
                del self._of[entry.turn]

    def turn_of(self, leaf: PlaceT) -> Turn | None:
        """Who left the path that ends there; None if it is not the end of one."""
        entry = self._at.get(leaf)
        return None if entry is None else entry.turn

    def shorten(self, leaf: PlaceT, parent: PlaceT) -> None:
        """`leaf` is gone, and `parent` the end of its path now."""
        entry = self._at.pop(leaf)
        entry.leaf = parent
        self._at[parent] = entry
        turn = entry.turn
        if parent.depth < turn.base and not turn.shared:
            shared = self._habits.shared_at(parent.hash, turn.last)
            if shared is not None:
                self._dequeue(entry)
                if self._of.get(turn) is entry:
                    del self._of[turn]
                entry.turn = shared
                self._enqueue(entry)

    def leave_behind(self, turn: Turn) -> None:
        """The conversation of `turn` goes on elsewhere: what is left of that path was dropped from its prompt."""
        entry = self._of.pop(turn, None)
        if entry is not None:
            self._dequeue(entry)
            entry.queue = None
            self._left[entry] = None

    def choose(self, *, learned: bool) -> PlaceT | None:
        """The end of the path that is to be shortened next, by worth or by age; None without any."""
        if not learned:
            oldest = next(iter(self._oldest), None)
            return None if oldest is None else oldest.leaf
        if self._chosen is None:
            self._chosen = next(iter(self._left), None) or self._least()
        return None if self._chosen is None else self._chosen.leaf

    def clear(self) -> None:
        for entries in (self._at, self._of, self._oldest, self._left, self._queues):
            entries.clear()
        self._chosen = None

    def check_invariants(self, leaves: set[PlaceT]) -> None:
        entries = set(self._at.values())
        assert set(self._at) == leaves
        assert all(entry.leaf is leaf for leaf, entry in self._at.items())
        assert set(self._oldest) == entries
        queued = [entry for queue in (self._left, *self._queues.values()) for entry in queue]
        assert set(queued) == entries
        assert len(queued) == len(entries)
        assert all(self._queues.values())
        assert all(self._of[turn] in entries for turn in self._of)
        assert self._chosen is None or self._chosen in entries

    def _least(self) -> Entry[PlaceT] | None:
        now, least, worth_min = self._habits.now, None, float("inf")
        for (_, due), queue in self._queues.items():
            entry = next(iter(queue))
            gap = 2.0 ** (due / _STEPS)
            age: float = now - entry.turn.last
            if age <= _LATE * gap:
                entry = next(reversed(queue))
                age = gap
            worth = self._habits.of(entry.turn).share / age
            if worth < worth_min:
                least, worth_min = entry, worth
        return least

    def _enqueue(self, entry: Entry[PlaceT]) -> None:
        turn = entry.turn
        entry.queue = key = (self._habits.kind(turn), round(self._habits.due(turn) * _STEPS))
        self._queues.setdefault(key, OrderedDict())[entry] = None

    def _dequeue(self, entry: Entry[PlaceT]) -> None:
        if self._chosen is entry:
            self._chosen = None
        if entry.queue is None:
            del self._left[entry]
            return
        queue = self._queues[entry.queue]
        del queue[entry]
        if not queue:
            del self._queues[entry.queue]


class _Sampled:
    """A place of a small cache."""

    __slots__ = ("branches", "depth", "hash", "parent")

    def __init__(self, hash_: int, depth: int, parent: _Sampled | None) -> None:
        self.hash, self.depth, self.parent = hash_, depth, parent
        self.branches = 0


class SmallCache:
    """A cache of names alone, of `capacity` blocks, which evicts in one of the orders."""

    def __init__(self, capacity: int, habits: Habits, *, learned: bool) -> None:
        self._capacity = capacity
        self._learned = learned
        self._places: dict[int, _Sampled] = {}
        self._leaves: Leaves[_Sampled] = Leaves(habits)

    def serve(self, names: Sequence[tuple[int, int]], turn: Turn) -> int:
        """Play the request `turn`, which has the (hash, depth) `names`. Returns how many were found."""
        last, found = None, 0
        for name, _ in names:
            place = self._places.get(name)
            if place is None:
                break
            last, found = place, found + 1
        if last is not None:
            self._leaves.remove(last)
        for name, depth in names[found:]:
            place = self._places[name] = _Sampled(name, depth, last)
            if last is not None:
                last.branches += 1
            last = place
        if last is not None and not last.branches:
            self._leaves.add(last, turn)
        if turn.before is not None:
            self._leaves.leave_behind(turn.before)
        while len(self._places) > self._capacity:
            self._evict()
        return found

    def _evict(self) -> None:
        leaf = self._leaves.choose(learned=self._learned)
        assert leaf is not None
        del self._places[leaf.hash]
        parent = leaf.parent
        if parent is not None:
            parent.branches -= 1
        if parent is None or parent.branches:
            self._leaves.remove(leaf)
        else:
            self._leaves.shorten(leaf, parent)


class Duel:
    """Whether the learned order or LRU finds more, on the blocks whose hash falls into a sample."""

    def __init__(self, capacity: int, habits: Habits) -> None:
        self._one_in = max(1, capacity // _SAMPLE_BLOCKS)
        small = max(1, capacity // self._one_in)
        self._learned = SmallCache(small, habits, learned=True)
        self._lru = SmallCache(small, habits, learned=False)
        self._memory_blocks = 8 * small
        self.lead = 0.0
        """Sampled blocks that the learned order found and LRU did not, lately."""
        self.learned = False

    def serve(self, names: Sequence[int], turn: Turn) -> None:
        sample = [(name, depth) for depth, name in enumerate(names) if name % self._one_in == 0]
        lead = self._learned.serve(sample, turn) - self._lru.serve(sample, turn)
        self.lead = self.lead * (1 - min(1.0, len(sample) / self._memory_blocks)) + lead
        if self.lead < -0.02 * self._memory_blocks:
            self.learned = False
        elif self.lead > 0:
            self.learned = True


class Adaptive(Generic[PlaceT]):
    """The order of eviction of one cache of `capacity` blocks of `block_tokens` tokens.

    Invariant: the places that are cached, and that nothing hangs from, are those that it can choose.
    """

    def __init__(self, capacity: int, block_tokens: int, *, duel: bool = True) -> None:
        """Without `duel` what was learned is always followed."""
        self._habits = Habits(capacity, block_tokens)
        self._duel = Duel(capacity, self._habits) if duel else None
        self._leaves: Leaves[PlaceT] = Leaves(self._habits)
        self._below: Leaves[PlaceT] = Leaves(self._habits)
        """Of host memory: what the cache evicts goes there, where that is kept."""
        self._turn = Turn(0, 0)

    def begin(self, names: Sequence[int], hit: int) -> Turn:
        """A request starts whose prompt has the blocks `names`, of which `hit` were found."""
        return self._habits.begin(names, hit)

    def end(self, turn: Turn, names: Sequence[int]) -> None:
        """It is over, and the path of `names` is about to be cached."""
        self._habits.end(turn)
        if self._duel is not None:
            self._duel.serve(names, turn)
        if turn.before is not None:
            self._leaves.leave_behind(turn.before)
            self._below.leave_behind(turn.before)
            turn.before = None
        self._turn = turn

    def cached(self, place: PlaceT) -> None:
        """Nobody uses `place` any more."""
        if not place.branches:
            self._leaves.add(place, self._turn)

    def used(self, place: PlaceT) -> None:
        """A cached place is in use again."""
        self._leaves.remove(place)

    def gone(self, leaf: PlaceT, parent: PlaceT | None) -> None:
        """`leaf` was evicted; `parent` is cached and what it hung from. None: that is in use, or there is none."""
        if parent is None or parent.branches:
            self._leaves.remove(leaf)
        else:
            self._leaves.shorten(leaf, parent)

    def moved(self, place: PlaceT) -> None:
        """`place`, the end of a path, goes to host memory, or is not read there any more."""
        self._below.add(place, self._leaves.turn_of(place) or self._turn)

    def gone_below(self, leaf: PlaceT, parent: PlaceT | None) -> None:
        """`leaf` has left host memory, or is read; of `parent`, which is there, nothing is left below it."""
        if parent is None:
            self._below.remove(leaf)
        elif self._below.turn_of(leaf) is not None:
            self._below.shorten(leaf, parent)
        else:
            self._below.add(parent, self._turn)

    def victim(self) -> PlaceT | None:
        """The end of a path that goes next; None where nothing is cached."""
        return self._leaves.choose(learned=self._duel is None or self._duel.learned)

    def victim_below(self) -> PlaceT | None:
        """The same of host memory."""
        return self._below.choose(learned=self._duel is None or self._duel.learned)

    def clear(self) -> None:
        """Nothing is cached any more. What was learned stays."""
        self._leaves.clear()
        self._below.clear()

    def check_invariants(self, cached: Iterable[PlaceT], below: Iterable[PlaceT] = ()) -> None:
        """`below`: the ends of paths that only host memory has, and no step reads."""
        self._leaves.check_invariants({place for place in cached if not place.branches})
        self._below.check_invariants(set(below))
