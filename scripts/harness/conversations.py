"""Conversations over the repo's own text: to be played and looked at, or as bodies of a size for a benchmark."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.load import Client, StreamOutcome, post_request
from harness.programs import ROOT

IN_FLIGHT = 3
ANSWER_TOKENS = 24
SOURCES = ("docs/*.md", "*.md", "engine/**/*.py", "router/**/*.py", "events/*.py", "prompts/*.py", "kernels/**/*.py")
SIZES = {"0.2k": 200, "2k": 2_000, "16k": 16_000, "110k": 110_000, "1m": 1_000_000}
CONVERSATIONS_PER_SIZE = 8
"""Of each size."""
DRAWS_MAX = 20 * CONVERSATIONS_PER_SIZE
CHAT = "/v1/chat/completions"
Message = dict[str, str]


def read_repository_text() -> str:
    """The repo's own documents and code, one after the other."""
    files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if "__init__" not in path.name]
    return "\n\n".join(p.read_text() for p in files)


def make_messages(rng: random.Random, text: str, characters: int) -> list[Message]:
    """Turns of the text from somewhere in it, about so many characters in all; the assistant's is the last."""
    offset, characters_remaining = rng.randrange(len(text)), characters - 150
    messages = [{"role": "system", "content": f"Assistant {rng.randrange(1000)}: be brief."}]
    while characters_remaining > 100:
        length = min(characters_remaining, rng.randint(200, 2000))
        role = "assistant" if messages[-1]["role"] == "user" else "user"
        messages.append({"role": role, "content": (text[offset : offset + length] + text)[:length]})
        offset, characters_remaining = (offset + length) % len(text), characters_remaining - length - 30
    return messages if messages[-1]["role"] != "user" else [*messages, {"role": "assistant", "content": "Yes."}]


def make_question(number: int) -> Message:
    """A turn that no other number has."""
    content = f"Question {number}: what does function {number * 7919 % 100_003} do, and why?"
    return {"role": "user", "content": content}


class ChatRequests:
    """Requests that end in a turn never seen before."""

    def __init__(self, is_sampled: Callable[[list[Message]], bool] | None = None, sampled_share: float = 0.0) -> None:
        """`is_sampled`: whether a router explains a conversation's misses; of each size so many are sampled then as
        in a draw of this share."""
        self._text, sampled_count = read_repository_text(), round(sampled_share * CONVERSATIONS_PER_SIZE)
        self.conversations = {
            name: self._draw_conversations(size, is_sampled, sampled_count) for name, size in SIZES.items()
        }
        self._request_count = 0

    def _draw_conversations(
        self, size: int, is_sampled: Callable[[list[Message]], bool] | None, sampled_count: int
    ) -> list[list[Message]]:
        candidates = (make_messages(random.Random(size + i), self._text, size) for i in range(DRAWS_MAX))
        if is_sampled is None or size < 1000:  # what begins with the question is drawn by that
            return list(itertools.islice(candidates, CONVERSATIONS_PER_SIZE))
        selected: dict[bool, list[list[Message]]] = {True: [], False: []}
        counts = {True: sampled_count, False: CONVERSATIONS_PER_SIZE - sampled_count}
        for messages in candidates:
            kind = is_sampled(messages)
            if len(selected[kind]) < counts[kind]:
                selected[kind].append(messages)
            if len(selected[True]) + len(selected[False]) == CONVERSATIONS_PER_SIZE:
                return selected[True] + selected[False]
        raise ValueError(f"too few conversations of {size} are drawn, or too many")

    def make(self, size: str, count: int, *, new_characters: int = 0, **fields: Any) -> list[bytes]:
        """`new_characters`: characters of text in the last turn, each time another part of the repo's."""
        requests = []
        for _ in range(count):
            self._request_count += 1
            last_message = make_question(self._request_count)
            offset = self._request_count * 7919 % (len(self._text) - new_characters)
            last_message["content"] += self._text[offset : offset + new_characters]
            messages = [*self.conversations[size][self._request_count % CONVERSATIONS_PER_SIZE], last_message]
            requests.append(post_request(CHAT, {"model": "mock", "messages": messages, **fields}))
        return requests


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
    ids = tokenizer.encode(read_repository_text(), add_special_tokens=False)

    def split_tokens(tokens: int) -> list[str]:
        return [tokenizer.decode(ids[i : i + tokens]) for i in range(0, len(ids) - tokens, tokens)]

    contexts, excerpts = split_tokens(context_tokens), split_tokens(turn_tokens)
    if len(contexts) < count:
        reason = f"the repo's text yields {len(contexts)} contexts of {context_tokens} tokens"
        raise ValueError(f"--conversations {count}: {reason}")
    conversations = []
    for i in range(count):
        parts = (excerpts[-(i * turns + t) - 1] for t in range(turns))
        questions = tuple(f"Question {t}. Explain this part:\n{part}" for t, part in enumerate(parts, 1))
        context = f"You answer questions about this text.\n{contexts[i]}"
        conversations.append(Conversation(f"conversation {i + 1}", context, questions))
    return conversations


