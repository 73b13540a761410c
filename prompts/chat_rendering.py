"""Conversion of a request's messages to the input of a chat template, by vLLM's rules, so that token ids agree.

Images and other media become a marker, and the prompt's text ends before the first of them.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeGuard

from prompts.chat_completions import TEXT_PARTS, decode_or_none, is_media
from prompts.chat_template import ChatTemplate, Message
from prompts.content_format import ContentFormat

MEDIA_MARKER: Final = "\ue000\ue0ffmedia\ue0ff\ue000"
"""Private-use characters that no tokenizer and no sensible text has; the prompt's text ends before them."""
BILLING_LINE: Final = "x-anthropic-billing-header"
"""Start of the first line of a coding agent's system text, which changes with every request. vLLM drops the line, so
that the rest of the prompt is found in the cache."""


class ChatPrompt(Protocol):
    """Fields of a chat request that decide the text of its prompt, for the engine's request class and the router's."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def tools(self) -> list[Message] | None: ...
    @property
    def documents(self) -> list[Message] | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def add_special_tokens(self) -> bool | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


def render_chat(template: ChatTemplate, request: ChatPrompt) -> str:
    """Return the text of a chat's prompt, up to its first image or other media.

    The text is the same that vLLM renders, so that vLLM's cached blocks are found by equal tokens. Raises RequestError
    if the template cannot render the chat.
    """
    continues_final_message = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continues_final_message
    text = template.render(
        _convert_messages(template, request),
        tools=None if request.tools is None else [_convert_tool(tool) for tool in request.tools],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continues_final_message,
        **_make_template_variables(request),
    )
    return text.partition(MEDIA_MARKER)[0]


def _make_template_variables(request: ChatPrompt) -> dict[str, Any]:
    """Return the request's own variables for the template. As in vLLM, fields of the request take precedence."""
    variables = dict(request.chat_template_kwargs or {})
    for name in ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"):
        variables.pop(name, None)
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables


def _convert_messages(template: ChatTemplate, request: ChatPrompt) -> list[Message]:
    has_tools = request.tools is not None
    content_format = template.find_content_format(has_tools=has_tools)
    messages = [_convert_message(message, content_format) for message in request.messages or ()]
    if any(message["role"] == "developer" for message in messages):
        source = template.select_source(has_tools=has_tools)
        if '"developer"' not in source and "'developer'" not in source:  # it would refuse or drop such messages
            return _convert_developer_to_system(messages)
    return messages


def _convert_message(message: Message, content_format: ContentFormat) -> Message:
    """Return a chat message as vLLM gives it to a template: with known fields only, and with converted content.

    For example, the content [{"type": "text", "text": "Hi"}] becomes "Hi" if the template's format is "string".
    """
    content = message.get("content")
    is_plain = len(message) == 2 and content_format == "string" and next(iter(message)) == "role"
    if is_plain and type(content) is str and not content.startswith(BILLING_LINE):
        return message  # most messages need no conversion
    role = message.get("role", "user")
    if role == "system":
        content = remove_billing_line(content)
    elif role == "tool" and content_format == "parts" and _is_list_of_texts(content):
        # Even most templates that loop over the parts of other messages expect a string from a tool.
        content = "\n".join(map(_read_part_text, content))
        content_format = "string"
    return {"role": role, "content": _convert_content(content, content_format), **_convert_other_fields(message, role)}


def _convert_other_fields(message: Message, role: Any) -> Message:
    """Return the fields of a chat message that a template gets besides its role and content, by vLLM's rules."""
    template_message: Message = {}
    if role == "assistant":
        tool_calls = message.get("tool_calls")
        if isinstance(tool_calls, list) and tool_calls:
            template_message["tool_calls"] = [convert_tool_call(call) for call in tool_calls]
        for name in ("reasoning_content", "reasoning"):
            if message.get(name) is not None:  # vLLM 0.33 takes an embedding instead of text
                template_message[name] = MEDIA_MARKER if isinstance(message[name], dict) else message[name]
    elif role == "tool" and "tool_call_id" in message:
        template_message["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        template_message["tools"] = message["tools"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            template_message[name] = message[name]
    return template_message


def _convert_developer_to_system(messages: list[Message]) -> list[Message]:
    """Give developer messages the role `system`, for templates that do not know the role `developer`.

    Such templates take one system message, at the start. So if there are several, or if it is not the first message,
    their texts are joined in a first message.
    """
    system_messages = [message for message in messages if message["role"] in ("system", "developer")]
    other_messages = [message for message in messages if message["role"] not in ("system", "developer")]
    if system_messages == messages[:1]:
        system_message = {name: value for name, value in messages[0].items() if name != "tools"}
        return [{**system_message, "role": "system"}, *other_messages]
    contents = [message["content"] for message in system_messages]
    texts = [text if isinstance(text, str) else "\n".join(part["text"] for part in text) for text in contents]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *other_messages]


def remove_billing_line(content: Any) -> Any:
    """Return a system message's content without a coding agent's billing line, which differs in every request.

    Each text of the content may begin with that line. A text part that has nothing else is left out.
    """
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_LINE) else content
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        is_text_part = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text_part else part
        if not isinstance(text, str) or not text.startswith(BILLING_LINE):
            parts.append(part)
            continue
        remaining_text = text.partition("\n")[2]
        if remaining_text:
            parts.append({**part, "text": remaining_text} if is_text_part else remaining_text)
    return parts


def _is_list_of_texts(content: Any) -> TypeGuard[list[Any]]:
    """Return whether a content is a list of parts that are plain texts, without media and references to tools."""
    plain_types = TEXT_PARTS.keys() - {"tool_reference"}
    return isinstance(content, list) and all(
        str(part.get("type", "text")) in plain_types if isinstance(part, dict) else isinstance(part, str)
        for part in content
    )


def _convert_content(content: Any, content_format: ContentFormat) -> str | list[Message]:
    if isinstance(content, str):
        return content if content_format == "string" else [{"type": "text", "text": content}]
    parts = content if isinstance(content, list) else []
    if content_format == "parts":
        return list(map(_convert_part, parts))
    return "\n".join(filter(None, map(_read_part_text, parts)))


def _convert_part(part: Any) -> Message:
    if isinstance(part, dict) and part.get("type") == "tool_reference":  # templates look the tool up
        return {"type": "tool_reference", "name": _read_part_text(part)}
    return {"type": "text", "text": _read_part_text(part)}


def _read_part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or is_media(part):
        return MEDIA_MARKER
    text = part.get(TEXT_PARTS.get(str(part.get("type")), "text"))
    return text if isinstance(text, str) else ""


def convert_tool_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object instead of JSON text, as chat templates expect them.

    Arguments that are no JSON object become an empty one: otherwise the conversation could not continue. A call without
    a function is returned unchanged.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decode_or_none(arguments)
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _convert_tool(tool: Message) -> Message:
    """Return a tool with its fields in vLLM's order and with explicit nulls, because templates may print all of it."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    ordered_fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    template_tool = {
        "type": tool.get("type", "function"),
        "function": {**ordered_fields, **_drop_fields(function, ordered_fields)},
    }
    return {**template_tool, **_drop_fields(tool, template_tool)}


def _drop_fields(fields: Message, dropped_fields: Message) -> Message:
    return {key: value for key, value in fields.items() if key not in dropped_fields}
