"""One setting, one policy, one run; the definition of load; the grid. `benchmarks/routing.py` prints what comes out."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from router.decide.cache_state import CacheState
from router.decide.config import CoreConfig, CostConfig, LearnConfig
from router.decide.learning.output_lengths import TOKENS_PRIOR, OutputLengths
from router.decide.target import Target
from routing_sim import peers
from routing_sim.fleet_router import KV_BYTES_PER_TOKEN, FleetRouter
from simulation.cluster import Cluster, ClusterConfig, Router, SimulationResult, WorkerConfig
from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.transfers import LinkTimes
from simulation.workload import Workload

WARM_SHARE = 0.1
"""Requests at the start of a trace that are not scored."""
LOAD_FACTOR = 4.0
"""100 % load: the largest arrival rate at which `SATURATED` keeps its mean TTFT within so many times its own at light
load."""
SATURATED = "dynamo_w1"
"""Dynamo's default."""
COLLAPSE_S = 900.0
"""A run whose oldest waiting request has waited so long is cut while load is calibrated."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the grid."""

    trace: str
    workers: int
    cache_share: float
    """Summed cache of all workers as a share of the trace's working set."""
    load: float
    """1.0: Dynamo's default is just about saturated."""


@dataclass(frozen=True, slots=True)
class Options:
    """What applies to every setting of a command."""

    service: StepTimes = field(default_factory=StepTimes)
    limits: EngineLimits = field(default_factory=EngineLimits)
    event_delay_s: float = 0.02
    routers: int = 1
    slow_workers: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    skip: int | None = None
    """Requests at the start that are not scored; None: a tenth."""
    host_memory: float = 0.0
    """Times each worker's cache, under it; the saturation is that without, and with prompts as they come."""
    transfer_gb_s: float = 0.0
    """Rate of each worker's link to the others, at KV_BYTES_PER_TOKEN; 0: no KV moves."""
    cache_blocks: int | None = None
    """Each worker's cache, where the setting does not say it as a share of the working set."""


@dataclass(slots=True)
class Score:
    """What one policy did in one setting. Seconds; hit is the share of prompt tokens taken from a cache."""

    hit: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_p999: float
    e2e: float
    imbalance: float
    """Prefilled tokens of the busiest worker over the mean."""
    tpot_mean: float = 0.0
    """Time per output token after the first, of each answer."""
    tpot_p99: float = 0.0
    e2e_p99: float = 0.0
    moved: float = 0.0
    """Tokens whose KV moved between workers, as a share of all prompt tokens."""


Factory = Callable[[Options], Router]

POLICIES: dict[str, Factory] = {
    "round_robin": lambda o: peers.RoundRobin(),
    "least_requests": lambda o: peers.LeastRequests(o.seed),
    "power_of_two": lambda o: peers.PowerOfTwo(o.seed),
    "session_sticky": lambda o: peers.SessionSticky(o.seed),
    "sglang_tree": lambda o: peers.SglangTree(),
    "dynamo_w1": lambda o: peers.Dynamo(1.0, o.seed),
    "dynamo_w16": lambda o: peers.Dynamo(16.0, o.seed),
    "dynamo_agentic": lambda o: peers.DynamoAgentic(o.seed),
    "lmetric": lambda o: peers.LMetric(o.seed),
    "llm_d": lambda o: peers.LlmD(o.seed),
    "blockcast": lambda o: FleetRouter(CoreConfig(), seed=o.seed),
}
EXTRA: dict[str, Factory] = {
    "oracle": lambda o: peers.Oracle(),
    "blockcast_told": lambda o: FleetRouter(CoreConfig(), seed=o.seed, knows_constants=True),
}
"""Run only where asked for: what knows the lengths of the answers, and `blockcast` with the true constants told."""
WITHOUT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "congestion": lambda: patch("router.decide.chooser.compute_congestion", lambda *of: 0.0),
    "pressure": lambda: patch.object(CacheState, "estimate_pressure_s", lambda *of: 0.0),
    "shared": lambda: patch.object(CacheState, "estimate_shared_prefix", lambda *of: (0, 0.0)),
    "slot_wait": lambda: patch.object(Target, "estimate_drain_s", lambda self, share: 0.0),
    "lengths": lambda: patch.object(OutputLengths, "estimate_length", lambda self, request: TOKENS_PRIOR),
    "overdue": lambda: patch("router.decide.target.OVERDUE_SHARE", 0.0),
}
"""Parts of the price, and how a run is made without one."""
_CONFIGS = {
    "decode": CoreConfig(cost=CostConfig(decode_weight=0.0)),
    "tie_break": CoreConfig(cost=CostConfig(utilisation_weight=0.0)),
    "learning": CoreConfig(learn=LearnConfig(enabled=False)),
}
ABLATIONS = {f"blockcast_without_{term}": term for term in (*WITHOUT, *_CONFIGS)}
EXTRA |= {
    name: lambda o, term=term: FleetRouter(_CONFIGS.get(term, CoreConfig()), seed=o.seed)  # type: ignore[misc]
    for name, term in ABLATIONS.items()
}
CHAT_POLICIES = [
    *("round_robin", "least_requests", "power_of_two", "sglang_tree", "dynamo_w1", "dynamo_w16", "dynamo_agentic"),
    *("lmetric", "llm_d", "blockcast"),
]
"""What is compared where decoding costs."""
BOUNDS = ("INF", "POOL")


