"""The directory: the one actor that knows who is there, carries out the plan, and tells every router.

A detached actor that Ray starts anew, on another node if need be; what is wanted and who was started is kept in Ray's
own store before it is acted on, so a new life finds its members again by their names. While it is away nothing is
started or stopped, and routers go on with the workers that they know.

Nothing of a request passes here: a member is asked for its news (a call that waits until there are some), a router
once a second for its load, and at once when the list has changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleet.books import Listed, Row
from fleet.cluster import rooms
from fleet.guard import follow_parent
from fleet.member import MemberActor, News, Report
from fleet.plan import Failure, Kind, Member, Move, Phase, Start, Target, failed, lightest, plan
from fleet.scaling import Bounds, Load, Scaler
from fleet.spec import NAMESPACE, Launch
from fleet.state import Record, State

log = logging.getLogger("fleet")

TURN_S_MAX = 0.25
ASK_S = 1.0
"""Between two looks at a router's load."""
EVENTS_MAX = 200
STARTS_A_TURN = 4
"""Ray takes up to two seconds for one on a busy node, and who asks for the status waits meanwhile."""


class DirectoryActor:
    """See above. Its methods are for the command line; they return at once."""

    def __init__(self, name: str, first: bytes) -> None:
        follow_parent()
        self._key = f"fleet/{name}".encode()
        saved = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        self._state = msgspec.json.decode(saved or first, type=State)
        self._lock = threading.RLock()
        self._actors: dict[str, Any] = {}
        self._waiting: dict[Any, Callable[[Any, Exception | None], None]] = {}
        self._failures: dict[tuple[Kind, int], Failure] = {}
        self._reports: dict[str, Report] = {}
        """By router."""
        self._silent_s: dict[str, float] = {}
        """Who does not answer, since when."""
        self._asked_s: dict[str, float] = {}
        self._asking: set[str] = set()
        self._version, self._listed, self._peers = 1, list[Listed](), list[str]()
        self._scaler, self._scaled_s, self._advice = Scaler(), 0.0, ""
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_MAX)
        self._dirty = True
        for record in list(self._state.members.values()):
            record.drain = 0
            self._adopt(record)
        threading.Thread(target=self._run, daemon=True).start()

    # Asked by the command line ---------------------------------------------------------------------------------------

    def scale(self, engines: int | None, routers: int | None, bounds: Bounds | None) -> None:
        """`engines`: a fixed number, which ends autoscaling unless `bounds` come too."""
        with self._lock:
            state = self._state
            if bounds is not None or engines is not None:
                state.bounds, self._scaler, self._advice = bounds, Scaler(), ""
            if engines is not None:
                state.engines = _count(state.engines, engines)
            if routers is not None:
                state.routers = _count(state.routers, routers)
            self._note(f"scale: {state.engines.count} engines, {state.routers.count} routers, {bounds}")

    def roll(self, kind: Kind, changes: dict[str, Any], surge: bool) -> None:
        """Replace all of a kind, one by one, after these fields of the spec have changed."""
        with self._lock:
            state = self._state
            state.spec = msgspec.structs.replace(state.spec, **changes)
            old = state.targets[kind]
            target = Target(old.count, old.revision + 1, surge)
            if kind is Kind.ENGINE:
                state.engines = target
            else:
                state.routers = target
            for key in [key for key in self._failures if key[0] is kind]:
                del self._failures[key]
            self._note(f"roll: {kind.value}s to revision {target.revision}")

    def end(self, *, now: bool) -> None:
        """Stop all: routers first, which end what they have; `now`: kill."""
        with self._lock:
            self.scale(0, 0, None)
            if now:
                for record in list(self._state.members.values()):
                    record.phase = Phase.STOPPING
                    self._gone(record, "killed")

    def status(self) -> dict[str, Any]:
        """Everything, as values that JSON has."""
        with self._lock:
            now = time.time()
            members, routers = [], self._routers_up()
            for record in sorted(self._state.members.values(), key=lambda one: (one.kind.value, one.slot, one.name)):
                row: dict[str, Any] = {
                    "name": record.name, "kind": record.kind.value, "slot": record.slot, "revision": record.revision,
                    "phase": record.phase.value, "seconds": now - record.since_s, "node": record.node,
                    "url": record.launch.url if record.launch else "",
                    "silent_s": now - self._silent_s.get(record.name, now),
                }  # fmt: skip
                if record.kind is Kind.ENGINE:
                    row |= {"in_flight": self._in_flight(record, routers), **self._load_of(record)}
                members.append(row)
            waits = [
                {"kind": kind.value, "slot": slot, "failures": one.count, "retry_in_s": max(0.0, one.retry_s - now)}
                for (kind, slot), one in self._failures.items()
            ]
            state = self._state
            return {
                "name": state.spec.name, "settled": self._settled(), "members": members, "failures": waits,
                "hung": state.hung,
                "targets": {kind.value: msgspec.to_builtins(one) for kind, one in state.targets.items()},
                "autoscaling": msgspec.to_builtins(state.bounds), "advice": self._advice,
                "events": [[at, text] for at, text in self._events],
            }  # fmt: skip

    # The loop --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._turn(time.time())
                    waiting = list(self._waiting)
                if not waiting:
                    time.sleep(TURN_S_MAX)
                    continue
                ready, _ = ray.wait(waiting, num_returns=1, timeout=TURN_S_MAX)
                if ready:
                    ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                with self._lock:
                    for ref in ready:
                        self._heard(ref)
            except RayError as error:
                log.warning("the directory goes on: %s", error)
                time.sleep(TURN_S_MAX)
            except BaseException:
                log.exception("the directory ends; Ray starts it anew")
                os._exit(1)

    def _heard(self, ref: Any) -> None:
        take = self._waiting.pop(ref)
        try:
            value = ray.get(ref)
        except RayError as error:
            take(None, error)
        else:
            take(value, None)

    def _turn(self, now: float) -> None:
        state = self._state
        self._scale(now)
        routers = self._routers_up()
        members = [
            Member(*one.place, self._in_flight(one, routers) if one.phase is Phase.DRAINING else None)
            for one in state.members.values()
        ]
        starts = 0
        for action in plan(state.targets, members, self._failures, state.patience, now):
            if isinstance(action, Move):
                self._move(action, now)
            elif (starts := starts + 1) <= STARTS_A_TURN:
                self._start(action, now)
        self._tell(now)
        if self._dirty:
            self._save()

    def _save(self) -> None:
        internal_kv._internal_kv_put(self._key, msgspec.json.encode(self._state), overwrite=True, namespace=NAMESPACE)
        self._dirty = False

    def _note(self, text: str) -> None:
        self._dirty = True
        self._events.append((time.time(), text))
        log.info("%s", text)

    # Members --------------------------------------------------------------------------------------------------------

    def _start(self, action: Start, now: float) -> None:
        state, kind = self._state, action.kind
        state.serial += 1
        record = Record(
            name=f"{state.spec.name}-{kind.value}-{action.slot}-{state.serial}",
            kind=kind, slot=action.slot, revision=state.targets[kind].revision, since_s=now,
        )  # fmt: skip
        needs = state.spec.resources(kind)
        placed = [one.node for one in state.members.values() if one.kind is kind]
        record.node = lightest(rooms(needs), placed) or ""
        state.members[record.name] = record
        self._note(f"{record.name}: start")
        self._save()
        workers = [one.settings for one in self._list() if not one.draining] if kind is Kind.ROUTER else []
        group = placement_group(
            [needs], strategy="STRICT_PACK", name=record.name, lifetime="detached",
            _soft_target_node_id=record.node or None,
        )  # fmt: skip
        actor = (
            ray.remote(MemberActor)
            .options(
                name=record.name, namespace=NAMESPACE, lifetime="detached", max_concurrency=16,
                num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(msgspec.json.encode(state.spec), kind.value, action.slot, workers)
        )  # fmt: skip
        self._watch(record, actor)

    def _adopt(self, record: Record) -> None:
        """After a new life of the directory."""
        try:
            actor = ray.get_actor(record.name, namespace=NAMESPACE)
        except ValueError:
            self._gone(record, "its actor is not there")
            return
        self._watch(record, actor)
        if record.phase is Phase.STOPPING:
            self._await(actor.stop.remote(), lambda *_: None)

    def _watch(self, record: Record, actor: Any) -> None:
        self._actors[record.name] = actor
        self._ask_news(record, News())

    def _ask_news(self, record: Record, known: News) -> None:
        """Of a member, for as long as it is one."""
        if record.name in self._actors:
            call = self._actors[record.name].news.remote(known)
            self._await(call, lambda news, error: self._take_news(record, known, news, error))

    def _take_news(self, record: Record, known: News, news: News | None, error: Exception | None) -> None:
        if record.name not in self._state.members:
            return
        if news is None:
            self._gone(record, f"lost: {error}")
            return
        if news.launch is not None and known.launch is None:
            self._up(record, news, news.launch)
        if news.silent != known.silent:
            self._note(f"{record.name}: {'does not answer' if news.silent else 'answers again'}")
            self._silent_s.pop(record.name, None)
            if news.silent:
                self._silent_s[record.name] = time.time()
        if news.hung and not known.hung:
            kind = record.kind.value
            self._state.hung[kind] = self._state.hung.get(kind, 0) + 1
            self._note(f"{record.name}: killed, it did not answer for {self._state.spec.hang_s_max:g} s")
        if news.ended is not None:
            self._gone(record, news.ended)
        else:
            self._ask_news(record, news)

    def _await(self, ref: Any, take: Callable[[Any, Exception | None], None]) -> None:
        self._waiting[ref] = take

    def _up(self, record: Record, news: News, launch: Launch) -> None:
        record.launch, record.node = launch, news.node
        if record.phase is Phase.STARTING:
            record.phase, record.since_s, record.up_s = Phase.UP, time.time(), time.time()
            self._note(f"{record.name}: up at {record.launch.url}, process {news.pid}")

    def _move(self, action: Move, now: float) -> None:
        record = self._state.members[action.name]
        before, record.phase, record.since_s = record.phase, action.to, now
        record.drain = 0
        self._note(f"{record.name}: {before.value} -> {action.to.value}")
        if action.to is not Phase.STOPPING:
            return
        if action.failed:
            self._fails(record)
        if before is Phase.STARTING:  # it may not even have a place yet
            self._gone(record, "did not start in time" if action.failed else "not wanted any more")
        else:
            self._await(self._actors[record.name].stop.remote(), lambda *_: None)

    def _fails(self, record: Record) -> None:
        now, key = time.time(), (record.kind, record.slot)
        self._failures[key] = failed(self._failures.get(key), now - record.up_s if record.up_s else 0.0, now)

    def _gone(self, record: Record, why: str) -> None:
        if self._state.members.pop(record.name, None) is None:
            return
        if record.phase in (Phase.STARTING, Phase.UP):
            self._fails(record)
        self._note(f"{record.name}: gone: {why.strip()[:2000]}")
        self._reports.pop(record.name, None)
        self._silent_s.pop(record.name, None)
        actor = self._actors.pop(record.name, None)
        if actor is not None:
            ray.kill(actor)
        try:
            remove_placement_group(get_placement_group(record.name))
        except ValueError:
            log.info("%s: its placement group is gone already", record.name)

    # Routers ---------------------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> None:
        """Every router that is up: at once what has changed, and once a second."""
        members, listed = self._state.members.values(), self._list()
        routers = [one for one in members if one.kind is Kind.ROUTER and one.launch is not None]
        peers = [one.launch.peer for one in routers if one.launch is not None]
        if (listed, peers) != (self._listed, self._peers):
            self._version, self._listed, self._peers = self._version + 1, listed, peers
        for one in members:
            if one.phase is Phase.DRAINING and not one.drain:
                one.drain = self._version
        for router in routers:
            name, report = router.name, self._reports.get(router.name)
            due = report is None or report.version != self._version or now - self._asked_s.get(name, 0.0) >= ASK_S
            hasty = report is None and now - self._asked_s.get(name, 0.0) < TURN_S_MAX
            if due and not hasty and name not in self._asking:
                self._asking.add(name)
                self._asked_s[name] = now
                call = self._actors[name].sync.remote(self._version, self._listed, self._peers)
                self._await(call, partial(self._told, name))

    def _list(self) -> list[Listed]:
        """The workers that routers are to know."""
        return [
            Listed(one.launch.worker, one.phase is not Phase.UP)
            for one in self._state.members.values()
            if one.kind is Kind.ENGINE and one.launch is not None
        ]

    def _told(self, name: str, report: Report | None, error: Exception | None) -> None:
        self._asking.discard(name)
        if report is None:
            self._reports.pop(name, None)  # what it said is old
            log.warning("%s: %s", name, error)
        elif name in self._state.members:
            self._reports[name] = report
            for text in report.refused:
                self._note(f"{name}: {text}")

    def _worker_reports(self, record: Record) -> list[Row]:
        worker = str(record.launch.worker.get("id")) if record.launch else ""
        return [report.rows[worker] for report in self._reports.values() if worker in report.rows]

    def _routers_up(self) -> list[str]:
        return [one.name for one in self._state.members.values() if one.kind is Kind.ROUTER and one.phase is Phase.UP]

    def _in_flight(self, record: Record, routers: list[str]) -> int | None:
        """Requests that all these routers have there; None until each has said so after it was told to drain."""
        reports = [self._reports.get(name) for name in routers]
        if any(report is None or report.version < record.drain for report in reports):
            return None
        if record.phase is Phase.DRAINING and not record.drain:
            return None
        return sum(row.in_flight for row in self._worker_reports(record))

    def _load_of(self, record: Record) -> dict[str, float]:
        rows = self._worker_reports(record)
        return {"queue_s": max((row.queue_s for row in rows), default=0.0),
                "busy": max((row.busy for row in rows), default=0.0)}  # fmt: skip

    def _settled(self) -> bool:
        """All that is wanted is up, of the right revision, answers, and is known to every router."""
        if self._silent_s:
            return False
        members = list(self._state.members.values())
        for kind, target in self._state.targets.items():
            own = [one for one in members if one.kind is kind]
            if len(own) != target.count or any((one.phase, one.revision) != (Phase.UP, target.revision) for one in own):
                return False
        engines = sum(one.kind is Kind.ENGINE for one in members)
        routers = [one.name for one in members if one.kind is Kind.ROUTER]
        reports = [self._reports[name] for name in routers if name in self._reports]
        return len(reports) == len(routers) and all(
            report.version == self._version and sum(row.up for row in report.rows.values()) == engines
            for report in reports
        )

    # Scaling ---------------------------------------------------------------------------------------------------------

    def _scale(self, now: float) -> None:
        state = self._state
        if state.bounds is None or now - self._scaled_s < ASK_S or not self._reports:
            return
        self._scaled_s = now
        up = [one for one in state.members.values() if one.kind is Kind.ENGINE and one.phase is Phase.UP]
        loads = [Load(**self._load_of(one)) for one in up]
        held = sum(report.held for report in self._reports.values())
        count = state.engines.count
        self._scaler, wanted, why = self._scaler.decide(state.bounds, count, loads, held, now)
        advice = f"{count} -> {wanted} engines: {why}"
        if wanted != count:
            if not state.bounds.dry:
                state.engines = _count(state.engines, wanted)
                self._note(f"autoscaling: {advice}")
            elif advice.partition(":")[0] != self._advice.partition(":")[0]:
                self._note(f"autoscaling would do: {advice}")
        self._advice = advice


def _count(target: Target, count: int) -> Target:
    return Target(count, target.revision, target.surge)
