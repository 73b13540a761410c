"""The unit pool: one buffer, cut into units of equal bytes, each FREE or given to one kind.

A **kind** is an attention group (its index in `CacheSpec.groups`) or, as the last kind, recurrent state. A unit of
kind k holds N_k blocks (`blocks_per_unit`; 1 for state). A block is a **hole** (nobody's), **live** (`ref_count` > 0)
or **cached** (no references, but named in the prefix tree). A dense model is the case of one kind with N = 1.

Owns which block is in which of these states, their age, and the order in which memory is taken. Refuses to know
hashes, sequences, tensors and events: what a cached block means is the business of the `evict` callback, which is
asked to give up a cached block (and whatever hangs from it) and answers by calling `drop`.

Invariants (`check_invariants`): a unit is free or of one kind; every block of it is a hole, live or cached, and a unit
whose blocks are all holes is free; the age lists hold exactly the cached blocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.types import BlockId, UnitId

NodeT = TypeVar("NodeT")

_CLOCK_BITS = 40
"""Low bits of a stamp: the order of releases, which decides among equals."""


_SUPERSEDED_DIVISOR = 16
"""A superseded state counts for one part in so many of what it saves."""


def compute_state_value(saved_blocks: int, *, is_superseded: bool) -> int:
    """What a state is worth, in blocks of full attention, that saves so many over the one before it."""
    return -(-saved_blocks // _SUPERSEDED_DIVISOR) if is_superseded else saved_blocks


class Block(Generic[NodeT]):
    """One block of a unit. `node` is its place in the prefix tree, None while it is not named there."""

    __slots__ = (
        "eviction_stamp",
        "id",
        "is_in_flight",
        "is_pending",
        "is_shared",
        "is_superseded",
        "node",
        "ref_count",
        "state_value",
        "unit",
    )

    def __init__(self, unit: Unit[NodeT], slot: int, blocks_per_unit: int) -> None:
        self.unit = unit
        self.id = BlockId(unit.index * blocks_per_unit + slot)
        self.ref_count = 0
        self.node: NodeT | None = None
        self.is_pending = False
        """Named, but its content is computed only in the step being planned: not announced yet."""
        self.is_in_flight = False
        """Of a pending state: the step that takes it is out, so the one being planned finds it there."""
        self.is_shared = False
        """A state that more than one sequence has reached; only `StateCheckpoints` looks at it."""
        self.is_superseded = False
        """A state that a deeper one of the same path continues; only `StateCheckpoints` looks at it."""
        self.state_value: int | None = None
        """Of a cached state: what it was released with."""
        self.eviction_stamp = 0
        """Its age while cached: what has the lowest stamp is evicted first."""

    @property
    def kind(self) -> int:
        assert self.unit.kind is not None
        return self.unit.kind

    def __repr__(self) -> str:
        return f"Block({self.id}, kind={self.unit.kind}, refs={self.ref_count}, named={self.node is not None})"


class Unit(Generic[NodeT]):
    """One unit of the buffer. `holes` are the blocks nobody holds, taken from the end."""

    __slots__ = ("blocks", "holes", "index", "kind", "live_blocks")

    def __init__(self, index: int) -> None:
        self.index = UnitId(index)
        self.kind: int | None = None
        self.blocks: list[Block[NodeT]] = []
        self.holes: list[Block[NodeT]] = []
        self.live_blocks = 0


class EvictionOrder(Protocol[NodeT]):
    """Another order of eviction than by age and worth: hears of blocks that are cached or used again."""

    def mark_cached(self, block: Block[NodeT]) -> None: ...
    def mark_used(self, block: Block[NodeT]) -> None: ...
    def select_victim(self) -> Block[NodeT] | None:
        """None: the pool is to say."""


class UnitPool(Generic[NodeT]):
    """Memory of one model's cache. `blocks_per_unit[k]` is N_k; a state kind, if any, comes last with N = 1."""

    def __init__(
        self,
        unit_count: int,
        blocks_per_unit: Sequence[int],
        evict: Callable[[Block[NodeT]], None],
        state_kind: int | None = None,
        eviction_order: EvictionOrder[NodeT] | None = None,
    ) -> None:
        """Raises ValueError for a pool without units or kinds. `state_kind`: the kind whose blocks say their worth."""
        if unit_count < 1:
            raise ValueError(f"unit_count: expected at least 1, got {unit_count}")
        if not blocks_per_unit or min(blocks_per_unit) < 1:
            raise ValueError(f"blocks_per_unit: expected at least one block of every kind, got {list(blocks_per_unit)}")
        kinds = range(len(blocks_per_unit))
        self.blocks_per_unit = tuple(blocks_per_unit)
        self.units: list[Unit[NodeT]] = [Unit(i) for i in range(unit_count)]
        self._free_units: list[Unit[NodeT]] = self.units[::-1]
        self._evict_block = evict
        self._state_kind = state_kind
        self._eviction_order = eviction_order
        self._release_count = 0
        self._inflation_value = 0
        self._live_blocks = [0] * len(blocks_per_unit)
        self._live_units = 0  # sum over kinds of ceil(live / N): what an ideally packed pool would need
        # Cached blocks of each kind, oldest first.
        self._cached_blocks: list[OrderedDict[Block[NodeT], None]] = [OrderedDict() for _ in kinds]
        # How many units of each kind of attention hold no live block but a cached one.
        self._idle_units = [0] * len(blocks_per_unit)
        # Cached states by stamp; entries that no longer hold are skipped when they come up.
        self._state_heap: list[tuple[int, int, Block[NodeT]]] = []
        self._heap_entry_ids = itertools.count()
        # Units of each kind by their number of holes (1 .. N - 1).
        self._units_by_holes: list[list[dict[Unit[NodeT], None]]] = [[{} for _ in range(n)] for n in blocks_per_unit]

    # ------------------------------------------------------------------ questions

    @property
    def free_units(self) -> int:
        return len(self._free_units)

    @property
    def live_units(self) -> int:
        """Units that the live blocks need when packed: what no eviction and no compaction can give back."""
        return self._live_units

    def can_allocate(self, block_counts: Sequence[int]) -> bool:
        """Whether `block_counts[k]` more live blocks of every kind k fit after eviction and compaction."""
        units_needed = sum(
            -(-(live + count) // n) for live, count, n in zip(self._live_blocks, block_counts, self.blocks_per_unit)
        )
        return units_needed <= len(self.units)

    # ------------------------------------------------------------------ changes

    def allocate(self, kind: int) -> Block[NodeT] | None:
        """A block of `kind` with one reference, or None when only compaction or nothing could give one.

        Order: a hole in the fullest unit of the kind, a free unit, what is cached, oldest first, until there is one.
        """
        block = self._take_hole(kind)
        while block is None and not self._free_units:
            if not self._evict_for(kind):
                return None
            block = self._take_hole(kind)
        if block is None:
            unit = self._free_units.pop()
            blocks_per_unit = self.blocks_per_unit[kind]
            unit.kind = kind
            unit.blocks = [Block(unit, slot, blocks_per_unit) for slot in range(blocks_per_unit)]
            unit.holes = unit.blocks[::-1]
            block = unit.holes.pop()
            if blocks_per_unit > 1:
                self._units_by_holes[kind][blocks_per_unit - 1][unit] = None
        block.ref_count = 1
        self._add_live(block.unit, kind)
        return block

    def acquire(self, block: Block[NodeT]) -> None:
        """One more reference to a live or cached block."""
        block.ref_count += 1
        if block.ref_count == 1:
            unit = block.unit
            del self._cached_blocks[block.kind][block]
            if unit.live_blocks == 0 and block.kind != self._state_kind:
                self._idle_units[block.kind] -= 1
            self._add_live(unit, block.kind)
            if self._eviction_order is not None:
                self._eviction_order.mark_used(block)

    def release(self, block: Block[NodeT], state_value: int | None = None) -> None:
        """One reference less; without any, a named block becomes cached, another a hole.

        How long it stays is GreedyDual-Size's rule (Cao and Irani, USITS 1997): its age is what it is worth plus the
        age of what was evicted last, so that something worth twice as much outlives twice the turnover. `state_value`
        is the number of full-attention blocks that a cached state saves from being computed again; a unit of KV is
        worth the blocks it holds, which among KV alone is LRU.
        """
        assert block.ref_count > 0, f"{block!r} released more often than held"
        block.ref_count -= 1
        if block.ref_count:
            return
        kind, unit = block.kind, block.unit
        self._count_live(kind, -1)
        unit.live_blocks -= 1
        if block.node is None:
            self._make_hole(block)
            self._idle_units[kind] += unit.kind is not None and unit.live_blocks == 0
            return
        assert not block.is_pending, f"{block!r}: the last reference to a block being computed was released"
        self._release_count += 1
        is_state = kind == self._state_kind
        assert is_state == (state_value is not None)
        value = self.blocks_per_unit[0] if state_value is None else state_value
        block.eviction_stamp = (self._inflation_value + value << _CLOCK_BITS) + self._release_count
        self._cached_blocks[kind][block] = None
        if is_state:
            block.state_value = state_value
            heapq.heappush(self._state_heap, (block.eviction_stamp, next(self._heap_entry_ids), block))
            if (
                len(self._state_heap) > 2 * len(self._cached_blocks[kind]) + 64
            ):  # most are of states that were used again since
                self._state_heap = [entry for entry in self._state_heap if _is_current(entry)]
                heapq.heapify(self._state_heap)
        elif unit.live_blocks == 0:
            self._idle_units[kind] += 1
        if self._eviction_order is not None:
            self._eviction_order.mark_cached(block)

    def drop(self, block: Block[NodeT]) -> None:
        """Turn a cached block into a hole. The caller has taken it out of the prefix tree."""
        assert block.ref_count == 0
        assert block.node is None
        kind, unit = block.kind, block.unit
        del self._cached_blocks[kind][block]
        self._make_hole(block)
        if unit.kind is None and kind != self._state_kind:
            self._idle_units[kind] -= 1

    # ------------------------------------------------------------------ inside

    def _count_live(self, kind: int, change: int) -> None:
        blocks_per_unit = self.blocks_per_unit[kind]
        live_before = self._live_blocks[kind]
        live_after = self._live_blocks[kind] = live_before + change
        self._live_units += -(-live_after // blocks_per_unit) + (-live_before // blocks_per_unit)

    def _add_live(self, unit: Unit[NodeT], kind: int) -> None:
        self._count_live(kind, 1)
        unit.live_blocks += 1

    def _take_hole(self, kind: int) -> Block[NodeT] | None:
        for hole_count, units in enumerate(self._units_by_holes[kind]):
            if units:
                unit = next(reversed(units))
                del units[unit]
                block = unit.holes.pop()
                if hole_count > 1:
                    self._units_by_holes[kind][hole_count - 1][unit] = None
                self._idle_units[kind] -= unit.live_blocks == 0
                return block
        return None

    def _make_hole(self, block: Block[NodeT]) -> None:
        unit = block.unit
        kind, hole_count = block.kind, len(unit.holes)
        if hole_count:
            del self._units_by_holes[kind][hole_count][unit]
        unit.holes.append(block)
        if hole_count + 1 < self.blocks_per_unit[kind]:
            self._units_by_holes[kind][hole_count + 1][unit] = None
            return
        self._free_unit(unit)

    def _free_unit(self, unit: Unit[NodeT]) -> None:
        unit.kind = None
        unit.blocks, unit.holes = [], []
        self._free_units.append(unit)

    def _evict_for(self, kind: int) -> bool:
        """Give up what goes first of all that helps to make room for a block of `kind`; False when nothing would.

        Of another kind of attention that is its oldest block, as often as it takes until one of its units is free.
        """
        state_victim = self._next_state_victim()
        if not (self._cached_blocks[kind] or state_victim is not None or any(self._idle_units)):
            return False
        victim = None if self._eviction_order is None else self._eviction_order.select_victim()
        if victim is None:
            victim = state_victim
            for other_kind, cached_blocks in enumerate(self._cached_blocks):
                if (
                    other_kind != self._state_kind
                    and cached_blocks
                    and (other_kind == kind or self._idle_units[other_kind])
                ):
                    block = next(iter(cached_blocks))
                    if victim is None or block.eviction_stamp < victim.eviction_stamp:
                        victim = block
            assert victim is not None
            self._inflation_value = max(self._inflation_value, victim.eviction_stamp >> _CLOCK_BITS)
        self._evict_block(victim)
        return True

    def _next_state_victim(self) -> Block[NodeT] | None:
        while self._state_heap:
            if _is_current(self._state_heap[0]):
                return self._state_heap[0][2]
            heapq.heappop(self._state_heap)
        return None

    def compact(self, kind: int) -> list[tuple[int, Block[NodeT], BlockId]]:
        """Empty a unit of another kind into its fellows' holes, evicting cached blocks where it must.

        Returns what to copy, in order: (kind, the block, which now has the id of its destination, its old id).
        Afterwards a unit is free, provided that `can_allocate` said so.
        """
        source_units = []
        for other_kind, blocks_per_unit in enumerate(self.blocks_per_unit):
            units = [
                unit for unit in self.units if unit.kind == other_kind and other_kind != kind and blocks_per_unit > 1
            ]
            if len(units) > -(-self._live_blocks[other_kind] // blocks_per_unit):
                source_units.append(min(units, key=lambda unit: unit.live_blocks))
        if not source_units:
            return []
        source_unit = min(source_units, key=lambda unit: unit.live_blocks)
        for block in list(source_unit.blocks):
            if block.node is not None and block.ref_count == 0:
                self._evict_block(block)
        return [] if self._free_units else self._move_live_blocks(source_unit)

    def _move_live_blocks(self, source_unit: Unit[NodeT]) -> list[tuple[int, Block[NodeT], BlockId]]:
        kind = source_unit.kind
        assert kind is not None
        moves: list[tuple[int, Block[NodeT], BlockId]] = []
        if source_unit.holes:
            del self._units_by_holes[kind][len(source_unit.holes)][source_unit]
        for slot, block in enumerate(source_unit.blocks):
            if block.ref_count == 0:
                continue
            hole = self._take_hole(kind)
            while hole is None and not self._free_units:
                self._evict_block(next(iter(self._cached_blocks[kind])))
                hole = self._take_hole(kind)
            if hole is None:  # what hung from the evicted block has freed a unit: no need to go on
                if source_unit.holes:
                    self._units_by_holes[kind][len(source_unit.holes)][source_unit] = None
                return moves
            unit = hole.unit
            moves.append((kind, block, block.id))
            unit.blocks[unit.blocks.index(hole)], source_unit.blocks[slot] = block, hole
            block.id, hole.id = hole.id, block.id
            block.unit, hole.unit = unit, source_unit
            unit.live_blocks += 1
            source_unit.live_blocks -= 1
            source_unit.holes.append(hole)
        assert source_unit.live_blocks == 0
        self._free_unit(source_unit)
        return moves

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        free_units = set(self._free_units)
        assert len(free_units) == len(self._free_units)
        live_blocks_by_kind = [0] * len(self.blocks_per_unit)
        cached_blocks: list[set[Block[NodeT]]] = [set() for _ in live_blocks_by_kind]
        idle_units: list[list[Unit[NodeT]]] = [[] for _ in live_blocks_by_kind]
        for unit in self.units:
            if unit.kind is None:
                assert unit in free_units
                assert not unit.blocks
                continue
            assert unit not in free_units
            blocks_per_unit = self.blocks_per_unit[unit.kind]
            assert len(unit.blocks) == blocks_per_unit > len(unit.holes)
            holes = set(unit.holes)
            for block in unit.blocks:
                assert (block in holes) == (block.ref_count == 0 and block.node is None), repr(block)
            unit_live_blocks = sum(block.ref_count > 0 for block in unit.blocks)
            assert unit.live_blocks == unit_live_blocks
            live_blocks_by_kind[unit.kind] += unit_live_blocks
            cached_blocks[unit.kind].update(b for b in unit.blocks if b.ref_count == 0 and b.node is not None)
            if unit_live_blocks == 0 and unit.kind != self._state_kind:
                idle_units[unit.kind].append(unit)
            if holes:
                assert unit in self._units_by_holes[unit.kind][len(holes)]
        assert live_blocks_by_kind == self._live_blocks
        assert (
            self._live_units
            == sum(-(-c // blocks_per_unit) for c, blocks_per_unit in zip(live_blocks_by_kind, self.blocks_per_unit))
            <= len(self.units)
        )
        for kind, blocks in enumerate(self._cached_blocks):
            assert set(blocks) == cached_blocks[kind]
            if kind == self._state_kind:
                heap_blocks = {b for stamp, _, b in self._state_heap if stamp == b.eviction_stamp}
                assert set(blocks) <= heap_blocks
                assert len(self._state_heap) <= 2 * len(self.units) + 64
                continue
            assert [b.eviction_stamp for b in blocks] == sorted(b.eviction_stamp for b in blocks)
            assert self._idle_units[kind] == len(idle_units[kind])


def _is_current(entry: tuple[int, int, Block[NodeT]]) -> bool:
    """Whether a queued state is cached, and not used since it was queued."""
    pushed_stamp, _, block = entry
    return block.ref_count == 0 and block.node is not None and block.eviction_stamp == pushed_stamp
