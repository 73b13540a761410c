"""Event batches to bytes and back: the msgpack payload of docs/wire-format.md.

Owns the encoding, of every vLLM version, and nothing else: no sockets, no sequence numbers, no meaning. Reading is
liberal: map and positional events may be mixed in one batch, unknown fields and types are skipped, and an event that
cannot be read costs only itself. Writing is exact: byte for byte what vLLM writes for the same events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from events.errors import DecodeError
from events.types import EVENT_TYPES, BlockRemoved, BlockStored, DecodedBatch, Event, EventBatch

_ENCODER = msgspec.msgpack.Encoder()

_ABSENT_AS_NONE: dict[str, dict[str, None]] = {
    "BlockStored": {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None},
    "BlockRemoved": {"medium": None},
    "AllBlocksCleared": {},
}
"""Fields that every current engine sends and some older one does not: absent means None."""

_LEGACY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": BlockStored.__struct_fields__[: BlockStored.__struct_fields__.index("locality")],
    "BlockRemoved": BlockRemoved.__struct_fields__[: BlockRemoved.__struct_fields__.index("locality")],
    "AllBlocksCleared": (),
}
"""What the last vLLM that wrote arrays (0.23) put into them, absent values as nil."""


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)
"""What msgspec raises for foreign bytes: TypeError for a map whose keys cannot be hashed."""

_BATCH_DECODER = msgspec.msgpack.Decoder(EventBatch)
_ENVELOPE_DECODER = msgspec.msgpack.Decoder(_Envelope)


def encode_batch(batch: EventBatch, legacy: bool = False) -> bytes:
    """The payload of `batch`: events as maps with "type" first, or as positional arrays where `legacy`."""
    if not legacy:
        return _ENCODER.encode(batch)
    return _ENCODER.encode([batch.ts, [_as_array(event) for event in batch.events], batch.data_parallel_rank])


def _as_array(event: Event) -> list[object]:
    return [type(event).__name__, *(getattr(event, field) for field in _LEGACY_FIELDS[type(event).__name__])]


def decode_batch(payload: bytes) -> DecodedBatch:
    """Read a payload of any known engine version.

    Raises DecodeError if the envelope is unreadable (truncated, not msgpack, not `[ts, events, rank]`).
    """
    try:
        return DecodedBatch(_BATCH_DECODER.decode(payload))
    except _UNREADABLE:
        pass  # not all events are well-formed maps of known types: read them one by one
    try:
        envelope = _ENVELOPE_DECODER.decode(payload)
    except _UNREADABLE as error:
        raise DecodeError(f"unreadable event batch of {len(payload)} bytes: {error}") from error
    batch = EventBatch(envelope.ts, [], envelope.data_parallel_rank)
    decoded = DecodedBatch(batch)
    for index, raw in enumerate(envelope.events):
        try:
            event = _decode_event(raw, decoded.unknown)
        except _UNREADABLE as error:
            decoded.malformed.append(f"event {index}: {error}")
            continue
        if event is not None:
            batch.events.append(event)
    return decoded


def _decode_event(raw: msgspec.Raw, unknown: dict[str, int]) -> Event | None:
    """One event in either form; None, and counted in `unknown`, where its type is not known."""
    value = msgspec.msgpack.decode(raw)
    if isinstance(value, list):
        kind, fields = _named_fields(value)
    elif isinstance(value, dict):
        kind, fields = value.get("type"), value
    else:
        raise msgspec.ValidationError(f"expected a map or an array, got {type(value).__name__}")
    if not isinstance(kind, str):
        raise msgspec.ValidationError(f"expected the event type as a string, got {kind!r:.60}")
    cls = EVENT_TYPES.get(kind)
    if cls is None:
        unknown[kind] = unknown.get(kind, 0) + 1
        return None
    complete = {**_ABSENT_AS_NONE[kind], **fields}
    if cls is BlockStored:
        complete["token_ids"] = _flat_token_ids(complete.get("token_ids"))
    return msgspec.convert(complete, cls)


def _named_fields(values: list[Any]) -> tuple[object, dict[Any, Any]]:
    """Names for a positional event. More values than known fields are of a newer version: ignored."""
    if not values:
        raise msgspec.ValidationError("empty array")
    kind = values[0]
    cls = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return kind, {}
    return kind, {"type": kind, **dict(zip(cls.__struct_fields__, values[1:]))}


def _flat_token_ids(token_ids: object) -> object:
    """SGLang under EAGLE announces (token, next token) pairs: the first of each is the block's own token."""
    if isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        return [pair[0] if isinstance(pair, list) and pair else pair for pair in token_ids]
    return token_ids
