"""Counting the load of each target from the requests that the router sends, and learning how fast the targets are.

`LoadTracker` owns the targets (router/decide/target.py) and the speeds of their pools. It knows nothing of caches,
sockets and clocks.

Invariants (`check_invariants`): a target's sums equal the sums over its requests in flight; after every request has
ended, every sum is zero.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import msgspec

from router.decide.config import CostConfig, LearnConfig
from router.decide.learning import PoolSpeed, PrefillInterval, Speed
from router.decide.load import (
    NO_PEER_LOAD,
    REPORT_VALID_S,
    EngineLoad,
    PeerLoad,
    estimate_external_load,
    merge_peer_loads,
)
from router.decide.price import Candidate, estimate_queue, find_awaited_request
from router.decide.shortlist import LoadOrder
from router.decide.target import InFlightRequest, RequestPhase, Target
from router.index.protocol import HolderId
from simulation.steps import StepTimes

_SAME_STEP_S: Final = 0.004
"""First tokens this close together are taken to come from one engine step."""
OBSERVED_STEPS_MIN: Final = 16
"""Least number of decode steps from which the time of a step is learned."""
_SILENCE_CHECK_INTERVAL_S: Final = 0.01
"""Time between two checks whether a pool without any observation is slower than its prior."""
_OVERDUE_RATIO_MIN: Final = 1.1
"""A prefill is overdue from this multiple of its expected time on."""
TOKEN_S_MIN: Final = 1e-4
"""Least time for a generated token; an engine that reports more tokens than fit its answer's time is not believed."""
COUNT_TOLERANCE_TOKENS: Final = 16
"""Tokens by which a reported length may exceed 1.25 times the number of chunks of a stream. Where chunks have several
tokens, lengths and step times are then both in chunks, which serves as well."""
_EXTERNAL_PROMPT_TOKENS: Final = 256
"""Uncached tokens that are assumed for a waiting request which no router sent."""
UTILISATION_WINDOW_S: Final = 60.0
"""Time over which utilisation is averaged."""
_RESCALE_WINDOWS: Final = 20.0
"""Windows after which scaled utilisations are scaled back, before they overflow."""


