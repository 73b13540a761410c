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
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleet.guard import exit_with_parent
from fleet.member import MemberActor, MemberReport
from fleet.plan import LIVE_PHASES, Member, MemberTarget, Phase, PhaseChange, StartAction, plan_actions
from fleet.program import TimedEvent
from fleet.spec import NAMESPACE, FleetSpec, MemberKind
from fleet.worker_list import ListedWorker, WorkerStatus

log = logging.getLogger("fleet")

PASS_S = 0.25
"""Longest pause of the loop, and shortest time between two reports of a member."""
REPORT_S = 1.0
"""Time between two reports of a member while all members are up."""
FAILED_START_PAUSE_S = 5.0
"""Time without starts after an actor died before its program served."""
OLD_NODE_S_MAX = 30.0
"""Longest wait of a router for room on the node of its slot's earlier router, before another node is tried."""
MAX_EVENTS = 200
STARTS_PER_PASS = 4
"""Most members started in one pass: Ray takes up to two seconds for each on a busy node, and reports wait meanwhile."""


class DirectoryState(msgspec.Struct, kw_only=True):
    """Everything that the directory stores in Ray, so that it finds its fleet again after a restart."""

    spec: FleetSpec
    target_by_kind: dict[MemberKind, MemberTarget]
    member_by_name: dict[str, Member] = {}
    node_by_router_slot: dict[int, str] = {}
    """Node on which the newest router of each slot runs or ran."""
    last_serial: int = 0
    """Number at the end of the newest member's name."""


@dataclass
class MemberLink:
    """The actor of a member, and what it has reported."""

    actor: Any
    created_at_s: float
    call: Any = None
    """The call of `report` that has not returned yet."""
    called_at_s: float = 0.0
    report: MemberReport = field(default_factory=MemberReport)
    """The newest report; an empty one before the first."""
    is_placed: bool = False
    """Whether the actor is known to have a node: it has answered a call, if only with an error."""
    has_warned: bool = False
    """Whether it was logged that no node has room for the member."""


