"""`GET /kv_event_sources`: how a worker tells where its events are, and how a router reads it.

Owns the JSON shape (ours is a superset of vLLM's: a bare array with one object a data-parallel rank) and the rule that
turns an advertised wildcard into the worker's host. Opens no connection.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from events.errors import DecodeError

_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group, as in `GET /kv_cache/groups`. `block_size` is the hash block size, in tokens."""

    group_idx: int
    kind: str
    block_size: int
    sliding_window: int | None = None


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """One publisher stream. The first four fields are vLLM's; a worker that has no others leaves them out."""

    data_parallel_rank: int = 0
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    epoch: str | None = None
    """Changes with every start of the publisher. None: the worker does not tell."""
    snapshot: bool = False
    """True where the replay socket answers snapshot requests."""
    model: str | None = None
    block_size: int | None = None
    groups: tuple[GroupInfo, ...] = ()


class _Wrapped(msgspec.Struct):
    sources: list[EventSource]


def encode_sources(sources: list[EventSource]) -> bytes:
    """The body of the answer."""
    return msgspec.json.encode(sources)


def parse_sources(body: bytes, worker_url: str) -> list[EventSource]:
    """Read the answer of the worker at `worker_url` (ours, vLLM's, also wrapped in {"sources": [...]}).

    Wildcard addresses get the worker's host. Raises DecodeError for anything else.
    """
    try:
        if body.lstrip().startswith(b"{"):
            sources = msgspec.json.decode(body, type=_Wrapped).sources
        else:
            sources = msgspec.json.decode(body, type=list[EventSource])
    except msgspec.MsgspecError as error:
        raise DecodeError(f"{worker_url}/kv_event_sources: {error}") from error
    host = urlsplit(worker_url).hostname or "127.0.0.1"
    return [
        msgspec.structs.replace(
            source,
            endpoint=resolve_endpoint(source.endpoint, host),
            replay_endpoint=source.replay_endpoint and resolve_endpoint(source.replay_endpoint, host),
        )
        for source in sources
    ]


def resolve_endpoint(endpoint: str, host: str) -> str:
    """`tcp://*:5557` as seen from outside: the wildcard becomes `host`. Other addresses stay as they are."""
    scheme, separator, rest = endpoint.partition("://")
    if scheme != "tcp" or not separator:
        return endpoint
    address, _, port = rest.rpartition(":")
    if address not in _WILDCARD_HOSTS:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def default_sources(host: str, ranks: int = 1, port: int = 5557) -> list[EventSource]:
    """Where a vLLM worker without `/kv_event_sources` publishes by default: port 5557 + rank, no replay."""
    address = f"[{host}]" if ":" in host else host
    return [EventSource(data_parallel_rank=rank, endpoint=f"tcp://{address}:{port + rank}") for rank in range(ranks)]
