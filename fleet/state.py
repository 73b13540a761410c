"""State of a fleet as it is kept in Ray's store. Values only."""

from __future__ import annotations

import msgspec

from fleet.plan import MemberKind, MemberTarget, Phase
from fleet.spec import FleetSpec, Launch


class MemberRecord(msgspec.Struct, kw_only=True):
    """Stored facts about one program of the fleet."""

    name: str
    kind: MemberKind
    slot: int
    """Number of the member among those of its kind; a replacement takes the same slot."""
    revision: int
    """Version of the command line with which the member was started."""
    phase: Phase = Phase.STARTING
    phase_since_s: float
    """Time at which the member entered its phase, in seconds since 1970."""
    launch: Launch | None = None
    """Command line and addresses of the member's program; None while it does not serve."""
    drain_list_version: int = 0
    """Version of the worker list that first marked the member as draining; 0: none yet."""

    @property
    def plan_fields(self) -> tuple[str, MemberKind, int, int, Phase, float]:
        """Fields of a `plan.Member`, without its requests."""
        return self.name, self.kind, self.slot, self.revision, self.phase, self.phase_since_s


class DirectoryState(msgspec.Struct, kw_only=True):
    """Everything that the directory stores in Ray, so that it finds its fleet again after a restart."""

    spec: FleetSpec
    engine_target: MemberTarget
    router_target: MemberTarget
    record_by_name: dict[str, MemberRecord] = {}
    node_by_router_slot: dict[int, str] = {}
    """Node on which the newest router of each slot runs or ran."""
    last_serial: int = 0
    """Number at the end of the newest member's name."""

    @property
    def target_by_kind(self) -> dict[MemberKind, MemberTarget]:
        return {MemberKind.ENGINE: self.engine_target, MemberKind.ROUTER: self.router_target}
