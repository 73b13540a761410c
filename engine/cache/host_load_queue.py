"""Blocks on their way from host memory to sequences that were admitted: a bounded number of bytes a step.

A sequence is admitted with memory for all that it found below; the copies are planned with as many steps as the bound
asks for, and it computes nothing before the step that plans the last of them. What was evicted for them is copied to
the host with them, each before its memory is overwritten. Until a copy's step is committed its block is pending,
exactly as one that is computed. A copy that is not planned yet can be taken back; so nobody else may be given its
block, who must wait (`has_unplanned`) or has it planned at once (`load_now`).

A state that is resumed from host memory comes the same way, last, into the sequence's own.

Owns the copies ahead and those of the plan being made. Refuses to know tables and budgets of tokens. Invariant: every
block that it names is held by its sequence, and what it is read from is held here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.blocks import Block, Node
from engine.cache.host_tier import HostTier
from engine.cache.prefix_tree import PrefixTree
from engine.types import Sequence

STEPS_WITHOUT_LOAD_MAX = 3
"""Beside decodes, without a copy for those who wait, where one block takes more than the bound."""


class HostHit(NamedTuple):
    """A block of a prompt's hit that only host memory has."""

    group: int
    node: Node
    host_block: Block
    """It is pinned."""


@dataclass(slots=True, eq=False)
class HostLoad:
    """A copy from host memory for a sequence."""

    seq: Sequence
    block: Block
    """The device's."""
    host_block: Block
    """It is pinned until the load is over."""
    is_cancelled: bool = False
    """It was taken back after it was planned: it is done in vain."""


class HostLoadQueue:
    """`block_bytes_by_kind`: bytes of a block; `step_bytes_max`: copied beside decodes, in a step's mean.

    Counted is what comes up, and what goes down to make room for it.
    """

    def __init__(
        self, host_tier: HostTier, tree: PrefixTree, block_bytes_by_kind: list[int], step_bytes_max: int | None
    ) -> None:
        assert step_bytes_max is None or step_bytes_max > 0
        self._host_tier = host_tier
        self._tree = tree
        self._block_bytes_by_kind = block_bytes_by_kind
        self._step_bytes_max = math.inf if step_bytes_max is None else step_bytes_max
        self._step_bytes_left = math.inf
        self._unplanned_loads_by_sequence: dict[Sequence, list[HostLoad]] = {}
        """Not planned yet, the last first."""
        self.unplanned_blocks: set[Block] = set()
        """The device's, of these."""
        self.planned_loads: list[HostLoad] = []
        """Of the plan being made, parents first."""

    def __contains__(self, seq: Sequence) -> bool:
        """Whether copies for `seq` are left to plan."""
        return seq in self._unplanned_loads_by_sequence

    def __bool__(self) -> bool:
        """Whether copies for anybody are."""
        return bool(self._unplanned_loads_by_sequence)

    def has_unplanned(self, nodes: Iterable[Node]) -> bool:
        """Whether any of these has a block whose copy is not planned yet."""
        return bool(self.unplanned_blocks) and any(
            block in self.unplanned_blocks for node in nodes for block in node.blocks
        )

    def begin_step(self, *, has_decodes: bool) -> None:
        """A step is planned: give those who wait what it may copy, those who came first before the others.

        What a block takes beyond the bound the next steps copy less.
        """
        step_bytes = self._step_bytes_max
        self._step_bytes_left = (
            max(min(self._step_bytes_left, 0), -STEPS_WITHOUT_LOAD_MAX * step_bytes) + step_bytes
            if has_decodes
            else math.inf
        )
        if self._unplanned_loads_by_sequence:
            for seq in list(self._unplanned_loads_by_sequence):
                self._plan_loads(seq)

    def add(self, seq: Sequence, block_pairs: list[tuple[Block, Block]]) -> None:
        """Fill (the device's block, the host's, held) of each, parents first. What the step has room for is planned."""
        if block_pairs:
            self._unplanned_loads_by_sequence[seq] = [
                HostLoad(seq, block, host_block) for block, host_block in reversed(block_pairs)
            ]
            self.unplanned_blocks.update(block for block, _ in block_pairs)
            self._plan_loads(seq)

    def load_now(self, block: Block) -> None:
        """Somebody is about to share this block: if its copy is not planned, all of its sequence's are now."""
        if block in self.unplanned_blocks:
            seq = next(
                seq
                for seq, loads in self._unplanned_loads_by_sequence.items()
                if any(load.block is block for load in loads)
            )
            self._plan_loads(seq, ignore_limit=True)

    def cancel(self, seq: Sequence) -> None:
        """Take back what is not planned, or only in the plan being made; children first.

        A copy in that plan is done in vain: its block is overwritten by whoever has it next.
        """
        loads = self._unplanned_loads_by_sequence.pop(seq, [])
        for load in loads:
            self.unplanned_blocks.discard(load.block)
            self._host_tier.flush_before_overwrite(load.block)
        self.rollback(loads[::-1])
        for load in reversed(self.planned_loads):
            if load.seq is seq and not load.is_cancelled:
                self.rollback([load])
                load.is_cancelled = True

    def list_planned_sequences(self) -> set[Sequence]:
        """Sequences that the plan being made copies something for."""
        return {load.seq for load in self.planned_loads if not load.is_cancelled}

    def take_planned(self) -> list[HostLoad]:
        """The plan is made: its copies."""
        loads, self.planned_loads = self.planned_loads, []
        return loads

    def commit(self, loads: list[HostLoad]) -> None:
        """They are done: announce the blocks."""
        for load in loads:
            if load.is_cancelled:
                continue
            if load.block.node is not None:
                self._tree.commit(load.block)
                self._host_tier.finish_promotion(load.host_block)
            else:  # a sequence's own state, or the cache was reset meanwhile
                self._host_tier.unpin_state(load.host_block)

    def rollback(self, loads: Items[HostLoad]) -> None:
        """They were not done."""
        for load in reversed(loads):
            if not load.is_cancelled:
                if load.block.node is not None:
                    self._tree.detach_pending(load.block)
                self._host_tier.unpin(load.host_block)

    def pinned_host_blocks(self) -> list[Block]:
        """Blocks of the host that are held for copies which no step has yet."""
        unplanned_loads = [load for loads in self._unplanned_loads_by_sequence.values() for load in loads]
        return [load.host_block for load in unplanned_loads + self.planned_loads if not load.is_cancelled]

    def _plan_loads(self, seq: Sequence, *, ignore_limit: bool = False) -> None:
        loads = self._unplanned_loads_by_sequence[seq]
        while loads:
            if self._step_bytes_left <= 0 and not ignore_limit:
                return
            load = loads.pop()
            block = load.block
            if not ignore_limit:
                self._step_bytes_left -= sum(
                    self._block_bytes_by_kind[kind] for kind in (block.kind, *self._host_tier.kinds_to_flush(block))
                )
            self._host_tier.plan_load(load.host_block, block)
            self.unplanned_blocks.discard(block)
            self.planned_loads.append(load)
        del self._unplanned_loads_by_sequence[seq]

    def check_invariants(self) -> None:
        blocks = [load.block for loads in self._unplanned_loads_by_sequence.values() for load in loads]
        assert all(self._unplanned_loads_by_sequence.values())
        assert len(blocks) == len(self.unplanned_blocks)
        assert set(blocks) == self.unplanned_blocks
        assert all(block.ref_count == 1 for block in blocks), "a block whose copy is not planned is shared"
