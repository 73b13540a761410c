"""Requests that the core knows, and their attempts: each try of a request at a worker, from its begin to its end.

`RetryBudget` says how many further attempts a tenant may make.

`AttemptTracker` counts an attempt in the load of its worker, in what is expected to be cached there and, if KV comes
from another worker, in the load of that one. Invariant: what `begin_attempt` counts, `end_attempt` takes back.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from options.bounded_dict import BoundedDict
from router.decide.cache_state import CacheState
from router.decide.chooser import RoutingChoice
from router.decide.config import RetryConfig
from router.decide.learning import WorkTotals
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Decision, RouteRequest
from router.decide.registry import WorkerRegistry
from router.decide.target import InFlightRequest, PromptQuery
from router.decide.transfers.links import TransferEstimate, TransferLinks
from router.decide.workers import WorkerState

TENANTS_MAX: Final = 4096
"""Tenants with a retry budget of their own; the one with the oldest request or retry is forgotten first."""
_RETRIES_MAX_RATIO: Final = 10.0
"""Most retries that a tenant can save up, as a multiple of those that it begins with."""
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
    """One try of a request at a worker, to which KV of the prompt may come from another worker, the source.

    A source that has the KV cached sends it at once. Another source computes the prompt first, which is the attempt's
    prefill leg, and sends the KV then. If the transfer fails, the worker of the attempt computes the prompt itself.
    """

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
    def excluded_workers(self) -> frozenset[str]:
        """Workers that the next attempt may not go to."""
        return self.tried_workers | self.refused_by

    @property
    def excluded_sources(self) -> frozenset[str]:
        """Workers that KV of this request comes from only if it must, and no other worker can give it."""
        return self.excluded_workers | self.tried_sources


class AttemptTracker:
    """Follows each attempt from its begin to its end, in the parts of the core that count it or learn from it."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        cache_state: CacheState,
        links: TransferLinks,
        counters: Counter[str],
    ) -> None:
        """Begin without attempts. `counters`: counts of events, by the names that `/metrics` shows."""
        self._registry = registry
        self._tracker = tracker
        self._cache_state = cache_state
        self._links = links
        self._counters = counters

    def begin_attempt(
        self, active_request: ActiveRequest, choice: RoutingChoice, decision: Decision, now: float
    ) -> None:
        """Count a request at the chosen worker, as load and as cached there. Sets `active_request.attempt`."""
        request, winner, prompt = active_request.request, choice.winner, choice.prompt_query
        plan = winner.plan
        in_flight = self._tracker.add_request(
            winner.target,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=winner.cached_tokens if plan is None else max(winner.cached_tokens, plan.arriving_tokens),
            is_streaming=request.is_streaming,
            now=now,
            expected_output_tokens=choice.request_facts.output_tokens,
            candidate=winner,
            is_background=active_request.is_background,
        )
        # The attempt is set now: if a later step raises, `end_attempt` can undo those before it.
        attempt = active_request.attempt = Attempt(decision, in_flight)
        if prompt is not None:
            self._cache_state.add_request(in_flight, prompt, now, session=request.session)
        if decision.is_split:  # another worker computes the prompt, and then its KV moves here
            self._start_prefill_leg(attempt, prompt, now)
        elif decision.transfer is not None:  # another worker has the KV cached
            self._start_transfer(attempt, now)
        # If the worker failed lately, this request alone shows whether the worker serves again.
        worker = self._registry.workers[decision.worker]
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

    def record_first_token(self, attempt: Attempt, now: float) -> bool:
        """Record the first token of a streamed answer; return whether the load tracker learns of it only now."""
        attempt.has_first_token = True
        attempt.observe_transfer(now)
        self.end_prefill_leg(attempt, now, is_computed=True)
        return self._tracker.record_first_token(attempt.in_flight, now)

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

    def fail_transfer(
        self, active_request: ActiveRequest, now: float, *, is_pair_fault: bool = True, may_be_crash: bool = False
    ) -> None:
        """Have the worker of the present attempt compute the prompt itself. See `RouterCore.fail_transfer`."""
        attempt = active_request.attempt
        assert attempt is not None
        in_flight, decision = attempt.in_flight, attempt.decision
        if in_flight.source is None or attempt.has_transfer_failed:
            return
        attempt.has_transfer_failed = True
        active_request.tried_sources |= {in_flight.source.worker_id}
        active_request.crash_suspicions += may_be_crash
        if is_pair_fault:
            self._links.record_failure(in_flight.source.name, in_flight.target.name, now)
        self.end_prefill_leg(attempt, now, is_computed=False)
        self._counters["failed_transfers"] += 1
        decision.predicted_cached_tokens = decision.terms.resident_tokens
        self._tracker.fail_transfer(in_flight, decision.predicted_cached_tokens, now)

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


class RetryBudget:
    """Number of retries that each tenant, an API key or a client's address, may still make.

    Each new request earns a fraction of a retry. So if every request fails, retries add only that fraction to the load.
    """

    def __init__(self, config: RetryConfig) -> None:
        self._attempts_max = config.attempts_max
        self._retries_per_request = config.budget_ratio
        self._initial_retries = float(config.budget_min)
        self._retries_max = _RETRIES_MAX_RATIO * max(config.budget_min, 1)
        self._retries_by_tenant: BoundedDict[str, float] = BoundedDict(TENANTS_MAX)
        """Retries that are left, by tenant; the tenant with the oldest last request or retry is first."""

    def __len__(self) -> int:
        return len(self._retries_by_tenant)

    def add_request(self, tenant: str) -> None:
        """Add the fraction of a retry that a new request of a tenant earns."""
        retries = self._get_retries(tenant) + self._retries_per_request
        self._retries_by_tenant[tenant] = min(retries, self._retries_max)

    def spend_retry(self, tenant: str, attempt_count: int) -> bool:
        """Take one retry for a request that was tried `attempt_count` times; return whether there was one."""
        if not self.has_retry(tenant, attempt_count):
            return False
        self._retries_by_tenant[tenant] = self._get_retries(tenant) - 1.0
        return True

    def has_retry(self, tenant: str, attempt_count: int) -> bool:
        """Return whether `spend_retry` would find a retry."""
        return attempt_count < self._attempts_max and self._get_retries(tenant) >= 1.0

    def _get_retries(self, tenant: str) -> float:
        return self._retries_by_tenant.get(tenant, self._initial_retries)
