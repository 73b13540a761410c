"""Names of prefixes: what a hash block is called, and its place in the prefix tree.

Refuses to know the tree and the log of events, which both use them. Invariant: the name, hash and parent of a node
never change, so the publisher's thread may read them while the step's thread goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.pool import Block


class BlockKey:
    """One hash block of some prefix: what it is called, whether or not anything holds it."""

    __slots__ = ("extra_keys", "hash", "lora_name", "packed")

    def __init__(self, hash_: int, packed: bytes, extra_keys: tuple[str, ...] | None, lora_name: str | None) -> None:
        self.hash = hash_
        self.packed = packed
        """Its token ids, as `events.pack_token_ids` writes them: one object, where a tuple of ints is one for each."""
        self.extra_keys = extra_keys
        self.lora_name = lora_name

    def equals(self, other: BlockKey) -> bool:
        """Whether tokens and keys are equal; the hash alone proves nothing."""
        return self is other or (
            self.packed == other.packed and self.extra_keys == other.extra_keys and self.lora_name == other.lora_name
        )


class Node:
    """A named hash block of a prefix. `blocks[k]` is the device's block of kind k that holds it, if one does.

    `host[k]` is the host's; None where the host has none of any kind.
    """

    __slots__ = ("blocks", "branches", "children", "depth", "hash", "host", "name", "parent")

    def __init__(self, name: BlockKey, parent: Node | None, kinds: int) -> None:
        self.name = name
        self.hash = name.hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.blocks: list[Block[Node] | None] = [None] * kinds
        self.host: list[Block[Node] | None] | None = None
        self.branches = 0
        """Children whose full-attention block is on the device."""
        self.children: dict[int, Node] = {}

    def has(self, kind: int) -> bool:
        """Whether the device has a computed block of `kind` here."""
        block = self.blocks[kind]
        return block is not None and not block.pending

    def is_coming(self, kinds: Iterable[int]) -> bool:
        """Whether a step that is planned or out computes a block of one of these kinds."""
        for kind in kinds:
            block = self.blocks[kind]
            if block is not None and block.pending:
                return True
        return False

    def resumes(self, kind: int) -> bool:
        """Whether the step being planned finds a state here: computed, or by a step that is out."""
        block = self.blocks[kind]
        return block is not None and (block.out or not block.pending)

    def on_host(self, kind: int) -> bool:
        """Whether the host has one."""
        return self.host is not None and self.host[kind] is not None

    def holds(self, kind: int) -> bool:
        """Whether the device or the host has one, or a step computes it."""
        return self.blocks[kind] is not None or self.on_host(kind)

    def saved(self, room: int) -> int | None:
        """Blocks that the state here saves over the one before it; None where none is.

        One that is superseded counts where so many blocks hang from it as a state takes the `room` of.
        """
        if not self.holds(-1):
            return None
        before = self.parent
        while before is not None and (
            not before.holds(-1) or (self.depth - before.depth < room and before._superseded())
        ):
            before = before.parent
        return self.depth - (-1 if before is None else before.depth)

    def _superseded(self) -> bool:
        block = self.blocks[-1] or (None if self.host is None else self.host[-1])
        return block is not None and block.superseded and not block.refs
