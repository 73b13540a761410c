"""Periodic work of the router's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

TICK_S: Final = 0.02

Step = Callable[[float], None]
"""A piece of work. Its argument is the time of the process's clock."""


class _NamedStep(NamedTuple):
    name: str
    run: Step


class Timers:
    """Runs the periodic work of the process: steps that clients wait for at each tick, the others at each sweep.

    Ticks are TICK_S apart, sweeps `sweep_s`. A step that raises does not stop the others.
    """

    def __init__(
        self, now: Callable[[], float], sweep_s: float, record_crash: Callable[[str, Exception], None]
    ) -> None:
        """`record_crash` is called with the name of a step that raised, and the exception."""
        self._now = now
        self._sweep_s = sweep_s
        self._record_crash = record_crash
        self._tick_steps: list[_NamedStep] = []
        self._sweep_steps: list[_NamedStep] = []
        self._swept_at_s = 0.0
        self._next_run: asyncio.TimerHandle | None = None

    def add_tick_step(self, name: str, step: Step) -> None:
        """Call `step` every TICK_S."""
        self._tick_steps.append(_NamedStep(name, step))

    def add_sweep_step(self, name: str, step: Step) -> None:
        """Call `step` every `sweep_s`."""
        self._sweep_steps.append(_NamedStep(name, step))

    def run(self) -> None:
        """Run the steps that are due: now, and every TICK_S until `stop`."""
        self._next_run = asyncio.get_running_loop().call_later(TICK_S, self.run)
        now = self._now()
        self._run_steps(self._tick_steps, now)
        if now - self._swept_at_s >= self._sweep_s:
            self._swept_at_s = now
            self._run_steps(self._sweep_steps, now)

    def stop(self) -> None:
        """Run no more steps."""
        if self._next_run is not None:
            self._next_run.cancel()

    def _run_steps(self, steps: list[_NamedStep], now: float) -> None:
        for step in steps:
            try:
                step.run(now)
            except Exception as error:  # noqa: BLE001  a boundary
                self._record_crash(step.name, error)
