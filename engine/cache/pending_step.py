"""What commit or rollback must know of a step that is planned."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.host_load_queue import HostLoad
from engine.cache.nodes import Node
from engine.cache.pool import Block
from engine.types import Chunk, Sequence


class FinishedBlocks(NamedTuple):
    """The blocks [start, end) of a sequence, which a step finishes and names."""

    seq: Sequence
    start: int
    end: int
    load_count: int
    """How many of the step's `host_loads` come before them."""


@dataclass(slots=True)
class PendingStep:
    """A step between its plan and its result."""

    finished_blocks: list[FinishedBlocks] = field(default_factory=list)
    unnamed_blocks: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, end): its last block is full at `end`, with a token that is not known yet."""
    moved_blocks: list[Block[Node]] = field(default_factory=list)
    """By a compaction that the step does first."""
    host_stores: list[Block[Node]] = field(default_factory=list)
    """Of the host: what the step fills there."""
    host_loads: list[HostLoad | None] = field(default_factory=list)
    """In the order of planning, parents first; None for one that was taken back."""
    chunks: Items[Chunk] = field(default_factory=list)
