"""Host memory under the device's: the blocks that were evicted there, until a prompt asks for them.

A pool of its own, of the same units and kinds, for nodes of the same prefix tree. What the device evicts is planned to
be copied here (`leave`), and what a request finds here to be copied back (`fetch`); both go into the one list of moves
that a step does first, in order, so memory that is given up in a plan may be used again in the same one. A block is
in one of the two pools: once the device has a computed copy, this one goes (`replaced`). A state that a sequence goes
on from is not such a copy (`return_state`).

A copy to the host waits until its memory on the device is about to be written: with the plan that is being made, unless
that memory is for a block that a later one loads (`settle`). So what is copied down is as bounded as what comes up.

Owns the host's pool and what is planned of it. Refuses to know sequences and tensors. Invariants: a block here is
cached, or held by a step that reads it; it hangs from a full-attention block here or on the device; what it was copied
from, or is still to be copied from, has been written by no step since.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import mul

from engine.cache.adaptive_eviction import AdaptiveEviction
from engine.cache.nodes import Node
from engine.cache.pool import Block, Unit, UnitPool
from engine.cache.prefix_tree import FULL_KIND, HostEvictionOrder, PrefixTree
from engine.cache.spec import CacheSpec
from engine.types import Move, Way


class HostTier:
    """`moves` is the plan's list, to which copies are added."""

    def __init__(
        self,
        unit_count: int,
        blocks_per_unit: Sequence[int],
        state_kind: int | None,
        tree: PrefixTree,
        moves: list[Move],
        order: AdaptiveEviction[Node] | None = None,
    ) -> None:
        """`order`: another one than by age, the device's too."""
        assert unit_count > 0
        self.pool: UnitPool[Node] = UnitPool(
            unit_count,
            blocks_per_unit,
            self.forget,
            state_kind,
            None if order is None else HostEvictionOrder(order, blocks_per_unit[FULL_KIND]),
        )
        self._order = order
        self._tree = tree
        self._moves = moves
        self._waiting: dict[Block[Node], Move] = {}
        """How each block here is filled that no plan fills yet."""
        self._fresh: dict[Unit[Node], list[Block[Node]]] = {}
        """Of these, what left with the plan being made, by the device's unit that it was in."""
        self._kept: dict[Block[Node], Block[Node]] = {}
        """And the others, by the device's block that is loaded into their memory later."""
        self.stored: list[Block[Node]] = []
        """Blocks that the step being planned fills."""
        self.stored_blocks = [0] * len(blocks_per_unit)
        self.loaded_blocks = [0] * len(blocks_per_unit)
        """Of each kind, planned since the start."""

    def usage(self, spec: CacheSpec) -> tuple[float, int, int]:
        """(share in use, bytes stored, bytes loaded)."""
        moved = (sum(map(mul, counts, spec.sizes())) for counts in (self.stored_blocks, self.loaded_blocks))
        return 1 - self.pool.free_units / len(self.pool.units), *moved

    # ------------------------------------------------------------------ down

    def leave(self, block: Block[Node], *, keep: bool) -> None:
        """A computed block of the device is about to lose its name: take it in, if it is to be kept, and say so."""
        node, kind, log = block.node, block.kind, self._tree.log
        assert node is not None
        if node.is_on_host(kind):
            log.removed(kind, node)
        elif keep and self._store(block, node):
            log.moved(kind, node)
        else:
            if kind == FULL_KIND:
                self._drop_all(node)
            log.removed(kind, node)

    def _store(self, block: Block[Node], node: Node) -> bool:
        kind = block.kind
        own = self.pool.allocate(kind)
        if own is None:
            return False
        if node.host_blocks is None:
            node.host_blocks = [None] * len(node.blocks)
        node.host_blocks[kind] = own
        own.node, own.is_superseded = node, block.is_superseded
        self.pool.release(own, block.state_value)
        self._waiting[own] = Move(kind, block.id, own.id, Way.TO_HOST)
        self._fresh.setdefault(block.unit, []).append(own)
        return True

    def settle(self, later: Container[Block[Node]]) -> None:
        """The plan is made: it copies what left, but for what lies where blocks are that are loaded `later`."""
        for unit, owns in self._fresh.items():
            for own in owns:
                move = self._waiting.get(own)
                if move is None:
                    continue
                if unit.kind == move.kind:
                    taken = unit.blocks[move.source % self.pool.blocks_per_unit[move.kind]]
                    if taken in later:
                        self._kept[taken] = own
                        continue
                self._copy(own)
        self._fresh.clear()

    def settle_all(self) -> None:
        """Copy all that left, before anything else that is planned from now on."""
        for own in list(self._waiting):
            self._copy(own)
        self._fresh.clear()
        self._kept.clear()

    def vacate(self, target: Block[Node]) -> None:
        """Copy what left from the memory of the device's `target`, which is about to be written."""
        for own in self._fresh.pop(target.unit, ()):
            self._copy(own)
        kept = self._kept.pop(target, None)
        if kept is not None:
            self._copy(kept)

    def vacating(self, target: Block[Node]) -> list[int]:
        """Kinds of the blocks that `vacate` would copy."""
        owns = [*self._fresh.get(target.unit, ()), self._kept.get(target)]
        return [own.kind for own in owns if own in self._waiting]

    def _copy(self, own: Block[Node]) -> None:
        move = self._waiting.pop(own, None)
        if move is not None:
            self._moves.append(move)
            self.stored.append(own)
            self.stored_blocks[move.kind] += 1

    def uncertain(self) -> list[Block[Node]]:
        """What the plan being made, or a later one, fills: not to be trusted where a step before failed."""
        return [*self.stored, *self._waiting]

    # ------------------------------------------------------------------ up

    def hold(self, node: Node, kind: int) -> Block[Node]:
        """The node's block here, which is not evicted before `let_go`."""
        assert node.host_blocks is not None
        own = node.host_blocks[kind]
        assert own is not None
        self.pool.acquire(own)
        return own

    def fetch(self, own: Block[Node], target: Block[Node]) -> None:
        """Copy a block that is held here to the device's `target` with the step being planned."""
        self.vacate(target)
        self._copy(own)
        self._moves.append(Move(own.kind, own.id, target.id, Way.FROM_HOST))
        self.loaded_blocks[own.kind] += 1

    def let_go(self, own: Block[Node]) -> None:
        if own.node is None and own.refs == 1:
            self._waiting.pop(own, None)
        self.pool.release(own, own.state_value)

    def taken(self, own: Block[Node]) -> None:
        """The device has a computed copy of a block that was held for it, or it was forgotten."""
        if own.refs > 1:  # somebody else reads it, too
            self.let_go(own)
            return
        if (node := own.node) is not None:
            self._unname(own, node)
        self.let_go(own)

    def return_state(self, own: Block[Node]) -> None:
        """A sequence has a copy of a state that was held for it, and will change it: the state here stays.

        Unless it was forgotten, or the device has a named copy meanwhile."""
        if own.node is None or own.node.has_computed(own.kind):
            self.taken(own)
        else:
            self.let_go(own)

    def replaced(self, block: Block[Node]) -> None:
        """The device has a computed block now: none is needed here, unless a step reads it."""
        node = block.node
        assert node is not None
        if node.host_blocks is not None and (own := node.host_blocks[block.kind]) is not None and not own.refs:
            self._drop(own)

    # ------------------------------------------------------------------ out

    def forget(self, block: Block[Node]) -> None:
        """Evict a block, and with a full-attention block that the device has not what hangs from it here."""
        assert block.node is not None
        if block.kind == FULL_KIND and not block.node.has_computed(FULL_KIND):
            self._drop_all(block.node)
        else:
            self._drop(block)

    def clear(self) -> None:
        """Forget every name. What steps read stays until they let it go."""
        for node in self._tree.nodes():
            for own in node.host_blocks or ():
                if own is not None:
                    own.node = None
                    self._give_up(own)
            node.host_blocks = None

    def grown(self, node: Node) -> None:
        """The tree has something below it: it is not the end of its path any more."""
        if self._order is not None and node.host_blocks is not None:
            self._order.gone_below(node, None)

    def pruned(self, node: Node) -> None:
        """The tree has it no more: what it hung from may be the end of its path here."""
        above = node.parent
        if self._order is not None:
            ends = (
                above is not None
                and above.host_blocks is not None
                and not above.children
                and (own := above.host_blocks[FULL_KIND])
            )
            self._order.gone_below(node, above if ends and own is not None and not own.refs else None)

    def _drop_all(self, top: Node) -> None:
        """What is here of this node and of those below it, leaves first."""
        below = [top]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            for own in reversed(node.host_blocks or ()):
                if own is not None:
                    self._drop(own)

    def _drop(self, own: Block[Node]) -> None:
        node, kind = own.node, own.kind
        assert node is not None
        self._unname(own, node)
        self._give_up(own)
        if self._order is not None and kind != FULL_KIND:
            self._order.state_gone(node)
        if any(node.blocks):
            if self._order is not None and kind == FULL_KIND:
                self._order.gone_below(node, None)
        elif node.host_blocks is None:
            self._tree.prune(node)

    def _unname(self, own: Block[Node], node: Node) -> None:
        kind = own.kind
        assert node.host_blocks is not None
        self._tree.log.gone(kind, node)
        node.host_blocks[kind] = None
        if not any(node.host_blocks):
            node.host_blocks = None
        own.node = None

    def _give_up(self, own: Block[Node]) -> None:
        """It has lost its name: unless a step reads it, its memory is free, and nothing is to be copied there."""
        if not own.refs:
            self._waiting.pop(own, None)
            self.pool.drop(own)

    def check_invariants(self, held: Sequence[Block[Node]]) -> None:
        """`held`: an entry for each reference of a step that is out."""
        self.pool.check_invariants()
        assert all(own.node is not None or own.refs for own in self._waiting), "to be copied to memory that is free"
        waiting = {own for owns in (*self._fresh.values(), self._kept.values()) for own in owns}
        assert waiting >= set(self._waiting), "a copy that nothing would plan"
        named = {own for node in self._tree.nodes() for own in node.host_blocks or () if own is not None}
        for unit in self.pool.units:
            for own in unit.blocks:
                assert own.refs == held.count(own), f"{own!r} of the host"
                assert (own in named) == (own.node is not None)
        for node in self._tree.nodes():
            assert node.host_blocks is None or any(node.host_blocks)
            for kind, block in enumerate(node.host_blocks or ()):
                assert block is None or (block.node is node and block.kind == kind)
                assert block is None or block.refs or not node.has_computed(kind), "kept twice"
