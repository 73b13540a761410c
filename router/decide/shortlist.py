"""The few targets of a large pool that may win: a decision costs about the same before 500 workers as before 8.

`LoadOrder` keeps a pool in the order of what a typical request, as those before it were, would cost on each. Who is
beaten by RIVALS_MIN others that come before it and have as long a prefix is not priced. Among the priced is then one
whose price exceeds the least by at most what differs between this request and the typical one:

    |W * P - (that of the typical one)| * (the pool's largest slow - its least) + what `decode` differs by between the
    two + progress + what a target's load changed since it was placed

Where the index says who is unbeaten; here is only the order. Refuses to know requests, the index and clocks. Invariant:
`holders` is `_sorted_holders` without its keys; the sums are over what was placed.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from router.decide.config import CostConfig
from router.decide.price import CacheFacts, PricedRequest, price_worker, sum_loads
from router.decide.target import Target
from router.index.protocol import HolderId

POOL_SIZE_MIN: Final = 33
"""Smaller pools are priced whole."""
RIVALS_MIN: Final = 8
REQUESTS_AVERAGED: Final = 256.0
"""Requests over which the typical one is averaged."""
DRIFT_RATIO: Final = 1.5
"""When it is so many times what the order was made for, or so small a part, the order is made anew."""
REPOSITIONS_PER_UPDATE: Final = 2
"""Targets placed anew at each decision although nothing was noted of them: time passes, and answers grow."""


@dataclass(slots=True)
class TypicalRequest:
    """The request that targets are compared by, in tokens."""

    prompt_tokens: float = 1024.0
    computed_tokens: float = 1024.0
    """Of the prompt: what is not cached where it goes."""
    answer_tokens: float = 256.0

    def is_near(self, other: TypicalRequest) -> bool:
        """Whether what is best for the one is good for the other."""
        return (
            _is_near(self.prompt_tokens, other.prompt_tokens)
            and _is_near(self.computed_tokens, other.computed_tokens)
            and _is_near(self.answer_tokens, other.answer_tokens)
        )


def _is_near(tokens: float, other_tokens: float) -> bool:
    return tokens <= DRIFT_RATIO * other_tokens + 1.0 and other_tokens <= DRIFT_RATIO * tokens + 1.0


class LoadOrder:
    """A pool of targets, the least to do first, and the sums over it that the price asks for."""

    def __init__(self, targets: Sequence[Target], config: CostConfig, now: float, decay: float) -> None:
        """`decay`: the tracker's, of utilisation."""
        self._config = config
        self.targets = {target.holder: target for target in targets}
        self._rotation = list(targets)
        self._rotation_index = 0
        self.typical, self._mean_request = TypicalRequest(), TypicalRequest()
        """What the order is made for, and what requests are on average."""
        self._requests_averaged = 0.0
        self.rebuild(now, decay)

    def rebuild(self, now: float, decay: float) -> None:
        """Place all anew: as at first, or after the scale of utilisation changed."""
        self._changed_holders: set[HolderId] = set()
        self._sorted_holders = sorted(
            (self._sort_key(target, now, decay), holder) for holder, target in self.targets.items()
        )
        # An array, which the index reads as it is.
        self.holders = cast("MutableSequence[HolderId]", array("Q", [holder for _, holder in self._sorted_holders]))
        self._sort_keys = {holder: key for key, holder in self._sorted_holders}
        self._loads_by_holder = {holder: sum_loads([target]) for holder, target in self.targets.items()}
        self.pool_load = sum_loads(list(self.targets.values()))

    def mark_changed(self, target: Target) -> None:
        """Its load changed."""
        if target.holder in self.targets:
            self._changed_holders.add(target.holder)

    def record_request(self, prompt_tokens: int, computed_tokens: int, answer_tokens: float) -> None:
        """What a request of this pool is, where it goes."""
        self._requests_averaged = min(self._requests_averaged + 1.0, REQUESTS_AVERAGED)
        mean, share = self._mean_request, 1.0 / self._requests_averaged
        mean.prompt_tokens += share * (prompt_tokens - mean.prompt_tokens)
        mean.computed_tokens += share * (computed_tokens - mean.computed_tokens)
        mean.answer_tokens += share * (answer_tokens - mean.answer_tokens)

    def update(self, now: float, decay: float) -> None:
        """Bring the order up to date; call before reading `holders` and the sums."""
        if not self._mean_request.is_near(self.typical):
            self.typical = replace(self._mean_request)
            self.rebuild(now, decay)
        for holder in self._changed_holders:
            self._reposition(holder, now, decay)
        self._changed_holders.clear()
        for _ in range(REPOSITIONS_PER_UPDATE):
            self._reposition(self._rotation[self._rotation_index].holder, now, decay)
            self._rotation_index = (self._rotation_index + 1) % len(self._rotation)

    def _reposition(self, holder: HolderId, now: float, decay: float) -> None:
        target, old_key = self.targets[holder], self._sort_keys[holder]
        load, old_load = sum_loads([target]), self._loads_by_holder[holder]
        self.pool_load = self.pool_load.add_change(load, old_load)
        self._loads_by_holder[holder] = load
        key = self._sort_key(target, now, decay)
        if key == old_key:
            return
        position = bisect.bisect_left(self._sorted_holders, (old_key, holder))
        del self._sorted_holders[position], self.holders[position]
        position = bisect.bisect_left(self._sorted_holders, (key, holder))
        self._sorted_holders.insert(position, (key, holder))
        self.holders.insert(position, holder)
        self._sort_keys[holder] = key

    def _sort_key(self, target: Target, now: float, decay: float) -> float:
        """Return the price of the typical request there, while the oldest prefill is at most half done: a key that goes
        on changing would be out of date before it is looked at."""
        typical, queue = self.typical, target.prefill_queue
        half_done_at_s = queue.busy_since_s + 0.5 * queue.oldest_prefill_s * target.slowdown
        request = PricedRequest(min(now, half_done_at_s), int(typical.prompt_tokens), typical.answer_tokens, decay)
        cache = CacheFacts(int(typical.prompt_tokens) - int(typical.computed_tokens))
        return price_worker(target, request, cache, self._config).cost

    def check_invariants(self) -> None:
        """The order is sorted and whole, the sums are what they sum."""
        assert self._sorted_holders == sorted((key, holder) for holder, key in self._sort_keys.items())
        assert list(self.holders) == [holder for _, holder in self._sorted_holders]
        for total, column in zip(self.pool_load, zip(*self._loads_by_holder.values())):
            assert abs(total - sum(column)) <= 1e-6 * (1.0 + sum(column))
