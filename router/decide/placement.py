"""Placing requests: each is sent to a worker, put into the queue, or refused.

`RequestPlacer` has the candidates priced, applies the limit on the time to the first token, and lets background
requests and fair shares wait in the queue. Each request that it sends to a worker counts there until `end_attempt`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

import msgspec

from router.decide.cache_state import CacheState
from router.decide.chooser import Chooser, RoutingChoice
from router.decide.config import CoreConfig
from router.decide.messages import Decision, Enqueue, Forward, Refuse, RouteRequest, Terms
from router.decide.output_lengths import OutputLengths
from router.decide.queue import QueuePosition, RequestQueue
from router.decide.registry import WorkerRegistry
from router.decide.speed import WorkTotals
from router.decide.target import InFlightRequest, PromptQuery, Target
from router.decide.tracker import LoadTracker
from router.decide.transfers.links import TransferEstimate, TransferLinks
from router.decide.workers import WorkerState

QUEUE_FULL_MESSAGE: Final = "The router's queue is full, or this key waits there with as much as all others could."
QUEUED_TRIES_MAX: Final = 24
"""Waiting requests, and as many background requests, that are tried when a worker may be free and at each tick."""
QUEUED_TRY_INTERVAL_S: Final = 0.05
OTHERS_SHARE_MAX: Final = 0.5
"""Greatest share of other prompts in the wait for a first token from which the time of a KV transfer is learned."""


class TransferTiming(msgspec.Struct, eq=False):
    """Start of a KV transfer to a worker, and its duration, from which the speed of later transfers is learned."""

    estimate: TransferEstimate
    """Expected duration."""
    started_s: float
    start_totals: WorkTotals
    """Work that the receiving worker had done when the transfer started."""
    duration_s: float | None = None
    """None until the first token, and after it if that may have waited longer for something else."""


class Attempt(msgspec.Struct, eq=False):
    """One try of a request at a worker, to which KV of the prompt may come from another worker."""

    decision: Decision
    in_flight: InFlightRequest
    """The request as it counts in the load and the expected cache contents of its worker."""
    has_first_token: bool = False
    prefill_leg: InFlightRequest | None = None
    """The prefill at another worker, which then sends the KV; None if there is none, or once it has ended."""
    transfer_timing: TransferTiming | None = None
    """None if no KV transfer has started so far, or if its duration will not be known."""
    has_transfer_failed: bool = False

    def list_in_flight(self) -> list[InFlightRequest]:
        """Return what the load tracker and the cache state count for the attempt."""
        return [self.in_flight] if self.prefill_leg is None else [self.in_flight, self.prefill_leg]

    def observe_transfer(self, now: float) -> None:
        """Derive the duration of the attempt's KV transfer, if there is one, at the request's first token.

        For example, the first token comes 0.9 s after the transfer began, and the rest of the prompt takes 0.2 s. If
        other prompts took 0.1 s of the 0.7 s that are left, the transfer took 0.6 s. Nothing is derived if they took
        more than half of that time, or if the request also waited for a sequence slot.
        """
        timing, terms, target = self.transfer_timing, self.decision.terms, self.in_flight.target
        has_waited_for_slot = terms.slot_wait_s > 0.0
        if timing is None or has_waited_for_slot:
            return
        prefill_s = self.in_flight.prefill_s
        own_prefill_s = max(terms.slowdown * prefill_s, prefill_s + target.step_s)
        waited_s = now - timing.started_s - own_prefill_s
        other_prefills_s = terms.slowdown * target.estimate_prefilled_s(timing.start_totals)
        if other_prefills_s <= OTHERS_SHARE_MAX * waited_s:
            timing.duration_s = waited_s - other_prefills_s


class ActiveRequest(msgspec.Struct, eq=False):
    """A request from its arrival to the end of its answer, and what its failed attempts have shown.

    Each try to serve it at a worker is an attempt. After a failed one the request may get another at another worker.
    """

    request: RouteRequest
    arrived_s: float
    """When the request came, on the router's clock."""
    wants_explanation: bool
    """Whether its decisions carry the terms of every candidate."""
    is_background: bool
    """Whether the request waits until a worker is idle."""
    attempt: Attempt | None = None
    """The present attempt; None while the request is queued."""
    failed_attempts: int = 0
    tried_workers: frozenset[str] = frozenset()
    """Workers of the failed attempts, which are not chosen again. A 429 is in `refused_by` alone."""
    tried_sources: frozenset[str] = frozenset()
    """Workers that failed to give KV to this request."""
    crash_suspicions: int = 0
    """Workers that this request may have crashed."""
    refused_by: frozenset[str] = frozenset()
    """Workers that answered 429 or 5xx since the last first token, or closed the connection without an answer."""

    @property
    def queue_position(self) -> QueuePosition:
        """Tenant, priority and age, which decide when the request is sent if it has to wait in the queue."""
        request = self.request
        return QueuePosition(request.tenant, self.is_background, request.priority, self.arrived_s)

    @property
    def excluded_workers(self) -> frozenset[str]:
        """Workers that the next attempt may not go to."""
        return self.tried_workers | self.refused_by

    @property
    def excluded_sources(self) -> frozenset[str]:
        """Workers that KV of this request comes from only if it must, and no other worker can give it."""
        return self.excluded_workers | self.tried_sources


