"""KV cache events: the wire format that engine and router share. docs/wire-format.md describes every byte."""

from events.checker import StreamChecker
from events.codec import decode_batch, encode_batch
from events.config import KVEventsConfig
from events.discover import discover
from events.errors import ConfigError, DecodeError, EventsError, InvariantError
from events.feed import EventFeed, FeedHandler
from events.feed_sockets import StreamSource
from events.hashing import BlockHash, block_hash, block_hashes, hash_keys, pack_token_ids, wire_keys
from events.instructions import (
    Apply,
    Clear,
    Gap,
    Instruction,
    Malformed,
    Origin,
    RequestReplay,
    RequestSnapshot,
    Restarted,
    Stale,
)
from events.publisher import EventPublisher
from events.sources import EventSource, GroupInfo, default_sources, encode_sources, parse_sources
from events.stream import StreamState
from events.stream_types import Join, StreamConfig, StreamPhase, StreamStats
from events.subscriber import Connection, Message, Notice, Subscriber
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
    "Apply",
    "BlockHash",
    "BlockName",
    "BlockRemoved",
    "BlockStored",
    "Clear",
    "ConfigError",
    "Connection",
    "DecodeError",
    "DecodedBatch",
    "Event",
    "EventBatch",
    "EventFeed",
    "EventPublisher",
    "EventSource",
    "EventsError",
    "FeedHandler",
    "Gap",
    "GroupInfo",
    "Instruction",
    "InvariantError",
    "Join",
    "KVEventsConfig",
    "Malformed",
    "Message",
    "Notice",
    "Origin",
    "RequestReplay",
    "RequestSnapshot",
    "Restarted",
    "Stale",
    "StreamChecker",
    "StreamConfig",
    "StreamPhase",
    "StreamSource",
    "StreamState",
    "StreamStats",
    "Subscriber",
    "block_hash",
    "block_hashes",
    "decode_batch",
    "default_sources",
    "discover",
    "encode_batch",
    "encode_sources",
    "hash_keys",
    "pack_token_ids",
    "parse_sources",
    "wire_keys",
]
