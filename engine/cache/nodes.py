"""Names of prefixes: what a hash block is called, and its place in the prefix tree.

Refuses to know the tree and the log of events, which both use them. Invariant: the name, hash and parent of a node
never change, so the publisher's thread may read them while the step's thread goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.pool import Block


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


class Node:
    """A named hash block of a prefix. `blocks[k]` is the device's block of kind k that holds it, if one does.

    `host_blocks[k]` is the host's; None where the host has none of any kind.
    """

    __slots__ = ("blocks", "cached_child_count", "children", "depth", "hash", "host_blocks", "key", "parent")

    def __init__(self, key: BlockKey, parent: Node | None, kind_count: int) -> None:
        self.key = key
        self.hash = key.hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.blocks: list[Block[Node] | None] = [None] * kind_count
        self.host_blocks: list[Block[Node] | None] | None = None
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

    def can_resume(self, kind: int) -> bool:
        """Whether the step being planned finds a state here: computed, or by a step that is out."""
        block = self.blocks[kind]
        return block is not None and (block.is_in_flight or not block.is_pending)

    def has_host_block(self, kind: int) -> bool:
        """Whether the host has one."""
        return self.host_blocks is not None and self.host_blocks[kind] is not None

    def has_block(self, kind: int) -> bool:
        """Whether the device or the host has one, or a step computes it."""
        return self.blocks[kind] is not None or self.has_host_block(kind)

    def count_saved_blocks(self, blocks_per_state: int) -> int | None:
        """Blocks that the state here saves over the one before it; None where none is.

        One that is superseded counts where so many blocks hang from it as have the room of a state.
        """
        if not self.has_block(-1):
            return None
        ancestor = self.parent
        while ancestor is not None and (
            not ancestor.has_block(-1)
            or (self.depth - ancestor.depth < blocks_per_state and ancestor._has_superseded_state())
        ):
            ancestor = ancestor.parent
        return self.depth - (-1 if ancestor is None else ancestor.depth)

    def _has_superseded_state(self) -> bool:
        block = self.blocks[-1] or (None if self.host_blocks is None else self.host_blocks[-1])
        return block is not None and block.is_superseded and not block.ref_count
