"""Choosing a target. Pure functions: what is known goes in, an index into the candidates comes out.

The `kv` cost is in seconds: the predicted time to the first token, with uncached prefill weighed up as the pool fills
(beta), and a small price on how much was routed to a target lately. docs/routing.md explains each term. Time and chance
are arguments.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from options import ConfigError
from router.decide.config import CostConfig
from router.decide.messages import RouteRequest, Terms
from router.decide.shortlist import LoadOrder
from router.decide.target import Target
from router.index.protocol import Match

log = logging.getLogger("router")

STICKY_TOKENS: Final = 256
"""Without a session key, `sticky` goes by this many first tokens of the prompt."""
BETA_MIN: Final = 0.1
"""Least seconds of price that beta adds to a second of new prefill, also on an idle pool."""
BETA_MAX: Final = 50.0
"""Most seconds of price that beta adds to a second of new prefill."""
TIE_S: Final = 1e-6
"""Prices that are at most so many seconds apart are a tie, and ties rotate."""


def congestion_factor(utilisation: float, backlogs: float, config: CostConfig) -> float:
    """How much more a second of new prefill weighs than a second of waiting, because it also delays whoever comes next.

    In a queue with one server, work that is added delays every arrival until the backlog is worked off: as many as
    arrive per second, times the backlog, over 1 - utilisation. With `backlogs` = the queue over the mean prefill of a
    request, arrivals times backlog are utilisation * backlogs; the added work itself counts for 1. The queue is the
    shortest of the candidates', as who comes later can go there: where one worker has a backlog and another is idle,
    prefill on the idle one is cheap.
    """
    ratio = min(utilisation, 2.0) * (1.0 + backlogs) / max(1.0 - utilisation, 0.1)
    return min(max(config.beta_scale * ratio, BETA_MIN), BETA_MAX)


def load_seconds(match: Match, config: CostConfig) -> float:
    """Time to fetch the part of a match that lies on slower tiers."""
    if match.tokens <= match.gpu_tokens:
        return 0.0
    return sum(tokens * rate for tokens, rate in zip(match.tier_tokens, config.load_s_per_token))


class KvCost:
    """The cost of sending one prompt to each of several targets at one moment.

    `cached[i]` is h of `targets[i]` in tokens; `loads[i]` its load seconds, or `loads` is None where all are zero;
    `ahead[i]` seconds of prefill that the router holds for it and will send before this prompt, or None; `crowding[i]`
    seconds that will be computed again for want of room there, or None where there is room everywhere; `memory[i]` the
    wait for KV memory, where there is one; `held_s` seconds of prefill that the router holds in all: they wait like
    what the targets were sent; `hot_tokens` is the beginning that running requests have in common with this one,
    `hot_share` the part of its prefill that is laid to others; `pool`: what the targets are the shortlist of.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        cached: list[int],
        loads: Sequence[float] | None,
        *,
        prompt_tokens: int,
        utilisation_factor: float,
        now: float,
        config: CostConfig,
        held_s: float = 0.0,
        expected_tokens: float = 0.0,
        pool: LoadOrder | None = None,
    ) -> None:
        self.targets = targets
        self.cached = cached
        self.loads = loads
        self.ahead: Sequence[float] | None = None
        self.crowding: Sequence[float] | None = None
        self.memory: dict[int, float] = {}
        self.hot_tokens, self.hot_share = 0, 0.0
        self.home, self.home_tokens = -1, 0
        """Where the conversation was before, and what it is taken to have there."""
        self.prompt_tokens = prompt_tokens
        self.expected_tokens = expected_tokens
        self.factor = utilisation_factor
        self.config = config
        utilisation, work, arrivals, shortest = 0.0, 0.0, 0.0, math.inf
        waits: list[float] = []
        self.waits = waits
        self.rests = [target.rest_seconds(now) for target in targets]
        for target in targets:
            wait = target.waiting_s
            if wait:  # as `Target.queue_s`, written out: this loop is a good part of what a decision costs
                progress = (now - target.busy_since_s - target.lead_share * target.step_now_s) / target.slow
                if progress > 0.0:
                    left, overdue = target.oldest_s - progress, target.OVERDUE_SHARE * progress
                    wait += (left if left > overdue else overdue) - target.oldest_s
            waits.append(wait)
            if wait * target.slow < shortest:
                shortest = wait * target.slow
            work += target.utilisation_scaled
            arrivals += target.arrivals_scaled
            if target.peer is not None:
                utilisation += target.peer.utilisation
        count = len(targets)
        if pool is not None:
            utilisation, work, arrivals, count = pool.peers, pool.work, pool.arrivals, len(pool.targets)
        mean_prefill = work / arrivals if arrivals > 0.0 else 0.0
        backlogs = (shortest + held_s / count) / mean_prefill if mean_prefill > 0.0 else 0.0
        self.beta = congestion_factor((utilisation + work * utilisation_factor) / count, backlogs, config)

    def choose(self, rotation: int) -> int:
        """The cheapest candidate; of several within `TIE_S`, the `rotation`-th in turn."""
        config, length = self.config, self.prompt_tokens
        weight, decode_weight = 1.0 + self.beta, config.decode_weight
        utilisation_weight = config.utilisation_weight * self.factor
        loads, ahead, crowding, rests = self.loads, self.ahead, self.crowding, self.rests
        square, expected, memory = length * length, self.expected_tokens, self.memory
        best, ties = float("inf"), []
        hot, hot_share = self.hot_tokens, self.hot_share
        mean_context = length + 0.5 * expected
        # The formula of `terms`, written out: see above.
        for i, (target, hit, wait) in enumerate(zip(self.targets, self.priced_hits, self.waits)):
            prefill = target.prefill_rate * (length - hit) + target.quadratic_rate * (square - hit * hit)
            stall = 0.0
            if hit < hot:
                part = target.prefill_seconds(hot, hit)
                prefill -= hot_share * part
                stall = decode_weight * self.stalled(part) * target.sharers
            cost = weight * prefill + wait
            if wait and target.shortest_first:
                cost = weight * prefill + self.placed(target, hit, wait)
            if ahead is not None:
                cost += ahead[i]
            cost = target.slow * cost + utilisation_weight * target.utilisation_scaled
            if target.peer is not None:
                cost += config.utilisation_weight * target.peer.utilisation
            if decode_weight:
                context_s = target.decode_context_s * mean_context
                decode_s = expected * (target.alone_s + context_s)
                sharers = target.sharers
                if sharers:
                    shared = expected
                    left = target.left_mean
                    if left < expected:
                        shared *= 2.0 * left / (left + expected)
                    decode_s += shared * (target.sharing_s + sharers * context_s)
                cost += decode_weight * decode_s
            cost += target.seat_s + stall + rests[i]
            if memory:
                cost += memory.get(i, 0.0)
            if loads is not None:
                cost += loads[i]
            if crowding is not None:
                cost += crowding[i]
            if cost < best - TIE_S:
                best, ties = cost, [i]
            elif cost <= best + TIE_S:
                ties.append(i)
                best = min(best, cost)
        return ties[rotation % len(ties)]

    @property
    def priced_hits(self) -> list[int]:
        """h of each candidate, or what the conversation is taken to have there, if that is more."""
        if self.home < 0 or self.home_tokens <= self.cached[self.home]:
            return self.cached
        hits = self.cached[:]
        hits[self.home] = self.home_tokens
        return hits

    def stalled(self, part_s: float) -> float:
        """What is not laid to others of computing so much of a hot beginning: so long each who runs there waits."""
        return (1.0 - self.hot_share) * part_s

    def placed(self, target: Target, hit: int, wait_s: float) -> float:
        """What of Q is computed before this prompt, and what it makes all those wait that it overtakes."""
        own_s = target.prefill_seconds(self.prompt_tokens, hit)
        before_s, later = target.place(own_s, wait_s)
        return before_s + later * own_s

    def load_seconds(self, i: int) -> float:
        """To fetch what candidate i has on slower tiers."""
        return self.loads[i] if self.loads is not None else 0.0

    def terms(self, i: int, resident_tokens: int) -> Terms:
        """Candidate i's price and what it is made of."""
        config, target, hit = self.config, self.targets[i], self.priced_hits[i]
        prefill = target.prefill_seconds(self.prompt_tokens, hit)
        waiting, overtaken = self.waits[i], 0
        if target.shortest_first:
            waiting, overtaken = target.place(prefill, waiting)
        held = self.ahead[i] if self.ahead is not None else 0.0
        utilisation = target.utilisation_scaled * self.factor
        decoding = target.decode_requests
        if target.peer is not None:
            utilisation += target.peer.utilisation
            decoding += target.peer.decode_requests
        load_s = self.load_seconds(i)
        crowding_s = self.crowding[i] if self.crowding is not None else 0.0
        part = target.prefill_seconds(self.hot_tokens, hit) if hit < self.hot_tokens else 0.0
        hot_s, stall_s = self.hot_share * part, self.stalled(part) * target.sharers
        overtaken_s = overtaken * prefill
        cost = target.slow * (waiting + overtaken_s + held + (1.0 + self.beta) * (prefill - hot_s))
        cost += config.utilisation_weight * utilisation + load_s + crowding_s
        seat_s, memory_s = target.seat_s, self.memory.get(i, 0.0)
        decode_s = target.decode_seconds(self.prompt_tokens, self.expected_tokens)
        rest_s = self.rests[i]
        cost += seat_s + memory_s + rest_s + config.decode_weight * (decode_s + stall_s)
        return Terms(
            worker=target.name,
            cached_tokens=self.cached[i],
            home_tokens=self.home_tokens if i == self.home else 0,
            resident_tokens=resident_tokens,
            prefill_s=prefill,
            queue_s=waiting,
            held_s=held,
            overtaken_s=overtaken_s,
            slow=target.slow,
            load_s=load_s,
            crowding_s=crowding_s,
            utilisation=utilisation,
            beta=self.beta,
            decode_requests=decoding,
            output_tokens=self.expected_tokens,
            seat_s=seat_s,
            memory_s=memory_s,
            decode_s=decode_s,
            rest_s=rest_s,
            hot_s=hot_s,
            stall_s=stall_s,
            others_requests=others.running + others.waiting if (others := target.believed) is not None else 0,
            ttft_s=target.slow * (waiting + held + prefill) + rest_s + seat_s + memory_s + load_s,
            cost=cost,
        )


