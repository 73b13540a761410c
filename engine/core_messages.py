"""Messages between the HTTP process and the core process, and their frames on the socket.

A frame is a 4-byte big-endian length and a msgpack message. Both ends are started by the same program, so the format
has no versions. Pure: no sockets here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from engine.core import EngineStats, SimulationLag
from engine.types import Request, SequenceOutput
from events.publisher import PublisherStats
from events.sources import EventSource, GroupInfo
from simulation.spec import ScriptTurn

_LENGTH = struct.Struct(">I")


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model and its KV cache, which the engine's core sends to the HTTP server at the start."""

    model_name: str
    """Name of the model as the user gave it, or of the built-in model."""
    model_path: str
    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    vocab_size: int
    dtype: str
    device: str
    groups: list[GroupInfo]
    """Response of /kv_cache/groups."""
    event_sources: list[EventSource]
    """Response of /kv_event_sources."""
    prefix_caching: bool = True
    prefill_order: str = "shortest"
    """Order in which prompts are computed."""
    max_num_seqs: int
    """Most sequences in one step."""
    max_num_batched_tokens: int
    """Most tokens of one step."""
    default_sampling: dict[str, float | int] = {}
    """Sampling parameters of the model's generation_config.json, under their request names."""
    no_constraint_reason: str | None = None
    """Reason why answers cannot be constrained by a grammar; None: they can."""
    script: tuple[ScriptTurn, ...] = ()
    """Answers of a simulation, turn by turn; empty: random text."""
    kv_transfer_port: int | None = None
    """Port from which peers get blocks; None: they get none."""


# HTTP -> core
class AddRequests(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue requests."""

    requests: list[Request]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End requests. Unknown ids are ignored."""

    request_ids: list[str]


class CallCore(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """Operation that the core executes between two steps. The reply is `CallDone`."""

    call_id: int
    operation: Literal["ping", "reset", "sleep", "wake", "reload"]
    """`ping` does nothing, `reset` empties the prefix cache; the others, of the weights, are refused with requests."""
    level: int = 1
    """Level of `sleep`: 1 keeps the weights, 2 drops them too."""
    path: str | None = None
    """Checkpoint folder of `reload`; None: the last one."""


Command = AddRequests | AbortRequests | CallCore


# core -> HTTP
class CoreReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The core can serve."""

    info: CoreInfo


class CoreFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Reason why the core cannot start, or must end; the core process ends after this message."""

    message: str


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """Outputs of a step, and statistics from time to time."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None = None
    publisher_stats: PublisherStats | None = None
    """Sent with `stats` if events are published."""
    simulation_lag: SimulationLag | None = None
    """Sent with `stats` if steps are simulated."""


class CallDone(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """Reply to `CallCore`."""

    call_id: int
    error: str | None = None
    """Reason why the operation failed; None: it did not."""


Report = CoreReady | CoreFailed | StepOutputs | CallDone


def encode_frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream into messages. Each has a frame: the length of its payload, then the payload."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        """Received bytes of an incomplete frame."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the payload of each frame that is complete."""
        buffer = self._buffer
        buffer += data
        frame_start = 0
        while len(buffer) - frame_start >= _LENGTH.size:
            payload_start = frame_start + _LENGTH.size
            (payload_size,) = _LENGTH.unpack_from(buffer, frame_start)
            frame_end = payload_start + payload_size
            if len(buffer) < frame_end:
                break
            yield bytes(buffer[payload_start:frame_end])
            frame_start = frame_end
        del buffer[:frame_start]
