"""OpenAI's Responses: what is refused and with which words, and the chats that bodies stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.chat_completions import ChatRequest
from prompts.errors import RequestError
from prompts.responses import (
    ClientTool,
    convert_to_chat,
    find_item_references,
    find_skipped_item_types,
    get_response_id_of_item,
    make_client_tools,
    make_item_id,
    parse_responses_request,
)
from prompts.routing import convert_source_to_chat, parse_routing


def chat(input_items: Any = "hi", before: Any = None, **body: Any) -> dict[str, Any]:
    return convert_to_chat(parse_responses_request(json.dumps({"input": input_items, **body}).encode()), before)


def message_item(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def call(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **fields}


def reasoning_item(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


PATCH = {"type": "custom", "name": "apply_patch", "description": "d"}
NAMESPACE = {
    "type": "namespace", "name": "fs",
    "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "edit"}, {"type": "web_search"}],
}  # fmt: skip


def test_thoughts_words_and_calls_are_one_message_again() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        reasoning_item("hm"), message_item("I call"), call(1), call(2, namespace="n"),
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "g", "input": "\u00e9"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "s"}]},
        message_item("one"), message_item("two"),
    ]  # fmt: skip
    chat_result = chat(items, instructions="rules")["messages"]
    calls = [("c1", "f", "{}"), ("c2", "n__f", "{}")]
    assert chat_result[:2] == [{"role": "system", "content": "rules"}, {"role": "user", "content": items[0]["content"]}]
    assert chat_result[2]["reasoning"] == "hm"
    assert chat_result[2]["content"] == "I call"
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in chat_result[2]["tool_calls"]] == calls
    assert chat_result[3] == {"role": "tool", "content": "r", "tool_call_id": "c1"}
    assert chat_result[4]["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"input": "\u00e9"}'}
    assert chat_result[5]["content"] == [{"type": "input_text", "text": "s"}]
    assert chat_result[6:] == [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_all_parts_of_an_assistants_item_are_kept() -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    thoughts = [{"type": "summary_text", "text": "x"}, {"type": "summary_text", "text": "y"}]
    items = [
        {"type": "reasoning", "summary": thoughts}, {"role": "assistant", "content": parts},
        {"role": "assistant", "content": parts[:1]},
    ]  # fmt: skip
    chat_result = chat(items)["messages"]
    assert chat_result == [
        {"role": "assistant", "reasoning": "x\ny", "content": parts}, {"role": "assistant", "content": "a"}
    ]  # fmt: skip


def test_what_a_server_did_is_told_as_text_or_skipped() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "id": "ts_1", "arguments": {"goal": "y"}},
        message_item("Found."),
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        {"type": "image_generation_call", "id": "ig_1", "result": "iVBO"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "a_type_of_tomorrow", "words": "z", "screenshot": "data:image/png;base64,iVBO"},
    ]
    search = (
        '[web_search_call: {"action":{"type":"search","query":"x"}}]\n[tool_search_call: {"arguments":{"goal":"y"}}]'
    )
    request = parse_responses_request(json.dumps({"input": items}).encode())
    assert convert_to_chat(request)["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "output_text", "text": search}, {"type": "output_text", "text": "Found."}
        ]},
        {"role": "assistant", "content":
            '[local_shell_call: {"call_id":"c","action":{"type":"exec","command":["ls"]}}]'},
        {"role": "user", "content": '[local_shell_call_output: {"output":"a.txt"}]'},
        {"role": "assistant", "content": '[a_type_of_tomorrow: {"words":"z"}]'},
    ]  # fmt: skip
    assert find_skipped_item_types(request) == ["compaction", "image_generation_call"]


def test_items_that_are_only_named_are_brought() -> None:
    name = make_item_id("rs_", "resp_0af", 2)
    assert get_response_id_of_item(name) == "resp_0af"
    items = [{"role": "user", "content": "q"}, {"type": "item_reference", "id": name}, message_item("a")]
    body = json.dumps({"input": items}).encode()
    request = parse_responses_request(body)
    assert find_item_references(request) == {name: "input[1].id"}
    chat_result = convert_to_chat(request, items={name: reasoning_item("hm")})["messages"]
    assert chat_result[1] == {"role": "assistant", "reasoning": "hm", "content": "a"}
    assert parse_routing("/v1/responses", body).stored_response_id == "resp_0af"
    with pytest.raises(RequestError, match="only the worker knows"):
        convert_source_to_chat(parse_routing("/v1/responses", body), None)


def test_tools_that_may_be_called_are_named_as_models_know_them() -> None:
    tools = [NAMESPACE, PATCH, {"type": "function", "name": "f"}, {"type": "web_search"}]
    tools_by_name = make_client_tools(tools)
    assert tools_by_name == {
        "fs__read": ClientTool("read", "fs"), "fs__edit": ClientTool("edit", "fs", True),
        "apply_patch": ClientTool("apply_patch", None, True), "f": ClientTool("f"),
    }  # fmt: skip
    assert [tool["function"]["name"] for tool in chat(tools=tools)["tools"]] == list(tools_by_name)
    allowed_tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "apply_patch"},
               {"type": "function", "namespace": "fs", "name": "read"}, {"type": "web_search"}]  # fmt: skip
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed_tools}
    chat_result = chat(tools=tools, tool_choice=choice)["tool_choice"]
    names = [tool["function"]["name"] for tool in chat_result["allowed_tools"]["tools"]]
    assert (chat_result["type"], chat_result["allowed_tools"]["mode"]) == ("allowed_tools", "required")
    assert names == ["f", "apply_patch", "fs__read"]
    bare = chat(tools=tools, tool_choice={"type": "custom", "name": "edit"})["tool_choice"]
    assert bare == {"type": "function", "function": {"name": "fs__edit"}}


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
    tool_choice = chat(tools=tools, tool_choice={"type": "function", "name": "a"})["tool_choice"]
    assert tool_choice == {"type": "function", "function": {"name": "a"}}


def test_tools_come_in_the_input_too() -> None:
    """Codex sends them so for OpenAI's newer models; the model was shown their JSON as a text of its own."""
    added = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE]}
    user = {"role": "user", "content": "q"}
    assert chat([added, user], tools=[PATCH]) == chat([user], tools=[PATCH, NAMESPACE])
    choice = {"type": "function", "namespace": "fs", "name": "read"}
    assert chat([added, user], tool_choice=choice)["tool_choice"]["function"]["name"] == "fs__read"
    with pytest.raises(RequestError, match=r"^input\[0\]\.tools: got null, expected an array of tools"):
        chat([{"type": "additional_tools", "role": "developer"}, user])


