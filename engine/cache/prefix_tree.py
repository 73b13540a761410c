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

from collections.abc import Collection, Sequence

from engine.cache.blocks import Node
from engine.cache.event_log import EventLog
from engine.cache.lru_eviction import LruEviction
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import BlockKey


class PrefixTree:
    """Finds cached prefixes. `DeviceTier` and `HostTier` keep the blocks at its nodes, and log their changes here."""

    def __init__(self, spec: CacheSpec, eviction: LruEviction) -> None:
        """Make an empty tree. `eviction`: orders of eviction, which are told of changes of the tree."""
        self._node_by_hash: dict[int, Node] = {}
        self._no_blocks: tuple[None, ...] = (None,) * len(spec.blocks_per_unit_by_kind())
        self._device_order = eviction.device_order
        self._host_order = eviction.host_order
        self.event_log = EventLog(spec)

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

    def clear(self) -> list[Node]:
        """Empty the prefix tree, announce that, and return the nodes that it had. The caller frees their blocks."""
        nodes = list(self._node_by_hash.values())
        self._node_by_hash.clear()
        self._device_order.clear()
        self._host_order.clear()
        self.event_log.record_cleared()
        return nodes

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