class RequestPlacer:
    """Sends requests to workers, queues them or refuses them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        cache_state: CacheState,
        links: TransferLinks,
        config: CoreConfig,
        rng: random.Random,
        counters: Counter[str],
    ) -> None:
        """Begin without requests, with the other parts of the router's core.

        `counters`: counts of events, by the names that `/metrics` shows.
        """
        self._registry = registry
        self._tracker = tracker
        self._cache_state = cache_state
        self._links = links
        self._config = config
        self._rng = rng
        self._counters = counters
        self._output_lengths = OutputLengths()
        self.chooser = Chooser(registry, tracker, cache_state, self._output_lengths, links, config, rng)

        self.queue = RequestQueue(config.queue)
        uses_price = config.policy == "kv" and config.policy_function is None
        self._queues_when_busy = config.queue.fair and uses_price
        """Whether requests wait in the router while every worker is busy: only the price tells how busy they are."""
        priority = config.queue.background_priority
        self._background_priority = math.inf if priority is None else priority
        """From this priority on, a request is in the background; without a setting, none is."""
        self._next_queue_try_at_s = 0.0
        """Time at which the first queued requests are tried again."""

    # New requests and retries ------------------------------------------------------------------------------------
    def make_active_request(self, request: RouteRequest, now: float, *, wants_explanation: bool) -> ActiveRequest:
        """Return the record of a new request."""
        return ActiveRequest(request, now, wants_explanation, request.priority >= self._background_priority)

    def place(
        self,
        active_request: ActiveRequest,
        now: float,
        *,
        queued_ahead_s: Mapping[str, float] | None = None,
        may_queue: bool = True,
    ) -> Forward | Enqueue | Refuse:
        """Choose a worker for a request, and send the request there, queue it, or refuse it.

        `queued_ahead_s`: prefill seconds of the queued requests that will be sent before this one, by target. They are
        given for a queued request that has its turn, and None for a new one. Without `may_queue` the request is sent or
        refused.
        """
        is_its_turn = queued_ahead_s is not None
        choice = self._choose_worker(active_request, now, queued_ahead_s=queued_ahead_s, waits_behind_queue=may_queue)
        if isinstance(choice, Refuse):
            return choice
        if not active_request.failed_attempts:
            refusal = self._apply_ttft_limit(active_request, choice, now)
            if refusal is not None:
                return refusal
        if may_queue and self._must_wait(active_request, choice, now, is_its_turn=is_its_turn):
            return self._enqueue(active_request, choice, now)
        if self.queue.requests:
            request = active_request.request
            if self._config.queue.fair:
                self.queue.charge(active_request.queue_position, choice.charge_s / request.share)
            self.queue.remove(request.request_id)
        return self._begin_attempt(active_request, choice, now)

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """Return the worker that `place` would choose for a new request, with the terms of every candidate."""
        rng_state = self._rng.getstate()
        active_request = self.make_active_request(request, now, wants_explanation=True)
        choice = self._choose_worker(active_request, now)
        self._rng.setstate(rng_state)
        return choice if isinstance(choice, Refuse) else self._make_decision(active_request, choice, now)

    def _choose_worker(
        self,
        active_request: ActiveRequest,
        now: float,
        *,
        queued_ahead_s: Mapping[str, float] | None = None,
        waits_behind_queue: bool = True,
    ) -> RoutingChoice | Refuse:
        """Price the workers that can serve a request and choose one; return a refusal if there is none.

        `waits_behind_queue`: the request may not overtake queued requests, so their prefills count as waiting time.
        `queued_ahead_s`: these prefill seconds, by target; None: look them up.
        """
        self._tracker.advance(now)
        request = active_request.request
        candidates = self._registry.find_candidates(request, active_request.excluded_workers)
        if isinstance(candidates, Refuse):
            return candidates
        if waits_behind_queue and active_request.is_background:  # only idle workers, if there are any
            candidates = [target for target in candidates if self._is_idle(target, now)] or candidates
        if queued_ahead_s is None:
            waits_behind_others = waits_behind_queue and self._queues_when_busy and bool(self.queue.requests)
            position = active_request.queue_position
            queued_ahead_s = self.queue.compute_prefill_ahead(position) if waits_behind_others else {}
        choice = self.chooser.choose(
            request,
            candidates,
            now,
            queued_ahead_s=queued_ahead_s,
            queued_s=self.queue.waiting_prefill_s,
            explain=active_request.wants_explanation,
            excluded_sources=active_request.excluded_sources,
        )
        if choice.winner.is_missing_source:
            message = "Every worker that could compute the prompt failed."
            return Refuse(request.request_id, 502, "upstream_failed", message)
        return choice

    def _apply_ttft_limit(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Refuse | None:
        """Apply the limit on the time to the first token, if there is one; return a refusal if no worker can keep it.

        If the chosen worker is predicted to be too late, the one with the earliest first token is chosen instead.
        """
        request_limit_s, default_limit_s = active_request.request.ttft_s_max, self._config.queue.ttft_s_max
        limits_s = [limit_s for limit_s in (request_limit_s, default_limit_s) if limit_s is not None]
        if not limits_s:
            return None
        max_ttft_s = min(limits_s)
        remaining_s = max_ttft_s - (now - active_request.arrived_s)
        if choice.winner.terms.ttft_s > remaining_s:
            choice.winner = choice.find_earliest()
        if choice.winner.terms.ttft_s <= remaining_s:
            return None
        self._counters["too_slow"] += 1
        return _refuse_slow(active_request.request.request_id, choice.winner.terms, max_ttft_s)

    def _must_wait(
        self, active_request: ActiveRequest, choice: RoutingChoice, now: float, *, is_its_turn: bool
    ) -> bool:
        """Return whether a request has to wait in the queue although a worker was chosen for it.

        A background request waits until the chosen worker is idle and no request waits. With fair queueing, other
        requests wait if their worker is busy, or if they would overtake queued requests.
        """
        if active_request.is_background:
            return self.queue.waiting_count > 0 or not self._has_background_room(choice, now)
        if not self._queues_when_busy:
            return False
        would_overtake = not is_its_turn and choice.winner.queued_ahead_s > 0.0
        return would_overtake or choice.wait_s > self._config.queue.enqueue_above_s

    def _has_background_room(self, choice: RoutingChoice, now: float) -> bool:
        """Return whether the targets of a choice are idle enough for one more background request."""
        plan = choice.winner.plan
        if plan is not None and plan.source_terms is not None and not self._is_idle(plan.source, now):
            return False
        return self._is_idle(choice.winner.target, now)

    def _is_idle(self, target: Target, now: float) -> bool:
        """Return whether a target is idle enough for one more background request."""
        if target.estimate_queue_s(now) > 0.0 or target.slot_wait_s > 0.0 or target.prefill_queue.requests:
            return False
        return target.load.background_request_count < self._config.queue.background_running

    # Attempts ----------------------------------------------------------------------------------------------------
    def _begin_attempt(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Forward:
        """Count a request at the chosen worker, as load and as cached there, and return the instruction to send it."""
        request, target = active_request.request, choice.winner.target
        decision = self._make_decision(active_request, choice, now)
        in_flight = self._add_load(active_request, choice, now)
        # The attempt is set now: if a later step raises, `end_attempt` can undo those before it.
        attempt = active_request.attempt = Attempt(decision, in_flight)
        if choice.prompt_query is not None:
            self._cache_state.add_request(in_flight, choice.prompt_query, now, session=choice.request.session)
        if decision.is_split:  # another worker computes the prompt, and then its KV moves here
            self._start_prefill_leg(attempt, choice.prompt_query, now)
        elif decision.transfer is not None:  # another worker has the KV cached
            self._start_transfer(attempt, now)
        self._start_probe(request, target)
        self.chooser.commit(choice, now)
        self._counters["routed"] += 1
        return Forward(request.request_id, decision)

    def _make_decision(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Decision:
        """Return a choice in the form in which it is reported: worker, prediction and price.

        With an explanation, it has the prices of all candidates, and for other workers the reason why they are none.
        """
        request, winner, most_cached = choice.request, choice.winner, choice.find_most_cached()
        decision = Decision(
            request_id=request.request_id,
            worker=winner.target.worker_id,
            rank=winner.target.rank,
            attempt=active_request.failed_attempts,
            prompt_tokens=request.prompt_tokens,
            predicted_cached_tokens=winner.cached_tokens,
            predicted_ttft_s=winner.terms.ttft_s,
            terms=winner.terms,
            decided_s=now,
            queued_s=now - active_request.arrived_s,
            most_cached=None if most_cached is winner else most_cached.terms,
        )
        if active_request.wants_explanation:
            all_terms = [candidate.terms for candidate in choice.candidates]
            decision.candidates = sorted(all_terms, key=lambda terms: terms.cost)
            decision.not_eligible = self._registry.find_ineligibility_reasons(request)
        return decision

    def _add_load(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> InFlightRequest:
        """Count a request in the load of the chosen worker."""
        request, winner, plan = active_request.request, choice.winner, choice.winner.plan
        return self._tracker.add_request(
            winner.target,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=winner.cached_tokens if plan is None else max(winner.cached_tokens, plan.arriving_tokens),
            is_streaming=request.is_streaming,
            now=now,
            expected_output_tokens=choice.request_facts.output_tokens,
            candidate=winner,
            is_background=active_request.is_background,
        )

    def _start_probe(self, request: RouteRequest, target: Target) -> None:
        """If the worker failed lately, let this request alone show whether the worker serves again."""
        worker = self._registry.workers[target.worker_id]
        if worker.health is WorkerState.PROBING:
            worker.probe = request.request_id
            self._registry.apply_worker_changes()

    def _start_prefill_leg(self, attempt: Attempt, prompt_query: PromptQuery | None, now: float) -> None:
        """Count the prompt of a split attempt at its source, the worker that computes the KV and then hands it over."""
        decision, source = attempt.decision, attempt.in_flight.source
        assert source is not None
        in_flight = self._tracker.add_request(
            source,
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=decision.predicted_cached_tokens,
            is_streaming=True,
            now=now,
        )
        attempt.prefill_leg = in_flight
        if prompt_query is not None:
            self._cache_state.add_request(in_flight, prompt_query, now)

    def _start_transfer(self, attempt: Attempt, now: float) -> None:
        """Count the transfer of an attempt's KV from now on."""
        in_flight, transfer, source = attempt.in_flight, attempt.decision.transfer, attempt.in_flight.source
        assert transfer is not None
        assert source is not None
        estimate = self._links.estimate(source, in_flight.target, transfer.tokens, now)
        start_totals = msgspec.structs.replace(in_flight.target.speed.work_totals)
        attempt.transfer_timing = TransferTiming(estimate, now, start_totals)
        self._tracker.start_transfer(in_flight, transfer.transfer_s, now)

    def end_prefill_leg(
        self, attempt: Attempt, now: float, *, is_computed: bool, reported_cached_tokens: int | None = None
    ) -> None:
        """End the prefill of an attempt at another worker, if it has one. If it was computed, its KV moves now."""
        leg, attempt.prefill_leg = attempt.prefill_leg, None
        if leg is None:
            return
        if is_computed:
            self._tracker.record_first_token(leg, now)
        self._tracker.end_request(leg, now, is_computed=is_computed, reported_cached_tokens=reported_cached_tokens)
        self._cache_state.end_request(leg, now, is_computed=is_computed)
        if is_computed:
            self._start_transfer(attempt, now)

    def record_transfer(self, attempt: Attempt, now: float) -> None:
        """Learn from the transfer of an attempt whose answer is complete, unless the transfer failed."""
        source, target, timing = attempt.in_flight.source, attempt.in_flight.target, attempt.transfer_timing
        if source is None or attempt.has_transfer_failed:
            return
        self._links.record_success(source.name, target.name)
        if timing is not None and timing.duration_s is not None:
            self._links.learn_speed(source.name, target.name, timing.estimate, timing.duration_s, now)

    def compute_without_transfer(self, attempt: Attempt, now: float, *, is_pair_fault: bool = True) -> None:
        """Have the target of an attempt compute its prompt itself. `is_pair_fault`: avoid the pair for a while."""
        in_flight, decision = attempt.in_flight, attempt.decision
        if in_flight.source is None or attempt.has_transfer_failed:
            return
        attempt.has_transfer_failed = True
        if is_pair_fault:
            self._links.record_failure(in_flight.source.name, in_flight.target.name, now)
        self.end_prefill_leg(attempt, now, is_computed=False)
        self._counters["failed_transfers"] += 1
        decision.predicted_cached_tokens = decision.terms.resident_tokens
        self._tracker.fail_transfer(in_flight, decision.predicted_cached_tokens, now)

    def record_answer(self, active_request: ActiveRequest, completion_tokens: int | None, now: float) -> None:
        """Learn from a whole answer how long answers are and how fast its worker is."""
        assert active_request.attempt is not None
        output_tokens = self._tracker.record_answer(active_request.attempt.in_flight, completion_tokens, now)
        self._output_lengths.record_length(active_request.request, output_tokens)

    def end_attempt(
        self, active_request: ActiveRequest, now: float, *, is_computed: bool, reported_cached_tokens: int | None = None
    ) -> None:
        """End the present attempt of a request: its worker's load and expected cache no longer count it.

        `is_computed`: the prompt was computed, so it is cached there. `reported_cached_tokens`: by the engine's answer.
        """
        request, attempt = active_request.request, active_request.attempt
        assert attempt is not None
        active_request.attempt = None
        if attempt.prefill_leg is not None:
            self.end_prefill_leg(attempt, now, is_computed=False)
        in_flight = attempt.in_flight
        self._tracker.end_request(
            in_flight, now, is_computed=is_computed, reported_cached_tokens=reported_cached_tokens
        )
        ended_session = request.session if request.is_final else None
        self._cache_state.end_request(in_flight, now, is_computed=is_computed, ended_session=ended_session)
        worker = self._registry.workers.get(attempt.decision.worker)
        if worker is not None and worker.probe == request.request_id:
            worker.probe = None  # another request may now try whether the worker serves again
            self._registry.apply_worker_changes()

    def end_session(self, request: RouteRequest) -> None:
        """Forget the session of a request, where the request says that it is the session's last."""
        if request.is_final and request.session is not None:
            self.chooser.session_placements.pop(request.session, None)
            self._output_lengths.forget_session(request)

    # The queue ---------------------------------------------------------------------------------------------------
    def _enqueue(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Enqueue | Refuse:
        """Put a request into the queue; if it is there already, record its newly chosen worker.

        The request waits for its turn until its own deadline, or else for the longest wait of the configuration. Return
        a refusal if the queue is full.
        """
        request, position, config = active_request.request, active_request.queue_position, self._config.queue
        is_new = request.request_id not in self.queue.requests
        if is_new and self.queue.is_full(position):
            return Refuse(request.request_id, 429, "queue_full", QUEUE_FULL_MESSAGE, max(1.0, choice.wait_s))
        deadline_s = request.deadline_s
        if deadline_s is None:
            max_wait_s = config.background_wait_s_max if position.is_background else config.wait_s_max
            deadline_s = active_request.arrived_s + max_wait_s
        self.queue.put(
            request.request_id,
            position,
            target=choice.winner.target.name,
            prefill_s=choice.winner.terms.prefill_s,
            charge_s=choice.charge_s / request.share,  # a tenant with twice the share gets twice the time
            deadline_s=deadline_s,
            refuse_at_deadline=request.deadline_s is not None or not position.is_background,
        )
        if is_new:
            self._counters["queued"] += 1
            if len(self.queue.requests) == 1:
                self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        return Enqueue(request.request_id, deadline_s)

    def place_queued(self, active_requests: Mapping[str, ActiveRequest], now: float) -> list[Forward | Refuse]:
        """Try to send the first queued requests; return an instruction for each that leaves the queue.

        A request that has to stay keeps its turn: its prefill counts as waiting time for the requests after it.
        `active_requests`: requests by id.
        """
        self._tracker.advance(now)
        self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        instructions: list[Forward | Refuse] = []
        queued_ahead_s_by_target: defaultdict[str, float] = defaultdict(float)
        for request_id in self.queue.get_next_request_ids(QUEUED_TRIES_MAX):
            if not self._tracker.has_free_target(self._config.queue.enqueue_above_s, now):
                break  # every worker is busy, so that all further requests would stay too
            instruction = self.place(active_requests[request_id], now, queued_ahead_s=queued_ahead_s_by_target)
            if isinstance(instruction, Enqueue):
                queued_request = self.queue.requests[request_id]
                queued_ahead_s_by_target[queued_request.target] += queued_request.prefill_s
            else:
                self.queue.remove(request_id)
                instructions.append(instruction)
        return instructions

    def place_expired(self, active_requests: Mapping[str, ActiveRequest], now: float) -> list[Forward | Refuse]:
        """Forward or refuse the queued requests that have reached their deadlines."""
        instructions: list[Forward | Refuse] = []
        for queued_request in self.queue.pop_expired(now):
            self.queue.remove(queued_request.request_id)
            active_request = active_requests[queued_request.request_id]
            if queued_request.refuse_at_deadline:
                instructions.append(_refuse_expired(active_request, now))
                continue
            self._counters["deadline_forwards"] += 1
            instruction = self.place(active_request, now, may_queue=False)
            assert not isinstance(instruction, Enqueue)
            instructions.append(instruction)
        return instructions

    def next_queue_tick(self) -> float | None:
        """Return when the queue next has something to do; None while it is empty."""
        return min(self._next_queue_try_at_s, self.queue.next_deadline_s()) if self.queue.requests else None


def _refuse_slow(request_id: str, terms: Terms, max_ttft_s: float) -> Refuse:
    """Return the refusal of a request that has `terms` at the earliest worker, and may wait for `max_ttft_s`."""
    message = f"The first token is predicted in {terms.ttft_s:.3g} s, and asked for in {max_ttft_s:.3g} s"
    idle_ttft_s = terms.prefill_s + terms.tier_load_s
    if idle_ttft_s > max_ttft_s:
        message += f": this prompt takes {idle_ttft_s:.3g} s also where nothing else runs."
        return Refuse(request_id, 429, "too_slow", message)
    return Refuse(request_id, 429, "too_slow", f"{message}.", retry_after_s=terms.ttft_s - max_ttft_s)


def _refuse_expired(active_request: ActiveRequest, now: float) -> Refuse:
    """Return the refusal of a queued request that has reached its deadline."""
    request_id = active_request.request.request_id
    if active_request.request.deadline_s is None:  # sent now, it would take from the shares of all others
        waited_s = now - active_request.arrived_s
        message = f"The request waited {waited_s:.3g} s in the router's queue, and its turn did not come."
        return Refuse(request_id, 429, "queue_full", message, waited_s)
    return Refuse(request_id, 503, "deadline", "The request's deadline passed while it waited in the router.", 1.0)
