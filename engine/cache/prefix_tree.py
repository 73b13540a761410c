"""The prefix tree: what the cached blocks mean, and what the world has been told about them.

A **node** is one hash block of a prefix: token ids, keys, hash, and the node before it. It names at most one block of
every kind on the device, and one in host memory; it lives while it names any. A node is found by its hash **and**
checked against its token ids, keys and parent (by induction the whole prefix), so a hash collision is a miss and never
another request's KV.

Owns names and parent links. Refuses to know reference counts and sequences (the pool and `KVCache` do).

Invariants: hash <-> node is a bijection; a node's group-0 block is on the device whenever the node names anything there
or has children that do (prefix closure), and on either whenever the node is there at all; a block is announced once its
content is computed, after its parent, and taken back before its parent; Stored and Removed of one (group, hash, medium)
alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine.cache.adaptive_eviction import AdaptiveEviction
from engine.cache.event_log import EventLog
from engine.cache.nodes import BlockKey, Node
from engine.cache.pool import Block
from engine.cache.spec import CacheSpec

FULL_KIND = 0
"""The kind of the full-attention group: the one whose chain of blocks carries everything else."""


class DeviceEvictionOrder:
    """Eviction order of the device's blocks. `blocks_per_state`: attention blocks in the room of a state."""

    def __init__(self, order: AdaptiveEviction[Node], blocks_per_state: int) -> None:
        self._order = order
        self._blocks_per_state = blocks_per_state

    def mark_cached(self, block: Block[Node]) -> None:
        assert block.node is not None
        if block.kind == FULL_KIND:
            self._order.mark_cached(block.node)
        elif block.is_superseded:
            assert block.state_value is not None
            self._order.add_superseded_state(block.node, block.state_value / self._blocks_per_state)

    def mark_used(self, block: Block[Node]) -> None:
        assert block.node is not None
        if block.kind == FULL_KIND:
            self._order.mark_used(block.node)
        else:
            self._order.mark_state_used(block.node)

    def select_victim(self) -> Block[Node] | None:
        node = self._order.select_state_victim()
        if node is not None:
            return node.blocks[-1]
        node = self._order.select_victim()
        return None if node is None else node.blocks[FULL_KIND]


class HostEvictionOrder:
    """Eviction order of the blocks in host memory."""

    def __init__(self, order: AdaptiveEviction[Node], blocks_per_state: int) -> None:
        self._order = order
        self._blocks_per_state = blocks_per_state

    def mark_cached(self, block: Block[Node]) -> None:
        node = block.node
        assert node is not None
        if block.kind != FULL_KIND:
            assert block.state_value is not None
            if block.is_superseded or node.blocks[FULL_KIND] is not None:
                self._order.add_superseded_host_state(node, block.state_value / self._blocks_per_state)
        elif not node.children:
            self._order.add_host_leaf(node)

    def mark_used(self, block: Block[Node]) -> None:
        assert block.node is not None
        if block.kind == FULL_KIND:
            self._order.remove_host_leaf(block.node, None)
        else:
            self._order.mark_state_used(block.node)

    def select_victim(self) -> Block[Node] | None:
        node = self._order.select_host_state_victim()
        if node is not None and node.host_blocks is not None:
            return node.host_blocks[-1]
        node = self._order.select_host_victim()
        return None if node is None or node.host_blocks is None else node.host_blocks[FULL_KIND]


class LowerTier(Protocol):
    """Memory that takes what the device evicts."""

    def demote(self, block: Block[Node], *, keep_on_host: bool) -> None: ...
    def discard_duplicate(self, block: Block[Node]) -> None: ...
    def handle_child_added(self, node: Node) -> None: ...
    def handle_node_removed(self, node: Node) -> None: ...
    def clear(self) -> None: ...


