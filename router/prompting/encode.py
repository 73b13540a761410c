"""A request's prompt as token ids, with bounds on the work, and what decides where its body goes, told without reading
the rest of it. Pure: no process, no thread, no clock.

Where a prompt cannot be read, where the worker will have to refuse it, and where it will reuse nothing of it, the
answer is None: such a request is routed by load alone and the worker's own words reach the client.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from prompts.bpe_encoder import count_openings
from prompts.errors import RequestError
from prompts.responses import response_of
from prompts.routing import RoutedBody, RoutingRequest, chat_of, check_object, read_values
from prompts.schemas import decode_json
from prompts.tokenizer import Tokenizer

TOKENS_MAX = 2**21
"""Of a prompt for a model that does not tell how many it takes."""
CHARS_A_TOKEN = 16
"""Text is encoded up to so many characters for each token that the model takes; what is longer is too long."""
COUNTED_CHARS = 4 << 20
"""Text up to here is encoded to its end, however little the model takes: the client is told how long its prompt is."""
CHARS_OF_A_TOKEN = 4
"""For estimates only."""
OBJECTS_MAX = 50_000
"""Messages, parts, tools and what they are made of: each costs a template some microseconds."""
VALUES_MAX = 8_000_000
LIGHT_BYTES, LIGHT_OBJECTS = 64 << 10, 512
"""Up to here a body takes well under 25 ms to decode and render."""
ASKED_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
"""Not `chat_template`: a client's own is a program, and running it is for the worker to refuse, not for us to ask."""
NAME_BYTES_MAX = 4096
"""Of a value that decides where a request goes."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_REFERENCE = re.compile(
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
    bare = _STRING.sub(b"", body)
    objects = count_openings(bare)
    return objects <= OBJECTS_MAX and objects + bare.count(b",") <= VALUES_MAX


class _Envelope(msgspec.Struct):
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


_envelopes = msgspec.json.Decoder(_Envelope)
_any = msgspec.json.Decoder()
_SMALL = tuple(name for name in _Envelope.__struct_fields__ if name not in ("messages", "previous_response_id"))
_TOLD = (
    "model", "cache_salt", "priority", "stream", "user", "prompt_cache_key", "metadata_user_id",
    "truncate_prompt_tokens", "output_max", "output_min",
)  # fmt: skip
"""Fields of a RoutingRequest that an envelope tells."""


class PromptSize(msgspec.Struct, frozen=True):
    """How many tokens the prompts of a body have, as a worker sees them."""

    tokens: int
    """Of all of them."""
    longest: int
    """Of the longest."""
    count: int = 1
    """Prompts."""
    is_exact: bool = True
    """False: the first has more than was counted."""


class ReadPrompt(msgspec.Struct, eq=False):
    """A prompt as it was read."""

    ids: Sequence[int] | None = None
    """All of them; None as above."""
    is_whole: bool = True
    """False: the text is so long that its end was not encoded."""
    chat: RoutingRequest | None = None
    """What `text` was rendered of, all of which was encoded."""
    text: str = ""


def cut(ids: Sequence[int] | None, parsed: RoutingRequest, tokens_max: int | None) -> Sequence[int] | None:
    """The part of a prompt that a worker would see, at most one token more than it takes."""
    keep = _kept_tokens(parsed, tokens_max)
    if ids and keep is not None:
        ids = ids[-keep:]
    most = (tokens_max or TOKENS_MAX) + 1
    return None if not ids else ids if len(ids) <= most else ids[:most]


def _kept_tokens(parsed: RoutingRequest, tokens_max: int | None) -> int | None:
    """How much of a prompt's end a worker would see, where the request says so (`truncate_prompt_tokens`; -1 as in
    vLLM: what the model takes, with room for one token)."""
    keep = parsed.truncate_prompt_tokens
    if keep == -1 and tokens_max is not None:
        return max(tokens_max - 1, 1)
    return keep if keep is not None and keep > 0 else None


def measure(
    ids: Sequence[int] | None,
    parsed: RoutingRequest,
    tokens_max: int | None,
    further: Sequence[int] = (),
    *,
    is_exact: bool = True,
) -> PromptSize | None:
    """Return the size of a body's prompts: of the first, which has these ids before they are cut, and of `further` ones
    (`further_tokens`)."""
    if ids is None:
        return None
    keep = _kept_tokens(parsed, tokens_max)
    lengths = [len(ids), *further] if keep is None else [min(length, keep) for length in (len(ids), *further)]
    return PromptSize(sum(lengths), max(lengths), len(lengths), is_exact)


def further_tokens(parsed: RoutingRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Count the tokens of each prompt of a body behind the first. Without a tokenizer those of texts are estimated."""
    prompt = parsed.prompt
    if not isinstance(prompt, list) or isinstance(prompt[0], int):
        return []
    adds = parsed.add_special_tokens is not False
    counts = []
    for item in prompt[1:]:
        if not isinstance(item, str):
            counts.append(len(item) if isinstance(item, list) else 0)
        elif tokenizer is None:
            counts.append(len(item) // CHARS_OF_A_TOKEN)
        else:
            counts.append(len(tokenizer.encode_array(item, adds)))
    return counts


def read_prompt(parsed: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None) -> ReadPrompt:
    """The prompt to route on, before it is cut: the first of several; with images, the text before the first one.
    Raises RequestError."""
    most = (tokens_max or TOKENS_MAX) + 1
    if parsed.scores_prompt:
        return ReadPrompt()
    if parsed.source is not None and tokenizer is not None:
        parsed = chat_of(parsed, tokenizer.chat_template)
    if parsed.kind == "chat":
        if tokenizer is None or parsed.messages is None or tokenizer.chat_template is None:
            return ReadPrompt()
        if parsed.chat_template is not None:
            return ReadPrompt()  # a program of the client's: it could run for ever, and workers refuse it by default
        text = tokenizer.chat_text(parsed)
        read = _encoded(tokenizer, text, parsed, bool(parsed.add_special_tokens), most)
        if len(text) <= most * CHARS_A_TOKEN:
            read.chat, read.text = parsed, text
        return read
    prompt = parsed.prompt
    if prompt is None:
        return ReadPrompt()
    first = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0]
    if isinstance(first, str):
        adds = parsed.add_special_tokens is not False
        return ReadPrompt() if tokenizer is None else _encoded(tokenizer, first, parsed, adds, most)
    try:
        return ReadPrompt(msgspec.convert(first, _TokenIds))
    except msgspec.ValidationError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from None


