"""Decisions of the directory about members that do not report, without a cluster of Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleet.plan import Member, Phase
from fleet.spec import FleetSpec, Launch, MemberKind

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
LAUNCH = Launch(command=[], url="http://10.0.0.1:8080", health_url="http://10.0.0.1:8080/livez")


def make_directory(monkeypatch: pytest.MonkeyPatch, member: Member, error: Exception) -> Any:
    """Return a directory that adopted a router on the node of its slot. Each call of the router's actor raises."""
    from fleet import directory

    state = directory.DirectoryState(
        spec=FleetSpec(name="fleet", engine_command=()),
        target_by_kind={kind: directory.MemberTarget(1) for kind in MemberKind},
        member_by_name={member.name: member},
        node_by_router_slot={0: "node"},
    )

    def get(call: object) -> None:
        raise error

    actor = SimpleNamespace(report=SimpleNamespace(remote=lambda *lists: "call"))
    fake_ray = SimpleNamespace(
        get_actor=lambda *_, **__: actor, get=get, kill=lambda actor: None, wait=lambda calls, **_: (calls, [])
    )
    monkeypatch.setattr(directory, "ray", fake_ray)
    monkeypatch.setattr(directory.DirectoryActor, "_run", lambda self: None)
    monkeypatch.setattr(directory, "exit_with_parent", lambda: None)
    monkeypatch.setattr(directory, "internal_kv", SimpleNamespace(_internal_kv_get=lambda *_, **__: None))
    return directory.DirectoryActor("fleet", directory.msgspec.json.encode(state))


@pytest.mark.parametrize("launch", [None, LAUNCH])
def test_a_router_whose_reports_fail_does_not_lack_room(monkeypatch: pytest.MonkeyPatch, launch: Launch | None) -> None:
    member = Member(
        name="r", kind=MemberKind.ROUTER, slot=0, revision=0, phase=Phase.UP, phase_since_s=0.0, launch=launch
    )
    directory = make_directory(monkeypatch, member, ray.exceptions.RayTaskError("report", "no list", ValueError("x")))
    late_s = directory._link_by_member["r"].created_at_s + 60.0
    directory._request_reports(late_s)
    directory._read_reports(late_s)
    directory._limit_waits_for_room(late_s)
    assert list(directory._state.member_by_name) == ["r"], "its actor has answered, so it has a node"
    assert directory._describe_wait(directory._state.member_by_name["r"]) == ""


def test_a_router_that_never_answers_lacks_room(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(name="r", kind=MemberKind.ROUTER, slot=0, revision=0, phase_since_s=0.0)
    directory = make_directory(monkeypatch, member, RuntimeError("not called"))
    directory._limit_waits_for_room(directory._link_by_member["r"].created_at_s + 60.0)
    assert not directory._state.member_by_name


def test_a_clock_that_is_set_back_keeps_no_member_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory asked nobody until the clock was where it had been."""
    from fleet import directory as fleet_directory

    member = Member(
        name="r", kind=MemberKind.ROUTER, slot=0, revision=0, phase=Phase.UP, phase_since_s=0.0, launch=LAUNCH
    )
    directory = make_directory(monkeypatch, member, ray.exceptions.RayTaskError("report", "no list", ValueError("x")))
    call_times_s: list[float] = []
    monotonic_s, wall_s = fleet_directory.time.monotonic(), fleet_directory.time.time()
    for passed_s, set_back_s in ((0.0, 0.0), (60.0, 3600.0)):
        now_s, shown_s = monotonic_s + passed_s, wall_s + passed_s - set_back_s
        monkeypatch.setattr(fleet_directory.time, "monotonic", lambda now_s=now_s: now_s)
        monkeypatch.setattr(fleet_directory.time, "time", lambda shown_s=shown_s: shown_s)
        directory._request_reports(directory._now())
        directory._link_by_member["r"].call = None  # it has returned
        call_times_s.append(directory._link_by_member["r"].called_at_s)
    assert call_times_s[1] - call_times_s[0] == pytest.approx(60.0)


def test_a_fleet_is_settled_once_its_members_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.member import MemberReport
    from fleet.program import ProgramState
    from fleet.worker_list import WorkerStatus

    router, engine = (
        Member(name=kind.value, kind=kind, slot=0, revision=0, phase=Phase.UP, phase_since_s=0.0, launch=LAUNCH)
        for kind in (MemberKind.ROUTER, MemberKind.ENGINE)
    )
    directory = make_directory(monkeypatch, router, RuntimeError("not called"))
    directory._state.member_by_name["engine"] = engine
    directory._adopt_member(engine)
    unknown = directory.status()
    assert not unknown["settled"]
    assert (unknown["failures"], unknown["hung"], unknown["members"][0]["node"]) == ([], {}, "")

    status_by_worker = {"w": WorkerStatus(is_up=True, is_draining=False, in_flight=0, queue_s=0.0, prefill_share=0.0)}
    links = directory._link_by_member
    links["router"].report = MemberReport(ProgramState(LAUNCH), "node", [], status_by_worker)
    links["engine"].report = MemberReport(ProgramState(LAUNCH, failure_count=2, hung_count=1), "node")
    status = directory.status()
    assert status["settled"]
    assert status["failures"] == [{"kind": "engine", "slot": 0, "failures": 2, "retry_in_s": 0.0}]
    assert status["hung"] == {"engine": 1}
    links["engine"].report = MemberReport(ProgramState(LAUNCH, silent_s=3.0), "node")
    assert not directory.status()["settled"], "the engine does not answer"
    links["engine"].report = MemberReport(ProgramState(LAUNCH), "node")
    links["router"].report = MemberReport(ProgramState(LAUNCH), "node", [], {})
    assert not directory.status()["settled"], "the router does not know the engine"
