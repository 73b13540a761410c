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
CONGESTION_MIN: Final = 0.1
"""Least seconds of price that congestion adds to a second of new prefill, also on an idle pool."""
CONGESTION_MAX: Final = 50.0
"""Most seconds of price that congestion adds to a second of new prefill."""
TIE_S: Final = 1e-6
"""Prices that are at most so many seconds apart are a tie, and ties rotate."""


def compute_congestion(utilisation: float, backlogs: float, config: CostConfig) -> float:
    """How much more a second of new prefill weighs than a second of waiting, because it also delays whoever comes next.

    In a queue with one server, work that is added delays every arrival until the backlog is worked off: as many as
    arrive per second, times the backlog, over 1 - utilisation. With `backlogs` = the queue over the mean prefill of a
    request, arrivals times backlog are utilisation * backlogs; the added work itself counts for 1. The queue is the
    shortest of the candidates', as who comes later can go there: where one worker has a backlog and another is idle,
    prefill on the idle one is cheap.
    """
    ratio = min(utilisation, 2.0) * (1.0 + backlogs) / max(1.0 - utilisation, 0.1)
    return min(max(config.congestion_weight * ratio, CONGESTION_MIN), CONGESTION_MAX)


def estimate_tier_load_s(match: Match, config: CostConfig) -> float:
    """Time to fetch the part of a match that lies on slower tiers."""
    if match.tokens <= match.gpu_tokens:
        return 0.0
    return sum(tokens * rate for tokens, rate in zip(match.tier_tokens, config.tier_load_s_per_token))


