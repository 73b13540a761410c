"""The engine's cache as the scheduler sees it: block tables of sequences over the pool and the prefix tree.

The life of a block: `admit` takes what is cached and `grow` what is new; `register_full_blocks` names the blocks that
the step finishes (pending: another request of the same step may share them); `commit`, after the compute, announces
them or, where an identical block exists, redirects the table to it (late merge); `release` gives them up, tail first. A
step may be planned while the one before is out: a block that it finishes with a token nobody knows yet is named at its
commit.

Owns the tables' physical side. Refuses to know budgets, sampling and order of requests. Invariant: a sequence whose
`SequenceBlocks` are not detached holds, for all its named positions, exactly the blocks that the tree names; so a
parent is never freed before a live child.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.adaptive_eviction import AdaptiveEviction
from engine.cache.attention_windows import AttentionWindows
from engine.cache.block_hasher import BlockHasher
from engine.cache.event_log import StepEvents
from engine.cache.eviction_queue import StateValuation
from engine.cache.host_load_queue import HostLoad, HostLoadQueue
from engine.cache.host_tier import HostTier
from engine.cache.nodes import Node
from engine.cache.pending_step import FinishedBlocks, PendingStep
from engine.cache.pool import Block, UnitPool
from engine.cache.prefix_tree import FULL_KIND, DeviceEvictionOrder, PrefixTree
from engine.cache.reuse_stats import ConversationTurn
from engine.cache.sequence_blocks import PendingMerge, SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import StateCheckpoints
from engine.types import BlockCopy, BlockId, Chunk, LazyDecodeChunks, Sequence, StepPlan

UNREAD_BLOCK_ID = BlockId(0)
"""What a sliding-window table holds for positions before the window: any valid block, since no kernel may read it."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    total_units: int
    live_units: int
    """Units that the running sequences need, packed; `live_units / units` is the usage that operators watch."""
    free_units: int
    host_usage: float = 0.0
    """Share of host memory that holds something."""
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    """Planned to be copied there and back, since the start."""


class HostHit(NamedTuple):
    """A block of a prompt's hit that is loaded from host memory."""

    group: int
    node: Node
    host_block: Block[Node]
    """It is pinned."""


