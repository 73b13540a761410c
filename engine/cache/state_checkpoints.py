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

from engine.cache.nodes import BlockKey, Node
from engine.cache.pool import Block, UnitPool, state_value
from engine.cache.prefix_tree import PrefixTree
from engine.types import Sequence, StepPlan, UnitId

_LONG_CHUNK_TOKENS = 1024
"""Prefill chunks from this length on end on a block boundary; from half of it on a checkpoint of their end pays."""


@dataclass(slots=True)
class _SequenceState:
    """One running sequence's part."""

    own: Block[Node]
    source: Block[Node] | None
    """Checkpoint to copy from before this step's compute; held until the step is over."""
    fresh: bool = True
    """The state has yet to be restored or zeroed by the step being planned."""
    stops: list[int] = field(default_factory=list)
    """Planned checkpoints as counts of blocks, ascending."""
    shared: dict[int, int] = field(default_factory=dict)
    """Hash of the prefix at each stop: what waiting requests compare with."""
    saving: dict[int, Block[Node]] = field(default_factory=dict)
    """Checkpoints that steps take which are planned and not committed, by the end of the chunk."""
    rolling: Block[Node] | None = None
    """Last checkpoint taken in decode. It is `shared` if another sequence has reached or used it."""


class StateCheckpoints:
    """States by sequence. `allocate` gives a state block at any price short of preemption, or None."""

    def __init__(
        self,
        kind: int,
        block_size: int,
        pool: UnitPool[Node],
        tree: PrefixTree,
        allocate: Callable[[int], Block[Node] | None],
    ) -> None:
        self._kind = kind
        self._block_size = block_size
        self._pool = pool
        self._tree = tree
        self._allocate = allocate
        self._states: dict[Sequence, _SequenceState] = {}
        self._planned: Counter[tuple[int, int]] = Counter()  # (blocks, hash) of all stops ahead
        self._copies: list[tuple[UnitId, UnitId]] = []

    # ------------------------------------------------------------------ a sequence's state

    def start(self, seq: Sequence, source: Block[Node] | None, *, copies: bool, fresh: bool = True) -> Block[Node]:
        """Give `seq` a state of its own, to be restored from the checkpoint `source` (None: zeroed) by this step.

        There must be room for it. Without `copies` the checkpoint itself becomes the state: nobody else may hold it.
        Not `fresh`: the caller fills the state that is returned.
        """
        if source is not None:
            self._pool.acquire(source)
            source.is_shared = True
        if source is None or copies:
            own = self._allocate(self._kind)
            assert own is not None, "admitted without room for its state"
            self._states[seq] = _SequenceState(own, source, fresh)
        else:
            own = source
            assert own.refs == 1
            self._tree.detach(own)
            self._states[seq] = _SequenceState(own, None, fresh=False)
        seq.state_unit = own.unit.index
        return own

    def plan(self, seq: Sequence, blocks: int, hash_: int) -> None:
        """Take a checkpoint of `seq` after so many blocks, named by the hash of the last of them."""
        state = self._states[seq]
        if blocks * self._block_size > seq.computed and blocks not in state.shared:
            state.stops = sorted([*state.stops, blocks])
            state.shared[blocks] = hash_
            self._planned[blocks, hash_] += 1

    def planned_ahead(self, names: Items[BlockKey], after: int) -> bool:
        """Whether a running sequence will take a checkpoint of the prefix `names`, deeper than `after` blocks."""
        return any(after < blocks <= len(names) and names[blocks - 1].hash == hash_ for blocks, hash_ in self._planned)

    def unplan(self, seq: Sequence) -> None:
        """Take no further checkpoint of `seq`: what it computes stays unnamed, and nobody shall wait for it."""
        state = self._states[seq]
        while state.stops:
            self._pass_stop(state)

    def clip(self, seq: Sequence, end: int) -> int:
        """The end of a chunk that may not run past the next planned checkpoint and, if long, ends on a boundary."""
        stops = self._states[seq].stops
        if not stops:
            return end
        end = min(end, stops[0] * self._block_size)
        return end if end - seq.computed < _LONG_CHUNK_TOKENS else end // self._block_size * self._block_size

    def reserve(self, seq: Sequence, nodes: list[Node], start: int, end: int) -> None:
        """Take a checkpoint with the step that computes [start, end), if one belongs there and memory allows."""
        state = self._states[seq]
        blocks, rest = divmod(end, self._block_size)
        if rest or blocks > len(nodes):
            return
        decoding = end - start == 1 and end > seq.prompt_len
        if not (decoding or blocks in state.shared or end - start >= _LONG_CHUNK_TOKENS // 2):
            return
        block = nodes[blocks - 1].blocks[self._kind]
        if block is not None:
            block.is_shared = True
        elif not nodes[blocks - 1].is_on_host(self._kind):
            self.save(seq, nodes[blocks - 1], end)

    def save(self, seq: Sequence, node: Node | None, end: int) -> None:
        """Take a checkpoint with the step that computes up to `end`, if memory allows; None: `attach` names it."""
        block = self._pool.allocate(self._kind)
        if block is not None:
            if node is not None:
                self._tree.attach(node, block)
            state = self._states[seq]
            state.saving[end] = block
            self._copies.append((state.own.unit.index, block.unit.index))

    def attach(self, seq: Sequence, node: Node, end: int) -> None:
        """Name the checkpoint that a step being committed took at `end`; one that is there already is enough."""
        block, known = self._states[seq].saving.get(end), node.blocks[self._kind]
        if known is not None:
            known.is_shared = True
        elif block is not None:
            self._tree.attach(node, block)

    def fill(self, plan: StepPlan) -> None:
        """Add the copies that the chunks of `plan` need. It is out: the next one may resume from what it takes."""
        for chunk in plan.chunks:
            state = self._states[chunk.seq]
            if state.fresh:
                state.fresh = False
                if state.source is None:
                    plan.state_resets.append(state.own.unit.index)
                else:
                    plan.state_restores.append((state.source.unit.index, state.own.unit.index))
            while state.stops and state.stops[0] * self._block_size <= chunk.end:
                self._pass_stop(state)
            if (block := state.saving.get(chunk.end)) is not None:
                block.is_in_flight = True
        plan.state_checkpoints, self._copies = self._copies, []

    def commit(self, seq: Sequence, start: int, end: int) -> None:
        """The step's compute is done."""
        state = self._states[seq]
        self._unpin(state)
        block = state.saving.pop(end, None)
        if block is None:
            return
        if block.node is None:  # the cache was reset meanwhile, or nothing that ends here got a name
            self._pool.release(block)
            return
        self._tree.commit(block)
        rolling, state.rolling = state.rolling, None
        decoding = end > seq.prompt_len and end - start == 1
        if decoding and rolling and not (rolling.is_shared or rolling.refs) and rolling.node is not None:
            self._tree.evict(rolling, keep_on_host=False)
        before = self._checkpoint_before(block.node)
        if before is not None:
            self._supersede(before)
        self._release(block)
        if decoding:
            state.rolling = block

    def abandon(self, seq: Sequence, end: int) -> None:
        """The step that computed up to `end` failed."""
        self._copies.clear()
        block = self._states[seq].saving.pop(end, None)
        if block is not None:
            if block.node is not None:
                self._tree.detach_pending(block)
            self._pool.release(block)

    def release(self, seq: Sequence) -> None:
        """Give up the state of `seq` and its plans. Its checkpoints stay cached."""
        self.unplan(seq)
        state = self._states.pop(seq)
        assert not state.saving
        self._unpin(state)
        self._pool.release(state.own)
        seq.state_unit = None

    # ------------------------------------------------------------------ inside

    def _unpin(self, state: _SequenceState) -> None:
        source, state.source = state.source, None
        if source is not None:
            self._release(source)

    def _release(self, checkpoint: Block[Node], *, superseded: bool = False) -> None:
        """Let a checkpoint become cached, at what it saves over the one before it that would be left."""
        checkpoint.is_superseded = superseded
        node = checkpoint.node
        if node is None:
            self._pool.release(checkpoint)
            return
        before = self._checkpoint_before(node)
        while before is not None and not superseded and self._is_superseded(before):
            before = self._checkpoint_before(before)
        saved = node.depth + 1 if before is None else node.depth - before.depth
        self._pool.release(checkpoint, state_value(saved, is_superseded=superseded))

    def _is_superseded(self, node: Node) -> bool:
        block = node.blocks[self._kind]
        if block is None and node.host_blocks is not None:
            block = node.host_blocks[self._kind]
        return block is not None and block.refs == 0 and block.is_superseded

    def _pass_stop(self, state: _SequenceState) -> None:
        blocks = state.stops.pop(0)
        key = (blocks, state.shared.pop(blocks))
        self._planned[key] -= 1
        if not self._planned[key]:
            del self._planned[key]

    def _checkpoint_before(self, node: Node) -> Node | None:
        before = node.parent
        while before is not None and not before.has_computed(self._kind) and not before.is_on_host(self._kind):
            before = before.parent
        return before

    def _supersede(self, node: Node) -> None:
        """Let a checkpoint that a deeper one continues go early, unless its prefix branches at it."""
        block = node.blocks[self._kind]
        if block is not None and block.refs == 0 and len(node.children) < 2:
            self._pool.acquire(block)
            self._release(block, superseded=True)

    def check_invariants(self) -> None:
        ahead = Counter((b, state.shared[b]) for state in self._states.values() for b in state.stops)
        assert ahead == self._planned
        for seq, state in self._states.items():
            assert state.own.refs == 1
            assert state.own.node is None
            assert state.own.unit.index == seq.state_unit
            assert state.stops == sorted(state.shared)
            assert all(blocks * self._block_size > seq.computed for blocks in state.stops)

    def references(self) -> list[Block[Node]]:
        """Every reference that this class holds, one entry each."""
        held = [[state.own, state.source, *state.saving.values()] for state in self._states.values()]
        return [block for blocks in held for block in blocks if block is not None]
