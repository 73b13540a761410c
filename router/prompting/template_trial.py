"""Trial of a chat template when it is loaded: whether cached token ids of a conversation can be continued with it.

Test conversations grow turn by turn through a cache. The ids must be those of a full read each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec

from prompts.errors import RequestError
from prompts.routing import parse_body
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.continued_conversation import cache_conversation
from router.prompting.conversation_reader import ConversationReader
from router.prompting.encode import read_prompt

CACHE_BYTES = 8 << 20
_FILLERS = (
    "Some words that make a message long enough to be worth caching, and then some more of them. " * 4,
    "Other words, 1 < 2 && {{ x }} %s 'é' <b>, and then some more of them, so that they are long enough. " * 4,
    " White space at both ends of many words, and then some more of them, so that they are long enough.\n" * 4,
)
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
_ROLES = {"system": "system", "question": "user", "answer": "assistant", "call": "assistant", "result": "tool"}
_CALLS = "call result call+text result call result "
_THOUGHTFUL_CALLS = "call+thought result call+text+thought result call+thought result "
_SHAPES = {
    "questions": "question answer " * 4,
    "a system text": "system " + "question answer " * 4,
    "thoughts": "system " + "question answer+thought " * 4,
    "thoughts in the text": "system " + "question answer+thought_in_text " * 4,
    "tools": f"system question {_CALLS} answer question {_CALLS} question",
    "tools and thoughts": f"system question {_THOUGHTFUL_CALLS} answer+thought question {_THOUGHTFUL_CALLS} question",
    "parallel calls": "system question call+two result result call result answer "
    "question call+two result result answer question",
    "parts": "system " + "question+parts answer " * 4,
    "empty texts": "system question+empty answer question answer+empty question answer question",
    "a late system text": "system question answer question answer system question answer question answer",
    "two questions in a row": "question answer question answer " + "question question answer " * 2 + "question",
}
"""Name of a conversation -> its messages, as chats and agents have them, in the format of `_make_conversation`."""


def _make_conversation(shape: str, filler: str) -> list[dict[str, Any]]:
    """Make the messages of a test conversation from a shape such as `question call+text result answer`.

    Each word is a message; words after a plus sign vary it. Most messages contain `filler`, a text worth caching.
    """
    messages: list[dict[str, Any]] = []
    open_call_ids: list[str] = []
    for number, word in enumerate(shape.split()):
        kind, *variants = word.split("+")
        message: dict[str, Any] = {"role": _ROLES[kind], "content": f"Message {number}. {filler}"}
        if kind == "call":
            function = {"name": "weather", "arguments": '{"city": "Paris"}'}
            call_count = 2 if "two" in variants else 1
            call_ids = [f"call{number:04}{i}" for i in range(call_count)]
            message["content"] = "I look." if "text" in variants else None
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
            open_call_ids += call_ids
        elif kind == "result":
            message["tool_call_id"] = open_call_ids.pop(0)
        if "thought" in variants:
            message["reasoning_content"] = f"Thought {number}. {filler}"
        if "thought_in_text" in variants:
            message["content"] = f"<think>\nIdea {number}.\n</think>\n\n{message['content']}"
        elif "parts" in variants:
            message["content"] = [{"type": "text", "text": "Part one."}, {"type": "text", "text": filler}]
        elif "empty" in variants:
            message["content"] = ""
        messages.append(message)
    return messages


class _TokenMismatchError(Exception):
    """A turn of a test conversation that has other token ids with the cache than without."""


def find_trial_problem(renderer: BoundaryRenderer) -> str | None:
    """Return why the token ids of a chat's last prompt cannot be reused for its next one, with one chat template.

    None if they can. Test conversations are tokenised turn by turn, with and without reuse, and the ids compared. After
    a problem, the router renders and tokenises each prompt as a whole.
    """
    # Other bodies than plain ones are tried with one filler, to save time.
    further_fields = [{"tools": _TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}]
    trials = [*product(_FILLERS, _SHAPES, [{}]), *product(_FILLERS[:1], _SHAPES, further_fields)]
    reused_turn_count = 0
    for filler, shape_name, fields in trials:
        if not renderer.template.is_bounded:  # the last rendering took too much time or memory
            return "its chat template may take too long"
        conversation = _make_conversation(_SHAPES[shape_name], filler)
        try:
            reused_turn_count += _count_continued_turns(renderer, conversation, fields)
        except _TokenMismatchError as error:
            return f"{shape_name}: {error}"
    return None if reused_turn_count else "no prompt of a conversation begins with an earlier one"


def _count_continued_turns(
    renderer: BoundaryRenderer, conversation: list[dict[str, Any]], fields: dict[str, Any]
) -> int:
    """Tokenise each turn of a conversation with the cache of earlier turns; return for how many the cache was of use.

    Each turn is also tokenised whole. Raises _TokenMismatchError if that gives other ids. The conversation ends early
    if the template refuses it. `fields`: further fields of the request bodies.
    """
    continued_turn_count = 0
    reader = ConversationReader(CACHE_BYTES)
    reader.allow("", renderer)  # the model of cached conversations that name none
    for body in _make_bodies(conversation, fields):
        request = parse_body("chat", body)
        try:
            prompt = read_prompt(request, renderer.tokenizer)
        except RequestError:
            break
        continuation = reader.read_continuation(reader.cache.find("chat", body), body)
        if continuation is None:
            cache_entry = cache_conversation(request, body, prompt, outline=None, renderer=renderer)
        else:
            if list(continuation.token_ids) != list(prompt.token_ids or ()):
                message_count = continuation.boundary.message_count
                raise _TokenMismatchError(f"what is rendered behind message {message_count} differs")
            continued_turn_count += 1
            cache_entry = continuation.cache_entry
        if cache_entry is not None:  # the next turn continues this one
            reader.cache.store(cache_entry, body)
    return continued_turn_count


def _make_bodies(conversation: list[dict[str, Any]], fields: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bodies of the requests of a conversation, each up to a later message that is not the assistant's."""
    for end, message in enumerate(conversation, 1):
        if end > 1 and message["role"] != "assistant":
            yield msgspec.json.encode({"messages": conversation[:end], **fields})
