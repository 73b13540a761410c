"""What engines say of their load: read, and counted beyond what is known. The truth helps; lies do bounded harm."""

from __future__ import annotations

import functools
import importlib
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.load import (
    NO_PEER_LOAD,
    REPORT_VALID_S,
    USAGE_TOLERANCE,
    Capacity,
    EngineLoad,
    estimate_external_load,
)
from router.decide.messages import Decision, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.worker_responses import (
    METRICS_READ_BYTES_MAX,
    SLICE_BYTES,
    are_ranks_asleep,
    read_engine_sizes,
    read_loads,
    select_metric_lines,
)
from router.index import make_index
from router.index.protocol import Scope
from simulation.cluster import Placement

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


@pytest.mark.parametrize(
    "line",
    [
        'vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4096.0',
        "engine:kv_transfer_pulled_bytes_total 4096.0",
    ],
)
def test_engines_say_how_much_kv_they_got(line: str) -> None:
    page = f"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n{line}\n"
    lines = b"\n".join(select_metric_lines(page.encode())).decode()
    assert read_loads(lines, 1) == [EngineLoad(1, 0, received_kv_bytes=4096.0)]
    assert read_loads(page.replace("4096.0", "-1"), 1) == [EngineLoad(1, 0)]


def test_loads_are_read_by_rank_and_in_sum() -> None:
    assert read_loads(VLLM, 2) == [EngineLoad(7, 2, 0.25), EngineLoad(3, 0, 0.5)]
    assert read_loads(VLLM, 1) == [EngineLoad(10, 2, 0.375)]
    assert read_loads(VLLM, 3)[2] is None
    assert read_loads(
        'sglang:num_running_reqs{model_name="m"} 4\nsglang:num_queue_reqs{a="{}"} 1 1700000000000\n', 1
    ) == [EngineLoad(4, 1, None)]


def test_sglang_names_ranks_and_priorities() -> None:
    page = "".join(
        f'sglang:{name}{{dp_rank="{rank}",model_name="m",priority="{priority}",tp_rank="0"}} {count}\n'
        for name in ("num_running_reqs", "num_queue_reqs")
        for rank in (0, 1)
        for priority, count in (("", 3 + rank), ("0", 1), ("10", 2 + rank))
    )
    assert read_loads(page, 2) == [EngineLoad(3, 3), EngineLoad(4, 4)]
    assert read_loads(page, 1) == [EngineLoad(7, 7)]


def sleeping(*awake: str) -> str:
    """vLLM's gauge of so many ranks."""
    return "".join(
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="awake"}} {value}\n'
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="weights_offloaded"}} {1 - float(value)}\n'
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="discard_all"}} 0.0\n'
        for rank, value in enumerate(awake)
    )


@pytest.mark.parametrize(
    ("page", "ranks", "asleep"),
    [
        (sleeping("1.0"), 1, None),
        (sleeping("0.0"), 1, True),
        (sleeping("0.0", "0.0"), 2, True),
        (sleeping("0.0", "0.0"), 1, True),
        (VLLM + sleeping("0.0", "1.0"), 2, False),
        (VLLM + sleeping("0.0", "1.0"), 1, False),
        (VLLM + sleeping("1.0", "1.0"), 2, False),
        (VLLM + sleeping("0.0", "0.0"), 2, True),
        (VLLM + sleeping("nan"), 1, False),
        (VLLM + sleeping("-1"), 1, False),
        (VLLM, 2, False),
        ("", 1, None),
    ],
)
def test_a_worker_sleeps_where_all_of_its_ranks_say_so(page: str, ranks: int, asleep: bool | None) -> None:
    selected_lines = b"\n".join(select_metric_lines(page.encode())).decode()
    assert are_ranks_asleep(read_loads(selected_lines, ranks)) is asleep


