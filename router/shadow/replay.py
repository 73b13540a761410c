"""Estimate what `router run` would have given, by two simulations of the recorded requests. No I/O.

One simulation places the requests as they were placed, the other as `router run` would. Both have the same engines
(simulation/engine.py, with step times learned from the recorded answers) and the same caches, so that a fault of the
model is in both. The measured times are then scaled by the ratio of the two. In the first simulation requests arrive at
their recorded times. In the second one, a request that waited for an answer arrives as long after that answer as it
did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from math import ceil
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from router.decide.config import CoreConfig, CostConfig, LearnConfig
from router.decide.load_tracker import LoadTracker
from router.decide.target import InFlightRequest
from router.index.protocol import HolderId
from router.shadow.core_router import CoreRouter
from router.shadow.observed_request import ObservedRequest, find_predecessors
from simulation.cluster import Cluster, ClusterConfig, Placement, Router, SimulationResult, WorkerConfig
from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.workload import SimRequest, Workload

DEFAULT_MAX_NUM_SEQS = 256
"""Largest batch of a worker that does not report it."""


class ObservedEngine(msgspec.Struct, frozen=True):
    """A worker and its sizes, each None if unknown."""

    name: str
    cache_tokens: int | None = None
    max_num_seqs: int | None = None
    shortest_first: bool = False
    step_tokens: int | None = None


class ReplayTotals(msgspec.Struct):
    """Sums over the compared requests."""

    computed_tokens: float
    ttft_s: float
    """Sum of times to first token."""
    seconds: float | None
    """Sum of times to the end of the answer; None if no end was seen."""


JSON_NAMES = {
    "request_count": "requests",
    "warm_up_request_count": "warming",
    "waiting_request_count": "waited",
    "measured_totals": "measured",
    "simulated_present": "today",
    "simulated_router": "ours",
    "step_times_by_worker": "steps",
    "ttft_percentiles_by_curve": "quantiles",
}
"""Field of a `Comparison` -> its name in the report, where that is another one."""


class Comparison(msgspec.Struct, rename=JSON_NAMES):
    """Time and tokens that `router run` would have saved, compared with the present load balancer.

    The recorded requests are simulated twice, as they were placed and as `router run` would place them.
    """

    request_count: int
    """Number of compared requests."""
    warm_up_request_count: int
    """Number of earlier requests, which only fill the caches of both simulations."""
    waiting_request_count: int
    """How many of all requests had waited for the end of another. The simulation of `router run` has them wait too."""
    prompt_tokens: int
    """Sum over the compared requests."""
    measured_totals: ReplayTotals | None
    """Recorded times; None if no first token was recorded."""
    simulated_present: ReplayTotals
    """Totals of the simulation in which each request goes to its recorded worker."""
    simulated_router: ReplayTotals
    """Totals of the simulation in which `router run` chooses the workers."""
    saved: ReplayTotals
    """Saving of `router run`: the share by which the two simulations differ, applied to `measured_totals` if known."""
    step_times_by_worker: dict[str, StepTimes]
    """Learned time of a forward step on each worker."""
    ttft_percentiles_by_curve: dict[str, list[float]] = {}
    """Percentiles 0 to 100 of the times to first token, in seconds: as recorded, and of both simulations."""


class RecordedPlacement(Router):
    """Places each request at the worker that it was placed at."""

    def __init__(self, worker_index_by_request: Sequence[int]) -> None:
        self._worker_index_by_request = worker_index_by_request

    def route(self, request: SimRequest, now: float) -> list[Placement]:
        return [Placement(request.index, self._worker_index_by_request[request.index])]


def compare_placements(
    observed_requests: Sequence[ObservedRequest],
    engines: Sequence[ObservedEngine],
    block_tokens: int,
    config: CoreConfig | None = None,
    warming: int = 0,
) -> Comparison:
    """Simulate the recorded requests twice, at their recorded workers and as `router run` places them, and compare.

    `observed_requests` are in the order of arrival, all on `engines`. The first of them, `warming` in number, only
    fill the caches. Raises ValueError if no request is left to compare.
    """
    request_count, compared_requests = len(observed_requests), observed_requests[warming:]
    if not compared_requests:
        raise ValueError(f"{request_count} requests were seen, of which {warming} only fill the caches: none is left")

    # Simulate.
    workload = make_workload(observed_requests, block_tokens, waits=False)
    waiting_workload = make_workload(observed_requests, block_tokens, waits=True)
    cluster = _make_cluster(observed_requests, engines, workload, block_tokens)
    worker_index_by_name = {engine.name: i for i, engine in enumerate(engines)}
    recorded_placement = RecordedPlacement([worker_index_by_name[request.worker] for request in observed_requests])
    today_result = Cluster(cluster, workload, [recorded_placement]).run()
    router_result = Cluster(cluster, waiting_workload, [CoreRouter(config or CoreConfig())]).run()

    # Sum the results.
    compared_indices = range(warming, request_count)
    has_ends = any(request.end_s is not None for request in observed_requests)
    today_totals = _sum_simulated_totals(today_result, workload, compared_indices, has_ends=has_ends)
    router_totals = _sum_simulated_totals(router_result, workload, compared_indices, has_ends=has_ends)
    measured_totals = _sum_measured_totals(compared_requests, today_totals)
    ttfts_by_curve = {
        "measured": _list_measured_ttfts(compared_requests),
        "today, as played": [today_result.ttft_s_by_request[i] for i in compared_indices],
        "router run": [router_result.ttft_s_by_request[i] for i in compared_indices],
    }
    return Comparison(
        request_count=len(compared_requests),
        warm_up_request_count=warming,
        waiting_request_count=sum(request.previous_index is not None for request in waiting_workload.requests),
        prompt_tokens=sum(request.prompt_tokens for request in compared_requests),
        measured_totals=measured_totals,
        simulated_present=today_totals,
        simulated_router=router_totals,
        saved=_compute_savings(measured_totals or today_totals, today_totals, router_totals),
        step_times_by_worker={engine.name: worker.step_times for engine, worker in zip(engines, cluster.workers)},
        ttft_percentiles_by_curve={
            curve: _compute_percentiles(ttfts) for curve, ttfts in ttfts_by_curve.items() if ttfts
        },
    )


def _make_cluster(
    observed_requests: Sequence[ObservedRequest],
    engines: Sequence[ObservedEngine],
    workload: Workload,
    block_tokens: int,
) -> ClusterConfig:
    """Return the workers to simulate, with the cache sizes that they report and step times learned from the answers."""
    step_times_by_engine = learn_step_times(observed_requests, engines)
    # A worker may report too small a cache: it has served the longest request, so it has room for that.
    longest_request_tokens = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    longest_request_blocks = ceil(longest_request_tokens / block_tokens) + 2
    workers = []
    for engine in engines:
        cache_blocks = None
        if engine.cache_tokens is not None:
            cache_blocks = max(engine.cache_tokens // block_tokens, longest_request_blocks)
        workers.append(WorkerConfig(step_times_by_engine[engine.name], cache_blocks))
    # All simulated workers have the same limits: those of the most limited engine.
    limits = EngineLimits(
        max_sequences=min(engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS for engine in engines),
        is_preemptive=True,
        shortest_first=all(engine.shortest_first for engine in engines),
    )
    return ClusterConfig(workers, limits=limits)


def _compute_savings(base: ReplayTotals, today: ReplayTotals, ours: ReplayTotals) -> ReplayTotals:
    """Return the part of the `base` totals that `router run` would save.

    The share that `ours` saves of `today`, both simulated, is applied to `base`, which may be measured.
    """

    def compute_saving(field: str) -> Any:
        base_total, today_total, our_total = (getattr(totals, field) for totals in (base, today, ours))
        if base_total is None or today_total is None:
            return None
        return base_total * (1.0 - our_total / today_total) if today_total > 0.0 else 0.0

    return ReplayTotals(*map(compute_saving, ReplayTotals.__struct_fields__))


def _compute_percentiles(values: Iterable[float]) -> list[float]:
    sorted_values = sorted(values)
    return [sorted_values[round(percent / 100 * (len(sorted_values) - 1))] for percent in range(101)]


def _sum_simulated_totals(
    result: SimulationResult, workload: Workload, indices: range, *, has_ends: bool
) -> ReplayTotals:
    """Return the totals of a simulation. `has_ends`: the end of some answer was recorded."""
    prompt_tokens = sum(workload.requests[i].prompt_tokens for i in indices)
    hit_tokens = sum(result.hit_tokens_by_request[i] for i in indices)
    seconds = sum(result.e2e_s_by_request[i] for i in indices) if has_ends else None
    return ReplayTotals(float(prompt_tokens - hit_tokens), sum(result.ttft_s_by_request[i] for i in indices), seconds)


def _list_measured_ttfts(requests: Sequence[ObservedRequest]) -> list[float]:
    return [request.first_token_s - request.arrival_s for request in requests if request.first_token_s is not None]


def _sum_measured_totals(requests: Sequence[ObservedRequest], simulated_totals: ReplayTotals) -> ReplayTotals | None:
    """Return the sums of the recorded times and computed tokens; None if no first token was recorded.

    A request that lacks a measurement counts as the mean of the others. A total that no request has measured is taken
    from `simulated_totals`.
    """
    ttfts = _list_measured_ttfts(requests)
    if not ttfts:
        return None
    totals = msgspec.structs.replace(simulated_totals, ttft_s=fmean(ttfts) * len(requests))
    latencies = [request.end_s - request.arrival_s for request in requests if request.end_s is not None]
    if latencies:
        totals.seconds = fmean(latencies) * len(requests)
    reporting_requests = [request for request in requests if request.cached_tokens is not None]
    reported_prompt_tokens = sum(request.prompt_tokens for request in reporting_requests)
    if reported_prompt_tokens:
        prompt_tokens = sum(request.prompt_tokens for request in requests)
        reported_cached_tokens = sum(request.cached_tokens or 0 for request in reporting_requests)
        computed_share = 1.0 - reported_cached_tokens / reported_prompt_tokens
        totals.computed_tokens = computed_share * prompt_tokens
    return totals


# Step times -----------------------------------------------------------------------------------------------------------


class _AnswerEvent(NamedTuple):
    """Moment in the life of a recorded request."""

    at_s: float
    request: ObservedRequest
    kind: Literal["arrival", "first token", "end"]


def _list_answer_events(requests: Iterable[ObservedRequest]) -> list[_AnswerEvent]:
    """Return the events of all answers with a first token, in order of time."""
    events = []
    for request in requests:
        if request.first_token_s is not None:
            first_token_s = max(request.first_token_s, request.arrival_s)  # a log may have rounded times
            events.append(_AnswerEvent(request.arrival_s, request, "arrival"))
            events.append(_AnswerEvent(first_token_s, request, "first token"))
            events.append(_AnswerEvent(max(request.end_s or first_token_s, first_token_s), request, "end"))
    return sorted(events, key=lambda event: (event.at_s, event.request.serial))


def learn_step_times(requests: Iterable[ObservedRequest], engines: Sequence[ObservedEngine]) -> dict[str, StepTimes]:
    """Return how long each worker takes for a step of its engine, learned from the recorded answers.

    The recorded arrivals, first tokens and ends are replayed, in order of time, to the tracker that learns step times
    in the router.
    """
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    targets = {}
    for i, engine in enumerate(engines):
        targets[engine.name] = tracker.add_target(engine.name, None, HolderId(i))
        targets[engine.name].set_step_tokens(engine.step_tokens)
    in_flight_requests: dict[int, InFlightRequest] = {}
    known_requests = [request for request in requests if request.worker in targets]
    for now, request, kind in _list_answer_events(known_requests):
        tracker.advance(now)
        if kind == "arrival":
            in_flight_requests[request.serial] = tracker.add_request(
                targets[request.worker],
                prompt_tokens=request.prompt_tokens,
                cached_tokens=min(request.cached_tokens or 0, request.prompt_tokens),
                is_streaming=True,
                now=now,
                expected_output_tokens=float(request.output_tokens or 0),
            )
        elif kind == "first token":
            tracker.record_first_token(in_flight_requests[request.serial], now)
        else:
            in_flight = in_flight_requests.pop(request.serial)
            tracker.record_progress(in_flight, request.output_tokens or 0)
            tracker.record_answer(in_flight, request.output_tokens, now)
            tracker.end_request(in_flight, now, reported_cached_tokens=request.cached_tokens)
    return {worker: target.speed.step_times for worker, target in targets.items()}


# Workload -------------------------------------------------------------------------------------------------------------


def make_workload(observed_requests: Sequence[ObservedRequest], block_tokens: int, *, waits: bool) -> Workload:
    """Convert recorded requests to a workload of the simulation.

    With `waits`, a request that waited for the end of an answer keeps its recorded delay after that end. Without it,
    all requests arrive at their recorded times. An answer of unknown length gets the mean length.
    """
    output_lengths = [observed.output_tokens for observed in observed_requests if observed.output_tokens]
    mean_output_tokens = max(1, round(fmean(output_lengths))) if output_lengths else 1
    # The simulation numbers blocks from 1 on. Blocks with equal digests have one number.
    unused_numbers = count(1)
    number_by_digest: defaultdict[int, int] = defaultdict(unused_numbers.__next__)
    predecessors = find_predecessors(observed_requests) if waits else [None] * len(observed_requests)
    requests: list[SimRequest] = []
    for i, (observed, predecessor) in enumerate(zip(observed_requests, predecessors)):
        awaited_end_s = None if predecessor is None else observed_requests[predecessor].end_s
        origin_s = observed_requests[0].arrival_s if awaited_end_s is None else awaited_end_s
        request = SimRequest(
            index=i,
            session=i,
            arrival_s=observed.arrival_s - origin_s,
            prompt_tokens=observed.prompt_tokens,
            output_tokens=observed.output_tokens or mean_output_tokens,
            block_ids=[number_by_digest[digest] for digest in observed.block_ids],
            previous_index=predecessor,
            block_size=block_tokens,
        )
        requests.append(request)
    _join_conversations(observed_requests, requests)
    _add_unseen_final_blocks(requests, unused_numbers)
    return Workload("seen", requests, f"{len(requests)} requests that were seen")


def _join_conversations(observed_requests: Sequence[ObservedRequest], requests: Sequence[SimRequest]) -> None:
    """Put the turns of a conversation into one session, and set the blocks that each answer leaves in the cache.

    These blocks are taken from the next prompt of the conversation, which repeats the answer. `requests` are those of
    the simulation, in the order of `observed_requests`.
    """
    index_by_serial: dict[int | None, int] = {observed.serial: i for i, observed in enumerate(observed_requests)}
    for observed, request in zip(observed_requests, requests):
        previous_turn = index_by_serial.get(observed.continues)
        if previous_turn is None:
            continue
        request.session = requests[previous_turn].session
        previous_end_s = observed_requests[previous_turn].end_s
        if previous_end_s is None or previous_end_s <= observed.arrival_s:
            _set_final_blocks(requests[previous_turn], request)


def _add_unseen_final_blocks(requests: Iterable[SimRequest], unused_numbers: Iterator[int]) -> None:
    """Give new numbers to those blocks of each request's answer that no later prompt contains.

    The last token of an answer is never computed, so it fills no block.
    """
    for request in requests:  # `final_block_ids`: blocks in the cache after the answer
        final_block_count = (request.prompt_tokens + request.output_tokens - 1) // request.block_size
        known_ids = request.final_block_ids or request.block_ids[: request.full_block_count]
        new_block_count = max(final_block_count - len(known_ids), 0)
        request.final_block_ids = known_ids + list(islice(unused_numbers, new_block_count))


def _set_final_blocks(earlier: SimRequest, request: SimRequest) -> None:
    """Set the blocks of an earlier request and its answer from the prompt that continues it, unless it differs."""
    full_blocks = earlier.full_block_count
    total_blocks = (earlier.prompt_tokens + earlier.output_tokens - 1) // earlier.block_size
    known_block_count = min(total_blocks, request.full_block_count)
    if earlier.final_block_ids or known_block_count < full_blocks:
        return
    if earlier.block_ids[:full_blocks] == request.block_ids[:full_blocks]:
        earlier.final_block_ids = request.block_ids[:known_block_count]
