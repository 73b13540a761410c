"""The demo's workload: conversations over the repo's own text, interleaved so that two or more requests always run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

IN_FLIGHT = 3
ANSWER_TOKENS = 24
SOURCES = (
    "docs/*.md",
    "*.md",
    "engine/*.py",
    "router/*.py",
    "events/*.py",
    "prompts/*.py",
    "engine/cache/*.py",
    "kernels/*.py",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A long shared context and the questions asked about it, one a turn; each question brings text of its own."""

    name: str
    context: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    conversation: str
    turn: int
    worker: str
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    ttft_ms: float


@dataclass(slots=True)
class _Turn:
    conversation: Conversation
    messages: list[dict[str, str]] = field(default_factory=list)
    number: int = 0


def repo_text() -> str:
    """The repo's own documents and code, one after the other."""
    root = Path(__file__).resolve().parent.parent
    files = [p for pattern in SOURCES for p in sorted(root.glob(pattern)) if "__init__" not in p.name]
    return "\n\n".join(p.read_text() for p in files)


def _texts(token_budget: int, model: Path) -> list[str]:
    """The repo's own text, cut into pieces of `token_budget` tokens."""
    from prompts import Tokenizer

    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode(repo_text(), add_special_tokens=False)
    return [tokenizer.decode(ids[i : i + token_budget]) for i in range(0, len(ids) - token_budget, token_budget)]


def make_conversations(
    model: Path, count: int, turns: int, context_tokens: int, turn_tokens: int
) -> list[Conversation]:
    """`count` conversations of `turns` turns, each with its own context. ValueError if the repo has too little text."""
    contexts = _texts(context_tokens, model)
    snippets = _texts(turn_tokens, model)
    if len(contexts) < count:
        raise ValueError(
            f"--conversations {count}: the repo's text yields {len(contexts)} contexts of {context_tokens} tokens"
        )
    made = []
    for i in range(count):
        questions = tuple(
            f"Question {t + 1}. Explain this part:\n{snippets[-(i * turns + t) - 1]}" for t in range(turns)
        )
        made.append(
            Conversation(f"conversation {i + 1}", f"You answer questions about this text.\n{contexts[i]}", questions)
        )
    return made


async def play(
    url: str, model: str, conversations: list[Conversation], on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Plays every turn of every conversation, `IN_FLIGHT` requests at a time, no pauses. Raises on a failed request."""
    waiting: asyncio.Queue[_Turn | None] = asyncio.Queue()
    for conversation in conversations:
        waiting.put_nowait(_Turn(conversation, [{"role": "system", "content": conversation.context}]))
    outcomes: list[Outcome] = []
    unfinished = len(conversations)

    async def player(session: aiohttp.ClientSession) -> None:
        nonlocal unfinished
        while (turn := await waiting.get()) is not None:
            turn.messages.append({"role": "user", "content": turn.conversation.questions[turn.number]})
            turn.number += 1
            answer, outcome = await ask(session, url, model, turn.conversation.name, turn.number, turn.messages)
            turn.messages.append({"role": "assistant", "content": answer})
            outcomes.append(outcome)
            on_outcome(outcome)
            if turn.number < len(turn.conversation.questions):
                waiting.put_nowait(turn)
                continue
            unfinished -= 1
            if unfinished == 0:
                for _ in range(IN_FLIGHT):
                    waiting.put_nowait(None)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(player(session) for _ in range(IN_FLIGHT)))
    return outcomes


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, name: str, turn: int, messages: list[dict[str, str]]
) -> tuple[str, Outcome]:
    """One streamed chat request. TTFT is from sending the request to the first chunk that carries text."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, ttft_ms = [], {}, 0.0
    sent = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{name} turn {turn}: HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if choice["delta"].get("content"):
                    ttft_ms = ttft_ms or (time.perf_counter() - sent) * 1e3
                    text.append(choice["delta"]["content"])
        headers = answer.headers
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    outcome = Outcome(
        conversation=name,
        turn=turn,
        worker=headers["x-blockcast-worker"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        predicted_tokens=int(headers["x-blockcast-predicted-cached-tokens"]),
        ttft_ms=ttft_ms,
    )
    return "".join(text), outcome
