#!/usr/bin/env python3
"""Which router answers first: a discrete-event simulation of policies over public traces.

The router under test is the real core, tracker, policy and index with a virtual clock; the others are re-implemented
from their documented formulas (benchmarks/routing_sim/peers.py). INF is one infinite cache shared by all workers, POOL
one shared cache of the same total size: what no router can beat without moving KV. Every figure is relative to INF in
the same setting, and a geometric mean over the settings.

    benchmarks/routing.py --trace mooncake_conversation.jsonl.gz --trace claude_code_agentic.jsonl.gz
    benchmarks/routing.py --workers 8 --cache 30 --limit 3000 --trace ... --json routing.json    # a few minutes

`--grid` plays a fixed sample of many settings with made-up requests instead: questions under shared system prompts,
where decoding is what costs. Figures are then relative to an oracle that knows the engines' state and how long every
answer will be. A file named by --json is added to: what is in it is not played again, but for policies that are named.

    benchmarks/routing.py --grid --sample 60 --jobs 2 --json grid.json
    benchmarks/routing.py --grid --sample 16 --ablate --json terms.json      # what each term of the price is worth

`--disaggregated` plays conversations before workers that do both, and before workers with roles (prefill, decode), each
under our price and under the rules of other routers.

    benchmarks/routing.py --disaggregated --workers 8,16 --limit 4000 --json disaggregated.json

Traces: Mooncake's FAST25 release (github.com/kvcache-ai/Mooncake) and kv-cache-tester's agent sessions
(github.com/callanjfox/kv-cache-tester), plain or gzipped. Without --trace, generated tool-use traffic is played.
The service model is assumed, not measured: --help has its parameters, docs/measurements/routing.md what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import _path  # noqa: F401
from harness.figures import describe_machine, format_facts, markdown_table, write_json
from routing_sim import disaggregation, grid
from routing_sim.fleet_router import KV_BYTES_PER_TOKEN
from routing_sim.runs import (
    ABLATIONS,
    BOUNDS,
    CHAT_POLICIES,
    EXTRA,
    POLICIES,
    Calibration,
    Options,
    Score,
    Setting,
    relative,
    run,
)
from routing_sim.traces import generate_tool_use, read_trace

from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.workload import Workload

GRID_COLUMNS = {title: (key, "{:.2f}") for title, key in (
    ("hit", "hit"), ("TTFT mean", "ttft_mean"), ("p50", "ttft_p50"), ("p99", "ttft_p99"), ("p99.9", "ttft_p999"),
    ("E2E", "e2e"), ("imbalance", "imbalance"))}  # fmt: skip
_WORKLOADS: dict[str, Workload] = {}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with a message naming the option that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", type=Path, default=[], help="a trace file; may be repeated")
    parser.add_argument("--limit", type=int, help="requests of each trace (default: all)")
    parser.add_argument("--workers", type=_ints, default=[4, 8, 16], help="comma-separated (default 4,8,16)")
    parser.add_argument("--cache", type=_floats, default=[10.0, 30.0, 100.0],
                        help="percent of the working set (default 10,30,100)")  # fmt: skip
    parser.add_argument("--load", type=_floats, default=[70.0, 95.0], help="percent of saturation (default 70,95)")
    parser.add_argument("--policy", action="append", choices=[*POLICIES, *EXTRA], help="only these (and the bounds)")
    parser.add_argument("--event-delay", type=float, default=0.02, help="seconds until a router hears of an event")
    parser.add_argument("--routers", type=int, default=1, help="routers in front; requests are dealt in turn")
    parser.add_argument("--slow-worker", type=float, help="worker 0 takes so many times as long as the others")
    parser.add_argument("--skip", type=int, help="requests at the start of a trace that are not scored (a tenth)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--calibration", type=Path, default=Path.home() / ".cache/blockcast/routing-calibration.json")
    parser.add_argument("--host-memory", type=float, default=0.0, help="under each cache, times its size")
    parser.add_argument(
        "--host-gb-s", type=float, default=25.0, help=f"from there, at {KV_BYTES_PER_TOKEN:,} bytes a token"
    )
    parser.add_argument("--transfer-gb-s", type=float, default=0.0, help="rate at which ours moves KV (0: it does not)")
    parser.add_argument("--prefill-order", choices=["arrival", "shortest"], default="arrival",
                        help="which prompt an engine computes first; 100 %% load is that of arrival")  # fmt: skip
    for name, value in asdict(StepTimes()).items():
        if name == "load_s_per_token":
            continue
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"service model (default {value})")
    parser.add_argument("--grid", action="store_true", help="settings in which decoding costs; see routing_sim/grid.py")
    parser.add_argument("--disaggregated", action="store_true", help="see routing_sim/disaggregation.py")
    parser.add_argument("--ablate", action="store_true", help="with --grid: ours without each term, beside ours")
    parser.add_argument("--sample", type=int, help="so many of the grid's settings (default: all)")
    parser.add_argument("--draws", type=int, default=1, help="of each of them, with seeds from --seed on: their means")
    arguments = parser.parse_args(argv)
    for path in arguments.trace:
        if not path.is_file():
            parser.error(f"--trace {path}: no such file")
    if arguments.draws < 1:
        parser.error(f"--draws {arguments.draws}: expected at least 1")
    return arguments


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """Calibrate, run the grid, print, write."""
    arguments = parse_arguments(argv)
    if arguments.grid:
        run_grid(arguments)
        return
    if arguments.disaggregated:
        run_disaggregated(arguments)
        return
    load_s = KV_BYTES_PER_TOKEN / (arguments.host_gb_s * 1e9) if arguments.host_memory else 0.0
    step_times = {name: getattr(arguments, name) for name in asdict(StepTimes()) if name != "load_s_per_token"}
    service = StepTimes(**step_times, load_s_per_token=load_s)
    options = Options(
        service=service,
        limits=EngineLimits(shortest_first=arguments.prefill_order == "shortest"),
        event_delay_s=arguments.event_delay,
        routers=arguments.routers,
        seed=arguments.seed,
        skip=arguments.skip,
        host_memory=arguments.host_memory,
        transfer_gb_s=arguments.transfer_gb_s,
        slow_workers={} if arguments.slow_worker is None else {0: arguments.slow_worker},
    )
    host = describe_machine()
    print(format_facts(host))
    document = run_traces(arguments, options)
    write_json(arguments.json, {**document, "machine": host})


def run_traces(arguments: argparse.Namespace, options: Options) -> dict[str, Any]:
    """Every policy on every trace in every setting."""
    start_s = time.time()
    workloads = [read_trace(path, limit=arguments.limit, seed=arguments.seed) for path in arguments.trace]
    workloads = workloads or [generate_tool_use("tool_use", seed=arguments.seed, max_requests=arguments.limit or 6000)]
    for workload in workloads:
        _WORKLOADS[workload.name] = workload
        print(
            f"{workload.name}: {workload.description}; working set {workload.working_set_blocks:,} blocks of 512 tokens"
        )
    settings = [
        Setting(trace, workers, cache / 100.0, load / 100.0)
        for trace in _WORKLOADS
        for workers in arguments.workers
        for cache in arguments.cache
        for load in arguments.load
    ]
    calibration = Calibration(arguments.calibration)
    full: dict[Setting, float] = {}
    for setting in dict.fromkeys(replace(s, load=1.0) for s in settings):
        full[setting] = calibration.speed(setting, _WORKLOADS[setting.trace], options)
        _progress("calibrating load", len(full), len(settings) // len(arguments.load))
    speeds = {s: full[replace(s, load=1.0)] * s.load for s in settings}
    policies = [*BOUNDS, *(arguments.policy or POLICIES)]
    scores = run_all([(policy, s, speeds[s], options) for s in settings for policy in policies], arguments.jobs)
    ratios = relative(scores, "INF")
    print(f"\nGeometric means over {len(settings)} settings, relative to INF (imbalance: busiest worker over mean)")
    order = sorted(ratios, key=lambda name: (name in BOUNDS, -ratios[name]["ttft_mean"]))
    print(markdown_table({name: ratios[name] for name in order}, GRID_COLUMNS, "policy"))
    print(f"{time.time() - start_s:.0f} s")
    return {
        **{name: ratios[name] for name in policies},
        "absolute": relative(scores, None),
        "settings": [{**asdict(s), "speed": speeds[s], "policies": as_json(scores[s])} for s in settings],
        "options": {**asdict(options), "traces": {w.name: w.description for w in _WORKLOADS.values()}},
    }


def run_grid(arguments: argparse.Namespace) -> None:
    """What the file does not have yet of the grid, and named policies anew; a line for each setting, then the sum."""
    start_s, host = time.time(), describe_machine()
    print(format_facts(host))
    previous_rows: dict[str, dict[str, Any]] = {}
    if arguments.json is not None and arguments.json.exists():
        previous_rows = json.loads(arguments.json.read_text())["settings"]
    rows_by_setting: dict[str, dict[str, Any]] = {}
    policy_names = [grid.OURS, *ABLATIONS] if arguments.ablate else [*CHAT_POLICIES, grid.BASE]
    work = []
    for point in grid.points(arguments.sample):
        known_rows = {
            name: row for name, row in previous_rows.get(str(point), {}).items() if name not in (arguments.policy or ())
        }
        missing = [name for name in policy_names if name not in known_rows]
        if missing:
            work.append((point, known_rows, missing, range(arguments.seed, arguments.seed + arguments.draws)))
        else:
            rows_by_setting[str(point)] = known_rows
    count, seed_options = len(work) + len(rows_by_setting), {"seed": arguments.seed, "draws": arguments.draws}
    print(f"{count} settings, {len(rows_by_setting)} known")
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for name, policies, seconds in pool.imap_unordered(_play, work):
            rows_by_setting[name] = policies
            if arguments.ablate:
                print(f"{len(rows_by_setting)}/{count} {name}; {seconds:.0f} s", flush=True)
                write_json(
                    arguments.json, {"settings": {**previous_rows, **rows_by_setting}, **seed_options, "machine": host}
                )
                continue
            ratios = grid.verdict(policies)["ratios"].items()
            ratio_text = ", ".join(f"{key} {value:.3f} ({policy})" for key, (value, policy) in ratios)
            print(f"{len(rows_by_setting)}/{count} {name}: over the best {ratio_text}; {seconds:.0f} s", flush=True)
            document = {
                **grid.summary(rows_by_setting),
                "settings": {**previous_rows, **rows_by_setting},
                **seed_options,
                "machine": host,
            }
            write_json(arguments.json, document)
    if arguments.ablate:
        means = {name: grid.means(rows_by_setting, name, grid.OURS) for name in ABLATIONS}
        print(markdown_table(means, {key: (key, "{:.3f}") for key in grid.FIGURES}, "ours, beside it"))
        return
    report = grid.summary(rows_by_setting)
    print(markdown_table(report.pop("relative"), {key: (key, "{:.3f}") for key in grid.FIGURES}, "policy"))
    print("\n".join(f"{key}: {json.dumps(value)}" for key, value in report.items()))
    print(f"{time.time() - start_s:.0f} s")


def run_disaggregated(arguments: argparse.Namespace) -> None:
    """Every scheme before every fleet and traffic, a table for each."""
    host = describe_machine()
    print(format_facts(host))
    document: dict[str, Any] = {"machine": host}
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for workers in arguments.workers:
            for traffic in disaggregation.TRAFFICS:
                runs = [
                    disaggregation.Run(traffic, workers, *scheme, arguments.limit or 4000, arguments.seed)
                    for scheme in disaggregation.list_schemes(workers)
                ]
                rows = dict(zip(map(str, runs), pool.map(disaggregation.play, runs, chunksize=1)))
                document[f"{workers} workers, {traffic.name}"] = rows
                print(f"\n{workers} workers, {traffic.name}")
                print(markdown_table(rows, disaggregation.COLUMNS, "scheme"), flush=True)
                write_json(arguments.json, document)


def _play(work: tuple[grid.Point, dict[str, Any], list[str], range]) -> tuple[str, dict[str, Any], float]:
    point, known_rows, missing, seeds = work
    start_s = time.time()
    draws = [grid.play(point, missing, seed) for seed in seeds]
    mean_rows = {
        policy: {figure: statistics.fmean(draw[policy][figure] for draw in draws) for figure in draws[0][policy]}
        for policy in missing
    }
    return str(point), {**known_rows, **mean_rows}, time.time() - start_s


def as_json(scores: dict[str, Score]) -> dict[str, dict[str, Any]]:
    return {name: asdict(score) for name, score in scores.items()}


def run_all(work: list[tuple[str, Setting, float, Options]], jobs: int) -> dict[Setting, dict[str, Score]]:
    """All of (policy, setting, speed, options), over `jobs` processes."""
    scores: dict[Setting, dict[str, Score]] = {setting: {} for _, setting, _, _ in work}
    with multiprocessing.get_context("fork").Pool(min(jobs, len(work))) as pool:
        for i, (policy, setting, figures) in enumerate(pool.imap_unordered(_run_one, work)):
            scores[setting][policy] = figures
            _progress("simulating", i + 1, len(work))
    sys.stderr.write("\n")
    return scores


def _run_one(work: tuple[str, Setting, float, Options]) -> tuple[str, Setting, Score]:
    policy, setting, speed, options = work
    _, figures = run(policy, setting, _WORKLOADS[setting.trace], speed, options)
    return policy, setting, figures


def _progress(stage: str, done_count: int, total: int) -> None:
    sys.stderr.write(f"\r{stage:<18} {done_count}/{total} ")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
