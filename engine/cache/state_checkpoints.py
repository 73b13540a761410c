"""Recurrent state in the pool: every running sequence's own state, and the checkpoints that later ones resume from.

A checkpoint is a copy of a state, taken when a sequence stands exactly on a hash-block boundary, and hung on the node
of the block that ends there: it is the state *after* that prefix. It is worth a whole unit, so where it is taken
matters more than how it is kept. Chunks are cut at planned positions:

- the branching point, where the prompt's KV hit runs past its state hit (somebody else was here, and may be again);
- the last boundary of the prompt, where its repetition or continuation will look first;
- the common point with a request that is waiting; that request waits for it instead of computing the same;
- where a long chunk of a prefill ends anyway, because the step's budget does;
- in decode, the last boundary reached: one rolling checkpoint a sequence. The one before is dropped, unless another
  sequence has reached it or resumed from it: who came first does not matter, so steps that overlap decide the same.

Who is evicted first: Marconi (MLSys 2025) weighs a state's age against the FLOPs it saves per byte, SGLang keeps its
states in a pool and an LRU list of their own. Here states and KV compete for the same units under one rule
(`UnitPool.release`), and a state is worth the blocks that it saves over the checkpoint before it. One that a deeper
checkpoint of the same path has superseded is not counted as one before and is worth little itself: unless the path
branches at it, only an edit of the last turn will ask for it. Whoever uses it makes it whole again.

Owns planned positions, step-long pins and the state copies of a plan. Refuses to know attention blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.blocks import Block, BlockKey, Node, StateBlock
from engine.cache.host_tier import HostTier
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree
from engine.types import Chunk, Sequence, StepPlan, UnitId

_LONG_CHUNK_TOKENS = 1024
"""Prefill chunks from this length on end on a block boundary; from half of it on a checkpoint of their end pays."""


_SUPERSEDED_DIVISOR = 16
"""A superseded state counts for one part in so many of what it saves."""


def compute_state_value(saved_blocks: int, *, is_superseded: bool) -> int:
    """What a state is worth, in blocks of full attention, that saves so many over the one before it."""
    return -(-saved_blocks // _SUPERSEDED_DIVISOR) if is_superseded else saved_blocks


class StateSource(NamedTuple):
    """What the state of a sequence begins from; of nothing where both are None."""

    checkpoint: StateBlock | None = None
    """A checkpoint on the device."""
    host_node: Node | None = None
    """Node whose checkpoint is in host memory."""
    should_copy: bool = True
    """Whether the checkpoint is copied. Else it becomes the state: no other sequence may hold it."""


class StateLoad(NamedTuple):
    """A state that is to be copied from host memory."""

    block: Block
    host_block: Block


@dataclass(slots=True)
class _SequenceState:
    """One running sequence's part."""

    block: StateBlock
    source_checkpoint: StateBlock | None
    """Checkpoint to copy from before this step's compute; held until the step is over."""
    needs_init: bool = True
    """The state has yet to be restored or zeroed by the step being planned."""
    planned_stops: list[int] = field(default_factory=list)
    """Planned checkpoints as counts of blocks, ascending."""
    hash_by_stop: dict[int, int] = field(default_factory=dict)
    """Hash of the prefix at each stop: what waiting requests compare with."""
    pending_checkpoint_by_end: dict[int, StateBlock] = field(default_factory=dict)
    """Checkpoints that steps take which are planned and not committed, by the end of the chunk."""
    rolling_checkpoint: StateBlock | None = None
    """Last checkpoint taken in decode. It `is_shared` if another sequence has reached or used it."""


