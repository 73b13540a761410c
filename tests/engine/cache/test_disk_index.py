"""The disk's index in lockstep with a model that recomputes everything from a list of paths."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.cache.disk.index import DiskIndex, Found
from engine.cache.nodes import DiskBlock, HashBlock
from events.hashing import block_hash, pack_token_ids

Path = tuple[int, ...]


def name(path: Path) -> HashBlock:
    parent = None
    for token in path[:-1]:
        parent = block_hash(parent, [token])
    return HashBlock(block_hash(parent, [path[-1]]), pack_token_ids([path[-1]]), None, None)


@dataclass
class Known:
    entry: DiskBlock
    stamp: int
    written: bool = False
    pins: int = 0


class Lockstep:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.slots = self.rng.choice([1, 2, 5, 12])
        self.index = DiskIndex(self.slots)
        self.model: dict[Path, Known] = {}
        self.lost: list[DiskBlock] = []
        """Forgotten while they were written: they have a slot still."""
        self.disk: dict[int, Found] = {}
        """What a later process would find."""

    def below(self, path: Path) -> list[Path]:
        return [other for other in self.model if other[: len(path)] == path]

    def victims(self, spared: Path) -> list[Path]:
        """Ends that may go, the one that must go first."""
        ends = [
            path for path, known in self.model.items()
            if known.written and not known.pins and path != spared and self.below(path) == [path]
        ]  # fmt: skip
        return sorted(ends, key=lambda path: self.model[path].stamp)

    def now(self) -> int:
        return max([known.stamp for known in self.model.values()], default=0)

    def step(self) -> None:
        acts = [self.add, self.add, self.add, self.write, self.write, self.fail, self.touch, self.pin, self.unpin,
                self.forget, self.release, self.match, self.match]  # fmt: skip
        if self.rng.random() < 0.02:
            acts = [self.clear, self.restart]
        self.rng.choice(acts)()
        self.check()

    def some(self, *, written: bool | None = None) -> Path | None:
        paths = [p for p, known in self.model.items() if written is None or known.written == written]
        return self.rng.choice(paths) if paths else None

    def gone(self, path: Path) -> list[Path]:
        """Take it out of the model; those that were written, in any order."""
        told = []
        above = self.model.get(path[:-1])
        if above is not None:
            above.stamp = max(above.stamp, self.model[path].stamp)
        for other in self.below(path):
            known = self.model.pop(other)
            if known.written:
                told.append(other)
            else:
                self.lost.append(known.entry)
        return told

    def add(self) -> None:
        path = (*(self.some() or ()), self.rng.randint(0, 2)) if self.rng.random() < 0.9 else (self.rng.randint(0, 2),)
        parent = self.model[path[:-1]].entry if path[:-1] else None
        is_full = len(self.model) + len(self.lost) == self.slots
        victims, evicted = self.victims(path[:-1]) if is_full else [], []
        entry = self.index.add(name(path), parent, evicted)
        if path in self.model:
            assert entry is None
            assert not evicted
            return
        assert (entry is None) == (is_full and not victims)
        assert [one.hash for one in evicted] == [name(victim).hash for victim in victims[:1]]
        for victim in victims[:1]:
            self.gone(victim)
        if entry is not None:
            assert all(entry.serial > known.stamp for known in self.model.values())
            self.model[path] = Known(entry, entry.serial)

    def write(self) -> None:
        ready = [p for p, k in self.model.items() if not k.written and (len(p) == 1 or self.model[p[:-1]].written)]
        if ready:
            path = self.rng.choice(ready)
            known = self.model[path]
            self.index.written(known.entry)
            known.written = True
            parent = known.entry.parent
            serial = None if parent is None else parent.serial
            self.disk[known.entry.slot] = Found(known.entry.slot, known.entry.serial, serial, known.entry.name)

    def fail(self) -> None:
        path = self.some(written=False)
        if path is not None:
            assert self.index.forget(self.model[path].entry) == []
            assert self.gone(path) == []

    def forget(self) -> None:
        path = self.some()
        if path is not None:
            told = self.index.forget(self.model[path].entry)
            order = [one.hash for one in told]
            expected = sorted(self.gone(path), key=len)
            assert sorted(order) == sorted(name(p).hash for p in expected)
            for one in expected:
                for child in expected:
                    if child[:-1] == one:
                        assert order.index(name(child).hash) < order.index(name(one).hash), "children first"

    def release(self) -> None:
        if self.lost:
            self.index.released(self.lost.pop(self.rng.randrange(len(self.lost))))

    def touch(self) -> None:
        path = self.some()
        if path is not None:
            chain = [path[: i + 1] for i in range(len(path))]
            self.index.touch([self.model[p].entry for p in chain])
            stamps = {self.model[p].entry.stamp for p in chain}
            assert len(stamps) == 1
            stamp = stamps.pop()
            assert max(known.stamp for known in self.model.values()) < stamp
            for p in chain:
                self.model[p].stamp = stamp

    def pin(self) -> None:
        path = self.some(written=True)
        if path is not None:
            self.index.pin(self.model[path].entry)
            self.model[path].pins += 1

    def unpin(self) -> None:
        path = self.some()
        if path is not None and self.model[path].pins:
            self.index.unpin(self.model[path].entry)
            self.model[path].pins -= 1

    def match(self) -> None:
        path = (*(self.some() or ()), *(self.rng.randint(0, 2) for _ in range(2)))
        names = [name(path[: i + 1]) for i in range(len(path))]
        found = self.index.match(names)
        length = 0
        while length < len(path) and path[: length + 1] in self.model and self.model[path[: length + 1]].written:
            length += 1
        assert [entry.hash for entry in found] == [one.hash for one in names[:length]]
        assert all(entry is self.model[path[: i + 1]].entry for i, entry in enumerate(found))

    def clear(self) -> None:
        self.index.clear()
        self.lost += [known.entry for known in self.model.values() if not known.written]
        self.model.clear()
        self.disk.clear()

    def restart(self) -> None:
        """What is found has its parents, and is never older than what is known of the same name."""
        if self.rng.random() < 0.5:
            self.slots = self.rng.choice([1, 2, 5, 12])
        self.disk = {slot: one for slot, one in self.disk.items() if slot < self.slots}  # the file is cut
        found = list(self.disk.values())
        self.rng.shuffle(found)
        self.index, before = DiskIndex(self.slots, found), self.model
        self.model, self.lost = {}, []
        paths: dict[int, Path] = {}
        every = {name(p).hash: p for p in before}
        for entry in self.index:
            above = () if entry.parent is None else paths[entry.parent.hash]
            tail = next(i for i in range(3) if pack_token_ids([i]) == entry.name.packed)
            path = paths[entry.hash] = (*above, tail)
            assert entry.hash == name(path).hash, "below another parent"
            self.model[path] = Known(entry, entry.serial, written=True)
            if entry.hash in every and before[every[entry.hash]].written and before[path].entry.slot < self.slots:
                assert entry.serial >= before[path].entry.serial
        for path, known in before.items():
            kept = all(before[path[: i + 1]].entry.slot < self.slots for i in range(len(path)))
            assert not known.written or not kept or path in self.model, "lost in a restart"

    def check(self) -> None:
        unwritten = [known.entry for known in self.model.values() if not known.written]
        self.index.check_invariants([*unwritten, *self.lost])
        assert {entry.hash for entry in self.index} == {name(path).hash for path in self.model}
        assert self.index.used == len(self.model) + len(self.lost)
        assert [e.hash for e in self.index.by_path() if e.parent is None] == [
            e.hash for e in reversed(list(self.index)) if e.parent is None
        ]
        assert len(list(self.index.by_path())) == len(self.index)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_index_is_that_of_the_model(first: int) -> None:
    for seed in range(first, first + 50):
        print(f"seed {seed}")
        both = Lockstep(seed)
        for _ in range(200):
            both.step()


def test_a_name_of_another_prefix_is_not_found() -> None:
    index = DiskIndex(4)
    entry = index.add(name((1,)), None, [])
    assert entry is not None
    index.written(entry)
    collides = HashBlock(entry.hash, pack_token_ids([2]), None, None)
    assert index.match([collides]) == []
    assert index.add(collides, None, []) is None
    salted = HashBlock(entry.hash, entry.name.packed, ("salt",), None)
    assert index.match([salted]) == []
    assert index.find(entry.name, entry) is None, "it hangs from nothing"


def test_what_hung_from_another_of_the_same_hash_is_not_restored_below_it() -> None:
    """A parent was forgotten, and its hash, by a collision, is another's now: its child stays behind."""
    parent, child = name((1,)), name((1, 2))
    other = HashBlock(parent.hash, pack_token_ids([7]), None, None)
    index = DiskIndex(4, [Found(1, 2, 1, child), Found(2, 3, None, other)])
    assert [entry.hash for entry in index] == [other.hash]
    index = DiskIndex(4, [Found(0, 1, None, parent), Found(1, 2, 1, child), Found(2, 3, None, other)])
    assert [entry.name.packed for entry in index] == [other.packed]
