"""What a request can be sent to, and how busy it is: the values that the tracker keeps and the policy reads.

A **target** is a worker, or one data-parallel rank of it. No book is kept here: only the tracker changes a target; what
is derived (slow, Q's parts) is recomputed by `refresh` and `requeue` after each change.
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

_JOINED_TOKENS, _JOINED_STEPS = 4.0, 16
"""An interval of so many steps' tokens, or of so many steps, is not made longer."""
_LINED_UP_MAX: Final = 128
"""Of those without a first token, the oldest, that are put in their order whenever one comes or goes."""
_LEFT_MIN: Final = 0.05
"""Of a P that should be done, where others went first meanwhile."""
SEATS_PRIOR: Final = 256
"""Of an engine of which that is not known; vLLM's default."""
LEFT_PRIOR: Final = 256.0
"""Tokens still to come of requests of others, before there were any of ours."""
SEAT_WAIT, SEAT_VOTES = 4.0, 8
"""So many times the expected wait is one for a seat, if so many in a row agree."""


class RequestPhase(enum.Enum):
    """PREFILL until the first token was seen (or estimated), then DECODE."""

    PREFILL = 0
    DECODE = 1


class InFlight(msgspec.Struct, eq=False, kw_only=True):
    """One routed request."""

    request_id: str
    target: Target
    number: int
    """In the order of routing there."""
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: float
    """Of its answer, as guessed when it was routed."""
    expected_s: float
    """Until its first token, as predicted then, had it a seat."""
    prefill_s: float
    routed_s: float
    stream: bool
    tier_load_s: float
    """To fetch what lies on slower tiers, by the configured rates."""
    done_s: float = 0.0
    """Of its P, by when another went first."""
    phase: RequestPhase = RequestPhase.PREFILL
    context_tokens: int = 0
    interval: PrefillInterval | None = None
    """Where its first token went, for learning."""
    said_tokens: int = 0
    """Generated, as far as the edge has counted."""
    decode_start: WorkTotals | None = None
    """What the target had done when the first token was seen, or when the stream was last learned from."""
    decode_said: int = 1
    """Of its answer then."""
    wager: LoadExpectation | None = None
    """Where its target's engine claims to have requests of others."""

    def left_s(self) -> float:
        """Of its P."""
        return max(self.prefill_s - self.done_s, _LEFT_MIN * self.prefill_s)


class WorkTotals(msgspec.Struct, eq=False):
    """Running totals of a target, for learning what a decode step takes: two of them bracket an answer."""

    at_s: float = 0.0
    request_seconds: float = 0.0
    """Decoding requests, over time."""
    context_seconds: float = 0.0
    uncached_tokens: float = 0.0
    """Prefilled, of all first tokens so far."""
    quadratic: float = 0.0

    def since(self, start: WorkTotals, elapsed_s: float, *, steps: int, clean: bool) -> Observation:
        """What was done after `start`, in so many steps."""
        return Observation(
            elapsed_s=elapsed_s,
            uncached_tokens=self.uncached_tokens - start.uncached_tokens,
            quadratic=self.quadratic - start.quadratic,
            steps=steps,
            decode_requests=(self.request_seconds - start.request_seconds) / elapsed_s,
            decode_context=(self.context_seconds - start.context_seconds) / elapsed_s,
            clean=clean,
            noise=0.1 if clean else 0.5,
        )


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One router's part of a target's load, as it tells its peers. Times are on the receiver's clock."""

    prefill_s: float = 0.0
    prefill_requests: int = 0
    oldest_prefill_s: float = 0.0
    oldest_routed_s: float = 0.0
    head_since_s: float = 0.0
    decode_requests: int = 0
    decode_context: int = 0
    utilisation: float = 0.0
    updated_s: float = 0.0
    prefill_rate: float | None = None
    """The `a` that its seconds were predicted with, where it told: two routers may have learned differently so far."""


