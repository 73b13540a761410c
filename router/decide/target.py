"""State of one target: a worker, or one data-parallel rank of a worker, that requests can be sent to.

The state has four parts: `Capacity`, `Load` and `PeerLoad` (router/decide/load.py), and `Speed`
(router/decide/learning/). `PrefillQueue` has the prompts that are to be computed. The tracker counts requests, the
cache state counts shared tokens. `recompute` brings derived values (slowdown, Q) up to date.
"""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from router.decide.learning import PoolSpeed, Speed, WorkTotals
from router.decide.load import (
    MAX_NUM_SEQS_PRIOR,
    NO_PEER_LOAD,
    Capacity,
    EngineLoad,
    Load,
    PeerLoad,
    RoutedTotals,
)
from router.decide.messages import TransferKind
from router.decide.workers import NO_TRANSFERS, PREFILL_ROLE, WorkerSpec
from router.index.protocol import HolderId, PinId, PrefixIndex, PreparedPrompt, Scope
from simulation.steps import StepTimes

_EXAMINED_PREFILLS_MAX: Final = 128
"""Prompts, the oldest first, that are compared with a new one; a longer queue is extrapolated from these."""
OVERDUE_SHARE: Final = 0.2
"""An overdue prefill is assumed to take this share of its time so far once more."""
_REMAINING_SHARE_MIN: Final = 0.05
"""Least share of a prefill that is assumed to remain after other prompts went first."""


class RequestPhase(enum.Enum):
    """Phase of a request at its target: waiting for KV from another worker, prefill, decode, or ended.

    In SOURCE_PREFILL the other worker still computes the KV, and in TRANSFER it sends the KV. Both are left out if no
    KV is to come. PREFILL ends with the first token; if that is not seen, because the answer is not streamed, its time
    is estimated.
    """

    SOURCE_PREFILL = 0
    TRANSFER = 1
    PREFILL = 2
    DECODE = 3
    ENDED = 4


class PromptQuery(msgspec.Struct, eq=False):
    """Prompt of a request, prepared for several look-ups of its cached prefixes in the index."""

    index: PrefixIndex
    prepared_ids: PreparedPrompt
    """The prompt's token ids, as the index reads them."""
    scope: Scope
    """Model, adapter and cache salt of the prompt."""
    prompt_tokens: int
    _keys_by_chunk_size: dict[int, list[int]] = {}

    def get_chunk_keys(self, chunk_tokens: int) -> list[int]:
        """Return a key for each chunk of `chunk_tokens` tokens: the digest of all tokens up to the chunk's end."""
        if self.prompt_tokens <= chunk_tokens:
            return []
        keys = self._keys_by_chunk_size.get(chunk_tokens)
        if keys is None:
            keys = self.index.chunk_keys(self.prepared_ids, self.scope, chunk_tokens)
            self._keys_by_chunk_size[chunk_tokens] = keys
        return keys


class InFlightRequest(msgspec.Struct, eq=False):
    """One request that was sent to a target, as the target's load and the cache state count it.

    It is first in its prefill, then decodes. Fields with `_at_s` are moments on the router's clock, those with another
    `_s` are durations.
    """

    target: Target
    prompt_tokens: int
    cached_tokens: int
    expected_output_tokens: float
    is_streaming: bool
    """Whether the first token will be seen; otherwise the time of the first token is estimated."""
    tier_load_s: float
    """Time to fetch the cached tokens that lie on slower tiers, by the configured rates."""
    sent_at_s: float
    """When the request was sent or, if KV had to come from another target, when that KV had come."""
    prefill_s: float
    """Time to compute the uncached tokens, as fast as the target is now thought to be."""
    source: Target | None = None
    """Target that sends KV of the prompt; None: no KV comes from elsewhere."""
    is_background: bool = False
    """Whether its priority is so low that it waits in the router until a worker is idle."""
    prefill_done_s: float = 0.0
    """Part of `prefill_s` that was computed before other requests went first."""
    phase: RequestPhase = RequestPhase.PREFILL
    output_tokens: int = 0
    """Tokens of the answer that the edge has counted so far."""
    observed_totals: WorkTotals | None = None
    """Work of the target up to the last time that its speed was learned from this answer, at first its first token."""
    observed_output_tokens: int = 1
    """Tokens of the answer at the time of `observed_totals`."""
    prompt: PromptQuery | None = None
    """The prompt, as the cache state counts it; None if it was not read."""
    pin: PinId | None = None
    """Pin of the prompt in the index; None without events, before its KV has come, or after the cache was lost."""

    @property
    def has_no_first_token(self) -> bool:
        """Whether its first token was neither seen nor estimated, and it has not ended."""
        return self.phase is RequestPhase.PREFILL or self.is_waiting_for_kv

    @property
    def is_waiting_for_kv(self) -> bool:
        """Whether it cannot begin, because KV is to come from another worker."""
        return self.phase in (RequestPhase.SOURCE_PREFILL, RequestPhase.TRANSFER)

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_tokens + self.output_tokens

    @property
    def overdue_output_tokens(self) -> int:
        """Tokens by which the answer is longer than expected so far."""
        return max(0, self.output_tokens - int(self.expected_output_tokens))

    def estimate_remaining_prefill_s(self) -> float:
        """Return the part of `prefill_s` that is left."""
        return max(self.prefill_s - self.prefill_done_s, _REMAINING_SHARE_MIN * self.prefill_s)