def share_contexts(conversations: list[Conversation], seed: int) -> list[Conversation]:
    """Return the same questions asked about fewer texts: the n-th context is drawn with a weight of 1 / n."""
    contexts = [conversation.context for conversation in conversations]
    weights = [1 / number for number in range(1, len(contexts) + 1)]
    drawn_contexts = random.Random(seed).choices(contexts, weights, k=len(contexts))
    return [replace(conversation, context=context) for conversation, context in zip(conversations, drawn_contexts)]


async def ask(client: Client, model: str, messages: list[Message], name: str) -> StreamOutcome:
    """Send the messages and return the outcome of the answer of `ANSWER_TOKENS`. RuntimeError if it fails."""
    body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    return StreamOutcome.from_response(await client.send(post_request(CHAT, body)), ANSWER_TOKENS, name)


async def run_conversations(
    url: str, model: str, conversations: list[Conversation], report_outcome: Callable[[str, StreamOutcome], None]
) -> list[StreamOutcome]:
    """Every turn of every conversation, `IN_FLIGHT` requests at a time, no pauses. Raises on a failed request."""
    outcomes: list[StreamOutcome] = []
    request_slots = asyncio.Semaphore(IN_FLIGHT)

    async def run_conversation(client: Client, conversation: Conversation) -> None:
        messages = [{"role": "system", "content": conversation.context}]
        for turn, question in enumerate(conversation.questions, 1):
            messages.append({"role": "user", "content": question})
            name = f"{conversation.name} turn {turn}"
            async with request_slots:  # who waits longest is next, so conversations take turns
                outcome = await ask(client, model, messages, name)
            messages.append({"role": "assistant", "content": outcome.text})
            outcomes.append(outcome)
            report_outcome(name, outcome)

    async with Client(url) as client:
        await asyncio.gather(*(run_conversation(client, conversation) for conversation in conversations))
    return outcomes


async def run_agents(url: str, model: str, agents: list[Conversation], agents_max: int) -> dict[str, StreamOutcome]:
    """Let each agent ask its first question, and then all the others at once, and return the outcomes by name.

    `agents_max`: agents that work at the same time. RuntimeError if a request fails.
    """
    outcomes: dict[str, StreamOutcome] = {}
    waiting_agents = iter(agents)

    async def ask_part(client: Client, messages: list[Message], name: str) -> str:
        outcomes[name] = await ask(client, model, messages, name)
        return outcomes[name].text

    async def run_in_turn(client: Client) -> None:
        for agent in waiting_agents:
            first_question, *questions = ({"role": "user", "content": question} for question in agent.questions)
            messages = [{"role": "system", "content": agent.context}, first_question]
            plan = await ask_part(client, messages, f"{agent.name} question 1")
            messages.append({"role": "assistant", "content": plan})
            parts = enumerate(questions, 2)
            await asyncio.gather(
                *(ask_part(client, [*messages, q], f"{agent.name} question {number}") for number, q in parts)
            )

    async with Client(url) as client:
        await asyncio.gather(*(run_in_turn(client) for _ in range(agents_max)))
    return outcomes
