#!/usr/bin/env python3
"""Where the time to one user's first token goes: the same prompts through ever more of the engine.

    benchmarks/first_token.py --json first.json
    benchmarks/first_token.py --model 0.6b-shape --rounds 20

`step`: scheduler, runner and sampler in this process. `generate`: `LLM` around them. `process`: a core in a process of
its own, asked through its socket. `http`: `engine serve`, streamed, the first part of the body. `version`: an answer of
the same server that needs nothing. All take turns; prompts are random and all different; shown are the median, the
least, and what each adds to the median of the one before. What adds little has been read from what adds more: the
machine should be quiet.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.figures import in_words, machine, write_json
from harness.load import Client, completion, post
from harness.programs import serve_engine

from engine import LLM
from engine.config import EngineConfig
from engine.process.client import EngineClient
from engine.tiny.model import PRESETS, cached_model
from engine.types import Request, SamplingParams

Ask = Callable[[list[int]], Awaitable[float]]
"""Takes a prompt; seconds to its first token."""
GET = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def in_process(model: LLM) -> tuple[Ask, Ask]:
    """(the step alone, all of `generate`)."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    async def step(prompt: list[int]) -> float:
        start_s = time.perf_counter()
        model._core.add(Request(request_id="r", token_ids=prompt, params=params), 0.0)
        while model._core.has_work:
            model._core.step(0.0)
        return time.perf_counter() - start_s

    async def generate(prompt: list[int]) -> float:
        start_s = time.perf_counter()
        model.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - start_s

    return step, generate


def apart(client: EngineClient) -> Ask:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    async def ask(prompt: list[int]) -> float:
        start_s = time.perf_counter()
        stream = client.submit([Request(request_id="r", token_ids=prompt, params=params)])
        await stream.__anext__()
        took_s = time.perf_counter() - start_s
        async for _ in stream:
            pass
        return took_s

    return ask


def over_http(client: Client, model: str) -> tuple[Ask, Ask]:
    async def version(prompt: list[int]) -> float:
        answer = (await client.ask(GET)).checked()
        return answer.end_s - answer.sent_s

    async def ask(prompt: list[int]) -> float:
        answer = (await client.ask(post("/v1/completions", completion(model, prompt, 2)))).checked()
        return answer.parts[0][0] - answer.sent_s

    return version, ask


async def measure(folder: Path, length: int, rounds: int) -> dict[str, list[float]]:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    room, rng = length + 16, random.Random()
    config = EngineConfig(model=str(folder), max_model_len=room)
    async with AsyncExitStack() as stack:
        model = stack.enter_context(LLM(str(folder), max_model_len=room))
        core = await EngineClient.start(config, lambda reason: None)
        stack.push_async_callback(core.close)
        await core.ready()
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "engine.log"
        server = stack.enter_context(serve_engine(log, str(folder), "--port", "0", "--max-model-len", str(room)))
        client = await stack.enter_async_context(Client(server.await_line()))
        step, generate = in_process(model)
        version, http = over_http(client, str(folder))
        asks = {"step": step, "generate": generate, "process": apart(core), "http": http, "version": version}
        found: dict[str, list[float]] = {name: [] for name in asks}
        for number in range(rounds + 3):  # the first ones warm up
            for name, ask in asks.items():
                took_s = await ask([rng.randrange(10, min(vocab, 2000)) for _ in range(length)])
                if number >= 3:
                    found[name].append(1e3 * took_s)
                await asyncio.sleep(0.02)  # what follows an answer is not the next one's
        return found


@click.command(help=__doc__)
@click.option("--model", default="0.4m", show_default=True, help=f"A folder, or a preset: {', '.join(PRESETS)}.")
@click.option("--prompt-len", default=100, show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(model: str, prompt_len: int, rounds: int, json_file: Path | None) -> None:
    import uvloop

    folder = cached_model(PRESETS[model]) if model in PRESETS else Path(model)
    where = machine("torch", "aiohttp", "uvloop", "msgspec")
    print(in_words(where))
    found = uvloop.run(measure(folder, prompt_len, rounds))
    report: dict[str, Any] = {"machine": where, "model": model, "prompt_len": prompt_len, "ms": found}
    before = 0.0
    for name, times in found.items():
        median = statistics.median(times)
        added = "" if name == "version" else f", {median - before:+6.2f}"
        print(f"{name:<9} {median:7.2f} ms, at least {min(times):6.2f}{added}")
        before = median
    write_json(json_file, report)


if __name__ == "__main__":
    main()
