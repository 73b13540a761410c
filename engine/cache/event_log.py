"""Changes of the cache: recorded on the step's thread, turned into KV events on another thread.

A step records which nodes changed, and takes the record as an iterator of events. The publisher iterates it on its own
thread, which keeps the work of making events out of the step. Events come in the order of the changes. One exception:
the removal of a block from host memory may come before the arrival of blocks that moved there earlier.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from engine.cache.blocks import Node
from engine.cache.spec import FULL_KIND, MAMBA, CacheSpec
from events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from events.hashing import unpack_token_ids


class Action(enum.Enum):
    """Ways in which cached blocks change."""

    STORED = enum.auto()
    """The device has computed them."""
    REMOVED = enum.auto()
    """The device has them no more."""
    DEMOTED = enum.auto()
    """They moved from the device (GPU) to host memory (CPU)."""
    HOST_REMOVED = enum.auto()
    """Host memory has them no more."""
    CLEARED = enum.auto()
    """Both memories are empty. The change lists no blocks."""


class Change(NamedTuple):
    """Consecutive changes of the cache by one action. They have one kind of blocks, unless they are demotions."""

    action: Action
    kind: int
    """Kind of the first block."""
    blocks: dict[tuple[int, Node], None]
    """Kind and node of each block, as an ordered set."""


class EventLog:
    """Records the changes of the cache in their order. Consecutive changes of one action and kind become one."""

    def __init__(self, spec: CacheSpec) -> None:
        self._block_size = spec.block_size
        self._groups = spec.list_group_infos()
        """How events describe each kind of blocks."""
        self._changes: list[Change] = []

    def record(self, action: Action, kind: int, node: Node) -> None:
        """Record a change of the block of `kind` at `node`. It joins the change before it, if that is of its sort.

        A block that leaves host memory mostly makes room for blocks that move there one by one ("demoted"). So its
        removal goes before the last demotions, and later ones can join these. If the block was itself among the last
        demotions, its removal must follow them.
        """
        index = len(self._changes)
        last_demoted = self._changes[-1].blocks if index and self._changes[-1].action is Action.DEMOTED else None
        if action is Action.HOST_REMOVED and last_demoted is not None and (kind, node) not in last_demoted:
            index -= 1
        previous = self._changes[index - 1] if index else None
        if previous and previous.action is action and (previous.kind == kind or action is Action.DEMOTED):
            previous.blocks[kind, node] = None
        else:
            self._changes.insert(index, Change(action, kind, {(kind, node): None}))

    def record_cleared(self) -> None:
        """Record that both memories are empty."""
        self._changes.append(Change(Action.CLEARED, FULL_KIND, {}))

    def drain(self) -> Iterator[Event] | None:
        """Return the changes since the last call as events, and forget them; None without changes.

        The events are made while they are iterated, on the thread that iterates.
        """
        changes, self._changes = self._changes, []
        return chain.from_iterable(map(self._make_events, changes)) if changes else None

    def _make_events(self, change: Change) -> Iterator[Event]:
        """Yield the events that announce one change.

        Blocks that moved to host memory are first stored on the CPU, then removed from the GPU. Their nodes were
        recorded children before parents. Stored blocks are announced in the reverse order, because readers of the
        events link a block to its parent.
        """
        action = change.action
        if action is Action.CLEARED:
            yield AllBlocksCleared()
            return
        nodes_by_kind: list[list[Node]] = [[] for _ in self._groups]
        for kind, node in change.blocks:
            nodes_by_kind[kind].append(node)
        for kind, nodes in enumerate(nodes_by_kind):
            if action is Action.STORED:
                yield from self._make_stored_events(kind, nodes, GPU)
            elif action is Action.DEMOTED:
                yield from self._make_stored_events(kind, reversed(nodes), CPU)
        if action is Action.STORED:
            return
        medium = CPU if action is Action.HOST_REMOVED else GPU
        for kind, nodes in reversed(list(enumerate(nodes_by_kind))):
            if nodes:
                yield BlockRemoved(block_hashes=[node.hash for node in nodes], medium=medium, group_idx=kind)

    def _make_stored_events(self, kind: int, nodes: Iterable[Node], medium: str) -> Iterator[Event]:
        """Yield an event for each run of stored blocks in which each is the next one's parent, and for each state."""
        run: list[Node] = []
        for node in nodes:
            continues_run = run and self._groups[kind].kind != MAMBA and node.parent is run[-1]
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
        assert len(token_ids) == len(nodes) * self._block_size
        first_node = nodes[0]
        group = self._groups[kind]
        return BlockStored(
            block_hashes=[node.hash for node in nodes],
            parent_block_hash=None if first_node.parent is None else first_node.parent.hash,
            token_ids=token_ids,
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=first_node.key.lora_name,
            extra_keys=[node.key.extra_keys for node in nodes],
            group_idx=kind,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
        )
