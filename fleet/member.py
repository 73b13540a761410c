"""Actor of one program of a fleet: starts it, watches whether it answers, and sends a router its lists of workers.

An actor lives for one run of its program and decides nothing. Every call may be repeated, because the directory may
have been restarted in between.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from fleet.guard import exit_with_parent, restore_niceness
from fleet.health import MAX_CORE_SILENT_S, ProbeHistory
from fleet.plan import MemberKind
from fleet.spec import FleetSpec, Launch, WorkerSettings, plan_launch
from fleet.worker_list import ListedWorker, WorkerStatus, parse_workers_page, plan_admin_calls

GUARD_PATH = str(Path(__file__).with_name("guard.py"))
LAST_LINE_COUNT = 20
START_PROBE_S = 0.1
HEALTH_CHECK_S = 2.0
"""Seconds between two health probes of a program that serves."""
MAX_CALL_S = 5.0
KILL_WAIT_S = 10.0
MAX_STATUS_WAIT_S = 60.0
"""Longest wait for a new status: the caller may be gone."""
RAY_VARIABLES = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID")
"""Ray sets these for its workers; they are not meant for a program of its own."""
_UNVERIFIED_TLS_CONTEXT = ssl._create_unverified_context()
"""TLS context for this node's own program, whose certificate is not verified."""
_DIRECT_OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_UNVERIFIED_TLS_CONTEXT)
)


class RouterReport(msgspec.Struct, frozen=True):
    """Workers of a router after it received a version of the list."""

    list_version: int
    status_by_worker: dict[str, WorkerStatus]
    errors: list[str] = []


class MemberStatus(msgspec.Struct, frozen=True):
    """State of one program, as its actor sees it."""

    launch: Launch | None = None
    """Command line and addresses; None until the program serves."""
    node: str = ""
    pid: int = 0
    is_silent: bool = False
    """Whether the last probes had no answer."""
    exit_reason: str | None = None
    """How the program ended, with its last lines after a failure; None while it runs."""
    was_hung: bool = False
    """Whether the program was killed because it did not answer."""


