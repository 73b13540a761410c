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
from router.decide.reported_load import DOUBTS_MAX, EngineLoad, LoadExpectation, ReportedLoad
from router.decide.shortlist import LoadOrder
from router.decide.speed import PoolSpeeds
from router.decide.target import InFlight, PeerLoad, PrefillInterval, RequestPhase, Target, merged
from router.index.protocol import HolderId

_MERGE_S: Final = 0.004
"""First tokens this close together came out of one engine step: one observation."""
DECODED_TOKENS: Final = 16
"""So many tokens of an answer teach what a decode step takes."""
_LISTENED: Final = 64
_LISTEN_S: Final = 0.01
"""Requests, the oldest, that are looked at so often while nothing was heard of a pool."""
TOKEN_S_MIN: Final = 1e-4
COUNT_DOUBT: Final = 16
"""No engine generates a sequence's tokens faster: one that says so is not believed. Nor that a stream had many more
tokens than chunks: a quarter, and so many. Where chunks have several tokens each, lengths and times are then in about
chunks, which is as good."""
CORRECTED_TOKENS: Final = 64
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
        self.requests: dict[str, InFlight] = {}
        self._epoch_s: float | None = None
        self._estimates: list[tuple[float, str]] = []
        """Heap of (estimated first token, request) of requests that do not stream."""
        self._listened_s = -math.inf
        self._peers: dict[str, dict[str, PeerLoad]] = {}
        """router -> target name -> load."""
        self.touched: set[str] = set()
        """Names of targets whose own load changed since whoever shares it last cleared this."""
        self.orders: list[LoadOrder] = []
        """Told of every change of a target's load."""

    # Targets -----------------------------------------------------------------------------------------------------
    def add_target(self, worker_id: str, rank: int | None, holder: HolderId, *, pool: str = "") -> Target:
        """A new target of the workers of one model (`pool`); it starts at their speed."""
        speeds = self._speeds.get(pool)
        if speeds is None:
            speeds = self._speeds[pool] = PoolSpeeds(self._service, self._learn)
        target = Target(worker_id, rank, holder, speeds)
        self.targets[target.name] = target
        self._apply_peers(target)
        return target

    def remove_target(self, name: str) -> None:
        """Its requests in flight stay known by id until they end; they no longer count anywhere."""
        target = self.targets.pop(name, None)
        if target is not None:
            target.speeds.leave(name)
        self.touched.discard(name)

    # A request's life --------------------------------------------------------------------------------------------
    def route(
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
    ) -> InFlight:
        """Count a request where it was sent. `expected_tokens`: a guess of how long its answer will be; `tier_load_s`:
        to fetch what lies on slower tiers, by the configured rates."""
        assert request_id not in self.requests, f"request {request_id} is already in flight"
        prefill_s = target.prefill_seconds(prompt_tokens, cached_tokens)
        target.settle(now)
        flight = InFlight(
            request_id=request_id,
            target=target,
            number=target.sent,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            expected_tokens=expected_tokens,
            expected_s=target.slowdown * (target.first_seconds(prefill_s, now) + prefill_s),
            prefill_s=prefill_s,
            routed_s=now,
            stream=stream,
            tier_load_s=tier_load_s,
        )
        if target.claims is not None and target.claims.claim:
            flight.wager = self._wager(flight, target.claims, now)
        if not stream:
            heapq.heappush(self._estimates, (now + flight.expected_s, request_id))
        target.sent += 1
        self.requests[request_id] = flight
        self._touch(target)
        target.prefills[request_id] = flight
        target.prefill_s += flight.prefill_s
        target.requests += 1
        target.pending_tokens += prompt_tokens
        target.left_tokens += expected_tokens
        target.refresh()
        target.requeue()
        window = self.cost.utilisation_window_s
        grown = math.exp((now - self._epoch(now)) / window)
        target.utilisation_scaled += flight.prefill_s / window * grown
        target.arrivals_scaled += grown / window
        return flight

    def first_token(self, request_id: str, now: float) -> InFlight | None:
        """PREFILL -> DECODE, seen; None where the request is unknown or already decoding."""
        flight = self.requests.get(request_id)
        if flight is None or flight.phase is RequestPhase.DECODE:
            return None
        if flight.wager is not None and flight.target.claims is not None:
            flight.target.claims.served(now - flight.routed_s, flight.wager.without_s, flight.wager.with_s)
            self._apply_peers(flight.target)
        self._observe(flight, now)
        self._start_decode(flight, now)
        flight.target.stepped_s = now
        flight.target.note_wait(now - flight.routed_s, flight.expected_s, now)
        return flight

    def progress(self, request_id: str, output_tokens: int, at_s: float | None = None) -> None:
        """A decoding request's context has grown to its prompt plus `output_tokens`, the last of which came `at_s`: an
        observation of what steps take, where that is known."""
        flight = self.requests.get(request_id)
        if flight is None or flight.phase is not RequestPhase.DECODE:
            return
        flight.said_tokens = output_tokens
        context = flight.prompt_tokens + output_tokens
        flight.target.context_tokens += context - flight.context_tokens
        flight.context_tokens = context
        flight.target.refresh()
        target = flight.target
        if at_s is not None and not target.prefills and at_s - target.decode_learnt_s >= target.speeds.steps_every_s:
            self._observe_steps(flight, output_tokens - flight.decode_said, at_s)

    def end(self, request_id: str, now: float, *, computed: bool = True, reported_cached: int | None = None) -> None:
        """Finished, failed or aborted: every count it had goes; where nothing was `computed`, its share of the
        utilisation too. `reported_cached`: the engine's own figure corrects what was learned from a prediction that
        was off."""
        flight = self.requests.pop(request_id, None)
        if flight is None:
            return
        target = flight.target
        self._touch(target)
        target.accrue(now)
        target.settle(now)
        target.requests -= 1
        target.ended_s = now
        if computed:
            target.stepped_s = now
        # Recomputed when empty, so that rounding never accumulates.
        target.left_tokens = target.left_tokens - flight.expected_tokens if target.requests else 0.0
        if flight.phase is RequestPhase.PREFILL:
            if self._leave_prefill(flight):
                target.head_since_s = now
        else:
            target.decode_requests -= 1
            target.context_tokens -= flight.context_tokens
        target.refresh()
        target.requeue()
        if not computed:
            window = self.cost.utilisation_window_s
            grown = math.exp((flight.routed_s - self._epoch(now)) / window)
            target.utilisation_scaled = max(0.0, target.utilisation_scaled - flight.prefill_s / window * grown)
        if reported_cached is not None:
            target.predicted_cached_tokens += flight.cached_tokens
            target.reported_cached_tokens += reported_cached
            if flight.interval is not None:
                self._correct(flight, flight.interval, reported_cached)

    def any_free(self, wait_s_max: float, now: float) -> bool:
        """Whether there is a target with no longer a wait."""
        return any(t.slowdown * t.queue_s(now) <= wait_s_max for t in self.targets.values())

    def _touch(self, target: Target) -> None:
        if self.targets.get(target.name) is target:
            self.touched.add(target.name)
            for order in self.orders:
                order.note(target)

    def advance(self, now: float) -> None:
        """Let requests that do not stream pass their estimated first token. Call before reading any load."""
        estimates = self._estimates
        while estimates and estimates[0][0] <= now:
            at_s, request_id = heapq.heappop(estimates)
            flight = self.requests.get(request_id)
            if flight is not None and flight.phase is RequestPhase.PREFILL and not flight.stream:
                self._start_decode(flight, at_s)
        if now - self._listened_s >= _LISTEN_S:
            self._listened_s = now
            for speeds in self._speeds.values():
                if speeds.silent:
                    self._listen(speeds, now)

    def _listen(self, speeds: PoolSpeeds, now: float) -> None:
        """Nothing was heard of a pool yet: that tells something too."""
        oldest = itertools.islice(self.requests.values(), _LISTENED)
        targets = {flight.target.name: flight.target for flight in oldest if flight.target.speeds is speeds}
        ratios = [ratio for target in targets.values() if (ratio := target.overdue(now)) is not None]
        if ratios:
            self._renew(next(iter(targets.values())), speeds.await_longer(ratios))

    def _start_decode(self, flight: InFlight, now: float) -> None:
        target = flight.target
        self._touch(target)
        target.settle(now)
        self._leave_prefill(flight)
        target.accrue(now)
        target.head_since_s = max(target.head_since_s, now)
        flight.phase = RequestPhase.DECODE
        flight.context_tokens = flight.prompt_tokens
        target.decode_requests += 1
        target.context_tokens += flight.context_tokens
        sums = target.sums
        sums.uncached_tokens += flight.prompt_tokens - flight.cached_tokens
        sums.quadratic += float(flight.prompt_tokens**2 - flight.cached_tokens**2)
        if flight.stream:
            flight.decode_start = msgspec.structs.replace(sums)
        target.refresh()
        target.requeue()

    def _leave_prefill(self, flight: InFlight) -> bool:
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
        return target.utilisation_scaled * factor + (target.peer.utilisation if target.peer is not None else 0.0)

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
            for order in self.orders:
                order.rebuild(1.0)
        return self._epoch_s

    # Learning ----------------------------------------------------------------------------------------------------
    def _observe(self, flight: InFlight, now: float) -> None:
        """Time from when the worker turned to this request until its first token: one observation, or part of one."""
        if not flight.stream:
            return
        target = flight.target
        if target.shortest_first:
            in_turn = flight.number > target.answered_number
            target.answered_number = max(flight.number, target.answered_number)
        else:
            in_turn = next(iter(target.prefills)) == flight.request_id
        alone = (target.peer is None or target.peer.prefill_s <= 0.0) and target.believed is None
        uncached = flight.prompt_tokens - flight.cached_tokens
        quadratic = float(flight.prompt_tokens**2 - flight.cached_tokens**2)
        interval = target.open_interval
        since = target.head_since_s if target.peer is None else max(target.head_since_s, target.peer.head_since_s)
        merges = interval is not None and now - interval.end_s <= _MERGE_S
        if interval is not None and not merges:
            merges = in_turn and interval.joins(flight.routed_s, since, target.service.step_tokens)
            if merges:
                interval.join(target.decode_requests, target.context_tokens)
        if interval is not None and merges:
            interval.end_s = now
            interval.uncached_tokens += uncached
            interval.quadratic += quadratic
            interval.tier_load_s += flight.tier_load_s
            interval.usable = interval.usable and alone
            flight.interval = interval
            return
        self.learn_pending(target)
        waits = 0.5 if target.decode_requests > 0 and flight.routed_s > since else 0.0
        start_s = max(since, flight.routed_s)
        flight.interval = target.open_interval = PrefillInterval(
            start_s=start_s,
            end_s=now,
            uncached_tokens=uncached,
            quadratic=quadratic,
            decode_requests=target.decode_requests,
            decode_context=target.context_tokens,
            usable=in_turn and alone,
            steps_before=waits,
            step_s=start_s + (now - start_s) * waits / (1.0 + waits),
            tier_load_s=flight.tier_load_s,
        )

    def answered(self, request_id: str, reported_tokens: int | None, now: float) -> int:
        """A whole answer has come: how long it was, as the engine says within reason, or as the edge counted. From its
        first token on it took a step for each."""
        flight = self.requests[request_id]
        said = counted = flight.said_tokens if flight.stream else 0
        if reported_tokens is not None:
            said = min(reported_tokens, int((now - flight.routed_s) / TOKEN_S_MIN))
            if counted:
                said = min(said, counted + counted // 4 + COUNT_DOUBT)
        flight.said_tokens = said
        self._observe_steps(flight, (counted or said) - flight.decode_said, now)
        return said

    def _observe_steps(self, flight: InFlight, steps: int, now: float) -> None:
        """Since a stream was last looked at it took so many steps, in which its target also prefilled what had its
        first token meanwhile: an observation of what steps take."""
        target, start = flight.target, flight.decode_start
        if start is None or steps < DECODED_TOKENS or self.targets.get(target.name) is not target:
            return
        target.accrue(now)
        elapsed_s = now - start.at_s
        if elapsed_s <= 0.0:
            return
        seen = target.sums.since(start, elapsed_s, steps=steps, clean=not target.prefills)
        flight.decode_start = msgspec.structs.replace(target.sums, at_s=now)
        flight.decode_said = flight.said_tokens
        if flight.wager is not None and target.claims is not None:
            target.compare(flight.wager, seen)
            self._apply_peers(target)
        if target.believed is None and now - target.decode_learnt_s >= target.speeds.steps_every_s:
            target.decode_learnt_s = now
            names, _ = target.speeds.observe(target.name, seen)
            self._renew(target, names)

    def learn_pending(self, target: Target) -> None:
        """Close the open interval and learn from it."""
        interval = target.open_interval
        target.open_interval = None
        if interval is None or not interval.usable or self.targets.get(target.name) is not target:
            return  # also when the worker was removed with requests in flight
        if interval.tier_load_s:
            seen = interval.seen(target.service.step_tokens)
            target.tier_load_speed.observe(interval.tier_load_s, seen.elapsed_s - target.expected_s(seen))
            interval.estimated_tier_load_s = min(
                interval.tier_load_s * target.tier_load_speed.factor, 0.9 * seen.elapsed_s
            )
        names, interval.taught = target.speeds.observe(target.name, interval.seen(target.service.step_tokens))
        self._renew(target, names)

    def _correct(self, flight: InFlight, interval: PrefillInterval, reported_cached: int) -> None:
        """The engine reused another part of the prompt than was predicted."""
        cached = min(max(reported_cached, 0), flight.prompt_tokens)
        if abs(cached - flight.cached_tokens) < CORRECTED_TOKENS:
            return
        interval.uncached_tokens += flight.cached_tokens - cached
        interval.quadratic += float(flight.cached_tokens**2 - cached**2)
        target = flight.target
        if interval.taught is not None and self.targets.get(target.name) is target:
            seen = interval.seen(target.service.step_tokens)
            self._renew(target, target.speeds.correct(interval.taught, seen))
            interval.taught = None  # a lesson is corrected once; steps of several corrected requests are rare

    def _renew(self, target: Target, names: list[str]) -> None:
        """Give the targets of one pool what was newly learned of them."""
        for name in names:
            changed = self.targets.get(name)
            if changed is not None and changed.speeds is target.speeds:
                changed.teach(changed.speeds.model(name))
                self._apply_peers(changed)

    # Other routers -----------------------------------------------------------------------------------------------
    def share(self, target: Target, now: float) -> PeerLoad:
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

    def set_peer(self, router: str, loads: Mapping[str, PeerLoad], *, full: bool = True) -> None:
        """What `router` has in flight, by target name. `full`: nothing on others, so that {} forgets the router; else
        about targets that are known only: of the rest a full message will tell."""
        before = self._peers.pop(router, {})
        known = {} if full else before
        now = {**known, **{name: load for name, load in loads.items() if full or name in self.targets}}
        if now:
            self._peers[router] = now
        for name in (before.keys() if full else set()) | loads.keys():
            if name in self.targets:
                self._apply_peers(self.targets[name])

    # Engines that tell of their load -------------------------------------------------------------------------------
    def hear_load(self, name: str, load: EngineLoad | None, now: float, *, sent: int) -> None:
        """What a target's engine says; None: it was asked in vain. `sent`: our requests when it was asked."""
        target = self.targets.get(name)
        if target is None or (load is None and target.claims is None):
            return
        claims = target.claims = target.claims or ReportedLoad()
        before, sent = claims.believed, max(sent, target.requests)
        held = target.context_tokens + target.pending_tokens - target.shared_tokens
        for known in self._peers.values():
            if (peer := known.get(name)) is not None:
                sent += peer.decode_requests + peer.prefill_requests
                held += peer.decode_context
        claims.hear(load, now, sent=sent, seats=target.seats, held_tokens=held, capacity=target.capacity_tokens)
        if claims.believed != before:
            target.accrue(now)
            self._apply_peers(target)

    def _wager(self, flight: InFlight, claims: ReportedLoad, now: float) -> LoadExpectation:
        """What is to be expected where the claim is true, and where it is not."""
        target, doubts = flight.target, claims.doubts
        claims.sent(now)
        expected = []
        for claims.doubts in (DOUBTS_MAX, 0):
            self._apply_peers(target)
            first_s = target.first_token_seconds(flight.prompt_tokens, flight.cached_tokens, now)
            expected.append((first_s, target.step_now_s))
        claims.doubts = doubts
        self._apply_peers(target)
        (without_s, step_s), (with_s, longer_s) = expected
        return LoadExpectation(without_s, with_s, longer_s - step_s)

    def _apply_peers(self, target: Target) -> None:
        loads = [known[target.name] for known in self._peers.values() if target.name in known]
        others = target.others()
        if others is not None:
            loads.append(others)
        target.peer = merged(loads, target.prefill_rate) if loads else None
        target.refresh()
        target.requeue()
        for order in self.orders:
            order.note(target)

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
            assert math.isclose(target.left_tokens, sum(f.expected_tokens for f in flights), abs_tol=1e-3)
            derived = (target.slowdown, target.waiting_s, target.busy_since_s, target.oldest_s, target.sharing_s)
            target.refresh()
            target.requeue()
            fresh = (target.slowdown, target.waiting_s, target.busy_since_s, target.oldest_s, target.sharing_s)
            assert derived == fresh, f"{target.name}: {derived} was not brought up to date, it should be {fresh}"
            assert target.context_tokens == sum(f.context_tokens for f in decoding), f"{target.name}: context"
