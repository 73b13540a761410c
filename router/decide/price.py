"""The price of a worker for one request, in seconds: six parts and their sum. Pure; see docs/reference/price.md.

    cost = ttft + w * decode + congestion * prefill + pressure + tie_break - shared

The same function chooses a worker, explains a choice (`POST /route`), predicts the time to the first token, and orders
the workers of a large pool (router/decide/shortlist.py).
"""

from __future__ import annotations

import math
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
UTILISATION_MAX: Final = 2.0
"""Greatest utilisation that congestion grows with: more is sent than the pool can compute."""
IDLE_SHARE_MIN: Final = 0.1
"""Least idle share of a pool that congestion is divided by."""
PREFILL_SHARE_MAX: Final = 0.9
"""Most of a worker's time that later prefills are expected to take from an answer there."""


class RequestFacts(msgspec.Struct, eq=False, gc=False):
    """Values that the price of one request depends on, and that are the same at every worker."""

    now: float
    prompt_tokens: int
    output_tokens: float
    """Expected length of the answer."""
    utilisation_decay: float
    """Factor from the utilisation that is stored for a worker, as of an earlier time, to the utilisation now."""
    congestion: float = 0.0
    """Seconds that a second of prefill, on a worker of mean speed, adds to the waits of all later requests together."""
    shared_tokens: int = 0
    """Length of the prefix that the prompt has in common with running requests, from which later ones are expected."""
    copy_reuse_share: float = 0.0
    """Share of later requests in the use of one more cached copy of that prefix: 3/4 if three of them use it, too."""
    can_move_prefill: bool = False
    """Whether another worker than the one that answers may compute the prompt, and spare the answers there a pause."""


class TransferPlan(msgspec.Struct, eq=False):
    """A transfer of KV from one target to another: the keys and values that attention computes from a prompt.

    Either the source has the KV cached, or the source computes the prompt first.
    """

    transfer: Transfer
    source: Candidate
    """The source. Its terms are the price of the prefill there; NOT_PRICED, all 0, if it has the KV cached."""
    arriving_tokens: int
    """Prompt tokens with KV at the destination when the transfer has ended."""

    @property
    def arrival_s(self) -> float:
        """Time until the transfer has ended. Meanwhile the destination computes earlier requests."""
        return self.source.terms.ttft_s + self.transfer.transfer_s


class Candidate(msgspec.Struct, eq=False):
    """One way to serve a request: a target, possibly with a transfer of KV to the target, and what that costs.

    A target is a worker, or one data-parallel rank of it. Each target is one candidate without a transfer, and one more
    for each planned transfer to it. One that needs a partner is a candidate only with a transfer, if any is planned.
    """

    target: Target
    cached_tokens: int = 0
    """Length of the usable prefix that is cached, or that requests in flight compute; with a plan, at the source."""
    resident_tokens: int = 0
    """Part of that prefix that is in the cache now, as far as is known."""
    media_cached_tokens: int = 0
    """Tokens of a prompt with media that are assumed to be cached, because the target served the conversation last."""
    tier_load_s: float = 0.0
    """Time to fetch the part of the cached prefix that lies on slower tiers."""
    pressure_s: float = 0.0
    """Time of prefill that will be computed again, because the target lacks room for all prompts in use there."""
    memory_wait_s: float = 0.0
    """Time until enough requests at the target have ended for the new request to fit into the KV memory."""
    queued_ahead_s: float = 0.0
    """Time of the prefill that the router has queued for the target and will send before this request."""
    plan: TransferPlan | None = None
    """KV that moves to the target before the target computes the rest of the prompt."""
    terms: Terms = NOT_PRICED
    """The price, once `price_worker` has computed it."""

    @property
    def is_missing_source(self) -> bool:
        """Whether another target has to compute the prompt for this target, and no plan has one."""
        return self.plan is None and self.target.transfer_facts.needs_partner


