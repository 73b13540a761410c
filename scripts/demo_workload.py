"""The demo's workload: conversations over the repo's own text, interleaved so that two or more requests always run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.load import Client, Outcome, post
from harness.programs import ROOT

IN_FLIGHT = 3
ANSWER_TOKENS = 24
SOURCES = ("docs/*.md", "*.md", "engine/**/*.py", "router/**/*.py", "events/*.py", "prompts/*.py", "kernels/**/*.py")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A long shared context and the questions asked about it, one a turn; each question brings text of its own."""

    name: str
    context: str
    questions: tuple[str, ...]


def repo_text() -> str:
    """The repo's own documents and code, one after the other."""
    files = [p for pattern in SOURCES for p in sorted(ROOT.glob(pattern)) if "__init__" not in p.name]
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
    url: str, model: str, conversations: list[Conversation], show: Callable[[str, Outcome], None]
) -> list[Outcome]:
    """Every turn of every conversation, `IN_FLIGHT` requests at a time, no pauses. Raises on a failed request."""
    outcomes: list[Outcome] = []
    free = asyncio.Semaphore(IN_FLIGHT)

    async def talk(client: Client, conversation: Conversation) -> None:
        messages = [{"role": "system", "content": conversation.context}]
        for turn, question in enumerate(conversation.questions, 1):
            messages.append({"role": "user", "content": question})
            body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
                    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
            name = f"{conversation.name} turn {turn}"
            async with free:  # who waits longest is next, so conversations take turns
                outcome = Outcome.of(await client.ask(post("/v1/chat/completions", body)), ANSWER_TOKENS, name)
            messages.append({"role": "assistant", "content": outcome.text})
            outcomes.append(outcome)
            show(name, outcome)

    async with Client(url) as client:
        await asyncio.gather(*(talk(client, conversation) for conversation in conversations))
    return outcomes
