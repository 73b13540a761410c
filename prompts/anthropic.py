"""Anthropic's Messages API: checks of bodies, and their conversion to chats by vLLM's rules.

Bodies that vLLM refuses are refused, and unknown fields are ignored. Two rules of the conversion depend on the model's
chat template: where system messages may stand, and how thinking is disabled.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from prompts.chat_completions import (
    COUNT_MAX,
    MAX_STOPS,
    ChatRequest,
    Json,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    Salt,
    Stop,
    Temperature,
    TopK,
    TopP,
    decode_json,
    make_function_tool,
)
from prompts.chat_rendering import BILLING_LINE, render_chat
from prompts.chat_template import ChatTemplate, TemplateLimitError
from prompts.errors import THREAD_UNSUPPORTED, RequestError, bad_value, field_error
from prompts.provider_history import convert_block, find_media_kind, is_hosted_block

BLOCK_TYPES = (
    "text", "image", "document", "search_result", "tool_use", "tool_result", "tool_reference", "thinking",
    "redacted_thinking", "tool_addition", "tool_removal",
)  # fmt: skip
"""Types of blocks, without those of tools that Anthropic's servers run."""
_SERVER_TOOL_PREFIXES = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Prefixes of the types of tools that Anthropic's servers run."""
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class MessageBlock(Struct, frozen=True, kw_only=True):
    """A part of a message: a text, an image, a tool call, the result of a call, or another type.

    All types of parts share this struct. A part that lacks the fields of its type is ignored.
    """

    type: str
    text: str | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | dict[str, Any] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: dict[str, Any] | None = None


class MessageTurn(Struct, frozen=True):
    """One message: what one side says in its turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]

    @property
    def blocks(self) -> list[MessageBlock]:
        """The blocks of the content; none if the content is a text."""
        return self.content if isinstance(self.content, list) else []


class MessagesTool(Struct, frozen=True, kw_only=True):
    name: str = ""
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024, le=COUNT_MAX)] | None = None


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Struct, kw_only=True, frozen=True):
    """Body of a request to `/v1/messages/count_tokens`, which counts the tokens of a prompt without an answer."""

    messages: list[MessageTurn]
    model: str | None = None
    system: str | list[MessageBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    mcp_servers: list[Any] | None = None
    thread: Any = None
    """Conversation that a server keeps, so that the next turn is sent without the earlier ones."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True, frozen=True):
    """Body of a request to `/v1/messages`, Anthropic's API for chats."""

    max_tokens: Annotated[int, Meta(ge=0, le=COUNT_MAX)]
    """Most tokens of the answer; 0 to only cache the prompt."""
    metadata: dict[str, Any] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    cache_salt: Salt | None = None
    kv_transfer_params: dict[str, Json] | None = None
    priority: Any = None
    """Priority of the request, as vLLM has it. Not a field of Anthropic's API."""


_CHAT_FIELDS = (
    "max_tokens", "temperature", "top_k", "top_p", "stream", "cache_salt", "model", "kv_transfer_params",
)  # fmt: skip
"""Fields that mean the same in a chat."""
_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


def parse_messages(data: bytes) -> MessagesRequest:
    """Read a body of `/v1/messages`. Raises RequestError that names field, value and expectation."""
    request = decode_json(_messages_decoder, data)
    _check_request(request)
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and (thinking.budget_tokens or 0) >= request.max_tokens:
        raise bad_value("thinking.budget_tokens", thinking.budget_tokens, f"below max_tokens ({request.max_tokens})")
    if request.max_tokens == 0:
        _check_caches_only(request)
    return request


def _check_caches_only(request: MessagesRequest) -> None:
    """Raise RequestError for a field that has no meaning without an answer, if `max_tokens` is 0, as Anthropic does."""
    choice, config = request.tool_choice, request.output_config
    is_present_by_param = {
        "stream": request.stream,
        "output_format": request.output_format is not None,
        "output_config.format": config is not None and config.format is not None,
        "tool_choice.type": choice is not None and choice.type in ("any", "tool"),
    }
    for param, is_present in is_present_by_param.items():
        if is_present:
            raise field_error(param, "expected it only with max_tokens of at least 1, as 0 only caches the prompt")


def parse_count(data: bytes) -> CountRequest:
    """Read a body of `/v1/messages/count_tokens`. Raises RequestError."""
    request = decode_json(_count_decoder, data)
    _check_request(request)
    return request