def _encoded(
    tokenizer: Tokenizer, text: str, parsed: RoutingRequest, add_special_tokens: bool, most: int
) -> ReadPrompt:
    """Ids of a text, of which no more is encoded than the model could take, or than is counted anyway. None where that
    tells nothing: the end is what counts, or so much text makes so few tokens."""
    chars_max = most * CHARS_A_TOKEN
    if len(text) > chars_max and parsed.truncate_prompt_tokens is not None:
        return ReadPrompt()
    encoded = text[: max(chars_max, COUNTED_CHARS)]
    ids, is_whole = tokenizer.encode_array(encoded, add_special_tokens), len(encoded) == len(text)
    return ReadPrompt(ids if is_whole or len(ids) >= most else None, is_whole)


def question(parsed: RoutingRequest, model: str) -> bytes | None:
    """What to ask a worker's `/tokenize`; None where there is no text to tokenise, or what cannot be asked (images)."""
    if parsed.source is not None:
        try:
            parsed = chat_of(parsed, None)
        except RequestError:
            return None
    if parsed.scores_prompt or parsed.has_media:
        return None
    if parsed.kind == "chat":
        if parsed.messages is None or parsed.chat_template is not None:
            return None
        given = {name: getattr(parsed, name) for name in ASKED_FIELDS}
        if parsed.continue_final_message:
            given["add_generation_prompt"] = False  # vLLM's default is true, and refuses both
        return msgspec.json.encode(
            {"model": model, **{name: value for name, value in given.items() if value is not None}}
        )
    prompt = parsed.prompt
    first = prompt if isinstance(prompt, str) else prompt[0] if prompt else None
    if not isinstance(first, str):
        return None
    adds = parsed.add_special_tokens is not False
    return msgspec.json.encode({"model": model, "prompt": first, "add_special_tokens": adds})


def envelope(body: bytes) -> dict[str, Any]:
    """What `RoutingRequest` needs before the prompt is read, and whether there are `messages`. Builds nothing of the
    rest. Raises RequestError where the body is no JSON object."""
    check_object(body)
    fields = decode_json(_envelopes, body)
    values = {name: _value(getattr(fields, name)) for name in _SMALL}
    most = values.pop("max_output_tokens")  # what Responses call it
    if values["max_tokens"] is None:
        values["max_tokens"] = most
    parsed = read_values("other", RoutedBody(**values))
    return {name: getattr(parsed, name) for name in _TOLD} | {
        "stored": previous if isinstance(previous := _value(fields.previous_response_id), str) else _referenced(body),
        "chats": bytes(memoryview(fields.messages)[:1]) == b"[",
    }


def _referenced(body: bytes) -> str | None:
    """The response that holds the first item which a body only names."""
    found = _REFERENCE.search(body) if b'"item_reference"' in body else None
    return None if found is None else response_of((found[1] or found[2]).decode())


def _value(raw: msgspec.Raw) -> Any:
    """A small value; a long one comes back cut, as the text that it is: nobody has such a name. Raises RequestError."""
    data = bytes(memoryview(raw)[: NAME_BYTES_MAX + 1])
    if len(data) > NAME_BYTES_MAX:
        return data.decode("utf-8", "replace")
    return decode_json(_any, data)
