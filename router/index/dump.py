"""A holder's content as event-batch payloads of digests: what one router gives another that has just started.

Owns the private event type `BlockDigests`. It stands in an ordinary batch `[ts, [event], nil]`, so it travels like any
payload; readers that do not know it count and skip it. The index keeps no token ids, so only an index with the same
seed can read it; the fingerprint tells.

    {"type": "BlockDigests", "fingerprint": u64, "group": {group_idx, kind, block_size, sliding_window, sparse},
     "medium": str, "blocks": [[name u64, key u61, end, length, copies], ...]}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from router.index.protocol import TIERS

BLOCKS_PER_CHUNK = 4_096


class DumpGroup(msgspec.Struct):
    group_idx: int | None
    kind: str | None
    block_size: int | None
    sliding_window: int | None
    sparse: bool


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
