"""Encoding of event batches as msgpack (docs/reference/wire-format.md), for all versions of vLLM.

Decoding is liberal: maps and positional events may be mixed in a batch, unknown fields and types are skipped, and a
malformed event does not affect the others. Encoding is exact: the bytes are those that vLLM writes for equal events.
"""

from __future__ import annotations

import struct

import msgspec

from events.event_parser import parse_event
from events.types import DecodedBatch, DecodeError, EventBatch

_ENCODER = msgspec.msgpack.Encoder()


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)
"""Errors that msgspec raises for foreign bytes; TypeError for a map whose keys cannot be hashed."""

_RAW_BATCH_DECODER = msgspec.msgpack.Decoder(_RawBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """Encode a batch: events become maps with "type" first."""
    return _ENCODER.encode(batch)


_BATCH_START = struct.Struct(">BBd")
"""Begin of a batch: the header of a short array, and its first element, a float64 with its header."""


def read_batch_time(payload: bytes) -> float | None:
    """Return when a batch was made, in seconds since 1970 on the worker's clock; None if it does not begin so."""
    if len(payload) < _BATCH_START.size:
        return None
    array_header, float_header, made_s = _BATCH_START.unpack_from(payload)
    return made_s if array_header & 0xF0 == 0x90 and float_header == 0xCB else None


def decode_batch_rank(payload: bytes) -> int | None:
    """Return the data-parallel rank of a batch; None if it has none, or cannot be decoded."""
    try:
        return _RAW_BATCH_DECODER.decode(payload).data_parallel_rank
    except _DECODE_ERRORS:
        return None


def decode_batch(payload: bytes) -> DecodedBatch:
    """Decode a batch of KV cache events from any known version of an engine. Raises DecodeError if it is no batch.

    Events that are malformed or of an unknown type are left out of the batch, and reported in the result.
    """
    try:
        raw_batch = _RAW_BATCH_DECODER.decode(payload)
    except _DECODE_ERRORS as error:
        raise DecodeError(f"unreadable event batch of {len(payload)} bytes: {error}") from error
    decoded_batch = DecodedBatch(EventBatch(raw_batch.ts, [], raw_batch.data_parallel_rank))
    unknown_type_counts = decoded_batch.unknown_type_counts
    for event_index, raw_event in enumerate(raw_batch.events):
        try:
            type_name, event = parse_event(raw_event)
        except _DECODE_ERRORS as error:
            decoded_batch.errors.append(f"event {event_index}: {error}")
            continue
        if event is not None:
            decoded_batch.batch.events.append(event)
        else:
            unknown_type_counts[type_name] = unknown_type_counts.get(type_name, 0) + 1
    return decoded_batch
