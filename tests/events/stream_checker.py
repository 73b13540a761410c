"""Holds a producer to what our engine promises (docs/reference/wire-format.md, guarantees 1, 2 and 3).

Owns a picture of the stream and the rules; feed it every batch in order and it raises at the first broken promise, with
the story of the block. Refuses to know the cache that produced the events. Runs beside the publisher in tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from events.types import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    Event,
    InvariantError,
)

GroupKey = tuple[int, str | None]
"""(group_idx, medium); an absent group is group 0."""

_STORY_EVENTS = 20


class StreamChecker:
    """The rules, by number:

    1. Stored and Removed of one (group, medium, name) alternate, beginning with Stored.
    2. `len(token_ids) == len(block_hashes) * block_size`, and there is at least one block.
    3. In a full-attention group the parent is resident, on any medium, when a block is stored, and no resident block
       hangs from one that was removed from its last. At the end of a batch, what other groups stored in it names
       resident full-attention blocks.
    """

    def __init__(self) -> None:
        self._parents: dict[GroupKey, dict[BlockName, BlockName | None]] = {}
        self._child_counts: dict[int, dict[BlockName, int]] = {}
        self._full: set[GroupKey] = set()
        self._story: deque[str] = deque(maxlen=_STORY_EVENTS)
        self.events_seen = 0

    def resident(self) -> set[tuple[int, str | None, BlockName]]:
        """{(group_idx, medium, name)} of what the stream says is resident."""
        return {(group, medium, name) for (group, medium), parents in self._parents.items() for name in parents}

    def resident_names(self, group_idx: int = 0) -> set[BlockName]:
        """Names resident in a group, over all media."""
        return {name for (group, _), parents in self._parents.items() if group == group_idx for name in parents}

    def check_batch(self, events: Iterable[Event]) -> None:
        """Check and apply one batch. Raises InvariantError; the checker is of no further use then."""
        stored_elsewhere: list[tuple[GroupKey, BlockName]] = []
        for event in events:
            self.events_seen += 1
            if isinstance(event, BlockStored):
                self._store(event, stored_elsewhere)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._story.append("cleared")
                self._parents.clear()
                self._child_counts.clear()
        for group, name in stored_elsewhere:
            self._check_foreign_parent(group, name)

    def _store(self, event: BlockStored, stored_elsewhere: list[tuple[GroupKey, BlockName]]) -> None:
        group: GroupKey = (event.group_idx or 0, event.medium)
        self._story.append(f"stored {event.block_hashes} after {event.parent_block_hash!r} in group {group}")
        if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self._fail(
                2,
                f"{len(event.block_hashes)} blocks of {event.block_size} tokens with {len(event.token_ids)} token ids",
            )
        if not event.block_hashes:
            self._fail(2, "a Stored event without blocks")
        if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
            self._fail(2, f"{len(event.extra_keys)} extra keys for {len(event.block_hashes)} blocks")
        full = event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in FULL_ATTENTION_KINDS
        if full:
            self._full.add(group)
        parents = self._parents.setdefault(group, {})
        children = self._child_counts.setdefault(group[0], {})
        parent = event.parent_block_hash
        for name in event.block_hashes:
            if name in parents:
                self._fail(1, f"block {name!r} of group {group} was stored while resident")
            if full:
                if parent is not None and not self._holds(group[0], parent):
                    self._fail(3, f"block {name!r} was stored before its parent {parent!r} in group {group}")
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
            else:
                stored_elsewhere.append((group, name))
            parents[name] = parent
            parent = name

    def _remove(self, event: BlockRemoved) -> None:
        group: GroupKey = (event.group_idx or 0, event.medium)
        self._story.append(f"removed {event.block_hashes} of group {group}")
        if not event.block_hashes:
            self._fail(2, "a Removed event without blocks")
        parents = self._parents.get(group, {})
        children = self._child_counts.get(group[0], {})
        for name in event.block_hashes:
            if name not in parents:
                self._fail(1, f"block {name!r} of group {group} was removed while not resident")
            parent = parents.pop(name)
            if not self._holds(group[0], name):
                if children.get(name, 0):
                    self._fail(3, f"block {name!r} of group {group} was removed before its {children[name]} children")
                children.pop(name, None)
            if group in self._full and parent is not None:
                children[parent] -= 1

    def _holds(self, group_idx: int, name: BlockName) -> bool:
        return any(name in parents for (group, _), parents in self._parents.items() if group == group_idx)

    def _check_foreign_parent(self, group: GroupKey, name: BlockName) -> None:
        parents = self._parents.get(group, {})
        if name not in parents:
            return  # gone again within the batch
        parent = parents[name]
        if parent is None:
            return
        if not any(parent in self._parents.get(full, {}) for full in self._full):
            self._fail(3, f"block {name!r} of group {group} hangs from {parent!r}, which no full-attention group holds")

    def _fail(self, guarantee: int, problem: str) -> None:
        story = "\n  ".join(self._story)
        raise InvariantError(f"guarantee {guarantee}: {problem}\nthe last events:\n  {story}")
