"""Sessions of agents through the official clients: what could be reused from turn to turn is.

The clients are unmodified, each with a session of its own: a turn brings the results of the tools that were called in
the last one, every sixth one a question too; answers are whole and streamed by turns. The model is scripted: it thinks
before it calls two tools at once, and the template drops what was thought before the last question.

thinking    nothing else changes
billing     the system prompt begins with a billing line that changes with every request, which our programs drop
changing    the same line under a name that nobody drops: what it would cost

Reusable are all tokens of the last turn, its answer with it, but the last one, of which nothing was computed; where the
template drops a thought, what was before it. Reused is what the engine reports, in blocks of 16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import ROOT, serve_engine

pytestmark = [pytest.mark.long, pytest.mark.live, pytest.mark.begins_first]

BLOCK = 16
TURNS = 8
TOOLS_A_QUESTION = 5
"""Turns with results of tools between two questions."""
_CALL = (
    '{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson)'
    " + '}</tool_call>' }}"
)
TEMPLATE = (
    """\
{%- if messages[0].role == 'system' %}
{%- set system, chat = messages[0].content, messages[1:] %}{%- else %}{%- set system, chat = '', messages %}{%- endif %}
{{- '<|im_start|>system\\n' + system + '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools or [] %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- set last = namespace(question=0) %}
{%- for message in chat %}
{%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in chat %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > last.question %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
"""
    + _CALL
    + """
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""After Qwen3's, without the line ends around a call."""
SCRIPT = [
    '<think>I must look.</think><tool_call>{"name": "read_file", "arguments": {"path": "a.txt", "line": 7}}'
    '</tool_call><tool_call>{"name": "search", "arguments": {"words": ["b", "a"], "most": 3}}</tool_call>',
    '<think>Once more.</think><tool_call>{"name": "search", "arguments": {"words": ["z"], "most": 10}}</tool_call>'
    '<tool_call>{"name": "read_file", "arguments": {"path": "b/c.py", "line": 1}}</tool_call>',
]
"""Arguments as the template writes them, so that an answer comes back with the ids that it was given."""
SPEC = {"prefill_s_per_token": 1e-6, "step_s": 1e-4, "kv_tokens": 1 << 18, "max_model_len": 32768}
_NAME = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "read_file": {"path": _NAME, "line": {"type": "integer"}},
    "search": {"words": {"type": "array", "items": _NAME}, "most": {"type": "integer"}},
}


def _schema(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


@dataclass
class Turn:
    """Tokens, as the engine reports them."""

    prompt: int
    cached_tokens: int
    completion: int
    reusable: int = 0
    asks: bool = False
    """It brings a new question."""


@dataclass
class Session:
    """One conversation; what a client does in its own form is the subclass's."""

    url: str
    case: str
    system: str
    turns: list[Turn] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Of the last answer: (id, name)."""

    @property
    def line(self) -> str:
        """That changes with every request; empty: none."""
        if self.case == "thinking":
            return ""
        name = "x-anthropic-billing-header" if self.case == "billing" else "x-other-billing-header"
        return f"{name}: cch={len(self.turns) * 7919:x};"

    @property
    def system_now(self) -> str:
        return f"{self.line}\n{self.system}" if self.line else self.system

    def play(self, turns: int, results: Iterator[str]) -> None:
        for number in range(turns):
            asks = number % (TOOLS_A_QUESTION + 1) == 0
            self.add_messages({call: next(results) for call, _ in self.calls}, f"Question {number}?" if asks else None)
            new_turn = self.request_turn(stream=number % 2 == 1, seed=number)
            new_turn.asks = asks
            if self.turns:
                last = self.turns[-1]
                new_turn.reusable = last.prompt + last.completion - 1
                if asks:  # the thoughts since the last question go
                    new_turn.reusable = next(turn for turn in reversed(self.turns) if turn.asks).prompt
            self.turns.append(new_turn)

    def add_messages(self, results: dict[str, str], question: str | None) -> None:
        raise NotImplementedError

    def request_turn(self, *, stream: bool, seed: int) -> Turn:
        raise NotImplementedError


class Anthropic(Session):
    def add_messages(self, results: dict[str, str], question: str | None) -> None:
        blocks: list[Any] = [{"type": "tool_result", "tool_use_id": c, "content": text} for c, text in results.items()]
        if question is not None:
            blocks.append({"type": "text", "text": question})
        self.messages.append({"role": "user", "content": blocks})

    def request_turn(self, *, stream: bool, seed: int) -> Turn:
        tools: Any = [
            {"name": name, "description": name, "input_schema": _schema(fields)} for name, fields in TOOLS.items()
        ]
        system = [{"type": "text", "text": text} for text in (self.line, self.system) if text]
        body: Any = {
            "model": "m", "max_tokens": 800, "system": system, "tools": tools,
            "messages": self.messages, "extra_body": {"seed": seed},
        }  # fmt: skip
        with anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0) as client:
            if stream:
                with client.messages.stream(**body) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**body)
        assert message.stop_reason == "tool_use", message
        content = [block.model_dump(exclude_none=True) for block in message.content]
        self.messages.append({"role": "assistant", "content": content})
        self.calls = [(block["id"], block["name"]) for block in content if block["type"] == "tool_use"]
        cached_tokens = message.usage.cache_read_input_tokens or 0
        return Turn(message.usage.input_tokens + cached_tokens, cached_tokens, message.usage.output_tokens)


class OpenAi(Session):
    def add_messages(self, results: dict[str, str], question: str | None) -> None:
        self.messages += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results.items()]
        if question is not None:
            self.messages.append({"role": "user", "content": question})

    def request_turn(self, *, stream: bool, seed: int) -> Turn:
        tools: Any = [
            {"type": "function", "function": {"name": name, "parameters": _schema(fields)}}
            for name, fields in TOOLS.items()
        ]
        body: Any = {
            "model": "m", "max_tokens": 800, "tools": tools, "seed": seed,
            "messages": [{"role": "system", "content": self.system_now}, *self.messages],
        }  # fmt: skip
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            if stream:
                with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
                    answer: Any = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**body)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls", answer
        message = choice.message.model_dump(exclude_none=True)
        self.messages.append(message)
        self.calls = [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]
        cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
        return Turn(answer.usage.prompt_tokens, cached_tokens, answer.usage.completion_tokens)


class Responses(Session):
    def add_messages(self, results: dict[str, str], question: str | None) -> None:
        self.messages += [
            {"type": "function_call_output", "call_id": call, "output": text} for call, text in results.items()
        ]
        if question is not None:
            self.messages.append({"role": "user", "content": question})

    def request_turn(self, *, stream: bool, seed: int) -> Turn:
        tools: Any = [
            {"type": "function", "name": name, "parameters": _schema(fields)} for name, fields in TOOLS.items()
        ]
        body: Any = {
            "model": "m", "max_output_tokens": 800, "tools": tools, "instructions": self.system_now, "store": False,
            "input": self.messages, "extra_body": {"seed": seed},
        }  # fmt: skip
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            if stream:
                with client.responses.stream(**body) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(**body)
        assert answer.status == "completed", answer
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        self.calls = [(item["call_id"], item["name"]) for item in items if item["type"] == "function_call"]
        self.messages += items
        usage = answer.usage
        return Turn(usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)


SESSIONS: dict[str, type[Session]] = {"anthropic": Anthropic, "openai": OpenAi, "responses": Responses}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an engine that runs."""
    folder = tmp_path_factory.mktemp("agents")
    template, script = folder / "template.jinja", folder / "script.txt"
    template.write_text(TEMPLATE)
    script.write_text("\n".join(SCRIPT))
    extra_flags = ("--chat-template", str(template), "--reasoning-parser", "qwen3",
            "--simulate", json.dumps({**SPEC, "script": str(script)}))  # fmt: skip
    flags = ("--port", "0", "--served-model-name", "m", "--log-level", "warning", *extra_flags)
    with serve_engine(folder / "engine.log", *flags) as program:
        yield program.await_line()


def texts() -> tuple[str, Iterator[str]]:
    """(a system prompt, results of tools), of this project's own pages."""
    pages = "\n\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))
    words = pages.split(" ")
    results = (" ".join(words[at : at + 12]) for at in range(2_000, len(words) - 12, 12))
    return " ".join(words[:700]), results


@pytest.mark.parametrize("client", SESSIONS)
@pytest.mark.parametrize("case", ["thinking", "billing", "changing"])
def test_every_block_that_could_be_reused_is(url: str, case: str, client: str) -> None:
    system, results = texts()
    # Each session is a stranger to the cache from the first word on.
    session = SESSIONS[client](url, case, f"{client}, {case}: {system}")
    session.play(TURNS, results)
    turns = session.turns[1:]
    reusable = sum(turn.reusable for turn in turns)
    cached_tokens = sum(min(turn.cached_tokens, turn.reusable) for turn in turns)
    blocks = [turn.reusable // BLOCK * BLOCK for turn in turns]
    if case == "changing":
        assert cached_tokens / reusable < 0.05
    else:
        assert sum(map(min, (turn.cached_tokens for turn in turns), blocks)) == sum(blocks)
        assert cached_tokens / reusable > 0.99
