"""What tests of the disk cache begin with: files that a process has written, and a bench over a disk."""

from __future__ import annotations

import random
from pathlib import Path

from drawn_specs import group
from fake_device import Bench
from fake_disk import FakeDisk, Slots

from engine.cache.disk.index import DiskIndex
from engine.cache.kv_cache import KVCache
from engine.cache.nodes import DiskBlock, HashBlock
from engine.cache.spec import CacheSpec
from engine.execution.disk_files import DiskFiles
from engine.scheduler import SchedulerConfig
from engine.types import BlockId
from events import STORAGE
from events.hashing import block_hash, pack_token_ids

BYTES, TOKENS = 1000, 4
FILES_BYTES = 50_000


def opened(folder: Path, size: int = FILES_BYTES, model: str = "a") -> tuple[DiskFiles, bytearray]:
    """The files, and the host memory of sixteen blocks."""
    files = DiskFiles(folder, {"model": model}, size, BYTES, TOKENS)
    memory = bytearray(16 * BYTES)
    files.start(lambda block: memoryview(memory)[block * BYTES : (block + 1) * BYTES], lambda: None)
    return files, memory


def finished(files: DiskFiles, count: int) -> list[bool]:
    found: list[bool] = []
    while len(found) < count:
        files.wait(5.0)
        found += [succeeded for _, succeeded in files.done()]
    return found


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def fill(folder: Path, count: int) -> list[HashBlock]:
    """A chain of blocks, each under a name, written by a process that ends."""
    files, memory = opened(folder)
    index, parent = DiskIndex(files.slots, files.found), None
    names: list[HashBlock] = []
    for number in range(count):
        tokens = [number] * TOKENS
        hash_ = block_hash(None if parent is None else parent.hash, tokens)
        names.append(HashBlock(hash_, pack_token_ids(tokens), ("salt",) if not number else None, None))
        memory[number * BYTES : (number + 1) * BYTES] = content(number)
        parent = index.add(names[-1], parent, [])
        assert parent is not None
        files.write(parent, BlockId(number))
        index.written(parent)
    files.close()
    assert all(succeeded for _, succeeded in files.done())
    return names


def found(files: DiskFiles, names: list[HashBlock]) -> list[DiskBlock]:
    return DiskIndex(files.slots, files.found).match(names)


SIZE = 4
TEXT = [1, 2, 3, 0] * 12
"""Twelve blocks."""


def bench_on(
    kept: Slots, *, slots: int = 100, units: int = 20, host_units: int = 60, overlap: bool = False
) -> tuple[Bench, FakeDisk]:
    disk = FakeDisk(slots, kept=kept)
    cache = KVCache(
        CacheSpec(block_size=SIZE, groups=(group(1),)), units, host_units=host_units, step_tokens_max=40, disk=disk
    )
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=78)
    bench = Bench(cache, config, overlap=overlap)
    disk.device = bench.device
    return bench, disk


def other(number: int) -> list[int]:
    """Eighteen blocks: what fills the device."""
    return [number % 5] * 72


def drain(bench: Bench) -> None:
    bench.drain()
    while bench.core.has_events:
        bench.step()
    bench.check()
    bench.assert_correct()


def written(bench: Bench) -> set[int]:
    return {name for _, name, medium in bench.events.resident if medium == STORAGE}


def after_a_restart() -> Slots:
    """TEXT was evicted from the device, and written."""
    bench, disk = bench_on({})
    bench.add("text", TEXT, max_tokens=1)
    drain(bench)
    bench.add("other", other(4), max_tokens=6)
    drain(bench)
    assert len(written(bench)) >= 10
    return disk.kept
