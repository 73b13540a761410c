"""Who has more to do than a turn of the event loop should take waits here, and goes on beside everybody else.

Owns how many go on in one turn, however many there are. Refuses to know what they do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 4
"""In one turn of the loop: each is a read of some 250 KB, or takes as long."""


class LoopTurns:
    """Of one process. First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(go_on)

    def _next(self) -> None:
        loop, waiting = asyncio.get_running_loop(), self._waiting
        for _ in range(min(AT_ONCE, len(waiting))):
            loop.call_soon(waiting.popleft())  # each by itself: what raises keeps nobody else from his turn
        if waiting:
            loop.call_soon(self._next)
