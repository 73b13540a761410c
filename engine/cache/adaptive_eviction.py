"""Order in which cached prefixes are evicted from the device and from host memory, learned by `ReuseStats`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from engine.cache.eviction_queue import EvictableT, EvictionQueue, StateValuation
from engine.cache.reuse_stats import ConversationTurn, ReuseStats


class AdaptiveEviction(Generic[EvictableT]):
    """The order of eviction of one cache of `capacity` blocks of `block_tokens` tokens.

    Invariant: the places that are cached, and that nothing hangs from, are those that it can choose.
    """

    def __init__(self, capacity: int, block_tokens: int, *, states: StateValuation[EvictableT] | None = None) -> None:
        self._habits = ReuseStats(capacity, block_tokens)
        self._leaves: EvictionQueue[EvictableT] = EvictionQueue(self._habits, states)
        self._below: EvictionQueue[EvictableT] = EvictionQueue(self._habits, states)
        """Of host memory: what the cache evicts goes there, where that is kept."""
        self._turn = ConversationTurn(0, 0)

    def begin(self, names: Sequence[int], hit: int) -> ConversationTurn:
        """A request starts whose prompt has the blocks `names`, of which `hit` were found."""
        return self._habits.begin(names, hit)

    def end(self, turn: ConversationTurn) -> None:
        """It is over, and its path is about to be cached."""
        self._habits.end(turn)
        if turn.before is not None:
            self._leaves.leave_behind(turn.before)
            self._below.leave_behind(turn.before)
            turn.before = None
        self._turn = turn

    def cached(self, place: EvictableT) -> None:
        """Nobody uses `place` any more."""
        if not place.cached_child_count:
            self._leaves.add(place, self._turn)

    def used(self, place: EvictableT) -> None:
        """A cached place is in use again."""
        self._leaves.remove(place)

    def gone(self, leaf: EvictableT, parent: EvictableT | None) -> None:
        """`leaf` was evicted; `parent` is cached and what it hung from. None: that is in use, or there is none."""
        if parent is None or parent.cached_child_count:
            self._leaves.remove(leaf)
        else:
            self._leaves.shorten(leaf, parent)

    def moved(self, place: EvictableT) -> None:
        """`place`, the end of a path, goes to host memory, or is not read there any more."""
        self._below.add(place, self._leaves.turn_of(place) or self._turn)

    def gone_below(self, leaf: EvictableT, parent: EvictableT | None) -> None:
        """`leaf` has left host memory, or is read; of `parent`, which is there, nothing is left below it."""
        if parent is None:
            self._below.remove(leaf)
        elif self._below.turn_of(leaf) is not None:
            self._below.shorten(leaf, parent)
        else:
            self._below.add(parent, self._turn)

    def superseded(self, place: EvictableT, worth: float) -> None:
        """A state is cached that a deeper one of its path continues; `worth`: blocks saved a block of its room."""
        self._leaves.supersede(place, worth)

    def superseded_below(self, place: EvictableT, worth: float) -> None:
        """The same in host memory, or its blocks of attention are not there."""
        self._below.supersede(place, worth)

    def state_used(self, place: EvictableT) -> None:
        """Its state is in use."""
        self._leaves.weigh(place)
        self._below.weigh(place)

    state_gone = state_used

    def victim(self) -> EvictableT | None:
        """The end of a path that goes next; None where nothing is cached."""
        return self._leaves.choose()

    def victim_below(self) -> EvictableT | None:
        """The same of host memory."""
        return self._below.choose()

    def victim_state(self) -> EvictableT | None:
        """Whose state goes next, and nothing else; None: the end of a path."""
        return self._leaves.choose_state()

    def victim_state_below(self) -> EvictableT | None:
        """The same of host memory."""
        return self._below.choose_state()

    def check_states(self, cached: set[EvictableT], below: set[EvictableT]) -> None:
        """Of the places whose states are cached here and there, some are superseded."""
        self._leaves.check_states(cached)
        self._below.check_states(below)

    def clear(self) -> None:
        """Nothing is cached any more. What was learned stays."""
        self._leaves.clear()
        self._below.clear()

    def check_invariants(self, cached: Iterable[EvictableT], below: Iterable[EvictableT] = ()) -> None:
        """`below`: the ends of paths that only host memory has, and no step reads."""
        self._leaves.check_invariants({place for place in cached if not place.cached_child_count})
        self._below.check_invariants(set(below))
