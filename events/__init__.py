"""KV cache events: the wire format that engine and router share. docs/wire-format.md describes every byte."""

from events.codec import decode_batch, encode_batch
from events.config import KVEventsConfig
from events.errors import ConfigError, DecodeError, EventsError, InvariantError
from events.hashing import BlockHash, block_hash, block_hashes, hash_keys, pack_token_ids, wire_keys
from events.publisher import EventPublisher
from events.sources import EventSource, GroupInfo, default_sources, encode_sources, parse_sources
from events.types import (
    CPU,
    FULL_ATTENTION,
    FULL_ATTENTION_KINDS,
    GPU,
    KINDS,
    MAMBA,
    SLIDING_WINDOW,
    STORAGE,
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Event,
    EventBatch,
)

__all__ = [
    "CPU",
    "FULL_ATTENTION",
    "FULL_ATTENTION_KINDS",
    "GPU",
    "KINDS",
    "MAMBA",
    "SLIDING_WINDOW",
    "STORAGE",
    "AllBlocksCleared",
    "BlockHash",
    "BlockName",
    "BlockRemoved",
    "BlockStored",
    "ConfigError",
    "DecodeError",
    "DecodedBatch",
    "Event",
    "EventBatch",
    "EventPublisher",
    "EventSource",
    "EventsError",
    "GroupInfo",
    "InvariantError",
    "KVEventsConfig",
    "block_hash",
    "block_hashes",
    "decode_batch",
    "default_sources",
    "encode_batch",
    "encode_sources",
    "hash_keys",
    "pack_token_ids",
    "parse_sources",
    "wire_keys",
]