class PrefillPlace(NamedTuple):
    """Place of a prompt in the order of an engine that computes the shortest prompt first."""

    order_s: float
    """Seconds by which the engine orders the prompt: those that remain of its prefill, or those of the prompt that
    computes its prefix, if these are more, as it cannot go before."""
    remaining_s: float
    """Seconds that remain of its prefill."""


@dataclass(slots=True, eq=False)
class PrefillQueue:
    """Prompts that a target is to compute and has all KV for, with sums that include other routers' prompts."""

    requests: dict[InFlightRequest, InFlightRequest | None] = field(default_factory=dict)
    """The requests, the first sent first. Each with the earlier request that computes a prefix which counts as cached
    for it, or None."""
    own_prefill_s: float = 0.0
    """Sum of `prefill_s` over `requests`."""
    arriving_prefill_s: float = 0.0
    """Prefill seconds of the requests that wait for KV on its way here. They join `requests` when it has come."""
    oldest_since_s: float = -math.inf
    """When the target could begin with its oldest request: at the last first token or end of an earlier request."""
    total_prefill_s: float = 0.0
    """Prefill seconds of all prompts here, other routers' included; Q without the progress of the current prefill."""
    busy_since_s: float = 0.0
    """When the target began with the current prefill."""
    fixed_step_share: float = 0.0
    """Share of a decode step that passes before the current prefill makes progress."""
    oldest_prefill_s: float = 0.0
    """Seconds of the current prefill: of the oldest prompt, or of the shortest with `is_shortest_first`."""
    is_shortest_first: bool = False
    """Whether the engine computes the shortest prompt first, else the oldest prompt."""
    current_request: InFlightRequest | None = None
    """Request of this router that the engine computes now: the oldest, or the shortest with `is_shortest_first`."""
    places: dict[InFlightRequest, PrefillPlace] = field(default_factory=dict)
    """Places of the oldest requests in the engine's order with `is_shortest_first`, else empty."""
    progress_recorded_at_s: float = -math.inf
    """Time up to which requests have their progress in `prefill_done_s`."""
    last_answered_sent_at_s: float = -math.inf
    """Latest `sent_at_s` of a request that has its first token."""

    def get_oldest(self) -> InFlightRequest | None:
        """Return the request that was sent first."""
        return next(iter(self.requests), None)

    def find_request_with_prefix(self, prefix_tokens: int) -> InFlightRequest | None:
        """Return the request here that computes a prefix of so many tokens; always None if the oldest goes first.

        The prompts are not compared: of several that are long enough, the first in the engine's order is taken.
        """
        long_requests = [
            request for request in self.places if request.cached_tokens < prefix_tokens <= request.prompt_tokens
        ]
        return min(long_requests, key=lambda request: self.places[request].order_s, default=None)

    def add(self, request: InFlightRequest, awaited_request: InFlightRequest | None = None) -> None:
        """Add a request that was sent to the target. It waits for a prefix that `awaited_request` computes."""
        self.requests[request] = awaited_request
        self.own_prefill_s += request.prefill_s

    def remove(self, request: InFlightRequest) -> bool:
        """Remove a request; return whether it was the oldest."""
        was_oldest = self.get_oldest() is request
        del self.requests[request]
        # Exactly zero when none is left, so that rounding never accumulates.
        self.own_prefill_s = self.own_prefill_s - request.prefill_s if self.requests else 0.0
        return was_oldest

    def record_first_token(self, request: InFlightRequest) -> bool:
        """Note that a request has its first token; return whether it had it in its turn.

        It is the turn of the oldest request. With `is_shortest_first`, no later request may have its first token.
        """
        if not self.is_shortest_first:
            return self.get_oldest() is request
        is_in_turn = request.sent_at_s >= self.last_answered_sent_at_s
        self.last_answered_sent_at_s = max(request.sent_at_s, self.last_answered_sent_at_s)
        return is_in_turn

    def reprice(self, speed: Speed) -> None:
        """Recompute the prefill seconds of all requests after the target's speed has changed."""
        for request in self.requests:
            request.prefill_s = speed.estimate_prefill_s(request.prompt_tokens, request.cached_tokens)
        self.own_prefill_s = sum(request.prefill_s for request in self.requests)

    def record_progress(self, slowdown: float, now: float) -> None:
        """Note the progress of the current prompt, before a change of the queue may put a shorter one first."""
        if self.is_shortest_first and self.current_request is not None:
            self.current_request.prefill_done_s += max(now - self.busy_since_s, 0.0) / slowdown
            self.progress_recorded_at_s = now

    def recompute(self, peer_load: PeerLoad, step_prefill_s: float) -> None:
        """Recompute the total prefill of the queue, and which prompt the engine computes now, after the queue changed.

        `peer_load`: prompts that other routers sent to the engine; the oldest of them is computed now if it was sent
        before this router's. `step_prefill_s`: seconds that the prefill in one full step of the engine takes.
        """
        self.places, self.current_request, done_s = {}, self.get_oldest(), 0.0
        if self.is_shortest_first and self.requests:
            self.places = self._find_places()
            self.current_request = min(self.places, key=lambda request: self.places[request].order_s)
            done_s = sum(request.prefill_s - place.remaining_s for request, place in self.places.items())
        self.total_prefill_s = self.own_prefill_s - done_s + peer_load.prefill_s
        current_prefill_s, current_since_s = self._find_current_prefill(peer_load)
        self.busy_since_s = max(self.oldest_since_s, peer_load.oldest_since_s, current_since_s)
        self.fixed_step_share = max(0.0, 1.0 - current_prefill_s / step_prefill_s)
        self.oldest_prefill_s = min(current_prefill_s, self.total_prefill_s)

    def _find_current_prefill(self, peer_load: PeerLoad) -> tuple[float, float]:
        """Return the seconds that remain of the prefill that the engine computes now, and since when it computes it.

        Without a prompt, these are zero and infinity.
        """
        remaining_s, since_s = 0.0, math.inf
        if self.current_request is not None:
            remaining_s = self.current_request.estimate_remaining_prefill_s()
            since_s = max(self.current_request.sent_at_s, self.progress_recorded_at_s)
        if peer_load.prefill_s > 0.0 and peer_load.oldest_sent_at_s < since_s:
            return peer_load.oldest_prefill_s, peer_load.oldest_sent_at_s
        return remaining_s, since_s

    def _find_places(self) -> dict[InFlightRequest, PrefillPlace]:
        """Return the places of the oldest requests at an engine that computes the shortest prompt first."""
        places: dict[InFlightRequest, PrefillPlace] = {}
        for request, awaited_request in itertools.islice(self.requests.items(), _EXAMINED_PREFILLS_MAX):
            remaining_s = order_s = request.estimate_remaining_prefill_s()
            if awaited_request in places:  # else there is none, or it has computed the prefix
                order_s = max(order_s, places[awaited_request].order_s)
            places[request] = PrefillPlace(order_s, remaining_s)
        return places

    def compare_places(self, order_s: float, current_done_s: float) -> tuple[float, int]:
        """Return the seconds of this router's prompts before a place in the engine's order, and the number behind it.

        For example, prompts of 0.1 s, 0.3 s and 0.8 s wait. Before a prompt of 0.5 s come 0.4 s, and one is behind it.
        `order_s`: the place. `current_done_s`: seconds of the current prompt that are computed already.
        """
        before_s, behind_count = 0.0, 0
        for request, place in self.places.items():
            done_s = current_done_s if request is self.current_request else 0.0
            if place.order_s - done_s <= order_s:
                before_s += max(place.remaining_s - done_s, 0.0)
            else:
                behind_count += 1
        prompts_per_place = len(self.requests) / max(len(self.places), 1)  # more than 1 in a long queue
        return before_s * prompts_per_place, round(behind_count * prompts_per_place)


