"""A holder of the reference index as `BlockDigests`, and back (the format: router/index/native/event_digests.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from reference.digest import Digester
from reference.events import tier_index
from reference.groups import DumpGroup, Group
from reference.holder import Holder
from router.index.protocol import TIERS, IngestReport

BLOCKS_PER_CHUNK = 4_096


class BlockDigests(msgspec.Struct, tag_field="type", tag="BlockDigests"):
    fingerprint: int
    group: DumpGroup
    medium: str
    blocks: list[tuple[int, int, int, int, int]]


class DumpBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockDigests]
    data_parallel_rank: int | None = None


def encode_dump(fingerprint: int, groups: list[DumpGroup], blocks: Iterator[tuple[int, int, Any]]) -> list[bytes]:
    """Payload chunks from (index into `groups`, tier, block row). Each group appears, also where it holds nothing."""
    rows: dict[tuple[int, int], list[Any]] = {(index, 0): [] for index in range(len(groups))}
    for index, tier, row in blocks:
        rows.setdefault((index, tier), []).append(row)
    chunks = []
    for (index, tier), held in rows.items():
        for at in range(0, len(held) or 1, BLOCKS_PER_CHUNK):
            event = BlockDigests(fingerprint, groups[index], TIERS[tier], held[at : at + BLOCKS_PER_CHUNK])
            chunks.append(msgspec.msgpack.encode(DumpBatch(0.0, [event])))
    return chunks


_MARK = b"\xa4type\xacBlockDigests"
_MARK_WINDOW_BYTES = 64
_DECODER = msgspec.msgpack.Decoder(DumpBatch)


def is_dump(payload: bytes) -> bool:
    """Does the payload hold a BlockDigests event? Looks at the head only: no ordinary batch has the mark there."""
    return _MARK in payload[:_MARK_WINDOW_BYTES]


def dump_holder(holder: Holder, digester: Digester) -> list[bytes]:
    groups = [group for group in holder.groups.values() if group.has_events or group.lengths]
    index_of = {group.key: index for index, group in enumerate(groups)}

    def rows() -> Iterator[tuple[int, int, Any]]:
        for name, known in holder.names.items():
            for (key, tier), held in known.copies_by_slot.items():
                yield index_of[key], tier, (name, known.place.key, known.place.end, held.length, held.copies)

    return encode_dump(digester.fingerprint, [_dump_group(group) for group in groups], rows())


def _dump_group(group: Group) -> DumpGroup:
    return DumpGroup(group.key, group.kind, group.block_size, group.window, group.is_sparse, group.has_events)


def load_dump(holder: Holder, payload: bytes, digester: Digester, report: IngestReport) -> None:
    """Add a chunk to what the holder holds."""
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        report.malformed.append(f"unreadable BlockDigests of {len(payload)} bytes: {error}")
        return
    for event in batch.events:
        if event.fingerprint != digester.fingerprint:
            report.malformed.append("BlockDigests.fingerprint is of another seed: this index cannot use it")
            continue
        holder.load(event.group, tier_index(event.medium), event.blocks)
        report.stored += len(event.blocks)
