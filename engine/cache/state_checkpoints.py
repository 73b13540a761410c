"""Recurrent states in the pool: one for every running sequence, and the checkpoints that sequences resume from.

A checkpoint is a copy of a sequence's state, taken when the sequence is computed exactly to the end of a block. The
node of that block in the prefix tree has it. A checkpoint takes a whole unit, so few are taken:

- at the end of the prompt's cached blocks, if the last checkpoint is before that: other prompts may branch there, too;
- at the end of the prompt's last full block, where a repetition or the next turn resumes;
- at the end of the common prefix with a waiting request, which waits for the checkpoint;
- where a long chunk of a prefill ends because the step's budget does, if a unit of memory is free;
- in decode, at the end of each block. A sequence keeps only its last one, the rolling checkpoint: the one before is
  evicted, unless another sequence has reached it or resumed from it.

The first three are planned: a chunk ends there at the latest.

The value of a state for eviction is the number of blocks since the checkpoint before it, which need not be computed
again. Marconi (MLSys 2025) weighs states by FLOPs saved per byte. A checkpoint is superseded once a later one of the
same prefix was taken, unless the tree branches there. Few requests resume from it, so its value is small until it is
used.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.device_tier import DeviceTier
from engine.cache.host_tier import HostLoad, HostTier
from engine.cache.spec import CacheSpec, ceil_div
from engine.types import BlockCopy, BlockKey, Chunk, Sequence, StepPlan, UnitId

_LONG_CHUNK_TOKENS = 1024
"""Prefill chunks from this length on end at a block boundary, so that a checkpoint can be taken there."""
_CHECKPOINT_CHUNK_TOKENS = _LONG_CHUNK_TOKENS // 2
"""A chunk of at least so many tokens gets a checkpoint at its end. Half, because `clip_chunk_end` shortens chunks."""
_SUPERSEDED_DIVISOR = 16
"""A superseded state of 16 saved blocks has the value of one saved block."""


def compute_state_value(saved_blocks: int, *, is_superseded: bool) -> int:
    """Return the value of a state for eviction, in blocks. `saved_blocks`: blocks since the state before it."""
    return ceil_div(saved_blocks, _SUPERSEDED_DIVISOR) if is_superseded else saved_blocks


@dataclass(slots=True)
class _SequenceState:
    """Recurrent state of one running sequence, and the copies of it (checkpoints) that are planned or just taken.

    Other requests with prompts that begin with the same tokens resume from a checkpoint.
    """

    block: StateBlock
    """The sequence's own state, which every step changes."""
    source_checkpoint: StateBlock | None = None
    """Checkpoint that the sequence's first step copies, held until that step is over."""
    planned_checkpoints: dict[int, int] = field(default_factory=dict)
    """Number of blocks before a planned checkpoint -> hash of the tokens in these blocks; ascending."""
    pending_checkpoint_by_end: dict[int, StateBlock] = field(default_factory=dict)
    """Number of computed tokens -> checkpoint that a step in flight takes there."""
    rolling_checkpoint: StateBlock | None = None
    """Last checkpoint taken in decode."""