def merged(loads: Sequence[PeerLoad], own_rate: float) -> PeerLoad:
    """Several routers' parts as one, in this router's seconds: work, not time, is what another one can tell."""
    scales = [own_rate / load.prefill_rate if load.prefill_rate else 1.0 for load in loads]
    busy = [(load, scale) for load, scale in zip(loads, scales) if load.prefill_s > 0.0]
    oldest, oldest_scale = min(busy or [(loads[0], 1.0)], key=lambda pair: pair[0].oldest_routed_s)
    return PeerLoad(
        prefill_s=sum(load.prefill_s * scale for load, scale in busy),
        prefill_requests=sum(load.prefill_requests for load in loads),
        oldest_prefill_s=oldest.oldest_prefill_s * oldest_scale,
        oldest_routed_s=oldest.oldest_routed_s,
        head_since_s=max(load.head_since_s for load in loads),
        decode_requests=sum(load.decode_requests for load in loads),
        decode_context=sum(load.decode_context for load in loads),
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
    prefills: dict[str, InFlight] = field(default_factory=dict)
    """Routed and without a first token, in the order of routing."""
    prefill_s: float = 0.0
    head_since_s: float = -math.inf
    """When the worker turned to its present oldest prefill: the last first token seen, or the end of one ahead."""
    requests: int = 0
    decode_requests: int = 0
    context_tokens: int = 0
    """Prompts and answers so far of those."""
    pending_tokens: int = 0
    """Prompts of those without a first token."""
    left_mean: float = LEFT_PRIOR
    """Of one of those who run; while there are only others' requests, as when there were some of ours."""
    left_tokens: float = 0.0
    """What is expected to be generated still, by all. As nothing is known of a length but its mean, what was said
    already makes no answer shorter."""
    capacity_tokens: int | None = None
    """Of its KV cache, where that is known: told by its worker, or seen."""
    seen_tokens: int | None = None
    """Its capacity as its events show it."""
    held_chunks: Tally | None = None
    """Chunks of running prompts, once the books know the target; `shared_tokens` counts all but one of them."""
    shared_tokens: int = 0
    room_tokens: float = math.inf
    """Of the cache, what running requests leave."""
    seats: int = SEATS_PRIOR
    """Sequences that run at once: told, or learned, or as many as is usual."""
    seats_told: bool = False
    shortest_first: bool = False
    """Of `prefills`, who has the least left is computed first; else in their order."""
    lefts: list[float] = field(default_factory=list)
    """Then: what is left of each P, the least first, and the sums of the first so many; where there are very many, of
    those that came first, each of which stands for `each` of all."""
    left_sums: list[float] = field(default_factory=lambda: [0.0])
    each: float = 1.0
    first: InFlight | None = None
    """Of those."""
    turned_s: float = -math.inf
    """When it became the first."""
    sent: int = 0
    """Requests, ever."""
    answered_number: int = -1
    """The latest of them that has its first token."""
    seat_s: float = 0.0
    """How long one more request would wait for a seat: as many have to end as are too many."""
    ended_s: float = -math.inf
    """When a request last ended here."""
    seat_votes: deque[int] = field(default_factory=lambda: deque(maxlen=SEAT_VOTES))
    """How many decoded beside the last requests that seemed to wait for a seat."""
    sums: WorkTotals = field(default_factory=WorkTotals)
    decode_learnt_s: float = -math.inf
    slowdown: float = 1.0
    step_now_s: float = 0.0
    """A decode step now."""
    sharers: int = 0
    """All requests here, with or without a first token, other routers' included."""
    sharing_s: float = 0.0
    """2 c n + d ctx over all of them: what they add to a step, and what one more sequence adds to theirs."""
    utilisation_scaled: float = 0.0
    arrivals_scaled: float = 0.0
    """Requests routed here per second, averaged and scaled like `utilisation_scaled`."""
    peer: PeerLoad | None = None
    """The sum of what other routers have in flight here, and of what its engine says that others have."""
    claims: ReportedLoad | None = None
    """What its engine says of its load, where it does."""
    open_interval: PrefillInterval | None = None
    waiting_s: float = 0.0
    """Sum of P of everything without a first token, other routers' included; Q before progress."""
    busy_since_s: float = 0.0
    """When the worker turned to the oldest of them."""
    lead_share: float = 0.0
    """Of a step: what goes by before the oldest of them makes progress, as a step has its fixed part first."""
    stepped_s: float = -math.inf
    """When a step was last seen to end: by a first token, or a last one."""
    oldest_s: float = 0.0
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
    alone_s: float = 0.0
    """A step of one sequence without its context."""
    step_prefill_s: float = 0.0
    """What a step's prefill tokens take at an empty context."""

    def __post_init__(self) -> None:
        self.name = self.worker_id if self.rank is None else f"{self.worker_id}#{self.rank}"
        self.speeds.join(self.name)
        self.teach(self.speeds.model(self.name))

    def expected_s(self, seen: Observation) -> float:
        """How long such an interval takes here, as far as is known."""
        decode_s = self.decode_request_s * seen.decode_requests + self.decode_context_s * seen.decode_context
        prefill_s = self.prefill_rate * seen.uncached_tokens + self.quadratic_rate * seen.quadratic
        return prefill_s + (self.service.step_s + decode_s) * seen.steps

    def teach(self, service: ServiceModel) -> None:
        """The worker is as fast as `service` says. Read once: these are looked at for every request."""
        self.service = service
        self.prefill_rate = service.prefill_s_per_token
        self.quadratic_rate = self.prefill_rate / (2.0 * service.quadratic_tokens)
        self.decode_request_s = service.decode_request_s
        self.decode_context_s = service.decode_context_s
        self.alone_s = service.step_s + self.decode_request_s
        self.step_prefill_s = self.prefill_rate * service.step_tokens
        for flight in self.prefills.values():
            flight.prefill_s = self.prefill_seconds(flight.prompt_tokens, flight.cached_tokens)
        self.prefill_s = sum(flight.prefill_s for flight in self.prefills.values())
        self.refresh()
        self.requeue()

    def refresh(self) -> None:
        """Recompute what is derived from the service model and the decode load."""
        requests, context = self.decode_requests, self.context_tokens
        self.sharers = self.requests
        if self.peer is not None:
            requests += self.peer.decode_requests
            context += self.peer.decode_context
            self.sharers += self.peer.decode_requests + self.peer.prefill_requests
        self.step_now_s = self.service.step_s + self.decode_request_s * requests + self.decode_context_s * context
        self.slowdown = 1.0 + self.step_now_s / self.step_prefill_s
        if self.requests:
            self.left_mean = self.left_tokens / self.requests
        over = self.sharers + 1 - self.seats
        self.seat_s = self.drain_seconds(over / self.seats) if over > 0 else 0.0
        self.sharing_s = 2.0 * self.decode_request_s * self.sharers
        self.sharing_s += self.decode_context_s * (context + self.pending_tokens)
        self.room_tokens = math.inf
        if self.capacity_tokens is not None:
            self.room_tokens = float(self.capacity_tokens - context - self.pending_tokens + self.shared_tokens)

    def prefill_seconds(self, prompt_tokens: int, cached_tokens: int) -> float:
        """P."""
        quadratic = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        return self.prefill_rate * (prompt_tokens - cached_tokens) + self.quadratic_rate * quadratic

    def queue_s(self, now: float) -> float:
        """Q: routed prefill that is still to be done, with the oldest one's progress taken off. What should be done by
        now and is not will take longer still, the more so the longer it has taken."""
        waiting = self.waiting_s
        if waiting == 0.0:
            return 0.0
        progress = (now - self.busy_since_s - self.lead_share * self.step_now_s) / self.slowdown
        if progress <= 0.0:
            return waiting
        left, overdue = self.oldest_s - progress, self.OVERDUE_SHARE * progress
        return waiting - self.oldest_s + (left if left > overdue else overdue)

    def settle(self, now: float) -> None:
        """Call before what is in the queue changes: where the order may change, what was done so far is noted."""
        first = self.first
        if first is not None:
            done_s = (now - self.busy_since_s) / self.slowdown
            if done_s > 0.0:
                first.done_s += done_s
        self.turned_s = now

    def place(self, own_s: float, wait_s: float) -> tuple[float, int]:
        """(what of Q = `wait_s` is computed before a prompt of P = `own_s`, how many it overtakes), where who has the
        least left goes first."""
        before_s, later, lefts, peer = 0.0, 0, self.lefts, self.peer
        if lefts:
            first_s = lefts[0] - (self.waiting_s - wait_s)  # it has made progress
            count = bisect_right(lefts, own_s, 1)
            before_s = (self.left_sums[count] - self.left_sums[1]) * self.each
            later = round((len(lefts) - count) * self.each)
            if first_s <= own_s:
                before_s += max(first_s, 0.0)
            else:
                later += 1
        if peer is not None and peer.prefill_requests:
            if peer.prefill_s <= own_s * peer.prefill_requests:
                before_s += peer.prefill_s
            else:
                later += peer.prefill_requests
        return before_s, later

    def first_seconds(self, own_s: float, now: float) -> float:
        """What is computed before a prompt of P = `own_s`."""
        wait_s = self.queue_s(now)
        return self.place(own_s, wait_s)[0] if wait_s and self.shortest_first else wait_s

    def overdue(self, now: float) -> float | None:
        """How many times as long as it should its oldest prefill has taken so far; None where there is none of ours."""
        if not self.prefills:
            return None
        return (now - self.busy_since_s) / (self.slowdown * self.oldest_s + self.lead_share * self.step_now_s)

    def first_token_seconds(self, prompt_tokens: int, cached_tokens: int, now: float) -> float:
        """Until such a prompt has its first token: what waits, a step and a half, seats and memory."""
        prefill_s = self.prefill_seconds(prompt_tokens, cached_tokens)
        seconds = self.slowdown * (self.first_seconds(prefill_s, now) + prefill_s)
        over = prompt_tokens - cached_tokens - self.room_tokens
        memory_s = self.drain_seconds(over / self.capacity_tokens) if over > 0.0 and self.capacity_tokens else 0.0
        return seconds + 1.5 * self.step_now_s + self.seat_s + memory_s

    def rest_seconds(self, now: float) -> float:
        """Until the step that runs ends, and another may begin with a new prompt: what is left of it if it was seen to
        begin, else half of one; what it prefills is in Q."""
        rest_s = self.step_now_s - (now - self.stepped_s)
        if rest_s > 0.0:
            return rest_s if self.sharers else 0.0
        return 0.5 * self.step_now_s if self.sharers and not self.waiting_s else 0.0

    def decode_seconds(self, prompt_tokens: int, expected_tokens: float) -> float:
        """What the rest of such an answer would take here, and what it would cost the answers beside it: n sequences
        share the steps with it, each of which it makes longer by c and its context, as they make its own."""
        context_s = self.decode_context_s * (prompt_tokens + 0.5 * expected_tokens)
        decode_s = expected_tokens * (self.alone_s + context_s)
        if self.sharers:
            shared = expected_tokens
            if self.left_mean < shared:  # those who run may be gone before it is
                shared *= 2.0 * self.left_mean / (self.left_mean + shared)
            decode_s += shared * (self.sharing_s + self.sharers * context_s)
        return decode_s

    def added_seconds(self, prompt_tokens: int, expected_tokens: float) -> float:
        """What such an answer adds to the steps of others."""
        return expected_tokens * (
            self.decode_request_s + self.decode_context_s * (prompt_tokens + 0.5 * expected_tokens)
        )

    def note_wait(self, waited_s: float, expected_s: float, now: float) -> None:
        """A request got its first token after so long. Where one after the other waits far longer than its prefill
        takes, and then begins just as another ends, always beside as many others: those are the seats."""
        if self.seats_told:
            return
        if self.decode_requests > self.seats:
            self.seats = max(SEATS_PRIOR, 2 * self.decode_requests)  # what was known was wrong
            self.seat_votes.clear()
        if waited_s > SEAT_WAIT * expected_s + 1.0 and now - self.ended_s < 0.1 + 3.0 * self.step_now_s:
            votes = self.seat_votes
            votes.append(self.decode_requests)
            most = max(votes)
            if len(votes) == SEAT_VOTES and most - min(votes) <= max(1, most // 32):
                self.seats = most

    def drain_seconds(self, share: float) -> float:
        """Until such a share (1: all) of what runs here has ended."""
        return share * self.left_mean * self.step_now_s if self.sharers else 0.0

    @property
    def believed(self) -> ExternalLoad | None:
        """What its engine says that others have here."""
        return self.claims.believed if self.claims is not None else None

    def others(self) -> PeerLoad | None:
        """That, as if another router had told it."""
        claim = self.believed
        if claim is None or self.claims is None:
            return None
        each_s = self.utilisation_scaled / self.arrivals_scaled if self.arrivals_scaled > 0.0 else 0.0
        return PeerLoad(
            prefill_s=claim.waiting * each_s,
            prefill_requests=claim.waiting,
            oldest_prefill_s=each_s,
            oldest_routed_s=math.inf,  # when it began is not known: it makes no progress, and is never late
            decode_requests=claim.running,
            decode_context=claim.held_tokens,
        )

    def compare(self, wager: LoadExpectation, seen: Observation) -> None:
        """An answer has ended: were its steps as long as ours make them, or as the engine's claim would?"""
        step_s = self.service.step_s + self.decode_request_s * seen.decode_requests
        step_s += self.decode_context_s * seen.decode_context
        without_s = seen.steps * step_s + self.prefill_rate * seen.uncached_tokens
        if self.claims is not None:
            self.claims.served(seen.elapsed_s, without_s, without_s + seen.steps * wager.step_more_s)

    def accrue(self, now: float) -> None:
        """Bring the totals over time up to now, before the counts change."""
        sums, peer = self.sums, self.peer
        passed = now - sums.at_s
        if passed <= 0.0:
            return
        sums.at_s = now
        requests, context = self.decode_requests, self.context_tokens
        if peer is not None:
            requests += peer.decode_requests
            context += peer.decode_context
            claim = self.believed
            if claim is not None:
                requests -= claim.running
                context -= claim.held_tokens
            sums.uncached_tokens += passed * min(peer.utilisation, 1.0) / self.prefill_rate
        sums.request_seconds += passed * requests
        sums.context_seconds += passed * context

    def requeue(self) -> None:
        """Recompute what `queue_s` reads, after what is in the queue changed."""
        since, oldest_s, oldest_routed_s = self.head_since_s, 0.0, math.inf
        if self.prefills:
            oldest = next(iter(self.prefills.values()))
            oldest_s, oldest_routed_s = oldest.prefill_s, oldest.routed_s
        self.waiting_s = self.prefill_s
        peer = self.peer
        if self.shortest_first:
            oldest_s, oldest_routed_s = self._line_up()
        elif self.first is not None:
            self.first, self.lefts, self.left_sums = None, [], [0.0]
        if peer is not None:
            since = max(since, peer.head_since_s)
        if peer is not None and peer.prefill_s > 0.0:
            self.waiting_s += peer.prefill_s
            if peer.oldest_routed_s < oldest_routed_s:
                oldest_s, oldest_routed_s = peer.oldest_prefill_s, peer.oldest_routed_s
        self.busy_since_s = max(since, oldest_routed_s)  # with the shortest first that is later
        self.lead_share = max(0.0, 1.0 - oldest_s / self.step_prefill_s)
        self.oldest_s = min(oldest_s, self.waiting_s)

    def _line_up(self) -> tuple[float, float]:
        """Put those without a first token in the order of what is left of them: (that of the first, since when)."""
        flights = sorted(itertools.islice(self.prefills.values(), _LINED_UP_MAX), key=InFlight.left_s)
        self.first = flights[0] if flights else None
        self.lefts = [flight.left_s() for flight in flights]
        self.left_sums = list(itertools.accumulate(self.lefts, initial=0.0))
        self.waiting_s, self.each = self.left_sums[-1], 1.0
        if len(flights) < len(self.prefills):
            self.each = len(self.prefills) / len(flights)
            self.waiting_s += max(0.0, self.prefill_s - sum(flight.prefill_s for flight in flights))
        return (self.lefts[0], self.turned_s) if flights else (0.0, math.inf)


@dataclass(slots=True)
class PrefillInterval:
    """First tokens of one engine step, or of several where a step may have begun a prompt that the next one ended:
    before they are learned from."""

    start_s: float
    end_s: float
    uncached_tokens: int
    quadratic: float
    decode_requests: float
    decode_context: float
    usable: bool
    steps_before: float = 0.0
    """Who comes while others decode waits for half a step, on average, before its own."""
    step_s: float = 0.0
    """When its last step began, about."""
    steps: int = 1
    tier_load_s: float = 0.0
    """By the configured rates, of all its requests."""
    estimated_tier_load_s: float = 0.0
    """What of it is taken to be loading."""
    taught: WorkerSample | None = None
    """What was learned from it, once it was."""

    def joins(self, routed_s: float, since_s: float, step_tokens: int) -> bool:
        """Whether what was routed then, and was turned to then, may have begun in its last step: a step takes of the
        next prompt what its budget leaves. What the two steps did is known together; of many tokens it is little."""
        room = self.uncached_tokens < _JOINED_TOKENS * step_tokens and self.steps < _JOINED_STEPS
        return room and routed_s <= self.step_s and since_s <= self.end_s

    def join(self, decode_requests: float, decode_context: float) -> None:
        """Another step belongs to it, beside so many decodes; it began when the last one ended."""
        self.step_s, count = self.end_s, self.steps + 1
        self.decode_requests += (decode_requests - self.decode_requests) / count
        self.decode_context += (decode_context - self.decode_context) / count
        self.steps = count

    def seen(self, step_tokens: int) -> Observation:
        """What it teaches of a worker whose steps have so many prefill tokens."""
        return Observation(
            elapsed_s=self.end_s - self.start_s - self.estimated_tier_load_s,
            uncached_tokens=self.uncached_tokens,
            quadratic=self.quadratic,
            steps=max(float(self.steps), self.uncached_tokens / step_tokens) + self.steps_before,
            decode_requests=self.decode_requests,
            decode_context=self.decode_context,
        )
