"""Cache events and their fields as vLLM sends them, and the errors of this room.

Invariant: the order of the fields is their order on the wire, in maps and in positional arrays. New fields are
appended, never inserted.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

BlockName: TypeAlias = int | bytes
"""Name of a block: a signed or unsigned 64-bit int, or 32 raw bytes. Opaque: compared, never computed."""

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
"""Media that engines announce. Others occur in the field (DISK, REMOTE ...) and pass through."""

FULL_ATTENTION = "full_attention"
SLIDING_WINDOW = "sliding_window"
MAMBA = "mamba"
"""Values of `kv_cache_spec_kind` that our engine sends. vLLM has others, such as chunked_local_attention."""
FULL_ATTENTION_KINDS = frozenset({FULL_ATTENTION, "mla_attention", "sink_full_attention"})
"""Kinds of group where each block needs all blocks before it; an event without a kind (older engines) is one of
these."""


def _default_none() -> None:
    """Return None: a default that `omit_defaults` writes all the same, as vLLM always writes these fields."""


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, gc=False):
    """Event: consecutive KV cache blocks of a prompt were stored in a worker's cache.

    Our engine always sends all tokens of at least one block: `len(token_ids) == len(block_hashes) * block_size`. Other
    engines send fewer hashes, or none, for groups with a sliding window or a state. The first seven fields are always
    sent, the others only if they are not None.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    """Name of the block before the first of these blocks; None if they start a prompt."""
    token_ids: list[int]
    block_size: int
    """Tokens in a block."""
    lora_id: int | None = msgspec.field(default_factory=_default_none)
    medium: str | None = msgspec.field(default_factory=_default_none)
    lora_name: str | None = msgspec.field(default_factory=_default_none)
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Keys besides the tokens in each block's hash: LoRA name, cache salt (first block), media keys."""
    group_idx: int | None = None
    """Group of layers with the same kind of attention; the blocks of each group are stored and removed separately."""
    kv_cache_spec_kind: str | None = None
    """Kind of attention of the group, such as FULL_ATTENTION; None: the engine is older."""
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    """Tokens after each block that its name covers too, as vLLM 0.33 sends them under EAGLE and MTP."""
    cache_salt: str | None = None
    """Salt of all blocks as SGLang sends it; vLLM and our engine put the salt into `extra_keys`."""
    mm_keys: list[list[Any] | None] | None = None
    """Media in each block, as TensorRT-LLM sends them."""
    skipped_parent_block_hash: BlockName | None = None
    """Name of the block that `skipped_token_ids` follow; None if they start a prompt."""
    skipped_token_ids: list[int] | None = None
    """Tokens up to the end of the parent block, in blocks that no event announced (vLLM's partial blocks)."""
    skipped_extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks left the cache, in this order."""

    block_hashes: list[BlockName]
    medium: str | None = msgspec.field(default_factory=_default_none)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: list[int] | None = None
    """Copies left of each block; None: the publisher does not say, and each removal is of one copy."""


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """Every block of every group left the cache."""

    medium: str | None = None
    """Medium that was cleared; None: all media."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

EVENT_CLASS_BY_NAME: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Changes of one step of one data-parallel rank. `ts` is seconds since 1970 on the worker's clock."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class DecodedBatch(msgspec.Struct):
    """Batch read from foreign bytes: the events that could be read, and what could not."""

    batch: EventBatch
    errors: list[str] = msgspec.field(default_factory=list)
    """One message an event that was dropped because it could not be read."""
    unknown_type_counts: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of skipped events of each unknown type."""


class EventsError(Exception):
    """Root of everything this package raises on purpose."""


class DecodeError(EventsError, ValueError):
    """The envelope of an event batch is unreadable; nothing of the payload was used."""


class InvariantError(EventsError, AssertionError):
    """A producer broke a guarantee of docs/reference/wire-format.md; the message tells the story of the block."""
