"""OpenAI's Responses: bodies as they are checked, and the chat that one stands for, by vLLM's rules.

`parse_response` refuses what no worker takes; unknown fields pass. `as_chat` gives the fields of the chat that is
rendered: an assistant's message, its thoughts and its calls, which are items of their own, become one message again.
What came before (`previous_response_id`) and what is only named (`item_reference`) is its caller's to bring.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from prompts.errors import RequestError, bad_value
from prompts.history.hosted_tools import hosted_text
from prompts.schemas import (
    COUNT_MAX,
    Count,
    Int64,
    JsonSchemaFormat,
    LogitBias,
    LogprobCount,
    Message,
    MinP,
    Penalty,
    RepetitionPenalty,
    ResponseFormat,
    Salt,
    Stop,
    Stops,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    check_part,
    decode_json,
)

Item = dict[str, Any]
ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]
ITEM_ID_CHARS_MAX = 256
CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What a tool that takes free text is shown as."""


class Reasoning(Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, kw_only=True, frozen=True):
    """A body of `/v1/responses`."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    tools: list[Item] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: LogprobCount | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt: Any = None
    conversation: Any = None
    # vLLM's
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_input_messages: Any = None


_SAMPLED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
    "min_tokens", "priority", "cache_salt", "stream", "parallel_tool_calls", "chat_template_kwargs", "user",
)  # fmt: skip
"""Fields that mean the same in a chat."""
_decoder = msgspec.json.Decoder(ResponsesRequest)


def parse_response(data: bytes) -> ResponsesRequest:
    """Read a body of `/v1/responses`. Raises RequestError that names field, value and expectation."""
    request = decode_json(_decoder, data)
    if request.prompt is not None:
        raise RequestError("prompt: templates of prompts are not supported", param="prompt")
    if request.conversation is not None:
        message = "conversation: none is kept here; expected previous_response_id, or all of it in input"
        raise RequestError(message, param="conversation")
    choice = request.tool_choice
    if not request.tools and (isinstance(choice, dict) or choice == "required"):
        raise RequestError(f"tool_choice: got {_shown(choice)}, expected only together with tools", param="tool_choice")
    for index, tool in enumerate(request.tools or ()):
        _check_tool(f"tools[{index}]", tool)
    return request


def _shown(choice: Any) -> str:
    return "an object" if isinstance(choice, dict) else json.dumps(choice)


def _check_tool(where: str, tool: Item) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise bad_value(f"{where}.type", kind, "a string such as function")
    if kind in ("function", "custom", "namespace") and not isinstance(tool.get("name"), str):
        raise bad_value(f"{where}.name", tool.get("name"), "a string")
    parameters = tool.get("parameters")
    if kind == "function" and parameters is not None and not isinstance(parameters, dict):
        raise bad_value(f"{where}.parameters", parameters, "an object")
    if kind == "custom" and isinstance(tool.get("format"), dict) and tool["format"].get("type") == "grammar":
        _check_grammar(f"{where}.format", tool["format"])
    if kind == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise bad_value(f"{where}.tools", inner, "an array of tools")
        for number, one in enumerate(inner):
            _check_tool(f"{where}.tools[{number}]", one)


def _check_grammar(where: str, form: Item) -> None:
    if form.get("syntax") not in ("lark", "regex"):
        raise bad_value(f"{where}.syntax", form.get("syntax"), '"lark" or "regex"')
    if not isinstance(form.get("definition"), str):
        raise bad_value(f"{where}.definition", form.get("definition"), "a string")


# Names ----------------------------------------------------------------------------------------------------------------


class ShownTool(Struct, frozen=True):
    """A tool as its client calls it; models are shown one name for both."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """It takes free text."""
    syntax: str | None = None
    """`lark` or `regex`, where the text must match a grammar."""
    definition: str = ""


def shown_tools(tools: list[Item] | None) -> dict[str, ShownTool]:
    """Return the tools by the names that a model is shown. No server here runs those of other types."""
    found: dict[str, ShownTool] = {}
    for tool in tools or ():
        if tool["type"] == "namespace":
            for inner in tool["tools"]:
                if inner["type"] in ("function", "custom"):
                    found[_flat(tool["name"], inner["name"])] = _shown_tool(inner, tool["name"])
        elif tool["type"] in ("function", "custom"):
            found[tool["name"]] = _shown_tool(tool, None)
    return found


def _shown_tool(tool: Item, namespace: str | None) -> ShownTool:
    form = tool.get("format")
    if tool["type"] == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        return ShownTool(tool["name"], namespace, True, form["syntax"], form["definition"])
    return ShownTool(tool["name"], namespace, tool["type"] == "custom")


def _flat(namespace: Any, name: Any) -> Any:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


_ITEM_NUMBER_CHARS = 4


def item_id(prefix: str, response_id: str, number: int) -> str:
    """Name an item of a response so that the name tells which response holds it."""
    return f"{prefix}{response_id.partition('_')[2]}{number:0{_ITEM_NUMBER_CHARS}x}"


def response_of(item: str) -> str:
    """Return the name of the response that holds an item, where `item_id` named it."""
    return "resp_" + item.partition("_")[2][:-_ITEM_NUMBER_CHARS]


def references(request: ResponsesRequest) -> dict[str, str]:
    """Return the items that a body only names, and where. Raises RequestError."""
    found: dict[str, str] = {}
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == "item_reference":
            name = item.get("id")
            if not isinstance(name, str) or len(name) > ITEM_ID_CHARS_MAX:
                raise bad_value(f"input[{index}].id", name, "the name of an item")
            found.setdefault(name, f"input[{index}].id")
    return found


# The chat -------------------------------------------------------------------------------------------------------------


def as_chat(
    request: ResponsesRequest, before: list[Message] | None = None, items: Mapping[str, Item] | None = None
) -> dict[str, Any]:
    """Fields of the chat request that this one stands for. `before`: the messages that the response it goes on from was
    made of, and what that one said. `items`: those that it only names. Raises RequestError."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    messages += [message for message in before or () if message.get("role") != "system"]
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        history = _History(messages)
        for index, item in enumerate(request.input):
            if item.get("type") == "item_reference":
                found = (items or {}).get(item.get("id", ""))
                if found is None:
                    raise RequestError(f"input[{index}].id: no such item is here", param=f"input[{index}].id")
                item = found
            history.add(f"input[{index}]", item)
    if not messages:
        raise bad_value("input", request.input, "at least one item that says something")
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": _tools(request.tools) if request.tools else None,
        "tool_choice": _choice(request),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "continue_final_message": _continues(request.input),
        "max_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "stop": request.stop or None,
        "response_format": _format(request.text.format if request.text is not None else None),
    }
    return fields | {name: getattr(request, name) for name in _SAMPLED}


