"""Conversations over the repo's own text: to be played and looked at, or as bodies of a size for a benchmark."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.load import Client, Outcome, post
from harness.programs import ROOT

IN_FLIGHT = 3
ANSWER_TOKENS = 24
SOURCES = ("docs/*.md", "*.md", "engine/**/*.py", "router/**/*.py", "events/*.py", "prompts/*.py", "kernels/**/*.py")
SIZES = {"0.2k": 200, "2k": 2_000, "16k": 16_000, "110k": 110_000, "1m": 1_000_000}
TALKS = 8
"""Of each size."""
TRIES = 20 * TALKS
CHAT = "/v1/chat/completions"
Message = dict[str, str]


def repo_text() -> str:
    """The repo's own documents and code, one after the other."""
    files = [p for pattern in SOURCES for p in sorted(ROOT.glob(pattern)) if "__init__" not in p.name]
    return "\n\n".join(p.read_text() for p in files)


def talk(rng: random.Random, text: str, characters: int) -> list[Message]:
    """Turns of the text from somewhere in it, about so many characters in all; the assistant's is the last."""
    at, left = rng.randrange(len(text)), characters - 150
    messages = [{"role": "system", "content": f"Assistant {rng.randrange(1000)}: be brief."}]
    while left > 100:
        take = min(left, rng.randint(200, 2000))
        role = "assistant" if messages[-1]["role"] == "user" else "user"
        messages.append({"role": role, "content": (text[at : at + take] + text)[:take]})
        at, left = (at + take) % len(text), left - take - 30
    return messages if messages[-1]["role"] != "user" else [*messages, {"role": "assistant", "content": "Yes."}]


def question(number: int) -> Message:
    """A turn that no other number has."""
    what = f"Question {number}: what does function {number * 7919 % 100_003} do, and why?"
    return {"role": "user", "content": what}


class Bodies:
    """Requests that end in a turn never seen before."""

    def __init__(self, reasoned: Callable[[list[Message]], bool] | None = None, share: float = 0.0) -> None:
        """`reasoned`: of which conversations a router tells why they miss; of each size so many are such ones then as
        in a draw of this share."""
        self._text, few = repo_text(), round(share * TALKS)
        self.talks = {name: self._talks(size, reasoned, few) for name, size in SIZES.items()}
        self._count = 0

    def _talks(self, size: int, reasoned: Callable[[list[Message]], bool] | None, told: int) -> list[list[Message]]:
        made = (talk(random.Random(size + i), self._text, size) for i in range(TRIES))
        if reasoned is None or size < 1000:  # what begins with the question is drawn by that
            return list(itertools.islice(made, TALKS))
        few: dict[bool, list[list[Message]]] = {True: [], False: []}
        wanted = {True: told, False: TALKS - told}
        for one in made:
            kind = reasoned(one)
            if len(few[kind]) < wanted[kind]:
                few[kind].append(one)
            if len(few[True]) + len(few[False]) == TALKS:
                return few[True] + few[False]
        raise ValueError(f"too few conversations of {size} are drawn, or too many")

    def make(self, size: str, count: int, *, new: int = 0, **fields: Any) -> list[bytes]:
        """`new`: characters of text in the last turn, each time another part of the repo's."""
        made = []
        for _ in range(count):
            self._count += 1
            last = question(self._count)
            at = self._count * 7919 % (len(self._text) - new)
            last["content"] += self._text[at : at + new]
            messages = [*self.talks[size][self._count % TALKS], last]
            made.append(post(CHAT, {"model": "mock", "messages": messages, **fields}))
        return made


@dataclass(frozen=True, slots=True)
class Conversation:
    """A long shared context and the questions asked about it, one a turn; each question brings text of its own."""

    name: str
    context: str
    questions: tuple[str, ...]


def make_conversations(
    model: Path, count: int, turns: int, context_tokens: int, turn_tokens: int
) -> list[Conversation]:
    """`count` conversations of `turns` turns, each with its own context. ValueError if the repo has too little text."""
    from prompts import Tokenizer

    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode(repo_text(), add_special_tokens=False)

    def pieces(tokens: int) -> list[str]:
        return [tokenizer.decode(ids[i : i + tokens]) for i in range(0, len(ids) - tokens, tokens)]

    contexts, snippets = pieces(context_tokens), pieces(turn_tokens)
    if len(contexts) < count:
        many = f"the repo's text yields {len(contexts)} contexts of {context_tokens} tokens"
        raise ValueError(f"--conversations {count}: {many}")
    made = []
    for i in range(count):
        parts = (snippets[-(i * turns + t) - 1] for t in range(turns))
        questions = tuple(f"Question {t}. Explain this part:\n{part}" for t, part in enumerate(parts, 1))
        context = f"You answer questions about this text.\n{contexts[i]}"
        made.append(Conversation(f"conversation {i + 1}", context, questions))
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
                outcome = Outcome.of(await client.ask(post(CHAT, body)), ANSWER_TOKENS, name)
            messages.append({"role": "assistant", "content": outcome.text})
            outcomes.append(outcome)
            show(name, outcome)

    async with Client(url) as client:
        await asyncio.gather(*(talk(client, conversation) for conversation in conversations))
    return outcomes
