"""Placing requests: each is sent to a worker, put into the queue, or refused.

`RequestPlacer` has the candidates priced, applies the limit on the time to the first token, and lets background
requests and fair shares wait in the queue.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from router.decide.attempts import ActiveRequest, AttemptTracker
from router.decide.chooser import Chooser, RoutingChoice
from router.decide.config import CoreConfig
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Decision, Enqueue, Forward, Refuse, RouteRequest, Terms, TransferKind
from router.decide.queue import RequestQueue
from router.decide.registry import WorkerRegistry
from router.decide.target import Target

QUEUE_FULL_MESSAGE: Final = "The router's queue is full, or this key waits there with as much as all others could."
QUEUED_TRIES_MAX: Final = 24
"""Waiting requests, and as many background requests, that are tried when a worker may be free and at each tick."""
QUEUED_TRY_INTERVAL_S: Final = 0.05


class RequestPlacer:
    """Sends requests to workers, queues them or refuses them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        chooser: Chooser,
        attempts: AttemptTracker,
        config: CoreConfig,
        counters: Counter[str],
    ) -> None:
        """Begin without requests, with the other parts of the router's core.

        `counters`: counts of events, by the names that `/metrics` shows.
        """
        self._registry = registry
        self._tracker = tracker
        self._chooser = chooser
        self._attempts = attempts
        self._config = config
        self._counters = counters
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

    def place(self, active_request: ActiveRequest, now: float) -> Forward | Enqueue | Refuse:
        """Send a request to a worker, queue it or refuse it: a new request, or one with a failed attempt."""
        return self._place(active_request, self._find_prefill_ahead(active_request), now, may_overtake=False)

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """Return the worker that `place` would choose for a new request, with the terms of every candidate."""
        active_request = self.make_active_request(request, now, wants_explanation=True)
        choice = self._choose_worker(active_request, self._find_prefill_ahead(active_request), now)
        return choice if isinstance(choice, Refuse) else self._make_decision(active_request, choice, now)

    def _find_prefill_ahead(self, active_request: ActiveRequest) -> Mapping[str, float]:
        """Return the prefill seconds of queued requests that have their turn before a request, by target."""
        has_to_wait = self._queues_when_busy and bool(self.queue.requests)
        return self.queue.compute_prefill_ahead(active_request) if has_to_wait else {}

    def _place(
        self,
        active_request: ActiveRequest,
        queued_ahead_s: Mapping[str, float],
        now: float,
        *,
        may_overtake: bool = True,
        may_queue: bool = True,
    ) -> Forward | Enqueue | Refuse:
        """Choose a worker for a request, and send the request there, queue it, or refuse it.

        `queued_ahead_s`: prefill seconds by target that will be sent before this request and that count as its wait.
        Without `may_overtake`, the request is queued if there are any at its target. Without `may_queue`, it is sent or
        refused.
        """
        choice = self._choose_worker(active_request, queued_ahead_s, now, may_queue=may_queue)
        if isinstance(choice, Refuse):
            return choice
        if not active_request.failed_attempts:
            refusal = self._apply_ttft_limit(active_request, choice, now)
            if refusal is not None:
                return refusal
        if may_queue and self._must_wait(active_request, choice, now, may_overtake=may_overtake):
            return self._enqueue(active_request, choice, now)
        if self.queue.requests:
            self.queue.record_sent(active_request, _compute_charge_s(active_request, choice))
        decision = self._make_decision(active_request, choice, now)
        self._attempts.begin_attempt(active_request, choice, decision, now)
        self._chooser.commit(choice, now)
        self._counters["routed"] += 1
        return Forward(decision.request_id, decision)

    def _choose_worker(
        self, active_request: ActiveRequest, queued_ahead_s: Mapping[str, float], now: float, *, may_queue: bool = True
    ) -> RoutingChoice | Refuse:
        """Price the workers that can serve a request and choose one; return a refusal if there is none.

        With `may_queue`, a background request gets an idle worker, if there is one.
        """
        self._tracker.advance(now)
        request = active_request.request
        candidates = self._registry.find_candidates(request, active_request.excluded_workers)
        if isinstance(candidates, Refuse):
            return candidates
        if may_queue and active_request.is_background:
            candidates = [target for target in candidates if self._is_idle(target, now)] or candidates
        choice = self._chooser.choose(
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
        self, active_request: ActiveRequest, choice: RoutingChoice, now: float, *, may_overtake: bool
    ) -> bool:
        """Return whether a request has to wait in the queue although a worker was chosen for it.

        A background request waits until the chosen worker is idle and no request waits. With fair queueing, other
        requests wait if their worker is busy, or if they would overtake queued requests.
        """
        if active_request.is_background:
            winner = choice.winner
            computing_targets = [winner.target]
            if winner.plan is not None and winner.plan.transfer.kind is TransferKind.PREFILL:
                computing_targets.append(winner.plan.source.target)
            return self.queue.waiting_count > 0 or not all(self._is_idle(target, now) for target in computing_targets)
        if not self._queues_when_busy:
            return False
        would_overtake = not may_overtake and choice.winner.queued_ahead_s > 0.0
        return would_overtake or choice.wait_s > self._config.queue.enqueue_above_s

    def _is_idle(self, target: Target, now: float) -> bool:
        """Return whether a target is idle enough for one more background request."""
        if target.estimate_queue_s(now) > 0.0 or target.slot_wait_s > 0.0 or target.prefill_queue.requests:
            return False
        return target.load.background_request_count < self._config.queue.background_running

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
            decision.not_eligible = self._registry.find_ineligibility_reasons(request, now)
        return decision

    # The queue ---------------------------------------------------------------------------------------------------
    def _enqueue(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Enqueue | Refuse:
        """Queue a request, or record the new choice of one that is queued; return a refusal if there is no place."""
        request_id = active_request.request.request_id
        is_new = request_id not in self.queue.requests
        if is_new and self.queue.is_full(active_request):
            return Refuse(request_id, 429, "queue_full", QUEUE_FULL_MESSAGE, max(1.0, choice.wait_s))
        winner, charge_s = choice.winner, _compute_charge_s(active_request, choice)
        target, prefill_s = winner.target.name, winner.terms.prefill_s
        if not is_new:
            self.queue.move(request_id, target=target, prefill_s=prefill_s, charge_s=charge_s)
            return Enqueue(request_id)
        self.queue.add(active_request, target=target, prefill_s=prefill_s, charge_s=charge_s)
        self._counters["queued"] += 1
        if len(self.queue.requests) == 1:
            self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        return Enqueue(request_id)

    def place_queued(self, now: float) -> Iterator[Forward | Refuse]:
        """Try to send the first queued requests; yield an instruction for each that leaves the queue.

        A request that has to stay keeps its turn: its prefill counts as waiting time for the requests after it.
        """
        self._tracker.advance(now)
        self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        queued_ahead_s_by_target: defaultdict[str, float] = defaultdict(float)
        for request_id in self.queue.get_next_request_ids(QUEUED_TRIES_MAX):
            if not self._tracker.has_free_target(self._config.queue.enqueue_above_s, now):
                break  # every worker is busy, so that all further requests would stay too
            queued_request = self.queue.requests[request_id]
            instruction = self._place(queued_request.active_request, queued_ahead_s_by_target, now)
            if isinstance(instruction, Enqueue):
                queued_ahead_s_by_target[queued_request.target] += queued_request.prefill_s
            else:
                self.queue.remove(request_id)
                yield instruction

    def place_expired(self, now: float) -> Iterator[Forward | Refuse]:
        """Refuse the queued requests that have reached their deadlines, or send those of the background."""
        for active_request in self.queue.pop_expired(now):
            if active_request.request.deadline_s is not None or not active_request.is_background:
                yield _refuse_expired(active_request, now)
                continue
            self._counters["deadline_forwards"] += 1
            instruction = self._place(active_request, {}, now, may_queue=False)
            assert not isinstance(instruction, Enqueue)
            yield instruction

    def next_queue_tick(self) -> float | None:
        """Return when the queue next has something to do; None while it is empty."""
        return min(self._next_queue_try_at_s, self.queue.next_deadline_s()) if self.queue.requests else None


def _compute_charge_s(active_request: ActiveRequest, choice: RoutingChoice) -> float:
    """Return what a tenant is charged for a request: with twice the share, it gets twice the workers' time."""
    return choice.charge_s / active_request.request.share


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
