"""What outlives the directory's actor, as it is kept in Ray's store. Values only."""

from __future__ import annotations

import msgspec

from fleet.plan import MemberKind, MemberTarget, Phase, PhaseTimeouts
from fleet.scaling import ScalingBounds
from fleet.spec import FleetSpec, Launch


class MemberRecord(msgspec.Struct, kw_only=True):
    """One member, as it is kept."""

    name: str
    kind: MemberKind
    slot: int
    revision: int
    phase: Phase = Phase.STARTING
    phase_since_s: float
    up_since_s: float | None = None
    """When it was up first."""
    node: str = ""
    """Where it was to be, then where it is."""
    launch: Launch | None = None
    drain_list_version: int = 0
    """The version of the list that first said so."""

    @property
    def plan_fields(self) -> tuple[str, MemberKind, int, int, Phase, float]:
        """The fields of a `plan.Member` but its requests."""
        return self.name, self.kind, self.slot, self.revision, self.phase, self.phase_since_s


class DirectoryState(msgspec.Struct, kw_only=True):
    """What outlives the actor. Times are of the nodes' clocks, in seconds since 1970."""

    spec: FleetSpec
    engine_target: MemberTarget
    router_target: MemberTarget
    timeouts: PhaseTimeouts
    scaling_bounds: ScalingBounds | None = None
    record_by_name: dict[str, MemberRecord] = {}
    last_serial: int = 0
    hung_count_by_kind: dict[str, int] = {}
    """By kind: programs that were killed because they did not answer."""

    @property
    def target_by_kind(self) -> dict[MemberKind, MemberTarget]:
        return {MemberKind.ENGINE: self.engine_target, MemberKind.ROUTER: self.router_target}
