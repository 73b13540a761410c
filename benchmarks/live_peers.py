#!/usr/bin/env python3
"""Routers against each other, live: simulated workers with real caches and events behind each, and the same requests.

    benchmarks/live_peers.py --workers 8 --rounds 2 --json peers.json
    benchmarks/live_peers.py --workers 8 --workers 16 --rounds 5 --minutes 25 --json peers.json

Workers are `engine serve --simulate`: everything but the computing is real. Each holds `--cache` percent of the
workload's different blocks. Sixteen are half as fast as eight, so that both have the same to do. The systems take
turns, who begins changes from round to round, caches are emptied before each run. In every second round two workers
are killed at 40 % of the time, and started again at 60 %.

Systems: ours (`router run`), smg (`cache_aware`), and vllm-router with `kv_aware` and with `cache_aware`. Others have
their own defaults, but for a look at their workers' health every second. Requests that fail are counted and in no
time. How late the workers' steps were is printed: where they are late the figures are the machine's. `--minutes` is
shared out among the workloads: a round that would not end in its part is not begun, and how many were made is said.
`--installed` plays ours as users have it; it is built first where it is not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import _path  # noqa: F401
import click
from harness.baseline_routers import baseline_command, installed_router_program
from harness.figures import cpu_seconds, describe_machine, format_facts, markdown_table, percentile, write_json
from harness.load import completion_body
from harness.programs import Program, free_ports, module_command, read_metric, request_json, serve_engine
from live_peers_parts import MODEL, WORKLOADS, Play, RequestKey, Talk, Workload, play

SPEC = {"prefill_s_per_token": 3e-4, "quadratic_tokens": 50_000, "step_s": 0.02, "decode_request_s": 1e-3,
        "decode_context_s": 2.5e-8, "max_model_len": 16_384}  # fmt: skip
SYSTEMS = ("blockcast", "smg", "vllm-router kv_aware", "vllm-router cache_aware")
KILLED_WORKERS = 2
END_S = 5.0
"""Kept for the end of a workload: its workers stop."""
COLUMNS = {
    "answered": ("requests", "{:,}"), "failed": ("failed", "{:,}"), "judged": ("judged", "{:,}"),
    "cached": ("cached_share", "{:.1%}"),
    "TTFT mean": ("ttft_mean_ms", "{:,.0f} ms"), "TTFT p99": ("ttft_p99_ms", "{:,.0f} ms"),
    "per token mean": ("tpot_mean_ms", "{:,.1f} ms"), "per token p99": ("tpot_p99_ms", "{:,.1f} ms"),
    "E2E mean": ("e2e_mean_ms", "{:,.0f} ms"), "E2E p99": ("e2e_p99_ms", "{:,.0f} ms"),
    "TTFT of rounds": ("ttft_rounds_ms", "{}"), "E2E of rounds": ("e2e_rounds_ms", "{}"),
}  # fmt: skip


class Workers:
    """So many simulated engines on fixed ports, so that one comes back under its own address."""

    def __init__(self, count: int, logs: Path, spec: dict[str, object]) -> None:
        self._stack = ExitStack()
        first_port = free_ports(3 * count)  # a worker that comes back finds its own free again
        self.ports = [(port, port + 1, port + 2) for port in range(first_port, first_port + 3 * count, 3)]
        self.urls = [f"http://127.0.0.1:{http}" for http, _, _ in self.ports]
        self.programs: list[Program] = []
        for http, publish, replay in self.ports:
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{publish}",
                      "replay_endpoint": f"tcp://*:{replay}"}  # fmt: skip
            flags = ["--simulate", json.dumps(spec), "--port", str(http), "--served-model-name", MODEL,
                     "--kv-events-config", json.dumps(events), "--max-queue", "0"]  # fmt: skip
            self.programs.append(self._stack.enter_context(serve_engine(logs / f"worker-{http}.log", *flags)))
        for program in self.programs:
            program.await_line()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reset_caches(self) -> None:
        """Empty all caches."""
        for url in self.urls:
            assert request_json(f"{url}/reset_prefix_cache", {})[0] == 200, url

    def step_lag(self) -> tuple[float, float]:
        """(mean lateness of a step, step time in the mean), ms."""
        steps, late_s, step_s = (sum(read_metric(url, f"engine:simulated_{name}_total") for url in self.urls)
                                 for name in ("steps", "lag_seconds", "step_seconds"))  # fmt: skip
        return late_s / max(steps, 1) * 1e3, step_s / max(steps, 1) * 1e3

    async def kill_and_restart(self, seconds: float) -> None:
        """Kill two at 40 % of so many seconds, start them again at 60 %."""
        await asyncio.sleep(0.4 * seconds)
        for program in self.programs[:KILLED_WORKERS]:
            program.kill()
        await asyncio.sleep(0.2 * seconds)
        for program in self.programs[:KILLED_WORKERS]:
            program.start()


def start_router(system: str, workers: Workers, log: Path, installed_program: Path | None) -> tuple[Program, str]:
    """(process, URL) of a router that has taken all workers in."""
    if system == "blockcast":
        program_command = module_command("router") if installed_program is None else [str(installed_program)]
        # The installed program does not import the checkout.
        program_options = {} if installed_program is None else {"env": {"PYTHONPATH": ""}, "cwd": log.parent}
        program = Program(
            [*program_command, "run", *workers.urls, "--port", "0", "--log-level", "error"], log, **program_options
        )  # type: ignore[arg-type]
        url = program.await_line()

        def is_ready() -> bool:
            rows = request_json(f"{url}/workers")[1].get("workers", ())
            stream_states = [s["up"] for row in rows if row["state"] == "up" for s in row["events"]["streams"]]
            return stream_states == [True] * len(workers.urls)

        _await_ready(program, is_ready, lambda: request_json(f"{url}/workers"))
        return program, url
    name, _, policy = system.partition(" ")
    command, port = baseline_command(name, workers.urls)
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1", "--log-level", "error"]
    if policy:
        command[command.index("--policy") + 1] = policy
    if policy == "kv_aware":
        command += ["--kv-event-model", MODEL, "--kv-event-block-size", "16"]
        for url, (_, publish, replay) in zip(workers.urls, workers.ports):
            command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{publish}"]
            command += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{replay}"]
    program = Program(command, log)
    url = f"http://127.0.0.1:{port}"
    program.await_url(f"{url}/health")
    body = completion_body(MODEL, "ready?", 1)
    _await_ready(program, lambda: request_json(f"{url}/v1/completions", body)[0] == 200, program.read_log)
    time.sleep(2.0)  # the last of its workers are taken in a moment after the first
    return program, url


def _await_ready(
    program: Program, probe: Callable[[], bool], describe_state: Callable[[], object], seconds: float = 60.0
) -> None:
    end_s = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > end_s:
            program.stop()
            raise RuntimeError(f"not ready: {describe_state()}")
        time.sleep(0.1)


def run_once(
    system: str, workers: Workers, talks: Sequence[Talk], kills: bool, log: Path, installed_program: Path | None
) -> Play:
    """A fresh router before empty caches, the whole workload once."""
    for number in range(KILLED_WORKERS):
        workers.programs[number].await_url(f"{workers.urls[number]}/health")
    workers.reset_caches()
    program, url = start_router(system, workers, log, installed_program)

    async def play_with_kills() -> Play:
        kill_task = (
            asyncio.ensure_future(workers.kill_and_restart(max(talk.start_s for talk in talks))) if kills else None
        )
        result = await play(url, talks)
        if kill_task is not None:
            await kill_task
        return result

    try:
        before_s = cpu_seconds(program.pid)
        result = asyncio.run(play_with_kills())
        result.router_cpu_s = cpu_seconds(program.pid) - before_s
        return result
    finally:
        program.stop()


def figures(plays: Sequence[Play], common_requests: Sequence[Set[RequestKey]] | None = None) -> dict[str, object]:
    """`judged`: for each run, the requests that count for times; all that were answered without it."""
    common_requests = common_requests or [result.outcomes.keys() for result in plays]
    rounds = [
        [result.outcomes[request] for request in sorted(requests)] for result, requests in zip(plays, common_requests)
    ]
    outcomes = [outcome for round_outcomes in rounds for outcome in round_outcomes]
    answered_count = sum(len(result.outcomes) for result in plays)
    times = {
        "ttft": [o.ttft_s for o in outcomes],
        "tpot": [(o.e2e_s - o.ttft_s) / (o.completion_tokens - 1) for o in outcomes],
        "e2e": [o.e2e_s for o in outcomes],
    }
    row: dict[str, object] = {
        "requests": answered_count, "failed": sum(result.failed_count for result in plays),
        "judged": len(outcomes),
        "cached_share": sum(o.cached_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes),
        "router_cpu_ms": sum(result.router_cpu_s for result in plays) / answered_count * 1e3,
        "ttft_rounds_ms": " ".join(
            f"{statistics.fmean(o.ttft_s for o in round_outcomes) * 1e3:.0f}" for round_outcomes in rounds
        ),
        "e2e_rounds_ms": " ".join(
            f"{statistics.fmean(o.e2e_s for o in round_outcomes) * 1e3:.0f}" for round_outcomes in rounds
        ),
    }  # fmt: skip
    for name, values in times.items():
        row[f"{name}_mean_ms"], row[f"{name}_p99_ms"] = statistics.fmean(values) * 1e3, percentile(values, 0.99) * 1e3
    return row


def compare_common_requests(plays: dict[str, list[Play]]) -> dict[str, dict[str, object]]:
    """A worker that dies takes its slowest requests with it: what one system failed counts in nobody's times."""
    if len({len(system_plays) for system_plays in plays.values()}) > 1:  # a system did not run in some round
        return {system: figures(system_plays) for system, system_plays in plays.items()}
    common_requests = [
        set.intersection(*(set(p.outcomes) for p in round_plays)) for round_plays in zip(*plays.values())
    ]
    return {system: figures(system_plays, common_requests) for system, system_plays in plays.items()}


