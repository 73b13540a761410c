"""Child processes of a program, each with a socket to its parent, which they do not outlive."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

_BOOTSTRAP = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:])))"
)
EXIT_GRACE_S = 5.0
"""Longest that a child process outlives its parent."""


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
