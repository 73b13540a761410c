"""What one publisher stream says it holds: names, presences, groups and the runs that wait for their parent.

Owns the meaning of events for one holder. Refuses to know prompts, other holders and how events are encoded.

Invariants
- A name is known while at least one (group, tier) holds a copy of it, and only then.
- `blocks[key, length][slot]` = copies held in `slot` of all names that stand for this block; never 0, never empty.
- A run is parked while neither its parent nor its own first name is known (parking.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from events.types import AllBlocksCleared, BlockName, BlockRemoved, BlockStored, Event
from reference.digest import Digester
from reference.events import (
    BLOCK_SIZE_MAX,
    is_bare,
    is_dense,
    is_opaque,
    lora_of,
    salt_of_first,
    skipped_of,
    tier_index,
)
from reference.groups import Group, GroupKey
from reference.parking import ParkedRun, Parking, Slot
from router.index.protocol import SILENT_AFTER_STORES, TIERS, DumpPart, HolderId, IngestReport

COPIES_MAX = 1 << 20
"""Of one name that a removal leaves."""
Block = tuple[int, int]
"""(digest of the prefix that ends with the block, tokens in the block)."""


class Place(NamedTuple):
    """Where a known name stands: the digest of the prefix it completes and that prefix's length in tokens."""

    key: int
    end: int


@dataclass(slots=True)
class HeldCopies:
    """Copies of one name in one slot."""

    length: int
    copies: int


@dataclass(slots=True)
class Name:
    place: Place
    copies_by_slot: dict[Slot, HeldCopies] = field(default_factory=dict)


