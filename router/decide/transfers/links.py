"""Speed of transfers between pairs of workers, and pairs that are avoided after failures. No I/O, no clock.

A transfer takes a delay, and the time of its bytes at the configured rate times a factor. Both are learned for each
pair; until then those of all pairs count, and before any transfer the configured ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from router.decide.config import TransferConfig

PAIRS_MAX: Final = 10_000
"""Pairs that are remembered; the longest unused one is forgotten first."""
PAUSE_S, PAUSE_S_MAX = 5.0, 300.0
"""First time that a pair is avoided after a failure, which doubles with each further failure, and the longest."""
RATE_LEARNED_S_MIN: Final = 0.02
"""Transfers whose bytes take so long, at the configured rate, show the rate. Shorter ones show the delay."""
OBSERVATIONS_MAX, OBSERVATIONS_MIN = 15, 3
"""Most and fewest transfers whose median is learned."""
LEARNED_FOR_S: Final = 300.0
"""Time for which a transfer is learned from. Without an end, a pair that was slow once would never be tried again."""


class _Observation(NamedTuple):
    value: float
    observed_at_s: float


class _RecentMedian:
    """Median of the last observations, because queues and busy machines make some transfers late."""

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=OBSERVATIONS_MAX)
        self._median = 0.0

    def observe(self, value: float, now: float) -> None:
        """Add an observation, and forget those that are too old."""
        observations = self._observations
        observations.append(_Observation(value, now))
        while now - observations[0].observed_at_s > LEARNED_FOR_S:
            observations.popleft()
        self._median = sorted(observations)[len(observations) // 2].value

    def get(self, now: float) -> float | None:
        """Return the median; None if there are not enough recent observations."""
        if len(self._observations) < OBSERVATIONS_MIN:
            return None
        oldest_needed = self._observations[-OBSERVATIONS_MIN]
        return self._median if now - oldest_needed.observed_at_s <= LEARNED_FOR_S else None


@dataclass(slots=True)
class _TransferSpeed:
    """Speed of transfers as it was observed."""

    delay_s: _RecentMedian = field(default_factory=_RecentMedian)
    """Time of a transfer besides its bytes, such as the wait for the steps of both engines."""
    rate_factor: _RecentMedian = field(default_factory=_RecentMedian)
    """Time of a transfer's bytes, divided by their time at the configured rate."""


@dataclass(slots=True)
class _Pair:
    speed: _TransferSpeed = field(default_factory=_TransferSpeed)
    pause_s: float = PAUSE_S
    """Time for which the next failure will have the pair avoided."""
    paused_until_s: float = 0.0


class TransferLinks:
    """Observed speed and failures of each pair (source, destination) of targets, by their names."""

    def __init__(self, config: TransferConfig) -> None:
        self._floor_s, self._s_per_byte = config.floor_s, 1.0 / (config.gb_s * 1e9)
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()
        self._all_pairs_speed = _TransferSpeed()

    def estimate_transfer_s(
        self, source: str, destination: str, byte_count: float, active_count: int, now: float
    ) -> float:
        """Return the time of a transfer that shares the pair's network with `active_count` others."""
        speeds = self._list_speeds(source, destination)
        bytes_s = (1 + active_count) * byte_count * self._s_per_byte
        return self._get_delay_s(speeds, now) + bytes_s * _get_rate_factor(speeds, now)

    def _list_speeds(self, source: str, destination: str) -> list[_TransferSpeed]:
        """Return the speeds that a pair may have: its own, and that of all pairs."""
        pair = self._pairs.get((source, destination))
        return [self._all_pairs_speed] if pair is None else [pair.speed, self._all_pairs_speed]

    def _get_delay_s(self, speeds: list[_TransferSpeed], now: float) -> float:
        return _get_first_learned((speed.delay_s for speed in speeds), now, default=self._floor_s)

    def is_paused(self, source: str, destination: str, now: float) -> bool:
        """Return whether a pair is avoided because a transfer failed."""
        pair = self._pairs.get((source, destination))
        return pair is not None and now < pair.paused_until_s

    def record_success(self, source: str, destination: str) -> None:
        """Count a transfer that came, so that the pair's next failure is the first in a row."""
        pair = self._pairs.get((source, destination))
        if pair is not None:
            pair.pause_s = PAUSE_S

    def learn_speed(self, source: str, destination: str, byte_count: float, transfer_s: float, now: float) -> None:
        """Learn from the time of a transfer that came; `byte_count` includes what moved beside it.

        A long transfer shows the rate, and a short one the delay.
        """
        bytes_s = byte_count * self._s_per_byte
        pair = self._get_pair(source, destination)
        speeds = [pair.speed, self._all_pairs_speed]
        if bytes_s >= RATE_LEARNED_S_MIN:
            rate_factor = (transfer_s - self._get_delay_s(speeds, now)) / bytes_s
            for speed in speeds:
                speed.rate_factor.observe(max(rate_factor, 0.0), now)
        else:
            delay_s = transfer_s - bytes_s * _get_rate_factor(speeds, now)
            for speed in speeds:
                speed.delay_s.observe(max(delay_s, 0.0), now)

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


def _get_rate_factor(speeds: list[_TransferSpeed], now: float) -> float:
    return _get_first_learned((speed.rate_factor for speed in speeds), now, default=1.0)


def _get_first_learned(medians: Iterable[_RecentMedian], now: float, *, default: float) -> float:
    """Return the first of the medians for which there are enough observations."""
    for median in medians:
        value = median.get(now)
        if value is not None:
            return value
    return default
