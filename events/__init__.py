"""KV cache events: the wire format that engine and router share. docs/reference/wire-format.md describes every byte.

Other rooms may use the names that are imported here.
"""
# ruff: noqa: F401

from events.codec import decode_batch, encode_batch
from events.config import KVEventsConfig
from events.feed import EventFeed, FeedHandler
from events.feed_sockets import StreamSource
from events.hashing import BlockHash, hash_block, hash_blocks, make_hash_keys, make_wire_keys, pack_token_ids
from events.publisher import EventPublisher
from events.sources import EventSource, GroupInfo, encode_sources, make_default_source, parse_sources
from events.stream import StreamState
from events.stream_types import (
    Apply,
    Clear,
    DuplicateBatch,
    Gap,
    Instruction,
    MalformedMessage,
    Origin,
    PublisherRestarted,
    RequestReplay,
    RequestSnapshot,
    StartMode,
    StreamConfig,
    StreamPhase,
    StreamStats,
)
from events.subscriber import Connection, Message, Notice, Subscriber, discover
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
    DecodeError,
    Event,
    EventBatch,
    EventsError,
    InvariantError,
)
from options import ConfigError

DISTRIBUTION = "blockcast"
