"""Several processes of one router on one port: what each asks of the others, over Unix sockets in a private folder.

Every process is equal: each keeps the whole index and answers any request. Two things need the others: sums
(`/metrics`, `/workers`) and changes of the list of workers, which the process that got them passes on. Load in flight
is shared by router/fleet/peers.py, between these processes as between routers on different machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from router.asking import Unanswered, ask
from router.fleet.discovery import WorkerFlag

log = logging.getLogger("router")

RELAYED = b"x-blockcast-relayed"
"""Marks a change that came from a sibling and goes no further."""
ANSWER_S_MAX = 2.0
READY_S_MAX = 1.0
"""For a process to say whether it is ready: one that is busy for longer is not."""
ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the processes this one is."""

    index: int
    count: int
    folder: Path

    def control(self, index: int) -> Path:
        """Unix socket of the control routes of a process."""
        return self.folder / f"control-{index}"

    def load(self, index: int) -> str:
        """Where a process publishes its load."""
        return f"ipc://{self.folder}/load-{index}"

    @property
    def others(self) -> list[int]:
        return [index for index in range(self.count) if index != self.index]


class Standing(msgspec.Struct):
    """What operators said since the start; a process that is started again asks another one for it."""

    workers: list[WorkerFlag]
    """Those that were named one by one."""
    drained: list[str]


class WorkerSums(msgspec.Struct):
    """One target's figures that add up over processes."""

    prefilling: int = 0
    decoding: int = 0
    routed: int = 0
    predicted_cached_tokens: int = 0
    reported_cached_tokens: int = 0

    def add(self, other: WorkerSums) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Report(msgspec.Struct):
    """What one process did, or several together."""

    metrics: dict[str, Any]
    in_flight: int
    held: int
    counters: dict[str, int]
    workers: dict[str, WorkerSums]
    tokenize_cpu_s: float
    known_bodies: tuple[int, int, int]
    """(bodies whose beginning was known, those that might have been, bytes) of what is known of bodies."""
    segments: dict[str, tuple[int, int, int]]
    """model -> (tokens found, tokens encoded, bytes) of its segment cache."""
    large_bodies: dict[str, int]
    """outcome -> bodies given to helper processes."""
    waiting_bytes: int
    """Of large bodies that are not read yet."""
    event_faults: int = 0
    """What raised on the thread that reads events."""
    events_ignored: int = 0
    """Messages of topics that nobody follows."""
    peer_messages: dict[str, int] = {}
    """outcome -> messages of and to other routers."""

    def add(self, other: Report) -> None:
        """All but `metrics`, which router/app/metrics_page.py adds up."""
        self.in_flight += other.in_flight
        self.held += other.held
        self.counters = dict(Counter(self.counters) + Counter(other.counters))
        for name, sums in other.workers.items():
            self.workers.setdefault(name, WorkerSums()).add(sums)
        self.tokenize_cpu_s += other.tokenize_cpu_s
        hits, misses, used = (mine + theirs for mine, theirs in zip(self.known_bodies, other.known_bodies))
        self.known_bodies = hits, misses, used
        self.large_bodies = dict(Counter(self.large_bodies) + Counter(other.large_bodies))
        self.waiting_bytes += other.waiting_bytes
        self.event_faults += other.event_faults
        self.events_ignored += other.events_ignored
        self.peer_messages = dict(Counter(self.peer_messages) + Counter(other.peer_messages))
        for model, (hits, misses, used) in other.segments.items():
            mine = self.segments.get(model, (0, 0, 0))
            self.segments[model] = (mine[0] + hits, mine[1] + misses, mine[2] + used)


class Siblings:
    """The other processes, as seen from one."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    async def reports(self) -> list[Report]:
        """Those of the others that answer in time."""
        answers = await asyncio.gather(*(self._ask(index, "GET", "/report") for index in self._share.others))
        return [msgspec.json.decode(answer, type=Report) for answer in answers if answer is not None]

    async def relay(self, method: str, path: str, body: bytes) -> None:
        """Have every other process do the same."""
        await asyncio.gather(*(self._ask(index, method, path, body) for index in self._share.others))

    async def standing(self) -> Standing | None:
        """As the first of the others tells that runs; None where none does, as when all are just started."""
        answer = await self.find("/standing")
        return None if answer is None else msgspec.json.decode(answer, type=Standing)

    async def find(self, path: str) -> bytes | None:
        """What the first of the others answers that knows."""
        answers = await asyncio.gather(*(self._ask(index, "GET", path, quiet=True) for index in self._share.others))
        return next((answer for answer in answers if answer is not None), None)

    async def not_ready(self) -> str | None:
        """Why one of the others had better get no requests. One that does not run gets none, its listener is gone."""

        async def reason(index: int) -> str | None:
            try:
                status, answer = await self._send(index, "GET", "/readyz", b"", READY_S_MAX)
                told = msgspec.json.decode(answer, type=dict[str, str])["status"]
                return None if status == 200 else f"process {index}: {told}"
            except Unanswered as error:
                gone = isinstance(error.__cause__, aiohttp.ClientConnectorError)
                return None if gone else f"process {index} does not answer"
            except (msgspec.MsgspecError, KeyError) as error:
                return f"process {index}: {error}"

        reasons = await asyncio.gather(*map(reason, self._share.others))
        return next((one for one in reasons if one is not None), None)

    async def _send(self, index: int, method: str, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Raises Unanswered."""
        session = self._sessions.get(index)
        if session is None:
            connector = aiohttp.UnixConnector(str(self._share.control(index)))
            session = self._sessions[index] = aiohttp.ClientSession(connector=connector)
        headers = {RELAYED.decode(): str(self._share.index), "Content-Type": "application/json"}
        return await ask(
            session, f"http://sibling{path}", method=method, headers=headers, data=body, seconds=seconds,
            bytes_max=ANSWER_BYTES_MAX,
        )  # fmt: skip

    async def _ask(self, index: int, method: str, path: str, body: bytes = b"", *, quiet: bool = False) -> bytes | None:
        try:
            status, answer = await self._send(index, method, path, body, ANSWER_S_MAX)
        except Unanswered as error:
            if not (quiet and isinstance(error.__cause__, aiohttp.ClientConnectorError)):
                log.warning("process %d does not answer %s: %s", index, method, error)
            return None
        if status >= 400 and quiet:
            return None
        if status >= 400:
            log.warning("process %d answers %s %s with %d", index, method, path, status)
            return None
        return answer

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
