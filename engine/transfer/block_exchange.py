"""The cache's side of transfers: what a prompt lacks, what a peer is sent, and storing what a peer has sent.

The thread of the steps calls `list_keys`, and `run_jobs` while no step is in flight. The jobs, which the thread of the
network submits, call `read` and `store`. Any thread may call the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.host_tier import HostLoad
from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_KIND
from engine.transfer.fingerprint import ModelFingerprint
from engine.transfer.interface import TransferStats
from engine.transfer.messages import BlocksSent, SentBlock, WantedBlock
from engine.transfer.pull_plan import Pull, PullItem, choose_blocks_to_pull, count_resumable_blocks
from engine.transfer.simulated_memory import SimulatedBlockMemory
from engine.types import BlockCopy, BlockKey, BlockPlace, Request
from engine.types import Sequence as EngineSequence

Result = TypeVar("Result")


class BlockMemory(Protocol):
    """Interface of the memory that holds the contents of blocks: it copies, reads and writes them."""

    def get_block_bytes(self, kind: int) -> int:
        """Return the bytes of a block's content."""

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        """Do copies within the device and to and from host memory, in order."""

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        """Return the contents of blocks, one after the other."""

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        """Write contents, one after the other, to blocks of the device."""


class _Job(NamedTuple):
    """A function that copies bytes between two steps, and the future of its result."""

    work: Callable[[], Any]
    byte_count: int
    future: Future[Any]


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
    """Reads blocks of the cache for peers, and stores blocks that peers have sent."""

    def __init__(self, cache: KVCache, memory: BlockMemory, fingerprint: ModelFingerprint) -> None:
        """Exchange the blocks of `cache` with other engines ("peers").

        `memory`: has the contents of these blocks. `fingerprint`: identifies the model, so that engines of different
        models exchange nothing.
        """
        self.fingerprint = fingerprint
        self.stats = TransferStats()
        self.block_tokens = cache.block_size
        self._cache = cache
        self._memory = memory
        self._kinds = range(len(cache.spec.block_bytes_by_kind()))

        # Jobs read or write contents between two steps, on the thread of the steps.
        self._jobs: deque[_Job] = deque()
        self.on_job: Callable[[], None] = lambda: None
        """Called on the thread that has submitted a job, to wake the thread of the steps."""

        # A simulated memory has no contents. Transfers from it send no bytes, but take the time of real ones.
        self.simulated_memory = memory if isinstance(memory, SimulatedBlockMemory) else None
        self.content_bytes_by_kind = [memory.get_block_bytes(kind) for kind in self._kinds]
        """Bytes that are sent of a block of each kind: 0 in a simulation."""
        self.block_bytes_by_kind = self.content_bytes_by_kind
        """Bytes of a block of each kind, also of a simulated one, for bounds, statistics and simulated times."""
        if self.simulated_memory is not None:
            self.block_bytes_by_kind = [self.simulated_memory.block_bytes for _ in self._kinds]

    def count_bytes(self, blocks: Iterable[PullItem | WantedBlock]) -> int:
        return sum(self.block_bytes_by_kind[block.kind] for block in blocks)

    # ------------------------------------------------------------------ jobs between steps

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def submit(self, work: Callable[[], Result], byte_count: int) -> Future[Result]:
        """Queue `work`, which reads or stores `byte_count` bytes, for the thread of the steps. Return its future.

        If the future is cancelled before the work begins, the work is skipped.
        """
        future: Future[Result] = Future()
        self._jobs.append(_Job(work, byte_count, future))
        self.on_job()
        return future

    def run_jobs(self, bytes_max: int) -> None:
        """Run the oldest jobs until they have copied at least `bytes_max` bytes, or none is left.

        If a job raises, its future gets the error, and this method raises it, too. Later jobs stay queued.
        """
        copied_bytes = 0
        while self._jobs and copied_bytes < bytes_max:
            job = self._jobs.popleft()
            is_cancelled = not job.future.set_running_or_notify_cancel()
            if is_cancelled:
                continue
            copied_bytes += job.byte_count
            try:
                job.future.set_result(job.work())
            except Exception as error:
                job.future.set_exception(error)
                raise

    # ------------------------------------------------------------------ what a peer is sent

    def locate(self, hashes: Sequence[int]) -> bytes:
        """Return which blocks of a prompt are cached, on the device or in host memory, up to the first that is not.

        `hashes`: prefix hashes of the prompt's blocks. Bit k of byte i is set if block i is cached for kind k: full
        attention, a sliding window, or a recurrent state. Any thread may call this, so the result may be outdated.
        """
        masks = bytearray()
        parent: Node | None = None
        for hash_ in hashes:
            node = self._cache.tree.get(hash_)
            if node is None or node.parent is not parent:
                break
            mask = 0
            for kind in self._kinds:
                if node.has_computed(kind) or node.has_host_block(kind):
                    mask |= 1 << kind
            masks.append(mask)
            parent = node
        return bytes(masks)

    def choose_blocks_to_pull(self, keys: Sequence[BlockKey], remote_masks: bytes) -> list[PullItem]:
        """Return the blocks of a prompt to pull from a peer. Any thread may call this.

        `remote_masks`: the kinds of each block that the peer has, as `locate` returns them.
        """
        local_masks = self.locate([key.hash for key in keys])
        return choose_blocks_to_pull(local_masks, remote_masks[: len(keys)], len(self._kinds), self._cache.windows)

    def is_cached(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether the cache has all blocks with these keys that a sequence needs to resume after them."""
        local_masks = self.locate([key.hash for key in keys])
        return count_resumable_blocks(local_masks, self._cache.windows) == len(keys)

    def read(self, wanted_blocks: Sequence[WantedBlock]) -> tuple[BlocksSent, memoryview]:
        """Copy the blocks that a peer wants, up to the first that is cached in neither memory.

        Returns the answer for the peer, and the contents of the blocks.
        """
        memory = self._memory
        memory.execute(self._cache.take_copies())  # a wanted block may be the target of a copy that is planned
        blocks: list[SentBlock] = []
        places: list[BlockPlace] = []
        for wanted_block in wanted_blocks:
            node = self._cache.tree.get(wanted_block.hash)
            place = None if node is None else self._find_content(node, wanted_block.kind)
            if node is None or place is None:
                break
            places.append(place)
            parent_hash = None if node.parent is None else node.parent.hash
            blocks.append(SentBlock.describe(node.key, parent_hash, wanted_block.kind))
        contents = memory.read_blocks(places) if places else memoryview(b"")
        self.stats.sent_blocks += len(blocks)
        self.stats.sent_bytes += self.count_bytes(wanted_blocks[: len(blocks)])
        return BlocksSent(self.fingerprint.digest, blocks), contents

    def _find_content(self, node: Node, kind: int) -> BlockPlace | None:
        """Return where the computed content of a node's block is: on the device, else in host memory, else nowhere."""
        block, host_block = node.blocks[kind], node.host_blocks[kind]
        if block is not None and not block.is_pending:
            return BlockPlace(kind, block.id)
        return None if host_block is None else BlockPlace(kind, host_block.id, is_on_host=True)

    # ------------------------------------------------------------------ what a peer has sent

    def list_keys(self, request: Request) -> list[BlockKey]:
        """Return the keys of the blocks of a prompt that need not be computed, and that its source may have."""
        seq = EngineSequence(request, request.token_ids, len(request.token_ids), arrival_s=0.0)
        keys, source = self._cache.list_keys(seq), request.kv_source
        if source is not None and source.cached_tokens is not None:
            keys = keys[: source.cached_tokens // self._cache.spec.block_size]
        return keys

    def store(self, pull: Pull, items: Sequence[PullItem], contents: memoryview, is_last: bool = False) -> int:
        """Put KV blocks that another engine has sent into this engine's prefix cache.

        `items`: blocks of the pulled prompt, each after the blocks that it needs. `contents`: their contents, one after
        the other. `is_last`: whether the pull moves no further blocks. Returns how many leading items are cached now:
        fewer than all if memory is lacking, or if a block before them was evicted. After an error, the cache is empty
        and the pull is given up.
        """
        pull.is_stored = is_last
        if pull.is_abandoned or not items:
            return 0
        new_blocks: list[_NewBlock] = []
        try:
            self._match_prefix(pull)
            self._allocate(pull, items, new_blocks)
            self._load_host_blocks(new_blocks)
            self._write_contents(items, new_blocks, contents)
            self._attach_all(pull, new_blocks)
        except Exception:
            pull.is_abandoned = True
            self._cache.reset()  # an unfilled block must leave the prefix tree before it is released
            raise
        finally:
            for new_block in reversed(new_blocks):
                self._release(new_block)
        stored_count = 0
        while stored_count < len(items) and pull.has_stored(items[stored_count]):
            stored_count += 1
        self.stats.pulled_blocks += stored_count
        self.stats.pulled_bytes += self.count_bytes(items[:stored_count])
        return stored_count

    def _match_prefix(self, pull: Pull) -> None:
        """Update `pull.nodes`, the cached beginning of the prompt, and mark it as used when it is first looked up.

        Without that mark, storing the prompt's other blocks could evict it.
        """
        is_first_time = not pull.nodes
        self._cache.tree.extend_match(pull.keys, pull.nodes)
        if is_first_time:
            pool = self._cache.pool
            blocks = [block for node in pull.nodes if (block := node.blocks[FULL_KIND]) and not block.is_pending]
            for block in blocks:
                pool.acquire(block)
            for block in reversed(blocks):
                pool.release(block)

    def _allocate(self, pull: Pull, items: Sequence[PullItem], new_blocks: list[_NewBlock]) -> None:
        """Append to `new_blocks` a device block for each received block (`items`), until memory runs out.

        A cached block needs the blocks before it on the device. So the ones that only host memory has come first. If
        one of those is being computed by a running sequence, nothing is allocated.
        """
        host_nodes = self._find_host_ancestors(pull, items)
        if host_nodes is None:
            return
        for node in host_nodes:
            block = self._cache.pool.allocate(FULL_KIND)
            if block is None:
                return
            was_evicted_for_block = not node.has_host_block(FULL_KIND)
            if was_evicted_for_block:
                self._cache.pool.release(block)
                return
            host_block = self._cache.host_tier.pin(node, FULL_KIND)
            new_blocks.append(_NewBlock(PullItem(node.depth, FULL_KIND), block, host_block))
        for item in items:
            has_node = item.block_index < len(pull.nodes)
            was_computed_meanwhile = has_node and pull.nodes[item.block_index].blocks[item.kind] is not None
            if was_computed_meanwhile:
                continue
            block = self._cache.pool.allocate(item.kind)
            if block is None:
                return
            new_blocks.append(_NewBlock(item, block))

    def _find_host_ancestors(self, pull: Pull, items: Sequence[PullItem]) -> list[Node] | None:
        """Return the cached nodes before the items that must be loaded from host memory first.

        A full-attention block needs the blocks before it on the device. A block of another kind also needs the
        full-attention block of its own node. None: one of these is being computed.
        """
        needed_counts = [item.block_index if item.kind == FULL_KIND else item.block_index + 1 for item in items]
        needed_count = min(len(pull.nodes), max(needed_counts))
        first_index = needed_count
        while first_index and not pull.nodes[first_index - 1].has_computed(FULL_KIND):
            first_index -= 1
        nodes = pull.nodes[first_index:needed_count]
        return None if any(node.blocks[FULL_KIND] is not None for node in nodes) else nodes

    def _load_host_blocks(self, new_blocks: Sequence[_NewBlock]) -> None:
        """Copy the earlier blocks of the prompt that only host memory has to the device, after all planned copies."""
        for new_block in new_blocks:
            if new_block.host_block is not None:
                self._cache.host_tier.plan_load_copy(HostLoad(new_block.block, new_block.host_block))
        self._memory.execute(self._cache.take_copies())

    def _write_contents(self, items: Sequence[PullItem], new_blocks: Sequence[_NewBlock], contents: memoryview) -> None:
        """Write contents that a peer has sent to the device blocks that were allocated for them.

        `contents` has those of all `items`, one after the other. An item without a new block is skipped: it was
        computed meanwhile, or there was no memory. A new block with a host block is filled from host memory instead.
        """
        block_by_item = {new.item: new.block for new in new_blocks if new.host_block is None}
        places: list[BlockPlace] = []
        parts: list[memoryview] = []
        start = 0
        for item in items:
            end = start + self.content_bytes_by_kind[item.kind]
            if item in block_by_item:
                places.append(BlockPlace(item.kind, block_by_item[item].id))
                parts.append(contents[start:end])
            start = end
        if not places:
            return
        if len(parts) < len(items):
            contents = memoryview(bytearray(b"".join(parts)))
        self._memory.write_blocks(places, contents)

    def _attach_all(self, pull: Pull, new_blocks: Sequence[_NewBlock]) -> None:
        """Put filled blocks into the prefix tree and announce them, up to the first that cannot be attached."""
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
        """Put a filled block into the prefix tree, which announces it as a cache event. Return its node.

        Returns None, with nothing done, if a block that it needs was evicted, or if its place in the tree is taken.
        The parent of a full-attention block is held until the block is released, so that it is not evicted first.
        """
        tree, block = self._cache.tree, new_block.block
        has_parent_on_device = parent is None or (parent in tree and parent.has_computed(FULL_KIND))
        if not has_parent_on_device:
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
        self._cache.device_tier.attach(node, block)
        self._cache.device_tier.commit(block)
        return node

    def _release(self, new_block: _NewBlock) -> None:
        """Release a new block, its source in host memory and its parent. A block in the tree becomes cached."""
        cache, block, host_block = self._cache, new_block.block, new_block.host_block
        if host_block is not None:
            cache.host_tier.unpin(host_block)
        if isinstance(block, StateBlock) and block.node is not None:
            cache.states.release_new_checkpoint(block)
        else:
            cache.pool.release(block)
        if new_block.parent_block is not None:
            cache.pool.release(new_block.parent_block)
