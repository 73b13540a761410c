"""Stores that wait: runs whose parent nobody has announced yet, and single names that nobody has spelt out.

Owns what waits for what, and the bound. Refuses to know places and presences: the holder attaches what is handed back.

Invariants: at most PARKED_BLOCKS_MAX blocks wait (the oldest run goes), each for at most PARKED_BATCHES_MAX batches
of the holder; a parked run has at least one block that waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from events.types import BlockStored

PARKED_BLOCKS_MAX = 8192
PARKED_BATCHES_MAX = 10_000
"""As many as vLLM's replay ring holds: what has not come by then cannot be replayed either."""

Slot = tuple[int | None, int]
"""(group, tier as an index into TIERS)."""
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class ParkedRun:
    """A dense store whose parent is unknown (`run`), or one name of a sparse store that nobody has spelt out."""

    slot: Slot
    names: list[int]
    is_waiting: list[bool]
    """Per name; False for one that is held already, or was removed while the run waited."""
    length: int
    awaited_name: int
    """The name that sets it free: the parent's, or the sparse name itself."""
    run: BlockStored | None
    batch: int
    """Count of the holder's batches when it was parked."""


class Parking:
    """The runs of one holder that wait, oldest first."""

    def __init__(self) -> None:
        self._runs: dict[int, ParkedRun] = {}
        self._serial = 0
        self._runs_by_awaited_name: dict[int, dict[int, None]] = {}
        self._names: dict[tuple[Slot, int], dict[int, None]] = {}
        self.blocks = 0

    def clear(self) -> None:
        self._runs.clear()
        self._runs_by_awaited_name.clear()
        self._names.clear()
        self.blocks = 0

    def park(self, run: ParkedRun) -> None:
        if len(run.names) > PARKED_BLOCKS_MAX:
            return
        self._serial += 1
        self._runs[self._serial] = run
        self.blocks += len(run.names)
        self._runs_by_awaited_name.setdefault(run.awaited_name, {})[self._serial] = None
        for name, waits in zip(run.names, run.is_waiting):
            if waits:
                self._names.setdefault((run.slot, name), {})[self._serial] = None
        while self.blocks > PARKED_BLOCKS_MAX:
            self._pop_run(next(iter(self._runs)))

    def release(self, name: int) -> list[ParkedRun]:
        """The runs that waited for `name`, oldest first; they wait no more."""
        return [self._pop_run(serial) for serial in list(self._runs_by_awaited_name.get(name, ()))]

    def cancel(self, slot: Slot, name: int) -> bool:
        """`name` was removed before its place was known: its oldest waiting copy goes. False where none waits."""
        serials = self._names.get((slot, name))
        if not serials:
            return False
        serial = next(iter(serials))
        run = self._runs[serial]
        copies = [index for index, waits in enumerate(run.is_waiting) if waits and run.names[index] == name]
        run.is_waiting[copies[0]] = False
        if len(copies) == 1:
            _discard(self._names, (slot, name), serial)
        if not any(run.is_waiting):
            self._pop_run(serial)
        return True

    def clear_tier(self, tier: int) -> None:
        """All that waits to stand on a tier goes."""
        for (slot, name), serials in list(self._names.items()):
            if slot[1] == tier:
                for _ in range(sum(self._runs[serial].names.count(name) for serial in serials)):
                    self.cancel(slot, name)

    def expire(self, batch: int) -> None:
        """Drop what has waited for PARKED_BATCHES_MAX batches."""
        while self._runs:
            serial, run = next(iter(self._runs.items()))
            if batch - run.batch < PARKED_BATCHES_MAX:
                return
            self._pop_run(serial)

    def check_invariants(self) -> None:
        assert self.blocks == sum(len(run.names) for run in self._runs.values()) <= PARKED_BLOCKS_MAX
        assert set(self._runs) == {serial for serials in self._runs_by_awaited_name.values() for serial in serials}
        assert all(any(run.is_waiting) for run in self._runs.values())

    def _pop_run(self, serial: int) -> ParkedRun:
        run = self._runs.pop(serial)
        self.blocks -= len(run.names)
        _discard(self._runs_by_awaited_name, run.awaited_name, serial)
        for name, waits in zip(run.names, run.is_waiting):
            if waits:
                _discard(self._names, (run.slot, name), serial)
        return run


def _discard(index: dict[K, dict[int, None]], key: K, serial: int) -> None:
    """Take `serial` out of `index[key]`; an empty entry goes."""
    serials = index.get(key)
    if serials is not None:
        serials.pop(serial, None)
        if not serials:
            del index[key]
