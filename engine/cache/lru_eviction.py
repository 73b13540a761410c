"""The order in which a pool evicts its cached blocks: by age, where a block that is worth more stays for longer.

A pool has one order. It reports every block that becomes cached or is used again, and asks which block to evict next.
`engine.cache.learned_eviction` extends the order by what it learns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Sequence
from operator import attrgetter

from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import Sequence as EngineSequence

_CLOCK_BITS = 40
"""Low bits of a stamp, which count the releases of blocks: of blocks with equal worth, the oldest goes first."""
_get_stamp = attrgetter("eviction_stamp")


class LruOrder:
    """Decides which cached block of a memory pool is evicted next: the least recently used, and by worth.

    A block is cached (`mark_cached`) once no sequence holds it and it is in the prefix tree. It leaves the cached
    blocks when a sequence holds it again (`mark_used`), or when it is evicted (`mark_freed`). Every block has a kind:
    one of the attention groups, or recurrent state.

    This is GreedyDual-Size (Cao and Irani, USITS 1997). A released block gets a stamp: its worth plus the stamp of the
    last evicted block. The lowest stamp is evicted next. All KV blocks are worth the same, so their order is LRU. A
    recurrent state is worth the blocks of full attention that need not be computed again thanks to it.
    """

    def __init__(self, spec: CacheSpec) -> None:
        """Start without cached blocks. `spec`: the kinds of blocks, and how many of each a unit of memory holds."""
        self._unit_value = spec.blocks_per_unit(FULL_KIND)
        """Worth of a KV block: as many full-attention blocks as a unit has, because a state takes a whole unit."""
        self._release_count = 0
        self._inflation_value = 0
        """Value to which the worth of a released block is added for its stamp: the stamp of the last evicted block."""
        self._cached_blocks: list[OrderedDict[Block, None]] = [OrderedDict() for _ in spec.groups]
        """Cached blocks of each attention kind, oldest first."""
        self._cached_states: list[StateBlock] = []
        """Cached states by their stamps, the lowest first."""

    def mark_cached(self, block: Block) -> None:
        """Record that no sequence holds a block of the prefix tree any more."""
        value = block.value if isinstance(block, StateBlock) else self._unit_value
        self._release_count += 1
        block.eviction_stamp = ((self._inflation_value + value) << _CLOCK_BITS) + self._release_count
        if isinstance(block, StateBlock):
            insort(self._cached_states, block, key=_get_stamp)
        else:
            self._cached_blocks[block.kind][block] = None

    def mark_used(self, block: Block) -> None:
        """Record that a sequence holds a cached block again."""
        self._remove(block)

    def mark_freed(self, block: Block) -> None:
        """Record that a cached block has left the prefix tree, and its memory is free."""
        self._remove(block)

    def _remove(self, block: Block) -> None:
        if isinstance(block, StateBlock):
            del self._cached_states[bisect_left(self._cached_states, block.eviction_stamp, key=_get_stamp)]
        else:
            del self._cached_blocks[block.kind][block]

    def mark_evicted(self, node: Node, kind: int) -> None:
        """Record that a block of `kind` at `node` was evicted, from tree and pool. The order by age ignores this."""

    def mark_child_added(self, node: Node) -> None:
        """Record that `node` got a child in the tree. Called for the order of host memory only, and ignored by age."""

    def clear(self) -> None:
        """Record that the tree is empty. `mark_freed` is still called for each block."""

    def find_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return the block to evict next; None if there is none.

        `useful_kinds`: attention kinds to choose from, because evicting a block of another kind would not free memory
        that the caller can use. A state may always be chosen: it has a whole unit of memory, which any kind can use.
        """
        victim = self.peek_victim(useful_kinds)
        if victim is not None:
            self._inflation_value = max(self._inflation_value, victim.eviction_stamp >> _CLOCK_BITS)
        return victim

    def peek_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return the block that `find_victim` would return, without changing any stamp."""
        blocks: list[Block] = [next(iter(self._cached_blocks[k])) for k in useful_kinds if self._cached_blocks[k]]
        blocks += self._cached_states[:1]
        return min(blocks, key=_get_stamp, default=None)

    def find_oldest(self, kind: int) -> Block:
        """Return the cached block of an attention kind that was released before all others of the kind."""
        return next(iter(self._cached_blocks[kind]))

    def check_nodes(self, nodes: Collection[Node]) -> None:
        """Assert that the order holds exactly the nodes of the tree that can be evicted."""

    def check_blocks(self, cached_blocks: Sequence[set[Block]]) -> None:
        """Assert that the order holds exactly `cached_blocks[k]`, for every kind k, each once and by its stamp."""
        for blocks, blocks_of_kind in zip([*self._cached_blocks, self._cached_states], cached_blocks):
            stamps = [block.eviction_stamp for block in blocks]
            assert set(blocks) == blocks_of_kind
            assert stamps == sorted(set(stamps))


class LruEviction:
    """Holds the eviction orders of device and host memory. Both order by age, and ignore which request used a block."""

    def __init__(self, spec: CacheSpec) -> None:
        self.device_order = LruOrder(spec)
        self.host_order = LruOrder(spec)

    def begin_turn(self, seq: EngineSequence, hit_blocks: int) -> None:
        """Record that `seq` was admitted, with `hit_blocks` leading blocks found in the cache."""

    def end_turn(self, seq: EngineSequence) -> None:
        """Record that `seq` gives up its blocks."""
