"""Limit of open files, which every program raises when it starts, event loops, and child processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

_BOOTSTRAP = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:])))"
)


EXIT_GRACE_S = 5.0
"""Longest that a child process outlives its parent."""


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, and return the new limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit < hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def read_resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not say."""
    try:
        with open("/proc/self/statm") as statm_file:
            return int(statm_file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def import_event_loops() -> Any:
    """Return the module whose `run` and `new_event_loop` are to be used: uvloop where it is installed, else asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio
    return uvloop


def start_child(module: str, *numbers: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `main(fd, *numbers)` of a module in a new Python process. Return the process and a socket to it.

    `fd`: file descriptor of the child's end of the socket. The return value of `main` is the exit status. The child
    ignores SIGINT and SIGTERM, which terminals and supervisors send to it too, because its parent has to end it.
    """
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        child_fd = child_socket.fileno()
        main_arguments = [str(number) for number in (child_fd, *numbers)]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), module, *main_arguments],
            pass_fds=[child_fd],
            stdin=subprocess.DEVNULL,
        )
    return process, parent_socket


def exit_when_closed(fd: int) -> None:
    """End this process EXIT_GRACE_S after the other end of the socket `fd` is closed, even if this process is blocked.

    A model that is loaded, or a device that hangs, may block a process for minutes.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # poll reports the end of a connection in any case
        poll.poll()
        time.sleep(EXIT_GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
