"""What is on the disk under the cache: blocks of full attention by name, each in a slot, with the block before it.

A prefix tree of its own, closed under parents by itself: a block is here only while the one before it is, so what is
here can be used whatever memory holds, also after a restart. Ends of paths leave first, the one used longest ago.

Pure: knows no files, threads and memory. Invariants: a name is found by its hash and checked against its token ids,
keys and parent; a slot belongs to one entry, also to one that was forgotten while its slot is written; only a written
entry is found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.nodes import DiskBlock, HashBlock


@dataclass(frozen=True, slots=True)
class Found:
    """What an earlier process wrote to a slot."""

    slot: int
    serial: int
    parent_serial: int | None
    name: HashBlock


class DiskIndex:
    """Of `slots` slots."""

    def __init__(self, slots: int, found: Iterable[Found] = ()) -> None:
        """`found`: what lies there already. What has no parent any more is left out, and of two of a name the older."""
        assert slots > 0
        self.slots = slots
        self._entries: dict[int, DiskBlock] = {}
        self._ends: list[tuple[int, int, DiskBlock]] = []
        """(stamp, slot, entry) of ends of paths, those that are none any more among them."""
        self._clock = 0
        self._restore([one for one in found if one.slot < slots])
        taken = {entry.slot for entry in self._entries.values()}
        self._fresh = max(taken, default=-1) + 1
        """Slots from here on were never anybody's."""
        self._free = [slot for slot in range(self._fresh - 1, -1, -1) if slot not in taken]
        """And of those before, these are nobody's."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Slots that are somebody's."""
        return self._fresh - len(self._free)

    def __iter__(self) -> Iterator[DiskBlock]:
        """Parents before children."""
        return iter(self._entries.values())

    def by_path(self) -> Iterator[DiskBlock]:
        """Parents before children, and each path in one go."""
        ahead = [entry for entry in self._entries.values() if entry.parent is None]
        while ahead:
            entry = ahead.pop()
            yield entry
            ahead.extend(entry.children.values())

    def find(self, name: HashBlock, parent: DiskBlock | None) -> DiskBlock | None:
        """The entry of that name below `parent`, verified: equal hash, tokens, keys and parent; written or not."""
        entry = self._entries.get(name.hash)
        if entry is None or entry.parent is not parent or not entry.name.equals(name):
            return None
        return entry

    def is_taken(self, hash_: int) -> bool:
        """Whether an entry of that hash is here, of whatever prefix."""
        return hash_ in self._entries

    def match(self, names: Iterable[HashBlock]) -> list[DiskBlock]:
        """The longest chain of written entries for `names`."""
        found: list[DiskBlock] = []
        parent: DiskBlock | None = None
        for name in names:
            entry = self.find(name, parent)
            if entry is None or not entry.written:
                break
            found.append(entry)
            parent = entry
        return found

    def touch(self, entries: Sequence[DiskBlock]) -> None:
        """They were asked for."""
        self._clock += 1
        for entry in entries:
            entry.stamp = self._clock
            self._consider(entry)

    def add(self, name: HashBlock, parent: DiskBlock | None, evicted: list[DiskBlock]) -> DiskBlock | None:
        """An entry that is about to be written, below `parent`; what goes for it is added to `evicted`.

        None where the hash is taken, or nothing can go.
        """
        if name.hash in self._entries or (parent is not None and parent.forgotten):
            return None
        if parent is not None:
            parent.pins += 1
        victim = None if self._has_room else self._oldest_end()
        if parent is not None:
            parent.pins -= 1
            self._consider(parent)
        if victim is not None:
            evicted += self.forget(victim)
        if not self._has_room:
            return None
        if not self._free:
            self._free.append(self._fresh)
            self._fresh += 1
        self._clock += 1
        return self._insert(DiskBlock(name, parent, self._free.pop(), self._clock))

    def written(self, entry: DiskBlock) -> None:
        """Its bytes are on the disk."""
        assert not entry.written
        assert not entry.forgotten
        assert entry.parent is None or entry.parent.written
        entry.written = True
        self._consider(entry)

    def pin(self, entry: DiskBlock) -> None:
        entry.pins += 1

    def unpin(self, entry: DiskBlock) -> None:
        entry.pins -= 1
        self._consider(entry)

    def forget(self, entry: DiskBlock) -> list[DiskBlock]:
        """Forget it and what hangs from it. Returns those that were written, children first.

        The slot of one that is being written is not free before `released`.
        """
        below = self._drop(entry)
        self._free.extend(one.slot for one in below if one.written)
        if entry.parent is not None:
            entry.parent.stamp = max(entry.parent.stamp, entry.stamp)
            self._consider(entry.parent)
        return [one for one in below if one.written]

    def released(self, entry: DiskBlock) -> None:
        """Nothing writes any more for this one, which was forgotten before it was written."""
        assert entry.forgotten
        assert not entry.written
        self._free.append(entry.slot)

    def clear(self) -> None:
        """Forget all; slots of what is being written are not free before `released`."""
        for entry in self._entries.values():
            entry.forgotten = True
            if entry.written:
                self._free.append(entry.slot)
        self._entries.clear()
        self._ends.clear()

    # ------------------------------------------------------------------ inside

    @property
    def _has_room(self) -> bool:
        return bool(self._free) or self._fresh < self.slots

    def _restore(self, found: list[Found]) -> None:
        by_serial: dict[int, DiskBlock] = {}
        slots: set[int] = set()
        for one in sorted(found, key=lambda one: one.serial):
            self._clock = max(self._clock, one.serial)
            parent = None if one.parent_serial is None else by_serial.get(one.parent_serial)
            if one.slot in slots or one.serial in by_serial or (parent is None and one.parent_serial is not None):
                continue
            if one.name.hash in self._entries:  # forgotten, and written again since
                for entry in self._drop(self._entries[one.name.hash]):
                    slots.discard(entry.slot)
                    del by_serial[entry.serial]
                if parent is not None and parent.forgotten:
                    continue
            entry = by_serial[one.serial] = self._insert(DiskBlock(one.name, parent, one.slot, one.serial))
            entry.written = True
            slots.add(one.slot)
        for entry in self._entries.values():
            self._consider(entry)

    def _drop(self, entry: DiskBlock) -> list[DiskBlock]:
        """Take it and what hangs from it out, children first."""
        below = [entry]
        for one in below:
            below.extend(one.children.values())
        below.reverse()
        for one in below:
            del self._entries[one.hash]
            one.forgotten = True
        if entry.parent is not None:
            del entry.parent.children[entry.hash]
        return below

    def _insert(self, entry: DiskBlock) -> DiskBlock:
        self._entries[entry.hash] = entry
        if entry.parent is not None:
            entry.parent.children[entry.hash] = entry
        return entry

    def _consider(self, entry: DiskBlock) -> None:
        if not _can_go(entry):
            return
        heapq.heappush(self._ends, (entry.stamp, entry.slot, entry))
        if len(self._ends) > 2 * len(self._entries) + 64:
            latest = {entry: stamp for stamp, _, entry in self._ends if _is_current(stamp, entry)}
            self._ends = [(stamp, entry.slot, entry) for entry, stamp in latest.items()]
            heapq.heapify(self._ends)

    def _oldest_end(self) -> DiskBlock | None:
        while self._ends:
            stamp, _, entry = heapq.heappop(self._ends)
            if _is_current(stamp, entry):
                return entry
        return None

    # ------------------------------------------------------------------ proof

    def check_invariants(self, being_written: Iterable[DiskBlock]) -> None:
        """`being_written`: each entry once."""
        unwritten = list(being_written)
        slots = [entry.slot for entry in self._entries.values() if entry.written] + [e.slot for e in unwritten]
        assert sorted(slots + self._free) == list(range(self._fresh))
        assert self._fresh <= self.slots
        assert {e for e in self._entries.values() if not e.written} == {e for e in unwritten if not e.forgotten}
        queued = {(stamp, entry) for stamp, _, entry in self._ends}
        for hash_, entry in self._entries.items():
            assert hash_ == entry.hash == entry.name.hash
            assert not entry.forgotten
            assert entry.pins >= 0
            if entry.parent is not None:
                assert self._entries.get(entry.parent.hash) is entry.parent, "prefix closure"
                assert entry.parent.children.get(hash_) is entry
                assert entry.parent.written or not entry.written
            assert all(child.parent is entry for child in entry.children.values())
            assert not _can_go(entry) or (entry.stamp, entry) in queued, "an end that would never go"
        assert len(self._ends) <= 2 * len(self._entries) + 65


def _can_go(entry: DiskBlock) -> bool:
    return entry.written and not entry.children and not entry.pins and not entry.forgotten


def _is_current(stamp: int, entry: DiskBlock) -> bool:
    return entry.stamp == stamp and _can_go(entry)
