"""The plan against a naive world: members that come up, die, stand still, drain, in any order."""

from __future__ import annotations

import dataclasses

from budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from fleet.plan import (
    Member,
    MemberTarget,
    Phase,
    PhaseChange,
    StartAction,
    plan_actions,
)
from fleet.spec import MemberKind

DRAIN_TIMEOUT_S = 50.0
NONE = {MemberKind.ENGINE: MemberTarget(0), MemberKind.ROUTER: MemberTarget(0)}


def member(
    slot: int, phase: Phase = Phase.UP, revision: int = 0, kind: MemberKind = MemberKind.ENGINE, **fields: object
) -> Member:
    return Member(
        name=f"{kind.value}{slot}", kind=kind, slot=slot, revision=revision, phase=phase, phase_since_s=0.0, **fields
    )  # type: ignore[arg-type]


def engines(target: MemberTarget, *members: Member, now: float = 1.0) -> list[object]:
    """The plan where a router is up."""
    targets = {MemberKind.ENGINE: target, MemberKind.ROUTER: MemberTarget(1)}
    return list(plan_actions(targets, [member(0, kind=MemberKind.ROUTER), *members], DRAIN_TIMEOUT_S, now))


def test_free_slots_are_taken_lowest_first() -> None:
    assert engines(MemberTarget(3), member(1)) == [StartAction(MemberKind.ENGINE, 0), StartAction(MemberKind.ENGINE, 2)]


def test_who_goes_when_fewer_are_wanted() -> None:
    members = [member(0), member(1), member(2, Phase.STARTING), member(3)]
    assert engines(MemberTarget(2), *members) == [
        PhaseChange("engine2", Phase.STOPPING),
        PhaseChange("engine3", Phase.DRAINING),
    ]


def test_a_drain_ends_with_the_last_request_or_the_last_second() -> None:
    assert engines(MemberTarget(0), member(0, Phase.DRAINING, in_flight=1)) == []
    assert engines(MemberTarget(0), member(0, Phase.DRAINING)) == [], "what the routers have is not known"
    assert engines(MemberTarget(0), member(0, Phase.DRAINING, in_flight=0)) == [PhaseChange("engine0", Phase.STOPPING)]
    assert engines(MemberTarget(0), member(0, Phase.DRAINING, in_flight=1), now=51.0) == [
        PhaseChange("engine0", Phase.STOPPING)
    ]


def test_a_drain_is_taken_back_where_more_are_wanted_again() -> None:
    draining = member(1, Phase.DRAINING, in_flight=3)
    assert engines(MemberTarget(2), member(0), draining) == [PhaseChange("engine1", Phase.UP)]
    old = [member(0, revision=1), replace(draining, revision=0)]
    assert engines(MemberTarget(2, revision=1), *old) == [], "an old one is not"


def test_rolling_goes_on_only_while_all_are_up() -> None:
    target = MemberTarget(2, revision=1)
    assert engines(target, member(0), member(1)) == [PhaseChange("engine0", Phase.DRAINING)]
    assert engines(target, member(0, Phase.DRAINING, in_flight=1), member(1)) == []
    assert engines(target, member(0, Phase.STARTING, revision=1), member(1)) == []
    assert engines(target, member(0, revision=1), member(1)) == [PhaseChange("engine1", Phase.DRAINING)]
    assert engines(target, member(0, revision=1), member(1, revision=1)) == []


def test_with_surge_the_replacement_comes_first() -> None:
    target = MemberTarget(1, revision=1, surge=True)
    assert engines(target, member(0)) == [StartAction(MemberKind.ENGINE, 1)]
    assert engines(target, member(0), member(1, Phase.STARTING, revision=1)) == []
    assert engines(target, member(0), member(1, revision=1)) == [PhaseChange("engine0", Phase.DRAINING)]
    assert engines(target, member(1, revision=1)) == []


def test_an_old_one_that_does_not_come_up_is_not_waited_for() -> None:
    assert engines(MemberTarget(1, revision=1), member(0, Phase.STARTING)) == [PhaseChange("engine0", Phase.STOPPING)]


def test_at_the_end_workers_outlive_the_routers() -> None:
    router = member(0, kind=MemberKind.ROUTER)
    assert plan_actions(NONE, [member(0), router], DRAIN_TIMEOUT_S, 1.0) == [PhaseChange("router0", Phase.STOPPING)]
    assert plan_actions(NONE, [member(0), replace(router, phase=Phase.STOPPING)], DRAIN_TIMEOUT_S, 1.0) == []
    assert plan_actions(NONE, [member(0)], DRAIN_TIMEOUT_S, 1.0) == [PhaseChange("engine0", Phase.DRAINING)]
    assert plan_actions(NONE, [member(0, Phase.DRAINING)], DRAIN_TIMEOUT_S, 1.0) == [
        PhaseChange("engine0", Phase.STOPPING)
    ]


