"""Chat and completion bodies, as OpenAI's and vLLM's clients send them, checked for the engine.

Owns the names, types, ranges and defaults of fields (vLLM's), and the errors that name them. `parse_chat` and
`parse_completion` refuse what an engine could not serve, and ignore unknown fields, as vLLM does.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.inspect import ListType, LiteralType, StructType, UnionType, type_info

from prompts.errors import RequestError, bad_value, field_error, format_value

Json = Any
Message = dict[str, Any]
_SURROGATE_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|" + _SURROGATE_PAIR + rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})")
"""Escapes in JSON; the group `half` is half of a surrogate pair without the other half."""
_ESCAPES_SEARCHED_MAX = 1_000_000
_LIST_INDEX = re.compile(r"\[[^\[\]]*\]")
_PATH_STEP = re.compile(r"\[(?P<index>[^\[\]]*)\]|(?P<name>[^.\[]+)")

# What a client may ask. Each of these numbers has two ends and each text a longest length, so that none can overflow,
# or cost more than a request of its size may, further inside. Bounds that depend on the model (token ids, the context)
# are checked where it is known. The engine's SamplingParams are made of the same types.
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
COUNT_MAX = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Samples = Annotated[int, Meta(ge=1, le=MAX_N)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Temperature = Annotated[float, Meta(ge=0.0, le=1000.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=COUNT_MAX)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=1000.0)]
TokenIdField = Annotated[int, Meta(ge=0, le=2**32 - 1)]
LogitBias = dict[TokenIdField, Annotated[float, Meta(ge=-100.0, le=100.0)]]
StopTokenIds = Annotated[list[TokenIdField], Meta(max_length=MAX_STOP_TOKEN_IDS)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
if TYPE_CHECKING:
    Prompt = str | list[str] | list[TokenIdField] | list[list[TokenIdField]]
else:
    Prompt = Any  # msgspec cannot tell lists apart by their items: `_check_prompt` does

MEDIA_PARTS = frozenset(
    {"image_url", "image", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio", "video_url",
     "video", "input_video", "file", "input_file", "audio_embeds", "video_embeds"}
)  # fmt: skip
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
              "tool_reference": "name"}  # fmt: skip
"""Part type -> the field that holds its text."""


def make_function_tool(name: str, description: Any, parameters: Any, **options: Any) -> Message:
    """Return a tool as chats have it, with the `options` that are not None, such as `strict`."""
    function = {"name": name, "description": description, "parameters": parameters}
    function |= {option: value for option, value in options.items() if value is not None}
    return {"type": "function", "function": function}


def is_media(part: Message) -> bool:
    """Whether a content part is something other than text."""
    part_type = part.get("type")
    return (isinstance(part_type, str) and part_type in MEDIA_PARTS) or (part_type is None and ("image_url" in part))


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Json] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Json] | None = None
    """Format of a structural tag; its older form has `structures` and `triggers`."""
    structures: list[dict[str, Json]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's constraints on an answer, of which one of the first six fields is given."""

    json: dict[str, Json] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Json] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class SharedRequest(Struct, kw_only=True, frozen=True):
    """Fields that chats, completions and responses share; None if the field was not sent, or sent as null."""

    model: str | None = None
    # Fields of OpenAI's API
    temperature: Temperature | None = None
    top_p: TopP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    user: str | None = None
    # Fields that vLLM adds
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    kv_transfer_params: dict[str, Json] | None = None


class CommonRequest(SharedRequest, kw_only=True, frozen=True):
    """Fields that chats and completions share, besides those of all APIs; None if the field was not sent."""

    # Fields of OpenAI's API
    max_tokens: Count | None = None
    n: Samples | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Fields that vLLM adds
    best_of: Count | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=COUNT_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: LogprobCount | None = None
    allowed_token_ids: list[TokenIdField] | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Json] | None = None
    logits_processors: list[Json] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = None
    guided_regex: Json = None
    guided_choice: Json = None
    guided_grammar: Json = None


class ChatRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of a request to `/v1/chat/completions`. `parse_chat` has checked the roles and contents of its messages."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: list[Message] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    mm_processor_kwargs: dict[str, Json] | None = None
    media_io_kwargs: dict[str, Json] | None = None
    prompt_token_ids: list[TokenIdField] | None = None
    """Token ids of the prompt, used instead of the messages. A router sends them to continue a broken answer."""
    answered_tokens: Count | None = None
    """Number of tokens at the end of `prompt_token_ids` that are the start of the answer to continue."""


class CompletionRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of a request to `/v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    suffix: str | None = None
    prompt_embeds: Json = None
    answered_tokens: Count | None = None
    """Number of the prompt's last token ids that are the beginning of the answer to continue."""


_T = TypeVar("_T")
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def parse_chat(data: bytes) -> ChatRequest:
    """Parse and check the body of a chat request. Raises RequestError, which names the wrong field."""
    request = decode_json(_chat_decoder, data)
    if not request.messages:
        raise bad_value("messages", request.messages, "at least one message")
    for message_index, message in enumerate(request.messages):
        _check_message(f"messages[{message_index}]", message)
    if request.add_generation_prompt and request.continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    if request.top_logprobs and not request.logprobs:
        raise field_error("top_logprobs", 'expected only together with "logprobs": true')
    for index, tool in enumerate(request.tools or ()):
        _check_tool(f"tools[{index}]", tool)
    _check_common_fields(request)
    return request


def parse_completion(data: bytes) -> CompletionRequest:
    """Parse and check the body of a completion request. Raises RequestError, which names the wrong field."""
    request = decode_json(_completion_decoder, data)
    _check_prompt(request.prompt)
    _check_common_fields(request)
    return request


def decode_json(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    """Decode the JSON body of a request. Raises RequestError, which says what is wrong, where, and what was expected.

    A float such as 5.0 counts as an integer, as in JSON Schema and vLLM.
    """
    try:
        return _decode_with_whole_floats(decoder, data)
    except msgspec.ValidationError as error:
        raise _make_field_error(str(error), data, decoder.type) from None
    except msgspec.DecodeError as error:
        problem = _find_lone_surrogate(data)
        if problem is None:
            problem = f"{error} after {len(data)} bytes" if "truncated" in str(error) else str(error)
        raise RequestError(f"the body is not valid JSON: {problem}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {_describe_utf8_error(data, error)}") from None
    except RecursionError:
        raise make_nesting_error() from None


def decode_or_none(text: str) -> Json:
    """Return the value of a JSON text; None for `null`, and for a text that is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def make_nesting_error() -> RequestError:
    """Return the error for a body whose lists and objects are nested too deeply for Python."""
    return RequestError("the body is not usable JSON: it is nested too deeply")


def _decode_with_whole_floats(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    """Decode a body; if an integer was sent as a float, decode it again with whole floats as integers."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    value: _T = msgspec.convert(_convert_whole_floats(msgspec.json.decode(data)), decoder.type, str_keys=True)
    return value


def _find_lone_surrogate(data: bytes) -> str | None:
    """Describe the first half of a surrogate pair that some clients send alone; None if there is none."""
    for match in itertools.islice(_ESCAPES.finditer(data), _ESCAPES_SEARCHED_MAX):
        if match["half"] is not None:
            text = match["half"].decode()
            return f"{text} at byte {match.start()} is half of a surrogate pair, expected the whole character"
    return None


def _convert_whole_floats(value: Json) -> Json:
    """Replace whole, exact floats in a JSON value by integers. Raises RecursionError for deeply nested values."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= 2**53 else value
    if isinstance(value, list):
        return [_convert_whole_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: _convert_whole_floats(item) for key, item in value.items()}
    return value


def _describe_utf8_error(data: bytes, error: UnicodeDecodeError) -> str:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as whole_error:  # msgspec counts from the start of the string it was reading
        error = whole_error
    return f"invalid UTF-8 at byte {error.start}"


def _make_field_error(message: str, data: bytes, body_type: Any) -> RequestError:
    """Return the client's error for an error message of msgspec, such as "Expected `int`, got `str` - at `$.n`".

    The client's error names the field (`n`), the value in the body `data`, and what was expected.
    """
    expectation, _, path = message.partition(" - at ")
    is_key = path.startswith("`key` in ")
    field = path.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if expectation.startswith("Object missing required field"):
        name = expectation.split("`")[1]
        full_name = f"{field}.{name}" if field else name
        return field_error(full_name, "missing, expected this field to be given")
    if not field:
        return RequestError(f"the body: {_lower_first(expectation)}")
    if is_key:
        return field_error(field, f"a key is wrong: {_lower_first(expectation.replace('`', ''))}")
    if expectation.startswith("Invalid enum value"):
        field_path = _LIST_INDEX.sub("", field).split(".")
        expectation = f"expected one of {', '.join(_find_enum_values(type_info(body_type), field_path))}"
    value = _find_value(data, field)
    if value is UNSET:
        return field_error(field, _lower_first(expectation.replace("`", "")))
    expectation = expectation.split(", got")[0].replace("`", "")  # the value says more than msgspec's ", got `str`"
    return field_error(field, f"got {format_value(value)}, {_lower_first(expectation)}")


