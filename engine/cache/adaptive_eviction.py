"""Cached prefixes of the device and of host memory in the order of eviction, learned by `ReuseStats`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from engine.cache.eviction_queue import EvictableT, EvictionQueue, StateValuation
from engine.cache.reuse_stats import ConversationTurn, ReuseStats


class AdaptiveEviction(Generic[EvictableT]):
    """One queue for each memory, and the conversations from which both learn.

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
        """The turn that ended last: the owner of nodes that become cached next."""

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
        """Add `node`, which has no children, to host memory; the turn is that of its path on the device."""
        self.host_queue.add(node, self.device_queue.find_turn(node) or self._last_turn)

    def replace_host_leaf(self, leaf: EvictableT, parent: EvictableT) -> None:
        """Record that `leaf` is gone and that `parent`, which host memory has, is the end of its path now."""
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
