"""What outlives the directory's actor, as it is kept in Ray's store. Values only."""

from __future__ import annotations

import msgspec

from fleet.plan import MemberKind, MemberTarget, Phase, PhaseTimeouts
from fleet.scaling import Bounds
from fleet.spec import Launch, Spec


class MemberRecord(msgspec.Struct, kw_only=True):
    """One member, as it is kept."""

    name: str
    kind: MemberKind
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
    def place(self) -> tuple[str, MemberKind, int, int, Phase, float]:
        """The fields of a `plan.Member` but its requests."""
        return self.name, self.kind, self.slot, self.revision, self.phase, self.since_s


class DirectoryState(msgspec.Struct, kw_only=True):
    """What outlives the actor. Times are of the nodes' clocks, in seconds since 1970."""

    spec: Spec
    engines: MemberTarget
    routers: MemberTarget
    patience: PhaseTimeouts
    bounds: Bounds | None = None
    members: dict[str, MemberRecord] = {}
    serial: int = 0
    hung: dict[str, int] = {}
    """By kind: programs that were killed because they did not answer."""

    @property
    def targets(self) -> dict[MemberKind, MemberTarget]:
        return {MemberKind.ENGINE: self.engines, MemberKind.ROUTER: self.routers}
