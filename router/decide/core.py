"""The router's core, sans IO: stimuli in, instructions out.

Every method that changes state takes `now` (seconds of one monotonic clock, never going back) and returns the
instructions that follow from it, in order; the shell performs them. Single-threaded: the shell calls it from one
thread; the index behind it may be fed by another.

A request's life: `route` -> Forward (in flight), Enqueue (kept in the queue) or Refuse (forgotten at once). In
flight it ends by `finished`, `aborted` or `failed`, the last of which may start another attempt. Held it ends by a
Forward, a Refuse or `aborted`, at the latest one tick after its deadline. Invariants: a request is held or in flight,
never both; in flight it has exactly one entry in the tracker and at most one pin; when all have ended, every counter of
load is zero and no pin outlives its grace.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from router.decide.cache_state import CacheState
from router.decide.chooser import Chooser, MediaPlacement, RoutingChoice
from router.decide.config import CoreConfig
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
from router.decide.queue import ActiveRequest, QueuePosition, RequestQueue, RetryBudget, gave_up
from router.decide.registry import CoreSnapshot, WorkerRegistry, worker_row
from router.decide.reported_load import EngineLoad
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.decide.watchdog import StallDetector, Watchdog
from router.decide.workers import Breaker, CacheView, ServedModel, Worker, WorkerSpec, WorkerState
from router.index.protocol import PrefixIndex

QUEUE_FULL: Final = "The router's queue is full, or this key waits there with as much as all others could."
TRIES: Final = 24
"""Held requests that are tried at each first token and each tick."""
TRY_EVERY_S: Final = 0.05
SUSPICIONS_MAX: Final = 2
"""Workers that a request may have ended or broken, after which it gets no other one."""
_AFTER_FIRST_BYTE: Final = (FailureKind.STALLED, FailureKind.STREAM)
_MAY_END_WORKERS: Final = (FailureKind.INTERNAL, FailureKind.RESET, FailureKind.STREAM)
"""What a worker looks like whose process this very request ended."""
Placed = TypeVar("Placed", bound=Forward | Enqueue | Refuse)


class RouterCore:
    """Chooses a worker for each request and keeps the books. See the module's docstring."""

    def __init__(self, index: PrefixIndex, config: CoreConfig, *, seed: int = 0) -> None:
        self.config = config
        self.index = index
        self.tracker = LoadTracker(config.service, config.cost, config.learn)
        self.book = CacheState(index, config)
        self.registry = WorkerRegistry(index, self.tracker, self.book, Breaker(config.health))
        self.workers: Mapping[str, Worker] = self.registry.workers
        self.watchdog = Watchdog()
        self.stillness = StallDetector(config.health.stalled_s)
        self.counters: Counter[str] = Counter()
        self._lengths = OutputLengths()
        self._rng = random.Random(seed)
        self._chooser = Chooser(self.registry, self.tracker, self.book, self._lengths, config, self._rng)
        self._live: dict[str, ActiveRequest] = {}
        self._held = RequestQueue(config.queue)
        self._holds = config.queue.fair and config.policy == "kv" and config.policy_function is None
        """Requests wait here while every worker is busy."""
        self._behind = config.queue.background_priority if config.queue.background_priority is not None else math.inf
        """From this priority on, a request is in the background."""
        self._in_background: dict[str, str] = {}
        """Background request in flight -> the target it is on."""
        self._next_try_s = 0.0
        self._retries = RetryBudget(config.retry)

    # Workers -----------------------------------------------------------------------------------------------------
    def add_worker(self, spec: WorkerSpec, now: float, *, up: bool = True) -> Worker:
        """Register a worker and its holders in the index, or update what is known of it (same worker_id)."""
        return self.registry.add(spec, up=up)

    def remove_worker(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget it at once. Its requests in flight stay known until the edge reports their end."""
        if worker_id not in self.workers:
            return []
        self.watchdog.forget(worker_id)
        self.registry.remove(worker_id)
        return self._try_held(now)

    def worker_up(self, worker_id: str, now: float) -> list[Instruction]:
        """A health check succeeded."""
        worker = self.workers.get(worker_id)
        if worker is None or not self.registry.breaker.success(worker):
            return []
        self.registry.changed()
        return self._try_held(now)

    def worker_down(self, worker_id: str, now: float, reason: str) -> list[Instruction]:
        """A health check failed for good: out of the candidates at once, and out of the index (WorkerLost)."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        was_down = worker.is_down
        self.registry.breaker.down(worker, now, reason)
        self.registry.changed()
        return [] if was_down else [self._lost(worker), *self._try_held(now)]

    def drain(self, worker_id: str, now: float, *, on: bool = True) -> list[Instruction]:
        """Stop (or resume) giving a worker new work; what it has goes on. Raises KeyError where it is unknown."""
        self.workers[worker_id].is_drained = on
        self.registry.changed()
        return self._try_held(now)

    def sleep(self, worker_id: str, now: float, *, on: bool) -> list[Instruction]:
        """Its engine says that it sleeps, or (`on` is False) that it does not."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.is_asleep is on:
            return []
        worker.is_asleep = on
        self.registry.changed()
        return self._try_held(now)

    def emptied(self, worker_id: str, at_s: float) -> None:
        """The engine forgot all that was cached."""
        for target in self.registry.targets_of(worker_id):
            flights = self.tracker.requests.items()
            self.book.emptied(target, [name for name, one in flights if one.target is target and one.routed_s <= at_s])

    def look(self, moved: Mapping[str, float], now: float) -> set[str]:
        """Notice workers that stand still: others are preferred to them until they move. See StallDetector.look."""
        changed = self.stillness.look(moved, now)
        self.registry.avoided = frozenset(self.stillness.workers)
        return changed

    def sent_to(self, worker_id: str) -> list[int]:
        """Requests in flight on each rank: what an engine that is asked for its load now may have of ours."""
        return [target.requests for target in self.registry.targets_of(worker_id)]

    def engine_says(self, worker_id: str, loads: Sequence[EngineLoad | None], sent: Sequence[int], now: float) -> None:
        """The load that a worker told, or not, of each rank; `sent`: what `sent_to` said when it was asked."""
        for target, load, count in zip(self.registry.targets_of(worker_id), loads, sent):
            self.tracker.hear_load(target.name, load, now, sent=count)

    def caches_seen(self, seen: Mapping[str, Sequence[int | None]]) -> None:
        """What the caches of workers hold, by rank, as their events show it: counts where a worker does not tell."""
        changed = False
        for worker_id, tokens in seen.items():
            for target, seen_tokens in zip(self.registry.targets_of(worker_id), tokens):
                if target.seen_tokens != seen_tokens:
                    target.seen_tokens = seen_tokens
                    self.book.join(target, self.workers[worker_id].spec)
                    changed = True
        if changed:
            self.registry.changed()

    def resolve_model(self, name: str) -> ServedModel | None:
        """What a client's model name means (base model, LoRA), or None where no worker serves it."""
        return self.registry.models().get(name)

    # A request's life --------------------------------------------------------------------------------------------
    def route(self, request: RouteRequest, now: float, *, explain: bool = False) -> Forward | Enqueue | Refuse:
        """Place a new request. `explain` fills the decision's candidates. The request id must not be live."""
        assert request.request_id not in self._live, f"request {request.request_id} is already known"
        if len(self._live) >= self.config.requests_max:
            self.counters["refused"] += 1
            return Refuse(request.request_id, 429, "too_many_requests", "The router is full.", 1.0)
        self._retries.arrived(request.tenant)
        live = self._live[request.request_id] = ActiveRequest(request, now, explain=explain)
        return self._settle(live, self._place(live, now))

    def explain(self, request: RouteRequest, now: float) -> Decision | Refuse:
        """What `route` would decide, with every candidate's terms. Changes nothing but estimated first tokens."""
        chance = self._rng.getstate()
        choice = self._choose(ActiveRequest(request, now, explain=True), now)
        self._rng.setstate(chance)
        return choice if isinstance(choice, Refuse) else self._chooser.decision(request, choice, now, explain=True)

    def others(self, request_id: str, count: int, now: float) -> list[str]:
        """Up to `count` workers that could take a request in flight if its own cannot: of some drawn by chance, those
        with the shortest queues, the shortest first."""
        live = self._live.get(request_id)
        if live is None or live.decision is None or not count:
            return []
        found = self.registry.candidates(live.request, live.tried | {live.decision.worker})
        if isinstance(found, Refuse):
            return []
        drawn = self._rng.sample(found, min(len(found), 4 * count))
        drawn.sort(key=lambda target: target.queue_s(now))
        return list(dict.fromkeys(target.worker_id for target in drawn))[:count]

    def first_token(self, request_id: str, now: float) -> list[Instruction]:
        """The first byte of the answer's content came (call it for streams only)."""
        live = self._live.get(request_id)
        if live is None or live.decision is None:
            return []
        live.first_token_seen = True
        if self.tracker.first_token(request_id, now) is None:
            return []
        self.registry.alive(live.decision.worker, now)
        return self._try_held(now)

    def progress(self, request_id: str, output_tokens: int, at_s: float | None = None) -> None:
        """Tokens generated so far, where the edge counts them (SSE chunks), the last of them `at_s`: refines the decode
        load, and teaches what steps take."""
        self.tracker.progress(request_id, output_tokens, at_s)
        live = self._live.get(request_id)
        worker = self.workers.get(live.decision.worker) if live is not None and live.decision is not None else None
        if worker is not None and at_s is not None:
            worker.heard_s = at_s

    def finished(
        self, request_id: str, usage: ReportedUsage | None, now: float, *, refused: bool = False
    ) -> list[Instruction]:
        """The whole answer was passed on. `refused`: it is an error of the worker's, which computed nothing for it."""
        live = self._live.pop(request_id, None)
        if live is None or live.decision is None:
            return []
        request, decision, told = live.request, live.decision, usage or ReportedUsage()
        self.counters["finished"] += 1
        if not refused:
            self._lengths.seen(request, self.tracker.answered(request_id, told.completion_tokens, now))
        self._end_attempt(live, now, computed=not refused, reported_cached=told.cached_tokens)
        self._end_session(request)
        self.registry.alive(decision.worker, now)
        worker = self.workers.get(decision.worker)
        if usage is not None and worker is not None:
            self.watchdog.finished(
                decision.worker,
                # Of several prompts only the first was looked for in the caches, and media are not counted.
                counted_tokens=request.prompt_tokens
                if request.token_ids is not None and request.prompts == 1 and request.home is None
                else None,
                prompt_tokens=told.prompt_tokens,
                predicted_cached=decision.predicted_cached_tokens,
                cached_tokens=told.cached_tokens,
                resident=decision.terms.resident_tokens,
                block_tokens=worker.spec.block_size,
            )
        return self._try_held(now)

    def aborted(self, request_id: str, now: float) -> list[Instruction]:
        """The client left, held or in flight; the edge cancels upstream by itself."""
        live = self._live.pop(request_id, None)
        if live is None:
            return []
        self.counters["aborted"] += 1
        if live.decision is None:
            self._held.drop(request_id)
            return []
        self._end_attempt(live, now, computed=live.first_token_seen)
        self._end_session(live.request)
        return self._try_held(now)

    def failed(
        self,
        request_id: str,
        kind: FailureKind,
        now: float,
        rest: RouteRequest | None = None,
        *,
        silent_s: float = 0.0,
        was_sent: bool = False,
    ) -> list[Instruction]:
        """An attempt failed. Before the first byte the request gets another worker while tries and budget last: the
        first Forward, Enqueue or Refuse is about it. After the first byte (STALLED, STREAM) it is forgotten without
        one, unless the edge says what the `rest` of it is; that has no budget: what was admitted once is no storm.
        `silent_s`: how long nothing came for it. `was_sent`: the worker had it, and then refused to connect."""
        live = self._live.get(request_id)
        if live is None or live.decision is None:
            return []
        worker_id = live.decision.worker
        instructions: list[Instruction] = []
        worker = self.workers.get(worker_id)
        probe = worker is not None and worker.probe == request_id
        self._end_attempt(live, now, computed=live.first_token_seen)
        if worker is not None and _is_of_worker(kind, live.request, worker, now - silent_s):
            fatal, reason = kind is FailureKind.CONNECT, f"{kind.value} failure"
            went_down = self.registry.breaker.failure(worker, now, reason=reason, fatal=fatal, probe=probe)
            self.registry.changed()
            if went_down and fatal:
                instructions.append(self._lost(worker))
        if rest is None and (kind in _AFTER_FIRST_BYTE or live.first_token_seen):
            del self._live[request_id]
            self.counters["failed"] += 1
            return instructions + self._try_held(now)
        is_whole = rest is None or rest is live.request
        live.suspicions += is_whole and (was_sent or kind in _MAY_END_WORKERS)
        live.decision = None
        live.tried |= {worker_id}
        live.attempt += 1
        instructions.insert(0, self._retry(live, kind, now) if rest is None else self._go_on(live, rest, kind, now))
        return instructions + self._try_held(now)

    def move(
        self, request_id: str, now: float, rest: RouteRequest | None = None, *, stalled: bool = False
    ) -> list[Instruction]:
        """Have another worker answer a request whose worker is lost, or the `rest` of its answer; as `failed` where
        that is possible. Empty where the request stays: nobody else can take it, or it was tried often enough.
        `stalled`: the worker is up and stands still in the middle, which counts as a failure of it."""
        live = self._live.get(request_id)
        if live is None or live.decision is None or (rest is None and live.first_token_seen):
            return []
        others = self.registry.candidates(rest or live.request, live.tried | {live.decision.worker})
        if isinstance(others, Refuse) or others[0].worker_id in self.registry.avoided:
            return []
        if rest is None and not self._retries.has_one(live.request.tenant, live.attempt + 1):
            return []
        if self._held.full(self._where(live)):
            return []
        kind = FailureKind.STALLED if stalled and rest is not None else FailureKind.LOST
        return self.failed(request_id, kind, now, rest, silent_s=self.config.health.stalled_s)

    def tick(self, now: float) -> list[Instruction]:
        """Deadlines, held requests, grace periods, breakers. Call at `next_tick()` or a little later."""
        self.tracker.advance(now)
        self.book.tick(now)
        if [worker for worker in self.registry.down if self.registry.breaker.half_open(worker, now)]:
            self.registry.changed()
        due = self._held.due(now)
        expired = [self._expire(self._live[request_id], now, refuse=refuse) for request_id, refuse in due]
        return [*expired, *self._try_held(now)]

    def next_tick(self) -> float | None:
        """When `tick` will next have something to do; None while nothing is pending."""
        times = [worker.open_until_s for worker in self.registry.down]
        released_s = self.book.next_tick()
        if released_s is not None:
            times.append(released_s)
        if len(self._held):
            times.append(min(self._next_try_s, self._held.next_deadline()))
        return min(times, default=None)

    # Placing -----------------------------------------------------------------------------------------------------
    def _place(
        self, live: ActiveRequest, now: float, *, ahead: Mapping[str, float] | None = None, may_hold: bool = True
    ) -> Forward | Enqueue | Refuse:
        """Choose, then commit or hold. `ahead`: what is held and goes first, by target; None: to be found out. On a
        Refuse the caller calls `_settle`, or finds another answer."""
        choice = self._choose(live, now, ahead=ahead, in_line=may_hold)
        if isinstance(choice, Refuse):
            return choice
        request, queue = live.request, self.config.queue
        if (request.ttft_s_max is not None or queue.ttft_s_max is not None) and not live.attempt:
            late = self._late(live, choice, now)
            if late is not None:
                return late
        if may_hold and request.priority >= self._behind:
            if self._held.counts[0] or not self._is_idle(choice.target, now):
                return self._hold(live, choice, now)
        elif may_hold and self._holds and (choice.wait_s > queue.hold_above_s or (ahead is None and choice.held_s)):
            return self._hold(live, choice, now)  # or who has just come would pass by those who wait for that worker
        if len(self._held):
            if queue.fair:
                self._held.sent(self._where(live), choice.charge_s / request.share)
            self._held.drop(request.request_id)
        return self._commit(live, choice, now)

    def _late(self, live: ActiveRequest, choice: RoutingChoice, now: float) -> Refuse | None:
        """Where no worker is predicted to begin in time; the winner becomes one that is, where the cheapest is not."""
        request, config = live.request, self.config.queue
        limits = [limit for limit in (request.ttft_s_max, config.ttft_s_max) if limit is not None]
        left_s = min(limits) - (now - live.arrived_s)
        if choice.cost.terms(choice.winner, 0).ttft_s <= left_s:
            return None
        soonest, ttft_s = choice.soonest()
        if ttft_s <= left_s:
            choice.winner = soonest
            return None
        terms = choice.cost.terms(soonest, 0)
        self.counters["too_slow"] += 1
        message = f"The first token is predicted in {ttft_s:.3g} s, and asked for in {min(limits):.3g} s"
        if terms.prefill_s + terms.load_s > min(limits):
            alone_s = terms.prefill_s + terms.load_s
            message += f": this prompt takes {alone_s:.3g} s also where nothing else runs."
            return Refuse(request.request_id, 429, "too_slow", message)
        return Refuse(request.request_id, 429, "too_slow", f"{message}.", ttft_s - min(limits))

    def _where(self, live: ActiveRequest) -> QueuePosition:
        request = live.request
        background = request.priority >= self._behind
        return QueuePosition(request.tenant, background, request.priority, live.arrived_s)

    def _is_idle(self, target: Target, now: float) -> bool:
        """Whether the background may have more of it."""
        if target.queue_s(now) > 0.0 or target.seat_s > 0.0 or target.prefills:
            return False
        running = sum(name == target.name for name in self._in_background.values())
        return running < self.config.queue.background_running

    def _choose(
        self, live: ActiveRequest, now: float, *, ahead: Mapping[str, float] | None = None, in_line: bool = True
    ) -> RoutingChoice | Refuse:
        """Price the candidates. `in_line`: it would have to wait behind what is held."""
        self.tracker.advance(now)
        candidates = self.registry.candidates(live.request, live.tried)
        if isinstance(candidates, Refuse):
            return candidates
        if live.request.priority >= self._behind and in_line:
            candidates = [target for target in candidates if self._is_idle(target, now)] or candidates
        choice = self._chooser.choose(
            live.request, candidates, now, ahead=ahead, held_s=self._held.prefill_s, explain=live.explain
        )
        if in_line and self._holds and ahead is None and len(self._held):
            self._chooser.choose_again(choice, self._held.ahead_of(self._where(live)))
        return choice

    def _commit(self, live: ActiveRequest, choice: RoutingChoice, now: float) -> Forward:
        """Send it: count it, pin its prefix, remember its session."""
        request = live.request
        decision = self._chooser.decision(
            request, choice, now, explain=live.explain, attempt=live.attempt, waited_s=now - live.arrived_s
        )
        live.decision = decision  # from here on `aborted` takes off the books what was written of it, if all raises
        target = choice.target
        self._chooser.rotate()
        self.tracker.route(
            request.request_id,
            target,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=decision.predicted_cached_tokens,
            stream=request.stream,
            now=now,
            expected_tokens=choice.cost.expected_tokens,
            load_s=choice.cost.load_seconds(choice.winner) / target.load.factor,
        )
        if choice.prompt is not None:
            self.book.sent(
                request.request_id,
                target,
                choice.prompt,
                now,
                cached_tokens=decision.predicted_cached_tokens,
                session=request.session,
            )
        if request.session is not None and self.config.session_affinity:
            self._chooser.sessions.put(request.session, target.name, now)
        if request.home is not None:
            home = MediaPlacement(target.name, request.prompt_tokens, now)
            self._chooser.homes.put((request.home, request.scope), home)
        worker = self.workers[target.worker_id]
        if worker.state is WorkerState.PROBING:
            worker.probe = request.request_id
            self.registry.changed()
        if request.priority >= self._behind:
            self._in_background[request.request_id] = target.name
        target.routed += 1
        self.counters["routed"] += 1
        return Forward(request.request_id, decision)

    # The queue ---------------------------------------------------------------------------------------------------
    def _hold(self, live: ActiveRequest, choice: RoutingChoice, now: float) -> Enqueue | Refuse:
        request, config = live.request, self.config.queue
        known, where = request.request_id in self._held, self._where(live)
        if not known and self._held.full(where):
            return Refuse(request.request_id, 429, "queue_full", QUEUE_FULL, max(1.0, choice.wait_s))
        wait_s = config.background_wait_s_max if where.background else config.wait_s_max
        deadline_s = request.deadline_s if request.deadline_s is not None else live.arrived_s + wait_s
        self._held.put(
            request.request_id,
            where,
            target=choice.target.name,
            prefill_s=choice.prefill_s,
            charge_s=choice.charge_s / request.share,
            deadline_s=deadline_s,
            refuse=request.deadline_s is not None or not where.background,
        )
        if not known:
            self.counters["held"] += 1
            if len(self._held) == 1:
                self._next_try_s = now + TRY_EVERY_S
        return Enqueue(request.request_id, deadline_s)

    def _try_held(self, now: float) -> list[Instruction]:
        """Try the first few held requests again; each that is placed or refused yields an instruction."""
        config = self.config.queue
        if not len(self._held):
            return []
        self.tracker.advance(now)
        self._next_try_s = now + TRY_EVERY_S
        instructions: list[Instruction] = []
        ahead: dict[str, float] = {}
        for request_id in self._held.first(TRIES):
            if not self.tracker.any_free(config.hold_above_s, now):
                break
            live = self._live[request_id]
            placed = self._settle(live, self._place(live, now, ahead=ahead))
            if isinstance(placed, Enqueue):
                target, prefill_s = self._held.held_for(request_id)
                ahead[target] = ahead.get(target, 0.0) + prefill_s
            else:
                instructions.append(placed)
        return instructions

    def _expire(self, live: ActiveRequest, now: float, *, refuse: bool) -> Forward | Refuse:
        """A held request's deadline came."""
        self._held.drop(live.request.request_id)
        if refuse:
            if live.request.deadline_s is None:  # to send it now would make all who ask for their share pay for it
                waited_s = now - live.arrived_s
                return self._settle(live, Refuse(live.request.request_id, 429, "queue_full", QUEUE_FULL, waited_s))
            message = "The request's deadline passed while it waited in the router."
            return self._settle(live, Refuse(live.request.request_id, 503, "deadline", message, 1.0))
        self.counters["deadline_forwards"] += 1
        placed = self._place(live, now, may_hold=False)
        assert not isinstance(placed, Enqueue)
        return self._settle(live, placed)

    # Ends --------------------------------------------------------------------------------------------------------
    def _retry(self, live: ActiveRequest, kind: FailureKind, now: float) -> Forward | Enqueue | Refuse:
        if live.suspicions < SUSPICIONS_MAX and self._retries.take(live.request.tenant, live.attempt):
            placed = self._place(live, now)
            if not isinstance(placed, Refuse):
                self.counters["retried"] += 1
                return placed
        return self._settle(live, gave_up(live.request.request_id, kind, self.registry.retry_after_s(now)))

    def _settle(self, live: ActiveRequest, placed: Placed) -> Placed:
        """What is refused is forgotten."""
        if isinstance(placed, Refuse):
            self._held.drop(live.request.request_id)
            del self._live[live.request.request_id]
            self.counters["refused"] += 1
        return placed

    def _go_on(
        self, live: ActiveRequest, rest: RouteRequest, kind: FailureKind, now: float
    ) -> Forward | Enqueue | Refuse:
        live.request, live.first_token_seen = rest, False
        if live.suspicions >= SUSPICIONS_MAX:
            return self._settle(live, gave_up(rest.request_id, kind, self.registry.retry_after_s(now)))
        placed = self._settle(live, self._place(live, now))
        self.counters["continued"] += not isinstance(placed, Refuse)
        return placed

    def _end_attempt(
        self, live: ActiveRequest, now: float, *, computed: bool, reported_cached: int | None = None
    ) -> None:
        """Take an attempt off the books. What was computed stays pinned for a grace period: its events are coming."""
        request = live.request
        self._in_background.pop(request.request_id, None)
        self.tracker.end(request.request_id, now, computed=computed, reported_cached=reported_cached)
        over = request.session if request.final else None
        self.book.ended(request.request_id, now, computed=computed, over=over)
        worker = self.workers.get(live.decision.worker) if live.decision is not None else None
        if worker is not None and worker.probe == live.request.request_id:
            worker.probe = None  # it told nothing, or its caller says what: the next request may be the probe
            self.registry.changed()

    def _end_session(self, request: RouteRequest) -> None:
        if request.final and request.session is not None:
            self._chooser.sessions.forget(request.session)
            self._lengths.forget(request)

    def _lost(self, worker: Worker) -> WorkerLost:
        for target in self.registry.targets_of(worker.worker_id):
            self.book.lost(target)
        return WorkerLost(worker.worker_id)

    # Seeing ------------------------------------------------------------------------------------------------------
    def snapshot(self, now: float) -> CoreSnapshot:
        """What `/workers` and `/metrics` show. Changes nothing but estimated first tokens."""
        self.tracker.advance(now)
        rows = []
        for worker_id, worker in self.workers.items():
            alarms = self.watchdog.alarms(worker_id, expects_events=worker.spec.cache_view is CacheView.EVENTS)
            alarms += self.stillness.alarms(worker_id, now)
            targets = self.registry.targets_of(worker_id)
            rows += [worker_row(worker, target, self.tracker, alarms, now) for target in targets]
        counters = dict(self.counters)
        if self._chooser.own is not None:
            counters["policy_failed"] = self._chooser.own.failures
        return CoreSnapshot(rows, len(self._held), len(self._live) - len(self._held), counters)

    def check_invariants(self) -> None:
        """Books agree with each other; called by tests after every stimulus."""
        self.tracker.check_invariants()
        self._held.check_invariants()
        for request_id, live in self._live.items():
            held, sent = request_id in self._held, request_id in self.tracker.requests
            assert held == (live.decision is None) == (not sent), f"{request_id}: {held=}, {sent=}, {live.decision}"
        assert set(self.tracker.requests) <= set(self._live)
        assert set(self._in_background) <= set(self._live)
        self.book.check_invariants(set(self.tracker.requests))


def _is_of_worker(kind: FailureKind, request: RouteRequest, worker: Worker, silent_since_s: float) -> bool:
    """Whether a failure counts for the worker's health: no client may choose that. A whole answer takes as long as its
    client wants; of a stream that is silent, the worker is to blame where it answered nobody else meanwhile."""
    if kind in (FailureKind.TIMEOUT, FailureKind.STALLED):
        return request.stream and worker.heard_s <= silent_since_s
    return kind not in (FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.LOST)
