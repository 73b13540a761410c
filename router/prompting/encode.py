"""A request's prompt as token ids, with bounds on the work, and the fields that decide where its body goes. Pure: no
process, no thread, no clock.

Where a prompt cannot be read, where the worker will have to refuse it, and where it will reuse nothing of it, the
answer is None: such a request is routed by load alone and the worker's own words reach the client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from prompts.body_digests import count_openings
from prompts.errors import RequestError
from prompts.responses import get_response_id_of_item
from prompts.routing import RoutingFields, RoutingRequest, check_object, convert_source_to_chat, make_routing_request
from prompts.schemas import decode_json
from prompts.tokenizer import Tokenizer

TOKENS_MAX = 2**21
"""Of a prompt for a model that does not tell how many it takes."""
CHARS_PER_TOKEN_MAX = 16
"""Text is encoded up to so many characters for each token that the model takes; what is longer is too long."""
COUNTED_CHARS = 4 << 20
"""Text up to here is encoded to its end, however little the model takes: the client is told how long its prompt is."""
CHARS_PER_TOKEN = 4
"""For estimates only."""
OBJECTS_MAX = 50_000
"""Messages, parts, tools and what they are made of: each costs a template some microseconds."""
VALUES_MAX = 8_000_000
LIGHT_BYTES, LIGHT_OBJECTS = 64 << 10, 512
"""Up to here a body takes well under 25 ms to decode and render."""
TOKENIZE_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
"""Not `chat_template`: a client's own is a program, and running it is for the worker to refuse, not for us to ask."""
NAME_BYTES_MAX = 4096
"""Of a value that decides where a request goes."""
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_ITEM_REFERENCE = re.compile(
    rb'"type"\s*:\s*"item_reference"\s*,\s*"id"\s*:\s*"([\w-]{1,256})"'
    rb'|"id"\s*:\s*"([\w-]{1,256})"\s*,\s*"type"\s*:\s*"item_reference"'
)
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


def is_light(body: bytes) -> bool:
    """Whether decoding and rendering a body keeps nobody waiting."""
    return len(body) <= LIGHT_BYTES and count_openings(body) <= LIGHT_OBJECTS


def is_within_bounds(body: bytes) -> bool:
    """Whether a body of valid JSON has few enough values to be built: counted, before anything is."""
    if len(body) <= VALUES_MAX and count_openings(body) <= OBJECTS_MAX:
        return True  # whatever of that stands in strings
    body_without_strings = _JSON_STRING.sub(b"", body)
    object_count = count_openings(body_without_strings)
    return object_count <= OBJECTS_MAX and object_count + body_without_strings.count(b",") <= VALUES_MAX


