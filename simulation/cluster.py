"""Event loop of a simulated fleet: arrivals, engines and routers on a virtual clock. No I/O.

A `Router` chooses a worker for each request. It sees first tokens and ends at once, and cache events after a delay.
With several routers, the index of a request chooses the router. Nothing here is random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from simulation.cache import SimCache
from simulation.engine import EngineLimits, SimSequence, SimWorker
from simulation.steps import StepTimes
from simulation.transfers import Links, LinkTimes
from simulation.workload import SimRequest, Workload


class Placement(NamedTuple):
    """A request to forward now."""

    request_index: int
    worker: int
    source: int | None = None
    """Worker from which the cached prefix is pulled first."""
    is_prefill: bool = False
    """Whether the source computes the whole prompt first."""


class Router:
    """Base class of routing policies that are simulated: chooses a worker for each request.

    The cluster calls a method at each event. Methods that return placements name the requests to send now, with their
    workers. They may be any requests that wait in the router.
    """

    cluster: Cluster

    def attach(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def route(self, request: SimRequest, now: float) -> Sequence[Placement]:
        """Handle the arrival of a request."""
        raise NotImplementedError

    def on_prefill_end(self, request: SimRequest, now: float) -> Sequence[Placement]:
        """Handle the end of a prefill at the source of a request. The KV begins to move now."""
        return []

    def on_first_token(self, request: SimRequest, worker: int, now: float) -> Sequence[Placement]:
        """Handle the first token of an answer."""
        return []

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> Sequence[Placement]:
        """Handle the end of an answer. `cached_tokens`: tokens of the prompt that no worker had to compute."""
        return []

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        """Handle the event that a worker stored blocks behind the block `parent`."""

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        """Handle the event that a worker evicted blocks."""

    def on_blocks_moved(self, worker: int, ids: list[int], to_host: bool, now: float) -> None:
        """Handle the event that blocks moved to host memory if `to_host`, else back to the GPU."""

    def tick_s(self) -> float | None:
        """Return the seconds until `tick` is to be called; None if no call is due."""
        return None

    def tick(self, now: float) -> Sequence[Placement]:
        return []


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Speed and caches of one simulated worker."""

    step_times: StepTimes
    cache_blocks: int | None
    """Blocks of the KV cache; None: infinite."""
    host_blocks: int = 0
    """Blocks of host memory for evicted KV."""
    roles: frozenset[str] = frozenset()
    """Roles that routers know: "prefill", "decode"; none: the worker does both."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Workers and arrival rate of one simulated run."""

    workers: Sequence[WorkerConfig]
    speed: float = 1.0
    """Arrival rate as a multiple of the trace's own."""
    event_delay_s: float = 0.02
    """Time between a change of a cache and its event at the routers."""
    has_shared_cache: bool = False
    """Whether all workers share one cache of the summed size, which bounds what a policy can reach."""
    limits: EngineLimits = field(default_factory=EngineLimits)
    link_times: LinkTimes | None = None
    """Speed at which workers move KV; None: they do not."""


@dataclass(slots=True)
class SimulationResult:
    """Results of a simulated run. Requests have their index in the workload."""

    arrived_s_by_request: dict[int, float] = field(default_factory=dict)
    """Arrival times, on the run's clock."""
    ttft_s_by_request: dict[int, float] = field(default_factory=dict)
    """Times from a request's arrival to its first token."""
    e2e_s_by_request: dict[int, float] = field(default_factory=dict)
    """Times from a request's arrival to the end of its answer."""
    hit_tokens_by_request: dict[int, int] = field(default_factory=dict)
    """Prompt tokens that were cached."""
    worker_by_request: dict[int, int] = field(default_factory=dict)
    prefilled_tokens_by_worker: list[int] = field(default_factory=list)
    preemption_count: int = 0
    moved_tokens: int = 0
    """Tokens of KV that moved between workers."""
    end_s: float = 0.0
    is_overloaded: bool = False
    """Whether the run was cut off because waiting grew without bound."""


