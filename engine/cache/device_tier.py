"""Device memory: the blocks that steps compute and read, each at a node of the prefix tree.

A block enters the tree when a step that computes it is planned (`attach`), and is announced once it is computed
(`commit`). When memory is needed, cached blocks leave the tree (`evict`), and host memory may keep their contents.
"""

from __future__ import annotations

from engine.cache.blocks import Block, Node
from engine.cache.event_log import Action
from engine.cache.host_tier import HostTier
from engine.cache.lru_eviction import LruOrder
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree
from engine.cache.spec import FULL_KIND, CacheSpec


class DeviceTier:
    """Owns the blocks of device memory, and keeps cached ones at the nodes of the prefix tree."""

    def __init__(
        self, unit_count: int, spec: CacheSpec, tree: PrefixTree, order: LruOrder, host_tier: HostTier
    ) -> None:
        """Make an empty device memory of `unit_count` units of equal size. A unit holds several blocks of one kind.

        `order`: decides which cached block is evicted next. `host_tier`: host memory, to which evicted blocks move.
        """
        self.pool = UnitPool(unit_count, spec, order, self.evict)
        self._tree = tree
        self._order = order
        self._host_tier = host_tier

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
        self._tree.event_log.record(Action.STORED, kind, node)
        self._host_tier.discard_duplicate(block)

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
            self._host_tier.demote(victim, keep_on_host=keep_on_host)
            self._unlink(victim)
            self.pool.drop(victim)
            self._order.mark_evicted(node, kind)

    def detach(self, block: Block) -> None:
        """Take a computed state out of the tree, and leave its memory to the sequence that holds it."""
        assert block.kind != FULL_KIND
        assert not block.is_pending
        self._host_tier.demote(block, keep_on_host=True)
        self._unlink(block)

    def _unlink(self, block: Block) -> None:
        """Take a block out of its node, and the node out of the tree if it has no other block."""
        node = block.node
        assert node is not None
        node.blocks[block.kind] = None
        if block.kind == FULL_KIND and node.parent is not None:
            node.parent.cached_child_count -= 1
        block.node = None
        self._tree.remove_if_empty(node)


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
