"""The actor of one program: starts it on its node, looks whether it answers, tells a router what changed.

It lives for one run of the program and decides nothing. Every call may be made again (the directory may have been
started anew in between).
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

from fleet.books import Listed, Row, changes, read_rows
from fleet.guard import follow_parent, nice_as_parent
from fleet.plan import Kind
from fleet.pulse import CORE_S_MAX, Pulse
from fleet.spec import Launch, Spec, Worker, launch

GUARD = str(Path(__file__).with_name("guard.py"))
TAIL_LINES = 20
LOOK_S = 0.1
WATCH_S = 2.0
"""Between two looks at a program that serves."""
CALL_S_MAX = 5.0
KILL_S = 10.0
NEWS_S_MAX = 60.0
"""A question for news ends by then: who asked may be gone."""
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


class News(msgspec.Struct, frozen=True):
    """Where one program is."""

    launch: Launch | None = None
    """Once it serves."""
    node: str = ""
    pid: int = 0
    silent: bool = False
    """It did not answer the last looks."""
    ended: str | None = None
    """How, and its last lines where it was not as it should."""
    hung: bool = False
    """It was ended because it did not answer."""


class MemberActor:
    """One program. `workers`: what a router knows from its start."""

    def __init__(self, spec: bytes, kind: str, slot: int, workers: Sequence[Worker] = ()) -> None:
        follow_parent()
        nice_as_parent()
        self._spec = msgspec.json.decode(spec, type=Spec)
        self._host = ray.util.get_node_ip_address()
        self._launch: Launch = launch(self._spec, Kind(kind), slot, self._host, self._free_ports, workers)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._told = threading.Lock()
        self._peers: list[str] = []
        env = {key: value for key, value in os.environ.items() if key not in RAYS_OWN} | self._spec.env
        env |= {"ROUTER_ADMIN_API_KEY": self._spec.admin_key, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", GUARD, *self._launch.command],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._news, self._changed = News(), threading.Condition()
        self._over, self._stopping = threading.Event(), False
        for work in (self._read, self._await_end, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def news(self, known: News) -> News:
        """Where it is, at once where that is not what is `known`, else after a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._news != known, NEWS_S_MAX)
            return self._news

    def stop(self) -> None:
        """End it; kill what has not ended after the spec's time."""
        self._stopping = True
        self._process.terminate()
        if not self._over.wait(self._spec.stop_s_max):
            self._kill()

    def _kill(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard kills all of it
        if not self._over.wait(KILL_S):
            self._process.kill()  # the guard itself does not go on; its program is killed with it
            self._over.wait()

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._news = msgspec.structs.replace(self._news, **changes)
            self._changed.notify_all()

    def _await_end(self) -> None:
        status = self._process.wait()
        self._over.set()
        self._tell(ended=f"ended with status {status}" + (": " + "".join(self._tail) if status else ""))

    def _watch(self) -> None:
        """Look until it serves, then for as long as it is not told to end."""
        while self._call("GET", self._launch.health)[0] != 200:
            if self._over.wait(LOOK_S):
                return
        self._tell(launch=self._launch, node=ray.get_runtime_context().get_node_id(), pid=self._process.pid)
        patience_s, pulse, looked_s = self._spec.hang_s_max, Pulse(), time.monotonic()
        pause_s = min(WATCH_S, patience_s / 4) if patience_s else WATCH_S
        while not self._over.wait(pause_s) and not self._stopping:
            answered = self._goes_on()
            took_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            pulse = pulse.looked(answered, took_s, pause_s + CALL_S_MAX)
            if pulse.is_silent != self._news.silent:
                self._tell(silent=pulse.is_silent)
            if pulse.hangs(patience_s) and not self._stopping:
                self._tell(hung=True)
                self._kill()

    def _goes_on(self) -> bool:
        """Any answer is one; of our engines, also of the step loop behind it."""
        request = urllib.request.Request(self._launch.health)
        try:
            with _DIRECT.open(request, timeout=CALL_S_MAX) as answer:
                return float(answer.headers.get("x-core-silent-seconds") or 0) < CORE_S_MAX
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except (OSError, http.client.HTTPException, ValueError):
            return False

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
            return Report(version, read_rows(page), int(page.get("queued", 0)), refused)

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
        except (OSError, http.client.HTTPException) as error:
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
