"""Estimate what `router run` would have given, by two simulations of the recorded requests. No I/O.

One simulation places the requests as they were placed, the other as `router run` would. Both have the same engines
(simulation/engine.py, with step times fitted to the recorded answers) and the same caches, so that a fault of the model
is in both. The measured times are then scaled by the ratio of the two. In the first simulation requests arrive at their
recorded times. In the second one, a request that waited for an answer arrives as long after that answer as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count

import msgspec

from router.decide.config import CoreConfig, CostConfig, LearnConfig, ServiceModel
from router.decide.target import InFlightRequest
from router.decide.tracker import LoadTracker
from router.index.protocol import HolderId
from router.shadow.core_router import CoreRouter
from router.shadow.observed_request import ObservedRequest, find_predecessors
from simulation.cluster import Cluster, ClusterConfig, Router, SimulationResult, WorkerConfig
from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.workload import SimRequest, Workload

FIT_ROUNDS_MAX, FIT_TOLERANCE = 3, 0.01
"""Most simulations to fit step times to the recorded answers, and the relative error that is good enough."""
DEFAULT_MAX_NUM_SEQS = 256
"""Largest batch of a worker that does not report it."""


class ObservedEngine(msgspec.Struct, frozen=True):
    """A worker and its sizes, each None if unknown."""

    name: str
    cache_tokens: int | None = None
    max_num_seqs: int | None = None
    shortest_first: bool = False


class ReplayTotals(msgspec.Struct):
    """Sums over the compared requests."""

    computed_tokens: float
    ttft_s: float
    """Sum of times to first token."""
    seconds: float | None
    """Sum of times to the end of the answer; None if no end was seen."""


class Comparison(msgspec.Struct):
    """Sums over the compared requests, for the recorded placement and for that of `router run`."""

    requests: int
    """Number of compared requests."""
    warming: int
    """Number of earlier requests, which only filled the caches of both simulations."""
    waited: int
    """Number of requests that waited for the end of another one, and do so with `router run` too."""
    prompt_tokens: int
    measured: ReplayTotals | None
    """Recorded times; None if no first token was seen."""
    today: ReplayTotals
    """Simulation with the recorded workers."""
    ours: ReplayTotals
    """Simulation with the workers that `router run` chooses."""
    saved: ReplayTotals
    """Gain by `router run`, relative to `measured` if that is known, else to `today`."""
    lost: dict[str, int]
    """Cause (workload or routing) -> tokens computed without need, in the simulation with the recorded workers."""
    steps: dict[str, StepTimes]
    """Fitted step times of each worker."""
    quantiles: dict[str, list[float]] = {}
    """Name of a curve -> percentiles 0 to 100 of its times to first token: recorded, and of both simulations."""

    @property
    def model_error(self) -> float | None:
        """Error of the simulated time to first token of today, as a share of the measured one."""
        return None if self.measured is None else self.today.ttft_s / max(self.measured.ttft_s, 1e-9) - 1.0


class RecordedPlacement(Router):
    """Places each request as it was placed, and records which of its blocks were cached when it arrived."""

    def __init__(self, worker_index_by_request: Sequence[int]) -> None:
        self._worker_index_by_request = worker_index_by_request
        self._seen_blocks: set[int] = set()
        """Blocks that some cache has had."""
        self.blocks_elsewhere: dict[int, int] = {}
        """Request -> blocks of its prefix that another worker had cached, beyond those of its own worker."""
        self.blocks_ever_cached: dict[int, int] = {}
        """Request -> blocks of its prefix that any worker had cached at any time."""
        self.blocks_evicted: dict[int, int] = {}
        """Request -> blocks of `blocks_ever_cached` that no worker had cached any more."""

    def route(self, request: SimRequest, now: float) -> list[tuple[int, int]]:
        ids, max_cached_blocks = request.block_ids, (request.prompt_tokens - 1) // request.block_size
        worker_index = self._worker_index_by_request[request.index]
        own_blocks = best_blocks = self.cluster.workers[worker_index].cache.count_cached_prefix(ids, max_cached_blocks)
        if own_blocks < max_cached_blocks:
            for worker in self.cluster.workers:
                if worker.cache.is_resident(ids[own_blocks]):
                    best_blocks = max(best_blocks, worker.cache.count_cached_prefix(ids, max_cached_blocks))
        blocks_ever_cached = best_blocks
        while blocks_ever_cached < max_cached_blocks and ids[blocks_ever_cached] in self._seen_blocks:
            blocks_ever_cached += 1
        self.blocks_elsewhere[request.index] = best_blocks - own_blocks
        self.blocks_evicted[request.index] = blocks_ever_cached - best_blocks
        self.blocks_ever_cached[request.index] = blocks_ever_cached
        return [(request.index, worker_index)]

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        self._seen_blocks.update(ids)


def _count_lost_tokens(
    placement: RecordedPlacement, requests: Sequence[ObservedRequest], indices: Iterable[int], block: int
) -> dict[str, int]:
    """Return cause -> tokens that were computed without need, in the simulation of today.

    The workload is the cause for blocks that no worker has any more, and for what a session's prompt has otherwise than
    its previous prompt. Routing is the cause for blocks that another worker had.
    """
    changed_blocks = dict.fromkeys(range(len(requests)), 0)
    last_request_by_user: dict[str, ObservedRequest] = {}
    for i, request in enumerate(requests):
        previous = None if request.user is None else last_request_by_user.get(request.user)
        if (
            previous is not None
            and request.continues != previous.serial
            and previous.block_ids[:1] == request.block_ids[:1]
        ):
            max_common_blocks = min(previous.prompt_tokens // block, (request.prompt_tokens - 1) // block)
            changed_blocks[i] = max(max_common_blocks - placement.blocks_ever_cached[i], 0)
        if request.user is not None:
            last_request_by_user[request.user] = request
    indices = list(indices)
    return {
        "workload": block * sum(placement.blocks_evicted[i] + changed_blocks[i] for i in indices),
        "routing": block * sum(placement.blocks_elsewhere[i] for i in indices),
    }


def compare(
    observed_requests: Sequence[ObservedRequest],
    engines: Sequence[ObservedEngine],
    block: int,
    config: CoreConfig | None = None,
    warming: int = 0,
) -> Comparison:
    """Compare the recorded placement of requests with that of `router run`.

    `observed_requests` are in the order of arrival, all on `engines`; the first `warming` of them only fill the caches.
    `block` is the number of tokens in a block. Raises ValueError if no request is left to compare.
    """
    indices = range(warming, len(observed_requests))
    if not indices:
        raise ValueError(
            f"{len(observed_requests)} requests were seen, of which {warming} only fill the caches: none is left"
        )
    workload = make_workload(observed_requests, block, waits=False)
    waiting_workload = make_workload(observed_requests, block, waits=True)
    cluster = _make_cluster(observed_requests, engines, workload, block)
    cluster, placement, today_result = _simulate_recorded_placement(observed_requests, engines, cluster, workload)
    router_result = Cluster(cluster, waiting_workload, [CoreRouter(config or CoreConfig())]).run()
    today_totals = _sum_simulated_totals(today_result, workload, indices)
    router_totals = _sum_simulated_totals(router_result, workload, indices)
    measured_totals = _sum_measured_totals([observed_requests[i] for i in indices], today_totals)
    if all(request.end_s is None for request in observed_requests):
        for totals in (today_totals, router_totals, measured_totals):
            if totals is not None:
                totals.seconds = None
    times_by_name = {
        "measured": [
            request.first_token_s - request.arrival_s
            for request in observed_requests[warming:]
            if request.first_token_s is not None
        ],
        "today, as played": [today_result.ttft_s_by_request[i] for i in indices],
        "router run": [router_result.ttft_s_by_request[i] for i in indices],
    }
    return Comparison(
        requests=len(indices),
        warming=warming,
        waited=sum(request.previous_index is not None for request in waiting_workload.requests),
        prompt_tokens=sum(observed_requests[i].prompt_tokens for i in indices),
        measured=measured_totals,
        today=today_totals,
        ours=router_totals,
        saved=_compute_savings(measured_totals or today_totals, today_totals, router_totals),
        lost=_count_lost_tokens(placement, observed_requests, indices, block),
        steps={engine.name: worker.step_times for engine, worker in zip(engines, cluster.workers)},
        quantiles={name: _compute_percentiles(times) for name, times in times_by_name.items() if times},
    )


def _make_cluster(
    observed_requests: Sequence[ObservedRequest], engines: Sequence[ObservedEngine], workload: Workload, block: int
) -> ClusterConfig:
    """Return the simulated workers, with the step times that the recorded answers show."""
    steps = learn_step_times(observed_requests, engines)
    longest_request_blocks = max(-(-(r.prompt_tokens + r.output_tokens) // block) for r in workload.requests) + 2
    workers = []
    for engine in engines:
        cache_blocks = None
        if engine.cache_tokens is not None:
            cache_blocks = max(engine.cache_tokens // block, longest_request_blocks)
        workers.append(WorkerConfig(steps[engine.name], cache_blocks))
    limits = EngineLimits(
        min(engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS for engine in engines),
        is_preemptive=True,
        shortest_first=all(engine.shortest_first for engine in engines),
    )
    return ClusterConfig(workers, limits=limits)


def _simulate_recorded_placement(
    observed_requests: Sequence[ObservedRequest],
    engines: Sequence[ObservedEngine],
    cluster: ClusterConfig,
    workload: Workload,
) -> tuple[ClusterConfig, RecordedPlacement, SimulationResult]:
    """Simulate the recorded placement, and fit the workers' decode times to the recorded answers.

    Makes at most FIT_ROUNDS_MAX corrections. Returns the cluster with the fitted times, the placement and the result.
    """
    worker_index_by_name = {engine.name: i for i, engine in enumerate(engines)}
    worker_indices = [worker_index_by_name[request.worker] for request in observed_requests]
    for fit_round in range(FIT_ROUNDS_MAX + 1):
        placement = RecordedPlacement(worker_indices)
        result = Cluster(cluster, workload, [placement]).run()
        decode_ratio = _measure_decode_ratio(observed_requests, result)
        is_fitted = abs(decode_ratio - 1.0) < FIT_TOLERANCE
        if is_fitted or fit_round == FIT_ROUNDS_MAX:
            break
        workers = [
            replace(worker, step_times=_scale_decode(worker.step_times, decode_ratio)) for worker in cluster.workers
        ]
        cluster = replace(cluster, workers=workers)
    return cluster, placement, result


def _compute_savings(base: ReplayTotals, today: ReplayTotals, ours: ReplayTotals) -> ReplayTotals:
    """Return what `router run` saves of the `base` totals, by the ratio of both simulations."""
    seconds = None
    if base.seconds is not None and today.seconds is not None and ours.seconds is not None:
        seconds = _scale_saving(base.seconds, today.seconds, ours.seconds)
    return ReplayTotals(
        _scale_saving(base.computed_tokens, today.computed_tokens, ours.computed_tokens),
        _scale_saving(base.ttft_s, today.ttft_s, ours.ttft_s),
        seconds,
    )


def _measure_decode_ratio(requests: Sequence[ObservedRequest], result: SimulationResult) -> float:
    """Return the recorded time from first tokens to the ends of answers, divided by the simulated time."""
    decode_times = [
        (i, s.end_s - s.first_token_s)
        for i, s in enumerate(requests)
        if s.end_s is not None and s.first_token_s is not None
    ]
    played_s = sum(result.e2e_s_by_request[i] - result.ttft_s_by_request[i] for i, _ in decode_times)
    return sum(seconds for _, seconds in decode_times) / played_s if played_s > 0.0 and decode_times else 1.0


def _scale_decode(steps: StepTimes, ratio: float) -> StepTimes:
    return replace(
        steps,
        step_s=steps.step_s * ratio,
        decode_request_s=steps.decode_request_s * ratio,
        decode_context_s=steps.decode_context_s * ratio,
    )


def _compute_percentiles(values: list[float]) -> list[float]:
    values.sort()
    return [values[round(k / 100 * (len(values) - 1))] for k in range(101)]


def _scale_saving(measured_value: float, today: float, ours: float) -> float:
    return measured_value * (1.0 - ours / today) if today > 0.0 else 0.0


def _sum_simulated_totals(result: SimulationResult, workload: Workload, indices: Iterable[int]) -> ReplayTotals:
    indices, requests = list(indices), workload.requests
    return ReplayTotals(
        float(sum(requests[i].prompt_tokens - result.hit_tokens_by_request[i] for i in indices)),
        sum(result.ttft_s_by_request[i] for i in indices),
        sum(result.e2e_s_by_request[i] for i in indices),
    )


def _sum_measured_totals(requests: Sequence[ObservedRequest], today: ReplayTotals) -> ReplayTotals | None:
    """Return the recorded totals, scaled up to the requests of unknown times; None if no time is known."""
    ttfts = [s.first_token_s - s.arrival_s for s in requests if s.first_token_s is not None]
    latencies = [s.end_s - s.arrival_s for s in requests if s.end_s is not None]
    reporting_requests = [s for s in requests if s.cached_tokens is not None]
    if not ttfts:
        return None
    reported_prompt_tokens = sum(s.prompt_tokens for s in reporting_requests)
    computed_tokens = sum(s.prompt_tokens - (s.cached_tokens or 0) for s in reporting_requests)
    return ReplayTotals(
        computed_tokens * sum(s.prompt_tokens for s in requests) / reported_prompt_tokens
        if reported_prompt_tokens
        else today.computed_tokens,
        sum(ttfts) * len(requests) / len(ttfts),
        sum(latencies) * len(requests) / len(latencies) if latencies else today.seconds,
    )


# Step times -----------------------------------------------------------------------------------------------------------


def learn_step_times(requests: Iterable[ObservedRequest], engines: Sequence[ObservedEngine]) -> dict[str, StepTimes]:
    """Return worker -> its step times, learned from recorded answers as the router learns from those it forwards."""
    tracker = LoadTracker(ServiceModel(), CostConfig(), LearnConfig())
    targets = {e.name: tracker.add_target(e.name, None, HolderId(i)) for i, e in enumerate(engines)}
    in_flight_requests: dict[int, InFlightRequest] = {}
    request_events: list[tuple[float, int, ObservedRequest]] = []
    for request in requests:
        if request.first_token_s is not None and request.worker in targets:
            first_token_s = max(request.first_token_s, request.arrival_s)  # a log may have rounded times
            end_s = max(request.end_s or first_token_s, first_token_s)
            request_events += [(request.arrival_s, 0, request), (first_token_s, 1, request), (end_s, 2, request)]
    for now, event_kind, request in sorted(
        request_events, key=lambda request_event: (request_event[0], request_event[2].serial, request_event[1])
    ):
        tracker.advance(now)
        if event_kind == 0:
            in_flight_requests[request.serial] = tracker.add_request(
                targets[request.worker],
                prompt_tokens=request.prompt_tokens,
                cached_tokens=min(request.cached_tokens or 0, request.prompt_tokens),
                is_streaming=True,
                now=now,
                expected_output_tokens=float(request.output_tokens or 0),
            )
        elif event_kind == 1:
            tracker.record_first_token(in_flight_requests[request.serial], now)
        else:
            in_flight = in_flight_requests.pop(request.serial)
            tracker.record_progress(in_flight, request.output_tokens or 0)
            tracker.record_answer(in_flight, request.output_tokens, now)
            tracker.end_request(in_flight, now, reported_cached_tokens=request.cached_tokens)
    models = {worker: target.speed.service for worker, target in targets.items()}
    return {worker: StepTimes(**asdict(model)) for worker, model in models.items()}


# Workload -------------------------------------------------------------------------------------------------------------


class _BlockNumbers:
    """Numbers blocks from 1 on. Blocks with equal digests get one number, blocks without digests get new numbers."""

    def __init__(self) -> None:
        self._number_by_digest: dict[int, int] = {}
        self.unused_numbers = count(1)

    def get_numbers(self, digests: Iterable[int]) -> list[int]:
        for digest in digests:
            if digest not in self._number_by_digest:
                self._number_by_digest[digest] = next(self.unused_numbers)
        return [self._number_by_digest[digest] for digest in digests]


def make_workload(observed_requests: Sequence[ObservedRequest], block: int, *, waits: bool) -> Workload:
    """Convert recorded requests to a workload of the simulation.

    With `waits`, a request that waited for the end of an answer keeps its recorded delay after that end. Without it,
    all requests arrive at their recorded times. Answers of unknown length get the mean length of the others.
    """
    index_by_serial: Mapping[int, int] = {observed.serial: i for i, observed in enumerate(observed_requests)}
    output_lengths = [observed.output_tokens for observed in observed_requests if observed.output_tokens]
    mean_output_tokens = max(1, round(sum(output_lengths) / len(output_lengths))) if output_lengths else 1
    block_numbers = _BlockNumbers()
    predecessors = find_predecessors(observed_requests) if waits else [None] * len(observed_requests)
    requests: list[SimRequest] = []
    for i, (observed, predecessor) in enumerate(zip(observed_requests, predecessors)):
        continued_index = index_by_serial.get(observed.continues) if observed.continues is not None else None
        wait_origin_s = None if predecessor is None else observed_requests[predecessor].end_s
        if wait_origin_s is None:
            wait_origin_s = observed_requests[0].arrival_s
        request = SimRequest(
            index=i,
            session=i if continued_index is None else requests[continued_index].session,
            arrival_s=observed.arrival_s - wait_origin_s,
            prompt_tokens=observed.prompt_tokens,
            output_tokens=observed.output_tokens or mean_output_tokens,
            block_ids=block_numbers.get_numbers(observed.block_ids),
            previous_index=predecessor,
            block_size=block,
        )
        requests.append(request)
        if continued_index is not None:
            continued_end_s = observed_requests[continued_index].end_s
            if continued_end_s is None or continued_end_s <= observed.arrival_s:
                _set_final_blocks(requests[continued_index], request, block)
    for request in requests:
        # An answer's last token is never computed, so it fills no block.
        final_block_count = (request.prompt_tokens + request.output_tokens - 1) // block
        known_ids = request.final_block_ids or request.block_ids[: request.full_block_count]
        request.final_block_ids = known_ids + [
            next(block_numbers.unused_numbers) for _ in range(final_block_count - len(known_ids))
        ]
    return Workload("seen", requests, f"{len(requests)} requests that were seen")


def _set_final_blocks(earlier: SimRequest, request: SimRequest, block: int) -> None:
    """Set the blocks of an earlier request and its answer from the prompt that continues it, unless it differs."""
    full_blocks = earlier.full_block_count
    known_block_count = min((earlier.prompt_tokens + earlier.output_tokens) // block, request.full_block_count)
    if earlier.final_block_ids or known_block_count < full_blocks:
        return
    if earlier.block_ids[:full_blocks] == request.block_ids[:full_blocks]:
        earlier.final_block_ids = request.block_ids[:known_block_count]
