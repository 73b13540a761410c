"""Blocks on their way from host memory to sequences that were admitted: a bounded number of bytes a step.

A sequence is admitted with memory for all that it found below; the copies are planned with as many steps as the bound
asks for, and it computes nothing before the step that plans the last of them. What was evicted for them is copied to
the host with them, each before its memory is overwritten. Until a copy's step is committed its block is pending,
exactly as one that is computed. A copy that is not planned yet can be taken back; so nobody else may be given its
block, who must wait (`holds`) or has it planned at once (`hurry`).

A state that is resumed from host memory comes the same way, last, into the sequence's own.

Owns the copies ahead and those of the plan being made. Refuses to know tables and budgets of tokens. Invariant: every
block that it names is held by its sequence, and what it is read from is held here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

from engine.cache.host_tier import HostTier
from engine.cache.nodes import Node
from engine.cache.pool import Block
from engine.cache.prefix_tree import PrefixTree
from engine.types import Sequence

STEPS_BETWEEN_MAX = 3
"""Beside decodes, without a copy for those who wait, where one block takes more than the bound."""
HostLoad = tuple[Sequence, Block[Node], Block[Node]]
"""(whom it is for, the device's block, the host's that it is read from, held)."""


class HostLoadQueue:
    """`sizes`: bytes of a block of every kind; `step_bytes_max`: copied beside decodes, in a step's mean.

    Counted is what comes up, and what goes down to make room for it.
    """

    def __init__(self, host: HostTier, tree: PrefixTree, sizes: list[int], step_bytes_max: int | None) -> None:
        assert step_bytes_max is None or step_bytes_max > 0
        self._host = host
        self._tree = tree
        self._sizes = sizes
        self._step_bytes_max = math.inf if step_bytes_max is None else step_bytes_max
        self._left = math.inf
        self._ahead: dict[Sequence, list[HostLoad]] = {}
        """Not planned yet, the last first."""
        self.blocks: set[Block[Node]] = set()
        """The device's, of these."""
        self.planned: list[HostLoad | None] = []
        """Of the plan being made, parents first; None for one that was taken back."""

    def __contains__(self, seq: Sequence) -> bool:
        """Whether copies for `seq` are left to plan."""
        return seq in self._ahead

    def __bool__(self) -> bool:
        """Whether copies for anybody are."""
        return bool(self._ahead)

    def holds(self, nodes: Iterable[Node]) -> bool:
        """Whether any of these has a block whose copy is not planned yet."""
        return bool(self.blocks) and any(block in self.blocks for node in nodes for block in node.blocks)

    def begin(self, *, beside_decodes: bool) -> None:
        """A step is planned: give those who wait what it may copy, those who came first before the others.

        What a block takes beyond the bound the next steps copy less.
        """
        bound = self._step_bytes_max
        self._left = max(min(self._left, 0), -STEPS_BETWEEN_MAX * bound) + bound if beside_decodes else math.inf
        for seq in list(self._ahead):
            self._plan(seq)

    def add(self, seq: Sequence, missing: list[tuple[Block[Node], Block[Node]]]) -> None:
        """Fill (the device's block, the host's, held) of each, parents first. What the step has room for is planned."""
        if missing:
            self._ahead[seq] = [(seq, block, own) for block, own in reversed(missing)]
            self.blocks.update(block for block, _ in missing)
            self._plan(seq)

    def hurry(self, block: Block[Node]) -> None:
        """Somebody is about to share this block: if its copy is not planned, all of its sequence's are now."""
        if block in self.blocks:
            seq = next(seq for seq, loads in self._ahead.items() if any(block is other for _, other, _ in loads))
            self._plan(seq, hurry=True)

    def drop(self, seq: Sequence) -> None:
        """Take back what is not planned, or only in the plan being made; children first.

        A copy in that plan is done in vain: its block is overwritten by whoever has it next.
        """
        ahead = self._ahead.pop(seq, [])
        for _, block, _ in ahead:
            self.blocks.discard(block)
            self._host.vacate(block)
        self.abandon(ahead[::-1])
        for index, load in reversed(list(enumerate(self.planned))):
            if load is not None and load[0] is seq:
                self.abandon([load])
                self.planned[index] = None

    def take(self) -> list[HostLoad | None]:
        """The plan is made: its copies."""
        planned, self.planned = self.planned, []
        return planned

    def commit(self, loads: list[HostLoad | None]) -> None:
        """They are done: announce the blocks."""
        for load in loads:
            if load is not None:
                _, block, own = load
                if block.node is not None:
                    self._tree.commit(block)
                    self._host.taken(own)
                else:  # a sequence's own state, or the cache was reset meanwhile
                    self._host.return_state(own)

    def abandon(self, loads: Items[HostLoad | None]) -> None:
        """They were not done."""
        for load in reversed(loads):
            if load is not None:
                _, block, own = load
                if block.node is not None:
                    self._tree.withdraw(block)
                self._host.let_go(own)

    def references(self) -> list[Block[Node]]:
        """Blocks of the host that are held for copies which no step has yet."""
        ahead = [own for loads in self._ahead.values() for _, _, own in loads]
        return ahead + [load[2] for load in self.planned if load is not None]

    def _plan(self, seq: Sequence, *, hurry: bool = False) -> None:
        ahead = self._ahead[seq]
        while ahead:
            if self._left <= 0 and not hurry:
                return
            load = ahead.pop()
            _, block, own = load
            if not hurry:
                self._left -= sum(self._sizes[kind] for kind in (block.kind, *self._host.vacating(block)))
            self._host.fetch(own, block)
            self.blocks.discard(block)
            self.planned.append(load)
        del self._ahead[seq]

    def check_invariants(self) -> None:
        blocks = [block for loads in self._ahead.values() for _, block, _ in loads]
        assert all(self._ahead.values())
        assert len(blocks) == len(self.blocks)
        assert set(blocks) == self.blocks
        assert all(block.refs == 1 for block in blocks), "a block whose copy is not planned is shared"
