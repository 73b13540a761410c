"""Speed of transfers between pairs of workers, and pairs that are avoided after failures. No I/O, no clock.

A transfer takes `floor_s` and the time of its bytes at the configured rate, times a factor. The factor is learned for
each pair; until then that of all pairs counts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from router.decide.config import TransferConfig
from router.decide.speed import LoadTimeFactor

PAIRS_MAX: Final = 10_000
"""Pairs that are remembered; the longest unused one is forgotten first."""
PAUSE_S, PAUSE_S_MAX = 5.0, 300.0
"""First time that a pair is avoided after a failure, which doubles with each further failure, and the longest."""
LEARNED_S_MIN: Final = 0.02
"""Least time at the configured rate of a transfer that is learned from; the time of a step hides shorter ones."""


@dataclass(slots=True)
class _Pair:
    speed: LoadTimeFactor = field(default_factory=LoadTimeFactor)
    pause_s: float = PAUSE_S
    """Time for which the next failure will have the pair avoided."""
    paused_until_s: float = 0.0


class TransferLinks:
    """Observed speed and failures of each pair (source, destination) of targets, by their names."""

    def __init__(self, config: TransferConfig) -> None:
        self._floor_s, self._s_per_byte = config.floor_s, 1.0 / (config.gb_s * 1e9)
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()
        self._all_pairs_speed = LoadTimeFactor()

    def estimate_transfer_s(self, source: str, destination: str, byte_count: float, active_count: int) -> float:
        """Return the time of a transfer that shares the pair's network with `active_count` others."""
        pair = self._pairs.get((source, destination))
        speed = pair.speed if pair is not None and pair.speed.is_learned else self._all_pairs_speed
        return self._floor_s + (1 + active_count) * byte_count * self._s_per_byte * speed.factor

    def is_paused(self, source: str, destination: str, now: float) -> bool:
        """Return whether a pair is avoided because a transfer failed."""
        pair = self._pairs.get((source, destination))
        return pair is not None and now < pair.paused_until_s

    def record_success(self, source: str, destination: str) -> None:
        """Count a transfer that came, so that the pair's next failure is the first in a row."""
        pair = self._pairs.get((source, destination))
        if pair is not None:
            pair.pause_s = PAUSE_S

    def learn_speed(self, source: str, destination: str, byte_count: float, transfer_s: float) -> None:
        """Learn from the time of a transfer that came; `byte_count` includes what moved beside it."""
        pair = self._get_pair(source, destination)
        configured_s = byte_count * self._s_per_byte
        if configured_s >= LEARNED_S_MIN:
            for speed in (pair.speed, self._all_pairs_speed):
                speed.observe(configured_s, transfer_s - self._floor_s)

    def record_failure(self, source: str, destination: str, now: float) -> None:
        """Avoid a pair for a while, longer after each failure in a row. One pause counts one failure."""
        pair = self._get_pair(source, destination)
        if now < pair.paused_until_s:
            return
        pair.paused_until_s = now + pair.pause_s
        pair.pause_s = min(2.0 * pair.pause_s, PAUSE_S_MAX)

    def forget_target(self, name: str) -> None:
        """Forget all pairs of a target, because its worker restarted or was removed."""
        for key in [key for key in self._pairs if name in key]:
            del self._pairs[key]

    def _get_pair(self, source: str, destination: str) -> _Pair:
        pair = self._pairs.setdefault((source, destination), _Pair())
        self._pairs.move_to_end((source, destination))
        if len(self._pairs) > PAIRS_MAX:
            self._pairs.popitem(last=False)
        return pair