@pytest.mark.parametrize("value", ["NaN", "-1", "1e30", "+Inf", "-Inf", "", "0x10", "seven", "1e400", "1_0e99"])
def test_what_cannot_be_true_is_not_said(value: str) -> None:
    for name in ("running", "waiting"):
        page = VLLM.replace(f'num_requests_{name}{{engine="0",model_name="m"}}', "x:y") + (
            f'vllm:num_requests_{name}{{engine="0"}} {value}\n'
        )
        assert read_loads(page, 2)[0] is None
    page = VLLM.replace("} 0.25", f"}} {value}")
    assert read_loads(page, 2)[0] == EngineLoad(7, 2, None)
    assert read_loads("", 1) == [None]


@given(st.text(max_size=300), st.integers(1, 4))
def test_any_page_is_read(text: str, ranks: int) -> None:
    for page in (text, VLLM.replace("7.0", text), VLLM.replace("engine", text)):
        for load in read_loads(page, ranks):
            assert load is None or (0 <= load.running <= 4e6 and 0 <= load.waiting <= 4e6)


LINES = [
    *VLLM.splitlines(), "", "x" * 300, "vllm:num_requests_running", 'sglang:token_usage{a="b"} 0.5',
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1', '# cache_config_info{block_size="1"}',
    'vllm:num_requests_running{a="' + "y" * 9000 + '"} 5', "z" * 70_000, '\u00e9 cache_config_info{block_size="2"',
]  # fmt: skip


@given(st.lists(st.sampled_from(LINES), max_size=60), st.integers(1, 3))
def test_the_lines_that_are_kept_say_what_the_page_says(lines: list[str], ranks: int) -> None:
    page = "\n".join(lines)
    selected_lines = b"\n".join(select_metric_lines(page.encode())).decode()
    assert read_loads(selected_lines, ranks) == read_loads(page, ranks)
    assert read_engine_sizes(selected_lines).cache_tokens == read_engine_sizes(page).cache_tokens


