"""Order in which cached prefixes are evicted from the device and from host memory, learned by `ReuseStats`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from engine.cache.eviction_queue import EvictableT, EvictionQueue, StateValuation
from engine.cache.reuse_stats import ConversationTurn, ReuseStats


class AdaptiveEviction(Generic[EvictableT]):
    """The order of eviction of one cache of `capacity_blocks` blocks of `block_tokens` tokens.

    Invariant: the places that are cached, and that nothing hangs from, are those that it can choose.
    """

    def __init__(
        self, capacity_blocks: int, block_tokens: int, *, state_valuation: StateValuation[EvictableT] | None = None
    ) -> None:
        self._reuse_stats = ReuseStats(capacity_blocks, block_tokens)
        self._device_queue: EvictionQueue[EvictableT] = EvictionQueue(self._reuse_stats, state_valuation)
        self._host_queue: EvictionQueue[EvictableT] = EvictionQueue(self._reuse_stats, state_valuation)
        """Of host memory: what the cache evicts goes there, where that is kept."""
        self._last_turn = ConversationTurn(0, 0)

    def begin_turn(self, block_hashes: Sequence[int], hit_blocks: int) -> ConversationTurn:
        """Record a request whose prompt has these blocks, of which the first `hit_blocks` were cached."""
        return self._reuse_stats.begin_turn(block_hashes, hit_blocks)

    def end_turn(self, turn: ConversationTurn) -> None:
        """It is over, and its path is about to be cached."""
        self._reuse_stats.end_turn(turn)
        if turn.previous is not None:
            self._device_queue.mark_abandoned(turn.previous)
            self._host_queue.mark_abandoned(turn.previous)
            turn.previous = None
        self._last_turn = turn

    def mark_cached(self, node: EvictableT) -> None:
        """Record that no request uses `node` any more."""
        if not node.cached_child_count:
            self._device_queue.add(node, self._last_turn)

    def mark_used(self, node: EvictableT) -> None:
        """A cached place is in use again."""
        self._device_queue.remove(node)

    def remove_leaf(self, leaf: EvictableT, parent: EvictableT | None) -> None:
        """`leaf` was evicted; `parent` is cached and what it hung from. None: that is in use, or there is none."""
        if parent is None or parent.cached_child_count:
            self._device_queue.remove(leaf)
        else:
            self._device_queue.shorten_path(leaf, parent)

    def add_host_leaf(self, node: EvictableT) -> None:
        """Add `node`, the end of a path that goes to host memory, or is not read there any more."""
        self._host_queue.add(node, self._device_queue.find_turn(node) or self._last_turn)

    def remove_host_leaf(self, leaf: EvictableT, parent: EvictableT | None) -> None:
        """`leaf` has left host memory, or is read; of `parent`, which is there, nothing is left below it."""
        if parent is None:
            self._host_queue.remove(leaf)
        elif self._host_queue.find_turn(leaf) is not None:
            self._host_queue.shorten_path(leaf, parent)
        else:
            self._host_queue.add(parent, self._last_turn)

    def add_superseded_state(self, node: EvictableT, value_per_block: float) -> None:
        """Add a state that a deeper one of its path continues. `value_per_block`: blocks saved for each of its room."""
        self._device_queue.add_superseded_state(node, value_per_block)

    def add_superseded_host_state(self, node: EvictableT, value_per_block: float) -> None:
        """The same in host memory, or its blocks of attention are not there."""
        self._host_queue.add_superseded_state(node, value_per_block)

    def mark_state_used(self, node: EvictableT) -> None:
        """Its state is in use."""
        self._device_queue.requeue(node)
        self._host_queue.requeue(node)

    mark_state_removed = mark_state_used

    def select_victim(self) -> EvictableT | None:
        """The end of a path that goes next; None where nothing is cached."""
        return self._device_queue.select_leaf()

    def select_host_victim(self) -> EvictableT | None:
        """The same of host memory."""
        return self._host_queue.select_leaf()

    def select_state_victim(self) -> EvictableT | None:
        """Whose state goes next, and nothing else; None: the end of a path."""
        return self._device_queue.select_state()

    def select_host_state_victim(self) -> EvictableT | None:
        """The same of host memory."""
        return self._host_queue.select_state()

    def check_states(self, device_nodes: set[EvictableT], host_nodes: set[EvictableT]) -> None:
        """Of the places whose states are cached here and there, some are superseded."""
        self._device_queue.check_states(device_nodes)
        self._host_queue.check_states(host_nodes)

    def clear(self) -> None:
        """Nothing is cached any more. What was learned stays."""
        self._device_queue.clear()
        self._host_queue.clear()

    def check_invariants(self, device_nodes: Iterable[EvictableT], host_leaves: Iterable[EvictableT] = ()) -> None:
        """`host_leaves`: the ends of paths that only host memory has, and no step reads."""
        self._device_queue.check_invariants({node for node in device_nodes if not node.cached_child_count})
        self._host_queue.check_invariants(set(host_leaves))
