"""Copies of blocks before and after a step is computed: within the device's memory, and between device and host memory.

On a GPU, blocks for the host are first copied to a staging buffer on the GPU, in order with the steps. A second stream
copies that buffer to the host while steps are computed. Blocks from the host are copied in order with the steps, after
all earlier copies to the host. So the result is the same as if the copies were performed one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.types import BlockCopy, BlockId, BlockPlace, CopyDirection

STAGING_BYTES = 64 << 20
"""Size of each of the two GPU buffers through which blocks go to the host; at least one block."""


class BlockCopier:
    """Copies blocks within the pool on the device, and between the pool and host memory, which it owns."""

    def __init__(self, spec: CacheSpec, buffer: Tensor, stride: int, host_units: int) -> None:
        """Allocate host memory for blocks that are evicted from the device. Raises RuntimeError if that is impossible.

        `buffer`: KV cache memory of the device. It is divided into units, which hold one or more blocks each. `stride`:
        bytes from one unit to the next. `host_units`: number of units in host memory.
        """
        self._device = buffer
        self._is_gpu = buffer.device.type != "cpu"
        self._host = torch.empty(host_units * stride, dtype=torch.uint8, pin_memory=self._is_gpu and host_units > 0)
        if not self._is_gpu:
            self._host.zero_()  # the system gives memory when it is first written, which must not happen in a step

        self._stride = stride
        self._blocks_per_unit = spec.blocks_per_unit_by_kind()
        self._block_bytes = spec.block_bytes_by_kind()
        self.copy_s = 0.0
        """Seconds that the computing thread has spent on copies to the host and back."""
        if self._is_gpu and host_units:
            self._copy_stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
            staging_bytes = max(STAGING_BYTES, *self._block_bytes)
            self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=buffer.device) for _ in range(2)]
            """GPU buffers from which blocks are copied to the host, in turns: the first is filled next."""
            self._staging_events: list[torch.cuda.Event | None] = [None, None]
            """Event that each buffer's last copy to the host has ended; None: it was not used yet."""

    def execute(self, block_copies: Iterable[BlockCopy]) -> None:
        """Perform the copies in order. On a GPU, only queue them, in order with the steps of the current stream."""
        for direction, copies in groupby(block_copies, lambda copy: copy.direction):
            if self._is_gpu and direction is CopyDirection.TO_HOST:
                self._stage_to_host(copies)
            else:
                self._copy(direction, copies)

    def get_block_bytes(self, kind: int) -> int:
        """Return the bytes of a block's content, as `read_blocks` returns them."""
        return self._block_bytes[kind]

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        """Return the contents of blocks, one after the other. On a GPU, waits for queued copies to the host."""
        contents = torch.empty(sum(self.get_block_bytes(place.kind) for place in places), dtype=torch.uint8)
        if self._is_gpu and any(place.is_on_host for place in places):
            self._copy_stream.synchronize()
        start = 0
        for kind, block, is_on_host in places:
            content = self._view_block(self._host if is_on_host else self._device, kind, block)
            contents[start : start + len(content)].copy_(content)
            start += len(content)
        return contents.numpy().data

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        """Write contents, as `read_blocks` returns them, to blocks of the device."""
        source = torch.frombuffer(contents, dtype=torch.uint8)
        start = 0
        for kind, block, _ in places:
            target = self._view_block(self._device, kind, block)
            target.copy_(source[start : start + len(target)])
            start += len(target)

    def _view_block(self, memory: Tensor, kind: int, block: BlockId) -> Tensor:
        """View the bytes of a block in one of the two memories."""
        unit, index_in_unit = divmod(block, self._blocks_per_unit[kind])
        size = self._block_bytes[kind]
        start = unit * self._stride + index_in_unit * size
        assert 0 <= start <= len(memory) - size, f"block {block} of kind {kind} lies outside its memory"
        return memory[start : start + size]

    def _copy(self, direction: CopyDirection, block_copies: Iterable[BlockCopy]) -> None:
        """Copy blocks; on a GPU, queue the copies on the current stream."""
        start_s = time.perf_counter()
        source_memory = self._host if direction is CopyDirection.FROM_HOST else self._device
        target_memory = self._host if direction is CopyDirection.TO_HOST else self._device
        if self._is_gpu and direction is CopyDirection.FROM_HOST:
            # Earlier copies to the host must be complete before the host memory is read.
            torch.cuda.current_stream(self._device.device).wait_stream(self._copy_stream)
        for kind, source, target, _ in block_copies:
            source_block = self._view_block(source_memory, kind, source)
            self._view_block(target_memory, kind, target).copy_(source_block, non_blocking=True)
        if not self._is_gpu and direction is not CopyDirection.WITHIN_DEVICE:
            self.copy_s += time.perf_counter() - start_s

    def _stage_to_host(self, block_copies: Iterable[BlockCopy]) -> None:
        """Copy blocks from the GPU to host memory while forward steps go on.

        The stream of the steps copies blocks to a staging buffer on the GPU. A second stream copies that buffer to the
        host, while the first stream goes on, and fills another buffer.
        """
        step_stream = torch.cuda.current_stream(self._device.device)
        staged_blocks: list[tuple[Tensor, Tensor]] = []
        """Blocks in the staging buffer, with the blocks of host memory to which they go."""
        staged_bytes = 0
        for kind, source_id, target_id, _ in block_copies:
            block = self._view_block(self._device, kind, source_id)
            has_room = staged_bytes + len(block) <= len(self._staging[0])
            if not has_room:
                self._flush_staging(staged_blocks, step_stream)  # swaps the buffers
                staged_blocks, staged_bytes = [], 0
            last_flush = self._staging_events[0]
            if not staged_blocks and last_flush is not None:
                step_stream.wait_event(last_flush)  # this buffer's earlier contents must be on the host
            staged = self._staging[0][staged_bytes : staged_bytes + len(block)]
            staged.copy_(block)
            staged_blocks.append((staged, self._view_block(self._host, kind, target_id)))
            staged_bytes += len(block)
        self._flush_staging(staged_blocks, step_stream)

    def _flush_staging(self, staged_blocks: list[tuple[Tensor, Tensor]], step_stream: torch.cuda.Stream) -> None:
        """Queue the copies from a staging buffer to the host, and swap the two buffers."""
        self._copy_stream.wait_stream(step_stream)
        with torch.cuda.stream(self._copy_stream):
            for staged, host in staged_blocks:
                host.copy_(staged, non_blocking=True)
            copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy_event.record(self._copy_stream)
        self._staging_events = [self._staging_events[1], copy_event]
        self._staging.reverse()
