"""Speed of transfers between pairs of workers, and pairs that are avoided after failures. No I/O, no clock.

A transfer waits for the step of a source that gives blocks between its steps. Then it takes a fixed time and the time
of its bytes, times a factor. The factor is learned for each pair; until then, the factor of all pairs together counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from options.bounded_dict import BoundedDict
from router.decide.config import TransferConfig
from router.decide.learning import TimeFactor
from router.decide.target import Target
from router.decide.workers import BLOCKCAST

PAIRS_MAX: Final = 10_000
"""Pairs that are remembered; the longest unused one is forgotten first."""
PAUSE_S, PAUSE_S_MAX = 5.0, 300.0
"""First time that a pair is avoided after a failure, which doubles with each further failure, and the longest."""
UNSCALED_S_MIN: Final = 1e-3
"""Least time of a transfer to which a factor is applied."""


class TransferEstimate(NamedTuple):
    """Parts of a transfer's time."""

    wait_s: float
    """Time until the source's running step ends, if the source gives blocks between its steps, as our engines do."""
    unscaled_s: float
    """Time of the transfer itself, by the configured or offered rate."""
    factor: float
    """Learned factor of `unscaled_s`."""

    @property
    def total_s(self) -> float:
        return self.wait_s + self.unscaled_s * self.factor


@dataclass(slots=True)
class _Pair:
    time_factor: TimeFactor = field(default_factory=TimeFactor)
    pause_s: float = PAUSE_S
    """Time for which the next failure will have the pair avoided."""
    paused_until_s: float = 0.0


class TransferLinks:
    """Observed speed and failures of each pair (source, destination) of targets, by their names."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._pairs: BoundedDict[tuple[str, str], _Pair] = BoundedDict(PAIRS_MAX)
        self._all_pairs_factor = TimeFactor()

    def estimate(self, source: Target, destination: Target | None, tokens: int, now: float) -> TransferEstimate:
        """Return the expected time to move the KV of `tokens` tokens between two workers, if that begins now.

        A worker's transfers share its network equally: beside two others, this one takes as long as three times its
        bytes. `destination` is None if it is not chosen yet. Then only the source's other transfers count.
        """
        facts, other_transfers = source.transfer_facts, source.load.outgoing_transfers
        factor = self._all_pairs_factor.get(now)
        if destination is not None:
            other_transfers = max(other_transfers, destination.load.incoming_transfers)
            pair = self._pairs.get((source.name, destination.name))
            factor = factor if pair is None else pair.time_factor.get(now, prior=factor)
        shared_bytes = (1 + other_transfers) * tokens * facts.bytes_per_token
        transfer_s = self._config.floor_s + shared_bytes / (1e9 * (facts.gb_s or self._config.gb_s))
        gives_between_steps = facts.dialect == BLOCKCAST  # engines of this project send blocks after a step has ended
        wait_s = source.estimate_step_remaining_s(now) if gives_between_steps else 0.0
        return TransferEstimate(wait_s, max(transfer_s, UNSCALED_S_MIN), factor)

    def is_paused(self, source: str, destination: str, now: float) -> bool:
        """Return whether a pair is avoided because a transfer failed."""
        pair = self._pairs.get((source, destination))
        return pair is not None and now < pair.paused_until_s

    def record_success(self, source: str, destination: str) -> None:
        """Count a transfer that came, so that the pair's next failure is the first in a row."""
        pair = self._pairs.get((source, destination))
        if pair is not None:
            pair.pause_s = PAUSE_S

    def learn_speed(
        self, source: str, destination: str, estimate: TransferEstimate, observed_s: float, now: float
    ) -> None:
        """Learn from the time of a transfer that came, for which there was an estimate at its begin."""
        for factor in (self._get_pair(source, destination).time_factor, self._all_pairs_factor):
            factor.observe(estimate.unscaled_s, observed_s - estimate.wait_s, now)

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
        pair = self._pairs[source, destination] = self._pairs.get((source, destination)) or _Pair()
        return pair
