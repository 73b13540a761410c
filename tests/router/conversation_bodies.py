"""Bodies of conversations as clients send them turn by turn, and tokenizers that know a template's tokens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from engine.tiny.tokenizer import write_tokenizer
from prompts.routing import ApiKind
from prompts.tokenizer import Tokenizer
from tests.prompts import chat_templates

NEIGHBOURS = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- set intro = messages[0].content if messages[0].role == 'system' else 'none' %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>' + message.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content ~ ('(next: ' ~ loop.nextitem.role ~ ')' if not loop.last else '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A message's text hangs on the messages beside it."""
SLICED = """\
{%- set intro = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set intro = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n' ~ intro ~ (tools | tojson if tools else '') ~ '<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + (intro if loop.first else '') + '\\n' }}
{{- message.content | trim ~ '<|im_end|>' ~ ('' if loop.last else '\\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Llama 3 and Gemma: `messages` becomes all but the first, where that is the system's."""
TEMPLATES: dict[str, str | None] = {
    "tiny": None, "neighbours": NEIGHBOURS, "sliced": SLICED, **chat_templates.ALL, **chat_templates.STYLES,
}  # fmt: skip
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>|<start_of_turn>|<end_of_turn>|\[/?[A-Z]+\]|</?think>|</?tool_call>")


def load_tokenizer(folder: Path, template: str | None) -> Tokenizer:
    """Load a tiny tokenizer that has the special tokens of a template."""
    write_tokenizer(folder, 1024, 1 << 20)
    path = str(folder / "tokenizer.json")
    hf_tokenizer = HfTokenizer.from_file(path)
    tokens = sorted(set(_SPECIAL_TOKEN.findall(template or "")))
    hf_tokenizer.add_special_tokens([
        AddedToken(token, special=True, normalized=False) for token in tokens if hf_tokenizer.token_to_id(token) is None
    ])  # fmt: skip
    hf_tokenizer.save(path)
    return Tokenizer.load(folder, template)


WORDS = (
    "one ",
    "two\n",
    "<|im_end|>\n",
    "<|im_start|>",
    "\u00e9\u00e8",
    "\U0001f600",
    '"\\',
    "{[",
    "]}",
    "  ",
    "<think>",
    "</think>",
    "<tool_response>",
)


def text(rng: random.Random, size: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, size)))


def message(rng: random.Random, kind: ApiKind, place: int) -> dict[str, Any]:
    """Any kind of turn; some are long, so that what came before is worth knowing."""
    size = rng.choice((3, 30, 3000))
    role = rng.choice(
        ("user", "assistant", "user", "assistant", "system" if place == 0 or rng.random() < 0.1 else "user")
    )
    if kind == "messages":
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text(rng, size) + "."}]
        if role == "assistant" and rng.random() < 0.5:
            blocks.append({"type": "tool_use", "id": f"t{place}", "name": "look", "input": {"at": text(rng, 3)}})
        if role == "user" and rng.random() < 0.5:
            blocks.insert(0, {"type": "tool_result", "tool_use_id": f"t{place}", "content": text(rng, size)})
        if rng.random() < 0.02:
            blocks.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}})
        return {"role": role, "content": rng.choice((blocks, text(rng, size) + "."))}
    if rng.random() < 0.2 and place:
        return {"role": "tool", "tool_call_id": "c", "content": text(rng, size)}
    chat_message: dict[str, Any] = {"role": "developer" if rng.random() < 0.01 else role, "content": text(rng, size)}
    if role == "assistant" and rng.random() < 0.3:
        function = {"name": "look", "arguments": json.dumps({"at": text(rng, 3)})}
        chat_message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
        if rng.random() < 0.3:
            chat_message["content"] = None
    if rng.random() < 0.02:
        chat_message["content"] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    elif rng.random() < 0.05:
        chat_message["content"] = [{"type": "text", "text": text(rng, 30)} for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.05:
        chat_message["reasoning_content"] = text(rng, 5)
    return chat_message


def body_of(rng: random.Random, kind: ApiKind, messages: list[Any], fields: dict[str, Any]) -> bytes:
    body_fields: dict[str, Any] = {"model": "m", "max_tokens": 5}
    body_fields |= {"messages": messages, **fields} if rng.random() < 0.9 else {**fields, "messages": messages}
    return json.dumps(body_fields, ensure_ascii=False, indent=rng.choice((None, None, None, 1))).encode()


def fields_of(rng: random.Random, kind: ApiKind) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if kind == "messages" and rng.random() < 0.7:
        fields["system"] = rng.choice(("Be brief.", [{"type": "text", "text": "Be very brief."}]))
    if rng.random() < 0.4:
        schema = {"type": "object", "properties": {"at": {"type": "string"}}}
        chat = {"type": "function", "function": {"name": "look", "parameters": schema}}
        fields["tools"] = [{"name": "look", "input_schema": schema} if kind == "messages" else chat]
    if kind == "chat" and rng.random() < 0.2:
        fields |= rng.choice(
            ({"add_generation_prompt": False}, {"continue_final_message": True}, {"reasoning_effort": "low"},
             {"chat_template_kwargs": {"enable_thinking": False}}, {"truncate_prompt_tokens": 9})
        )  # fmt: skip
    return fields


def draw_next_messages(rng: random.Random, kind: ApiKind, messages: list[Any]) -> list[Any]:
    """The conversation as its client sends it next."""
    next_messages = list(messages)
    how = rng.random()
    if how < 0.1 and next_messages:
        del next_messages[rng.randrange(len(next_messages)) :]
    elif how < 0.2 and next_messages:
        at = rng.randrange(len(next_messages))
        next_messages[at] = message(rng, kind, at)
    elif how < 0.25 and len(next_messages) > 1:
        a, b = rng.sample(range(len(next_messages)), 2)
        next_messages[a], next_messages[b] = next_messages[b], next_messages[a]
    elif how < 0.3:
        next_messages.append(rng.choice((None, 3, "text", {}, {"role": "user"}, {"content": 5})))
        return next_messages
    return [*next_messages, *(message(rng, kind, len(next_messages) + i) for i in range(rng.randint(0, 4)))]


def draw_agent_turn(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """A question, and what an agent does about it: thoughts, calls alone or side by side, results, an answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Question {number}? " + text(rng, 40) + "."}]
    thinks = rng.random() < 0.5
    for step in range(rng.choice((0, 0, 1, 2, 5))):
        calls = [
            {"id": f"call{number:02}{step:02}{i}", "type": "function",
             "function": {"name": "look", "arguments": json.dumps({"at": f"{number}.{step}.{i}"})}}
            for i in range(rng.choice((1, 1, 1, 3)))
        ]  # fmt: skip
        content = rng.choice((None, "", "I look.", text(rng, 30)))
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        if thinks and rng.random() < 0.7:
            messages[-1]["reasoning_content"] = "Thought. " + text(rng, 20)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "Result. " + text(rng, rng.choice((3, 300)))}
            for call in calls
        ]
    answer: dict[str, Any] = {"role": "assistant", "content": f"Answer {number}. " + text(rng, 200)}
    if thinks and rng.random() < 0.5:
        answer["reasoning_content"] = "Last thought. " + text(rng, 20)
    elif thinks and rng.random() < 0.5:
        answer["content"] = f"<think>\nhm {text(rng, 9)}\n</think>\n\n" + answer["content"]
    return [*messages, answer]


def long_talk(turns: int, mark: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{mark}{i} " + "word and word. " * 200} for i in range(turns)]
