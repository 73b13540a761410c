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
_Map = msgspec.defstruct("_Map", [("type", str), *((field, Raw, _ABSENT) for field in _FIELDS)])
_MAP = msgspec.msgpack.Decoder(_Map)
_ARRAY = msgspec.msgpack.Decoder(list[Raw])
_TEXT = msgspec.msgpack.Decoder(str)
_BYTES = msgspec.msgpack.Decoder(bytes)
_INT = msgspec.msgpack.Decoder(int)
_BLOCKS_OF_KEYS = msgspec.msgpack.Decoder(list[list[Raw] | None] | None)


def parse_event(raw: Raw) -> tuple[str, Event | None]:
    """The event and the name of its type; None for the event where the type is not known.

    Raises what msgspec raises (ValidationError, UnicodeDecodeError) for what cannot be read.
    """
    form = _form(raw)
    if form == "map":
        value = msgspec.structs.asdict(_MAP.decode(raw))
        kind, sent = value.pop("type"), value
    elif form == "array":
        values = _ARRAY.decode(raw)
        if not values:
            raise ValidationError("empty array")
        kind = _TEXT.decode(values[0])
        known = _POSITIONAL.get(kind, ())
        sent = dict(zip(known, values[1:]))  # more values than known fields are of a newer version
    else:
        raise ValidationError("expected a map or an array")
    cls = EVENT_TYPES.get(kind)
    if cls is None:
        return kind, None
    event = cls(**dict(_read_fields(cls, sent)))
    if isinstance(event, BlockStored):
        complete(event)
        _place_texts(event)
    return kind, event


def complete(event: BlockStored) -> None:
    """Derive a block size that the publisher left at 0."""
    names, tokens = len(event.block_hashes), len(event.token_ids)
    if event.block_size == 0 and names and tokens % names == 0:
        event.block_size = tokens // names


def _place_texts(event: BlockStored) -> None:
    """Make a media key of the first text among each block's token ids: TensorRT-LLM sends texts where media stand."""
    ids: list[Any] = event.token_ids
    texts = [at for at, value in enumerate(ids) if isinstance(value, str)]
    if not texts:
        return
    names, size = len(event.block_hashes), event.block_size
    if not names or names * size != len(ids):
        raise ValidationError("BlockStored.token_ids has texts and not one name a block")
    keys: list[Any] = list(event.extra_keys or ())
    keys += [None] * (names - len(keys))
    first = {at // size: at for at in reversed(texts)}
    for block, at in first.items():
        keys[block] = (*(keys[block] or ()), (ids[at], at % size))
    event.extra_keys = keys
    event.token_ids = [0 if isinstance(value, str) else value for value in ids]


def _read_fields(cls: type[Event], sent: dict[str, Raw]) -> Iterator[tuple[str, Any]]:
    for field in cls.__struct_fields__:
        raw = sent.get(field, _ABSENT)
        if len(raw) == 0:
            if field in _REQUIRED:
                raise ValidationError(f"{cls.__name__} without {field}")
            yield field, None
            continue
        if cls is AllBlocksCleared:
            yield field, _unneeded(str | None, raw)  # of a medium that cannot be read, all blocks count as cleared
            continue
        try:
            yield field, _READ[field](raw)
        except ValidationError as error:
            raise ValidationError(f"{cls.__name__}.{field}: {error}") from error


def _typed(kind: Any) -> Callable[[Raw], Any]:
    return msgspec.msgpack.Decoder(kind).decode


def _unneeded(kind: Any, raw: Raw) -> Any:
    """A value that readers may show and that decides nothing: None where it is not what it should be."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _token_ids(raw: Raw) -> list[int]:
    """SGLang under EAGLE announces (token, next token) pairs: the first of each is the block's own token. Texts stay,
    and nil is none at all."""
    try:
        return _TOKENS.decode(raw) or []
    except ValidationError:
        return [_token_id(value) for value in _ARRAY.decode(raw)]


def _token_id(raw: Raw) -> Any:
    form = _form(raw)
    return _TEXT.decode(raw) if form == "text" else _INT.decode(_first(raw) if form == "array" else raw)


_TOKENS = msgspec.msgpack.Decoder(list[int] | None)


def _first(raw: Raw) -> Raw:
    values = _ARRAY.decode(raw)
    if not values:
        raise ValidationError("an empty pair")
    return values[0]


def _extra_keys(raw: Raw) -> list[tuple[Any, ...] | None] | None:
    blocks = _BLOCKS_OF_KEYS.decode(raw)
    return None if blocks is None else [None if keys is None else tuple(map(_extra_key, keys)) for keys in blocks]


def _extra_key(raw: Raw) -> object:
    """A text, bytes, or a media item as (identifier, offset); None for anything else, which matches no prompt."""
    form = _form(raw)
    if form == "text":
        return _TEXT.decode(raw)
    if form == "bytes":
        return _BYTES.decode(raw)
    values = _ARRAY.decode(raw) if form == "array" else []
    if len(values) == 2 and _form(values[0]) == "text" and _form(values[1]) == "int":
        return _TEXT.decode(values[0]), _INT.decode(values[1])
    return None


def _form(raw: Raw) -> str:
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


_NEWER = frozenset({"mm_keys", "remaining_copy_counts", *(f for f in _FIELDS if f.startswith("skipped_"))})
_POSITIONAL = {
    kind: tuple(field for field in cls.__struct_fields__ if field not in _NEWER) for kind, cls in EVENT_TYPES.items()
}
"""Fields that stand in arrays; whoever sends the newer ones sends maps."""
_REQUIRED = frozenset({"block_hashes", "token_ids", "block_size"})
_READ: dict[str, Callable[[Raw], Any]] = {
    "block_hashes": _typed(list[BlockName]),
    "parent_block_hash": _typed(BlockName | None),
    "token_ids": _token_ids,
    "block_size": _typed(int),
    "lora_id": _typed(int | None),
    "medium": _typed(str | None),
    "lora_name": _typed(str | None),
    "extra_keys": _extra_keys,
    "group_idx": _typed(int | None),
    "kv_cache_spec_kind": _typed(str | None),
    "kv_cache_spec_sliding_window": _typed(int | None),
    "locality": partial(_unneeded, str | None),
    "ownership": partial(_unneeded, str | None),
    "session_id": partial(_unneeded, str | None),
    "lookahead_token_ids": partial(_unneeded, list[int] | None),
    "cache_salt": _typed(str | None),
    "mm_keys": _typed(list[list[Raw] | None] | None),
    "skipped_parent_block_hash": _typed(BlockName | None),
    "skipped_token_ids": _typed(list[int] | None),
    "skipped_extra_keys": _typed(list[list[Raw] | None] | None),
    "remaining_copy_counts": _typed(list[int] | None),
}
assert _READ.keys() == _FIELDS.keys(), "every field of events/types.py is read"
