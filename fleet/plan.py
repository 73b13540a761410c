"""Plan of the members to start, drain and stop next, from the wanted members, the present ones and `now`. No I/O.

The fleet's members of one kind have numbered slots. `plan_actions` is called repeatedly. Its rules:

* no slot has two members, and there are never more members than wanted, or one more (`surge`) during a replacement;
* a worker that is up is drained before it is stopped;
* old members that are up are replaced one by one, the next only when all are up, so that a broken version replaces only
  one.

A program that ends is started again by its own actor, so it stays the same member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from fleet.spec import Launch, MemberKind


class Phase(str, Enum):
    """Phase in the life of a member."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    """The member gets no new requests, and finishes those that it has."""
    STOPPING = "stopping"
    """The member was asked to stop."""


LIVE_PHASES = (Phase.STARTING, Phase.UP)


@dataclass(frozen=True)
class MemberTarget:
    """Wanted number of members of one kind, and their revision."""

    count: int
    revision: int = 0
    """Members of a lower revision are replaced."""
    surge: bool = False
    """Whether a replacement starts before the old member is drained, which needs room for one more."""


class Member(msgspec.Struct, kw_only=True):
    """One program of the fleet, a worker or a router, from the decision to start it until its end was noticed."""

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
    in_flight: int | None = None
    """Requests that routers have sent to a draining member and that are not finished; None if that is not certain."""


@dataclass(frozen=True)
class StartAction:
    """Start of a new member in a slot."""

    kind: MemberKind
    slot: int


@dataclass(frozen=True)
class PhaseChange:
    """Move of a member to another phase. A move to UP cancels a drain."""

    name: str
    phase: Phase


Action = StartAction | PhaseChange


def plan_actions(
    target_by_kind: Mapping[MemberKind, MemberTarget], members: Sequence[Member], drain_timeout_s: float, now: float
) -> list[Action]:
    """Return the members (workers and routers) to start, drain and stop now, to bring the fleet nearer to its targets.

    `drain_timeout_s`: longest time that a member may take to finish its requests before it is stopped.
    """
    actions: list[Action] = []
    has_routers = any(member.kind is MemberKind.ROUTER for member in members)
    is_shutting_down = has_routers and target_by_kind[MemberKind.ROUTER].count == 0
    for kind in (MemberKind.ROUTER, MemberKind.ENGINE):
        if kind is MemberKind.ENGINE and is_shutting_down:
            continue  # engines stay until the last router has finished its requests
        members_of_kind = [member for member in members if member.kind is kind]
        stops = _plan_stops(target_by_kind[kind], members_of_kind, drain_timeout_s, now, has_routers=has_routers)
        changes = _plan_count_changes(kind, target_by_kind[kind], members_of_kind, stops)
        actions += [*stops, *changes]
    return actions


def _plan_stops(
    target: MemberTarget, members: Sequence[Member], drain_timeout_s: float, now: float, *, has_routers: bool
) -> list[PhaseChange]:
    """Return the stops of members that still start with an old revision, or that have drained."""

    def should_stop(member: Member) -> bool:
        if member.phase is Phase.STARTING:
            return member.revision < target.revision
        if member.phase is not Phase.DRAINING:
            return False
        is_idle = member.in_flight == 0 or not has_routers
        return is_idle or now - member.phase_since_s > drain_timeout_s

    return [PhaseChange(member.name, Phase.STOPPING) for member in members if should_stop(member)]


def _plan_count_changes(
    kind: MemberKind, target: MemberTarget, members: Sequence[Member], stops: Sequence[PhaseChange]
) -> list[Action]:
    """Return the removals, cancelled drains and starts that bring the workers, or the routers, to their target.

    Members are live while they start or are up. If the number of live ones is right and all are up, one member of an
    old revision is removed, and the next plan starts another in its slot. `stops`: stops that were planned already.
    """
    stopped_names = {stop.name for stop in stops}
    remaining_members = [member for member in members if member.name not in stopped_names]
    live_members = [member for member in remaining_members if member.phase in LIVE_PHASES]
    outdated_members = [member for member in live_members if member.revision < target.revision]
    needs_surge = target.surge and bool(outdated_members) and target.count > 0
    wanted_count = target.count + (1 if needs_surge else 0)
    if len(live_members) > wanted_count:
        return _plan_excess_removals(live_members, len(live_members) - wanted_count)
    if len(live_members) < wanted_count:
        returns = _plan_returns(target, remaining_members, wanted_count - len(live_members))
        # Leaving members count too: each holds its slot and its resources until it is gone.
        occupied_slots = {member.slot for member in members}
        return [*returns, *_plan_starts(kind, wanted_count - len(members), occupied_slots)]
    is_settled = len(members) == len(live_members) and all(member.phase is Phase.UP for member in live_members)
    if outdated_members and is_settled:
        return [_plan_removal(min(outdated_members, key=lambda member: member.slot))]
    return []


def _plan_excess_removals(live_members: Sequence[Member], count: int) -> list[Action]:
    """Return the removals of `count` members: of old revisions first, then of those that start, in the last slots."""
    removal_order = sorted(live_members, key=lambda member: (member.revision, member.phase is Phase.UP, -member.slot))
    return [_plan_removal(member) for member in removal_order[:count]]


def _plan_returns(target: MemberTarget, members: Sequence[Member], count_max: int) -> list[PhaseChange]:
    returnable_members = [
        member for member in members if member.phase is Phase.DRAINING and member.revision == target.revision
    ]
    return [PhaseChange(member.name, Phase.UP) for member in returnable_members[:count_max]]


def _plan_removal(member: Member) -> PhaseChange:
    """Return the phase change that removes a member; routers finish their requests while stopping."""
    should_drain = member.kind is MemberKind.ENGINE and member.phase is Phase.UP
    return PhaseChange(member.name, Phase.DRAINING if should_drain else Phase.STOPPING)


def _plan_starts(kind: MemberKind, missing_member_count: int, occupied_slots: set[int]) -> list[Action]:
    slot_count = len(occupied_slots) + missing_member_count
    free_slots = [slot for slot in range(slot_count) if slot not in occupied_slots]
    return [StartAction(kind, slot) for slot in free_slots[: max(0, missing_member_count)]]
