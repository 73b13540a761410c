"""A publisher without threads, and a network that loses, repeats, delays, reorders and cuts.

The publisher is made of the real ring, shadow and replies; only the sockets are missing. Everything random comes from
the `rng` that is handed in, everything timed from `now`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from events import Event, EventBatch, encode_batch
from events.frames import END_SEQ, SNAPSHOT_SEQ
from events.replay_replies import SeqAndPayload, iter_replay, iter_snapshot
from events.resident_set import ResidentSet


class SimPublisher:
    """What `events.EventPublisher` does on its threads, as plain calls."""

    def __init__(self, ring_size: int, snapshots: bool) -> None:
        self.next_seq = 0
        self._ring: deque[SeqAndPayload] = deque(maxlen=ring_size)
        self.snapshots = snapshots
        self._shadow = ResidentSet()
        self._last: SeqAndPayload | None = None

    def publish(self, events: list[Event], now: float) -> SeqAndPayload:
        self._last = self.next_seq, encode_batch(EventBatch(now, events, 0))
        self._ring.append(self._last)
        self.next_seq += 1
        if self.snapshots:
            self._shadow.apply(events)
        return self._last

    def reply(self, start_seq: int, now: float) -> Iterator[SeqAndPayload]:
        """The messages of the reply; without snapshots, a bare end marker where one is asked for."""
        if start_seq != SNAPSHOT_SEQ:
            return iter_replay(list(self._ring), start_seq)
        if not self.snapshots:
            return iter([(END_SEQ, b"")])
        return iter_snapshot(self._shadow.list_blocks(), self._last, 0, now)


@dataclass
class Faults:
    """Probabilities, each of one thing happening to one message or in one tick."""

    lose: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    lose_reply: float = 0.0
    cut: float = 0.0
    crash: float = 0.0
    restart_router: float = 0.0
    delay_s_max: float = 0.05

    @staticmethod
    def draw(rng: random.Random) -> Faults:
        """A random mix: most runs have a few kinds of faults, some have all, some none."""

        def maybe(high: float) -> float:
            return rng.random() * high if rng.random() < 0.6 else 0.0

        return Faults(
            lose=maybe(0.2),
            repeat=maybe(0.2),
            reorder=maybe(0.3),
            lose_reply=maybe(0.05),
            cut=maybe(0.01),
            crash=maybe(0.006),
            restart_router=maybe(0.006),
            delay_s_max=rng.choice([0.0, 0.02, 0.5]),
        )


@dataclass
class Wire:
    """One direction of one subscription: messages under way, delivered by time."""

    rng: random.Random
    under_way: list[tuple[float, int, bytes]] = field(default_factory=list)
    last_due: float = 0.0

    def send(self, seq: int, payload: bytes, now: float, faults: Faults) -> None:
        if self.rng.random() < faults.lose:
            return
        copies = 2 if self.rng.random() < faults.repeat else 1
        for _ in range(copies):
            due = now + self.rng.random() * faults.delay_s_max
            if self.rng.random() >= faults.reorder:
                due = self.last_due = max(due, self.last_due)
            self.under_way.append((due, seq, payload))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Takes out what has arrived, in order of arrival."""
        arrivals = sorted((m for m in self.under_way if m[0] <= now), key=lambda message: message[0])
        self.under_way = [m for m in self.under_way if m[0] > now]
        return [(seq, payload) for _, seq, payload in arrivals]

    def reset(self, now: float) -> None:
        self.under_way.clear()
        self.last_due = now
