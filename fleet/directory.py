"""The directory of a fleet: the actor that starts and stops the members by the plan, and tells routers their workers.

If the actor dies, Ray restarts it, on another node if need be. Its state is stored with Ray before it acts, so the new
actor finds its members by their names. Meanwhile no member is started or stopped, and routers keep their workers.

No request passes through the directory. It asks each member for its next status, a call that returns when the status
changes. Routers report their load once a second, and when their list of workers has changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleet.cluster import compute_node_capacities
from fleet.guard import exit_with_parent
from fleet.member import MemberActor, MemberStatus, RouterReport
from fleet.plan import (
    Member,
    MemberKind,
    MemberTarget,
    Phase,
    PhaseChange,
    SlotFailure,
    StartAction,
    make_next_failure,
    pick_least_occupied_node,
    plan_actions,
)
from fleet.spec import NAMESPACE, Launch
from fleet.state import DirectoryState, MemberRecord
from fleet.worker_list import ListedWorker, WorkerStatus

log = logging.getLogger("fleet")

MAX_LOOP_PAUSE_S = 0.25
ROUTER_SYNC_S = 1.0
"""Seconds between two reads of a router's load."""
MAX_EVENTS = 200
STARTS_PER_PASS = 4
"""Most members started in one pass: Ray takes up to two seconds for each on a busy node, and status requests wait
meanwhile."""