@pytest.mark.parametrize("line", ["\n", "v\n", "vllm:num_requests_running 1\n", *(line + "\n" for line in LINES[-4:])])
def test_a_page_of_four_megabytes_is_read_in_slices_and_little_is_kept(line: str) -> None:
    page = (line * (4_000_000 // len(line))).encode()
    slices = list(select_metric_lines(page))
    assert sum(map(len, slices)) <= METRICS_READ_BYTES_MAX
    assert (
        len(slices) >= len(page) // SLICE_BYTES
        or sum(map(len, slices)) > METRICS_READ_BYTES_MAX // 2
        or len(line) > SLICE_BYTES
    )


def estimate(
    running: int, waiting: int = 0, usage: float | None = None, *, known_requests: int = 0, has_size: bool = True
) -> tuple[int, int, int]:
    capacity = Capacity(kv_tokens=10_000 if has_size else None, max_num_seqs=64)
    report = EngineLoad(running, waiting, usage)
    external = estimate_external_load(
        report, known_requests=known_requests, known_kv_tokens=1000, capacity=capacity, prompt_s=0.1, prefill_rate=1e-4
    )
    assert external.prefill_s == pytest.approx(0.1 * external.prefill_requests)
    return external.decode_requests, external.prefill_requests, external.decode_context_tokens


def test_only_what_others_have_counts() -> None:
    assert estimate(28, known_requests=12) == (16, 0, 0)
    assert estimate(50, 5, 0.55, known_requests=10) == (40, 5, 4000)
    assert estimate(50, 5, 0.55, known_requests=10, has_size=False) == (40, 5, 0)
    assert estimate(8, 4, known_requests=10) == (0, 2, 0)
    assert estimate(3, usage=0.1, known_requests=10) == (0, 0, 0), "what was sent counts, whoever says less"
    assert estimate(10**6, 10**6, 1.0) == (64, 128, 8500), "no more than there are seats"


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.none() | st.floats(0.0, 1.0),
    st.integers(0, 100),
    st.integers(0, 12_000),
)
def test_the_load_is_the_larger_of_what_is_known_and_what_is_reported(
    running: int, waiting: int, usage: float | None, known_requests: int, known_tokens: int
) -> None:
    capacity = Capacity(kv_tokens=10_000, max_num_seqs=10_000)
    external = estimate_external_load(
        EngineLoad(running, waiting, usage), known_requests=known_requests, known_kv_tokens=known_tokens,
        capacity=capacity, prompt_s=0.1, prefill_rate=1e-4,
    )  # fmt: skip
    assert known_requests + external.request_count == max(known_requests, running + waiting)
    reported_tokens = int((usage - USAGE_TOLERANCE) * 10_000) if usage is not None else 0
    assert known_tokens + external.decode_context_tokens == max(known_tokens, reported_tokens)
    assert bool(external) is any((external.request_count, external.decode_context_tokens))


def test_a_report_counts_until_it_is_old() -> None:
    core = core_of(1)
    (target,) = core.registry.get_targets("w0")
    core.record_engine_load("w0", [EngineLoad(30, 0)], [0], 1.0)
    assert (target.external_load.decode_requests, target.total_request_count) == (30, 30)
    core.record_engine_load("w0", [None], [0], 1.0 + REPORT_VALID_S)
    assert target.external_load.decode_requests == 30
    core.record_engine_load("w0", [None], [0], 1.1 + REPORT_VALID_S)
    assert target.external_load is NO_PEER_LOAD
    assert target.total_request_count == 0


def core_of(workers: int) -> RouterCore:
    core = RouterCore(make_index(seed=1), CoreConfig())
    for i in range(workers):
        models = (ServedModel("m", "m"),)
        core.add_worker(WorkerSpec(f"w{i}", f"http://w{i}", models=models, max_num_seqs=32, cache_tokens=50_000), 0.0)
    return core


def test_what_others_have_is_in_the_price_and_in_what_is_shown() -> None:
    core = core_of(2)
    core.record_engine_load("w0", [EngineLoad(32, 8, 0.9)], core.count_in_flight_by_rank("w0"), 4.0)
    core.record_engine_load("w1", [EngineLoad(0, 0, 0.0)], core.count_in_flight_by_rank("w1"), 4.0)
    core.record_engine_load("gone", [EngineLoad(1, 1, 0.0)], core.count_in_flight_by_rank("gone"), 4.0)
    decision = core.explain(RouteRequest("x", "m", Scope("m"), list(range(600)), 600), 5.0)
    assert isinstance(decision, Decision)
    cheap, dear = decision.candidates
    assert (cheap.worker, cheap.external_requests, dear.external_requests) == ("w1", 0, 40)
    assert dear.decode_requests == 32
    assert dear.slot_wait_s > 0.5
    assert dear.decode_s > cheap.decode_s
    rows = {row["target"]: row for row in core.snapshot(5.0).workers}
    assert tuple(rows["w0"][field] for field in ("external_requests", "peer_decoding", "engine_load")) == (
        40, 0, EngineLoad(32, 8, 0.9))  # fmt: skip
    core.record_engine_load("w0", [None], [0], 30.0)
    decision = core.explain(RouteRequest("x", "m", Scope("m"), list(range(600)), 600), 30.0)
    assert [terms.external_requests for terms in decision.candidates] == [0, 0]  # type: ignore[union-attr]
    core.check_invariants()


# Lies, played out ------------------------------------------------------------------------------------------------
Say = Callable[[int, EngineLoad, float], EngineLoad | None]
FULL = EngineLoad(32, 1000, 1.0)


LIES: dict[str, Say] = {
    "nothing": lambda worker, truth, now: None,
    "none runs": lambda worker, truth, now: EngineLoad(0, 0, 0.0),
    "one is full": lambda worker, truth, now: FULL if worker == 0 else truth,
    "all are full": lambda worker, truth, now: FULL,
    "one runs": lambda worker, truth, now: EngineLoad(32, 0, 0.1) if worker == 7 else truth,
    "all run anything": lambda worker, truth, now: EngineLoad(int(7 * now + 5 * worker) % 32, 0, 0.1),
    "memory of one is full": lambda worker, truth, now: EngineLoad(0, 0, 1.0) if worker == 7 else truth,
    "what others had at the start": lambda worker, truth, now: EngineLoad(12, 0, 0.2),
}
"""worker, the truth, seconds -> what it says."""


@pytest.fixture(scope="module")
def sim() -> Any:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)
    parts = (
        "routing_sim.runs",
        "router.shadow.core_router",
        "routing_sim.traces",
        "simulation.cluster",
        "simulation.engine",
    )
    modules = SimpleNamespace(**{part.rpartition(".")[2]: importlib.import_module(part) for part in parts})
    modules.play = functools.partial(play, modules)
    modules.silent = functools.cache(functools.partial(play, modules, None))
    yield modules
    sys.path.remove(folder)


