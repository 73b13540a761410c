"""A disk without files: its thread works when the test lets it, on the fake device's host memory as that is then."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from fake_device import FakeDevice

from engine.cache.disk.index import Found
from engine.cache.nodes import DiskBlock, HashBlock
from engine.types import BlockId

Content = list[int | None]
Slots = dict[int, tuple[Found, Content]]


class FakeDisk:
    """An `engine.cache.disk.jobs.Disk`. `kept`: what lies on it, also for another one after a restart."""

    block_bytes = 1
    lost = False

    def __init__(self, slots: int, rng: random.Random | None = None, kept: Slots | None = None) -> None:
        """With `rng` it works at random moments and sometimes fails; else when it is asked what is done."""
        self.slots = slots
        self.kept: Slots = {} if kept is None else kept
        self.found = [found for found, _ in self.kept.values()]
        self.device: FakeDevice | None = None
        self.rng = rng
        self.failing = 0.0
        self.jobs: deque[Callable[[], tuple[DiskBlock, bool] | None]] = deque()
        self.reads: deque[Callable[[], tuple[DiskBlock, bool] | None]] = deque()
        self.finished: list[tuple[DiskBlock, bool]] = []
        self.stuck = False
        self.seconds = 0.0
        """That reading takes, as far as is known."""
        self.writes = 0

    def fits(self, name: HashBlock) -> bool:
        return name.hash % 37 != 0

    def write(self, entry: DiskBlock, source: BlockId) -> None:
        self.jobs.append(partial(self._write, entry, source))

    def read(self, entry: DiskBlock, target: BlockId) -> None:
        self.reads.append(partial(self._read, entry, target))

    def erase(self, entry: DiskBlock) -> None:
        self.jobs.append(partial(self._erase, entry))

    def clear(self) -> None:
        self.jobs.append(self._clear)

    def read_s(self, blocks: int) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.work(1_000)

    def close(self) -> None:
        self.work(1_000_000)

    def done(self) -> list[tuple[DiskBlock, bool]]:
        self.work(1_000_000 if self.rng is None else self.rng.choice([0, 0, 1, 5]))
        finished, self.finished = self.finished, []
        return finished

    def work(self, count: int) -> None:
        for _ in range(0 if self.stuck else count):
            queue = self.reads or self.jobs
            if not queue:
                return
            result = queue.popleft()()
            if result is not None:
                self.finished.append(result)

    def _fails(self) -> bool:
        return self.rng is not None and self.rng.random() < self.failing

    def _write(self, entry: DiskBlock, source: BlockId) -> tuple[DiskBlock, bool]:
        assert self.device is not None
        self.kept.pop(entry.slot, None)
        if self._fails():
            return entry, False
        self.writes += 1
        content = list(self.device.host_slots[0, source])
        assert None not in content, "written before it was there"
        parent = None if entry.parent is None else entry.parent.serial
        self.kept[entry.slot] = Found(entry.slot, entry.serial, parent, entry.name), content
        return entry, True

    def _read(self, entry: DiskBlock, target: BlockId) -> tuple[DiskBlock, bool]:
        assert self.device is not None
        found, content = self.kept.get(entry.slot, (None, []))
        if found is None or found.serial != entry.serial or self._fails():
            self.device.host_slots[0, target] = [-1] * self.device.block_size
            return entry, False
        assert found.name.equals(entry.name)
        self.device.host_slots[0, target] = list(content)
        return entry, True

    def _erase(self, entry: DiskBlock) -> None:
        self.kept.pop(entry.slot, None)

    def _clear(self) -> None:
        self.kept.clear()
