"""The index's truth: a plain-Python PrefixIndex that says what the native one (router/index/native) must do.

It passes the same contract and is compared with the native one call by call (test_index_lockstep.py) and payload by
payload (test_native_fuzz.py). The meaning of events is in holder.py, the arithmetic of a usable prefix in match.py.
"""

from __future__ import annotations

import itertools
import sys
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from events.codec import decode_batch
from events.types import DecodeError
from reference.digest import Digester
from reference.dump import dump_holder, load_part
from reference.events import check_event
from reference.holder import Holder
from reference.match import Pins, cut_of, match_holder
from router.index.protocol import (
    DumpPart,
    HolderId,
    IndexStats,
    IngestReport,
    Match,
    PinId,
    PreparedPrompt,
    Scope,
    Tokens,
)

PROBLEMS_MAX = 16


class IngestStep:
    """A payload that is applied in one step."""

    def __init__(self, index: ReferenceIndex, holder: HolderId, payload: bytes, now_s: float) -> None:
        self._work = (index, holder, payload, now_s)
        self.report = IngestReport()

    def step(self) -> bool:
        index, *work = self._work
        self.report = index.ingest(*work)
        return False


class Slices:
    """A dump that is made already."""

    def __init__(self, slices: list[list[DumpPart]]) -> None:
        self._slices = slices

    def step(self) -> list[DumpPart] | None:
        return self._slices.pop(0) if self._slices else None


