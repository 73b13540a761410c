"""The price of a worker for one request, in seconds: six parts and their sum. Pure; see docs/reference/price.md.

    cost = ttft + w * decode + congestion * prefill + pressure + tie_break - shared

The same function chooses a worker, explains a choice (`POST /route`), predicts the time to the first token, and orders
the workers of a large pool (router/decide/shortlist.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from router.decide.config import CostConfig
from router.decide.messages import NOT_PRICED, Terms, Transfer
from router.decide.target import InFlightRequest, Target
from router.index.protocol import Match

CONGESTION_MIN: Final = 0.1
"""Least seconds of price that congestion adds to a second of new prefill, also on an idle pool."""
CONGESTION_MAX: Final = 50.0
"""Most seconds of price that congestion adds to a second of new prefill."""
PREFILL_SHARE_MAX: Final = 0.9
"""Most of a worker's time that later prefills are expected to take from an answer there."""


class RequestFacts(msgspec.Struct, eq=False):
    """Facts about one request that its price depends on at every worker."""

    now: float
    prompt_tokens: int
    output_tokens: float
    """Expected length of the answer."""
    utilisation_decay: float
    """Factor that turns a target's `utilisation_scaled` into prefill seconds per second."""
    congestion: float = 0.0
    """Seconds that later requests wait longer, all together, for a second of new prefill at a target without a factor
    of its own."""
    shared_tokens: int = 0
    """Length of the prefix that running requests have in common with the prompt."""
    copy_reuse_share: float = 0.0
    """Share of the requests that use one more copy of that prefix, on an idle worker, and come after this request."""
    can_move_prefill: bool = False
    """Whether one worker may compute the prompt for another: then it matters whose answers the prefill interrupts."""


class Candidate(msgspec.Struct, eq=False):
    """One way to serve a request: a target, possibly with a transfer of KV to the target, and what that costs.

    A target without a transfer is one candidate, and with each transfer that is possible another one.
    """

    target: Target
    cached_tokens: int = 0
    """Tokens of the prompt that no worker has to compute: the usable cached prefix, that of requests in flight
    included."""
    resident_tokens: int = 0
    """Part of the cached prefix that events (or the approximate cache) vouch for now."""
    media_cached_tokens: int = 0
    """Tokens of a prompt with media that are assumed to be cached, because the target served the conversation last."""
    tier_load_s: float = 0.0
    """Time to fetch the part of the cached prefix that lies on slower tiers."""
    pressure_s: float = 0.0
    """Time of prefill that will be computed again, because the target lacks room for all prompts in use there."""
    memory_wait_s: float = 0.0
    """Time until enough requests at the target have ended for this one to fit into the KV memory."""
    queued_ahead_s: float = 0.0
    """Time of the prefill that the router has queued for the target and will send before this request."""
    transfer: Transfer | None = None
    """KV that moves to the target before the target computes the rest of the prompt."""
    source: Target | None = None
    """Target that this KV comes from."""
    arriving_tokens: int = 0
    """Prompt tokens with KV at the target when the transfer has ended. If the source computes the prompt first, this is
    more than `cached_tokens`."""
    arrival_s: float = 0.0
    """Time until the transfer has ended. Meanwhile the target computes earlier requests."""
    source_terms: Terms | None = None
    """Price of the prefill at the source; None if the source only sends what it has cached."""
    terms: Terms = NOT_PRICED
    """The price, once `price_worker` has computed it."""

    @property
    def is_missing_source(self) -> bool:
        """Whether another target has to compute the prompt for this one, and none is planned."""
        return self.transfer is None and self.target.transfer_facts.needs_partner


