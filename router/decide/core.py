"""The router's core, sans IO: stimuli in, instructions out.

Times are seconds of one monotonic clock, never going back. Methods return the instructions that follow from a stimulus,
in order, if any can; the shell performs them. Single-threaded: the shell calls it from one
thread; the index behind it may be fed by another.

`route` answers a new request with Forward (in flight), Enqueue (queued) or Refuse (forgotten). A request in flight ends
by `finish_request`, `abort_request` or `fail_attempt`; the latter may begin another attempt. A Forward, a Refuse or
`abort_request` ends a wait in the queue, at the latest one tick after the deadline. Invariants: a request is queued or
has an attempt, never both; when all requests have ended, every counter of load is zero.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from router.decide.attempts import ActiveRequest, Attempt, AttemptTracker, RetryBudget
from router.decide.cache_state import CacheState
from router.decide.chooser import Chooser
from router.decide.circuit_breaker import CircuitBreaker, is_worker_fault
from router.decide.config import CoreConfig
from router.decide.load import EngineLoad
from router.decide.load_tracker import LoadTracker
from router.decide.messages import (
    REFUSALS,
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
from router.decide.placement import RequestPlacer
from router.decide.recent_prompts import RecentPrompts
from router.decide.registry import CoreSnapshot, WorkerRegistry, describe_target
from router.decide.target import PromptQuery
from router.decide.transfers.links import TransferLinks
from router.decide.watchdog import StallDetector, Watchdog
from router.decide.workers import (
    CacheView,
    ServedModel,
    Worker,
    WorkerSpec,
    WorkerState,
)
from router.index.protocol import PrefixIndex

CRASH_SUSPICIONS_MAX: Final = 2
"""Workers that a request may have crashed; after as many it gets no other one."""
_FAILURES_AFTER_FIRST_BYTE: Final = (FailureKind.STALLED, FailureKind.STREAM)
_FAILURES_OF_CRASHED_WORKERS: Final = (FailureKind.INTERNAL, FailureKind.RESET, FailureKind.STREAM)
"""Failures that a request sees when it crashes its worker."""
PlacementT = TypeVar("PlacementT", bound=Forward | Enqueue | Refuse)


class RouterCore:
    """Chooses a worker for each request and follows the request to its end. See the module's docstring."""

    def __init__(
        self, index: PrefixIndex, config: CoreConfig, *, seed: int = 0, recent_prompts: RecentPrompts | None = None
    ) -> None:
        """Make a core without workers. `index`: prefixes that the workers have cached. `seed`: of random choices."""
        self.config = config
        self.counters: Counter[str] = Counter()
        """Counts of events, by the names that `/metrics` shows."""

        # What is known of the workers.
        self.index = index
        self.tracker = LoadTracker(config.service, config.cost, config.learn)
        self.cache_state = CacheState(index, config, recent_prompts or RecentPrompts())
        self.tracker.on_kv_arrival = self.cache_state.pin
        self.registry = WorkerRegistry(index, self.tracker, self.cache_state, CircuitBreaker(config.health))
        self.workers: Mapping[str, Worker] = self.registry.workers
        self.watchdog = Watchdog()
        self.stall_detector = StallDetector(config.health.stalled_s)
        self._links = TransferLinks(config.transfer)

        # The requests, and where they are sent.
        self._active_requests: dict[str, ActiveRequest] = {}
        """Queued and in-flight requests by id."""
        self._retry_budget = RetryBudget(config.retry)
        self._rng = random.Random(seed)
        self._attempts = AttemptTracker(self.registry, self.tracker, self.cache_state, self._links, self.counters)
        self._chooser = Chooser(self.registry, self.tracker, self.cache_state, self._links, config, self._rng)
        self._placer = RequestPlacer(self.registry, self.tracker, self._chooser, self._attempts, config, self.counters)

    # Workers -----------------------------------------------------------------------------------------------------
    def add_worker(self, spec: WorkerSpec, now: float, *, is_up: bool = True) -> Worker:
        """Register a worker and its holders in the index, or replace the description of one with the same id."""
        return self.registry.add_worker(spec, is_up=is_up)

    def remove_worker(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget a worker. Its requests in flight stay known until the edge reports their ends."""
        if worker_id not in self.workers:
            return []
        self.watchdog.forget(worker_id)
        self._lose_worker(worker_id, now)
        self.registry.remove_worker(worker_id)
        return self._place_queued(now)

    def mark_worker_up(self, worker_id: str, now: float) -> list[Instruction]:
        """Record that a health check of a worker succeeded."""
        worker = self.workers.get(worker_id)
        if worker is None or not self.registry.breaker.record_success(worker):
            return []
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def mark_worker_down(self, worker_id: str, now: float, reason: str, pause_s: float = 0.0) -> list[Instruction]:
        """Send nothing more to a worker after failed health checks. The first one has the index forget the worker.

        `pause_s`: least time before a request may try the worker.
        """
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        self.registry.breaker.open(worker, now, reason)
        worker.open_until_s = max(worker.open_until_s, now + pause_s)
        self.registry.apply_worker_changes()
        return [] if worker.is_lost else [self._lose_worker(worker_id, now), *self._place_queued(now)]

    def set_draining(
        self, worker_id: str, now: float, *, is_draining: bool = True, reason: str = "drained by an operator"
    ) -> list[Instruction]:
        """Stop or resume sending new requests to a worker. Raises KeyError if the worker is unknown."""
        self.workers[worker_id].drain_reason = reason if is_draining else ""
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def set_asleep(self, worker_id: str, now: float, *, is_asleep: bool) -> list[Instruction]:
        """Record whether a worker's engine says that it sleeps."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.is_asleep is is_asleep:
            return []
        worker.is_asleep = is_asleep
        self.registry.apply_worker_changes()
        return self._place_queued(now)

    def clear_worker_cache(self, worker_id: str, at_s: float, rank: int | None = None) -> None:
        """Forget what a worker, or one rank of it, had cached at `at_s`. The feed clears the index by itself."""
        targets = self.registry.get_targets(worker_id)
        earlier_attempts = [attempt for attempt in self.get_attempts().values() if attempt.decision.decided_s <= at_s]
        requests = [request for attempt in earlier_attempts for request in attempt.list_in_flight()]
        for target in targets if rank is None else targets[rank : rank + 1]:
            self.cache_state.clear_target(target, [request for request in requests if request.target is target], at_s)

    def update_stalled_workers(self, last_byte_s: Mapping[str, float], now: float) -> set[str]:
        """Avoid workers with stalled streams; return the workers that changed. See StallDetector.update."""
        changed_workers = self.stall_detector.update(last_byte_s, now)
        self.registry.update_avoided_workers(self.stall_detector.stalled_workers, now)
        return changed_workers

    def count_in_flight_by_rank(self, worker_id: str) -> list[int]:
        """Return the number of this router's requests in flight on each rank of a worker."""
        return [target.load.request_count for target in self.registry.get_targets(worker_id)]

    def record_engine_load(
        self, worker_id: str, loads: Sequence[EngineLoad | None], in_flight: Sequence[int], now: float
    ) -> None:
        """Record the load that a worker reports for each rank; None if it reports nothing.

        `in_flight`: result of `count_in_flight_by_rank` when the worker was asked.
        """
        for target, load, in_flight_count in zip(self.registry.get_targets(worker_id), loads, in_flight):
            self.tracker.record_engine_load(target, load, now, in_flight=in_flight_count)

    def record_cache_capacity(self, worker_id: str, rank: int, capacity_tokens: int | None) -> None:
        """Record how many tokens a rank's cache holds by its events, for workers that do not report it."""
        for target in self.registry.get_targets(worker_id)[rank : rank + 1]:
            if target.capacity.observed_kv_tokens != capacity_tokens:
                target.capacity.observed_kv_tokens = capacity_tokens
                target.apply_worker_spec(self.workers[worker_id].spec)
                self.registry.apply_worker_changes()

    def resolve_model(self, name: str) -> ServedModel | None:
        """Return the base model and LoRA of a model name; None if no worker serves it."""
        return self.registry.get_served_models().get(name)

    # A request's life --------------------------------------------------------------------------------------------
    def route(self, request: RouteRequest, now: float, *, explain: bool = False) -> Forward | Enqueue | Refuse:
        """Place a new request under an unused id. `explain`: the decision has the terms of all candidates."""
        assert request.request_id not in self._active_requests, f"request {request.request_id} is already known"
        if len(self._active_requests) >= self.config.requests_max:
            self.counters["refused"] += 1
            return Refuse(request.request_id, 429, "too_many_requests", "The router is full.", 1.0)
        self._retry_budget.add_request(request.tenant)
        active_request = self._placer.make_active_request(request, now, wants_explanation=explain)
        self._active_requests[request.request_id] = active_request
        return self._forget_refused(self._placer.place(active_request, now))

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """Return the worker that `route` would choose, with the terms of all candidates. No request is counted.

        The limit on the time to the first token does not apply, and the request need not wait in the queue.
        """
        rng_state = self._rng.getstate()
        decision = self._placer.explain(request, now)
        self._rng.setstate(rng_state)
        return decision

    def has_request(self, request_id: str) -> bool:
        """Return whether a request is queued or in flight."""
        return request_id in self._active_requests

    def get_prompt_query(self, request_id: str) -> PromptQuery | None:
        """Return the prompt of a request; None if the request is not in flight or its prompt was not read."""
        attempt = self._get_attempt(request_id)
        return None if attempt is None else attempt.in_flight.prompt

    def find_fallback_workers(self, request_id: str, count: int, now: float) -> list[str]:
        """Return up to `count` workers that could take over a request in flight: the least busy of a random sample."""
        attempt = self._get_attempt(request_id)
        if attempt is None or not count:
            return []
        active_request = self._active_requests[request_id]
        candidates = self.registry.find_candidates(
            active_request.request, active_request.excluded_workers | {attempt.decision.worker}
        )
        if isinstance(candidates, Refuse):
            return []
        sample = self._rng.sample(candidates, min(len(candidates), 4 * count))
        sample.sort(key=lambda target: target.estimate_queue_s(now))
        return list(dict.fromkeys(target.worker_id for target in sample))[:count]

    def record_first_token(self, request_id: str, now: float) -> list[Instruction]:
        """Record that the first token of a streamed answer has come, so its prompt is computed and its worker works."""
        attempt = self._get_attempt(request_id)
        if attempt is None or attempt.has_first_token:
            return []
        if not self._attempts.record_first_token(attempt, now):
            return []
        active_request = self._active_requests[request_id]
        self.registry.record_service(attempt.decision.worker, active_request.refused_by, now)
        active_request.refused_by = frozenset()  # a continuation minutes later is no new evidence
        self.registry.record_answer(attempt.decision.worker, now)
        return self._place_queued(now)

    def record_progress(self, request_id: str, output_tokens: int, at_s: float | None = None) -> None:
        """Record how many tokens a streamed answer has, the last of them since `at_s`."""
        attempt = self._get_attempt(request_id)
        if attempt is None:
            return
        self.tracker.record_progress(attempt.in_flight, output_tokens, at_s)
        worker = self.workers.get(attempt.decision.worker)
        if worker is not None and at_s is not None:
            worker.last_answer_at_s = at_s

    def record_prefill_end(
        self, request_id: str, now: float, *, is_kv_transferred: bool = False, cached_tokens: int | None = None
    ) -> list[Instruction]:
        """Record that the prompt of a request was computed by another worker than the one that will answer.

        Its KV moves to the answering worker from now on; with `is_kv_transferred` it has moved already. The computing
        worker had `cached_tokens` of the prompt; None if it does not report that.
        """
        attempt = self._get_attempt(request_id)
        if attempt is None or attempt.prefill_leg is None:
            return []
        self._attempts.end_prefill_leg(attempt, now, is_computed=True, reported_cached_tokens=cached_tokens)
        if is_kv_transferred:
            self.tracker.end_transfer(attempt.in_flight, now)
            attempt.transfer_timing = None  # its duration is unknown, so nothing is learned from the transfer
        return self._place_queued(now)

    def fail_transfer(
        self, request_id: str, now: float, *, is_pair_fault: bool = True, may_be_crash: bool = False
    ) -> list[Instruction]:
        """Record that a request's worker gets no KV from the other worker that was to send it, the source.

        The attempt goes on: the request's worker computes the prompt itself. The request uses that source again only if
        no other worker can compute the prompt for one that only decodes.
        `is_pair_fault`: the fault is in the transfer, so the router avoids transfers between the two workers for a
        while; False if the source refused this request alone. `may_be_crash`: the source broke down while it served the
        request. If the request may have crashed CRASH_SUSPICIONS_MAX workers, it fails instead.
        """
        attempt = self._get_attempt(request_id)
        if attempt is None:
            return []
        active_request = self._active_requests[request_id]
        self._attempts.fail_transfer(active_request, now, is_pair_fault=is_pair_fault, may_be_crash=may_be_crash)
        if may_be_crash and active_request.crash_suspicions >= CRASH_SUSPICIONS_MAX:
            return self.fail_attempt(request_id, FailureKind.SOURCE, now)
        return self._place_queued(now)

    def finish_request(
        self, request_id: str, usage: ReportedUsage | None, now: float, *, is_error: bool = False
    ) -> list[Instruction]:
        """End a request after its answer was passed on to the client, and learn from the answer.

        `usage`: token counts that the engine reports. `is_error`: the answer is an error for which the worker computed
        nothing. Returns the instructions for queued requests that can be sent now.
        """
        attempt = self._get_attempt(request_id)
        if attempt is None:
            return []
        active_request, decision = self._active_requests[request_id], attempt.decision
        engine_usage = usage or ReportedUsage()
        if decision.is_split:  # the prompt was computed by another worker, which had other tokens cached
            engine_usage = ReportedUsage(engine_usage.prompt_tokens, None, engine_usage.completion_tokens)
        elif _has_missing_transfer(decision, engine_usage):
            self._attempts.fail_transfer(active_request, now)
        if not is_error:
            self._attempts.record_transfer(attempt, now)
            output_tokens = self.tracker.record_answer(attempt.in_flight, engine_usage.completion_tokens, now)
            self._chooser.record_answer(active_request.request, output_tokens)
        self._attempts.end_attempt(
            active_request, now, is_computed=not is_error, reported_cached_tokens=engine_usage.cached_tokens
        )
        self._chooser.end_session(active_request.request)
        del self._active_requests[request_id]
        self.counters["finished"] += 1
        if not is_error and not attempt.has_first_token:  # otherwise it is no service, or recorded already
            self.registry.record_service(decision.worker, active_request.refused_by, now)
        self.registry.record_answer(decision.worker, now)
        if usage is not None:
            self._compare_usage(active_request.request, decision, engine_usage)
        return self._place_queued(now)

    def abort_request(self, request_id: str, now: float) -> list[Instruction]:
        """Forget a queued or in-flight request after its client left. The edge cancels it at the worker."""
        attempt = self._get_attempt(request_id)
        active_request = self._active_requests.pop(request_id, None)
        if active_request is None:
            return []
        self.counters["aborted"] += 1
        if attempt is None:
            self._placer.queue.remove(request_id)
            return []
        self._attempts.end_attempt(active_request, now, is_computed=attempt.has_first_token)
        self._chooser.end_session(active_request.request)
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
        """End a request's attempt at a worker, which failed, and send the request to another worker if possible.

        The first instruction returned says what becomes of the request: Forward, Enqueue or Refuse. If the client has a
        part of the answer, only a `continuation`, a request for the rest of it, can be sent; without one, the request
        ends, and no instruction is about it. `silent_s`: seconds since the worker's last byte. `was_sent`: the worker
        got the request, and then refused a new connection, so it may have crashed.
        """
        attempt = self._get_attempt(request_id)
        if attempt is None:
            return []
        active_request = self._active_requests[request_id]
        worker_losses = self._end_failed_attempt(active_request, attempt, kind, now, silent_s=silent_s)
        has_answer_begun = attempt.has_first_token or kind in _FAILURES_AFTER_FIRST_BYTE
        if has_answer_begun and continuation is None:  # no other worker can write the rest
            del self._active_requests[request_id]
            self.counters["failed"] += 1
            return worker_losses + self._place_queued(now)

        active_request.failed_attempts += 1
        self._exclude_worker(active_request, attempt.decision.worker, kind)
        # If it is repeated from its start, it may crash the next worker, too.
        is_repeated_whole = continuation is None or continuation is active_request.request
        if is_repeated_whole and (was_sent or kind in _FAILURES_OF_CRASHED_WORKERS):
            active_request.crash_suspicions += 1
        instruction = self._try_again(active_request, continuation, kind, now)
        return [instruction, *worker_losses, *self._place_queued(now)]

    def move_request(
        self, request_id: str, now: float, continuation: RouteRequest | None = None, *, is_stalled: bool = False
    ) -> list[Instruction]:
        """Have another worker take over a running request; return [] if the request stays where it is.

        `continuation`: request for the rest of the answer; it is needed once the client has part of the answer. The
        first instruction returned is the request's Forward, Enqueue or Refuse. `is_stalled`: the worker is up but sends
        nothing in the middle of an answer, which counts as a failure of that worker.
        """
        attempt = self._get_attempt(request_id)
        if attempt is None or not self._can_move(self._active_requests[request_id], attempt, continuation):
            return []
        kind = FailureKind.STALLED if is_stalled and continuation is not None else FailureKind.LOST
        return self.fail_attempt(request_id, kind, now, continuation, silent_s=self.config.health.stalled_s)

    def _can_move(self, active_request: ActiveRequest, attempt: Attempt, continuation: RouteRequest | None) -> bool:
        """Return whether another worker may take over a running request.

        It may not if all other workers have stalled, if the request has no retry left, or if the queue is full.
        `continuation`: request for the rest of the answer, which costs no retry. Without it, the request would start
        again, and it may not if its answer has begun.
        """
        request = active_request.request
        if continuation is None:
            if attempt.has_first_token:
                return False
            if not self._retry_budget.has_retry(request.tenant, active_request.failed_attempts + 1):
                return False
        excluded_workers = active_request.excluded_workers | {attempt.decision.worker}
        candidates = self.registry.find_candidates(continuation or request, excluded_workers)
        if isinstance(candidates, Refuse):
            return False
        stalled_workers = self.stall_detector.stalled_workers
        if all(target.worker_id in stalled_workers for target in candidates):
            return False
        return not self._placer.queue.is_full(active_request)

    def tick(self, now: float) -> list[Instruction]:
        """Apply deadlines, queue tries, pins and pauses that are due. Call at `next_tick()` or a little later."""
        self.tracker.advance(now)
        self.cache_state.release_expired_pins(now)
        if [worker for worker in self.registry.down_workers if self.registry.breaker.try_half_open(worker, now)]:
            self.registry.apply_worker_changes()
        return [*map(self._forget_refused, self._placer.place_expired(now)), *self._place_queued(now)]

    def next_tick(self) -> float | None:
        """Return when `tick` will next have something to do; None while nothing is pending."""
        due_times_s = [worker.open_until_s for worker in self.registry.down_workers]
        next_times_s = (self.cache_state.next_release_s(), self._placer.next_queue_tick())
        due_times_s += [next_s for next_s in next_times_s if next_s is not None]
        return min(due_times_s, default=None)

    def _get_attempt(self, request_id: str) -> Attempt | None:
        """Return the attempt of a request in flight; None if the request is queued or unknown."""
        active_request = self._active_requests.get(request_id)
        return None if active_request is None else active_request.attempt

    def get_attempts(self) -> dict[str, Attempt]:
        """Return the attempts of all requests in flight, by request id."""
        return {
            request_id: active_request.attempt
            for request_id, active_request in self._active_requests.items()
            if active_request.attempt is not None
        }

    def _place_queued(self, now: float) -> list[Instruction]:
        if not self._placer.queue.requests:
            return []
        return list(map(self._forget_refused, self._placer.place_queued(now)))

    def _forget_refused(self, instruction: PlacementT) -> PlacementT:
        """Forget the request of a refusal; other instructions change nothing."""
        if isinstance(instruction, Refuse):
            del self._active_requests[instruction.request_id]
            self.counters["refused"] += 1
        return instruction

    # Failures ----------------------------------------------------------------------------------------------------
    def _end_failed_attempt(
        self, active_request: ActiveRequest, attempt: Attempt, kind: FailureKind, now: float, *, silent_s: float
    ) -> list[Instruction]:
        """End an attempt that failed, and count the failure against its worker if the worker is at fault.

        Return a WorkerLost if that shows that the worker's process has ended: the worker refuses connections.
        """
        request, worker = active_request.request, self.workers.get(attempt.decision.worker)
        is_probe = worker is not None and worker.probe == request.request_id  # the probe ends with the attempt
        self._attempts.end_attempt(active_request, now, is_computed=attempt.has_first_token)
        if worker is None or not is_worker_fault(kind, request, worker, now - silent_s):
            return []
        has_refused_connection = kind is FailureKind.CONNECT
        self.registry.breaker.record_failure(
            worker, now, reason=f"{kind.value} failure", is_fatal=has_refused_connection, is_probe=is_probe
        )
        self.registry.apply_worker_changes()
        must_report_loss = has_refused_connection and worker.is_down and not worker.is_lost
        return [self._lose_worker(worker.worker_id, now)] if must_report_loss else []

    def _exclude_worker(self, active_request: ActiveRequest, worker_id: str, kind: FailureKind) -> None:
        """Record that a worker failed a request, so that the request is not sent there again.

        There are two exceptions. A worker that only was too busy (429) is in `refused_by`, which is emptied once the
        answer begins elsewhere. And if only the source of its KV failed, the worker is used again if there is no other.
        """
        if kind in REFUSALS:
            active_request.refused_by |= {worker_id}
        tried_workers = active_request.tried_workers | {worker_id}
        if kind is FailureKind.SOURCE:
            other_workers = self.registry.find_candidates(active_request.request, tried_workers)
            may_return = isinstance(other_workers, Refuse)
        else:
            may_return = kind is FailureKind.OVERLOADED
        if not may_return:
            active_request.tried_workers = tried_workers

    def _try_again(
        self, active_request: ActiveRequest, continuation: RouteRequest | None, kind: FailureKind, now: float
    ) -> Forward | Enqueue | Refuse:
        """Send a request to another worker after an attempt failed, or queue it; else refuse it because of `kind`.

        `continuation`: request for the rest of an answer that has begun, which is sent instead. Without it the request
        is sent once more from its start, which takes one of its tenant's retries.
        """
        may_try = active_request.crash_suspicions < CRASH_SUSPICIONS_MAX  # otherwise it may crash another worker
        if continuation is not None:
            active_request.request = continuation
        elif may_try:
            may_try = self._retry_budget.spend_retry(active_request.request.tenant, active_request.failed_attempts)
        if may_try:
            instruction = self._placer.place(active_request, now)
            if not isinstance(instruction, Refuse):
                self.counters["retried" if continuation is None else "continued"] += 1
                return instruction
            if continuation is not None:
                return self._forget_refused(instruction)
        # The client is told of the failure, which says more than why no other worker can take the request.
        retry_after_s = self.registry.compute_retry_after_s(now)
        return self._forget_refused(_refuse_after_failure(active_request.request.request_id, kind, retry_after_s))

    def _lose_worker(self, worker_id: str, now: float) -> WorkerLost:
        """Forget what a worker had cached, and the transfers with it."""
        self.workers[worker_id].is_lost = True
        for target in self.registry.get_targets(worker_id):
            self._links.forget_target(target.name)
        self.clear_worker_cache(worker_id, now)
        return WorkerLost(worker_id)

    # Seeing ------------------------------------------------------------------------------------------------------
    def snapshot(self, now: float) -> CoreSnapshot:
        """Return what `/workers` and `/metrics` show, after the estimated loads were brought up to `now`."""
        self.tracker.advance(now)
        worker_rows = []
        for worker_id, worker in self.workers.items():
            alarms = self._list_alarms(worker_id, worker, now)
            targets = self.registry.get_targets(worker_id)
            worker_rows += [describe_target(worker, target, self.tracker, alarms, now) for target in targets]
        counters = dict(self.counters)
        if self._chooser.custom_policy is not None:
            counters["policy_failed"] = self._chooser.custom_policy.failures
        queued_count = len(self._placer.queue.requests)
        return CoreSnapshot(worker_rows, queued_count, len(self._active_requests) - queued_count, counters)

    def _list_alarms(self, worker_id: str, worker: Worker, now: float) -> list[str]:
        """Return the present alarms of a worker, each a text that begins with the alarm's name."""
        alarms = self.watchdog.list_alarms(worker_id, expects_events=worker.spec.cache_view is CacheView.EVENTS)
        alarms += self.stall_detector.list_alarms(worker_id, now)
        if worker.state is WorkerState.UP:
            alarms += self.watchdog.list_event_alarms(worker_id)
        return alarms

    def _compare_usage(self, request: RouteRequest, decision: Decision, usage: ReportedUsage) -> None:
        """Compare the tokens that an engine reports for an answer with those predicted, for the worker's alarms."""
        worker = self.workers.get(decision.worker)
        if worker is None:
            return
        # The router does not count the tokens of media, and looks up only the first of several prompts.
        is_text = request.token_ids is not None and request.media_conversation is None
        is_counted = is_text and request.prompt_count == 1
        self.watchdog.record_answer(
            decision.worker,
            counted_tokens=request.prompt_tokens if is_counted else None,
            reported_tokens=usage.prompt_tokens,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            reported_cached_tokens=usage.cached_tokens,
            resident_tokens=decision.terms.resident_tokens,
            block_tokens=worker.spec.block_size,
        )

    def check_invariants(self) -> None:
        """Assert that all parts agree on what is queued and in flight; tests call it after every stimulus."""
        in_flight = [request for attempt in self.get_attempts().values() for request in attempt.list_in_flight()]
        self.tracker.check_invariants(in_flight)
        self._placer.queue.check_invariants()
        for request_id, active_request in self._active_requests.items():
            is_queued, attempt = request_id in self._placer.queue.requests, active_request.attempt
            assert is_queued == (attempt is None), f"{request_id}: {is_queued=}, {attempt}"
        self.cache_state.check_invariants(in_flight)


def _has_missing_transfer(decision: Decision, usage: ReportedUsage) -> bool:
    """Return whether an engine reports that less than half of the KV which should have come was cached."""
    if decision.transfer is None or usage.cached_tokens is None:
        return False
    return usage.cached_tokens < decision.predicted_cached_tokens - decision.transfer.tokens // 2


def _refuse_after_failure(request_id: str, kind: FailureKind, retry_after_s: float) -> Refuse:
    """Return the refusal of a request that failed and cannot be tried again."""
    status, code = 502, "upstream_failed"
    if kind is FailureKind.OVERLOADED:
        status, code = 429, "upstream_overloaded"
    elif kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        status, code = 504, "upstream_timeout"
    message = f"The worker failed ({kind.value}) and no other could be tried."
    return Refuse(request_id, status, code, message, retry_after_s)
