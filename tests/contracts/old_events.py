"""Event batches as vLLM wrote them before June 2026: each event is an array, not a map."""

from __future__ import annotations

import msgspec

from events.types import BlockRemoved, BlockStored, Event, EventBatch

_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": BlockStored.__struct_fields__[: BlockStored.__struct_fields__.index("locality")],
    "BlockRemoved": BlockRemoved.__struct_fields__[: BlockRemoved.__struct_fields__.index("locality")],
    "AllBlocksCleared": (),
}
"""Fields that the last vLLM which wrote arrays (0.23) put into them. Absent values are nil."""


def encode_as_arrays(batch: EventBatch) -> bytes:
    """Encode `batch` as vLLM 0.23 does."""
    return msgspec.msgpack.encode([batch.ts, [_array(event) for event in batch.events], batch.data_parallel_rank])


def _array(event: Event) -> list[object]:
    name = type(event).__name__
    return [name, *(getattr(event, field) for field in _FIELDS[name])]
