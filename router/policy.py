"""Choosing a target. Pure functions: what is known goes in, an index into the candidates comes out.

The `kv` cost is in seconds: the predicted time to the first token, with uncached prefill weighed up as the pool fills
(beta), and a small price on how much was routed to a target lately. docs/routing.md explains each term. Time and chance
are arguments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import xxhash

from router.config import CostConfig
from router.messages import Terms
from router.tracker import Target
from router.view import Match

STICKY_TOKENS = 256
"""Without a session key, `sticky` goes by this many first tokens of the prompt."""


def beta_of(mean_utilisation: float, config: CostConfig) -> float:
    """How much more a second of new prefill weighs than a second of waiting: it also delays whoever comes next."""
    ratio = mean_utilisation / max(1.0 - mean_utilisation, 0.1)
    return max(config.beta_scale * min(ratio, config.beta_max_ratio), config.beta_min)


def load_seconds(match: Match, config: CostConfig) -> float:
    """Time to fetch the part of a match that lies on slower tiers."""
    if match.tokens <= match.gpu_tokens:
        return 0.0
    return sum(tokens * rate for tokens, rate in zip(match.tier_tokens, config.load_s_per_token))


class KvCost:
    """The cost of sending one prompt to each of several targets at one moment.

    `cached[i]` is h of `targets[i]` in tokens; `loads[i]` its load seconds, or `loads` is None where all are zero;
    `ahead[i]` seconds of prefill that the router holds for it and will send before this prompt, or None.
    """

    __slots__ = ("ahead", "beta", "cached", "config", "factor", "loads", "now", "prompt_tokens", "targets")

    def __init__(
        self,
        targets: Sequence[Target],
        cached: Sequence[int],
        loads: Sequence[float] | None,
        *,
        prompt_tokens: int,
        utilisation_factor: float,
        now: float,
        config: CostConfig,
    ) -> None:
        self.targets = targets
        self.cached = cached
        self.loads = loads
        self.ahead: Sequence[float] | None = None
        self.prompt_tokens = prompt_tokens
        self.factor = utilisation_factor
        self.now = now
        self.config = config
        total = 0.0
        for target in targets:
            total += target.utilisation_scaled * utilisation_factor
            if target.peer is not None:
                total += target.peer.utilisation
        self.beta = beta_of(total / len(targets), config)

    def choose(self, rotation: int) -> int:
        """The cheapest candidate; of several within `tie_s`, the `rotation`-th in turn."""
        config, now, length, factor = self.config, self.now, self.prompt_tokens, self.factor
        weight, decode_weight, tie_s = 1.0 + self.beta, config.decode_weight, config.tie_s
        utilisation_weight = config.utilisation_weight * factor
        loads, ahead = self.loads, self.ahead
        square = length * length
        best, ties = float("inf"), []
        # The formula of `terms`, written out: with 64 candidates this loop is what a decision costs beyond the match.
        for i, (target, hit) in enumerate(zip(self.targets, self.cached)):
            slow = target.slow
            cost = weight * (target.prefill_rate * (length - hit) + target.quadratic_rate * (square - hit * hit))
            waiting = target.waiting_s
            if waiting:
                progress = (now - target.busy_since_s) / slow
                if progress > target.progress_max_s:
                    progress = target.progress_max_s
                cost += waiting - progress if progress > 0.0 else waiting
            if ahead is not None:
                cost += ahead[i]
            cost = slow * cost + utilisation_weight * target.utilisation_scaled
            if target.peer is not None:
                cost += config.utilisation_weight * target.peer.utilisation
            if decode_weight:
                cost += decode_weight * target.prefill_seconds(length, hit) * target.decode_requests
            if loads is not None:
                cost += loads[i]
            if cost < best - tie_s:
                best, ties = cost, [i]
            elif cost <= best + tie_s:
                ties.append(i)
                best = min(best, cost)
        return ties[rotation % len(ties)]

    def terms(self, i: int, resident_tokens: int) -> Terms:
        """Candidate i's price and what it is made of."""
        config, target, hit = self.config, self.targets[i], self.cached[i]
        prefill = target.prefill_seconds(self.prompt_tokens, hit)
        waiting = target.queue_s(self.now)
        held = self.ahead[i] if self.ahead is not None else 0.0
        utilisation = target.utilisation_scaled * self.factor
        decoding = target.decode_requests
        if target.peer is not None:
            utilisation += target.peer.utilisation
            decoding += target.peer.decode_requests
        load_s = self.loads[i] if self.loads is not None else 0.0
        cost = target.slow * (waiting + held + (1.0 + self.beta) * prefill)
        cost += config.utilisation_weight * utilisation + load_s
        cost += config.decode_weight * prefill * target.decode_requests
        return Terms(
            worker=target.name,
            cached_tokens=hit,
            resident_tokens=resident_tokens,
            prefill_s=prefill,
            queue_s=waiting,
            held_s=held,
            slow=target.slow,
            load_s=load_s,
            utilisation=utilisation,
            beta=self.beta,
            decode_requests=decoding,
            ttft_s=target.slow * (waiting + held + prefill) + load_s,
            cost=cost,
        )


def choose_round_robin(targets: Sequence[Target], rotation: int) -> int:
    """Each in turn."""
    return rotation % len(targets)


def choose_least_requests(targets: Sequence[Target], rotation: int) -> int:
    """Fewest requests in flight, other routers' decodes included; ties in turn."""
    counts = [t.requests + (t.peer.decode_requests if t.peer is not None else 0) for t in targets]
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