class StateCheckpoints:
    """Owns the states of all running sequences, and decides where they leave checkpoints."""

    def __init__(
        self,
        spec: CacheSpec,
        device_tier: DeviceTier,
        host_tier: HostTier,
        block_copies: list[BlockCopy],
        allocate: Callable[[int], Block | None],
    ) -> None:
        """Start without sequences. `device_tier`: memory of states and checkpoints. `host_tier`: of evicted ones.

        `block_copies`: list to which copies of checkpoints to states are appended. The next step does these copies
        first. `allocate(kind)` returns a free block, perhaps after moving other blocks; None if there is no memory.
        """
        self._kind = spec.state_kind
        self._block_size = spec.block_size
        self._device_tier = device_tier
        self._pool = device_tier.pool
        self._host_tier = host_tier
        self._block_copies = block_copies
        self._allocate = allocate
        self._state_by_sequence: dict[Sequence, _SequenceState] = {}
        self._planned_resets: list[UnitId] = []
        """States that the step being planned sets to zero."""
        self._planned_copies: list[BlockCopy] = []
        """Copies of states to checkpoints that the step being planned makes."""

    def create_state(self, seq: Sequence, node: Node | None, *, has_room_for_copy: bool) -> list[HostLoad]:
        """Give a sequence a recurrent state, which its first step restores from a checkpoint, or sets to zero.

        `node`: last node of the sequence's cached prefix, which has a checkpoint on the device or in host memory; None:
        nothing is cached. `has_room_for_copy`: whether there is memory to copy the checkpoint. If not, the sequence may
        take the checkpoint itself. Returns the copy from host memory that restores the state, if there is any.
        """
        if node is None:
            block = self._allocate_state()
            self._set_state(seq, _SequenceState(block))
            self._planned_resets.append(block.unit.index)
            return []
        if node.can_resume():
            assert node.checkpoint is not None
            self._resume_on_device(seq, node.checkpoint, has_room_for_copy=has_room_for_copy)
            return []
        host_block = self._host_tier.pin(node, self._kind)  # first, because the allocation may evict host blocks
        block = self._allocate_state()
        self._set_state(seq, _SequenceState(block))
        return [HostLoad(block, host_block)]

    def _resume_on_device(self, seq: Sequence, checkpoint: StateBlock, *, has_room_for_copy: bool) -> None:
        """Give a sequence a copy of a checkpoint; without room for a copy, the checkpoint itself if no other uses it.

        The checkpoint is held until the sequence's first step has copied it.
        """
        self._pool.acquire(checkpoint)
        checkpoint.is_shared = True
        if checkpoint.ref_count == 1 and not has_room_for_copy:
            self._device_tier.detach(checkpoint)
            self._set_state(seq, _SequenceState(checkpoint))
        else:
            block = self._allocate_state()
            self._set_state(seq, _SequenceState(block, source_checkpoint=checkpoint))
            self._block_copies.append(BlockCopy(self._kind, checkpoint.id, block.id))

    def _allocate_state(self) -> StateBlock:
        block = self._allocate(self._kind)
        assert isinstance(block, StateBlock), "admitted without room for its state"
        return block

    def _set_state(self, seq: Sequence, state: _SequenceState) -> None:
        self._state_by_sequence[seq] = state
        seq.state_unit = state.block.unit.index

    def plan_checkpoint(self, seq: Sequence, block_count: int, hash_: int) -> None:
        """Plan a checkpoint of `seq` after `block_count` blocks. `hash_`: hash of the last of them."""
        state = self._state_by_sequence[seq]
        if block_count * self._block_size > seq.computed_tokens and block_count not in state.planned_checkpoints:
            state.planned_checkpoints = dict(sorted([*state.planned_checkpoints.items(), (block_count, hash_)]))

    def has_planned_checkpoint(self, keys: Items[BlockKey], resumable_blocks: int) -> bool:
        """Return whether a running sequence will take a checkpoint of this prefix, later than the cached one.

        `resumable_blocks`: number of blocks after which the cache has a checkpoint of this prefix.
        """
        return any(
            resumable_blocks < block_count <= len(keys) and keys[block_count - 1].hash == hash_
            for state in self._state_by_sequence.values()
            for block_count, hash_ in state.planned_checkpoints.items()
        )

    def cancel_planned(self, seq: Sequence) -> None:
        """Cancel the planned checkpoints of `seq`, because its further blocks stay out of the prefix tree."""
        self._state_by_sequence[seq].planned_checkpoints.clear()

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk of `seq` up to `end` should end: no later than the next planned checkpoint.

        A long chunk ends at a block boundary, because a checkpoint is taken there, unless it lies within one block.
        """
        next_stop = next(iter(self._state_by_sequence[seq].planned_checkpoints), None)
        if next_stop is None:
            return end
        end = min(end, next_stop * self._block_size)
        last_boundary = end // self._block_size * self._block_size
        is_long = end - seq.computed_tokens >= _LONG_CHUNK_TOKENS
        return last_boundary if is_long and last_boundary > seq.computed_tokens else end

    def reserve_checkpoint(self, seq: Sequence, nodes: list[Node], start: int, end: int) -> None:
        """Plan a checkpoint after the tokens [start, end), if they end a block and a checkpoint is due there.

        A checkpoint is a copy of the sequence's recurrent state, from which later prompts with the same prefix resume.
        If another sequence took one at the same prefix, that is marked as shared instead. `nodes`: prefix tree nodes of
        the sequence's blocks.
        """
        block_count, remainder = divmod(end, self._block_size)
        ends_at_block = not remainder and block_count <= len(nodes)
        is_planned = block_count in self._state_by_sequence[seq].planned_checkpoints
        is_long_with_memory_free = end - start >= _CHECKPOINT_CHUNK_TOKENS and self._pool.free_units > 0
        is_due = is_planned or is_long_with_memory_free or _is_decode(seq, start, end)
        if not ends_at_block or not is_due:
            return
        node = nodes[block_count - 1]
        if node.checkpoint is not None:
            node.checkpoint.is_shared = True
        elif not node.has_host_block(self._kind):  # a prompt can also resume from a checkpoint in host memory
            self.save_checkpoint(seq, node, end)

    def save_checkpoint(self, seq: Sequence, node: Node | None, end: int) -> None:
        """Take a checkpoint with the step that computes up to `end`, if there is memory.

        `node`: node of the prefix tree that gets the checkpoint; None: `attach_checkpoint` is called later.
        """
        block = self._pool.allocate(self._kind)
        if isinstance(block, StateBlock):
            if node is not None:
                self._device_tier.attach(node, block)
            state = self._state_by_sequence[seq]
            state.pending_checkpoint_by_end[end] = block
            self._planned_copies.append(BlockCopy(self._kind, state.block.id, block.id))

    def attach_checkpoint(self, seq: Sequence, node: Node, end: int) -> None:
        """Give `node` the checkpoint that the step being committed took at `end`, unless it has one."""
        if node.checkpoint is not None:
            node.checkpoint.is_shared = True
            return
        block = self._state_by_sequence[seq].pending_checkpoint_by_end.get(end)
        if block is not None:
            self._device_tier.attach(node, block)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add to the plan of a step which states it sets to zero, and which checkpoints it takes.

        A *planned* checkpoint is only a place where a chunk has to end. A *pending* one has memory, to which the step
        copies the state. With the plan complete, it is *in flight*: requests of the next step may resume from it.
        """
        plan.state_resets, self._planned_resets = self._planned_resets, []
        plan.state_checkpoints, self._planned_copies = self._planned_copies, []
        for chunk in plan.chunks:
            state = self._state_by_sequence[chunk.seq]
            planned = state.planned_checkpoints.items()  # those that this step reaches are no longer planned
            state.planned_checkpoints = {n: hash_ for n, hash_ in planned if n * self._block_size > chunk.end}
            checkpoint = state.pending_checkpoint_by_end.get(chunk.end)
            if checkpoint is not None:
                checkpoint.is_in_flight = True

    def commit(self, chunks: Items[Chunk]) -> None:
        """Record that a step with these chunks is computed."""
        for chunk in chunks:
            state = self._state_by_sequence[chunk.seq]
            self._release_source(state)  # the step has copied the checkpoint that the sequence resumed from
            checkpoint = state.pending_checkpoint_by_end.pop(chunk.end, None)
            if checkpoint is not None:
                self._commit_checkpoint(checkpoint, state, chunk)

    def _commit_checkpoint(self, checkpoint: StateBlock, state: _SequenceState, chunk: Chunk) -> None:
        """Cache a checkpoint: the copy of a sequence's recurrent state that a step took at the end of its chunk.

        While a sequence decodes, only its last checkpoint is worth the memory, so the one before that is evicted.
        """
        if checkpoint.node is None:  # the cache was reset meanwhile, or the block that ends here is not in the tree
            self._pool.release(checkpoint)
            return
        self._device_tier.commit(checkpoint)
        previous_checkpoint = state.rolling_checkpoint
        state.rolling_checkpoint = None
        if _is_decode(chunk.seq, chunk.start, chunk.end):
            state.rolling_checkpoint = checkpoint
            if previous_checkpoint is not None and previous_checkpoint.is_cached and not previous_checkpoint.is_shared:
                self._device_tier.evict(previous_checkpoint, keep_on_host=False)
        self.release_new_checkpoint(checkpoint)

    def release_new_checkpoint(self, checkpoint: StateBlock) -> None:
        """Release a checkpoint that was just announced, so that it becomes cached. It supersedes the one before it."""
        assert checkpoint.node is not None
        previous_node = self._find_previous_checkpoint(checkpoint.node)
        if previous_node is not None:
            self._mark_superseded(previous_node)
        self._release_checkpoint(checkpoint)

    def drop_pending(self) -> None:
        """Free the checkpoints that steps in flight were to take. The cache was reset before."""
        for state in self._state_by_sequence.values():
            for checkpoint in state.pending_checkpoint_by_end.values():
                self._pool.release(checkpoint)
            state.pending_checkpoint_by_end.clear()

    def release(self, seq: Sequence) -> None:
        """Release the state of `seq`, and cancel its plans. Its checkpoints stay cached."""
        self.cancel_planned(seq)
        state = self._state_by_sequence.pop(seq)
        assert not state.pending_checkpoint_by_end
        self._release_source(state)
        self._pool.release(state.block)
        seq.state_unit = None

    def _release_source(self, state: _SequenceState) -> None:
        if state.source_checkpoint is not None:
            self._release_checkpoint(state.source_checkpoint)
            state.source_checkpoint = None

    def _release_checkpoint(self, checkpoint: StateBlock, *, is_superseded: bool = False) -> None:
        """Release the saved recurrent state of a prefix, so that it may be evicted, and set its value for eviction.

        The value is the number of blocks since the previous checkpoint, because the checkpoint saves computing these.
        It is lower if a later checkpoint supersedes this one, because then few requests resume from it.
        """
        checkpoint.is_superseded = is_superseded
        node = checkpoint.node
        if node is None:
            self._pool.release(checkpoint)
            return
        previous_node = self._find_previous_checkpoint(node)
        if not is_superseded:
            while previous_node is not None and previous_node.has_superseded_state():  # hardly used, so passed over
                previous_node = self._find_previous_checkpoint(previous_node)
        previous_depth = -1 if previous_node is None else previous_node.depth
        saved_blocks = node.depth - previous_depth
        checkpoint.value = compute_state_value(saved_blocks, is_superseded=is_superseded)
        self._pool.release(checkpoint)

    def _find_previous_checkpoint(self, node: Node) -> Node | None:
        """Return the nearest ancestor with a checkpoint in either memory; None if there is none."""
        ancestor = node.parent
        while ancestor is not None:
            if ancestor.has_computed(self._kind) or ancestor.has_host_block(self._kind):
                return ancestor
            ancestor = ancestor.parent
        return None

    def _mark_superseded(self, node: Node) -> None:
        """Mark the checkpoint at `node` as superseded, unless it is held, or the prefix tree branches there."""
        checkpoint = node.checkpoint
        has_branches = len(node.children) > 1
        if checkpoint is not None and checkpoint.ref_count == 0 and not has_branches:
            self._pool.acquire(checkpoint)
            self._release_checkpoint(checkpoint, is_superseded=True)

    def check_invariants(self) -> None:
        """Assert that each sequence has a state of its own, and that its planned checkpoints are still to come."""
        for seq, state in self._state_by_sequence.items():
            assert state.block.ref_count == 1
            assert state.block.node is None
            assert state.block.unit.index == seq.state_unit
            assert list(state.planned_checkpoints) == sorted(state.planned_checkpoints)
            assert all(n * self._block_size > seq.computed_tokens for n in state.planned_checkpoints)

    def list_references(self) -> list[Block]:
        """Return the blocks that sequences hold here, one entry for each reference."""
        blocks_by_state = [
            [state.block, state.source_checkpoint, *state.pending_checkpoint_by_end.values()]
            for state in self._state_by_sequence.values()
        ]
        return [block for blocks in blocks_by_state for block in blocks if block is not None]


def _is_decode(seq: Sequence, start: int, end: int) -> bool:
    """Return whether the chunk [start, end) is one token of the answer."""
    return end - start == 1 and end > seq.prompt_len


class NoStates:
    """Stands for `StateCheckpoints` in a model without recurrent states: there is nothing to save or restore."""

    def create_state(self, seq: Sequence, node: Node | None, *, has_room_for_copy: bool) -> list[HostLoad]:
        return []

    def has_planned_checkpoint(self, keys: Items[BlockKey], resumable_blocks: int) -> bool:
        return False

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        return end

    def list_references(self) -> list[Block]:
        return []

    def _do_nothing(self, *arguments: object) -> None:
        pass

    plan_checkpoint = _do_nothing
    cancel_planned = _do_nothing
    reserve_checkpoint = _do_nothing
    save_checkpoint = _do_nothing
    attach_checkpoint = _do_nothing
    fill_plan = _do_nothing
    commit = _do_nothing
    release_new_checkpoint = _do_nothing
    drop_pending = _do_nothing
    release = _do_nothing
    check_invariants = _do_nothing
