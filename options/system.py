"""Limit of open files, which every program raises when it starts, memory of a process, event loops, silent sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any, Final

SILENT_S_MAX: Final = 30
"""Time after which connections to a machine that acknowledges nothing are broken."""


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


def probe_silent_connections(sock: Any, unacknowledged_s_max: float | None = None) -> None:
    """Have the kernel probe a silent connection: a machine without power or network sends no end of it.

    A listening socket passes this on to its connections. `unacknowledged_s_max`: longest time in which the other end
    acknowledges nothing, or takes nothing of what waits for it, but at least SILENT_S_MAX; None: minutes.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": SILENT_S_MAX // 2, "TCP_KEEPINTVL": SILENT_S_MAX // 6, "TCP_KEEPCNT": 3}
    if unacknowledged_s_max is not None:
        values["TCP_USER_TIMEOUT"] = int(min(max(unacknowledged_s_max, SILENT_S_MAX) * 1000, 2**31 - 1))
    for name, value in values.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