def _check_request(request: CountRequest) -> None:
    """Raise RequestError for values that Anthropic does not allow, and for what only Anthropic's servers can do."""
    if request.thread is not None:
        message = "thread: no conversation is kept here; expected all messages in each request, without this field"
        raise RequestError(message, param="thread", code=THREAD_UNSUPPORTED)
    if not request.messages:
        raise bad_value("messages", request.messages, "at least one message")
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        raise bad_value("thinking.budget_tokens", None, "a number of tokens")
    choice = request.tool_choice
    if choice is not None and choice.type == "tool" and not choice.name:
        raise bad_value("tool_choice.name", choice.name, "the name of a tool")
    if request.mcp_servers:
        expectation = "none: Anthropic's servers call the tools of MCP servers, no server here does; the client may"
        raise bad_value("mcp_servers", request.mcp_servers, expectation)
    if request.output_format is not None and request.output_config is not None and request.output_config.format:
        raise field_error("output_format", "expected only without output_config.format")
    for tool_index, tool in enumerate(request.tools or ()):
        _check_tool(f"tools[{tool_index}]", tool)
    for message_index, turn in enumerate(request.messages):
        for block_index, block in enumerate(turn.blocks):
            _check_block(f"messages[{message_index}].content[{block_index}]", turn.role, block)


def _check_tool(param: str, tool: MessagesTool) -> None:
    tool_type = tool.type
    if tool.input_schema is None and tool_type is not None and tool_type.startswith(_SERVER_TOOL_PREFIXES):
        expectation = (
            "an input_schema and a client that runs the tool: Anthropic's servers run this one, no server here does"
        )
        raise bad_value(f"{param}.type", tool_type, expectation)
    if not tool.name:
        raise field_error(f"{param}.name", "missing, expected this field to be given")
    if tool.input_schema is None:
        problem = "missing, expected this field to be given"
        if tool_type not in (None, "custom"):
            problem += f": the client runs {tool_type}, and only Anthropic's models know it without a schema"
        raise field_error(f"{param}.input_schema", problem)


def _check_block(param: str, role: str, block: MessageBlock) -> None:
    if block.type not in BLOCK_TYPES and not is_hosted_block(block.type):
        raise bad_value(f"{param}.type", block.type, f"one of {', '.join(BLOCK_TYPES)}")
    if block.type in ("tool_addition", "tool_removal"):
        _check_tool_change(param, role, block)
    if block.type == "tool_result" and isinstance(block.content, dict):
        raise bad_value(f"{param}.content", block.content, "a string or an array of blocks")
    if block.type in ("image", "document") and isinstance(block.source, str):
        raise bad_value(f"{param}.source", block.source, "an object")


def _check_tool_change(param: str, role: str, block: MessageBlock) -> None:
    if role != "system":
        raise bad_value(f"{param}.type", block.type, "tools to change in messages of the role system only")
    if block.tool is None or not isinstance(_get_changed_tool_name(block.tool), str):
        raise bad_value(f"{param}.tool", block.tool, "a tool_reference with a name, or a tool_definition")
    if block.type == "tool_removal" and block.tool.get("type") != "tool_reference":
        raise bad_value(f"{param}.tool.type", block.tool.get("type"), "tool_reference")


# The chat -------------------------------------------------------------------------------------------------------------


def convert_to_chat(request: CountRequest, template: ChatTemplate | None) -> dict[str, Any]:
    """Convert a body of Anthropic's Messages API to the fields of an OpenAI chat request. Raises RequestError.

    `template` renders the chat; None if it is unknown. Many templates accept a system message only at the start, so
    system messages are moved there if the template needs that.
    """
    merges_system = template is not None and template.needs_system_first()
    messages = _convert_messages(request, merges_system=merges_system)
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": request.messages[-1].role == "assistant" and _can_continue(messages[-1]),
        "chat_template_kwargs": request.chat_template_kwargs,
        "reasoning_effort": _choose_reasoning_effort(request, template),
        "tools": _convert_tools(request),
        "tool_choice": "auto" if request.tools else None,
        "response_format": _convert_output_format(request),
    }
    if request.tool_choice is not None:
        fields["tool_choice"] = _convert_tool_choice(request.tool_choice)
        fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in _CHAT_FIELDS}
        fields["stop"] = request.stop_sequences or None
    return fields


def _convert_tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _convert_output_format(request: CountRequest) -> ResponseFormat | None:
    output_format = request.output_format
    if output_format is None and request.output_config is not None:
        output_format = request.output_config.format
    if output_format is None:
        return None
    schema = JsonSchemaFormat(name=output_format.type, schema=output_format.schema)
    return ResponseFormat(type=output_format.type, json_schema=schema)


