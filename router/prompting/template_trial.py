"""Whether a chat template may be rendered from a message boundary on: tried out when it is loaded.

Conversations of the shapes that occur (roles, tools, thoughts) grow turn by turn through a cache of their own. The ids
must be those of a full read each time, and a part of the turns must be found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from prompts.errors import RequestError
from prompts.routing import parse_routing_of_kind
from prompts.tokenizer import Tokenizer
from router.prompting.conversation_cache import ConversationCache
from router.prompting.conversation_reading import cache_conversation, continue_conversation
from router.prompting.encode import read_prompt

CACHE_BYTES = 8 << 20
_FILLER = "Some words that make a message long enough to be worth caching, and then some more of them. " * 4
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Return the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]


def _call(number: int, *, thought: bool = False, text: str | None = None, calls: int = 1) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": [
        {"id": f"call{number:04}{i}", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Paris"}'}} for i in range(calls)]}  # fmt: skip
    return message | {"reasoning_content": f"Thought {number}. {_FILLER}"} if thought else message


def _answer(number: int, *, thought: bool = False, inline_thought: bool = False) -> dict[str, Any]:
    text = f"<think>\nIdea {number}.\n</think>\n\n" if inline_thought else ""
    message = {"role": "assistant", "content": f"{text}Answer {number}. {_FILLER}"}
    return message | {"reasoning_content": f"Thought {number}."} if thought else message


def _question(number: int, text: Any = None) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {number}? {_FILLER}" if text is None else text}


def _result(number: int, part: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:04}{part}", "content": f"Result {number}.{part} {_FILLER}"}


def _draw_conversations() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Conversations by name. Requests end where a model would answer: behind a message of the user, or of a tool."""
    system = {"role": "system", "content": f"Be brief. {_FILLER}"}
    plain = [message for i in range(4) for message in (_question(i), _answer(i))]
    yield "questions", plain
    yield "a system text", [system, *plain]
    for name, kind in (("thoughts", {"thought": True}), ("thoughts in the text", {"inline_thought": True})):
        yield name, [system, *(m for i in range(4) for m in (_question(i), _answer(i, **kind)))]
    for name, thought in (("tools", False), ("tools and thoughts", True)):
        loop = [m for i in range(3) for m in (_call(i, thought=thought, text="I look." if i % 2 else None), _result(i))]
        yield name, [system, _question(0), *loop, _answer(0, thought=thought), _question(1), *loop, _question(2)]
    yield "parallel calls", [system, _question(0), _call(1, calls=2), _result(1), _result(1, 1), _call(2), _result(2),
                             _answer(2), _question(3), _call(4, calls=2), _result(4), _result(4, 1), _answer(4),
                             _question(5)]  # fmt: skip
    parts = [{"type": "text", "text": "Part one."}, {"type": "text", "text": _FILLER}]
    yield "parts", [system, *(m for i in range(4) for m in (_question(i, parts), _answer(i)))]
    yield "empty texts", [system, _question(0, ""), _answer(0), _question(1), {"role": "assistant", "content": ""},
                          _question(2), _answer(2), _question(3)]  # fmt: skip
    yield "a late system text", [system, *plain[:4], {"role": "system", "content": "Be kind."}, *plain[4:]]
    yield "two questions in a row", [*plain[:3], *plain[2:4], _question(8), _question(9), _answer(9), _question(10)]


def find_trial_problem(tokenizer: Tokenizer) -> str | None:
    """Return why conversations of a tokenizer's chat template must be rendered whole; None where they need not."""
    reused_count = 0
    for name, conversation in _draw_conversations():
        for fields in ({}, {"tools": _TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}):
            problem, hits = _try_conversation(tokenizer, conversation, fields)
            if problem is not None:
                return f"{name}: {problem}"
            reused_count += hits
    return None if reused_count else "no prompt of a conversation begins with an earlier one"


def _try_conversation(
    tokenizer: Tokenizer, conversation: list[dict[str, Any]], fields: dict[str, Any]
) -> tuple[str | None, int]:
    """Return what went wrong, and how many requests were found in the cache."""
    cache, hits = ConversationCache(CACHE_BYTES), 0
    for end, message in enumerate(conversation, 1):
        if message["role"] == "assistant" or end == 1:
            continue
        body = msgspec.json.encode({"messages": conversation[:end], **fields})
        request = parse_routing_of_kind("chat", body)
        try:
            prompt = read_prompt(request, tokenizer)
        except RequestError:
            return None, hits
        predecessor, cached = None, None
        for match in cache.find("chat", body):
            continuation = continue_conversation(*match, body, tokenizer, further_differs=False)
            if continuation is not None:
                if list(continuation.token_ids) != list(prompt.token_ids or ()):
                    return f"what is rendered behind message {match[1].message_count} differs", hits
                cached, predecessor, hits = continuation.successor, continuation.predecessor, hits + 1
                break
        else:
            cached = cache_conversation(request, body, prompt, tokenizer)
        if cached is not None:
            cache.store(cached, body, predecessor)
    return None, hits
