"""Plan of the members to start, drain and stop next, from the wanted members, the present ones and `now`. No I/O.

The fleet's members of one kind have numbered slots. `plan_actions` is called repeatedly. Its rules:

* no slot has two members, and there are never more members than wanted, or one more (`surge`) during a replacement;
* a worker that is up is drained before it is stopped;
* old members are replaced one by one, the next only when all are up, so that a broken version replaces only one;
* after a program ends, its slot is used again at once, then after 1, 2, 4, ... 60 s, until one was up for a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

MAX_BACK_OFF_S = 60.0
STEADY_AFTER_S = 60.0
"""Time for which a program must be up, so that its end does not count as a failed start."""


class MemberKind(str, Enum):
    ENGINE = "engine"
    ROUTER = "router"


class Phase(str, Enum):
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


@dataclass(frozen=True)
class Member:
    """One program, from the decision to start it until its end was noticed."""

    name: str
    kind: MemberKind
    slot: int
    revision: int
    phase: Phase
    phase_since_s: float
    """Time at which the member entered its phase."""
    in_flight: int | None = None
    """Requests that routers have sent to the member and that are not finished; None if their number is unknown."""


@dataclass(frozen=True)
class SlotFailure:
    """Unplanned ends of a slot's programs, and when to start the next one."""

    failure_count: int
    retry_at_s: float
    """Earliest time of the next start."""


@dataclass(frozen=True)
class PhaseTimeouts:
    """Longest times for the start and the drain of a member."""

    start_timeout_s: float = 1800.0
    drain_timeout_s: float = 300.0


@dataclass(frozen=True)
class StartAction:
    kind: MemberKind
    slot: int


@dataclass(frozen=True)
class PhaseChange:
    """Move of a member to another phase. A move to UP cancels a drain."""

    name: str
    phase: Phase
    has_failed: bool = False
    """Whether the member took too long to start."""


Action = StartAction | PhaseChange
FailureBySlot = Mapping[tuple[MemberKind, int], SlotFailure]


def make_next_failure(previous: SlotFailure | None, up_s: float, now: float) -> SlotFailure:
    """Return a slot's failure record after its program ended by itself. `up_s`: how long it was up; 0 if never."""
    count = 1 if previous is None or up_s >= STEADY_AFTER_S else previous.failure_count + 1
    return SlotFailure(count, now + (min(MAX_BACK_OFF_S, 2.0 ** min(count - 2, 6)) if count > 1 else 0.0))


def plan_actions(
    target_by_kind: Mapping[MemberKind, MemberTarget],
    members: Sequence[Member],
    failure_by_slot: FailureBySlot,
    timeouts: PhaseTimeouts,
    now: float,
) -> list[Action]:
    """Return the actions to take now, so that the fleet comes nearer to its targets.

    `failure_by_slot` tells how long slots must wait after failures. Actions of routers come before those of engines.
    """
    actions: list[Action] = []
    has_routers = any(member.kind is MemberKind.ROUTER for member in members)
    are_routers_leaving = has_routers and not target_by_kind[MemberKind.ROUTER].count
    for kind in (MemberKind.ROUTER, MemberKind.ENGINE):
        if kind is MemberKind.ENGINE and are_routers_leaving:
            continue  # the fleet shuts down: engines stay until the last router has finished its requests
        members_of_kind = [member for member in members if member.kind is kind]
        stops = _plan_stops(target_by_kind[kind], members_of_kind, timeouts, now, has_routers=has_routers)
        changes = _plan_count_changes(kind, target_by_kind[kind], members_of_kind, stops, failure_by_slot, now)
        actions += [*stops, *changes]
    return actions