class Cluster:
    """One simulated run: workers and routers that process a workload on a simulated clock.

    Open-loop requests arrive at the times of the trace, closed-loop ones some time after the answer that they follow.
    """

    def __init__(self, config: ClusterConfig, workload: Workload, routers: Sequence[Router]) -> None:
        """Prepare a run at time 0 with idle workers and empty caches, and attach the routers, which choose workers."""
        self.config = config
        self.workload = workload
        self.result = SimulationResult()

        # The clock, and what happens next.
        self.now = 0.0
        self._scheduled_actions: list[tuple[float, int, Callable[[], None]]] = []
        """Heap of (time, number, action). Of actions at one time, that with the lower number is first."""
        self._schedule_count = 0
        self._followers_by_request: dict[int, list[SimRequest]] = {}
        """Requests that arrive some time after the answer to another request, by the index of that request."""

        # The workers, and the links between them.
        self.workers = _make_workers(config, workload.block_size)
        if not config.has_shared_cache:  # a shared cache has the same blocks for every worker
            self._publish_cache_changes()
        self._links = Links(config.link_times.tokens_per_s if config.link_times is not None else 0.0)
        self._link_end_s = math.inf
        """Time for which the end of the next transfer is scheduled."""
        self._placement_by_prefill: dict[SimSequence, Placement] = {}
        """Placements of requests with a prompt that a source computes now, by the sequence at the source."""
        self._source_hit_blocks_by_request: dict[int, int] = {}
        """Blocks of a prompt that were cached at the worker which computed it for another one, by request."""

        self.routers = routers
        self._is_tick_scheduled_by_router = [False] * len(routers)
        for router in routers:
            router.attach(self)

    def schedule(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at a time of the run. Actions at the same time run in the order of scheduling."""
        self._schedule_count += 1
        heapq.heappush(self._scheduled_actions, (time_s, self._schedule_count, action))

    def run(self, ttft_limit_s: float | None = None) -> SimulationResult:
        """Simulate until every request is answered, or until the first of a worker's queue waits over `ttft_limit_s`.

        An action is an arrival, a step's end or a router's tick. Each has a time, and the earliest is done next.
        """
        for request in self.workload.requests:
            if request.previous_index is None:
                self.schedule(request.arrival_s / self.config.speed, partial(self._arrive, request))
            else:
                self._followers_by_request.setdefault(request.previous_index, []).append(request)
        result, request_count = self.result, len(self.workload.requests)
        # There are always actions, as routers exchange messages for ever: the run ends with the last answer.
        while self._scheduled_actions and len(result.e2e_s_by_request) < request_count:
            self.now, _, action = heapq.heappop(self._scheduled_actions)
            action()
            if ttft_limit_s is not None and self._compute_longest_wait_s() > ttft_limit_s:
                result.is_overloaded = True
                break
        lost_count = request_count - len(result.e2e_s_by_request)
        assert result.is_overloaded or not lost_count, f"{lost_count} requests were lost"
        result.end_s = self.now
        result.prefilled_tokens_by_worker = [worker.prefilled_tokens for worker in self.workers]
        result.preemption_count = sum(worker.preemption_count for worker in self.workers)
        return result

    def _compute_longest_wait_s(self) -> float:
        waits_s = [
            self.now - worker.waiting_sequences[0].routed_at_s for worker in self.workers if worker.waiting_sequences
        ]
        return max(waits_s, default=0.0)

    # Requests ----------------------------------------------------------------------------------------------------
    def _arrive(self, request: SimRequest) -> None:
        self.result.arrived_s_by_request[request.index] = self.now
        self._notify_router(request.index, lambda router: router.route(request, self.now))

    def _notify_router(self, request_index: int, notify: Callable[[Router], Sequence[Placement]]) -> None:
        """Call the router of a request and forward what it returns."""
        router_index = request_index % len(self.routers)
        self._forward(notify(self.routers[router_index]))
        self._schedule_tick(router_index)

    def _forward(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            self.result.worker_by_request[placement.request_index] = placement.worker
            if placement.source is None:
                self._submit(placement)
            elif placement.is_prefill:
                self._prefill_at_source(placement, self.workers[placement.source])
            else:
                self._pull(placement, self.workers[placement.source])

    def _prefill_at_source(self, placement: Placement, source: SimWorker) -> None:
        """Have a source compute the prompt of a request, before its KV moves to the worker that decodes."""
        request = self.workload.requests[placement.request_index]
        full_blocks = request.block_ids[: request.full_block_count]
        sequence = SimSequence(replace(request, output_tokens=1, final_block_ids=full_blocks), self.now)
        self._placement_by_prefill[sequence] = placement
        source.submit(sequence, self.now)
        self._schedule_wake(source)

    def _end_prefill_at_source(self, source: SimWorker, sequence: SimSequence) -> None:
        """Move the KV that the worker lacks, because the source has computed the prompt, and submit the request."""
        placement = self._placement_by_prefill.pop(sequence)
        request = self.workload.requests[placement.request_index]
        self._source_hit_blocks_by_request[request.index] = sequence.hit_blocks
        self._notify_router(request.index, lambda router: router.on_prefill_end(request, self.now))
        full_blocks = request.block_ids[: request.full_block_count]
        cached_blocks = self.workers[placement.worker].cache.count_cached_prefix(full_blocks, len(full_blocks))
        moved_tokens = request.prompt_tokens - cached_blocks * request.block_size
        self._move(placement, source, full_blocks, moved_tokens)

    def _pull(self, placement: Placement, source: SimWorker) -> None:
        """Move the blocks that a source has and the worker lacks, then submit the request."""
        request = self.workload.requests[placement.request_index]
        source_blocks = source.count_hit_blocks(request)
        missing_blocks = source_blocks - self.workers[placement.worker].count_hit_blocks(request)
        if missing_blocks <= 0:
            self._submit(placement)
            return
        self._move(placement, source, request.block_ids[:source_blocks], missing_blocks * request.block_size)

    def _move(self, placement: Placement, source: SimWorker, block_ids: list[int], moved_tokens: int) -> None:
        """Move KV from a source to the worker of a request, and give the request to the worker when it has come.

        `block_ids`: blocks of the prompt that the worker has then. `moved_tokens`: how many tokens have to move.
        """
        link_times = self.config.link_times
        assert link_times is not None, "the workers move no KV"
        self.result.moved_tokens += moved_tokens

        def start_transfer() -> None:
            self._links.start(source.number, placement.worker, moved_tokens, self.now, end_transfer)
            self._schedule_link_end()

        def end_transfer() -> None:
            self.workers[placement.worker].cache.store_moved(block_ids)
            self._submit(placement)

        self.schedule(self.now + link_times.floor_s, start_transfer)

    def _schedule_link_end(self) -> None:
        """Schedule a call when the next transfer between workers ends, at the present shares of the links."""
        end_s = self._links.next_end_s()
        if end_s is not None:
            self._link_end_s = end_s = max(end_s, self.now)
            self.schedule(end_s, lambda: self._advance_links(end_s))

    def _advance_links(self, end_s: float) -> None:
        if end_s == self._link_end_s:  # else the shares of the links have changed meanwhile
            self._links.advance(self.now)
            self._schedule_link_end()

    def _submit(self, placement: Placement) -> None:
        """Give a request to its worker.

        If a source has computed the prompt, the worker has the KV of all tokens but the last, which is always computed.
        """
        worker = self.workers[placement.worker]
        sequence = SimSequence(self.workload.requests[placement.request_index], self.now)
        if placement.request_index in self._source_hit_blocks_by_request:
            sequence.moved_tokens = sequence.request.prompt_tokens - 1
        worker.submit(sequence, self.now)
        self._schedule_wake(worker)

    def _schedule_wake(self, worker: SimWorker) -> None:
        wake_s = worker.wake_s
        if wake_s is not None:
            self.schedule(wake_s, lambda: self._wake(worker, wake_s))

    def _wake(self, worker: SimWorker, wake_s: float) -> None:
        """End a worker's step, and record which requests got their first token or finished with it."""
        if worker.wake_s != wake_s:
            return  # the step has ended, or the decode run was cut and ends earlier
        step_result = worker.advance(self.now)
        self._schedule_wake(worker)
        for sequence in step_result.first_token_sequences:
            if sequence not in self._placement_by_prefill:
                self._record_first_token(worker, sequence)
        for sequence in step_result.finished_sequences:
            if sequence in self._placement_by_prefill:
                self._end_prefill_at_source(worker, sequence)
            else:
                self._record_finished(worker, sequence)

    def _record_first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        request_index = sequence.request.index
        self.result.ttft_s_by_request[request_index] = self.now - self.result.arrived_s_by_request[request_index]
        self.result.hit_tokens_by_request[request_index] = self._count_hit_tokens(sequence)
        self._notify_router(
            request_index, lambda router: router.on_first_token(sequence.request, worker.number, self.now)
        )

    def _count_hit_tokens(self, sequence: SimSequence) -> int:
        hit_blocks = self._source_hit_blocks_by_request.get(sequence.request.index, sequence.hit_blocks)
        return hit_blocks * sequence.request.block_size

    def _record_finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        request_index = sequence.request.index
        self.result.e2e_s_by_request[request_index] = self.now - self.result.arrived_s_by_request[request_index]
        cached_tokens = self._count_hit_tokens(sequence)
        self._notify_router(
            request_index, lambda router: router.on_finished(sequence.request, worker.number, cached_tokens, self.now)
        )
        for follower in self._followers_by_request.pop(request_index, ()):
            self.schedule(self.now + follower.arrival_s, partial(self._arrive, follower))

    # Ticks and events of routers ------------------------------------------------------------------------------------
    def _schedule_tick(self, router_index: int) -> None:
        if self._is_tick_scheduled_by_router[router_index]:
            return
        delay_s = self.routers[router_index].tick_s()
        if delay_s is not None:
            self._is_tick_scheduled_by_router[router_index] = True
            self.schedule(self.now + delay_s, lambda: self._tick(router_index))

    def _tick(self, router_index: int) -> None:
        self._is_tick_scheduled_by_router[router_index] = False
        self._forward(self.routers[router_index].tick(self.now))
        self._schedule_tick(router_index)

    def _publish_cache_changes(self) -> None:
        for worker in self.workers:
            worker.cache.on_store = partial(self._publish, "on_blocks_stored", worker.number)
            worker.cache.on_remove = partial(self._publish, "on_blocks_removed", worker.number)
            worker.cache.on_move = partial(self._publish, "on_blocks_moved", worker.number)

    def _publish(self, method: str, worker: int, *arguments: object) -> None:
        """Call a method of every router after the delay of events."""

        def deliver() -> None:
            for router in self.routers:
                getattr(router, method)(worker, *arguments, self.now)

        self.schedule(self.now + self.config.event_delay_s, deliver)


def _make_workers(config: ClusterConfig, block_size: int) -> list[SimWorker]:
    """Make the idle workers of a run, each with an empty cache of its own or all with a shared one."""
    shared_cache = _make_shared_cache(config.workers) if config.has_shared_cache else None
    return [
        SimWorker(
            number,
            worker.step_times,
            shared_cache or SimCache(worker.cache_blocks, host_capacity=worker.host_blocks),
            config.limits,
            block_size,
        )
        for number, worker in enumerate(config.workers)
    ]


def _make_shared_cache(workers: Sequence[WorkerConfig]) -> SimCache:
    is_infinite = any(worker.cache_blocks is None for worker in workers)
    capacity = None if is_infinite else sum(worker.cache_blocks or 0 for worker in workers)
    return SimCache(capacity, is_shared=True, host_capacity=sum(worker.host_blocks for worker in workers))
