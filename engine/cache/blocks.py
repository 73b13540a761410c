"""Blocks of memory, and the nodes of the prefix tree that name them.

Refuses to know the pool, the tree and the log of events, which use both. Invariant: the name, hash and parent of a node
never change, so the publisher's thread may read them while the step's thread goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Sequence as Items

from engine.types import BlockId, UnitId


class BlockKey:
    """One hash block of some prefix: what it is called, whether or not anything holds it."""

    __slots__ = ("extra_keys", "hash", "lora_name", "packed_tokens")

    def __init__(
        self, hash_: int, packed_tokens: bytes, extra_keys: tuple[str, ...] | None, lora_name: str | None
    ) -> None:
        self.hash = hash_
        self.packed_tokens = packed_tokens
        """Its token ids, as `events.pack_token_ids` writes them: one object, where a tuple of ints is one for each."""
        self.extra_keys = extra_keys
        self.lora_name = lora_name

    def equals(self, other: BlockKey) -> bool:
        """Whether tokens and keys are equal; the hash alone proves nothing."""
        return self is other or (
            self.packed_tokens == other.packed_tokens
            and self.extra_keys == other.extra_keys
            and self.lora_name == other.lora_name
        )


class BlockState(enum.Enum):
    """What a block of memory is used for."""

    HOLE = "hole"
    """No sequence holds the block, and no node names it."""
    PRIVATE = "private"
    """Sequences hold the block, and no node names it."""
    PENDING = "pending"
    """Sequences hold the block, and a node names it whose content a planned step computes: not announced yet."""
    LIVE = "live"
    """Sequences hold the block, and a node names it whose content is computed."""
    CACHED = "cached"
    """No sequence holds the block; a node names it, and a prompt can resume from it until it is evicted."""


class Block:
    """One block of a unit. `node` is its place in the prefix tree, None while it is not named there."""

    __slots__ = ("eviction_stamp", "id", "is_pending", "node", "ref_count", "unit")

    def __init__(self, unit: Unit, slot: int, blocks_per_unit: int) -> None:
        self.unit = unit
        self.id = BlockId(unit.index * blocks_per_unit + slot)
        self.ref_count = 0
        self.node: Node | None = None
        self.is_pending = False
        """Named, but its content is computed only in a step that is planned or out: not announced yet."""
        self.eviction_stamp = 0
        """Its age while cached: what has the lowest stamp is evicted first."""

    @property
    def kind(self) -> int:
        assert self.unit.kind is not None
        return self.unit.kind

    @property
    def state(self) -> BlockState:
        if self.node is None:
            return BlockState.PRIVATE if self.ref_count else BlockState.HOLE
        if self.is_pending:
            return BlockState.PENDING
        return BlockState.LIVE if self.ref_count else BlockState.CACHED

    def __repr__(self) -> str:
        return f"Block({self.id}, kind={self.unit.kind}, refs={self.ref_count}, named={self.node is not None})"


class StateBlock(Block):
    """A block that holds a recurrent state: a sequence's own, or a checkpoint."""

    __slots__ = ("is_in_flight", "is_shared", "is_superseded", "value")

    def __init__(self, unit: Unit, slot: int, blocks_per_unit: int) -> None:
        super().__init__(unit, slot, blocks_per_unit)
        self.is_in_flight = False
        """The step that takes a pending checkpoint is out, so the one being planned finds it there."""
        self.is_shared = False
        """More than one sequence has reached the checkpoint."""
        self.is_superseded = False
        """A deeper checkpoint of the same path continues this one."""
        self.value = 0
        """Blocks of full attention that the checkpoint saves from being computed again."""


class Unit:
    """One unit of a buffer: free, or given to one kind of block."""

    __slots__ = ("blocks", "holes", "index", "kind", "live_blocks")

    def __init__(self, index: int) -> None:
        self.index = UnitId(index)
        self.kind: int | None = None
        self.blocks: list[Block] = []
        self.holes: list[Block] = []
        """Blocks that no sequence holds, taken from the end."""
        self.live_blocks = 0


class Node:
    """A named hash block of a prefix. `blocks[k]` is the device's block of kind k that holds it, if one does.

    `host_blocks[k]` is the host's.
    """

    __slots__ = ("blocks", "cached_child_count", "children", "depth", "hash", "host_blocks", "key", "parent")

    def __init__(self, key: BlockKey, parent: Node | None, no_blocks: tuple[None, ...]) -> None:
        """`no_blocks`: a None for every kind. All nodes that host memory holds nothing of share this tuple."""
        self.key = key
        self.hash = key.hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.blocks: list[Block | None] = list(no_blocks)
        self.host_blocks: Items[Block | None] = no_blocks
        self.cached_child_count = 0
        """Children whose full-attention block is on the device."""
        self.children: dict[int, Node] = {}

    def has_computed(self, kind: int) -> bool:
        """Whether the device has a computed block of `kind` here."""
        block = self.blocks[kind]
        return block is not None and not block.is_pending

    def is_pending(self, kinds: Iterable[int]) -> bool:
        """Whether a step that is planned or out computes a block of one of these kinds."""
        for kind in kinds:
            block = self.blocks[kind]
            if block is not None and block.is_pending:
                return True
        return False

    def has_host_block(self, kind: int) -> bool:
        """Whether the host has one."""
        return self.host_blocks[kind] is not None

    def has_block(self, kind: int) -> bool:
        """Whether the device or the host has one, or a step computes it."""
        return self.blocks[kind] is not None or self.has_host_block(kind)

    def is_held(self, kind: int) -> bool:
        """Whether a sequence holds the device's block of `kind`."""
        block = self.blocks[kind]
        return block is not None and block.ref_count > 0

    def is_cached(self, kind: int) -> bool:
        """Whether the device has a block of `kind` that no sequence holds."""
        block = self.blocks[kind]
        return block is not None and not block.ref_count

    def is_cached_on_host(self, kind: int) -> bool:
        """Whether the host has a block of `kind` that no step reads."""
        block = self.host_blocks[kind]
        return block is not None and not block.ref_count

    # ------------------------------------------------------------------ states, the last kind of models that have any

    @property
    def checkpoint(self) -> StateBlock | None:
        """The device's state after this prefix."""
        block = self.blocks[-1]
        return block if isinstance(block, StateBlock) else None

    def can_resume(self) -> bool:
        """Whether the step being planned finds a state here: computed, or by a step that is out."""
        checkpoint = self.checkpoint
        return checkpoint is not None and (checkpoint.is_in_flight or not checkpoint.is_pending)

    def has_superseded_state(self) -> bool:
        """Whether no sequence holds the state here, and a deeper state continues it."""
        block = self.blocks[-1] or self.host_blocks[-1]
        return isinstance(block, StateBlock) and block.is_superseded and not block.ref_count

    def count_saved_blocks(self, blocks_per_state: int) -> int | None:
        """Blocks that the state here saves over the one before it; None where none is.

        One that is superseded counts where so many blocks hang from it as have the room of a state.
        """
        if not self.has_block(-1):
            return None
        ancestor = self.parent
        while ancestor is not None and (
            not ancestor.has_block(-1)
            or (self.depth - ancestor.depth < blocks_per_state and ancestor.has_superseded_state())
        ):
            ancestor = ancestor.parent
        return self.depth - (-1 if ancestor is None else ancestor.depth)
