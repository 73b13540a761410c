"""The fields of a request body by which a router routes: the prompt, and a few that decide where it should go.

Lenient by design: numbers and flags are read as workers read them (pydantic's rules), and other fields of a wrong type
count as absent, because the worker names the mistake better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from prompts.anthropic import CountRequest, MessagesRequest, convert_to_chat, depends_on_template, parse_messages
from prompts.chat_completions import Message, Prompt, decode_json, is_media
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError, bad_value
from prompts.responses import ResponsesRequest, find_item_references, get_response_id_of_item, parse_responses_request
from prompts.responses import convert_to_chat as convert_response_to_chat
from prompts.worker_fields import may_have_worker_fields

ApiKind = Literal["chat", "completion", "messages", "responses", "other"]
API_KIND_BY_PATH: dict[str, ApiKind] = {
    "/v1/chat/completions": "chat", "/v1/completions": "completion", "/v1/messages": "messages",
    "/v1/responses": "responses",
}  # fmt: skip
"""Paths of the APIs that have prompts."""


_RENDERED_FIELDS = ("messages", "tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
_OBJECT_START = re.compile(rb"[ \t\r\n]*\{")
_INTEGER = re.compile(r"(?P<digits>[+-]?[0-9]+(?:_[0-9]+)*)(?:\.0*)?")
_INTEGER_CHARS_MAX = 64
_FLAG_WORDS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}
_PRIORITY_MAX = 2**63 - 1


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """Fields of a request body by which a router chooses a worker: the prompt, and those that limit the choice.

    A chat has `messages`, a completion has `prompt`. Fields that a client did not send, or sent with a wrong type, are
    None.
    """

    kind: ApiKind
    source: CountRequest | ResponsesRequest | None = None
    """Body of the Messages or Responses API, not yet converted to a chat; None if a worker will refuse it."""
    model: str | None = None
    messages: list[Message] | None = None
    """Messages of a chat; None if they have a wrong type."""
    prompt: Prompt | None = None
    """Prompt of a completion: a text, token ids, or a list of several prompts."""
    tools: list[Message] | None = None
    documents: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    output_tokens_max: int = 0
    """Most tokens of all answers to the request together; 0 if the client sets no limit."""
    output_tokens_min: int = 0
    """Fewest tokens of all answers together, by `min_tokens`, or by `ignore_eos` if nothing else ends them."""
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata_user_id: str | None = None
    """The field `user_id` of the body's `metadata`."""
    stored_response_id: str | None = None
    """Id of a stored response that the prompt continues, which only one worker has."""
    opening_digest: str | None = None
    """Digest of the conversation's beginning, where it was computed without the messages."""
    scores_prompt: bool = False
    """Whether every prompt token gets a logprob, so that engines use no cached tokens."""
    echoes_chat: bool = False
    """Whether a chat has `echo`: vLLM then gives its prompt logprobs too, our engine does not."""
    has_worker_fields: bool = False
    """Whether the body may have fields that only routers may send to workers."""
    has_media: bool = False
    """Whether the prompt has images or other media; only the text before the first is tokenised."""

    def replace(self, **changes: Any) -> RoutingRequest:
        """Return a copy with other values of some fields."""
        return msgspec.structs.replace(self, **changes)


_value_decoder = msgspec.json.Decoder()
RawFields = dict[str, msgspec.Raw]
"""Top-level fields of a body: name -> value as undecoded JSON."""
_raw_fields_decoder = msgspec.json.Decoder(RawFields)


def parse_routing(path: str, data: bytes) -> RoutingRequest:
    """Read a body sent to `path`. Raises RequestError if it is no JSON object, or its priority no integer."""
    return parse_body(API_KIND_BY_PATH.get(path, "other"), data)


def decode_fields(data: bytes) -> RawFields:
    """Return the top-level fields of a body, their values as undecoded JSON. Raises RequestError for other JSON."""
    check_object(data)
    return decode_json(_raw_fields_decoder, data)


