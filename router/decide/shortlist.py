"""The few targets of a large pool that may win: a decision costs about the same before 500 workers as before 8.

`LoadOrder` keeps a pool in the order of what a typical request, as those before it were, would cost on each. Who is
beaten by KEEP others that come before it and have as long a prefix is not priced. Among the priced is then one whose
price exceeds the least by at most what differs between this request and the typical one:

    |W * P - (that of the typical one)| * (the pool's largest slow - its least) + what `decode` differs by between the
    two + progress + a step + what a target's load changed since it was placed

Where the index says who is unbeaten; here is only the order. Refuses to know requests, the index and clocks. Invariant:
`holders` is `_order` without its keys; the sums are over what was placed.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from router.decide.config import CostConfig
from router.decide.target import Target
from router.index.protocol import HolderId

POOL_MIN: Final = 33
"""Smaller pools are priced whole."""
KEEP: Final = 13
MEMORY: Final = 256.0
"""Requests over which the typical one is averaged."""
DRIFT: Final = 1.5
"""When it is so many times what the order was made for, or so small a part, the order is made anew."""
RENEWED: Final = 2
"""Targets placed anew at each decision although nothing was noted of them: time passes, and answers grow."""


@dataclass(slots=True)
class TypicalRequest:
    """The request that targets are compared by, in tokens."""

    prompt: float = 1024.0
    computed: float = 1024.0
    """Of the prompt: what is not cached where it goes."""
    answer: float = 256.0

    def near(self, other: TypicalRequest) -> bool:
        """Whether what is best for the one is good for the other."""
        return (
            _near(self.prompt, other.prompt)
            and _near(self.computed, other.computed)
            and _near(self.answer, other.answer)
        )


def _near(tokens: float, others: float) -> bool:
    return tokens <= DRIFT * others + 1.0 and others <= DRIFT * tokens + 1.0


class LoadOrder:
    """A pool of targets, the least to do first, and the sums over it that the price asks for."""

    def __init__(self, targets: Sequence[Target], config: CostConfig, factor: float) -> None:
        """`factor`: U of a target is its `utilisation_scaled` times this."""
        self._config = config
        self.targets = {target.holder: target for target in targets}
        self._turns = list(targets)
        self._turn = 0
        self.typical, self._mean = TypicalRequest(), TypicalRequest()
        """What the order is made for, and what requests are on average."""
        self._count = 0.0
        self.rebuild(factor)

    def rebuild(self, factor: float) -> None:
        """Place all anew: as at first, or after the scale of utilisation changed."""
        self._moved: set[HolderId] = set()
        self._order = sorted((self._key(target, factor), holder) for holder, target in self.targets.items())
        # An array, which the index reads as it is.
        self.holders = cast("MutableSequence[HolderId]", array("Q", [holder for _, holder in self._order]))
        self._keys = {holder: key for key, holder in self._order}
        self._parts = {holder: _parts(target) for holder, target in self.targets.items()}
        self.work, self.arrivals, self.peers, self.requests = (sum(column) for column in zip(*self._parts.values()))

    def note(self, target: Target) -> None:
        """Its load changed."""
        if target.holder in self.targets:
            self._moved.add(target.holder)

    def asked(self, prompt_tokens: int, computed_tokens: int, answer_tokens: float) -> None:
        """What a request of this pool is, where it goes."""
        self._count = min(self._count + 1.0, MEMORY)
        mean, share = self._mean, 1.0 / self._count
        mean.prompt += share * (prompt_tokens - mean.prompt)
        mean.computed += share * (computed_tokens - mean.computed)
        mean.answer += share * (answer_tokens - mean.answer)

    def renew(self, factor: float) -> None:
        """Bring the order up to date; call before reading `holders` and the sums."""
        if not self._mean.near(self.typical):
            self.typical = replace(self._mean)
            self.rebuild(factor)
        for holder in self._moved:
            self._place(holder, factor)
        self._moved.clear()
        for _ in range(RENEWED):
            self._place(self._turns[self._turn].holder, factor)
            self._turn = (self._turn + 1) % len(self._turns)

    def _place(self, holder: HolderId, factor: float) -> None:
        target, old = self.targets[holder], self._keys[holder]
        parts, before = _parts(target), self._parts[holder]
        self.work += parts[0] - before[0]
        self.arrivals += parts[1] - before[1]
        self.peers += parts[2] - before[2]
        self.requests += parts[3] - before[3]
        self._parts[holder] = parts
        key = self._key(target, factor)
        if key == old:
            return
        at = bisect.bisect_left(self._order, (old, holder))
        del self._order[at], self.holders[at]
        at = bisect.bisect_left(self._order, (key, holder))
        self._order.insert(at, (key, holder))
        self.holders.insert(at, holder)
        self._keys[holder] = key

    def _key(self, target: Target, factor: float) -> float:
        """Seconds."""
        prompt, answer = int(self.typical.prompt), self.typical.answer
        computed = int(self.typical.computed)
        prefill_s = target.prefill_seconds(prompt, prompt - computed)
        wait_s = target.waiting_s - 0.5 * target.oldest_prefill_s
        if target.shortest_first:
            before_s, later = target.shortest_first_place(prefill_s, wait_s)
            wait_s = before_s + later * prefill_s
        key = target.slowdown * (wait_s + prefill_s) + target.seat_s
        key += self._config.utilisation_weight * target.utilisation_scaled * factor
        if target.concurrent_requests:
            key += 0.5 * target.step_s
        if target.peer_load is not None:
            key += self._config.utilisation_weight * target.peer_load.utilisation
        if target.capacity_tokens and target.free_tokens < computed:
            key += target.drain_seconds((computed - target.free_tokens) / target.capacity_tokens)
        return key + self._config.decode_weight * target.decode_seconds(prompt, answer)

    def check_invariants(self) -> None:
        """The order is sorted and whole, the sums are what they sum."""
        assert self._order == sorted((key, holder) for holder, key in self._keys.items())
        assert list(self.holders) == [holder for _, holder in self._order]
        sums = (self.work, self.arrivals, self.peers, self.requests)
        for total, column in zip(sums, zip(*self._parts.values())):
            assert abs(total - sum(column)) <= 1e-6 * (1.0 + sum(column))


def _parts(target: Target) -> tuple[float, float, float, float]:
    """What it adds to the sums."""
    peer = target.peer_load
    utilisation = peer.utilisation if peer is not None else 0.0
    return target.utilisation_scaled, target.arrivals_scaled, utilisation, target.requests
