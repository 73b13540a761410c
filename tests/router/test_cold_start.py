"""A fleet that was just started, at speeds which the router does not know yet: questions behind one new prompt."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from core_by_hand import chosen_worker, make_core, request

from router.decide.config import CoreConfig
from router.decide.messages import Forward
from router.shadow.core_router import CoreRouter
from simulation.cluster import Cluster, ClusterConfig, WorkerConfig
from simulation.engine import EngineLimits
from simulation.steps import StepTimes

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: it has files named like modules
from routing_sim.fleet_router import FleetRouter
from routing_sim.traces import ChatShape, generate_chat

SLOW_STEPS = StepTimes(3e-4, 50_000.0, 0.02, 1e-3, 2.5e-8)
"""Workers whose prefill takes three times as long as the router assumes."""
ONE_PROMPT = ChatShape(
    system_tokens=2000, question_tokens=75, output_tokens=150, requests_per_s=17.0, request_count=68, block_size=16
)


def compute_mean_times(router: CoreRouter, worker_count: int, *, shortest_first: bool) -> tuple[float, float]:
    """Return the mean time to the first token and to the last one; more workers are slower, for the same load."""
    workload = generate_chat("one prompt", ONE_PROMPT, seed=1)
    slowness = worker_count / 8
    workers = [WorkerConfig(SLOW_STEPS.scale(slowness, slowness), 579)] * worker_count
    config = ClusterConfig(workers, limits=EngineLimits(shortest_first=shortest_first))
    result = Cluster(config, workload, [router]).run()
    return statistics.fmean(result.ttft_s_by_request.values()), statistics.fmean(result.e2e_s_by_request.values())


@pytest.mark.parametrize("shortest_first", [True, False])
@pytest.mark.parametrize("worker_count", [8, 16])
def test_a_cold_fleet_serves_one_prompt_about_as_well_as_with_known_speeds(
    worker_count: int, shortest_first: bool
) -> None:
    """Without the wait for prefixes that longer prompts compute, the first tokens took 2.5 times as long."""
    cold = compute_mean_times(CoreRouter(CoreConfig()), worker_count, shortest_first=shortest_first)
    informed = compute_mean_times(
        FleetRouter(CoreConfig(), knows_constants=True), worker_count, shortest_first=shortest_first
    )
    assert cold[0] < 1.1 * informed[0]
    assert cold[1] < 1.05 * informed[1]


def test_the_order_of_prefills_makes_no_difference_to_questions_behind_one_prompt() -> None:
    arrival = compute_mean_times(CoreRouter(CoreConfig()), 8, shortest_first=False)
    shortest = compute_mean_times(CoreRouter(CoreConfig()), 8, shortest_first=True)
    assert shortest == pytest.approx(arrival, rel=0.05)


def test_no_request_waits_for_a_prefix_beside_an_idle_worker_before_the_first_answer() -> None:
    core, index = make_core("abcd", CoreConfig(service=StepTimes(prefill_s_per_token=1e-3, step_tokens=200)))
    prompt = list(range(200))
    requests = [request(f"r{i}", prompt + [5000 + i] * 4, output_tokens_max=4) for i in range(8)]
    results = [core.route(route_request, 1.0 + 0.001 * i) for i, route_request in enumerate(requests)]
    workers = [chosen_worker(result) for result in results]
    assert sorted(workers[:4]) == ["a", "b", "c", "d"]
    for result in results[4:]:  # all workers have prompts to compute: prefixes that are being computed count
        assert isinstance(result, Forward)
        assert result.decision.predicted_cached_tokens == 200
    core.record_first_token("r0", 1.2)
    index.store(core.workers[workers[0]].holders[0], prompt)
    for name in ("r1", "r2", "r3"):
        core.finish_request(name, None, 1.2)
    later_result = core.route(request("later", prompt + [9] * 4, output_tokens_max=4), 1.2)
    assert isinstance(later_result, Forward)
    assert later_result.decision.predicted_cached_tokens == 200
