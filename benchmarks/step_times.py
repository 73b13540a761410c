#!/usr/bin/env python3
"""Learn how long an engine's steps take, and write it as a SPEC for `engine serve --simulate`.

    benchmarks/step_times.py --json spec.json                         # our engine with the demo's model
    benchmarks/step_times.py --url http://gpu1:8000 --json spec.json  # any worker with vLLM's API that is idle

Prompts of random tokens, alone, give prefill; groups of prompts that decode together give the rest. The five figures
are the least squares of the relative error, none below zero. What HTTP adds to a first token is measured on a
simulated engine whose steps take no time, and taken off.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _path  # noqa: F401
import click
import numpy as np
from harness.figures import describe_machine, format_facts, write_json
from harness.load import Client, Response, StreamOutcome, completion_body, post_request
from harness.programs import make_demo_model, request_json, serve_engine

NAMES = ("step_s", "prefill_s_per_token", "half_quadratic_s", "decode_request_s", "decode_context_s")
PROMPTS = (16, 128, 512, 1024, 2048, 3072)
GROUPS = ((1, 64), (1, 2048), (4, 256), (8, 64), (8, 1024), (16, 256), (32, 64), (32, 256))
"""(sequences, prompt of each) that decode together."""
DECODE_TOKENS = 48
NO_TIME = {"prefill_s_per_token": 0.0, "kv_tokens": 400_000}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What took how long; `counts` are those of NAMES."""

    counts: tuple[float, ...]
    seconds: float


class Engine:
    """A worker that is idle but for us."""

    def __init__(self, url: str, step_tokens: int, rng: random.Random) -> None:
        self.url = url
        self.model = request_json(f"{url}/v1/models")[1]["data"][0]["id"]
        self._step_tokens = step_tokens
        self._rng = rng

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(10, 250) for _ in range(length)]

    def request(self, length: int, tokens: int) -> bytes:
        return post_request("/v1/completions", completion_body(self.model, self.prompt(length), tokens))

    async def prefills(self, rounds: int) -> list[TimedStep]:
        """First tokens of prompts that come alone."""
        timed_steps = []
        async with Client(self.url) as client:
            await client.send(self.request(600, 8))
            for length in PROMPTS:
                times_s = []
                for _ in range(rounds):
                    answer = (await client.send(self.request(length, 1))).raise_for_status()
                    times_s.append(StreamOutcome.from_response(answer, 1, "prefill").ttft_s)
                steps = -(-length // self._step_tokens)
                timed_steps.append(TimedStep((steps, length, length * length, 0, 0), statistics.median(times_s)))
        return timed_steps

    async def decodes(self) -> list[TimedStep]:
        """The time between the tokens of sequences that all decode."""
        timed_steps = []
        async with Client(self.url) as client:
            for count, length in GROUPS:
                answers = await asyncio.gather(
                    *(client.send(self.request(length, DECODE_TOKENS)) for _ in range(count))
                )
                times = [_token_times(answer.raise_for_status()) for answer in answers]
                all_run, first_ends = max(t[0] for t in times), min(t[-1] for t in times)
                gaps = [b - a for t in times for a, b in itertools.pairwise(t) if a >= all_run and b <= first_ends]
                if gaps:
                    context = length + DECODE_TOKENS / 2
                    timed_steps.append(TimedStep((1, 0, 0, count, count * context), statistics.median(gaps)))
        return timed_steps


def _token_times(answer: Response) -> list[float]:
    return [at_s for at_s, event in answer.json_events() if json.loads(event)["choices"]]


def fit(timed_steps: Sequence[TimedStep]) -> dict[str, float]:
    """Least squares of the relative error; what would be below zero is left out."""
    rows = np.array([entry.counts for entry in timed_steps]) / np.array([[entry.seconds] for entry in timed_steps])
    columns = [i for i in range(len(NAMES)) if rows[:, i].any()]
    while True:
        scale = np.abs(rows[:, columns]).max(axis=0)
        coefficients = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(timed_steps)), rcond=None)[0] / scale
        if (coefficients >= 0).all():
            return dict.fromkeys(NAMES, 0.0) | {NAMES[i]: float(value) for i, value in zip(columns, coefficients)}
        columns.pop(int(np.argmin(coefficients * scale)))


def learn(engine: Engine, idle: Engine, rounds: int) -> tuple[dict[str, float], float]:
    """(times, mean relative error of what they say of what they were learned from). `idle`: its steps take no time."""
    real, http = asyncio.run(engine.prefills(rounds)), asyncio.run(idle.prefills(rounds))
    timed_steps = [TimedStep(a.counts, max(a.seconds - b.seconds, 1e-6)) for a, b in zip(real, http)]
    timed_steps += asyncio.run(engine.decodes())
    times = fit(timed_steps)
    for entry in timed_steps:
        predicted_step_s = sum(times[name] * count for name, count in zip(NAMES, entry.counts))
        click.echo(f"  {entry.counts}: {entry.seconds * 1e3:.2f} ms, said {predicted_step_s * 1e3:.2f} ms")
    predicted_s = [sum(times[name] * count for name, count in zip(NAMES, entry.counts)) for entry in timed_steps]
    error = statistics.fmean(abs(s / entry.seconds - 1) for s, entry in zip(predicted_s, timed_steps))
    half = times.pop("half_quadratic_s")
    times["quadratic_tokens"] = times["prefill_s_per_token"] / (2 * half) if half else 1e9
    return times, error


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.option("--url", help="A worker. [default: `engine serve` with the demo's model is started]")
@click.option("--step-tokens", default=2048, show_default=True, help="The worker's --max-num-batched-tokens.")
@click.option("--kv-tokens", default=200_000, show_default=True, help="For the SPEC: tokens that its cache holds.")
@click.option("--rounds", default=5, show_default=True, help="Of each prefill.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the SPEC here.")
def main(
    url: str | None, step_tokens: int, kv_tokens: int, rounds: int, seed: int, json_file: Path | None
) -> None:  # fmt: skip
    host = describe_machine("blockcast", "torch", "numpy")
    click.echo(format_facts(host))
    logs = Path(tempfile.mkdtemp(prefix="blockcast-steps-"))
    flags = ("--port", "0", "--max-num-batched-tokens", str(step_tokens))
    programs = [serve_engine(logs / "idle.log", "--simulate", json.dumps(NO_TIME), *flags)]
    if url is None:
        programs.append(serve_engine(logs / "real.log", str(make_demo_model("qwen3")), "--dtype", "bfloat16", *flags))
    try:
        urls = [program.await_line() for program in programs]
        idle, engine = (Engine(u, step_tokens, random.Random(seed)) for u in (urls[0], url or urls[1]))
        times, error = learn(engine, idle, rounds)
        spec = {**times, "kv_tokens": kv_tokens, "source": f"{engine.model}, learned by benchmarks/step_times.py"}
        click.echo(json.dumps(spec, indent=2))
        click.echo(f"what it was learned from is met within {error:.1%} in the mean")
        write_json(json_file, spec)
    finally:
        for program in programs:
            program.stop()


if __name__ == "__main__":
    main()
