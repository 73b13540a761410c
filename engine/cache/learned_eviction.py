"""Learned eviction, which predicts when conversations continue.

Device memory and host memory have one order each. Both learn from the same conversations. Blocks that no learned queue
holds are evicted in the order of their age.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.cache.block_hasher import compute_keys
from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.eviction_queue import EvictionQueue
from engine.cache.lru_eviction import LruEviction, LruOrder
from engine.cache.reuse_stats import ConversationTurn, ReuseStats
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import Sequence as EngineSequence


class LearnedOrder(LruOrder):
    """Chooses the cached block that is evicted next from one memory, the device's or the host's.

    The choice is the last block of the cached prefix that a conversation is least likely to use again. Prefixes are
    paths in a tree of blocks. The learned queue holds their leaves, and recurrent states that may be evicted before the
    attention blocks of their nodes. All blocks are also in the order by age, which decides when the queue is empty.
    """

    def __init__(self, spec: CacheSpec, eviction: LearnedEviction, queue: EvictionQueue, *, is_host: bool) -> None:
        """Start without cached blocks. `eviction`: both orders together. `queue`: the learned queue of this memory."""
        super().__init__(spec)
        self._eviction = eviction
        self._queue = queue
        self._is_host = is_host

    def _get_blocks(self, node: Node) -> Sequence[Block | None]:
        """Return the blocks that this memory has at a node: full attention is the first kind, state the last."""
        return node.host_blocks if self._is_host else node.blocks

    def _is_leaf(self, node: Node) -> bool:
        """Return whether a path of cached blocks in this memory ends at a node."""
        block = self._get_blocks(node)[FULL_KIND]
        child_count = len(node.children) if self._is_host else node.cached_child_count
        return block is not None and block.is_cached and not child_count

    def mark_cached(self, block: Block) -> None:
        """Record that no sequence holds a block any more: the end of a path, or a state, may be evicted now."""
        super().mark_cached(block)
        node = block.node
        assert node is not None
        if isinstance(block, StateBlock):
            is_without_attention = self._is_host and node.blocks[FULL_KIND] is not None  # which is on the device
            if block.is_superseded or is_without_attention:
                blocks_per_state = self._unit_value
                self._queue.add_superseded_state(node, block.value / blocks_per_state)
        elif self._is_leaf(node):  # a path that leaves the device belongs to the same turn in host memory
            self._queue.add(node, self._eviction.device_queue.find_turn(node) or self._eviction.last_turn)

    def mark_used(self, block: Block) -> None:
        super().mark_used(block)
        assert block.node is not None
        if isinstance(block, StateBlock):
            self._eviction.requeue_state(block.node)
        else:
            self._queue.remove(block.node)

    def mark_evicted(self, node: Node, kind: int) -> None:
        """Update the queue after an eviction from `node`. If its parent is a leaf now, the parent is queued instead."""
        parent = node.parent
        if kind != FULL_KIND:
            self._eviction.requeue_state(node)
        elif parent is None or not self._is_leaf(parent):
            self._queue.remove(node)
        elif self._queue.find_turn(node) is not None:
            self._queue.shorten_path(node, parent)
        else:  # a step read the block, so the block was in no queue
            self._queue.add(parent, self._eviction.last_turn)

    def mark_child_added(self, node: Node) -> None:
        """Record that `node` got a child, so it is not a leaf."""
        self._queue.remove(node)

    def clear(self) -> None:
        self._queue.clear()

    def find_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return a superseded state that is worth little, else the end of the path that is worth least."""
        if self.peek_victim(useful_kinds) is None:
            return None
        node = self._queue.select_state()
        if node is not None:
            return self._get_blocks(node)[-1]
        node = self._queue.select_leaf()
        return super().find_victim(useful_kinds) if node is None else self._get_blocks(node)[FULL_KIND]

    def check_nodes(self, nodes: Collection[Node]) -> None:
        """Assert that the queue holds exactly the leaves, and states only of nodes that have one in this memory."""
        state_blocks = [self._get_blocks(node)[-1] for node in nodes]
        self._queue.check_invariants({node for node in nodes if self._is_leaf(node)})
        self._queue.check_states({block.node for block in state_blocks if block and block.is_cached and block.node})


class LearnedEviction(LruEviction):
    """Evicts the cached prefixes that are least likely to be used again, learned from when conversations continue.

    A *turn* is one request of a conversation. The next turn's prompt begins with the same tokens, so the cached blocks
    of a turn, its *path*, are worth keeping until then. Time is counted in blocks of prompts. For example, next turns
    mostly come after 100 blocks. Then a path that waits for 1,000 blocks is evicted before one that waits for 50.

    `ReuseStats` learns these times, and one `EvictionQueue` for each memory, device and host, orders the paths by them.
    Only for models without sliding windows.
    """

    def __init__(self, spec: CacheSpec, unit_count: int) -> None:
        """Start with nothing learned. `unit_count`: number of units of memory on device and host together."""
        blocks_per_unit = spec.blocks_per_unit(FULL_KIND)
        blocks_per_state = blocks_per_unit if spec.state is not None else None  # a recurrent state fills a unit
        self._block_size = spec.block_size
        self.reuse_stats = ReuseStats(unit_count * blocks_per_unit, spec.block_size)
        self.device_queue = EvictionQueue(self.reuse_stats, blocks_per_state)
        self.host_queue = EvictionQueue(self.reuse_stats, blocks_per_state)
        self.device_order = LearnedOrder(spec, self, self.device_queue, is_host=False)
        self.host_order = LearnedOrder(spec, self, self.host_queue, is_host=True)
        self._turn_by_sequence: dict[EngineSequence, ConversationTurn] = {}
        self.last_turn = ConversationTurn(prompt_blocks=0, shared_blocks=0, added_blocks=0)
        """The turn that ended last: blocks that become cached next belong to its path. At first, an empty turn."""

    def begin_turn(self, seq: EngineSequence, hit_blocks: int) -> None:
        """Record a sequence's prompt as a turn of a conversation. The first `hit_blocks` of its blocks were cached."""
        block_count = len(seq.token_ids) // self._block_size
        hashes = [key.hash for key in compute_keys(seq, block_count, self._block_size)[:block_count]]
        self._turn_by_sequence[seq] = self.reuse_stats.begin_turn(hashes, hit_blocks)

    def end_turn(self, seq: EngineSequence) -> None:
        """Record that the turn of `seq` is over. The caller then releases its blocks, which stay cached.

        Blocks that only the previous turn had are evicted first, because the conversation goes on from this turn.
        """
        turn = self._turn_by_sequence.pop(seq)
        self.reuse_stats.end_turn(turn)
        if turn.previous is not None:
            self.device_queue.mark_abandoned(turn.previous)
            self.host_queue.mark_abandoned(turn.previous)
            turn.previous = None
        self.last_turn = turn

    def requeue_state(self, node: Node) -> None:
        """Put the path that ends at `node` into the queue of its new value: the state there was used or removed."""
        self.device_queue.requeue(node)
        self.host_queue.requeue(node)
