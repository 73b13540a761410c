"""A program that is kept running: started under its guard, probed, killed if it hangs, and started again when it ends.

Knows nothing of Ray. `fleet/member.py` makes an actor of it.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fleet.spec import FleetSpec, Launch

GUARD_PATH = str(Path(__file__).with_name("guard.py"))
LAST_LINE_COUNT = 20
MAX_EVENTS = 200
"""Most events that wait for `take_events`; the oldest are dropped."""
START_PROBE_S = 0.1
HEALTH_CHECK_S = 2.0
"""Seconds between two health probes of a program that serves."""
MAX_CALL_S = 5.0
KILL_WAIT_S = 10.0
OUTPUT_WAIT_S = 2.0
"""Longest wait for the last lines of a program that has ended: a process that it left behind may hold them open."""
STEADY_AFTER_S = 60.0
"""Time for which a program must have served, so that its end does not count as one more failure in a row."""
MAX_CORE_SILENT_S = 5.0
"""Longest that an engine's step loop may owe an answer before the engine counts as silent."""
SILENT_AFTER_PROBES = 2
"""Failed probes in a row after which a program counts as silent."""
MAX_RESTART_PAUSE_S = 60.0
RAY_VARIABLES = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID")
"""Ray sets these for its workers; they are not meant for a program of its own."""
_UNVERIFIED_TLS_CONTEXT = ssl._create_unverified_context()
"""TLS context for this node's own program, whose certificate is not verified."""
_DIRECT_OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_UNVERIFIED_TLS_CONTEXT)
)


class TimedEvent(NamedTuple):
    """Event in the life of a program or of the fleet, for people."""

    at_s: float
    """Seconds since 1970."""
    text: str


class HttpAnswer(NamedTuple):
    """Answer of a program. The status is 0 if nothing answered; the content is then the error."""

    status: int
    content: Any
    """Decoded JSON, or else text."""
    headers: Message