@dataclass(frozen=True)
class Plan:
    """What is played before so many workers."""

    count: int
    systems: tuple[str, ...]
    rounds: int
    cache_percent: float
    seconds: float
    logs: Path
    installed_program: Path | None

    def play(self, name: str, until_s: float) -> dict[str, object]:
        """All rounds of one workload that can be expected to end in time; at least one."""
        slowdown = self.count / 8
        spec = {key: value * slowdown if key.endswith(("_s", "_token")) else value for key, value in SPEC.items()}
        workload: Workload = WORKLOADS[name](self.seconds)
        talks = [Talk.of(session) for session in workload.sessions]
        longest_prompt = max(len(turn.prompt_ids) + turn.answer_tokens for s in workload.sessions for turn in s.turns)
        blocks = max(int(workload.working_set_blocks() * self.cache_percent / 100), 4 * longest_prompt // 16)
        click.echo(
            f"\n{name}: {workload.note}; {workload.requests} requests, {workload.prompt_tokens:,} prompt tokens, "
            f"{workload.unseen_tokens():,} new to an endless cache; {blocks:,} blocks a worker, {self.count} workers"
        )
        plays: dict[str, list[Play]] = {system: [] for system in self.systems}
        with Workers(self.count, self.logs, {**spec, "kv_tokens": 16 * blocks}) as workers:
            longest_s = 0.0
            for number in range(self.rounds):
                start_s = time.monotonic()
                if start_s + longest_s > until_s:
                    click.echo(f"  no time for more than {number} rounds")
                    break
                shift = number % len(self.systems)
                for system in self.systems[shift:] + self.systems[:shift]:
                    log = self.logs / f"{self.count}-{name}-{number}-{system.replace(' ', '-')}.log"
                    try:
                        result = run_once(system, workers, talks, number % 2 == 1, log, self.installed_program)
                    except RuntimeError as error:  # the others go on
                        click.echo(f"  round {number + 1} {system:<24} did not run: {str(error)[-300:]}")
                        continue
                    plays[system].append(result)
                    row, shown_columns = figures([result]), list(COLUMNS.items())[:-2]
                    summary_text = "  ".join(f"{title} {form.format(row[key])}" for title, (key, form) in shown_columns)
                    click.echo(f"  round {number + 1} {system:<24} {summary_text}")
                longest_s = max(longest_s, time.monotonic() - start_s)
            late_ms, step_ms = workers.step_lag()
        rows = compare_common_requests({system: system_plays for system, system_plays in plays.items() if system_plays})
        click.echo(f"steps of the workers late by {late_ms:.2f} ms of {step_ms:.1f} ms in the mean\n")
        click.echo(markdown_table(rows, COLUMNS, f"{name}, {self.count} workers"))
        outcomes = {
            s: [[{"asked": k} | asdict(o) | {"text": ""} for k, o in p.outcomes.items()] for p in system_plays]
            for s, system_plays in plays.items()
        }
        return {"workers": self.count, "rows": rows, "late_ms": late_ms, "step_ms": step_ms, "plays": outcomes}


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.option("--workers", "counts", multiple=True, default=[8], show_default=True,
              type=click.IntRange(KILLED_WORKERS + 1, 64), help="May be repeated.")  # fmt: skip
@click.option(
    "--system", "systems", multiple=True, type=click.Choice(SYSTEMS), default=SYSTEMS, help="May be repeated."
)
@click.option("--workload", "names", multiple=True, type=click.Choice(sorted(WORKLOADS)), default=sorted(WORKLOADS),
              show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(min=1), help="Every second one with kills.")
@click.option("--cache", default=30.0, show_default=True, help="A worker's cache, percent of the workload's blocks.")
@click.option("--seconds", default=7.0, show_default=True, help="In which the sessions of a run begin.")
@click.option("--minutes", type=click.FloatRange(min=1), help="In which all of it has to end.")
@click.option("--installed/--checkout", default=False, help="Ours as `pip install` builds it, or this checkout's.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure here.")
def main(
    counts: tuple[int, ...], systems: tuple[str, ...], names: tuple[str, ...], rounds: int, cache: float,
    seconds: float, minutes: float | None, installed: bool, json_file: Path | None,
) -> None:  # fmt: skip
    host = describe_machine("blockcast")
    click.echo(format_facts(host))
    logs = Path(tempfile.mkdtemp(prefix="blockcast-peers-"))
    ours_at = installed_router_program() if installed else None
    until_s = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    document: dict[str, object] = {"machine": host, "installed": installed, "workloads": {}}
    todo = [(count, name) for count in counts for name in names]
    for index, (count, name) in enumerate(todo):
        plan = Plan(count, systems, rounds, cache, seconds, logs, ours_at)
        share_s = (until_s - time.monotonic()) / (len(todo) - index)
        result = plan.play(name, time.monotonic() + share_s - END_S * (minutes is not None))
        document["workloads"][f"{name}, {count} workers"] = result  # type: ignore[index]
        write_json(json_file, document)
    click.echo(f"logs in {logs}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
