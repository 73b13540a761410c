"""Host memory below the device's memory: it keeps blocks that the device evicts, until a prompt needs them.

Host memory has a pool of its own, of the same units and kinds, for nodes of the same prefix tree. When the device
evicts a block, a copy to host memory is planned (`demote`). When a request finds a block here, a copy back is planned.
Both go into one list of copies, which a step does first and in order. A block is in one of the two pools: the host's
copy is dropped once the device has a computed one (`discard_duplicate`). Only a state may be in both: the running
sequence that loaded it changes its own copy.

Invariants: a block here is cached, or held by a step that reads it. Its parent's full-attention block is here or on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.event_log import Action
from engine.cache.lru_eviction import LruOrder
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree, list_subtree
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import BlockCopy, CopyDirection


class HostUsage(NamedTuple):
    """How much of host memory is used, and what was copied."""

    used_share: float = 0.0
    """Share of the units that hold blocks, 0 .. 1."""
    stored_bytes: int = 0
    """Bytes that steps were planned to copy to host memory since the start."""
    loaded_bytes: int = 0
    """Bytes that steps were planned to copy back since the start."""


class HostHit(NamedTuple):
    """A block of a prompt's cached prefix that only host memory has."""

    group: int
    block_index: int
    """Index of the block in the prompt."""
    host_block: Block
    """Block of host memory, which is pinned."""


class HostLoad(NamedTuple):
    """A copy of one block from host memory to the device."""

    block: Block
    """Target on the device."""
    host_block: Block
    """Source in host memory, which is pinned until the load is over."""


