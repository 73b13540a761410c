"""Copies of blocks that a step does before anything else: within the device's memory, to the host's and back.

Owns the host's memory. On a CPU the thread that computes the step copies. On a GPU what goes to the host is gathered
on the device, in order with the steps, and a stream of its own carries it on while they compute; what comes back is
read in order with the steps, behind what was carried before. So moves have the effect of being done one by one.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.types import BlockCopy, BlockId, CopyDirection

STAGING_BYTES = 64 << 20
"""Of each of two pieces of a GPU's memory through which blocks go to the host; a block at least."""


class BlockMoves:
    """Of a device's `buffer` of units, [units * stride] bytes, and of as many units of host memory as are asked for."""

    def __init__(self, spec: CacheSpec, buffer: Tensor, stride: int, host_units: int) -> None:
        """Raises RuntimeError where there is no memory to be had, or none to be pinned."""
        self._device = buffer
        self._on_gpu = buffer.device.type != "cpu"
        if self._on_gpu or not host_units:
            self._host = torch.empty(host_units * stride, dtype=torch.uint8, pin_memory=host_units > 0)
        else:
            self._host = _large_pages(host_units * stride)
        self._stride = stride
        self._sizes = [(spec.blocks_per_unit(g), spec.block_bytes(g)) for g in range(len(spec.groups))]
        if spec.state is not None:
            self._sizes.append((1, stride))
        self.copy_s = 0.0
        """That a CPU's thread has spent on copies to the host and back."""
        if self._on_gpu and host_units:
            self._carrier = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
            size = max(STAGING_BYTES, *(block_bytes for _, block_bytes in self._sizes))
            self._staging = [torch.empty(size, dtype=torch.uint8, device=buffer.device) for _ in range(2)]
            self._carried: list[torch.cuda.Event | None] = [None, None]

    def do(self, moves: Iterable[BlockCopy]) -> None:
        """All of them, in order. On a GPU: queue them on the current stream."""
        for way, run in groupby(moves, lambda move: move.direction):
            if way is CopyDirection.TO_HOST and self._on_gpu:
                self._carry(run)
                continue
            if way is CopyDirection.FROM_HOST and self._on_gpu:
                torch.cuda.current_stream(self._device.device).wait_stream(self._carrier)
            if not self._on_gpu:
                self._copy(way, run)
                continue
            of = self._host if way is CopyDirection.FROM_HOST else self._device
            for kind, source, target, _ in run:
                self._block(self._device, kind, target).copy_(self._block(of, kind, source), non_blocking=True)

    def _copy(self, way: CopyDirection, moves: Iterable[BlockCopy]) -> None:
        """On a CPU: by addresses, which cost less than an array's slices, and a fraction of a tensor's."""
        start_s = time.perf_counter()
        to = self._host if way is CopyDirection.TO_HOST else self._device
        of = self._host if way is CopyDirection.FROM_HOST else self._device
        to_start, of_start = to.data_ptr(), of.data_ptr()
        ends = to.numel(), of.numel()
        for kind, source, target, _ in moves:
            there, here = self._place(kind, target), self._place(kind, source)
            if min(there.start, here.start) < 0 or there.stop > ends[0] or here.stop > ends[1]:
                raise AssertionError(f"{way}: block {source} or {target} of kind {kind} lies outside its memory")
            ctypes.memmove(to_start + there.start, of_start + here.start, there.stop - there.start)
        if way is not CopyDirection.WITHIN:
            self.copy_s += time.perf_counter() - start_s

    def _place(self, kind: int, block: BlockId) -> slice:
        per_unit, size = self._sizes[kind]
        start = block // per_unit * self._stride + block % per_unit * size
        return slice(start, start + size)

    def _block(self, memory: Tensor, kind: int, block: BlockId) -> Tensor:
        return memory[self._place(kind, block)]

    def _carry(self, moves: Iterable[BlockCopy]) -> None:
        """To the host, by the carrier, from where nothing that the steps write overwrites it."""
        main = torch.cuda.current_stream(self._device.device)
        pieces: list[tuple[Tensor, Tensor]] = []
        used = 0
        for kind, source, target, _ in moves:
            block = self._block(self._device, kind, source)
            if used + len(block) > len(self._staging[0]):
                self._send(pieces, main)
                pieces, used = [], 0
            if not pieces and (carried := self._carried[0]) is not None:
                main.wait_event(carried)
            piece = self._staging[0][used : used + len(block)]
            piece.copy_(block)
            pieces.append((self._block(self._host, kind, target), piece))
            used += len(block)
        self._send(pieces, main)

    def _send(self, pieces: list[tuple[Tensor, Tensor]], main: torch.cuda.Stream) -> None:
        """What one staging holds; the next blocks go through the other."""
        self._carrier.wait_stream(main)
        with torch.cuda.stream(self._carrier):
            for host, piece in pieces:
                host.copy_(piece, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._carrier)
        self._carried = [self._carried[1], done]
        self._staging.reverse()


def _large_pages(size: int) -> Tensor:
    """[size] zeros, touched now and not within the steps that come to them first, in large pages where there are any.

    A block that nobody has looked at for long is copied a third faster for it. Raises RuntimeError without memory.
    """
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{size} bytes of host memory: {error}") from error
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
