#!/usr/bin/env python3
"""The engine's speed: time to first token, time a token, tokens a second.

    benchmarks/engine.py                                                  # ours and HF generate, the 0.4M Llama
    benchmarks/engine.py --peer vllm=http://127.0.0.1:8001                # and a server with the same weights
    benchmarks/engine.py --model 0.6b-shape --outputs 8 --prompt-lens 100

A real `engine serve` is asked over HTTP with streaming, as are the peers; HF's `generate` runs in a process of its own.
Prompts are random tokens, all different, so no prefix cache helps; answers are greedy and of a fixed length. `users`
send a request each, and the next when the last was answered. The systems alternate, round by round; shown are medians
over the rounds. CPU is that of the server's processes, all threads; with more than one core it can exceed the wall.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from engine_systems import Figures, HfGenerate, HttpSystem, System
from harness.figures import in_words, machine, markdown, write_json
from harness.programs import serve_engine

from engine.tiny.model import PRESETS, cached_model

COLUMNS = {
    "TTFT ms": ("ttft_ms", "{:.2f}"), "ms/token": ("itl_ms", "{:.3f}"), "p99 gap ms": ("gap_p99_ms", "{:.2f}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"), "(min..max)": ("range", "{}"), "CPU us/token": ("cpu", "{}"),
}  # fmt: skip
Prompts = Callable[[int, int], list[list[int]]]
"""So many random prompts of so many tokens that never repeat."""


def compare(
    systems: list[System], prompts: Prompts, length: int, users: int, outputs: int, rounds: int, turns: int
) -> dict[str, list[Figures]]:
    """Figures of each system in each round, one setting. The systems alternate; who begins changes."""
    found: dict[str, list[Figures]] = {system.name: [] for system in systems}
    for number in range(rounds):
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            found[system.name].append(system.run(prompts(users * turns, length), users, outputs))
    return found


def row(figures: list[Figures]) -> dict[str, Any]:
    """Medians over the rounds."""
    columns = {name: [getattr(f, name) for f in figures] for name in asdict(figures[0])}
    found: dict[str, Any] = {n: statistics.median(v) for n, v in columns.items() if None not in v}
    rates, cpu = columns["tokens_per_s"], found.get("cpu_us_per_token")
    return found | {"range": f"{min(rates):.0f}..{max(rates):.0f}", "cpu": "-" if cpu is None else f"{cpu:.0f}"}


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
@click.option("--hf/--no-hf", default=True, show_default=True)
@click.option("--hf-dtype", default="auto", show_default=True, help="float32 is faster where bf16 is emulated.")
@click.option(
    "--seed", type=int, help="Of the prompts. [default: another one each run: a peer may remember the last's]"
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str, peers: list[tuple[str, str]], users: list[int], prompt_lens: list[int], outputs: int, rounds: int,
    turns: int, threads: int, overlap: bool, hf: bool, hf_dtype: str, seed: int | None, json_file: Path | None,
) -> None:  # fmt: skip
    folder = cached_model(PRESETS[model]) if model in PRESETS else Path(model)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    spoken = len(tokenizer["model"]["vocab"])
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    rng, vocab_size = random.Random(seed), min(config["vocab_size"], spoken)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]

    textless = spoken < config["vocab_size"] // 2  # a shape with random weights: most of its tokens have no text
    where = machine("torch", "transformers", "aiohttp", "uvloop", "msgspec", "pyzmq")
    print(in_words(where))
    dtype = config.get("dtype") or config.get("torch_dtype")
    print(f"model {model}: {config['model_type']}, {dtype}, {threads} thread(s), seed {seed}")
    report: dict[str, Any] = {"machine": where, "model": model, "outputs": outputs, "settings": []}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--port", "0", "--num-threads", str(threads), "--max-model-len", str(max(prompt_lens) + outputs))
        urls = list(peers)
        for name in ("overlapping", "blockcast") if overlap else ("blockcast",):
            how = ("--overlap", "on" if name == "overlapping" else "off")
            engine = serve_engine(logs / name, str(folder), *flags, *how, env={"OMP_NUM_THREADS": str(threads)})
            urls.insert(0, (name, stack.enter_context(engine).await_line()))
        systems: list[System] = [HttpSystem(name, url, with_ids=textless) for name, url in urls]
        if hf:
            generate = HfGenerate(folder, threads, hf_dtype)
            stack.callback(generate.close)
            systems.append(generate)
        for length in prompt_lens:
            for system in systems:  # warm up
                system.run(prompts(max(users), length), max(users), min(outputs, 8))
            for count in users:
                found = compare(systems, prompts, length, count, outputs, rounds, turns)
                print(f"\n{count} users, prompts of {length}, {outputs} outputs")
                print(markdown({name: row(figures) for name, figures in found.items()}, COLUMNS), flush=True)
                rows = {name: [asdict(f) for f in figures] for name, figures in found.items()}
                report["settings"].append({"users": count, "prompt_len": length, "systems": rows})
    write_json(json_file, report)


if __name__ == "__main__":
    main()
