#!/usr/bin/env python3
"""Whether `router shadow` promises what switching then gives.

Before the simulator of benchmarks/routing.py: a fleet under round robin and under least requests is watched as
`router shadow` watches one (prompts, who answered, when, how much was cached), and what it predicts of switching is set
beside what the same fleet did under `router run`. The fleet's step times are not told: they are learned.

    benchmarks/shadow.py                                  # generated tool use and chats, half a minute
    benchmarks/shadow.py --trace claude_code_agentic.jsonl.gz --limit 3000 --json shadow.json
"""

from __future__ import annotations

import argparse
import random
from array import array
from itertools import count
from pathlib import Path

import _path  # noqa: F401
from harness.figures import describe_machine, format_facts, markdown_table, write_json
from routing_sim.runs import Calibration, Options, Setting, cluster_config, run
from routing_sim.traces import ChatShape, generate_chat, generate_tool_use, read_trace

from router.decide.config import CoreConfig
from router.shadow.observed_request import ObservedRequest, RecordedPrompt, RecordedPrompts
from router.shadow.replay import ObservedEngine, compare_placements
from simulation.cluster import SimulationResult
from simulation.engine import EngineLimits
from simulation.workload import SimRequest, Workload

COLUMNS = {
    "predicted": ("predicted", "{:,.0f}"), "measured": ("measured", "{:,.0f}"), "error": ("error", "{:+.1%}"),
    "of today": ("share", "{:.0%}"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", type=Path, default=[], help="a trace file; may be repeated")
    parser.add_argument("--limit", type=int, default=3000, help="requests of each (default 3,000)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--cache", type=float, default=30.0, help="percent of the working set")
    parser.add_argument("--load", type=float, default=40.0, help="percent of saturation")
    parser.add_argument("--rate", type=float, default=12.0, help="of the generated chats, requests a second")
    parser.add_argument("--users", type=int, default=16, help="who hold one talk after the other in the third workload")
    parser.add_argument("--slow-worker", type=float, help="worker 0 takes so many times as long as the others")
    parser.add_argument("--policy", action="append", help="of today (default: round_robin and least_requests)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--calibration", type=Path, default=Path.home() / ".cache/blockcast/routing-calibration.json")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Play, compare, print, write."""
    arguments = parser().parse_args(argv)
    host = describe_machine()
    print(format_facts(host))
    rows = simulate_workloads(arguments)
    print(markdown_table(rows, COLUMNS, "what is saved"))
    write_json(arguments.json, {"rows": rows, "machine": host})


def simulate_workloads(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """name -> what was predicted to be saved, and what was."""
    workloads = [read_trace(path, limit=arguments.limit, seed=arguments.seed) for path in arguments.trace] or [
        generate_tool_use("tool_use", seed=arguments.seed, max_requests=arguments.limit),
        generate_chat("chat", ChatShape(20, 2000, 200, 200, arguments.rate, arguments.limit, 32), seed=arguments.seed),
        generate_users(arguments.users, arguments.limit, arguments.seed),
    ]
    slow = {} if arguments.slow_worker is None else {0: arguments.slow_worker}
    played_by = f"{arguments.users} users"
    rows: dict[str, dict[str, float]] = {}
    for workload in workloads:
        keep_answers(workload)
        limits, blocks = EngineLimits(is_preemptive=True), {"chat": 1500, played_by: 3000}.get(workload.name)
        options, speed = Options(limits=limits, slow_workers=slow, seed=arguments.seed, cache_blocks=blocks), 1.0
        setting = Setting(workload.name, arguments.workers, arguments.cache / 100, arguments.load / 100)
        if workload.name not in ("chat", played_by):
            full = Setting(setting.trace, setting.workers, setting.cache_share, 1.0)
            speed = Calibration(arguments.calibration).speed(full, workload, options) * setting.load
        after, _ = run("blockcast", setting, workload, speed, options)
        for policy in arguments.policy or ["round_robin", "least_requests"]:
            today, _ = run(policy, setting, workload, speed, options)
            blocks = cluster_config(setting, workload, speed, options).workers[0].cache_blocks
            rows |= compare_run(f"{workload.name}, {policy}", workload, today, after, arguments.workers, blocks)
    return rows


def generate_users(number: int, requests_max: int, seed: int) -> Workload:
    """So many users, who hold one conversation after the other and think before each turn for a second, on average."""
    rng, block, block_ids = random.Random(seed), 32, count(1)
    systems = [[next(block_ids) for _ in range(rng.randint(10, 120))] for _ in range(12)]
    last_requests: list[int | None] = [None] * number
    turns: list[list[int]] = [[] for _ in range(number)]
    """user -> the blocks that its conversation has"""
    turns_left = [0] * number
    requests: list[SimRequest] = []
    while len(requests) < requests_max:
        user = len(requests) % number
        if not turns_left[user]:
            turns_left[user], turns[user] = rng.randint(1, 8), list(rng.choice(systems))
        turns_left[user] -= 1
        ids = turns[user] + [next(block_ids) for _ in range(rng.randint(2, 20))]
        wait_s = rng.expovariate(1.0) + 5.0 * (last_requests[user] is None) * rng.random()
        output_tokens = rng.randint(20, 300)
        tokens, i = len(ids) * block, len(requests)
        requests.append(SimRequest(i, user, wait_s, tokens, output_tokens, ids, last_requests[user], block, list(ids)))
        last_requests[user], turns[user] = i, ids + [next(block_ids) for _ in range(output_tokens // block)]
        requests[-1].final_block_ids = list(turns[user])
    workload = Workload(f"{number} users", requests, f"{requests_max} requests, generated with seed {seed}")
    workload.working_set_blocks = len({b for r in requests for b in r.final_block_ids})
    return workload


def keep_answers(workload: Workload) -> None:
    """Answers that nobody goes on from stay in the cache too, as in real engines; benchmarks/routing.py drops them."""
    block_ids = count(1 + max(block for r in workload.requests for block in r.final_block_ids))
    for r in workload.requests:
        r.final_block_ids = r.final_block_ids + [
            next(block_ids)
            for _ in range((r.prompt_tokens + r.output_tokens - 1) // r.block_size - len(r.final_block_ids))
        ]


def observe_run(workload: Workload, result: SimulationResult) -> list[ObservedRequest]:
    """What `router shadow` sees of a run, in the order of arrival."""
    earlier_prompts = RecordedPrompts(len(workload.requests))
    lengths = {r.index: r.prompt_tokens + r.output_tokens for r in workload.requests}
    requests = []
    for request in sorted(workload.requests, key=lambda r: result.arrived_s_by_request[r.index]):
        i, ids, tokens = request.index, array("Q", request.block_ids), request.prompt_tokens
        at_s = result.arrived_s_by_request[i]
        record = ObservedRequest(
            i, at_s, ids, tokens, str(result.worker_by_request[i]), result.hit_tokens_by_request[i]
        )
        record.first_token_s, record.end_s = at_s + result.ttft_s_by_request[i], at_s + result.e2e_s_by_request[i]
        record.output_tokens = request.output_tokens
        record.continues = earlier_prompts.find_continued(ids, lambda earlier, tokens=tokens: earlier.tokens <= tokens)
        earlier_prompts.add(RecordedPrompt(i, lengths[i], 0), ids, request.full_block_count)
        requests.append(record)
    return requests


def compare_run(
    name: str, workload: Workload, today: SimulationResult, after: SimulationResult, workers: int, blocks: int | None
) -> dict[str, dict[str, float]]:
    requests = observe_run(workload, today)
    warming = len(requests) // 10
    cache_tokens = None if blocks is None else blocks * workload.block_size
    engines = [ObservedEngine(str(i), cache_tokens) for i in range(workers)]
    comparison = compare_placements(requests, engines, workload.block_size, CoreConfig(), warming=warming)
    scored_requests = [request.serial for request in requests[warming:]]

    def compute_saving(figure: str) -> tuple[float, float]:
        if figure == "tokens":
            before, after_switch = (
                sum(workload.requests[i].prompt_tokens - r.hit_tokens_by_request[i] for i in scored_requests)
                for r in (today, after)
            )
        else:
            before, after_switch = (sum(getattr(r, figure)[i] for i in scored_requests) for r in (today, after))
        return before - after_switch, before

    measured = comparison.measured_totals
    model_error = 0.0 if measured is None else comparison.simulated_present.ttft_s / measured.ttft_s - 1.0
    rows = {}
    for title, predicted_saving, figure in (
        ("tokens computed", comparison.saved.computed_tokens, "tokens"),
        ("seconds to first token", comparison.saved.ttft_s, "ttft_s_by_request"),
        ("seconds to the end", comparison.saved.seconds, "e2e_s_by_request"),
    ):
        measured_saving, base = compute_saving(figure)
        rows[f"{name}: {title}"] = {
            "predicted": predicted_saving, "measured": measured_saving, "share": measured_saving / base,
            "error": predicted_saving / measured_saving - 1.0, "model_error": model_error,
        }  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
