"""The cache's side of transfers: what a prompt lacks, what a peer is sent, and storing what a peer has sent.

The thread of the steps calls `list_keys`, and `read` and `store` while no step is in flight. Any thread may call the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.cache.blocks import Block, BlockKey, Node, StateBlock
from engine.cache.host_tier import HostLoad
from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_KIND
from engine.transfer.messages import SentBlock, WantedBlock
from engine.transfer.pull_plan import Pull, PullItem, choose_blocks_to_pull, count_resumable_blocks
from engine.types import BlockCopy, BlockPlace, Request
from engine.types import Sequence as EngineSequence


class BlockMemory(Protocol):
    """The contents of blocks."""

    def get_block_bytes(self, kind: int) -> int:
        """Return the bytes of a block's content."""

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        """Do copies within the device and to and from host memory, in order."""

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        """Return the contents of blocks, one after the other."""

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        """Write contents, one after the other, to blocks of the device."""


class ReadBlocks(NamedTuple):
    """Blocks that are sent to a peer, and their contents."""

    blocks: list[SentBlock]
    contents: memoryview


@dataclass(slots=True, eq=False)
class _NewBlock:
    """Memory on the device for a block of a prompt, and what is held with it until the block is released."""

    item: PullItem
    block: Block
    host_block: Block | None = None
    """Pinned block of host memory that has the content; None: the peer has sent it."""
    parent_block: Block | None = None
    """Block before it, held so that it is not evicted first."""


