"""Evicts the ends of cached paths, by what `ReuseStats` has learned of how conversations return.

A path is the cached blocks of one conversation turn, and is evicted from its end. Its value is the expected number of
hits of a block per unit of time: `return share / max(gap, age)` (see `engine.cache.reuse_stats`). Paths of equal class,
gap and value share a queue. Only the ends of the queues are compared, and the number of queues does not grow with the
cache. A path that was chosen is shortened until it is gone or another path is cached.

In a model with recurrent states, a path can be resumed only where a state was saved. Then the value of the path also
depends on the blocks that its last state saves, for each block of memory (`StateValuation`). A state that a later state
of the same path has superseded is evicted by itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.cache.reuse_stats import ConversationTurn, ReuseStats

_QUEUES_PER_DOUBLING = 2
"""Queues of one class for each doubling of the gap."""
_OVERDUE_GAPS = 1.5
"""A turn is overdue when its age is more than so many times its expected gap."""

_UNRESUMABLE_VALUE = 0.02
"""Value of a path without a state at its end. No prompt resumes from it, but it shows where to save a state next."""

EvictableT = TypeVar("EvictableT", bound="EvictableNode")


class EvictableNode(Protocol):
    """A node of a prefix tree, as eviction sees it."""

    hash: int
    depth: int
    cached_child_count: int
    """Number of children that are cached, too."""


@dataclass(frozen=True, slots=True)
class StateValuation(Generic[EvictableT]):
    """Computes the worth of paths that can be resumed only at recurrent states."""

    blocks_per_state: int
    """Attention blocks that take as much memory as one state."""
    count_saved_blocks: Callable[[EvictableT, int], int | None]
    """`Node.count_saved_blocks`: blocks that the state at a node saves; None if there is no state."""

    def value_per_block(self, leaf: EvictableT) -> float:
        """Return the blocks that need not be computed thanks to the path to `leaf`, per block of memory that it takes.

        If the state at the leaf saves 30 blocks, and takes the memory of 10, the value is 30 / (30 + 10).
        """
        saved_blocks = self.count_saved_blocks(leaf, self.blocks_per_state)
        return _UNRESUMABLE_VALUE if saved_blocks is None else saved_blocks / (saved_blocks + self.blocks_per_state)


class QueueKey(NamedTuple):
    """Properties that all paths of one queue share."""

    turn_class: object
    gap_step: int
    """log2 of the expected gap before the turn returns, times the queues per doubling."""
    value_log2: int

    @property
    def gap(self) -> float:
        """Expected blocks of prompts before the turn returns."""
        return math.pow(2.0, self.gap_step / _QUEUES_PER_DOUBLING)


class CachedPath(Generic[EvictableT]):
    """Cached blocks up to `leaf`, kept because `turn` may be continued."""

    __slots__ = ("leaf", "queue_key", "turn")

    def __init__(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        self.leaf = leaf
        self.turn = turn
        self.queue_key: QueueKey | None = None
        """None: the path is abandoned, because its conversation continues elsewhere."""


class EvictionQueue(Generic[EvictableT]):
    """Chooses which cached path of one memory is evicted next, from its end."""

    def __init__(self, reuse_stats: ReuseStats, state_valuation: StateValuation[EvictableT] | None = None) -> None:
        self._reuse_stats = reuse_stats
        self._state_valuation = state_valuation
        self._path_by_leaf: dict[EvictableT, CachedPath[EvictableT]] = {}
        self._path_by_turn: dict[ConversationTurn, CachedPath[EvictableT]] = {}
        self._abandoned_paths: OrderedDict[CachedPath[EvictableT], None] = OrderedDict()
        self._superseded_states: OrderedDict[EvictableT, tuple[float, int]] = OrderedDict()
        """Node of a superseded state -> (worth of a block of its memory, clock when it was added), oldest first."""
        self._queues: dict[QueueKey, OrderedDict[CachedPath[EvictableT], None]] = {}
        self._next_path: CachedPath[EvictableT] | None = None

    def add(self, leaf: EvictableT, turn: ConversationTurn) -> None:
        """Add the path of `turn`, which ends at `leaf`."""
        self._superseded_states.pop(leaf, None)
        path = self._path_by_leaf[leaf] = CachedPath(leaf, turn)
        self._path_by_turn[turn] = path
        self._enqueue(path)
        self._next_path = None

    def remove(self, leaf: EvictableT) -> None:
        """Remove the path that ends at `leaf`, if there is one."""
        path = self._path_by_leaf.pop(leaf, None)
        if path is not None:
            self._dequeue(path)
            if self._path_by_turn.get(path.turn) is path:
                del self._path_by_turn[path.turn]

    def find_turn(self, leaf: EvictableT) -> ConversationTurn | None:
        """Return the turn of the path that ends at `leaf`; None if no path does."""
        path = self._path_by_leaf.get(leaf)
        return None if path is None else path.turn

    def shorten_path(self, leaf: EvictableT, parent: EvictableT) -> None:
        """Record that `leaf` was evicted: its path ends at `parent` now.

        Once only a prefix is left that several conversations share, the path is valued by the reuse of that prefix.
        """
        path = self._path_by_leaf.pop(leaf)
        path.leaf = parent
        self._path_by_leaf[parent] = path
        self._superseded_states.pop(parent, None)
        prefix_turn = self._find_shared_prefix(path)
        if prefix_turn is None:
            self.requeue(parent)
            return
        self._dequeue(path)
        if self._path_by_turn.get(path.turn) is path:
            del self._path_by_turn[path.turn]
        path.turn = prefix_turn
        self._enqueue(path)

    def _find_shared_prefix(self, path: CachedPath[EvictableT]) -> ConversationTurn | None:
        """Return the shared prefix that a conversation's path was shortened to; None if it ends elsewhere."""
        turn = path.turn
        if turn.is_shared_prefix or path.leaf.depth >= turn.shared_blocks:
            return None
        return self._reuse_stats.touch_shared_prefix(path.leaf.hash, turn.end_clock)

    def requeue(self, node: EvictableT) -> None:
        """Move the path that ends at `node`, if one does, to the queue of its present value.

        Called when the state at `node` was used, added or removed.
        """
        self._superseded_states.pop(node, None)
        path = self._path_by_leaf.get(node)
        if path is not None and path.queue_key is not None and path.queue_key.value_log2 != self._value_log2(node):
            self._dequeue(path)
            self._enqueue(path)
            self._next_path = None

    def add_superseded_state(self, node: EvictableT, value_per_block: float) -> None:
        """Add a superseded state. `value_per_block`: blocks that it saves, for each block of its memory."""
        if node not in self._path_by_leaf:
            self._superseded_states[node] = (value_per_block, self._reuse_stats.clock)

    def select_state(self) -> EvictableT | None:
        """Return the node of the oldest superseded state, if no path is worth less; else None."""
        if not self._superseded_states:
            return None
        node, (value_per_block, superseded_clock) = next(iter(self._superseded_states.items()))
        next_path = self._select_path()
        if next_path is None:
            return node
        mean_reuse = self._reuse_stats.compute_mean_reuse()
        age = self._reuse_stats.clock - superseded_clock
        state_value = value_per_block * mean_reuse.return_share / max(2.0**mean_reuse.gap_log2, age)
        return node if state_value <= self._current_value(next_path) else None

    def mark_abandoned(self, turn: ConversationTurn) -> None:
        """Evict the path of `turn` first from now on, because the next turn of its conversation has another path."""
        path = self._path_by_turn.pop(turn, None)
        if path is not None:
            self._dequeue(path)
            path.queue_key = None
            self._abandoned_paths[path] = None

    def select_leaf(self) -> EvictableT | None:
        """Return the node to evict next; None if the queue is empty."""
        path = self._select_path()
        return None if path is None else path.leaf

    def clear(self) -> None:
        """Forget all paths and states. What was learned stays in `ReuseStats`."""
        self._path_by_leaf.clear()
        self._path_by_turn.clear()
        self._abandoned_paths.clear()
        self._superseded_states.clear()
        self._queues.clear()
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
        """Return the path to evict from: the path of the last call, until it is gone or another path is added."""
        if self._next_path is None:
            self._next_path = next(iter(self._abandoned_paths), None) or self._least_valuable_path()
        return self._next_path

    def _least_valuable_path(self) -> CachedPath[EvictableT] | None:
        """Return the path that is worth least. A queue offers its oldest path if that is overdue, else its youngest."""
        least_valuable, value_min = None, math.inf
        for key, queue in self._queues.items():
            path = next(iter(queue))
            if not self._is_overdue(path, key):
                path = next(reversed(queue))
            value = self._current_value(path)
            if value < value_min:
                least_valuable, value_min = path, value
        return least_valuable

    def _current_value(self, path: CachedPath[EvictableT]) -> float:
        """Return the expected hits of a block of the path per unit of time; 0 if the path is abandoned."""
        key = path.queue_key
        if key is None:
            return 0.0
        wait = self._age(path) if self._is_overdue(path, key) else key.gap
        return self._reuse_stats.get_counts(path.turn).return_share / wait * 2.0**key.value_log2

    def _age(self, path: CachedPath[EvictableT]) -> int:
        return self._reuse_stats.clock - path.turn.end_clock

    def _is_overdue(self, path: CachedPath[EvictableT], key: QueueKey) -> bool:
        """Return whether the turn of a path in the queue of `key` should have returned long ago."""
        return self._age(path) > _OVERDUE_GAPS * key.gap

    def _value_log2(self, leaf: EvictableT) -> int:
        """Return the rounded log2 of `StateValuation.value_per_block` at `leaf`; 0 for a model without states."""
        if self._state_valuation is None:
            return 0
        return round(math.log2(self._state_valuation.value_per_block(leaf)))

    def _enqueue(self, path: CachedPath[EvictableT]) -> None:
        """Put a path into the queue of its class, gap and value."""
        turn = path.turn
        gap_step = round(self._reuse_stats.expected_gap_log2(turn) * _QUEUES_PER_DOUBLING)
        path.queue_key = key = QueueKey(self._reuse_stats.classify_turn(turn), gap_step, self._value_log2(path.leaf))
        self._queues.setdefault(key, OrderedDict())[path] = None

    def _dequeue(self, path: CachedPath[EvictableT]) -> None:
        """Take a path out of its queue, or out of the abandoned paths."""
        if self._next_path is path:
            self._next_path = None
        if path.queue_key is None:
            del self._abandoned_paths[path]
            return
        queue = self._queues[path.queue_key]
        del queue[path]
        if not queue:
            del self._queues[path.queue_key]