def _continues(given: str | list[Item]) -> bool:
    """Whether the last message is one that its assistant has not finished."""
    last = given[-1] if isinstance(given, list) and given else {}
    return last.get("type", "message") == "message" and last.get("status") in ("in_progress", "incomplete")


def skipped_items(request: ResponsesRequest) -> list[str]:
    """Types of the items of which a model is shown nothing."""
    given = request.input if isinstance(request.input, list) else []
    return sorted({str(item["type"]) for item in given if _is_hosted(item) and _hosted(item) is None})


class _History:
    """Messages made of items: what an assistant thought, said and called is one message again."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._is_hosted = False
        """The last message says only what a server did, and the assistant's own words belong to it."""

    def add(self, where: str, item: Item) -> None:
        """Add a message, or a part of the assistant's last one. Raises RequestError."""
        kind, role = item.get("type"), item.get("role")
        if kind == "function_call":
            self._call(where, item, item.get("arguments"))
        elif kind == "custom_tool_call":
            self._call(where, item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
        elif kind == "reasoning":
            thought = _thought(item)
            if thought or not item.get("encrypted_content"):
                self._say("reasoning", thought)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            content = output if isinstance(output, str) else _parts(f"{where}.output", output)
            self._append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif _is_hosted(item):
            self._host(str(kind), item)
        elif not isinstance(role, str) or not role:
            raise bad_value(f"{where}.role", role, "a string such as user or assistant, or an item with a type")
        elif role == "assistant" and item.get("content") is not None:
            self._say("content", _said(f"{where}.content", item["content"]))
        else:
            content = item.get("content")
            content = content if isinstance(content, str) else _parts(f"{where}.content", content)
            self._append({"role": role, "content": content})

    def _append(self, message: Message) -> None:
        self._messages.append(message)
        self._is_hosted = False

    def _call(self, where: str, item: Item, arguments: Any) -> None:
        name = _flat(item.get("namespace"), item.get("name"))
        for field, value in (("call_id", item.get("call_id")), ("name", item.get("name")), ("arguments", arguments)):
            if not isinstance(value, str):
                raise bad_value(f"{where}.{field}", value, "a string")
        call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages[-1].setdefault("tool_calls", []).append(call)
            self._is_hosted = False
        else:
            self._append({"role": "assistant", "tool_calls": [call]})

    def _say(self, field: str, said: str | list[Any]) -> None:
        last = self._messages[-1] if self._messages else {}
        if self._is_hosted and field == "content":
            parts = [{"type": "output_text", "text": said}] if isinstance(said, str) else said
            last["content"] = [{"type": "output_text", "text": last["content"]}, *parts]
            self._is_hosted = False
        elif last.get("role") == "assistant" and last.get(field) is None:
            last[field] = said
        else:
            self._append({"role": "assistant", field: said})

    def _host(self, kind: str, item: Item) -> None:
        """What a server did is told by the assistant; what a client sent back for it by the user."""
        text, last = _hosted(item), self._messages[-1] if self._messages else {}
        if text is None:
            return
        if kind.endswith(("_output", "_response")):
            self._append({"role": "user", "content": text})
        elif self._is_hosted:
            last["content"] += "\n" + text
        elif last.get("role") == "assistant" and last.get("content") is None and "tool_calls" not in last:
            last["content"] = text
            self._is_hosted = True
        else:
            self._append({"role": "assistant", "content": text})
            self._is_hosted = True


_READ_TYPES = (
    "message", "function_call", "custom_tool_call", "reasoning", "function_call_output", "custom_tool_call_output",
    "item_reference",
)  # fmt: skip


def _is_hosted(item: Item) -> bool:
    """Whether it is of a type that only its provider's servers know, such as `web_search_call` or `compaction`."""
    kind = item.get("type")
    return isinstance(kind, str) and kind not in _READ_TYPES


def _hosted(item: Item) -> str | None:
    unread = ("type", "id", "status", "result") if item["type"] == "image_generation_call" else ("type", "id", "status")
    return hosted_text(item["type"], {name: value for name, value in item.items() if name not in unread})


def _thought(item: Item) -> str:
    for field in ("content", "summary"):
        parts = item.get(field)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if texts and isinstance(texts[0], str):
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _said(where: str, content: Any) -> str | list[Any]:
    """An assistant's words: one text, or several parts."""
    if isinstance(content, str):
        return content
    parts = _parts(where, content) or []
    if not parts:
        return ""
    text = parts[0].get("text") if len(parts) == 1 and isinstance(parts[0], dict) else None
    return text if isinstance(text, str) else parts


def _parts(where: str, content: Any) -> list[Any] | None:
    if content is not None and not isinstance(content, list):
        raise bad_value(where, content, "a string or an array of parts")
    for number, part in enumerate(content or ()):
        check_part(f"{where}[{number}]", part)
    return content


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if not request.tools:
        return None
    if not isinstance(choice, dict):
        return choice or "auto"
    shown = shown_tools(request.tools)
    if choice.get("type") != "allowed_tools":
        return _chosen("tool_choice", choice, shown)
    inner = choice.get("allowed_tools", choice)
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise bad_value("tool_choice.tools", listed, "an array of tools")
    named = [(f"tool_choice.tools[{i}]", tool) for i, tool in enumerate(listed)]
    ours = [_chosen(where, tool, shown) for where, tool in named if tool.get("type") in ("function", "custom")]
    if listed and not ours:
        raise bad_value("tool_choice.tools", listed, "at least one function or custom tool: no server here runs others")
    return {"type": "allowed_tools", "allowed_tools": {"mode": inner.get("mode"), "tools": ours}}


def _chosen(where: str, choice: Item, shown: Mapping[str, ShownTool]) -> Message:
    """A tool that a choice names, as chats name it."""
    kind, name = choice.get("type"), choice.get("name")
    if kind not in ("function", "custom"):
        words = '"function", "custom" or "allowed_tools": no server here runs other tools'
        raise bad_value(f"{where}.type", kind, words)
    flat = _flat(choice.get("namespace"), name)
    if flat not in shown:
        named = [full for full, tool in shown.items() if tool.name == name and choice.get("namespace") is None]
        if len(named) != 1:
            raise bad_value(f"{where}.name", name, f"one of the tools: {', '.join(shown)}")
        (flat,) = named
    return {"type": "function", "function": {"name": flat}}


def _tools(tools: list[Item]) -> list[Message]:
    """Those that a model is shown: functions, free-text ones, and those of a namespace under its name."""
    made: list[Message] = []
    for tool in tools:
        namespace = tool["name"] if tool["type"] == "namespace" else None
        for one in tool["tools"] if tool["type"] == "namespace" else (tool,):
            if one["type"] == "custom":
                made.append(_function({**one, "parameters": CUSTOM_INPUT}, _flat(namespace, one["name"])))
            elif one["type"] == "function":
                made.append(_function(one, _flat(namespace, one["name"])))
    return made


def _function(tool: Item, name: str) -> Message:
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
    for field in ("strict", "defer_loading"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    schema = JsonSchemaFormat(name=form.name, description=form.description, schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