class Holder:
    """State of one stream. All methods run under the index's lock."""

    def __init__(self, holder: HolderId, model: str, digester: Digester) -> None:
        self.id, self.model = holder, model
        self.reannounces = False
        self._digester = digester
        self.groups: dict[GroupKey, Group] = {}
        self.names: dict[int, Name] = {}
        self.blocks: dict[Block, Counter[Slot]] = {}
        self._full_stores = 0
        self._batch = 0
        self._batch_places: dict[int, Place] = {}
        self.parking = Parking()
        self.removed_keys: list[int] = []
        """Keys of the blocks that a batch removed, but those of windows."""

    def check_invariants(self) -> None:
        """Assert what the module promises; for tests."""
        blocks: dict[Block, Counter[Slot]] = {}
        for name in self.names.values():
            assert name.copies_by_slot, "a known name is held somewhere"
            for slot, held in name.copies_by_slot.items():
                assert held.copies > 0
                blocks.setdefault((name.place.key, held.length), Counter())[slot] += held.copies
        assert blocks == self.blocks
        lengths = Counter(
            (slot[0], held.length) for name in self.names.values() for slot, held in name.copies_by_slot.items()
        )
        assert lengths == Counter({(g.key, n): c for g in self.groups.values() for n, c in g.lengths.items()})
        self.parking.check_invariants()
        assert not self._batch_places

    # -- groups ------------------------------------------------------------------------------------------------

    def declare(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for group in self.groups.values():
            group.is_declared = False
        for raw in groups:
            group = self.groups.setdefault(raw.get("group_idx"), Group(raw.get("group_idx")))
            group.is_declared = True
            group.kind = raw.get("kind") or group.kind
            group.block_size = raw.get("block_size") or group.block_size
            group.window = raw.get("sliding_window") or group.window
        self.groups = {key: group for key, group in self.groups.items() if group.is_declared or group.has_events}
        self._full_stores = 0

    def is_silent(self, group: Group) -> bool:
        """Declared, never heard, while full attention spoke often enough that it would have been."""
        return group.is_declared and not group.has_events and self._full_stores >= SILENT_AFTER_STORES

    def demanding_groups(self) -> list[Group]:
        """The groups that must all be able to resume at a usable prefix."""
        groups = [group for group in self.groups.values() if group.role != "ignored" and not self.is_silent(group)]
        candidates = self._candidate_groups()
        return [group for group in groups if group.key is not None or not candidates]

    def _candidate_groups(self) -> list[Group]:
        """The groups that an event without one can be about, the likeliest first. None: it has no groups."""
        active_groups = [group for group in self.groups.values() if group.has_events and group.key is not None]
        return sorted(active_groups, key=lambda group: (not group.is_full_attention, group.key))

    def _find_group(self, names: Iterable[int]) -> Group | None:
        """That which holds the first known name; where nobody knows any, full attention's."""
        candidates = self._candidate_groups()
        for name in names:
            group_keys = {key for key, _ in self.names[name].copies_by_slot} if name in self.names else set()
            for group in candidates:
                if group.key in group_keys:
                    return group
        return candidates[0] if candidates else None

    def clear(self) -> None:
        """A new life of the stream: nothing is held, and what the events taught about groups is not trusted."""
        self.forget_blocks()
        for group in self.groups.values():
            group.has_events = group.is_sparse = False
        self.groups = {key: group for key, group in self.groups.items() if group.is_declared}
        self._full_stores = 0

    def forget_blocks(self) -> None:
        self.names.clear()
        self.blocks.clear()
        self._batch_places.clear()
        self.parking.clear()
        for group in self.groups.values():
            group.lengths.clear()

    # -- events ------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event], report: IngestReport) -> None:
        """Apply one batch. Names are resolved over each stretch between two AllBlocksCleared as a whole, because an
        event may use names that only a later event of the batch spells out."""
        self._batch += 1
        stretch: list[BlockStored | BlockRemoved] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._apply_stretch(stretch, report)
                stretch = []
                if event.medium is None:
                    self.forget_blocks()
                    report.cleared += 1
                else:
                    self._clear_tier(tier_index(event.medium), report)
            else:
                stretch.append(event)
        self._apply_stretch(stretch, report)
        self.parking.expire(self._batch)

    def _apply_stretch(self, events: list[BlockStored | BlockRemoved], report: IngestReport) -> None:
        spelt = self._place_batch(events)
        for index, event in enumerate(events):
            if isinstance(event, BlockStored):
                self._store(event, spelt.get(index), report)
            else:
                self._remove(event, report)
        self._batch_places.clear()

    def _place_batch(self, events: list[BlockStored | BlockRemoved]) -> dict[int, list[Place]]:
        """Fill `_batch_places` with the place of every block that a dense store spells out behind blocks known so far.

        Returns the places of each such store by its index. A store goes where it says itself: `_batch_places` is for
        the others, and where two stores of a batch give one name two places, the later word counts.
        """
        places_by_run: dict[int, list[Place]] = {}
        for event in events:
            # The block may leave its tier before its copy is told.
            if isinstance(event, BlockStored) and is_bare(event):
                for name in map(self._digester.name, event.block_hashes):
                    if name in self.names:
                        self._batch_places[name] = self.names[name].place
        for index, event in enumerate(events):
            places = self._place_run(event) if isinstance(event, BlockStored) and is_dense(event) else None
            if places is not None:
                places_by_run[index] = places
        return places_by_run

    def _place_run(self, run: BlockStored) -> list[Place] | None:
        start = self._start_of(run)
        if start is None:
            return None
        first, place = start
        places = [place] * first
        for index in range(first, len(run.block_hashes)):
            place = self._advance(place, run, index)
            self._batch_places[self._digester.name(run.block_hashes[index])] = place
            places.append(place)
        return places

    def _start_of(self, run: BlockStored) -> tuple[int, Place] | None:
        """(blocks of the run that are known already, where the next one begins); None where nobody knows."""
        start = self._parent_place(run)
        if start is not None:
            return 0, start
        first_place = self._place(run.block_hashes[0]) if run.block_hashes else None
        return None if first_place is None else (1, first_place)

    def _parent_place(self, run: BlockStored) -> Place | None:
        """Where the run begins: behind its parent; behind the tokens that the event says were skipped after an
        ancestor; or at the start of a prompt, also where a publisher calls that the parent 0."""
        if run.parent_block_hash is None:
            return self._root(run, salt_of_first(run))
        parent = self._place(run.parent_block_hash)
        if parent is not None:
            return parent
        skipped_tokens = skipped_of(run)
        if skipped_tokens:
            ancestor = run.skipped_parent_block_hash
            start = self._root(run, None) if ancestor is None else self._place(ancestor)
            if start is None:
                return None
            return Place(self._digester.extend(start.key, skipped_tokens)[-1], start.end + len(skipped_tokens))
        return self._root(run, salt_of_first(run)) if run.parent_block_hash == 0 else None

    def _root(self, run: BlockStored, salt: str | None) -> Place:
        salt = run.cache_salt if run.cache_salt is not None else salt
        return Place(self._digester.start(self.model, salt, lora_of(run)), 0)

    def _length_of(self, run: BlockStored, slot: Slot) -> int:
        """The length of a block that is not full yet, named at a finer boundary than the full blocks before it: it
        begins where the last full one ends. For any other run, its block size."""
        ancestor, full_length = run.skipped_parent_block_hash, len(skipped_of(run)) + run.block_size
        ancestor_name = None if ancestor is None else self.names.get(self._digester.name(ancestor))
        if (
            len(run.block_hashes) != 1
            or not skipped_of(run)
            or ancestor_name is None
            or slot not in ancestor_name.copies_by_slot
        ):
            return run.block_size
        return (
            full_length if run.block_size < ancestor_name.copies_by_slot[slot].length >= full_length else run.block_size
        )

    def _place(self, engine_hash: BlockName) -> Place | None:
        name = self._digester.name(engine_hash)
        place = self._batch_places.get(name)
        if place is None:
            entry = self.names.get(name)
            place = None if entry is None else entry.place
        return place

    def _advance(self, place: Place, run: BlockStored, index: int) -> Place:
        size = run.block_size
        key = self._digester.make_opaque(place.key) if is_opaque(run, index, place.end) else place.key
        tokens = run.token_ids[index * size : (index + 1) * size]
        return Place(self._digester.extend(key, tokens)[-1], place.end + size)

    # -- stores ------------------------------------------------------------------------------------------------

    def _store(self, event: BlockStored, places: list[Place] | None, report: IngestReport) -> None:
        names = [self._digester.name(engine_hash) for engine_hash in event.block_hashes]
        if is_bare(event):
            stored_names = self._store_copies(event, names)
            report.unknown_copies += len(names) - len(stored_names)
        else:
            group = self._find_group(names) if event.group_idx is None else None
            if group is None:
                group = self._update_group(event)
                group.is_sparse |= not is_dense(event)
            slot = (group.key, tier_index(event.medium))
            if places is None and is_dense(event):  # its parent may have been stored since
                places = self._place_run(event)
            if places is None:
                stored_names = self._store_unresolved(event, names, slot, group, report)
            else:
                length = self._length_of(event, slot)
                for name, place in zip(names, places):
                    self._add(name, place, slot, length, group)
                stored_names = names
        report.stored += len(stored_names)
        self._attach_waiting(stored_names, report)

    def _store_copies(self, event: BlockStored, names: list[int]) -> list[int]:
        """Names without tokens are copies of known blocks. Returns those; the others say nothing and do not wait."""
        stored_names = []
        for name in names:
            place = self._place(name)
            group = (self._find_group([name]) if event.group_idx is None else None) or self.groups.get(event.group_idx)
            if place is None or group is None:
                continue
            held = self.names[name].copies_by_slot if name in self.names else {}
            lengths = [held[group.key, tier].length for tier in range(len(TIERS)) if (group.key, tier) in held]
            length = lengths[0] if lengths else event.block_size or group.block_size or 0
            if 0 < length <= min(place.end, BLOCK_SIZE_MAX):
                self._add(name, place, (group.key, tier_index(event.medium)), length, group)
                stored_names.append(name)
        return stored_names

    def _store_unresolved(
        self, event: BlockStored, names: list[int], slot: Slot, group: Group, report: IngestReport
    ) -> list[int]:
        """A sparse store, or a dense one that hangs in the air. Returns the names whose place is known."""
        dense = is_dense(event)
        unknown_names = [name for name in names if self._place(name) is None]
        if (
            unknown_names
            and not dense
            and group.role == "state"
            and len(names) == 1
            and not self._knows_full_attention()
        ):
            self._batch_places.update(self._place_of_last(event, names[0]))
            unknown_names = [name for name in names if self._place(name) is None]
        if unknown_names and dense:
            waits = [self._place(name) is None for name in names]
            awaited_name = names[0] if event.parent_block_hash is None else self._digester.name(event.parent_block_hash)
            self.parking.park(ParkedRun(slot, names, waits, event.block_size, awaited_name, event, self._batch))
            report.parked += sum(waits)
        stored_names = []
        for name in names:
            place = self._place(name)
            if place is not None:
                self._add(name, place, slot, event.block_size, group)
                stored_names.append(name)
            elif not dense:
                self.parking.park(ParkedRun(slot, [name], [True], event.block_size, name, None, self._batch))
                report.parked += 1
        return stored_names

    def _update_group(self, event: BlockStored) -> Group:
        group = self.groups.get(event.group_idx)
        if group is None:
            group = self.groups[event.group_idx] = Group(event.group_idx)
        group.has_events = True
        group.kind = event.kv_cache_spec_kind or group.kind
        group.block_size = event.block_size
        if event.kv_cache_spec_sliding_window is not None and event.kv_cache_spec_sliding_window > 0:
            group.window = event.kv_cache_spec_sliding_window
        if group.is_full_attention:
            self._full_stores += 1
        return group

    def _knows_full_attention(self) -> bool:
        return any(group.is_full_attention for group in self.groups.values())

    def _place_of_last(self, event: BlockStored, name: int) -> dict[int, Place]:
        """A state event with one hash names the end of its tokens; for models without full attention to say so."""
        start = self._start_of(event)
        if start is None or start[0] != 0:
            return {}
        key = self._digester.extend(start[1].key, event.token_ids)[-1]
        return {name: Place(key, start[1].end + len(event.token_ids))}

    def _add(self, name: int, place: Place, slot: Slot, length: int, group: Group) -> None:
        entry = self.names.get(name)
        if entry is not None and entry.place != place:
            self._forget_name(name, entry)  # the engine gave the name to another block: the newest word counts
            entry = None
        if entry is None:
            entry = self.names[name] = Name(place)
            copies = None
        else:
            copies = entry.copies_by_slot.get(slot)
        if copies is None:
            entry.copies_by_slot[slot] = HeldCopies(length, 1)
            self._count(place.key, length, slot, +1, group)
            return
        if copies.length != length:
            self._count(place.key, copies.length, slot, -copies.copies, group)
            self._count(place.key, length, slot, copies.copies, group)
            copies.length = length
        if not self.reannounces:
            copies.copies += 1
            self.blocks[place.key, length][slot] += 1

    def _count(self, key: int, length: int, slot: Slot, copies: int, group: Group) -> None:
        """Add (or take away) all `copies` of one name in one slot."""
        block = self.blocks.setdefault((key, length), Counter())
        block[slot] += copies
        group.lengths[length] += 1 if copies > 0 else -1
        if block[slot] == 0:
            del block[slot]
            if not block:
                del self.blocks[key, length]
        if group.lengths[length] == 0:
            del group.lengths[length]

    def _forget_name(self, name: int, entry: Name) -> None:
        for slot, copies in entry.copies_by_slot.items():
            self._count(entry.place.key, copies.length, slot, -copies.copies, self.groups[slot[0]])
        del self.names[name]

    def load(self, part: DumpPart, rows: Sequence[tuple[int, ...]]) -> IngestReport:
        """Take over blocks from another index with the same seed: (name, key, end, length, copies) each."""
        group = self.groups.setdefault(part["group_idx"], Group(part["group_idx"]))
        group.has_events |= part["announced"]
        group.kind = part["kind"] or group.kind
        group.block_size = part["block_size"] or group.block_size
        group.window = part["sliding_window"] or group.window
        group.is_sparse |= part["sparse"]
        names = []
        for name, key, end, length, copies in rows:
            for _ in range(copies):
                self._add(name, Place(key, end), (group.key, part["tier"]), length, group)
            names.append(name)
        report = IngestReport(stored=len(rows))
        self._attach_waiting(names, report)
        self._batch_places.clear()
        return report

    # -- removals ----------------------------------------------------------------------------------------------

    def _clear_tier(self, tier: int, report: IngestReport) -> None:
        """Everything on one tier left."""
        name_slots = [
            (name, slot) for name, entry in self.names.items() for slot in entry.copies_by_slot if slot[1] == tier
        ]
        for name, slot in name_slots:
            self._remove_copies(name, slot, 0)
        report.removed += len(name_slots)
        self.parking.clear_tier(tier)

    def _remove(self, event: BlockRemoved, report: IngestReport) -> None:
        keys = [event.group_idx]
        if event.group_idx is None:
            keys += [group.key for group in self._candidate_groups()]
        slots = [(key, tier_index(event.medium)) for key in keys]
        counts = event.remaining_copy_counts or [None] * len(event.block_hashes)
        for name, copies_left in zip(map(self._digester.name, event.block_hashes), counts):
            if any(self._remove_copies(name, slot, copies_left) or self.parking.cancel(slot, name) for slot in slots):
                report.removed += 1
            else:
                report.unknown_removals += 1

    def _remove_copies(self, name: int, slot: Slot, copies_left: int | None = None) -> bool:
        """`left` copies of the name stay in the slot, or one fewer than before; False where it is not there."""
        entry = self.names.get(name)
        held_copies = None if entry is None else entry.copies_by_slot.get(slot)
        if entry is None or held_copies is None:
            return False
        copies = (
            held_copies.copies - 1 if copies_left is None else min(copies_left, 1 if self.reannounces else COPIES_MAX)
        )
        if copies > 0:
            self.blocks[entry.place.key, held_copies.length][slot] += copies - held_copies.copies
            held_copies.copies = copies
            return True
        self._count(entry.place.key, held_copies.length, slot, -held_copies.copies, self.groups[slot[0]])
        if self.groups[slot[0]].role in ("full", "state"):
            self.removed_keys.append(entry.place.key)
        del entry.copies_by_slot[slot]
        if not entry.copies_by_slot:
            del self.names[name]
        return True

    # -- attaching --------------------------------------------------------------------------------------------

    def _attach_waiting(self, names: Iterable[int], report: IngestReport) -> None:
        """The places of `names` are known now: attach what waited for them, and what waited for that."""
        stack = list(names)
        while stack:
            for run in self.parking.release(stack.pop()):
                attached_names = self._attach(run)
                report.stored += len(attached_names)
                stack.extend(attached_names)

    def _attach(self, parked: ParkedRun) -> list[int]:
        group = self.groups[parked.slot[0]]
        if parked.run is not None:
            self._place_run(parked.run)
        attached_names = []
        for name, is_waiting in zip(parked.names, parked.is_waiting):
            place = self._place(name)
            if is_waiting and place is not None:
                self._add(name, place, parked.slot, parked.length, group)
                attached_names.append(name)
        return attached_names
