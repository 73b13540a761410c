"""OpenAI's Responses: what is refused and with which words, and the chats that bodies stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import RequestError
from prompts.responses import as_chat, parse_response
from prompts.schemas import ChatRequest


def chat(given: Any = "hi", before: Any = None, **body: Any) -> dict[str, Any]:
    return as_chat(parse_response(json.dumps({"input": given, **body}).encode()), before)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **more}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_thoughts_words_and_calls_are_one_message_again() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        thought("hm"), said("I call"), call(1), call(2, namespace="n"),
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "g", "input": "\u00e9"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "s"}]},
        said("one"), said("two"),
    ]  # fmt: skip
    made = chat(items, instructions="rules")["messages"]
    calls = [("c1", "f", "{}"), ("c2", "n__f", "{}")]
    assert made[:2] == [{"role": "system", "content": "rules"}, {"role": "user", "content": items[0]["content"]}]
    assert made[2]["reasoning"] == "hm"
    assert made[2]["content"] == "I call"
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in made[2]["tool_calls"]] == calls
    assert made[3] == {"role": "tool", "content": "r", "tool_call_id": "c1"}
    assert made[4]["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"input": "\u00e9"}'}
    assert made[5]["content"] == [{"type": "input_text", "text": "s"}]
    assert made[6:] == [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_what_was_before_comes_without_its_instructions() -> None:
    before = [{"role": "system", "content": "old"}, {"role": "user", "content": "q"}]
    roles = [(m["role"], m["content"]) for m in chat("next", before, instructions="new")["messages"]]
    assert roles == [("system", "new"), ("user", "q"), ("user", "next")]


def test_tools_that_a_model_is_shown() -> None:
    inner = {"type": "function", "name": "a", "parameters": {"type": "object"}, "strict": None}
    tools = [
        {**inner, "strict": True, "description": "d"}, {"type": "namespace", "name": "n", "tools": [inner]},
        {"type": "custom", "name": "c"}, {"type": "web_search"},
    ]  # fmt: skip
    fields = chat(tools=tools)
    functions = [tool["function"] for tool in fields["tools"]]
    assert [function["name"] for function in functions] == ["a", "n__a", "c"]
    assert functions[0] == {"name": "a", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert list(functions[2]["parameters"]["properties"]) == ["input"]
    assert fields["tool_choice"] == "auto"
    assert chat(tool_choice="none")["tool_choice"] is None
    named = chat(tools=tools, tool_choice={"type": "function", "name": "a"})["tool_choice"]
    assert named == {"type": "function", "function": {"name": "a"}}


def test_other_fields() -> None:
    assert chat([said("half", status="incomplete")])["continue_final_message"] is True
    assert chat([said("whole", status="completed")])["continue_final_message"] is False
    assert chat(truncation="auto")["truncate_prompt_tokens"] == -1
    assert chat(reasoning={"effort": "high"})["reasoning_effort"] == "high"
    form = chat(text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}})["response_format"]
    assert form.json_schema.schema == {"type": "object"}
    assert chat(max_output_tokens=7)["max_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"given": 3}, "input: got 3"),
        ({"given": ["x"]}, "input[0]"),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"given": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name: got null"),
        ({"given": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"given": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"prompt": {"id": "p"}}, "prompt: templates"),
        ({"conversation": "conv_1"}, "conversation: none is kept here"),
        ({"conversation": {"id": "conv_1"}}, "conversation: none is kept here"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens: got 0"),
        ({"reasoning": {"effort": "huge"}}, 'reasoning.effort: got "huge", expected one of'),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat(**fields)
    assert words in raised.value.message


KINDS = [
    "message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output", "x"
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=4) | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "name"]), inner),
    max_leaves=6,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS), "role": st.sampled_from(["user", "assistant", "system", "developer"]) | VALUES,
        "content": VALUES, "summary": VALUES, "output": VALUES, "arguments": VALUES, "name": VALUES, "call_id": VALUES,
        "status": VALUES, "input": VALUES, "namespace": VALUES,
    },
)  # fmt: skip


@given(items=st.lists(ITEMS, max_size=5), tools=VALUES)
def test_any_body_is_a_chat_or_an_error_of_the_clients(items: Any, tools: Any) -> None:
    try:
        made = ChatRequest(**chat(items, tools=tools))
    except RequestError:
        return
    assert all(isinstance(message["role"], str) for message in made.messages)
    assert len(made.messages) <= len(items)