def price_worker(candidate: Candidate, request: RequestFacts, config: CostConfig) -> Terms:
    """Return the six parts of one worker's price for one request, their sum, and what explains them."""
    target = candidate.target
    prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
    load, speed, peer_load = target.load, target.speed, target.peer_load
    slowdown, running_count = target.slowdown, target.total_request_count
    congestion = request.congestion / speed.factor  # a slower target gets fewer of the later requests
    hit_tokens = candidate.cached_tokens
    if candidate.media_cached_tokens > hit_tokens:
        hit_tokens = candidate.media_cached_tokens
    if candidate.arriving_tokens > hit_tokens:
        hit_tokens = candidate.arriving_tokens

    # ttft: the wait for a slot and KV memory, the prefill that goes first and its own, and loads from slower tiers.
    prefill_s = speed.estimate_prefill_s(prompt_tokens, hit_tokens)
    queue_s, overtaken_count = target.estimate_queue_s(request.now), 0
    if queue_s and target.prefill_queue.is_shortest_first:  # longer prompts wait for this one, unless it needs theirs
        order_s = target.prefill_queue.compute_order_s(prefill_s, find_awaited_request(candidate))
        queue_s, overtaken_count = target.estimate_shortest_first_wait(order_s, queue_s)
    queue_s += candidate.queued_ahead_s
    slot_wait_s = target.slot_wait_s
    if candidate.memory_wait_s > slot_wait_s:
        slot_wait_s = candidate.memory_wait_s
    ttft_s = slot_wait_s + slowdown * (queue_s + prefill_s) + candidate.tier_load_s
    if candidate.arrival_s > slowdown * queue_s:
        ttft_s += candidate.arrival_s - slowdown * queue_s

    # decode: the answer's own steps, and how much it and the requests there lengthen each other's steps.
    context_s = speed.decode_context_s * (prompt_tokens + 0.5 * output_tokens)
    decode_s = output_tokens * (
        speed.single_step_s + context_s + target.mutual_step_delay_s + running_count * context_s
    )

    decode_request_count = load.decode_request_count + peer_load.decode_requests
    utilisation = load.utilisation_scaled * request.utilisation_decay + peer_load.utilisation

    # shared: later requests use one more copy of a common prefix too; those that run here wait while it is computed.
    shared_s = reused_prefill_s = 0.0
    if hit_tokens < request.shared_tokens:
        reuse_share = request.copy_reuse_share * target.compute_free_share()
        shared_prefill_s = speed.estimate_prefill_s(request.shared_tokens, hit_tokens)
        reused_prefill_s = reuse_share * shared_prefill_s
        shared_s = slowdown * (1.0 + congestion) * reused_prefill_s
        if not request.can_move_prefill:
            decode_s += (shared_prefill_s - reused_prefill_s) * running_count
    if request.can_move_prefill:  # answers stand still during a prefill: those there now, and later this one
        decode_s += (prefill_s - reused_prefill_s) * decode_request_count
        prefill_share = min(utilisation, PREFILL_SHARE_MAX)
        decode_s += output_tokens * target.step_s * prefill_share / (1.0 - prefill_share)

    decode_s *= config.decode_weight
    congestion_s = (congestion + overtaken_count) * slowdown * prefill_s
    computed_s = prefill_s
    source_terms = candidate.source_terms
    if source_terms is not None:
        computed_s += source_terms.slowdown * source_terms.prefill_s
        decode_s += source_terms.decode_s
        congestion_s += source_terms.congestion_s
    tie_break_s = config.utilisation_weight * utilisation
    external_load = target.external_load
    return Terms(
        worker=target.name,
        cost=ttft_s + decode_s + congestion_s + candidate.pressure_s + tie_break_s - shared_s,
        ttft_s=ttft_s,
        decode_s=decode_s,
        congestion_s=congestion_s,
        pressure_s=candidate.pressure_s,
        shared_s=shared_s,
        tie_break_s=tie_break_s,
        cached_tokens=candidate.cached_tokens,
        resident_tokens=candidate.resident_tokens,
        media_cached_tokens=candidate.media_cached_tokens,
        prefill_s=computed_s,
        queue_s=queue_s,
        slowdown=slowdown,
        slot_wait_s=slot_wait_s,
        tier_load_s=candidate.tier_load_s,
        output_tokens=output_tokens,
        decode_requests=decode_request_count,
        external_requests=external_load.running + external_load.waiting,
        transfer=candidate.transfer or msgspec.UNSET,
    )


def find_awaited_request(candidate: Candidate) -> InFlightRequest | None:
    """Return the request at a target that still computes the prefix that a new request will reuse; None if none does.

    A prefix that comes from another target needs no such request, nor does one that the target has stored already.
    """
    if candidate.source is not None or candidate.cached_tokens <= candidate.resident_tokens:
        return None
    return candidate.target.prefill_queue.find_request_with_prefix(candidate.cached_tokens)


class PoolLoad(NamedTuple):
    """Sums over the workers of a pool."""

    prefill_rate: float
    """Prefill seconds that this router sends there per second; times `utilisation_decay`, the rate now."""
    arrival_rate: float
    """Requests that this router sends there per second; times `utilisation_decay`, the rate now."""
    peer_utilisation: float
    """Prefill seconds that other routers send there per second."""
    worker_count: int

    def add_change(self, load: PoolLoad, old_load: PoolLoad) -> PoolLoad:
        """Return the sums after the load of one worker changed from `old_load` to `load`."""
        return PoolLoad(
            self.prefill_rate + load.prefill_rate - old_load.prefill_rate,
            self.arrival_rate + load.arrival_rate - old_load.arrival_rate,
            self.peer_utilisation + load.peer_utilisation - old_load.peer_utilisation,
            self.worker_count,
        )


def sum_loads(targets: Sequence[Target]) -> PoolLoad:
    """Add up the load of several targets."""
    prefill_rate, arrival_rate, peer_utilisation = 0.0, 0.0, 0.0
    for target in targets:
        prefill_rate += target.load.utilisation_scaled
        arrival_rate += target.load.arrivals_scaled
        peer_utilisation += target.peer_load.utilisation
    return PoolLoad(prefill_rate, arrival_rate, peer_utilisation, len(targets))


def compute_congestion(
    pool: PoolLoad, shortest_wait_s: float, queued_s: float, utilisation_decay: float, config: CostConfig
) -> float:
    """Return how much longer later requests wait, all together, for a second of new prefill.

    In a queue with one server, added work delays every arrival until the backlog is worked off. The backlog of a pool
    is the wait at its least busy worker, where later requests can go, plus each worker's part of the `queued_s`
    seconds in the router's queue. With the backlog counted in mean prefills:

        congestion = weight * utilisation * (1 + backlog) / (1 - utilisation)
    """
    utilisation = (pool.peer_utilisation + pool.prefill_rate * utilisation_decay) / pool.worker_count
    backlog_s = shortest_wait_s + queued_s / pool.worker_count
    backlog = backlog_s * pool.arrival_rate / pool.prefill_rate if pool.prefill_rate > 0.0 else 0.0
    ratio = min(utilisation, 2.0) * (1.0 + backlog) / max(1.0 - utilisation, 0.1)
    return min(max(config.congestion_weight * ratio, CONGESTION_MIN), CONGESTION_MAX)


def estimate_tier_load_s(match: Match, config: CostConfig) -> float:
    """Return the time to fetch the part of a match that lies on slower tiers."""
    if match.tokens <= match.gpu_tokens:
        return 0.0
    return sum(tokens * rate for tokens, rate in zip(match.tier_tokens, config.tier_load_s_per_token))
