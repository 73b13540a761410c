"""Limit of open files, which every program raises when it starts, and child processes."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys

_BOOTSTRAP = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:])))"
)


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, and return the new limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit < hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def start_child(module: str, *numbers: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `main(fd, *numbers)` of a module in a Python process of its own. Return the process and a socket to it.

    `fd`: the process's end of the socket. The return value of `main` is the exit status.
    """
    own_socket, child_socket = socket.socketpair()
    with child_socket:
        arguments = [json.dumps(sys.path), module, *map(str, (child_socket.fileno(), *numbers))]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *arguments],
            pass_fds=[child_socket.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return process, own_socket
