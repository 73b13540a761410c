"""The unit pool: memory cut into units of equal size, each free or divided into blocks of one kind.

A **kind** is an attention group (its index in `CacheSpec.groups`) or, as the last kind, recurrent state. A block is
**live** (sequences hold it: `ref_count` > 0), **cached** (no sequence holds it, but it is in the prefix tree) or a
**hole** (unused). A model with one attention group has one kind of blocks, one in each unit.

The pool decides which memory is taken, and its `LruOrder` which cached block goes first. To evict a block the pool
calls `evict`, which takes the block and its descendants out of the prefix tree, and calls `drop` for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.cache.blocks import Block, StateBlock, Unit
from engine.cache.lru_eviction import LruOrder
from engine.cache.spec import CacheSpec, ceil_div
from engine.types import BlockCopy


class UnitPool:
    """Allocates and frees the blocks of one model's cache."""

    def __init__(self, unit_count: int, spec: CacheSpec, order: LruOrder, evict: Callable[[Block], None]) -> None:
        """Make a pool of `unit_count` free units. A unit is memory that can be divided into blocks of any one kind.

        `spec`: blocks of each kind in a unit. With [4, 8, 1], a unit holds 4 blocks of kind 0, or 8 of kind 1, or one
        of kind 2. `order` chooses the cached block to evict, and `evict` takes it out of the cache.
        """
        assert unit_count >= 0
        state_kind, blocks_per_unit = spec.state_kind, spec.blocks_per_unit_by_kind()
        assert min(blocks_per_unit) >= 1
        kind_count = len(blocks_per_unit)
        self.blocks_per_unit = tuple(blocks_per_unit)
        self.units: list[Unit] = [Unit(i) for i in range(unit_count)]
        self._free_units: list[Unit] = self.units[::-1]
        self._attention_kinds = range(state_kind)
        self._block_classes = [Block if kind < state_kind else StateBlock for kind in range(kind_count)]
        self._order = order
        self._evict_block = evict
        self._live_blocks = [0] * kind_count
        """Number of blocks of each kind that sequences hold."""
        self._idle_units = [0] * kind_count
        """Number of units of each kind that hold cached blocks, and none that a sequence holds."""
        self._units_by_hole_count: list[list[dict[Unit, None]]] = [[{} for _ in range(n)] for n in blocks_per_unit]
        """[kind][number of unused blocks ("holes")] -> the units with so many, as an ordered set."""

    @property
    def free_units(self) -> int:
        return len(self._free_units)

    @property
    def live_units(self) -> int:
        """Number of units that the live blocks fill when packed. No eviction and no compaction can free these units."""
        return sum(map(ceil_div, self._live_blocks, self.blocks_per_unit))

    def can_allocate(self, block_counts: Sequence[int]) -> bool:
        """Return whether `block_counts[k]` more blocks of every kind k fit if all cached blocks are evicted.

        Blocks that sequences hold can be moved closer together (`compact`), but not evicted.
        """
        units_needed = sum(
            ceil_div(live_count + count, blocks_per_unit)
            for live_count, count, blocks_per_unit in zip(self._live_blocks, block_counts, self.blocks_per_unit)
        )
        return units_needed <= len(self.units)

    def allocate(self, kind: int) -> Block | None:
        """Return a block of `kind` with one reference; None if even evictions cannot make room.

        An unused block ("hole") in a unit of this kind is taken first, then a block of a free unit. Without either,
        cached blocks are evicted one by one until there is room. After None, `compact` may still make room.
        """
        block = self._take_hole(kind)
        while block is None and not self._free_units:
            has_evicted = self._evict_for(kind)
            if not has_evicted:
                return None
            block = self._take_hole(kind)
        if block is None:
            block = self._divide_free_unit(kind)
        block.ref_count = 1
        self._count_live(block.unit, kind, 1)
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference to a live or cached block."""
        block.ref_count += 1
        if block.ref_count == 1:
            self._order.mark_used(block)
            self._count_live(block.unit, block.kind, 1)

    def release(self, block: Block) -> None:
        """Remove one reference to a block, as when a sequence ends.

        A block that loses its last reference stays cached for later prompts if it is in the prefix tree (`block.node`).
        Any other block becomes a hole: its memory can be used at once.
        """
        assert block.ref_count > 0, f"{block!r} released more often than held"
        block.ref_count -= 1
        if block.ref_count:
            return
        self._count_live(block.unit, block.kind, -1)
        if block.node is None:
            self._make_hole(block)
        else:
            assert not block.is_pending, f"{block!r}: the last reference to a block being computed was released"
            self._order.mark_cached(block)

    def drop(self, block: Block) -> None:
        """Make a cached block unused, after the caller has taken it out of the prefix tree."""
        assert block.ref_count == 0
        assert block.node is None
        self._order.mark_freed(block)
        self._make_hole(block)

    def discard(self, block: Block) -> None:
        """Take a block from its node, which is no longer in the prefix tree, and drop it unless it is held."""
        block.node = None
        block.is_pending = False
        if not block.ref_count:
            self.drop(block)

    def _divide_free_unit(self, kind: int) -> Block:
        """Divide a free unit of memory into blocks of `kind`. Return the first; the others are unused (holes)."""
        unit = self._free_units.pop()
        blocks_per_unit = self.blocks_per_unit[kind]
        block_class = self._block_classes[kind]
        unit.kind = kind
        unit.blocks = [block_class(unit, slot, blocks_per_unit) for slot in range(blocks_per_unit)]
        unit.holes = unit.blocks[::-1]
        self._idle_units[kind] += 1
        block = unit.holes.pop()
        self._index_by_holes(unit, kind)
        return block

    def _index_by_holes(self, unit: Unit, kind: int) -> None:
        """Record a unit under its number of unused blocks, so that `_take_hole` finds it. Full units are left out."""
        if unit.holes:
            self._units_by_hole_count[kind][len(unit.holes)][unit] = None

    def _unindex_by_holes(self, unit: Unit, kind: int) -> None:
        if unit.holes:
            del self._units_by_hole_count[kind][len(unit.holes)][unit]

    def _count_live(self, unit: Unit, kind: int, change: int) -> None:
        """Add `change`, 1 or -1, to the number of live blocks of a unit, and of its kind."""
        was_idle = unit.live_blocks == 0
        self._live_blocks[kind] += change
        unit.live_blocks += change
        self._idle_units[kind] += (unit.live_blocks == 0) - was_idle

    def _take_hole(self, kind: int) -> Block | None:
        """Take an unused block ("hole") from a unit of this kind; return None if no unit has one.

        The unit with the fewest unused blocks is filled first, so that emptier units can become free as a whole. The
        caller adds the first reference to the block.
        """
        for units in self._units_by_hole_count[kind]:
            if not units:
                continue
            unit, _ = units.popitem()
            block = unit.holes.pop()
            self._index_by_holes(unit, kind)
            return block
        return None

    def _make_hole(self, block: Block) -> None:
        """Mark a block as unused in its unit of memory. A unit with only unused blocks becomes free for any kind."""
        unit, kind = block.unit, block.kind
        self._unindex_by_holes(unit, kind)
        unit.holes.append(block)
        if len(unit.holes) == self.blocks_per_unit[kind]:
            self._free_unit(unit, kind)
        else:
            self._index_by_holes(unit, kind)

    def _free_unit(self, unit: Unit, kind: int) -> None:
        self._idle_units[kind] -= 1
        unit.kind = None
        unit.blocks, unit.holes = [], []
        self._free_units.append(unit)

    def _evict_for(self, kind: int) -> bool:
        """Evict the next cached block that helps to make room for a block of `kind`; return False if there is none.

        A block of the same kind leaves its own memory. A block of another kind helps only if no sequence uses its unit
        of memory, because further evictions then free the whole unit.
        """
        useful_kinds = [k for k in self._attention_kinds if k == kind or self._idle_units[k]]
        victim = self._order.find_victim(useful_kinds)
        if victim is None:
            return False
        self._evict_block(victim)
        return True

    def compact(self, kind: int) -> list[BlockCopy]:
        """Free a unit of memory that another kind uses, so that `kind` can have it.

        Live blocks of that unit move to unused blocks in other units of their kind; cached blocks may be evicted. If
        `can_allocate` was true before, a unit is free afterwards. Returns the copies of contents that the caller
        must do in order. The blocks already have their new ids.
        """
        source_unit = self._find_unit_to_empty(kind)
        if source_unit is None:
            return []
        for block in list(source_unit.blocks):
            if block.is_cached:
                self._evict_block(block)
        return [] if self._free_units else self._move_live_blocks(source_unit)

    def _find_unit_to_empty(self, excluded_kind: int) -> Unit | None:
        """Return the unit that takes the fewest moves to empty: the one with the fewest live blocks.

        Only a kind that has more units than its live blocks need can give one up. None if no kind but
        `excluded_kind` can.
        """
        candidates = []
        for kind, blocks_per_unit in enumerate(self.blocks_per_unit):
            if kind == excluded_kind or blocks_per_unit == 1:
                continue
            units = [unit for unit in self.units if unit.kind == kind]
            if len(units) > ceil_div(self._live_blocks[kind], blocks_per_unit):
                candidates += units
        return min(candidates, key=lambda unit: unit.live_blocks, default=None)

    def _move_live_blocks(self, source_unit: Unit) -> list[BlockCopy]:
        """Free a unit: move the blocks that sequences hold to unused blocks (holes) in other units of its kind.

        Returns the copies of KV that the moves need. The caller wants one free unit, so if evictions on the way free
        another one, the remaining blocks stay.
        """
        kind = source_unit.kind
        assert kind is not None
        moves: list[BlockCopy] = []
        self._unindex_by_holes(source_unit, kind)  # so that only holes of other units are taken
        for slot, block in enumerate(source_unit.blocks):
            if block.ref_count == 0:
                continue
            hole = self._take_or_evict_hole(kind)
            if hole is None:  # another unit is free now
                self._index_by_holes(source_unit, kind)
                return moves
            moves.append(BlockCopy(kind, block.id, hole.id))
            self._swap_with_hole(block, slot, hole)
        assert source_unit.live_blocks == 0
        self._free_unit(source_unit, kind)
        return moves

    def _take_or_evict_hole(self, kind: int) -> Block | None:
        """Take an unused block of a kind, for which the oldest cached blocks of that kind are evicted if necessary.

        Returns None if no unit has one, and a unit is free.
        """
        hole = self._take_hole(kind)
        while hole is None and not self._free_units:
            self._evict_block(self._order.find_oldest(kind))
            hole = self._take_hole(kind)
        return hole

    def _swap_with_hole(self, block: Block, slot: int, hole: Block) -> None:
        """Exchange the memory of a live block and an unused block in another unit. `slot`: of the live block."""
        source_unit, target_unit, kind = block.unit, hole.unit, block.kind
        target_unit.blocks[target_unit.blocks.index(hole)] = block
        source_unit.blocks[slot] = hole
        block.id, hole.id = hole.id, block.id
        block.unit, hole.unit = target_unit, source_unit
        self._count_live(target_unit, kind, 1)
        self._count_live(source_unit, kind, -1)
        source_unit.holes.append(hole)

    def check_invariants(self) -> None:
        """Assert that the pool's counts and indexes agree with its units and blocks.

        A unit of memory is free, or divided into blocks of one kind. A block is live (a sequence holds it), cached
        (only the prefix tree has it) or a hole (unused). An idle unit has cached blocks and no live one.
        """
        free_units = set(self._free_units)
        assert len(free_units) == len(self._free_units)
        for unit in self.units:
            assert (unit in free_units) == (unit.kind is None)
            if unit.kind is None:
                assert not unit.blocks
            else:
                self._check_divided_unit(unit, unit.kind)
        assert self.live_units <= len(self.units)
        cached_blocks: list[set[Block]] = []
        for kind, live_blocks in enumerate(self._live_blocks):
            units = [unit for unit in self.units if unit.kind == kind]
            assert live_blocks == sum(unit.live_blocks for unit in units)
            assert self._idle_units[kind] == sum(unit.live_blocks == 0 for unit in units)
            cached_blocks.append({block for unit in units for block in unit.blocks if block.is_cached})
        self._order.check_blocks(cached_blocks)

    def _check_divided_unit(self, unit: Unit, kind: int) -> None:
        """Assert that a unit with blocks of `kind` counts and lists its live and unused blocks rightly."""
        assert len(unit.blocks) == self.blocks_per_unit[kind] > len(unit.holes)
        assert unit.live_blocks == sum(block.ref_count > 0 for block in unit.blocks)
        assert set(unit.holes) == {block for block in unit.blocks if block.ref_count == 0 and block.node is None}
        if unit.holes:
            assert unit in self._units_by_hole_count[kind][len(unit.holes)]
