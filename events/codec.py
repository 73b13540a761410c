"""Encoding and decoding of event batches as msgpack (docs/reference/wire-format.md), for all versions of vLLM.

Decoding is liberal: maps and positional events may be mixed in a batch, unknown fields and types are skipped, and a
malformed event does not affect the others. An event is malformed if a field that says what is stored, removed or
cleared has another type than in docs/reference/wire-format.md, if a text is no UTF-8, or if a key of a map is no text.
The native decoder (router/index/native/events.cpp) accepts and refuses the same events.

Encoding is exact: the bytes are those that vLLM writes for equal events.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_type_hints

import msgspec
from msgspec import Raw, ValidationError

from events.types import (
    EVENT_CLASS_BY_NAME,
    AllBlocksCleared,
    BlockStored,
    DecodedBatch,
    DecodeError,
    Event,
    EventBatch,
)

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
            type_name, event = _parse_event(raw_event)
        except _DECODE_ERRORS as error:
            decoded_batch.errors.append(f"event {event_index}: {error}")
            continue
        if event is not None:
            decoded_batch.batch.events.append(event)
        else:
            unknown_type_counts[type_name] = unknown_type_counts.get(type_name, 0) + 1
    return decoded_batch


_ABSENT = Raw(b"")
_FIELDS = dict.fromkeys(field for cls in EVENT_CLASS_BY_NAME.values() for field in cls.__struct_fields__)
_EVENT_DECODER = msgspec.msgpack.Decoder(
    msgspec.defstruct("_EventMap", [("type", str), *((field, Raw, _ABSENT) for field in _FIELDS)]) | list[Raw]
)
_TEXT_DECODER = msgspec.msgpack.Decoder(str)
_BYTES_DECODER = msgspec.msgpack.Decoder(bytes)
_INT_DECODER = msgspec.msgpack.Decoder(int)
_EXTRA_KEYS_DECODER = msgspec.msgpack.Decoder(list[list[Raw] | None] | None)
_TOKENS_DECODER = msgspec.msgpack.Decoder(list[int] | None)
_DIALECT_TOKENS_DECODER = msgspec.msgpack.Decoder(list[int | str | list[Raw]])


def _parse_event(raw_event: Raw) -> tuple[str, Event | None]:
    """Parse one event of a batch; return the name of its type and the event, which is None for an unknown type.

    Some engines send an event as a map, others as an array with the type and the fields in their fixed order. Raises
    ValidationError or UnicodeDecodeError for a malformed event.
    """
    decoded_event = _EVENT_DECODER.decode(raw_event)
    if isinstance(decoded_event, list):
        if not decoded_event:
            raise ValidationError("empty array")
        raw_type, *raw_values = decoded_event
        type_name = _TEXT_DECODER.decode(raw_type)
        field_names = _POSITIONAL_FIELDS.get(type_name, ())
        raw_value_by_field = dict(zip(field_names, raw_values))  # further values of newer versions are ignored
    else:
        raw_value_by_field = msgspec.structs.asdict(decoded_event)
        type_name = raw_value_by_field.pop("type")
    event_class = EVENT_CLASS_BY_NAME.get(type_name)
    if event_class is None:
        return type_name, None
    event = event_class(**dict(_decode_fields(event_class, raw_value_by_field)))
    if isinstance(event, BlockStored):
        _infer_block_size(event)
        _move_texts_to_extra_keys(event)
    return type_name, event


def _infer_block_size(event: BlockStored) -> None:
    """Set a block size of 0 to the number of tokens per block, if that is a whole number."""
    block_count, token_count = len(event.block_hashes), len(event.token_ids)
    if event.block_size == 0 and block_count and token_count % block_count == 0:
        event.block_size = token_count // block_count


def _move_texts_to_extra_keys(event: BlockStored) -> None:
    """Replace the names of media among an event's token ids by 0, and add them to the extra keys of their blocks.

    TensorRT-LLM puts a text that names an image or other media among the token ids. The first text of each block
    becomes the key (text, offset in the block). Raises ValidationError if the tokens do not fill the blocks exactly.
    """
    token_ids: list[Any] = event.token_ids
    has_text = str in map(type, token_ids)
    if not has_text:
        return
    block_count, block_size = len(event.block_hashes), event.block_size
    if not block_count or block_count * block_size != len(token_ids):
        raise ValidationError("BlockStored.token_ids has texts and not one name a block")
    keys_by_block: list[Any] = list(event.extra_keys or ())
    keys_by_block += [None] * (block_count - len(keys_by_block))
    for block_index in range(block_count):
        block_tokens = token_ids[block_index * block_size : (block_index + 1) * block_size]
        for offset, token in enumerate(block_tokens):
            if isinstance(token, str):
                other_keys = keys_by_block[block_index] or ()
                keys_by_block[block_index] = (*other_keys, (token, offset))
                break
    event.extra_keys = keys_by_block
    event.token_ids = [0 if isinstance(token, str) else token for token in token_ids]


def _decode_fields(event_class: type[Event], raw_value_by_field: dict[str, Raw]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the decoded value of each field of `event_class`; the value of a missing field is None.

    Raises ValidationError, which names the field, for a malformed value and for a missing field that is required.
    """
    for field_name in event_class.__struct_fields__:
        raw_value = raw_value_by_field.get(field_name, _ABSENT)
        is_absent = len(raw_value) == 0
        if is_absent and field_name in _REQUIRED_FIELDS:
            raise ValidationError(f"{event_class.__name__} without {field_name}")
        if is_absent:
            yield field_name, None
        elif event_class is AllBlocksCleared:
            # If the medium cannot be read, the blocks of all media count as cleared.
            yield field_name, _decode_or_none(str | None, raw_value)
        else:
            try:
                yield field_name, _DECODER_BY_FIELD[field_name](raw_value)
            except ValidationError as error:
                raise ValidationError(f"{event_class.__name__}.{field_name}: {error}") from error


