"""The prefix tree: which prefix each cached block belongs to, and which blocks were announced.

A **node** is one block of a prefix: token ids, other keys, hash, and the node before it. It names at most one block of
every kind on the device, and one in host memory, and leaves the tree when it names none. A node is found by its hash
**and** checked against its token ids, keys and parent (by induction the whole prefix). So a hash collision is a miss,
and never another request's KV.

Owns names and parent links. Refuses to know reference counts and sequences (the pool and `KVCache` do).

Invariants: every hash has one node. If a node or its child names any block on the device, the node's group-0 block is
on the device, too (prefix closure). Every node has a group-0 block in one of the memories. A block is announced once
it is computed, after its parent, and its removal before its parent's. Stored and Removed of one (group, hash, medium)
alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from engine.cache.blocks import Block, BlockKey, Node
from engine.cache.event_log import EventLog
from engine.cache.eviction_order import LruEviction
from engine.cache.spec import FULL_KIND, CacheSpec


class LowerTier(Protocol):
    """Interface of host memory, which takes blocks that the device evicts."""

    def demote(self, block: Block, *, keep_on_host: bool) -> None:
        """Take a computed block of the device in, which is about to lose its name, and announce that."""

    def discard_duplicate(self, block: Block) -> None:
        """Drop the copy of a block that the device has computed now, unless a step reads the copy."""

    def forget_all(self) -> None:
        """Forget every name."""


class PrefixTree:
    """Finds cached prefixes, and names the blocks that hold them. Announces every change of what is cached."""

    def __init__(self, spec: CacheSpec, eviction: LruEviction, drop: Callable[[Block], None]) -> None:
        """`drop`: gives a block that is no longer named back to the pool."""
        self._node_by_hash: dict[int, Node] = {}
        self._no_blocks: tuple[None, ...] = (None,) * len(spec.blocks_per_unit_by_kind())
        self._device_order = eviction.device_order
        self._host_order = eviction.host_order
        self._return_to_pool = drop
        self.event_log = EventLog(spec)
        self.lower_tier: LowerTier
        """Set by `HostTier` before any block is named."""

    def __len__(self) -> int:
        return len(self._node_by_hash)

    def __contains__(self, node: Node) -> bool:
        return self._node_by_hash.get(node.hash) is node

    def nodes(self) -> Collection[Node]:
        """Return every node, parents before children."""
        return self._node_by_hash.values()

    def get(self, hash_: int) -> Node | None:
        """Return the node of a hash, unverified. Other threads may ask: the answer is that of some moment."""
        return self._node_by_hash.get(hash_)

    def find(self, key: BlockKey, parent: Node | None) -> Node | None:
        """Return the child of `parent` with this key; None if there is none.

        Two prefixes may have the same hash, so the tokens and the other parts of the key are compared, too.
        """
        node = self._node_by_hash.get(key.hash)
        if node is None or node.parent is not parent:
            return None
        return node if node.key.equals(key) else None

    def extend_match(self, keys: Sequence[BlockKey], nodes: list[Node]) -> None:
        """Change `nodes` in place to the nodes of the longest cached prefix of a prompt.

        `keys` are the names of the prompt's blocks, one after the other. `nodes` is the result of an earlier call for
        the same keys, or empty. Only its end is checked, since a node in the tree has all its ancestors.
        """
        while nodes and self._node_by_hash.get(nodes[-1].hash) is not nodes[-1]:
            nodes.pop()
        parent = nodes[-1] if nodes else None
        for index in range(len(nodes), len(keys)):
            node = self.find(keys[index], parent)
            if node is None:
                break
            nodes.append(node)
            parent = node

    def get_or_create(self, key: BlockKey, parent: Node | None) -> Node | None:
        """Return the child of `parent` with this key, made if need be; None if another prefix has the same hash."""
        if key.hash in self._node_by_hash:
            return self.find(key, parent)
        node = self._node_by_hash[key.hash] = Node(key, parent, self._no_blocks)
        if parent is not None:
            parent.children[node.hash] = node
            self._host_order.mark_child_added(parent)
        return node

    # ------------------------------------------------------------------ blocks of the device

    def attach(self, node: Node, block: Block) -> None:
        """Name a block that the step being planned computes: the node stands for the prefix that ends with it.

        From now on requests that are admitted share the block. It is pending until `commit` announces it.
        """
        kind = block.kind
        assert node.blocks[kind] is None
        assert block.node is None
        node.blocks[kind] = block
        block.node = node
        block.is_pending = True
        if kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count += 1

    def commit(self, block: Block) -> None:
        """Announce a pending block, which is computed now."""
        node, kind = block.node, block.kind
        assert block.is_pending
        assert node is not None
        assert kind == FULL_KIND or node.has_computed(FULL_KIND), "announced before its prefix"
        assert node.parent is None or node.parent.has_computed(FULL_KIND), "announced before its parent"
        block.is_pending = False
        self.event_log.record_stored(kind, node)
        self.lower_tier.discard_duplicate(block)

    def detach_pending(self, block: Block) -> None:
        """Take the name of a pending block, which was not computed. Children go first."""
        assert block.is_pending
        block.is_pending = False
        self._unlink(block)

    def evict(self, block: Block, *, keep_on_host: bool = True) -> None:
        """Evict a cached block from the device.

        A full-attention block takes its descendants with it, leaves first, because a prefix must stay whole.
        `keep_on_host`: copy the blocks to host memory, if there is any.
        """
        root = block.node
        assert root is not None
        victims = [block] if block.kind != FULL_KIND else list_blocks_leaves_first(root)
        for victim in victims:
            node, kind = victim.node, victim.kind
            assert node is not None
            assert not victim.is_pending
            self.lower_tier.demote(victim, keep_on_host=keep_on_host)
            self._unlink(victim)
            self._return_to_pool(victim)
            self._device_order.mark_evicted(node, kind)

    def detach(self, block: Block) -> None:
        """Take the name of a computed state or window block, and leave its memory to the sequence that holds it."""
        assert block.kind != FULL_KIND
        assert not block.is_pending
        self.lower_tier.demote(block, keep_on_host=True)
        self._unlink(block)

    def clear(self) -> list[Block]:
        """Forget every name in both memories. Returns the device's blocks that had one; the caller frees those in no
        use.
        """
        self.lower_tier.forget_all()
        blocks = [b for node in self._node_by_hash.values() for b in node.blocks if b is not None]
        for block in blocks:
            block.node = None
            block.is_pending = False
        self._node_by_hash.clear()
        self._device_order.clear()
        self._host_order.clear()
        self.event_log.record_cleared()
        return blocks

    def _unlink(self, block: Block) -> None:
        node = block.node
        assert node is not None
        node.blocks[block.kind] = None
        if block.kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count -= 1
        block.node = None
        self.remove_if_empty(node)

    # ------------------------------------------------------------------ blocks of the host

    def attach_host(self, node: Node, block: Block) -> None:
        """Name a block of the host that a step copies from the device."""
        host_blocks = list(node.host_blocks)
        host_blocks[block.kind] = block
        node.host_blocks = host_blocks
        block.node = node

    def detach_host(self, block: Block) -> None:
        """Take the name of a block of the host, and announce that. The caller calls `remove_if_empty`."""
        node, kind = block.node, block.kind
        assert node is not None
        self.event_log.record_host_removed(kind, node)
        host_blocks = [None if k == kind else b for k, b in enumerate(node.host_blocks)]
        node.host_blocks = host_blocks if any(host_blocks) else self._no_blocks
        block.node = None

    def clear_host(self) -> list[Block]:
        """Forget every name of the host without announcing it. Returns the host's blocks that had one."""
        blocks = []
        for node in self._node_by_hash.values():
            blocks += [block for block in node.host_blocks if block is not None]
            node.host_blocks = self._no_blocks
        for block in blocks:
            block.node = None
        return blocks

    def remove_if_empty(self, node: Node) -> None:
        """Remove a node that names no block in either memory."""
        if any(node.blocks) or any(node.host_blocks):
            return
        assert not node.children, "a node left before its children"
        del self._node_by_hash[node.hash]
        if node.parent is not None:
            del node.parent.children[node.hash]
        self._host_order.mark_node_removed(node)

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        """Assert that nodes, their blocks and the eviction orders agree.

        Every node has a block in at least one memory, and so has every node above it. A block that a sequence holds
        has only held blocks above it, and a computed block has only computed ones above it.
        """
        self._device_order.check_nodes(self.nodes())
        self._host_order.check_nodes(self.nodes())
        for hash_, node in self._node_by_hash.items():
            assert node.hash == hash_ == node.key.hash, "a node under another hash"
            assert all(child.parent is node for child in node.children.values()), "a child of another parent"
            _check_blocks(node)
            if node.parent is not None:
                assert self._node_by_hash.get(node.parent.hash) is node.parent, "a parent outside the tree"
                assert node.parent.children.get(hash_) is node, "a node that its parent does not know"
                _check_parent_block(node, node.parent)


