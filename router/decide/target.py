"""What a request can be sent to, and how busy it is: the values that the tracker keeps and the policy reads.

A **target** is a worker, or one data-parallel rank of it. No book is kept here: only the tracker changes a target; what
is derived (slow, Q's parts) is recomputed by `recompute_decode_load` and `recompute_queue` after each change.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import msgspec

from router.decide.config import ServiceModel
from router.decide.reported_load import ExternalLoad, LoadExpectation, ReportedLoad
from router.decide.speed import Observation, PoolSpeeds, TierLoadSpeed, WorkerSample
from router.index.protocol import HolderId, Tally

_INTERVAL_TOKENS_MAX, _INTERVAL_STEPS_MAX = 4.0, 16
"""An interval of so many steps' tokens, or of so many steps, is not made longer."""
_SORTED_PREFILLS_MAX: Final = 128
"""Of those without a first token, the oldest, that are put in their order whenever one comes or goes."""
_REMAINING_SHARE_MIN: Final = 0.05
"""Of a P that should be done, where others went first meanwhile."""
MAX_NUM_SEQS_PRIOR: Final = 256
"""Of an engine of which that is not known; vLLM's default."""
REMAINING_TOKENS_PRIOR: Final = 256.0
"""Tokens still to come of requests of others, before there were any of ours."""
SLOT_WAIT_RATIO, SLOT_VOTES = 4.0, 8
"""So many times the expected wait is one for a slot, if so many in a row agree."""


class RequestPhase(enum.Enum):
    """PREFILL until the first token was seen (or estimated), then DECODE."""

    PREFILL = 0
    DECODE = 1


class InFlightRequest(msgspec.Struct, eq=False, kw_only=True):
    """One routed request."""

    request_id: str
    target: Target
    send_index: int
    """In the order of routing there."""
    prompt_tokens: int
    cached_tokens: int
    expected_output_tokens: float
    """Of its answer, as guessed when it was routed."""
    expected_ttft_s: float
    """Until its first token, as predicted then, had it a slot."""
    prefill_s: float
    routed_at_s: float
    is_streaming: bool
    tier_load_s: float
    """To fetch what lies on slower tiers, by the configured rates."""
    prefill_done_s: float = 0.0
    """Of its P, by when another went first."""
    phase: RequestPhase = RequestPhase.PREFILL
    context_tokens: int = 0
    prefill_interval: PrefillInterval | None = None
    """Where its first token went, for learning."""
    output_tokens: int = 0
    """Generated, as far as the edge has counted."""
    decode_start_totals: WorkTotals | None = None
    """What the target had done when the first token was seen, or when the stream was last learned from."""
    observed_output_tokens: int = 1
    """Of its answer then."""
    load_expectation: LoadExpectation | None = None
    """Where its target's engine reports requests of others."""

    def estimate_remaining_prefill_s(self) -> float:
        """Of its P."""
        return max(self.prefill_s - self.prefill_done_s, _REMAINING_SHARE_MIN * self.prefill_s)


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target, for learning what a decode step takes: two of them bracket an answer."""

    updated_at_s: float = 0.0
    decode_request_seconds: float = 0.0
    """Decoding requests, over time."""
    context_token_seconds: float = 0.0
    uncached_tokens: float = 0.0
    """Prefilled, of all first tokens so far."""
    quadratic_work: float = 0.0

    def observe_since(self, start: WorkTotals, elapsed_s: float, *, step_count: int, is_complete: bool) -> Observation:
        """What was done after `start`, in so many steps."""
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic_work=self.quadratic_work - start.quadratic_work,
            steps=step_count,
            decode_requests=(self.decode_request_seconds - start.decode_request_seconds) / elapsed_s,
            decode_context_tokens=(self.context_token_seconds - start.context_token_seconds) / elapsed_s,
            is_complete=is_complete,
            relative_noise=0.1 if is_complete else 0.5,
        )


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One router's part of a target's load, as it tells its peers. Times are on the receiver's clock."""

    prefill_s: float = 0.0
    prefill_requests: int = 0
    oldest_prefill_s: float = 0.0
    oldest_routed_s: float = 0.0
    oldest_prefill_since_s: float = 0.0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    utilisation: float = 0.0
    updated_s: float = 0.0
    prefill_rate: float | None = None
    """The `a` that its seconds were predicted with, where it told: two routers may have learned differently so far."""


