"""Engines that compute the prompt with the least left first: what waits before a prompt there, what it costs those that
it overtakes, how the router knows, and the same in the simulated engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from core_by_hand import apply_operation
from hypothesis import assume, given
from hypothesis import strategies as st

from options import ConfigError
from router.decide.config import CoreConfig, CostConfig, LearnConfig, QueueConfig
from router.decide.core import RouterCore
from router.decide.load import PeerLoad
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Enqueue, Forward, RouteRequest, Terms
from router.decide.policy import choose_cheapest
from router.decide.price import Candidate, RequestFacts, price_worker
from router.decide.target import InFlightRequest, Target
from router.decide.workers import BLOCKCAST, ServedModel, WorkerSpec
from router.fleet.prober import Prober
from router.fleet.worker_responses import read_engine_sizes
from router.fleet.worker_settings import WorkerSettings, parse_worker_flag
from router.index import make_index
from router.index.protocol import HolderId, Scope
from simulation.cache import SimCache
from simulation.engine import AGEING, EngineLimits, SimSequence, SimWorker
from simulation.steps import StepTimes
from simulation.workload import SimRequest


def tracker_of(count: int, *, learn: bool = False) -> tuple[LoadTracker, list[Target]]:
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig(enabled=learn))
    targets = [tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(count)]
    for target in targets:
        target.prefill_queue.is_shortest_first = True
        target.recompute_queue()
    return tracker, targets


def price(
    tracker: LoadTracker, targets: list[Target], cached_tokens: list[int], tokens: int, now: float
) -> list[Terms]:
    request = RequestFacts(now, tokens, 0.0, tracker.compute_utilisation_decay(now), congestion=0.1)
    candidates = [Candidate(target, tokens, tokens) for target, tokens in zip(targets, cached_tokens)]
    return [price_worker(candidate, request, CostConfig()) for candidate in candidates]


def pick_cheapest(prices: list[Terms]) -> int:
    return choose_cheapest([terms.cost for terms in prices], 0)


# The price -----------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 60_000), max_size=12), st.integers(1, 60_000), st.floats(0.0, 8.0))
def test_what_waits_before_a_prompt_is_who_has_less_left(
    other_tokens: list[int], own_tokens: int, elapsed_s: float
) -> None:
    assume(own_tokens not in other_tokens)  # of two that are alike, whichever goes first
    tracker, (target,) = tracker_of(1)
    for tokens in other_tokens:
        tracker.add_request(target, prompt_tokens=tokens, cached_tokens=0, is_streaming=True, now=0.0)
    lefts = sorted(target.estimate_prefill_s(tokens, 0) for tokens in other_tokens)
    own_s, wait_s = target.estimate_prefill_s(own_tokens, 0), target.estimate_queue_s(elapsed_s)
    if lefts:  # by how much the first is done is what `queue_s` says
        lefts[0] -= target.prefill_queue.own_prefill_s - wait_s
    before_s, overtaken_count = target.estimate_shortest_first_wait(own_s, None, wait_s)
    assert before_s == pytest.approx(sum(remaining_s for remaining_s in lefts if remaining_s <= own_s), abs=1e-9)
    assert overtaken_count == sum(remaining_s > own_s for remaining_s in lefts)
    (terms,) = price(tracker, [target], [0], own_tokens, elapsed_s)
    assert terms.queue_s == pytest.approx(before_s)
    assert terms.congestion_s == pytest.approx(terms.slowdown * (0.1 + overtaken_count) * own_s)
    least = sum(min(remaining_s, own_s) for remaining_s in lefts)
    overtaking_s = terms.congestion_s / terms.slowdown - 0.1 * own_s
    assert terms.queue_s + overtaking_s == pytest.approx(least, abs=1e-9), "the least of both, for each"


def test_a_short_turn_stays_behind_a_long_prompt_and_a_long_one_goes_elsewhere() -> None:
    """Worker 0 has the conversation and a prompt of 40,000 tokens to compute. In the order of arrival a turn of 500 new
    tokens is computed anew elsewhere; here it goes first. Who brings as much as that one goes where nothing waits."""
    tracker, targets = tracker_of(2)
    tracker.add_request(targets[0], prompt_tokens=40_000, cached_tokens=0, is_streaming=True, now=0.0)
    assert pick_cheapest(price(tracker, targets, [7500, 0], 8000, 0.1)) == 0
    assert pick_cheapest(price(tracker, targets, [7500, 0], 80_000, 0.1)) == 1
    for target in targets:
        target.prefill_queue.is_shortest_first = False
        target.recompute_queue()
    assert pick_cheapest(price(tracker, targets, [7500, 0], 8000, 0.1)) == 1


def test_a_prompt_whose_prefix_a_longer_one_computes_goes_behind_that_one() -> None:
    tracker, (target,) = tracker_of(1)
    first = tracker.add_request(target, prompt_tokens=2100, cached_tokens=0, is_streaming=True, now=0.0)
    first_s = target.estimate_prefill_s(2100, 0)
    request = RequestFacts(0.1, 2050, 0.0, 1.0)

    def wait_s(resident_tokens: int) -> float:
        return price_worker(Candidate(target, 2000, resident_tokens), request, CostConfig()).queue_s

    assert wait_s(resident_tokens=2000) == 0.0, "the prefix is there: the short rest overtakes"
    assert wait_s(resident_tokens=512) == pytest.approx(first_s - 0.1, rel=0.1)
    candidate = Candidate(target, 2000, resident_tokens=0)
    own_s = target.estimate_prefill_s(2050, 2000)
    ttft_s = price_worker(candidate, request, CostConfig()).ttft_s
    assert ttft_s == pytest.approx(target.slowdown * (first_s - 0.1 + own_s), rel=0.1)
    second, third = (
        tracker.add_request(
            target, prompt_tokens=2050, cached_tokens=2000, is_streaming=True, now=0.1, candidate=candidate
        )
        for _ in range(2)
    )
    assert wait_s(resident_tokens=0) == pytest.approx(first_s - 0.1 + 2 * own_s, rel=0.1)
    assert target.compute_overdue_ratio(0.1) < 0.6, "it is the first prompt that is being computed"
    tracker.record_first_token(first, 0.25)
    assert [place.order_s for place in target.prefill_queue.places.values()] == pytest.approx([own_s, own_s])
    tracker.check_invariants([first, second, third])


@pytest.mark.parametrize("count", [128, 129, 1000])
def test_of_very_many_the_oldest_stand_for_all(count: int) -> None:
    tracker, (target,) = tracker_of(1)
    sizes = [500 + 61 * (i * 37 % 100) for i in range(count)]
    in_flight = [
        tracker.add_request(target, prompt_tokens=tokens, cached_tokens=0, is_streaming=True, now=0.0)
        for tokens in sizes
    ]
    assert target.estimate_queue_s(0.0) == pytest.approx(target.prefill_queue.own_prefill_s)
    assert len(target.prefill_queue.places) == 128
    for prompt_tokens in (400, 1000, 3500, 9000):
        own_s = target.estimate_prefill_s(prompt_tokens, 0)
        before_s, overtaken_count = target.estimate_shortest_first_wait(own_s, None, target.estimate_queue_s(0.0))
        truth = [s for tokens in sizes if (s := target.estimate_prefill_s(tokens, 0)) <= own_s]
        assert before_s == pytest.approx(sum(truth), rel=0.12, abs=1e-6)
        assert overtaken_count == pytest.approx(count - len(truth), rel=0.12)
    tracker.check_invariants(in_flight)


def test_what_other_routers_sent_counts_by_its_mean() -> None:
    tracker, (target,) = tracker_of(1)
    load = PeerLoad(6.0, 3, oldest_prefill_s=2.0)
    tracker.set_peer_loads("other", {target.name: load})
    assert target.estimate_shortest_first_wait(1.0, None, target.estimate_queue_s(0.0)) == (0.0, 3)
    assert target.estimate_shortest_first_wait(2.5, None, target.estimate_queue_s(0.0)) == (6.0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["route", "blind", "first", "end", "turn"]), st.integers(0, 9), st.integers(1, 9000)),
        max_size=60,
    )
)
def test_sums_hold_in_any_order_of_events(steps: list[tuple[str, int, int]]) -> None:
    tracker, (target,) = tracker_of(1, learn=True)
    in_flight: dict[str, InFlightRequest] = {}
    for i, (operation, number, tokens) in enumerate(steps):
        name, now = str(number), i * 0.1
        apply_operation(tracker, target, in_flight, operation, name, tokens, now)
        if operation == "turn":  # its engine was restarted with the other order
            target.prefill_queue.is_shortest_first = not target.prefill_queue.is_shortest_first
            target.recompute_queue()
        tracker.advance(now)
        tracker.check_invariants(in_flight.values())
        assert target.estimate_queue_s(now) >= 0.0
        if target.prefill_queue.is_shortest_first:
            flights = target.prefill_queue.requests
            assert target.prefill_queue.places == {
                flight: (flight.estimate_remaining_prefill_s(),) * 2 for flight in flights
            }
            assert all(
                0.05 * f.prefill_s <= f.estimate_remaining_prefill_s() + 1e-12 <= f.prefill_s + 2e-12 for f in flights
            )
            before_s, overtaken_count = target.estimate_shortest_first_wait(
                target.estimate_prefill_s(tokens, 0), None, target.estimate_queue_s(now)
            )
            assert 0.0 <= before_s <= target.estimate_queue_s(now) + 1e-9
            assert overtaken_count <= len(flights)
    for request in in_flight.values():
        tracker.end_request(request, 1e6)
    assert (
        target.load.request_count,
        target.prefill_queue.own_prefill_s,
        target.prefill_queue.places,
        target.prefill_queue.total_prefill_s,
    ) == (0, 0.0, {}, 0.0)


def test_what_was_done_before_another_went_first_is_remembered() -> None:
    tracker, (target,) = tracker_of(1)
    tracker.add_request(target, prompt_tokens=40_000, cached_tokens=0, is_streaming=True, now=0.0)
    p = target.estimate_prefill_s(40_000, 0)
    short = tracker.add_request(target, prompt_tokens=1000, cached_tokens=0, is_streaming=True, now=3.0)
    tracker.record_first_token(short, 3.2)
    assert [place.order_s for place in target.prefill_queue.places.values()] == [pytest.approx(p - 3.0, rel=0.1)]


def test_the_queue_also_holds_requests_for_an_engine_that_has_one_of_its_own() -> None:
    def core_of(*, shortest: bool, fair: bool) -> RouterCore:
        core = RouterCore(make_index(), CoreConfig(queue=QueueConfig(fair=fair)), seed=0)
        core.add_worker(WorkerSpec("w", "http://w", (ServedModel("m", "m"),), is_shortest_first=shortest), 0.0)
        return core

    def second(core: RouterCore) -> object:
        for name in ("a", "b"):
            answer = core.route(RouteRequest(name, "m", Scope("m"), None, 50_000), 0.0)
        return answer

    assert isinstance(second(core_of(shortest=False, fair=True)), Enqueue)
    assert isinstance(second(core_of(shortest=True, fair=False)), Forward)
    assert isinstance(second(core_of(shortest=True, fair=True)), Enqueue), "turns between tenants are the router's"


# How it is known -----------------------------------------------------------------------------------------------------
class ScriptedProber(Prober):
    """A prober of one of our engines with this line in its metrics."""

    def __init__(self, line: str) -> None:
        self._kv_dialects = ()
        self._line = line

    async def _get(self, flag: WorkerSettings, path: str, bytes_max: int = 0) -> tuple[int, bytes]:
        models = b'{"data": [{"id": "m", "owned_by": "%b"}]}' % BLOCKCAST.encode()
        page = {"/v1/models": models, "/metrics": self._line.encode()}.get(path)
        return (404, b"") if page is None else (200, page)


def test_the_engine_tells_and_an_operator_knows_better() -> None:
    line = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="9",prefill_order="%s"} 1.0\n'
    assert read_engine_sizes(line % "shortest").is_shortest_first
    assert not read_engine_sizes(line % "arrival").is_shortest_first
    assert not read_engine_sizes('vllm:cache_config_info{block_size="16"} 1.0\n').is_shortest_first
    for flag, reported_order, expected in (
        ("url=http://a", True, True),
        ("url=http://a", False, False),
        ("url=http://a,prefill_order=arrival", True, False),
        ("url=http://a,prefill_order=shortest", False, True),
    ):
        prober = ScriptedProber(line % ("shortest" if reported_order else "arrival"))
        facts = asyncio.run(prober.probe(parse_worker_flag(f"{flag},events=none")))
        assert facts.spec.is_shortest_first is expected
    with pytest.raises(ConfigError, match="prefill_order='longest', expected arrival or shortest"):
        parse_worker_flag("url=http://a,prefill_order=longest")


def test_a_worker_that_comes_back_with_the_other_order_is_priced_by_it() -> None:
    core = RouterCore(make_index(), CoreConfig(), seed=0)
    spec = WorkerSpec("w", "http://w", (ServedModel("m", "m"),))
    for shortest, order in ((False, "arrival"), (True, "shortest"), (False, "arrival")):
        core.add_worker(WorkerSpec(spec.worker_id, spec.url, spec.models, is_shortest_first=shortest), 0.0)
        (row,) = core.snapshot(0.0).workers
        assert row["prefill_order"] == order


# The simulated engine ------------------------------------------------------------------------------------------------
def serve_prompts(
    arrivals: list[tuple[float, int]],
    limits: EngineLimits,
    *,
    capacity: int = 10**6,
    computed_on_arrival: dict[int, int] | None = None,
) -> dict[int, float]:
    """Seconds at which each of (arrival, tokens) has its first token; prompts have nothing in common. `came`: takes
    what had been computed when each arrived."""
    from simulation.steps import StepTimes

    worker = SimWorker(0, StepTimes(0.001, 1e12, 0.0, 0.0, 0.0, 64), SimCache(capacity), limits, 16)
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1][0])
    first: dict[int, float] = {}
    while todo or worker.wake_s is not None:
        if todo and (worker.wake_s is None or todo[0][1][0] <= worker.wake_s):
            number, (arrival_s, tokens) = todo.pop(0)
            ids = [number * 10_000 + i for i in range(tokens // 16)]
            sim_request = SimRequest(number, number, arrival_s, tokens, 1, ids)
            sim_request.final_block_ids = ids
            worker.submit(job := SimSequence(sim_request, arrival_s), arrival_s)
            if computed_on_arrival is not None:
                computed_on_arrival[number] = job.computed_before_arrival
        else:
            now = worker.wake_s
            assert now is not None
            for job in worker.advance(now).first_token_sequences:
                first[job.request.index] = now
    return first


SHORTEST = EngineLimits(shortest_first=True)


def test_the_simulated_engine_lets_short_prompts_by() -> None:
    arrivals = [(0.0, 6400), (1.0, 128), (1.0, 64)]
    assert serve_prompts(arrivals, EngineLimits()) == {
        0: pytest.approx(6.4),
        1: pytest.approx(6.528),
        2: pytest.approx(6.592),
    }
    first = serve_prompts(arrivals, SHORTEST)
    assert first[2] < first[1] < 1.4
    assert first[0] == pytest.approx(6.592), "nothing is computed twice"


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(1, 600)), min_size=1, max_size=40))
def test_who_comes_after_ten_times_a_prompts_length_was_computed_goes_behind_it(
    arrivals: list[tuple[float, int]],
) -> None:
    arrival_s: dict[int, int] = {}
    first = serve_prompts(arrivals, SHORTEST, computed_on_arrival=arrival_s)
    assert len(first) == len(arrivals)
    for i, (_, tokens) in enumerate(arrivals):
        late = [j for j in arrival_s if arrival_s[j] - arrival_s[i] > tokens / AGEING]
        assert all(first[i] <= first[j] for j in late)


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.just(300)), min_size=1, max_size=20))
def test_prompts_of_one_length_go_in_their_order(arrivals: list[tuple[float, int]]) -> None:
    assert serve_prompts(arrivals, SHORTEST) == pytest.approx(serve_prompts(arrivals, EngineLimits()))


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(16, 600)), min_size=1, max_size=15), st.booleans())
def test_a_cache_that_is_too_small_ends_all_the_same(arrivals: list[tuple[float, int]], preempts: bool) -> None:
    limits: Any = EngineLimits(max_sequences=4, is_preemptive=preempts, shortest_first=True)
    assert len(serve_prompts(arrivals, limits, capacity=45)) == len(arrivals)