class MemberActor:
    """Actor that runs one program of a fleet, a worker or a router, and reports its status."""

    def __init__(self, encoded_spec: bytes, kind: str, slot: int, workers: Sequence[WorkerSettings] = ()) -> None:
        """Start the program on this node, and the threads that watch it.

        `workers` are the workers that a router knows from its start.
        """
        exit_with_parent()
        restore_niceness()
        self._spec = msgspec.json.decode(encoded_spec, type=FleetSpec)
        self._host = ray.util.get_node_ip_address()
        self._launch: Launch = plan_launch(
            self._spec, MemberKind(kind), slot, self._host, self._find_free_ports, workers
        )
        self._last_lines: deque[str] = deque(maxlen=LAST_LINE_COUNT)
        """Last lines that the program wrote."""
        self._sync_lock = threading.Lock()
        self._peer_addresses: list[str] = []
        """Addresses of other routers that this router knows."""
        self._process = self._start_program()
        self._status = MemberStatus()
        self._status_changed = threading.Condition()
        self._exit_event = threading.Event()
        self._is_stopping = False
        for thread_function in (self._forward_output, self._wait_for_exit, self._watch_health):
            threading.Thread(target=thread_function, daemon=True).start()

    def _start_program(self) -> subprocess.Popen[bytes]:
        """Start the program under its guard, which kills it when this process ends."""
        env = {key: value for key, value in os.environ.items() if key not in RAY_VARIABLES} | self._spec.env
        env |= {"ROUTER_ADMIN_API_KEY": self._spec.admin_key, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, "-S", "-E", GUARD_PATH, *self._launch.command],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_for_status(self, last_status: MemberStatus) -> MemberStatus:
        """Return the program's status, once it differs from `last_status` or MAX_STATUS_WAIT_S have passed."""
        with self._status_changed:
            self._status_changed.wait_for(lambda: self._status != last_status, MAX_STATUS_WAIT_S)
            return self._status

    def stop(self) -> None:
        """Stop the program, and kill it after the timeout of the spec."""
        self._is_stopping = True
        self._process.terminate()
        if not self._exit_event.wait(self._spec.stop_timeout_s):
            self._kill()

    def _kill(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard then kills the program with its children
        if not self._exit_event.wait(KILL_WAIT_S):
            self._process.kill()  # the guard hangs: its program is killed with it
            self._exit_event.wait()

    def _update_status(self, **changes: Any) -> None:
        with self._status_changed:
            self._status = msgspec.structs.replace(self._status, **changes)
            self._status_changed.notify_all()

    def _wait_for_exit(self) -> None:
        exit_code = self._process.wait()
        self._exit_event.set()
        last_lines = ": " + "".join(self._last_lines) if exit_code else ""
        self._update_status(exit_reason=f"ended with status {exit_code}{last_lines}")

    def _watch_health(self) -> None:
        """Probe the program until it serves, then until it is to stop; kill it if it does not answer for too long."""
        while self._send_request("GET", self._launch.health_url)[0] != 200:
            if self._exit_event.wait(START_PROBE_S):
                return
        self._update_status(launch=self._launch, node=ray.get_runtime_context().get_node_id(), pid=self._process.pid)
        hang_timeout_s = self._spec.hang_timeout_s
        pause_s = min(HEALTH_CHECK_S, hang_timeout_s / 4) if hang_timeout_s else HEALTH_CHECK_S
        probe_history = ProbeHistory()
        checked_at_s = time.monotonic()
        while not self._exit_event.wait(pause_s) and not self._is_stopping:
            is_alive = self._is_alive()
            now = time.monotonic()
            probe_history = probe_history.add_probe(is_alive, now - checked_at_s, pause_s + MAX_CALL_S)
            checked_at_s = now
            if probe_history.is_silent != self._status.is_silent:
                self._update_status(is_silent=probe_history.is_silent)
            if probe_history.is_hung(hang_timeout_s) and not self._is_stopping:
                self._update_status(was_hung=True)
                self._kill()

    def _is_alive(self) -> bool:
        """Return whether the program answers, and, for our engines, whether the step loop behind it does."""
        request = urllib.request.Request(self._launch.health_url)
        try:
            with _DIRECT_OPENER.open(request, timeout=MAX_CALL_S) as answer:
                return float(answer.headers.get("x-core-silent-seconds") or 0) < MAX_CORE_SILENT_S
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def sync_router(self, list_version: int, workers: list[ListedWorker], peer_addresses: list[str]) -> RouterReport:
        """Make the router of this actor know exactly these workers and peers, and return its report.

        `list_version` is the version of these lists, for the report. Calls that the router refused are listed there as
        errors. Raises RuntimeError if the router does not list its workers.
        """
        with self._sync_lock:
            errors = []
            for method, path, body in plan_admin_calls(workers, parse_workers_page(self._fetch_workers_page())):
                status, answer = self._send_request(method, self._launch.admin_url + path, body)
                if status not in (200, 201, 404):  # 404: this router never had the worker, or has removed it already
                    errors.append(f"{method} {path}: {status} {answer}")
            other_peers = sorted(set(peer_addresses) - {self._launch.peer_address})
            if other_peers != self._peer_addresses:
                status, answer = self._send_request("PUT", f"{self._launch.admin_url}/peers", {"peers": other_peers})
                if status == 200:
                    self._peer_addresses = other_peers
                else:
                    errors.append(f"PUT /peers: {status} {answer}")
            return RouterReport(list_version, parse_workers_page(self._fetch_workers_page()), errors)

    def _fetch_workers_page(self) -> dict[str, Any]:
        status, page = self._send_request("GET", f"{self._launch.admin_url}/workers")
        if status != 200 or not isinstance(page, dict):
            raise RuntimeError(f"{self._launch.admin_url}/workers: {status} {page}")
        return page

    def _send_request(self, method: str, url: str, body: object = None) -> tuple[int, Any]:
        """Send a request to the program; return the status and the answer, decoded if it is JSON, else as text.

        The status is 0 if nothing answers; the answer is then the error. Admin requests carry the admin key.
        """
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._launch.admin_url and url.startswith(self._launch.admin_url):
            headers["Authorization"] = f"Bearer {self._spec.admin_key}"
        body_bytes = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, body_bytes, headers, method=method)
        try:
            with _DIRECT_OPENER.open(request, timeout=MAX_CALL_S) as answer:
                status, answer_bytes = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, answer_bytes = error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        try:
            return status, json.loads(answer_bytes or b"null")
        except ValueError:
            return status, answer_bytes[:500].decode(errors="replace")

    def _forward_output(self) -> None:
        """Copy the program's output to this actor's log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            self._last_lines.append(text)
            sys.stderr.write(text)

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