def merge_peer_loads(loads: Sequence[PeerLoad], prefill_rate: float) -> PeerLoad:
    """Several routers' parts as one, in this router's seconds: work, not time, is what another one can tell."""
    scales = [prefill_rate / load.prefill_rate if load.prefill_rate else 1.0 for load in loads]
    busy_loads = [(load, scale) for load, scale in zip(loads, scales) if load.prefill_s > 0.0]
    oldest_load, oldest_scale = min(busy_loads or [(loads[0], 1.0)], key=lambda pair: pair[0].oldest_routed_s)
    return PeerLoad(
        prefill_s=sum(load.prefill_s * scale for load, scale in busy_loads),
        prefill_requests=sum(load.prefill_requests for load in loads),
        oldest_prefill_s=oldest_load.oldest_prefill_s * oldest_scale,
        oldest_routed_s=oldest_load.oldest_routed_s,
        oldest_prefill_since_s=max(load.oldest_prefill_since_s for load in loads),
        decode_requests=sum(load.decode_requests for load in loads),
        decode_context_tokens=sum(load.decode_context_tokens for load in loads),
        utilisation=sum(load.utilisation * scale for load, scale in zip(loads, scales)),
        updated_s=min(load.updated_s for load in loads),
    )


@dataclass(slots=True, eq=False)
class Target:
    """The load of one target. Read by the policy; changed only by the `LoadTracker`, its memory by the `CacheState`."""

    worker_id: str
    rank: int | None
    holder: HolderId
    speeds: PoolSpeeds
    OVERDUE_SHARE: ClassVar[float] = 0.2
    """Share of the time that an overdue prefill has taken: what is taken to be left of the prefill."""
    tier_load_speed: TierLoadSpeed = field(default_factory=TierLoadSpeed)
    name: str = ""
    prefilling_requests: dict[str, InFlightRequest] = field(default_factory=dict)
    """Routed and without a first token, in the order of routing."""
    own_pending_prefill_s: float = 0.0
    oldest_prefill_since_s: float = -math.inf
    """When the worker turned to its present oldest prefill: the last first token seen, or the end of one ahead."""
    own_request_count: int = 0
    decode_request_count: int = 0
    decode_context_tokens: int = 0
    """Prompts and answers so far of those."""
    pending_prompt_tokens: int = 0
    """Prompts of those without a first token."""
    mean_remaining_output_tokens: float = REMAINING_TOKENS_PRIOR
    """Of one of those who run; while there are only others' requests, as when there were some of ours."""
    remaining_output_tokens: float = 0.0
    """What is expected to be generated still, by all. As nothing is known of a length but its mean, what was said
    already makes no answer shorter."""
    kv_capacity_tokens: int | None = None
    """Of its KV cache, where that is known: told by its worker, or seen."""
    observed_kv_capacity_tokens: int | None = None
    """Its capacity as its events show it."""
    running_chunk_counts: Tally | None = None
    """Chunks of running prompts, once the books know the target; `shared_tokens` counts all but one of them."""
    duplicate_prompt_tokens: int = 0
    free_kv_tokens: float = math.inf
    """Of the cache, what running requests leave."""
    max_num_seqs: int = MAX_NUM_SEQS_PRIOR
    """Sequences that run at once: told, or learned, or as many as is usual."""
    has_reported_max_num_seqs: bool = False
    is_shortest_first: bool = False
    """Of `prefills`, who has the least left is computed first; else in their order."""
    sorted_remaining_prefill_s: list[float] = field(default_factory=list)
    """Then: what is left of each P, the least first, and the sums of the first so many; where there are very many, of
    those that came first, each of which stands for `each` of all."""
    cumulative_remaining_prefill_s: list[float] = field(default_factory=lambda: [0.0])
    sorted_sample_scale: float = 1.0
    shortest_prefill: InFlightRequest | None = None
    """Of those."""
    shortest_prefill_since_s: float = -math.inf
    """When it became the first."""
    next_send_index: int = 0
    """Requests, ever."""
    last_answered_send_index: int = -1
    """The latest of them that has its first token."""
    slot_wait_s: float = 0.0
    """How long one more request would wait for a slot: as many have to end as are too many."""
    last_request_end_s: float = -math.inf
    """When a request last ended here."""
    slot_count_votes: deque[int] = field(default_factory=lambda: deque(maxlen=SLOT_VOTES))
    """How many decoded beside the last requests that seemed to wait for a slot."""
    work_totals: WorkTotals = field(default_factory=WorkTotals)
    last_step_observation_s: float = -math.inf
    slowdown: float = 1.0
    step_s: float = 0.0
    """A decode step now."""
    total_request_count: int = 0
    """All requests here, with or without a first token, other routers' included."""
    mutual_step_delay_s: float = 0.0
    """2 c n + d ctx over all of them: what they add to a step, and what one more sequence adds to theirs."""
    utilisation_scaled: float = 0.0
    arrivals_scaled: float = 0.0
    """Requests routed here per second, averaged and scaled like `utilisation_scaled`."""
    peer_load: PeerLoad | None = None
    """The sum of what other routers have in flight here, and of what its engine says that others have."""
    reported_load: ReportedLoad | None = None
    """What its engine says of its load, where it does."""
    open_prefill_interval: PrefillInterval | None = None
    total_pending_prefill_s: float = 0.0
    """Sum of P of everything without a first token, other routers' included; Q before progress."""
    busy_since_s: float = 0.0
    """When the worker turned to the oldest of them."""
    fixed_step_share: float = 0.0
    """Of a step: what goes by before the oldest of them makes progress, as a step has its fixed part first."""
    last_step_at_s: float = -math.inf
    """When a step was last seen to end: by a first token, or a last one."""
    oldest_prefill_s: float = 0.0
    """The oldest one's P."""
    routed_requests: int = 0
    """Requests sent here since it was added; what was cached of their prompts, as predicted and as reported."""
    predicted_cached_tokens: int = 0
    reported_cached_tokens: int = 0
    service: ServiceModel = field(init=False)
    prefill_rate: float = 0.0
    """a"""
    quadratic_rate: float = 0.0
    """a / (2 * Lq)"""
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    single_step_s: float = 0.0
    """A step of one sequence without its context."""
    step_prefill_s: float = 0.0
    """What a step's prefill tokens take at an empty context."""

    def __post_init__(self) -> None:
        self.name = self.worker_id if self.rank is None else f"{self.worker_id}#{self.rank}"
        self.speeds.add_worker(self.name)
        self.set_service_model(self.speeds.make_service_model(self.name))

    def predict_interval_s(self, observation: Observation) -> float:
        """How long such an interval takes here, as far as is known."""
        decode_s = (
            self.decode_request_s * observation.decode_requests
            + self.decode_context_s * observation.decode_context_tokens
        )
        prefill_s = self.prefill_rate * observation.uncached_tokens + self.quadratic_rate * observation.quadratic_work
        return prefill_s + (self.service.step_s + decode_s) * observation.steps

    def set_service_model(self, service: ServiceModel) -> None:
        """The worker is as fast as `service` says. Read once: these are looked at for every request."""
        self.service = service
        self.prefill_rate = service.prefill_s_per_token
        self.quadratic_rate = self.prefill_rate / (2.0 * service.quadratic_tokens)
        self.decode_request_s = service.decode_request_s
        self.decode_context_s = service.decode_context_s
        self.single_step_s = service.step_s + self.decode_request_s
        self.step_prefill_s = self.prefill_rate * service.step_tokens
        for request in self.prefilling_requests.values():
            request.prefill_s = self.estimate_prefill_s(request.prompt_tokens, request.cached_tokens)
        self.own_pending_prefill_s = sum(request.prefill_s for request in self.prefilling_requests.values())
        self.recompute_decode_load()
        self.recompute_queue()

    def recompute_decode_load(self) -> None:
        """Recompute what is derived from the service model and the decode load."""
        decode_request_count, context_tokens = self.decode_request_count, self.decode_context_tokens
        self.total_request_count = self.own_request_count
        if self.peer_load is not None:
            decode_request_count += self.peer_load.decode_requests
            context_tokens += self.peer_load.decode_context_tokens
            self.total_request_count += self.peer_load.decode_requests + self.peer_load.prefill_requests
        self.step_s = (
            self.service.step_s + self.decode_request_s * decode_request_count + self.decode_context_s * context_tokens
        )
        self.slowdown = 1.0 + self.step_s / self.step_prefill_s
        if self.own_request_count:
            self.mean_remaining_output_tokens = self.remaining_output_tokens / self.own_request_count
        excess_requests = self.total_request_count + 1 - self.max_num_seqs
        self.slot_wait_s = self.estimate_drain_s(excess_requests / self.max_num_seqs) if excess_requests > 0 else 0.0
        self.mutual_step_delay_s = 2.0 * self.decode_request_s * self.total_request_count
        self.mutual_step_delay_s += self.decode_context_s * (context_tokens + self.pending_prompt_tokens)
        self.free_kv_tokens = math.inf
        if self.kv_capacity_tokens is not None:
            self.free_kv_tokens = float(
                self.kv_capacity_tokens - context_tokens - self.pending_prompt_tokens + self.duplicate_prompt_tokens
            )

    def estimate_prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """P."""
        quadratic_work = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic_work

    def estimate_queue_s(self, now: float) -> float:
        """Q: routed prefill that is still to be done, with the oldest one's progress taken off. What should be done by
        now and is not will take longer still, the more so the longer it has taken."""
        waiting_s = self.total_pending_prefill_s
        if waiting_s == 0.0:
            return 0.0
        progress_s = (now - self.busy_since_s - self.fixed_step_share * self.step_s) / self.slowdown
        if progress_s <= 0.0:
            return waiting_s
        remaining_s, overdue_s = self.oldest_prefill_s - progress_s, self.OVERDUE_SHARE * progress_s
        return waiting_s - self.oldest_prefill_s + (remaining_s if remaining_s > overdue_s else overdue_s)

    def record_queue_progress(self, now: float) -> None:
        """Call before what is in the queue changes: where the order may change, what was done so far is noted."""
        shortest_prefill = self.shortest_prefill
        if shortest_prefill is not None:
            done_s = (now - self.busy_since_s) / self.slowdown
            if done_s > 0.0:
                shortest_prefill.prefill_done_s += done_s
        self.shortest_prefill_since_s = now

    def estimate_shortest_first_wait(self, prefill_s: float, wait_s: float) -> tuple[float, int]:
        """(what of Q = `wait_s` is computed before a prompt of P = `prefill_s`, how many it overtakes), where who
        has the least left goes first."""
        before_s, overtaken_count, sorted_remaining_s, peer = 0.0, 0, self.sorted_remaining_prefill_s, self.peer_load
        if sorted_remaining_s:
            first_s = sorted_remaining_s[0] - (self.total_pending_prefill_s - wait_s)  # it has made progress
            position = bisect_right(sorted_remaining_s, prefill_s, 1)
            before_s = (
                self.cumulative_remaining_prefill_s[position] - self.cumulative_remaining_prefill_s[1]
            ) * self.sorted_sample_scale
            overtaken_count = round((len(sorted_remaining_s) - position) * self.sorted_sample_scale)
            if first_s <= prefill_s:
                before_s += max(first_s, 0.0)
            else:
                overtaken_count += 1
        if peer is not None and peer.prefill_requests:
            if peer.prefill_s <= prefill_s * peer.prefill_requests:
                before_s += peer.prefill_s
            else:
                overtaken_count += peer.prefill_requests
        return before_s, overtaken_count

    def estimate_wait_before_s(self, prefill_s: float, now: float) -> float:
        """What is computed before a prompt of P = `prefill_s`."""
        wait_s = self.estimate_queue_s(now)
        return self.estimate_shortest_first_wait(prefill_s, wait_s)[0] if wait_s and self.is_shortest_first else wait_s

    def compute_overdue_ratio(self, now: float) -> float | None:
        """How many times as long as it should its oldest prefill has taken so far; None where there is none of ours."""
        if not self.prefilling_requests:
            return None
        return (now - self.busy_since_s) / (self.slowdown * self.oldest_prefill_s + self.fixed_step_share * self.step_s)

    def predict_ttft_s(self, prompt_tokens: int, cached_tokens: int, now: float) -> float:
        """Until such a prompt has its first token: what waits, a step and a half, slots and memory."""
        prefill_s = self.estimate_prefill_s(prompt_tokens, cached_tokens)
        compute_s = self.slowdown * (self.estimate_wait_before_s(prefill_s, now) + prefill_s)
        missing_kv_tokens = prompt_tokens - cached_tokens - self.free_kv_tokens
        memory_wait_s = (
            self.estimate_drain_s(missing_kv_tokens / self.kv_capacity_tokens)
            if missing_kv_tokens > 0.0 and self.kv_capacity_tokens
            else 0.0
        )
        return compute_s + 1.5 * self.step_s + self.slot_wait_s + memory_wait_s

    def estimate_step_wait_s(self, now: float) -> float:
        """Until the step that runs ends, and another may begin with a new prompt: what is left of it if it was seen to
        begin, else half of one; what it prefills is in Q."""
        remaining_s = self.step_s - (now - self.last_step_at_s)
        if remaining_s > 0.0:
            return remaining_s if self.total_request_count else 0.0
        return 0.5 * self.step_s if self.total_request_count and not self.total_pending_prefill_s else 0.0

    def estimate_decode_s(self, prompt_tokens: int, expected_tokens: float) -> float:
        """What the rest of such an answer would take here, and what it would cost the answers beside it: n sequences
        share the steps with it, each of which it makes longer by c and its context, as they make its own."""
        context_s = self.decode_context_s * (prompt_tokens + 0.5 * expected_tokens)
        decode_s = expected_tokens * (self.single_step_s + context_s)
        if self.total_request_count:
            overlap_tokens = expected_tokens
            if self.mean_remaining_output_tokens < overlap_tokens:  # those who run may be gone before it is
                overlap_tokens *= (
                    2.0 * self.mean_remaining_output_tokens / (self.mean_remaining_output_tokens + overlap_tokens)
                )
            decode_s += overlap_tokens * (self.mutual_step_delay_s + self.total_request_count * context_s)
        return decode_s

    def estimate_added_decode_s(self, prompt_tokens: int, expected_tokens: float) -> float:
        """What such an answer adds to the steps of others."""
        return expected_tokens * (
            self.decode_request_s + self.decode_context_s * (prompt_tokens + 0.5 * expected_tokens)
        )

    def learn_max_num_seqs(self, waited_s: float, expected_s: float, now: float) -> None:
        """A request got its first token after so long. Where one after the other waits far longer than its prefill
        takes, and then begins just as another ends, always beside as many others: those are all slots."""
        if self.has_reported_max_num_seqs:
            return
        if self.decode_request_count > self.max_num_seqs:
            self.max_num_seqs = max(MAX_NUM_SEQS_PRIOR, 2 * self.decode_request_count)  # what was known was wrong
            self.slot_count_votes.clear()
        if waited_s > SLOT_WAIT_RATIO * expected_s + 1.0 and now - self.last_request_end_s < 0.1 + 3.0 * self.step_s:
            votes = self.slot_count_votes
            votes.append(self.decode_request_count)
            votes_max = max(votes)
            if len(votes) == SLOT_VOTES and votes_max - min(votes) <= max(1, votes_max // 32):
                self.max_num_seqs = votes_max

    def estimate_drain_s(self, share: float) -> float:
        """Until such a share (1: all) of what runs here has ended."""
        return share * self.mean_remaining_output_tokens * self.step_s if self.total_request_count else 0.0

    @property
    def external_load(self) -> ExternalLoad | None:
        """What its engine says that others have here."""
        return self.reported_load.trusted_external if self.reported_load is not None else None

    def make_external_peer_load(self) -> PeerLoad | None:
        """That, as if another router had told it."""
        external = self.external_load
        if external is None or self.reported_load is None:
            return None
        mean_prefill_s = self.utilisation_scaled / self.arrivals_scaled if self.arrivals_scaled > 0.0 else 0.0
        return PeerLoad(
            prefill_s=external.waiting * mean_prefill_s,
            prefill_requests=external.waiting,
            oldest_prefill_s=mean_prefill_s,
            oldest_routed_s=math.inf,  # when it began is not known: it makes no progress, and is never late
            decode_requests=external.running,
            decode_context_tokens=external.kv_tokens,
        )

    def compare_with_expectation(self, expectation: LoadExpectation, observation: Observation) -> None:
        """An answer has ended: were its steps as long as ours make them, or as the engine's report would?"""
        step_s = self.service.step_s + self.decode_request_s * observation.decode_requests
        step_s += self.decode_context_s * observation.decode_context_tokens
        own_only_s = observation.steps * step_s + self.prefill_rate * observation.uncached_tokens
        if self.reported_load is not None:
            self.reported_load.record_wait(
                observation.elapsed_s, own_only_s, own_only_s + observation.steps * expectation.added_step_s
            )

    def advance_work_totals(self, now: float) -> None:
        """Bring the totals over time up to now, before the counts change."""
        totals, peer_load = self.work_totals, self.peer_load
        elapsed_s = now - totals.updated_at_s
        if elapsed_s <= 0.0:
            return
        totals.updated_at_s = now
        decode_request_count, context_tokens = self.decode_request_count, self.decode_context_tokens
        if peer_load is not None:
            decode_request_count += peer_load.decode_requests
            context_tokens += peer_load.decode_context_tokens
            external = self.external_load
            if external is not None:
                decode_request_count -= external.running
                context_tokens -= external.kv_tokens
            totals.uncached_tokens += elapsed_s * min(peer_load.utilisation, 1.0) / self.prefill_rate
        totals.decode_request_seconds += elapsed_s * decode_request_count
        totals.context_token_seconds += elapsed_s * context_tokens

    def recompute_queue(self) -> None:
        """Recompute what `estimate_queue_s` reads, after the queue changed."""
        oldest_since_s, oldest_prefill_s, oldest_routed_s = self.oldest_prefill_since_s, 0.0, math.inf
        if self.prefilling_requests:
            oldest_request = next(iter(self.prefilling_requests.values()))
            oldest_prefill_s, oldest_routed_s = oldest_request.prefill_s, oldest_request.routed_at_s
        self.total_pending_prefill_s = self.own_pending_prefill_s
        peer_load = self.peer_load
        if self.is_shortest_first:
            oldest_prefill_s, oldest_routed_s = self._sort_by_remaining_prefill()
        elif self.shortest_prefill is not None:
            self.shortest_prefill = None
            self.sorted_remaining_prefill_s = []
            self.cumulative_remaining_prefill_s = [0.0]
        if peer_load is not None:
            oldest_since_s = max(oldest_since_s, peer_load.oldest_prefill_since_s)
        if peer_load is not None and peer_load.prefill_s > 0.0:
            self.total_pending_prefill_s += peer_load.prefill_s
            if peer_load.oldest_routed_s < oldest_routed_s:
                oldest_prefill_s, oldest_routed_s = peer_load.oldest_prefill_s, peer_load.oldest_routed_s
        self.busy_since_s = max(oldest_since_s, oldest_routed_s)  # with the shortest first that is later
        self.fixed_step_share = max(0.0, 1.0 - oldest_prefill_s / self.step_prefill_s)
        self.oldest_prefill_s = min(oldest_prefill_s, self.total_pending_prefill_s)

    def _sort_by_remaining_prefill(self) -> tuple[float, float]:
        """Put those without a first token in the order of what is left of them: (that of the first, since when)."""
        requests = sorted(
            itertools.islice(self.prefilling_requests.values(), _SORTED_PREFILLS_MAX),
            key=InFlightRequest.estimate_remaining_prefill_s,
        )
        self.shortest_prefill = requests[0] if requests else None
        self.sorted_remaining_prefill_s = [request.estimate_remaining_prefill_s() for request in requests]
        self.cumulative_remaining_prefill_s = list(itertools.accumulate(self.sorted_remaining_prefill_s, initial=0.0))
        self.total_pending_prefill_s, self.sorted_sample_scale = self.cumulative_remaining_prefill_s[-1], 1.0
        if len(requests) < len(self.prefilling_requests):
            self.sorted_sample_scale = len(self.prefilling_requests) / len(requests)
            self.total_pending_prefill_s += max(
                0.0, self.own_pending_prefill_s - sum(request.prefill_s for request in requests)
            )
        return (self.sorted_remaining_prefill_s[0], self.shortest_prefill_since_s) if requests else (0.0, math.inf)


@dataclass(slots=True)
class PrefillInterval:
    """First tokens of one engine step, or of several where a step may have begun a prompt that the next one ended:
    before they are learned from."""

    start_s: float
    end_s: float
    uncached_tokens: int
    quadratic_work: float
    decode_requests: float
    decode_context_tokens: float
    is_usable: bool
    waited_steps: float = 0.0
    """Who comes while others decode waits for half a step, on average, before its own."""
    last_step_start_s: float = 0.0
    """When its last step began, about."""
    step_count: int = 1
    tier_load_s: float = 0.0
    """By the configured rates, of all its requests."""
    estimated_tier_load_s: float = 0.0
    """What of it is taken to be loading."""
    sample: WorkerSample | None = None
    """What was learned from it, once it was."""

    def can_add_step(self, routed_s: float, since_s: float, step_tokens: int) -> bool:
        """Whether what was routed then, and was turned to then, may have begun in its last step: a step takes of the
        next prompt what its budget leaves. What the two steps did is known together; of many tokens it is little."""
        has_room = self.uncached_tokens < _INTERVAL_TOKENS_MAX * step_tokens and self.step_count < _INTERVAL_STEPS_MAX
        return has_room and routed_s <= self.last_step_start_s and since_s <= self.end_s

    def add_step(self, decode_requests: float, decode_context: float) -> None:
        """Another step belongs to it, beside so many decodes; it began when the last one ended."""
        self.last_step_start_s, step_count = self.end_s, self.step_count + 1
        self.decode_requests += (decode_requests - self.decode_requests) / step_count
        self.decode_context_tokens += (decode_context - self.decode_context_tokens) / step_count
        self.step_count = step_count

    def to_observation(self, step_tokens: int) -> Observation:
        """What it teaches of a worker whose steps have so many prefill tokens."""
        return Observation(
            elapsed_s=self.end_s - self.start_s - self.estimated_tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic_work=self.quadratic_work,
            steps=max(float(self.step_count), self.uncached_tokens / step_tokens) + self.waited_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )
