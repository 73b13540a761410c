"""A request's prompt as token ids, with bounds on the work, and the fields of a body that routing needs. No I/O.

Token ids are None if a prompt cannot be read, if the worker will refuse it, or if no cache can hold it. Such a request
is routed by load alone, and the client gets the worker's own error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from prompts.chat_completions import decode_json
from prompts.errors import RequestError
from prompts.responses import get_response_id_of_item
from prompts.routing import (
    ApiKind,
    RoutingRequest,
    convert_source_to_chat,
    decode_fields,
    make_routing_request,
)
from prompts.tokenizer import Tokenizer

TOKENS_MAX = 2**21
"""Most tokens of a prompt if the limit of its model is unknown."""
CHARS_PER_TOKEN_MAX = 16
"""Characters of text that are encoded for each token that the model takes; a longer prompt has too many tokens."""
COUNTED_CHARS = 4 << 20
"""Text up to this length is encoded whole, so that an error can say how many tokens a prompt has."""
CHARS_PER_TOKEN = 4
"""Estimated characters of a token."""
OBJECTS_MAX = 50_000
"""Most lists and objects of a body: each costs a template some microseconds."""
VALUES_MAX = 8_000_000
LIGHT_BYTES, LIGHT_OBJECTS = 64 << 10, 512
"""Largest body that takes well under 25 ms to decode and render."""
TOKENIZE_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
"""Fields of a `/tokenize` request. A client's `chat_template` is a program, which workers refuse by default."""
NAME_BYTES_MAX = 4096
"""Longest value of a field that decides where a request goes."""
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_ITEM_REFERENCE = re.compile(
    rb'"type"\s*:\s*"item_reference"\s*,\s*"id"\s*:\s*"([\w-]{1,256})"'
    rb'|"id"\s*:\s*"([\w-]{1,256})"\s*,\s*"type"\s*:\s*"item_reference"'
)
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


def has_more_objects(text: bytes, objects_max: int) -> bool:
    """Return whether JSON may have more lists and objects than `objects_max`. Brackets in strings count too."""
    return len(text) > 2 * objects_max and _count_openings(text) > objects_max  # an object has two brackets


