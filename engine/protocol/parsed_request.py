"""Parse the bytes of a body into a checked request with its prompts as token ids. No I/O.

These functions may run in another thread or process (`engine.http.body_workers`). Large fields that only parsing needs
are left out of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from engine.output.choice import PLAIN_TEXT_CONFIG
from engine.output.formats import REASONING_FORMATS, ReasoningState, initial_reasoning_state
from engine.output.parser import OutputParserConfig
from engine.output.schema_types import read_parameter_types
from engine.protocol.params import ModelLimits, check_prompt, is_echo_only_request
from engine.protocol.unsupported_params import check_supported, refuse_media
from engine.structured_output.constraint import (
    EncodedConstraint,
    is_call_required,
    make_scripted_constraint,
    names_function,
    parse_requested_constraint,
)
from prompts import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    Tokenizer,
    bad_value,
    field_error,
    parse_chat,
    parse_completion,
)
from prompts.anthropic import CountRequest, convert_to_chat, find_media, parse_count, parse_messages
from prompts.chat_completions import ResponseFormat, StructuredOutputs
from prompts.kv_source import RemoteKVSource, read_kv_source
from prompts.responses import (
    ClientTool,
    ResponsesRequest,
    find_item_references,
    find_skipped_item_types,
    make_client_tools,
    parse_responses_request,
)
from prompts.responses import convert_to_chat as convert_response_to_chat
from prompts.routing import API_KIND_BY_PATH, ApiKind

ECHOED_BYTES_MAX = 64 << 10
"""Largest field of a body that its answer repeats; larger fields are left out."""
MAX_CHOICES = 1024
"""Most sequences of one HTTP request."""
_PROMPT_END_TOKENS = 64
"""Number of last tokens of a prompt that hold the markers at its end."""
_SAMPLING_FIELDS = ("stop", "stop_token_ids", "logit_bias")
"""Fields with lists and objects that are needed after a body was parsed."""
ECHOED_DEFAULTS: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": None, "parallel_tool_calls": True, "reasoning": None,
    "temperature": 1.0, "text": None, "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled",
    "user": None,
}  # fmt: skip
"""Fields of a body that its answer repeats, and their values in the answer if the body does not have them."""


class ResponseContext(msgspec.Struct, frozen=True):
    """Fields of a `/v1/responses` body that its answer needs; large ones stay encoded."""

    messages: bytes
    """JSON list of the rendered messages, for a response that continues this one."""
    echoed_fields: bytes
    """JSON object of the fields that the answer repeats."""
    should_store: bool
    previous_response_id: str | None
    tools: dict[str, ClientTool] = {}
    """Name that the model sees -> tool, for tools with another name or with free text as input."""
    skipped_item_types: list[str] = []
    """Types of input items that the model does not see."""


class ParsedRequest(msgspec.Struct, frozen=True):
    """A validated HTTP request: its fields, its tokenized prompts, and how its answer is constrained and parsed."""

    body: ChatRequest | CompletionRequest
    """Request body, without prompts and other large fields that are not needed any more."""
    prompts: list[list[int]]
    """Token ids of each prompt."""
    api: ApiKind = "chat"
    """API that was asked, and whose form the answer has."""
    prompt_texts: list[str] = []
    """Text of each prompt if a completion echoes its prompts; otherwise empty strings. No strings for a chat."""
    parser_config: OutputParserConfig = PLAIN_TEXT_CONFIG
    """How reasoning and tool calls are found in the generated text."""
    constraint: EncodedConstraint | None = None
    """Format that the answer must match; None: any answer is allowed."""
    response_context: ResponseContext | None = None
    """Fields of a `/v1/responses` request that its answer needs; None for other APIs."""
    is_prompt_only: bool = False
    """Whether the prompt is only to be cached or echoed, and not answered."""
    kv_source: RemoteKVSource | None = None
    """Engine from which cached blocks may be fetched. The source's signature is not checked yet."""


