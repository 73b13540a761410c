"""What benchmarks/live_routing.py plays and how: sessions of real text, their arrival in time, the client, the sums.

A workload is the same for every policy, to the byte: what a later turn holds of earlier answers is the text of the
source, not what the model said, as in any replay of a trace. A turn is sent when its time has come and its
predecessor's answer is complete, whichever is later; sessions start without waiting for anything.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

BLOCK = 16
REQUEST_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `gap_s`: trace seconds since the session's previous one was sent; 0 for its first."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other; `start_s` in trace seconds."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions by start, and in words where they come from and what was left out."""

    note: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.prompt_ids) for session in self.sessions for turn in session.turns)

    @property
    def span_s(self) -> float:
        """Trace seconds until the last request is due, were every answer immediate."""
        return max(session.start_s + sum(turn.gap_s for turn in session.turns) for session in self.sessions)

    def unseen_tokens(self) -> int:
        """Prompt tokens that are in no earlier prompt's whole blocks: what one endless shared cache would prefill."""
        due = []
        for session in self.sessions:
            at = session.start_s
            for turn in session.turns:
                at += turn.gap_s
                due.append((at, turn.prompt_ids))
        seen: set[int] = set()
        unseen = 0
        for _, ids in sorted(due, key=lambda pair: pair[0]):
            chain = 0
            cached = 0
            for start in range(0, len(ids) - BLOCK + 1, BLOCK):
                chain = hash((chain, ids[start : start + BLOCK]))
                if chain in seen:
                    cached = start + BLOCK
                seen.add(chain)
            unseen += len(ids) - min(cached, (len(ids) - 1) // BLOCK * BLOCK)
        return unseen

    def working_set_blocks(self) -> int:
        """Different blocks of prompts and answers together, the answers counted at their length."""
        chains: set[int] = set()
        answers = 0
        for session in self.sessions:
            for turn in session.turns:
                chain = 0
                for start in range(0, len(turn.prompt_ids) - BLOCK + 1, BLOCK):
                    chain = hash((chain, turn.prompt_ids[start : start + BLOCK]))
                    chains.add(chain)
                answers += -(-turn.answer_tokens // BLOCK)
        return len(chains) + answers


class _Text:
    """A long text, handed out piece by piece as tokens; starts again at its beginning when it is used up."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._decode: Callable[[Sequence[int]], str] = tokenizer.decode
        self._ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self._at = 0
        self.laps = 0

    def take(self, tokens: int) -> str:
        if self._at + tokens > len(self._ids):
            self._at = 0
            self.laps += 1
        piece = self._ids[self._at : self._at + tokens]
        self._at += tokens
        return self._decode(piece)


def repo_sessions(tokenizer: Any, text: str, *, sessions: int, turns: int, answer_tokens: int, seed: int) -> Workload:
    """Sessions of coding agents over `text`: one of four instructions that sessions share, a file of the session's own
    (600 to 4,000 tokens), and turns that each bring a tool's result (40 to 400 tokens) and the answer before.

    Sessions start at random, a trace second apart on average; turns follow after 4 trace seconds on average.
    ValueError where the text is too short for every session to have its own.
    """
    rng = random.Random(seed)
    source = _Text(tokenizer, text)
    shared = [f"You are agent {k + 1} and work by these rules.\n{source.take(700)}\n" for k in range(4)]
    made = []
    start_s = 0.0
    for number in range(sessions):
        start_s += rng.expovariate(1.0)
        instructions = rng.choices(shared, (8, 4, 2, 1))[0]
        prompt = (
            f"{instructions}The file of session {number + 1}:\n{source.take(int(rng.triangular(600, 4000, 1500)))}\n"
        )
        steps = []
        for turn in range(turns):
            prompt += f"user: step {turn + 1}\n{source.take(rng.randint(40, 400))}\nassistant:"
            gap_s = rng.expovariate(1 / 4.0) if turn else 0.0
            ids = tuple(tokenizer.encode(prompt))
            steps.append(Turn(prompt, ids, answer_tokens, gap_s))
            prompt += source.take(answer_tokens) + "\n"
        made.append(Session(f"repo-{seed}-{number}", start_s, tuple(steps)))
    if source.laps:
        raise ValueError(f"--sessions {sessions} --turns {turns}: the repo's text is used up; expected fewer")
    return Workload(f"the repo's own text as {sessions} agent sessions of {turns} turns, seed {seed}", tuple(made))


def agent_text(
    path: Path, tokenizer: Any, *, requests_max: int, max_tokens: int, answer_tokens: int, seed: int
) -> Workload:
    """Sessions of LMCache's agent trace (a folder or .tar.gz of JSON lines: `timestamp` us, `input`, `output`).

    Sessions are taken at random until `requests_max` requests; each ends before its first prompt above `max_tokens`
    tokens. Gaps within a session are the trace's; starts are drawn anew, since the trace's are hours apart. ValueError
    naming file, line and field for what cannot be read.
    """
    rng = random.Random(seed)
    files = sorted(_jsonl_files(path))
    if not files:
        raise ValueError(f"--trace {path}: no .jsonl file in it")
    rng.shuffle(files)
    made: list[Session] = []
    count = too_long = empty = 0
    start_s = 0.0
    for name, text in files:
        records = sorted(_records(name, text), key=lambda record: record[0])
        steps: list[Turn] = []
        before_us = 0
        for i, (stamp_us, prompt, output) in enumerate(records):
            if not prompt.strip():
                empty += 1
                continue
            ids = tuple(tokenizer.encode(prompt))
            if len(ids) > max_tokens:
                too_long += len(records) - i
                break
            answer = max(1, min(answer_tokens, len(tokenizer.encode(output, add_special_tokens=False))))
            gap_s = (stamp_us - before_us) / 1e6 if steps else 0.0
            steps.append(Turn(prompt, ids, answer, gap_s))
            before_us = stamp_us
            if count + len(steps) >= requests_max:
                break
        if steps:
            start_s += rng.expovariate(1 / 4.0)
            made.append(Session(name, start_s, tuple(steps)))
            count += len(steps)
        if count >= requests_max:
            break
    note = (
        f"{path.name}: {count} requests of {len(made)} sessions, seed {seed}; left out of these sessions: {too_long} "
        f"requests from the first prompt above {max_tokens:,} tokens on, {empty} without text; answers cut to "
        f"{answer_tokens} tokens"
    )
    if not made:
        raise ValueError(f"--trace {path}: no session has a prompt of at most --max-tokens {max_tokens}")
    return Workload(note, tuple(made))


def _jsonl_files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in path.rglob("*.jsonl"):
            yield file.relative_to(path).as_posix(), file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            if content is not None:
                yield member.name, content.read().decode("utf-8")


def _records(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        for key, kind in (("timestamp", int), ("input", str), ("output", str)):
            if not isinstance(record.get(key), kind):
                raise ValueError(f"{name} line {number}: {key} is {record.get(key)!r}, expected {kind.__name__}")
        yield record["timestamp"], record["input"], record["output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as the client saw it; tokens as the engine reported them."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    ttft_s: float
    e2e_s: float


async def replay(url: str, model: str, workload: Workload, time_scale: float) -> list[Outcome]:
    """Every request once, trace seconds times `time_scale`. RuntimeError for a request that was not answered."""
    outcomes: list[Outcome] = []
    begin_s = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)

    async def play(client: aiohttp.ClientSession, session: Session) -> None:
        due_s = begin_s + session.start_s * time_scale
        for turn in session.turns:
            due_s += turn.gap_s * time_scale
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            due_s = time.perf_counter()  # where the answer before was late, the rest of the session shifts
            outcomes.append(await complete(client, url, model, turn.prompt, turn.answer_tokens, session.name))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        await asyncio.gather(*(play(client, session) for session in workload.sessions))
    return outcomes


async def complete(
    client: aiohttp.ClientSession, url: str, model: str, prompt: str | list[int], tokens: int, session: str
) -> Outcome:
    """One streamed completion of exactly `tokens` greedy tokens. TTFT ends at the first chunk with a choice."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    first_s: float | None = None
    sent_s = time.perf_counter()
    async with client.post(url + "/v1/completions", json=body, headers={"x-session-id": session}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{session}: HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            if first_s is None:
                first_s = time.perf_counter()
            if b'"prompt_tokens"' in line:
                usage = json.loads(line[6:]).get("usage") or usage
        worker = answer.headers.get("x-blockcast-worker", url)
    end_s = time.perf_counter()
    if first_s is None or usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"{session}: asked for {tokens} tokens, the answer ended with usage {usage}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Outcome(worker, usage["prompt_tokens"], cached, tokens, first_s - sent_s, end_s - sent_s)


async def prefill_rate(urls: list[str], model: str, vocab_size: int, length: int, seconds: float, seed: int) -> float:
    """Tokens a second that all workers together prefill, each with one prompt of `length` random tokens at a time."""
    rng = random.Random(seed)
    done = 0

    async def keep_busy(client: aiohttp.ClientSession, url: str, end_s: float) -> None:
        nonlocal done
        while time.perf_counter() < end_s:
            prompt = [rng.randrange(10, vocab_size) for _ in range(length)]
            outcome = await complete(client, url, model, prompt, 1, "calibration")
            done += outcome.prompt_tokens - outcome.cached_tokens

    async with aiohttp.ClientSession() as client:
        await asyncio.gather(*(complete(client, url, model, [7] * length, 1, "warm-up") for url in urls))
        begin_s = time.perf_counter()
        await asyncio.gather(*(keep_busy(client, url, begin_s + seconds) for url in urls))
        return done / (time.perf_counter() - begin_s)


async def warm(urls: list[str], model: str) -> None:
    """A first prefill and decode on every worker, of tokens that the workload does not hold."""
    async with aiohttp.ClientSession() as client:
        await asyncio.gather(*(complete(client, url, model, [9] * 600, 4, "warm-up") for url in urls))


def summarise(outcomes: Sequence[Outcome]) -> dict[str, float | int]:
    """Sums and milliseconds. p99 is by nearest rank; `busiest_share` the largest part of the prefill on one worker."""
    ttft_ms = sorted(outcome.ttft_s * 1e3 for outcome in outcomes)
    prefilled: dict[str, int] = {}
    for o in outcomes:
        prefilled[o.worker] = prefilled.get(o.worker, 0) + o.prompt_tokens - o.cached_tokens
    total = sum(prefilled.values())
    return {
        "requests": len(outcomes),
        "prompt_tokens": sum(o.prompt_tokens for o in outcomes),
        "cached_tokens": sum(o.cached_tokens for o in outcomes),
        "prefilled_tokens": total,
        "busiest_share": round(max(prefilled.values()) / total, 3),
        "ttft_mean_ms": round(statistics.fmean(ttft_ms), 1),
        "ttft_p50_ms": round(_rank(ttft_ms, 0.50), 1),
        "ttft_p99_ms": round(_rank(ttft_ms, 0.99), 1),
        "e2e_mean_ms": round(statistics.fmean(o.e2e_s for o in outcomes) * 1e3, 1),
    }


def _rank(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