class World(RuleBasedStateMachine):
    """Carries out what is planned; anything may happen to members in between."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = {MemberKind.ENGINE: MemberTarget(3), MemberKind.ROUTER: MemberTarget(2)}
        self.members: dict[str, Member] = {}
        self.now = 0.0
        self.serial = 0

    def turn(self) -> None:
        before = dict(self.members)
        for action in plan_actions(self.targets, list(self.members.values()), DRAIN_TIMEOUT_S, self.now):
            if isinstance(action, StartAction):
                assert all((s.kind, s.slot) != (action.kind, action.slot) for s in self.members.values()), "one a slot"
                self.serial += 1
                revision = self.targets[action.kind].revision
                name = str(self.serial)
                self.members[name] = Member(
                    name=name, kind=action.kind, slot=action.slot, revision=revision, phase_since_s=self.now
                )
                continue
            old = before[action.name]
            assert old == self.members[action.name], "one move a member"
            if old.kind is MemberKind.ENGINE and old.phase is Phase.UP:
                assert action.phase is Phase.DRAINING, "no worker that is up is stopped"
            if old.phase is Phase.STARTING:
                del self.members[action.name]
            else:
                self.members[action.name] = replace(old, phase=action.phase, phase_since_s=self.now, in_flight=None)

    def pick(self, data: st.DataObject, *phases: Phase) -> Member | None:
        members = [s for s in self.members.values() if s.phase in phases]
        return data.draw(st.sampled_from(members)) if members else None

    def change_one(self, data: st.DataObject, old_phase: Phase, **changes: object) -> None:
        """Change one of the members in this phase, if there is one, and go on."""
        member = self.pick(data, old_phase)
        if member is not None:
            self.members[member.name] = replace(member, **changes)
        self.turn()

    @rule(seconds=st.floats(0.1, 40.0))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    @rule(data=st.data())
    def comes_up(self, data: st.DataObject) -> None:
        self.change_one(data, Phase.STARTING, phase=Phase.UP, phase_since_s=self.now)

    @rule(data=st.data())
    def starts_again(self, data: st.DataObject) -> None:
        """The program has ended, and its actor starts it again."""
        self.change_one(data, Phase.UP, phase=Phase.STARTING, phase_since_s=self.now)

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        member = self.pick(data, *Phase)
        if member is not None:
            del self.members[member.name]
        self.turn()

    @rule(data=st.data(), count=st.one_of(st.none(), st.integers(0, 3)))
    def drains(self, data: st.DataObject, count: int | None) -> None:
        self.change_one(data, Phase.DRAINING, in_flight=count)

    @rule(kind=st.sampled_from(MemberKind), count=st.integers(0, 5))
    def scale(self, kind: MemberKind, count: int) -> None:
        self.targets[kind] = dataclasses.replace(self.targets[kind], count=count)
        self.turn()

    @rule(kind=st.sampled_from(MemberKind), surge=st.booleans())
    def roll(self, kind: MemberKind, surge: bool) -> None:
        old = self.targets[kind]
        self.targets[kind] = MemberTarget(old.count, old.revision + 1, surge and kind is MemberKind.ENGINE)
        self.turn()

    @precondition(lambda self: True)
    @rule()
    def converges(self) -> None:
        """Left alone, with programs that come up and requests that end, it is what is wanted, and stays so; and while
        it replaces, no more than one is missing."""
        steady = {kind: self.up(kind) >= target.count for kind, target in self.targets.items()}
        for _ in range(200):
            self.now += 61.0
            self.turn()
            for kind, target in self.targets.items():
                if steady[kind] and self.targets[MemberKind.ROUTER].count:
                    assert self.up(kind) >= target.count - (0 if target.surge else 1)
            for member in list(self.members.values()):
                if member.phase is Phase.STARTING:
                    self.members[member.name] = replace(member, phase=Phase.UP, phase_since_s=self.now)
                elif member.phase is Phase.DRAINING:
                    self.members[member.name] = replace(member, in_flight=0)
                elif member.phase is Phase.STOPPING:
                    del self.members[member.name]
        for kind, target in self.targets.items():
            members = [s for s in self.members.values() if s.kind is kind]
            assert [(s.phase, s.revision) for s in members] == [(Phase.UP, target.revision)] * target.count
        assert plan_actions(self.targets, list(self.members.values()), DRAIN_TIMEOUT_S, self.now) == []

    def up(self, kind: MemberKind) -> int:
        return sum(s.kind is kind and s.phase is Phase.UP for s in self.members.values())

    @invariant()
    def never_two_a_slot(self) -> None:
        slots = [(s.kind, s.slot) for s in self.members.values()]
        assert len(slots) == len(set(slots))


World.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestWorld = World.TestCase
