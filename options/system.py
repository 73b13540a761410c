"""Limit of open files, which every program raises when it starts."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, and return the new limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit < hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
