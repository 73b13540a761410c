"""KV cache events: the wire format that engine and router share. docs/reference/wire-format.md describes every byte.

Other rooms may use the names that are imported here.
"""
# ruff: noqa: F401

from events.codec import decode_batch, encode_batch
from events.config import KVEventsConfig
from events.feed import EventFeed
from events.feed_sockets import StreamSource
from events.hashing import hash_blocks, make_hash_keys, make_wire_keys, pack_token_ids
from events.publisher import EventPublisher
from events.sources import EventSource, GroupInfo, encode_sources, parse_sources
from events.stream import StreamState
from events.stream_types import (
    Apply,
    Clear,
    Connection,
    DroppedMessages,
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
)
from events.subscriber import Message, Notice, Subscriber, discover
from events.types import (
    CPU,
    FULL_ATTENTION,
    GPU,
    MAMBA,
    SLIDING_WINDOW,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    Event,
    EventBatch,
    EventsError,
    InvariantError,
)
from options import ConfigError

DISTRIBUTION = "blockcast"
