"""Block cache of a simulated engine: leaf-first LRU, with host memory for evicted blocks. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class SimCache:
    """Block cache of one worker, or of several that share it.

    A block is referenced (running requests use it), idle (kept for later hits) or unnamed (reserved, not computed yet).
    Together they are at most `capacity`; with `force`, `reserve` may exceed it. Evicted blocks move to host
    memory of `host_capacity` blocks, and a hit moves them back.
    """

    def __init__(self, capacity: int | None, *, is_shared: bool = False, host_capacity: int = 0) -> None:
        """Make an empty cache of `capacity` blocks (None: infinite) and of `host_capacity` blocks in host memory.

        `is_shared`: whether several workers use it.
        """
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.is_shared = is_shared

        # Blocks on the device, and in host memory.
        self.reference_count_by_block: dict[int, int] = {}
        """Number of running requests that use each block."""
        self.idle_blocks: OrderedDict[int, None] = OrderedDict()
        """Blocks without references, the least recently used first."""
        self.unnamed_blocks = 0
        """Number of reserved blocks that are not computed yet."""
        self.host_blocks: OrderedDict[int, None] = OrderedDict()
        """Blocks in host memory, the least recently used first."""

        # Listeners.
        self.on_store: Callable[[list[int], int | None], None] | None = None
        """Called with new consecutive blocks of a prompt, and the block before them."""
        self.on_remove: Callable[[list[int]], None] | None = None
        """Called with evicted blocks."""
        self.on_move: Callable[[list[int], bool], None] | None = None
        """Called with blocks that moved, and whether they moved to host memory."""

    def count_cached_prefix(self, block_ids: list[int], max_blocks: int) -> int:
        """Count the blocks of the longest cached prefix of a prompt, at most `max_blocks`."""
        reference_counts, idle_blocks, host_blocks = self.reference_count_by_block, self.idle_blocks, self.host_blocks
        for index, block in enumerate(block_ids):
            is_cached = block in reference_counts or block in idle_blocks or block in host_blocks
            if index >= max_blocks or not is_cached:
                return index
        return len(block_ids)

    def compute_usage(self) -> float:
        """Return the share of the blocks that running requests hold."""
        return 0.0 if self.capacity is None else self.count_held_blocks() / self.capacity

    def count_held_blocks(self) -> int:
        """Count the blocks that running requests hold."""
        return len(self.reference_count_by_block) + self.unnamed_blocks

    def reserve(self, block_ids: list[int], hit_blocks: int, block_count: int, *, force: bool = False) -> int | None:
        """Take `block_count` blocks for a request: the first `hit_blocks` are cached, the others are computed later.

        Return how many cached blocks move back from host memory. Return None, and take none, if the capacity does not
        allow it. `force`: exceed the capacity, so that no worker is idle while others hold all of a shared cache.
        """
        cached_block_ids, new_block_count = block_ids[:hit_blocks], block_count - hit_blocks
        if not force and not self._has_room(cached_block_ids, new_block_count):
            return None
        loaded_blocks = self._reference(cached_block_ids)
        self.unnamed_blocks += new_block_count
        self.evict_excess()
        return loaded_blocks

    def _has_room(self, cached_block_ids: list[int], new_block_count: int) -> bool:
        """Return whether a request can use these cached blocks and reserve new ones, if idle blocks are evicted."""
        if self.capacity is None:
            return True
        newly_referenced = sum(1 for block in cached_block_ids if block not in self.reference_count_by_block)
        return self.count_held_blocks() + newly_referenced + new_block_count <= self.capacity

    def evict_excess(self) -> None:
        """Evict idle blocks while the cache is over its capacity."""
        if self.capacity is None:
            return
        excess = min(self.count_held_blocks() + len(self.idle_blocks) - self.capacity, len(self.idle_blocks))
        if excess <= 0:
            return
        evicted_blocks = [self.idle_blocks.popitem(last=False)[0] for _ in range(excess)]
        if self.host_capacity:
            evicted_blocks = self._store_in_host(evicted_blocks)
        if evicted_blocks and self.on_remove is not None:
            self.on_remove(evicted_blocks)

    def _store_in_host(self, blocks: list[int]) -> list[int]:
        """Move blocks to host memory; return those that host memory evicts for them."""
        self.host_blocks.update(dict.fromkeys(blocks))
        if self.on_move is not None:
            self.on_move(blocks, True)
        return [self.host_blocks.popitem(last=False)[0] for _ in range(len(self.host_blocks) - self.host_capacity)]

    def _reference(self, cached_block_ids: list[int]) -> int:
        """Count one more running request that uses these cached blocks; return how many were in host memory.

        Those move back to the device.
        """
        reference_counts, loaded_blocks = self.reference_count_by_block, []
        for block in cached_block_ids:
            if block in reference_counts:
                reference_counts[block] += 1
                continue
            reference_counts[block] = 1
            if block in self.host_blocks:
                del self.host_blocks[block]
                loaded_blocks.append(block)
            else:
                del self.idle_blocks[block]
        if loaded_blocks and self.on_move is not None:
            self.on_move(loaded_blocks, False)
        return len(loaded_blocks)

    def _is_cached(self, block: int) -> bool:
        return block in self.reference_count_by_block or block in self.idle_blocks or block in self.host_blocks

    def register(self, block_ids: list[int], start_block: int, end_block: int) -> None:
        """Give the reserved blocks [start, end) of a request their ids, now that they are computed.

        A block that another request computed meanwhile is shared instead of stored again. `on_store` gets the new
        blocks, and the block before the first of them (None at the start of the prompt).
        """
        computed_blocks = block_ids[start_block:end_block]
        new_blocks = [block for block in computed_blocks if not self._is_cached(block)]
        self.unnamed_blocks -= len(computed_blocks)
        self._reference([block for block in computed_blocks if self._is_cached(block)])
        self.reference_count_by_block.update(dict.fromkeys(new_blocks, 1))
        if new_blocks and self.on_store is not None:
            first_index = block_ids.index(new_blocks[0])
            self.on_store(new_blocks, block_ids[first_index - 1] if first_index else None)

    def store_moved(self, block_ids: list[int]) -> None:
        """Store a prefix that came from another worker, as if a request that ended had computed it."""
        resident_blocks = self.count_cached_prefix(block_ids, len(block_ids))
        if self.capacity is not None:
            block_ids = block_ids[: max(resident_blocks, self.capacity - self.count_held_blocks())]
        self.reserve(block_ids, resident_blocks, len(block_ids), force=True)
        self.register(block_ids, resident_blocks, len(block_ids))
        self.release(block_ids, 0)

    def release(self, block_ids: list[int], unnamed_blocks: int) -> None:
        """Release the blocks of a request, the last first, so that leaves are evicted first.

        `block_ids`: its computed blocks. `unnamed_blocks`: number of its reserved blocks that are not computed.
        """
        reference_counts = self.reference_count_by_block
        for block in reversed(block_ids):
            reference_counts[block] -= 1
            if not reference_counts[block]:
                del reference_counts[block]
                self.idle_blocks[block] = None
        self.unnamed_blocks -= unnamed_blocks
