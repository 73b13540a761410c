"""Work that is begun anew when it fails, with pauses that double, and work that is given up after some time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")

RESTART_S = 1.0
RESTART_S_MAX = 60.0
"""Longest pause of `run_forever`; the pause doubles from RESTART_S on."""
GOOD_WORK_S = 10.0
"""Time after which the end of some work is no reason for a long pause: balancers cut each watch after 20 s or more."""


async def run_forever(work: Callable[[], Coroutine[Any, Any, None]], report_error: Callable[[Exception], None]) -> None:
    """Call `work` again and again, with a pause after each time it ends or raises an error, which is reported.

    The pause doubles, unless the work went well for GOOD_WORK_S.
    """
    pause_s = 0.0
    while True:
        started_s = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001  a boundary
            report_error(error)
        if time.monotonic() - started_s > GOOD_WORK_S:
            pause_s = 0.0
        pause_s = double_pause(pause_s, RESTART_S, RESTART_S_MAX)
        await asyncio.sleep(pause_s)


def double_pause(pause_s: float, first_s: float, max_s: float) -> float:
    """Return twice the last pause, between `first_s` and `max_s`."""
    return min(max(2 * pause_s, first_s), max_s)


async def run_with_timeout(seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Await `work`, but no longer than `seconds`; return its result, or None if it took longer.

    Up to Python 3.11, `asyncio.wait_for` loses a cancellation that comes when the work is done, and the task of a
    removed worker would run for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    return task.result() if task.done() else None
