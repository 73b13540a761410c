"""How busy each worker is, from the router's own bookkeeping: the cost's Q, U, slow, n_dec and ctx.

Owns what is in flight on each target (router/decide/target.py) and what was learned of its speed. Refuses to know why a
target was chosen, caches, sockets and clocks.

Invariants (`check_invariants`): a target's sums equal the sums over its requests; a request is in exactly one phase;
after every request ended, every sum is zero.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from router.decide.config import CostConfig, LearnConfig, ServiceModel
from router.decide.reported_load import MISMATCHES_MAX, EngineLoad, LoadExpectation, ReportedLoad
from router.decide.shortlist import LoadOrder
from router.decide.speed import PoolSpeeds
from router.decide.target import InFlightRequest, PeerLoad, PrefillInterval, RequestPhase, Target, merge_loads
from router.index.protocol import HolderId

_SAME_STEP_S: Final = 0.004
"""First tokens this close together came out of one engine step: one observation."""
OBSERVED_STEPS_MIN: Final = 16
"""So many tokens of an answer teach what a decode step takes."""
_SILENCE_REQUESTS_MAX: Final = 64
_SILENCE_CHECK_S: Final = 0.01
"""Requests, the oldest, that are looked at so often while nothing was heard of a pool."""
TOKEN_S_MIN: Final = 1e-4
COUNT_TOLERANCE_TOKENS: Final = 16
"""No engine generates a sequence's tokens faster: one that says so is not believed. Nor that a stream had many more
tokens than chunks: a quarter, and so many. Where chunks have several tokens each, lengths and times are then in about
chunks, which is as good."""
CORRECTION_TOKENS_MIN: Final = 64
"""A prediction that was off by less taught nothing wrong."""
_RESCALE_WINDOWS: Final = 20.0


class LoadTracker:
    """Bookkeeping at route, first token, finish, failure; learning; the load other routers told of."""

    def __init__(self, service: ServiceModel, cost: CostConfig, learn: LearnConfig) -> None:
        self._service = service
        self.cost = cost
        self._learn = learn
        self._speeds: dict[str, PoolSpeeds] = {}
        """pool -> what was learned of its targets; as many as models were ever served."""
        self.targets: dict[str, Target] = {}
        self.requests: dict[str, InFlightRequest] = {}
        self._epoch_s: float | None = None
        self._estimates: list[tuple[float, str]] = []
        """Heap of (estimated first token, request) of requests that do not stream."""
        self._silence_checked_s = -math.inf
        self._peer_loads: dict[str, dict[str, PeerLoad]] = {}
        """router -> target name -> load."""
        self.changed_targets: set[str] = set()
        """Names of targets whose own load changed since whoever shares it last cleared this."""
        self.load_orders: list[LoadOrder] = []
        """Told of every change of a target's load."""

    # Targets -----------------------------------------------------------------------------------------------------
    def add_target(self, worker_id: str, rank: int | None, holder: HolderId, *, pool: str = "") -> Target:
        """A new target of the workers of one model (`pool`); it starts at their speed."""
        speeds = self._speeds.get(pool)
        if speeds is None:
            speeds = self._speeds[pool] = PoolSpeeds(self._service, self._learn)
        target = Target(worker_id, rank, holder, speeds)
        self.targets[target.name] = target
        self._update_peer_load(target)
        return target

    def remove_target(self, name: str) -> None:
        """Its requests in flight stay known by id until they end; they no longer count anywhere."""
        target = self.targets.pop(name, None)
        if target is not None:
            target.speeds.remove_worker(name)
        self.changed_targets.discard(name)

    # A request's life --------------------------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        target: Target,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        stream: bool,
        now: float,
        expected_tokens: float = 0.0,
        tier_load_s: float = 0.0,
    ) -> InFlightRequest:
        """Count a request where it was sent. `expected_tokens`: a guess of how long its answer will be; `tier_load_s`:
        to fetch what lies on slower tiers, by the configured rates."""
        assert request_id not in self.requests, f"request {request_id} is already in flight"
        prefill_s = target.prefill_seconds(prompt_tokens, cached_tokens)
        target.record_queue_progress(now)
        flight = InFlightRequest(
            request_id=request_id,
            target=target,
            number=target.sent_requests,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            expected_tokens=expected_tokens,
            expected_s=target.slowdown * (target.seconds_before(prefill_s, now) + prefill_s),
            prefill_s=prefill_s,
            routed_s=now,
            stream=stream,
            tier_load_s=tier_load_s,
        )
        if target.reported_load is not None and target.reported_load.external:
            flight.expectation = self._expect_wait(flight, target.reported_load, now)
        if not stream:
            heapq.heappush(self._estimates, (now + flight.expected_s, request_id))
        target.sent_requests += 1
        self.requests[request_id] = flight
        self._mark_changed(target)
        target.prefills[request_id] = flight
        target.prefill_s += flight.prefill_s
        target.requests += 1
        target.pending_tokens += prompt_tokens
        target.remaining_tokens += expected_tokens
        target.refresh()
        target.refresh_queue()
        window = self.cost.utilisation_window_s
        growth = math.exp((now - self._epoch(now)) / window)
        target.utilisation_scaled += flight.prefill_s / window * growth
        target.arrivals_scaled += growth / window
        return flight

    def record_first_token(self, request_id: str, now: float) -> InFlightRequest | None:
        """PREFILL -> DECODE, seen; None where the request is unknown or already decoding."""
        flight = self.requests.get(request_id)
        if flight is None or flight.phase is RequestPhase.DECODE:
            return None
        if flight.expectation is not None and flight.target.reported_load is not None:
            flight.target.reported_load.record_wait(
                now - flight.routed_s, flight.expectation.own_only_s, flight.expectation.with_external_s
            )
            self._update_peer_load(flight.target)
        self._observe_first_token(flight, now)
        self._start_decode(flight, now)
        flight.target.last_step_s = now
        flight.target.record_wait(now - flight.routed_s, flight.expected_s, now)
        return flight

    def record_progress(self, request_id: str, output_tokens: int, at_s: float | None = None) -> None:
        """A decoding request's context has grown to its prompt plus `output_tokens`, the last of which came `at_s`: an
        observation of what steps take, where that is known."""
        flight = self.requests.get(request_id)
        if flight is None or flight.phase is not RequestPhase.DECODE:
            return
        flight.output_tokens = output_tokens
        context = flight.prompt_tokens + output_tokens
        flight.target.context_tokens += context - flight.context_tokens
        flight.context_tokens = context
        flight.target.refresh()
        target = flight.target
        if (
            at_s is not None
            and not target.prefills
            and at_s - target.steps_observed_s >= target.speeds.step_observation_interval_s
        ):
            self._observe_steps(flight, output_tokens - flight.observed_output_tokens, at_s)

    def end_request(
        self, request_id: str, now: float, *, is_computed: bool = True, reported_cached: int | None = None
    ) -> None:
        """Finished, failed or aborted: every count it had goes; where nothing was computed, its share of the
        utilisation too. `reported_cached`: the engine's own figure corrects what was learned from a prediction that
        was off."""
        flight = self.requests.pop(request_id, None)
        if flight is None:
            return
        target = flight.target
        self._mark_changed(target)
        target.update_totals(now)
        target.record_queue_progress(now)
        target.requests -= 1
        target.ended_s = now
        if is_computed:
            target.last_step_s = now
        # Recomputed when empty, so that rounding never accumulates.
        target.remaining_tokens = target.remaining_tokens - flight.expected_tokens if target.requests else 0.0
        if flight.phase is RequestPhase.PREFILL:
            if self._remove_from_prefill(flight):
                target.head_since_s = now
        else:
            target.decode_requests -= 1
            target.context_tokens -= flight.context_tokens
        target.refresh()
        target.refresh_queue()
        if not is_computed:
            window = self.cost.utilisation_window_s
            growth = math.exp((flight.routed_s - self._epoch(now)) / window)
            target.utilisation_scaled = max(0.0, target.utilisation_scaled - flight.prefill_s / window * growth)
        if reported_cached is not None:
            target.predicted_cached_tokens += flight.cached_tokens
            target.reported_cached_tokens += reported_cached
            if flight.interval is not None:
                self._correct_observation(flight, flight.interval, reported_cached)

    def has_free_target(self, wait_s_max: float, now: float) -> bool:
        """Whether there is a target with no longer a wait."""
        return any(t.slowdown * t.queue_s(now) <= wait_s_max for t in self.targets.values())

    def _mark_changed(self, target: Target) -> None:
        if self.targets.get(target.name) is target:
            self.changed_targets.add(target.name)
            for order in self.load_orders:
                order.mark_changed(target)

    def advance(self, now: float) -> None:
        """Let requests that do not stream pass their estimated first token. Call before reading any load."""
        estimates = self._estimates
        while estimates and estimates[0][0] <= now:
            at_s, request_id = heapq.heappop(estimates)
            flight = self.requests.get(request_id)
            if flight is not None and flight.phase is RequestPhase.PREFILL and not flight.stream:
                self._start_decode(flight, at_s)
        if now - self._silence_checked_s >= _SILENCE_CHECK_S:
            self._silence_checked_s = now
            for speeds in self._speeds.values():
                if speeds.is_untrained:
                    self._check_silence(speeds, now)

    def _check_silence(self, speeds: PoolSpeeds, now: float) -> None:
        """Nothing was heard of a pool yet: that tells something too."""
        oldest = itertools.islice(self.requests.values(), _SILENCE_REQUESTS_MAX)
        targets = {flight.target.name: flight.target for flight in oldest if flight.target.speeds is speeds}
        ratios = [ratio for target in targets.values() if (ratio := target.overdue_ratio(now)) is not None]
        if ratios:
            self._update_models(next(iter(targets.values())), speeds.raise_prior(ratios))

    def _start_decode(self, flight: InFlightRequest, now: float) -> None:
        target = flight.target
        self._mark_changed(target)
        target.record_queue_progress(now)
        self._remove_from_prefill(flight)
        target.update_totals(now)
        target.head_since_s = max(target.head_since_s, now)
        flight.phase = RequestPhase.DECODE
        flight.context_tokens = flight.prompt_tokens
        target.decode_requests += 1
        target.context_tokens += flight.context_tokens
        sums = target.work_totals
        sums.uncached_tokens += flight.prompt_tokens - flight.cached_tokens
        sums.quadratic += float(flight.prompt_tokens**2 - flight.cached_tokens**2)
        if flight.stream:
            flight.decode_start = msgspec.structs.replace(sums)
        target.refresh()
        target.refresh_queue()

    def _remove_from_prefill(self, flight: InFlightRequest) -> bool:
        """Take a request's P off; True where it was the oldest."""
        target = flight.target
        was_oldest = next(iter(target.prefills)) == flight.request_id
        del target.prefills[flight.request_id]
        target.pending_tokens -= flight.prompt_tokens
        # Recomputed when empty, so that rounding never accumulates.
        target.prefill_s = target.prefill_s - flight.prefill_s if target.prefills else 0.0
        return was_oldest

    # Utilisation -------------------------------------------------------------------------------------------------
    def utilisation_factor(self, now: float) -> float:
        """U of a target at `now` = its `utilisation_scaled` * this (plus what peers told)."""
        return math.exp(-max(now - self._epoch(now), 0.0) / self.cost.utilisation_window_s)

    def utilisation(self, target: Target, now: float) -> float:
        """U, other routers' share included."""
        factor = self.utilisation_factor(now)  # first: it may rescale what it is multiplied with
        return target.utilisation_scaled * factor + (
            target.peer_load.utilisation if target.peer_load is not None else 0.0
        )

    def _epoch(self, now: float) -> float:
        """Decay is kept as one growing factor for all; start over before it overflows."""
        window = self.cost.utilisation_window_s
        if self._epoch_s is None:
            self._epoch_s = now
        elif now - self._epoch_s > _RESCALE_WINDOWS * window:
            factor = math.exp(-(now - self._epoch_s) / window)
            for target in self.targets.values():
                target.utilisation_scaled *= factor
                target.arrivals_scaled *= factor
            self._epoch_s = now
            for order in self.load_orders:
                order.rebuild(1.0)
        return self._epoch_s

    # Learning ----------------------------------------------------------------------------------------------------
    def _observe_first_token(self, flight: InFlightRequest, now: float) -> None:
        """Time from when the worker turned to this request until its first token: one observation, or part of one."""
        if not flight.stream:
            return
        target = flight.target
        if target.shortest_first:
            is_in_turn = flight.number > target.last_answered_number
            target.last_answered_number = max(flight.number, target.last_answered_number)
        else:
            is_in_turn = next(iter(target.prefills)) == flight.request_id
        is_alone = (target.peer_load is None or target.peer_load.prefill_s <= 0.0) and target.external_load is None
        uncached_tokens = flight.prompt_tokens - flight.cached_tokens
        quadratic = float(flight.prompt_tokens**2 - flight.cached_tokens**2)
        interval = target.open_interval
        since_s = (
            target.head_since_s if target.peer_load is None else max(target.head_since_s, target.peer_load.head_since_s)
        )
        joins_interval = interval is not None and now - interval.end_s <= _SAME_STEP_S
        if interval is not None and not joins_interval:
            joins_interval = is_in_turn and interval.can_add_step(flight.routed_s, since_s, target.service.step_tokens)
            if joins_interval:
                interval.add_step(target.decode_requests, target.context_tokens)
        if interval is not None and joins_interval:
            interval.end_s = now
            interval.uncached_tokens += uncached_tokens
            interval.quadratic += quadratic
            interval.tier_load_s += flight.tier_load_s
            interval.is_usable = interval.is_usable and is_alone
            flight.interval = interval
            return
        self.close_interval(target)
        steps_waited = 0.5 if target.decode_requests > 0 and flight.routed_s > since_s else 0.0
        start_s = max(since_s, flight.routed_s)
        flight.interval = target.open_interval = PrefillInterval(
            start_s=start_s,
            end_s=now,
            uncached_tokens=uncached_tokens,
            quadratic=quadratic,
            decode_requests=target.decode_requests,
            decode_context=target.context_tokens,
            is_usable=is_in_turn and is_alone,
            steps_before=steps_waited,
            last_step_start_s=start_s + (now - start_s) * steps_waited / (1.0 + steps_waited),
            tier_load_s=flight.tier_load_s,
        )

    def record_answer(self, request_id: str, reported_tokens: int | None, now: float) -> int:
        """A whole answer has come: how long it was, as the engine says within reason, or as the edge counted. From its
        first token on it took a step for each."""
        flight = self.requests[request_id]
        output_tokens = counted_tokens = flight.output_tokens if flight.stream else 0
        if reported_tokens is not None:
            output_tokens = min(reported_tokens, int((now - flight.routed_s) / TOKEN_S_MIN))
            if counted_tokens:
                output_tokens = min(output_tokens, counted_tokens + counted_tokens // 4 + COUNT_TOLERANCE_TOKENS)
        flight.output_tokens = output_tokens
        self._observe_steps(flight, (counted_tokens or output_tokens) - flight.observed_output_tokens, now)
        return output_tokens

    def _observe_steps(self, flight: InFlightRequest, steps: int, now: float) -> None:
        """Since a stream was last looked at it took so many steps, in which its target also prefilled what had its
        first token meanwhile: an observation of what steps take."""
        target, start = flight.target, flight.decode_start
        if start is None or steps < OBSERVED_STEPS_MIN or self.targets.get(target.name) is not target:
            return
        target.update_totals(now)
        elapsed_s = now - start.at_s
        if elapsed_s <= 0.0:
            return
        observation = target.work_totals.observe_since(start, elapsed_s, steps=steps, is_complete=not target.prefills)
        flight.decode_start = msgspec.structs.replace(target.work_totals, at_s=now)
        flight.observed_output_tokens = flight.output_tokens
        if flight.expectation is not None and target.reported_load is not None:
            target.test_expectation(flight.expectation, observation)
            self._update_peer_load(target)
        if target.external_load is None and now - target.steps_observed_s >= target.speeds.step_observation_interval_s:
            target.steps_observed_s = now
            names, _ = target.speeds.observe(target.name, observation)
            self._update_models(target, names)

    def close_interval(self, target: Target) -> None:
        """Close the open interval and learn from it."""
        interval = target.open_interval
        target.open_interval = None
        if interval is None or not interval.is_usable or self.targets.get(target.name) is not target:
            return  # also when the worker was removed with requests in flight
        if interval.tier_load_s:
            observation = interval.to_observation(target.service.step_tokens)
            target.tier_load_speed.observe(
                interval.tier_load_s, observation.elapsed_s - target.expected_seconds(observation)
            )
            interval.estimated_tier_load_s = min(
                interval.tier_load_s * target.tier_load_speed.factor, 0.9 * observation.elapsed_s
            )
        names, interval.sample = target.speeds.observe(target.name, interval.to_observation(target.service.step_tokens))
        self._update_models(target, names)

    def _correct_observation(self, flight: InFlightRequest, interval: PrefillInterval, reported_cached: int) -> None:
        """The engine reused another part of the prompt than was predicted."""
        cached_tokens = min(max(reported_cached, 0), flight.prompt_tokens)
        if abs(cached_tokens - flight.cached_tokens) < CORRECTION_TOKENS_MIN:
            return
        interval.uncached_tokens += flight.cached_tokens - cached_tokens
        interval.quadratic += float(flight.cached_tokens**2 - cached_tokens**2)
        target = flight.target
        if interval.sample is not None and self.targets.get(target.name) is target:
            observation = interval.to_observation(target.service.step_tokens)
            self._update_models(target, target.speeds.correct(interval.sample, observation))
            interval.sample = None  # a lesson is corrected once; steps of several corrected requests are rare

    def _update_models(self, target: Target, names: list[str]) -> None:
        """Give the targets of one pool what was newly learned of them."""
        for name in names:
            changed_target = self.targets.get(name)
            if changed_target is not None and changed_target.speeds is target.speeds:
                changed_target.set_service_model(changed_target.speeds.model(name))
                self._update_peer_load(changed_target)

    # Other routers -----------------------------------------------------------------------------------------------
    def own_load(self, target: Target, now: float) -> PeerLoad:
        """This router's own part of a target's load."""
        oldest = next(iter(target.prefills.values()), None)
        factor = self.utilisation_factor(now)
        return PeerLoad(
            prefill_s=target.prefill_s,
            prefill_requests=len(target.prefills),
            oldest_prefill_s=oldest.prefill_s if oldest else 0.0,
            oldest_routed_s=oldest.routed_s if oldest else now,
            head_since_s=target.head_since_s,
            decode_requests=target.decode_requests,
            decode_context=target.context_tokens,
            utilisation=target.utilisation_scaled * factor,
            updated_s=now,
            prefill_rate=target.prefill_rate,
        )

    def set_peer_loads(self, router: str, loads: Mapping[str, PeerLoad], *, full: bool = True) -> None:
        """What `router` has in flight, by target name. `full`: nothing on others, so that {} forgets the router; else
        about targets that are known only: of the rest a full message will tell."""
        previous = self._peer_loads.pop(router, {})
        other_loads = {} if full else previous
        new_loads = {**other_loads, **{name: load for name, load in loads.items() if full or name in self.targets}}
        if new_loads:
            self._peer_loads[router] = new_loads
        for name in (previous.keys() if full else set()) | loads.keys():
            if name in self.targets:
                self._update_peer_load(self.targets[name])

    # Engines that tell of their load -------------------------------------------------------------------------------
    def record_engine_load(self, name: str, load: EngineLoad | None, now: float, *, in_flight: int) -> None:
        """What a target's engine says; None: it was asked in vain. `in_flight`: our requests when it was asked."""
        target = self.targets.get(name)
        if target is None or (load is None and target.reported_load is None):
            return
        reported_load = target.reported_load = target.reported_load or ReportedLoad()
        previous, in_flight = reported_load.trusted_external, max(in_flight, target.requests)
        kv_tokens = target.context_tokens + target.pending_tokens - target.shared_tokens
        for peer_loads in self._peer_loads.values():
            if (peer := peer_loads.get(name)) is not None:
                in_flight += peer.decode_requests + peer.prefill_requests
                kv_tokens += peer.decode_context
        reported_load.update(
            load,
            now,
            in_flight=in_flight,
            max_num_seqs=target.max_num_seqs,
            kv_tokens=kv_tokens,
            capacity=target.capacity_tokens,
        )
        if reported_load.trusted_external != previous:
            target.update_totals(now)
            self._update_peer_load(target)

    def _expect_wait(self, flight: InFlightRequest, reported_load: ReportedLoad, now: float) -> LoadExpectation:
        """What is to be expected where the report is true, and where it is not."""
        target, mismatches = flight.target, reported_load.mismatches
        reported_load.start_test(now)
        expected = []
        for reported_load.mismatches in (MISMATCHES_MAX, 0):
            self._update_peer_load(target)
            first_s = target.first_token_seconds(flight.prompt_tokens, flight.cached_tokens, now)
            expected.append((first_s, target.step_s))
        reported_load.mismatches = mismatches
        self._update_peer_load(target)
        (own_only_s, step_s), (with_external_s, longer_s) = expected
        return LoadExpectation(own_only_s, with_external_s, longer_s - step_s)

    def _update_peer_load(self, target: Target) -> None:
        loads = [peer_loads[target.name] for peer_loads in self._peer_loads.values() if target.name in peer_loads]
        external = target.external_peer_load()
        if external is not None:
            loads.append(external)
        target.peer_load = merge_loads(loads, target.prefill_rate) if loads else None
        target.refresh()
        target.refresh_queue()
        for order in self.load_orders:
            order.mark_changed(target)

    # Truth -------------------------------------------------------------------------------------------------------
    def check_invariants(self) -> None:
        """Every sum equals what it sums."""
        for target in self.targets.values():
            flights = [f for f in self.requests.values() if f.target is target]
            decoding = [f for f in flights if f.phase is RequestPhase.DECODE]
            waiting = [f.request_id for f in flights if f.phase is RequestPhase.PREFILL]
            assert target.requests == len(flights), f"{target.name}: {target.requests} requests, {len(flights)} known"
            assert sorted(target.prefills) == sorted(waiting), f"{target.name}: prefills differ"
            assert math.isclose(target.prefill_s, sum(f.prefill_s for f in target.prefills.values()), abs_tol=1e-6)
            assert target.decode_requests == len(decoding), f"{target.name}: decode count"
            assert target.pending_tokens == sum(f.prompt_tokens for f in target.prefills.values())
            assert math.isclose(target.remaining_tokens, sum(f.expected_tokens for f in flights), abs_tol=1e-3)
            cached_values = (
                target.slowdown,
                target.waiting_s,
                target.busy_since_s,
                target.oldest_prefill_s,
                target.shared_step_s,
            )
            target.refresh()
            target.refresh_queue()
            fresh_values = (
                target.slowdown,
                target.waiting_s,
                target.busy_since_s,
                target.oldest_prefill_s,
                target.shared_step_s,
            )
            assert cached_values == fresh_values, (
                f"{target.name}: {cached_values} was not brought up to date, it should be {fresh_values}"
            )
            assert target.context_tokens == sum(f.context_tokens for f in decoding), f"{target.name}: context"
