"""The prefix tree: what the cached blocks mean, and what the world has been told about them.

A **node** is one hash block of a prefix: token ids, keys, hash, and the node before it. It names at most one block of
every kind; it lives while it names any. A node is found by its hash **and** checked against its token ids, keys and
parent (by induction the whole prefix), so a hash collision is a miss and never another request's KV.

Owns names, parent links and the event log. Refuses to know reference counts and sequences (the pool and `KVCache` do).

Invariants: hash <-> node is a bijection; a node's group-0 block is there whenever the node names anything or has
children (prefix closure); a block is announced once its content is computed, after its parent, and taken back before
its parent; Stored and Removed of one (group, hash) alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.cache.pool import Block
from engine.cache.spec import MAMBA, CacheSpec
from events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event

FULL = 0
"""The kind of the full-attention group: the one whose chain of blocks carries everything else."""


class HashBlock:
    """One hash block of some prefix: what it is called, whether or not anything holds it."""

    __slots__ = ("extra_keys", "hash", "lora_name", "token_ids")

    def __init__(
        self, hash_: int, token_ids: Sequence[int], extra_keys: tuple[str, ...] | None, lora_name: str | None
    ) -> None:
        self.hash = hash_
        self.token_ids = tuple(token_ids)
        self.extra_keys = extra_keys
        self.lora_name = lora_name

    def equals(self, other: HashBlock) -> bool:
        """Whether tokens and keys are equal; the hash alone proves nothing."""
        return self is other or (
            self.token_ids == other.token_ids
            and self.extra_keys == other.extra_keys
            and self.lora_name == other.lora_name
        )


class Node:
    """A named hash block of a prefix. `blocks[k]` is the block of kind k that holds it, if one does."""

    __slots__ = ("blocks", "children", "depth", "hash", "name", "parent")

    def __init__(self, name: HashBlock, parent: Node | None, kinds: int) -> None:
        self.name = name
        self.hash = name.hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.blocks: list[Block[Node] | None] = [None] * kinds
        self.children: dict[int, Node] = {}

    def has(self, kind: int) -> bool:
        """Whether a computed block of `kind` can be read here."""
        block = self.blocks[kind]
        return block is not None and not block.pending


class PrefixTree:
    """Nodes by hash. `drop` gives a block that is no longer named back to the pool."""

    def __init__(self, spec: CacheSpec, drop: Callable[[Block[Node]], None]) -> None:
        self._nodes: dict[int, Node] = {}
        self._kinds = len(spec.groups) + (spec.state is not None)
        self._drop = drop
        self._log = EventLog(spec)

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Iterable[Node]:
        """Every node, parents before children."""
        return self._nodes.values()

    def find(self, name: HashBlock, parent: Node | None) -> Node | None:
        """The node of that name below `parent`, verified: equal hash, tokens, keys and parent."""
        node = self._nodes.get(name.hash)
        if node is None or node.parent is not parent:
            return None
        return node if node.name.equals(name) else None

    def match(self, names: Sequence[HashBlock], nodes: list[Node]) -> None:
        """Make `nodes` the longest chain for `names`, with those that the step being planned will compute.

        `nodes` is what an earlier call found for the same names, or empty: only what changed since is looked at. A node
        that is still here has all those before it.
        """
        while nodes and self._nodes.get(nodes[-1].hash) is not nodes[-1]:
            nodes.pop()
        parent = nodes[-1] if nodes else None
        for index in range(len(nodes), len(names)):
            node = self.find(names[index], parent)
            if node is None:
                break
            nodes.append(node)
            parent = node

    def ensure(self, name: HashBlock, parent: Node | None) -> Node | None:
        """The node of that name below `parent`, made if need be. None when its hash belongs to another prefix."""
        node = self.find(name, parent)
        if node is None:
            if name.hash in self._nodes:
                return None
            node = self._nodes[name.hash] = Node(name, parent, self._kinds)
            if parent is not None:
                parent.children[node.hash] = node
        return node

    def attach(self, node: Node, block: Block[Node]) -> None:
        """Name a block whose content this step computes. It can be shared at once and is announced by `commit`."""
        assert node.blocks[block.kind] is None
        assert block.node is None
        node.blocks[block.kind] = block
        block.node = node
        block.pending = True

    def commit(self, block: Block[Node]) -> None:
        """The content is there: announce it."""
        assert block.pending
        assert block.node is not None
        assert block.kind == FULL or block.node.has(FULL), "announced before its prefix"
        assert block.node.parent is None or block.node.parent.has(FULL), "announced before its parent"
        block.pending = False
        self._log.stored(block.kind, block.node)

    def withdraw(self, block: Block[Node]) -> None:
        """Unname a pending block: its content never came. Children go first."""
        assert block.pending
        block.pending = False
        self._unname(block)

    def forget(self, block: Block[Node]) -> None:
        """Evict a cached block, and with a full-attention block everything that hangs from it, leaves first."""
        assert block.node is not None
        doomed = [block]
        if block.kind == FULL:
            below = [block.node]
            for node in below:  # grows while it is walked: breadth first, so reversed it is leaves first
                below.extend(node.children.values())
            doomed = [
                b for node in reversed(below) for b in (*node.blocks[FULL + 1 :], node.blocks[FULL]) if b is not None
            ]
        for victim in doomed:
            assert victim.node is not None
            assert not victim.pending
            self._log.removed(victim.kind, victim.node)
            self._unname(victim)
            self._drop(victim)

    def take(self, block: Block[Node]) -> None:
        """Unname a computed block that nothing hangs from, a state or window block, and leave it to its holder."""
        assert block.kind != FULL
        assert block.node is not None
        assert not block.pending
        self._log.removed(block.kind, block.node)
        self._unname(block)

    def clear(self) -> list[Block[Node]]:
        """Forget every name. Returns the blocks that had one: the caller frees those that nobody holds."""
        blocks = [b for node in self._nodes.values() for b in node.blocks if b is not None]
        for block in blocks:
            block.node = None
            block.pending = False
        self._nodes.clear()
        self._log.cleared()
        return blocks

    def take_events(self) -> list[Event]:
        return self._log.take()

    def _unname(self, block: Block[Node]) -> None:
        node = block.node
        assert node is not None
        node.blocks[block.kind] = None
        block.node = None
        if not any(node.blocks):
            assert not node.children, "a node left before its children"
            del self._nodes[node.hash]
            if node.parent is not None:
                del node.parent.children[node.hash]

    def check_invariants(self) -> None:
        for hash_, node in self._nodes.items():
            assert node.hash == hash_ == node.name.hash
            assert any(node.blocks), "a node that names nothing"
            full = node.blocks[FULL]
            assert full is not None, "prefix closure: no full-attention block"
            if node.parent is not None:
                assert self._nodes.get(node.parent.hash) is node.parent
                assert node.parent.children.get(hash_) is node
                parent_block = node.parent.blocks[FULL]
                assert parent_block is not None
                assert full.pending or not parent_block.pending
                assert parent_block.refs > 0 or full.refs == 0, "prefix closure: a live block below a cached one"
            for kind, block in enumerate(node.blocks):
                if block is not None:
                    assert block.node is node
                    assert block.kind == kind
                    assert not block.pending or block.refs > 0
            assert all(child.parent is node for child in node.children.values())


class EventLog:
    """Events in the order they happened, neighbours of a chain joined, until somebody takes them."""

    def __init__(self, spec: CacheSpec) -> None:
        self._block_size = spec.block_size
        kinds = [(g.kind, g.sliding_window) for g in spec.groups]
        if spec.state is not None:
            kinds.append((MAMBA, None))
        self._kinds = kinds
        self._joined = [kind != MAMBA for kind, _ in kinds]
        """Whether blocks of a chain go into one event."""
        self._entries: list[tuple[bool, int, list[Node]] | None] = []  # (stored?, kind, nodes); None: all cleared

    def stored(self, kind: int, node: Node) -> None:
        entries = self._entries
        if entries and self._joined[kind] and (last := entries[-1]) and last[0] and last[1] == kind:
            nodes = last[2]
            if nodes[-1] is node.parent:
                nodes.append(node)
                return
        entries.append((True, kind, [node]))

    def removed(self, kind: int, node: Node) -> None:
        last = self._entries[-1] if self._entries else None
        if last and not last[0] and last[1] == kind:
            last[2].append(node)
        else:
            self._entries.append((False, kind, [node]))

    def cleared(self) -> None:
        self._entries.append(None)

    def take(self) -> list[Event]:
        entries, self._entries = self._entries, []
        return [self._event(entry) for entry in entries]

    def _event(self, entry: tuple[bool, int, list[Node]] | None) -> Event:
        if entry is None:
            return AllBlocksCleared()
        stored, kind, nodes = entry
        hashes: list[int | bytes] = [node.hash for node in nodes]  # this runs on the step's thread: few operations
        if not stored:
            return BlockRemoved(block_hashes=hashes, medium=GPU, group_idx=kind)
        first, (kind_name, window) = nodes[0], self._kinds[kind]
        token_ids: list[int] = []
        for node in nodes:
            token_ids += node.name.token_ids
        assert len(token_ids) == len(hashes) * self._block_size
        return BlockStored(
            hashes,
            None if first.parent is None else first.parent.hash,
            token_ids,
            self._block_size,
            None,  # lora_id
            GPU,
            first.name.lora_name,
            [node.name.extra_keys for node in nodes],
            kind,
            kind_name,
            window,
        )