class _RawRoutingFields(msgspec.Struct):
    """The fields that decide where a request goes, unread: of everything else only the syntax is looked at."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    cache_salt: msgspec.Raw = msgspec.Raw(b"null")
    priority: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    user: msgspec.Raw = msgspec.Raw(b"null")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"null")
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"null")
    n: msgspec.Raw = msgspec.Raw(b"null")
    min_tokens: msgspec.Raw = msgspec.Raw(b"null")
    ignore_eos: msgspec.Raw = msgspec.Raw(b"null")
    stop: msgspec.Raw = msgspec.Raw(b"null")
    stop_token_ids: msgspec.Raw = msgspec.Raw(b"null")


_routing_decoder = msgspec.json.Decoder(_RawRoutingFields)
_json_decoder = msgspec.json.Decoder()
_SMALL_FIELDS = tuple(
    name for name in _RawRoutingFields.__struct_fields__ if name not in ("messages", "previous_response_id")
)
_ROUTING_FIELDS = (
    "model", "cache_salt", "priority", "stream", "user", "prompt_cache_key", "metadata_user_id",
    "truncate_prompt_tokens", "output_tokens_max", "output_tokens_min",
)  # fmt: skip
"""Fields of a RoutingRequest that `read_routing_fields` reads."""


class PromptSize(msgspec.Struct, frozen=True):
    """Number of tokens that the prompts of a body have, as a worker sees them."""

    tokens: int
    """Tokens of all prompts."""
    longest_tokens: int
    """Tokens of the longest prompt."""
    prompt_count: int = 1
    """Number of prompts."""
    is_exact: bool = True
    """False: the first has more than was counted."""


class RenderedPrompt(msgspec.Struct, eq=False):
    """A prompt as it was read."""

    token_ids: Sequence[int] | None = None
    """All of them; None as above."""
    is_whole: bool = True
    """False: the text is so long that its end was not encoded."""
    chat: RoutingRequest | None = None
    """The chat that `text` was rendered of, all of which was encoded."""
    text: str = ""


def truncate_prompt(ids: Sequence[int] | None, request: RoutingRequest, tokens_max: int | None) -> Sequence[int] | None:
    """The part of a prompt that a worker would see, at most one token more than it takes."""
    last_tokens = _truncation_tokens(request, tokens_max)
    if ids and last_tokens is not None:
        ids = ids[-last_tokens:]
    ids_max = (tokens_max or TOKENS_MAX) + 1
    return None if not ids else ids if len(ids) <= ids_max else ids[:ids_max]


def _truncation_tokens(request: RoutingRequest, tokens_max: int | None) -> int | None:
    """How much of a prompt's end a worker would see, where the request says so (`truncate_prompt_tokens`; -1 as in
    vLLM: what the model takes, with room for one token)."""
    last_tokens = request.truncate_prompt_tokens
    if last_tokens == -1 and tokens_max is not None:
        return max(tokens_max - 1, 1)
    return last_tokens if last_tokens is not None and last_tokens > 0 else None


def measure_prompts(
    ids: Sequence[int] | None,
    request: RoutingRequest,
    tokens_max: int | None,
    further_tokens: Sequence[int] = (),
    *,
    is_exact: bool = True,
) -> PromptSize | None:
    """Return the size of a body's prompts: of the first, which has these ids before they are truncated, and of the
    others (`count_further_tokens`)."""
    if ids is None:
        return None
    last_tokens = _truncation_tokens(request, tokens_max)
    lengths = (
        [len(ids), *further_tokens]
        if last_tokens is None
        else [min(length, last_tokens) for length in (len(ids), *further_tokens)]
    )
    return PromptSize(sum(lengths), max(lengths), len(lengths), is_exact)


def count_further_tokens(request: RoutingRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Count the tokens of each prompt of a body behind the first. Without a tokenizer those of texts are estimated."""
    prompt = request.prompt
    if not isinstance(prompt, list) or isinstance(prompt[0], int):
        return []
    adds_special_tokens = request.add_special_tokens is not False
    token_counts = []
    for further_prompt in prompt[1:]:
        if not isinstance(further_prompt, str):
            token_counts.append(len(further_prompt) if isinstance(further_prompt, list) else 0)
        elif tokenizer is None:
            token_counts.append(len(further_prompt) // CHARS_PER_TOKEN)
        else:
            token_counts.append(len(tokenizer.encode_array(further_prompt, adds_special_tokens)))
    return token_counts


def read_prompt(
    request: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None,
    render: Callable[[RoutingRequest], str] | None = None,
) -> RenderedPrompt:  # fmt: skip
    """The prompt to route on, before it is cut: the first of several; with images, the text before the first one.
    `render`: renders chats, if not the tokenizer's template. Raises RequestError."""
    ids_max = (tokens_max or TOKENS_MAX) + 1
    if request.scores_prompt:
        return RenderedPrompt()
    if request.source is not None and tokenizer is not None:
        request = convert_source_to_chat(request, tokenizer.chat_template)
    if request.kind == "chat":
        if tokenizer is None or request.messages is None or tokenizer.chat_template is None:
            return RenderedPrompt()
        if request.chat_template is not None:
            return (
                RenderedPrompt()
            )  # a program of the client's: it could run for ever, and workers refuse it by default
        text = (render or tokenizer.render_chat_text)(request)
        rendered_prompt = _encode_text(tokenizer, text, request, bool(request.add_special_tokens), ids_max)
        if len(text) <= ids_max * CHARS_PER_TOKEN_MAX:
            rendered_prompt.chat, rendered_prompt.text = request, text
        return rendered_prompt
    prompt = request.prompt
    if prompt is None:
        return RenderedPrompt()
    first_prompt = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0]
    if isinstance(first_prompt, str):
        adds_special_tokens = request.add_special_tokens is not False
        return (
            RenderedPrompt()
            if tokenizer is None
            else _encode_text(tokenizer, first_prompt, request, adds_special_tokens, ids_max)
        )
    try:
        return RenderedPrompt(msgspec.convert(first_prompt, _TokenIds))
    except msgspec.ValidationError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from None