def depends_on_template(request: object) -> bool:
    """Whether a body becomes another chat for another template; false for a body of another API."""
    if not isinstance(request, CountRequest):
        return False
    is_disabled = request.thinking is not None and request.thinking.type == "disabled"
    return is_disabled or any(turn.role == "system" for turn in request.messages)


def find_media(request: CountRequest) -> tuple[str, str] | None:
    """Return the path and the kind (`image` or `document`) of the first block that is no text; None if all are text."""
    for message_index, turn in enumerate(request.messages):
        for block_index, block in enumerate(turn.blocks):
            inner_blocks = block.content if block.type == "tool_result" and isinstance(block.content, list) else ()
            for media_block in (msgspec.structs.asdict(block), *inner_blocks):
                kind = find_media_kind(media_block)
                if kind is not None:
                    return f"messages[{message_index}].content[{block_index}]", kind
    return None


def _can_continue(message: Message) -> bool:
    """Whether the assistant's last message can be continued: it ends with a text."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1].get("text")
    return bool(content) and "tool_calls" not in message


def _convert_messages(request: CountRequest, *, merges_system: bool) -> list[Message]:
    """Convert the system prompt and the messages of a body to messages of a chat.

    With `merges_system`, all system texts form the first message. Raises RequestError if no message says anything.
    """
    turns = request.messages
    system_text = request.system if isinstance(request.system, str) else _join_system_texts(request.system or [])
    if merges_system:
        system_text += "".join(_join_system_texts(turn.content) for turn in turns if turn.role == "system")
        turns = [turn for turn in turns if turn.role != "system"]
    messages: list[Message] = [{"role": "system", "content": system_text}] if system_text else []
    messages += chain.from_iterable(map(convert_turn, turns))
    if not messages:
        raise field_error("messages", "none of them says anything, expected a text, a call or a result")
    return messages


def convert_turn(turn: MessageTurn) -> list[Message]:
    """Convert a message in Anthropic's format to messages of an OpenAI chat: one, several or none.

    There is one or more for each result of a tool, then one for all other blocks.
    """
    if turn.role == "system":
        system_text = _join_system_texts(turn.content)
        return [{"role": "system", "content": system_text}] if system_text else []
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[Message] = []
    if turn.role == "user":
        for block in turn.content:
            if block.type == "tool_result":
                messages += _convert_tool_result(block)
    message: Message = {"role": turn.role}
    thoughts = [block.thinking for block in turn.content if block.type == "thinking" and block.thinking is not None]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    tool_calls = [_convert_call(block) for block in turn.content if block.type == "tool_use"]
    if tool_calls:
        message["tool_calls"] = tool_calls
    converted_blocks = [_convert_content_block(turn.role, block) for block in turn.content]
    content_parts = [part for part in converted_blocks if part is not None]
    if content_parts:
        is_one_text = len(content_parts) == 1 and content_parts[0]["type"] == "text"
        message["content"] = content_parts[0]["text"] if is_one_text else content_parts
    if turn.role == "assistant" or content_parts:
        messages.append(message)
    return messages


def _join_system_texts(content: str | list[MessageBlock]) -> str:
    """Join the texts of a system message, without those that begin with a billing line, which every request changes."""
    if isinstance(content, str):
        return "" if content.startswith(BILLING_LINE) else content
    texts = [block.text for block in content if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(BILLING_LINE))


def _convert_call(block: MessageBlock) -> Message:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id or "", "type": "function", "function": function}


def _convert_content_block(role: str, block: MessageBlock) -> Message | None:
    """Return a block as a part of its message's content; None if it has no place there, such as a call."""
    if block.type == "text" and block.text:
        return {"type": "text", "text": block.text}
    if block.type == "image" and block.source:
        return {"type": "image_url", "image_url": {}}
    if block.type == "tool_result" and role != "user":
        return {"type": "text", "text": f"Tool result: {block.content or ''}"}
    if block.type in ("document", "search_result") or is_hosted_block(block.type):
        return convert_block(msgspec.structs.asdict(block))
    return None


