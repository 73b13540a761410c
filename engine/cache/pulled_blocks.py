"""Blocks that are pulled from another engine into this cache, between steps.

Owns no blocks: it allocates and releases blocks of the pool, and registers them in the prefix tree, for
`engine.transfer`. Only while no step is in flight, except for `list_keys`.
"""

from __future__ import annotations

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import Block, BlockKey, Node, StateBlock
from engine.cache.host_tier import HostTier
from engine.cache.pool import UnitPool
from engine.cache.prefix_matcher import PrefixMatcher
from engine.cache.prefix_tree import PrefixTree
from engine.cache.spec import FULL_KIND
from engine.cache.state_checkpoints import NoStates, StateCheckpoints
from engine.types import BlockCopy, Sequence


class PulledBlocks:
    """Gives memory to blocks that are pulled from a peer, and puts them into the prefix tree once they are filled."""

    def __init__(
        self,
        pool: UnitPool,
        tree: PrefixTree,
        states: StateCheckpoints | NoStates,
        host_tier: HostTier,
        matcher: PrefixMatcher,
        hasher: BlockHasher,
        block_copies: list[BlockCopy],
    ) -> None:
        """Take the parts of the cache that pulled blocks change.

        `block_copies`: copies that wait for the next step. A pull writes to the same memory before that step, so it
        takes these copies (`take_copies`) and does them first.
        """
        self._pool = pool
        self._tree = tree
        self._states = states
        self._host_tier = host_tier
        self._matcher = matcher
        self._hasher = hasher
        self._block_copies = block_copies

    def list_keys(self, seq: Sequence) -> list[BlockKey]:
        """Return the keys of the blocks of `seq` that need not be computed if they are cached. `seq` is not queued."""
        keys = self._matcher.list_keys(seq)
        self._hasher.discard(seq)
        return keys

    def allocate(self, kind: int) -> Block | None:
        """Return a block with one reference; None if running sequences hold all memory."""
        return self._pool.allocate(kind)

    def take_copies(self) -> list[BlockCopy]:
        """Take the copies that wait for the next step. The caller does them at once, in order."""
        block_copies = self._block_copies.copy()
        self._block_copies.clear()
        return block_copies

    def name(self, block: Block, key: BlockKey, parent: Node | None) -> Node | None:
        """Put a filled block into the prefix tree, announce it, and return its node.

        Returns None, with nothing done, if the parent was evicted meanwhile, or if the tree has such a block already.
        The parent of a full-attention block is held until `release`, so that it is not evicted before the child.
        """
        if parent is not None and (parent not in self._tree or not parent.has_computed(FULL_KIND)):
            return None
        node = self._tree.get_or_create(key, parent)
        if node is None or node.blocks[block.kind] is not None:
            return None
        if block.kind != FULL_KIND and not node.has_computed(FULL_KIND):
            self._tree.remove_if_empty(node)
            return None
        if block.kind == FULL_KIND and parent is not None:
            self._pool.acquire(_full_block(parent))
        self._tree.attach(node, block)
        self._tree.commit(block)
        return node

    def release(self, block: Block) -> None:
        """Give up the references of `allocate` and `name`. A block in the tree becomes cached. Children go first."""
        node = block.node
        if isinstance(block, StateBlock) and node is not None:
            self._states.release_new_checkpoint(block)
        else:
            self._pool.release(block)
        if node is not None and node.parent is not None and block.kind == FULL_KIND:
            self._pool.release(_full_block(node.parent))


def _full_block(node: Node) -> Block:
    """Return the device's full-attention block of a node that has one."""
    block = node.blocks[FULL_KIND]
    assert block is not None
    return block