def price_worker(candidate: Candidate, request: RequestFacts, config: CostConfig) -> Terms:
    """Return the price in seconds of one way to serve a request: six parts, their sum, and the figures behind them.

    For example, a worker computes 10,000 tokens a second and has 3,000 of a prompt's 4,000 tokens cached: its prefill
    takes 0.1 s. If prefills of 0.2 s come first, the time to the first token is 0.3 s.
    """
    target, slowdown, plan = candidate.target, candidate.target.slowdown, candidate.plan
    present_tokens = candidate.cached_tokens
    if candidate.media_cached_tokens > present_tokens:
        present_tokens = candidate.media_cached_tokens
    if plan is not None and plan.arriving_tokens > present_tokens:
        present_tokens = plan.arriving_tokens
    prefill_s = target.speed.estimate_prefill_s(request.prompt_tokens, present_tokens)

    # Time to the first token. The prefill begins after the earlier ones, and once KV from another worker has arrived.
    queue_s, overtaken_count = estimate_queue(candidate, prefill_s, request.now)
    queue_s += candidate.queued_ahead_s
    slot_wait_s, memory_wait_s = target.slot_wait_s, candidate.memory_wait_s
    if memory_wait_s > slot_wait_s:
        slot_wait_s = memory_wait_s
    ttft_s = slot_wait_s + slowdown * (queue_s + prefill_s) + candidate.tier_load_s
    if plan is not None:
        ttft_s += max(plan.arrival_s - slowdown * queue_s, 0.0)

    # Time of the answer after its first token, with the delay of the other answers at the target.
    utilisation = target.load.utilisation_scaled * request.utilisation_decay + target.peer_load.utilisation
    shared = NO_SHARED_PREFILL
    if present_tokens < request.shared_tokens:
        shared = estimate_shared_prefill(target, request, present_tokens)
    decode_s = config.decode_weight * estimate_decode_s(target, request, prefill_s, shared, utilisation)

    # What the prefill costs later requests, of which a slower target gets fewer, and what its cached prefix saves them.
    congestion = request.congestion / target.speed.factor
    congestion_s = (congestion + overtaken_count) * slowdown * prefill_s
    shared_s = slowdown * (1.0 + congestion) * shared.reused_s
    tie_break_s = config.utilisation_weight * utilisation

    if plan is not None:
        source_terms = plan.source.terms
        prefill_s += source_terms.slowdown * source_terms.prefill_s
        decode_s += source_terms.decode_s
        congestion_s += source_terms.congestion_s
    pressure_s = candidate.pressure_s
    cost = ttft_s + decode_s + congestion_s + pressure_s + tie_break_s - shared_s
    return Terms(
        target.name,
        cost,
        ttft_s,
        decode_s,
        congestion_s,
        pressure_s,
        shared_s,
        tie_break_s,
        cached_tokens=candidate.cached_tokens,
        resident_tokens=candidate.resident_tokens,
        media_cached_tokens=candidate.media_cached_tokens,
        prefill_s=prefill_s,
        queue_s=queue_s,
        slowdown=slowdown,
        slot_wait_s=slot_wait_s,
        tier_load_s=candidate.tier_load_s,
        output_tokens=request.output_tokens,
        decode_requests=target.load.decode_request_count + target.peer_load.decode_requests,
        external_requests=target.external_load.request_count,
        transfer=msgspec.UNSET if plan is None else plan.transfer,
    )


def estimate_queue(candidate: Candidate, prefill_s: float, now: float) -> tuple[float, int]:
    """Return the seconds of prefill that come before a request, and the number of waiting requests that it overtakes.

    At most engines, which compute prompts in the order of arrival, a request overtakes those that wait for KV from
    another target, or comes behind them if it waits for KV, too. At an engine that computes the shortest prompt first,
    longer prompts wait for the request, unless it needs the prefix that one of them computes.
    """
    target = candidate.target
    queue_s = target.estimate_queue_s(now)
    if target.prefill_queue.is_shortest_first:
        return target.estimate_shortest_first_wait(prefill_s, find_awaited_request(candidate), queue_s)
    if candidate.plan is None:
        return queue_s, target.load.incoming_transfers
    return queue_s + target.prefill_queue.arriving_prefill_s, 0


def find_awaited_request(candidate: Candidate) -> InFlightRequest | None:
    """Return the request at a target that still computes the prefix that a new request will reuse; None if none does.

    A prefix that comes from another target needs no such request, nor does one that the target has stored already.
    """
    if candidate.plan is not None or candidate.cached_tokens <= candidate.resident_tokens:
        return None
    return candidate.target.prefill_queue.find_request_with_prefix(candidate.cached_tokens)


class SharedPrefill(NamedTuple):
    """Prefill of the part of a prompt that running requests begin with too, and that a target has not cached."""

    total_s: float
    reused_s: float
    """Part of `total_s` that counts as work for later requests, which will find the prefix cached."""


NO_SHARED_PREFILL: Final = SharedPrefill(total_s=0.0, reused_s=0.0)


def estimate_shared_prefill(target: Target, request: RequestFacts, present_tokens: int) -> SharedPrefill:
    """Return the prefill that a target does for one more copy of a prefix that running requests have in common.

    For example, three later requests will use the copy beside this one. If computing it takes 0.4 s, then 0.3 s count
    as theirs, or less on a target with little room. `present_tokens`: prompt tokens with KV at the target.
    """
    total_s = target.speed.estimate_prefill_s(request.shared_tokens, present_tokens)
    return SharedPrefill(total_s, request.copy_reuse_share * target.compute_free_share() * total_s)