class KvCost:
    """The cost of sending one prompt to each of several targets at one moment.

    `cached_tokens[i]` is h of `targets[i]` in tokens; `tier_loads_s[i]` its load seconds, or `tier_loads_s` is None
    where all are zero; `queued_ahead_s[i]` seconds of prefill that the router has queued for it and will send before
    this prompt, or None; `pressures_s[i]` seconds that will be computed again for want of room there, or None where
    there is room everywhere; `memory_wait_s[i]` the wait for KV memory, where there is one; `queued_s` seconds of
    prefill that the router has queued in all: they wait like what the targets were sent; `shared_prefix_tokens` is
    the beginning that running requests have in common with this one, `shared_discount` the part of its prefill that
    is laid to others; `pool`: what the targets are the shortlist of."""

    def __init__(
        self,
        targets: Sequence[Target],
        cached_tokens: list[int],
        tier_loads_s: Sequence[float] | None,
        *,
        prompt_tokens: int,
        utilisation_decay: float,
        now: float,
        config: CostConfig,
        queued_s: float = 0.0,
        expected_tokens: float = 0.0,
        pool: LoadOrder | None = None,
    ) -> None:
        self.targets = targets
        self.cached_tokens = cached_tokens
        self.tier_loads_s = tier_loads_s
        self.queued_ahead_s: Sequence[float] | None = None
        self.pressures_s: Sequence[float] | None = None
        self.memory_wait_s: dict[int, float] = {}
        self.shared_prefix_tokens, self.shared_discount = 0, 0.0
        self.media_candidate_index, self.media_cached_tokens = -1, 0
        """Where the conversation was before, and what it is taken to have there."""
        self.prompt_tokens = prompt_tokens
        self.expected_tokens = expected_tokens
        self.utilisation_decay = utilisation_decay
        self.config = config
        utilisation, work_rate, arrival_rate, shortest_wait_s = 0.0, 0.0, 0.0, math.inf
        queue_waits_s: list[float] = []
        self.queue_waits_s = queue_waits_s
        self.step_waits_s = [target.estimate_step_wait_s(now) for target in targets]
        for target in targets:
            load, queue = target.load, target.prefill_queue
            wait_s = queue.total_prefill_s
            if wait_s:  # as `Target.estimate_queue_s`, written out: this loop is a good part of what a decision costs
                progress_s = (now - queue.busy_since_s - queue.fixed_step_share * target.step_s) / target.slowdown
                if progress_s > 0.0:
                    remaining_s, overdue_s = queue.oldest_prefill_s - progress_s, target.OVERDUE_SHARE * progress_s
                    wait_s += (remaining_s if remaining_s > overdue_s else overdue_s) - queue.oldest_prefill_s
            queue_waits_s.append(wait_s)
            if wait_s * target.slowdown < shortest_wait_s:
                shortest_wait_s = wait_s * target.slowdown
            work_rate += load.utilisation_scaled
            arrival_rate += load.arrivals_scaled
            utilisation += target.peer_load.utilisation
        target_count = len(targets)
        if pool is not None:
            utilisation = pool.peer_utilisation
            work_rate = pool.work_rate
            arrival_rate = pool.arrival_rate
            target_count = len(pool.targets)
        mean_prefill_s = work_rate / arrival_rate if arrival_rate > 0.0 else 0.0
        backlogs = (shortest_wait_s + queued_s / target_count) / mean_prefill_s if mean_prefill_s > 0.0 else 0.0
        self.congestion = compute_congestion(
            (utilisation + work_rate * utilisation_decay) / target_count, backlogs, config
        )

    def choose_cheapest(self, rotation: int) -> int:
        """The cheapest candidate; of several within `TIE_S`, the `rotation`-th in turn."""
        config, prompt_tokens = self.config, self.prompt_tokens
        prefill_weight, decode_weight = 1.0 + self.congestion, config.decode_weight
        utilisation_weight = config.utilisation_weight * self.utilisation_decay
        tier_loads_s = self.tier_loads_s
        queued_ahead_s = self.queued_ahead_s
        pressures_s = self.pressures_s
        step_waits_s = self.step_waits_s
        prompt_tokens_squared = prompt_tokens * prompt_tokens
        expected_tokens = self.expected_tokens
        memory_wait_s = self.memory_wait_s
        lowest_cost, tied_candidates = float("inf"), []
        shared_prefix_tokens, shared_discount = self.shared_prefix_tokens, self.shared_discount
        mean_context_tokens = prompt_tokens + 0.5 * expected_tokens
        # The formula of `make_terms`, written out: see above.
        for i, (target, hit_tokens, wait_s) in enumerate(
            zip(self.targets, self.priced_cached_tokens, self.queue_waits_s)
        ):
            speed, load = target.speed, target.load
            prefill_s = speed.prefill_rate * (prompt_tokens - hit_tokens) + speed.quadratic_rate * (
                prompt_tokens_squared - hit_tokens * hit_tokens
            )
            stall_s = 0.0
            if hit_tokens < shared_prefix_tokens:
                shared_prefill_s = target.estimate_prefill_s(shared_prefix_tokens, hit_tokens)
                prefill_s -= shared_discount * shared_prefill_s
                stall_s = decode_weight * self.estimate_decode_stall_s(shared_prefill_s) * target.total_request_count
            cost = prefill_weight * prefill_s + wait_s
            if wait_s and target.prefill_queue.is_shortest_first:
                cost = prefill_weight * prefill_s + self.estimate_shortest_first_s(target, hit_tokens, wait_s)
            if queued_ahead_s is not None:
                cost += queued_ahead_s[i]
            cost = target.slowdown * cost + utilisation_weight * load.utilisation_scaled
            cost += config.utilisation_weight * target.peer_load.utilisation
            if decode_weight:
                context_s = speed.decode_context_s * mean_context_tokens
                decode_s = expected_tokens * (speed.single_step_s + context_s)
                running_count = target.total_request_count
                if running_count:
                    overlap_tokens = expected_tokens
                    mean_remaining_tokens = load.mean_remaining_output_tokens
                    if mean_remaining_tokens < expected_tokens:
                        overlap_tokens *= 2.0 * mean_remaining_tokens / (mean_remaining_tokens + expected_tokens)
                    decode_s += overlap_tokens * (target.mutual_step_delay_s + running_count * context_s)
                cost += decode_weight * decode_s
            cost += target.slot_wait_s + stall_s + step_waits_s[i]
            if memory_wait_s:
                cost += memory_wait_s.get(i, 0.0)
            if tier_loads_s is not None:
                cost += tier_loads_s[i]
            if pressures_s is not None:
                cost += pressures_s[i]
            if cost < lowest_cost - TIE_S:
                lowest_cost, tied_candidates = cost, [i]
            elif cost <= lowest_cost + TIE_S:
                tied_candidates.append(i)
                lowest_cost = min(lowest_cost, cost)
        return tied_candidates[rotation % len(tied_candidates)]

    @property
    def priced_cached_tokens(self) -> list[int]:
        """h of each candidate, or what the conversation is taken to have there, if that is more."""
        if self.media_candidate_index < 0 or self.media_cached_tokens <= self.cached_tokens[self.media_candidate_index]:
            return self.cached_tokens
        hits = self.cached_tokens[:]
        hits[self.media_candidate_index] = self.media_cached_tokens
        return hits

    def estimate_decode_stall_s(self, shared_prefill_s: float) -> float:
        """What is not laid to others of computing so much of a hot beginning: so long each who runs there waits."""
        return (1.0 - self.shared_discount) * shared_prefill_s

    def estimate_shortest_first_s(self, target: Target, hit_tokens: int, wait_s: float) -> float:
        """What of Q is computed before this prompt, and what it makes all those wait that it overtakes."""
        prefill_s = target.estimate_prefill_s(self.prompt_tokens, hit_tokens)
        before_s, overtaken_count = target.estimate_shortest_first_wait(prefill_s, wait_s)
        return before_s + overtaken_count * prefill_s

    def get_tier_load_s(self, i: int) -> float:
        """To fetch what candidate i has on slower tiers."""
        return self.tier_loads_s[i] if self.tier_loads_s is not None else 0.0

    def make_terms(self, i: int, resident_tokens: int) -> Terms:
        """Candidate i's price and what it is made of."""
        config, target, hit_tokens = self.config, self.targets[i], self.priced_cached_tokens[i]
        prefill_s = target.estimate_prefill_s(self.prompt_tokens, hit_tokens)
        queue_s, overtaken_count = self.queue_waits_s[i], 0
        if target.prefill_queue.is_shortest_first:
            queue_s, overtaken_count = target.estimate_shortest_first_wait(prefill_s, queue_s)
        queued_ahead_s = self.queued_ahead_s[i] if self.queued_ahead_s is not None else 0.0
        utilisation = target.load.utilisation_scaled * self.utilisation_decay + target.peer_load.utilisation
        decode_requests = target.load.decode_request_count + target.peer_load.decode_requests
        tier_load_s = self.get_tier_load_s(i)
        pressure_s = self.pressures_s[i] if self.pressures_s is not None else 0.0
        shared_prefill_s = (
            target.estimate_prefill_s(self.shared_prefix_tokens, hit_tokens)
            if hit_tokens < self.shared_prefix_tokens
            else 0.0
        )
        shared_s = self.shared_discount * shared_prefill_s
        stall_s = self.estimate_decode_stall_s(shared_prefill_s) * target.total_request_count
        overtaking_s = overtaken_count * prefill_s
        cost = target.slowdown * (
            queue_s + overtaking_s + queued_ahead_s + (1.0 + self.congestion) * (prefill_s - shared_s)
        )
        cost += config.utilisation_weight * utilisation + tier_load_s + pressure_s
        slot_wait_s, memory_wait_s = target.slot_wait_s, self.memory_wait_s.get(i, 0.0)
        decode_s = target.estimate_decode_s(self.prompt_tokens, self.expected_tokens)
        step_wait_s = self.step_waits_s[i]
        cost += slot_wait_s + memory_wait_s + step_wait_s + config.decode_weight * (decode_s + stall_s)
        return Terms(
            worker=target.name,
            cached_tokens=self.cached_tokens[i],
            media_cached_tokens=self.media_cached_tokens if i == self.media_candidate_index else 0,
            resident_tokens=resident_tokens,
            prefill_s=prefill_s,
            queue_s=queue_s,
            queued_ahead_s=queued_ahead_s,
            overtaking_s=overtaking_s,
            slowdown=target.slowdown,
            tier_load_s=tier_load_s,
            pressure_s=pressure_s,
            utilisation=utilisation,
            congestion=self.congestion,
            decode_requests=decode_requests,
            output_tokens=self.expected_tokens,
            slot_wait_s=slot_wait_s,
            memory_wait_s=memory_wait_s,
            decode_s=decode_s,
            step_wait_s=step_wait_s,
            shared_s=shared_s,
            decode_stall_s=stall_s,
            external_requests=target.external_load.running + target.external_load.waiting,
            ttft_s=target.slowdown * (queue_s + queued_ahead_s + prefill_s)
            + step_wait_s
            + slot_wait_s
            + memory_wait_s
            + tier_load_s,
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
            policy = getattr(importlib.import_module(module), function) if colon else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--policy-function: got {name!r}: {error}") from error
        if not callable(policy):
            raise ConfigError(f"--policy-function: got {name!r}, expected MODULE:NAME of a function")
        self._function: Callable[[RouteRequest, list[Terms]], object] = policy
        self.failures = 0

    def choose(self, request: RouteRequest, terms: list[Terms]) -> int | None:
        try:
            index = self._function(request, terms)
            if type(index) is not int or not 0 <= index < len(terms):
                raise ValueError(f"got {index!r}, expected an index from 0 to {len(terms) - 1}")
        except Exception:
            self.failures += 1
            if self.failures == 1:
                log.exception("the policy function failed; the price decides, here and whenever it fails again")
            return None
        return index


def choose_round_robin(targets: Sequence[Target], rotation: int) -> int:
    """Each in turn."""
    return rotation % len(targets)


def choose_least_requests(targets: Sequence[Target], rotation: int) -> int:
    """Fewest requests in flight, other routers' included; ties in turn."""
    request_counts = [
        target.load.request_count + target.peer_load.prefill_requests + target.peer_load.decode_requests
        for target in targets
    ]
    fewest = min(request_counts)
    tied_candidates = [i for i, count in enumerate(request_counts) if count == fewest]
    return tied_candidates[rotation % len(tied_candidates)]


def choose_random(targets: Sequence[Target], rng: random.Random) -> int:
    """Uniformly."""
    return rng.randrange(len(targets))


def make_sticky_key(session: str | None, token_ids: Sequence[int] | None) -> str | None:
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