def test_other_fields() -> None:
    assert chat([message_item("half", status="incomplete")])["continue_final_message"] is True
    assert chat([message_item("whole", status="completed")])["continue_final_message"] is False
    assert chat(truncation="auto")["truncate_prompt_tokens"] == -1
    assert chat(reasoning={"effort": "high"})["reasoning_effort"] == "high"
    form = chat(text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}})["response_format"]
    assert form.json_schema.schema == {"type": "object"}
    assert chat(max_output_tokens=7)["max_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_items": 3}, "input: got 3"),
        ({"input_items": ["x"]}, "input[0]"),
        ({"input_items": [{"type": "item_reference", "id": "x"}]}, "input[0].id: no such item is here"),
        ({"input_items": []}, "input: got an empty array"),
        ({"input_items": [{"content": "x"}]}, "input[0].role: got null"),
        ({"input_items": [{"role": "user", "content": [{"type": "odd"}]}]}, 'input[0].content[0].type: got "odd"'),
        (
            {"input_items": ["a", {"type": "function_call_output", "call_id": "c", "output": [3]}][1:]},
            "input[0].output[0]: got 3",
        ),
        (
            {"input_items": [message_item("x"), {**message_item("x"), "content": [{"type": "output_text"}] * 2}]},
            "input[1].content[0].text",
        ),
        ({"input_items": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name: got null"),
        ({"input_items": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax: got"),
        ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition: got"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.name: got"),
        ({"tools": [PATCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type: got"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": []}}, "tool_choice.name: got an empty array"),
        ({"input": [{"type": "item_reference", "id": []}]}, "input[0].id: no such item"),
        ({"tools": [PATCH], "tool_choice": {"type": "allowed_tools", "tools": "x"}}, "tool_choice.tools: got"),
        (
            {"tools": [PATCH], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "custom", "name": "x"}]}},
            'tool_choice.tools[0].name: got "x", expected one of the tools: apply_patch',
        ),
        (
            {"tools": [PATCH], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "web_search"}]}},
            "no server here runs others",
        ),
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
    with pytest.raises(RequestError) as error_info:
        chat(**fields)
    assert words in error_info.value.message


KINDS = [
    "message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output", "x",
    "web_search_call", "item_reference", "additional_tools",
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
        "status": VALUES, "input": VALUES, "namespace": VALUES, "tools": VALUES,
    },
)  # fmt: skip


@given(items=st.lists(ITEMS, max_size=5), tools=VALUES)
def test_any_body_is_a_chat_or_an_error_of_the_clients(items: Any, tools: Any) -> None:
    try:
        chat_result = ChatRequest(**chat(items, tools=tools))
    except RequestError:
        return
    assert all(isinstance(message["role"], str) for message in chat_result.messages)
    assert len(chat_result.messages) <= len(items)
