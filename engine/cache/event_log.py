"""Changes of the cache: recorded on the step's thread, turned into KV events on another thread.

A step records which nodes changed, and takes the record as `StepEvents`. The publisher makes the events on its own
thread, which keeps that work out of the step. Events come in the order of the changes. One exception: the removal of a
block from host memory may come before the arrival of blocks that moved there earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from engine.cache.blocks import Node
from engine.cache.spec import MAMBA, CacheSpec
from events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from events.hashing import unpack_token_ids

STORED, REMOVED, DEMOTED, HOST_REMOVED, CLEARED = range(5)
"""Actions of a change. DEMOTED: from the device to host memory. CLEARED: both memories."""


class Change(NamedTuple):
    """One change of the cache, of one or more blocks."""

    action: int
    kind: int
    """Kind of the blocks; 0 for DEMOTED, which may have blocks of all kinds."""
    nodes: Any
    """Nodes of the blocks, as a list; for DEMOTED, a dict as an ordered set of (kind, node)."""


class EventLog:
    """Records the changes of the cache in their order. Consecutive changes of one action and kind become one."""

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self.groups = spec.list_group_infos()
        """How events describe each kind of blocks."""
        self._changes: list[Change] = []

    def record_stored(self, kind: int, node: Node) -> None:
        """Record that the device has a computed block of `kind` at `node`."""
        self._record(STORED, kind, node)

    def record_removed(self, kind: int, node: Node) -> None:
        """Record that the device has no block of `kind` at `node` any more."""
        self._record(REMOVED, kind, node)

    def _record(self, action: int, kind: int, node: Node) -> None:
        """Add a node to the last change if that has the same action and kind, else begin another change."""
        last_change = self._get_last_change(action, kind)
        if last_change is None:
            self._changes.append(Change(action, kind, [node]))
        else:
            last_change.nodes.append(node)

    def record_demoted(self, kind: int, node: Node) -> None:
        """Record that a block moved from the device (GPU) to host memory (CPU)."""
        last_change = self._get_last_change(DEMOTED, 0)
        if last_change is None:
            last_change = Change(DEMOTED, 0, {})
            self._changes.append(last_change)
        last_change.nodes[kind, node] = None

    def record_host_removed(self, kind: int, node: Node) -> None:
        """Record that host memory dropped a block, for the KV cache events to announce.

        Mostly, the block made room for blocks that moved from the device ("demoted"). If these were recorded last, the
        removal goes before them, so that later demotions can join theirs in one change. A block that was itself among
        them must be removed after them.
        """
        insert_index = len(self._changes)
        last_demotions = self._get_last_change(DEMOTED, 0)
        if last_demotions is not None and (kind, node) not in last_demotions.nodes:
            insert_index -= 1  # before the demotions
        change_before = self._changes[insert_index - 1] if insert_index else None
        if change_before is not None and (change_before.action, change_before.kind) == (HOST_REMOVED, kind):
            change_before.nodes.append(node)
        else:
            self._changes.insert(insert_index, Change(HOST_REMOVED, kind, [node]))

    def record_cleared(self) -> None:
        """Record that both memories are empty."""
        self._changes.append(Change(CLEARED, 0, ()))

    def drain(self) -> StepEvents | None:
        """Return the changes since the last call as events, and forget them; None without changes."""
        changes = self._changes
        if not changes:
            return None
        self._changes = []
        return StepEvents(changes, self)

    def _get_last_change(self, action: int, kind: int) -> Change | None:
        """Return the last change if it has this action and kind."""
        if not self._changes:
            return None
        last_change = self._changes[-1]
        return last_change if last_change.action == action and last_change.kind == kind else None


class StepEvents:
    """Makes the events of one step while they are iterated, on the thread that iterates."""

    def __init__(self, changes: list[Change], log: EventLog) -> None:
        self._changes = changes
        self._log = log

    def __iter__(self) -> Iterator[Event]:
        return chain.from_iterable(map(self._make_events, self._changes))

    def _make_events(self, change: Change) -> Iterable[Event]:
        """Return the events that announce one change."""
        action, kind, nodes = change
        if action == CLEARED:
            return [AllBlocksCleared()]
        if action == STORED:
            return self._make_stored_events(kind, nodes, GPU)
        if action == REMOVED:
            return [_make_removed_event(kind, nodes, GPU)]
        if action == HOST_REMOVED:
            return [_make_removed_event(kind, nodes, CPU)]
        assert action == DEMOTED
        return self._make_demotion_events(nodes)

    def _make_demotion_events(self, demoted_nodes: Iterable[tuple[int, Node]]) -> Iterator[Event]:
        """Yield the events for blocks that moved to host memory: stored on the CPU, then removed from the GPU.

        `demoted_nodes`: pairs of a block's kind and its prefix tree node, children before parents. Stored blocks are
        announced in the reverse order, because readers of the events link a block to its parent.
        """
        nodes_by_kind: list[list[Node]] = [[] for _ in self._log.groups]
        for kind, node in demoted_nodes:
            nodes_by_kind[kind].append(node)
        for kind, nodes in enumerate(nodes_by_kind):
            yield from self._make_stored_events(kind, reversed(nodes), CPU)
        for kind in reversed(range(len(nodes_by_kind))):
            if nodes_by_kind[kind]:
                yield _make_removed_event(kind, nodes_by_kind[kind], GPU)

    def _make_stored_events(self, kind: int, nodes: Iterable[Node], medium: str) -> Iterator[Event]:
        """Yield the events for stored blocks: one for each run of nodes in which each is the parent of the next.

        A recurrent state has an event of its own.
        """
        run: list[Node] = []
        for node in nodes:
            continues_run = run and self._log.groups[kind].kind != MAMBA and node.parent is run[-1]
            if run and not continues_run:
                yield self._make_stored_event(kind, run, medium)
                run = []
            run.append(node)
        if run:
            yield self._make_stored_event(kind, run, medium)

    def _make_stored_event(self, kind: int, nodes: list[Node], medium: str) -> BlockStored:
        """Return the event which announces that CPU or GPU memory (`medium`) now holds consecutive blocks of a prompt.

        `nodes`: the blocks' nodes in the prefix tree, each the parent of the next. `kind`: index of the blocks' group
        of attention layers; the last index stands for recurrent state.
        """
        token_ids = unpack_token_ids(b"".join([node.key.packed_tokens for node in nodes]))
        assert len(token_ids) == len(nodes) * self._log.block_size
        first_node = nodes[0]
        group = self._log.groups[kind]
        return BlockStored(
            block_hashes=[node.hash for node in nodes],
            parent_block_hash=None if first_node.parent is None else first_node.parent.hash,
            token_ids=token_ids,
            block_size=self._log.block_size,
            lora_id=None,
            medium=medium,
            lora_name=first_node.key.lora_name,
            extra_keys=[node.key.extra_keys for node in nodes],
            group_idx=kind,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
        )


def _make_removed_event(kind: int, nodes: list[Node], medium: str) -> BlockRemoved:
    return BlockRemoved(block_hashes=[node.hash for node in nodes], medium=medium, group_idx=kind)