class CustomPolicy:
    """An operator's own function: `choose(request, terms) -> index into terms`, one `Terms` a candidate.

    Where it raises or returns no index, nobody loses an answer: it is counted, logged the first time, and the price
    decides. Raises ConfigError where the function cannot be found.
    """

    def __init__(self, name: str) -> None:
        module, colon, function = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), function) if colon else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"policy_function: got {name!r}: {error}") from error
        if not callable(found):
            raise ConfigError(f"policy_function: got {name!r}, expected MODULE:NAME of a function")
        self._function: Callable[[RouteRequest, list[Terms]], object] = found
        self.failures = 0

    def choose(self, request: RouteRequest, terms: list[Terms]) -> int | None:
        try:
            chosen = self._function(request, terms)
            if type(chosen) is not int or not 0 <= chosen < len(terms):
                raise ValueError(f"got {chosen!r}, expected an index from 0 to {len(terms) - 1}")
        except Exception:
            self.failures += 1
            if self.failures == 1:
                log.exception("the policy function failed; the price decides, here and whenever it fails again")
            return None
        return chosen


def choose_round_robin(targets: Sequence[Target], rotation: int) -> int:
    """Each in turn."""
    return rotation % len(targets)


def choose_least_requests(targets: Sequence[Target], rotation: int) -> int:
    """Fewest requests in flight, other routers' included; ties in turn."""
    counts = [t.requests + (t.peer.prefill_requests + t.peer.decode_requests if t.peer else 0) for t in targets]
    fewest = min(counts)
    ties = [i for i, count in enumerate(counts) if count == fewest]
    return ties[rotation % len(ties)]


def choose_random(targets: Sequence[Target], rng: random.Random) -> int:
    """Uniformly."""
    return rng.randrange(len(targets))


def sticky_key(session: str | None, token_ids: Sequence[int] | None) -> str | None:
    """What `sticky` hashes: the session, else how the prompt begins; None where neither is known."""
    if session is not None:
        return session
    if token_ids is None:
        return None
    return ",".join(map(str, token_ids[:STICKY_TOKENS]))


def choose_sticky(targets: Sequence[Target], key: str) -> int:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): the same on every router, and a worker that comes or goes
    moves only its own share of keys."""
    return max(range(len(targets)), key=lambda i: xxhash.xxh3_64_intdigest(f"{targets[i].name}\0{key}".encode()))
