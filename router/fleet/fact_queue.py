"""Facts that the event feed learns about workers, and the queue that hands them to the event loop.

The feed learns facts on its own thread, and the core runs on the event loop. Health checks run on the event loop and
call the core directly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple


class CacheCleared(NamedTuple):
    """A rank's cache is empty, or unknown because events were lost."""

    worker_id: str
    rank: int
    at_s: float
    """Time of `time.monotonic`."""


class CapacityObserved(NamedTuple):
    """Number of tokens that the cache of a rank holds, as its events show; None if they do not show it yet."""

    worker_id: str
    rank: int
    tokens: int | None


class StreamLost(NamedTuple):
    """The subscription of a rank's events broke, maybe because its worker died."""

    worker_id: str
    rank: int


class EngineRestarted(NamedTuple):
    """The events of a rank come from another process than before."""

    worker_id: str
    rank: int


WorkerFact = CacheCleared | CapacityObserved | StreamLost | EngineRestarted


class FactQueue:
    """Queue that hands facts about workers (cache cleared, engine restarted, ...) from any thread to the event loop.

    A new fact replaces a waiting one of the same kind about the same data-parallel rank. So however often a fact is
    repeated, it is applied at most once in each turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, apply_fact: Callable[[WorkerFact], None]) -> None:
        """`apply_fact` is called on the loop's thread with each fact, in order."""
        self._loop = loop
        self._apply_fact = apply_fact
        self._lock = threading.Lock()
        self._waiting_facts: dict[tuple[type[WorkerFact], str, int], WorkerFact] = {}
        """Facts by kind, worker and rank."""

    def put(self, fact: WorkerFact) -> None:
        """Schedule a fact to be applied in the loop's next turn. Any thread may call this."""
        key = (type(fact), fact.worker_id, fact.rank)
        with self._lock:
            is_scheduled = bool(self._waiting_facts)
            self._waiting_facts.pop(key, None)  # so that the new fact moves to the end of the order
            self._waiting_facts[key] = fact
        if not is_scheduled:
            self._loop.call_soon_threadsafe(self._apply_waiting_facts)

    def _apply_waiting_facts(self) -> None:
        with self._lock:
            facts, self._waiting_facts = self._waiting_facts, {}
        for fact in facts.values():
            self._apply_fact(fact)
