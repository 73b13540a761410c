"""Fair scheduling of long work on the event loop.

In each iteration of the loop a bounded number of callbacks runs. Tenants take turns, so a tenant with many callbacks
delays only itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

READS_PER_ITERATION: Final = 4
"""Callbacks in one iteration of the loop; each is a read of some 250 KB, or takes as long."""
REQUESTS_PER_ITERATION: Final = 8
"""Requests begun in one iteration of the loop; each takes a fifth of a millisecond."""


class FairScheduler:
    """Spreads long work over the iterations of the event loop, so that one tenant's work does not delay the others'.

    Each iteration runs a few callbacks: those of a tenant in the order of arrival, and of different tenants in turn.
    """

    def __init__(self, callbacks_per_iteration: int = READS_PER_ITERATION) -> None:
        self._callbacks_per_iteration = self._free_slots = callbacks_per_iteration
        self._queue_by_tenant: dict[str, deque[Callable[[], None]]] = {}
        """Callbacks of each tenant in the order of arrival; the next tenant is first."""

    def try_start(self) -> bool:
        """Take one of this iteration's slots, and return whether there was one: then the caller may work at once.

        If there was none, or others wait, the caller has to `schedule` its work.
        """
        if self._queue_by_tenant or not self._free_slots:
            return False
        self._free_slots -= 1
        if not self._free_slots:  # only then, as it makes the loop turn once more
            asyncio.get_running_loop().call_soon(self._reset_slots)
        return True

    def _reset_slots(self) -> None:
        self._free_slots = self._callbacks_per_iteration

    def schedule(self, callback: Callable[[], None], tenant: str = "") -> None:
        """Call `callback` in a later iteration, after those that `tenant` has scheduled before."""
        if not self._queue_by_tenant:
            asyncio.get_running_loop().call_soon(self._run_batch)
        queue = self._queue_by_tenant.get(tenant)
        if queue is None:
            queue = self._queue_by_tenant[tenant] = deque()
        queue.append(callback)

    async def take_turn(self, tenant: str) -> None:
        """Wait for a turn of `tenant`, as `schedule` gives it."""
        turn = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if not turn.done():
                turn.set_result(None)

        self.schedule(begin, tenant)
        await turn

    def _run_batch(self) -> None:
        """Run some of the queued callbacks, one of each tenant in turn, and leave the others to the next iteration."""
        loop = asyncio.get_running_loop()
        callbacks = self._pop_callbacks()
        if self._queue_by_tenant:
            loop.call_soon(self._run_batch)
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # noqa: BLE001  a boundary: the other callbacks run
                loop.call_exception_handler({"message": "in a turn of the loop", "exception": error})

    def _pop_callbacks(self) -> list[Callable[[], None]]:
        """Remove and return the callbacks of one iteration of the loop, taken from the tenants in turn."""
        callbacks: list[Callable[[], None]] = []
        while self._queue_by_tenant and len(callbacks) < self._callbacks_per_iteration:
            tenant = next(iter(self._queue_by_tenant))
            queue = self._queue_by_tenant.pop(tenant)
            callbacks.append(queue.popleft())
            if queue:
                self._queue_by_tenant[tenant] = queue  # behind the other tenants
        return callbacks