class ReferenceIndex:
    """PrefixIndex in plain Python. One lock; every call is atomic."""

    def __init__(self, seed: int | None = None) -> None:
        self._digester = Digester(seed)
        self._lock = threading.RLock()
        self._holders: dict[HolderId, Holder] = {}
        self._pins: dict[HolderId, Pins] = {}
        self._removed_prefixes: dict[int, tuple[HolderId, float]] = {}
        self._pinned_prompts: dict[PinId, tuple[HolderId, list[int], int | None]] = {}
        self._holder_ids: Iterator[int] = itertools.count()
        self._pin_ids: Iterator[int] = itertools.count()

    @property
    def seed(self) -> int:
        return self._digester.seed

    def add_holder(self, model: str) -> HolderId:
        with self._lock:
            holder = HolderId(next(self._holder_ids))
            self._holders[holder] = Holder(holder, model, self._digester)
            self._pins[holder] = Pins()
            return holder

    def remove_holder(self, holder: HolderId) -> None:
        with self._lock:
            self._get(holder)
            del self._holders[holder], self._pins[holder]
            self._pinned_prompts = {pin: entry for pin, entry in self._pinned_prompts.items() if entry[0] != holder}

    def clear(self, holder: HolderId) -> None:
        with self._lock:
            self._get(holder).clear()

    def declare_groups(self, holder: HolderId, groups: Sequence[Mapping[str, object]]) -> None:
        with self._lock:
            self._get(holder).declare(groups)

    def set_reannounces(self, holder: HolderId, reannounces: bool) -> None:
        with self._lock:
            self._get(holder).reannounces = reannounces

    def begin_ingest(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestStep:
        return IngestStep(self, holder, payload, now_s)

    def ingest(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestReport:
        with self._lock:
            removed_keys = self._get(holder).removed_keys
            report = self._ingest(holder, payload)
            self._removed_prefixes.update(dict.fromkeys(removed_keys, (holder, now_s)))
            removed_keys.clear()
        report.malformed_events = len(report.malformed)
        del report.malformed[PROBLEMS_MAX:]
        return report

    def _ingest(self, holder: HolderId, payload: bytes) -> IngestReport:
        report = IngestReport()
        with self._lock:
            state = self._get(holder)
            try:
                result = decode_batch(payload)
            except DecodeError as error:
                report.malformed.append(str(error))
                return report
            report.malformed.extend(result.errors)
            report.unknown_events = sum(result.unknown_type_counts.values())
            events = []
            for event in result.batch.events:
                error_text = check_event(event)
                if error_text is None:
                    events.append(event)
                else:
                    report.malformed.append(error_text)
            state.apply(events, report)
        return report

    def prepare(self, token_ids: Sequence[int] | bytes, similar: PreparedPrompt | None = None) -> PreparedPrompt:
        return as_token_list(token_ids)

    def count_common_tokens(self, token_ids: Sequence[int], others: Sequence[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(token_ids, others)) if a != b), min(len(token_ids), len(others)))

    def match(
        self, token_ids: Tokens, scope: Scope, order: Sequence[HolderId] | None = None, max_rivals: int = 1
    ) -> list[Match]:
        matches = self._match(token_ids, scope)
        if order is None:
            return matches
        if max_rivals < 1:
            raise ValueError(f"max_rivals is {max_rivals}: expected at least 1")
        match_by_holder = {match.holder: match for match in matches}
        tokens = [match_by_holder[holder].pinned_tokens if holder in match_by_holder else 0 for holder in order]
        better_counts = [sum(other_tokens >= tokens[i] for other_tokens in tokens[:i]) for i in range(len(tokens))]
        return [
            match_by_holder[holder] for i, holder in enumerate(order) if tokens[i] and better_counts[i] < max_rivals
        ]

    def _match(self, token_ids: Tokens, scope: Scope) -> list[Match]:
        with self._lock:
            holders = [holder for holder in self._holders.values() if holder.model == scope.model]
            if not any(holder.blocks or self._pins[holder.id] for holder in holders):
                return []
            prefixes = self._digester.prefixes(as_token_list(token_ids), scope)
            matches = (match_holder(holder, self._pins[holder.id], prefixes) for holder in holders)
            return [match for match in matches if match is not None]

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        if chunk_tokens < 1:
            raise ValueError(f"chunk is {chunk_tokens}: expected at least 1")
        return self._digester.prefixes(as_token_list(token_ids), scope)[chunk_tokens:-1:chunk_tokens]

    def find_lost_blocks(
        self, token_ids: Tokens, scope: Scope, start: int, step: int
    ) -> tuple[int, HolderId, float] | None:
        if step < 1:
            raise ValueError(f"step is {step}: expected at least 1")
        with self._lock:
            prefixes = self._digester.prefixes(as_token_list(token_ids), scope)
            ends = list(range(start - start % step + step, len(prefixes) - 1, step))
            removed_ends = list(itertools.takewhile(lambda end: prefixes[end] in self._removed_prefixes, ends))
            return (removed_ends[-1], *self._removed_prefixes[prefixes[removed_ends[0]]]) if removed_ends else None

    def pin(self, holder: HolderId, token_ids: Tokens, scope: Scope) -> PinId:
        with self._lock:
            state = self._get(holder)
            prefixes = self._digester.prefixes(as_token_list(token_ids), scope)
            cut = cut_of(state)
            boundaries = prefixes[cut::cut]
            last = (len(prefixes) - 2) // cut * cut
            checkpoint = prefixes[last] if last > 0 else None
            pin = PinId(next(self._pin_ids))
            self._pinned_prompts[pin] = (holder, boundaries, checkpoint)
            self._pins[holder].add(boundaries, checkpoint, +1)
            return pin

    def unpin(self, pin: PinId) -> None:
        with self._lock:
            entry = self._pinned_prompts.pop(pin, None)
            if entry is not None:
                holder, boundaries, checkpoint = entry
                self._pins[holder].add(boundaries, checkpoint, -1)

    def stats(self) -> IndexStats:
        with self._lock:
            return IndexStats(
                holders=len(self._holders),
                entries=sum(
                    len(name.copies_by_slot) for holder in self._holders.values() for name in holder.names.values()
                ),
                parked=sum(holder.parking.blocks for holder in self._holders.values()),
                pins=len(self._pinned_prompts),
                memory_bytes=sum(_memory(holder) for holder in self._holders.values()),
            )

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        with self._lock:
            state = self._get(holder)
            return [
                {
                    "group_idx": group.key,
                    "kind": group.kind,
                    "block_size": group.block_size,
                    "sliding_window": group.window,
                    "blocks": group.lengths.total(),
                    "silent": state.is_silent(group),
                }
                for group in sorted(state.groups.values(), key=lambda group: -1 if group.key is None else group.key)
            ]

    def held_tokens(self, holder: HolderId) -> int:
        with self._lock:
            groups = self._get(holder).groups.values()
            return max((sum(length * n for length, n in group.lengths.items()) for group in groups), default=0)

    def begin_dump(self, holder: HolderId) -> Slices:
        with self._lock:
            return Slices([dump_holder(self._get(holder), self._digester)])

    def load(self, holder: HolderId, part: DumpPart) -> IngestReport:
        with self._lock:
            return load_part(self._get(holder), part, self._digester)

    def check_invariants(self) -> None:
        """Assert what holder.py promises; for tests."""
        with self._lock:
            for holder in self._holders.values():
                holder.check_invariants()

    def _get(self, holder: HolderId) -> Holder:
        try:
            return self._holders[holder]
        except KeyError:
            raise KeyError(f"holder {holder} is not in the index (removed?)") from None


def as_token_list(prompt: Tokens) -> Sequence[int]:
    """Token ids from a sequence or from little-endian uint32 bytes. Raises ValueError for what is no token id."""
    token_ids = cast("Sequence[int] | bytes", prompt)  # a PreparedPrompt of the reference index is a sequence
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        if len(token_ids) % 4:
            raise ValueError(f"token bytes: length {len(token_ids)} is not a multiple of 4")
        words = array("I", bytes(token_ids))
        if sys.byteorder == "big":
            words.byteswap()
        return words
    for index, token in enumerate(token_ids):
        if not 0 <= token < 1 << 32:
            raise ValueError(f"token_ids[{index}] is {token}: expected 0 <= id < 2^32")
    return token_ids


def _memory(holder: Holder) -> int:
    """Estimate: the dictionaries plus the usual size of what one name and one block hang on."""
    tables: tuple[dict[Any, Any], ...] = (holder.names, holder.blocks)
    waiting = 1_000 * holder.parking.blocks
    return sum(sys.getsizeof(table) for table in tables) + 460 * len(holder.names) + 350 * len(holder.blocks) + waiting
