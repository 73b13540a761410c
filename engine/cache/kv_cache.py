"""The engine's cache as the scheduler sees it: block tables of sequences over the pool and the prefix tree.

A block goes through these calls. `admit` gives a sequence the cached blocks of its prompt, and `grow` gives it new
ones. `register_full_blocks` puts the blocks that a step fills into the prefix tree: they are pending, and another
request of the same step may share them. `commit`, after the step is computed, announces them. If an identical block
exists by then, the table is redirected to it. `release` gives all blocks of a sequence up: a block that no other
sequence holds stays cached if it is in the prefix tree, else its memory is free. docs/architecture.md has the table of
states.

Invariant: a sequence that is not detached holds the full-attention blocks of all its nodes in the prefix tree. So a
parent is never freed before a live child.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items

from engine.cache.attention_windows import AttentionWindows
from engine.cache.block_hasher import compute_keys, count_common_blocks
from engine.cache.blocks import Block, Node
from engine.cache.device_tier import DeviceTier
from engine.cache.host_tier import HostHit, HostLoad, HostTier
from engine.cache.learned_eviction import LearnedEviction
from engine.cache.lru_eviction import LruEviction
from engine.cache.prefix_tree import PrefixTree
from engine.cache.sequence_blocks import SequenceBlocks
from engine.cache.spec import FULL_KIND, CacheSpec, ceil_div
from engine.cache.state_checkpoints import NoStates, StateCheckpoints
from engine.cache.step_log import StepLog
from engine.types import BlockCopy, BlockKey, Chunk, Sequence, StepPlan
from events import Event


class KVCache:
    """Owns the block tables of one model's sequences, over device memory of `unit_count` units."""

    def __init__(
        self,
        spec: CacheSpec,
        unit_count: int,
        *,
        enable_prefix_caching: bool = True,
        step_tokens_max: int | None = None,
        adaptive_eviction: bool = False,
        host_unit_count: int = 0,
    ) -> None:
        """Make an empty cache. A unit is a piece of memory that holds one or more blocks, all of one kind.

        `spec`: sizes of the model's blocks. `unit_count`: units on the device, at least one. `host_unit_count`: units
        of host memory, to which evicted blocks move; ignored without prefix caching. `step_tokens_max`: most tokens
        that one step adds to a sequence; None: no limit. `adaptive_eviction`: learn which blocks are reused; without
        it, and for models with sliding windows, the least recently used block is evicted first.
        """
        assert unit_count >= 1
        self.spec = spec
        self.block_size = spec.block_size
        self._groups = range(len(spec.groups))
        self._caches_prefixes = enable_prefix_caching
        self.windows = AttentionWindows(spec, step_tokens_max)

        # Eviction order, prefix tree, and the blocks of both memories.
        host_unit_count = host_unit_count if enable_prefix_caching else 0
        can_learn = enable_prefix_caching and not self.windows.sliding_groups
        self._eviction = LruEviction(spec)
        if adaptive_eviction and can_learn:
            self._eviction = LearnedEviction(spec, unit_count + host_unit_count)
        self.tree = PrefixTree(spec, self._eviction)
        self._block_copies: list[BlockCopy] = []
        """Copies that the step being planned makes. `HostTier` and `StateCheckpoints` add theirs."""
        self.host_tier = HostTier(host_unit_count, spec, self.tree, self._eviction.host_order, self._block_copies)
        self.device_tier = DeviceTier(unit_count, spec, self.tree, self._eviction.device_order, self.host_tier)
        self.pool = self.device_tier.pool

        # Running and waiting sequences.
        self.states: StateCheckpoints | NoStates = NoStates()
        if spec.state is not None:
            self.states = StateCheckpoints(spec, self.device_tier, self.host_tier, self._block_copies, self._allocate)
        self._steps = StepLog(spec, self.tree, self.device_tier, self.states, self.host_tier)
        self._blocks_by_sequence: dict[Sequence, SequenceBlocks] = {}
        self._matched_nodes: dict[Sequence, list[Node]] = {}
        """Last result of `_match` for each waiting sequence, because a step may look a long prompt up several times."""

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._blocks_by_sequence

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states: then sequences resume only at checkpoints."""
        return self.spec.state is not None

    @property
    def used_share(self) -> float:
        """Share of the device's units that running sequences need if their blocks are packed, 0 .. 1."""
        return self.pool.live_units / len(self.pool.units)

    @property
    def token_capacity(self) -> int:
        """Most tokens of one sequence that the cache can hold, when it holds no other."""
        return self.windows.compute_token_capacity(len(self.pool.units), self.pool.blocks_per_unit)

    @property
    def growth_reserve_blocks(self) -> int:
        """Blocks that stay free for running sequences to grow into when another sequence is admitted."""
        return max(1, self.pool.blocks_per_unit[FULL_KIND] * len(self.pool.units) // 100)

    def has_room_for_blocks(self, block_count: int) -> bool:
        """Return whether a new sequence of `block_count` blocks fits beside the live blocks."""
        return self.pool.can_allocate(self.windows.count_blocks_needed(block_count))

    def count_cached_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of `seq` need not be computed if it is admitted now."""
        return self._count_resumable(self._match(seq)) * self.block_size

    def _match(self, seq: Sequence) -> list[Node]:
        """Return the nodes of the longest cached prefix of `seq`; blocks that planned steps compute count as cached.

        The list is valid until the next call for `seq`.
        """
        nodes = self._matched_nodes.setdefault(seq, [])
        self.tree.extend_match(self.list_keys(seq), nodes)
        return nodes

    def _count_resumable(self, nodes: list[Node]) -> int:
        """Return after how many leading nodes of a cached prefix a sequence can resume."""
        return self.windows.count_resumable_blocks(len(nodes), lambda kind, index: nodes[index].has_usable_block(kind))

    def list_keys(self, seq: Sequence) -> list[BlockKey]:
        """Return the keys of the blocks of `seq` that need not be computed if the cache has them.

        The last token must be computed in any case. If the request wants logprobs of its prompt, all tokens must.
        """
        if seq.request.params.prompt_logprobs is not None or not self._caches_prefixes:
            return []
        block_count = (len(seq.token_ids) - 1) // self.block_size
        return compute_keys(seq, block_count, self.block_size)[:block_count]

    def should_wait(self, seq: Sequence) -> bool:
        """Return whether `seq` should wait, because a running sequence is about to cache more of its prompt.

        With 3 blocks of the prompt cached, the question is whether a running sequence is going to compute the fourth.
        In a model with recurrent states, it must also leave a checkpoint from which `seq` can resume.
        """
        matched_nodes = self._match(seq)
        keys = self.list_keys(seq)
        if self.has_states:
            return self.states.has_planned_checkpoint(keys, self._count_resumable(matched_nodes))
        match_count = len(matched_nodes)
        return match_count < len(keys) and self._will_compute(match_count, keys[match_count])

    def _will_compute(self, index: int, key: BlockKey) -> bool:
        """Return whether a running sequence has this key at block `index`, and has yet to compute that block."""
        for seq, seq_blocks in self._blocks_by_sequence.items():
            has_registered_block = len(seq_blocks.nodes) > index
            if has_registered_block or seq_blocks.is_detached:
                continue
            if index < len(seq.block_keys) and seq.block_keys[index].hash == key.hash:
                return True
        return False

    def admit(self, seq: Sequence, reserve_blocks: int = 0) -> bool:
        """Start to run a sequence: give it the cached blocks of its prefix, so that it computes only the other tokens.

        With blocks of 16 tokens, 2 of them cached, and a prompt of 40 tokens, `seq.computed_tokens` becomes 32. Returns
        False, with nothing changed, if there is no memory for the sequence and `reserve_blocks` more blocks.
        """
        assert seq not in self._blocks_by_sequence
        matched_nodes = self._match(seq)
        nodes = matched_nodes[: self._count_resumable(matched_nodes)]
        sequence_block_count = ceil_div(len(seq.token_ids), self.block_size)
        block_counts = self.windows.count_missing_blocks(nodes, sequence_block_count + reserve_blocks)
        if not self.pool.can_allocate(block_counts):
            return False
        self._start_sequence(seq, nodes, block_counts)
        self._plan_checkpoints(seq, len(matched_nodes))
        del self._matched_nodes[seq]
        self._eviction.begin_turn(seq, len(matched_nodes))
        return True

    def _start_sequence(self, seq: Sequence, nodes: list[Node], block_counts: list[int]) -> None:
        """Give a sequence the cached blocks of its prefix, and the recurrent state after them.

        `nodes`: prefix tree nodes of these blocks. `block_counts`: blocks of each kind for which there is room.
        Everything cached is held before anything is allocated, because an allocation evicts what no sequence holds.
        """
        seq_blocks = SequenceBlocks(seq, nodes, len(self._groups), is_detached=not self._caches_prefixes)
        has_room_for_copy = False
        if self.has_states:  # the last kind is the state; to copy a cached one, both must fit
            *attention_counts, state_count = block_counts
            has_room_for_copy = self.pool.can_allocate([*attention_counts, state_count + 1])
        host_hits = self._acquire_prefix(seq_blocks)
        last_node = nodes[-1] if nodes else None
        state_loads = self.states.create_state(seq, last_node, has_room_for_copy=has_room_for_copy)
        block_loads = self._allocate_for_loads(seq_blocks, host_hits)
        self._steps.plan_loads([*block_loads, *state_loads])
        seq_blocks.rewrite_tables()
        self._blocks_by_sequence[seq] = seq_blocks
        seq.host_tokens = self.block_size * sum(hit.group == FULL_KIND for hit in host_hits)
        seq.computed_tokens = len(nodes) * self.block_size

    def _acquire_prefix(self, seq_blocks: SequenceBlocks) -> list[HostHit]:
        """Give a sequence the device's blocks of its cached prefix, and return the blocks that only host memory has.

        In the sequence's block tables, None stands for a block that is yet to be loaded from host memory, or that is
        never read again, because it lies before a sliding window.
        """
        host_hits: list[HostHit] = []
        nodes = seq_blocks.nodes
        for group, blocks in enumerate(seq_blocks.blocks_by_group):
            first_index = self.windows.find_first_needed_block(group, len(nodes))
            blocks.extend([None] * first_index)
            for node in nodes[first_index:]:
                block = node.blocks[group]
                if block is None:
                    host_hits.append(HostHit(group, node.depth, self.host_tier.pin(node, group)))
                else:
                    self.pool.acquire(block)
                blocks.append(block)
        return host_hits

    def _allocate_for_loads(self, seq_blocks: SequenceBlocks, host_hits: list[HostHit]) -> list[HostLoad]:
        """Allocate a device block for each block of the prefix that only host memory has (a host hit).

        Returns the copies that fill the new blocks. An allocation may evict other blocks, so that a node of the prefix
        leaves the tree. Such a node is made again.
        """
        loads: list[HostLoad] = []
        nodes = seq_blocks.nodes
        for group, index, host_block in host_hits:
            block = self._allocate(group)
            assert block is not None, "admitted without room for the blocks to load"
            if nodes[index] not in self.tree:
                new_node = self.tree.get_or_create(nodes[index].key, nodes[index - 1] if index else None)
                assert new_node is not None
                nodes[index] = new_node
            self.device_tier.attach(nodes[index], block)
            seq_blocks.blocks_by_group[group][index] = block
            loads.append(HostLoad(block, host_block))
        return loads

    def _plan_checkpoints(self, seq: Sequence, matched_block_count: int) -> None:
        """Plan a state checkpoint at the end of the prompt's cached blocks, and one at the end of its last full block.

        Other prompts may branch where the cached blocks end. A repetition or the next turn resumes at the last block.
        """
        if self.has_states and self._caches_prefixes:
            full_block_count = (len(seq.token_ids) - 1) // self.block_size
            keys = compute_keys(seq, full_block_count, self.block_size)
            for block_count in {matched_block_count, full_block_count} - {0}:
                self.states.plan_checkpoint(seq, block_count, keys[block_count - 1].hash)

    def plan_shared_prefix(self, seq: Sequence, waiting_seq: Sequence) -> int:
        """Return how many prompt tokens the running `seq` computes first, so that `waiting_seq` need not compute them.

        In a model with states, also plan that `seq` leaves a checkpoint at the end of that common prefix.
        """
        if self._blocks_by_sequence[seq].is_detached:
            return 0
        block_count = count_common_blocks(seq, waiting_seq, self.block_size)
        if not block_count:
            return 0
        self.states.plan_checkpoint(seq, block_count, seq.block_keys[block_count - 1].hash)
        needs_all_logits = waiting_seq.request.params.prompt_logprobs is not None  # then every token is computed
        return 0 if needs_all_logits else block_count * self.block_size

    def clip_chunk_end(self, seq: Sequence, end: int) -> int:
        """Return the end of a chunk of `seq`: `end`, or the next planned checkpoint if that comes first."""
        return self.states.clip_chunk_end(seq, end)

    def grow(self, seq: Sequence, end: int) -> bool:
        """Give `seq` blocks for the positions [0, end). Without the memory, return False and leave `seq` as it is."""
        missing_count = ceil_div(end, self.block_size) - len(seq.block_tables[FULL_KIND])
        if missing_count <= 0:
            return True
        new_blocks: list[Block] = []
        for group in self._groups:
            for _ in range(missing_count):
                block = self._allocate(group)
                if block is None:
                    for new_block in reversed(new_blocks):
                        self.pool.release(new_block)
                    return False
                new_blocks.append(block)
        self._blocks_by_sequence[seq].append(new_blocks)
        return True

    def _allocate(self, kind: int) -> Block | None:
        """Allocate a block of `kind`; None if sequences hold too much memory.

        If need be, blocks of other kinds move together to free a unit. The plan being made copies their contents.
        """
        block = self.pool.allocate(kind)
        if block is not None:
            return block
        one_block = [int(k == kind) for k in range(len(self.pool.blocks_per_unit))]
        if not self.pool.can_allocate(one_block):
            return None
        self._block_copies += self.pool.compact(kind)
        for seq_blocks in self._blocks_by_sequence.values():
            seq_blocks.rewrite_tables()  # a moved block has another id
        block = self.pool.allocate(kind)
        assert block is not None, "a compaction that made no room"
        return block

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`, the last block first, so that it is evicted first."""
        seq_blocks = self._blocks_by_sequence.pop(seq)
        self.states.release(seq)
        self._eviction.end_turn(seq)
        seq_blocks.release(self.pool)
        seq.block_tables = []
        seq.computed_tokens = 0

    def forget_match(self, seq: Sequence) -> None:
        """Forget the cached prefix of a request that has ended."""
        self._matched_nodes.pop(seq, None)

    def register_full_blocks(self, seq: Sequence, end: int) -> None:
        """Put the blocks that are full once `seq` is computed up to `end` into the prefix tree, as pending blocks."""
        self._steps.register_full_blocks(self._blocks_by_sequence[seq], end)

    def fill_plan(self, plan: StepPlan) -> None:
        """Complete a plan with its copies, and advance its sequences. The step counts as in flight from now on."""
        plan.block_copies = self.take_copies()
        for chunk in plan.chunks:
            chunk.seq.computed_tokens = chunk.end
        self.states.fill_plan(plan)
        self._steps.begin_step()

    def commit(self, chunks: Items[Chunk], ended_sequences: Collection[Sequence] = ()) -> None:
        """Record that the oldest step in flight is computed: announce its blocks, release blocks before the windows.

        `ended_sequences`: sequences of finished requests, for which no further blocks are registered.
        """
        self._steps.commit(ended_sequences)
        if self.windows.sliding_groups:
            for chunk in chunks:
                self._release_outside_windows(self._blocks_by_sequence[chunk.seq], chunk.end)
        self.states.commit(chunks)

    def _release_outside_windows(self, seq_blocks: SequenceBlocks, end: int) -> None:
        """Release the blocks that are too old for a sliding window: no query from position `end` on reads them."""
        for group in self.windows.sliding_groups:
            seq_blocks.release_before(group, self.windows.find_first_seen_block(group, end), self.pool)

    def take_copies(self) -> list[BlockCopy]:
        """Take the copies that wait for the next step. The caller does them at once, in order.

        A transfer does so, because it writes to blocks of the same memory before that step.
        """
        block_copies = self._block_copies.copy()
        self._block_copies.clear()
        return block_copies

    def take_events(self) -> Iterator[Event] | None:
        """Return the events since the last call, in order; None if nothing changed. Iterating makes the events."""
        return self.tree.event_log.drain()

    def reset(self) -> None:
        """Empty the prefix cache. Running sequences keep their blocks, and register no further ones."""
        for node in self.tree.clear():
            for block in filter(None, node.blocks):
                self.pool.discard(block)
            for host_block in filter(None, node.host_blocks):
                self.host_tier.pool.discard(host_block)
        for seq_blocks in self._blocks_by_sequence.values():
            self._steps.detach(seq_blocks)
            seq_blocks.nodes = []
        self._steps.cancel_merges()

    def reset_after_failure(self) -> None:
        """Empty the cache after a step has failed. The caller then releases all sequences.

        The steps in flight should have copied blocks between the device and host memory, and those copies may be
        missing. So no block of either memory is trusted any more.
        """
        self.reset()
        self._steps.drop_steps()
        self._block_copies.clear()

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.tree.check_invariants()
        self.states.check_invariants()
        self.host_tier.check_invariants(self._steps.list_pinned_host_blocks())
        references = self.states.list_references() + self._steps.list_references()
        for seq_blocks in self._blocks_by_sequence.values():
            seq_blocks.check_invariants()
            references += seq_blocks.list_references()
        reference_counts = Counter(references)
        for unit in self.pool.units:
            for block in unit.blocks:
                assert block.ref_count == reference_counts[block], f"{block!r}: {reference_counts[block]} table entries"