def cluster_config(setting: Setting, workload: Workload, speed: float, options: Options) -> ClusterConfig:
    """Cache per worker in blocks: its part of the working set, but at least what the longest request needs."""
    longest = max(-(-(r.prompt_tokens + r.output_tokens) // r.block_size) for r in workload.requests)
    blocks = options.cache_blocks or max(
        round(setting.cache_share * workload.working_set_blocks / setting.workers), longest + 1
    )
    factors = [options.slow_workers.get(i, 1.0) for i in range(setting.workers)]
    workers = [
        WorkerConfig(options.service.scale(factor, factor), blocks, int(blocks * options.host_memory))
        for factor in factors
    ]
    link_times = LinkTimes(options.transfer_gb_s * 1e9 / KV_BYTES_PER_TOKEN) if options.transfer_gb_s else None
    return ClusterConfig(workers, speed, options.event_delay_s, limits=options.limits, link_times=link_times)


def run(
    policy: str,
    setting: Setting,
    workload: Workload,
    speed: float,
    options: Options,
    *,
    ttft_limit_s: float | None = None,
    factory: Factory | None = None,
) -> tuple[SimulationResult, Score]:
    """Simulate once. `factory` replaces the named policy's."""
    config = cluster_config(setting, workload, speed, options)
    routers: list[Router]
    if policy in BOUNDS:
        config = replace(config, has_shared_cache=True)
        if policy == "INF":
            infinite_workers = [replace(worker, cache_blocks=None, host_blocks=0) for worker in config.workers]
            config = replace(config, workers=infinite_workers)
        routers = [peers.LeastWork()]
    else:
        make = factory or {**POLICIES, **EXTRA}[policy]
        routers = [make(replace(options, seed=options.seed + i)) for i in range(options.routers)]
    with WITHOUT.get(ABLATIONS.get(policy, ""), nullcontext)():
        result = Cluster(config, workload, routers).run(ttft_limit_s)
    return result, score(result, workload, options.skip)


def score(result: SimulationResult, workload: Workload, skip: int | None) -> Score:
    """Figures over all requests but the first `skip` (a tenth)."""
    first = int(len(workload.requests) * WARM_SHARE) if skip is None else skip
    scored_requests = [r for r in workload.requests[first:] if r.index in result.e2e_s_by_request]
    ttft = sorted(result.ttft_s_by_request[r.index] for r in scored_requests) or [math.inf]
    e2e = sorted(result.e2e_s_by_request[r.index] for r in scored_requests) or [math.inf]
    decoding = [r for r in scored_requests if r.output_tokens > 1]
    tpot = sorted(
        (result.e2e_s_by_request[r.index] - result.ttft_s_by_request[r.index]) / (r.output_tokens - 1) for r in decoding
    ) or [math.inf]
    mean_prefilled = statistics.mean(result.prefilled_tokens_by_worker) if result.prefilled_tokens_by_worker else 0.0
    return Score(
        hit=sum(result.hit_tokens_by_request[r.index] for r in scored_requests)
        / max(1, sum(r.prompt_tokens for r in scored_requests)),
        ttft_mean=statistics.fmean(ttft),
        ttft_p50=_percentile(ttft, 0.5),
        ttft_p99=_percentile(ttft, 0.99),
        ttft_p999=_percentile(ttft, 0.999),
        e2e=statistics.fmean(e2e),
        imbalance=max(result.prefilled_tokens_by_worker) / mean_prefilled if mean_prefilled else 1.0,
        tpot_mean=statistics.fmean(tpot),
        tpot_p99=_percentile(tpot, 0.99),
        e2e_p99=_percentile(e2e, 0.99),
        moved=result.moved_tokens / max(1, sum(r.prompt_tokens for r in workload.requests)),
    )


def _percentile(sorted_values: list[float], share: float) -> float:
    return sorted_values[int(share * (len(sorted_values) - 1))]


class Calibration:
    """speed of 100 % load for each (trace, workers, cache), found by bisection and kept in a file between runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._speeds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def speed(self, setting: Setting, workload: Workload, options: Options) -> float:
        """Multiple of the trace's own arrival rate that counts as 100 % load."""
        key = self._key(setting, workload, options)
        if key not in self._speeds:
            limits = replace(options.limits, shortest_first=False)
            plain = replace(options, routers=1, slow_workers={}, host_memory=0.0, limits=limits)
            self._speeds[key] = _saturation(setting, workload, plain)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._speeds, indent=1, sort_keys=True))
        return self._speeds[key]

    @staticmethod
    def _key(setting: Setting, workload: Workload, options: Options) -> str:
        digest = hashlib.sha256()
        for r in workload.requests:
            digest.update(
                repr((r.arrival_s, r.prompt_tokens, r.output_tokens, r.previous_index, r.block_ids[-1:])).encode()
            )
        service = asdict(options.service)
        del service["load_s_per_token"]  # the saturation is that without host memory
        settings = (service, options.event_delay_s, LOAD_FACTOR)
        digest.update(repr(settings).encode())
        name = f"{setting.trace}/{len(workload.requests)}/n{setting.workers}/c{setting.cache_share}"
        return f"{name}/{digest.hexdigest()[:12]}"


