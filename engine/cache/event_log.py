"""Changes of the cache: recorded on the step's thread, turned into KV events on another thread.

A step records which nodes changed, and takes the record as `StepEvents`. The publisher makes the events on its own
thread. That keeps the step's thread from reading the blocks: after a forward pass they are no longer in the CPU's
caches. Refuses to know the tree. Invariant: events come in the order of the changes. One exception: the removal of a
block from host memory may come before the arrival of blocks that moved there earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from engine.cache.blocks import Node
from engine.cache.spec import MAMBA, CacheSpec
from events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from events.hashing import unpack_token_ids

STORED, REMOVED, DEMOTED, HOST_REMOVED = range(4)
"""Actions: stored on the device, removed from it, moved from it to host memory, removed from host memory."""
Change = tuple[int, int, Any] | None
"""(action, kind, nodes); for DEMOTED (action, 0, {(kind, node): None}). None: the whole cache was cleared."""


class EventLog:
    """Record of changes in their order. Consecutive blocks of a prefix become one change."""

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self.kinds = [(g.kind, g.sliding_window) for g in spec.groups]
        """(`kv_cache_spec_kind` of the events, sliding window) of each kind of block."""
        if spec.state is not None:
            self.kinds.append((MAMBA, None))
        self.joins_chains_by_kind = [kind != MAMBA for kind, _ in self.kinds]
        """Whether consecutive blocks of a prefix go into one event, by kind."""
        self._changes: list[Change] = []

    def record_stored(self, kind: int, node: Node) -> None:
        changes = self._changes
        if (
            changes
            and self.joins_chains_by_kind[kind]
            and (last_change := changes[-1])
            and last_change[0] == STORED
            and last_change[1] == kind
        ):
            nodes = last_change[2]
            if nodes[-1] is node.parent:
                nodes.append(node)
                return
        changes.append((STORED, kind, [node]))

    def record_removed(self, kind: int, node: Node) -> None:
        last_change = self._changes[-1] if self._changes else None
        if last_change and last_change[0] == REMOVED and last_change[1] == kind:
            last_change[2].append(node)
        else:
            self._changes.append((REMOVED, kind, [node]))

    def record_demoted(self, kind: int, node: Node) -> None:
        last_change = self._changes[-1] if self._changes else None
        if last_change is None or last_change[0] != DEMOTED:
            last_change = (DEMOTED, 0, {})
            self._changes.append(last_change)
        last_change[2][kind, node] = None

    def record_host_removed(self, kind: int, node: Node) -> None:
        """Record a removal from host memory before the last demotions, for which it most often made room.

        So consecutive demotions stay one change.
        """
        insert_index = len(self._changes)
        if (
            insert_index
            and (last_change := self._changes[-1])
            and last_change[0] == DEMOTED
            and (kind, node) not in last_change[2]
        ):
            insert_index -= 1
        last_change = self._changes[insert_index - 1] if insert_index else None
        if last_change and last_change[0] == HOST_REMOVED and last_change[1] == kind:
            last_change[2].append(node)
        else:
            self._changes.insert(insert_index, (HOST_REMOVED, kind, [node]))

    def record_cleared(self) -> None:
        self._changes.append(None)

    def drain(self) -> StepEvents | None:
        """Take what was recorded since the last call; None if nothing was, as after most steps."""
        changes = self._changes
        if not changes:
            return None
        self._changes = []
        return StepEvents(changes, self)


class StepEvents(Collection[Event]):
    """Events of a step, made when they are iterated, on the thread that iterates."""

    def __init__(self, changes: list[Change], log: EventLog) -> None:
        self._changes = changes
        self._log = log

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._changes)

    def __iter__(self) -> Iterator[Event]:
        return chain.from_iterable(map(self._make_events, self._changes))

    def __contains__(self, event: object) -> bool:
        return any(event == step_event for step_event in self)

    def _make_events(self, change: Change) -> Iterable[Event]:
        if change is None:
            return (AllBlocksCleared(),)
        action, kind, nodes = change
        if action == STORED:
            return (self._make_stored(kind, nodes, GPU),)
        if action == DEMOTED:
            return self._make_demoted(nodes)
        return (_make_removed(kind, nodes, GPU if action == REMOVED else CPU),)

    def _make_demoted(self, demoted_nodes: Iterable[tuple[int, Node]]) -> Iterator[Event]:
        """Make events of blocks that moved to host memory. They left children first; parents are announced first."""
        nodes_by_kind: list[list[Node]] = [[] for _ in self._log.kinds]
        for kind, node in demoted_nodes:
            nodes_by_kind[kind].append(node)
        for kind, nodes in enumerate(nodes_by_kind):
            chain_nodes: list[Node] = []
            for node in reversed(nodes):
                if chain_nodes and not (self._log.joins_chains_by_kind[kind] and node.parent is chain_nodes[-1]):
                    yield self._make_stored(kind, chain_nodes, CPU)
                    chain_nodes = []
                chain_nodes.append(node)
            if chain_nodes:
                yield self._make_stored(kind, chain_nodes, CPU)
        for kind in range(len(nodes_by_kind) - 1, -1, -1):
            if nodes_by_kind[kind]:
                yield _make_removed(kind, nodes_by_kind[kind], GPU)

    def _make_stored(self, kind: int, nodes: list[Node], medium: str) -> BlockStored:
        block_hashes: list[int | bytes] = [node.hash for node in nodes]
        first_node, (kind_name, window) = nodes[0], self._log.kinds[kind]
        token_ids = unpack_token_ids(b"".join([node.key.packed_tokens for node in nodes]))
        assert len(token_ids) == len(block_hashes) * self._log.block_size
        return BlockStored(
            block_hashes,
            None if first_node.parent is None else first_node.parent.hash,
            token_ids,
            self._log.block_size,
            None,  # lora_id
            medium,
            first_node.key.lora_name,
            [node.key.extra_keys for node in nodes],
            kind,
            kind_name,
            window,
        )


def _make_removed(kind: int, nodes: list[Node], medium: str) -> BlockRemoved:
    return BlockRemoved(block_hashes=[node.hash for node in nodes], medium=medium, group_idx=kind)
