"""Limits of this process that every program raises at its start."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> int:
    """Take as many file descriptors as the hard limit allows; return how many these are."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit < hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
