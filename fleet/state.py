"""What outlives the directory's actor, as it is kept in Ray's store. Values only."""

from __future__ import annotations

import msgspec

from fleet.plan import Kind, Phase, PhaseTimeouts, Target
from fleet.scaling import Bounds
from fleet.spec import Launch, Spec


class Record(msgspec.Struct, kw_only=True):
    """One member, as it is kept."""

    name: str
    kind: Kind
    slot: int
    revision: int
    phase: Phase = Phase.STARTING
    since_s: float
    up_s: float | None = None
    """When it was up first."""
    node: str = ""
    """Where it was to be, then where it is."""
    launch: Launch | None = None
    drain: int = 0
    """The version of the list that first said so."""

    @property
    def place(self) -> tuple[str, Kind, int, int, Phase, float]:
        """The fields of a `plan.Member` but its requests."""
        return self.name, self.kind, self.slot, self.revision, self.phase, self.since_s


class State(msgspec.Struct, kw_only=True):
    """What outlives the actor. Times are of the nodes' clocks, in seconds since 1970."""

    spec: Spec
    engines: Target
    routers: Target
    patience: PhaseTimeouts
    bounds: Bounds | None = None
    members: dict[str, Record] = {}
    serial: int = 0
    hung: dict[str, int] = {}
    """By kind: programs that were killed because they did not answer."""

    @property
    def targets(self) -> dict[Kind, Target]:
        return {Kind.ENGINE: self.engines, Kind.ROUTER: self.routers}