def _saturation(setting: Setting, workload: Workload, options: Options) -> float:
    def mean(speed: float, limit_s: float | None) -> float:
        result, figures = run(SATURATED, setting, workload, speed, options, ttft_limit_s=limit_s)
        return math.inf if result.is_overloaded else figures.ttft_mean

    work = sum(r.prompt_tokens + r.prompt_tokens**2 / (2 * options.service.quadratic_tokens) for r in workload.requests)
    work *= options.service.prefill_s_per_token
    span = max(r.arrival_s for r in workload.requests if r.previous_index is None) or 1.0
    guess = setting.workers * span / work
    light_mean = mean(guess * 0.05, None)
    low, high = guess * 0.05, guess * 0.5
    while mean(high, COLLAPSE_S) <= LOAD_FACTOR * light_mean:
        low, high = high, high * 2.0
        if high > 4096 * guess:
            raise ValueError(f"{setting}: no arrival rate saturates it; is the trace long enough?")
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        if mean(middle, COLLAPSE_S) <= LOAD_FACTOR * light_mean:
            low = middle
        else:
            high = middle
    return low


RATIOS = ("hit", "ttft_mean", "ttft_p50", "ttft_p99", "ttft_p999", "e2e", "e2e_p99", "tpot_mean", "tpot_p99")


def relative(scores: dict[Setting, dict[str, Score]], base: str | None) -> dict[str, dict[str, float]]:
    """Geometric means over the settings of each policy's figures, divided by the base's if one is named."""
    means: dict[str, dict[str, float]] = {}
    for name in {name for by_policy in scores.values() for name in by_policy}:
        rows = [p for p in scores.values() if name in p]
        for f in RATIOS:
            bases = [1.0 if base is None else getattr(p[base], f) for p in rows]
            ratios = [getattr(p[name], f) / max(other, 1e-9) for p, other in zip(rows, bases)]
            means.setdefault(name, {})[f] = _geomean(ratios)
        means[name]["imbalance"] = _geomean([p[name].imbalance for p in rows])
    return means


def _geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in values))
