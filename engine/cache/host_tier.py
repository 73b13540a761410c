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

from engine.cache.adaptive_eviction import AdaptiveEviction
from engine.cache.nodes import Node
from engine.cache.pool import Block, Unit, UnitPool
from engine.cache.prefix_tree import FULL_KIND, HostEvictionOrder, PrefixTree
from engine.cache.spec import CacheSpec
from engine.types import BlockCopy, CopyDirection


class HostUsage(NamedTuple):
    """`used_share`: share of host memory that holds something. The bytes are planned copies since the start."""

    used_share: float
    stored_bytes: int
    loaded_bytes: int


class HostTier:
    """`block_copies` is the plan's list, to which copies are added."""

    def __init__(
        self,
        unit_count: int,
        blocks_per_unit: Sequence[int],
        state_kind: int | None,
        tree: PrefixTree,
        block_copies: list[BlockCopy],
        eviction_order: AdaptiveEviction[Node] | None = None,
    ) -> None:
        """`eviction_order`: another one than by age, the device's too."""
        assert unit_count > 0
        self.pool: UnitPool[Node] = UnitPool(
            unit_count,
            blocks_per_unit,
            self.evict,
            state_kind,
            None if eviction_order is None else HostEvictionOrder(eviction_order, blocks_per_unit[FULL_KIND]),
        )
        self._eviction_order = eviction_order
        self._tree = tree
        self._block_copies = block_copies
        self._unplanned_copy_by_block: dict[Block[Node], BlockCopy] = {}
        """How each block here is filled that no plan fills yet."""
        self._unplanned_blocks_by_unit: dict[Unit[Node], list[Block[Node]]] = {}
        """Of these, what left with the plan being made, by the device's unit that it was in."""
        self._host_block_by_load_target: dict[Block[Node], Block[Node]] = {}
        """And the others, by the device's block that is loaded into their memory later."""
        self.planned_stores: list[Block[Node]] = []
        """Blocks that the step being planned fills."""
        self.stored_blocks_by_kind = [0] * len(blocks_per_unit)
        self.loaded_blocks_by_kind = [0] * len(blocks_per_unit)
        """Of each kind, planned since the start."""

    def measure_usage(self, spec: CacheSpec) -> HostUsage:
        copied_bytes = (
            sum(map(mul, counts, spec.block_bytes_by_kind()))
            for counts in (self.stored_blocks_by_kind, self.loaded_blocks_by_kind)
        )
        return HostUsage(1 - self.pool.free_units / len(self.pool.units), *copied_bytes)

    # ------------------------------------------------------------------ down

    def demote(self, block: Block[Node], *, keep_on_host: bool) -> None:
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

    def _store(self, block: Block[Node], node: Node) -> bool:
        kind = block.kind
        host_block = self.pool.allocate(kind)
        if host_block is None:
            return False
        if node.host_blocks is None:
            node.host_blocks = [None] * len(node.blocks)
        node.host_blocks[kind] = host_block
        host_block.node, host_block.is_superseded = node, block.is_superseded
        self.pool.release(host_block, block.state_value)
        self._unplanned_copy_by_block[host_block] = BlockCopy(kind, block.id, host_block.id, CopyDirection.TO_HOST)
        self._unplanned_blocks_by_unit.setdefault(block.unit, []).append(host_block)
        return True

    def plan_copies(self, deferred_targets: Container[Block[Node]]) -> None:
        """Plan to copy what left, except from the memory of `deferred_targets`, which a later plan loads."""
        for unit, host_blocks in self._unplanned_blocks_by_unit.items():
            for host_block in host_blocks:
                block_copy = self._unplanned_copy_by_block.get(host_block)
                if block_copy is None:
                    continue
                if unit.kind == block_copy.kind:
                    target = unit.blocks[block_copy.source % self.pool.blocks_per_unit[block_copy.kind]]
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

    def flush_before_overwrite(self, target: Block[Node]) -> None:
        """Copy what left from the memory of the device's `target`, which is about to be written."""
        for host_block in self._unplanned_blocks_by_unit.pop(target.unit, ()):
            self._plan_copy(host_block)
        deferred_block = self._host_block_by_load_target.pop(target, None)
        if deferred_block is not None:
            self._plan_copy(deferred_block)

    def kinds_to_flush(self, target: Block[Node]) -> list[int]:
        """Kinds of the blocks that `flush_before_overwrite` would copy."""
        host_blocks = [
            *self._unplanned_blocks_by_unit.get(target.unit, ()),
            self._host_block_by_load_target.get(target),
        ]
        return [host_block.kind for host_block in host_blocks if host_block in self._unplanned_copy_by_block]

    def _plan_copy(self, host_block: Block[Node]) -> None:
        block_copy = self._unplanned_copy_by_block.pop(host_block, None)
        if block_copy is not None:
            self._block_copies.append(block_copy)
            self.planned_stores.append(host_block)
            self.stored_blocks_by_kind[block_copy.kind] += 1

    def untrusted_blocks(self) -> list[Block[Node]]:
        """What the plan being made, or a later one, fills: not to be trusted where a step before failed."""
        return [*self.planned_stores, *self._unplanned_copy_by_block]

    # ------------------------------------------------------------------ up

    def pin(self, node: Node, kind: int) -> Block[Node]:
        """The node's block here, which is not evicted before `unpin`."""
        assert node.host_blocks is not None
        host_block = node.host_blocks[kind]
        assert host_block is not None
        self.pool.acquire(host_block)
        return host_block

    def plan_load(self, host_block: Block[Node], target: Block[Node]) -> None:
        """Copy a block that is held here to the device's `target` with the step being planned."""
        self.flush_before_overwrite(target)
        self._plan_copy(host_block)
        self._block_copies.append(BlockCopy(host_block.kind, host_block.id, target.id, CopyDirection.FROM_HOST))
        self.loaded_blocks_by_kind[host_block.kind] += 1

    def unpin(self, host_block: Block[Node]) -> None:
        if host_block.node is None and host_block.ref_count == 1:
            self._unplanned_copy_by_block.pop(host_block, None)
        self.pool.release(host_block, host_block.state_value)

    def finish_promotion(self, host_block: Block[Node]) -> None:
        """The device has a computed copy of a block that was held for it, or it was forgotten."""
        if host_block.ref_count > 1:  # somebody else reads it, too
            self.unpin(host_block)
            return
        if (node := host_block.node) is not None:
            self._unlink(host_block, node)
        self.unpin(host_block)

    def unpin_state(self, host_block: Block[Node]) -> None:
        """A sequence has a copy of a state that was held for it, and will change it: the state here stays.

        Unless it was forgotten, or the device has a named copy meanwhile."""
        if host_block.node is None or host_block.node.has_computed(host_block.kind):
            self.finish_promotion(host_block)
        else:
            self.unpin(host_block)

    def discard_duplicate(self, block: Block[Node]) -> None:
        """The device has a computed block now: none is needed here, unless a step reads it."""
        node = block.node
        assert node is not None
        if (
            node.host_blocks is not None
            and (host_block := node.host_blocks[block.kind]) is not None
            and not host_block.ref_count
        ):
            self._drop(host_block)

    # ------------------------------------------------------------------ out

    def evict(self, block: Block[Node]) -> None:
        """Evict a block, and with a full-attention block that the device has not what hangs from it here."""
        assert block.node is not None
        if block.kind == FULL_KIND and not block.node.has_computed(FULL_KIND):
            self._drop_subtree(block.node)
        else:
            self._drop(block)

    def clear(self) -> None:
        """Forget every name. What steps read stays until they let it go."""
        for node in self._tree.nodes():
            for host_block in node.host_blocks or ():
                if host_block is not None:
                    host_block.node = None
                    self._free_if_unpinned(host_block)
            node.host_blocks = None

    def handle_child_added(self, node: Node) -> None:
        """The tree has something below it: it is not the end of its path any more."""
        if self._eviction_order is not None and node.host_blocks is not None:
            self._eviction_order.remove_host_leaf(node, None)

    def handle_node_removed(self, node: Node) -> None:
        """The tree has it no more: what it hung from may be the end of its path here."""
        parent = node.parent
        if self._eviction_order is not None:
            parent_is_leaf = (
                parent is not None
                and parent.host_blocks is not None
                and not parent.children
                and (parent_block := parent.host_blocks[FULL_KIND])
            )
            self._eviction_order.remove_host_leaf(
                node, parent if parent_is_leaf and parent_block is not None and not parent_block.ref_count else None
            )

    def _drop_subtree(self, root: Node) -> None:
        """What is here of this node and of those below it, leaves first."""
        subtree = [root]
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            for host_block in reversed(node.host_blocks or ()):
                if host_block is not None:
                    self._drop(host_block)

    def _drop(self, host_block: Block[Node]) -> None:
        node, kind = host_block.node, host_block.kind
        assert node is not None
        self._unlink(host_block, node)
        self._free_if_unpinned(host_block)
        if self._eviction_order is not None and kind != FULL_KIND:
            self._eviction_order.mark_state_removed(node)
        if any(node.blocks):
            if self._eviction_order is not None and kind == FULL_KIND:
                self._eviction_order.remove_host_leaf(node, None)
        elif node.host_blocks is None:
            self._tree.remove_node(node)

    def _unlink(self, host_block: Block[Node], node: Node) -> None:
        kind = host_block.kind
        assert node.host_blocks is not None
        self._tree.event_log.record_host_removed(kind, node)
        node.host_blocks[kind] = None
        if not any(node.host_blocks):
            node.host_blocks = None
        host_block.node = None

    def _free_if_unpinned(self, host_block: Block[Node]) -> None:
        """It has lost its name: unless a step reads it, its memory is free, and nothing is to be copied there."""
        if not host_block.ref_count:
            self._unplanned_copy_by_block.pop(host_block, None)
            self.pool.drop(host_block)

    def check_invariants(self, pinned_blocks: Sequence[Block[Node]]) -> None:
        """`pinned_blocks`: an entry for each reference of a step that is out."""
        self.pool.check_invariants()
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
            host_block for node in self._tree.nodes() for host_block in node.host_blocks or () if host_block is not None
        }
        for unit in self.pool.units:
            for host_block in unit.blocks:
                assert host_block.ref_count == pinned_blocks.count(host_block), f"{host_block!r} of the host"
                assert (host_block in named_blocks) == (host_block.node is not None)
        for node in self._tree.nodes():
            assert node.host_blocks is None or any(node.host_blocks)
            for kind, block in enumerate(node.host_blocks or ()):
                assert block is None or (block.node is node and block.kind == kind)
                assert block is None or block.ref_count or not node.has_computed(kind), "kept twice"