class AdaptiveEviction(Generic[EvictableT]):
    """Evicts the path that is least likely to be continued. Device and host memory learn from the same conversations.

    Invariant: the device's queue holds exactly the cached nodes that have no cached child.
    """

    def __init__(
        self, capacity_blocks: int, block_tokens: int, *, state_valuation: StateValuation[EvictableT] | None = None
    ) -> None:
        """`capacity_blocks`: blocks of both memories. `block_tokens`: tokens of a block."""
        self._reuse_stats = ReuseStats(capacity_blocks, block_tokens)
        self.device_queue: EvictionQueue[EvictableT] = EvictionQueue(self._reuse_stats, state_valuation)
        self.host_queue: EvictionQueue[EvictableT] = EvictionQueue(self._reuse_stats, state_valuation)
        self._last_turn = ConversationTurn(0, 0)
        """The turn that ended last: nodes that become cached next belong to its path."""

    def begin_turn(self, block_hashes: Sequence[int], hit_blocks: int) -> ConversationTurn:
        """Record a request with these blocks in its prompt; the first `hit_blocks` of them were cached."""
        return self._reuse_stats.begin_turn(block_hashes, hit_blocks)

    def end_turn(self, turn: ConversationTurn) -> None:
        """Record that a request is over; its blocks are about to become cached."""
        self._reuse_stats.end_turn(turn)
        if turn.previous is not None:
            self.device_queue.mark_abandoned(turn.previous)
            self.host_queue.mark_abandoned(turn.previous)
            turn.previous = None
        self._last_turn = turn

    def mark_cached(self, node: EvictableT) -> None:
        """Record that the device still has `node`, and no request uses it any more."""
        if not node.cached_child_count:
            self.device_queue.add(node, self._last_turn)

    def remove_leaf(self, leaf: EvictableT, parent: EvictableT | None) -> None:
        """Record that the device has evicted `leaf`. `parent`: its parent, if that is cached."""
        if parent is None or parent.cached_child_count:
            self.device_queue.remove(leaf)
        else:
            self.device_queue.shorten_path(leaf, parent)

    def add_host_leaf(self, node: EvictableT) -> None:
        """Record that host memory has `node`, which has no children. Its path belongs to the same turn as before."""
        self.host_queue.add(node, self.device_queue.find_turn(node) or self._last_turn)

    def replace_host_leaf(self, leaf: EvictableT, parent: EvictableT) -> None:
        """Record that `leaf` has left the tree, so that its path in host memory ends at `parent` now."""
        if self.host_queue.find_turn(leaf) is not None:
            self.host_queue.shorten_path(leaf, parent)
        else:
            self.host_queue.add(parent, self._last_turn)

    def requeue_state(self, node: EvictableT) -> None:
        """Value a path again after the state at `node` was used or removed."""
        self.device_queue.requeue(node)
        self.host_queue.requeue(node)

    def clear(self) -> None:
        """Record that both memories are empty. What was learned stays."""
        self.device_queue.clear()
        self.host_queue.clear()

    def check_invariants(self, device_nodes: Iterable[EvictableT], host_leaves: Iterable[EvictableT] = ()) -> None:
        """Check the queues. `host_leaves`: ends of paths that only host memory has, and that no step reads."""
        self.device_queue.check_invariants({node for node in device_nodes if not node.cached_child_count})
        self.host_queue.check_invariants(set(host_leaves))
