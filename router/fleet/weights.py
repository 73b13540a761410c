"""Sleep, wake up, other weights, an empty cache: for workers one by one, so that the others answer meanwhile.

Owns the order: no new work, what runs there ends, the engine is told (by vLLM's routes, which ours has too), what was
known of its cache is forgotten, work again. Refuses to know who asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlencode

import aiohttp
import msgspec
from msgspec import Meta

from router.asking import Unanswered, ask
from router.decide.core import RouterCore
from router.decide.workers import OURS, CacheView, WorkerState
from router.fleet.members import Fleet

log = logging.getLogger("router")

ANSWER_S_MAX = 1800.0
"""Of an engine that loads weights."""
ANSWER_BYTES_MAX = 1 << 20
LOOK_S = 0.05
KNOWN_S_MAX = 60.0
"""For a process that was started again to find the workers."""
EMPTY_S_MAX = 0.5
"""Until an emptied cache says so by its events. vLLM says it with its next step only: then its word is believed."""


class WeightsOrder(msgspec.Struct, forbid_unknown_fields=True):
    """What is to be done."""

    do: Literal["sleep", "wake", "reload", "reset"]
    worker_id: str | None = None
    """None: all that are known, one after the other."""
    path: Annotated[str, Meta(min_length=1)] | None = None
    """Of reload: a checkpoint's folder as the worker sees it; None: the one of last time."""
    level: Literal[1, 2] = 1
    """Of sleep."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """For what runs there to end; after it this worker is left as it is, and the others too."""


class Begun(msgspec.Struct):
    """An order that is under way, as it is noted."""

    order: WeightsOrder
    left: list[str]
    """The worker whose turn it is, and those after it."""
    was_drained: bool
    """That worker, before."""


class Outcome(msgspec.Struct):
    """Of one worker."""

    worker_id: str
    done: bool
    seconds: float
    error: str | None = None


class Weights:
    """Of one process: one order at a time."""

    def __init__(
        self,
        core: RouterCore,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        headers: dict[str, str] | None,
        *,
        clear: Callable[[str], None],
    ) -> None:
        """`headers`: with the workers' API key. `clear`: forget what a worker's events have said."""
        self._core, self._fleet, self._session, self._headers = core, fleet, session, headers or {}
        self._clear = clear
        self.drain: Callable[[str, bool], Awaitable[None]] = lambda worker_id, on: fleet.drain(worker_id, on=on)
        """In every process."""
        self.running: Callable[[str], Awaitable[int]] = self._running
        """Requests that a worker has of all processes."""
        self.changed: Callable[[str, bool], Awaitable[None]] = self.look_again
        """In every process: look at the worker now, and forget its cache if it was emptied."""
        self.note: Path | None = None
        """Where it stands how far an order is, for who is started again in the middle of it."""
        self.busy = False

    async def _running(self, worker_id: str) -> int:
        return sum(self._core.sent_to(worker_id))

    async def roll(self, order: WeightsOrder, workers: list[str], was_drained: bool | None = None) -> list[Outcome]:
        """Up to the first that fails, which takes work again. `was_drained`: the first, where that is
        not to be seen."""
        assert not self.busy
        self.busy = True
        outcomes: list[Outcome] = []
        try:
            for i, worker_id in enumerate(workers):
                began_s = time.monotonic()
                worker = self._core.workers.get(worker_id)
                if was_drained is None:
                    was_drained = worker is not None and worker.state is WorkerState.DRAINING
                self._note(Begun(order, workers[i:], was_drained))
                error = await self._one(order, worker_id, was_drained)
                outcomes.append(Outcome(worker_id, error is None, round(time.monotonic() - began_s, 3), error))
                log.info("admin: %s of worker %s: %s", order.do, worker_id, error or "done")
                if error is not None:
                    break
                was_drained = None
        finally:
            self.busy = False
            self._note(None)
        return outcomes

    async def go_on(self) -> None:
        """With what a process left that died in the middle of an order: its worker gets no work, and nobody else knows
        how far it was. Each step may be done twice."""
        if self.note is None or not self.note.exists():
            return
        try:
            begun = msgspec.json.decode(self.note.read_bytes(), type=Begun)
        except msgspec.MsgspecError as error:
            log.error("admin: an order was under way whose note cannot be read: %s", error)
            return
        log.warning("admin: %s goes on, for workers %s", begun.order.do, ", ".join(begun.left))
        self.busy = True  # until those are known again
        end_s = time.monotonic() + KNOWN_S_MAX
        while not self._core.workers.keys() >= {*begun.left} and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
        self.busy = False
        await self.roll(begun.order, begun.left, begun.was_drained)

    def _note(self, begun: Begun | None) -> None:
        if self.note is None:
            return
        if begun is None:
            self.note.unlink(missing_ok=True)
            return
        new = self.note.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(begun))
        new.replace(self.note)

    async def _one(self, order: WeightsOrder, worker_id: str, was_drained: bool) -> str | None:
        worker = self._core.workers.get(worker_id)
        if worker is None:
            return "was removed"
        rests = False
        await self.drain(worker_id, True)
        try:
            end_s = time.monotonic() + order.drain_s
            while await self.running(worker_id):
                if time.monotonic() > end_s:
                    return f"still has requests after {order.drain_s:g} s"
                await asyncio.sleep(LOOK_S)
            try:
                for path, body in self._calls(order, worker.spec.engine):
                    await self._tell(worker_id, worker.spec.url, path, body)
            except Unanswered as error:
                return str(error)
            rests = order.do == "sleep"
            await self.changed(worker_id, order.do != "wake")
            return None
        finally:
            if not rests and (order.do == "wake" or not was_drained):
                await self.drain(worker_id, False)
            await self.changed(worker_id, False)

    @staticmethod
    def _calls(order: WeightsOrder, engine: str) -> list[tuple[str, bytes]]:
        """(path, body) of what the worker is asked."""
        reset = ("/reset_prefix_cache", b"")
        if order.do == "sleep":
            return [("/sleep?" + urlencode({"level": order.level, "mode": "wait"}), b"")]
        if order.do == "wake":
            return [("/wake_up", b"")]
        if order.do == "reset":
            return [reset]
        body: dict[str, object] = {"method": "reload_weights"}
        if order.path is not None:
            body["kwargs"] = {"weights_path": order.path}
        load = ("/collective_rpc", msgspec.json.encode(body))
        return [load] if engine == OURS else [load, reset]  # ours empties its cache by itself

    async def _tell(self, worker_id: str, url: str, path: str, body: bytes) -> None:
        """Raises Unanswered."""
        headers = (self._headers if self._fleet.is_keyed(worker_id) else {}) | {"Content-Type": "application/json"}
        status, answer = await ask(
            self._session, url + path, method="POST", headers=headers, data=body, seconds=ANSWER_S_MAX,
            bytes_max=ANSWER_BYTES_MAX,
        )  # fmt: skip
        if status != 200 or b'"success":false' in answer.replace(b" ", b""):
            said = answer[:500].decode("utf-8", "replace")
            hint = " (engine serve --enable-sleep-mode, vLLM: VLLM_SERVER_DEV_MODE=1)" if status == 404 else ""
            raise Unanswered(f"{path} is answered {status}{hint}: {said}")

    async def look_again(self, worker_id: str, emptied: bool) -> None:
        """Ask how the worker is; where its cache was emptied, return when nothing counts as cached there."""
        self._fleet.suspect(worker_id)
        if not emptied:
            return
        self._core.emptied(worker_id, time.monotonic())
        worker = self._core.workers.get(worker_id)
        if worker is None or worker.spec.cache_view is not CacheView.EVENTS:
            return
        end_s = time.monotonic() + EMPTY_S_MAX
        while any(self._core.index.held_tokens(holder) for holder in worker.holders):
            if time.monotonic() > end_s:
                self._clear(worker_id)
                return
            await asyncio.sleep(LOOK_S)
