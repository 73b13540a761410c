"""The blocks of a simulated engine: no bytes move, and transfers take as long as their bytes would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine.types import BlockCopy, BlockPlace


class SimulatedBlockMemory:
    """A `BlockMemory` with blocks of no bytes, behind a network link that carries one transfer after the other."""

    def __init__(self, block_bytes: int, bytes_per_s: float) -> None:
        """Make a memory with an idle link. `block_bytes`: size that a block is assumed to have on the link."""
        self.block_bytes = block_bytes
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def carry(self, byte_count: int) -> None:
        """Wait until the link has carried `byte_count` bytes, after all earlier transfers."""
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s) + byte_count / self.bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)

    def get_block_bytes(self, kind: int) -> int:
        return 0

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        pass

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        return memoryview(b"")

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        pass
