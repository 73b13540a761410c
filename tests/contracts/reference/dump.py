"""Content of a holder of the reference index as parts of a dump (router/index/protocol.py:DumpPart), and back."""

from __future__ import annotations

import struct

from reference.digest import Digester
from reference.events import BLOCK_SIZE_MAX
from reference.holder import Holder
from router.index.protocol import DumpPart, IngestReport

ROW = struct.Struct("5Q")


def dump_holder(holder: Holder, digester: Digester) -> list[DumpPart]:
    """One part for each tier of a group that has blocks; each group appears, also where it holds nothing."""
    groups = [group for group in holder.groups.values() if group.has_events or group.lengths]
    rows = {(group.key, 0): b"" for group in groups}
    for name, known in holder.names.items():
        for slot, held in known.copies_by_slot.items():
            row = ROW.pack(name, known.place.key, known.place.end, held.length, held.copies)
            rows[slot] = rows.get(slot, b"") + row
    return [
        DumpPart(
            fingerprint=digester.fingerprint,
            group_idx=key,
            kind=holder.groups[key].kind,
            block_size=holder.groups[key].block_size,
            sliding_window=holder.groups[key].window,
            announced=holder.groups[key].has_events,
            sparse=holder.groups[key].is_sparse,
            tier=tier,
            rows=held_rows,
        )
        for (key, tier), held_rows in rows.items()
    ]


def load_part(holder: Holder, part: DumpPart, digester: Digester) -> IngestReport:
    """Add a part to what the holder holds."""
    if part["fingerprint"] != digester.fingerprint:
        return IngestReport(malformed_events=1, malformed=["the dump is of another seed: this index cannot use it"])
    rows = list(ROW.iter_unpack(part["rows"]))
    if any(not 0 < length <= BLOCK_SIZE_MAX for _, _, _, length, _ in rows):
        return IngestReport(malformed_events=1, malformed=["a dump has a row that is out of range, or too many rows"])
    return holder.load(part, rows)