class _RequestTimetable:
    """Priority queue of requests by the time at which an event is expected, such as their first token."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, InFlightRequest]] = []
        """Heap of (time, number of entries that were added before, request). The number decides between equal times."""
        self._entry_count = 0

    def add(self, at_s: float, request: InFlightRequest) -> None:
        """Add a request for which the event is expected at `at_s`."""
        heapq.heappush(self._entries, (at_s, self._entry_count, request))
        self._entry_count += 1

    def pop_due(self, now: float) -> Iterator[tuple[float, InFlightRequest]]:
        """Remove and yield (expected time, request) of all that are due by `now`, the earliest first."""
        while self._entries and self._entries[0][0] <= now:
            at_s, _, request = heapq.heappop(self._entries)
            yield at_s, request


class LoadTracker:
    """Load and speed of every target, from this router's requests, its peers and the engines' reports."""

    def __init__(self, service: StepTimes, cost: CostConfig, learn: LearnConfig) -> None:
        """Begin without targets. `service`: step times that are assumed of a worker before anything is learned."""
        self._service = service
        self._learn = learn
        self.cost = cost
        self.targets: dict[str, Target] = {}
        """Workers, or data-parallel ranks of workers, by name."""
        self._speed_by_pool: dict[str, PoolSpeed] = {}
        """Learned speed of the workers of each model. It stays here after the last of them is removed."""
        self._silence_checked_at_s = -math.inf
        """When workers without any answer were last checked for slowness."""

        # Events that the router does not see, at their estimated times.
        self._estimated_first_tokens = _RequestTimetable()
        """First tokens of requests that do not stream."""
        self._estimated_arrivals = _RequestTimetable()
        """Ends of the KV transfers that requests wait for."""
        self.on_kv_arrival: Callable[[InFlightRequest], None] = lambda request: None
        """Called with a request when its KV has come, or is no longer expected, unless the target was removed."""

        self._epoch_s = -math.inf
        """Time to which the utilisation of all targets is scaled (`_advance_decay_epoch`)."""

        # Load of others: routers, and clients that use none.
        self._peer_loads_by_router: dict[str, dict[str, PeerLoad]] = {}
        """Load by other routers' requests: by router, then by name of the target."""
        self._engine_reported_at_s: dict[str, float] = {}
        """When the engine of each target last reported its load."""

        # Readers of this router's load, to which changes are passed on.
        self.changed_targets: set[str] = set()
        """Names of targets to which this router's load has changed since it was last reported to the other routers."""
        self.load_orders: dict[tuple[str, str | None], LoadOrder] = {}
        """(model, role) -> targets of its pool sorted by price. An order is told of each target whose load changes."""

    # Targets -----------------------------------------------------------------------------------------------------
    def add_target(self, worker_id: str, rank: int | None, holder: HolderId, *, pool: str = "") -> Target:
        """Add a target. It starts with the learned speed of its `pool`, the workers that serve one base model."""
        pool_speed = self._speed_by_pool.get(pool)
        if pool_speed is None:
            pool_speed = self._speed_by_pool[pool] = PoolSpeed(self._service, self._learn)
        target = Target(worker_id, rank, holder, pool_speed)
        self.targets[target.name] = target
        self._merge_peer_load(target)
        return target

    def remove_target(self, name: str) -> None:
        """Forget a target. Its requests in flight may still be ended, and no longer count anywhere."""
        target = self.targets.pop(name, None)
        if target is not None:
            target.speed.pool.members.remove(target.speed)
        self._engine_reported_at_s.pop(name, None)
        self.changed_targets.discard(name)

    # A request's life --------------------------------------------------------------------------------------------
    def add_request(
        self,
        target: Target,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        is_streaming: bool,
        now: float,
        expected_output_tokens: float = 0.0,
        candidate: Candidate | None = None,
        is_background: bool = False,
    ) -> InFlightRequest:
        """Count a request that is sent to `target`. Pass the returned object to the methods that report its progress.

        `candidate` says where the cached tokens come from: slower memory, a running request that computes them first,
        or another worker (then call `start_transfer` when the KV begins to move). None: the target's fastest memory.
        """
        candidate = candidate or Candidate(target)
        plan, queue, load = candidate.plan, target.prefill_queue, target.load
        tier_load_s = candidate.tier_load_s
        if tier_load_s:
            tier_load_s /= target.speed.tier_load.get(now)  # without the learned factor
        request = InFlightRequest(
            target=target,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            expected_output_tokens=expected_output_tokens,
            is_streaming=is_streaming,
            tier_load_s=tier_load_s,
            sent_at_s=now,
            prefill_s=target.speed.estimate_prefill_s(prompt_tokens, cached_tokens),
            source=plan.source.target if plan else None,
            is_background=is_background,
        )
        if not is_streaming:
            self._estimated_first_tokens.add(now + _predict_ttft_s(request, candidate, now), request)
        self._mark_changed(target)
        queue.record_progress(target.slowdown, now)
        if plan is None:
            queue.add(request, find_awaited_request(candidate))
        else:
            request.phase = RequestPhase.SOURCE_PREFILL
        load.request_count += 1
        load.background_request_count += is_background
        target.totals.request_count += 1
        load.pending_prompt_tokens += prompt_tokens
        load.remaining_output_tokens += expected_output_tokens
        target.recompute()
        self._add_utilisation(target, request.prefill_s, now, arrivals=1)
        return request

    def record_first_token(self, request: InFlightRequest, now: float) -> bool:
        """Record the first token of a request; return False if it was recorded, or taken as come, before."""
        if not request.has_no_first_token:
            return False
        self.end_transfer(request, now)
        self._observe_first_token(request, now)
        self._start_decode(request, now)
        if not request.target.prefill_queue.requests:  # no later step can extend the interval
            self.close_interval(request.target)
        return True

    def record_progress(self, request: InFlightRequest, output_tokens: int, at_s: float | None = None) -> None:
        """Record that the answer of a decoding request has `output_tokens` tokens so far.

        `at_s`: arrival time of the last token. If given, the time of decode steps is learned from it now and then,
        while no prefill lengthens them.
        """
        if request.phase is not RequestPhase.DECODE:
            return
        target, load = request.target, request.target.load
        old_overdue_tokens = request.overdue_output_tokens
        load.decode_context_tokens += output_tokens - request.output_tokens
        request.output_tokens = output_tokens
        load.overdue_output_tokens += request.overdue_output_tokens - old_overdue_tokens
        target.recompute_decode_load()
        if at_s is not None and not target.prefill_queue.requests:
            self._observe_steps(request, output_tokens - request.observed_output_tokens, at_s)

    def end_request(
        self,
        request: InFlightRequest,
        now: float,
        *,
        is_computed: bool = True,
        reported_cached_tokens: int | None = None,
    ) -> None:
        """Remove a request that finished, failed or was aborted from the counts of its target.

        `is_computed`: False if the target computed nothing of the request; its prefill then leaves the target's
        utilisation, too. `reported_cached_tokens`: cached tokens by the engine's answer; None if not reported.
        """
        assert request.phase is not RequestPhase.ENDED, "the request has ended already"
        target, load, queue = request.target, request.target.load, request.target.prefill_queue
        self._mark_changed(target)
        target.advance_work_totals(now)
        queue.record_progress(target.slowdown, now)

        load.last_request_end_s = now
        load.request_count -= 1
        load.background_request_count -= request.is_background
        load.remaining_output_tokens -= request.expected_output_tokens
        if not load.request_count:
            load.remaining_output_tokens = 0.0  # exactly, so that rounding never accumulates
        if request.has_no_first_token:
            load.pending_prompt_tokens -= request.prompt_tokens
            if request.is_waiting_for_kv:
                self._uncount_transfer(request)
            elif queue.remove(request):
                queue.oldest_since_s = now
        else:
            load.decode_request_count -= 1
            load.decode_context_tokens -= request.context_tokens
            load.overdue_output_tokens -= request.overdue_output_tokens
        request.phase = RequestPhase.ENDED
        target.recompute()

        if not is_computed:
            self._add_utilisation(target, -request.prefill_s, request.sent_at_s)
        if reported_cached_tokens is not None:
            target.totals.predicted_cached_tokens += request.cached_tokens
            target.totals.reported_cached_tokens += reported_cached_tokens

    def start_transfer(self, request: InFlightRequest, transfer_s: float, now: float) -> None:
        """Count a transfer at both ends. At its end the request joins its target's prefill queue."""
        if request.phase is not RequestPhase.SOURCE_PREFILL:
            return
        assert request.source is not None
        target, request.phase = request.target, RequestPhase.TRANSFER
        self._mark_changed(target)
        target.load.incoming_transfers += 1
        request.source.load.outgoing_transfers += 1
        target.prefill_queue.arriving_prefill_s += request.prefill_s
        self._estimated_arrivals.add(now + transfer_s, request)

    def end_transfer(self, request: InFlightRequest, now: float) -> None:
        """End a request's wait for KV from another worker, if it waits: it joins the prefill queue of its target."""
        if not request.is_waiting_for_kv:
            return
        target, queue = request.target, request.target.prefill_queue
        self._uncount_transfer(request)
        request.phase = RequestPhase.PREFILL
        request.sent_at_s = now
        queue.record_progress(target.slowdown, now)
        queue.add(request)
        if self.targets.get(target.name) is target:
            self.on_kv_arrival(request)
        self._reprice_prefill(request, now)  # the target's speed may have been learned while the request waited

    def _uncount_transfer(self, request: InFlightRequest) -> None:
        """Stop counting a request's transfer at both ends, if the transfer is under way."""
        if request.phase is not RequestPhase.TRANSFER:
            return
        assert request.source is not None
        load, queue = request.target.load, request.target.prefill_queue
        request.source.load.outgoing_transfers -= 1
        load.incoming_transfers -= 1
        # Exactly zero when none is left, so that rounding never accumulates.
        queue.arriving_prefill_s = queue.arriving_prefill_s - request.prefill_s if load.incoming_transfers else 0.0

    def fail_transfer(self, request: InFlightRequest, cached_tokens: int, now: float) -> None:
        """Have the target of a request without a first token compute all but `cached_tokens`: its KV does not come."""
        if not request.has_no_first_token:
            return
        request.cached_tokens = cached_tokens
        if request.is_waiting_for_kv:
            self.end_transfer(request, now)
        else:
            self._reprice_prefill(request, now)

    def _reprice_prefill(self, request: InFlightRequest, now: float) -> None:
        """Recompute the prefill times in the queue of a request's target, and the request's share of utilisation."""
        target, old_prefill_s = request.target, request.prefill_s
        self._mark_changed(target)
        target.prefill_queue.reprice(target.speed)
        self._add_utilisation(target, request.prefill_s - old_prefill_s, now)
        target.recompute_queue()

    def has_free_target(self, max_wait_s: float, now: float) -> bool:
        """Return whether a new request would wait at most `max_wait_s` at some target."""
        return any(target.slowdown * target.estimate_queue_s(now) <= max_wait_s for target in self.targets.values())

    def _mark_changed(self, target: Target) -> None:
        if self.targets.get(target.name) is target:
            self.changed_targets.add(target.name)
            for order in self.load_orders.values():
                order.mark_changed(target)

    def advance(self, now: float) -> None:
        """Update all loads to `now`. Must be called before any load is read.

        The router does not see when KV arrives at a worker, nor the first token of an answer that is not streamed. Both
        count as having happened once their estimated time has passed.
        """
        for arrived_at_s, request in self._estimated_arrivals.pop_due(now):
            self.end_transfer(request, arrived_at_s)
        for first_token_at_s, request in self._estimated_first_tokens.pop_due(now):
            if request.has_no_first_token:
                self.end_transfer(request, first_token_at_s)
                self._start_decode(request, first_token_at_s)
        if now - self._silence_checked_at_s >= _SILENCE_CHECK_INTERVAL_S:
            self._silence_checked_at_s = now
            self._learn_from_silence(now)

    def _learn_from_silence(self, now: float) -> None:
        """Raise the assumed times of pools without any answer yet, if the prefill of the median worker is overdue."""
        silent_pools = {pool for pool in self._speed_by_pool.values() if pool.is_unmeasured}
        if not silent_pools:
            return
        ratios_by_pool: dict[PoolSpeed, list[float]] = {}
        for target in self.targets.values():
            if target.prefill_queue.requests and target.speed.pool in silent_pools:
                ratios_by_pool.setdefault(target.speed.pool, []).append(target.compute_overdue_ratio(now))
        for pool, ratios in ratios_by_pool.items():
            median_ratio = sorted(ratios)[len(ratios) // 2]
            if median_ratio > _OVERDUE_RATIO_MIN and pool.raise_prior(median_ratio):
                self._apply_learned_speeds(pool.members)

    def _start_decode(self, request: InFlightRequest, now: float) -> None:
        """Count a request as decoding from now on, because it has its first token or is expected to have it."""
        target, load, queue = request.target, request.target.load, request.target.prefill_queue
        self._mark_changed(target)

        # It leaves the prefill queue.
        queue.record_progress(target.slowdown, now)
        queue.remove(request)
        queue.oldest_since_s = max(queue.oldest_since_s, now)
        load.pending_prompt_tokens -= request.prompt_tokens

        # It joins the decoding requests.
        target.advance_work_totals(now)
        request.phase = RequestPhase.DECODE
        load.decode_request_count += 1
        load.decode_context_tokens += request.context_tokens

        # Its prefill counts as done. From a copy of the totals, the time of decode steps is learned later.
        totals = target.speed.work_totals
        totals.uncached_tokens += request.prompt_tokens - request.cached_tokens
        totals.quadratic_work += float(request.prompt_tokens**2 - request.cached_tokens**2)
        if request.is_streaming:
            request.observed_totals = msgspec.structs.replace(totals)
        target.recompute()

    # Utilisation -------------------------------------------------------------------------------------------------
    def compute_utilisation_decay(self, now: float) -> float:
        """Return the factor from `utilisation_scaled` to utilisation at `now`, the same for all targets."""
        return math.exp(-max(now - self._advance_decay_epoch(now), 0.0) / UTILISATION_WINDOW_S)

    def compute_utilisation(self, target: Target, now: float) -> float:
        """Return a target's utilisation U, other routers' share included."""
        decay = self.compute_utilisation_decay(now)  # before `utilisation_scaled` is read: it may rescale that
        return target.load.utilisation_scaled * decay + target.peer_load.utilisation

    def _add_utilisation(self, target: Target, prefill_s: float, at_s: float, *, arrivals: int = 0) -> None:
        """Count prefill seconds and requests that a target got at `at_s`; a negative number takes seconds back.

        They are scaled up by the time since the epoch, so that nothing has to decay.
        """
        growth = math.exp((at_s - self._advance_decay_epoch(at_s)) / UTILISATION_WINDOW_S)
        load = target.load
        load.utilisation_scaled = max(0.0, load.utilisation_scaled + prefill_s / UTILISATION_WINDOW_S * growth)
        load.arrivals_scaled += arrivals * growth / UTILISATION_WINDOW_S

    def _advance_decay_epoch(self, now: float) -> float:
        """Return the epoch, the time to which decaying loads are scaled, so that time alone changes no stored number.

        A load x at time t is stored as x * exp((t - epoch) / window). Multiplied by exp(-(now - epoch) / window), it is
        the load at `now`. Before the stored numbers overflow, the epoch is moved to `now` and all are rescaled.
        """
        if now - self._epoch_s <= _RESCALE_WINDOWS * UTILISATION_WINDOW_S:
            return self._epoch_s
        decay = math.exp(-(now - self._epoch_s) / UTILISATION_WINDOW_S)  # 0 for the first epoch, before any load
        for target in self.targets.values():
            target.load.utilisation_scaled *= decay
            target.load.arrivals_scaled *= decay
        self._epoch_s = now
        for order in self.load_orders.values():
            order.rebuild(now, utilisation_decay=1.0)
        return self._epoch_s

    # Learning ----------------------------------------------------------------------------------------------------
    def _observe_first_token(self, request: InFlightRequest, now: float) -> None:
        """Measure how long a target takes for prefill, at the first token of a streamed answer.

        A prefill interval is the time in which a prompt, or several, were computed. First tokens that arrive together
        end the same engine step, so their prompts share an interval. A later one belongs to it, too, if its prompt was
        next and may have begun in the interval's last step. An interval is not used if the target also did work of
        unknown size: another router's prompts, or prompts with KV from another worker.
        """
        if not request.is_streaming:
            return
        target, load, speed = request.target, request.target.load, request.target.speed
        is_in_turn = target.prefill_queue.record_first_token(request)
        previous_end_s = max(target.prefill_queue.oldest_since_s, target.peer_load.oldest_since_s)
        interval = speed.open_prefill_interval
        if interval is None or now - interval.end_s > _SAME_STEP_S:  # it is the first token of another step
            if interval and is_in_turn and interval.can_add_step(request.sent_at_s, previous_end_s, speed.step_tokens):
                interval.add_step(load.decode_request_count, load.decode_context_tokens)
            else:
                self.close_interval(target)
                interval = speed.open_prefill_interval = PrefillInterval(
                    request.sent_at_s, previous_end_s, load.decode_request_count, load.decode_context_tokens, now
                )
                interval.is_usable = is_in_turn
        if target.peer_load.prefill_s > 0.0 or target.external_load or request.source is not None:
            interval.is_usable = False
        interval.add_first_token(request.prompt_tokens, request.cached_tokens, request.tier_load_s, now)

    def record_answer(self, request: InFlightRequest, reported_tokens: int | None, now: float) -> int:
        """Learn the time of decode steps from a complete answer, and return the answer's length in tokens.

        The length is the engine's report within plausible bounds, or else the number that the edge counted.
        """
        output_tokens = counted_tokens = request.output_tokens if request.is_streaming else 0
        if reported_tokens is not None:
            output_tokens = min(reported_tokens, int((now - request.sent_at_s) / TOKEN_S_MIN))
            if counted_tokens:
                output_tokens = min(output_tokens, counted_tokens + counted_tokens // 4 + COUNT_TOLERANCE_TOKENS)
        self._observe_steps(request, (counted_tokens or output_tokens) - request.observed_output_tokens, now)
        return output_tokens

    def _observe_steps(self, request: InFlightRequest, step_count: int, now: float) -> None:
        """Learn how long a decode step takes from the last `step_count` tokens of a streamed answer, each from a step.

        In these steps the target also worked for other requests, so all its work of that time is compared. Nothing is
        learned shortly after the last time, nor while the engine has requests that no router sent, because their work
        is unknown.
        """
        target, speed, start_totals = request.target, request.target.speed, request.observed_totals
        is_due = now - speed.last_step_observation_s >= speed.pool.step_observation_interval_s
        if not is_due or step_count < OBSERVED_STEPS_MIN or self.targets.get(target.name) is not target:
            return
        if start_totals is None or now <= start_totals.updated_at_s:
            return
        target.advance_work_totals(now)
        observation = speed.work_totals.compute_work_since(start_totals, now, step_count=step_count)
        request.observed_totals = msgspec.structs.replace(speed.work_totals, updated_at_s=now)
        request.observed_output_tokens = request.output_tokens
        if not target.external_load:
            speed.last_step_observation_s = now
            self._apply_learned_speeds(speed.observe(observation))

    def close_interval(self, target: Target) -> None:
        """Close a target's open prefill interval, if it has one, and learn from it."""
        speed = target.speed
        interval, speed.open_prefill_interval = speed.open_prefill_interval, None
        is_target_removed = self.targets.get(target.name) is not target
        if interval is not None and interval.is_usable and not is_target_removed:
            self._apply_learned_speeds(speed.observe_prefills(interval))

    def _apply_learned_speeds(self, speeds: Collection[Speed]) -> None:
        """Recompute the targets of speeds that have changed."""
        if not speeds:
            return
        changed_speeds = set(speeds)
        for target in self.targets.values():
            if target.speed in changed_speeds:
                target.speed.refresh()
                target.prefill_queue.reprice(target.speed)
                self._merge_peer_load(target)

    # Other routers -----------------------------------------------------------------------------------------------
    def make_local_load(self, target: Target, now: float) -> PeerLoad:
        """Return the load that this router has put on a target, to tell it to other routers of the same workers."""
        load, queue = target.load, target.prefill_queue
        oldest_request = queue.get_oldest()
        return PeerLoad(
            prefill_s=queue.own_prefill_s,
            prefill_requests=load.request_count - load.decode_request_count,
            oldest_prefill_s=oldest_request.prefill_s if oldest_request else 0.0,
            oldest_sent_at_s=oldest_request.sent_at_s if oldest_request else now,
            oldest_since_s=queue.oldest_since_s,
            decode_requests=load.decode_request_count,
            decode_context_tokens=load.decode_context_tokens,
            utilisation=load.utilisation_scaled * self.compute_utilisation_decay(now),
            prefill_rate=target.speed.prefill_rate,
        )

    def set_peer_loads(self, router: str, loads: Mapping[str, PeerLoad], *, is_full: bool = True) -> None:
        """Replace the loads of another router, by target name.

        `is_full`: the router has no load on other targets, so that {} forgets it. Otherwise its other loads stay, and
        loads of unknown targets are ignored until the next full message.
        """
        previous_loads = self._peer_loads_by_router.pop(router, {})
        if is_full:
            new_loads, changed_names = dict(loads), previous_loads.keys() | loads.keys()
        else:
            changed_names = loads.keys() & self.targets.keys()
            new_loads = {**previous_loads, **{name: loads[name] for name in changed_names}}
        if new_loads:
            self._peer_loads_by_router[router] = new_loads
        for name in changed_names & self.targets.keys():
            self._merge_peer_load(self.targets[name])

    # Reports of engines --------------------------------------------------------------------------------------------
    def record_engine_load(self, target: Target, engine_load: EngineLoad | None, now: float, *, in_flight: int) -> None:
        """Record the load that a worker's engine reports, to learn of requests that no router sent.

        `engine_load`: None if the engine did not answer. Its last report then stays valid for REPORT_VALID_S.
        `in_flight`: number of this router's requests at the target when the engine was asked.
        """
        reported_at_s = self._engine_reported_at_s.get(target.name, -math.inf)
        if engine_load is None and now - reported_at_s <= REPORT_VALID_S:
            return
        target.advance_work_totals(now)
        target.engine_load, target.external_load = engine_load, NO_PEER_LOAD
        self._merge_peer_load(target)
        if engine_load is None:
            return
        self._engine_reported_at_s[target.name] = now
        load, peer_load = target.load, target.peer_load
        known_requests = max(in_flight, load.request_count)  # the report may be older or newer than this count
        held_tokens = load.decode_context_tokens + load.pending_prompt_tokens - load.duplicate_prompt_tokens
        target.external_load = estimate_external_load(
            engine_load,
            known_requests=known_requests + peer_load.request_count,
            known_kv_tokens=held_tokens + peer_load.decode_context_tokens,
            capacity=target.capacity,
            prompt_s=target.estimate_prefill_s(_EXTERNAL_PROMPT_TOKENS, 0),
            prefill_rate=target.speed.prefill_rate,
        )
        self._merge_peer_load(target)

    def _merge_peer_load(self, target: Target) -> None:
        """Recompute the load that others put on a target: peers of this router, and clients of the engine."""
        loads = [
            peer_loads[target.name] for peer_loads in self._peer_loads_by_router.values() if target.name in peer_loads
        ]
        if target.external_load:
            loads.append(target.external_load)
        target.peer_load = merge_peer_loads(loads, target.speed.prefill_rate)
        target.recompute()
        for order in self.load_orders.values():
            order.mark_changed(target)

    def check_invariants(self, in_flight_requests: Collection[InFlightRequest]) -> None:
        """Assert that every running count and sum of a target equals the one over its requests in flight."""
        for target in self.targets.values():
            requests = [request for request in in_flight_requests if request.target is target]
            moving_requests = [request for request in in_flight_requests if request.phase is RequestPhase.TRANSFER]
            incoming_count = sum(request.target is target for request in moving_requests)
            outgoing_count = sum(request.source is target for request in moving_requests)
            assert target.load.incoming_transfers == incoming_count, f"{target.name}: incoming transfers"
            assert target.load.outgoing_transfers == outgoing_count, f"{target.name}: outgoing transfers"
            _check_counts(target, requests)
            _check_prefill_queue(target, requests)
            _check_derived_values(target)


def _predict_ttft_s(request: InFlightRequest, candidate: Candidate, now: float) -> float:
    """Return the expected time to the first token of a new request, without waits for a slot or slower memory."""
    slowdown, arrival_s = request.target.slowdown, candidate.plan.arrival_s if candidate.plan else 0.0
    queue_s, _ = estimate_queue(candidate, request.prefill_s, now)
    # The target computes earlier prompts while KV comes from another worker, so the longer of the two waits counts.
    return max(arrival_s, slowdown * queue_s) + slowdown * request.prefill_s


def _check_counts(target: Target, requests: Collection[InFlightRequest]) -> None:
    """Assert that the counts of requests and tokens of a target are those of its requests in flight."""
    load, name = target.load, target.name
    decoding_requests = [request for request in requests if request.phase is RequestPhase.DECODE]
    has_ended = any(request.phase is RequestPhase.ENDED for request in requests)
    assert not has_ended, f"{name}: a request that has ended is in flight"
    assert load.request_count == len(requests), f"{name}: {load.request_count} requests, {len(requests)} known"
    assert load.decode_request_count == len(decoding_requests), f"{name}: decode count"
    background_count = sum(request.is_background for request in requests)
    assert load.background_request_count == background_count, f"{name}: background requests"
    context_tokens = sum(request.context_tokens for request in decoding_requests)
    assert load.decode_context_tokens == context_tokens, f"{name}: context"
    pending_tokens = sum(request.prompt_tokens for request in requests if request.has_no_first_token)
    assert load.pending_prompt_tokens == pending_tokens, f"{name}: prompt tokens before the first token"
    output_tokens = sum(request.expected_output_tokens for request in requests)
    assert math.isclose(load.remaining_output_tokens, output_tokens, abs_tol=1e-3), f"{name}: expected output tokens"
    overdue_tokens = sum(request.overdue_output_tokens for request in requests)
    assert load.overdue_output_tokens == overdue_tokens, f"{name}: tokens beyond expected lengths"


def _check_prefill_queue(target: Target, requests: Collection[InFlightRequest]) -> None:
    """Assert that a target's queue holds the requests in prefill, and the sum of their prefill times."""
    queue = target.prefill_queue
    prefilling_requests = {request for request in requests if request.phase is RequestPhase.PREFILL}
    assert set(queue.requests) == prefilling_requests, f"{target.name}: prefills differ"
    prefill_s = sum(request.prefill_s for request in queue.requests)
    assert math.isclose(queue.own_prefill_s, prefill_s, abs_tol=1e-6), f"{target.name}: prefill seconds"
    arriving_s = sum(request.prefill_s for request in requests if request.phase is RequestPhase.TRANSFER)
    assert math.isclose(queue.arriving_prefill_s, arriving_s, abs_tol=1e-6), f"{target.name}: prefill after transfers"


def _check_derived_values(target: Target) -> None:
    """Assert that the values that are derived from the counts are up to date, by deriving them again."""

    def get_values() -> list[float]:
        queue = target.prefill_queue
        queue_values = [queue.total_prefill_s, queue.busy_since_s, queue.oldest_prefill_s]
        return [*queue_values, target.slowdown, target.mutual_step_delay_s]

    cached_values = get_values()
    target.recompute()
    assert cached_values == get_values(), f"{target.name}: {cached_values} should be {get_values()}"
