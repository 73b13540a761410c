#!/usr/bin/env python3
"""The engine's speed: time to first token, time a token, tokens a second.

    benchmarks/engine.py                                                  # ours, the 0.4M Llama
    benchmarks/engine.py --peer vllm=http://127.0.0.1:8001                # and a server with the same weights
    benchmarks/engine.py --model 0.6b-shape --outputs 8 --prompt-lens 100

A real `engine serve` is asked over HTTP with streaming, as are the peers.
Prompts are random tokens, all different, so no prefix cache helps; answers are greedy and of a fixed length. `users`
send a request each, and the next when the last was answered. The systems alternate, round by round; shown are medians
over the rounds. CPU is that of the server's processes, all threads; with more than one core it can exceed the wall.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.figures import cpu_seconds, describe_machine, format_facts, markdown_table, percentile, write_json
from harness.load import closed_loop, completion_body, post_request
from harness.programs import serve_engine

from engine.tiny.model import PRESETS, cached_model

COLUMNS = {
    "TTFT ms": ("ttft_ms", "{:.2f}"), "ms/token": ("itl_ms", "{:.3f}"), "p99 gap ms": ("gap_p99_ms", "{:.2f}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"), "(min..max)": ("range", "{}"), "CPU us/token": ("cpu", "{}"),
}  # fmt: skip
Prompts = Callable[[int, int], list[list[int]]]
"""So many random prompts of so many tokens that never repeat."""


@dataclass(frozen=True)
class Figures:
    """One run of one setting. Milliseconds, tokens a second, CPU microseconds a token (None if not known)."""

    ttft_ms: float
    itl_ms: float
    gap_p99_ms: float
    tokens_per_s: float
    cpu_us_per_token: float | None

    @classmethod
    def from_answers(
        cls,
        answers: Sequence[tuple[float, list[float]]],
        tokens: int,
        tokens_per_answer: int,
        wall_s: float,
        cpu_s: float | None,
    ) -> Figures:
        """`answers`: when each was asked for and when its parts came; `tokens` in all, `each` in one."""
        ttft_s = statistics.median(times[0] - start_s for start_s, times in answers)
        itl_s = statistics.median((times[-1] - times[0]) / max(1, tokens_per_answer - 1) for _, times in answers)
        gaps_s = [b - a for _, times in answers for a, b in pairwise(times)]  # zero: two parts that came in one read
        cpu_us = None if cpu_s is None else 1e6 * cpu_s / tokens
        return cls(1e3 * ttft_s, 1e3 * itl_s, 1e3 * percentile(gaps_s or [0.0], 0.99), tokens / wall_s, cpu_us)


def listener_pid(port: int) -> int | None:
    """The process that listens on a local TCP port, if we may know."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # ended, or somebody else's
    return None


class HttpSystem:
    """A server that speaks OpenAI's completions."""

    def __init__(self, name: str, url: str, *, with_ids: bool = False) -> None:
        """`with_ids`: let chunks carry token ids, so that a token without text of its own makes a chunk too."""
        self.name = name
        self._with_ids = with_ids
        self.url = url.rstrip("/")
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            self.model: str = json.load(answer)["data"][0]["id"]
        port = re.search(r"//(?:127\.0\.0\.1|localhost):(\d+)", self.url)
        self.pid = listener_pid(int(port.group(1))) if port else None

    def run(self, prompts: list[list[int]], users: int, output_len: int) -> Figures:
        import uvloop

        extra_fields = {"return_token_ids": True} if self._with_ids else {}
        bodies = [completion_body(self.model, prompt, output_len, **extra_fields) for prompt in prompts]
        cpu_s = cpu_seconds(self.pid) if self.pid is not None else 0.0
        start_s = time.perf_counter()
        answers = uvloop.run(closed_loop(self.url, [post_request("/v1/completions", body) for body in bodies], users))
        wall_s = time.perf_counter() - start_s
        cpu_used_s = cpu_seconds(self.pid) - cpu_s if self.pid is not None else None
        timings = []
        for answer in answers:
            *chunks, (_, last) = answer.json_events()  # the last is the usage
            tokens = json.loads(last)["usage"]["completion_tokens"]
            if tokens != output_len:
                raise RuntimeError(f"{self.name}: {tokens} tokens instead of {output_len}")
            timings.append((answer.start_s, [at_s for at_s, _ in chunks]))
        return Figures.from_answers(timings, len(prompts) * output_len, output_len, wall_s, cpu_used_s)


