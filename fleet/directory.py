"""The directory of a fleet: the actor that starts and stops the members by the plan, and tells routers their workers.

If the actor dies, Ray restarts it, on another node if need be. Its state is stored with Ray before it acts, so the new
actor finds its members by their names. Meanwhile no member is started or stopped, programs that end are still started
again by their own actors, and routers keep their workers.

No request passes through the directory. About once a second it calls each member's `report`, which brings back what
happened to the program, and which carries the lists of workers and peers to a router.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleet.guard import exit_with_parent
from fleet.member import MemberActor, MemberReport, RouterReport
from fleet.plan import LIVE_PHASES, Member, MemberKind, MemberTarget, Phase, PhaseChange, StartAction, plan_actions
from fleet.spec import NAMESPACE, FleetSpec
from fleet.state import DirectoryState, MemberRecord
from fleet.worker_list import ListedWorker, WorkerStatus

log = logging.getLogger("fleet")

PASS_S = 0.25
"""Longest pause of the loop, and shortest time between two reports of a member."""
REPORT_S = 1.0
"""Time between two reports of a member that is up and knows the newest lists."""
FAILED_START_PAUSE_S = 5.0
"""Time without starts after an actor died before its program served."""
MAX_EVENTS = 200
STARTS_PER_PASS = 4
"""Most members started in one pass: Ray takes up to two seconds for each on a busy node, and reports wait meanwhile."""


@dataclass
class MemberLink:
    """The actor of a member, and what it has reported."""

    actor: Any
    call: Any = None
    """The call of `report` that has not returned yet."""
    called_at_s: float = 0.0
    report: MemberReport | None = None
    """The newest report."""


class DirectoryActor:
    """Actor that starts, watches and stops the members of one fleet.

    Its public methods are called by the command line and return at once.
    """

    def __init__(self, name: str, initial_state: bytes) -> None:
        """Load the stored state of the fleet, or else take `initial_state`, and watch the members in it."""
        exit_with_parent()
        self._storage_key = f"fleet/{name}".encode()
        stored_state = internal_kv._internal_kv_get(self._storage_key, namespace=NAMESPACE)
        self._state = msgspec.json.decode(stored_state or initial_state, type=DirectoryState)
        self._has_unsaved_changes = True
        self._lock = threading.RLock()
        self._link_by_member: dict[str, MemberLink] = {}
        self._next_start_at_s = 0.0
        """Time before which no member is started."""
        self._list_version = 1
        """Version of the published lists of workers and peers."""
        self._published_workers: list[ListedWorker] = []
        self._published_peer_addresses: list[str] = []
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        """Time and text of the newest events."""
        for record in list(self._state.record_by_name.values()):
            record.drain_list_version = 0
            self._adopt_member(record)
        threading.Thread(target=self._run, daemon=True).start()

    # Asked by the command line ---------------------------------------------------------------------------------------

    def scale(self, engine_count: int | None, router_count: int | None) -> None:
        """Set how many engines and routers there should be; None leaves a number as it is."""
        with self._lock:
            state = self._state
            if engine_count is not None:
                state.engine_target = replace(state.engine_target, count=engine_count)
            if router_count is not None:
                state.router_target = replace(state.router_target, count=router_count)
            self._record_event(f"scale: {state.engine_target.count} engines, {state.router_target.count} routers")

    def roll(self, kind: MemberKind, spec_changes: dict[str, Any], should_surge: bool) -> None:
        """Replace all members of a kind, one by one, after changing these fields of the spec."""
        with self._lock:
            state = self._state
            state.spec = msgspec.structs.replace(state.spec, **spec_changes)
            old_target = state.target_by_kind[kind]
            target = MemberTarget(old_target.count, old_target.revision + 1, should_surge)
            if kind is MemberKind.ENGINE:
                state.engine_target = target
            else:
                state.router_target = target
            self._record_event(f"roll: {kind.value}s to revision {target.revision}")

    def stop_all(self, *, now: bool) -> None:
        """Stop all members, routers first, which finish their requests; `now` kills all of them."""
        with self._lock:
            self.scale(0, 0)
            if now:
                for record in list(self._state.record_by_name.values()):
                    self._remove_member(record, "killed")

    def status(self) -> dict[str, Any]:
        """Return what `fleet status` shows of the fleet, its members and recent events, as JSON values."""
        with self._lock:
            state, now = self._state, time.time()
            records = sorted(state.record_by_name.values(), key=lambda record: (record.kind, record.slot, record.name))
            return {
                "name": state.spec.name, "settled": self._is_settled(),
                "members": [self._describe_member(record, now) for record in records],
                "failures": [row for record in records for row in self._list_failures(record, now)],
                "hung": self._count_hung(),
                "targets": {kind.value: msgspec.to_builtins(target) for kind, target in state.target_by_kind.items()},
                "events": [[event_s, text] for event_s, text in self._events],
            }  # fmt: skip

    def _describe_member(self, record: MemberRecord, now: float) -> dict[str, Any]:
        """Return a member's row of `status`; a worker's row contains its load too."""
        report = self._get_report(record)
        row: dict[str, Any] = {
            "name": record.name, "kind": record.kind.value, "slot": record.slot, "revision": record.revision,
            "phase": record.phase.value, "seconds": now - record.phase_since_s, "node": report.node if report else "",
            "url": record.launch.url if record.launch else "", "silent_s": report.program.silent_s if report else 0.0,
        }  # fmt: skip
        if record.kind is MemberKind.ENGINE:
            statuses = self._list_worker_statuses(record)
            row["in_flight"] = self._count_in_flight(record)
            row["queue_s"] = max((status.queue_s for status in statuses), default=0.0)
            row["prefill_share"] = max((status.prefill_share for status in statuses), default=0.0)
        return row

    def _list_failures(self, record: MemberRecord, now: float) -> list[dict[str, Any]]:
        """Return the row of `status` about a member that failed; no row if it did not."""
        report = self._get_report(record)
        if report is None or not report.program.failure_count:
            return []
        program = report.program
        return [{"kind": record.kind.value, "slot": record.slot, "failures": program.failure_count,
                 "retry_in_s": max(0.0, program.retry_at_s - now)}]  # fmt: skip

    def _count_hung(self) -> dict[str, int]:
        """Count how often programs of the present members were killed because they did not answer, by kind."""
        counts = Counter[str]()
        for record in self._state.record_by_name.values():
            report = self._get_report(record)
            if report is not None and report.program.hung_count:
                counts[record.kind.value] += report.program.hung_count
        return dict(counts)

    # The loop --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read reports, compare the fleet with its plan, and ask for further reports, again and again."""
        while True:
            try:
                with self._lock:
                    self._run_once(time.time())
                    calls = [link.call for link in self._link_by_member.values() if link.call is not None]
                if calls:
                    ray.wait(calls, num_returns=len(calls), timeout=PASS_S)
                else:
                    time.sleep(PASS_S)
            except RayError as error:
                log.warning("a call to Ray failed, and the fleet's directory tries again: %s", error)
                time.sleep(PASS_S)
            except BaseException:
                log.exception("the fleet's directory ends, and Ray will restart it")
                os._exit(1)  # the actor would live on without this thread

    def _run_once(self, now: float) -> None:
        """Read the reports that have come, take the actions that the plan wants, and ask for further reports."""
        state = self._state
        self._read_reports(now)
        members = []
        for record in state.record_by_name.values():
            in_flight = self._count_in_flight(record) if record.phase is Phase.DRAINING else None
            members.append(Member(*record.plan_fields, in_flight))
        start_count = 0
        for action in plan_actions(state.target_by_kind, members, state.spec.drain_timeout_s, now):
            if isinstance(action, PhaseChange):
                self._change_phase(action, now)
            elif start_count < STARTS_PER_PASS and now >= self._next_start_at_s:
                start_count += 1
                self._start_member(action, now)
        self._update_lists()
        self._request_reports(now)
        if self._has_unsaved_changes:
            self._save()

    def _save(self) -> None:
        internal_kv._internal_kv_put(
            self._storage_key, msgspec.json.encode(self._state), overwrite=True, namespace=NAMESPACE
        )
        self._has_unsaved_changes = False

    def _record_event(self, text: str, at_s: float | None = None) -> None:
        self._has_unsaved_changes = True
        self._events.append((time.time() if at_s is None else at_s, text))
        log.info("%s", text)

    # Members --------------------------------------------------------------------------------------------------------

    def _start_member(self, action: StartAction, now: float) -> None:
        """Start the actor of a new member where Ray has room for it. The member is saved first, for a restart."""
        state, kind = self._state, action.kind
        state.last_serial += 1
        record = MemberRecord(
            name=f"{state.spec.name}-{kind.value}-{action.slot}-{state.last_serial}",
            kind=kind, slot=action.slot, revision=state.target_by_kind[kind].revision, phase_since_s=now,
        )  # fmt: skip
        state.record_by_name[record.name] = record
        self._record_event(f"{record.name}: start")
        self._save()
        resources = state.spec.get_required_resources(kind)
        actor_class = ray.remote(MemberActor).options(
            name=record.name, namespace=NAMESPACE, lifetime="detached", max_concurrency=16,
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0.0),
            scheduling_strategy=self._choose_strategy(record),
        )  # fmt: skip
        actor = actor_class.remote(msgspec.json.encode(state.spec), kind.value, record.slot, self._list_workers())
        self._link_by_member[record.name] = MemberLink(actor)

    def _choose_strategy(self, record: MemberRecord) -> str | NodeAffinitySchedulingStrategy:
        """Return how Ray chooses a member's node: spread, but a router goes where its slot was before, if it can.

        So a router that is replaced keeps its address, which clients know.
        """
        earlier_node = self._state.node_by_router_slot.get(record.slot)
        if record.kind is MemberKind.ENGINE or earlier_node is None:
            return "SPREAD"
        return NodeAffinitySchedulingStrategy(earlier_node, soft=True)

    def _adopt_member(self, record: MemberRecord) -> None:
        """Watch a member that an earlier directory process started."""
        try:
            actor = ray.get_actor(record.name, namespace=NAMESPACE)
        except ValueError:
            self._remove_member(record, "its actor is not there")
            return
        self._link_by_member[record.name] = MemberLink(actor)
        if record.phase is Phase.STOPPING:
            actor.stop.remote()

    def _request_reports(self, now: float) -> None:
        """Ask for the reports that are due. A member has one such call at a time."""
        for record in self._state.record_by_name.values():
            link = self._link_by_member[record.name]
            interval_s = REPORT_S if record.phase is Phase.UP and self._has_newest_lists(record) else PASS_S
            if link.call is not None or now - link.called_at_s < interval_s:
                continue
            link.called_at_s = now
            if record.kind is MemberKind.ROUTER:
                lists = (self._list_version, self._published_workers, self._published_peer_addresses)
                link.call = link.actor.report.remote(*lists)
            else:
                link.call = link.actor.report.remote()

    def _read_reports(self, now: float) -> None:
        call_by_name = {name: link.call for name, link in self._link_by_member.items() if link.call is not None}
        if not call_by_name:
            return
        finished_calls, _ = ray.wait(list(call_by_name.values()), num_returns=len(call_by_name), timeout=0)
        for name, call in call_by_name.items():
            if call in finished_calls:
                self._link_by_member[name].call = None
                self._read_report(self._state.record_by_name[name], call, now)

    def _read_report(self, record: MemberRecord, call: Any, now: float) -> None:
        """Record what a member reports. If its actor died, the plan will start another one in its slot."""
        try:
            report: MemberReport = ray.get(call)
        except RayTaskError as error:
            log.warning("%s: no report: %s", record.name, error)
            return
        except RayError as error:
            if record.phase is Phase.STARTING:  # a node may lack what an actor needs
                self._next_start_at_s = now + FAILED_START_PAUSE_S
            self._remove_member(record, f"lost: {error}")
            return
        self._link_by_member[record.name].report = report
        for event_s, text in report.events:
            self._record_event(f"{record.name}: {text}", event_s)
        record.launch = report.program.launch
        if record.kind is MemberKind.ROUTER:
            self._state.node_by_router_slot[record.slot] = report.node
        phase = Phase.UP if record.launch is not None else Phase.STARTING
        if report.program.has_stopped:
            self._remove_member(record, "stopped")
        elif record.phase is Phase.DRAINING and record.launch is None:
            self._remove_member(record, "ended before it had drained")
        elif record.phase in LIVE_PHASES and record.phase is not phase:
            record.phase, record.phase_since_s = phase, now
            self._has_unsaved_changes = True

    def _change_phase(self, action: PhaseChange, now: float) -> None:
        record = self._state.record_by_name[action.name]
        previous_phase, record.phase, record.phase_since_s = record.phase, action.phase, now
        record.drain_list_version = 0
        self._record_event(f"{record.name}: {previous_phase.value} -> {action.phase.value}")
        if previous_phase is Phase.STARTING:  # it may not even have a place yet
            self._remove_member(record, "not wanted any more")
        elif action.phase is Phase.STOPPING:
            self._link_by_member[record.name].actor.stop.remote()

    def _remove_member(self, record: MemberRecord, reason: str) -> None:
        """Forget a member, and end its actor with its program."""
        del self._state.record_by_name[record.name]
        self._record_event(f"{record.name}: gone: {reason.strip()[:2000]}")
        link = self._link_by_member.pop(record.name, None)
        if link is not None:
            ray.kill(link.actor)

    def _get_report(self, record: MemberRecord) -> MemberReport | None:
        return self._link_by_member[record.name].report

    # Routers ---------------------------------------------------------------------------------------------------------

    def _update_lists(self) -> None:
        """Bring the lists of workers and peers that routers receive up to date."""
        records, workers = self._state.record_by_name.values(), self._list_workers()
        peer_addresses = [
            record.launch.peer_address
            for record in records
            if record.kind is MemberKind.ROUTER and record.launch is not None
        ]
        if (workers, peer_addresses) != (self._published_workers, self._published_peer_addresses):
            self._list_version += 1
            self._published_workers, self._published_peer_addresses = workers, peer_addresses
        for record in records:
            if record.phase is Phase.DRAINING and not record.drain_list_version:
                record.drain_list_version = self._list_version

    def _list_workers(self) -> list[ListedWorker]:
        """List the workers that routers should know."""
        return [
            ListedWorker(record.launch.worker_settings, record.phase is not Phase.UP)
            for record in self._state.record_by_name.values()
            if record.kind is MemberKind.ENGINE and record.launch is not None
        ]

    def _get_router_report(self, record: MemberRecord) -> RouterReport | None:
        report = self._get_report(record)
        return None if report is None else report.router

    def _has_newest_lists(self, record: MemberRecord) -> bool:
        """Return whether a member knows the newest lists, as far as it should."""
        report = self._get_router_report(record)
        is_known = report is not None and report.list_version == self._list_version
        return is_known or record.kind is MemberKind.ENGINE

    def _list_routers(self) -> list[MemberRecord]:
        return [record for record in self._state.record_by_name.values() if record.kind is MemberKind.ROUTER]

    def _list_worker_statuses(self, record: MemberRecord) -> list[WorkerStatus]:
        """Return the state of a worker as each router reports it."""
        worker_id = str(record.launch.worker_settings.get("id")) if record.launch else ""
        reports = [self._get_router_report(router) for router in self._list_routers()]
        return [
            report.status_by_worker[worker_id] for report in reports if report and worker_id in report.status_by_worker
        ]

    def _count_in_flight(self, record: MemberRecord) -> int | None:
        """Count the requests that the routers that are up have at a worker; None while the number is not certain.

        When the worker drains, a report from before the drain does not count: its router may have sent requests since.
        """
        reports = [self._get_router_report(router) for router in self._list_routers() if router.phase is Phase.UP]
        if any(report is None or report.list_version < record.drain_list_version for report in reports):
            return None
        if record.phase is Phase.DRAINING and not record.drain_list_version:
            return None
        return sum(worker_status.in_flight for worker_status in self._list_worker_statuses(record))

    def _is_settled(self) -> bool:
        """Return whether the fleet is as wanted: nothing is left to start, replace or stop.

        Every wanted member is up, answers and has the right revision, and every router finds all engines up.
        """
        records = list(self._state.record_by_name.values())
        for kind, target in self._state.target_by_kind.items():
            records_of_kind = [record for record in records if record.kind is kind]
            if len(records_of_kind) != target.count:
                return False
            if any(record.phase is not Phase.UP or record.revision != target.revision for record in records_of_kind):
                return False
        reports = [self._get_report(record) for record in records]
        if any(report is None or report.program.silent_s for report in reports):
            return False
        router_reports = [self._get_router_report(router) for router in self._list_routers()]
        return all(
            report is not None
            and report.list_version == self._list_version
            and sum(status.is_up for status in report.status_by_worker.values()) == self._state.engine_target.count
            for report in router_reports
        )


def create_directory(spec: FleetSpec, engine_count: int, router_count: int) -> Any:
    """Start the directory of a new fleet, which starts the fleet's programs.

    Ray restarts it whenever it dies, and it outlives the process that calls this. Raises ValueError if the cluster has
    a fleet of this name.
    """
    initial_state = DirectoryState(
        spec=spec, engine_target=MemberTarget(engine_count), router_target=MemberTarget(router_count)
    )
    actor_class = ray.remote(DirectoryActor).options(
        name=f"{spec.name}-directory", namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=-1, max_task_retries=-1, max_concurrency=16,
    )  # fmt: skip
    return actor_class.remote(spec.name, msgspec.json.encode(initial_state))


def delete_fleet(name: str, directory: Any) -> None:
    """Kill the directory and delete its stored state, once the last member has gone."""
    ray.kill(directory)
    internal_kv._internal_kv_del(f"fleet/{name}".encode(), namespace=NAMESPACE)