class KVCache:
    """One model's cache of `unit_count` units."""

    def __init__(
        self,
        spec: CacheSpec,
        unit_count: int,
        *,
        enable_prefix_caching: bool = True,
        step_tokens_max: int | None = None,
        adaptive_eviction: bool = False,
        host_unit_count: int = 0,
        load_bytes_max: int | None = None,
    ) -> None:
        """`step_tokens_max` bounds what one step adds to a sequence, and so what a sliding-window group must hold.

        `adaptive_eviction` takes effect where no window slides. `host_unit_count`: of host memory
        under the device's, none without prefix caching. `load_bytes_max`: that a step with decodes brings back from it.
        """
        self.spec = spec
        self.block_size = spec.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._group_indices = range(len(spec.groups))
        blocks_per_unit = [spec.blocks_per_unit(g) for g in self._group_indices] + [1] * (spec.state is not None)
        self._windows = AttentionWindows(spec, step_tokens_max)
        host_unit_count *= enable_prefix_caching
        self._eviction_order: AdaptiveEviction[Node] | None = None
        if adaptive_eviction and enable_prefix_caching and not self._windows:
            state_valuation = (
                None if spec.state is None else StateValuation(blocks_per_unit[FULL_KIND], Node.count_saved_blocks)
            )
            self._eviction_order = AdaptiveEviction(
                (unit_count + host_unit_count) * blocks_per_unit[FULL_KIND],
                spec.block_size,
                state_valuation=state_valuation,
            )
        self._turn_by_sequence: dict[Sequence, ConversationTurn] = {}
        self.tree = PrefixTree(spec, lambda block: self.pool.drop(block), self._eviction_order)
        state_kind = None if spec.state is None else len(spec.groups)
        eviction_order = (
            None
            if self._eviction_order is None
            else DeviceEvictionOrder(self._eviction_order, blocks_per_unit[FULL_KIND])
        )
        self.pool: UnitPool[Node] = UnitPool(unit_count, blocks_per_unit, self.tree.evict, state_kind, eviction_order)
        self._checkpoints: StateCheckpoints | None = None
        if state_kind is not None:
            self._checkpoints = StateCheckpoints(state_kind, spec.block_size, self.pool, self.tree, self._allocate)
        self._block_copies: list[BlockCopy] = []
        """Of the plan being made."""
        self.host_tier: HostTier | None = None
        if host_unit_count:
            self.host_tier = self.tree.host_tier = HostTier(
                host_unit_count, blocks_per_unit, state_kind, self.tree, self._block_copies, self._eviction_order
            )
        self.host_loads = (
            None
            if self.host_tier is None
            else HostLoadQueue(self.host_tier, self.tree, spec.block_bytes_by_kind(), load_bytes_max)
        )
        self._table_version = 0
        """Of all sequences."""
        self._planning_step = PendingStep()
        self._steps_in_flight: deque[PendingStep] = deque()
        self._untrusted_blocks: list[Block[Node]] = []
        self._untrusted_host_blocks: list[Block[Node]] = []
        """Moved by steps that failed."""
        self._blocks_by_sequence: dict[Sequence, SequenceBlocks] = {}
        self._hasher = BlockHasher(spec.block_size)
        self._matched_nodes_by_sequence: dict[Sequence, list[Node]] = {}
        """What `match_prefix` found last for each sequence that waits."""

    # ------------------------------------------------------------------ questions

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._blocks_by_sequence

    @property
    def usage(self) -> CacheUsage:
        host_usage = (0.0, 0, 0) if self.host_tier is None else self.host_tier.measure_usage(self.spec)
        return CacheUsage(len(self.pool.units), self.pool.live_units, self.pool.free_units, *host_usage)

    @property
    def token_capacity(self) -> int:
        """Tokens that one sequence alone can hold."""
        return self._windows.compute_token_capacity(len(self.pool.units), self.pool.blocks_per_unit)

    def has_room_for_blocks(self, block_count: int) -> bool:
        """Whether so many more tokens' worth of blocks could be live beside what is live now."""
        return self.pool.can_allocate(self._windows.count_blocks_needed(block_count))

    def match_prefix(self, seq: Sequence) -> list[Node]:
        """The nodes of the longest known prefix of `seq`, early sharing included; changes nothing.

        At least one token is left to compute, and all of them where the logprobs of the prompt are wanted. The list is
        the cache's own, good until the next call for `seq`: a request that waits is asked for in every step.
        """
        if not self.enable_prefix_caching or seq.request.params.prompt_logprobs is not None:
            return []
        full_block_count = (len(seq.token_ids) - 1) // self.block_size
        keys = self._hasher.block_keys(seq, full_block_count)
        nodes = self._matched_nodes_by_sequence.setdefault(seq, [])
        self.tree.extend_match(keys if len(keys) == full_block_count else keys[:full_block_count], nodes)
        return nodes

    def count_cached_tokens(self, seq: Sequence) -> int:
        """Tokens of `seq` that need not be computed if it is admitted now; changes nothing."""
        return self._windows.count_resumable_nodes(self.match_prefix(seq)) * self.block_size

    def should_wait(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to compute, load or checkpoint what `seq` would compute again."""
        if not self.enable_prefix_caching or seq.request.params.prompt_logprobs is not None:
            return False
        matched_nodes = self.match_prefix(seq)
        if self.host_loads is not None and self.host_loads.has_unplanned(matched_nodes):
            return True
        keys = self._hasher.block_keys(seq, full_block_count := (len(seq.token_ids) - 1) // self.block_size)
        if self._checkpoints is not None:
            return self._checkpoints.has_planned_checkpoint(
                keys[:full_block_count], self._windows.count_resumable_nodes(matched_nodes)
            )
        return len(matched_nodes) < full_block_count and self._will_compute(
            len(matched_nodes), keys[len(matched_nodes)].hash
        )

    # ------------------------------------------------------------------ a sequence's blocks

    def admit(self, seq: Sequence, reserve_blocks: int = 0) -> bool:
        """Start a sequence on what the cache holds of it: fills its tables and sets `seq.computed_tokens`.

        False, and nothing changed, when all its known tokens and `reserve_blocks` more would not fit beside what is
        live. Once it is admitted, its known tokens find their memory.
        """
        assert seq not in self._blocks_by_sequence
        matched_nodes = self.match_prefix(seq)
        nodes = matched_nodes[: self._windows.count_resumable_nodes(matched_nodes)]
        block_counts = self._windows.count_blocks_needed(-(-len(seq.token_ids) // self.block_size) + reserve_blocks)
        for g, window in enumerate(self._windows.window_blocks):
            window_nodes = nodes if window is None else nodes[max(0, len(nodes) - window) :]
            block_counts[g] -= sum(
                block.ref_count > 0 for node in window_nodes if (block := node.blocks[g]) is not None
            )
        if not self.pool.can_allocate(block_counts):
            return False
        # With a copy a resumed sequence has two states until its first step is done, unless another holds the source.
        source_checkpoint = (
            nodes[-1].blocks[-1] if nodes and self._checkpoints is not None and nodes[-1].can_resume(-1) else None
        )
        should_copy_state = (
            source_checkpoint is None
            or source_checkpoint.ref_count > 0
            or self.pool.can_allocate([*block_counts[:-1], block_counts[-1] + 1])
        )
        seq_blocks = SequenceBlocks(len(self._group_indices))
        host_hits: list[HostHit] = []
        state_loads: list[tuple[Block[Node], Block[Node]]] = []
        seq.block_tables = [[] for _ in self._group_indices]
        self._increment_table_version(seq)
        for g in self._group_indices:
            window = self._windows.window_blocks[g]
            first_block_index = 0 if window is None else max(0, len(nodes) - window)
            group_blocks: list[Block[Node] | None] = [None] * first_block_index
            for node in nodes[first_block_index:]:
                block = node.blocks[g]
                if block is None:
                    assert self.host_tier is not None
                    host_hits.append(HostHit(g, node, self.host_tier.pin(node, g)))
                else:
                    self.pool.acquire(block)
                group_blocks.append(block)
            seq_blocks.blocks_by_group[g] = group_blocks
            seq_blocks.window_starts[g] = first_block_index
        if self._checkpoints is not None:  # holds the source before anything is allocated
            state_loads = self._create_state(
                seq, source_checkpoint, nodes[-1] if nodes else None, should_copy=should_copy_state
            )
        if self.host_loads is not None:
            self.host_loads.add(seq, self._allocate_for_loads(seq_blocks, nodes, host_hits) + state_loads)
        for g, blocks in enumerate(seq_blocks.blocks_by_group):
            seq.block_tables[g] = [UNREAD_BLOCK_ID if block is None else block.id for block in blocks]
        seq.host_tokens = self.block_size * sum(hit.group == FULL_KIND for hit in host_hits)
        seq_blocks.nodes = nodes
        seq_blocks.committed_block_count = len(nodes)
        self._blocks_by_sequence[seq] = seq_blocks
        seq.computed_tokens = len(nodes) * self.block_size
        if self._checkpoints is not None and self.enable_prefix_caching:
            keys = self._hasher.block_keys(seq, last_boundary := (len(seq.token_ids) - 1) // self.block_size)
            for stop in {len(matched_nodes), last_boundary} - {0}:
                self._checkpoints.plan_checkpoint(seq, stop, keys[stop - 1].hash)
        self._matched_nodes_by_sequence.pop(seq, None)
        if self._eviction_order is not None:
            keys = self._hasher.block_keys(seq, count := len(seq.token_ids) // self.block_size)
            self._turn_by_sequence[seq] = self._eviction_order.begin_turn(
                [key.hash for key in keys[:count]], len(matched_nodes)
            )
        return True

    def plan_shared_prefix(self, seq: Sequence, waiting_seq: Sequence) -> int:
        """Tokens that `waiting_seq` can have of the running `seq`, up to where their prompts part.

        If a state is needed there, a checkpoint of `seq` is planned.
        """
        if not self.enable_prefix_caching or self._blocks_by_sequence[seq].is_detached:
            return 0
        shared_block_count = 1
        max_shared_blocks = min(len(seq.token_ids) - 1, len(waiting_seq.token_ids) - 1) // self.block_size
        running_keys = self._hasher.block_keys(seq, max_shared_blocks)
        waiting_keys = self._hasher.block_keys(waiting_seq, max_shared_blocks)
        if not max_shared_blocks or running_keys[0].hash != waiting_keys[0].hash:
            return 0
        while (
            shared_block_count < max_shared_blocks
        ):  # chained hashes: equal at i means equal up to i; a collision costs a checkpoint only
            middle_block_count = (shared_block_count + max_shared_blocks + 1) // 2
            shared_block_count, max_shared_blocks = (
                (middle_block_count, max_shared_blocks)
                if running_keys[middle_block_count - 1].hash == waiting_keys[middle_block_count - 1].hash
                else (shared_block_count, middle_block_count - 1)
            )
        if self._checkpoints is not None:
            self._checkpoints.plan_checkpoint(seq, shared_block_count, running_keys[shared_block_count - 1].hash)
        return 0 if waiting_seq.request.params.prompt_logprobs is not None else shared_block_count * self.block_size

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        """Where a chunk of `seq` that could go to `end` must stop, so that a planned checkpoint can be taken."""
        return end if self._checkpoints is None else self._checkpoints.clip_chunk_end(seq, end)

    def grow(self, seq: Sequence, end: int) -> bool:
        """Make the tables of `seq` cover the positions [0, end). On False nothing has changed."""
        missing_count = -(-end // self.block_size) - len(seq.block_tables[FULL_KIND])
        if missing_count <= 0:
            return True
        new_blocks: list[tuple[int, Block[Node]]] = []
        for g in self._group_indices:
            for _ in range(missing_count):
                block = self._allocate(g)
                if block is None:
                    for _, new_block in reversed(new_blocks):
                        self.pool.release(new_block)
                    return False
                new_blocks.append((g, block))
        blocks = self._blocks_by_sequence[seq].blocks_by_group
        for g, block in new_blocks:
            blocks[g].append(block)
            seq.block_tables[g].append(block.id)
        return True

    def register_full_blocks(self, seq: Sequence, end: int) -> None:
        """Name the blocks that computing up to `end` finishes. Where an identical one exists, merge at commit."""
        seq_blocks = self._blocks_by_sequence[seq]
        full_count, named_count = end // self.block_size, len(seq_blocks.nodes)
        if full_count <= named_count or seq_blocks.is_detached or not self.enable_prefix_caching:
            return
        if end > len(seq.token_ids):
            if end % self.block_size == 0:
                self._planning_step.unnamed_blocks.append((seq, end))
                if self._checkpoints is not None:
                    self._checkpoints.save_checkpoint(seq, None, end)
            return
        self._assign_nodes(seq, seq_blocks, full_count)
        load_count = 0 if self.host_loads is None else len(self.host_loads.planned_loads)
        self._planning_step.finished_blocks.append(FinishedBlocks(seq, named_count, len(seq_blocks.nodes), load_count))
        if self._checkpoints is not None and not seq_blocks.is_detached:
            self._checkpoints.reserve_checkpoint(seq, seq_blocks.nodes, seq.computed_tokens, end)

    def fill_plan(self, plan: StepPlan) -> None:
        """Complete a plan that will be executed: the copies of states and of compacted blocks. It is out now."""
        pending_step, self._planning_step = self._planning_step, PendingStep()
        pending_step.chunks = plan.chunks
        plan.table_version = self._table_version
        if self.host_tier is not None and self.host_loads is not None:
            self.host_tier.plan_copies(self.host_loads.unplanned_blocks)
        plan.block_copies = self._block_copies.copy()
        self._block_copies.clear()
        if self.host_tier is not None:
            pending_step.host_stores, self.host_tier.planned_stores = self.host_tier.planned_stores, []
        if self.host_loads is not None:
            pending_step.host_loads = self.host_loads.take_planned()
        if isinstance(plan.chunks, LazyDecodeChunks):
            for seq in plan.chunks.sequences:
                seq.computed_tokens += 1
        else:
            for chunk in plan.chunks:
                chunk.seq.computed_tokens = chunk.end
        if self._checkpoints is not None:
            self._checkpoints.fill_plan(plan)
        self._steps_in_flight.append(pending_step)

    def commit(self, chunks: Items[Chunk], ended_sequences: Collection[Sequence] = ()) -> None:
        """The oldest step's compute is done: announce what it finished, merge what it finished twice.

        Of the `ended_sequences` nothing is named any more. Most chunks of a step are decodes that finish no block: only
        those that do are looked at, but for what windows leave and states.
        """
        oldest_step = self._steps_in_flight.popleft()
        assert oldest_step.chunks is chunks
        committed_load_count = 0
        for seq, start, end, load_count in oldest_step.finished_blocks:
            if load_count > committed_load_count:
                self._commit_loads(oldest_step.host_loads[committed_load_count:load_count])
                committed_load_count = load_count
            self._commit_blocks(seq, start, end)
        if oldest_step.host_loads:
            self._commit_loads(oldest_step.host_loads[committed_load_count:])
        for seq, end in oldest_step.unnamed_blocks:
            seq_blocks = self._blocks_by_sequence[seq]
            start, full_count = len(seq_blocks.nodes), end // self.block_size
            if seq not in ended_sequences and not seq_blocks.is_detached:
                self._assign_nodes(seq, seq_blocks, full_count, is_computed=True)
                if self._checkpoints is not None and len(seq_blocks.nodes) == full_count:
                    self._checkpoints.attach_checkpoint(seq, seq_blocks.nodes[-1], end)
                self._commit_blocks(seq, start, len(seq_blocks.nodes))
        if self._windows:
            for chunk in chunks:
                self._release_outside_windows(chunk.seq, self._blocks_by_sequence[chunk.seq], chunk.end)
        if self._checkpoints is not None:
            for chunk in chunks:
                self._checkpoints.commit(chunk.seq, chunk.start, chunk.end)

    def rollback(self) -> None:
        """The newest step that is out was not computed: none of its blocks may be trusted or announced.

        All its sequences must be released, once the steps before it are abandoned too.
        """
        newest_step = self._steps_in_flight.pop()
        self._untrusted_blocks += newest_step.moved_blocks
        if self._checkpoints is not None:
            for chunk in reversed(newest_step.chunks):
                self._checkpoints.rollback(chunk.seq, chunk.end)
        remaining_load_count = len(newest_step.host_loads)
        for seq, start, end, load_count in reversed(newest_step.finished_blocks):
            if load_count < remaining_load_count:
                self._rollback_loads(newest_step.host_loads[load_count:remaining_load_count])
                remaining_load_count = load_count
            seq_blocks = self._blocks_by_sequence[seq]
            for block in reversed(list(seq_blocks.iter_pending_blocks(start, end))):
                self.tree.detach_pending(block)
            del seq_blocks.nodes[start:]
        if remaining_load_count:
            self._rollback_loads(newest_step.host_loads[:remaining_load_count])
        for seq, start, _, _ in newest_step.finished_blocks:  # behind what hangs from them
            self._blocks_by_sequence[seq].drop_merges(self.pool, start)
        self._untrusted_host_blocks += newest_step.host_stores

    def release(self, seq: Sequence) -> None:
        """Give up everything that `seq` holds, its tail first so that it is evicted first."""
        seq_blocks = self._blocks_by_sequence.pop(seq)
        if self.host_loads is not None:
            self.host_loads.cancel(seq)
        assert not seq_blocks.pending_merges
        assert len(seq_blocks.nodes) == seq_blocks.committed_block_count, "released in the middle of a step"
        if self._checkpoints is not None:
            self._checkpoints.release(seq)
        if self._eviction_order is not None:
            self._eviction_order.end_turn(self._turn_by_sequence.pop(seq))
        seq_blocks.release(self.pool)
        seq.block_tables = []
        seq.computed_tokens = 0

    def invalidate_failed_copies(self) -> bool:
        """After a failed step: forget what its moves, or those planned after it, may or may not have copied.

        True, and nothing done, while sequences hold any of it: they must be released first.
        """
        host_blocks = [] if self.host_tier is None else self._untrusted_host_blocks + self.host_tier.untrusted_blocks()
        if any(block.ref_count for block in self._untrusted_blocks + host_blocks):
            return True
        for block in self._untrusted_blocks:
            if block.node is not None:
                self.tree.evict(block, keep_on_host=False)
        self._untrusted_blocks.clear()
        for block in host_blocks:
            if block.node is not None:
                assert self.host_tier is not None
                self.host_tier.evict(block)
        self._untrusted_host_blocks.clear()
        return False

    def discard_keys(self, seq: Sequence) -> None:
        """Drop the memorised hashes of a request that is gone for good."""
        self._hasher.discard(seq)
        self._matched_nodes_by_sequence.pop(seq, None)

    # ------------------------------------------------------------------ the whole cache

    def reset(self) -> None:
        """Forget every name. Sequences keep the blocks they hold, but what they finish from now on stays unnamed."""
        for block in self.tree.clear():
            if block.ref_count == 0:
                self.pool.drop(block)
        for seq, seq_blocks in self._blocks_by_sequence.items():
            self._detach(seq, seq_blocks)
            seq_blocks.nodes = []
            seq_blocks.committed_block_count = 0
            seq_blocks.drop_merges(self.pool)

    def take_events(self) -> StepEvents | None:
        """What became resident and what left since the last call, in order; made when it is read. None for nothing."""
        return self.tree.event_log.drain()

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.tree.check_invariants()
        references_by_block: dict[Block[Node], int] = {}
        for seq, seq_blocks in self._blocks_by_sequence.items():
            for g in self._group_indices:
                group_blocks, table = seq_blocks.blocks_by_group[g], seq.block_tables[g]
                assert [UNREAD_BLOCK_ID if b is None else b.id for b in group_blocks] == table
                assert all(b is not None for b in group_blocks[seq_blocks.window_starts[g] :])
                for index, block in enumerate(group_blocks):
                    if block is None:
                        continue
                    references_by_block[block] = references_by_block.get(block, 0) + 1
                    assert block.kind == g
                    if index < seq_blocks.committed_block_count:
                        assert block.node is seq_blocks.nodes[index] or block.node is None
            for merge in seq_blocks.pending_merges:
                references_by_block[merge.identical_block] = references_by_block.get(merge.identical_block, 0) + 1
        if self._checkpoints is not None:
            self._checkpoints.check_invariants()
            for block in self._checkpoints.list_references():
                references_by_block[block] = references_by_block.get(block, 0) + 1
        if self.host_tier is not None:
            assert self.host_loads is not None
            self.host_loads.check_invariants()
            pinned_host_blocks = [
                load.host_block for step in self._steps_in_flight for load in step.host_loads if load is not None
            ]
            self.host_tier.check_invariants(pinned_host_blocks + self.host_loads.pinned_host_blocks())
        for unit in self.pool.units:
            for block in unit.blocks:
                assert block.ref_count == references_by_block.get(block, 0), (
                    f"{block!r}: {references_by_block.get(block, 0)} table entries"
                )

    # ------------------------------------------------------------------ inside

    def _commit_loads(self, loads: list[HostLoad | None]) -> None:
        assert self.host_loads is not None
        self.host_loads.commit(loads)

    def _rollback_loads(self, loads: list[HostLoad | None]) -> None:
        assert self.host_loads is not None
        self.host_loads.rollback(loads)

    def _detach(self, seq: Sequence, seq_blocks: SequenceBlocks) -> None:
        seq_blocks.is_detached = True
        if self._checkpoints is not None:
            self._checkpoints.cancel_planned(seq)

    def _will_compute(self, index: int, hash_: int) -> bool:
        """Whether the prompt of a running sequence has this block at `index`, later than in the step being planned."""
        for seq, seq_blocks in self._blocks_by_sequence.items():
            if len(seq_blocks.nodes) <= index and not seq_blocks.is_detached:
                keys = self._hasher.hashed_keys(seq)
                if index < len(keys) and keys[index].hash == hash_:
                    return True
        return False

    def _increment_table_version(self, seq: Sequence) -> None:
        seq.table_version += 1
        self._table_version += 1

    def _allocate(self, kind: int) -> Block[Node] | None:
        """A block of `kind`, if need be after a compaction; None exactly when the live blocks leave no room."""
        block = self.pool.allocate(kind)
        if block is None and self.pool.can_allocate([int(k == kind) for k in range(len(self.pool.blocks_per_unit))]):
            moved_blocks = self.pool.compact(kind)
            if self.host_tier is not None:
                self.host_tier.plan_all_copies()
            for group, moved_block, source in moved_blocks:
                self._block_copies.append(BlockCopy(group, source, moved_block.id))
                self._planning_step.moved_blocks.append(moved_block)
            for seq, seq_blocks in self._blocks_by_sequence.items():
                self._increment_table_version(seq)
                for g, group_blocks in enumerate(seq_blocks.blocks_by_group):
                    seq.block_tables[g][:] = [UNREAD_BLOCK_ID if b is None else b.id for b in group_blocks]
            block = self.pool.allocate(kind)
            assert block is not None, "a compaction that made no room"
        return block

    def _create_state(
        self, seq: Sequence, source_checkpoint: Block[Node] | None, last_node: Node | None, *, should_copy: bool
    ) -> list[tuple[Block[Node], Block[Node]]]:
        """Give `seq` its state: from the checkpoint `source`, or of nothing.

        Or from the host's of its `last_node`: (the device's block, the host's).
        """
        assert self._checkpoints is not None
        if source_checkpoint is not None or last_node is None:
            self._checkpoints.create_state(seq, source_checkpoint, should_copy=should_copy)
            return []
        assert self.host_tier is not None
        host_block = self.host_tier.pin(last_node, -1)
        return [(self._checkpoints.create_state(seq, None, should_copy=True, needs_init=False), host_block)]

    def _allocate_for_loads(
        self, seq_blocks: SequenceBlocks, nodes: list[Node], host_hits: list[HostHit]
    ) -> list[tuple[Block[Node], Block[Node]]]:
        """Blocks of (group, node), pending, for what the host holds: (the device's, the host's)."""
        blocks: list[tuple[Block[Node], Block[Node]]] = []
        for g, node, host_block in host_hits:
            block = self._allocate(g)
            assert block is not None, "admitted without room for what is loaded"
            if node is not nodes[node.depth] or node not in self.tree:  # what was evicted for it took its name along
                new_node = self.tree.get_or_create(node.key, nodes[node.depth - 1] if node.depth else None)
                assert new_node is not None
                node = nodes[node.depth] = new_node
            self.tree.attach(node, block)
            seq_blocks.blocks_by_group[g][node.depth] = block
            blocks.append((block, host_block))
        return blocks

    def _release_outside_windows(self, seq: Sequence, seq_blocks: SequenceBlocks, end: int) -> None:
        """Release the blocks that no query from position `end` on can see."""
        for g in self._group_indices:
            window = self._windows.window_tokens[g]
            if window is None:
                continue
            start = max(0, end - window + 1) // self.block_size
            group_blocks, table = seq_blocks.blocks_by_group[g], seq.block_tables[g]
            for index in range(seq_blocks.window_starts[g], min(start, len(group_blocks))):
                block = group_blocks[index]
                assert block is not None
                self.pool.release(block)
                group_blocks[index] = None
                table[index] = UNREAD_BLOCK_ID
            seq_blocks.window_starts[g] = max(seq_blocks.window_starts[g], min(start, len(group_blocks)))

    def _assign_nodes(
        self, seq: Sequence, seq_blocks: SequenceBlocks, full_count: int, *, is_computed: bool = False
    ) -> None:
        """Give the blocks up to this one their nodes; the sequence is detached where a name is another's.

        With `is_computed` they take no part in what a later step is to compute: they are named next time.
        """
        keys = self._hasher.block_keys(seq, full_count)
        for index in range(len(seq_blocks.nodes), full_count):
            node = self.tree.get_or_create(keys[index], seq_blocks.nodes[-1] if seq_blocks.nodes else None)
            if node is None:
                self._detach(seq, seq_blocks)
                return
            if is_computed and node.is_pending(self._group_indices):
                return
            seq_blocks.nodes.append(node)
            for g in self._group_indices:
                held_block, named_block = seq_blocks.blocks_by_group[g][index], node.blocks[g]
                if held_block is None or held_block is named_block:
                    continue
                if named_block is None:
                    self.tree.attach(node, held_block)
                else:
                    if self.host_loads is not None:
                        self.host_loads.load_now(named_block)
                    self.pool.acquire(named_block)
                    seq_blocks.pending_merges.append(PendingMerge(g, index, named_block))

    def _commit_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """What is named of [start, end) is computed: announce it, and keep one of what is there twice."""
        seq_blocks = self._blocks_by_sequence[seq]
        for block in seq_blocks.iter_pending_blocks(start, end):
            self.tree.commit(block)
        seq_blocks.committed_block_count = min(end, len(seq_blocks.nodes))  # fewer where the cache was reset meanwhile
        if seq_blocks.pending_merges and (
            merges := [merge for merge in seq_blocks.pending_merges if merge.block_index < end]
        ):
            seq_blocks.pending_merges = seq_blocks.pending_merges[len(merges) :]
            self._merge_duplicates(seq, seq_blocks, merges)

    def _merge_duplicates(self, seq: Sequence, seq_blocks: SequenceBlocks, merges: list[PendingMerge]) -> None:
        self._increment_table_version(seq)
        for g, index, named_block in merges:
            held_block = seq_blocks.blocks_by_group[g][index]
            assert held_block is not None
            assert held_block is not named_block
            seq_blocks.blocks_by_group[g][index] = named_block
            seq.block_tables[g][index] = named_block.id
            self.pool.release(held_block)
