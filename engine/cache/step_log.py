"""Log of the blocks that each step, planned or in flight, fills and loads.

While a step is planned, the blocks that it fills are **registered**: they enter the prefix tree, where later requests
of the same step find them. When the step is computed, they are **committed**: announced by an event, or merged with an
identical block. If the last token of a block is not sampled yet, the block is registered when its step is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.block_hasher import compute_keys
from engine.cache.blocks import Block
from engine.cache.device_tier import DeviceTier
from engine.cache.host_tier import HostLoad, HostTier
from engine.cache.prefix_tree import PrefixTree
from engine.cache.sequence_blocks import SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import NoStates, StateCheckpoints
from engine.types import Sequence


class PendingMerge(NamedTuple):
    """A block of a sequence that is replaced by an identical block of the prefix tree when its step is committed."""

    seq_blocks: SequenceBlocks
    group: int
    block_index: int
    """Index of the block in the table of its group."""
    identical_block: Block
    """Block of the prefix tree that replaces it. The sequence holds both until the commit."""


@dataclass(slots=True)
class PendingStep:
    """The blocks of one step, from its planning to its result."""

    work: list[HostLoad | Block] = field(default_factory=list)
    """Blocks that the step loads from host memory or fills, in the order of planning: parents come before children."""
    merges: list[PendingMerge] = field(default_factory=list)
    """Blocks that the step fills, and that the prefix tree has already."""
    late_block_end_by_sequence: dict[SequenceBlocks, int] = field(default_factory=dict)
    """End, in tokens, of the block that the step fills, for sequences with a last token that is not sampled yet."""


class StepLog:
    """Registers the blocks of each step in the prefix tree, and commits them once the step is computed."""

    def __init__(
        self,
        spec: CacheSpec,
        tree: PrefixTree,
        device_tier: DeviceTier,
        states: StateCheckpoints | NoStates,
        host_tier: HostTier,
    ) -> None:
        """Start with no step planned or in flight.

        Blocks of `device_tier` are put at nodes of the prefix `tree`. `states` saves recurrent states at the ends of
        blocks. `host_tier` has evicted blocks, which steps load again.
        """
        self._block_size = spec.block_size
        self._groups = range(len(spec.groups))
        self._tree = tree
        self._device_tier = device_tier
        self._pool = device_tier.pool
        self._states = states
        self._host_tier = host_tier
        self._planning_step = PendingStep()
        self._steps_in_flight: deque[PendingStep] = deque()

    def register_full_blocks(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Put the blocks that a planned step fills into the prefix tree, where other requests find them.

        `end`: tokens of the sequence that are computed after the step. With blocks of 16 tokens and `end` 40, blocks 0
        and 1 are full. If the step before has yet to sample the last token, the block has no hash. Then it is put into
        the tree when the planned step is committed. Detached sequences keep their blocks out of the tree.
        """
        full_count, remainder = divmod(end, self._block_size)
        has_new_full_block = full_count > len(seq_blocks.nodes)
        if not has_new_full_block or seq_blocks.is_detached:
            return
        seq = seq_blocks.seq
        is_last_token_sampled = end <= len(seq.token_ids)
        if is_last_token_sampled:
            self._add_nodes(seq_blocks, full_count, self._planning_step)
            if not seq_blocks.is_detached:  # a hash collision detaches it
                self._states.reserve_checkpoint(seq, seq_blocks.nodes, seq.computed_tokens, end)
        elif not remainder:
            self._planning_step.late_block_end_by_sequence[seq_blocks] = end
            self._states.save_checkpoint(seq, None, end)

    def plan_loads(self, loads: Iterable[HostLoad]) -> None:
        """Load pinned blocks of host memory with the step being planned, parents first."""
        for load in loads:
            self._host_tier.plan_load_copy(load)
            self._planning_step.work.append(load)

    def begin_step(self) -> None:
        """Record that planning of the step is complete, and that the step is in flight from now on."""
        self._steps_in_flight.append(self._planning_step)
        self._planning_step = PendingStep()

    def detach(self, seq_blocks: SequenceBlocks) -> None:
        """Keep further blocks of a sequence out of the prefix tree."""
        seq_blocks.is_detached = True
        self._states.cancel_planned(seq_blocks.seq)

    def commit(self, ended_sequences: Collection[Sequence]) -> None:
        """Announce the blocks of the oldest step in flight, which is computed now, and merge identical blocks.

        `ended_sequences`: sequences of finished requests, for which late blocks are not registered any more.
        """
        step = self._steps_in_flight.popleft()
        self._commit_blocks(step)
        for seq_blocks, end in step.late_block_end_by_sequence.items():
            if seq_blocks.seq not in ended_sequences and not seq_blocks.is_detached:
                self._commit_late_block(seq_blocks, end)

    def _commit_late_block(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Register and announce the block that ends at `end`, and the state checkpoint there, if the step took one.

        When the step was planned, the block's last token was not sampled yet, so the block had no hash.
        """
        full_count, late_blocks = end // self._block_size, PendingStep()
        self._add_nodes(seq_blocks, full_count, late_blocks, is_computed=True)
        if len(seq_blocks.nodes) == full_count:
            self._states.attach_checkpoint(seq_blocks.seq, seq_blocks.nodes[-1], end)
        self._commit_blocks(late_blocks)

    def cancel_merges(self) -> None:
        """Release the blocks that were to replace identical ones. The cache was reset, and sequences keep their own."""
        for step in (*self._steps_in_flight, self._planning_step):
            for merge in step.merges:
                self._pool.release(merge.identical_block)
            step.merges.clear()

    def drop_steps(self) -> None:
        """Forget the steps in flight, which were not computed. The cache was reset before."""
        for load in _list_loads(self._steps_in_flight):
            self._host_tier.unpin(load.host_block)
        self._steps_in_flight.clear()
        self._states.drop_pending()

    def _add_nodes(
        self, seq_blocks: SequenceBlocks, full_count: int, step: PendingStep, *, is_computed: bool = False
    ) -> None:
        """Put those of a sequence's first `full_count` blocks into the prefix tree that are not yet there.

        `step`: the step that fills the blocks. `is_computed`: whether they are computed already. Then no block can be
        merged with one that another step has yet to compute, so the first such block and all after it stay out.
        """
        nodes = seq_blocks.nodes
        first_index = len(nodes)
        keys = compute_keys(seq_blocks.seq, full_count, self._block_size)
        for key in keys[first_index:full_count]:
            node = self._tree.get_or_create(key, nodes[-1] if nodes else None)
            if node is None:  # a hash collision: another prefix has the same hash
                self.detach(seq_blocks)
                break
            if is_computed and node.is_pending(self._groups):
                break
            nodes.append(node)
        for group in self._groups:
            for index in range(first_index, len(nodes)):
                self._attach_block(seq_blocks, group, index, step)

    def _attach_block(self, seq_blocks: SequenceBlocks, group: int, index: int, step: PendingStep) -> None:
        """Put a sequence's block at `index` into its node of the tree, where sequences with the same prefix find it.

        If the node already has another block with the same content, the two are merged when the step is committed.
        """
        node = seq_blocks.nodes[index]
        own_block = seq_blocks.blocks_by_group[group][index]
        tree_block = node.blocks[group]
        if own_block is None or own_block is tree_block:
            return
        if tree_block is None:
            self._device_tier.attach(node, own_block)
            step.work.append(own_block)
        else:
            self._pool.acquire(tree_block)
            step.merges.append(PendingMerge(seq_blocks, group, index, tree_block))

    def _commit_blocks(self, step: PendingStep) -> None:
        """Announce the blocks of a step, which are loaded and computed now, and merge duplicates.

        If another sequence has put an identical block into the prefix tree first, a sequence's block table is
        redirected to that block, and the sequence's own block is released.
        """
        for item in step.work:
            block = item.block if isinstance(item, HostLoad) else item
            if block.is_pending:  # not the state of a sequence, and no block if the cache was reset meanwhile
                self._device_tier.commit(block)
            if isinstance(item, HostLoad):
                self._host_tier.unpin(item.host_block)
        for seq_blocks, group, index, tree_block in step.merges:
            self._pool.release(seq_blocks.replace(group, index, tree_block))

    def list_references(self) -> list[Block]:
        """Return the blocks that merges hold besides the sequences, one entry for each reference."""
        steps = (*self._steps_in_flight, self._planning_step)
        return [merge.identical_block for step in steps for merge in step.merges]

    def list_pinned_host_blocks(self) -> list[Block]:
        """Return the blocks of host memory that loads hold, one entry for each load."""
        return [load.host_block for load in _list_loads([*self._steps_in_flight, self._planning_step])]


def _list_loads(steps: Iterable[PendingStep]) -> list[HostLoad]:
    return [item for step in steps for item in step.work if isinstance(item, HostLoad)]