def _convert_tool_result(block: MessageBlock) -> list[Message]:
    """Return the chat messages for the result of a tool: its text, then its images, then references to other tools.

    The images are in a message of the user, because chat templates expect none in a message of a tool.
    """
    result_blocks = block.content if isinstance(block.content, list) else []
    parts = [part for part in map(_convert_result_block, result_blocks) if part is not None]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    reference_parts = [part for part in parts if part["type"] == "tool_reference"]
    media_parts = [part for part in parts if part["type"] not in ("text", "tool_reference")]

    tool_message = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    text = block.content if isinstance(block.content, str) else "\n".join(texts)
    messages: list[Message] = [{**tool_message, "content": text}]
    if media_parts:
        messages.append({"role": "user", "content": media_parts})
    if reference_parts:
        messages.append({**tool_message, "content": reference_parts})
    return messages


def _convert_result_block(block: dict[str, Any]) -> Message | None:
    """Return a block of a tool's result as a part of a chat's content; None for a reference without a name."""
    block_type = block.get("type")
    if block_type == "text":
        text = block.get("text", "")
        if not isinstance(text, str):
            raise bad_value("messages: text of a tool_result", text, "a string")
        return {"type": "text", "text": text}
    if block_type == "image":
        return {"type": "image_url", "image_url": {}}
    if block_type == "tool_reference":
        name = block.get("tool_name") or block.get("name")
        return {"type": "tool_reference", "name": name} if name else None
    return convert_block(block)


def _convert_tools(request: CountRequest) -> list[Message] | None:
    """Return the tools that the model may call after all changes; None if the body has none. Raises RequestError."""
    blocks = [block for turn in request.messages for block in turn.blocks]
    changes = [block for block in blocks if block.type in ("tool_addition", "tool_removal")]
    tools = _change_tools(request.tools or [], changes) if changes else request.tools
    return None if tools is None else [_convert_function(tool) for tool in tools]


def _change_tools(tools: list[MessagesTool], changes: list[MessageBlock]) -> list[MessagesTool]:
    """Return the tools that a model may call after a conversation has added and removed some of them.

    `tools`: those at the start. `changes`: blocks of type `tool_addition` or `tool_removal`. An addition defines a new
    tool, or names one that was removed or is loaded only now. Raises RequestError for an unknown name.
    """
    tool_by_name = {tool.name: tool for tool in tools}
    removed_names: set[str] = set()
    for change in changes:
        assert change.tool is not None
        name = _get_changed_tool_name(change.tool)
        is_definition = change.tool.get("type") == "tool_definition"
        if not is_definition and name not in tool_by_name:
            raise RequestError(f"{change.type} names the tool {name!r}, which is not in tools", param="tools")
        if change.type == "tool_removal":
            removed_names.add(name)
            continue
        removed_names.discard(name)
        if is_definition:
            tool_by_name[name] = _read_tool_definition(change.tool["definition"])
        else:
            tool_by_name[name] = msgspec.structs.replace(tool_by_name[name], defer_loading=None)
    return [tool for name, tool in tool_by_name.items() if name not in removed_names]


def _read_tool_definition(definition: Any) -> MessagesTool:
    """Read a tool that the conversation adds. Raises RequestError if it is malformed."""
    try:
        tool = msgspec.convert(definition, MessagesTool)
    except msgspec.ValidationError as error:
        raise RequestError(f"tool.definition: {error}", param="messages") from None
    _check_tool("tool.definition", tool)
    return tool


def _get_changed_tool_name(change: dict[str, Any]) -> Any:
    definition = change.get("definition")
    return definition.get("name") if isinstance(definition, dict) else change.get("name")


def _convert_function(tool: MessagesTool) -> Message:
    assert tool.input_schema is not None
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    return make_function_tool(tool.name, tool.description, schema, strict=tool.strict, defer_loading=tool.defer_loading)


def _choose_reasoning_effort(request: CountRequest, template: ChatTemplate | None) -> str | None:
    """Return the effort of thinking, as templates read it.

    Disabled thinking is the effort "none", or "low" if the template does not tell "none" from other efforts.
    """
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none" if template is None or _distinguishes_no_effort(template) else "low"
    return None if request.output_config is None else request.output_config.effort


@lru_cache(maxsize=64)
def _distinguishes_no_effort(template: ChatTemplate) -> bool:
    """Whether the effort "none" makes another prompt than every other effort."""
    prompt = _render_with_effort(template, "none")
    return prompt is not None and all(_render_with_effort(template, effort) != prompt for effort in get_args(Effort))


def _render_with_effort(template: ChatTemplate, effort: str) -> str | None:
    try:
        return render_chat(template, ChatRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort))
    except TemplateLimitError:
        raise  # it says nothing of the template, and must not be remembered
    except RequestError:
        return None
