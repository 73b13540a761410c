"""Periodic work of the router's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

TICK_S: Final = 0.02

Step = Callable[[float], None]
"""A piece of work, which is given the time of the process's clock."""


class _NamedStep(NamedTuple):
    name: str
    run: Step


class Timers:
    """Calls some steps every TICK_S and the others every `sweep_s`. A step that raises does not stop the others."""

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

    def add_tick_step(self, name: str, step: Step) -> None:
        """Call `step` every TICK_S."""
        self._tick_steps.append(_NamedStep(name, step))

    def add_sweep_step(self, name: str, step: Step) -> None:
        """Call `step` every `sweep_s`."""
        self._sweep_steps.append(_NamedStep(name, step))

    async def run(self) -> None:
        """Run until the task is cancelled. The steps run in callbacks, as a task would wake the loop twice a tick."""
        loop = asyncio.get_running_loop()
        failure: asyncio.Future[None] = loop.create_future()

        def tick() -> None:
            if failure.done():
                return
            try:
                self._run_due_steps()
            except Exception as error:  # noqa: BLE001  whatever it is, the process ends with it
                failure.set_exception(error)
            else:
                loop.call_later(TICK_S, tick)

        tick()
        await failure

    def _run_due_steps(self) -> None:
        now = self._now()
        for step in self._tick_steps:
            self._run_step(step, now)
        if now - self._swept_at_s >= self._sweep_s:
            self._swept_at_s = now
            for step in self._sweep_steps:
                self._run_step(step, now)

    def _run_step(self, step: _NamedStep, now: float) -> None:
        try:
            step.run(now)
        except Exception as error:  # noqa: BLE001  a boundary
            self._record_crash(step.name, error)