def _wait_for_calls(pending_calls: list[Any], timeout_s: float) -> list[Any]:
    """Wait for one of the remote calls, and return all that are finished then. Sleep if there are no calls."""
    if not pending_calls:
        time.sleep(timeout_s)
        return []
    finished_calls, _ = ray.wait(pending_calls, num_returns=1, timeout=timeout_s)
    if finished_calls:
        finished_calls, _ = ray.wait(pending_calls, num_returns=len(pending_calls), timeout=0)
    return list(finished_calls)


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
        self._actor_by_member: dict[str, Any] = {}
        self._callback_by_call: dict[Any, Callable[[Any, Exception | None], None]] = {}
        """Function for the result of each remote call that is not finished."""
        self._failure_by_slot: dict[tuple[MemberKind, int], SlotFailure] = {}
        self._report_by_router: dict[str, RouterReport] = {}
        """Newest report of each router, by member name."""
        self._silent_since_s_by_member: dict[str, float] = {}
        """Time since which each silent member has not answered."""
        self._synced_at_s_by_router: dict[str, float] = {}
        """Time at which the lists were last sent to each router."""
        self._syncing_router_names: set[str] = set()
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
            for slot_key in [slot_key for slot_key in self._failure_by_slot if slot_key[0] is kind]:
                del self._failure_by_slot[slot_key]
            self._record_event(f"roll: {kind.value}s to revision {target.revision}")

    def stop_all(self, *, now: bool) -> None:
        """Stop all members, routers first, which finish their requests; `now` kills all of them."""
        with self._lock:
            self.scale(0, 0)
            if now:
                for record in list(self._state.record_by_name.values()):
                    record.phase = Phase.STOPPING
                    self._remove_member(record, "killed")

    def status(self) -> dict[str, Any]:
        """Return what `fleet status` shows of the fleet, its members and recent events, as JSON values."""
        with self._lock:
            state, now = self._state, time.time()
            router_names = self._list_routers_up()
            records = sorted(state.record_by_name.values(), key=lambda record: (record.kind, record.slot, record.name))
            failure_rows = [
                {
                    "kind": kind.value,
                    "slot": slot,
                    "failures": failure.failure_count,
                    "retry_in_s": max(0.0, failure.retry_at_s - now),
                }
                for (kind, slot), failure in self._failure_by_slot.items()
            ]
            return {
                "name": state.spec.name, "settled": self._is_settled(),
                "members": [self._describe_member(record, router_names, now) for record in records],
                "failures": failure_rows,
                "hung": state.hung_count_by_kind,
                "targets": {kind.value: msgspec.to_builtins(target) for kind, target in state.target_by_kind.items()},
                "events": [[event_s, text] for event_s, text in self._events],
            }  # fmt: skip

    def _describe_member(self, record: MemberRecord, router_names: list[str], now: float) -> dict[str, Any]:
        """Return a member's row of `status`; a worker's row contains its load too."""
        row: dict[str, Any] = {
            "name": record.name, "kind": record.kind.value, "slot": record.slot, "revision": record.revision,
            "phase": record.phase.value, "seconds": now - record.phase_since_s, "node": record.node,
            "url": record.launch.url if record.launch else "",
            "silent_s": now - self._silent_since_s_by_member.get(record.name, now),
        }  # fmt: skip
        if record.kind is MemberKind.ENGINE:
            row["in_flight"] = self._count_in_flight(record, router_names)
            row |= self._measure_worker_load(record)
        return row

    # The loop --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Compare the fleet with its plan again and again; between, handle the results of remote calls."""
        while True:
            try:
                with self._lock:
                    self._run_once(time.time())
                    pending_calls = list(self._callback_by_call)
                finished_calls = _wait_for_calls(pending_calls, MAX_LOOP_PAUSE_S)
                with self._lock:
                    for call in finished_calls:
                        self._handle_result(call)
            except RayError as error:
                log.warning("a call to Ray failed, and the fleet's directory tries again: %s", error)
                time.sleep(MAX_LOOP_PAUSE_S)
            except BaseException:
                log.exception("the fleet's directory ends, and Ray will restart it")
                os._exit(1)  # the actor would live on without this thread

    def _handle_result(self, call: Any) -> None:
        callback = self._callback_by_call.pop(call)
        try:
            result = ray.get(call)
        except RayError as error:
            callback(None, error)
        else:
            callback(result, None)

    def _run_once(self, now: float) -> None:
        """Take the actions that the plan wants now, and save the state if it has changed."""
        state = self._state
        router_names = self._list_routers_up()
        members = []
        for record in state.record_by_name.values():
            is_draining = record.phase is Phase.DRAINING
            in_flight = self._count_in_flight(record, router_names) if is_draining else None
            members.append(Member(*record.plan_fields, in_flight))
        start_count = 0
        for action in plan_actions(state.target_by_kind, members, self._failure_by_slot, state.timeouts, now):
            if isinstance(action, PhaseChange):
                self._change_phase(action, now)
            elif start_count < STARTS_PER_PASS:
                start_count += 1
                self._start_member(action, now)
        self._sync_routers(now)
        if self._has_unsaved_changes:
            self._save()

    def _save(self) -> None:
        internal_kv._internal_kv_put(
            self._storage_key, msgspec.json.encode(self._state), overwrite=True, namespace=NAMESPACE
        )
        self._has_unsaved_changes = False

    def _record_event(self, text: str) -> None:
        self._has_unsaved_changes = True
        self._events.append((time.time(), text))
        log.info("%s", text)

    # Members --------------------------------------------------------------------------------------------------------

    def _start_member(self, action: StartAction, now: float) -> None:
        """Start the actor of a new member, on the node with the fewest members of its kind, and watch it.

        The member is saved first, so that a restarted directory knows of it.
        """
        state, kind = self._state, action.kind
        state.last_serial += 1
        record = MemberRecord(
            name=f"{state.spec.name}-{kind.value}-{action.slot}-{state.last_serial}",
            kind=kind, slot=action.slot, revision=state.target_by_kind[kind].revision, phase_since_s=now,
        )  # fmt: skip
        resources = state.spec.get_required_resources(kind)
        occupied_nodes = [member.node for member in state.record_by_name.values() if member.kind is kind]
        record.node = pick_least_occupied_node(compute_node_capacities(resources), occupied_nodes) or ""
        state.record_by_name[record.name] = record
        self._record_event(f"{record.name}: start")
        self._save()
        self._watch_member(record, self._create_actor(record, resources))

    def _create_actor(self, record: MemberRecord, resources: dict[str, float]) -> Any:
        """Create the Ray actor that runs a member's program, where all of the resources are on one node."""
        workers: list[Mapping[str, str | int]] = []
        if record.kind is MemberKind.ROUTER:
            workers = [worker.settings for worker in self._list_workers() if not worker.is_draining]
        placement = placement_group(
            [resources], strategy="STRICT_PACK", name=record.name, lifetime="detached",
            _soft_target_node_id=record.node or None,
        )  # fmt: skip
        actor_class = ray.remote(MemberActor).options(
            name=record.name, namespace=NAMESPACE, lifetime="detached", max_concurrency=16,
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=0),
        )  # fmt: skip
        return actor_class.remote(msgspec.json.encode(self._state.spec), record.kind.value, record.slot, workers)

    def _adopt_member(self, record: MemberRecord) -> None:
        """Watch a member that an earlier directory process started."""
        try:
            actor = ray.get_actor(record.name, namespace=NAMESPACE)
        except ValueError:
            self._remove_member(record, "its actor is not there")
            return
        self._watch_member(record, actor)
        if record.phase is Phase.STOPPING:
            self._register_callback(actor.stop.remote(), lambda *_: None)

    def _watch_member(self, record: MemberRecord, actor: Any) -> None:
        self._actor_by_member[record.name] = actor
        self._request_status(record, MemberStatus())

    def _request_status(self, record: MemberRecord, last_status: MemberStatus) -> None:
        """Ask a member for its next status, as long as it belongs to the fleet."""
        if record.name in self._actor_by_member:
            call = self._actor_by_member[record.name].wait_for_status.remote(last_status)
            self._register_callback(call, lambda status, error: self._handle_status(record, last_status, status, error))

    def _handle_status(
        self, record: MemberRecord, last_status: MemberStatus, status: MemberStatus | None, error: Exception | None
    ) -> None:
        """Record what changed since a member's last status, and ask for the next one, unless the member is gone.

        `status` is None if the call failed, because the member's actor has died.
        """
        if record.name not in self._state.record_by_name:
            return
        if status is None:
            self._remove_member(record, f"lost: {error}")
            return
        if status.launch is not None and last_status.launch is None:
            self._mark_up(record, status, status.launch)
        if status.is_silent != last_status.is_silent:
            self._record_event(f"{record.name}: {'does not answer' if status.is_silent else 'answers again'}")
            self._silent_since_s_by_member.pop(record.name, None)
            if status.is_silent:
                self._silent_since_s_by_member[record.name] = time.time()
        if status.was_hung and not last_status.was_hung:
            kind = record.kind.value
            self._state.hung_count_by_kind[kind] = self._state.hung_count_by_kind.get(kind, 0) + 1
            self._record_event(f"{record.name}: killed, it did not answer for {self._state.spec.hang_timeout_s:g} s")
        if status.exit_reason is not None:
            self._remove_member(record, status.exit_reason)
        else:
            self._request_status(record, status)

    def _register_callback(self, call: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        self._callback_by_call[call] = callback

    def _mark_up(self, record: MemberRecord, status: MemberStatus, launch: Launch) -> None:
        record.launch, record.node = launch, status.node
        if record.phase is Phase.STARTING:
            record.phase, record.phase_since_s, record.up_since_s = Phase.UP, time.time(), time.time()
            self._record_event(f"{record.name}: up at {record.launch.url}, process {status.pid}")

    def _change_phase(self, action: PhaseChange, now: float) -> None:
        record = self._state.record_by_name[action.name]
        previous_phase, record.phase, record.phase_since_s = record.phase, action.phase, now
        record.drain_list_version = 0
        self._record_event(f"{record.name}: {previous_phase.value} -> {action.phase.value}")
        if action.phase is not Phase.STOPPING:
            return
        if action.has_failed:
            self._record_failure(record)
        if previous_phase is Phase.STARTING:  # it may not even have a place yet
            self._remove_member(record, "did not start in time" if action.has_failed else "not wanted any more")
        else:
            self._register_callback(self._actor_by_member[record.name].stop.remote(), lambda *_: None)

    def _record_failure(self, record: MemberRecord) -> None:
        now, slot_key = time.time(), (record.kind, record.slot)
        self._failure_by_slot[slot_key] = make_next_failure(
            self._failure_by_slot.get(slot_key), now - record.up_since_s if record.up_since_s else 0.0, now
        )

    def _remove_member(self, record: MemberRecord, reason: str) -> None:
        """Forget a member that ended, and free its place. An end that was not planned is a failure of its slot."""
        if self._state.record_by_name.pop(record.name, None) is None:
            return
        if record.phase in (Phase.STARTING, Phase.UP):
            self._record_failure(record)
        self._record_event(f"{record.name}: gone: {reason.strip()[:2000]}")
        self._report_by_router.pop(record.name, None)
        self._silent_since_s_by_member.pop(record.name, None)
        actor = self._actor_by_member.pop(record.name, None)
        if actor is not None:
            ray.kill(actor)
        try:
            remove_placement_group(get_placement_group(record.name))
        except ValueError:
            log.info("%s: its placement group is gone already", record.name)

    # Routers ---------------------------------------------------------------------------------------------------------

    def _sync_routers(self, now: float) -> None:
        """Send the lists of workers and peers to every router: at once if they changed, else once a second.

        Each call also brings back the router's report. A router has one such call at a time.
        """
        members, workers = self._state.record_by_name.values(), self._list_workers()
        routers = [member for member in members if member.kind is MemberKind.ROUTER and member.launch is not None]
        peer_addresses = [member.launch.peer_address for member in routers if member.launch is not None]
        if (workers, peer_addresses) != (self._published_workers, self._published_peer_addresses):
            self._list_version += 1
            self._published_workers, self._published_peer_addresses = workers, peer_addresses
        for member in members:
            if member.phase is Phase.DRAINING and not member.drain_list_version:
                member.drain_list_version = self._list_version
        for router in routers:
            if router.name in self._syncing_router_names or not self._is_sync_due(router.name, now):
                continue
            self._syncing_router_names.add(router.name)
            self._synced_at_s_by_router[router.name] = now
            call = self._actor_by_member[router.name].sync_router.remote(
                self._list_version, self._published_workers, self._published_peer_addresses
            )
            self._register_callback(call, partial(self._handle_router_report, router.name))

    def _is_sync_due(self, router_name: str, now: float) -> bool:
        """Return whether to send the lists to a router: it lacks the newest version, or its report is old."""
        report = self._report_by_router.get(router_name)
        elapsed_s = now - self._synced_at_s_by_router.get(router_name, 0.0)
        if report is None:
            return elapsed_s >= MAX_LOOP_PAUSE_S  # the last call failed, and is not repeated at once
        return report.list_version != self._list_version or elapsed_s >= ROUTER_SYNC_S

    def _list_workers(self) -> list[ListedWorker]:
        """List the workers that routers should know."""
        return [
            ListedWorker(record.launch.worker_settings, record.phase is not Phase.UP)
            for record in self._state.record_by_name.values()
            if record.kind is MemberKind.ENGINE and record.launch is not None
        ]

    def _handle_router_report(self, router_name: str, report: RouterReport | None, error: Exception | None) -> None:
        self._syncing_router_names.discard(router_name)
        if report is None:
            self._report_by_router.pop(router_name, None)  # what it said is old
            log.warning("%s: %s", router_name, error)
        elif router_name in self._state.record_by_name:
            self._report_by_router[router_name] = report
            for error_text in report.errors:
                self._record_event(f"{router_name}: {error_text}")

    def _list_worker_statuses(self, record: MemberRecord) -> list[WorkerStatus]:
        worker_id = str(record.launch.worker_settings.get("id")) if record.launch else ""
        return [
            report.status_by_worker[worker_id]
            for report in self._report_by_router.values()
            if worker_id in report.status_by_worker
        ]

    def _list_routers_up(self) -> list[str]:
        return [
            record.name
            for record in self._state.record_by_name.values()
            if record.kind is MemberKind.ROUTER and record.phase is Phase.UP
        ]

    def _count_in_flight(self, record: MemberRecord, router_names: list[str]) -> int | None:
        """Count the requests that these routers have at a worker; None while the number is not certain.

        When the worker drains, a report from before the drain does not count: its router may have sent requests since.
        """
        reports = [self._report_by_router.get(name) for name in router_names]
        if any(report is None or report.list_version < record.drain_list_version for report in reports):
            return None
        if record.phase is Phase.DRAINING and not record.drain_list_version:
            return None
        return sum(worker_status.in_flight for worker_status in self._list_worker_statuses(record))

    def _measure_worker_load(self, record: MemberRecord) -> dict[str, float]:
        statuses = self._list_worker_statuses(record)
        return {"queue_s": max((status.queue_s for status in statuses), default=0.0),
                "prefill_share": max((status.prefill_share for status in statuses), default=0.0)}  # fmt: skip

    def _is_settled(self) -> bool:
        """Return whether the fleet is as wanted: nothing is left to start, replace or stop.

        Every wanted member is up, answers and has the right revision, and every router finds all engines up.
        """
        if self._silent_since_s_by_member:
            return False
        members = list(self._state.record_by_name.values())
        for kind, target in self._state.target_by_kind.items():
            members_of_kind = [member for member in members if member.kind is kind]
            is_as_wanted = all(
                member.phase is Phase.UP and member.revision == target.revision for member in members_of_kind
            )
            if len(members_of_kind) != target.count or not is_as_wanted:
                return False
        engine_count = sum(member.kind is MemberKind.ENGINE for member in members)
        reports = [self._report_by_router.get(member.name) for member in members if member.kind is MemberKind.ROUTER]
        return all(
            report is not None
            and report.list_version == self._list_version
            and sum(worker_status.is_up for worker_status in report.status_by_worker.values()) == engine_count
            for report in reports
        )
