"""A program is kept running: real programs under the real guard, which end, hang and never serve."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.program import SupervisedProgram
from fleet.spec import FleetSpec, Launch

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import free_port

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def run_program(code: str, **limits: float) -> Iterator[SupervisedProgram]:
    spec = FleetSpec(name="fleet", engine_command=(), **limits)  # type: ignore[arg-type]

    def plan_launch() -> Launch:
        url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-c", code, url.rpartition(":")[2]]
        return Launch(command=command, url=url, health_url=f"{url}/health")

    program = SupervisedProgram(spec, plan_launch)
    try:
        yield program
    finally:
        program.stop()


def wait_until(is_reached: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def find_program(program: SupervisedProgram) -> int:
    """The process of the program itself, which its guard runs."""
    launch = program.state.launch
    assert launch is not None
    port = launch.url.rpartition(":")[2].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if port in words and not any(word.endswith(b"guard.py") for word in words):
            return int(folder.name)
    raise AssertionError("the program is not there")


def test_a_program_that_dies_is_started_again_elsewhere() -> None:
    with run_program(SERVER) as program:
        wait_until(lambda: program.state.launch)
        first_launch = program.state.launch
        os.kill(find_program(program), signal.SIGKILL)
        wait_until(lambda: program.state.launch not in (None, first_launch))
        texts = [text for _, text in program.take_events()]
        assert texts[0].startswith(f"up at {first_launch.url}")  # type: ignore[union-attr]
        assert texts[1] == "gone: ended with status 137"
        assert program.state.failure_count == 1
        assert program.take_events() == [], "told once"
        pid = find_program(program)
    wait_until(lambda: program.state.has_stopped)
    assert program.state.launch is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_program_whose_guard_is_killed_is_started_again_though_its_child_lives_on() -> None:
    leave_child = "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
    with run_program(leave_child + SERVER) as program:
        wait_until(lambda: program.state.launch)
        first_launch = program.state.launch
        pid = find_program(program)
        (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        try:
            os.kill(guard, signal.SIGKILL)
            wait_until(lambda: program.state.launch not in (None, first_launch))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_program_whose_health_check_makes_no_sense_is_killed() -> None:
    server = SERVER.replace('"Content-Length", "0"', '"X-Core-Silent-Seconds", "x"')
    with run_program(server, hang_timeout_s=0.5) as program:
        wait_until(lambda: program.state.hung_count == 1)


def test_an_error_that_is_cut_off_does_not_end_the_watch_over_a_program() -> None:
    """As of a program that dies while it answers. The program was never started again."""
    server = SERVER.replace("send_response(200)", "send_response(503)").replace(
        '"Content-Length", "0"', '"Content-Length", "9"'
    )
    with run_program(server, start_timeout_s=2.0) as program:
        wait_until(lambda: program.state.failure_count)
        assert program.take_events()[0][1] == "killed, it did not serve within 2 s"


def test_a_program_that_fails_waits_longer_and_longer_and_says_why() -> None:
    with run_program("import sys; sys.exit('no such model')") as program:
        wait_until(lambda: program.state.failure_count >= 3)
        texts = [text for _, text in program.take_events()]
        assert texts[:2] == ["gone: ended with status 1: no such model"] * 2
        assert program.state.retry_at_s > time.time(), "the third start waits"


def test_a_program_that_does_not_serve_in_time_is_killed() -> None:
    with run_program("import time; time.sleep(600)", start_timeout_s=0.3) as program:
        wait_until(lambda: program.state.failure_count)
        assert program.take_events()[0][1] == "killed, it did not serve within 0.3 s"


def test_a_program_that_hangs_is_killed() -> None:
    with run_program(SERVER, hang_timeout_s=0.5) as program:
        wait_until(lambda: program.state.launch)
        os.kill(find_program(program), signal.SIGSTOP)
        wait_until(lambda: program.state.hung_count == 1)
        wait_until(lambda: program.state.launch)
        texts = [text for _, text in program.take_events()]
        assert texts[1:3] == ["does not answer", "killed, it did not answer for 0.5 s"]


def test_a_stopped_program_is_not_started_again() -> None:
    with run_program(SERVER) as program:
        program.stop()
        wait_until(lambda: program.state.has_stopped)
        assert program.state.failure_count == 0