def parse_body(kind: ApiKind, data: bytes, raw_fields: RawFields | None = None) -> RoutingRequest:
    """Read the fields of a body that a router needs. Raises RequestError as `parse_routing` does.

    `raw_fields`: result of `decode_fields`, if the caller has it. A body that the worker will refuse raises nothing if
    its JSON and its priority are valid: the request then lacks the malformed fields.
    """
    if raw_fields is None:
        raw_fields = decode_fields(data)
    source = _parse_source(kind, data)
    if source is None:
        request = make_routing_request(kind, _decode_values(raw_fields, data))
    else:
        request = _make_from_source(source)
    return request.replace(has_worker_fields=True) if may_have_worker_fields(raw_fields) else request


def _parse_source(kind: ApiKind, data: bytes) -> MessagesRequest | ResponsesRequest | None:
    """Parse a body of the Messages or Responses API; None for one of another API, and for a malformed one."""
    try:
        if kind == "messages":
            return parse_messages(data)
        return parse_responses_request(data) if kind == "responses" else None
    except RequestError:
        return None  # the worker will say what is wrong


def _decode_values(raw_fields: RawFields, data: bytes) -> dict[str, Any]:
    """Decode the fields of a body that routing needs. Raises RequestError that names the place in `data`."""
    try:
        return {name: _value_decoder.decode(raw) for name, raw in raw_fields.items() if name in _DECODED_FIELDS}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields: dict[str, Any] = decode_json(_value_decoder, data)
        return fields


def make_routing_request(kind: ApiKind, fields: Mapping[str, Any]) -> RoutingRequest:
    """Make the routing request of a chat, a completion or a form from its fields, without values of a wrong type.

    Raises RequestError if the priority is no integer.
    """
    get = fields.get
    messages = _as_objects(get("messages"))
    output_tokens_max, output_tokens_min = _read_output_limits(fields)
    is_chat = kind == "chat" or bool(messages)
    # With `echo` and logprobs, the answer repeats the prompt, with a logprob for each token. For chats, only vLLM does.
    logprob_count = _as_int(get("top_logprobs", 0) if is_chat else get("logprobs"))
    echoes_with_logprobs = _as_bool(get("echo")) is True and logprob_count is not None
    return RoutingRequest(
        kind=kind,
        messages=messages or None,
        cache_salt=_as_string(get("cache_salt")) or None,
        priority=read_priority(get("priority")),
        stream=_as_bool(get("stream")) is True,
        output_tokens_max=output_tokens_max,
        output_tokens_min=output_tokens_min,
        metadata_user_id=_read_user_id(get("metadata")),
        scores_prompt=get("prompt_logprobs") is not None or (echoes_with_logprobs and not is_chat),
        echoes_chat=echoes_with_logprobs and is_chat,
        has_media=has_media(messages),
        **{name: read(fields[name]) for name, read in _FIELD_READERS.items() if name in fields},
    )


def _read_user_id(metadata: Any) -> str | None:
    return _as_string(metadata.get("user_id")) if isinstance(metadata, dict) else None


def _make_from_source(source: MessagesRequest | ResponsesRequest) -> RoutingRequest:
    """Make the routing request of a body that is converted to a chat later."""
    request = RoutingRequest(
        kind="messages",
        source=source,
        model=source.model,
        cache_salt=source.cache_salt,
        priority=read_priority(source.priority),
        stream=source.stream is True,
        metadata_user_id=_read_user_id(source.metadata),
    )
    if isinstance(source, MessagesRequest):
        # The step that reads the prompt draws a token, also if the body asks for none.
        return request.replace(output_tokens_max=max(source.max_tokens, 1))
    return request.replace(
        kind="responses",
        output_tokens_max=source.max_output_tokens or 0,
        truncate_prompt_tokens=-1 if source.truncation == "auto" else None,
        user=source.user,
        prompt_cache_key=source.prompt_cache_key,
        stored_response_id=source.previous_response_id or _find_referenced_response_id(source),
    )


def _find_referenced_response_id(source: ResponsesRequest) -> str | None:
    """Return the id of the stored response with the first item that a body refers to by its id."""
    try:
        return next(map(get_response_id_of_item, find_item_references(source)), None)
    except RequestError:
        return None  # the worker says what is wrong with the name