class StateCheckpoints:
    """States by sequence. `allocate` gives a state block at any price short of preemption, or None."""

    def __init__(
        self,
        kind: int,
        block_size: int,
        pool: UnitPool,
        tree: PrefixTree,
        host_tier: HostTier,
        allocate: Callable[[int], Block | None],
    ) -> None:
        self._kind = kind
        self._block_size = block_size
        self._pool = pool
        self._tree = tree
        self._host_tier = host_tier
        self._allocate = allocate
        self._state_by_sequence: dict[Sequence, _SequenceState] = {}
        self._stop_counts: Counter[tuple[int, int]] = Counter()  # (blocks, hash) of all stops ahead
        self._planned_copies: list[tuple[UnitId, UnitId]] = []

    # ------------------------------------------------------------------ a sequence's state

    def find_source(self, nodes: list[Node], block_counts: list[int]) -> StateSource:
        """Where a sequence resumes that has these nodes, and needs so many more live blocks of every kind.

        With a copy it has two states until its first step is done, unless another sequence holds the source.
        """
        if not nodes:
            return StateSource()
        checkpoint = nodes[-1].checkpoint
        if checkpoint is None or not nodes[-1].can_resume():
            return StateSource(host_node=nodes[-1])
        *kv_counts, state_count = block_counts
        has_room_for_copy = self._pool.can_allocate([*kv_counts, state_count + 1])
        return StateSource(checkpoint, should_copy=checkpoint.ref_count > 0 or has_room_for_copy)

    def create_state(self, seq: Sequence, source: StateSource) -> list[StateLoad]:
        """Give `seq` a state of its own, to be restored from its source, or zeroed, by this step.

        There must be room for it. Returns what is to be copied from host memory.
        """
        checkpoint = source.checkpoint
        if checkpoint is not None:
            self._pool.acquire(checkpoint)
            checkpoint.is_shared = True
        if checkpoint is not None and not source.should_copy:
            assert checkpoint.ref_count == 1
            self._tree.detach(checkpoint)
            state = _SequenceState(checkpoint, None, needs_init=False)
            loads = []
        else:
            host_blocks = [] if source.host_node is None else [self._host_tier.pin(source.host_node, self._kind)]
            block = self._allocate(self._kind)
            assert isinstance(block, StateBlock), "admitted without room for its state"
            state = _SequenceState(block, checkpoint, needs_init=not host_blocks)
            loads = [StateLoad(block, host_block) for host_block in host_blocks]
        self._state_by_sequence[seq] = state
        seq.state_unit = state.block.unit.index
        return loads

    def plan_checkpoint(self, seq: Sequence, block_count: int, hash_: int) -> None:
        """Take a checkpoint of `seq` after so many blocks, named by the hash of the last of them."""
        state = self._state_by_sequence[seq]
        if block_count * self._block_size > seq.computed_tokens and block_count not in state.hash_by_stop:
            state.planned_stops = sorted([*state.planned_stops, block_count])
            state.hash_by_stop[block_count] = hash_
            self._stop_counts[block_count, hash_] += 1

    def has_planned_checkpoint(self, keys: Items[BlockKey], resumable_blocks: int) -> bool:
        """Whether a running sequence will take a checkpoint of the prefix `keys`, deeper than `resumable_blocks`."""
        return any(
            resumable_blocks < blocks <= len(keys) and keys[blocks - 1].hash == hash_
            for blocks, hash_ in self._stop_counts
        )

    def cancel_planned(self, seq: Sequence) -> None:
        """Take no further checkpoint of `seq`: what it computes stays unnamed, and nobody shall wait for it."""
        state = self._state_by_sequence[seq]
        while state.planned_stops:
            self._remove_first_stop(state)

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        """The end of a chunk that may not run past the next planned checkpoint and, if long, ends on a boundary."""
        stops = self._state_by_sequence[seq].planned_stops
        if not stops:
            return end
        end = min(end, stops[0] * self._block_size)
        return end if end - seq.computed_tokens < _LONG_CHUNK_TOKENS else end // self._block_size * self._block_size

    def reserve_checkpoint(self, seq: Sequence, nodes: list[Node], start: int, end: int) -> None:
        """Take a checkpoint with the step that computes [start, end), if one belongs there and memory allows."""
        state = self._state_by_sequence[seq]
        block_count, remainder = divmod(end, self._block_size)
        if remainder or block_count > len(nodes):
            return
        is_decode = end - start == 1 and end > seq.prompt_len
        if not (is_decode or block_count in state.hash_by_stop or end - start >= _LONG_CHUNK_TOKENS // 2):
            return
        checkpoint = nodes[block_count - 1].checkpoint
        if checkpoint is not None:
            checkpoint.is_shared = True
        elif not nodes[block_count - 1].has_host_block(self._kind):
            self.save_checkpoint(seq, nodes[block_count - 1], end)

    def save_checkpoint(self, seq: Sequence, node: Node | None, end: int) -> None:
        """Take a checkpoint with the step that computes up to `end`, if memory allows.

        Without a node, `attach_checkpoint` names it."""
        block = self._pool.allocate(self._kind)
        if isinstance(block, StateBlock):
            if node is not None:
                self._tree.attach(node, block)
            state = self._state_by_sequence[seq]
            state.pending_checkpoint_by_end[end] = block
            self._planned_copies.append((state.block.unit.index, block.unit.index))

    def attach_checkpoint(self, seq: Sequence, node: Node, end: int) -> None:
        """Name the checkpoint that a step being committed took at `end`; one that is there already is enough."""
        block, checkpoint = self._state_by_sequence[seq].pending_checkpoint_by_end.get(end), node.checkpoint
        if checkpoint is not None:
            checkpoint.is_shared = True
        elif block is not None:
            self._tree.attach(node, block)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the copies that the chunks of `plan` need. It is out: the next one may resume from what it takes."""
        for chunk in plan.chunks:
            state = self._state_by_sequence[chunk.seq]
            if state.needs_init:
                state.needs_init = False
                if state.source_checkpoint is None:
                    plan.state_resets.append(state.block.unit.index)
                else:
                    plan.state_restores.append((state.source_checkpoint.unit.index, state.block.unit.index))
            while state.planned_stops and state.planned_stops[0] * self._block_size <= chunk.end:
                self._remove_first_stop(state)
            if (block := state.pending_checkpoint_by_end.get(chunk.end)) is not None:
                block.is_in_flight = True
        plan.state_checkpoints, self._planned_copies = self._planned_copies, []

    def commit(self, chunks: Items[Chunk]) -> None:
        """The compute of a step with these chunks is done."""
        for chunk in chunks:
            self._commit_chunk(chunk.seq, chunk.start, chunk.end)

    def _commit_chunk(self, seq: Sequence, start: int, end: int) -> None:
        state = self._state_by_sequence[seq]
        self._release_source(state)
        block = state.pending_checkpoint_by_end.pop(end, None)
        if block is None:
            return
        if block.node is None:  # the cache was reset meanwhile, or nothing that ends here got a name
            self._pool.release(block)
            return
        self._tree.commit(block)
        previous_rolling, state.rolling_checkpoint = state.rolling_checkpoint, None
        is_decode = end > seq.prompt_len and end - start == 1
        if (
            is_decode
            and previous_rolling
            and not (previous_rolling.is_shared or previous_rolling.ref_count)
            and previous_rolling.node is not None
        ):
            self._tree.evict(previous_rolling, keep_on_host=False)
        previous_node = self._previous_checkpoint(block.node)
        if previous_node is not None:
            self._mark_superseded(previous_node)
        self._release_checkpoint(block)
        if is_decode:
            state.rolling_checkpoint = block

    def rollback(self, chunks: Items[Chunk]) -> None:
        """A step with these chunks failed."""
        for chunk in reversed(chunks):
            self._planned_copies.clear()
            block = self._state_by_sequence[chunk.seq].pending_checkpoint_by_end.pop(chunk.end, None)
            if block is not None:
                if block.node is not None:
                    self._tree.detach_pending(block)
                self._pool.release(block)

    def release(self, seq: Sequence) -> None:
        """Give up the state of `seq` and its plans. Its checkpoints stay cached."""
        self.cancel_planned(seq)
        state = self._state_by_sequence.pop(seq)
        assert not state.pending_checkpoint_by_end
        self._release_source(state)
        self._pool.release(state.block)
        seq.state_unit = None

    # ------------------------------------------------------------------ inside

    def _release_source(self, state: _SequenceState) -> None:
        source, state.source_checkpoint = state.source_checkpoint, None
        if source is not None:
            self._release_checkpoint(source)

    def _release_checkpoint(self, checkpoint: StateBlock, *, is_superseded: bool = False) -> None:
        """Let a checkpoint become cached, at what it saves over the one before it that would be left."""
        checkpoint.is_superseded = is_superseded
        node = checkpoint.node
        if node is None:
            self._pool.release(checkpoint)
            return
        previous_node = self._previous_checkpoint(node)
        while previous_node is not None and not is_superseded and previous_node.has_superseded_state():
            previous_node = self._previous_checkpoint(previous_node)
        saved_blocks = node.depth + 1 if previous_node is None else node.depth - previous_node.depth
        checkpoint.value = compute_state_value(saved_blocks, is_superseded=is_superseded)
        self._pool.release(checkpoint)

    def _remove_first_stop(self, state: _SequenceState) -> None:
        stop = state.planned_stops.pop(0)
        stop_and_hash = (stop, state.hash_by_stop.pop(stop))
        self._stop_counts[stop_and_hash] -= 1
        if not self._stop_counts[stop_and_hash]:
            del self._stop_counts[stop_and_hash]

    def _previous_checkpoint(self, node: Node) -> Node | None:
        ancestor = node.parent
        while (
            ancestor is not None and not ancestor.has_computed(self._kind) and not ancestor.has_host_block(self._kind)
        ):
            ancestor = ancestor.parent
        return ancestor

    def _mark_superseded(self, node: Node) -> None:
        """Let a checkpoint that a deeper one continues go early, unless its prefix branches at it."""
        checkpoint = node.checkpoint
        if checkpoint is not None and checkpoint.ref_count == 0 and len(node.children) < 2:
            self._pool.acquire(checkpoint)
            self._release_checkpoint(checkpoint, is_superseded=True)

    def check_invariants(self) -> None:
        stop_counts = Counter(
            (b, state.hash_by_stop[b]) for state in self._state_by_sequence.values() for b in state.planned_stops
        )
        assert stop_counts == self._stop_counts
        for seq, state in self._state_by_sequence.items():
            assert state.block.ref_count == 1
            assert state.block.node is None
            assert state.block.unit.index == seq.state_unit
            assert state.planned_stops == sorted(state.hash_by_stop)
            assert all(blocks * self._block_size > seq.computed_tokens for blocks in state.planned_stops)

    def list_references(self) -> list[Block]:
        """Every reference that this class holds, one entry each."""
        blocks_by_state = [
            [state.block, state.source_checkpoint, *state.pending_checkpoint_by_end.values()]
            for state in self._state_by_sequence.values()
        ]
        return [block for blocks in blocks_by_state for block in blocks if block is not None]


class NoStates:
    """The states of a model that has none."""

    def find_source(self, nodes: list[Node], block_counts: list[int]) -> StateSource:
        return StateSource()

    def create_state(self, seq: Sequence, source: StateSource) -> list[StateLoad]:
        return []

    def plan_checkpoint(self, seq: Sequence, block_count: int, hash_: int) -> None:
        pass

    def has_planned_checkpoint(self, keys: Items[BlockKey], resumable_blocks: int) -> bool:
        return False

    def cancel_planned(self, seq: Sequence) -> None:
        pass

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        return end

    def reserve_checkpoint(self, seq: Sequence, nodes: list[Node], start: int, end: int) -> None:
        pass

    def save_checkpoint(self, seq: Sequence, node: Node | None, end: int) -> None:
        pass

    def attach_checkpoint(self, seq: Sequence, node: Node, end: int) -> None:
        pass

    def fill_plan(self, plan: StepPlan) -> None:
        pass

    def commit(self, chunks: Items[Chunk]) -> None:
        pass

    def rollback(self, chunks: Items[Chunk]) -> None:
        pass

    def release(self, seq: Sequence) -> None:
        pass

    def check_invariants(self) -> None:
        pass

    def list_references(self) -> list[Block]:
        return []
