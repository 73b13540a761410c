"""Settings of `--kv-events-config`: vLLM's keys, defaults and addresses.

Owns parsing and the rules of addresses: bind or connect, and one port for each data-parallel rank. No I/O.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from options import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker's event publisher, read from the JSON of `--kv-events-config`.

    Keys and defaults are vLLM's: with the flag, events are published only if `enable_kv_cache_events` is set. Without
    the flag, our engine publishes. The texts in the annotations are the help of the command line.
    """

    enable_kv_cache_events: Annotated[bool, "Publish events. On where none of these settings is given."] = False
    publisher: Annotated[
        Literal["zmq", "null"] | None, "null: nothing is published. [default: zmq where events are enabled]"
    ] = None
    endpoint: Annotated[str, "Where events are published. Rank r uses the port + r."] = "tcp://*:5557"
    replay_endpoint: Annotated[str | None, "Where missed batches and snapshots are asked for; always bound."] = None
    """None: the publisher offers no replay."""
    buffer_steps: Annotated[Count, "Batches kept for replay."] = 10_000
    hwm: Annotated[Count, "Messages queued for one slow subscriber before it loses some; 0: no limit."] = 100_000
    max_queue_size: Annotated[Positive, "Batches that may wait for the publisher's thread."] = 100_000
    """When the queue is full, its oldest batch is not sent; subscribers see the gap and ask for its replay."""
    topic: Annotated[str, "Begins every message: subscribers choose by it."] = ""

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """Read the JSON of `--kv-events-config`. Raises ConfigError naming the key that is wrong."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            key_names = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"--kv-events-config {text!r}: {error}; known keys: {key_names}") from error


def should_bind(endpoint: str) -> bool:
    """Return whether to bind rather than connect: vLLM binds a wildcard or an address local to the machine."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def make_rank_endpoint(endpoint: str, rank: int) -> str:
    """Return the address on which a data-parallel rank publishes, derived from the configured one.

    Ranks of one worker must not share an address. For tcp the rank is added to the port; for ipc and inproc it becomes
    a suffix. Raises ConfigError for another transport, and for a tcp address without a usable port.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"endpoint {endpoint!r}: expected tcp://, ipc:// or inproc://")
    host, _, port = endpoint.rpartition(":")
    if host == "tcp" or not (port == "*" or port.isdigit()):
        raise ConfigError(f"endpoint {endpoint!r}: expected tcp://HOST:PORT")
    if port in ("*", "0"):
        return endpoint  # the system chooses a port for every rank
    if not 0 < int(port) + rank < 65536:
        raise ConfigError(f"endpoint {endpoint!r}: port + data-parallel rank {rank} is not a port")
    return f"{host}:{int(port) + rank}"
