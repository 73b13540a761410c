"""Actor of one program of a fleet: keeps it running on its node, and sends a router its lists of workers and peers.

An actor decides nothing, and every call of it may be repeated.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from fleet.guard import exit_with_parent
from fleet.plan import MemberKind
from fleet.program import ProgramState, SupervisedProgram, TimedEvent, send_request
from fleet.spec import FleetSpec, Launch, plan_launch
from fleet.worker_list import ListedWorker, WorkerStatus, parse_workers_page, plan_admin_calls


class RouterReport(msgspec.Struct, frozen=True):
    """Workers of a router after it received a version of the list."""

    list_version: int
    status_by_worker: dict[str, WorkerStatus]


class MemberReport(msgspec.Struct, frozen=True):
    """Answer of a member to the directory."""

    program: ProgramState
    node: str
    events: list[TimedEvent]
    """Events of the program since the last report."""
    router: RouterReport | None = None
    """Report of a router that serves and answers; None for an engine."""


class MemberActor:
    """Actor that keeps one program of a fleet running, a worker or a router, and reports about it."""

    def __init__(self, encoded_spec: bytes, kind: str, slot: int, workers: Sequence[ListedWorker] = ()) -> None:
        """Start the program on this node. `workers` are those that a router knows from its start."""
        exit_with_parent()
        self._spec = msgspec.json.decode(encoded_spec, type=FleetSpec)
        self._kind = MemberKind(kind)
        self._slot = slot
        self._workers = workers
        self._host = ray.util.get_node_ip_address()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._published_peers: tuple[Launch, list[str]] | None = None
        """Run of this router, and the addresses of the other routers that it was sent."""
        self._program = SupervisedProgram(self._spec, self._plan_launch)

    def _plan_launch(self) -> Launch:
        """Return the command line of the next run. A router begins with the workers that were last listed."""
        settings = [worker.settings for worker in self._workers if not worker.is_draining]
        return plan_launch(self._spec, self._kind, self._slot, self._host, self._find_free_ports, settings)

    def stop(self) -> None:
        """Stop the program, and kill it after the timeout of the spec."""
        self._program.stop()

    def report(
        self, list_version: int = 0, workers: Sequence[ListedWorker] = (), peer_addresses: Sequence[str] = ()
    ) -> MemberReport:
        """Return what is new. A router is first made to know exactly these workers and peers.

        `list_version` is the version of these lists, for the router's report.
        """
        program, events, router_report = self._program.state, self._program.take_events(), None
        self._workers = workers
        if program.launch is not None and self._kind is MemberKind.ROUTER:
            refusals = self._sync_router(program.launch, workers, peer_addresses)
            events += [(time.time(), refusal) for refusal in refusals]
            page = self._fetch_workers_page(program.launch)
            router_report = None if page is None else RouterReport(list_version, parse_workers_page(page))
        return MemberReport(program, self._node, events, router_report)

    def _sync_router(self, launch: Launch, workers: Sequence[ListedWorker], peer_addresses: Sequence[str]) -> list[str]:
        """Make the router know exactly these workers and peers; return the calls that it refused, each as a text."""
        refusals: list[str] = []
        page = self._fetch_workers_page(launch)
        if page is None:
            return refusals
        calls = plan_admin_calls(workers, parse_workers_page(page))
        other_peers = sorted(set(peer_addresses) - {launch.peer_address})
        if (launch, other_peers) != self._published_peers:
            calls.append(("PUT", "/peers", {"peers": other_peers}))
        for method, path, body in calls:
            answer = send_request(method, launch.admin_url + path, body, self._spec.admin_key)
            if answer.status not in (200, 201, 404):  # 404: this router never had the worker, or has removed it already
                refusals.append(f"{method} {path}: {answer.status} {answer.content}")
            elif path == "/peers":
                self._published_peers = launch, other_peers
        return refusals

    def _fetch_workers_page(self, launch: Launch) -> dict[str, Any] | None:
        """Return the body of the router's `GET /workers`; None if it does not answer."""
        answer = send_request("GET", f"{launch.admin_url}/workers", admin_key=self._spec.admin_key)
        if answer.status == 200 and isinstance(answer.content, dict):
            return answer.content
        print(f"{launch.admin_url}/workers: {answer.status} {answer.content}", file=sys.stderr)
        return None

    def _find_free_ports(self, count: int) -> int:
        """Return the first of `count` consecutive free ports on this node. Raises OSError."""
        for _ in range(100):
            sockets = [socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) for _ in range(count)]
            try:
                sockets[0].bind((self._host, 0))
                first_port: int = sockets[0].getsockname()[1]
                for port_offset, port_socket in enumerate(sockets[1:], 1):
                    port_socket.bind((self._host, first_port + port_offset))
                return first_port
            except (OSError, OverflowError):
                continue
            finally:
                for port_socket in sockets:
                    port_socket.close()
        raise OSError(f"no {count} free ports in a row on {self._host}")
