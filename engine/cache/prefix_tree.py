"""The prefix tree: which prefix each cached block belongs to, and which blocks were announced.

A **node** is one block of a prefix: token ids, other keys, hash, and the node before it. It has at most one memory
block of every kind on the device, and one in host memory, and leaves the tree when it has none. A node is found by its
hash, and then its token ids, keys and parent are compared. So a hash collision is a miss, and never another request's
KV.

Invariants: every hash has one node. If a node or its child has any block on the device, the node's full-attention block
is on the device, too. Every node has a full-attention block in one of the memories. A block is announced once it is
computed, after its parent, and its removal before its parent's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from engine.cache.blocks import Block, Node
from engine.cache.event_log import EventLog
from engine.cache.lru_eviction import LruEviction
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import BlockKey


class LowerTier(Protocol):
    """Interface of host memory, which takes blocks that the device evicts."""

    def demote(self, block: Block, *, keep_on_host: bool) -> None:
        """Take over a computed block that the device is about to evict, and announce that."""

    def discard_duplicate(self, block: Block) -> None:
        """Drop the copy of a block that the device has computed now, unless a step reads the copy."""


class ClearedBlocks(NamedTuple):
    """Blocks that a tree had before it was emptied."""

    on_device: list[Block]
    on_host: list[Block]


class PrefixTree:
    """Finds cached prefixes and the blocks that hold them. Announces every change of the cached blocks."""

    def __init__(self, spec: CacheSpec, eviction: LruEviction, drop: Callable[[Block], None]) -> None:
        """Make an empty tree. `eviction`: orders of eviction, which are told of changes of the tree.

        `drop`: gives a block that left the tree back to the pool.
        """
        self._node_by_hash: dict[int, Node] = {}
        self._no_blocks: tuple[None, ...] = (None,) * len(spec.blocks_per_unit_by_kind())
        self._device_order = eviction.device_order
        self._host_order = eviction.host_order
        self._return_to_pool = drop
        self.event_log = EventLog(spec)
        self.host_tier: LowerTier
        """Set by `HostTier` before any block is attached."""

    def __len__(self) -> int:
        return len(self._node_by_hash)

    def __contains__(self, node: Node) -> bool:
        return self._node_by_hash.get(node.hash) is node

    def nodes(self) -> Collection[Node]:
        """Return every node, parents before children."""
        return self._node_by_hash.values()

    def get(self, hash_: int) -> Node | None:
        """Return the node of a hash, without comparing tokens. Safe on other threads; the result may be outdated."""
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
        """Find the longest cached prefix of a prompt: change `nodes` to its nodes, one for each block.

        `keys`: the keys of the prompt's blocks, in order. `nodes`: the result of an earlier call for the same keys, or
        empty. Only the end of the list changes, because a node leaves the tree before its ancestors.
        """
        while nodes and nodes[-1] not in self:
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

    def attach(self, node: Node, block: Block) -> None:
        """Put a block that the step being planned computes into the tree, at the node of its prefix.

        Requests that are admitted from now on share the block. It is pending until `commit` announces it.
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
        self.host_tier.discard_duplicate(block)

    def evict(self, block: Block, *, keep_on_host: bool = True) -> None:
        """Evict a cached block from the device, and give its memory back to the pool.

        With a full-attention block, the blocks after it in the tree are evicted, too, leaves first: without the block,
        no prompt can use them. `keep_on_host`: copy the blocks to host memory, if there is any.
        """
        victims = [block]
        if block.kind == FULL_KIND:
            assert block.node is not None
            victims = list_blocks_leaves_first(block.node)
        for victim in victims:
            node, kind = victim.node, victim.kind
            assert node is not None
            assert not victim.is_pending
            self.host_tier.demote(victim, keep_on_host=keep_on_host)
            self._unlink(victim)
            self._return_to_pool(victim)
            self._device_order.mark_evicted(node, kind)

    def detach(self, block: Block) -> None:
        """Take a computed state out of the tree, and leave its memory to the sequence that holds it."""
        assert block.kind != FULL_KIND
        assert not block.is_pending
        self.host_tier.demote(block, keep_on_host=True)
        self._unlink(block)

    def clear(self) -> ClearedBlocks:
        """Empty the prefix tree, and return the blocks that it had. The caller frees those that no sequence holds."""
        nodes = self._node_by_hash.values()
        blocks = ClearedBlocks(
            on_device=[block for node in nodes for block in node.blocks if block is not None],
            on_host=[block for node in nodes for block in node.host_blocks if block is not None],
        )
        for block in chain(blocks.on_device, blocks.on_host):
            block.node = None
            block.is_pending = False
        self._node_by_hash.clear()
        self._device_order.clear()
        self._host_order.clear()
        self.event_log.record_cleared()
        return blocks

    def _unlink(self, block: Block) -> None:
        """Take a block of the device out of its node, and the node out of the tree if it has no other block."""
        node = block.node
        assert node is not None
        node.blocks[block.kind] = None
        if block.kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count -= 1
        block.node = None
        self.remove_if_empty(node)

    def attach_host(self, node: Node, block: Block) -> None:
        """Add a host block, to which a step copies the device's block, to a node."""
        node.host_blocks[block.kind] = block
        block.node = node

    def detach_host(self, block: Block) -> None:
        """Take a host block out of the tree, and announce its removal. The node may be left without blocks."""
        node, kind = block.node, block.kind
        assert node is not None
        self.event_log.record_host_removed(kind, node)
        node.host_blocks[kind] = None
        block.node = None

    def remove_if_empty(self, node: Node) -> None:
        """Remove a node that has no block in either memory."""
        if any(node.blocks) or any(node.host_blocks):
            return
        assert not node.children, "a node left before its children"
        del self._node_by_hash[node.hash]
        if node.parent is not None:
            del node.parent.children[node.hash]

    def check_invariants(self) -> None:
        """Assert that the prefix tree's nodes, their blocks and the eviction orders agree.

        Every node has a block in device or host memory. The parent of a block that a sequence holds is held, and the
        parent of a computed block is computed.
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
    """Assert that a full-attention block on the device has a parent block there, computed and held if the block is."""
    block, parent_block = node.blocks[FULL_KIND], parent.blocks[FULL_KIND]
    if block is None:
        return
    assert parent_block is not None, "a block without its parent"
    assert block.is_pending or not parent_block.is_pending, "a computed block after a pending one"
    assert parent_block.ref_count > 0 or block.ref_count == 0, "a held block after one that no sequence holds"


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