def _make_decoder(value_type: Any) -> Callable[[Raw], Any]:
    return msgspec.msgpack.Decoder(value_type).decode


def _decode_or_none(value_type: Any, raw: Raw) -> Any:
    """Decode a value that is only displayed; return None if the value has another type."""
    try:
        return msgspec.msgpack.decode(raw, type=value_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        return None


def _decode_token_ids(raw: Raw) -> list[int]:
    """Decode a list of token ids, which may contain texts; return an empty list for nil.

    SGLang with EAGLE sends pairs (token, next token). The first of each pair is the block's own token.
    """
    try:
        return _TOKENS_DECODER.decode(raw) or []
    except ValidationError:
        return [_decode_token_id(value) for value in _DIALECT_TOKENS_DECODER.decode(raw)]


def _decode_token_id(value: int | str | list[Raw]) -> Any:
    if not isinstance(value, list):
        return value
    if not value:
        raise ValidationError("an empty pair")
    return _INT_DECODER.decode(value[0])


def _decode_extra_keys(raw: Raw) -> list[tuple[Any, ...] | None] | None:
    keys_by_block = _EXTRA_KEYS_DECODER.decode(raw)
    if keys_by_block is None:
        return None
    return [None if keys is None else tuple(map(_decode_extra_key, keys)) for keys in keys_by_block]


def _decode_displayed_keys(raw: Raw) -> list[list[Any] | None] | None:
    """Decode the keys of each block, which are only displayed; None if a key among them cannot be read."""
    _EXTRA_KEYS_DECODER.decode(raw)
    keys_by_block: list[list[Any] | None] | None = _decode_or_none(list[list[Any] | None] | None, raw)
    return keys_by_block


def _decode_extra_key(raw: Raw) -> object:
    """Decode a text, bytes, or a media item as (identifier, offset); None for other values, which match nothing."""
    for decoder in (_TEXT_DECODER, _BYTES_DECODER):
        with contextlib.suppress(ValidationError):
            return decoder.decode(raw)
    return _decode_or_none(tuple[str, int], raw)


_NEWER_FIELDS = frozenset({"mm_keys", "remaining_copy_counts", *(f for f in _FIELDS if f.startswith("skipped_"))})
_POSITIONAL_FIELDS = {
    kind: tuple(field for field in cls.__struct_fields__ if field not in _NEWER_FIELDS)
    for kind, cls in EVENT_CLASS_BY_NAME.items()
}
"""Names of fields in positional arrays; publishers of newer fields send maps."""
_REQUIRED_FIELDS = frozenset({"block_hashes", "token_ids", "block_size"})
_DECODER_BY_FIELD: dict[str, Callable[[Raw], Any]] = {
    field: _make_decoder(hint) for cls in EVENT_CLASS_BY_NAME.values() for field, hint in get_type_hints(cls).items()
} | {
    "token_ids": _decode_token_ids,
    "extra_keys": _decode_extra_keys,
    "mm_keys": _decode_displayed_keys,
    "skipped_extra_keys": _decode_displayed_keys,
    "locality": partial(_decode_or_none, str | None),
    "ownership": partial(_decode_or_none, str | None),
    "session_id": partial(_decode_or_none, str | None),
    "lookahead_token_ids": partial(_decode_or_none, list[list[int]] | None),
}
"""Decoder of each field: of the type that the field has in events/types.py, unless other engines send other types."""
