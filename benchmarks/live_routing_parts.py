"""What benchmarks/live_routing.py plays and how: sessions of real text, their arrival in time.

A workload is the same for every policy, to the byte: what a later turn holds of earlier answers is the text of the
source, not what the model said, as in any replay of a trace. A turn is sent when its time has come and its
predecessor's answer is complete, whichever is later; sessions start without waiting for anything.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import _path  # noqa: F401
from harness.load import Client, Outcome, completion, post

BLOCK = 16


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
            chains = _chains(ids)
            cached = BLOCK * next((i for i, chain in enumerate(chains) if chain not in seen), len(chains))
            seen.update(chains)
            unseen += len(ids) - min(cached, (len(ids) - 1) // BLOCK * BLOCK)
        return unseen

    def working_set_blocks(self) -> int:
        """Different blocks of prompts and answers together, the answers counted at their length."""
        turns = [turn for session in self.sessions for turn in session.turns]
        answers = sum(-(-turn.answer_tokens // BLOCK) for turn in turns)
        return len({chain for turn in turns for chain in _chains(turn.prompt_ids)}) + answers


def _chains(ids: tuple[int, ...]) -> list[int]:
    """A name of each whole block and all before it."""
    blocks = (ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK))
    return list(itertools.accumulate(blocks, lambda chain, block: hash((chain, block)), initial=0))[1:]


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


async def replay(url: str, model: str, workload: Workload, time_scale: float) -> list[Outcome]:
    """Every request once, trace seconds times `time_scale`. RuntimeError for a request that was not answered."""
    outcomes: list[Outcome] = []
    begin_s = time.perf_counter()

    async def play(client: Client, session: Session) -> None:
        due_s = begin_s + session.start_s * time_scale
        for turn in session.turns:
            due_s += turn.gap_s * time_scale
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            due_s = time.perf_counter()  # where the answer before was late, the rest of the session shifts
            outcomes.append(await complete(client, model, turn.prompt, turn.answer_tokens, session.name))

    async with Client(url) as client:
        await asyncio.gather(*(play(client, session) for session in workload.sessions))
    return outcomes


async def complete(client: Client, model: str, prompt: str | list[int], tokens: int, session: str) -> Outcome:
    """One streamed completion of exactly `tokens` greedy tokens."""
    body = completion(model, prompt, tokens)
    answer = await client.ask(post("/v1/completions", body, {"x-session-id": session}))
    return Outcome.of(answer, tokens, session)


async def prefill_rate(urls: list[str], model: str, vocab_size: int, length: int, seconds: float, seed: int) -> float:
    """Tokens a second that all workers together prefill, each with one prompt of `length` random tokens at a time."""
    rng = random.Random(seed)
    done = 0

    async def keep_busy(url: str, end_s: float) -> None:
        nonlocal done
        async with Client(url) as client:
            while time.perf_counter() < end_s:
                prompt = [rng.randrange(10, vocab_size) for _ in range(length)]
                outcome = await complete(client, model, prompt, 1, "calibration")
                done += outcome.prompt_tokens - outcome.cached_tokens

    await warm(urls, model, length, 1)
    begin_s = time.perf_counter()
    await asyncio.gather(*(keep_busy(url, begin_s + seconds) for url in urls))
    return done / (time.perf_counter() - begin_s)


async def warm(urls: list[str], model: str, length: int = 600, tokens: int = 4) -> None:
    """A first prefill and decode on every worker, of tokens that the workload does not hold."""

    async def one(url: str) -> None:
        async with Client(url) as client:
            await complete(client, model, [9] * length, tokens, "warm-up")

    await asyncio.gather(*map(one, urls))
