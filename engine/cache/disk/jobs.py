"""What the step loop asks of a disk, and what is on its way there and back."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.disk.index import Found
from engine.cache.nodes import DiskBlock, HashBlock, Node
from engine.cache.pool import Block
from engine.types import BlockId


class Disk(Protocol):
    """Files, and a thread that reads and writes them."""

    slots: int
    found: Items[Found]
    """What an earlier process wrote, in any order."""
    block_bytes: int
    lost: bool
    """Nothing can be read any more."""

    def fits(self, name: HashBlock) -> bool:
        """Whether there is room for its keys."""
        ...

    def write(self, entry: DiskBlock, source: BlockId) -> None:
        """Write this block of host memory, behind what was asked to be written before."""
        ...

    def read(self, entry: DiskBlock, target: BlockId) -> None:
        """Read into this block of host memory what must be the entry's, by name and checksum."""
        ...

    def erase(self, entry: DiskBlock) -> None:
        """No later process is to find it."""
        ...

    def clear(self) -> None:
        """No later process is to find anything that was written or asked to be before."""
        ...

    def done(self) -> list[tuple[DiskBlock, bool]]:
        """What was read or written since the last call, in order, and whether it succeeded."""
        ...

    def read_s(self, blocks: int) -> float:
        """How long reading so many more takes, as far as is known."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something is done, and no longer than this."""
        ...

    def close(self) -> None:
        """Finish what was asked for, as far as that takes some seconds, and give the files up. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class Write:
    entry: DiskBlock
    own: Block[Node]
    ready: bool
    """Its bytes are there."""


@dataclass(slots=True, eq=False)
class Wait:
    """A request that waits for the disk, or has waited."""

    until_s: float
    last: DiskBlock | None = None
    """Of those that are read for it, the last."""
    asks: bool = True
    """It has not been found out yet what is to be read for it: there was no room."""
    over: bool = False
    held: list[Block[Node]] = field(default_factory=list)
    """Of host memory, parents first: until it is over they stay."""


@dataclass(slots=True, eq=False)
class Read:
    entry: DiskBlock
    own: Block[Node]
    wait: Wait
    behind: int | None = None
    """Steps that must be over before."""


@dataclass(slots=True)
class DiskTotals:
    """Since the start, in blocks."""

    stored: int = 0
    loaded: int = 0
    passed_over: int = 0
    """That were to be written, and were not: too many at once, no room, keys too long."""
    failed_reads: int = 0
    """What was read was not what had been written, or could not be read."""
    failed_writes: int = 0
