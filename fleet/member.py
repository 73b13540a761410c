"""Actor of one program of a fleet: keeps it running on its node, and sends a router its lists of workers and peers.

An actor decides nothing, and every call of it may be repeated.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence

import msgspec
import ray

from fleet.guard import exit_with_parent
from fleet.program import ProgramState, SupervisedProgram, TimedEvent, send_request
from fleet.spec import FleetSpec, Launch, MemberKind, plan_router, plan_worker
from fleet.worker_list import AdminCall, ListedWorker, WorkerStatus, parse_workers_page, plan_admin_calls

PORT_SEARCHES_MAX = 100


class MemberReport(msgspec.Struct, frozen=True):
    """Answer of a member to the directory."""

    program: ProgramState = ProgramState()
    node: str = ""
    """Ray's id of the node on which the member runs."""
    events: list[TimedEvent] = []
    """Events of the program since the last report."""
    status_by_worker: dict[str, WorkerStatus] | None = None
    """Workers of a router that serves and answers; None for another router, and for an engine."""


class MemberActor:
    """Actor that keeps one program of a fleet running, a worker or a router, and reports about it."""

    def __init__(self, encoded_spec: bytes, kind: str, slot: int, workers: Sequence[ListedWorker] = ()) -> None:
        """Start the program on this node. `workers` are those that a router knows when it starts."""
        exit_with_parent()
        self._spec = msgspec.json.decode(encoded_spec, type=FleetSpec)
        self._kind = MemberKind(kind)
        self._slot = slot
        self._workers = workers
        self._host = ray.util.get_node_ip_address()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._program = SupervisedProgram(self._spec, self._plan_launch)

    def _plan_launch(self) -> Launch:
        """Return the command line of the next run. A router begins with the workers that were last listed."""
        settings = [worker.settings for worker in self._workers if not worker.is_draining]
        if self._kind is MemberKind.ROUTER:
            return plan_router(self._spec, self._slot, self._host, self._find_free_ports, settings)
        return plan_worker(self._spec, self._host, self._find_free_ports)

    def stop(self) -> None:
        """Stop the program, and kill it after the timeout of the spec."""
        self._program.stop()

    def report(self, workers: Sequence[ListedWorker] = (), peer_addresses: Sequence[str] = ()) -> MemberReport:
        """Return the program's state and new events. A router first gets exactly these workers and peers."""
        self._workers = workers
        program, events, status_by_worker = self._program.state, self._program.take_events(), None
        if program.launch is not None and self._kind is MemberKind.ROUTER:
            status_by_worker = self._update_workers(program.launch, events)
            if status_by_worker is not None:
                peers = sorted(set(peer_addresses) - {program.launch.peer_address})
                self._call_router(program.launch, AdminCall("PUT", "/peers", {"peers": peers}), events)
        return MemberReport(program, self._node, events, status_by_worker)

    def _update_workers(self, launch: Launch, events: list[TimedEvent]) -> dict[str, WorkerStatus] | None:
        """Register the listed workers with the router, and remove all others. Refused calls are added to `events`.

        Returns the router's workers afterwards; None if the router does not answer.
        """
        status_by_worker = self._fetch_workers(launch)
        if status_by_worker is None:
            return None
        calls = plan_admin_calls(self._workers, status_by_worker)
        for call in calls:
            self._call_router(launch, call, events)
        return self._fetch_workers(launch) if calls else status_by_worker

    def _call_router(self, launch: Launch, call: AdminCall, events: list[TimedEvent]) -> None:
        """Call the router's admin API. A refusal is added to `events`."""
        answer = send_request(call.method, launch.admin_url + call.path, call.body, self._spec.admin_key)
        if answer.status not in (200, 201, 404):  # 404: this router never had the worker, or has removed it already
            events.append(TimedEvent(time.time(), f"{call.method} {call.path}: {answer.status} {answer.content}"))

    def _fetch_workers(self, launch: Launch) -> dict[str, WorkerStatus] | None:
        """Return the router's workers; None if it does not answer. Raises ValueError if the answer is malformed."""
        answer = send_request("GET", f"{launch.admin_url}/workers", admin_key=self._spec.admin_key)
        if answer.status == 200:
            return parse_workers_page(answer.content)
        print(f"{launch.admin_url}/workers: {answer.status} {answer.content}", file=sys.stderr)
        return None

    def _find_free_ports(self, count: int) -> int:
        """Return the first of `count` consecutive free ports on this node. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        for _ in range(PORT_SEARCHES_MAX):
            sockets = [socket.socket(family) for _ in range(count)]
            try:
                sockets[0].bind((self._host, 0))  # the system chooses a free port
                first_port: int = sockets[0].getsockname()[1]
                for port_offset, port_socket in enumerate(sockets[1:], 1):
                    port_socket.bind((self._host, first_port + port_offset))
                return first_port
            except (OSError, OverflowError):  # one of the next ports is in use, or there are no higher ones
                continue
            finally:
                for port_socket in sockets:
                    port_socket.close()
        raise OSError(f"no {count} free ports in a row on {self._host}")
