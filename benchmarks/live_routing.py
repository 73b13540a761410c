#!/usr/bin/env python3
"""Routing policies against each other, live: real `engine serve` workers on this machine, a real router, real text.

    benchmarks/live_routing.py                                        # about four minutes on two cores
    benchmarks/live_routing.py --policy sticky --policy kv --rounds 4 --json live.json

Every run starts fresh workers and a fresh router, warms each worker up with tokens of no use later, and plays the same
requests, to the byte: sessions start at random moments, whatever is still in progress, and within a session a request
follows the one before. The policies alternate, and who begins changes from round to round.

Load is stated against what is measured first: the tokens a second that all workers prefill together. At `--load 70` the
prompt tokens that one endless cache shared by all workers would still have to prefill arrive at 70 % of that rate; what
a policy computes twice, and every answer token, comes on top. One factor scales all times of the workload for it.

Tokens are the engine's own counts; times are the client's. The model is the demo's random one: its text means nothing,
its prefill costs what such a model costs.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import _path  # noqa: F401
import click
from harness.figures import in_words, machine, markdown, write_json
from harness.load import Outcome, summarise
from harness.programs import Cluster, make_demo_model
from harness.talks import repo_text
from live_routing_parts import BLOCK, Workload, prefill_rate, replay, repo_sessions, warm

from prompts import Tokenizer

POLICIES = ("kv", "least_requests", "round_robin", "sticky")
CALIBRATION_S = 5.0
COLUMNS = {
    "requests": ("requests", "{:,}"), "prompt tokens": ("prompt_tokens", "{:,}"), "cached": ("cached_tokens", "{:,}"),
    "prefilled": ("prefilled_tokens", "{:,}"), "on the busiest": ("busiest_share", "{:.0%}"),
    "TTFT mean": ("ttft_mean_ms", "{:,.0f} ms"), "p50": ("ttft_p50_ms", "{:,.0f} ms"),
    "p99": ("ttft_p99_ms", "{:,.0f} ms"), "E2E mean": ("e2e_mean_ms", "{:,.0f} ms"),
}  # fmt: skip


def measure_rate(model: Path, workers: int, length: int, vocab_size: int, log_dir: Path) -> float:
    """Tokens a second of all workers together, on fresh ones that are then thrown away."""
    with Cluster(model, policy="round_robin", num_blocks=None, log_dir=log_dir, workers=workers) as cluster:
        urls = cluster.worker_urls
        return asyncio.run(prefill_rate(urls, cluster.model_name, vocab_size, length, CALIBRATION_S, seed=1))


def run_once(
    policy: str, model: Path, workload: Workload, scale: float, workers: int, blocks: int, log_dir: Path
) -> tuple[list[Outcome], float]:
    """Fresh processes, the whole workload once; outcomes and wall seconds."""
    with Cluster(model, policy=policy, num_blocks=blocks, log_dir=log_dir, workers=workers) as cluster:
        asyncio.run(warm(cluster.worker_urls, cluster.model_name))
        begin_s = time.perf_counter()
        outcomes = asyncio.run(replay(cluster.url, cluster.model_name, workload, scale))
        return outcomes, time.perf_counter() - begin_s


def comparison(rows: dict[str, dict[str, float | int]]) -> list[str]:
    """kv against each of the others, in words."""
    if "kv" not in rows:
        return []
    keys = {"prefilled tokens": "prefilled_tokens", "TTFT mean": "ttft_mean_ms", "p99": "ttft_p99_ms"}
    lines = []
    for name, row in rows.items():
        if name != "kv":
            parts = [f"{label} {rows['kv'][key] / row[key] - 1:+.0%}" for label, key in keys.items()]
            lines.append(f"kv against {name}: " + ", ".join(parts))
    return lines


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), default=POLICIES[:3],
              show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 64), help="Engines behind the router.")
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(min=1), help="Runs of each policy.")
@click.option("--load", default=40.0, show_default=True, type=click.FloatRange(min=1.0),
              help="Percent of the measured prefill rate at which unseen prompt tokens arrive.")  # fmt: skip
@click.option("--cache", default=60.0, show_default=True, type=click.FloatRange(min=1.0),
              help="A worker's KV cache, percent of the workload's different blocks.")  # fmt: skip
@click.option("--sessions", default=24, show_default=True, type=click.IntRange(min=1))
@click.option("--turns", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--answer-tokens", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, help="Of the sessions and their arrival.")
@click.option("--model-family", default="qwen3", show_default=True, help="Architecture of the random model.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure here.")
def main(
    policies: tuple[str, ...], workers: int, rounds: int, load: float, cache: float, sessions: int, turns: int,
    answer_tokens: int, seed: int, model_family: str, json_file: Path | None,
) -> None:  # fmt: skip
    started_s = time.monotonic()
    log_dir = Path(tempfile.mkdtemp(prefix="blockcast-live-"))
    host = machine("blockcast", "torch", "uvloop", "msgspec", "pyzmq")
    click.echo(in_words(host))
    model = make_demo_model(model_family)
    tokenizer = Tokenizer.load(model)
    shape = {"sessions": sessions, "turns": turns, "answer_tokens": answer_tokens}
    try:
        workload = repo_sessions(tokenizer, repo_text(), **shape, seed=seed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    unseen, longest = workload.unseen_tokens(), max(len(t.prompt_ids) for s in workload.sessions for t in s.turns)
    blocks = max(int(workload.working_set_blocks() * cache / 100), 2 * (longest + answer_tokens) // BLOCK + 64)
    click.echo(workload.note)
    click.echo(
        f"{workload.requests} requests, {workload.prompt_tokens:,} prompt tokens, {unseen:,} of them new to an endless "
        f"shared cache; {blocks:,} blocks of {BLOCK} tokens a worker, {cache:g} % of the working set"
    )
    length = min(2048, workload.prompt_tokens // workload.requests)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    rate = measure_rate(model, workers, length, vocab_size, log_dir)
    scale = unseen / (load / 100 * rate) / workload.span_s
    planned_s = workload.span_s * scale
    loads = {"unseen": unseen / planned_s / rate, "prompt": workload.prompt_tokens / planned_s / rate}
    click.echo(
        f"{workers} workers prefill {rate:,.0f} tokens/s together; trace seconds x {scale:.3g}: {planned_s:.0f} s, "
        f"load {loads['unseen']:.0%} with one endless cache, {loads['prompt']:.0%} with none"
    )
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    runs = []
    for number in range(rounds):
        shift = number % len(policies)
        for policy in policies[shift:] + policies[:shift]:
            found, wall_s = run_once(policy, model, workload, scale, workers, blocks, log_dir)
            outcomes[policy] += found
            runs.append({"policy": policy, "round": number + 1, "wall_s": round(wall_s, 1), **summarise(found)})
            r = runs[-1]
            click.echo(
                f"round {number + 1} {policy:<15} {wall_s:5.1f} s  prefilled {r['prefilled_tokens']:>8,}"
                f"  TTFT mean {r['ttft_mean_ms']:>6,.0f} ms  p99 {r['ttft_p99_ms']:>6,.0f} ms"
            )
    rows = {policy: summarise(found) for policy, found in outcomes.items()}
    click.echo("\n" + markdown(rows, COLUMNS, "policy") + "\n")
    for line in comparison(rows):
        click.echo(line)
    click.echo(f"{time.monotonic() - started_s:.0f} s; logs in {log_dir}")
    figures = {
        "machine": host, "workload": workload.note, "workers": workers, "blocks": blocks, "prefill_rate": rate,
        "time_scale": scale, "load": loads, "unseen_tokens": unseen, "policies": rows, "runs": runs,
    }  # fmt: skip
    write_json(json_file, figures)


if __name__ == "__main__":
    main()
