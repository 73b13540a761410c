"""From the messages of a request to what a chat template is given, by vLLM's rules, so that ids agree with its workers.

Which keys of a message a template sees, whether content is a string or parts, tool calls with their arguments read,
tools with their fields in vLLM's order. Media parts become a marker: the text before the first is all that token ids
can say of such a prompt.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from prompts.chat_template import ChatTemplate, ContentFormat, Message
from prompts.routing import is_media
from prompts.schemas import TEXT_PARTS

MEDIA_MARKER = "\ue000\ue0ffmedia\ue0ff\ue000"
"""Private-use characters that no tokenizer and no sensible text holds; the prompt's text ends where it begins."""


class ChatPrompt(Protocol):
    """What rendering reads of a request: ChatRequest and RoutingRequest both have it."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def tools(self) -> list[Message] | None: ...
    @property
    def documents(self) -> list[Message] | None: ...
    @property
    def chat_template(self) -> str | None: ...
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
    """The prompt's text, cut at the first media part. Raises RequestError where the template cannot render it."""
    tools = None if request.tools is None else [_tool(tool) for tool in request.tools]
    form = template.content_format(request.chat_template, has_tools=tools is not None)
    continues = bool(request.continue_final_message)
    generation = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    # As in vLLM, a field of the request wins over the same name among the template's variables.
    variables = dict(request.chat_template_kwargs or {})
    documents = variables.pop("documents", None)
    for name in ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"):
        variables.pop(name, None)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    text = template.render(
        [_message(message, form) for message in request.messages or []],
        tools=tools,
        documents=request.documents if request.documents is not None else documents,
        chat_template=request.chat_template,
        add_generation_prompt=generation,
        continue_final_message=continues,
        **variables,
    )
    return text.partition(MEDIA_MARKER)[0]


def _message(message: Message, form: ContentFormat) -> Message:
    if len(message) == 2 and form == "string" and next(iter(message)) == "role" and type(message.get("content")) is str:
        return message  # as most are: it would be made again as it is
    role = message.get("role", "user")
    made: Message = {"role": role, "content": _content(message.get("content"), form)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            made["tool_calls"] = [_tool_call(call) for call in calls]
        for name in ("reasoning_content", "reasoning"):
            if message.get(name) is not None:
                made[name] = message[name]
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        made["tools"] = message["tools"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _content(content: Any, form: ContentFormat) -> str | list[Message]:
    if isinstance(content, str):
        return content if form == "string" else [{"type": "text", "text": content}]
    texts = [_part_text(part) for part in content] if isinstance(content, list) else []
    if form == "parts":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or is_media(part):
        return MEDIA_MARKER
    text = part.get(TEXT_PARTS.get(str(part.get("type")), "text"))
    return text if isinstance(text, str) else ""


def _tool_call(call: Any) -> Any:
    """The call with its arguments as an object: templates write them with `tojson`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return call  # not JSON, or none that can be read: the template gets what the client sent
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _tool(tool: Message) -> Message:
    """A tool with vLLM's field order and explicit nulls, which templates that print it show."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    named = {name: function.get(name) for name in ("name", "description", "parameters")}
    made = {"type": tool.get("type", "function"), "function": {**named, **_without(function, named)}}
    return {**made, **_without(tool, made)}


def _without(values: Message, names: Message) -> Message:
    return {key: value for key, value in values.items() if key not in names}
