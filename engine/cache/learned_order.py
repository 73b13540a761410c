"""Learned eviction order, which predicts when conversations continue (`AdaptiveEviction`).

Device memory and host memory have one order each. Both learn from the same conversations. Blocks that no learned queue
holds are evicted in the order of their age.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import Block, Node, StateBlock
from engine.cache.eviction_order import EvictionOrder, LruEviction, LruOrder
from engine.cache.eviction_queue import AdaptiveEviction, EvictionQueue, StateValuation
from engine.cache.reuse_stats import ConversationTurn
from engine.cache.spec import FULL_KIND, CacheSpec
from engine.types import Sequence as EngineSequence


class _LearnedOrder(EvictionOrder):
    """Base of the learned eviction orders of device and host memory.

    All blocks are also kept in an order by age, which decides when the learned queue of the memory is empty.
    """

    def __init__(
        self, eviction: AdaptiveEviction[Node], queue: EvictionQueue[Node], age_order: LruOrder, blocks_per_state: int
    ) -> None:
        """`queue`: the learned queue of this memory. `blocks_per_state`: attention blocks in the memory of a state."""
        self._eviction = eviction
        self._queue = queue
        self._age_order = age_order
        self._blocks_per_state = blocks_per_state

    @abstractmethod
    def _get_blocks(self, node: Node) -> Sequence[Block | None]:
        """Return the blocks that this memory has at a node: full attention is the first kind, state the last."""

    def mark_used(self, block: Block) -> None:
        self._age_order.mark_used(block)
        assert block.node is not None
        if isinstance(block, StateBlock):
            self._eviction.requeue_state(block.node)
        else:
            self._queue.remove(block.node)

    def mark_freed(self, block: Block) -> None:
        self._age_order.mark_freed(block)

    def find_victim(self, useful_kinds: Sequence[int]) -> Block | None:
        """Return a superseded state that is worth little, else the end of the path that is worth least."""
        if self._age_order.peek_victim(useful_kinds) is None:
            return None
        node = self._queue.select_state()
        if node is not None:
            return self._get_blocks(node)[-1]
        node = self._queue.select_leaf()
        return self._age_order.find_victim(useful_kinds) if node is None else self._get_blocks(node)[FULL_KIND]

    def find_oldest(self, kind: int) -> Block:
        return self._age_order.find_oldest(kind)

    def check_blocks(self, cached_blocks: Sequence[set[Block]], unit_count: int) -> None:
        self._age_order.check_blocks(cached_blocks, unit_count)


class LearnedDeviceOrder(_LearnedOrder):
    """Decides which block leaves the device next: one of the conversation that is least likely to return.

    The learned queue holds the nodes at the ends of cached prefixes, and states that a later state of the same
    conversation has superseded. If the queue is empty, the oldest block goes.
    """

    def _get_blocks(self, node: Node) -> Sequence[Block | None]:
        return node.blocks

    def mark_cached(self, block: Block) -> None:
        """Record that no sequence holds a block any more, so that it may be evicted.

        Of the states, only superseded ones enter the queue, with the number of blocks that a state saves per block of
        its memory.
        """
        self._age_order.mark_cached(block)
        assert block.node is not None
        if not isinstance(block, StateBlock):
            self._eviction.mark_cached(block.node)
        elif block.is_superseded:
            self._queue.add_superseded_state(block.node, block.value / self._blocks_per_state)

    def mark_evicted(self, node: Node, kind: int) -> None:
        """Update the queue after an eviction. The parent of an evicted full-attention block may be evicted next."""
        if kind != FULL_KIND:
            self._eviction.requeue_state(node)
        else:
            parent = node.parent
            self._eviction.remove_leaf(node, parent if parent is not None and parent.is_cached(FULL_KIND) else None)

    def clear(self) -> None:
        self._eviction.clear()

    def check_nodes(self, nodes: Collection[Node]) -> None:
        self._eviction.check_invariants(
            [node for node in nodes if node.is_cached(FULL_KIND)],
            [node for node in nodes if node.is_cached_on_host(FULL_KIND) and not node.children],
        )
        self._eviction.device_queue.check_states({node for node in nodes if node.is_cached(-1)})
        self._eviction.host_queue.check_states({node for node in nodes if node.is_cached_on_host(-1)})


class LearnedHostOrder(_LearnedOrder):
    """Decides which block leaves host memory next: one of the conversation that is least likely to return.

    The learned queue holds leaves of the prefix tree that only host memory has, and states that a later state of the
    same conversation has superseded. If the queue is empty, the oldest block goes.
    """

    def _get_blocks(self, node: Node) -> Sequence[Block | None]:
        return node.host_blocks

    def mark_cached(self, block: Block) -> None:
        self._age_order.mark_cached(block)
        node = block.node
        assert node is not None
        if isinstance(block, StateBlock):
            if block.is_superseded or node.blocks[FULL_KIND] is not None:
                self._queue.add_superseded_state(node, block.value / self._blocks_per_state)
        elif not node.children:
            self._eviction.add_host_leaf(node)

    def mark_evicted(self, node: Node, kind: int) -> None:
        if kind != FULL_KIND:
            self._eviction.requeue_state(node)
        elif any(node.blocks):
            self._queue.remove(node)

    def mark_child_added(self, node: Node) -> None:
        self._queue.remove(node)

    def mark_node_removed(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and not parent.children and parent.is_cached_on_host(FULL_KIND):
            self._eviction.replace_host_leaf(node, parent)
        else:
            self._queue.remove(node)


class LearnedEviction(LruEviction):
    """Evicts the cached prefixes that are least likely to be used again, learned from how conversations return.

    A turn is one request of a conversation. The prompt of the next turn begins with the prompt of the turn before, so
    the cached prefix of a turn is worth keeping until the next turn is due. Device and host memory have one order
    each, and learn from the same turns. Only for models without sliding windows.
    """

    def __init__(self, spec: CacheSpec, unit_count: int) -> None:
        """`unit_count`: number of units of memory on device and host together."""
        super().__init__(spec)
        blocks_per_unit = spec.blocks_per_unit_by_kind()
        blocks_per_state = blocks_per_unit[FULL_KIND]
        # With recurrent states, a cached prefix can be resumed only where a state was saved, so paths differ in worth.
        valuation = StateValuation(blocks_per_state, Node.count_saved_blocks) if spec.state is not None else None
        self._block_size = spec.block_size
        self._eviction: AdaptiveEviction[Node] = AdaptiveEviction(
            unit_count * blocks_per_unit[FULL_KIND], spec.block_size, state_valuation=valuation
        )
        eviction, age_orders = self._eviction, [LruOrder(blocks_per_unit, spec.state_kind) for _ in range(2)]
        self.device_order = LearnedDeviceOrder(eviction, eviction.device_queue, age_orders[0], blocks_per_state)
        self.host_order = LearnedHostOrder(eviction, eviction.host_queue, age_orders[1], blocks_per_state)
        self._turn_by_sequence: dict[EngineSequence, ConversationTurn] = {}

    def begin_turn(self, seq: EngineSequence, hasher: BlockHasher, hit_blocks: int) -> None:
        """Record a sequence's prompt as a turn of a conversation. The first `hit_blocks` of its blocks were cached."""
        block_count = len(seq.token_ids) // self._block_size
        hashes = [key.hash for key in hasher.block_keys(seq, block_count)[:block_count]]
        self._turn_by_sequence[seq] = self._eviction.begin_turn(hashes, hit_blocks)

    def end_turn(self, seq: EngineSequence) -> None:
        """Record that the sequence is over: from now on its next turn can come, and its blocks become cached."""
        self._eviction.end_turn(self._turn_by_sequence.pop(seq))
