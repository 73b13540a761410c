"""Who has more to do than a turn of the event loop should take waits here, and goes on beside everybody else.

Owns how many go on in one turn, however many there are, and that parties take turns: who comes with many waits behind
his own. Refuses to know what they do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

AT_ONCE: Final = 4
"""In one turn of the loop: each is a read of some 250 KB, or takes as long."""
REQUESTS_AT_ONCE: Final = 8
"""Begun in one turn of the loop: each takes a fifth of a millisecond."""


class LoopTurns:
    """Of one process. Of one party: first come, first served."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = self._left = at_once
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By party, the next one first."""

    def now(self) -> bool:
        """Whether one more has room in this turn, who then need not wait. Nobody overtakes those who do."""
        if self._waiting or not self._left:
            return False
        self._left -= 1
        if not self._left:  # not in every turn: that would make the loop turn once more for a request
            asyncio.get_running_loop().call_soon(self._renew)
        return True

    def _renew(self) -> None:
        self._left = self._at_once

    def wait(self, go_on: Callable[[], None], party: str = "") -> None:
        """Call `go_on` in a later turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        queue = self._waiting.get(party)
        if queue is None:
            queue = self._waiting[party] = deque()
        queue.append(go_on)

    def _next(self) -> None:
        loop, waiting = asyncio.get_running_loop(), self._waiting
        turns: list[Callable[[], None]] = []
        while waiting and len(turns) < self._at_once:
            party = next(iter(waiting))
            queue = waiting.pop(party)
            turns.append(queue.popleft())
            if queue:
                waiting[party] = queue
        if waiting:
            loop.call_soon(self._next)
        for go_on in turns:
            try:
                go_on()
            except Exception as error:  # noqa: BLE001  what raises keeps nobody else from his turn
                loop.call_exception_handler({"message": "in a turn of the loop", "exception": error})
