"""The live part of benchmarks/shadow.py: a simulated fleet under round robin, copies for `router shadow`; then the same
clients before `router run`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _path  # noqa: F401
from harness.load import Client, Outcome, post
from harness.programs import Program, await_true, call, ours
from harness.talks import CHAT, repo_text

SPEC = {
    "prefill_s_per_token": 3e-4, "quadratic_tokens": 50_000.0, "step_s": 0.02, "decode_request_s": 5e-4,
    "decode_context_s": 2.5e-8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """Users who come when they come, each with one conversation (or `talks`, one after the other), and think between
    turns."""

    workers: int = 3
    kv_tokens: int = 16_000
    users: int = 40
    span_s: float = 36.0
    """In which they come."""
    talks: int = 1
    turns: int = 5
    turn_characters: int = 1200
    answer_tokens: int = 16
    think_s: float = 0.3
    systems: int = 3
    """System prompts of 2,000 characters that users share."""
    seed: int = 0


def measure(traffic: Traffic) -> dict[str, dict[str, Any]]:
    """what -> predicted, measured, error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        with (
            fleet(traffic, folder / "today") as urls,
            router(folder / "balancer.log", "run", "--policy", "round_robin", *urls) as balancer,
        ):
            to = balancer.await_line()
            shadow = router(folder / "shadow.log", "shadow", "--report", str(report), "--warm-share", "0", *urls)
            with shadow:
                at = shadow.await_line()
                await_up(at, traffic.workers)
                await_up(to, traffic.workers)
                today = asyncio.run(play(to, traffic, copies=at))
                asyncio.run(asyncio.sleep(5.0))  # what all had cached before is placed after some seconds
            if not report.exists():
                raise RuntimeError(f"no report:\n{shadow.text()[-3000:]}")
        with fleet(traffic, folder / "after") as urls, router(folder / "run.log", "run", *urls) as after:
            url = after.await_line()
            await_up(url, traffic.workers)
            then = asyncio.run(play(url, traffic))
        return beside(json.loads(report.read_text()), today, then)


def beside(told: dict[str, Any], today: list[Outcome], then: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Rows of the table."""
    found = told["comparison"]
    if found is None or found["requests"] != len(today):
        raise RuntimeError(f"nothing was compared: {told['problem']}, {told['requests']}")
    figures = {
        "tokens computed": ("computed_tokens", lambda o: o.prompt_tokens - o.cached_tokens),
        "seconds to first token": ("ttft_s", lambda o: o.ttft_s),
        "seconds to the end": ("seconds", lambda o: o.e2e_s),
    }
    rows: dict[str, dict[str, Any]] = {}
    for title, (name, of) in figures.items():
        was, now = (sum(map(of, outcomes)) for outcomes in (today, then))  # type: ignore[arg-type]
        predicted = found["saved"][name]
        if predicted is None:
            continue
        rows[title] = {"predicted": predicted, "measured": was - now, "error": predicted / (was - now) - 1.0}
        rows[title] |= {"share": (was - now) / was, "played": found["today"][name], "today": was}
    return rows


def router(log: Path, *args: str) -> Program:
    return Program(ours("router", args[0], "--port", "0", *args[1:]), log)


@contextlib.contextmanager
def fleet(traffic: Traffic, folder: Path) -> Iterator[list[str]]:
    """Empty engines; their URLs."""
    folder.mkdir()
    spec = json.dumps({**SPEC, "kv_tokens": traffic.kv_tokens})
    with contextlib.ExitStack() as stack:
        command = ours("engine", "serve", "--port", "0", "--simulate", spec)
        engines = [stack.enter_context(Program(command, folder / f"{i}.log")) for i in range(traffic.workers)]
        yield [engine.await_line() for engine in engines]


def await_up(url: str, workers: int) -> None:
    """RuntimeError where they do not come."""

    def up() -> bool:
        rows = call(f"{url}/workers")[1]["workers"]
        ready = [r for r in rows if r["state"] == "up" and "loaded" in (r.get("tokenizer") or {}).values()]
        return len(ready) == workers

    if not await_true(up, 60.0):
        raise RuntimeError(f"{url}: not all of {workers} workers came up: {call(f'{url}/workers')[1]}")


async def play(url: str, traffic: Traffic, *, copies: str | None = None) -> list[Outcome]:
    """All conversations; `copies` also go there, as a mirror sends them."""
    text, outcomes = repo_text(), []
    rng = random.Random(traffic.seed)
    systems = [cut(text, rng, 2000) for _ in range(traffic.systems)]

    async def user(number: int, client: Client, mirror: Client | None) -> None:
        own = random.Random(1000 * traffic.seed + number)
        copied: set[asyncio.Task[Any]] = set()
        await asyncio.sleep(own.random() * traffic.span_s)
        for talk in range(traffic.talks):
            messages = [{"role": "system", "content": systems[(number + talk) % len(systems)]}]
            for turn in range(traffic.turns):
                messages.append(
                    {"role": "user", "content": f"{number}.{talk}.{turn}: " + cut(text, own, traffic.turn_characters)}
                )
                body = {"messages": messages, "max_tokens": traffic.answer_tokens, "stream": True}
                body |= {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
                request = post(CHAT, body)
                if mirror is not None:
                    copied.add(asyncio.ensure_future(mirror.ask(request)))
                outcome = Outcome.of(await client.ask(request), traffic.answer_tokens, f"user {number}")
                outcomes.append(outcome)
                messages.append({"role": "assistant", "content": outcome.text})
                await asyncio.sleep(own.expovariate(1.0 / traffic.think_s))
        await asyncio.gather(*copied)

    async with Client(url) as client, Client(copies or url) as mirror:
        await asyncio.gather(*(user(n, client, mirror if copies else None) for n in range(traffic.users)))
    return outcomes


def cut(text: str, rng: random.Random, characters: int) -> str:
    at = rng.randrange(len(text) - characters)
    return text[at : at + characters]