def send_request(method: str, url: str, body: object = None, admin_key: str = "") -> HttpAnswer:
    """Send a request to a program on this node, and return the answer, with status 0 if there was none."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if admin_key:
        headers["Authorization"] = f"Bearer {admin_key}"
    body_bytes = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, body_bytes, headers, method=method)
    try:
        try:
            answer = _DIRECT_OPENER.open(request, timeout=MAX_CALL_S)
        except urllib.error.HTTPError as error:
            answer = error  # an error status is an answer too
        with answer:
            status, answer_bytes, answer_headers = answer.status, answer.read(), answer.headers
    except (OSError, http.client.HTTPException) as error:
        return HttpAnswer(0, str(error), Message())
    try:
        content = json.loads(answer_bytes or b"null")
    except ValueError:
        content = answer_bytes[:500].decode(errors="replace")
    return HttpAnswer(status, content, answer_headers)


def compute_restart_pause(failure_count: int) -> float:
    """Return the seconds until a program is started again after so many failures in a row: 0, 1, 2, 4, ... 60."""
    return min(MAX_RESTART_PAUSE_S, 2.0 ** min(failure_count - 2, 6)) if failure_count > 1 else 0.0


@dataclass(frozen=True)
class ProbeHistory:
    """Failed health probes of a program since its last answer: how many, and for how long."""

    silent_s: float = 0.0
    missed_probe_count: int = 0

    def add_probe(self, is_alive: bool, elapsed_s: float, max_elapsed_s: float) -> ProbeHistory:
        """Return the history with one more probe. `is_alive`: whether the program answered.

        `elapsed_s`: time since the previous probe. At most `max_elapsed_s` of it count as silence, because the process
        that probes may have been suspended for hours.
        """
        if is_alive:
            return ProbeHistory()
        counted_s = min(max(elapsed_s, 0.0), max_elapsed_s)
        return ProbeHistory(self.silent_s + counted_s, self.missed_probe_count + 1)

    @property
    def is_silent(self) -> bool:
        """Whether enough probes failed in a row to report it."""
        return self.missed_probe_count >= SILENT_AFTER_PROBES

    def is_hung(self, max_silent_s: float) -> bool:
        """Return whether the program was silent for `max_silent_s`; always False if that is 0."""
        return 0 < max_silent_s <= self.silent_s and self.is_silent


class ProgramState(msgspec.Struct, frozen=True):
    """State of a supervised program: whether it serves, and its failures so far."""

    launch: Launch | None = None
    """Command line and addresses; None while the program does not serve."""
    silent_s: float = 0.0
    """For how long the program has not answered health probes; 0 while it answers."""
    failure_count: int = 0
    """Unplanned ends in a row."""
    retry_at_s: float = 0.0
    """Time of the next start after the last unplanned end, in seconds since 1970."""
    hung_count: int = 0
    """How often the program was killed because it did not answer."""
    has_stopped: bool = False
    """Whether the program was asked to stop, and has ended."""


@dataclass
class ProgramRun:
    """One run of a program under a guard process, from its start to its end."""

    launch: Launch
    process: subprocess.Popen[bytes]
    """Guard process, which runs the program and kills it when the guard's stdin is closed."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINE_COUNT))
    """Last lines that the program wrote."""

    def wait_for_end(self) -> None:
        """Forward the program's output until the program ends, then set `has_ended`."""
        assert self.process.stdin is not None
        output_thread = threading.Thread(target=self._forward_output, daemon=True)
        output_thread.start()
        self.process.wait()
        self.process.stdin.close()
        output_thread.join(OUTPUT_WAIT_S)
        self.has_ended.set()

    def _forward_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                text = line.decode(errors="replace")
                self.last_lines.append(text)
                sys.stderr.write(text)

    def describe_end(self) -> str:
        """Return how the program has ended; after a failure, with the last lines that it wrote."""
        status = self.process.returncode
        last_lines = "".join(self.last_lines).strip()[:2000] if status else ""
        return f"ended with status {status}" + (f": {last_lines}" if last_lines else "")

    def kill(self) -> None:
        """Kill the program with all its children, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # the guard then kills the program with its children
        if not self.has_ended.wait(KILL_WAIT_S):
            self.process.kill()  # the guard hangs: its program is killed with it
            self.has_ended.wait()

    def is_answering(self) -> bool:
        """Return whether the program answers, and, for our engines, whether the step loop behind it does."""
        answer = send_request("GET", self.launch.health_url)
        try:
            core_silent_s = float(answer.headers.get("x-core-silent-seconds") or 0)
        except ValueError:
            return False
        return answer.status != 0 and core_silent_s < MAX_CORE_SILENT_S


class SupervisedProgram:
    """Runs one program until `stop` is called, and starts it again whenever it ends before.

    It is started again at once, then after pauses that grow to a minute if it keeps failing.
    """

    def __init__(self, spec: FleetSpec, plan_launch: Callable[[], Launch]) -> None:
        """Start the program on a thread. `plan_launch` makes a command line with fresh addresses, or raises OSError."""
        self._spec = spec
        self._plan_launch = plan_launch
        self._lock = threading.Lock()
        self._run: ProgramRun | None = None
        self._state = ProgramState()
        self._events: deque[TimedEvent] = deque(maxlen=MAX_EVENTS)
        self._is_stopping = threading.Event()
        threading.Thread(target=self._keep_running, daemon=True).start()

    @property
    def state(self) -> ProgramState:
        return self._state

    def take_events(self) -> list[TimedEvent]:
        """Return what happened to the program since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def stop(self) -> None:
        """Stop the program, and kill it after the timeout of the spec. It may be called again."""
        with self._lock:
            self._is_stopping.set()
            run = self._run
        if run is not None and not run.has_ended.is_set():
            run.process.terminate()
            if not run.has_ended.wait(self._spec.stop_timeout_s):
                run.kill()

    def _keep_running(self) -> None:
        """Run the program again and again, with a pause after a failure, until `stop` is called."""
        while not self._is_stopping.is_set():
            served_s = self._run_once()
            if self._is_stopping.is_set():
                break
            is_first_failure = self._state.failure_count == 0 or served_s >= STEADY_AFTER_S
            failure_count = 1 if is_first_failure else self._state.failure_count + 1
            pause_s = compute_restart_pause(failure_count)
            self._update(launch=None, silent_s=0.0, failure_count=failure_count, retry_at_s=time.time() + pause_s)
            self._is_stopping.wait(pause_s)
        self._update(launch=None, has_stopped=True)

    def _run_once(self) -> float:
        """Run the program until it ends, and return for how many seconds it served; 0 if it never did."""
        try:
            run = self._start_program()
        except OSError as error:
            self._add_event(f"gone: not started: {error}")
            return 0.0
        if run is None:
            return 0.0
        served_s = 0.0
        if self._wait_until_serving(run):
            self._update(launch=run.launch)
            self._add_event(f"up at {run.launch.url}, process {run.process.pid}")
            served_since_s = time.monotonic()
            self._probe_until_end(run)
            served_s = time.monotonic() - served_since_s
        run.has_ended.wait()
        self._add_event(f"gone: {run.describe_end()}")
        return served_s

    def _start_program(self) -> ProgramRun | None:
        """Start the program under a guard, which ends with this process; None if `stop` was called. Raises OSError."""
        env = {key: value for key, value in os.environ.items() if key not in RAY_VARIABLES} | self._spec.env
        env |= {"ROUTER_ADMIN_API_KEY": self._spec.admin_key, "PYTHONUNBUFFERED": "1"}
        launch = self._plan_launch()
        with self._lock:
            if self._is_stopping.is_set():
                return None
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", GUARD_PATH, *launch.command],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            run = self._run = ProgramRun(launch, process)
        threading.Thread(target=run.wait_for_end, daemon=True).start()
        return run

    def _wait_until_serving(self, run: ProgramRun) -> bool:
        """Return whether the program serves, once it does. If it takes too long, it is killed."""
        give_up_at_s = time.monotonic() + self._spec.start_timeout_s
        while send_request("GET", run.launch.health_url).status != 200:
            if run.has_ended.wait(START_PROBE_S):
                return False
            if time.monotonic() > give_up_at_s:
                self._add_event(f"killed, it did not serve within {self._spec.start_timeout_s:g} s")
                run.kill()
                return False
        return True

    def _probe_until_end(self, run: ProgramRun) -> None:
        """Probe a serving program every few seconds, until it ends or `stop` is called.

        The state and the events say when it falls silent and when it answers again. A program that stays silent for
        `hang_timeout_s` is killed; it is then started again as after any end.
        """
        hang_timeout_s = self._spec.hang_timeout_s
        pause_s = min(HEALTH_CHECK_S, hang_timeout_s / 4) if hang_timeout_s else HEALTH_CHECK_S
        history = ProbeHistory()
        probed_at_s = time.monotonic()
        while not run.has_ended.wait(pause_s) and not self._is_stopping.is_set():
            is_answering = run.is_answering()
            now = time.monotonic()
            was_silent = history.is_silent
            history = history.add_probe(is_answering, now - probed_at_s, max_elapsed_s=pause_s + MAX_CALL_S)
            probed_at_s = now
            self._update(silent_s=history.silent_s if history.is_silent else 0.0)
            if history.is_silent != was_silent:
                self._add_event("does not answer" if history.is_silent else "answers again")
            if history.is_hung(hang_timeout_s) and not self._is_stopping.is_set():
                self._add_event(f"killed, it did not answer for {hang_timeout_s:g} s")
                self._update(hung_count=self._state.hung_count + 1)
                run.kill()

    def _update(self, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)

    def _add_event(self, text: str) -> None:
        with self._lock:
            self._events.append(TimedEvent(time.time(), text))
