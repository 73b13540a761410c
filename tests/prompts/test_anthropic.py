"""Anthropic's bodies: what is refused and with which words, and the chats that they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.anthropic import convert_to_chat, find_media, parse_count, parse_messages
from prompts.chat_completions import ChatRequest
from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import has_media, parse_routing

EARLY = ChatTemplate("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}"
                     "{% endif %}{{ m.content }}{% endfor %}")  # fmt: skip
ANYWHERE = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ reasoning_effort }}")
TURNS_CLOSED = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
                            "{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip
FORM = {"type": "json_schema", "schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cch=1;"


def chat(template: ChatTemplate = ANYWHERE, **body: Any) -> dict[str, Any]:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}
    return convert_to_chat(parse_messages(json.dumps(body).encode()), template)


def test_a_message_of_no_tokens_counts_as_one_of_one_token() -> None:
    """The step that reads the prompt draws a token. To a router, an answer of 0 tokens has no limit."""
    body = {"max_tokens": 0, "messages": [{"role": "user", "content": "hi"}]}
    assert parse_routing("/v1/messages", json.dumps(body).encode()).output_tokens_max == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"output_format": FORM}, "output_format"),
        ({"output_config": {"format": FORM}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice.type"),
    ],
)
def test_an_answer_of_no_tokens_cannot_be_streamed_or_have_a_form(fields: dict[str, Any], param: str) -> None:
    """As at Anthropic, where `max_tokens: 0` only caches the prompt."""
    with pytest.raises(RequestError, match="expected it only with max_tokens of at least 1") as error_info:
        chat(max_tokens=0, **fields)
    assert error_info.value.param == param
    assert chat(**fields)["max_tokens"] == 9
    assert chat(max_tokens=0, stream=False, tool_choice={"type": "auto"})["max_tokens"] == 0


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_results_of_tools_come_before_the_words_that_came_with_them() -> None:
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {"b": 1, "a": [2.0, None]}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("one"), text("two")]}
    thinking_block = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turns = [
        {"role": "assistant", "content": [thinking_block, text("I read"), use, {**thinking_block, "thinking": "!"}]},
        {"role": "user", "content": [text("and"), result, {"type": "redacted_thinking", "data": "?"}]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": []},
    ]
    call = {"id": "t", "type": "function", "function": {"name": "read", "arguments": {"b": 1, "a": [2.0, None]}}}
    tool_message = {"role": "tool", "tool_call_id": "t", "content": "one\ntwo"}
    assert chat(messages=turns)["messages"] == [
        {"role": "assistant", "reasoning": "hm!", "tool_calls": [call], "content": "I read"},
        tool_message, {"role": "user", "content": "and"}, tool_message, {"role": "assistant"},
    ]  # fmt: skip


def test_images_are_parts_and_those_of_results_the_users() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), image]}
    chat_messages = chat(messages=[{"role": "user", "content": [result, text("a"), image]}])["messages"]
    image_part = {"type": "image_url", "image_url": {}}
    assert chat_messages == [
        {"role": "tool", "tool_call_id": "t", "content": "seen"}, {"role": "user", "content": [image_part]},
        {"role": "user", "content": [text("a"), image_part]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected_messages"),
    [
        (ANYWHERE, [("system", "rules"), ("user", "hi"), ("system", "now")]),
        (EARLY, [("system", "rulesnow"), ("user", "hi")]),
    ],
)
def test_system_texts_stand_where_the_template_takes_them(template: ChatTemplate, expected_messages: list[Any]) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [text(BILLING), text("now")]},
        {"role": "system", "content": BILLING},
    ]
    fields = chat(template, system=[text(BILLING), text("rules")], messages=turns)
    assert [(m["role"], m["content"]) for m in fields["messages"]] == expected_messages


def test_a_system_text_that_begins_with_the_billing_line_is_left_to_rendering() -> None:
    assert chat(system=BILLING + "\nrules")["messages"][0] == {"role": "system", "content": BILLING + "\nrules"}


def test_tools_have_types_and_can_change() -> None:
    tools = [{"name": n, "input_schema": {"x": 1}} for n in ("a", "b")]
    fields = chat(tools=tools)
    assert fields["tool_choice"] == "auto"
    function = {"name": "a", "description": None, "parameters": {"x": 1, "type": "object"}}
    assert fields["tools"][0] == {"type": "function", "function": function}
    new = {"type": "tool_definition", "definition": {"name": "c", "input_schema": {"type": "object"}, "strict": True}}
    changes = [
        {"type": "tool_addition", "tool": new},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}},
    ]
    turns = [{"role": "user", "content": "x"}, {"role": "system", "content": changes}]
    names = [tool["function"]["name"] for tool in chat(tools=tools, messages=turns)["tools"]]
    assert names == ["b", "c"]
    with pytest.raises(RequestError, match="'a', which is not in tools"):
        chat(messages=turns)


def test_choices_efforts_and_formats() -> None:
    named_choice = {"type": "function", "function": {"name": "a"}}
    for choice, expected_choice in (("any", "required"), ("none", "none"), ("auto", "auto"), ("tool", named_choice)):
        assert chat(tool_choice={"type": choice, "name": "a"})["tool_choice"] == expected_choice
    assert chat(tool_choice={"type": "auto", "disable_parallel_tool_use": True})["parallel_tool_calls"] is False
    assert chat(thinking={"type": "disabled"})["reasoning_effort"] == "none"
    assert chat(EARLY, thinking={"type": "disabled"})["reasoning_effort"] == "low"  # it renders no effort at all
    for thinking_type in ("adaptive", "between_tools"):
        fields = {"output_config": {"effort": "max"}, "thinking": {"type": thinking_type}}
        assert chat(**fields)["reasoning_effort"] == "max"
    for fields in ({"output_config": {"format": FORM}}, {"output_format": FORM}):
        assert chat(**fields)["response_format"].json_schema.schema == {"type": "object"}


SAID = {"role": "assistant", "content": "1, 2,"}


@pytest.mark.parametrize(
    ("last", "goes_on"),
    [
        ([SAID], True),
        ([{"role": "assistant", "content": [text("1,"), text(" 2,")]}], True),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("1,")]}], True),
        ([SAID, {"role": "user", "content": "go"}], False),
        ([{"role": "assistant", "content": ""}], False),
        ([{"role": "assistant", "content": [text("I read"), {"type": "tool_use", "id": "t", "name": "read"}]}], False),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}], False),
    ],
)
def test_a_last_text_of_the_assistant_is_the_beginning_of_the_answer(last: Any, goes_on: bool) -> None:
    fields = chat(messages=[{"role": "user", "content": "Count"}, *last])
    assert fields["continue_final_message"] is goes_on
    prompt_text = render_chat(TURNS_CLOSED, ChatRequest(**fields))
    assert prompt_text.endswith(("<assistant>1,", "1, 2,", "1,\n 2,")) is goes_on
    assert (
        prompt_text.endswith("</assistant><assistant>" if last[-1]["role"] == "assistant" else "<assistant>")
        is not goes_on
    )


PLAIN = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "a\nb"}}
PARTS = {"type": "document", "context": "Of May", "source": {"type": "content", "content": [text("x"), text("y")]}}
FOUND = {"type": "search_result", "source": "http://x", "title": "X", "content": [text("one"), text("two")]}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


def test_documents_and_search_results_are_read_wherever_they_stand() -> None:
    texts = ["Notes\na\nb", "Of May\nx\ny", "X\nhttp://x\none\ntwo"]
    turn = {"role": "user", "content": [PLAIN, PARTS, FOUND]}
    assert [part["text"] for part in chat(messages=[turn])["messages"][0]["content"]] == texts
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), PLAIN, PARTS, FOUND]}
    (tool_message,) = chat(messages=[{"role": "user", "content": [result]}])["messages"]
    assert tool_message == {"role": "tool", "tool_call_id": "t", "content": "\n".join(["seen", *texts])}


def test_parts_of_a_result_that_nobody_knows_are_shown_and_not_dropped() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "json", "value": {"a": 1}}]}
    (tool_message,) = chat(messages=[{"role": "user", "content": [result]}])["messages"]
    assert tool_message["content"] == '[json: {"value":{"a":1}}]'


@pytest.mark.parametrize(
    ("block", "medium"),
    [
        (IMAGE, "image"), (PDF, "document"), (PLAIN, None),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "document"),
        ({"type": "document", "source": {"type": "content", "content": [text("x"), IMAGE]}}, "image"),
    ],
)  # fmt: skip
def test_media_are_found_and_named(block: Any, medium: str | None) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), block]}
    for content in ([text("a"), block], [text("a"), result]):
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        request = parse_messages(json.dumps(body).encode())
        assert find_media(request) == (None if medium is None else ("messages[0].content[1]", medium))
        assert has_media(convert_to_chat(request, ANYWHERE)["messages"]) is (medium is not None)


def test_what_a_server_ran_is_told_as_text() -> None:
    page = {"type": "web_search_result", "url": "http://x", "title": "X", "encrypted_content": "EqgfCioIARgB"}
    blocks = [
        text("I search."),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]},
        {"type": "mcp_tool_use", "id": "m", "name": "echo", "server_name": "n", "input": {}},
        {"type": "code_execution_tool_result", "tool_use_id": "c", "content": {"type": "r", "stdout": "4"}},
        {"type": "new_kind_of_tool_result", "content": "words"},
        {"type": "compaction", "content": "In short: x."},
    ]
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "!"},
    ]
    parts = [part["text"] for part in chat(messages=turns)["messages"][1]["content"]]
    assert parts == [
        "I search.", '[server_tool_use: {"name":"web_search","input":{"query":"x"}}]',
        '[web_search_tool_result: {"content":[{"type":"web_search_result","url":"http://x","title":"X"}]}]',
        '[mcp_tool_use: {"name":"echo","input":{}}]',
        '[code_execution_tool_result: {"content":{"type":"r","stdout":"4"}}]',
        '[new_kind_of_tool_result: {"content":"words"}]', "In short: x.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: got an empty array"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages: none of them says anything"),
        ({"max_tokens": -1}, "max_tokens: got -1"),
        ({"messages": [{"role": "bob", "content": ""}]}, 'messages[0].role: got "bob", expected one of assistant, sys'),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 'messages[0].content[0].type: got "x"'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_removal"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]}, "messages[0].content[0].tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: got null"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens: got 2000, expected below"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name: missing"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
            'tools[0].type: got "web_search_20250305", expected an input_schema and a client that runs the tool: Anth',
        ),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "no server here does"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "to be given: the client runs bash_20250124, and",
        ),
        ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers: got an array of 1 items, expected none"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        (
            {"output_format": FORM, "output_config": {"format": FORM}},
            "output_format: expected only without output_config.format",
        ),
        ({"messages": [{"role": "user", "content": [{**PLAIN, "source": "x"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {}}]}]},
            "messages[0].content[0].content: got an object",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as error_info:
        chat(**fields)
    assert words in error_info.value.message
    error = error_info.value.body("/v1/messages")
    assert error == {"type": "error", "error": {"type": "invalid_request_error", "message": error_info.value.message}}


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_client_that_sends_new_turns_alone_is_told_to_send_all(thread: Any) -> None:
    """Anthropic's tool runner sends all turns again, and threads no more, after this code."""
    with pytest.raises(RequestError, match="thread: no conversation is kept here") as error_info:
        chat(thread=thread)
    details = error_info.value.body("/v1/messages")["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}
    assert chat(thread=None)["messages"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.text("ab x-", max_size=9) | st.just("text"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "name", "input", "content", "tool"]), inner, max_size=4)
    ),
    max_leaves=8,
)
KINDS = [
    "text", "image", "document", "search_result", "server_tool_use", "web_fetch_tool_result", "tool_use", "tool_result",
    "tool_reference", "thinking", "tool_addition", "tool_removal",
]  # fmt: skip
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "text": st.text(max_size=5), "thinking": st.text(max_size=5), "content": JSON, "id": st.text(max_size=3),
        "input": st.dictionaries(st.text(max_size=3), JSON, max_size=2), "tool": JSON, "source": JSON,
    },
)  # fmt: skip
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=9) | st.lists(BLOCKS, max_size=3),
    }
)


@given(turns=st.lists(TURNS | JSON, max_size=4), fields=st.dictionaries(st.sampled_from(["system", "tools"]), JSON))
def test_any_body_is_a_chat_or_an_error_of_the_clients(turns: Any, fields: Any) -> None:
    try:
        request = parse_count(json.dumps({"messages": turns, **fields}).encode())
        chats = [ChatRequest(**convert_to_chat(request, template)) for template in (EARLY, ANYWHERE)]
    except RequestError:
        return
    for chat_messages in chats:
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in chat_messages.messages)