def compare(
    systems: list[HttpSystem], prompts: Prompts, length: int, users: int, outputs: int, rounds: int, turns: int
) -> dict[str, list[Figures]]:
    """Figures of each system in each round, one setting. The systems alternate; who begins changes."""
    figures: dict[str, list[Figures]] = {system.name: [] for system in systems}
    for number in range(rounds):
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            figures[system.name].append(system.run(prompts(users * turns, length), users, outputs))
    return figures


def row(figures: list[Figures]) -> dict[str, Any]:
    """Medians over the rounds."""
    columns = {name: [getattr(f, name) for f in figures] for name in asdict(figures[0])}
    medians: dict[str, Any] = {n: statistics.median(v) for n, v in columns.items() if None not in v}
    rates, cpu = columns["tokens_per_s"], medians.get("cpu_us_per_token")
    return medians | {"range": f"{min(rates):.0f}..{max(rates):.0f}", "cpu": "-" if cpu is None else f"{cpu:.0f}"}


def _numbers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: expected whole numbers with commas between them") from error


def _peers(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [tuple(value.split("=", 1)) for value in values]
    if any(len(pair) != 2 or not pair[1].startswith("http://") for pair in pairs):
        raise click.BadParameter("expected NAME=http://HOST:PORT")
    return [(pair[0], pair[1]) for pair in pairs]


@click.command(help=__doc__)
@click.option("--model", default="0.4m", show_default=True, help=f"A folder, or a preset: {', '.join(PRESETS)}.")
@click.option("--peer", "peers", multiple=True, callback=_peers, metavar="NAME=URL", help="May be repeated.")
@click.option("--users", default="1,4,16", callback=_numbers, show_default=True)
@click.option("--prompt-lens", default="100,2000", callback=_numbers, show_default=True)
@click.option("--outputs", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--turns", default=3, show_default=True, help="Requests of each user in a round.")
@click.option("--threads", default=1, show_default=True, help="Of each system that we start.")
@click.option("--overlap", is_flag=True, help="Ours with steps that overlap too, as a system of its own.")
@click.option(
    "--seed", type=int, help="Of the prompts. [default: another one each run: a peer may remember the last's]"
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str, peers: list[tuple[str, str]], users: list[int], prompt_lens: list[int], outputs: int, rounds: int,
    turns: int, threads: int, overlap: bool, seed: int | None, json_file: Path | None,
) -> None:  # fmt: skip
    folder = cached_model(PRESETS[model]) if model in PRESETS else Path(model)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    text_token_count = len(tokenizer["model"]["vocab"])
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    rng, vocab_size = random.Random(seed), min(config["vocab_size"], text_token_count)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]

    # In a shape with random weights most tokens have no text.
    textless = text_token_count < config["vocab_size"] // 2
    machine_facts = describe_machine("torch", "transformers", "aiohttp", "uvloop", "msgspec", "pyzmq")
    print(format_facts(machine_facts))
    dtype = config.get("dtype") or config.get("torch_dtype")
    print(f"model {model}: {config['model_type']}, {dtype}, {threads} thread(s), seed {seed}")
    report: dict[str, Any] = {"machine": machine_facts, "model": model, "outputs": outputs, "settings": []}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--port", "0", "--num-threads", str(threads), "--max-model-len", str(max(prompt_lens) + outputs))
        urls = list(peers)
        for name in ("overlapping", "blockcast") if overlap else ("blockcast",):
            overlap_flags = ("--overlap", "on" if name == "overlapping" else "off")
            engine = serve_engine(
                logs / name, str(folder), *flags, *overlap_flags, env={"OMP_NUM_THREADS": str(threads)}
            )
            urls.insert(0, (name, stack.enter_context(engine).await_line()))
        systems: list[HttpSystem] = [HttpSystem(name, url, with_ids=textless) for name, url in urls]
        for length in prompt_lens:
            for system in systems:  # warm up
                system.run(prompts(max(users), length), max(users), min(outputs, 8))
            for count in users:
                figures_by_system = compare(systems, prompts, length, count, outputs, rounds, turns)
                print(f"\n{count} users, prompts of {length}, {outputs} outputs")
                print(
                    markdown_table({name: row(figures) for name, figures in figures_by_system.items()}, COLUMNS),
                    flush=True,
                )
                rows = {name: [asdict(f) for f in figures] for name, figures in figures_by_system.items()}
                report["settings"].append({"users": count, "prompt_len": length, "systems": rows})
    write_json(json_file, report)


if __name__ == "__main__":
    main()
