"""OpenAI's Responses API: checks of bodies, and their conversion to chats by vLLM's rules.

Bodies that no worker takes are refused, and unknown fields are ignored. Stored responses and items to which a body
refers are given by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from prompts.chat_completions import (
    COUNT_MAX,
    JsonSchemaFormat,
    LogprobCount,
    Message,
    ResponseFormat,
    SharedRequest,
    check_part,
    decode_json,
    make_function_tool,
)
from prompts.errors import bad_value, field_error
from prompts.provider_history import format_hosted_call

Item = dict[str, Any]
ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]
ITEM_ID_CHARS_MAX = 256
LOGPROBS_INCLUDED = "message.output_text.logprobs"
"""Name in `include` of the logprobs of the answer's text."""
CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters that a model is shown for a tool which takes free text."""


class Reasoning(Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextFormat(JsonSchemaFormat, frozen=True):
    schema: dict[str, Any] | None = None
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SharedRequest, kw_only=True, frozen=True):
    """Body of a request to `/v1/responses`, OpenAI's Responses API."""

    input: str | list[Item]
    """The user's text, or the items of the conversation: messages, tool calls and their results."""
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    tools: list[Item] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None
    include: list[str] | None = None
    """Parts of the answer that are left out otherwise. Only `LOGPROBS_INCLUDED` has an effect."""
    top_logprobs: LogprobCount | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt: Any = None
    conversation: Any = None
    # Fields that vLLM adds
    chat_template_kwargs: dict[str, Any] | None = None

    def list_tools(self) -> list[Item]:
        """Return the tools of `tools`, and those of the input's `additional_tools` items, as Codex sends them."""
        items = self.input if isinstance(self.input, list) else []
        tool_lists = [self.tools or [], *(item["tools"] for item in items if item.get("type") == "additional_tools")]
        return [tool for tools in tool_lists for tool in tools]


