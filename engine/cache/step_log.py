"""What the steps that are planned or out do to the cache: blocks that they finish, load and move.

A step's blocks are **registered** while it is planned: they get their names, and may be shared by later requests of the
same step. When the step is computed they are **committed**: announced, or merged where an identical block exists. When
it fails they are **rolled back**. A block that a step finishes with a token which is not known yet is named when that
step is committed.

Owns what commit and rollback must know of each step. Refuses to know admission, and how memory is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import Block
from engine.cache.host_load_queue import HostLoad, HostLoadQueue
from engine.cache.host_tier import HostTier
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree
from engine.cache.sequence_blocks import PendingMerge, SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import NoStates, StateCheckpoints
from engine.types import Chunk, Sequence


class FinishedBlocks(NamedTuple):
    """The blocks [start, end) of a sequence, which a step finishes and names."""

    seq_blocks: SequenceBlocks
    start: int
    end: int
    load_count: int
    """How many of the step's `host_loads` come before them."""


@dataclass(slots=True)
class PendingStep:
    """A step between its plan and its result."""

    finished_blocks: list[FinishedBlocks] = field(default_factory=list)
    end_by_unnamed: dict[SequenceBlocks, int] = field(default_factory=dict)
    """Sequences whose last block is full at this position, with a token that is not known yet."""
    moved_blocks: list[Block] = field(default_factory=list)
    """Blocks that a compaction moves, which the step does first."""
    host_stores: list[Block] = field(default_factory=list)
    """Blocks of the host that the step fills."""
    host_loads: list[HostLoad] = field(default_factory=list)
    """In the order of planning, parents first."""
    chunks: Items[Chunk] = field(default_factory=list)


