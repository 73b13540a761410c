"""Blocks of memory, and the nodes of the prefix tree.

A node stands for one block of a prefix, and refers to the memory that holds this block's KV. Key, hash and parent of a
node never change, so the publisher's thread may read them while the step's thread works.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.types import BlockId, BlockKey, UnitId

_STATE_KIND = -1
"""Index of the recurrent states among the kinds of blocks, if the model has such states."""


class Block:
    """A block of KV cache memory, and how it is used. A unit of memory is divided into blocks of one kind."""

    __slots__ = ("eviction_stamp", "id", "is_pending", "node", "ref_count", "unit")

    def __init__(self, unit: Unit, slot: int, blocks_per_unit: int) -> None:
        """Make an unused block: number `slot` of the `blocks_per_unit` blocks in a unit."""
        self.unit = unit
        self.id = BlockId(unit.index * blocks_per_unit + slot)
        self.ref_count = 0
        """Number of sequences, or of steps, that hold the block."""
        self.node: Node | None = None
        """Node of the prefix tree that has this block; None if the block is not in the tree."""
        self.is_pending = False
        """Whether the block is in the tree before its KV is computed, by a step that is planned or in flight."""
        self.eviction_stamp = 0
        """Sort key of cached blocks: the block with the lowest stamp is evicted first."""

    @property
    def kind(self) -> int:
        """Index of the attention group for which the block holds KV; the last kind is recurrent state."""
        assert self.unit.kind is not None
        return self.unit.kind

    @property
    def is_cached(self) -> bool:
        """Whether the block is in the prefix tree, and no sequence or step holds it: it may be evicted."""
        return self.node is not None and not self.ref_count

    def __repr__(self) -> str:
        return f"Block({self.id}, kind={self.unit.kind}, refs={self.ref_count}, in_tree={self.node is not None})"


class StateBlock(Block):
    """A block that holds a recurrent state, such as Mamba's: a running sequence's own, or a checkpoint.

    A checkpoint is the state after a prefix of a prompt. Later prompts with this prefix resume from it.
    """

    __slots__ = ("is_in_flight", "is_shared", "is_superseded", "value")

    def __init__(self, unit: Unit, slot: int, blocks_per_unit: int) -> None:
        super().__init__(unit, slot, blocks_per_unit)
        self.is_in_flight = False
        """Whether the step that takes the checkpoint has begun, so that the next step may resume from it."""
        self.is_shared = False
        """Whether more than one sequence has reached the checkpoint."""
        self.is_superseded = False
        """Whether a later checkpoint of the same conversation makes this one nearly useless."""
        self.value = 0
        """Number of blocks that prompts need not compute again thanks to the checkpoint."""


class Unit:
    """One unit of a pool's memory: free, or cut into blocks of one kind."""

    __slots__ = ("blocks", "holes", "index", "kind", "live_blocks")

    def __init__(self, index: int) -> None:
        self.index = UnitId(index)
        self.kind: int | None = None
        self.blocks: list[Block] = []
        self.holes: list[Block] = []
        """Unused blocks. The last one in the list is taken first."""
        self.live_blocks = 0
        """Number of blocks that are held."""


class Node:
    """A block of a prefix in the prefix tree, with the memory blocks that hold its KV, or the state after it.

    `blocks[k]`: the device's block of kind k, or None. `host_blocks[k]`: the block of host memory, or None.
    """

    __slots__ = ("blocks", "cached_child_count", "children", "depth", "hash", "host_blocks", "key", "parent")

    def __init__(self, key: BlockKey, parent: Node | None, no_blocks: tuple[None, ...]) -> None:
        """Make a node without blocks. `parent`: node of the block before it; None for the first block of a prefix.

        `no_blocks`: None for every kind.
        """
        self.key = key
        self.hash = key.hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.blocks: list[Block | None] = list(no_blocks)
        self.host_blocks: list[Block | None] = list(no_blocks)
        self.cached_child_count = 0
        """Number of children with a full-attention block on the device."""
        self.children: dict[int, Node] = {}

    def has_computed(self, kind: int) -> bool:
        """Return whether the device has a computed block of `kind` here."""
        block = self.blocks[kind]
        return block is not None and not block.is_pending

    def is_pending(self, kinds: Iterable[int]) -> bool:
        """Return whether a step that is planned or in flight computes a block of one of these kinds."""
        for kind in kinds:
            block = self.blocks[kind]
            if block is not None and block.is_pending:
                return True
        return False

    def has_host_block(self, kind: int) -> bool:
        """Return whether host memory has a block of `kind` here."""
        return self.host_blocks[kind] is not None

    def has_block(self, kind: int) -> bool:
        """Return whether device or host memory has a block of `kind` here, computed or pending."""
        return self.blocks[kind] is not None or self.has_host_block(kind)

    def has_usable_block(self, kind: int) -> bool:
        """Return whether the step being planned finds a block of `kind` here, in one of the memories.

        A block that another step computes counts, too, but for a state only if that step has begun.
        """
        block = self.blocks[kind]
        if block is None or (block.is_pending and isinstance(block, StateBlock) and not block.is_in_flight):
            return self.has_host_block(kind)
        return True

    def is_held(self, kind: int) -> bool:
        """Return whether a sequence holds the device's block of `kind`."""
        block = self.blocks[kind]
        return block is not None and block.ref_count > 0

    @property
    def checkpoint(self) -> StateBlock | None:
        """State after this prefix on the device."""
        block = self.blocks[_STATE_KIND]
        return block if isinstance(block, StateBlock) else None

    def can_resume(self) -> bool:
        """Return whether the step being planned finds a state here: computed, or in the work of a step in flight."""
        checkpoint = self.checkpoint
        return checkpoint is not None and (checkpoint.is_in_flight or not checkpoint.is_pending)

    def has_superseded_state(self) -> bool:
        """Return whether the state here is superseded, and no sequence holds it."""
        block = self.blocks[_STATE_KIND] or self.host_blocks[_STATE_KIND]
        return isinstance(block, StateBlock) and block.is_superseded and block.is_cached

    def count_saved_blocks(self, blocks_per_state: int) -> int | None:
        """Return how many blocks a prompt that resumes from the recurrent state at this node need not compute.

        Without this state, the prompt would resume from the state of the nearest ancestor that has one. An ancestor
        fewer than `blocks_per_state` blocks away is passed over if its state is superseded, because that state is
        evicted early. Returns None if no state is saved at this node.
        """
        if not self.has_block(_STATE_KIND):
            return None
        ancestor = self.parent
        while ancestor is not None:
            distance = self.depth - ancestor.depth
            if ancestor.has_block(_STATE_KIND):
                is_near = distance < blocks_per_state
                if not (is_near and ancestor.has_superseded_state()):
                    return distance
            ancestor = ancestor.parent
        return self.depth + 1