def _check_blocks(node: Node) -> None:
    """Assert that a node has a full-attention block, and that its blocks on the device are its own."""
    full_block = node.blocks[FULL_KIND]
    assert any(node.blocks) or any(node.host_blocks), "a node without blocks"
    assert full_block is not None or node.has_host_block(FULL_KIND), "no full-attention block"
    assert full_block is not None or not any(node.blocks), "no full-attention block on the device, but others"
    for kind, block in enumerate(node.blocks):
        if block is not None:
            assert block.node is node, "a block of another node"
            assert block.kind == kind, "a block of another kind"
            assert not block.is_pending or block.ref_count > 0, "a block that no sequence computes"


def _check_parent_block(node: Node, parent: Node) -> None:
    """Assert that the block above a node's block on the device is there, as much computed and as much in use."""
    block, parent_block = node.blocks[FULL_KIND], parent.blocks[FULL_KIND]
    if block is None:
        return
    assert parent_block is not None, "a block below none"
    assert block.is_pending or not parent_block.is_pending, "a computed block below one that is not"
    assert parent_block.ref_count > 0 or block.ref_count == 0, "a block in use below one that is not"


def list_subtree(root: Node) -> list[Node]:
    """Return a node and all its descendants, breadth first; in reverse, leaves come first."""
    subtree = [root]
    for node in subtree:  # grows while it is walked
        subtree.extend(node.children.values())
    return subtree


def list_blocks_leaves_first(root: Node) -> list[Block]:
    """Return the device's blocks of a node and of its descendants, leaves first.

    Of one node, the full-attention block comes last, because the others must not outlive it.
    """
    subtree = [root]
    for node in subtree:  # grows while it is walked
        subtree.extend(child for child in node.children.values() if child.blocks[FULL_KIND] is not None)
    blocks: list[Block | None] = []
    for node in reversed(subtree):
        blocks += [*node.blocks[FULL_KIND + 1 :], node.blocks[FULL_KIND]]
    return [block for block in blocks if block is not None]
