"""Loads of blocks from host memory for sequences that were admitted: a bounded number of bytes a step.

A sequence is admitted with device memory for every block that only the host has. The loads are spread over as many
steps as the bound asks for. The sequence computes nothing before the step that plans the last of its loads. A block
that was evicted to make room is copied to the host before its memory is overwritten. Until a load's step is committed
the device's block is pending, like a block that is computed. A load that no step plans yet can be taken back. So a
request that shares the block must wait (`has_unplanned`), or has the load planned at once (`load_now`).

A state that is resumed from host memory is loaded last, into the sequence's own state.

Owns the loads that are not planned, and those of the plan being made. Refuses to know tables and token budgets.
Invariant: the sequence holds the device's block of each load, and the load holds the host's block.
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
"""Most steps with decodes in a row that load nothing, because one block was larger than the bound."""


class HostHit(NamedTuple):
    """A block of a prompt's cached prefix that only host memory has."""

    group: int
    node: Node
    host_block: Block
    """Block of host memory, which is pinned."""


@dataclass(slots=True, eq=False)
class HostLoad:
    """A copy of one block from host memory, for a sequence."""

    seq: Sequence
    block: Block
    """Target on the device."""
    host_block: Block
    """Source in host memory, which is pinned until the load is over."""
    is_cancelled: bool = False
    """Whether the load was taken back after it was planned: then it is done in vain."""


class HostLoadQueue:
    """Loads that wait for a step, and loads of the step being planned."""

    def __init__(
        self, host_tier: HostTier, tree: PrefixTree, block_bytes_by_kind: list[int], step_bytes_max: int | None
    ) -> None:
        """`block_bytes_by_kind`: bytes of a block of each kind. `step_bytes_max`: bytes that a step
        with decodes may copy.

        A step may exceed `step_bytes_max`, and later steps copy less for it; None: no limit. Loads count, and so do the
        copies to the host that make room for loads.
        """
        assert step_bytes_max is None or step_bytes_max > 0
        self._host_tier = host_tier
        self._tree = tree
        self._block_bytes_by_kind = block_bytes_by_kind
        self._step_bytes_max = math.inf if step_bytes_max is None else step_bytes_max
        self._step_bytes_left = math.inf
        self._unplanned_loads_by_sequence: dict[Sequence, list[HostLoad]] = {}
        """Sequence -> its loads that no step has planned, the next one last, for `pop()`."""
        self.unplanned_blocks: set[Block] = set()
        """Device blocks that `_unplanned_loads_by_sequence` will fill."""
        self.planned_loads: list[HostLoad] = []
        """Loads of the plan being made, parents first."""

    def __contains__(self, seq: Sequence) -> bool:
        """Return whether loads for `seq` are left to plan."""
        return seq in self._unplanned_loads_by_sequence

    def has_unplanned(self, nodes: Iterable[Node]) -> bool:
        """Return whether the load of any of these nodes' blocks is not planned yet."""
        return bool(self.unplanned_blocks) and any(
            block in self.unplanned_blocks for node in nodes for block in node.blocks
        )

    def begin_step(self, *, has_decodes: bool) -> None:
        """Plan as many loads with the step as it may copy, in the order of admission.

        If a block exceeds the bound, the next steps copy less.
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
        """Load (device's block, host's block) pairs for `seq`, parents first; plan those that this step has room for.

        The host's blocks are pinned.
        """
        if block_pairs:
            self._unplanned_loads_by_sequence[seq] = [
                HostLoad(seq, block, host_block) for block, host_block in reversed(block_pairs)
            ]
            self.unplanned_blocks.update(block for block, _ in block_pairs)
            self._plan_loads(seq)

    def load_now(self, block: Block) -> None:
        """Plan the load of this block now, if it is not planned, and all other loads of its sequence."""
        if block in self.unplanned_blocks:
            seq = next(
                seq
                for seq, loads in self._unplanned_loads_by_sequence.items()
                if any(load.block is block for load in loads)
            )
            self._plan_loads(seq, ignore_limit=True)

    def cancel(self, seq: Sequence) -> None:
        """Take back the loads for `seq` that no step in flight has, children first.

        A load in the plan being made is done in vain: the next owner of its block overwrites it.
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
        """Return the sequences for which the plan being made loads something."""
        return {load.seq for load in self.planned_loads if not load.is_cancelled}

    def take_planned(self) -> list[HostLoad]:
        """Take the loads of the plan, which is complete."""
        loads, self.planned_loads = self.planned_loads, []
        return loads

    def commit(self, loads: list[HostLoad]) -> None:
        """Announce the blocks of loads that are done."""
        for load in loads:
            if load.is_cancelled:
                continue
            if load.block.node is not None:
                self._tree.commit(load.block)
                self._host_tier.finish_promotion(load.host_block)
            else:  # the state of a sequence, or the cache was reset meanwhile
                self._host_tier.unpin_state(load.host_block)

    def rollback(self, loads: Items[HostLoad]) -> None:
        """Take loads back that were not done."""
        for load in reversed(loads):
            if not load.is_cancelled:
                if load.block.node is not None:
                    self._tree.detach_pending(load.block)
                self._host_tier.unpin(load.host_block)

    def pinned_host_blocks(self) -> list[Block]:
        """Return the host's blocks that are pinned for loads which no step in flight has."""
        unplanned_loads = [load for loads in self._unplanned_loads_by_sequence.values() for load in loads]
        return [load.host_block for load in unplanned_loads + self.planned_loads if not load.is_cancelled]

    def _plan_loads(self, seq: Sequence, *, ignore_limit: bool = False) -> None:
        """Plan the loads for `seq`, as many as the step may still copy, or all of them."""
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