class HostTier:
    """Keeps blocks that the device evicted in host memory. A tier of no units keeps nothing."""

    def __init__(
        self, unit_count: int, spec: CacheSpec, tree: PrefixTree, order: LruOrder, block_copies: list[BlockCopy]
    ) -> None:
        """Make an empty host memory of `unit_count` units of equal size. A unit holds several blocks of one kind.

        `tree`: prefix tree of device and host memory. `order`: decides which host block is evicted next.
        `block_copies`: list to which copies between the memories are appended. The next forward step does these copies
        first.
        """
        self.pool = UnitPool(unit_count, spec, order, self.evict)
        self._block_bytes_by_kind = spec.block_bytes_by_kind()
        self._order = order
        self._tree = tree
        self._block_copies = block_copies
        self._stored_bytes = 0
        self._loaded_bytes = 0

    def measure_usage(self) -> HostUsage:
        """Return the present use of the memory, and the bytes copied since the start. All is 0 without host memory."""
        if not self.pool.units:
            return HostUsage()
        return HostUsage(
            used_share=1 - self.pool.free_units / len(self.pool.units),
            stored_bytes=self._stored_bytes,
            loaded_bytes=self._loaded_bytes,
        )

    def demote(self, block: Block, *, keep_on_host: bool) -> None:
        """Keep a block that the device is about to evict in host memory, and record the move for the KV cache events.

        A block without a host copy is copied if `keep_on_host` is set and there is room. Any other block is recorded as
        removed from the device. If that was the last copy of a full-attention block, no prompt can use the blocks after
        it, so host memory drops these, too.
        """
        node, kind, event_log = block.node, block.kind, self._tree.event_log
        assert node is not None
        has_host_copy = node.has_host_block(kind)
        if not has_host_copy and keep_on_host and self._store(block, node):
            event_log.record(Action.DEMOTED, kind, node)
            return
        if not has_host_copy and kind == FULL_KIND:
            self._drop_subtree(node)
        event_log.record(Action.REMOVED, kind, node)

    def _store(self, block: Block, node: Node) -> bool:
        """Plan the copy of a device block to host memory, for its prefix tree `node`; return False if there is no room.

        The caller may reuse the device block at once: a step does copies in the order of planning, before it computes.
        """
        if not self.pool.units:
            return False
        kind = block.kind
        host_block = self.pool.allocate(kind)
        if host_block is None:
            return False
        node.host_blocks[kind] = host_block
        host_block.node = node
        if isinstance(block, StateBlock) and isinstance(host_block, StateBlock):
            host_block.is_superseded = block.is_superseded
            host_block.value = block.value
        self.pool.release(host_block)
        self._block_copies.append(BlockCopy(kind, block.id, host_block.id, CopyDirection.TO_HOST))
        self._stored_bytes += self._block_bytes_by_kind[kind]
        return True

    def pin(self, node: Node, kind: int) -> Block:
        """Return the node's host block, and hold the block, so that it is not evicted before `unpin`."""
        host_block = node.host_blocks[kind]
        assert host_block is not None
        self.pool.acquire(host_block)
        return host_block

    def plan_load_copy(self, load: HostLoad) -> None:
        """Plan the copy of a pinned block to the device. The caller unpins the block later."""
        target, host_block = load
        self._block_copies.append(BlockCopy(host_block.kind, host_block.id, target.id, CopyDirection.FROM_HOST))
        self._loaded_bytes += self._block_bytes_by_kind[host_block.kind]

    def unpin(self, host_block: Block) -> None:
        """Remove one reference to a host block. Drop the block if the tree has a computed copy on the device.

        It stays while another step reads it. A state stays, too, if a sequence has copied it, because the sequence
        will change its copy.
        """
        node = host_block.node
        if node is not None and node.has_computed(host_block.kind) and host_block.ref_count == 1:
            self._unlink(host_block)
        self.pool.release(host_block)

    def discard_duplicate(self, block: Block) -> None:
        """Drop the host copy of a block that the device has just computed, unless a step reads the copy."""
        assert block.node is not None
        host_block = block.node.host_blocks[block.kind]
        if host_block is not None and not host_block.ref_count:
            self._drop(host_block)

    def evict(self, block: Block) -> None:
        """Evict a host block to make room.

        If no memory has this full-attention block any more, no prompt can use the host blocks that follow it in the
        tree, so these are dropped, too.
        """
        assert block.node is not None
        if block.kind == FULL_KIND and not block.node.has_computed(FULL_KIND):
            self._drop_subtree(block.node)
        else:
            self._drop(block)

    def _drop_subtree(self, root: Node) -> None:
        """Drop the host blocks of a node and of its descendants, leaves first."""
        for node in reversed(list_subtree(root)):
            for host_block in reversed(node.host_blocks):
                if host_block is not None:
                    self._drop(host_block)

    def _drop(self, host_block: Block) -> None:
        node, kind = host_block.node, host_block.kind
        assert node is not None
        self._unlink(host_block)
        self.pool.discard(host_block)
        self._tree.remove_if_empty(node)
        self._order.mark_evicted(node, kind)

    def _unlink(self, host_block: Block) -> None:
        """Take a host block out of its node, and announce its removal. The node may be left without blocks."""
        node, kind = host_block.node, host_block.kind
        assert node is not None
        self._tree.event_log.record(Action.HOST_REMOVED, kind, node)
        node.host_blocks[kind] = None
        host_block.node = None

    def check_invariants(self, pinned_blocks: Sequence[Block]) -> None:
        """Assert that host memory's pool of blocks and the prefix tree agree.

        `pinned_blocks`: host blocks that a planned copy to the device reads, once for each copy.
        """
        self.pool.check_invariants()
        tree_blocks: set[Block] = set()
        for node in self._tree.nodes():
            for kind, host_block in enumerate(node.host_blocks):
                if host_block is not None:
                    tree_blocks.add(host_block)
                    assert host_block.node is node
                    assert host_block.kind == kind
                    assert host_block.ref_count or not node.has_computed(kind), "block on host and device"
        for unit in self.pool.units:
            for host_block in unit.blocks:
                assert host_block.ref_count == pinned_blocks.count(host_block), f"{host_block!r} of the host"
                assert (host_block in tree_blocks) == (host_block.node is not None)
