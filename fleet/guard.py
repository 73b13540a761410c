"""Guard of one program: no process of it outlives the program, or the process that asked for the program.

`python guard.py COMMAND...`, with a pipe as stdin that the asking process keeps open, so that the pipe closes however
that process dies. If the guard is killed, the kernel kills the program too (PDEATHSIG). Linux only; needs only the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time

SUBREAPER, PDEATHSIG = 36, 1
"""Option numbers of prctl(2)."""
LIBC = ctypes.CDLL(None, use_errno=True)
STDIN = 0


def reap_children() -> dict[int, int]:
    """Reap the children that have ended; return their exit statuses by pid, 128 + N for signal N."""
    status_by_pid: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            exit_code = os.waitstatus_to_exitcode(status)
            status_by_pid[pid] = exit_code if exit_code >= 0 else 128 - exit_code
    return status_by_pid


def kill_descendants() -> None:
    """Kill every descendant. Children of a killed process become our own children (SUBREAPER), and are killed next."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as children_file:
            pids = [int(pid) for pid in children_file.read().split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def exit_with_parent(check_interval_s: float = 0.5) -> None:
    """End this process when the process that started it has ended; a thread looks for that.

    If a raylet is killed, its actors would otherwise live as long as one of their calls runs.
    """
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(check_interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel, in the child process, to kill it when the guard dies."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def open_signal_pipe() -> int:
    """Return a pipe to which Python writes the number of each signal, so that `select` notices signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signal_number, lambda *_: None)
    return reader


def main(command: list[str]) -> int:
    """Run a program, and return its exit status once the program and all its descendants have ended.

    stdin is a pipe from the process that wants the program. If the pipe closes, that process has died, and the program
    is killed with all its descendants. SIGTERM and SIGINT are passed on to the program as SIGTERM.
    """
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)  # orphaned descendants become children of this process
    signal_pipe = open_signal_pipe()
    guard_pid = os.getpid()
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: die_with_parent(guard_pid)
    )
    while True:
        ready_descriptors, _, _ = select.select([STDIN, signal_pipe], [], [])
        signal_numbers = os.read(signal_pipe, 4096) if signal_pipe in ready_descriptors else b""
        status_by_pid = reap_children()
        if program.pid in status_by_pid:
            kill_descendants()
            return status_by_pid[program.pid]
        is_stdin_closed = STDIN in ready_descriptors and not os.read(STDIN, 4096)
        if is_stdin_closed:
            kill_descendants()
            return 128 + signal.SIGKILL
        if signal.SIGTERM in signal_numbers or signal.SIGINT in signal_numbers:
            os.kill(program.pid, signal.SIGTERM)  # not reaped yet, so the number is still its own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