_CHAT_FIELDS = (*SharedRequest.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs")
"""Fields that mean the same in a chat."""
_request_decoder = msgspec.json.Decoder(ResponsesRequest)


def parse_responses_request(data: bytes) -> ResponsesRequest:
    """Parse a body of `/v1/responses`. Raises RequestError, which names the wrong field, if it cannot be served."""
    request = decode_json(_request_decoder, data)
    if request.prompt is not None:
        raise field_error("prompt", "templates of prompts are not supported")
    if request.conversation is not None:
        raise field_error("conversation", "none is kept here; expected previous_response_id, or all of it in input")
    for index, tool in enumerate(request.tools or ()):
        _check_tool(f"tools[{index}]", tool)
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == "additional_tools":
            _check_tool(f"input[{index}]", item)
    tool_choice = request.tool_choice
    if (isinstance(tool_choice, dict) or tool_choice == "required") and not request.list_tools():
        raise bad_value("tool_choice", tool_choice, "tools beside it")
    return request


def _check_tool(param: str, tool: Item) -> None:
    """Raise RequestError, which names the field, for a tool that cannot be shown to a model."""
    tool_type = tool.get("type")
    if not isinstance(tool_type, str):
        raise bad_value(f"{param}.type", tool_type, "a string such as function")
    if tool_type in ("function", "custom", "namespace") and not isinstance(tool.get("name"), str):
        raise bad_value(f"{param}.name", tool.get("name"), "a string")
    parameters = tool.get("parameters")
    if tool_type == "function" and parameters is not None and not isinstance(parameters, dict):
        raise bad_value(f"{param}.parameters", parameters, "an object")
    if _has_grammar(tool):
        grammar = tool["format"]
        if grammar.get("syntax") not in ("lark", "regex"):
            raise bad_value(f"{param}.format.syntax", grammar.get("syntax"), '"lark" or "regex"')
        if not isinstance(grammar.get("definition"), str):
            raise bad_value(f"{param}.format.definition", grammar.get("definition"), "a string")
    if tool_type in ("namespace", "additional_tools"):
        inner_tools = tool.get("tools")
        if not isinstance(inner_tools, list) or not all(isinstance(inner_tool, dict) for inner_tool in inner_tools):
            raise bad_value(f"{param}.tools", inner_tools, "an array of tools")
        for tool_index, inner_tool in enumerate(inner_tools):
            _check_tool(f"{param}.tools[{tool_index}]", inner_tool)


def _has_grammar(tool: Item) -> bool:
    """Return whether a tool takes free text that must match a grammar."""
    tool_format = tool.get("format")
    return tool["type"] == "custom" and isinstance(tool_format, dict) and tool_format.get("type") == "grammar"


# Names ----------------------------------------------------------------------------------------------------------------


class ClientTool(Struct, frozen=True):
    """A tool that the client runs. A model is shown one flat name, made of the namespace and the name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether the tool takes free text."""
    syntax: str | None = None
    """Grammar that the free text must match: `lark`, `regex` or none."""
    definition: str = ""


def make_client_tools(tools: list[Item]) -> dict[str, ClientTool]:
    """Return the tools that the client runs, by the names that a model is shown."""
    client_tools: dict[str, ClientTool] = {}
    for namespace, tool in _iter_client_tools(tools):
        grammar = tool["format"] if _has_grammar(tool) else {}
        client_tools[_make_flat_name(namespace, tool["name"])] = ClientTool(
            tool["name"], namespace, tool["type"] == "custom", grammar.get("syntax"), grammar.get("definition", "")
        )
    return client_tools


def _iter_client_tools(tools: list[Item]) -> Iterator[tuple[str | None, Item]]:
    """Yield the namespace, or None, and the definition of each tool that the client runs."""
    for tool in tools:
        is_namespace = tool["type"] == "namespace"
        namespace = tool["name"] if is_namespace else None
        for inner_tool in tool["tools"] if is_namespace else [tool]:
            if inner_tool["type"] in ("function", "custom"):
                yield namespace, inner_tool


def _make_flat_name(namespace: Any, name: Any) -> Any:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


_ITEM_NUMBER_CHARS = 4


def make_item_id(prefix: str, response_id: str, number: int) -> str:
    """Make the id of an item of a response, which contains the id of the response."""
    return f"{prefix}{response_id.partition('_')[2]}{number:0{_ITEM_NUMBER_CHARS}x}"


def get_response_id_of_item(item_id: str) -> str:
    """Return the id of the response in the id of an item that `make_item_id` made."""
    return "resp_" + item_id.partition("_")[2][:-_ITEM_NUMBER_CHARS]


def find_item_references(request: ResponsesRequest) -> dict[str, str]:
    """Return the ids of items that a body refers to, and the paths of the references. Raises RequestError."""
    params_by_id: dict[str, str] = {}
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == "item_reference":
            referenced_id = item.get("id")
            if not isinstance(referenced_id, str) or len(referenced_id) > ITEM_ID_CHARS_MAX:
                raise bad_value(f"input[{index}].id", referenced_id, "the name of an item")
            params_by_id.setdefault(referenced_id, f"input[{index}].id")
    return params_by_id


# The chat -------------------------------------------------------------------------------------------------------------


def convert_to_chat(
    request: ResponsesRequest, previous_messages: list[Message] | None = None, items: Mapping[str, Item] | None = None
) -> dict[str, Any]:
    """Convert a body of the Responses API to the fields of an OpenAI chat request. Raises RequestError.

    `previous_messages`: those of the stored response that the body continues, its answer included. `items`: the stored
    items that the body names, by their ids.
    """
    tools = request.list_tools()
    has_logprobs = LOGPROBS_INCLUDED in (request.include or ())
    fields: dict[str, Any] = {
        "messages": _convert_messages(request, previous_messages or [], items or {}),
        "logprobs": True if has_logprobs else None,
        "top_logprobs": request.top_logprobs if has_logprobs else None,
        "tools": _convert_tools(tools) if tools else None,
        "tool_choice": _convert_tool_choice(request.tool_choice, tools),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "continue_final_message": _continues_last_message(request.input),
        "max_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "response_format": _convert_format(request.text.format if request.text is not None else None),
    }
    return fields | {name: getattr(request, name) for name in _CHAT_FIELDS}


def _convert_messages(
    request: ResponsesRequest, previous_messages: list[Message], items: Mapping[str, Item]
) -> list[Message]:
    """Return the chat's messages: the instructions, those of stored responses, and the input. Raises RequestError."""
    messages: list[Message] = [{"role": "system", "content": request.instructions}] if request.instructions else []
    messages += [message for message in previous_messages if message.get("role") != "system"]
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        history = _ChatHistory(messages)
        for index, item in enumerate(request.input):
            history.add(f"input[{index}]", _resolve_reference(f"input[{index}]", item, items))
    if not messages:
        raise bad_value("input", request.input, "at least one item that says something")
    return messages


def _resolve_reference(param: str, item: Item, items: Mapping[str, Item]) -> Item:
    """Return the stored item that an `item_reference` names; any other item as it is. Raises RequestError."""
    if item.get("type") != "item_reference":
        return item
    referenced_id = item.get("id")
    referenced_item = items.get(referenced_id) if isinstance(referenced_id, str) else None
    if referenced_item is None:
        raise field_error(f"{param}.id", "no such item is here")
    return referenced_item


def _continues_last_message(request_input: str | list[Item]) -> bool:
    """Whether the last message is an unfinished one, to be continued."""
    last = request_input[-1] if isinstance(request_input, list) and request_input else {}
    return last.get("type", "message") == "message" and last.get("status") in ("in_progress", "incomplete")


def find_skipped_item_types(request: ResponsesRequest) -> list[str]:
    """Return the types of the items that a model is not shown."""
    items = request.input if isinstance(request.input, list) else []
    return sorted({str(item["type"]) for item in items if _is_hosted_item(item) and _format_hosted_item(item) is None})


class _ChatHistory:
    """Appends the items of a body to the messages of a chat.

    The Responses API has an item each for the reasoning, the text and the calls of an assistant. Such items in a row
    become one message. The tools that a provider's servers ran ("hosted calls") become text.
    """

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._ends_with_hosted_call = False
        """Whether the last message has only calls of a server's tools, so that the assistant's text is added to it."""

    def add(self, param: str, item: Item) -> None:
        """Append an item of the Responses API to the chat, as a new message or as a part of the assistant's last one.

        `param`: path of the item in the body, for error messages. Raises RequestError.
        """
        item_type = item.get("type")
        if item_type == "additional_tools":
            return  # they are no part of the history: `list_tools` has them
        if item_type == "function_call":
            self._add_call(param, item, item.get("arguments"))
        elif item_type == "custom_tool_call":
            self._add_call(param, item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
        elif item_type == "reasoning":
            reasoning = _read_reasoning_text(item)
            is_only_encrypted = not reasoning and item.get("encrypted_content")  # for the provider's servers
            if not is_only_encrypted:
                self._set_assistant_field("reasoning", reasoning)
        elif item_type in ("function_call_output", "custom_tool_call_output"):
            content = _read_content(f"{param}.output", item.get("output"))
            self._append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif _is_hosted_item(item):
            self._add_hosted_call(str(item_type), item)
        else:
            self._add_message(param, item)

    def _add_message(self, param: str, item: Item) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or not role:
            raise bad_value(f"{param}.role", role, "a string such as user or assistant, or an item with a type")
        if role == "assistant" and content is not None:
            self._set_assistant_field("content", _read_assistant_content(f"{param}.content", content))
        else:
            self._append({"role": role, "content": _read_content(f"{param}.content", content)})

    def _append(self, message: Message) -> None:
        self._messages.append(message)
        self._ends_with_hosted_call = False

    def _add_call(self, param: str, item: Item, arguments: Any) -> None:
        name = _make_flat_name(item.get("namespace"), item.get("name"))
        for field, value in (("call_id", item.get("call_id")), ("name", item.get("name")), ("arguments", arguments)):
            if not isinstance(value, str):
                raise bad_value(f"{param}.{field}", value, "a string")
        tool_call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages[-1].setdefault("tool_calls", []).append(tool_call)
            self._ends_with_hosted_call = False
        else:
            self._append({"role": "assistant", "tool_calls": [tool_call]})

    def _set_assistant_field(self, field: str, value: str | list[Any]) -> None:
        last_message = self._messages[-1] if self._messages else {}
        if self._ends_with_hosted_call and field == "content":
            parts = [{"type": "output_text", "text": value}] if isinstance(value, str) else value
            last_message["content"] = [{"type": "output_text", "text": last_message["content"]}, *parts]
            self._ends_with_hosted_call = False
        elif last_message.get("role") == "assistant" and last_message.get(field) is None:
            last_message[field] = value
        else:
            self._append({"role": "assistant", field: value})

    def _add_hosted_call(self, item_type: str, item: Item) -> None:
        """Append the call of a tool that a provider's servers ran, as text of the assistant.

        A client's output for such a call becomes text of the user. The texts of several calls in a row are joined.
        """
        text = _format_hosted_item(item)
        if text is None:
            return
        if item_type.endswith(("_output", "_response")):
            self._append({"role": "user", "content": text})
            return
        last_message = self._messages[-1] if self._messages else {}
        has_answer = last_message.get("content") is not None or "tool_calls" in last_message
        if self._ends_with_hosted_call:
            last_message["content"] += "\n" + text
        elif last_message.get("role") == "assistant" and not has_answer:
            last_message["content"] = text
        else:
            self._append({"role": "assistant", "content": text})
        self._ends_with_hosted_call = True


_READ_TYPES = (
    "message", "function_call", "custom_tool_call", "reasoning", "function_call_output", "custom_tool_call_output",
    "item_reference", "additional_tools",
)  # fmt: skip


def _is_hosted_item(item: Item) -> bool:
    """Whether an item has a type that only its provider's servers know, such as `web_search_call` or `compaction`."""
    item_type = item.get("type")
    return isinstance(item_type, str) and item_type not in _READ_TYPES


def _format_hosted_item(item: Item) -> str | None:
    unread_fields = (
        ("type", "id", "status", "result") if item["type"] == "image_generation_call" else ("type", "id", "status")
    )
    return format_hosted_call(item["type"], {name: value for name, value in item.items() if name not in unread_fields})


def _read_reasoning_text(item: Item) -> str:
    for field in ("content", "summary"):
        parts = item.get(field)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if texts and isinstance(texts[0], str):
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _read_assistant_content(param: str, content: Any) -> str | list[Any]:
    """Return the content of an assistant's message: its text if there is one part, else the parts."""
    parts = _read_content(param, content) or ""
    if len(parts) == 1 and isinstance(parts[0], dict) and isinstance(parts[0].get("text"), str):
        return str(parts[0]["text"])
    return parts


def _read_content(param: str, content: Any) -> str | list[Any] | None:
    """Return a text, a list of parts, or None as it is. Raises RequestError for any other content."""
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise bad_value(param, content, "a string or an array of parts")
    for part_index, part in enumerate(content or ()):
        check_part(f"{param}[{part_index}]", part)
    return content


def _convert_tool_choice(choice: str | Item | None, tools: list[Item]) -> Any:
    """Return the choice of tools as chats have it; None if there are no tools. Raises RequestError."""
    if not tools:
        return None
    if not isinstance(choice, dict):
        return choice or "auto"
    convert = _convert_allowed_tools if choice.get("type") == "allowed_tools" else _convert_named_tool
    return convert("tool_choice", choice, make_client_tools(tools))


def _convert_allowed_tools(param: str, choice: Item, tools: Mapping[str, ClientTool]) -> Message:
    """Convert a choice among some of the tools (`allowed_tools`) to the format of chat completions.

    Tools that only a provider's servers run are left out. Raises RequestError if only such tools are listed.
    """
    allowed_choice = choice.get("allowed_tools", choice)  # OpenAI's clients send it flat or nested
    listed_tools = allowed_choice.get("tools") if isinstance(allowed_choice, dict) else None
    if not isinstance(listed_tools, list) or not all(isinstance(tool, dict) for tool in listed_tools):
        raise bad_value(f"{param}.tools", listed_tools, "an array of tools")
    chat_tools = [
        _convert_named_tool(f"{param}.tools[{index}]", tool, tools)
        for index, tool in enumerate(listed_tools)
        if tool.get("type") in ("function", "custom")
    ]
    if listed_tools and not chat_tools:
        expectation = "at least one function or custom tool: no server here runs others"
        raise bad_value(f"{param}.tools", listed_tools, expectation)
    return {"type": "allowed_tools", "allowed_tools": {"mode": allowed_choice.get("mode"), "tools": chat_tools}}


def _convert_named_tool(param: str, choice: Item, tools: Mapping[str, ClientTool]) -> Message:
    """Convert a choice of one tool to the format of chat completions. Raises RequestError for an unknown tool.

    `tools`: the client's tools by flat name, which is made of namespace and name. The choice may lack the namespace if
    only one tool has the name. `param`: path of the choice in the body, for error messages.
    """
    tool_type, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    if tool_type not in ("function", "custom"):
        expectation = '"function", "custom" or "allowed_tools": no server here runs other tools'
        raise bad_value(f"{param}.type", tool_type, expectation)
    if not isinstance(name, str):
        raise bad_value(f"{param}.name", name, "a string")
    flat_name = _make_flat_name(namespace, name)
    if flat_name not in tools and namespace is None:
        matching_names = [flat for flat, tool in tools.items() if tool.name == name]
        flat_name = matching_names[0] if len(matching_names) == 1 else flat_name
    if flat_name not in tools:
        raise bad_value(f"{param}.name", name, f"one of the tools: {', '.join(tools)}")
    return {"type": "function", "function": {"name": flat_name}}


def _convert_tools(tools: list[Item]) -> list[Message]:
    """Return the tools that a model is shown, as chats have them."""
    chat_tools: list[Message] = []
    for namespace, tool in _iter_client_tools(tools):
        parameters = CUSTOM_TOOL_SCHEMA if tool["type"] == "custom" else tool.get("parameters")
        name = _make_flat_name(namespace, tool["name"])
        options = {option: tool.get(option) for option in ("strict", "defer_loading")}
        chat_tools.append(make_function_tool(name, tool.get("description"), parameters, **options))
    return chat_tools


def _convert_format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=text_format)