def _plan_stops(
    target: MemberTarget, members: Sequence[Member], timeouts: PhaseTimeouts, now: float, *, has_routers: bool
) -> list[PhaseChange]:
    """Return the stops of members that started too slowly or for an old revision, or that have drained."""
    stops: list[PhaseChange] = []
    for member in members:
        phase_s = now - member.phase_since_s
        if member.phase is Phase.STARTING:
            is_late = phase_s > timeouts.start_timeout_s
            is_outdated = member.revision < target.revision
            if is_late or is_outdated:
                stops.append(PhaseChange(member.name, Phase.STOPPING, has_failed=is_late and not is_outdated))
        elif member.phase is Phase.DRAINING:
            is_idle = member.in_flight == 0 or not has_routers
            if is_idle or phase_s > timeouts.drain_timeout_s:
                stops.append(PhaseChange(member.name, Phase.STOPPING))
    return stops


def _plan_count_changes(
    kind: MemberKind,
    target: MemberTarget,
    members: Sequence[Member],
    stops: Sequence[PhaseChange],
    failure_by_slot: FailureBySlot,
    now: float,
) -> list[Action]:
    """Return the removals, cancelled drains and starts that bring the members of a kind to their target.

    If their number is right and all are up, one member of an old revision is removed.
    """
    stopped_names = {stop.name for stop in stops}
    live_members = [member for member in members if member.phase in LIVE_PHASES and member.name not in stopped_names]
    outdated_members = [member for member in live_members if member.revision < target.revision]
    wanted_count = target.count
    if target.surge and outdated_members and target.count > 0:
        wanted_count += 1
    excess_count = len(live_members) - wanted_count
    if excess_count > 0:
        removal_order = sorted(
            live_members, key=lambda member: (member.revision, member.phase is Phase.UP, -member.slot)
        )
        return [_plan_removal(member) for member in removal_order[:excess_count]]
    if excess_count < 0:
        draining_members = [
            member
            for member in members
            if member.phase is Phase.DRAINING
            and member.revision == target.revision
            and member.name not in stopped_names
        ]
        returns = [PhaseChange(member.name, Phase.UP) for member in draining_members[:-excess_count]]
        occupied_slots = {member.slot for member in members}  # a member that leaves still occupies its slot
        return [*returns, *_plan_starts(kind, wanted_count - len(members), occupied_slots, failure_by_slot, now)]
    is_settled = len(members) == len(live_members) and all(member.phase is Phase.UP for member in live_members)
    if outdated_members and is_settled:
        return [_plan_removal(min(outdated_members, key=lambda member: member.slot))]
    return []


def _plan_removal(member: Member) -> PhaseChange:
    """Return the phase change that removes a member; routers finish their requests while stopping."""
    should_drain = member.kind is MemberKind.ENGINE and member.phase is Phase.UP
    return PhaseChange(member.name, Phase.DRAINING if should_drain else Phase.STOPPING)


def _plan_starts(
    kind: MemberKind, missing_member_count: int, occupied_slots: set[int], failure_by_slot: FailureBySlot, now: float
) -> list[Action]:
    """Return the starts for the lowest free slots, except those that must wait after failures.

    No higher slot is used instead of a slot that must wait.
    """
    slot_count = len(occupied_slots) + missing_member_count
    free_slots = [slot for slot in range(slot_count) if slot not in occupied_slots]
    slots = free_slots[: max(0, missing_member_count)]
    slot_failures = (failure_by_slot.get((kind, slot)) for slot in slots)
    return [
        StartAction(kind, slot)
        for slot, failure in zip(slots, slot_failures)
        if failure is None or failure.retry_at_s <= now
    ]


def pick_least_occupied_node(capacity_by_node: Mapping[str, float], occupied_nodes: Sequence[str]) -> str | None:
    """Return the node with the fewest members of a kind, of equal nodes the largest; None if no node has room.

    `capacity_by_node`: how many members would fit on each node if it were empty. `occupied_nodes`: nodes of the present
    members of the kind.
    """
    nodes = [node for node, capacity in capacity_by_node.items() if capacity >= 1]
    return min(nodes, key=lambda node: (occupied_nodes.count(node), -capacity_by_node[node], node), default=None)
