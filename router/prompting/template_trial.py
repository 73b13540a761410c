"""Trial of a chat template when it is loaded: whether it may be rendered from a message boundary on.

Conversations of the shapes that occur (roles, tools, thoughts) grow turn by turn through a cache of their own. The ids
must be those of a full read each time, and some of the turns must be found in the cache.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prompts.errors import RequestError
from prompts.routing import parse_routing_of_kind
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_reader import ConversationReader
from router.prompting.conversation_reading import cache_conversation
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


class _ConversationMaker:
    """Makes the conversations with which a template is tried, in the shapes that agents and chats have.

    Most messages contain the same long text (the filler), so that their conversations are worth caching.
    """

    def __init__(self, filler: str) -> None:
        self._filler = filler
        self._system: dict[str, Any] = {"role": "system", "content": f"Be brief. {filler}"}

    def list_conversations(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return the name and the messages of each conversation."""
        question, answer = self._make_question, self._make_answer
        plain, system = self._make_exchanges(), self._system
        return [
            ("questions", plain),
            ("a system text", [system, *plain]),
            ("thoughts", [system, *self._make_exchanges(thought=True)]),
            ("thoughts in the text", [system, *self._make_exchanges(inline_thought=True)]),
            ("tools", self._make_tool_loops(thought=False)),
            ("tools and thoughts", self._make_tool_loops(thought=True)),
            ("parallel calls", self._make_parallel_calls()),
            ("parts", self._make_questions_in_parts()),
            ("empty texts", self._make_empty_texts()),
            ("a late system text", [system, *plain[:4], {"role": "system", "content": "Be kind."}, *plain[4:]]),
            (
                "two questions in a row",
                [*plain[:5], *plain[4:6], question(8), question(9), answer(9), question(10)],
            ),
        ]

    def _make_exchanges(self, *, thought: bool = False, inline_thought: bool = False) -> list[dict[str, Any]]:
        """Return four questions, each with its answer."""
        messages: list[dict[str, Any]] = []
        for i in range(4):
            messages += [self._make_question(i), self._make_answer(i, thought=thought, inline_thought=inline_thought)]
        return messages

    def _make_tool_loops(self, *, thought: bool) -> list[dict[str, Any]]:
        """Return questions after each of which an agent calls a tool three times: templates drop old thoughts there."""
        loop: list[dict[str, Any]] = []
        for i in range(3):
            loop += [self._make_call(i, thought=thought, text="I look." if i % 2 else None), self._make_result(i)]
        question, answer = self._make_question, self._make_answer
        return [self._system, question(0), *loop, answer(0, thought=thought), question(1), *loop, question(2)]

    def _make_parallel_calls(self) -> list[dict[str, Any]]:
        """Return calls of two tools at once, whose results templates may write as one message."""
        question, answer, call, result = self._make_question, self._make_answer, self._make_call, self._make_result
        return [self._system, question(0), call(1, call_count=2), result(1), result(1, 1), call(2), result(2),
                answer(2), question(3), call(4, call_count=2), result(4), result(4, 1), answer(4),
                question(5)]  # fmt: skip

    def _make_questions_in_parts(self) -> list[dict[str, Any]]:
        """Return questions whose content is a list of parts."""
        parts = [{"type": "text", "text": "Part one."}, {"type": "text", "text": self._filler}]
        messages = [self._system]
        for i in range(4):
            messages += [self._make_question(i, parts), self._make_answer(i)]
        return messages

    def _make_empty_texts(self) -> list[dict[str, Any]]:
        """Return a conversation with an empty question and an empty answer, which templates may leave out."""
        question, answer = self._make_question, self._make_answer
        return [self._system, question(0, ""), answer(0), question(1), {"role": "assistant", "content": ""},
                question(2), answer(2), question(3)]  # fmt: skip

    def _make_question(self, number: int, content: Any = None) -> dict[str, Any]:
        return {"role": "user", "content": f"Question {number}? {self._filler}" if content is None else content}

    def _make_answer(self, number: int, *, thought: bool = False, inline_thought: bool = False) -> dict[str, Any]:
        text = f"<think>\nIdea {number}.\n</think>\n\n" if inline_thought else ""
        message = {"role": "assistant", "content": f"{text}Answer {number}. {self._filler}"}
        return message | {"reasoning_content": f"Thought {number}."} if thought else message

    def _make_call(
        self, number: int, *, thought: bool = False, text: str | None = None, call_count: int = 1
    ) -> dict[str, Any]:
        """Return an assistant's message that calls a tool once or more."""
        function = {"name": "weather", "arguments": '{"city": "Paris"}'}
        calls = [{"id": f"call{number:04}{i}", "type": "function", "function": function} for i in range(call_count)]
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": calls}
        return message | {"reasoning_content": f"Thought {number}. {self._filler}"} if thought else message

    def _make_result(self, number: int, part: int = 0) -> dict[str, Any]:
        """Return the result of one call of the message that `_make_call` makes for the same number."""
        text = f"Result {number}.{part} {self._filler}"
        return {"role": "tool", "tool_call_id": f"call{number:04}{part}", "content": text}


def find_trial_problem(renderer: BoundaryRenderer) -> str | None:
    """Return why conversations of a chat template must be rendered whole; None if they need not."""
    reused_count = 0
    for filler in _FILLERS:
        variants: list[dict[str, Any]] = [{}]
        if filler is _FILLERS[0]:
            variants += [{"tools": _TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}]
        for name, conversation in _ConversationMaker(filler).list_conversations():
            for fields in variants:
                trial = _compare_cached_and_full_reads(renderer, conversation, fields)
                if trial.problem is not None:
                    return f"{name}: {trial.problem}"
                reused_count += trial.hit_count
    return None if reused_count else "no prompt of a conversation begins with an earlier one"


class _TrialResult(msgspec.Struct):
    """Result of the reads of one conversation."""

    hit_count: int = 0
    """Number of turns of which an earlier part was cached."""
    problem: str | None = None
    """Difference between the cached and the full read of a turn; None if there is none."""


def _compare_cached_and_full_reads(
    renderer: BoundaryRenderer, conversation: list[dict[str, Any]], fields: dict[str, Any]
) -> _TrialResult:
    """Read a conversation turn by turn, each turn whole and by the cached turns before it, and compare the token ids.

    Stop at the first difference, or when the template refuses the conversation. `fields`: further fields of the bodies.
    """
    reader, trial = ConversationReader(CACHE_BYTES), _TrialResult()
    reader.allow("", renderer)  # the model of entries that name none
    for end, message in enumerate(conversation, 1):
        if message["role"] == "assistant" or end == 1:
            continue  # a request ends with a message of the user or of a tool
        body = msgspec.json.encode({"messages": conversation[:end], **fields})
        request = parse_routing_of_kind("chat", body)
        try:
            prompt = read_prompt(request, renderer.tokenizer)
        except RequestError:
            return trial
        matches = reader.find("chat", body)
        continuation = reader.read(matches, body) if matches else None
        if continuation is None:
            cached = cache_conversation(request, body, prompt, outline=None, renderer=renderer)
            if cached is not None:
                reader.cache.store(cached, body)
            continue
        trial.hit_count += 1
        if list(continuation.token_ids) != list(prompt.token_ids or ()):
            trial.problem = f"what is rendered behind message {continuation.boundary.message_count} differs"
            return trial
        if continuation.successor is not None:
            reader.cache.store(continuation.successor, body, continuation.predecessor)
    return trial
