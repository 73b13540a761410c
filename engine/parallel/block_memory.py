"""The contents of blocks over several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.execution.block_copier import BlockCopier
from engine.parallel.messages import CopyBlocks, ReadBlocks, WriteBlocks
from engine.parallel.ranks import Leader
from engine.types import BlockCopy, BlockPlace


class RankedBlockMemory:
    """Reads, writes and copies blocks on all ranks together. Implements `BlockMemory`.

    A block's content is the parts of all ranks, rank 0 first.
    """

    def __init__(self, leader: Leader, copier: BlockCopier) -> None:
        """`copier`: reads and writes the parts of rank 0."""
        self._leader = leader
        self._copier = copier

    def get_block_bytes(self, kind: int) -> int:
        return self._copier.get_block_bytes(kind) * self._leader.rank_count

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        if block_copies:
            with self._leader.hold_ranks():
                self._leader.broadcast(CopyBlocks(list(block_copies)))
                self._copier.execute(block_copies)

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        with self._leader.hold_ranks():
            self._leader.broadcast(ReadBlocks(list(places)))
            own_parts = self._copier.read_blocks(places)
            parts_by_rank = [own_parts, *(memoryview(parts) for parts in self._leader.receive_block_parts())]
        contents = bytearray()
        start = 0
        for place in places:
            end = start + self._copier.get_block_bytes(place.kind)
            for parts in parts_by_rank:
                contents += parts[start:end]
            start = end
        return memoryview(contents)

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        parts_by_rank = [bytearray() for _ in range(self._leader.rank_count)]
        start = 0
        for place in places:
            part_bytes = self._copier.get_block_bytes(place.kind)
            for parts in parts_by_rank:
                parts += contents[start : start + part_bytes]
                start += part_bytes
        own_parts, *followers_parts = parts_by_rank
        with self._leader.hold_ranks():
            self._leader.send_each([WriteBlocks(list(places), bytes(parts)) for parts in followers_parts])
            self._copier.write_blocks(places, memoryview(own_parts))