def _encode_text(
    tokenizer: Tokenizer, text: str, request: RoutingRequest, add_special_tokens: bool, ids_max: int
) -> RenderedPrompt:
    """Ids of a text, of which no more is encoded than the model could take, or than is counted anyway. None where that
    tells nothing: the end is what counts, or so much text makes so few tokens."""
    chars_max = ids_max * CHARS_PER_TOKEN_MAX
    if len(text) > chars_max and request.truncate_prompt_tokens is not None:
        return RenderedPrompt()
    encoded_text = text[: max(chars_max, COUNTED_CHARS)]
    ids, is_whole = tokenizer.encode_array(encoded_text, add_special_tokens), len(encoded_text) == len(text)
    return RenderedPrompt(ids if is_whole or len(ids) >= ids_max else None, is_whole)


def build_tokenize_request(request: RoutingRequest, model: str) -> bytes | None:
    """Build the body of a `/tokenize` request; None where there is no text to tokenise, or there are images."""
    if request.source is not None:
        try:
            request = convert_source_to_chat(request, None)
        except RequestError:
            return None
    if request.scores_prompt or request.has_media:
        return None
    if request.kind == "chat":
        if request.messages is None or request.chat_template is not None:
            return None
        fields = {name: getattr(request, name) for name in TOKENIZE_FIELDS}
        if request.continue_final_message:
            fields["add_generation_prompt"] = False  # vLLM's default is true, and refuses both
        return msgspec.json.encode(
            {"model": model, **{name: value for name, value in fields.items() if value is not None}}
        )
    prompt = request.prompt
    first_prompt = prompt if isinstance(prompt, str) else prompt[0] if prompt else None
    if not isinstance(first_prompt, str):
        return None
    adds_special_tokens = request.add_special_tokens is not False
    return msgspec.json.encode({"model": model, "prompt": first_prompt, "add_special_tokens": adds_special_tokens})


def read_routing_fields(body: bytes) -> dict[str, Any]:
    """Read the fields that `RoutingRequest` needs before the prompt is read, and whether there are `messages`. Builds
    nothing of the rest. Raises RequestError where the body is no JSON object."""
    check_object(body)
    fields = decode_json(_routing_decoder, body)
    values = {name: _decode_small_value(getattr(fields, name)) for name in _SMALL_FIELDS}
    output_tokens_max = values.pop("max_output_tokens")  # what Responses call it
    if values["max_tokens"] is None:
        values["max_tokens"] = output_tokens_max
    request = make_routing_request("other", RoutingFields(**values))
    return {name: getattr(request, name) for name in _ROUTING_FIELDS} | {
        "stored_response_id": previous
        if isinstance(previous := _decode_small_value(fields.previous_response_id), str)
        else _find_referenced_response(body),
        "has_messages": bytes(memoryview(fields.messages)[:1]) == b"[",
    }


def _find_referenced_response(body: bytes) -> str | None:
    """Return the id of the response that holds the first item which a body only names."""
    reference = _ITEM_REFERENCE.search(body) if b'"item_reference"' in body else None
    return None if reference is None else get_response_id_of_item((reference[1] or reference[2]).decode())


def _decode_small_value(raw: msgspec.Raw) -> Any:
    """A small value; a long one comes back cut, as the text that it is: nobody has such a name. Raises RequestError."""
    data = bytes(memoryview(raw)[: NAME_BYTES_MAX + 1])
    if len(data) > NAME_BYTES_MAX:
        return data.decode("utf-8", "replace")
    return decode_json(_json_decoder, data)
