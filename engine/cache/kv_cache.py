"""The engine's cache as the scheduler sees it: block tables of sequences over the pool and the prefix tree.

The life of a block: `admit` takes what is cached and `grow` what is new; `reserve` names the blocks that the step
finishes (pending: another request of the same step may share them); `commit`, after the compute, announces them or,
where an identical block exists, redirects the table to it (late merge); `release` gives them up, tail first. A step may
be planned while the one before is out: a block that it finishes with a token nobody knows yet is named at its commit.

Owns the tables' physical side. Refuses to know budgets, sampling and order of requests. Invariant: a sequence whose
chain is not detached holds, for all its named positions, exactly the blocks that the tree names; so a parent is never
freed before a live child.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.cache.adaptive_eviction import AdaptiveEviction
from engine.cache.attention_windows import AttentionWindows
from engine.cache.block_hasher import BlockHasher
from engine.cache.event_log import StepEvents
from engine.cache.eviction_queue import StateValuation
from engine.cache.host_load_queue import HostLoad, HostLoadQueue
from engine.cache.host_tier import HostTier
from engine.cache.nodes import Node
from engine.cache.pending_step import PendingStep
from engine.cache.pool import Block, UnitPool
from engine.cache.prefix_tree import FULL_KIND, DeviceEvictionOrder, PrefixTree
from engine.cache.reuse_stats import ConversationTurn
from engine.cache.sequence_blocks import SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import StateCheckpoints
from engine.types import BlockId, Chunk, FedChunks, Move, Sequence, StepPlan

UNREAD_BLOCK = BlockId(0)
"""What a sliding-window table holds for positions before the window: any valid block, since no kernel may read it."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    units: int
    live_units: int
    """Units that the running sequences need, packed; `live_units / units` is the usage that operators watch."""
    free_units: int
    host_usage: float = 0.0
    """Share of host memory that holds something."""
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    """Planned to be copied there and back, since the start."""


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
        host_units: int = 0,
        load_bytes_max: int | None = None,
    ) -> None:
        """`step_tokens_max` bounds what one step adds to a sequence, and so what a sliding-window group must hold.

        `adaptive_eviction` takes effect where no window slides. `host_units`: of host memory
        under the device's, none without prefix caching. `load_bytes_max`: that a step with decodes brings back from it.
        """
        self.spec = spec
        self.block_size = spec.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._groups = range(len(spec.groups))
        per_unit = [spec.blocks_per_unit(g) for g in self._groups] + [1] * (spec.state is not None)
        self._windows = AttentionWindows(spec, step_tokens_max)
        host_units *= enable_prefix_caching
        self._order: AdaptiveEviction[Node] | None = None
        if adaptive_eviction and enable_prefix_caching and not self._windows:
            states = None if spec.state is None else StateValuation(per_unit[FULL_KIND], Node.saved_blocks)
            self._order = AdaptiveEviction(
                (unit_count + host_units) * per_unit[FULL_KIND], spec.block_size, state_valuation=states
            )
        self._turns: dict[Sequence, ConversationTurn] = {}
        self.tree = PrefixTree(spec, lambda block: self.pool.drop(block), self._order)
        state_kind = None if spec.state is None else len(spec.groups)
        order = None if self._order is None else DeviceEvictionOrder(self._order, per_unit[FULL_KIND])
        self.pool: UnitPool[Node] = UnitPool(unit_count, per_unit, self.tree.evict, state_kind, order)
        self._checkpoints: StateCheckpoints | None = None
        if state_kind is not None:
            self._checkpoints = StateCheckpoints(state_kind, spec.block_size, self.pool, self.tree, self._allocate)
        self._moves: list[Move] = []
        """Of the plan being made."""
        self.host: HostTier | None = None
        if host_units:
            self.host = self.tree.host_tier = HostTier(
                host_units, per_unit, state_kind, self.tree, self._moves, self._order
            )
        self.loads = None if self.host is None else HostLoadQueue(self.host, self.tree, spec.sizes(), load_bytes_max)
        self._table_changes = 0
        """Of all sequences."""
        self._planning = PendingStep()
        self._out: deque[PendingStep] = deque()
        self._distrusted: list[Block[Node]] = []
        self._distrusted_host: list[Block[Node]] = []
        """Moved by steps that failed."""
        self._chains: dict[Sequence, SequenceBlocks] = {}
        self._names = BlockHasher(spec.block_size)
        self._matched: dict[Sequence, list[Node]] = {}
        """What `match` found last for each sequence that waits."""

    # ------------------------------------------------------------------ questions

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._chains

    @property
    def usage(self) -> CacheUsage:
        host = (0.0, 0, 0) if self.host is None else self.host.usage(self.spec)
        return CacheUsage(len(self.pool.units), self.pool.live_units, self.pool.free_units, *host)

    @property
    def token_capacity(self) -> int:
        """Tokens that one sequence alone can hold."""
        return self._windows.token_capacity(len(self.pool.units), self.pool.blocks_per_unit)

    def has_spare(self, spare_blocks: int) -> bool:
        """Whether so many more tokens' worth of blocks could be live beside what is live now."""
        return self.pool.can_allocate(self._windows.demand(spare_blocks))

    def match(self, seq: Sequence) -> list[Node]:
        """The nodes of the longest known prefix of `seq`, early sharing included; changes nothing.

        At least one token is left to compute, and all of them where the logprobs of the prompt are wanted. The list is
        the cache's own, good until the next call for `seq`: a request that waits is asked for in every step.
        """
        if not self.enable_prefix_caching or seq.request.params.prompt_logprobs is not None:
            return []
        count = (len(seq.token_ids) - 1) // self.block_size
        names = self._names.of(seq, count)
        nodes = self._matched.setdefault(seq, [])
        self.tree.match(names if len(names) == count else names[:count], nodes)
        return nodes

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` that need not be computed if it is admitted now; changes nothing."""
        return self._windows.resumable(self.match(seq)) * self.block_size

    def should_wait(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to compute, load or checkpoint what `seq` would compute again."""
        if not self.enable_prefix_caching or seq.request.params.prompt_logprobs is not None:
            return False
        known = self.match(seq)
        if self.loads is not None and self.loads.has_unplanned(known):
            return True
        names = self._names.of(seq, count := (len(seq.token_ids) - 1) // self.block_size)
        if self._checkpoints is not None:
            return self._checkpoints.planned_ahead(names[:count], self._windows.resumable(known))
        return len(known) < count and self._is_coming(len(known), names[len(known)].hash)

    # ------------------------------------------------------------------ a sequence's blocks

    def admit(self, seq: Sequence, spare_blocks: int = 0) -> bool:
        """Start a sequence on what the cache holds of it: fills its tables and sets `seq.computed`.

        False, and nothing changed, when all its known tokens and `spare_blocks` more would not fit beside what is live.
        Once it is admitted, its known tokens find their memory.
        """
        assert seq not in self._chains
        known = self.match(seq)
        nodes = known[: self._windows.resumable(known)]
        counts = self._windows.demand(-(-len(seq.token_ids) // self.block_size) + spare_blocks)
        for g, window in enumerate(self._windows.blocks):
            seen = nodes if window is None else nodes[max(0, len(nodes) - window) :]
            counts[g] -= sum(block.refs > 0 for node in seen if (block := node.blocks[g]) is not None)
        if not self.pool.can_allocate(counts):
            return False
        # With a copy a resumed sequence has two states until its first step is done, unless another holds the source.
        source = nodes[-1].blocks[-1] if nodes and self._checkpoints is not None and nodes[-1].can_resume(-1) else None
        copies = source is None or source.refs > 0 or self.pool.can_allocate([*counts[:-1], counts[-1] + 1])
        chain = SequenceBlocks(len(self._groups))
        missing: list[tuple[int, Node, Block[Node]]] = []
        state: list[tuple[Block[Node], Block[Node]]] = []
        seq.block_tables = [[] for _ in self._groups]
        self._table_changed(seq)
        for g in self._groups:
            window = self._windows.blocks[g]
            start = 0 if window is None else max(0, len(nodes) - window)
            held: list[Block[Node] | None] = [None] * start
            for node in nodes[start:]:
                block = node.blocks[g]
                if block is None:
                    assert self.host is not None
                    missing.append((g, node, self.host.pin(node, g)))
                else:
                    self.pool.acquire(block)
                held.append(block)
            chain.blocks[g] = held
            chain.window_starts[g] = start
        if self._checkpoints is not None:  # holds the source before anything is allocated
            state = self._start_state(seq, source, nodes[-1] if nodes else None, copies=copies)
        if self.loads is not None:
            self.loads.add(seq, self._take_up(chain, nodes, missing) + state)
        for g, blocks in enumerate(chain.blocks):
            seq.block_tables[g] = [UNREAD_BLOCK if block is None else block.id for block in blocks]
        seq.host_tokens = self.block_size * sum(g == FULL_KIND for g, _, _ in missing)
        chain.nodes = nodes
        chain.committed = len(nodes)
        self._chains[seq] = chain
        seq.computed = len(nodes) * self.block_size
        if self._checkpoints is not None and self.enable_prefix_caching:
            names = self._names.of(seq, last := (len(seq.token_ids) - 1) // self.block_size)
            for stop in {len(known), last} - {0}:
                self._checkpoints.plan(seq, stop, names[stop - 1].hash)
        self._matched.pop(seq, None)
        if self._order is not None:
            names = self._names.of(seq, count := len(seq.token_ids) // self.block_size)
            self._turns[seq] = self._order.begin_turn([name.hash for name in names[:count]], len(known))
        return True

    def plan_common(self, seq: Sequence, other: Sequence) -> int:
        """Tokens that the waiting `other` can have of the running `seq`, up to where their prompts part.

        If a state is needed there, a checkpoint of `seq` is planned.
        """
        if not self.enable_prefix_caching or self._chains[seq].detached:
            return 0
        low, high = 1, min(len(seq.token_ids) - 1, len(other.token_ids) - 1) // self.block_size
        ours, theirs = self._names.of(seq, high), self._names.of(other, high)
        if not high or ours[0].hash != theirs[0].hash:
            return 0
        while low < high:  # chained hashes: equal at i means equal up to i; a collision costs a checkpoint only
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ours[middle - 1].hash == theirs[middle - 1].hash else (low, middle - 1)
        if self._checkpoints is not None:
            self._checkpoints.plan(seq, low, ours[low - 1].hash)
        return 0 if other.request.params.prompt_logprobs is not None else low * self.block_size

    def clip(self, seq: Sequence, end: int) -> int:
        """Where a chunk of `seq` that could go to `end` must stop, so that a planned checkpoint can be taken."""
        return end if self._checkpoints is None else self._checkpoints.clip(seq, end)

    def grow(self, seq: Sequence, end: int) -> bool:
        """Make the tables of `seq` cover the positions [0, end). On False nothing has changed."""
        missing = -(-end // self.block_size) - len(seq.block_tables[FULL_KIND])
        if missing <= 0:
            return True
        taken: list[tuple[int, Block[Node]]] = []
        for g in self._groups:
            for _ in range(missing):
                block = self._allocate(g)
                if block is None:
                    for _, other in reversed(taken):
                        self.pool.release(other)
                    return False
                taken.append((g, block))
        blocks = self._chains[seq].blocks
        for g, block in taken:
            blocks[g].append(block)
            seq.block_tables[g].append(block.id)
        return True

    def reserve(self, seq: Sequence, end: int) -> None:
        """Name the blocks that computing up to `end` finishes. Where an identical one exists, merge at commit."""
        chain = self._chains[seq]
        finished, named = end // self.block_size, len(chain.nodes)
        if finished <= named or chain.detached or not self.enable_prefix_caching:
            return
        if end > len(seq.token_ids):
            if end % self.block_size == 0:
                self._planning.unnamed.append((seq, end))
                if self._checkpoints is not None:
                    self._checkpoints.save(seq, None, end)
            return
        self._name(seq, chain, finished)
        loaded = 0 if self.loads is None else len(self.loads.planned_loads)
        self._planning.finishing.append((seq, named, len(chain.nodes), loaded))
        if self._checkpoints is not None and not chain.detached:
            self._checkpoints.reserve(seq, chain.nodes, seq.computed, end)

    def fill(self, plan: StepPlan) -> None:
        """Complete a plan that will be executed: the copies of states and of compacted blocks. It is out now."""
        step, self._planning = self._planning, PendingStep()
        step.chunks = plan.chunks
        plan.table_changes = self._table_changes
        if self.host is not None and self.loads is not None:
            self.host.plan_copies(self.loads.unplanned_blocks)
        plan.block_moves = self._moves.copy()
        self._moves.clear()
        if self.host is not None:
            step.stored, self.host.planned_stores = self.host.planned_stores, []
        if self.loads is not None:
            step.loaded = self.loads.take_planned()
        if isinstance(plan.chunks, FedChunks):
            for seq in plan.chunks.sequences:
                seq.computed += 1
        else:
            for chunk in plan.chunks:
                chunk.seq.computed = chunk.end
        if self._checkpoints is not None:
            self._checkpoints.fill(plan)
        self._out.append(step)

    def commit(self, chunks: Items[Chunk], ended: Collection[Sequence] = ()) -> None:
        """The oldest step's compute is done: announce what it finished, merge what it finished twice.

        Of the `ended` sequences nothing is named any more. Most chunks of a step are decodes that finish no block: only
        those that do are looked at, but for what windows leave and states.
        """
        step = self._out.popleft()
        assert step.chunks is chunks
        done = 0
        for seq, start, end, loaded in step.finishing:
            if loaded > done:
                self._commit_loads(step.loaded[done:loaded])
                done = loaded
            self._settle(seq, start, end)
        if step.loaded:
            self._commit_loads(step.loaded[done:])
        for seq, end in step.unnamed:
            chain = self._chains[seq]
            start, finished = len(chain.nodes), end // self.block_size
            if seq not in ended and not chain.detached:
                self._name(seq, chain, finished, computed=True)
                if self._checkpoints is not None and len(chain.nodes) == finished:
                    self._checkpoints.attach(seq, chain.nodes[-1], end)
                self._settle(seq, start, len(chain.nodes))
        if self._windows:
            for chunk in chunks:
                self._pass_windows(chunk.seq, self._chains[chunk.seq], chunk.end)
        if self._checkpoints is not None:
            for chunk in chunks:
                self._checkpoints.commit(chunk.seq, chunk.start, chunk.end)

    def abandon(self) -> None:
        """The newest step that is out was not computed: none of its blocks may be trusted or announced.

        All its sequences must be released, once the steps before it are abandoned too.
        """
        step = self._out.pop()
        self._distrusted += step.moved
        if self._checkpoints is not None:
            for chunk in reversed(step.chunks):
                self._checkpoints.abandon(chunk.seq, chunk.end)
        left = len(step.loaded)
        for seq, start, end, loaded in reversed(step.finishing):
            if loaded < left:
                self._abandon_loads(step.loaded[loaded:left])
                left = loaded
            chain = self._chains[seq]
            for block in reversed(list(chain.pending(start, end))):
                self.tree.detach_pending(block)
            del chain.nodes[start:]
        if left:
            self._abandon_loads(step.loaded[:left])
        for seq, start, _, _ in step.finishing:  # behind what hangs from them
            self._chains[seq].unpin_merges(self.pool, start)
        self._distrusted_host += step.stored

    def release(self, seq: Sequence) -> None:
        """Give up everything that `seq` holds, its tail first so that it is evicted first."""
        chain = self._chains.pop(seq)
        if self.loads is not None:
            self.loads.cancel(seq)
        assert not chain.merges
        assert len(chain.nodes) == chain.committed, "released in the middle of a step"
        if self._checkpoints is not None:
            self._checkpoints.release(seq)
        if self._order is not None:
            self._order.end_turn(self._turns.pop(seq))
        chain.release(self.pool)
        seq.block_tables = []
        seq.computed = 0

    def distrust_moved(self) -> bool:
        """After a failed step: forget what its moves, or those planned after it, may or may not have copied.

        True, and nothing done, while sequences hold any of it: they must be released first.
        """
        below = [] if self.host is None else self._distrusted_host + self.host.untrusted_blocks()
        if any(block.refs for block in self._distrusted + below):
            return True
        for block in self._distrusted:
            if block.node is not None:
                self.tree.evict(block, keep_on_host=False)
        self._distrusted.clear()
        for block in below:
            if block.node is not None:
                assert self.host is not None
                self.host.evict(block)
        self._distrusted_host.clear()
        return False

    def forget_names(self, seq: Sequence) -> None:
        """Drop the memorised hashes of a request that is gone for good."""
        self._names.forget(seq)
        self._matched.pop(seq, None)

    # ------------------------------------------------------------------ the whole cache

    def reset(self) -> None:
        """Forget every name. Sequences keep the blocks they hold, but what they finish from now on stays unnamed."""
        for block in self.tree.clear():
            if block.refs == 0:
                self.pool.drop(block)
        for seq, chain in self._chains.items():
            self._detach(seq, chain)
            chain.nodes = []
            chain.committed = 0
            chain.unpin_merges(self.pool)

    def take_events(self) -> StepEvents | None:
        """What became resident and what left since the last call, in order; made when it is read. None for nothing."""
        return self.tree.event_log.drain()

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.tree.check_invariants()
        refs: dict[Block[Node], int] = {}
        for seq, chain in self._chains.items():
            for g in self._groups:
                held, table = chain.blocks[g], seq.block_tables[g]
                assert [UNREAD_BLOCK if b is None else b.id for b in held] == table
                assert all(b is not None for b in held[chain.window_starts[g] :])
                for index, block in enumerate(held):
                    if block is None:
                        continue
                    refs[block] = refs.get(block, 0) + 1
                    assert block.kind == g
                    if index < chain.committed:
                        assert block.node is chain.nodes[index] or block.node is None
            for _, _, block in chain.merges:
                refs[block] = refs.get(block, 0) + 1
        if self._checkpoints is not None:
            self._checkpoints.check_invariants()
            for block in self._checkpoints.references():
                refs[block] = refs.get(block, 0) + 1
        if self.host is not None:
            assert self.loads is not None
            self.loads.check_invariants()
            read = [load[2] for step in self._out for load in step.loaded if load is not None]
            self.host.check_invariants(read + self.loads.pinned_host_blocks())
        for unit in self.pool.units:
            for block in unit.blocks:
                assert block.refs == refs.get(block, 0), f"{block!r}: {refs.get(block, 0)} table entries"

    # ------------------------------------------------------------------ inside

    def _commit_loads(self, loads: list[HostLoad | None]) -> None:
        assert self.loads is not None
        self.loads.commit(loads)

    def _abandon_loads(self, loads: list[HostLoad | None]) -> None:
        assert self.loads is not None
        self.loads.rollback(loads)

    def _detach(self, seq: Sequence, chain: SequenceBlocks) -> None:
        chain.detached = True
        if self._checkpoints is not None:
            self._checkpoints.unplan(seq)

    def _is_coming(self, index: int, hash_: int) -> bool:
        """Whether the prompt of a running sequence has this block at `index`, later than in the step being planned."""
        for seq, chain in self._chains.items():
            if len(chain.nodes) <= index and not chain.detached:
                names = self._names.known(seq)
                if index < len(names) and names[index].hash == hash_:
                    return True
        return False

    def _table_changed(self, seq: Sequence) -> None:
        seq.table_changes += 1
        self._table_changes += 1

    def _allocate(self, kind: int) -> Block[Node] | None:
        """A block of `kind`, if need be after a compaction; None exactly when the live blocks leave no room."""
        block = self.pool.allocate(kind)
        if block is None and self.pool.can_allocate([int(k == kind) for k in range(len(self.pool.blocks_per_unit))]):
            moved = self.pool.compact(kind)
            if self.host is not None:
                self.host.plan_all_copies()
            for group, block_moved, source in moved:
                self._moves.append(Move(group, source, block_moved.id))
                self._planning.moved.append(block_moved)
            for seq, chain in self._chains.items():
                self._table_changed(seq)
                for g, held in enumerate(chain.blocks):
                    seq.block_tables[g][:] = [UNREAD_BLOCK if b is None else b.id for b in held]
            block = self.pool.allocate(kind)
            assert block is not None, "a compaction that made no room"
        return block

    def _start_state(
        self, seq: Sequence, source: Block[Node] | None, last: Node | None, *, copies: bool
    ) -> list[tuple[Block[Node], Block[Node]]]:
        """Give `seq` its state: from the checkpoint `source`, or of nothing.

        Or from the host's of its `last` node: (its own, the host's, held).
        """
        assert self._checkpoints is not None
        if source is not None or last is None:
            self._checkpoints.start(seq, source, copies=copies)
            return []
        assert self.host is not None
        own = self.host.pin(last, -1)
        return [(self._checkpoints.start(seq, None, copies=True, fresh=False), own)]

    def _take_up(
        self, chain: SequenceBlocks, nodes: list[Node], missing: list[tuple[int, Node, Block[Node]]]
    ) -> list[tuple[Block[Node], Block[Node]]]:
        """Blocks of (group, node), in the chain and pending, for what the host holds: (the device's, the host's)."""
        blocks: list[tuple[Block[Node], Block[Node]]] = []
        for g, node, own in missing:
            block = self._allocate(g)
            assert block is not None, "admitted without room for what is loaded"
            if node is not nodes[node.depth] or node not in self.tree:  # what was evicted for it took its name along
                again = self.tree.get_or_create(node.key, nodes[node.depth - 1] if node.depth else None)
                assert again is not None
                node = nodes[node.depth] = again
            self.tree.attach(node, block)
            chain.blocks[g][node.depth] = block
            blocks.append((block, own))
        return blocks

    def _pass_windows(self, seq: Sequence, chain: SequenceBlocks, end: int) -> None:
        """Release the blocks that no query from position `end` on can see."""
        for g in self._groups:
            window = self._windows.tokens[g]
            if window is None:
                continue
            start = max(0, end - window + 1) // self.block_size
            held, table = chain.blocks[g], seq.block_tables[g]
            for index in range(chain.window_starts[g], min(start, len(held))):
                block = held[index]
                assert block is not None
                self.pool.release(block)
                held[index] = None
                table[index] = UNREAD_BLOCK
            chain.window_starts[g] = max(chain.window_starts[g], min(start, len(held)))

    def _name(self, seq: Sequence, chain: SequenceBlocks, finished: int, *, computed: bool = False) -> None:
        """Give the blocks up to this one their nodes; the chain is detached where a name is another's.

        Blocks that are `computed` take no part in what a later step is to compute: they are named next time.
        """
        names = self._names.of(seq, finished)
        for index in range(len(chain.nodes), finished):
            node = self.tree.get_or_create(names[index], chain.nodes[-1] if chain.nodes else None)
            if node is None:
                self._detach(seq, chain)
                return
            if computed and node.is_pending(self._groups):
                return
            chain.nodes.append(node)
            for g in self._groups:
                own, known = chain.blocks[g][index], node.blocks[g]
                if own is None or own is known:
                    continue
                if known is None:
                    self.tree.attach(node, own)
                else:
                    if self.loads is not None:
                        self.loads.load_now(known)
                    self.pool.acquire(known)
                    chain.merges.append((g, index, known))

    def _settle(self, seq: Sequence, start: int, end: int) -> None:
        """What is named of [start, end) is computed: announce it, and keep one of what is there twice."""
        chain = self._chains[seq]
        for block in chain.pending(start, end):
            self.tree.commit(block)
        chain.committed = min(end, len(chain.nodes))  # fewer where the cache was reset meanwhile
        if chain.merges and (merges := [merge for merge in chain.merges if merge[1] < end]):
            chain.merges = chain.merges[len(merges) :]
            self._merge(seq, chain, merges)

    def _merge(self, seq: Sequence, chain: SequenceBlocks, merges: list[tuple[int, int, Block[Node]]]) -> None:
        self._table_changed(seq)
        for g, index, known in merges:
            own = chain.blocks[g][index]
            assert own is not None
            assert own is not known
            chain.blocks[g][index] = known
            seq.block_tables[g][index] = known.id
            self.pool.release(own)
