"""What benchmarks/live_peers.py plays: conversations, agents, one shared prompt; and how it plays them.

Prompts are text of random words, so there is as much of it as is wanted. Everything is drawn from one seed: all
systems get the same requests at the same moments. A turn follows its session's last answer after a pause.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import _path  # noqa: F401
from harness.load import Client, StreamOutcome, completion_body, post_request

from engine.simulation.executor import sample_words
from engine.tiny.tokenizer import cached_tokenizer
from prompts import Tokenizer

MODEL = "simulated"
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `gap_s`: seconds since the session's last answer; 0 for its first."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions by start; `note` says in words what they are."""

    note: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.prompt_ids) for session in self.sessions for turn in session.turns)

    def unseen_tokens(self) -> int:
        """Prompt tokens that are in no earlier prompt's whole blocks: what one endless shared cache would prefill."""
        timed_prompts = []
        for session in self.sessions:
            turn_s = session.start_s
            for turn in session.turns:
                turn_s += turn.gap_s
                timed_prompts.append((turn_s, turn.prompt_ids))
        seen_chains: set[int] = set()
        unseen_tokens = 0
        for _, ids in sorted(timed_prompts, key=lambda pair: pair[0]):
            chains = _block_names(ids)
            cached_tokens = BLOCK * next((i for i, chain in enumerate(chains) if chain not in seen_chains), len(chains))
            seen_chains.update(chains)
            unseen_tokens += len(ids) - min(cached_tokens, (len(ids) - 1) // BLOCK * BLOCK)
        return unseen_tokens

    def working_set_blocks(self) -> int:
        """Different blocks of prompts and answers together, the answers counted at their length."""
        turns = [turn for session in self.sessions for turn in session.turns]
        answers = sum(-(-turn.answer_tokens // BLOCK) for turn in turns)
        return len({chain for turn in turns for chain in _block_names(turn.prompt_ids)}) + answers


def _block_names(ids: tuple[int, ...]) -> list[int]:
    """A name of each whole block and all before it."""
    blocks = (ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK))
    return list(itertools.accumulate(blocks, lambda chain, block: hash((chain, block)), initial=0))[1:]


class Words:
    """Text of so many tokens: every word is one."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = Tokenizer.load(cached_tokenizer())
        self._words = [self.tokenizer.decode([i]) for i in sample_words(self.tokenizer)]
        self._rng = random.Random(seed)

    def make_text(self, tokens: int) -> str:
        return "".join(self._rng.choices(self._words, k=tokens))


def _workload(
    note: str,
    count: int,
    seconds: float,
    session: Callable[[random.Random, Words], list[tuple[str, str, int]]],
    pause_s: float,
) -> Workload:
    """`session` gives (what a prompt ends with, what the answer is taken to be, its tokens) of each turn."""
    rng, words = random.Random(1), Words(2)
    sessions = []
    for number in range(count):
        prompt, turns = "", []
        for new_text, answer, tokens in session(rng, words):
            prompt += new_text
            turns.append(
                Turn(
                    prompt, tuple(words.tokenizer.encode(prompt)), tokens, rng.expovariate(1 / pause_s) if turns else 0
                )
            )
            prompt += answer
        sessions.append(Session(f"{number}", rng.uniform(0.0, seconds), tuple(turns)))
    return Workload(note, tuple(sorted(sessions, key=lambda session: session.start_s)))


def conversations(seconds: float) -> Workload:
    def session(rng: random.Random, words: Words) -> list[tuple[str, str, int]]:
        turns = [(words.make_text(int(rng.triangular(400, 3000, 1200))), words.make_text(40), 40)]
        return turns + [
            (words.make_text(rng.randint(40, 300)), words.make_text(40), 40) for _ in range(rng.randint(2, 5))
        ]

    count = int(10 * seconds)
    return _workload(f"{count} conversations of 3 to 6 turns", count, seconds, session, 0.5)


def agents(seconds: float) -> Workload:
    instructions: list[str] = []

    def session(rng: random.Random, words: Words) -> list[tuple[str, str, int]]:
        if not instructions:
            instructions.extend(words.make_text(1500) for _ in range(4))
        opening = rng.choices(instructions, (8, 4, 2, 1))[0] + words.make_text(int(rng.triangular(600, 4000, 1500)))
        turns = [(opening, words.make_text(24), 24)]
        return turns + [
            (words.make_text(rng.randint(40, 400)), words.make_text(24), 24) for _ in range(rng.randint(4, 8))
        ]

    count = int(6 * seconds)
    return _workload(f"{count} agents of 5 to 9 steps, four instructions of 1,500 tokens", count, seconds, session, 0.3)


def shared_prompt(seconds: float) -> Workload:
    prompts: list[str] = []

    def session(rng: random.Random, words: Words) -> list[tuple[str, str, int]]:
        if not prompts:
            prompts.append(words.make_text(2000))
        return [(prompts[0] + words.make_text(rng.randint(30, 120)), "", rng.randint(60, 240))]

    count = int(17 * seconds)
    return _workload(f"{count} questions behind one prompt of 2,000 tokens", count, seconds, session, 1.0)


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "conversations": conversations, "agents": agents, "one prompt": shared_prompt,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Talk:
    """A session as bytes, made before the clock starts."""

    start_s: float
    turns: tuple[tuple[float, bytes, int], ...]
    """(pause after the answer before, request, tokens of the answer)."""

    @classmethod
    def of(cls, session: Session) -> Talk:
        turns = [
            (
                turn.gap_s,
                post_request("/v1/completions", completion_body(MODEL, turn.prompt, turn.answer_tokens)),
                turn.answer_tokens,
            )
            for turn in session.turns
        ]
        return cls(session.start_s, tuple(turns))


RequestKey = tuple[int, int]
"""(session, turn): the same request in every run."""


@dataclass(slots=True)
class Play:
    """One run."""

    outcomes: dict[RequestKey, StreamOutcome] = field(default_factory=dict)
    failed_count: int = 0
    router_cpu_s: float = 0.0


async def play(url: str, talks: list[Talk]) -> Play:
    """All sessions at their times. A turn that fails is counted, and its session goes on."""
    result, loop = Play(), asyncio.get_running_loop()
    begin_s = loop.time()

    async def play_session(client: Client, number: int, talk: Talk) -> None:
        await asyncio.sleep(max(0.0, begin_s + talk.start_s - loop.time()))
        for turn, (pause_s, request, tokens) in enumerate(talk.turns):
            await asyncio.sleep(pause_s)
            response = await client.send(request)
            try:
                result.outcomes[number, turn] = StreamOutcome.from_response(response, tokens, "?")
            except RuntimeError:
                result.failed_count += 1

    async with Client(url, timeout_s=60.0) as client:
        await asyncio.gather(*(play_session(client, number, talk) for number, talk in enumerate(talks)))
    return result
