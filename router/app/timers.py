"""Periodic work of the router's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 0.02


@dataclass(slots=True)
class _Step:
    """A piece of periodic work."""

    name: str
    run: Callable[[float], None]
    """Does the work; its argument is the time of the process's clock."""
    every_s: float
    due_at_s: float = 0.0


class Timers:
    """Runs functions periodically on the event loop. A function that raises does not stop the others."""

    def __init__(self, now: Callable[[], float], record_crash: Callable[[str, Exception], None]) -> None:
        """`now`: the clock, in seconds. `record_crash` is called with the name of a step that raised, and the error."""
        self._now = now
        self._record_crash = record_crash
        self._steps: list[_Step] = []
        self._next_run: asyncio.TimerHandle | None = None

    def add(self, name: str, step: Callable[[float], None], every_s: float = 0.0) -> None:
        """Call `step` every `every_s` seconds, or at every tick. `name` labels its crashes in the metrics."""
        self._steps.append(_Step(name, step, every_s))

    def run(self) -> None:
        """Run the steps that are due: now, and every TICK_S until `stop`."""
        self._next_run = asyncio.get_running_loop().call_later(TICK_S, self.run)
        now = self._now()
        for step in self._steps:
            if now >= step.due_at_s:
                step.due_at_s = now + step.every_s
                try:
                    step.run(now)
                except Exception as error:  # noqa: BLE001  a boundary
                    self._record_crash(step.name, error)

    def stop(self) -> None:
        """Run no more steps."""
        if self._next_run is not None:
            self._next_run.cancel()