def convert_source_to_chat(
    request: RoutingRequest, template: ChatTemplate | None, *, keeps_system_in_place: bool = False
) -> RoutingRequest:
    """Convert a body of the Messages or Responses API to the chat that a template renders.

    Raises RequestError if the body refers to a response that only the worker stores. It is also raised without a
    template for a body that becomes another chat for another template, unless `keeps_system_in_place`.
    """
    source = request.source
    if isinstance(source, ResponsesRequest):
        if source.previous_response_id is not None:
            raise RequestError("only the worker knows what was said before", param="previous_response_id")
        if find_item_references(source):
            raise RequestError("only the worker knows the items that are named", param="input")
        fields = convert_response_to_chat(source)
    else:
        assert source is not None
        if template is None and not keeps_system_in_place and depends_on_template(source):
            raise RequestError("what this prompt is depends on the model's chat template")
        fields = convert_to_chat(source, template)
    chat_fields = {name: fields[name] for name in _RENDERED_FIELDS if name in fields}
    return request.replace(kind="chat", source=None, has_media=has_media(chat_fields["messages"]), **chat_fields)


def check_object(data: bytes) -> None:
    """Raise RequestError for bytes that cannot be a JSON object."""
    if _OBJECT_START.match(data) is None:
        expected = "an object, in UTF-8 without a byte order mark"
        raise RequestError(f"the body is not valid JSON: expected {expected}")


def _as_string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_bool(value: Any) -> bool | None:
    """Return a value as a flag by pydantic's rules; None for a value that is no flag."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else None
    return _FLAG_WORDS.get(value.lower()) if isinstance(value, str) else None


def _as_int(value: Any) -> int | None:
    """Return a value as an integer by pydantic's rules, which take a whole float, a text or a flag too."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, float)):
        return int(value) if isinstance(value, bool) or value.is_integer() else None
    if isinstance(value, str) and len(value) <= _INTEGER_CHARS_MAX:
        match = _INTEGER.fullmatch(value.strip())
        return None if match is None else int(match["digits"])
    return None


def _as_dict(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def read_priority(value: Any) -> int:
    """Return a body's `priority` within 64 bits; 0 if it has none. Raises RequestError if it is no integer."""
    if value is None:
        return 0
    number = _as_int(value)
    if number is None:
        raise bad_value("priority", value, "an integer")
    return max(-_PRIORITY_MAX, min(number, _PRIORITY_MAX))


def _read_output_limits(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the most and the fewest tokens that all choices of a body can have; 0 for no limit."""
    max_tokens = _as_int(fields.get("max_completion_tokens"))
    if max_tokens is None:
        max_tokens = _as_int(fields.get("max_tokens"))
    choice_count = max(_as_int(fields.get("n")) or 1, 1)
    ends_at_limit = (
        _as_bool(fields.get("ignore_eos")) is True and not fields.get("stop") and not fields.get("stop_token_ids")
    )
    min_tokens = max_tokens if ends_at_limit else _as_int(fields.get("min_tokens"))
    return max(max_tokens or 0, 0) * choice_count, max(min_tokens or 0, 0) * choice_count


def _as_objects(value: Any) -> list[Message] | None:
    """Return a list of objects; None for any other value."""
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


def _as_prompt(value: Any) -> Prompt | None:
    """Return a prompt in one of its four forms, of which only the first item is checked; None for another value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and (type(value[0]) is int or isinstance(value[0], (str, list))):
        return value
    return None


def has_media(messages: list[Message] | None) -> bool:
    """Whether a message has images or other media."""
    for message in messages or ():
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and is_media(part):
                    return True
    return False


_FIELD_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("model", "chat_template", "reasoning_effort", "truncation_side", "user", "prompt_cache_key"), _as_string
    ),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "add_special_tokens"), _as_bool),
    **dict.fromkeys(("tools", "documents"), _as_objects),
    "prompt": _as_prompt,
    "chat_template_kwargs": _as_dict,
    "truncate_prompt_tokens": _as_int,
}
"""Field of a chat or completion that a routing request has, too -> how its value is read; None for a wrong type."""
_DECODED_FIELDS = _FIELD_READERS.keys() | {
    "messages", "cache_salt", "priority", "stream", "max_tokens", "max_completion_tokens", "n", "min_tokens",
    "ignore_eos", "stop", "stop_token_ids", "metadata", "prompt_logprobs", "echo", "logprobs", "top_logprobs",
}  # fmt: skip
"""Fields of a chat or completion that `make_routing_request` reads."""