class BlockExchange:
    """Blocks of one cache, read and written."""

    def __init__(self, cache: KVCache, memory: BlockMemory) -> None:
        self._cache = cache
        self._memory = memory
        self._kinds = range(len(cache.spec.block_bytes_by_kind()))
        self._windows = cache.windows

    def get_block_bytes(self, kind: int) -> int:
        """Return the bytes of a block's content."""
        return self._memory.get_block_bytes(kind)

    # ------------------------------------------------------------------ what a peer is sent

    def locate(self, hashes: Sequence[int]) -> bytes:
        """Return a mask of kinds for each leading hash that is cached (`BlocksLocated`). For any thread: a hint."""
        masks = bytearray()
        parent: Node | None = None
        for hash_ in hashes:
            node = self._cache.tree.get(hash_)
            if node is None or node.parent is not parent:
                break
            masks.append(sum(1 << kind for kind in self._kinds if node.has_computed(kind) or node.has_host_block(kind)))
            parent = node
        return bytes(masks)

    def choose_blocks_to_pull(self, keys: Sequence[BlockKey], remote_masks: bytes) -> list[PullItem]:
        """Return the blocks of a prompt to pull. `remote_masks`: `BlocksLocated.kind_masks`. For any thread."""
        local_masks = self.locate([key.hash for key in keys])
        return choose_blocks_to_pull(local_masks, remote_masks[: len(keys)], len(self._kinds), self._windows)

    def is_cached(self, keys: Sequence[BlockKey]) -> bool:
        """Whether nothing of a prompt has to be computed that could be pulled."""
        local_masks = self.locate([key.hash for key in keys])
        return count_resumable_blocks(local_masks, len(self._kinds), self._windows) == len(keys)

    def read(self, wanted_blocks: Sequence[WantedBlock]) -> ReadBlocks:
        """Copy the contents of the blocks that a peer wants, up to the first that is in neither memory of ours."""
        memory = self._memory
        memory.execute(self._cache.take_copies())  # a wanted block may be the target of a copy that is planned
        blocks: list[SentBlock] = []
        places: list[BlockPlace] = []
        for wanted_block in wanted_blocks:
            node, kind = self._cache.tree.get(wanted_block.hash), wanted_block.kind
            place = None if node is None else self._find_content(node, kind)
            if node is None or place is None:
                break
            key, parent = node.key, node.parent
            places.append(place)
            blocks.append(
                SentBlock(
                    hash=node.hash,
                    kind=kind,
                    parent_hash=None if parent is None else parent.hash,
                    packed_tokens=key.packed_tokens,
                    extra_keys=key.extra_keys,
                    lora_name=key.lora_name,
                )
            )
        return ReadBlocks(blocks, memory.read_blocks(places) if places else memoryview(b""))

    def _find_content(self, node: Node, kind: int) -> BlockPlace | None:
        block, host_block = node.blocks[kind], node.host_blocks[kind]
        if block is not None and not block.is_pending:
            return BlockPlace(kind, block.id)
        return None if host_block is None else BlockPlace(kind, host_block.id, is_on_host=True)

    # ------------------------------------------------------------------ what a peer has sent

    def list_keys(self, request: Request) -> list[BlockKey]:
        """Return the names of the blocks of a prompt that need not be computed, and that its source may have."""
        seq = EngineSequence(request, request.token_ids, len(request.token_ids), arrival_s=0.0)
        keys, source = self._cache.list_prompt_keys(seq), request.kv_source
        if source is not None and source.cached_tokens is not None:
            keys = keys[: source.cached_tokens // self._cache.spec.block_size]
        return keys

    def store(self, pull: Pull, items: Sequence[PullItem], contents: memoryview) -> int:
        """Copy blocks of a prompt, which a peer has sent, into the cache, and announce them.

        `contents` is the contents of all `items`, one after the other. There is no item if the peer has none of the
        blocks any more. Returns how many leading items are in the cache now: fewer than all if memory is lacking, or
        if a block before them was evicted meanwhile. After an error, the cache is empty and nothing more of the prompt
        is stored.
        """
        if pull.is_abandoned or not items:
            return 0
        new_blocks: list[_NewBlock] = []
        try:
            self._store(pull, items, contents, new_blocks)
        except Exception:
            pull.is_abandoned = True
            self._cache.reset()  # so that a block which is not filled leaves the tree before it is released
            raise
        finally:
            for new_block in reversed(new_blocks):
                self._release(new_block)
        return next((i for i, item in enumerate(items) if not _is_stored(pull, item)), len(items))

    def _store(self, pull: Pull, items: Sequence[PullItem], contents: memoryview, new_blocks: list[_NewBlock]) -> None:
        """Allocate blocks for items, fill them, and announce them. The caller releases what is in `new_blocks` then."""
        cache, memory = self._cache, self._memory
        is_first = not pull.nodes
        cache.tree.extend_match(pull.keys, pull.nodes)
        if is_first:
            self._mark_used(pull.nodes)
        self._allocate(pull, items, new_blocks)
        for new_block in new_blocks:
            if new_block.host_block is not None:
                cache.host_tier.plan_load_copy(HostLoad(new_block.block, new_block.host_block))
        memory.execute(cache.take_copies())
        _write_contents(memory, items, new_blocks, contents)
        self._attach_all(pull, new_blocks)

    def _mark_used(self, nodes: Sequence[Node]) -> None:
        """Let the part of a prompt that is here be evicted last: memory for the other part is found by evicting."""
        pool = self._cache.pool
        blocks = [block for node in nodes if (block := node.blocks[FULL_KIND]) is not None and not block.is_pending]
        for block in blocks:
            pool.acquire(block)
        for block in reversed(blocks):
            pool.release(block)

    def _allocate(self, pull: Pull, items: Sequence[PullItem], new_blocks: list[_NewBlock]) -> None:
        """Append to `new_blocks` a device block for each item that is not here yet, as far as memory allows.

        Blocks of the prompt before these that are only in host memory come first, because a block on the device needs
        those before it there, too. Appends nothing if one of them is just being computed.
        """
        host_nodes = self._find_host_ancestors(pull, items)
        if host_nodes is None:
            return
        for node in host_nodes:
            block = self._cache.pool.allocate(FULL_KIND)
            if block is None or not node.has_host_block(FULL_KIND):  # no memory, or evicted to make room for another
                if block is not None:
                    self._cache.pool.release(block)
                return
            host_block = self._cache.host_tier.pin(node, FULL_KIND)
            new_blocks.append(_NewBlock(PullItem(node.depth, FULL_KIND), block, host_block))
        for item in items:
            if item.block_index < len(pull.nodes) and pull.nodes[item.block_index].blocks[item.kind] is not None:
                continue  # computed here meanwhile
            block = self._cache.pool.allocate(item.kind)
            if block is None:
                break
            new_blocks.append(_NewBlock(item, block))

    def _find_host_ancestors(self, pull: Pull, items: Sequence[PullItem]) -> list[Node] | None:
        """Return the known nodes that must come from host memory first. None if one of them is being computed."""
        needed_count = min(len(pull.nodes), max(item.block_index + (item.kind != FULL_KIND) for item in items))
        first_index = needed_count
        while first_index and not pull.nodes[first_index - 1].has_computed(FULL_KIND):
            first_index -= 1
        nodes = pull.nodes[first_index:needed_count]
        return None if any(node.blocks[FULL_KIND] is not None for node in nodes) else nodes

    def _attach_all(self, pull: Pull, new_blocks: Sequence[_NewBlock]) -> None:
        """Announce blocks that are filled, up to the first that can have no name."""
        for new_block in new_blocks:
            index = new_block.item.block_index
            if index > len(pull.nodes):
                return
            parent = pull.nodes[index - 1] if index else None
            node = self._attach(new_block, pull.keys[index], parent)
            if node is None:
                return
            pull.nodes[index : index + 1] = [node]

    def _attach(self, new_block: _NewBlock, key: BlockKey, parent: Node | None) -> Node | None:
        """Put a filled block into the prefix tree, announce it, and return its node.

        Returns None, with nothing done, if the parent was evicted meanwhile, or if the tree has such a block already.
        The parent of a full-attention block is held until `_release`, so that it is not evicted before the child.
        """
        tree, block = self._cache.tree, new_block.block
        if parent is not None and (parent not in tree or not parent.has_computed(FULL_KIND)):
            return None
        node = tree.get_or_create(key, parent)
        if node is None or node.blocks[block.kind] is not None:
            return None
        if block.kind != FULL_KIND and not node.has_computed(FULL_KIND):
            tree.remove_if_empty(node)
            return None
        if block.kind == FULL_KIND and parent is not None:
            parent_block = parent.blocks[FULL_KIND]
            assert parent_block is not None
            self._cache.pool.acquire(parent_block)
            new_block.parent_block = parent_block
        tree.attach(node, block)
        tree.commit(block)
        return node

    def _release(self, new_block: _NewBlock) -> None:
        """Give up a new block, and what is held with it. A block in the tree becomes cached."""
        cache, block, host_block = self._cache, new_block.block, new_block.host_block
        if host_block is not None and block.node is not None:  # the device has a named copy now
            cache.host_tier.finish_promotion(host_block)
        elif host_block is not None:
            cache.host_tier.unpin(host_block)
        if isinstance(block, StateBlock) and block.node is not None:
            cache.states.release_new_checkpoint(block)
        else:
            cache.pool.release(block)
        if new_block.parent_block is not None:
            cache.pool.release(new_block.parent_block)


def _write_contents(
    memory: BlockMemory, items: Sequence[PullItem], new_blocks: Sequence[_NewBlock], contents: memoryview
) -> None:
    """Fill new blocks with what a peer sent: `contents` is the contents of all `items`, one after the other.

    An item without a new block was computed here meanwhile, or found no memory: its part is skipped. New blocks with a
    host block are filled from host memory instead.
    """
    block_by_item = {new.item: new.block for new in new_blocks if new.host_block is None}
    places: list[BlockPlace] = []
    parts: list[memoryview] = []
    start = 0
    for item in items:
        end = start + memory.get_block_bytes(item.kind)
        if item in block_by_item:
            places.append(BlockPlace(item.kind, block_by_item[item].id))
            parts.append(contents[start:end])
        start = end
    if not places:
        return
    if len(parts) == len(items):
        memory.write_blocks(places, contents)  # nothing is skipped: no need to join a copy
    else:
        memory.write_blocks(places, memoryview(bytearray(b"".join(parts))))


def _is_stored(pull: Pull, item: PullItem) -> bool:
    return item.block_index < len(pull.nodes) and pull.nodes[item.block_index].has_computed(item.kind)
