"""Host memory under the device's: the blocks that were evicted there, until a prompt asks for them.

A pool of its own, of the same units and kinds, for nodes of the same prefix tree. What the device evicts is planned to
be copied here (`demote`), and what a request finds here to be copied back (`plan_load`); both go into the one list of
copies that a step does first, in order, so memory that is given up in a plan may be used again in the same one. A block
is in one of the two pools: once the device has a computed copy, this one goes (`discard_duplicate`). A state that a
sequence goes on from is not such a copy (`unpin_state`).

A copy to the host waits until its memory on the device is about to be written: with the plan that is being made,
unless that memory is for a block that a later one loads (`plan_copies`). So what is copied down is as bounded as what
comes up.

Owns the host's pool and what is planned of it. Refuses to know sequences and tensors. Invariants: a block here is
cached, or held by a step that reads it; it hangs from a full-attention block here or on the device; what it was copied
from, or is still to be copied from, has been written by no step since.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import mul
from typing import NamedTuple

from engine.cache.blocks import Block, Node, StateBlock, Unit
from engine.cache.eviction_order import EvictionOrder
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree, list_subtree
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import BlockCopy, CopyDirection


class HostUsage(NamedTuple):
    """`used_share`: share of host memory that holds something. The bytes are planned copies since the start."""

    used_share: float = 0.0
    stored_bytes: int = 0
    loaded_bytes: int = 0


class HostTier:
    """Host memory of so many units, or of none. `block_copies` is the plan's list, to which copies are added."""

    def __init__(
        self, unit_count: int, spec: CacheSpec, tree: PrefixTree, order: EvictionOrder, block_copies: list[BlockCopy]
    ) -> None:
        tree.lower_tier = self
        blocks_per_unit = spec.blocks_per_unit_by_kind()
        self._pool = UnitPool(unit_count, blocks_per_unit, spec.state_kind, order, self.evict)
        self._block_bytes_by_kind = spec.block_bytes_by_kind()
        self._order = order
        self._tree = tree
        self._block_copies = block_copies
        self._unplanned_copy_by_block: dict[Block, BlockCopy] = {}
        """How each block here is filled that no plan fills yet."""
        self._unplanned_blocks_by_unit: dict[Unit, list[Block]] = {}
        """Of these, what left with the plan being made, by the device's unit that it was in."""
        self._host_block_by_load_target: dict[Block, Block] = {}
        """And the others, by the device's block that is loaded into their memory later."""
        self._planned_stores: list[Block] = []
        """Blocks that the step being planned fills."""
        self._stored_blocks_by_kind = [0] * len(blocks_per_unit)
        self._loaded_blocks_by_kind = [0] * len(blocks_per_unit)
        """Of each kind, planned since the start."""

    @property
    def free_units(self) -> int:
        return self._pool.free_units

    def measure_usage(self) -> HostUsage:
        copied_bytes = (
            sum(map(mul, counts, self._block_bytes_by_kind))
            for counts in (self._stored_blocks_by_kind, self._loaded_blocks_by_kind)
        )
        if not self._pool.units:
            return HostUsage()
        return HostUsage(1 - self._pool.free_units / len(self._pool.units), *copied_bytes)

    def take_planned_stores(self) -> list[Block]:
        """The plan is made: the blocks that it fills here."""
        stores, self._planned_stores = self._planned_stores, []
        return stores

    # ------------------------------------------------------------------ down

    def demote(self, block: Block, *, keep_on_host: bool) -> None:
        """A computed block of the device is about to lose its name: take it in, if it is to be kept, and say so."""
        node, kind, event_log = block.node, block.kind, self._tree.event_log
        assert node is not None
        if node.has_host_block(kind):
            event_log.record_removed(kind, node)
        elif keep_on_host and self._store(block, node):
            event_log.record_demoted(kind, node)
        else:
            if kind == FULL_KIND:
                self._drop_subtree(node)
            event_log.record_removed(kind, node)

    def _store(self, block: Block, node: Node) -> bool:
        kind = block.kind
        host_block = self._pool.allocate(kind) if self._pool.units else None
        if host_block is None:
            return False
        self._tree.attach_host(node, host_block)
        if isinstance(block, StateBlock) and isinstance(host_block, StateBlock):
            host_block.is_superseded, host_block.value = block.is_superseded, block.value
        self._pool.release(host_block)
        self._unplanned_copy_by_block[host_block] = BlockCopy(kind, block.id, host_block.id, CopyDirection.TO_HOST)
        self._unplanned_blocks_by_unit.setdefault(block.unit, []).append(host_block)
        return True

    def plan_copies(self, deferred_targets: Container[Block]) -> None:
        """Plan to copy what left, except from the memory of `deferred_targets`, which a later plan loads."""
        if not self._unplanned_blocks_by_unit:
            return
        for unit, host_blocks in self._unplanned_blocks_by_unit.items():
            for host_block in host_blocks:
                block_copy = self._unplanned_copy_by_block.get(host_block)
                if block_copy is None:
                    continue
                if unit.kind == block_copy.kind:
                    target = unit.blocks[block_copy.source % self._pool.blocks_per_unit[block_copy.kind]]
                    if target in deferred_targets:
                        self._host_block_by_load_target[target] = host_block
                        continue
                self._plan_copy(host_block)
        self._unplanned_blocks_by_unit.clear()

    def plan_all_copies(self) -> None:
        """Copy all that left, before anything else that is planned from now on."""
        for host_block in list(self._unplanned_copy_by_block):
            self._plan_copy(host_block)
        self._unplanned_blocks_by_unit.clear()
        self._host_block_by_load_target.clear()

    def flush_before_overwrite(self, target: Block) -> None:
        """Copy what left from the memory of the device's `target`, which is about to be written."""
        for host_block in self._unplanned_blocks_by_unit.pop(target.unit, ()):
            self._plan_copy(host_block)
        deferred_block = self._host_block_by_load_target.pop(target, None)
        if deferred_block is not None:
            self._plan_copy(deferred_block)

    def kinds_to_flush(self, target: Block) -> list[int]:
        """Kinds of the blocks that `flush_before_overwrite` would copy."""
        host_blocks = [
            *self._unplanned_blocks_by_unit.get(target.unit, ()),
            self._host_block_by_load_target.get(target),
        ]
        return [host_block.kind for host_block in host_blocks if host_block in self._unplanned_copy_by_block]

    def _plan_copy(self, host_block: Block) -> None:
        block_copy = self._unplanned_copy_by_block.pop(host_block, None)
        if block_copy is not None:
            self._block_copies.append(block_copy)
            self._planned_stores.append(host_block)
            self._stored_blocks_by_kind[block_copy.kind] += 1

    def untrusted_blocks(self) -> list[Block]:
        """What the plan being made, or a later one, fills: not to be trusted where a step before failed."""
        return [*self._planned_stores, *self._unplanned_copy_by_block]

    # ------------------------------------------------------------------ up

    def pin(self, node: Node, kind: int) -> Block:
        """The node's block here, which is not evicted before `unpin`."""
        host_block = node.host_blocks[kind]
        assert host_block is not None
        self._pool.acquire(host_block)
        return host_block

    def plan_load(self, host_block: Block, target: Block) -> None:
        """Copy a block that is held here to the device's `target` with the step being planned."""
        self.flush_before_overwrite(target)
        self._plan_copy(host_block)
        self._block_copies.append(BlockCopy(host_block.kind, host_block.id, target.id, CopyDirection.FROM_HOST))
        self._loaded_blocks_by_kind[host_block.kind] += 1

    def unpin(self, host_block: Block) -> None:
        if host_block.node is None and host_block.ref_count == 1:
            self._unplanned_copy_by_block.pop(host_block, None)
        self._pool.release(host_block)

    def finish_promotion(self, host_block: Block) -> None:
        """The device has a computed copy of a block that was held for it, or it was forgotten."""
        if host_block.ref_count > 1:  # somebody else reads it, too
            self.unpin(host_block)
            return
        if host_block.node is not None:
            self._tree.detach_host(host_block)
        self.unpin(host_block)

    def unpin_state(self, host_block: Block) -> None:
        """A sequence has a copy of a state that was held for it, and will change it: the state here stays.

        Unless it was forgotten, or the device has a named copy meanwhile."""
        if host_block.node is None or host_block.node.has_computed(host_block.kind):
            self.finish_promotion(host_block)
        else:
            self.unpin(host_block)

    def discard_duplicate(self, block: Block) -> None:
        """The device has a computed block now: none is needed here, unless a step reads it."""
        assert block.node is not None
        host_block = block.node.host_blocks[block.kind]
        if host_block is not None and not host_block.ref_count:
            self._drop(host_block)

    # ------------------------------------------------------------------ out

    def evict(self, block: Block) -> None:
        """Evict a block, and with a full-attention block that the device has not what hangs from it here."""
        assert block.node is not None
        if block.kind == FULL_KIND and not block.node.has_computed(FULL_KIND):
            self._drop_subtree(block.node)
        else:
            self._drop(block)

    def forget_all(self) -> None:
        """Forget every name. What steps read stays until they let it go."""
        for host_block in self._tree.clear_host():
            self._free_if_unpinned(host_block)

    def _drop_subtree(self, root: Node) -> None:
        """What is here of this node and of those below it, leaves first."""
        for node in reversed(list_subtree(root)):
            for host_block in reversed(node.host_blocks):
                if host_block is not None:
                    self._drop(host_block)

    def _drop(self, host_block: Block) -> None:
        node, kind = host_block.node, host_block.kind
        assert node is not None
        self._tree.detach_host(host_block)
        self._free_if_unpinned(host_block)
        self._order.mark_evicted(node, kind)
        self._tree.remove_if_empty(node)

    def _free_if_unpinned(self, host_block: Block) -> None:
        """It has lost its name: unless a step reads it, its memory is free, and nothing is to be copied there."""
        if not host_block.ref_count:
            self._unplanned_copy_by_block.pop(host_block, None)
            self._pool.drop(host_block)

    def check_invariants(self, pinned_blocks: Sequence[Block]) -> None:
        """`pinned_blocks`: an entry for each reference of a step that is out."""
        self._pool.check_invariants()
        assert all(
            host_block.node is not None or host_block.ref_count for host_block in self._unplanned_copy_by_block
        ), "to be copied to memory that is free"
        unplanned_blocks = {
            host_block
            for host_blocks in (*self._unplanned_blocks_by_unit.values(), self._host_block_by_load_target.values())
            for host_block in host_blocks
        }
        assert unplanned_blocks >= set(self._unplanned_copy_by_block), "a copy that nothing would plan"
        named_blocks = {
            host_block for node in self._tree.nodes() for host_block in node.host_blocks if host_block is not None
        }
        for unit in self._pool.units:
            for host_block in unit.blocks:
                assert host_block.ref_count == pinned_blocks.count(host_block), f"{host_block!r} of the host"
                assert (host_block in named_blocks) == (host_block.node is not None)
        for node in self._tree.nodes():
            for kind, block in enumerate(node.host_blocks):
                assert block is None or (block.node is node and block.kind == kind)
                assert block is None or block.ref_count or not node.has_computed(kind), "kept twice"
