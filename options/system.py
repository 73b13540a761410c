"""Limit of open files, which every program raises when it starts, memory of a process, and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any


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
