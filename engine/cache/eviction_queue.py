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
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.cache.reuse_stats import ConversationTurn, ReuseStats

_QUEUES_PER_DOUBLING = 2
"""Queues of one class for each doubling of the gap."""
_OVERDUE_GAPS = 1.5
"""Times its gap after which a turn is overdue."""

_UNRESUMABLE_VALUE = 0.02
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

    blocks_per_state: int
    """Blocks of attention that one takes the room of."""
    count_saved_blocks: Callable[[EvictableT, int], int | None]
    """Blocks from the state before a place to the one there, by that room; None where there is none."""

    def value_per_block(self, leaf: EvictableT) -> float:
        """Blocks that a path which ends there saves, for each that it and its last state take."""
        saved_blocks = self.count_saved_blocks(leaf, self.blocks_per_state)
        return _UNRESUMABLE_VALUE if saved_blocks is None else saved_blocks / (saved_blocks + self.blocks_per_state)


class QueueKey(NamedTuple):
    """Paths of equal class, gap and value share a queue."""

    turn_class: object
    gap_step: int
    """log2 of the gap after which their turns are due, in steps of a queue."""
    value_log2: int


class CachedPath(Generic[EvictableT]):
    """A path that can be shortened at `leaf`, kept for the sake of `turn`."""

    __slots__ = ("leaf", "queue_key", "turn")

    def __init__(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        self.leaf = leaf
        self.turn = turn
        self.queue_key: QueueKey | None = None
        """None: left behind, by a conversation that went on elsewhere."""


class EvictionQueue(Generic[EvictableT]):
    """Every cached place that nothing hangs from, in the order of eviction."""

    def __init__(self, reuse_stats: ReuseStats, state_valuation: StateValuation[EvictableT] | None = None) -> None:
        self._reuse_stats = reuse_stats
        self._state_valuation = state_valuation
        self._path_by_leaf: dict[EvictableT, CachedPath[EvictableT]] = {}
        self._path_by_turn: dict[ConversationTurn, CachedPath[EvictableT]] = {}
        self._abandoned_paths: OrderedDict[CachedPath[EvictableT], None] = OrderedDict()
        self._superseded_states: OrderedDict[EvictableT, tuple[float, int]] = OrderedDict()
        """States that go by themselves: what each is worth, and since when."""
        self._queues: dict[QueueKey, OrderedDict[CachedPath[EvictableT], None]] = {}
        self._next_path: CachedPath[EvictableT] | None = None

    def add(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        """`leaf` is the end of the path that `turn` has left."""
        self._superseded_states.pop(leaf, None)
        path = self._path_by_leaf[leaf] = CachedPath(leaf, turn)
        self._path_by_turn[turn] = path
        self._enqueue(path)
        self._next_path = None

    def remove(self, leaf: EvictableT) -> None:
        """`leaf` is in use, or gone; nothing if it is not the end of a path."""
        path = self._path_by_leaf.pop(leaf, None)
        if path is not None:
            self._dequeue(path)
            if self._path_by_turn.get(path.turn) is path:
                del self._path_by_turn[path.turn]

    def find_turn(self, leaf: EvictableT) -> ConversationTurn | None:
        """Who left the path that ends there; None if it is not the end of one."""
        path = self._path_by_leaf.get(leaf)
        return None if path is None else path.turn

    def shorten_path(self, leaf: EvictableT, parent: EvictableT) -> None:
        """`leaf` is gone, and `parent` the end of its path now."""
        path = self._path_by_leaf.pop(leaf)
        path.leaf = parent
        self._path_by_leaf[parent] = path
        self._superseded_states.pop(parent, None)
        turn = path.turn
        prefix_turn = None
        if parent.depth < turn.shared_blocks and not turn.is_shared_prefix:
            prefix_turn = self._reuse_stats.shared_prefix_turn(parent.hash, turn.end_clock)
        if prefix_turn is not None:
            self._dequeue(path)
            if self._path_by_turn.get(turn) is path:
                del self._path_by_turn[turn]
            path.turn = prefix_turn
            self._enqueue(path)
        else:
            self.requeue(parent)

    def requeue(self, node: EvictableT) -> None:
        """The state at `node`, which may be the end of a path, is in use, or has come or gone."""
        self._superseded_states.pop(node, None)
        path = self._path_by_leaf.get(node)
        if path is not None and path.queue_key is not None and path.queue_key.value_log2 != self._value_log2(node):
            self._dequeue(path)
            self._enqueue(path)
            self._next_path = None

    def add_superseded_state(self, node: EvictableT, value_per_block: float) -> None:
        """Queue the state at `node`, which few requests will resume. `value_per_block`: saved for each of its room."""
        if node not in self._path_by_leaf:
            self._superseded_states[node] = (value_per_block, self._reuse_stats.clock)

    def select_state(self) -> EvictableT | None:
        """The oldest of the superseded states, if the end of no path is worth less."""
        if not self._superseded_states:
            return None
        node, (value, superseded_clock) = next(iter(self._superseded_states.items()))
        next_path = self._select_path()
        if next_path is None:
            return node
        return_share, gap_log2 = self._reuse_stats.compute_mean_reuse()
        return (
            node
            if value * return_share / max(2.0**gap_log2, self._reuse_stats.clock - superseded_clock)
            <= self._current_value(next_path)
            else None
        )

    def mark_abandoned(self, turn: ConversationTurn) -> None:
        """The conversation of `turn` goes on elsewhere: what is left of that path was dropped from its prompt."""
        path = self._path_by_turn.pop(turn, None)
        if path is not None:
            self._dequeue(path)
            path.queue_key = None
            self._abandoned_paths[path] = None

    def select_leaf(self) -> EvictableT | None:
        """The end of the path that is to be shortened next; None without any."""
        path = self._select_path()
        return None if path is None else path.leaf

    def clear(self) -> None:
        for collection in (
            self._path_by_leaf,
            self._path_by_turn,
            self._abandoned_paths,
            self._queues,
            self._superseded_states,
        ):
            collection.clear()
        self._next_path = None

    def check_invariants(self, leaves: set[EvictableT]) -> None:
        paths = set(self._path_by_leaf.values())
        assert set(self._path_by_leaf) == leaves
        assert all(path.leaf is leaf for leaf, path in self._path_by_leaf.items())
        queued_paths = [path for queue in (self._abandoned_paths, *self._queues.values()) for path in queue]
        assert set(queued_paths) == paths
        assert len(queued_paths) == len(paths)
        assert all(self._queues.values())
        assert all(self._path_by_turn[turn] in paths for turn in self._path_by_turn)
        assert self._next_path is None or self._next_path in paths
        assert not self._superseded_states.keys() & leaves

    def check_states(self, nodes_with_states: set[EvictableT]) -> None:
        assert self._superseded_states.keys() <= nodes_with_states

    def _select_path(self) -> CachedPath[EvictableT] | None:
        if self._next_path is None:
            self._next_path = next(iter(self._abandoned_paths), None) or self._least_valuable_path()
        return self._next_path

    def _least_valuable_path(self) -> CachedPath[EvictableT] | None:
        """The oldest of a queue where it is overdue, else the youngest; of all queues what is worth least."""
        clock, least_valuable, value_min = self._reuse_stats.clock, None, float("inf")
        for key, queue in self._queues.items():
            path = next(iter(queue))
            if clock - path.turn.end_clock <= _OVERDUE_GAPS * 2.0 ** (key.gap_step / _QUEUES_PER_DOUBLING):
                path = next(reversed(queue))
            value = self._current_value(path)
            if value < value_min:
                least_valuable, value_min = path, value
        return least_valuable

    def _current_value(self, path: CachedPath[EvictableT]) -> float:
        if path.queue_key is None:
            return 0.0
        _, gap_step, value_log2 = path.queue_key
        gap, age = 2.0 ** (gap_step / _QUEUES_PER_DOUBLING), self._reuse_stats.clock - path.turn.end_clock
        return (
            self._reuse_stats.get_counts(path.turn).return_share
            / (age if age > _OVERDUE_GAPS * gap else gap)
            * 2.0**value_log2
        )

    def _value_log2(self, leaf: EvictableT) -> int:
        """log2, rounded, of what a block of the path that ends there saves."""
        return 0 if self._state_valuation is None else round(math.log2(self._state_valuation.value_per_block(leaf)))

    def _enqueue(self, path: CachedPath[EvictableT]) -> None:
        turn = path.turn
        gap_step = round(self._reuse_stats.expected_gap_log2(turn) * _QUEUES_PER_DOUBLING)
        path.queue_key = key = QueueKey(self._reuse_stats.classify_turn(turn), gap_step, self._value_log2(path.leaf))
        self._queues.setdefault(key, OrderedDict())[path] = None

    def _dequeue(self, path: CachedPath[EvictableT]) -> None:
        if self._next_path is path:
            self._next_path = None
        if path.queue_key is None:
            del self._abandoned_paths[path]
            return
        queue = self._queues[path.queue_key]
        del queue[path]
        if not queue:
            del self._queues[path.queue_key]