class StepLog:
    """The step being planned, and the steps that are out."""

    def __init__(
        self,
        spec: CacheSpec,
        hasher: BlockHasher,
        tree: PrefixTree,
        pool: UnitPool,
        states: StateCheckpoints | NoStates,
        host_tier: HostTier,
        loads: HostLoadQueue,
    ) -> None:
        self._block_size = spec.block_size
        self._groups = range(len(spec.groups))
        self._hasher = hasher
        self._tree = tree
        self._pool = pool
        self._states = states
        self._host_tier = host_tier
        self._loads = loads
        self._planning_step = PendingStep()
        self._steps_in_flight: deque[PendingStep] = deque()
        self._untrusted_blocks: list[Block] = []
        self._untrusted_host_blocks: list[Block] = []
        """Moved by steps that failed."""

    # ------------------------------------------------------------------ planning

    def register_move(self, block: Block) -> None:
        """The step moves a block to other memory first."""
        self._planning_step.moved_blocks.append(block)

    def register_full_blocks(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Name the blocks that computing up to `end` finishes. Where an identical one exists, merge at commit."""
        full_count, remainder = divmod(end, self._block_size)
        named_count = len(seq_blocks.nodes)
        if full_count <= named_count or seq_blocks.is_detached:
            return
        seq = seq_blocks.seq
        if end > len(seq.token_ids):
            if not remainder:
                self._planning_step.end_by_unnamed[seq_blocks] = end
                self._states.save_checkpoint(seq, None, end)
            return
        self._assign_nodes(seq_blocks, full_count)
        load_count = len(self._loads.planned_loads)
        self._planning_step.finished_blocks.append(
            FinishedBlocks(seq_blocks, named_count, len(seq_blocks.nodes), load_count)
        )
        if not seq_blocks.is_detached:
            self._states.reserve_checkpoint(seq, seq_blocks.nodes, seq.computed_tokens, end)

    def begin_step(self, chunks: Items[Chunk]) -> None:
        """The step is planned: it is out now."""
        step, self._planning_step = self._planning_step, PendingStep()
        step.chunks = chunks
        step.host_stores = self._host_tier.take_planned_stores()
        step.host_loads = self._loads.take_planned()
        self._steps_in_flight.append(step)

    def detach(self, seq_blocks: SequenceBlocks) -> None:
        """What the sequence finishes from now on stays unnamed."""
        seq_blocks.is_detached = True
        self._states.cancel_planned(seq_blocks.seq)

    # ------------------------------------------------------------------ results

    def commit(self, chunks: Items[Chunk], ended_sequences: Collection[Sequence]) -> None:
        """The oldest step's compute is done: announce what it finished, merge what it finished twice.

        Nothing of the `ended_sequences` is named any more. Most chunks of a step are decodes that finish no block: only
        chunks that finish one are looked at.
        """
        step = self._steps_in_flight.popleft()
        assert step.chunks is chunks
        committed_load_count = 0
        for seq_blocks, start, end, load_count in step.finished_blocks:
            self._loads.commit(step.host_loads[committed_load_count:load_count])
            committed_load_count = max(committed_load_count, load_count)
            self._commit_blocks(seq_blocks, start, end)
        self._loads.commit(step.host_loads[committed_load_count:])
        for seq_blocks, end in step.end_by_unnamed.items():
            if seq_blocks.seq not in ended_sequences and not seq_blocks.is_detached:
                self._name_and_commit(seq_blocks, end)

    def _name_and_commit(self, seq_blocks: SequenceBlocks, end: int) -> None:
        start, full_count = len(seq_blocks.nodes), end // self._block_size
        self._assign_nodes(seq_blocks, full_count, is_computed=True)
        if len(seq_blocks.nodes) == full_count:
            self._states.attach_checkpoint(seq_blocks.seq, seq_blocks.nodes[-1], end)
        self._commit_blocks(seq_blocks, start, len(seq_blocks.nodes))

    def rollback(self) -> None:
        """The newest step that is out was not computed: none of its blocks may be trusted or announced."""
        step = self._steps_in_flight.pop()
        self._untrusted_blocks += step.moved_blocks
        self._states.rollback(step.chunks)
        remaining_load_count = len(step.host_loads)
        for seq_blocks, start, end, load_count in reversed(step.finished_blocks):
            self._loads.rollback(step.host_loads[load_count:remaining_load_count])
            remaining_load_count = min(remaining_load_count, load_count)
            for block in reversed(list(seq_blocks.iter_pending_blocks(start, end))):
                self._tree.detach_pending(block)
            del seq_blocks.nodes[start:]
        self._loads.rollback(step.host_loads[:remaining_load_count])
        for seq_blocks, start, _, _ in step.finished_blocks:  # behind what hangs from them
            seq_blocks.drop_merges(self._pool, start)
        self._untrusted_host_blocks += step.host_stores

    def invalidate_failed_copies(self) -> bool:
        """After a failed step: forget the blocks that its copies, or later ones, may or may not have filled.

        True, and nothing done, while sequences hold any of these blocks: the sequences must be released first.
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
        """Give the blocks up to this one their nodes; the sequence is detached where a name is another's.

        With `is_computed` they take no part in what a later step is to compute: they are named next time.
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
                held_block, named_block = seq_blocks.blocks_by_group[group][index], node.blocks[group]
                if held_block is None or held_block is named_block:
                    continue
                if named_block is None:
                    self._tree.attach(node, held_block)
                else:
                    self._loads.load_now(named_block)
                    self._pool.acquire(named_block)
                    seq_blocks.pending_merges.append(PendingMerge(group, index, named_block))

    def _commit_blocks(self, seq_blocks: SequenceBlocks, start: int, end: int) -> None:
        """What is named of [start, end) is computed: announce it, and keep one of what is there twice."""
        for block in seq_blocks.iter_pending_blocks(start, end):
            self._tree.commit(block)
        seq_blocks.committed_block_count = min(end, len(seq_blocks.nodes))  # fewer where the cache was reset meanwhile
        if seq_blocks.pending_merges and (merges := seq_blocks.take_merges(end)):
            self._merge_duplicates(seq_blocks, merges)

    def _merge_duplicates(self, seq_blocks: SequenceBlocks, merges: list[PendingMerge]) -> None:
        seq_blocks.mark_replaced()
        for group, index, identical_block in merges:
            self._pool.release(seq_blocks.replace(group, index, identical_block))

    def list_pinned_host_blocks(self) -> list[Block]:
        """Blocks of the host that copies of steps which are out, or of none yet, read."""
        loads = [load for step in self._steps_in_flight for load in step.host_loads if not load.is_cancelled]
        return [load.host_block for load in loads] + self._loads.pinned_host_blocks()
