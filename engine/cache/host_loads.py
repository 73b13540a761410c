"""Loads of blocks from host memory for sequences that are admitted.

A sequence is admitted with a device block for every block that only the host has. The same step first copies these
blocks to the device, and then computes the sequence. A block that was evicted to make room is copied to the host
before its memory is overwritten. Until the step is committed the device's block is pending, like a block that is
computed. A state that is resumed from host memory is loaded last, into the sequence's own state.

Owns the loads of the plan being made. Refuses to know tables and token budgets.
Invariant: the sequence holds the device's block of each load, and the load holds the host's block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.blocks import Block, Node
from engine.cache.host_tier import HostTier
from engine.cache.prefix_tree import PrefixTree


class HostHit(NamedTuple):
    """A block of a prompt's cached prefix that only host memory has."""

    group: int
    node: Node
    host_block: Block
    """Block of host memory, which is pinned."""


@dataclass(slots=True, eq=False)
class HostLoad:
    """A copy of one block from host memory to the device."""

    block: Block
    """Target on the device."""
    host_block: Block
    """Source in host memory, which is pinned until the load is over."""


class HostLoads:
    """Plans loads from host memory, and announces or undoes them once their step has ended."""

    def __init__(self, host_tier: HostTier, tree: PrefixTree) -> None:
        self._host_tier = host_tier
        self._tree = tree
        self.planned_loads: list[HostLoad] = []
        """Loads of the plan being made, parents first."""

    def plan(self, block_pairs: Iterable[tuple[Block, Block]]) -> None:
        """Add loads to the plan being made, parents first. Each pair is (device block, pinned host block)."""
        for block, host_block in block_pairs:
            self._host_tier.plan_load(host_block, block)
            self.planned_loads.append(HostLoad(block, host_block))

    def take_planned(self) -> list[HostLoad]:
        """Take the loads of the plan, which is complete."""
        loads, self.planned_loads = self.planned_loads, []
        return loads

    def commit(self, loads: Sequence[HostLoad]) -> None:
        """Announce the blocks of loads that are done."""
        for load in loads:
            if load.block.node is not None:
                self._tree.commit(load.block)
                self._host_tier.finish_promotion(load.host_block)
            else:  # the state of a sequence, or the cache was reset meanwhile
                self._host_tier.unpin_state(load.host_block)

    def rollback(self, loads: Sequence[HostLoad]) -> None:
        """Take back loads that were not done, children first."""
        for load in reversed(loads):
            if load.block.node is not None:
                self._tree.detach_pending(load.block)
            self._host_tier.unpin(load.host_block)
