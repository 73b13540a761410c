"""Evicts the ends of cached paths, by what `ReuseStats` has learned of how conversations return.

A path is the cached blocks of one conversation turn, and is evicted from its end. Its value is the expected number of
hits of a block per unit of time (see `engine.cache.reuse_stats`). Paths of equal class, gap and value share a queue, so
that only the ends of few queues are compared. Among paths of about equal value the youngest goes first: the older ones'
returns are nearer.

In a model with recurrent states, a path can be resumed only where a state was saved. Then the value of the path also
depends on the blocks that its last state saves, for each block of memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.blocks import Node
from engine.cache.reuse_stats import ConversationTurn, ReuseStats, TurnClass

_STEPS_PER_DOUBLING = 2
"""Queues of one class for each doubling of the gap, and ranks for each doubling of the value."""
_OVERDUE_GAPS = 1.5
"""A turn is overdue when its age is more than so many times its expected gap."""

_UNRESUMABLE_VALUE = 0.02
"""Value of a path without a state at its end. No prompt resumes from it, but it shows where to save a state next."""


class QueueKey(NamedTuple):
    """Properties that all paths of one queue share."""

    turn_class: TurnClass
    gap_step: int
    """log2 of the expected gap before the turn returns, times the steps per doubling."""
    value_log2: int
    """log2 of the blocks that a path saves, for each block of memory that it takes."""


class SupersededState(NamedTuple):
    """A recurrent state that a later state of the same path has superseded."""

    value_per_block: float
    """Blocks that it saves, for each block of its memory."""
    clock: int
    """Clock of `ReuseStats` when it was superseded."""


@dataclass(slots=True, eq=False)
class CachedPath:
    """Cached blocks up to `leaf`, kept because the next turn after `turn` may reuse them."""

    leaf: Node
    turn: ConversationTurn
    queue_key: QueueKey | None = None
    """None: the path is abandoned, because its conversation continues elsewhere."""


class EvictionQueue:
    """Chooses which cached path of one memory is evicted next, from its end."""

    def __init__(self, reuse_stats: ReuseStats, blocks_per_state: int | None = None) -> None:
        """Start without paths, which are the cached prefixes of conversations: each ends at a leaf of the prefix tree.

        `reuse_stats`: statistics of when conversations continue. `blocks_per_state`: number of attention blocks that
        take as much memory as one recurrent state; None for a model without such states.
        """
        self._reuse_stats = reuse_stats
        self._blocks_per_state = blocks_per_state
        self._path_by_leaf: dict[Node, CachedPath] = {}
        self._path_by_turn: dict[ConversationTurn, CachedPath] = {}
        self._superseded_states: OrderedDict[Node, SupersededState] = OrderedDict()
        """Recurrent states that a later state of the same path replaces, by their nodes, oldest first."""
        self._queues: dict[QueueKey | None, OrderedDict[CachedPath, None]] = {}
        """All paths, oldest first in each queue. Those in the queue under None are evicted before all others."""
        self._next_path: CachedPath | None = None
        """Path that is evicted next; None: it must be chosen again."""

    def add(self, leaf: Node, turn: ConversationTurn) -> None:
        """Add the path of `turn`, which ends at `leaf`."""
        self._superseded_states.pop(leaf, None)
        path = self._path_by_leaf[leaf] = CachedPath(leaf, turn)
        self._path_by_turn[turn] = path
        self._enqueue(path)
        self._next_path = None

    def remove(self, leaf: Node) -> None:
        """Remove the path that ends at `leaf`, if there is one."""
        path = self._path_by_leaf.pop(leaf, None)
        if path is not None:
            self._dequeue(path)
            self._forget_turn(path)

    def _forget_turn(self, path: CachedPath) -> None:
        """Remove a path from the paths by turn, unless its turn has another path."""
        if self._path_by_turn.get(path.turn) is path:
            del self._path_by_turn[path.turn]

    def find_turn(self, leaf: Node) -> ConversationTurn | None:
        """Return the turn of the path that ends at `leaf`; None if no path does."""
        path = self._path_by_leaf.get(leaf)
        return None if path is None else path.turn

    def shorten_path(self, leaf: Node, parent: Node) -> None:
        """Record that the last block of a cached path, at `leaf`, was evicted: the path ends at `parent` now.

        A path has the cached blocks of one conversation turn. Once it is as short as a prefix that several
        conversations share, such as a system prompt, it is valued by how often that prefix is reused.
        """
        path = self._path_by_leaf.pop(leaf)
        path.leaf = parent
        self._path_by_leaf[parent] = path
        self._superseded_states.pop(parent, None)
        shared_prefix = self._find_shared_prefix(path)
        if shared_prefix is None:
            self.requeue(parent)
            return
        self._dequeue(path)
        self._forget_turn(path)
        path.turn = shared_prefix
        self._enqueue(path)

    def _find_shared_prefix(self, path: CachedPath) -> ConversationTurn | None:
        """Return the shared prefix that a conversation's path was shortened to; None if it ends elsewhere."""
        turn = path.turn
        if turn.is_shared_prefix or path.leaf.depth >= turn.shared_blocks:
            return None
        return self._reuse_stats.touch_shared_prefix(path.leaf.hash, turn.end_clock)

    def requeue(self, node: Node) -> None:
        """Move the path that ends at `node`, if one does, to the queue of its value: the state there has changed."""
        self._superseded_states.pop(node, None)
        path = self._path_by_leaf.get(node)
        if path is None or path.queue_key is None:
            return
        if path.queue_key.value_log2 != self._compute_value_log2(node):
            self._dequeue(path)
            self._enqueue(path)
            self._next_path = None

    def add_superseded_state(self, node: Node, value_per_block: float) -> None:
        """Add a superseded state. `value_per_block`: blocks that it saves, for each block of its memory."""
        if node not in self._path_by_leaf:
            self._superseded_states[node] = SupersededState(value_per_block, self._reuse_stats.clock)

    def select_state(self) -> Node | None:
        """Return the node of the oldest superseded state, if no path is worth less; else None."""
        if not self._superseded_states:
            return None
        node, state = next(iter(self._superseded_states.items()))
        next_path = self._select_path()
        if next_path is None:
            return node
        mean_reuse = self._reuse_stats.compute_mean_reuse()
        age = self._reuse_stats.clock - state.clock
        state_value = state.value_per_block * mean_reuse.return_share / max(2.0**mean_reuse.gap_log2, age)
        return node if state_value <= self._compute_value(next_path) else None

    def mark_abandoned(self, turn: ConversationTurn) -> None:
        """Evict the path of `turn` first from now on, because the next turn of its conversation has another path."""
        path = self._path_by_turn.pop(turn, None)
        if path is not None:
            self._dequeue(path)
            path.queue_key = None
            self._queues.setdefault(None, OrderedDict())[path] = None

    def select_leaf(self) -> Node | None:
        """Return the node to evict next; None if the queue is empty."""
        path = self._select_path()
        return None if path is None else path.leaf

    def clear(self) -> None:
        """Forget all paths and states. What was learned stays in `ReuseStats`."""
        self._path_by_leaf.clear()
        self._path_by_turn.clear()
        self._superseded_states.clear()
        self._queues.clear()
        self._next_path = None

    def check_invariants(self, leaves: set[Node]) -> None:
        """Assert that there is one path for each of the `leaves`, and that each path is in exactly one queue."""
        paths = set(self._path_by_leaf.values())
        assert set(self._path_by_leaf) == leaves
        assert all(path.leaf is leaf for leaf, path in self._path_by_leaf.items())
        queued_paths = [path for queue in self._queues.values() for path in queue]
        assert set(queued_paths) == paths
        assert len(queued_paths) == len(paths)
        assert all(self._queues.values())
        assert all(self._path_by_turn[turn] in paths for turn in self._path_by_turn)
        assert self._next_path is None or self._next_path in paths
        assert not self._superseded_states.keys() & leaves

    def check_states(self, nodes_with_states: set[Node]) -> None:
        """Assert that all superseded states are at nodes that have a state in this memory."""
        assert self._superseded_states.keys() <= nodes_with_states

    def _select_path(self) -> CachedPath | None:
        """Return the path to evict from: the path of the last call, until it is gone or another path is added."""
        if self._next_path is None:
            self._next_path = next(iter(self._queues.get(None, ())), None) or self._find_least_valuable()
        return self._next_path

    def _find_least_valuable(self) -> CachedPath | None:
        """Return the cached path (the cached prefix of a conversation) to evict; None if there is none.

        That is the path with the least value; of paths with about the same value, the youngest. All paths in a queue
        are expected to be reused after the same gap. If the oldest of them is overdue, it is worth least, else the
        youngest is.
        """
        least_valuable = None
        rank_min = (math.inf, 0)
        for key, queue in self._queues.items():
            assert key is not None, "abandoned paths go first"
            oldest_path, youngest_path = next(iter(queue)), next(reversed(queue))
            expected_gap = math.pow(2.0, key.gap_step / _STEPS_PER_DOUBLING)
            path = oldest_path if self._is_overdue(oldest_path, expected_gap) else youngest_path
            rank = self._rank(path)
            if rank < rank_min:
                least_valuable, rank_min = path, rank
        return least_valuable

    def _rank(self, path: CachedPath) -> tuple[float, int]:
        """Return a sort key of a queued path: its value, in steps of a half-octave, then its age."""
        return round(_STEPS_PER_DOUBLING * math.log2(self._compute_value(path))), self._compute_age(path)

    def _compute_value(self, path: CachedPath) -> float:
        """Return the expected hits of a block of the path per unit of time; 0 if the path is abandoned."""
        key = path.queue_key
        if key is None:
            return 0.0
        gap = math.pow(2.0, self._reuse_stats.estimate_gap_log2(path.turn))
        wait = self._compute_age(path) if self._is_overdue(path, gap) else gap
        return self._reuse_stats.get_counts(path.turn).return_share / wait * 2.0**key.value_log2

    def _compute_age(self, path: CachedPath) -> int:
        """Return the blocks of all prompts since the path's turn ended."""
        return self._reuse_stats.clock - path.turn.end_clock

    def _is_overdue(self, path: CachedPath, gap: float) -> bool:
        """Return whether the turn of a path, expected after `gap` blocks of prompts, should have returned long ago."""
        return self._compute_age(path) > _OVERDUE_GAPS * gap

    def _compute_value_log2(self, leaf: Node) -> int:
        """Return the rounded log2 of the blocks that the path to `leaf` saves, per block of memory that it takes.

        If the state at the leaf saves 30 blocks, and takes the memory of 10, the value is 30 / (30 + 10). 0 for a model
        without states.
        """
        blocks_per_state = self._blocks_per_state
        if blocks_per_state is None:
            return 0
        saved_blocks = leaf.count_saved_blocks(blocks_per_state)
        value = _UNRESUMABLE_VALUE if saved_blocks is None else saved_blocks / (saved_blocks + blocks_per_state)
        return round(math.log2(value))

    def _enqueue(self, path: CachedPath) -> None:
        """Put a path into the queue of its class, gap and value."""
        turn = path.turn
        gap_step = round(self._reuse_stats.estimate_gap_log2(turn) * _STEPS_PER_DOUBLING)
        value_log2 = self._compute_value_log2(path.leaf)
        path.queue_key = key = QueueKey(self._reuse_stats.classify_turn(turn), gap_step, value_log2)
        self._queues.setdefault(key, OrderedDict())[path] = None

    def _dequeue(self, path: CachedPath) -> None:
        """Take a path out of its queue."""
        if self._next_path is path:
            self._next_path = None
        queue = self._queues[path.queue_key]
        del queue[path]
        if not queue:
            del self._queues[path.queue_key]
