"""Body of `GET /kv_event_sources`, in which a worker says at which addresses it publishes events. No I/O.

The JSON is a superset of vLLM's: an object with one entry for each data-parallel rank. A router replaces a wildcard in
an address by the worker's host.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from events.types import DecodeError
from options.addresses import bracket_host

DEFAULT_PORT = 5557
_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})
_ENDPOINT_PATTERN = re.compile(r"tcp://[!-~]{1,255}:(?P<port>[0-9]{1,5})|(?:ipc|inproc)://\S{1,512}")

RANKS_MAX = 256
"""Most ranks of a worker; each takes four file descriptors."""
GROUPS_MAX = 256
TOKEN_BYTES_MAX = 1 << 30
"""Most bytes of a cached token."""
NAME_CHARS_MAX = 1024
BLOCK_TOKENS_MAX = 1 << 24
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
BlockTokens = Annotated[int, Meta(gt=0, le=BLOCK_TOKENS_MAX)]


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group, as in `GET /kv_cache/groups`. `block_size` is the hash block size, in tokens."""

    group_idx: Annotated[int, Meta(ge=0, lt=1 << 16)]
    kind: Name
    block_size: BlockTokens
    sliding_window: BlockTokens | None = None


class KVTransferOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Address at which an engine of this project gives cached blocks to peers."""

    endpoint: str
    """`tcp://HOST:PORT`; a wildcard stands for the worker's host."""
    group: Name
    """Engines of the same group have equal weights and cache layouts, so that blocks may move between them."""
    bytes_per_token: Annotated[int, Meta(gt=0, le=TOKEN_BYTES_MAX)]
    """Bytes by which each further token of a prefix lengthens its transfer."""
    gb_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Rate at which blocks come from the engine, in 1e9 bytes a second, until a router learns it. 0: not known."""


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of KV cache events of a worker: its addresses, and the cache that it describes.

    An entry of `GET /kv_event_sources`. The first five fields are vLLM's, the others ours.
    """

    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    endpoint: str
    replay_endpoint: str | None = None
    topic: Name = ""
    data_parallel_rank: Rank = 0
    snapshot_endpoint: str | None = None
    """Address of a socket that answers snapshots only (vLLM's open change 57789)."""
    epoch: Name | None = None
    """Id that each start of the publisher makes anew, for operators; None: the worker does not report one."""
    snapshot: bool = False
    """Whether the replay socket answers snapshot requests."""
    model: Name | None = None
    block_size: BlockTokens | None = None
    groups: Annotated[tuple[GroupInfo, ...], Meta(max_length=GROUPS_MAX)] = ()
    reannounces: bool = False
    """Whether cached blocks are announced again (vLLM's `kv_cache_report_mode=full`): these are no second copies."""
    kv_transfer: KVTransferOffer | None = None
    """Address at which peers get the blocks that this stream announces; None: they get none."""


def encode_sources(sources: list[EventSource]) -> bytes:
    """Encode the body of the answer, {"rank": source}."""
    return msgspec.json.encode({str(source.data_parallel_rank): source for source in sources})


def parse_sources(body: bytes, worker_url: str) -> list[EventSource]:
    """Parse a worker's answer to `GET /kv_event_sources`; return its publishing streams by ascending rank.

    The answer is an object `{"rank": source}`, an array of sources, or `{"sources": [...]}`. A wildcard host in an
    address becomes the host of `worker_url`. Raises DecodeError for a malformed answer.
    """
    try:
        answer = msgspec.json.decode(body)
        if isinstance(answer, dict) and isinstance(answer.get("sources"), list):
            answer = answer["sources"]
        if isinstance(answer, dict):
            source_by_rank = msgspec.convert(answer, dict[Rank, EventSource], strict=False)
            sources = [
                msgspec.structs.replace(source, data_parallel_rank=rank) for rank, source in source_by_rank.items()
            ]
        else:
            sources = msgspec.convert(answer, list[EventSource])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"{worker_url}/kv_event_sources: {error}") from error
    host = urlsplit(worker_url).hostname or "127.0.0.1"
    publishing_sources = [
        _resolve_addresses(source, host)
        for source in sources
        if source.enable_kv_cache_events and source.publisher != "null"
    ]
    return sorted(publishing_sources, key=lambda source: source.data_parallel_rank)


def _resolve_addresses(source: EventSource, host: str) -> EventSource:
    """Replace wildcards in the addresses of a source by `host`."""
    offer = source.kv_transfer
    return msgspec.structs.replace(
        source,
        endpoint=resolve_endpoint(source.endpoint, host),
        replay_endpoint=source.replay_endpoint and resolve_endpoint(source.replay_endpoint, host),
        snapshot_endpoint=source.snapshot_endpoint and resolve_endpoint(source.snapshot_endpoint, host),
        kv_transfer=offer and msgspec.structs.replace(offer, endpoint=resolve_endpoint(offer.endpoint, host)),
    )


def is_endpoint(text: str) -> bool:
    """Return whether a text has the form of a ZeroMQ address: `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`."""
    match = _ENDPOINT_PATTERN.fullmatch(text)
    return match is not None and (match["port"] is None or 0 < int(match["port"]) < 65536)


def resolve_endpoint(endpoint: str, host: str) -> str:
    """Replace the wildcard of an address such as `tcp://*:5557` by `host`. Other addresses stay as they are."""
    scheme, separator, authority = endpoint.partition("://")
    if scheme != "tcp" or not separator:
        return endpoint
    advertised_host, _, port = authority.rpartition(":")
    if advertised_host not in _WILDCARD_HOSTS:
        return endpoint
    return f"tcp://{bracket_host(host)}:{port}"


def parse_endpoint_host(endpoint: str) -> str | None:
    """Return the host of a TCP endpoint, without brackets; None for `ipc://` and `inproc://`."""
    scheme, _, authority = endpoint.partition("://")
    return authority.rpartition(":")[0].strip("[]") if scheme == "tcp" else None


def make_default_source(host: str, topic: str = "") -> EventSource:
    """Return the default source of a vLLM worker without `/kv_event_sources`: it has no replay."""
    return EventSource(endpoint=resolve_endpoint(f"tcp://*:{DEFAULT_PORT}", host), topic=topic)
