"""The order in which a pool gives up its cached blocks: the interface, and the order by age.

A pool has one order. The order hears of every block that becomes cached or is no longer, and names the next one to
evict. `engine.cache.learned_order` has the other one.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.spec import CacheSpec
from engine.types import Sequence as EngineSequence

_CLOCK_BITS = 40
"""Low bits of a stamp: the order of releases, which decides among equals."""
_HEAP_SLACK = 64
"""Entries that the heap of states may hold beyond twice those that are cached."""


class TreeHooks:
    """What an order may hear of the prefix tree. An order by age needs none of it."""

    def mark_evicted(self, node: Node, kind: int) -> None:
        """The memory of this order names no block of `kind` at `node` any more."""

    def mark_child_added(self, node: Node) -> None:
        """A node was added below `node`. Only the host's order is told."""

    def mark_node_removed(self, node: Node) -> None:
        """The tree has `node` no more: neither memory names anything there. Only the host's order is told."""

    def clear(self) -> None:
        """No node names anything any more; `mark_freed` is still called for each block."""

    def check_nodes(self, nodes: Collection[Node]) -> None:
        """Assert that the order knows the nodes of the tree that can be evicted."""


class EvictionOrder(TreeHooks, ABC):
    """What a pool tells of its blocks, and asks before it evicts one."""

    @abstractmethod
    def mark_cached(self, block: Block) -> None:
        """The last sequence has given up a named block."""

    @abstractmethod
    def mark_used(self, block: Block) -> None:
        """A cached block is held again."""

    @abstractmethod
    def mark_freed(self, block: Block) -> None:
        """A cached block has lost its name, and its memory is free."""

    @abstractmethod
    def find_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return the block to evict next: a state, or one of these kinds of attention. None if nothing is cached."""

    @abstractmethod
    def find_oldest(self, kind: int) -> Block:
        """Return the cached block of an attention kind that was released first."""

    @abstractmethod
    def check_blocks(self, cached_blocks: Sequence[set[Block]], unit_count: int) -> None:
        """Assert that the order knows exactly these blocks, given by kind."""


class LruOrder(EvictionOrder):
    """Oldest first, where what is worth more ages later.

    That is GreedyDual-Size (Cao and Irani, USITS 1997): the stamp of a block is its worth plus the stamp of what was
    evicted last, so that something worth twice as much outlives twice the turnover. A state is worth the blocks of full
    attention that it saves; a unit of KV is worth the blocks it holds, which among KV alone is LRU.
    """

    def __init__(self, blocks_per_unit: Sequence[int], state_kind: int) -> None:
        """`state_kind`: the kind of states; those before it are attention groups."""
        self._unit_value = blocks_per_unit[0]
        self._state_kind = state_kind
        self._release_count = 0
        self._inflation_value = 0
        self._cached_blocks: list[OrderedDict[Block, None]] = [OrderedDict() for _ in blocks_per_unit]
        """Cached blocks of each kind, oldest first."""
        self._state_heap: list[tuple[int, int, StateBlock]] = []
        """Cached states by stamp; entries that no longer hold are skipped when they come up."""
        self._heap_entry_ids = itertools.count()

    def mark_cached(self, block: Block) -> None:
        kind = block.unit.kind
        assert kind is not None
        value = block.value if isinstance(block, StateBlock) else self._unit_value
        self._release_count += 1
        block.eviction_stamp = (self._inflation_value + value << _CLOCK_BITS) + self._release_count
        self._cached_blocks[kind][block] = None
        if isinstance(block, StateBlock):
            heapq.heappush(self._state_heap, (block.eviction_stamp, next(self._heap_entry_ids), block))
            if len(self._state_heap) > 2 * len(self._cached_blocks[kind]) + _HEAP_SLACK:  # most were used again since
                self._state_heap = [entry for entry in self._state_heap if _is_current(entry)]
                heapq.heapify(self._state_heap)

    def mark_used(self, block: Block) -> None:
        del self._cached_blocks[block.kind][block]

    mark_freed = mark_used

    def find_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        victim = self.peek_victim(useful_kinds)
        if victim is not None:
            self._inflation_value = max(self._inflation_value, victim.eviction_stamp >> _CLOCK_BITS)
        return victim

    def peek_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return what `find_victim` would, and let nothing age."""
        victim: Block | None = self._find_oldest_state()
        for kind in useful_kinds:
            if cached_blocks := self._cached_blocks[kind]:
                block = next(iter(cached_blocks))
                if victim is None or block.eviction_stamp < victim.eviction_stamp:
                    victim = block
        return victim

    def find_oldest(self, kind: int) -> Block:
        return next(iter(self._cached_blocks[kind]))

    def _find_oldest_state(self) -> StateBlock | None:
        while self._state_heap:
            if _is_current(self._state_heap[0]):
                return self._state_heap[0][2]
            heapq.heappop(self._state_heap)
        return None

    def check_blocks(self, cached_blocks: Sequence[set[Block]], unit_count: int) -> None:
        assert len(self._state_heap) <= 2 * unit_count + _HEAP_SLACK
        assert [set(blocks) for blocks in self._cached_blocks] == list(cached_blocks)
        for kind, blocks in enumerate(self._cached_blocks):
            stamps = [block.eviction_stamp for block in blocks]
            if kind < self._state_kind:
                assert stamps == sorted(stamps)
            else:
                assert set(blocks) <= {block for stamp, _, block in self._state_heap if stamp == block.eviction_stamp}


def _is_current(entry: tuple[int, int, StateBlock]) -> bool:
    """Whether a queued state is cached, and not used since it was queued."""
    pushed_stamp, _, block = entry
    return block.ref_count == 0 and block.node is not None and block.eviction_stamp == pushed_stamp


class LruEviction:
    """The orders of both memories: by age, which needs to know nothing of requests."""

    def __init__(self, spec: CacheSpec) -> None:
        blocks_per_unit = spec.blocks_per_unit_by_kind()
        self.device_order: EvictionOrder = LruOrder(blocks_per_unit, spec.state_kind)
        self.host_order: EvictionOrder = LruOrder(blocks_per_unit, spec.state_kind)

    def begin_turn(self, seq: EngineSequence, hasher: BlockHasher, hit_blocks: int) -> None:
        """`seq` was admitted; so many of its leading blocks were found."""

    def end_turn(self, seq: EngineSequence) -> None:
        """`seq` gives up its blocks."""