class DirectoryActor:
    """Actor that starts, watches and stops the members of one fleet.

    Its public methods are called by the command line, and wait at most until a pass of the thread has ended.
    """

    def __init__(self, name: str, initial_state: bytes) -> None:
        """Load the fleet's state that Ray has stored, or else `initial_state`, and start the thread that acts on it.

        `name`: name of the fleet. `initial_state`: a DirectoryState as JSON, for a new fleet.
        """
        exit_with_parent()
        stored_state = internal_kv._internal_kv_get(_make_storage_key(name), namespace=NAMESPACE)
        self._state = msgspec.json.decode(stored_state or initial_state, type=DirectoryState)
        self._has_unsaved_changes = True
        self._lock = threading.RLock()
        """Held by the thread during each pass, and by the public methods."""
        self._link_by_member: dict[str, MemberLink] = {}
        """Actors of the members, by the member's name."""
        self._clock_offset_s = time.time() - time.monotonic()
        """Seconds since 1970 at which the monotonic clock began, as the system's clock had it at the start."""
        self._next_start_at_s = 0.0
        """Time before which no member is started."""
        self._events: deque[TimedEvent] = deque(maxlen=MAX_EVENTS)
        """Newest events of the fleet."""
        for member in list(self._state.member_by_name.values()):
            self._adopt_member(member)
        threading.Thread(target=self._run, daemon=True).start()

    def scale(self, engine_count: int | None, router_count: int | None) -> None:
        """Set how many engines and routers there should be; None leaves a number as it is."""
        with self._lock:
            targets = self._state.target_by_kind
            for kind, count in ((MemberKind.ENGINE, engine_count), (MemberKind.ROUTER, router_count)):
                if count is not None:
                    targets[kind] = replace(targets[kind], count=count)
            engine_target, router_target = targets[MemberKind.ENGINE], targets[MemberKind.ROUTER]
            self._record_event(f"scale: {engine_target.count} engines, {router_target.count} routers")

    def roll(self, kind: MemberKind, spec_changes: dict[str, Any], should_surge: bool) -> None:
        """Replace all members of a kind, one by one, after changing these fields of the spec."""
        with self._lock:
            state = self._state
            state.spec = msgspec.structs.replace(state.spec, **spec_changes)
            old_target = state.target_by_kind[kind]
            target = MemberTarget(old_target.count, old_target.revision + 1, should_surge)
            state.target_by_kind[kind] = target
            self._record_event(f"roll: {kind.value}s to revision {target.revision}")

    def stop_all(self, *, now: bool) -> None:
        """Stop all members, routers first, which finish their requests; `now` kills all of them."""
        with self._lock:
            self.scale(0, 0)
            if now:
                for member in list(self._state.member_by_name.values()):
                    self._remove_member(member, "killed")

    def status(self) -> dict[str, Any]:
        """Return what `fleet status` shows of the fleet, its members and recent events, as JSON values."""
        with self._lock:
            state, now = self._state, self._now()
            members = sorted(state.member_by_name.values(), key=lambda member: (member.kind, member.slot, member.name))
            programs = [(member, self._get_report(member).program) for member in members]
            hung_count_by_kind = Counter[str]()
            for member, program in programs:
                hung_count_by_kind[member.kind.value] += program.hung_count
            return {
                "name": state.spec.name, "settled": self._is_settled(),
                "members": [self._describe_member(member, now) for member in members],
                "failures": [
                    {"kind": member.kind.value, "slot": member.slot, "failures": program.failure_count,
                     "retry_in_s": max(0.0, program.retry_at_s - now)}
                    for member, program in programs if program.failure_count
                ],
                "hung": {kind: count for kind, count in hung_count_by_kind.items() if count},
                "targets": {kind.value: msgspec.to_builtins(target) for kind, target in state.target_by_kind.items()},
                "events": [list(event) for event in self._events],
            }  # fmt: skip

    def _describe_member(self, member: Member, now: float) -> dict[str, Any]:
        """Return the row of a worker or router in `fleet status`: its node, phase and address, and a worker's load."""
        report = self._get_report(member)
        row: dict[str, Any] = {
            "name": member.name, "kind": member.kind.value, "slot": member.slot, "revision": member.revision,
            "phase": member.phase.value, "seconds": now - member.phase_since_s, "node": report.node,
            "url": member.launch.url if member.launch else "", "silent_s": report.program.silent_s,
            "wait": self._describe_wait(member),
        }  # fmt: skip
        if member.kind is MemberKind.ENGINE:
            statuses = self._list_worker_statuses(member)
            row["in_flight"] = sum(status.in_flight for status in statuses)
            row["queue_s"] = max((status.queue_s for status in statuses), default=0.0)
            row["prefill_share"] = max((status.prefill_share for status in statuses), default=0.0)
        return row

    def _run(self) -> None:
        """Keep the fleet as wanted, for ever: do what is due, then wait until workers and routers have reported."""
        while True:
            try:
                with self._lock:
                    self._run_once(self._now())
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
                os._exit(1)  # otherwise the actor would live on without this thread

    def _now(self) -> float:
        """Return seconds since 1970, of a clock that goes on while the system's is set back or forth."""
        return self._clock_offset_s + time.monotonic()

    def _run_once(self, now: float) -> None:
        """Read the reports of workers and routers, start and stop some of them by the plan, and ask for new reports."""
        state = self._state
        self._read_reports(now)
        self._limit_waits_for_room(now)
        members = list(state.member_by_name.values())
        for member in members:
            member.in_flight = self._count_in_flight(member) if member.phase is Phase.DRAINING else None
        is_start_paused = now < self._next_start_at_s  # a start has failed, which was read above
        remaining_starts = 0 if is_start_paused else STARTS_PER_PASS
        for action in plan_actions(state.target_by_kind, members, state.spec.drain_timeout_s, now):
            if isinstance(action, PhaseChange):
                self._change_phase(action, now)
            elif remaining_starts:
                remaining_starts -= 1
                self._start_member(action, now)
        self._request_reports(now)
        if self._has_unsaved_changes:
            self._save()

    def _save(self) -> None:
        storage_key = _make_storage_key(self._state.spec.name)
        internal_kv._internal_kv_put(storage_key, msgspec.json.encode(self._state), overwrite=True, namespace=NAMESPACE)
        self._has_unsaved_changes = False

    def _record_event(self, text: str, at_s: float | None = None) -> None:
        """Log an event and list it in `status`. `at_s`: time of the event; None: now. The state has changed with it."""
        self._has_unsaved_changes = True
        self._events.append(TimedEvent(time.time() if at_s is None else at_s, text))
        log.info("%s", text)

    def _start_member(self, action: StartAction, now: float) -> None:
        """Start the actor of a new member (worker or router), which starts the program on a node that Ray chooses.

        The member is saved before its actor is made, so that a restarted directory never misses an actor.
        """
        state = self._state
        state.last_serial += 1
        member = Member(
            name=f"{state.spec.name}-{action.kind.value}-{action.slot}-{state.last_serial}",
            kind=action.kind,
            slot=action.slot,
            revision=state.target_by_kind[action.kind].revision,
            phase_since_s=now,
        )
        state.member_by_name[member.name] = member
        self._record_event(f"{member.name}: start")
        self._save()
        actor_class = ray.remote(MemberActor).options(**self._make_actor_options(member))
        actor = actor_class.remote(
            msgspec.json.encode(state.spec), member.kind.value, member.slot, self._list_workers()
        )
        self._link_by_member[member.name] = MemberLink(actor, now)

    def _make_actor_options(self, member: Member) -> dict[str, Any]:
        """Return Ray's options for a member's actor: its name, what it reserves, and how its node is chosen.

        A router returns to its old node, so that clients find it at its address. Other members are spread.
        """
        spec, old_node = self._state.spec, self._find_old_node(member)
        is_engine = member.kind is MemberKind.ENGINE
        return {
            "name": member.name,
            "namespace": NAMESPACE,
            "lifetime": "detached",  # it outlives this directory process
            "max_concurrency": 16,
            "num_cpus": spec.worker_cpus if is_engine else spec.router_cpus,
            "num_gpus": spec.worker_gpus if is_engine else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(old_node, soft=True) if old_node else "SPREAD",
        }

    def _limit_waits_for_room(self, now: float) -> None:
        """Give up the wait of routers for room on their old nodes, and log which members no node has room for."""
        for member in list(self._state.member_by_name.values()):
            link = self._link_by_member[member.name]
            if link.is_placed or now - link.created_at_s < OLD_NODE_S_MAX:
                continue
            if self._find_old_node(member) is not None:
                del self._state.node_by_router_slot[member.slot]
                self._remove_member(member, "its old node has no room, and another one is tried")
            elif not link.has_warned:
                link.has_warned = True
                self._record_event(f"{member.name}: {self._describe_wait(member)}")

    def _describe_wait(self, member: Member) -> str:
        """Return for which resources a member waits; an empty text for one that has a node."""
        if self._link_by_member[member.name].is_placed:
            return ""
        old_node, options = self._find_old_node(member), self._make_actor_options(member)
        resources = f"{options['num_cpus']:g} CPUs" + (f", {options['num_gpus']} GPUs" if options["num_gpus"] else "")
        return f"waits for {resources} on {f'node {old_node[:8]}' if old_node else 'any node'}"

    def _find_old_node(self, member: Member) -> str | None:
        """Return the node of the earlier router of this slot; None for an engine or a new slot."""
        return self._state.node_by_router_slot.get(member.slot) if member.kind is MemberKind.ROUTER else None

    def _adopt_member(self, member: Member) -> None:
        try:
            actor = ray.get_actor(member.name, namespace=NAMESPACE)
        except ValueError:
            self._remove_member(member, "its actor is not there")
            return
        self._link_by_member[member.name] = MemberLink(actor, self._now(), is_placed=member.launch is not None)
        if member.phase is Phase.STOPPING:
            actor.stop.remote()

    def _request_reports(self, now: float) -> None:
        """Ask for the reports that are due, more often while the fleet changes. A member has one call at a time."""
        members = self._state.member_by_name.values()
        interval_s = REPORT_S if all(member.phase is Phase.UP for member in members) else PASS_S
        workers = self._list_workers()
        peer_addresses = [member.launch.peer_address for member in self._list_routers() if member.launch is not None]
        for member in members:
            link = self._link_by_member[member.name]
            if link.call is None and now - link.called_at_s >= interval_s:
                lists = (workers, peer_addresses) if member.kind is MemberKind.ROUTER else ()
                link.called_at_s, link.call = now, link.actor.report.remote(*lists)

    def _read_reports(self, now: float) -> None:
        """Read the reports that have come, without waiting for others."""
        call_by_name = {name: link.call for name, link in self._link_by_member.items() if link.call is not None}
        if not call_by_name:
            return
        finished_calls, _ = ray.wait(list(call_by_name.values()), num_returns=len(call_by_name), timeout=0)
        for name, call in call_by_name.items():
            if call in finished_calls:
                self._link_by_member[name].call = None
                self._read_report(self._state.member_by_name[name], call, now)

    def _read_report(self, member: Member, call: Any, now: float) -> None:
        """Record the report of a member (worker or router): the state of its program, and its events.

        `call`: Ray's handle of the finished call that returned the report. If the member's code raised an error, the
        member stays as it is. If its actor has died, the member is removed, and the next plan starts another one.
        """
        link = self._link_by_member[member.name]
        try:
            report: MemberReport = ray.get(call)
        except RayTaskError as error:
            link.is_placed = True
            log.warning("%s: no report: %s", member.name, error)
            return
        except RayError as error:
            if member.phase is Phase.STARTING:  # a node may lack what an actor needs
                self._next_start_at_s = now + FAILED_START_PAUSE_S
            self._remove_member(member, f"lost: {error}")
            return
        link.report = report
        link.is_placed = True
        for event_s, text in report.events:
            self._record_event(f"{member.name}: {text}", event_s)
        member.launch = report.program.launch
        if member.kind is MemberKind.ROUTER:
            self._state.node_by_router_slot[member.slot] = report.node
        self._follow_reported_phase(member, report.program.has_stopped, now)

    def _follow_reported_phase(self, member: Member, has_stopped: bool, now: float) -> None:
        """Record that a member's program serves now, or starts again. Remove the member if its program has stopped."""
        reported_phase = Phase.UP if member.launch is not None else Phase.STARTING
        if has_stopped:
            self._remove_member(member, "stopped")
        elif member.phase is Phase.DRAINING and member.launch is None:
            self._remove_member(member, "ended before it had drained")
        elif member.phase in LIVE_PHASES and member.phase is not reported_phase:
            member.phase = reported_phase
            member.phase_since_s = now
            self._has_unsaved_changes = True

    def _change_phase(self, action: PhaseChange, now: float) -> None:
        """Move a member to the phase that the plan wants, and stop its program if it is to stop."""
        member = self._state.member_by_name[action.name]
        previous_phase = member.phase
        member.phase = action.phase
        member.phase_since_s = now
        self._record_event(f"{member.name}: {previous_phase.value} -> {action.phase.value}")
        if previous_phase is Phase.STARTING:  # it may not even have a place yet
            self._remove_member(member, "not wanted any more")
        elif action.phase is Phase.STOPPING:
            self._link_by_member[member.name].actor.stop.remote()

    def _remove_member(self, member: Member, reason: str) -> None:
        """Forget a member, and end its actor with its program."""
        del self._state.member_by_name[member.name]
        if member.kind is MemberKind.ROUTER and member.slot >= self._state.target_by_kind[MemberKind.ROUTER].count:
            # A later router of this slot does not wait for a node that may have no room by then.
            self._state.node_by_router_slot.pop(member.slot, None)
        self._record_event(f"{member.name}: gone: {reason.strip()[:2000]}")
        link = self._link_by_member.pop(member.name, None)
        if link is not None:
            ray.kill(link.actor)

    def _get_report(self, member: Member) -> MemberReport:
        return self._link_by_member[member.name].report

    def _list_workers(self) -> list[ListedWorker]:
        return [
            ListedWorker(member.launch.worker_settings, member.phase is not Phase.UP)
            for member in self._state.member_by_name.values()
            if member.kind is MemberKind.ENGINE and member.launch is not None
        ]

    def _list_routers(self) -> list[Member]:
        return [member for member in self._state.member_by_name.values() if member.kind is MemberKind.ROUTER]

    def _list_worker_statuses(self, member: Member) -> list[WorkerStatus]:
        worker_id = str(member.launch.worker_settings.get("id")) if member.launch else ""
        pages = [self._get_report(router).status_by_worker or {} for router in self._list_routers()]
        return [page[worker_id] for page in pages if worker_id in page]

    def _count_in_flight(self, member: Member) -> int | None:
        """Count the requests of all routers at a worker that drains; None while the number is not certain.

        It is certain once each router that is up has reported, and none reports the worker as up: then none sends it
        further requests.
        """
        routers_up = [router for router in self._list_routers() if router.phase is Phase.UP]
        if any(self._get_report(router).status_by_worker is None for router in routers_up):
            return None
        statuses = self._list_worker_statuses(member)
        if any(status.is_up for status in statuses):
            return None
        return sum(status.in_flight for status in statuses)

    def _is_settled(self) -> bool:
        """Return whether the fleet is as wanted: nothing is left to start, replace or stop.

        Every wanted worker and router is up, answers and has the right revision, and every router finds all workers up.
        """
        targets = self._state.target_by_kind
        members = self._state.member_by_name.values()
        member_count_by_kind = Counter(member.kind for member in members)
        if any(member_count_by_kind[kind] != target.count for kind, target in targets.items()):
            return False
        for member in members:
            report, target = self._get_report(member), targets[member.kind]
            is_answering = report.program.launch is not None and not report.program.silent_s
            if not is_answering or member.phase is not Phase.UP or member.revision != target.revision:
                return False
            if member.kind is MemberKind.ROUTER:
                up_count = sum(status.is_up for status in (report.status_by_worker or {}).values())
                if up_count != targets[MemberKind.ENGINE].count:
                    return False
        return True


def create_directory(spec: FleetSpec, engine_count: int, router_count: int) -> Any:
    """Start the directory of a new fleet, which starts the fleet's programs.

    Ray restarts it whenever it dies, and it outlives the process that calls this. Raises ValueError if the cluster has
    a fleet of this name.
    """
    target_by_kind = {MemberKind.ENGINE: MemberTarget(engine_count), MemberKind.ROUTER: MemberTarget(router_count)}
    initial_state = DirectoryState(spec=spec, target_by_kind=target_by_kind)
    actor_class = ray.remote(DirectoryActor).options(
        name=f"{spec.name}-directory", namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=-1, max_task_retries=-1, max_concurrency=16,
    )  # fmt: skip
    return actor_class.remote(spec.name, msgspec.json.encode(initial_state))


def delete_fleet(name: str, directory: Any) -> None:
    """Kill the directory and delete its stored state, once the last member has gone."""
    ray.kill(directory)
    internal_kv._internal_kv_del(_make_storage_key(name), namespace=NAMESPACE)


def _make_storage_key(fleet_name: str) -> bytes:
    return f"fleet/{fleet_name}".encode()