class Target:
    """A worker, or one data-parallel rank of it, with all that its price depends on."""

    def __init__(self, worker_id: str, rank: int | None, holder: HolderId, pool: PoolSpeed) -> None:
        """Make a target to which nothing was sent yet.

        `rank`: number of the worker's data-parallel rank; None if it has one only. `holder`: id of the rank's cache in
        the prefix index. `pool`: learned speed of the workers with the same model, at which the target begins.
        """
        self.worker_id = worker_id
        self.rank = rank
        self.holder = holder
        self.name = worker_id if rank is None else f"{worker_id}#{rank}"

        self.capacity = Capacity()
        self.speed = Speed(pool)
        self.transfer_facts = NO_TRANSFERS
        self.can_prefill_for_others = False
        """Whether it may compute prompts for other workers to answer, by the roles of its worker and by its engine."""

        # Load of this router's requests, and of others.
        self.load = Load()
        self.prefill_queue = PrefillQueue()
        self.totals = RoutedTotals()
        self.peer_load = NO_PEER_LOAD
        """Sum of the loads of other routers and of `external_load`."""
        self.external_load = NO_PEER_LOAD
        """Load that the engine reports and that no router sent."""
        self.engine_load: EngineLoad | None = None
        """Last report of the engine; None if it reports nothing, or nothing lately."""

        # Derived from all these by `recompute_decode_load`.
        self.slowdown = 1.0
        """Factor by which running decodes stretch a prefill."""
        self.step_s = 0.0
        """Time of a decode step with the sequences that run now."""
        self.total_request_count = 0
        """Requests here before and after their first token, other routers' included."""
        self.mutual_step_delay_s = 0.0
        """Seconds by which the requests here lengthen a step of a new request, and it theirs, besides its context."""
        self.slot_wait_s = 0.0
        """Time that one more request would wait for a free sequence slot."""
        self.free_kv_tokens = math.inf
        """Tokens of the KV cache that no running request holds."""
        self.recompute()

    def apply_worker_spec(self, spec: WorkerSpec) -> None:
        """Set capacities and abilities from a description of the worker. Each rank has an equal part of the memory."""
        self.transfer_facts = spec.transfer
        may_prefill_for_others = not spec.roles or PREFILL_ROLE in spec.roles
        self.can_prefill_for_others = may_prefill_for_others and TransferKind.PREFILL in spec.transfer.kinds
        capacity = self.capacity
        capacity.kv_tokens = capacity.observed_kv_tokens
        if spec.cache_tokens is not None:
            capacity.kv_tokens = spec.cache_tokens // spec.ranks
        capacity.host_tokens = (spec.host_tokens or 0) // spec.ranks
        capacity.max_num_seqs = spec.max_num_seqs or MAX_NUM_SEQS_PRIOR
        self.prefill_queue.is_shortest_first = spec.is_shortest_first
        self.set_step_tokens(spec.step_tokens)
        self.recompute()

    def set_step_times(self, step_times: StepTimes) -> None:
        """Replace the learned speed of the target."""
        self.speed.set_step_times(step_times)
        self.prefill_queue.reprice(self.speed)
        self.recompute()

    def set_step_tokens(self, step_tokens: int | None) -> None:
        """Replace the most tokens of the engine's steps. None: as configured."""
        if step_tokens != self.speed.reported_step_tokens:
            self.speed.reported_step_tokens = step_tokens
            self.speed.refresh()
            self.recompute()

    def recompute(self) -> None:
        """Recompute everything that is derived, after a change of speed, loads, capacity or queue."""
        self.recompute_decode_load()
        self.recompute_queue()

    def recompute_decode_load(self) -> None:
        """Recompute the step time, the waits and the free memory, after speed, load or capacity have changed."""
        load, speed, peer_load, capacity = self.load, self.speed, self.peer_load, self.capacity
        decode_request_count = load.decode_request_count + peer_load.decode_requests
        context_tokens = load.decode_context_tokens + peer_load.decode_context_tokens
        total_request_count = load.request_count + peer_load.request_count
        self.total_request_count = total_request_count

        # Time of a decode step, and by how much the decodes stretch a prefill.
        self.step_s = (
            speed.step_s + speed.decode_request_s * decode_request_count + speed.decode_context_s * context_tokens
        )
        self.slowdown = 1.0 + self.step_s / speed.step_prefill_s
        self.mutual_step_delay_s = 2.0 * speed.decode_request_s * total_request_count
        self.mutual_step_delay_s += speed.decode_context_s * (context_tokens + load.pending_prompt_tokens)

        # Wait of one more request for a sequence slot, if all are taken.
        if load.request_count:
            load.mean_remaining_output_tokens = load.remaining_output_tokens / load.request_count
        self.slot_wait_s = 0.0
        excess_requests = total_request_count + 1 - capacity.max_num_seqs
        if excess_requests > 0:
            self.slot_wait_s = self.estimate_drain_s(excess_requests / capacity.max_num_seqs)

        self.free_kv_tokens = math.inf
        if capacity.kv_tokens is not None:
            held_tokens = context_tokens + load.pending_prompt_tokens - load.duplicate_prompt_tokens
            self.free_kv_tokens = float(capacity.kv_tokens - held_tokens)

    def recompute_queue(self) -> None:
        """Recompute what `estimate_queue_s` reads after the queue has changed."""
        self.prefill_queue.recompute(self.peer_load, self.speed.step_prefill_s)

    def estimate_prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Return P, the time to compute the uncached part of a prompt here."""
        return self.speed.estimate_prefill_s(prompt_tokens, cached_tokens)

    def estimate_queue_s(self, now: float) -> float:
        """Return Q, the remaining prefill seconds of the requests here.

        A prefill that should be done by now is assumed to take OVERDUE_SHARE of its time so far once more.
        """
        queue = self.prefill_queue
        waiting_s = queue.total_prefill_s
        if waiting_s == 0.0:
            return 0.0
        progress_s = (now - queue.busy_since_s - queue.fixed_step_share * self.step_s) / self.slowdown
        if progress_s <= 0.0:
            return waiting_s
        remaining_s, overdue_s = queue.oldest_prefill_s - progress_s, OVERDUE_SHARE * progress_s
        return waiting_s - queue.oldest_prefill_s + (remaining_s if remaining_s > overdue_s else overdue_s)

    def estimate_step_remaining_s(self, now: float) -> float:
        """Return the expected time until the engine's running step ends.

        Our engines send KV blocks to other workers only between steps. On average half of a step remains, but not more
        than the prefill that is still queued.
        """
        is_decoding = self.load.decode_request_count + self.peer_load.decode_requests > 0
        queued_prefill_s = self.estimate_queue_s(now)
        step_prefill_s = self.speed.step_prefill_s if queued_prefill_s else 0.0
        half_step_s = 0.5 * (step_prefill_s + (self.step_s if is_decoding else 0.0))
        return min(half_step_s, self.slowdown * queued_prefill_s) if queued_prefill_s else half_step_s

    def estimate_shortest_first_wait(
        self, prefill_s: float, awaited_request: InFlightRequest | None, queued_s: float
    ) -> tuple[float, int]:
        """Return the wait of a new prompt at an engine that computes the shortest first, and how many it overtakes.

        The wait is in seconds. The new prompt takes `prefill_s`, and goes behind `awaited_request`, if that is given:
        it computes a prefix of the prompt. `queued_s`: prefill seconds that are left of all prompts here, as
        `estimate_queue_s` returns them.
        """
        queue, peer_load, order_s = self.prefill_queue, self.peer_load, prefill_s
        if awaited_request is not None:
            order_s = max(prefill_s, queue.places[awaited_request].order_s)
        current_done_s = queue.total_prefill_s - queued_s  # only the current prompt makes progress
        wait_s, overtaken_count = queue.compare_places(order_s, current_done_s)
        # Of two groups of prompts only the sum is known, so all in a group count as of the group's mean length: those
        # of other routers, and those that wait for KV from another worker.
        for group_prefill_s, prompt_count in (
            (peer_load.prefill_s, peer_load.prefill_requests),
            (queue.arriving_prefill_s, self.load.incoming_transfers),
        ):
            if group_prefill_s <= order_s * prompt_count:  # their mean is at most `order_s`
                wait_s += group_prefill_s
            else:
                overtaken_count += prompt_count
        return wait_s, overtaken_count

    def estimate_prefilled_s(self, start: WorkTotals) -> float:
        """Return the time of the prefills that ended here since `start`, a copy of the work totals."""
        speed, totals = self.speed, self.speed.work_totals
        prefill_s = speed.prefill_rate * (totals.uncached_tokens - start.uncached_tokens)
        return prefill_s + speed.quadratic_rate * (totals.quadratic_work - start.quadratic_work)

    def compute_overdue_ratio(self, now: float) -> float:
        """Return the time that the current prefill has taken so far, divided by its expected time."""
        queue = self.prefill_queue
        expected_s = self.slowdown * queue.oldest_prefill_s + queue.fixed_step_share * self.step_s
        return (now - queue.busy_since_s) / expected_s

    def compute_free_share(self) -> float:
        """Return the free share of the KV memory times the free share of the sequence slots."""
        free_slots_share = 1.0 - self.total_request_count / self.capacity.max_num_seqs
        if not self.capacity.kv_tokens:
            return max(free_slots_share, 0.0)
        return max(free_slots_share, 0.0) * max(self.free_kv_tokens / self.capacity.kv_tokens, 0.0)

    def estimate_added_decode_s(self, prompt_tokens: int, output_tokens: float) -> float:
        """Return the time that the steps of an answer add to those of other requests."""
        speed = self.speed
        return output_tokens * (speed.decode_request_s + speed.decode_context_s * (prompt_tokens + 0.5 * output_tokens))

    def estimate_drain_s(self, share: float) -> float:
        """Return the time until a share, at most 1, of the requests here has ended."""
        return share * self.load.mean_remaining_output_tokens * self.step_s if self.total_request_count else 0.0

    def estimate_memory_wait_s(self, needed_tokens: float) -> float:
        """Return the time until enough requests have ended for `needed_tokens` of the KV memory to be free.

        For example, 10 requests hold 50,000 tokens, and 8,000 are missing: two requests must end, as each is assumed to
        hold 5,000. An overdue answer (longer than expected) is assumed to be half done: a few long ones can hold a
        small cache for minutes.
        """
        request_count = self.total_request_count
        if needed_tokens <= self.free_kv_tokens or self.capacity.kv_tokens is None or not request_count:
            return 0.0
        held_tokens = self.capacity.kv_tokens - self.free_kv_tokens
        if held_tokens <= 0.0:  # no running request holds memory, so none that ends frees any
            return 0.0
        missing_share = min((needed_tokens - self.free_kv_tokens) / held_tokens, 1.0)
        ending_share = math.ceil(missing_share * request_count) / request_count
        overdue_s = self.load.overdue_output_tokens / request_count * self.step_s
        return self.estimate_drain_s(ending_share) + ending_share * overdue_s

    def advance_work_totals(self, now: float) -> None:
        """Add the time since the last call to the work totals, before the counts change."""
        totals, peer_load = self.speed.work_totals, self.peer_load
        elapsed_s = now - totals.updated_at_s
        if elapsed_s <= 0.0:
            return
        totals.updated_at_s = now
        decode_request_count = self.load.decode_request_count + peer_load.decode_requests
        context_tokens = self.load.decode_context_tokens + peer_load.decode_context_tokens
        totals.uncached_tokens += elapsed_s * min(peer_load.utilisation, 1.0) / self.speed.prefill_rate
        totals.decode_request_seconds += elapsed_s * decode_request_count
        totals.context_token_seconds += elapsed_s * context_tokens
