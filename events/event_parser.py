"""One event of a batch, read field by field: what an engine of another age or make may have sent.

Owns what is read liberally and what is not. An event is malformed where a field that says what is stored, removed or
cleared has another type than docs/wire-format.md gives it, where a text is no UTF-8, or where a map's key is no text.
Unknown fields are stepped over unread, and so are the values that no reader here needs. The native decoder
(router/index/native/events.cpp) reads the same events and refuses the same ones. Refuses to know batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, ValidationError

from events.types import EVENT_TYPES, AllBlocksCleared, BlockName, BlockStored, Event

_ABSENT = Raw(b"")
_FIELDS = dict.fromkeys(field for cls in EVENT_TYPES.values() for field in cls.__struct_fields__)
_EventMap = msgspec.defstruct("_Map", [("type", str), *((field, Raw, _ABSENT) for field in _FIELDS)])
_MAP_DECODER = msgspec.msgpack.Decoder(_EventMap)
_ARRAY_DECODER = msgspec.msgpack.Decoder(list[Raw])
_TEXT_DECODER = msgspec.msgpack.Decoder(str)
_BYTES_DECODER = msgspec.msgpack.Decoder(bytes)
_INT_DECODER = msgspec.msgpack.Decoder(int)
_EXTRA_KEYS_DECODER = msgspec.msgpack.Decoder(list[list[Raw] | None] | None)


def parse_event(raw: Raw) -> tuple[str, Event | None]:
    """The event and the name of its type; None for the event where the type is not known.

    Raises what msgspec raises (ValidationError, UnicodeDecodeError) for what cannot be read.
    """
    value_kind = _msgpack_kind(raw)
    if value_kind == "map":
        value = msgspec.structs.asdict(_MAP_DECODER.decode(raw))
        kind, raw_fields = value.pop("type"), value
    elif value_kind == "array":
        values = _ARRAY_DECODER.decode(raw)
        if not values:
            raise ValidationError("empty array")
        kind = _TEXT_DECODER.decode(values[0])
        field_names = _POSITIONAL_FIELDS.get(kind, ())
        raw_fields = dict(zip(field_names, values[1:]))  # more values than known fields are of a newer version
    else:
        raise ValidationError("expected a map or an array")
    cls = EVENT_TYPES.get(kind)
    if cls is None:
        return kind, None
    event = cls(**dict(_decode_fields(cls, raw_fields)))
    if isinstance(event, BlockStored):
        infer_block_size(event)
        _texts_to_media_keys(event)
    return kind, event


def infer_block_size(event: BlockStored) -> None:
    """Derive a block size that the publisher left at 0."""
    block_count, token_count = len(event.block_hashes), len(event.token_ids)
    if event.block_size == 0 and block_count and token_count % block_count == 0:
        event.block_size = token_count // block_count


def _texts_to_media_keys(event: BlockStored) -> None:
    """Make a media key of the first text among each block's token ids: TensorRT-LLM sends texts where media stand."""
    ids: list[Any] = event.token_ids
    text_positions = [position for position, value in enumerate(ids) if isinstance(value, str)]
    if not text_positions:
        return
    block_count, block_size = len(event.block_hashes), event.block_size
    if not block_count or block_count * block_size != len(ids):
        raise ValidationError("BlockStored.token_ids has texts and not one name a block")
    keys: list[Any] = list(event.extra_keys or ())
    keys += [None] * (block_count - len(keys))
    first_text_positions = {position // block_size: position for position in reversed(text_positions)}
    for block, position in first_text_positions.items():
        keys[block] = (*(keys[block] or ()), (ids[position], position % block_size))
    event.extra_keys = keys
    event.token_ids = [0 if isinstance(value, str) else value for value in ids]


def _decode_fields(cls: type[Event], raw_fields: dict[str, Raw]) -> Iterator[tuple[str, Any]]:
    for field in cls.__struct_fields__:
        raw = raw_fields.get(field, _ABSENT)
        if len(raw) == 0:
            if field in _REQUIRED_FIELDS:
                raise ValidationError(f"{cls.__name__} without {field}")
            yield field, None
            continue
        if cls is AllBlocksCleared:
            yield (
                field,
                _decode_or_none(str | None, raw),
            )  # of a medium that cannot be read, all blocks count as cleared
            continue
        try:
            yield field, _FIELD_DECODERS[field](raw)
        except ValidationError as error:
            raise ValidationError(f"{cls.__name__}.{field}: {error}") from error


def _decoder_of(value_type: Any) -> Callable[[Raw], Any]:
    return msgspec.msgpack.Decoder(value_type).decode


def _decode_or_none(value_type: Any, raw: Raw) -> Any:
    """A value that readers may show and that decides nothing: None where it is not what it should be."""
    try:
        return msgspec.msgpack.decode(raw, type=value_type)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _decode_token_ids(raw: Raw) -> list[int]:
    """SGLang under EAGLE announces (token, next token) pairs: the first of each is the block's own token. Texts stay,
    and nil is none at all."""
    try:
        return _TOKENS_DECODER.decode(raw) or []
    except ValidationError:
        return [_decode_token_id(value) for value in _ARRAY_DECODER.decode(raw)]


def _decode_token_id(raw: Raw) -> Any:
    value_kind = _msgpack_kind(raw)
    return (
        _TEXT_DECODER.decode(raw)
        if value_kind == "text"
        else _INT_DECODER.decode(_first_item(raw) if value_kind == "array" else raw)
    )


_TOKENS_DECODER = msgspec.msgpack.Decoder(list[int] | None)


def _first_item(raw: Raw) -> Raw:
    values = _ARRAY_DECODER.decode(raw)
    if not values:
        raise ValidationError("an empty pair")
    return values[0]


def _decode_extra_keys(raw: Raw) -> list[tuple[Any, ...] | None] | None:
    blocks = _EXTRA_KEYS_DECODER.decode(raw)
    return (
        None if blocks is None else [None if keys is None else tuple(map(_decode_extra_key, keys)) for keys in blocks]
    )


def _decode_extra_key(raw: Raw) -> object:
    """A text, bytes, or a media item as (identifier, offset); None for anything else, which matches no prompt."""
    value_kind = _msgpack_kind(raw)
    if value_kind == "text":
        return _TEXT_DECODER.decode(raw)
    if value_kind == "bytes":
        return _BYTES_DECODER.decode(raw)
    values = _ARRAY_DECODER.decode(raw) if value_kind == "array" else []
    if len(values) == 2 and _msgpack_kind(values[0]) == "text" and _msgpack_kind(values[1]) == "int":
        return _TEXT_DECODER.decode(values[0]), _INT_DECODER.decode(values[1])
    return None


def _msgpack_kind(raw: Raw) -> str:
    """What stands there by its first byte: `map`, `array`, `text`, `bytes`, `int` or `other`."""
    tag = memoryview(raw)[0]
    if 0x80 <= tag <= 0x8F or tag in (0xDE, 0xDF):
        return "map"
    if 0x90 <= tag <= 0x9F or tag in (0xDC, 0xDD):
        return "array"
    if 0xA0 <= tag <= 0xBF or 0xD9 <= tag <= 0xDB:
        return "text"
    if 0xC4 <= tag <= 0xC6:
        return "bytes"
    return "int" if tag <= 0x7F or tag >= 0xE0 or 0xCC <= tag <= 0xD3 else "other"


_NEWER_FIELDS = frozenset({"mm_keys", "remaining_copy_counts", *(f for f in _FIELDS if f.startswith("skipped_"))})
_POSITIONAL_FIELDS = {
    kind: tuple(field for field in cls.__struct_fields__ if field not in _NEWER_FIELDS)
    for kind, cls in EVENT_TYPES.items()
}
"""Fields that stand in arrays; whoever sends the newer ones sends maps."""
_REQUIRED_FIELDS = frozenset({"block_hashes", "token_ids", "block_size"})
_FIELD_DECODERS: dict[str, Callable[[Raw], Any]] = {
    "block_hashes": _decoder_of(list[BlockName]),
    "parent_block_hash": _decoder_of(BlockName | None),
    "token_ids": _decode_token_ids,
    "block_size": _decoder_of(int),
    "lora_id": _decoder_of(int | None),
    "medium": _decoder_of(str | None),
    "lora_name": _decoder_of(str | None),
    "extra_keys": _decode_extra_keys,
    "group_idx": _decoder_of(int | None),
    "kv_cache_spec_kind": _decoder_of(str | None),
    "kv_cache_spec_sliding_window": _decoder_of(int | None),
    "locality": partial(_decode_or_none, str | None),
    "ownership": partial(_decode_or_none, str | None),
    "session_id": partial(_decode_or_none, str | None),
    "lookahead_token_ids": partial(_decode_or_none, list[int] | None),
    "cache_salt": _decoder_of(str | None),
    "mm_keys": _decoder_of(list[list[Raw] | None] | None),
    "skipped_parent_block_hash": _decoder_of(BlockName | None),
    "skipped_token_ids": _decoder_of(list[int] | None),
    "skipped_extra_keys": _decoder_of(list[list[Raw] | None] | None),
    "remaining_copy_counts": _decoder_of(list[int] | None),
}
assert _FIELD_DECODERS.keys() == _FIELDS.keys(), "every field of events/types.py is read"
