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

from router.decide.config import CoreConfig
from router.shadow.observed_request import ObservedRequest, PrefixLinks
from router.shadow.replay import ObservedEngine, compare
from simulation.cluster import SimulationResult
from simulation.engine import EngineLimits
from simulation.traces import ChatShape, generate_chat, generate_tool_use, read_trace
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
    rows = simulated(arguments)
    print(markdown_table(rows, COLUMNS, "what is saved"))
    write_json(arguments.json, {"rows": rows, "machine": host})


def simulated(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """name -> what was predicted to be saved, and what was."""
    loaded = [read_trace(path, limit=arguments.limit, seed=arguments.seed) for path in arguments.trace] or [
        generate_tool_use("tool_use", seed=arguments.seed, requests_max=arguments.limit),
        generate_chat(
            "chat", ChatShape(20, 2000, 200, 200, arguments.rate, 0, arguments.limit, 32), seed=arguments.seed
        ),
        users(arguments.users, arguments.limit, arguments.seed),
    ]
    slow = {} if arguments.slow_worker is None else {0: arguments.slow_worker}
    played_by = f"{arguments.users} users"
    rows: dict[str, dict[str, float]] = {}
    for workload in loaded:
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
            blocks = cluster_config(setting, workload, speed, options).cache_blocks
            rows |= beside(f"{workload.name}, {policy}", workload, today, after, arguments.workers, blocks)
    return rows


def users(number: int, requests_max: int, seed: int) -> Workload:
    """So many users, who hold one conversation after the other and think before each turn for a second, on average."""
    rng, block, fresh = random.Random(seed), 32, count(1)
    systems = [[next(fresh) for _ in range(rng.randint(10, 120))] for _ in range(12)]
    last: list[int | None] = [None] * number
    turns: list[list[int]] = [[] for _ in range(number)]
    """user -> the blocks that its conversation has"""
    left = [0] * number
    requests: list[SimRequest] = []
    while len(requests) < requests_max:
        user = len(requests) % number
        if not left[user]:
            left[user], turns[user] = rng.randint(1, 8), list(rng.choice(systems))
        left[user] -= 1
        ids = turns[user] + [next(fresh) for _ in range(rng.randint(2, 20))]
        wait_s, said = rng.expovariate(1.0) + 5.0 * (last[user] is None) * rng.random(), rng.randint(20, 300)
        tokens, i = len(ids) * block, len(requests)
        requests.append(SimRequest(i, user, wait_s, tokens, said, ids, last[user], block, list(ids)))
        last[user], turns[user] = i, ids + [next(fresh) for _ in range(said // block)]
        requests[-1].final_ids = list(turns[user])
    workload = Workload(f"{number} users", requests, f"{requests_max} requests, generated with seed {seed}")
    workload.working_set_blocks = len({b for r in requests for b in r.final_ids})
    return workload


def keep_answers(workload: Workload) -> None:
    """Answers that nobody goes on from stay in the cache too, as in real engines; benchmarks/routing.py drops them."""
    fresh = count(1 + max(block for r in workload.requests for block in r.final_ids))
    for r in workload.requests:
        r.final_ids = r.final_ids + [
            next(fresh) for _ in range((r.prompt_tokens + r.output_tokens - 1) // r.block - len(r.final_ids))
        ]


def watched(workload: Workload, result: SimulationResult) -> list[ObservedRequest]:
    """What `router shadow` sees of a run, in the order of arrival."""
    links = PrefixLinks(len(workload.requests))
    lengths = {r.index: r.prompt_tokens + r.output_tokens for r in workload.requests}
    found = []
    for request in sorted(workload.requests, key=lambda r: result.arrived_s[r.index]):
        i, ids, tokens = request.index, array("Q", request.ids), request.prompt_tokens
        at_s = result.arrived_s[i]
        seen = ObservedRequest(i, at_s, ids, tokens, str(result.worker_of[i]), result.hit_tokens[i])
        seen.first_token_s, seen.end_s = at_s + result.ttft_s[i], at_s + result.e2e_s[i]
        seen.output_tokens = request.output_tokens
        seen.continues_streams = links.follow(
            i, ids, request.full_blocks, lambda earlier, tokens=tokens: lengths[earlier] <= tokens
        )
        found.append(seen)
    return found


def beside(
    name: str, workload: Workload, today: SimulationResult, after: SimulationResult, workers: int, blocks: int | None
) -> dict[str, dict[str, float]]:
    seen = watched(workload, today)
    warming = len(seen) // 10
    cache_tokens = None if blocks is None else blocks * workload.block
    engines = [ObservedEngine(str(i), cache_tokens) for i in range(workers)]
    found = compare(seen, engines, workload.block, CoreConfig(), warming=warming)
    kept = [one.serial for one in seen[warming:]]

    def gained(of: str) -> tuple[float, float]:
        if of == "tokens":
            was, now = (sum(workload.requests[i].prompt_tokens - r.hit_tokens[i] for i in kept) for r in (today, after))
        else:
            was, now = (sum(getattr(r, of)[i] for i in kept) for r in (today, after))
        return was - now, was

    rows = {}
    for title, predicted, of in (
        ("tokens computed", found.saved.computed_tokens, "tokens"),
        ("seconds to first token", found.saved.ttft_s, "ttft_s"),
        ("seconds to the end", found.saved.seconds, "e2e_s"),
    ):
        measured, base = gained(of)
        rows[f"{name}: {title}"] = {
            "predicted": predicted, "measured": measured, "share": measured / base,
            "error": predicted / measured - 1.0, "model_error": found.model_error or 0.0,
        }  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
