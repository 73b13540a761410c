"""The router's core, sans IO: stimuli in, instructions out.

Every method that changes state takes `now` (seconds of one monotonic clock, never going back) and returns the
instructions that follow from it, in order; the shell performs them. Single-threaded: the shell calls it from one
thread; the index behind it may be fed by another.

A request's life: `route` -> Forward (in flight), Enqueue (kept in the queue) or Refuse (forgotten at once). In flight
it ends by `finish_request`, `abort_request` or `fail_attempt`, the last of which may start another attempt. Queued it
ends by a Forward, a Refuse or `abort_request`, at the latest one tick after its deadline. Invariants: a request is
queued or in flight, never both; in flight it has exactly one entry in the tracker and at most one pin; when all have
ended, every counter of load is zero and no pin outlives its grace."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from router.decide.cache_state import CacheState, PromptQuery
from router.decide.chooser import Chooser, Placement, RoutingChoice
from router.decide.config import CoreConfig
from router.decide.load import EngineLoad
from router.decide.messages import (
    Decision,
    Enqueue,
    FailureKind,
    Forward,
    Instruction,
    Refuse,
    ReportedUsage,
    RouteRequest,
    WorkerLost,
)
from router.decide.output_lengths import OutputLengths
from router.decide.queue import ActiveRequest, QueuePosition, RequestQueue, RetryBudget, refuse_after_failure
from router.decide.registry import CoreSnapshot, WorkerRegistry, make_worker_snapshot
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.decide.watchdog import StallDetector, Watchdog
from router.decide.workers import CacheView, CircuitBreaker, ServedModel, Worker, WorkerSpec, WorkerState
from router.decide.working_set import WorkingSets
from router.index.protocol import PrefixIndex

QUEUE_FULL_MESSAGE: Final = "The router's queue is full, or this key waits there with as much as all others could."
QUEUED_TRIES_MAX: Final = 24
"""Held requests that are tried at each first token and each tick."""
QUEUED_TRY_INTERVAL_S: Final = 0.05
CRASH_SUSPICIONS_MAX: Final = 2
"""Workers that a request may have ended or broken, after which it gets no other one."""
_FAILURES_AFTER_FIRST_BYTE: Final = (FailureKind.STALLED, FailureKind.STREAM)
_FAILURES_OF_CRASHED_WORKERS: Final = (FailureKind.INTERNAL, FailureKind.RESET, FailureKind.STREAM)
"""What a worker looks like whose process this very request ended."""
PlacementT = TypeVar("PlacementT", bound=Forward | Enqueue | Refuse)


class RouterCore:
    """Chooses a worker for each request and keeps the books. See the module's docstring."""

    def __init__(
        self, index: PrefixIndex, config: CoreConfig, *, seed: int = 0, working_sets: WorkingSets | None = None
    ) -> None:
        self.config = config
        self.index = index
        self.tracker = LoadTracker(config.service, config.cost, config.learn)
        self.cache_state = CacheState(index, config, working_sets or WorkingSets())
        self.registry = WorkerRegistry(index, self.tracker, self.cache_state, CircuitBreaker(config.health))
        self.workers: Mapping[str, Worker] = self.registry.workers
        self.watchdog = Watchdog()
        self.stall_detector = StallDetector(config.health.stalled_s)
        self.counters: Counter[str] = Counter()
        self._output_lengths = OutputLengths()
        self._rng = random.Random(seed)
        self._chooser = Chooser(self.registry, self.tracker, self.cache_state, self._output_lengths, config, self._rng)
        self._active_requests: dict[str, ActiveRequest] = {}
        self._queue = RequestQueue(config.queue)
        self._queues_when_busy = config.queue.fair and config.policy == "kv" and config.policy_function is None
        """Requests wait here while every worker is busy."""
        self._background_priority = (
            config.queue.background_priority if config.queue.background_priority is not None else math.inf
        )
        """From this priority on, a request is in the background."""
        self._next_queue_try_at_s = 0.0
        self._retry_budget = RetryBudget(config.retry)

    # Workers -----------------------------------------------------------------------------------------------------
    def add_worker(self, spec: WorkerSpec, now: float, *, is_up: bool = True) -> Worker:
        """Register a worker and its holders in the index, or update what is known of it (same worker_id)."""
        return self.registry.add_worker(spec, is_up=is_up)

    def remove_worker(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget it at once. Its requests in flight stay known until the edge reports their end."""
        if worker_id not in self.workers:
            return []
        self.watchdog.forget(worker_id)
        self.clear_worker_cache(worker_id, now)
        self.registry.remove_worker(worker_id)
        return self._place_queued(now)

    def mark_worker_up(self, worker_id: str, now: float) -> list[Instruction]:
        """A health check succeeded."""
        worker = self.workers.get(worker_id)
        if worker is None or not self.registry.breaker.record_success(worker):
            return []
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def mark_worker_down(self, worker_id: str, now: float, reason: str) -> list[Instruction]:
        """A health check failed for good: out of the candidates at once, and out of the index (WorkerLost)."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        was_down = worker.is_down
        self.registry.breaker.open(worker, now, reason)
        self.registry.apply_worker_changes()
        return [] if was_down else [self._lose_worker(worker_id, now), *self._place_queued(now)]

    def set_draining(self, worker_id: str, now: float, *, is_draining: bool = True) -> list[Instruction]:
        """Stop (or resume) giving a worker new work; what it has goes on. Raises KeyError where it is unknown."""
        self.workers[worker_id].is_drained = is_draining
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def set_asleep(self, worker_id: str, now: float, *, is_asleep: bool) -> list[Instruction]:
        """Its engine says that it sleeps, or (`is_asleep` is False) that it does not."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.is_asleep is is_asleep:
            return []
        worker.is_asleep = is_asleep
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def clear_worker_cache(self, worker_id: str, at_s: float, rank: int | None = None) -> None:
        """All that was cached at `at_s` is gone, on one rank or on all. The index is cleared by who feeds it."""
        targets = self.registry.get_targets(worker_id)
        for target in targets if rank is None else targets[rank : rank + 1]:
            earlier_prompts = [
                active_request.running_prompt
                for active_request in self._active_requests.values()
                if active_request.running_prompt is not None
                and active_request.running_prompt.target is target
                and active_request.decision is not None
                and active_request.decision.decided_s <= at_s
            ]
            self.cache_state.clear_target(target, earlier_prompts, at_s)

    def update_stalled_workers(self, last_byte_s: Mapping[str, float], now: float) -> set[str]:
        """Notice workers that stand still: others are preferred to them until they move. See StallDetector.look."""
        changed_workers = self.stall_detector.update(last_byte_s, now)
        self.registry.avoided_workers = frozenset(self.stall_detector.stalled_workers)
        return changed_workers

    def count_in_flight_by_rank(self, worker_id: str) -> list[int]:
        """Requests in flight on each rank: what an engine that is asked for its load now may have of ours."""
        return [target.load.request_count for target in self.registry.get_targets(worker_id)]

    def record_engine_load(
        self, worker_id: str, loads: Sequence[EngineLoad | None], in_flight: Sequence[int], now: float
    ) -> None:
        """The load that a worker told, or not, of each rank; `in_flight`: what `count_in_flight_by_rank` said
        when it was asked."""
        for target, load, in_flight_count in zip(self.registry.get_targets(worker_id), loads, in_flight):
            self.tracker.record_engine_load(target.name, load, now, in_flight=in_flight_count)

    def record_cache_capacity(self, worker_id: str, rank: int, capacity_tokens: int | None) -> None:
        """Number of tokens that a rank's cache holds, as its events show it: counts where a worker does not tell."""
        for target in self.registry.get_targets(worker_id)[rank : rank + 1]:
            if target.capacity.observed_kv_tokens != capacity_tokens:
                target.capacity.observed_kv_tokens = capacity_tokens
                self.cache_state.add_target(target, self.workers[worker_id].spec)
                self.registry.apply_worker_changes()

    def resolve_model(self, name: str) -> ServedModel | None:
        """What a client's model name means (base model, LoRA), or None where no worker serves it."""
        return self.registry.get_served_models().get(name)

    # A request's life --------------------------------------------------------------------------------------------
    def route(self, request: RouteRequest, now: float, *, explain: bool = False) -> Forward | Enqueue | Refuse:
        """Place a new request. `explain` fills the decision's candidates. The request id must not be live."""
        assert request.request_id not in self._active_requests, f"request {request.request_id} is already known"
        if len(self._active_requests) >= self.config.requests_max:
            self.counters["refused"] += 1
            return Refuse(request.request_id, 429, "too_many_requests", "The router is full.", 1.0)
        self._retry_budget.add_request(request.tenant)
        active_request = self._active_requests[request.request_id] = ActiveRequest(
            request, now, wants_explanation=explain
        )
        return self._forget_refused(active_request, self._place_request(active_request, now))

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """What `route` would decide, with every candidate's terms. Changes nothing but estimated first tokens."""
        rng_state = self._rng.getstate()
        choice = self._choose_worker(ActiveRequest(request, now, wants_explanation=True), now)
        self._rng.setstate(rng_state)
        return choice if isinstance(choice, Refuse) else self._chooser.make_decision(request, choice, now, explain=True)

    def has_request(self, request_id: str) -> bool:
        """Whether a request is queued or in flight."""
        return request_id in self._active_requests

    def get_prompt_query(self, request_id: str) -> PromptQuery | None:
        """Return the prompt of a request in flight; None where it is unknown, or was not read."""
        active_request = self._active_requests.get(request_id)
        if active_request is None or active_request.running_prompt is None:
            return None
        return active_request.running_prompt.query

    def find_fallback_workers(self, request_id: str, count: int, now: float) -> list[str]:
        """Up to `count` workers that could take a request in flight if its own cannot: of some drawn by chance, those
        with the shortest queues, the shortest first."""
        active_request = self._active_requests.get(request_id)
        if active_request is None or active_request.decision is None or not count:
            return []
        candidates = self.registry.find_candidates(
            active_request.request, active_request.tried_workers | {active_request.decision.worker}
        )
        if isinstance(candidates, Refuse):
            return []
        sample = self._rng.sample(candidates, min(len(candidates), 4 * count))
        sample.sort(key=lambda target: target.estimate_queue_s(now))
        return list(dict.fromkeys(target.worker_id for target in sample))[:count]

    def record_first_token(self, request_id: str, now: float) -> list[Instruction]:
        """The first byte of the answer's content came (call it for streams only)."""
        active_request = self._active_requests.get(request_id)
        if active_request is None or active_request.decision is None:
            return []
        active_request.has_first_token = True
        if self.tracker.record_first_token(request_id, now) is None:
            return []
        self.registry.record_answer(active_request.decision.worker, now)
        return self._place_queued(now)

    def record_progress(self, request_id: str, output_tokens: int, at_s: float | None = None) -> None:
        """Tokens generated so far, where the edge counts them (SSE chunks), the last of them `at_s`: refines the decode
        load, and teaches what steps take."""
        self.tracker.record_progress(request_id, output_tokens, at_s)
        active_request = self._active_requests.get(request_id)
        worker = (
            self.workers.get(active_request.decision.worker)
            if active_request is not None and active_request.decision is not None
            else None
        )
        if worker is not None and at_s is not None:
            worker.last_answer_at_s = at_s

    def finish_request(
        self, request_id: str, usage: ReportedUsage | None, now: float, *, is_error: bool = False
    ) -> list[Instruction]:
        """The whole answer was passed on. `is_error`: it is an error of the worker's, which computed nothing for it."""
        active_request = self._active_requests.pop(request_id, None)
        if active_request is None or active_request.decision is None:
            return []
        request, decision, engine_usage = active_request.request, active_request.decision, usage or ReportedUsage()
        self.counters["finished"] += 1
        if not is_error:
            self._output_lengths.record(
                request, self.tracker.record_answer(request_id, engine_usage.completion_tokens, now)
            )
        self._end_attempt(active_request, now, is_computed=not is_error, reported_cached=engine_usage.cached_tokens)
        self._end_session(request)
        self.registry.record_answer(decision.worker, now)
        worker = self.workers.get(decision.worker)
        if usage is not None and worker is not None:
            self.watchdog.record_answer(
                decision.worker,
                # Of several prompts only the first was looked for in the caches, and media are not counted.
                counted_tokens=request.prompt_tokens
                if request.token_ids is not None and request.prompt_count == 1 and request.media_conversation is None
                else None,
                prompt_tokens=engine_usage.prompt_tokens,
                predicted_cached_tokens=decision.predicted_cached_tokens,
                cached_tokens=engine_usage.cached_tokens,
                resident_tokens=decision.terms.resident_tokens,
                block_tokens=worker.spec.block_size,
            )
        return self._place_queued(now)

    def abort_request(self, request_id: str, now: float) -> list[Instruction]:
        """The client left, queued or in flight; the edge cancels upstream by itself."""
        active_request = self._active_requests.pop(request_id, None)
        if active_request is None:
            return []
        self.counters["aborted"] += 1
        if active_request.decision is None:
            self._queue.remove(request_id)
            return []
        self._end_attempt(active_request, now, is_computed=active_request.has_first_token)
        self._end_session(active_request.request)
        return self._place_queued(now)

    def fail_attempt(
        self,
        request_id: str,
        kind: FailureKind,
        now: float,
        continuation: RouteRequest | None = None,
        *,
        silent_s: float = 0.0,
        was_sent: bool = False,
    ) -> list[Instruction]:
        """An attempt failed. Before the first byte the request gets another worker while tries and budget last: the
        first Forward, Enqueue or Refuse is about it. After the first byte (STALLED, STREAM) it is forgotten without
        one, unless the edge says what the `continuation` of it is; that has no budget: what was admitted once is no
        storm. `silent_s`: how long nothing came for it. `was_sent`: the worker had it, and then refused to connect."""
        active_request = self._active_requests.get(request_id)
        if active_request is None or active_request.decision is None:
            return []
        worker_id = active_request.decision.worker
        instructions: list[Instruction] = []
        worker = self.workers.get(worker_id)
        is_probe = worker is not None and worker.probe == request_id
        self._end_attempt(active_request, now, is_computed=active_request.has_first_token)
        if worker is not None and _is_worker_fault(kind, active_request.request, worker, now - silent_s):
            is_fatal, reason = kind is FailureKind.CONNECT, f"{kind.value} failure"
            went_down = self.registry.breaker.record_failure(
                worker, now, reason=reason, is_fatal=is_fatal, is_probe=is_probe
            )
            self.registry.apply_worker_changes()
            if went_down and is_fatal:
                instructions.append(self._lose_worker(worker_id, now))
        if continuation is None and (kind in _FAILURES_AFTER_FIRST_BYTE or active_request.has_first_token):
            del self._active_requests[request_id]
            self.counters["failed"] += 1
            return instructions + self._place_queued(now)
        is_from_start = continuation is None or continuation is active_request.request
        active_request.crash_suspicions += is_from_start and (was_sent or kind in _FAILURES_OF_CRASHED_WORKERS)
        active_request.decision = None
        active_request.tried_workers |= {worker_id}
        active_request.attempt += 1
        instructions.insert(
            0,
            self._retry_request(active_request, kind, now)
            if continuation is None
            else self._continue_request(active_request, continuation, kind, now),
        )
        return instructions + self._place_queued(now)

    def move_request(
        self, request_id: str, now: float, continuation: RouteRequest | None = None, *, is_stalled: bool = False
    ) -> list[Instruction]:
        """Have another worker answer a request whose worker is lost, or the `continuation` of its answer; as
        `fail_attempt` where that is possible. Empty where the request stays: nobody else can take it, or it was tried
        often enough. `is_stalled`: the worker is up and stands still in the middle, which counts as a failure of it."""
        active_request = self._active_requests.get(request_id)
        if (
            active_request is None
            or active_request.decision is None
            or (continuation is None and active_request.has_first_token)
        ):
            return []
        candidates = self.registry.find_candidates(
            continuation or active_request.request, active_request.tried_workers | {active_request.decision.worker}
        )
        if isinstance(candidates, Refuse) or candidates[0].worker_id in self.registry.avoided_workers:
            return []
        if continuation is None and not self._retry_budget.has_retry(
            active_request.request.tenant, active_request.attempt + 1
        ):
            return []
        if self._queue.is_full(self._make_queue_position(active_request)):
            return []
        kind = FailureKind.STALLED if is_stalled and continuation is not None else FailureKind.LOST
        return self.fail_attempt(request_id, kind, now, continuation, silent_s=self.config.health.stalled_s)

    def tick(self, now: float) -> list[Instruction]:
        """Deadlines, queued requests, grace periods, breakers. Call at `next_tick()` or a little later."""
        self.tracker.advance(now)
        self.cache_state.release_expired_pins(now)
        if [worker for worker in self.registry.down_workers if self.registry.breaker.try_half_open(worker, now)]:
            self.registry.apply_worker_changes()
        due_requests = self._queue.pop_expired(now)
        instructions = [
            self._expire_queued(self._active_requests[request_id], now, refuse=refuse)
            for request_id, refuse in due_requests
        ]
        return [*instructions, *self._place_queued(now)]

    def next_tick(self) -> float | None:
        """When `tick` will next have something to do; None while nothing is pending."""
        due_times_s = [worker.open_until_s for worker in self.registry.down_workers]
        next_release_s = self.cache_state.next_release_s()
        if next_release_s is not None:
            due_times_s.append(next_release_s)
        if len(self._queue):
            due_times_s.append(min(self._next_queue_try_at_s, self._queue.next_deadline_s()))
        return min(due_times_s, default=None)

    # Placing -----------------------------------------------------------------------------------------------------
    def _place_request(
        self,
        active_request: ActiveRequest,
        now: float,
        *,
        queued_ahead_s: Mapping[str, float] | None = None,
        may_queue: bool = True,
    ) -> Forward | Enqueue | Refuse:
        """Choose, then commit or enqueue. `queued_ahead_s`: what is queued and goes first, by target; None: to be found
        out. On a Refuse the caller calls `_forget_refused`, or finds another answer."""
        choice = self._choose_worker(active_request, now, queued_ahead_s=queued_ahead_s, waits_behind_queue=may_queue)
        if isinstance(choice, Refuse):
            return choice
        request, queue = active_request.request, self.config.queue
        if (request.ttft_s_max is not None or queue.ttft_s_max is not None) and not active_request.attempt:
            refusal = self._check_ttft_limit(active_request, choice, now)
            if refusal is not None:
                return refusal
        if may_queue and request.priority >= self._background_priority:
            if self._queue.request_counts[0] or not self._has_background_room(choice.target, now):
                return self._enqueue_request(active_request, choice, now)
        elif (
            may_queue
            and self._queues_when_busy
            and (choice.wait_s > queue.enqueue_above_s or (queued_ahead_s is None and choice.queued_ahead_s))
        ):
            return self._enqueue_request(
                active_request, choice, now
            )  # or who has just come would pass by those who wait for that worker
        if len(self._queue):
            if queue.fair:
                self._queue.charge(self._make_queue_position(active_request), choice.charge_s / request.share)
            self._queue.remove(request.request_id)
        return self._commit_choice(active_request, choice, now)

    def _check_ttft_limit(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Refuse | None:
        """Return a refusal where no worker is predicted to begin in time.

        Where the winner is too late and another worker is not, the earliest worker becomes the winner.
        """
        request, config = active_request.request, self.config.queue
        ttft_limits_s = [limit for limit in (request.ttft_s_max, config.ttft_s_max) if limit is not None]
        ttft_left_s = min(ttft_limits_s) - (now - active_request.arrived_s)
        if choice.winner_terms.ttft_s <= ttft_left_s:
            return None
        choice.winner_index = min(range(len(choice.terms)), key=lambda i: choice.terms[i].ttft_s)
        terms = choice.winner_terms
        if terms.ttft_s <= ttft_left_s:
            return None
        self.counters["too_slow"] += 1
        message = f"The first token is predicted in {terms.ttft_s:.3g} s, and asked for in {min(ttft_limits_s):.3g} s"
        if terms.prefill_s + terms.tier_load_s > min(ttft_limits_s):
            alone_s = terms.prefill_s + terms.tier_load_s
            message += f": this prompt takes {alone_s:.3g} s also where nothing else runs."
            return Refuse(request.request_id, 429, "too_slow", message)
        return Refuse(request.request_id, 429, "too_slow", f"{message}.", terms.ttft_s - min(ttft_limits_s))

    def _make_queue_position(self, active_request: ActiveRequest) -> QueuePosition:
        request = active_request.request
        is_background = request.priority >= self._background_priority
        return QueuePosition(request.tenant, is_background, request.priority, active_request.arrived_s)

    def _has_background_room(self, target: Target, now: float) -> bool:
        """Whether the background may have more of it."""
        if target.estimate_queue_s(now) > 0.0 or target.slot_wait_s > 0.0 or target.prefill_queue.requests:
            return False
        return target.load.background_request_count < self.config.queue.background_running

    def _choose_worker(
        self,
        active_request: ActiveRequest,
        now: float,
        *,
        queued_ahead_s: Mapping[str, float] | None = None,
        waits_behind_queue: bool = True,
    ) -> RoutingChoice | Refuse:
        """Price the candidates. `waits_behind_queue`: the request would have to wait behind what is queued."""
        self.tracker.advance(now)
        candidates = self.registry.find_candidates(active_request.request, active_request.tried_workers)
        if isinstance(candidates, Refuse):
            return candidates
        if active_request.request.priority >= self._background_priority and waits_behind_queue:
            candidates = [target for target in candidates if self._has_background_room(target, now)] or candidates
        choice = self._chooser.choose(
            active_request.request,
            candidates,
            now,
            queued_ahead_s=queued_ahead_s,
            queued_s=self._queue.queued_prefill_s,
            explain=active_request.wants_explanation,
        )
        if waits_behind_queue and self._queues_when_busy and queued_ahead_s is None and len(self._queue):
            self._chooser.rechoose_behind_queue(
                choice, self._queue.compute_prefill_ahead(self._make_queue_position(active_request))
            )
        return choice

    def _commit_choice(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Forward:
        """Send it: count it, pin its prefix, remember its session."""
        request = active_request.request
        decision = self._chooser.make_decision(
            request,
            choice,
            now,
            explain=active_request.wants_explanation,
            attempt=active_request.attempt,
            waited_s=now - active_request.arrived_s,
        )
        # Set first, so that `abort_request` can undo the following steps if one of them raises.
        active_request.decision = decision
        target = choice.target
        self._chooser.advance_tie_rotation()
        self.tracker.add_request(
            request.request_id,
            target,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=decision.predicted_cached_tokens,
            stream=request.is_streaming,
            now=now,
            expected_tokens=choice.request_facts.output_tokens,
            tier_load_s=choice.winner_terms.tier_load_s / target.speed.tier_load.factor,
        )
        if request.priority >= self._background_priority:
            target.load.background_request_count += 1
        if choice.prompt_query is not None:
            active_request.running_prompt = self.cache_state.add_request(
                target,
                choice.prompt_query,
                now,
                cached_tokens=decision.predicted_cached_tokens,
                session=request.session,
            )
        placement = Placement(target.name, request.prompt_tokens, now)
        if request.session is not None and self.config.session_affinity:
            self._chooser.session_placements.put(request.session, placement)
        if request.media_conversation is not None:
            self._chooser.media_placements.put((request.media_conversation, request.scope), placement)
        worker = self.workers[target.worker_id]
        if worker.state is WorkerState.PROBING:
            worker.probe = request.request_id
            self.registry.apply_worker_changes()
        target.load.routed_requests += 1
        self.counters["routed"] += 1
        return Forward(request.request_id, decision)

    # The queue ---------------------------------------------------------------------------------------------------
    def _enqueue_request(self, active_request: ActiveRequest, choice: RoutingChoice, now: float) -> Enqueue | Refuse:
        request, config = active_request.request, self.config.queue
        is_queued, position = request.request_id in self._queue, self._make_queue_position(active_request)
        if not is_queued and self._queue.is_full(position):
            return Refuse(request.request_id, 429, "queue_full", QUEUE_FULL_MESSAGE, max(1.0, choice.wait_s))
        wait_s = config.background_wait_s_max if position.is_background else config.wait_s_max
        deadline_s = request.deadline_s if request.deadline_s is not None else active_request.arrived_s + wait_s
        self._queue.put(
            request.request_id,
            position,
            target=choice.target.name,
            prefill_s=choice.winner_terms.prefill_s,
            charge_s=choice.charge_s / request.share,
            deadline_s=deadline_s,
            refuse_at_deadline=request.deadline_s is not None or not position.is_background,
        )
        if not is_queued:
            self.counters["queued"] += 1
            if len(self._queue) == 1:
                self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        return Enqueue(request.request_id, deadline_s)

    def _place_queued(self, now: float) -> list[Instruction]:
        """Try the first few queued requests again; each that is placed or refused yields an instruction."""
        config = self.config.queue
        if not len(self._queue):
            return []
        self.tracker.advance(now)
        self._next_queue_try_at_s = now + QUEUED_TRY_INTERVAL_S
        instructions: list[Instruction] = []
        queued_ahead_s: dict[str, float] = {}
        for request_id in self._queue.get_next_request_ids(QUEUED_TRIES_MAX):
            if not self.tracker.has_free_target(config.enqueue_above_s, now):
                break
            active_request = self._active_requests[request_id]
            instruction = self._forget_refused(
                active_request, self._place_request(active_request, now, queued_ahead_s=queued_ahead_s)
            )
            if isinstance(instruction, Enqueue):
                target, prefill_s = self._queue.get_queued_target(request_id)
                queued_ahead_s[target] = queued_ahead_s.get(target, 0.0) + prefill_s
            else:
                instructions.append(instruction)
        return instructions

    def _expire_queued(self, active_request: ActiveRequest, now: float, *, refuse: bool) -> Forward | Refuse:
        """A queued request's deadline came."""
        self._queue.remove(active_request.request.request_id)
        if refuse:
            if (
                active_request.request.deadline_s is None
            ):  # to send it now would make all who ask for their share pay for it
                waited_s = now - active_request.arrived_s
                return self._forget_refused(
                    active_request,
                    Refuse(active_request.request.request_id, 429, "queue_full", QUEUE_FULL_MESSAGE, waited_s),
                )
            message = "The request's deadline passed while it waited in the router."
            return self._forget_refused(
                active_request, Refuse(active_request.request.request_id, 503, "deadline", message, 1.0)
            )
        self.counters["deadline_forwards"] += 1
        instruction = self._place_request(active_request, now, may_queue=False)
        assert not isinstance(instruction, Enqueue)
        return self._forget_refused(active_request, instruction)

    # Ends --------------------------------------------------------------------------------------------------------
    def _retry_request(
        self, active_request: ActiveRequest, kind: FailureKind, now: float
    ) -> Forward | Enqueue | Refuse:
        if active_request.crash_suspicions < CRASH_SUSPICIONS_MAX and self._retry_budget.spend_retry(
            active_request.request.tenant, active_request.attempt
        ):
            instruction = self._place_request(active_request, now)
            if not isinstance(instruction, Refuse):
                self.counters["retried"] += 1
                return instruction
        return self._forget_refused(
            active_request,
            refuse_after_failure(active_request.request.request_id, kind, self.registry.compute_retry_after_s(now)),
        )

    def _forget_refused(self, active_request: ActiveRequest, instruction: PlacementT) -> PlacementT:
        """What is refused is forgotten."""
        if isinstance(instruction, Refuse):
            self._queue.remove(active_request.request.request_id)
            del self._active_requests[active_request.request.request_id]
            self.counters["refused"] += 1
        return instruction

    def _continue_request(
        self, active_request: ActiveRequest, continuation: RouteRequest, kind: FailureKind, now: float
    ) -> Forward | Enqueue | Refuse:
        active_request.request, active_request.has_first_token = continuation, False
        if active_request.crash_suspicions >= CRASH_SUSPICIONS_MAX:
            return self._forget_refused(
                active_request,
                refuse_after_failure(continuation.request_id, kind, self.registry.compute_retry_after_s(now)),
            )
        instruction = self._forget_refused(active_request, self._place_request(active_request, now))
        self.counters["continued"] += not isinstance(instruction, Refuse)
        return instruction

    def _end_attempt(
        self, active_request: ActiveRequest, now: float, *, is_computed: bool, reported_cached: int | None = None
    ) -> None:
        """Take an attempt off the books. What was computed stays pinned for a grace period: its events are coming."""
        request = active_request.request
        in_flight_request = self.tracker.end_request(
            request.request_id, now, is_computed=is_computed, reported_cached=reported_cached
        )
        if in_flight_request is not None and request.priority >= self._background_priority:
            in_flight_request.target.load.background_request_count -= 1
        if active_request.running_prompt is not None:
            ended_session = request.session if request.is_final else None
            self.cache_state.end_request(
                active_request.running_prompt, now, is_computed=is_computed, ended_session=ended_session
            )
            active_request.running_prompt = None
        worker = self.workers.get(active_request.decision.worker) if active_request.decision is not None else None
        if worker is not None and worker.probe == active_request.request.request_id:
            worker.probe = None  # it told nothing, or its caller says what: the next request may be the probe
            self.registry.apply_worker_changes()

    def _end_session(self, request: RouteRequest) -> None:
        if request.is_final and request.session is not None:
            self._chooser.session_placements.forget(request.session)
            self._output_lengths.forget_session(request)

    def _lose_worker(self, worker_id: str, now: float) -> WorkerLost:
        self.clear_worker_cache(worker_id, now)
        return WorkerLost(worker_id)

    # Seeing ------------------------------------------------------------------------------------------------------
    def snapshot(self, now: float) -> CoreSnapshot:
        """What `/workers` and `/metrics` show. Changes nothing but estimated first tokens."""
        self.tracker.advance(now)
        worker_rows = []
        for worker_id, worker in self.workers.items():
            alarms = self.watchdog.alarms(worker_id, expects_events=worker.spec.cache_view is CacheView.EVENTS)
            alarms += self.stall_detector.alarms(worker_id, now)
            targets = self.registry.get_targets(worker_id)
            worker_rows += [make_worker_snapshot(worker, target, self.tracker, alarms, now) for target in targets]
        counters = dict(self.counters)
        if self._chooser.custom_policy is not None:
            counters["policy_failed"] = self._chooser.custom_policy.failures
        return CoreSnapshot(worker_rows, len(self._queue), len(self._active_requests) - len(self._queue), counters)

    def check_invariants(self) -> None:
        """Books agree with each other; called by tests after every stimulus."""
        self.tracker.check_invariants()
        self._queue.check_invariants()
        for request_id, active_request in self._active_requests.items():
            is_queued, is_in_flight = request_id in self._queue, request_id in self.tracker.in_flight_requests
            assert is_queued == (active_request.decision is None) == (not is_in_flight), (
                f"{request_id}: {is_queued=}, {is_in_flight=}, {active_request.decision}"
            )
        assert set(self.tracker.in_flight_requests) <= set(self._active_requests)
        background_counts = Counter(
            self.tracker.in_flight_requests[request_id].target.name
            for request_id, active_request in self._active_requests.items()
            if active_request.decision is not None and active_request.request.priority >= self._background_priority
        )
        for target in self.tracker.targets.values():
            assert target.load.background_request_count <= background_counts[target.name]
        prompts = [active_request.running_prompt for active_request in self._active_requests.values()]
        self.cache_state.check_invariants([prompt for prompt in prompts if prompt is not None])


def _is_worker_fault(kind: FailureKind, request: RouteRequest, worker: Worker, silent_since_s: float) -> bool:
    """Whether a failure counts for the worker's health: no client may choose that. A whole answer takes as long as its
    client wants; of a stream that is silent, the worker is to blame where it answered nobody else meanwhile."""
    if kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        return request.is_streaming and worker.last_answer_at_s <= silent_since_s
    return kind not in (FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.LOST)
