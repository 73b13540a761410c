"""The shadow of a worker's cache: what its events say is resident, and how to say it again in a snapshot.

Owns the set and the synthesis of Stored events from it. Refuses to know sockets, sequence numbers and encoding.
Invariants: a block is here once for each (group, medium) that holds it; iteration order is announcement order, so in
the full-attention group parents stand before their children (guarantee 3 of docs/wire-format.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from events.errors import InvariantError
from events.types import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    Event,
)


class RunInfo(msgspec.Struct, frozen=True, gc=False):
    """What the blocks of one Stored event share."""

    group_idx: int | None
    medium: str | None
    block_size: int
    lora_id: int | None
    lora_name: str | None
    kind: str | None
    sliding_window: int | None
    session_id: str | None


class ResidentBlock(msgspec.Struct, frozen=True, gc=False):
    """One resident block; never changed, so a list of them is a consistent picture."""

    name: BlockName
    parent: BlockName | None
    token_ids: array[int]
    extra_keys: tuple[Any, ...] | None
    info: RunInfo


Key = tuple[int | None, str | None, BlockName]


class ResidentSet:
    """Applies events in stream order; what our engine never announces is skipped and raised as InvariantError."""

    def __init__(self) -> None:
        self._blocks: dict[Key, ResidentBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def keys(self) -> set[Key]:
        """{(group_idx, medium, name)} of everything resident."""
        return set(self._blocks)

    def blocks(self) -> list[ResidentBlock]:
        """A consistent picture, in announcement order."""
        return list(self._blocks.values())

    def apply(self, events: Iterable[Event]) -> None:
        """Apply a batch. An event that breaks an invariant is skipped; the first such error is raised at the end."""
        broken: InvariantError | None = None
        for event in events:
            try:
                self._apply(event)
            except InvariantError as error:
                broken = broken or error
        if broken is not None:
            raise broken

    def _apply(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                if self._blocks.pop((event.group_idx, event.medium, name), None) is None:
                    raise InvariantError(f"removed block {name!r} of group {event.group_idx} was not resident")
        elif isinstance(event, AllBlocksCleared):
            self._blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if not event.block_hashes or len(event.token_ids) != len(event.block_hashes) * size:
            raise InvariantError(
                f"stored {len(event.block_hashes)} blocks of {size} tokens with {len(event.token_ids)} token ids"
            )
        tokens = array("I", event.token_ids)
        info = RunInfo(
            event.group_idx,
            event.medium,
            size,
            event.lora_id,
            event.lora_name,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.session_id,
        )
        keys = event.extra_keys or [None] * len(event.block_hashes)
        parent, start = event.parent_block_hash, 0
        for name, extra in zip(event.block_hashes, keys):
            key = (event.group_idx, event.medium, name)
            if key in self._blocks:
                raise InvariantError(f"stored block {name!r} of group {event.group_idx} was resident already")
            self._blocks[key] = ResidentBlock(name, parent, tokens[start : start + size], extra, info)
            parent, start = name, start + size


def snapshot_events(blocks: Iterable[ResidentBlock], blocks_per_event: int = 256) -> Iterator[BlockStored]:
    """Stored events that rebuild `blocks`: full attention first, then the groups that name its blocks as parents.

    Neighbours that continue each other are joined into one event of at most `blocks_per_event` blocks.
    """
    everything = list(blocks)
    full = [block for block in everything if block.info.kind is None or block.info.kind in FULL_ATTENTION_KINDS]
    other = [block for block in everything if not (block.info.kind is None or block.info.kind in FULL_ATTENTION_KINDS)]
    for group in (full, other):
        run: list[ResidentBlock] = []
        for block in group:
            continues = run and block.parent == run[-1].name and block.info == run[-1].info
            if run and (not continues or len(run) >= blocks_per_event):
                yield _stored(run)
                run = []
            run.append(block)
        if run:
            yield _stored(run)


def _stored(run: list[ResidentBlock]) -> BlockStored:
    info = run[0].info
    token_ids: list[int] = []
    for block in run:
        token_ids.extend(block.token_ids)
    return BlockStored(
        block_hashes=[block.name for block in run],
        parent_block_hash=run[0].parent,
        token_ids=token_ids,
        block_size=info.block_size,
        lora_id=info.lora_id,
        medium=info.medium,
        lora_name=info.lora_name,
        extra_keys=[block.extra_keys for block in run],
        group_idx=info.group_idx,
        kv_cache_spec_kind=info.kind,
        kv_cache_spec_sliding_window=info.sliding_window,
        session_id=info.session_id,
    )