def _find_enum_values(value_type: Any, field_path: list[str]) -> list[str]:
    """Return the values that an enumerated field of a request may have; none if it is another kind of field.

    `value_type`: msgspec's description of the type that contains the field. `field_path`: names of the fields down to
    this one, such as ["response_format", "type"].
    """
    if isinstance(value_type, LiteralType) and not field_path:
        return [str(value) for value in value_type.values]
    if isinstance(value_type, UnionType):
        return [value for member in value_type.types for value in _find_enum_values(member, field_path)]
    if isinstance(value_type, ListType):
        return _find_enum_values(value_type.item_type, field_path)
    if isinstance(value_type, StructType) and field_path:
        for field in value_type.fields:
            if field.name == field_path[0]:
                return _find_enum_values(field.type, field_path[1:])
    return []


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _find_value(data: bytes, field: str) -> Json | UnsetType:
    """Return the value of a field in the JSON body of a request; UNSET if it cannot be found.

    `field`: path of the field, such as `messages[2].role`.
    """
    try:
        value: Json = msgspec.json.decode(data)
        for step in _PATH_STEP.finditer(field):
            value = value[int(step["index"]) if step["name"] is None else step["name"]]
    except (LookupError, TypeError, ValueError, RecursionError):  # msgspec writes `[...]` for a key of an object
        return UNSET
    return value


def _check_common_fields(request: CommonRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise field_error("stream_options", 'expected only together with "stream": true')
    max_tokens = request.max_tokens
    if max_tokens is not None and request.min_tokens is not None and request.min_tokens > max_tokens:
        raise bad_value("min_tokens", request.min_tokens, f"at most max_tokens ({max_tokens})")


def _check_message(param: str, message: Message) -> None:
    """Raise RequestError, which names the field, for a message that no template could render."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise bad_value(f"{param}.role", role, "a string such as system, user, assistant or tool")
    if isinstance(content, list):
        for part_index, part in enumerate(content):
            check_part(f"{param}.content[{part_index}]", part)
    elif content is not None and not isinstance(content, str):
        raise bad_value(f"{param}.content", content, "a string, an array of parts, or null")
    if message.get("tool_calls") is not None:
        _check_tool_calls(f"{param}.tool_calls", message["tool_calls"])


def check_part(param: str, part: Json) -> None:
    if isinstance(part, str):
        return  # vLLM takes bare strings among the parts
    if not isinstance(part, dict):
        raise bad_value(param, part, "an object with a type, or a string")
    part_type = part.get("type")
    if isinstance(part_type, str) and part_type in TEXT_PARTS:
        text_field = TEXT_PARTS[part_type]
        if not isinstance(part.get(text_field), str):
            raise bad_value(f"{param}.{text_field}", part.get(text_field), "a string")
    elif not (isinstance(part_type, str) and part_type in MEDIA_PARTS):
        raise bad_value(f"{param}.type", part_type, "text")


def _check_tool_calls(param: str, calls: Json) -> None:
    if not isinstance(calls, list):
        raise bad_value(param, calls, "an array of tool calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(f"{param}[{index}]", call, 'an object with "function": {"name": ..., "arguments": ...}')
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise bad_value(f"{param}[{index}].function.arguments", arguments, "a string of JSON")


def _check_tool(param: str, tool: Message) -> None:
    function = tool.get("function")
    if function is None and tool.get("type", "function") != "function":
        raise bad_value(f"{param}.type", tool["type"], '"function": only /v1/responses has other tools')
    if not isinstance(function, dict):
        raise bad_value(f"{param}.function", function, "an object with a name")
    if not isinstance(function.get("name"), str):
        raise bad_value(f"{param}.function.name", function.get("name"), "a string")


def _check_prompt(prompt: Json) -> None:
    """Raise RequestError unless a prompt is a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt:
        forms = "a string, an array of strings, an array of token ids or an array of arrays of token ids"
        raise bad_value("prompt", prompt, f"{forms}, not empty" if prompt == [] else forms)
    if isinstance(prompt[0], str):
        for index, item in enumerate(prompt):
            if not isinstance(item, str):
                raise bad_value(f"prompt[{index}]", item, "a string, as the first item is one")
    elif isinstance(prompt[0], list):
        expectation = "a non-empty array of token ids, as the first item is an array"
        for index, item in enumerate(prompt):
            if not isinstance(item, list) or not item:
                raise bad_value(f"prompt[{index}]", item, expectation)
            _check_token_ids(f"prompt[{index}]", item)
    else:
        _check_token_ids("prompt", prompt)


def _check_token_ids(param: str, ids: list[Json]) -> None:
    """Raise RequestError unless all items are token ids. A whole float among them is replaced by its integer."""
    for index, token_id in enumerate(ids):
        if isinstance(token_id, float) and token_id.is_integer():
            ids[index] = token_id = int(token_id)
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise bad_value(f"{param}[{index}]", token_id, "a token id (an integer >= 0)")
