"""Log of the blocks that each step, planned or in flight, finishes, loads and moves.

A step's blocks are **registered** while it is planned: they get their names, and later requests of the same step may
share them. When the step is computed they are **committed**: announced, or merged with an identical block. If the step
fails they are **rolled back**. If the last token of a block is not known when its step is planned, the block is named
when the step is committed.

Knows nothing of admission, and of how memory is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import Block, Node
from engine.cache.host_tier import HostLoad, HostTier
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree
from engine.cache.sequence_blocks import PendingMerge, SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import NoStates, StateCheckpoints
from engine.types import Chunk, Sequence


class FinishedBlocks(NamedTuple):
    """Blocks [start, end) of a sequence, which one step finishes and names."""

    seq_blocks: SequenceBlocks
    start: int
    end: int
    load_count: int
    """Number of the step's `host_loads` that were planned before these blocks were named.

    If request A loads 2 blocks and finishes one, and then B loads 3 and finishes one, A's block has 2 and B's has 5. So
    the order of announcements is 2 loads, A's block, 3 loads, B's block.
    """


@dataclass(slots=True)
class PendingStep:
    """The blocks of one step, from its planning to its result."""

    finished_blocks: list[FinishedBlocks] = field(default_factory=list)
    end_by_unnamed_sequence: dict[SequenceBlocks, int] = field(default_factory=dict)
    """End of the block that the step fills, by sequence. The last token of such a sequence is not known yet."""
    moved_blocks: list[Block] = field(default_factory=list)
    """Blocks that a compaction moves at the start of the step."""
    host_stores: list[Block] = field(default_factory=list)
    """Blocks of host memory that the step fills."""
    host_loads: list[HostLoad] = field(default_factory=list)
    """Loads in the order of planning, parents first."""
    chunks: Items[Chunk] = field(default_factory=list)


class StepLog:
    """Names the blocks of each step, and announces or undoes them once the step's result is known."""

    def __init__(
        self,
        spec: CacheSpec,
        hasher: BlockHasher,
        tree: PrefixTree,
        pool: UnitPool,
        states: StateCheckpoints | NoStates,
        host_tier: HostTier,
    ) -> None:
        """Start without steps. All parts are the cache's own: this one is told of each step, and calls the others."""
        self._block_size = spec.block_size
        self._groups = range(len(spec.groups))
        self._hasher = hasher
        self._tree = tree
        self._pool = pool
        self._states = states
        self._host_tier = host_tier
        self._planning_step = PendingStep()
        self._steps_in_flight: deque[PendingStep] = deque()
        self._untrusted_blocks: list[Block] = []
        """Blocks with unknown contents, because the step that should have copied them failed."""
        self._untrusted_host_blocks: list[Block] = []
        """Blocks of host memory with unknown contents, because the step that should have filled them failed."""

    # ------------------------------------------------------------------ planning

    def register_move(self, block: Block) -> None:
        """Record that a compaction of the step being planned moves a block."""
        self._planning_step.moved_blocks.append(block)

    def register_full_blocks(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Assign tree nodes, by which others find them, to the blocks that are full once `end` tokens are computed.

        A node is named by the hash of all tokens up to its end. So if a step in flight still draws the last of them,
        the node is assigned when that step is committed. Does nothing if the sequence's further blocks get no names.
        """
        full_count, remainder = divmod(end, self._block_size)
        named_count = len(seq_blocks.nodes)
        if full_count <= named_count or seq_blocks.is_detached:
            return
        seq = seq_blocks.seq
        if end > len(seq.token_ids):  # a step in flight draws the missing token
            if not remainder:
                self._planning_step.end_by_unnamed_sequence[seq_blocks] = end
                self._states.save_checkpoint(seq, None, end)
            return
        self._assign_nodes(seq_blocks, full_count)
        load_count = len(self._host_tier.planned_loads)
        self._planning_step.finished_blocks.append(
            FinishedBlocks(seq_blocks, named_count, len(seq_blocks.nodes), load_count)
        )
        if not seq_blocks.is_detached:
            self._states.reserve_checkpoint(seq, seq_blocks.nodes, seq.computed_tokens, end)

    def begin_step(self, chunks: Items[Chunk]) -> None:
        """Record that the step being planned is complete, and in flight from now on."""
        step, self._planning_step = self._planning_step, PendingStep()
        step.chunks = chunks
        step.host_stores = self._host_tier.take_planned_stores()
        step.host_loads = self._host_tier.take_planned_loads()
        self._steps_in_flight.append(step)

    def detach(self, seq_blocks: SequenceBlocks) -> None:
        """Assign no nodes to further blocks of a sequence."""
        seq_blocks.is_detached = True
        self._states.cancel_planned(seq_blocks.seq)

    # ------------------------------------------------------------------ results

    def commit(self, chunks: Items[Chunk], ended_sequences: Collection[Sequence]) -> None:
        """Announce the blocks of the oldest step in flight, which is computed, and merge identical blocks.

        `ended_sequences`: further blocks of these sequences get no nodes. Only chunks that finish a block cost time.
        """
        step = self._steps_in_flight.popleft()
        assert step.chunks is chunks
        announced_count = 0
        for seq_blocks, start, end, load_count in step.finished_blocks:
            # A computed block may follow a loaded one in its prefix, so loads that were planned before it come first.
            self._host_tier.commit_loads(step.host_loads[announced_count:load_count])
            announced_count = max(announced_count, load_count)
            self._commit_blocks(seq_blocks, start, end)
        self._host_tier.commit_loads(step.host_loads[announced_count:])
        for seq_blocks, end in step.end_by_unnamed_sequence.items():
            if seq_blocks.seq not in ended_sequences and not seq_blocks.is_detached:
                self._name_and_commit(seq_blocks, end)

    def _name_and_commit(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Name and announce a block that is computed now, and the checkpoint at its end, if its step took one.

        The block got no name with the others, because its last token was still being drawn when its step was planned.
        """
        start, full_count = len(seq_blocks.nodes), end // self._block_size
        self._assign_nodes(seq_blocks, full_count, is_computed=True)
        if len(seq_blocks.nodes) == full_count:
            self._states.attach_checkpoint(seq_blocks.seq, seq_blocks.nodes[-1], end)
        self._commit_blocks(seq_blocks, start, len(seq_blocks.nodes))

    def rollback(self) -> None:
        """Undo the newest step in flight, which was not computed: its registrations in the reverse of their order."""
        step = self._steps_in_flight.pop()
        self._untrusted_blocks += step.moved_blocks
        self._states.rollback(step.chunks)
        remaining_load_count = len(step.host_loads)
        for seq_blocks, start, end, load_count in reversed(step.finished_blocks):
            self._host_tier.rollback_loads(step.host_loads[load_count:remaining_load_count])
            remaining_load_count = min(remaining_load_count, load_count)
            for block in reversed(list(seq_blocks.iter_pending_blocks(start, end))):
                self._tree.detach_pending(block)
            del seq_blocks.nodes[start:]
        self._host_tier.rollback_loads(step.host_loads[:remaining_load_count])
        for seq_blocks, start, _, _ in step.finished_blocks:  # after the blocks that descend from them
            seq_blocks.drop_merges(self._pool, start)
        self._untrusted_host_blocks += step.host_stores

    def invalidate_failed_copies(self) -> bool:
        """Drop the blocks that copies of failed steps may or may not have filled.

        Returns True, with nothing done, while sequences hold any of these blocks: they must be released first.
        """
        host_blocks = self._untrusted_host_blocks + self._host_tier.untrusted_blocks()
        if any(block.ref_count for block in self._untrusted_blocks + host_blocks):
            return True
        for block in self._untrusted_blocks:
            if block.node is not None:
                self._tree.evict(block, keep_on_host=False)
        for block in host_blocks:
            if block.node is not None:
                self._host_tier.evict(block)
        self._untrusted_blocks.clear()
        self._untrusted_host_blocks.clear()
        return False

    # ------------------------------------------------------------------ names

    def _assign_nodes(self, seq_blocks: SequenceBlocks, full_count: int, *, is_computed: bool = False) -> None:
        """Name the sequence's blocks up to `full_count`; detach the sequence if another prefix has the same hash.

        `is_computed`: the blocks are computed already, so they cannot share a pending block; they are named later.
        """
        keys = self._hasher.block_keys(seq_blocks.seq, full_count)
        for index in range(len(seq_blocks.nodes), full_count):
            node = self._tree.get_or_create(keys[index], seq_blocks.nodes[-1] if seq_blocks.nodes else None)
            if node is None:
                self.detach(seq_blocks)
                return
            if is_computed and node.is_pending(self._groups):
                return
            seq_blocks.nodes.append(node)
            for group in self._groups:
                self._name_block(seq_blocks, group, index, node)

    def _name_block(self, seq_blocks: SequenceBlocks, group: int, index: int, node: Node) -> None:
        """Make `node` name a block of a sequence, so that other sequences with the same prefix find it.

        If the node names another block with the same content already, the two are merged at the commit.
        """
        held_block, named_block = seq_blocks.blocks_by_group[group][index], node.blocks[group]
        if held_block is None or held_block is named_block:
            return
        if named_block is None:
            self._tree.attach(node, held_block)
        else:
            self._pool.acquire(named_block)
            seq_blocks.pending_merges.append(PendingMerge(group, index, named_block))

    def _commit_blocks(self, seq_blocks: SequenceBlocks, start: int, end: int) -> None:
        """Announce the named blocks of [start, end), which are computed, and merge identical ones.

        If another sequence computed the same block, the table gets that one, and the sequence's own is released.
        """
        for block in seq_blocks.iter_pending_blocks(start, end):
            self._tree.commit(block)
        seq_blocks.committed_block_count = min(end, len(seq_blocks.nodes))  # fewer if the cache was reset meanwhile
        if not seq_blocks.pending_merges:
            return
        merges = seq_blocks.take_merges(end)
        if merges:
            seq_blocks.mark_replaced()
        for group, index, identical_block in merges:
            self._pool.release(seq_blocks.replace(group, index, identical_block))

    def list_pinned_host_blocks(self) -> list[Block]:
        """Return the blocks of host memory that loads hold, one entry for each load."""
        loads_in_flight = [load for step in self._steps_in_flight for load in step.host_loads]
        return [load.host_block for load in loads_in_flight + self._host_tier.planned_loads]
