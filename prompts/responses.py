"""OpenAI's Responses: bodies as they are checked, and the chat that one stands for, by vLLM's rules.

`parse_response` refuses what no worker takes; unknown fields pass. `as_chat` gives the fields of the chat that is
rendered: an assistant's message, its thoughts and its calls, which are items of their own, become one message again.
What came before (`previous_response_id`) is its caller's to bring.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from prompts.errors import RequestError, bad_value
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
    decode_json,
)

Item = dict[str, Any]
ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]
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
        raise RequestError(f"{where}.format: a grammar is not supported, expected text", param=where)
    if kind == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise bad_value(f"{where}.tools", inner, "an array of tools")
        for number, one in enumerate(inner):
            _check_tool(f"{where}.tools[{number}]", one)


# The chat -------------------------------------------------------------------------------------------------------------


def as_chat(request: ResponsesRequest, before: list[Message] | None = None) -> dict[str, Any]:
    """Fields of the chat request that this one stands for. `before`: the messages that the response it goes on from was
    made of, and what that one said. Raises RequestError."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    messages += [message for message in before or () if message.get("role") != "system"]
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            _add_item(messages, f"input[{index}]", item)
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
    is_said = last.get("type", "message") in ("message", "reasoning")
    return is_said and last.get("status") in ("in_progress", "incomplete")


def _add_item(messages: list[Message], where: str, item: Item) -> None:
    """A message of its own, or a part of the assistant's that stands before it."""
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        name = item.get("name")
        if isinstance(item.get("namespace"), str):
            name = f"{item['namespace']}__{name}"
        _add_call(messages, where, item, name, item.get("arguments"))
    elif kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        _add_call(messages, where, item, item.get("name"), arguments)
    elif kind == "reasoning":
        _add_said(messages, "reasoning", _thought(where, item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        content = output if isinstance(output, str) else _parts(f"{where}.output", output)
        messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    elif not isinstance(role, str) or kind not in (None, "message"):
        raise bad_value(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")
    elif role == "assistant" and _text(item) is not None:
        _add_said(messages, "content", _text(item))
    else:
        content = item.get("content")
        content = content if isinstance(content, str) else _parts(f"{where}.content", content)
        messages.append({"role": role, "content": content})


def _add_call(messages: list[Message], where: str, item: Item, name: Any, arguments: Any) -> None:
    for field, value in (("call_id", item.get("call_id")), ("name", name), ("arguments", arguments)):
        if not isinstance(value, str):
            raise bad_value(f"{where}.{field}", value, "a string")
    call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _add_said(messages: list[Message], field: str, text: Any) -> None:
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(field) is None:
        messages[-1][field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _thought(where: str, item: Item) -> str:
    if item.get("encrypted_content"):
        raise RequestError(f"{where}.encrypted_content: cannot be read", param=f"{where}.encrypted_content")
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list) and parts and isinstance(parts[0], dict) and isinstance(parts[0].get("text"), str):
            return str(parts[0]["text"])
    return ""


def _text(item: Item) -> str | None:
    """An assistant's words: the first of its parts."""
    content = item.get("content")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _parts(where: str, content: Any) -> list[Any] | None:
    if content is not None and not isinstance(content, list):
        raise bad_value(where, content, "a string or an array of parts")
    return content


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if not request.tools:
        return None
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice or "auto"


def _tools(tools: list[Item]) -> list[Message]:
    """Those that a model is shown: functions, those of a namespace under its name, and free-text ones."""
    made: list[Message] = []
    for tool in tools:
        kind = tool["type"]
        if kind == "function":
            made.append(_function(tool, tool["name"]))
        elif kind == "custom":
            made.append(_function({**tool, "parameters": CUSTOM_INPUT}, tool["name"]))
        elif kind == "namespace":
            inner = [one for one in tool["tools"] if one["type"] == "function"]
            made += [_function(one, f"{tool['name']}__{one['name']}") for one in inner]
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