def read_chat(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ParsedRequest:
    """Parse a body of `/v1/chat/completions`. Raises RequestError."""
    return _read_chat_body(parse_chat(data), tokenizer, limits)


def read_messages(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ParsedRequest:
    """Parse a body of `/v1/messages`, which is converted to a chat. Raises RequestError."""
    request = parse_messages(data)
    _check_text_only(request)
    body = ChatRequest(**convert_to_chat(request, tokenizer.chat_template) | {"max_tokens": max(request.max_tokens, 1)})
    parsed_request = _read_chat_body(body, tokenizer, limits, "/v1/messages")
    return msgspec.structs.replace(parsed_request, is_prompt_only=request.max_tokens == 0)


def read_count(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[str | None, bytes]:
    """Answer a body of `/v1/messages/count_tokens`: return (requested model, answer as JSON). Raises RequestError."""
    request = parse_count(data)
    _check_text_only(request)
    count = len(tokenizer.encode_chat(ChatRequest(**convert_to_chat(request, tokenizer.chat_template))))
    return request.model, msgspec.json.encode({"input_tokens": count})


class ResponseReferences(msgspec.Struct, frozen=True):
    """Earlier responses and items that a body of `/v1/responses` refers to."""

    previous_response_id: str | None
    """Id of the response to continue."""
    items: dict[str, str]
    """Item id -> the field that refers to it."""


def read_response_references(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ResponseReferences:
    """Find the stored responses that a body of `/v1/responses` needs. Raises RequestError."""
    request = parse_responses_request(data)
    return ResponseReferences(request.previous_response_id, find_item_references(request))


def read_response(
    previous_messages: bytes | None,
    data: bytes,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    items: Mapping[str, bytes] = MappingProxyType({}),
) -> ParsedRequest:
    """Parse a body of `/v1/responses` by converting it to a chat. Raises RequestError.

    `previous_messages`: messages of the stored response that the body continues, as a JSON list, or None. `items`: JSON
    of the stored items that the body refers to, by item id.
    """
    request = parse_responses_request(data)
    _check_response_supported(request)
    earlier_messages = None if previous_messages is None else msgspec.json.decode(previous_messages)
    items_by_id = {item_id: msgspec.json.decode(item) for item_id, item in items.items()}
    body = ChatRequest(**convert_response_to_chat(request, earlier_messages, items_by_id))
    context = _make_response_context(request, body)
    try:
        parsed_request = _read_chat_body(body, tokenizer, limits, "/v1/responses", context.tools)
    except RequestError as error:
        if error.param is None:
            raise
        param = _get_responses_field(error.param)  # the client knows its own field, not the chat's
        message = error.message.replace(error.param, param, 1)
        raise RequestError(message, param=param, code=error.code, status=error.status) from None
    constraint = parsed_request.constraint
    if constraint is not None:
        constraint = msgspec.structs.replace(constraint, param=_get_responses_field(constraint.param))
    return msgspec.structs.replace(parsed_request, response_context=context, constraint=constraint)


def _make_response_context(request: ResponsesRequest, body: ChatRequest) -> ResponseContext:
    """Return what the answer needs of a request. `body`: the chat that the request was made to."""
    tools = make_client_tools(request.list_tools())
    return ResponseContext(
        messages=msgspec.json.encode(body.messages),
        echoed_fields=_encode_echoed_fields(request),
        should_store=request.store is not False,
        previous_response_id=request.previous_response_id,
        # A plain function needs no entry: the model sees it under the client's own name.
        tools={name: tool for name, tool in tools.items() if tool != ClientTool(name)},
        skipped_item_types=find_skipped_item_types(request),
    )


def _check_response_supported(request: ResponsesRequest) -> None:
    """Raise RequestError if the response is to be computed in the background, or if its input has an image or file."""
    if request.background:
        raise field_error("background", "not supported, expected false: a response is computed while its client waits")
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        for field in ("content", "output"):
            refuse_media(f"input[{index}].{field}", item.get(field), "input_text")


_RESPONSES_FIELDS = {
    "messages": "input", "response_format.json_schema": "text.format", "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}  # fmt: skip
"""Field of a chat -> field of `/v1/responses` from which it was converted."""


def _get_responses_field(param: str) -> str:
    """Return the field of `/v1/responses` from which a field of the chat was converted.

    "response_format.json_schema.schema" gives "text.format.schema". A field of a message gives "input", because the
    messages of the chat are counted differently than the items of the input.
    """
    for chat_field, responses_field in _RESPONSES_FIELDS.items():
        if param.startswith(chat_field):
            return responses_field if chat_field == "messages" else param.replace(chat_field, responses_field, 1)
    return param


def _encode_echoed_fields(request: ResponsesRequest) -> bytes:
    """Return the JSON of the fields that the answer to a body repeats. A large one counts as missing."""
    fields = dict(ECHOED_DEFAULTS)
    for name in ECHOED_DEFAULTS:
        value = getattr(request, name)
        if value is not None:
            value_json = msgspec.json.encode(value)
            if len(value_json) <= ECHOED_BYTES_MAX:
                fields[name] = msgspec.Raw(value_json)
    return msgspec.json.encode(fields)


def _check_text_only(request: CountRequest) -> None:
    """Raise RequestError for the first image or document."""
    media = find_media(request)
    if media is not None:
        path, kind = media
        # Claude Code recognises these first words, and repeats the request without the image.
        raise RequestError(f"Could not process {kind}: {path} is one; this model reads text only", param=path)


def _read_chat_body(
    body: ChatRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    path: str = "/v1/chat/completions",
    tools: Mapping[str, ClientTool] = MappingProxyType({}),
) -> ParsedRequest:
    """Tokenize the prompt of a chat, and decide how its answer is constrained and parsed. Raises RequestError.

    `path`: path of the requested API, for errors. `tools`: custom tools, whose input is free text, by name.
    """
    check_supported(body)
    token_ids, prompt_text = _encode_prompt(body, tokenizer)
    prompt_field = "input" if path == "/v1/responses" else "messages"
    prompt = _truncate_prompt(prompt_field, token_ids, body, limits, path)
    parser_config = make_parser_config(body, prompt_text, limits)
    reasoning_ids = reasoning_token_ids(parser_config, tokenizer)
    grammar_tools = {name: tool for name, tool in tools.items() if tool.syntax is not None}
    constraint = build_constraint(body, limits, reasoning_ids, grammar_tools)
    # Of the messages, the answer needs the last one's role, and its text if that is echoed.
    last_message = body.messages[-1]
    kept_message = {"role": last_message["role"]}
    if body.echo and isinstance(last_message.get("content"), str):
        kept_message["content"] = last_message["content"]
    return ParsedRequest(
        body=_strip_large_fields(body, messages=[kept_message]),
        prompts=[prompt],
        api=API_KIND_BY_PATH[path],
        parser_config=parser_config,
        constraint=constraint,
        kv_source=read_kv_source(body.kv_transfer_params) if limits.has_transfers else None,
    )


def reasoning_token_ids(config: OutputParserConfig, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return (token that opens reasoning, token that ends it), between which an answer is not constrained.

    The opening token is None if the prompt has already opened the reasoning. Both are None without reasoning, or if its
    end is several tokens.
    """
    if config.reasoning_format is None or config.initial_state == "after":
        return None, None
    format = REASONING_FORMATS[config.reasoning_format]
    end_id = _find_token(format.close_markers, tokenizer)
    if config.initial_state == "inside" or end_id is None:
        return None, end_id
    return _find_token(format.open_markers, tokenizer), end_id


def _find_token(texts: Sequence[str], tokenizer: Tokenizer) -> int | None:
    return next((token_id for token_id in map(tokenizer.token_to_id, texts) if token_id is not None), None)


def build_constraint(
    body: ChatRequest | CompletionRequest,
    limits: ModelLimits,
    reasoning_ids: tuple[int | None, int | None] = (None, None),
    grammar_tools: Mapping[str, ClientTool] = MappingProxyType({}),
) -> EncodedConstraint | None:
    """Return the format that the answer to a request must match; None if any answer is allowed. Raises RequestError.

    It is a requested format, such as a JSON schema, or comes from tools, or from a simulation's script.
    `reasoning_ids`: tokens that open and end reasoning, which is not constrained. `grammar_tools`: custom tools with a
    grammar, by name.
    """
    requested = parse_requested_constraint(body, limits.call_format, grammar_tools)
    has_text_format = requested is not None and requested.param != "tools"  # strict tools constrain their calls alone
    must_call = requested is not None and requested.param == "tool_choice"
    if limits.script and isinstance(body, ChatRequest) and not must_call:
        # A simulated engine answers with the next turn of its script, but not with a text where a format is requested.
        scripted = make_scripted_constraint(body, limits.script, limits.call_format, grammar_tools)
        is_scripted_text = scripted.param != "tools"
        if not (is_scripted_text and has_text_format):
            requested = scripted
    if requested is None:
        return None
    if limits.constraint_refusal is not None:
        raise field_error(requested.param, limits.constraint_refusal)
    return EncodedConstraint(requested.param, msgspec.json.encode(requested.format), *reasoning_ids)


def _encode_prompt(body: ChatRequest, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return the token ids of a chat's prompt, and the text of at least its end.

    The text shows whether the chat template has opened the reasoning. Raises RequestError.
    """
    token_ids = body.prompt_token_ids
    if token_ids is None:
        if body.answered_tokens:
            raise bad_value("answered_tokens", body.answered_tokens, "none, or prompt_token_ids")
        text = tokenizer.render_chat_text(body)
        return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens)), text
    # A router has tokenized the prompt, and may have appended tokens that another engine has generated.
    end = max(len(token_ids) - (body.answered_tokens or 0), 0)
    last_ids = token_ids[max(end - _PROMPT_END_TOKENS, 0) : end]
    return token_ids, tokenizer.decode(last_ids, skip_special_tokens=False)


def make_parser_config(body: ChatRequest, prompt: str, limits: ModelLimits) -> OutputParserConfig:
    """Return how reasoning and tool calls are found in the answer to a chat. `prompt`: text of at least its end."""
    reasoning_state: ReasoningState = "after"
    if limits.reasoning_format is not None:
        reasoning_format = REASONING_FORMATS[limits.reasoning_format]
        reasoning_state = initial_reasoning_state(reasoning_format, prompt, _get_continued_text(body))
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    return OutputParserConfig(
        reasoning_format=limits.reasoning_format,
        initial_state=reasoning_state,
        shows_reasoning=body.include_reasoning is not False,
        call_format=limits.call_format if tools else None,
        parameter_types=read_parameter_types(tools) if tools and limits.call_format == "qwen3_coder" else {},
        single_call=body.parallel_tool_calls is False,
        requires_call=is_call_required(body),
        names_function=names_function(body),
    )


def _get_continued_text(body: ChatRequest) -> str | None:
    """Return the text of the last message if the answer continues it; else None."""
    content = body.messages[-1].get("content") if body.continue_final_message else None
    if isinstance(content, list):
        last_part = content[-1] if content else None
        content = last_part.get("text") if isinstance(last_part, dict) else None
    return content if isinstance(content, str) else None


def read_completion(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ParsedRequest:
    """Parse a body of `/v1/completions`, which has one prompt or several, as text or token ids. Raises RequestError."""
    body = parse_completion(data)
    check_supported(body)
    has_several_prompts = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    body_prompts = body.prompt if has_several_prompts else [body.prompt]
    sample_count = body.n or 1
    if len(body_prompts) * sample_count > MAX_CHOICES:
        choices_text = f"{len(body_prompts)} prompts x {sample_count} samples"
        raise field_error("n", f"{choices_text}, expected at most {MAX_CHOICES} together")
    prompts: list[list[int]] = []
    for index, token_ids in enumerate(tokenizer.encode_completion(body)):
        field = "prompt" if len(body_prompts) == 1 else f"prompt[{index}]"
        prompts.append(_truncate_prompt(field, token_ids, body, limits))
    prompt_texts = [""] * len(prompts)
    if body.echo:
        prompt_texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(token_ids, skip_special_tokens=False)
            for prompt, token_ids in zip(body_prompts, prompts)
        ]
    return ParsedRequest(
        body=_strip_large_fields(body, prompt=""),
        prompts=prompts,
        api="completion",
        is_prompt_only=is_echo_only_request(body),
        prompt_texts=prompt_texts,
        constraint=build_constraint(body, limits),
        kv_source=read_kv_source(body.kv_transfer_params) if limits.has_transfers else None,
    )


def _truncate_prompt(
    param: str, prompt: list[int], body: ChatRequest | CompletionRequest, limits: ModelLimits, path: str = ""
) -> list[int]:
    """Return the last tokens of a prompt, as many as the request's `truncate_prompt_tokens` says, or all by default.

    With `truncation_side` "right" these are the first. -1 keeps as many as the model takes. `param`, `path`: the
    prompt's field and the path of the API, for errors. Raises RequestError, also if the prompt is too long.
    """
    kept_tokens = body.truncate_prompt_tokens
    if kept_tokens is not None:
        if kept_tokens == 0 or kept_tokens > limits.max_model_len:
            expected = f"-1, or 1 to max_model_len ({limits.max_model_len})"
            raise bad_value("truncate_prompt_tokens", kept_tokens, expected)
        if kept_tokens == -1:
            kept_tokens = limits.max_model_len - 1  # leaves room for one token of the answer
        prompt = prompt[:kept_tokens] if body.truncation_side == "right" else prompt[-kept_tokens:]
    check_prompt(prompt, limits, param, path)
    return prompt


def _strip_large_fields(body: ChatRequest | CompletionRequest, **replacements: Any) -> ChatRequest | CompletionRequest:
    """Return the body with `replacements`, and without fields that may be large and that only parsing needs."""
    fields = msgspec.structs.asdict(body)
    large_types = (dict, list, ResponseFormat, StructuredOutputs)
    large_fields = [
        name for name, value in fields.items() if isinstance(value, large_types) and name not in _SAMPLING_FIELDS
    ]
    return msgspec.structs.replace(body, **{**dict.fromkeys(large_fields), **replacements})