def _count_openings(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def is_light(body: bytes) -> bool:
    """Whether a body is small enough to be decoded and rendered while other requests wait."""
    return len(body) <= LIGHT_BYTES and not has_more_objects(body, LIGHT_OBJECTS)


def is_within_bounds(body: bytes) -> bool:
    """Whether a body of valid JSON has few enough values to be decoded."""
    if len(body) <= VALUES_MAX and not has_more_objects(body, OBJECTS_MAX):
        return True  # even if none of the brackets is inside of a string
    body_without_strings = _JSON_STRING.sub(b"", body)
    object_count = _count_openings(body_without_strings)
    return object_count <= OBJECTS_MAX and object_count + body_without_strings.count(b",") <= VALUES_MAX


_SMALL_FIELDS = (
    "model", "cache_salt", "priority", "stream", "user", "prompt_cache_key", "metadata", "truncate_prompt_tokens",
    "truncation_side", "max_tokens", "max_completion_tokens", "n", "min_tokens", "ignore_eos", "stop",
    "stop_token_ids", "echo", "top_logprobs",
)  # fmt: skip
"""Fields that `read_large_request` decodes."""
_json_decoder = msgspec.json.Decoder()


class PromptSize(msgspec.Struct, frozen=True, gc=False):
    """Number of tokens of a body's prompts, as a worker counts them."""

    tokens: int
    """Tokens of all prompts."""
    longest_tokens: int
    prompt_count: int = 1
    is_exact: bool = True
    """Whether all of the first prompt was counted."""


class RenderedPrompt(msgspec.Struct, eq=False):
    """A prompt, rendered and encoded."""

    token_ids: Sequence[int] | None = None
    """All token ids, or None if they are of no use (see the module)."""
    is_whole: bool = True
    """Whether the text was encoded to its end."""
    chat: RoutingRequest | None = None
    """The chat that was rendered, if its text is not too long for the model."""
    text: str = ""


def truncate_prompt(ids: Sequence[int] | None, request: RoutingRequest, tokens_max: int | None) -> Sequence[int] | None:
    """Return the part of a prompt that a worker would use, with at most one token more than the worker accepts."""
    kept_tokens = _get_kept_tokens(request, tokens_max)
    if ids and kept_tokens is not None:
        ids = ids[:kept_tokens] if request.truncation_side == "right" else ids[-kept_tokens:]
    ids_max = (tokens_max or TOKENS_MAX) + 1
    if not ids:
        return None
    return ids if len(ids) <= ids_max else ids[:ids_max]


def _get_kept_tokens(request: RoutingRequest, tokens_max: int | None) -> int | None:
    """Return how many tokens of a prompt a worker would use (`truncate_prompt_tokens`); None for all."""
    kept_tokens = request.truncate_prompt_tokens
    if kept_tokens == -1 and tokens_max is not None:  # as in vLLM, the longest prompt that leaves room for one token
        return max(tokens_max - 1, 1)
    return kept_tokens if kept_tokens is not None and kept_tokens > 0 else None


def measure_prompts(
    token_ids: Sequence[int] | None,
    request: RoutingRequest,
    tokens_max: int | None,
    further_lengths: Sequence[int] = (),
    *,
    is_exact: bool = True,
) -> PromptSize | None:
    """Return the number of tokens of a body's prompts after truncation; None if the first prompt has no ids.

    `token_ids`: ids of the first prompt before truncation. `tokens_max`: most tokens that the model takes.
    `further_lengths`: tokens of each other prompt. `is_exact`: False if only a part of the first prompt was encoded.
    """
    if token_ids is None:
        return None
    lengths = [len(token_ids), *further_lengths]
    kept_tokens = _get_kept_tokens(request, tokens_max)
    if kept_tokens is not None:
        lengths = [min(length, kept_tokens) for length in lengths]
    return PromptSize(tokens=sum(lengths), longest_tokens=max(lengths), prompt_count=len(lengths), is_exact=is_exact)


def count_further_tokens(request: RoutingRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token counts of a completion request's prompts after the first; estimates if there is no tokenizer."""
    prompt = request.prompt
    if not isinstance(prompt, list) or isinstance(prompt[0], int):  # a text, or the token ids of one prompt
        return []
    adds_special_tokens = request.add_special_tokens is not False
    token_counts = []
    for further_prompt in prompt[1:]:
        if not isinstance(further_prompt, str):  # token ids, or a wrong type, for which the worker gives the error
            token_counts.append(len(further_prompt) if isinstance(further_prompt, list) else 0)
        elif tokenizer is None:
            token_counts.append(len(further_prompt) // CHARS_PER_TOKEN)
        else:
            token_counts.append(len(tokenizer.encode_array(further_prompt, adds_special_tokens)))
    return token_counts


def read_prompt(request: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None) -> RenderedPrompt:
    """Render and encode the part of a prompt by which a router finds its cached blocks, without truncating it.

    Of several prompts only the first is read, and of a prompt with images only the text before the first image. The
    result has no ids if the model has no tokenizer here, or if the body has no prompt. Raises RequestError.
    """
    if request.scores_prompt:
        return RenderedPrompt()  # the worker computes the whole prompt to score it, so no cached block helps
    ids_max = (tokens_max or TOKENS_MAX) + 1
    if request.source is not None and tokenizer is not None:
        request = convert_source_to_chat(request, tokenizer.chat_template)
    if request.kind == "chat":
        return _read_chat(request, tokenizer, ids_max)
    return _read_completion(request, tokenizer, ids_max)


def _read_completion(request: RoutingRequest, tokenizer: Tokenizer | None, ids_max: int) -> RenderedPrompt:
    """Encode the first prompt of a completion; the result has no ids for a text without a tokenizer."""
    prompt = _get_first_prompt(request)
    if prompt is None:
        return RenderedPrompt()
    if isinstance(prompt, str):
        if tokenizer is None:
            return RenderedPrompt()
        adds_special_tokens = request.add_special_tokens is not False
        return _encode_text(tokenizer, prompt, request, ids_max, adds_special_tokens=adds_special_tokens)
    try:
        return RenderedPrompt(msgspec.convert(prompt, _TokenIds))
    except msgspec.ValidationError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from None


def _read_chat(request: RoutingRequest, tokenizer: Tokenizer | None, ids_max: int) -> RenderedPrompt:
    """Render and encode a chat. The result has no ids without a template of ours, and for a client's own template."""
    if tokenizer is None or request.messages is None or tokenizer.chat_template is None:
        return RenderedPrompt()
    if request.chat_template is not None:
        return RenderedPrompt()  # a program of the client, which might never end, and workers refuse it by default
    text = tokenizer.render_chat_text(request)
    adds_special_tokens = bool(request.add_special_tokens)
    rendered_prompt = _encode_text(tokenizer, text, request, ids_max, adds_special_tokens=adds_special_tokens)
    if len(text) <= ids_max * CHARS_PER_TOKEN_MAX:
        rendered_prompt.chat, rendered_prompt.text = request, text
    return rendered_prompt


def _get_first_prompt(request: RoutingRequest) -> Any:
    """Return the first prompt of a completion, a text or token ids; None if the body has no prompt."""
    prompt = request.prompt
    if prompt is None or isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt
    return prompt[0]


def _encode_text(
    tokenizer: Tokenizer, text: str, request: RoutingRequest, ids_max: int, *, adds_special_tokens: bool
) -> RenderedPrompt:
    """Encode a text, but no more of it than the model could take, or than COUNTED_CHARS.

    The ids are None if such a start of the text says nothing: the prompt will be truncated to its end, or the start
    has fewer tokens than the model takes.
    """
    chars_max = ids_max * CHARS_PER_TOKEN_MAX
    if len(text) > chars_max and request.truncate_prompt_tokens is not None:
        return RenderedPrompt()
    encoded_text = text[: max(chars_max, COUNTED_CHARS)]
    ids, is_whole = tokenizer.encode_array(encoded_text, adds_special_tokens), len(encoded_text) == len(text)
    return RenderedPrompt(ids if is_whole or len(ids) >= ids_max else None, is_whole)


def build_tokenize_request(request: RoutingRequest, model: str) -> bytes | None:
    """Build the body of a `/tokenize` request, which asks a worker for the token ids of a prompt.

    Return None if the prompt is no text or has images, if no cache can help it, or if it has the client's own template.
    """
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
            fields["add_generation_prompt"] = False  # vLLM's default is true, and it refuses both
        fields = {name: value for name, value in fields.items() if value is not None}
    else:
        prompt = _get_first_prompt(request)
        if not isinstance(prompt, str):
            return None
        fields = {"prompt": prompt, "add_special_tokens": request.add_special_tokens is not False}
    return msgspec.json.encode({"model": model, **fields})


def read_large_request(body: bytes, kind: ApiKind | None) -> RoutingRequest:
    """Read the fields by which a large body is routed, such as the model, but not its prompt.

    To decode long values would take too long here: the prompt is left out, and of another long value the result has
    only the start of its JSON. `kind`: the API that the request's path names; None: a body with a list of `messages` is
    a chat, and any other one a completion. Raises RequestError if the body is no JSON object.
    """
    raw_value_by_field = decode_fields(body)

    def decode_field(name: str) -> Any:
        return _decode_small_value(raw_value_by_field.get(name))

    fields = {name: decode_field(name) for name in _SMALL_FIELDS if name in raw_value_by_field}
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = decode_field("max_output_tokens")  # its name in the Responses API
    if kind is None:
        first_character = bytes(memoryview(raw_value_by_field.get("messages", b""))[:1])
        has_message_list = first_character == b"["
        kind = "chat" if has_message_list else "completion"
    stored_response_id = decode_field("previous_response_id")
    if not isinstance(stored_response_id, str):
        stored_response_id = _find_referenced_response(body)
    return make_routing_request(kind, fields).replace(stored_response_id=stored_response_id)


def _find_referenced_response(body: bytes) -> str | None:
    """Return the id of the stored response that has the first item to which a body refers by id; None without any."""
    reference = _ITEM_REFERENCE.search(body) if b'"item_reference"' in body else None
    return None if reference is None else get_response_id_of_item((reference[1] or reference[2]).decode())


def _decode_small_value(raw: msgspec.Raw | None) -> Any:
    """Decode a value; return a value over NAME_BYTES_MAX as the start of its JSON. Raises RequestError."""
    if raw is None:
        return None
    data = bytes(memoryview(raw)[: NAME_BYTES_MAX + 1])
    if len(data) > NAME_BYTES_MAX:
        return data.decode("utf-8", "replace")
    return decode_json(_json_decoder, data)
