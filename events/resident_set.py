"""Set of the blocks that a worker's events say are resident, and the events of a snapshot that rebuild it. No I/O.

Invariants: a block is in the set once for each (group, medium) that has it. Blocks are in the order of their events, so
in the full-attention group parents come before their children (guarantee 3 of docs/reference/wire-format.md), unless
they moved to another medium; a snapshot puts parents first again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from events.types import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    Event,
    InvariantError,
)

MAX_BLOCKS_PER_EVENT = 256
"""Most blocks of one event of a snapshot."""


class ResidentBlock(msgspec.Struct, frozen=True, gc=False):
    """A resident block. Blocks are never changed, so a list of them stays consistent."""

    name: BlockName
    parent_name: BlockName | None
    token_ids: array[int]
    extra_keys: tuple[Any, ...] | None
    stored_event: BlockStored
    """Event that stored the block, without the fields that belong to single blocks."""


BlockKey = tuple[int | None, str | None, BlockName]


class ResidentSet:
    """The blocks that a worker's events say are cached, kept up to date event by event.

    Snapshots for late subscribers are made of it. An event that contradicts the set raises InvariantError: our engine
    never stores a resident block again, or removes a block that is not resident.
    """

    def __init__(self) -> None:
        self._block_by_key: dict[BlockKey, ResidentBlock] = {}

    def __len__(self) -> int:
        return len(self._block_by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_by_key

    def list_blocks(self) -> list[ResidentBlock]:
        """List the resident blocks in announcement order."""
        return list(self._block_by_key.values())

    def apply(self, events: Iterable[Event]) -> None:
        """Apply a batch. The rest of an event that breaks an invariant is skipped; the first error is raised last."""
        first_error: InvariantError | None = None
        for event in events:
            try:
                self._apply(event)
            except InvariantError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _apply(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            for block_name in event.block_hashes:
                if self._block_by_key.pop((event.group_idx, event.medium, block_name), None) is None:
                    raise InvariantError(f"removed block {block_name!r} of group {event.group_idx} was not resident")
        elif isinstance(event, AllBlocksCleared):
            self._block_by_key.clear()

    def _store(self, event: BlockStored) -> None:
        """Add the consecutive blocks of an event, each with its tokens and the name of the block before it.

        Raises InvariantError if the number of tokens is wrong, or at the first block that is resident already.
        """
        block_size = event.block_size
        if not event.block_hashes or len(event.token_ids) != len(event.block_hashes) * block_size:
            raise InvariantError(
                f"stored {len(event.block_hashes)} blocks of {block_size} tokens with {len(event.token_ids)} token ids"
            )
        token_ids = array("I", event.token_ids)
        stored_event = _copy_with_blocks(event, [])
        extra_keys_by_block = event.extra_keys or [None] * len(event.block_hashes)
        parent_name = event.parent_block_hash
        start_token = 0
        for block_name, extra_keys in zip(event.block_hashes, extra_keys_by_block):
            block_key = (event.group_idx, event.medium, block_name)
            if block_key in self._block_by_key:
                raise InvariantError(f"stored block {block_name!r} of group {event.group_idx} was resident already")
            block_tokens = token_ids[start_token : start_token + block_size]
            self._block_by_key[block_key] = ResidentBlock(
                block_name, parent_name, block_tokens, extra_keys, stored_event
            )
            parent_name = block_name
            start_token += block_size


def make_snapshot_events(blocks: Iterable[ResidentBlock]) -> Iterator[BlockStored]:
    """Yield BlockStored events that announce these blocks again, each block after its parent, the one before it.

    Consecutive blocks of one prefix share an event, of at most MAX_BLOCKS_PER_EVENT blocks.
    """
    event_blocks: list[ResidentBlock] = []
    for block in _order_parents_first(sorted(blocks, key=_is_partial_attention)):
        if event_blocks and not _can_join_event(block, event_blocks):
            yield _copy_with_blocks(event_blocks[0].stored_event, event_blocks)
            event_blocks = []
        event_blocks.append(block)
    if event_blocks:
        yield _copy_with_blocks(event_blocks[0].stored_event, event_blocks)


def _can_join_event(block: ResidentBlock, event_blocks: list[ResidentBlock]) -> bool:
    """Return whether a block continues the prefix of an event's blocks, and the event has room for it."""
    last_block = event_blocks[-1]
    is_continuation = block.parent_name == last_block.name and block.stored_event == last_block.stored_event
    return is_continuation and len(event_blocks) < MAX_BLOCKS_PER_EVENT


def _order_parents_first(blocks: list[ResidentBlock]) -> Iterable[ResidentBlock]:
    """Order blocks so that each full-attention block follows its parent, the block before it in the prefix.

    `blocks` come in the order in which they were stored. If A, the first block of the prefix A, B, C, moved to host
    memory and back, that order is B, C, A. Blocks of sliding windows and states need no parent, and come last.
    """
    media = {block.stored_event.medium for block in blocks}
    if len(media) < 2:
        return blocks  # on one medium, parents are stored before their children
    blocks_by_name: dict[BlockName, list[ResidentBlock]] = {}
    partial_blocks = []
    for block in blocks:
        if _is_partial_attention(block):
            partial_blocks.append(block)
        else:
            blocks_by_name.setdefault(block.name, []).append(block)

    ordered_names: dict[BlockName, None] = {}  # a dict as an ordered set
    for block_name in blocks_by_name:
        unordered_path: dict[BlockName, None] = {}  # from the block up to its first ancestor that is ordered
        name: BlockName | None = block_name
        # A name that comes twice is in a circle of parents, which only a faulty engine announces.
        while name in blocks_by_name and name not in ordered_names and name not in unordered_path:
            unordered_path[name] = None
            name = blocks_by_name[name][0].parent_name
        ordered_names.update(dict.fromkeys(reversed(unordered_path)))

    full_blocks = [block for block_name in ordered_names for block in blocks_by_name[block_name]]
    return full_blocks + partial_blocks


def _is_partial_attention(block: ResidentBlock) -> bool:
    return block.stored_event.kv_cache_spec_kind not in (None, *FULL_ATTENTION_KINDS)


def _copy_with_blocks(event: BlockStored, blocks: list[ResidentBlock]) -> BlockStored:
    return msgspec.structs.replace(
        event,
        block_hashes=[block.name for block in blocks],
        parent_block_hash=blocks[0].parent_name if blocks else None,
        token_ids=[token for block in blocks for token in block.token_ids],
        extra_keys=[block.extra_keys for block in blocks],
    )