class PrefixTree:
    """Nodes by hash. `drop` gives a block that is no longer named back to the pool."""

    def __init__(
        self, spec: CacheSpec, drop: Callable[[Block[Node]], None], eviction_order: AdaptiveEviction[Node] | None = None
    ) -> None:
        self._node_by_hash: dict[int, Node] = {}
        self._kind_count = len(spec.groups) + (spec.state is not None)
        self._return_to_pool = drop
        self._eviction_order = eviction_order
        self.host_tier: LowerTier | None = None
        """Takes what the device evicts."""
        self.event_log = EventLog(spec)

    def __len__(self) -> int:
        return len(self._node_by_hash)

    def __contains__(self, node: Node) -> bool:
        return self._node_by_hash.get(node.hash) is node

    def nodes(self) -> Iterable[Node]:
        """Every node, parents before children."""
        return self._node_by_hash.values()

    def find(self, key: BlockKey, parent: Node | None) -> Node | None:
        """The node of that name below `parent`, verified: equal hash, tokens, keys and parent."""
        node = self._node_by_hash.get(key.hash)
        if node is None or node.parent is not parent:
            return None
        return node if node.key.equals(key) else None

    def extend_match(self, keys: Sequence[BlockKey], nodes: list[Node]) -> None:
        """Make `nodes` the longest chain for `keys`, with those that the step being planned will compute.

        `nodes` is what an earlier call found for the same keys, or empty: only what changed since is looked at. A node
        that is still here has all those before it.
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
        """The node of that name below `parent`, made if need be. None when its hash belongs to another prefix."""
        if key.hash in self._node_by_hash:
            return self.find(key, parent)
        node = self._node_by_hash[key.hash] = Node(key, parent, self._kind_count)
        if parent is not None:
            parent.children[node.hash] = node
            if self.host_tier is not None:
                self.host_tier.handle_child_added(parent)
        return node

    def attach(self, node: Node, block: Block[Node]) -> None:
        """Name a block whose content this step computes. It can be shared at once and is announced by `commit`."""
        kind = block.kind
        assert node.blocks[kind] is None
        assert block.node is None
        node.blocks[kind] = block
        block.node = node
        block.is_pending, block.is_in_flight, block.is_shared = True, False, False
        if kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count += 1

    def commit(self, block: Block[Node]) -> None:
        """The content is there: announce it."""
        assert block.is_pending
        assert block.node is not None
        assert block.kind == FULL_KIND or block.node.has_computed(FULL_KIND), "announced before its prefix"
        assert block.node.parent is None or block.node.parent.has_computed(FULL_KIND), "announced before its parent"
        block.is_pending = False
        self.event_log.record_stored(block.kind, block.node)
        if self.host_tier is not None:
            self.host_tier.discard_duplicate(block)

    def detach_pending(self, block: Block[Node]) -> None:
        """Unname a pending block: its content never came. Children go first."""
        assert block.is_pending
        block.is_pending = False
        self._unlink(block)

    def evict(self, block: Block[Node], *, keep_on_host: bool = True) -> None:
        """Evict a cached block, and with a full-attention block everything that hangs from it, leaves first.

        Host memory, where there is any, takes it in with `keep_on_host`.
        """
        assert block.node is not None
        victims = [block]
        if block.kind == FULL_KIND:
            subtree, host_tier = [block.node], self.host_tier
            for node in subtree:  # grows while it is walked: breadth first, so reversed it is leaves first
                children = node.children.values()
                subtree.extend(
                    children if host_tier is None else [c for c in children if c.blocks[FULL_KIND] is not None]
                )
            victims = [
                b
                for node in reversed(subtree)
                for b in (*node.blocks[FULL_KIND + 1 :], node.blocks[FULL_KIND])
                if b is not None
            ]
        for victim in victims:
            assert victim.node is not None
            assert not victim.is_pending
            node = victim.node
            if self.host_tier is None:
                self.event_log.record_removed(victim.kind, node)
            else:
                self.host_tier.demote(victim, keep_on_host=keep_on_host)
            kind = victim.kind
            self._unlink(victim)
            self._return_to_pool(victim)
            if self._eviction_order is not None and kind != FULL_KIND:
                self._eviction_order.mark_state_removed(node)
            elif self._eviction_order is not None:
                parent_block = None if node.parent is None else node.parent.blocks[FULL_KIND]
                self._eviction_order.remove_leaf(
                    node, node.parent if parent_block is not None and not parent_block.ref_count else None
                )

    def detach(self, block: Block[Node]) -> None:
        """Unname a computed block that nothing hangs from, a state or window block, and leave it to its holder."""
        assert block.kind != FULL_KIND
        assert block.node is not None
        assert not block.is_pending
        if self.host_tier is None:
            self.event_log.record_removed(block.kind, block.node)
        else:
            self.host_tier.demote(block, keep_on_host=True)
        self._unlink(block)

    def clear(self) -> list[Block[Node]]:
        """Forget every name. Returns the device's blocks that had one: the caller frees those that nobody holds."""
        if self.host_tier is not None:
            self.host_tier.clear()
        blocks = [b for node in self._node_by_hash.values() for b in node.blocks if b is not None]
        for block in blocks:
            block.node = None
            block.is_pending = False
        self._node_by_hash.clear()
        if self._eviction_order is not None:
            self._eviction_order.clear()
        self.event_log.record_cleared()
        return blocks

    def _unlink(self, block: Block[Node]) -> None:
        node = block.node
        assert node is not None
        node.blocks[block.kind] = None
        if block.kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count -= 1
        block.node = None
        if not any(node.blocks) and node.host_blocks is None:
            self.remove_node(node)

    def remove_node(self, node: Node) -> None:
        """It names nothing any more."""
        assert not node.children, "a node left before its children"
        del self._node_by_hash[node.hash]
        if node.parent is not None:
            del node.parent.children[node.hash]
        if self.host_tier is not None:
            self.host_tier.handle_node_removed(node)

    def check_invariants(self) -> None:
        if self._eviction_order is not None:
            device_nodes = [
                node
                for node in self._node_by_hash.values()
                if (full_block := node.blocks[FULL_KIND]) and not full_block.ref_count
            ]
            host_nodes = [
                n
                for n in self._node_by_hash.values()
                if n.host_blocks and (named_block := n.host_blocks[FULL_KIND]) and not named_block.ref_count
            ]
            self._eviction_order.check_invariants(device_nodes, [n for n in host_nodes if not n.children])
            self._eviction_order.check_states(
                {
                    node
                    for node in self._node_by_hash.values()
                    if (named_block := node.blocks[-1]) and not named_block.ref_count
                },
                {
                    node
                    for node in self._node_by_hash.values()
                    if node.host_blocks and (named_block := node.host_blocks[-1]) and not named_block.ref_count
                },
            )
        for hash_, node in self._node_by_hash.items():
            assert node.hash == hash_ == node.key.hash
            assert any(node.blocks) or any(node.host_blocks or ()), "a node that names nothing"
            full_block = node.blocks[FULL_KIND]
            assert full_block is not None or node.has_host_block(FULL_KIND), "prefix closure: no full-attention block"
            assert full_block is not None or not any(node.blocks), (
                "prefix closure: no full-attention block on the device"
            )
            if node.parent is not None:
                assert self._node_by_hash.get(node.parent.hash) is node.parent
                assert node.parent.children.get(hash_) is node
            if node.parent is not None and full_block is not None:
                parent_block = node.parent.blocks[FULL_KIND]
                assert parent_block is not None
                assert full_block.is_pending or not parent_block.is_pending
                assert parent_block.ref_count > 0 or full_block.ref_count == 0, (
                    "prefix closure: a live block below a cached one"
                )
            for kind, block in enumerate(node.blocks):
                if block is not None:
                    assert block.node is node
                    assert block.kind == kind
                    assert not block.is_pending or block.ref_count > 0
            assert all(child.parent is node for child in node.children.values())