def estimate_decode_s(
    target: Target, request: RequestFacts, prefill_s: float, shared: SharedPrefill, utilisation: float
) -> float:
    """Return the time of an answer after its first token, plus the time by which it delays the target's other answers.

    A step of the engine gives each answer one token, and reads the context of all. During a prefill, all answers stand
    still. `prefill_s`: time of this prompt's own prefill.
    """
    speed, output_tokens, request_count = target.speed, request.output_tokens, target.total_request_count
    mean_context_tokens = request.prompt_tokens + 0.5 * output_tokens
    context_s = speed.decode_context_s * mean_context_tokens
    own_step_s = speed.single_step_s + context_s
    others_delay_s = request_count * context_s  # by the new context; all other delays are in `mutual_step_delay_s`
    steps_s = output_tokens * (own_step_s + target.mutual_step_delay_s + others_delay_s)
    if not request.can_move_prefill:
        # Every worker would interrupt its answers for the prompt, except where a shared prefix is cached already. One
        # more copy of that prefix is avoidable work, less what the copy saves later requests.
        avoidable_s = shared.total_s - shared.reused_s
        return steps_s + avoidable_s * request_count
    decode_request_count = target.load.decode_request_count + target.peer_load.decode_requests
    others_pause_s = (prefill_s - shared.reused_s) * decode_request_count
    return steps_s + others_pause_s + _estimate_own_pause_s(target, output_tokens, utilisation)


def _estimate_own_pause_s(target: Target, output_tokens: float, utilisation: float) -> float:
    """Return how long a new answer at a target will stand still during later prefills.

    The utilisation lags while load rises. But a server that is busy for a share u of its time has u / (1 - u) requests
    on average (M/M/1 queue), so the number of prompts there gives a lower bound of u.
    """
    prompt_count = len(target.prefill_queue.requests) + target.peer_load.prefill_requests
    prefill_share = min(max(utilisation, prompt_count / (prompt_count + 1)), PREFILL_SHARE_MAX)
    return output_tokens * target.step_s * prefill_share / (1.0 - prefill_share)


class PoolLoad(NamedTuple):
    """Load of a pool, the workers that can serve one model: sums over these workers.

    The two rates are as of an earlier time. Both have to be multiplied by one factor, `utilisation_decay`.
    """

    prefill_rate: float
    """Prefill seconds that this router sends there per second."""
    arrival_rate: float
    """Requests that this router sends there per second."""
    peer_utilisation: float
    """Prefill seconds that other routers send there per second, now."""
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


def find_shortest_wait_s(targets: Sequence[Target], now: float) -> float:
    """Return the time until the first of the targets has computed the prompts that were sent to it."""
    shortest_wait_s = math.inf
    for target in targets:
        wait_s = target.slowdown * target.estimate_queue_s(now)
        if wait_s < shortest_wait_s:
            shortest_wait_s = wait_s
    return shortest_wait_s


def compute_congestion(
    pool: PoolLoad, shortest_wait_s: float, queued_s: float, utilisation_decay: float, config: CostConfig
) -> float:
    """Return the congestion of a pool: how long all later requests together wait for each second of new prefill.

        congestion = weight * utilisation * (1 + backlog) / (1 - utilisation)

    Utilisation is the busy share of a worker's time, on average. The backlog is the wait of a request that comes now,
    counted in prefills of mean length: `shortest_wait_s` at the least busy worker, and one worker's part of the
    `queued_s` seconds in the router's queue. For example, a pool that is busy for 3/4 of the time and has no backlog
    gives `3 * weight`.
    """
    utilisation = (pool.peer_utilisation + pool.prefill_rate * utilisation_decay) / pool.worker_count
    backlog_s = shortest_wait_s + queued_s / pool.worker_count
    mean_prefill_s = pool.prefill_rate / pool.arrival_rate if pool.arrival_rate else 0.0  # both decay alike
    backlog = backlog_s / mean_prefill_s if mean_prefill_s else 0.0
    idle_share = max(1.0 - utilisation, IDLE_SHARE_MIN)
    congestion = config.congestion_weight * min(utilisation, UTILISATION_MAX) * (1.0 + backlog) / idle_share
    return min(max(congestion, CONGESTION_MIN), CONGESTION_MAX)


def estimate_tier_load_s(match: Match, config: CostConfig) -> float:
    """Return the time to fetch the part of a match that lies on slower tiers."""
    if match.tokens <= match.gpu_tokens:
        return 0.0
    return sum(tokens * rate for tokens, rate in zip(match.tier_tokens, config.tier_load_s_per_token))
