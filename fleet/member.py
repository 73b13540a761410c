"""The actor of one program: starts it on its node, says when it serves and when it ended, tells a router what changed.

It lives for one run of the program and decides nothing. Every call may be made again (the directory may have been
started anew in between).
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import msgspec
import ray

from fleet.books import Listed, Row, changes, read_rows
from fleet.guard import follow_parent, nice_as_parent
from fleet.plan import Kind
from fleet.spec import Launch, Spec, launch

GUARD = str(Path(__file__).with_name("guard.py"))
TAIL_LINES = 20
LOOK_S = 0.1
CALL_S_MAX = 5.0
RAYS_OWN = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID")
"""Ray sets these for its workers; they are not meant for a program of its own."""
_NEAR = ssl._create_unverified_context()
"""This node's own program: whatever name its certificate has."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_NEAR))


class Report(msgspec.Struct, frozen=True):
    """What a router said after it was told the list of version `version`."""

    version: int
    rows: dict[str, Row]
    held: int
    refused: list[str] = []


class MemberActor:
    """One program."""

    def __init__(self, spec: bytes, kind: str, slot: int) -> None:
        follow_parent()
        nice_as_parent()
        self._spec = msgspec.json.decode(spec, type=Spec)
        self._host = ray.util.get_node_ip_address()
        self._launch: Launch = launch(self._spec, Kind(kind), slot, self._host, self._free_ports)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._told = threading.Lock()
        self._peers: list[str] = []
        env = {key: value for key, value in os.environ.items() if key not in RAYS_OWN} | self._spec.env
        env |= {"ROUTER_ADMIN_API_KEY": self._spec.admin_key, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", GUARD, *self._launch.command],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """Once it serves: where. Raises RuntimeError where it ended before."""
        while self._process.poll() is None:
            if self._call("GET", self._launch.health)[0] == 200:
                node = ray.get_runtime_context().get_node_id()
                return {"launch": msgspec.to_builtins(self._launch), "node": node, "pid": self._process.pid}
            time.sleep(LOOK_S)
        raise RuntimeError(self.ended())

    def ended(self) -> str:
        """Once it has ended: how, and its last lines where it was not as it should."""
        status = self._process.wait()
        return f"ended with status {status}" + (": " + "".join(self._tail) if status else "")

    def stop(self) -> None:
        """End it; kill what has not ended after the spec's time."""
        self._process.terminate()
        try:
            self._process.wait(self._spec.stop_s_max)
        except subprocess.TimeoutExpired:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the guard kills all of it
            self._process.wait()

    def sync(self, version: int, listed: list[Listed], peers: list[str]) -> Report:
        """Bring the router to this list of workers and other routers; what it says then. Raises RuntimeError."""
        with self._told:
            refused = []
            for method, path, body in changes(listed, read_rows(self._page())):
                status, answer = self._call(method, self._launch.admin + path, body)
                if status not in (200, 201, 404):  # 404: it has never reached it, or has gone before
                    refused.append(f"{method} {path}: {status} {answer}")
            others = sorted(peer for peer in peers if peer != self._launch.peer)
            if others != self._peers:
                status, answer = self._call("PUT", f"{self._launch.admin}/peers", {"peers": others})
                if status == 200:
                    self._peers = others
                else:
                    refused.append(f"PUT /peers: {status} {answer}")
            page = self._page()
            return Report(version, read_rows(page), int(page.get("held", 0)), refused)

    def _page(self) -> dict[str, Any]:
        status, page = self._call("GET", f"{self._launch.admin}/workers")
        if status != 200 or not isinstance(page, dict):
            raise RuntimeError(f"{self._launch.admin}/workers: {status} {page}")
        return page

    def _call(self, method: str, url: str, body: object = None) -> tuple[int, Any]:
        """(status, JSON or text); status 0 where nobody answers."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._launch.admin and url.startswith(self._launch.admin):
            headers["Authorization"] = f"Bearer {self._spec.admin_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with _DIRECT.open(request, timeout=CALL_S_MAX) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        except OSError as error:
            return 0, str(error)
        try:
            return status, json.loads(raw or b"null")
        except ValueError:
            return status, raw[:500].decode(errors="replace")

    def _read(self) -> None:
        """The program's lines, on to this actor's log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            self._tail.append(text)
            sys.stderr.write(text)

    def _free_ports(self, count: int) -> int:
        """The first of `count` free ports in a row on this node. Raises OSError."""
        for _ in range(100):
            probes = [socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) for _ in range(count)]
            try:
                probes[0].bind((self._host, 0))
                first: int = probes[0].getsockname()[1]
                for rank, probe in enumerate(probes[1:], 1):
                    probe.bind((self._host, first + rank))
                return first
            except (OSError, OverflowError):
                continue
            finally:
                for probe in probes:
                    probe.close()
        raise OSError(f"no {count} free ports in a row on {self._host}")
