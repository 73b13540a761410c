"""Shortlist of a large pool: the few targets that may have the lowest price for a request.

With it, a decision among 500 workers costs about as much as one among 8. `LoadOrder` sorts the targets by the price of
a typical request: a prompt of 1024 tokens, none of them cached, and an answer of 256. If 8 (RIVALS_MIN) targets come
before a target in that order and have at least as long a cached prefix, the target is not priced. The prefix index
finds the others. So the lowest price may be missed. The chosen price is higher by at most the sum of

* |(1 + congestion) * P - that of the typical request| * (largest slowdown in the pool - least)
* the differences in `decode` and in the wait for KV memory between the request and the typical one
* changes of the target's load and progress of its oldest prefill since the target was sorted

Pure: time is an argument. Invariant: `holders` is `_sorted_holders` without the prices, and `pool_load` is the sum of
the loads at the last sorting.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Final, cast

from router.decide.config import CostConfig
from router.decide.price import Candidate, RequestFacts, price_worker, sum_loads
from router.decide.target import Target
from router.index.protocol import HolderId

POOL_SIZE_MIN: Final = 33
"""Size of the smallest pool that has a shortlist; all targets of smaller pools are priced."""
RIVALS_MIN: Final = 8
"""Number of targets which must be better in load and as good in prefix before a target is left out."""
TYPICAL_PROMPT_TOKENS: Final = 1024
TYPICAL_ANSWER_TOKENS: Final = 256.0
REPOSITIONS_PER_UPDATE: Final = 2
"""Targets that are sorted anew at each decision without a known change, because answers grow as time passes."""


class LoadOrder:
    """Targets of a pool in ascending order of a typical request's price, and the sum of their loads."""

    def __init__(self, targets: Sequence[Target], config: CostConfig, now: float, utilisation_decay: float) -> None:
        self._config = config
        self.targets = {target.holder: target for target in targets}
        self._rotation = list(targets)
        self._rotation_index = 0
        self.rebuild(now, utilisation_decay)

    def rebuild(self, now: float, utilisation_decay: float) -> None:
        """Sort all targets anew."""
        self._changed_holders: set[HolderId] = set()
        self._sorted_holders = sorted(
            (self._compute_price(target, now, utilisation_decay), holder) for holder, target in self.targets.items()
        )
        # The index reads the array without a copy.
        self.holders = cast("MutableSequence[HolderId]", array("Q", [holder for _, holder in self._sorted_holders]))
        self._price_by_holder = {holder: price for price, holder in self._sorted_holders}
        self._load_by_holder = {holder: sum_loads([target]) for holder, target in self.targets.items()}
        self.pool_load = sum_loads(list(self.targets.values()))

    def list_rivals(self, matches: Iterable[HolderId]) -> list[Target]:
        """Return the targets that may have the lowest price: RIVALS_MIN with the least load, and those in `matches`."""
        return [self.targets[holder] for holder in dict.fromkeys([*self.holders[:RIVALS_MIN], *matches])]

    def mark_changed(self, target: Target) -> None:
        """Note that a target's load changed, if the target is in this pool."""
        if target.holder in self.targets:
            self._changed_holders.add(target.holder)

    def update(self, now: float, utilisation_decay: float) -> None:
        """Bring `holders` and `pool_load` up to date before they are read."""
        for holder in self._changed_holders:
            self._reposition(holder, now, utilisation_decay)
        self._changed_holders.clear()
        for _ in range(REPOSITIONS_PER_UPDATE):
            self._reposition(self._rotation[self._rotation_index].holder, now, utilisation_decay)
            self._rotation_index = (self._rotation_index + 1) % len(self._rotation)

    def _reposition(self, holder: HolderId, now: float, utilisation_decay: float) -> None:
        """Move a target within the order, after its load or the price of a typical request there may have changed.

        `holder`: the target's id in the prefix index. The order by price is stored twice: as (price, holder) pairs in
        `_sorted_holders`, for bisection, and as plain ids in `holders`, which native code reads.
        """
        target = self.targets[holder]
        load = sum_loads([target])
        self.pool_load = self.pool_load.add_change(load, self._load_by_holder[holder])
        self._load_by_holder[holder] = load

        price = self._compute_price(target, now, utilisation_decay)
        old_price = self._price_by_holder[holder]
        if price == old_price:
            return
        old_position = bisect.bisect_left(self._sorted_holders, (old_price, holder))
        del self._sorted_holders[old_position], self.holders[old_position]
        position = bisect.bisect_left(self._sorted_holders, (price, holder))
        self._sorted_holders.insert(position, (price, holder))
        self.holders.insert(position, holder)
        self._price_by_holder[holder] = price

    def _compute_price(self, target: Target, now: float, utilisation_decay: float) -> float:
        """Return the price of the typical request at a target.

        The price falls while the target computes a prompt. Here it falls no more once half of that prompt is done:
        otherwise the price would be out of date before it is read.
        """
        queue = target.prefill_queue
        read_at_s = min(now, queue.busy_since_s + 0.5 * queue.oldest_prefill_s * target.slowdown)
        memory_wait_s = target.estimate_memory_wait_s(TYPICAL_PROMPT_TOKENS + TYPICAL_ANSWER_TOKENS)
        request = RequestFacts(read_at_s, TYPICAL_PROMPT_TOKENS, TYPICAL_ANSWER_TOKENS, utilisation_decay)
        return price_worker(Candidate(target, memory_wait_s=memory_wait_s), request, self._config).cost

    def check_invariants(self) -> None:
        """Assert that the order is sorted and complete, and that `pool_load` is the sum of all loads."""
        assert self._sorted_holders == sorted((price, holder) for holder, price in self._price_by_holder.items())
        assert list(self.holders) == [holder for _, holder in self._sorted_holders]
        for total, loads in zip(self.pool_load, zip(*self._load_by_holder.values())):
            assert abs(total - sum(loads)) <= 1e-6 * (1.0 + sum(loads))