def play(
    sim: Any, say: Say | None, *, direct: float = 0.0, rate: float = 60.0, count: int = 900
) -> tuple[float, float]:
    """Eight workers of 32 seats; the first two get `direct` of the requests from elsewhere. (TTFT, end to end), mean
    seconds of the others after the first fifth. `say`: what worker i says in place of the truth, every 4 s."""
    workload = sim.traces.generate_chat("told", sim.traces.ChatShape(4, 1000, 50, 200, rate, count, 32), seed=1)
    rng = random.Random(1)
    elsewhere = {r.index: rng.randrange(2) for r in workload.requests if rng.random() < direct}

    class ReportingRouter(sim.core_router.CoreRouter):  # type: ignore[misc]
        def read_load(self, worker: Any) -> EngineLoad | None:
            return say(worker.number, super().read_load(worker), self.cluster.now) if say is not None else None

        def route(self, request: Any, now: float) -> list[Placement]:
            if request.index in elsewhere:
                return [Placement(request.index, elsewhere[request.index])]
            placements: list[Placement] = super().route(request, now)
            return placements

        def on_first_token(self, request: Any, worker: int, now: float) -> Any:
            return [] if request.index in elsewhere else super().on_first_token(request, worker, now)

        def on_finished(self, request: Any, worker: int, cached_tokens: int, now: float) -> Any:
            return [] if request.index in elsewhere else super().on_finished(request, worker, cached_tokens, now)

    service = sim.runs.StepTimes(0.0001, 1e12, 0.01, 2e-5, 4e-8, 4096)
    limits = sim.engine.EngineLimits(32, is_preemptive=True)
    config = sim.cluster.ClusterConfig([sim.cluster.WorkerConfig(service, 6250)] * 8, limits=limits)
    router = ReportingRouter(CoreConfig())
    result = sim.cluster.Cluster(config, workload, [router]).run()
    router.core.check_invariants()
    mine = [r.index for r in workload.requests[count // 5 :] if r.index not in elsewhere]
    return statistics.fmean(result.ttft_s_by_request[i] for i in mine), statistics.fmean(
        result.e2e_s_by_request[i] for i in mine
    )


def test_the_truth_of_others_requests_helps(sim: Any) -> None:
    """Half of all requests go to two of eight workers past the router."""
    half: Any = {"direct": 0.5, "rate": 80.0, "count": 1400}
    without, with_reports = sim.silent(**half), sim.play(lambda worker, truth, now: truth, **half)
    assert with_reports[0] < 0.95 * without[0]
    assert with_reports[1] <= without[1]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_little(sim: Any, lie: str) -> None:
    """Against saying nothing: first tokens a fifth later at most, answers a twentieth."""
    without, with_lies = sim.silent(), sim.play(LIES[lie])
    assert with_lies[0] <= 1.2 * without[0], (with_lies, without)
    assert with_lies[1] <= 1.05 * without[1], (with_lies, without)


@pytest.mark.parametrize("lie", ["nothing", "none runs"])
def test_who_says_less_than_is_known_changes_nothing(sim: Any, lie: str) -> None:
    assert sim.play(LIES[lie], direct=0.5, rate=80.0) == sim.silent(direct=0.5, rate=80.0)
